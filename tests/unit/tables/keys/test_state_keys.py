"""State keys: bytes in the order of the values, and back."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.key_vectors import (
    TYPE_NAMES,
    VECTORS,
    codec_of,
    columns_of,
    key_in,
    model_state_key,
    tables_and_keys,
    values_of_type,
)
from tidemill.errors import TableCode, TableError
from tidemill.tables.keys.ragged import gather
from tidemill.tables.keys.state_keys import after_prefix, decode_state_keys

GivenKeys = tuple[list[str], str, list[list[Any]]]


def place(keys: list[bytes], junk: list[bytes]) -> tuple[bytes, np.ndarray, np.ndarray]:
    """The keys in one buffer with other bytes before, between and behind them."""
    data, starts, ends = b"", [], []
    for index, key in enumerate(keys):
        data += junk[index % len(junk)]
        starts.append(len(data))
        data += key
        ends.append(len(data))
    return data + junk[-1], np.array(starts, np.int64), np.array(ends, np.int64)


@pytest.mark.parametrize(
    "case", VECTORS["cases"], ids=lambda case: f"{'+'.join(case['types'])} {case['state_hex'][:40]}"
)
def test_vector_has_its_state_key_and_is_read_back(case: dict[str, Any]) -> None:
    codec = codec_of(case["types"], case["format"])
    columns = columns_of(case["types"], [key_in(case)])
    state_keys = codec.state_keys(columns)
    assert state_keys.type == pa.binary()
    key = state_keys[0].as_py()
    assert key.hex() == case["state_hex"]
    read = decode_state_keys(key, np.array([0]), np.array([len(key)]), codec.types)
    assert all(one.equals(other) for one, other in zip(read, columns, strict=True))


@given(tables_and_keys())
def test_bytes_are_those_of_the_model(given_keys: GivenKeys) -> None:
    types, key_format, keys = given_keys
    encoded = codec_of(types, key_format).state_keys(columns_of(types, keys)).to_pylist()
    assert encoded == [model_state_key(types, key) for key in keys]


@given(tables_and_keys())
def test_order_of_state_keys_is_the_order_of_values(given_keys: GivenKeys) -> None:
    types, key_format, keys = given_keys
    encoded = codec_of(types, key_format).state_keys(columns_of(types, keys)).to_pylist()
    by_bytes = [key for _, key in sorted(zip(encoded, keys, strict=True))]
    # Python orders strings by code points, bytes and numbers by value, and lists by their first difference.
    assert by_bytes == sorted(keys)


@given(tables_and_keys(), st.lists(st.binary(max_size=3), min_size=1, max_size=3), st.booleans())
def test_keys_anywhere_in_a_buffer_are_read_back(
    given_keys: GivenKeys, junk: list[bytes], backwards: bool
) -> None:
    types, key_format, keys = given_keys
    codec, columns = codec_of(types, key_format), columns_of(types, keys)
    data, starts, ends = place(codec.state_keys(columns).to_pylist(), junk)
    if backwards:
        starts, ends, columns = starts[::-1], ends[::-1], [column[::-1] for column in columns]
    read = decode_state_keys(data, starts, ends, codec.types)
    assert [column.type for column in read] == list(codec.types)
    assert all(one.equals(other) for one, other in zip(read, columns, strict=True))


@given(tables_and_keys())
def test_slices_are_encoded_like_whole_arrays(given_keys: GivenKeys) -> None:
    types, key_format, keys = given_keys
    codec, columns = codec_of(types, key_format), columns_of(types, keys)
    whole = codec.state_keys(columns)
    assert codec.state_keys([column[1:] for column in columns]).equals(whole[1:])
    assert codec.state_keys([column[:0] for column in columns]).to_pylist() == []


def test_no_state_keys_give_empty_columns() -> None:
    codec = codec_of(["string", "bigint", "boolean", "decimal(5,2)"], "json")
    none = np.empty(0, np.int64)
    assert [len(column) for column in decode_state_keys(b"", none, none, codec.types)] == [0, 0, 0, 0]


@given(tables_and_keys(keys_max=1), st.binary(max_size=30), st.integers(0, 30), st.integers(0, 30))
def test_any_bytes_are_a_state_key_or_damage(
    given_keys: GivenKeys, other: bytes, begin: int, size: int
) -> None:
    types, key_format, keys = given_keys
    codec = codec_of(types, key_format)
    data = bytearray(model_state_key(types, keys[0]))
    data[begin : begin + size] = other[:size]
    try:
        columns = decode_state_keys(bytes(data), np.array([0]), np.array([len(data)]), codec.types)
    except TableError as error:
        assert error.table_code is TableCode.state_damaged
        assert error.index == 0
        return
    assert codec.state_keys(columns).to_pylist() == [bytes(data)]
    codec.canonical(columns)


@pytest.mark.parametrize(
    ("types", "state_hex"),
    [
        (["bigint"], "80000000000000"),
        (["bigint"], "800000000000000000"),
        (["boolean"], "02"),
        (["string"], "61"),
        (["string"], "6100"),
        (["string"], "610001"),
        (["string"], "61000100ff0000"),
        (["string"], "ff0000"),
        (["string", "tinyint"], "610080"),
        (["string", "tinyint"], "610000"),
        (["string", "tinyint"], "6161"),
        (["date"], "ffffffff"),
        (["timestamp"], "0000000000000000"),
        (["decimal(5,2)"], "ff" * 16),
    ],
)
def test_damaged_state_keys_are_refused_with_their_row(types: list[str], state_hex: str) -> None:
    codec = codec_of(types, "json")
    fine = {"string": "a", "boolean": True}
    good = model_state_key(types, [fine.get(name, 0) for name in types])
    data, starts, ends = place([good, bytes.fromhex(state_hex)], [b""])
    with pytest.raises(TableError) as caught:
        decode_state_keys(data, starts, ends, codec.types)
    assert caught.value.table_code is TableCode.state_damaged
    assert caught.value.index == 1


@given(tables_and_keys(), st.data())
def test_prefix_bounds_hold_exactly_the_keys_with_that_prefix(
    given_keys: GivenKeys, data: st.DataObject
) -> None:
    types, key_format, keys = given_keys
    codec, columns = codec_of(types, key_format), columns_of(types, keys)
    wanted = keys[data.draw(st.integers(0, len(keys) - 1))]
    size = data.draw(st.integers(0, len(types)))
    low, high = codec.prefix_bounds([python_value(columns[at], keys.index(wanted)) for at in range(size)])
    for key, state_key in zip(keys, codec.state_keys(columns).to_pylist(), strict=True):
        assert (low <= state_key and (high is None or state_key < high)) is (key[:size] == wanted[:size])


@given(tables_and_keys(), st.data())
def test_bound_parts_the_keys_by_value(given_keys: GivenKeys, data: st.DataObject) -> None:
    types, key_format, keys = given_keys
    codec, columns = codec_of(types, key_format), columns_of(types, keys)
    index = data.draw(st.integers(0, len(keys) - 1))
    size = data.draw(st.integers(0, len(types)))
    bound = codec.bound([python_value(columns[at], index) for at in range(size)])
    for key, state_key in zip(keys, codec.state_keys(columns).to_pylist(), strict=True):
        assert (state_key >= bound) is (key[:size] >= keys[index][:size])


def python_value(column: pa.Array, index: int) -> Any:
    if pa.types.is_timestamp(column.type):
        # Arrow asks the system's time zone database for UTC; the arithmetic needs none.
        since = dt.timedelta(microseconds=column.view(pa.int64())[index].as_py())
        return dt.datetime(1970, 1, 1, tzinfo=dt.UTC if column.type.tz else None) + since
    return column[index].as_py()


def test_bounds_need_no_values() -> None:
    codec = codec_of(["string"], "raw")
    assert codec.bound([]) == b""
    assert codec.prefix_bounds([]) == (b"", None)


def test_prefix_is_made_of_whole_columns() -> None:
    codec = codec_of(["string", "bigint"], "json")
    low, high = codec.prefix_bounds(["e"])
    assert high is not None
    inside = codec.state_keys(codec.columns_from([("e", -(2**63)), ("e", 2**63 - 1)])).to_pylist()
    outside = codec.state_keys(codec.columns_from([("", 0), ("eu", 0), ("e\0", 0), ("f", 0)])).to_pylist()
    assert all(low <= key < high for key in inside)
    assert not any(low <= key < high for key in outside)
    # What begins with a text lies between the text and the next text of its length.
    assert codec.bound(["e"]) <= outside[1] < codec.bound(["f"])


def test_bounds_of_too_many_or_wrong_values_are_refused() -> None:
    codec = codec_of(["string", "decimal(5,2)"], "json")
    for values in (["a", Decimal(1), 2], [1], ["a", "1"], [None]):
        for call in (codec.bound, codec.prefix_bounds):
            with pytest.raises(TableError) as caught:
                call(values)
            assert caught.value.table_code is TableCode.key_refused


@given(TYPE_NAMES.flatmap(lambda name: st.tuples(st.just(name), values_of_type(name), values_of_type(name))))
def test_no_value_begins_with_another(pair: tuple[str, Any, Any]) -> None:
    name, one, other = pair
    left, right = codec_of([name], "raw").state_keys(columns_of([name], [[one], [other]])).to_pylist()
    assert left == right or not (left.startswith(right) or right.startswith(left))


@given(st.binary(max_size=4) | st.integers(0, 4).map(lambda size: b"\xff" * size), st.binary(max_size=6))
def test_after_prefix_is_the_smallest_above(prefix: bytes, other: bytes) -> None:
    after = after_prefix(prefix)
    if other.startswith(prefix):
        assert after is None or other < after
    elif other > prefix:
        assert after is not None
        assert other >= after


@given(st.binary(max_size=20), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8))
def test_slices_are_gathered_in_any_order(data: bytes, pairs: list[tuple[int, int]]) -> None:
    pairs = [(min(*pair, len(data)), min(max(pair), len(data))) for pair in pairs]
    starts, ends = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    gathered = gather(np.frombuffer(data, np.uint8), starts, ends)
    gathered.validate(full=True)
    assert gathered.to_pylist() == [data[begin:end] for begin, end in pairs]
