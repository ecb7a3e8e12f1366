"""Canonical keys: one spelling for each key, in every format, and every other one refused."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.key_vectors import (
    TYPE_NAMES,
    VECTORS,
    arrow_type,
    bytes_in,
    codec_of,
    columns_of,
    key_in,
    model_canonical,
    tables_and_keys,
    values_of_type,
)
from tidemill.errors import TableCode, TableError
from tidemill.tables.keys.codec import KEY_BYTES_MAX, KeyCodec, check_key_columns, default_key_format

UTC = dt.UTC


def binary(*keys: bytes | None) -> pa.Array:
    return pa.array(keys, pa.binary())


def same(left: list[pa.Array], right: list[pa.Array]) -> bool:
    return len(left) == len(right) and all(one.equals(other) for one, other in zip(left, right, strict=True))


def refusal(call: Any, *args: Any) -> TableError:
    with pytest.raises(TableError) as caught:
        call(*args)
    assert caught.value.table_code is TableCode.key_refused
    return caught.value


# The vectors.


def case_id(case: dict[str, Any]) -> str:
    spelling = next(str(case[field]) for field in case if field.startswith(("canonical", "refused")))
    return f"{'+'.join(case['types'])} {case['format']} {spelling[:40]!a}"


@pytest.mark.parametrize("case", VECTORS["cases"], ids=case_id)
def test_vector_has_its_canonical_spelling_and_is_read_back(case: dict[str, Any]) -> None:
    codec = codec_of(case["types"], case["format"])
    columns = columns_of(case["types"], [key_in(case)])
    keys = codec.canonical(columns)
    assert keys.type == pa.binary()
    assert keys.to_pylist() == [bytes_in(case, "canonical")]
    assert same(codec.parse(keys), columns)


@pytest.mark.parametrize("case", VECTORS["refused"], ids=case_id)
def test_vector_is_refused(case: dict[str, Any]) -> None:
    codec = codec_of(case["types"], case["format"])
    error = refusal(codec.parse, binary(bytes_in(case, "refused")))
    assert error.index == 0


def test_vectors_cover_every_type_in_both_formats() -> None:
    covered = {(name.split("(")[0], case["format"]) for case in VECTORS["cases"] for name in case["types"]}
    names = [
        "boolean",
        "tinyint",
        "smallint",
        "int",
        "bigint",
        "string",
        "binary",
        "date",
        "timestamp",
        "timestamp_ntz",
        "decimal",
    ]
    assert covered == {(name, key_format) for name in names for key_format in ("raw", "json")}


# Properties.


@given(tables_and_keys())
def test_spelling_is_that_of_the_model(given_keys: tuple[list[str], str, list[list[Any]]]) -> None:
    types, key_format, keys = given_keys
    spelt = codec_of(types, key_format).canonical(columns_of(types, keys))
    assert spelt.to_pylist() == [model_canonical(types, key_format, key) for key in keys]


@given(tables_and_keys())
def test_what_is_spelt_is_read_back(given_keys: tuple[list[str], str, list[list[Any]]]) -> None:
    types, key_format, keys = given_keys
    codec, columns = codec_of(types, key_format), columns_of(types, keys)
    read = codec.parse(codec.canonical(columns))
    assert [column.type for column in read] == [arrow_type(name) for name in types]
    assert same(read, columns)


@given(tables_and_keys())
def test_slices_are_spelt_and_read_like_whole_arrays(
    given_keys: tuple[list[str], str, list[list[Any]]],
) -> None:
    types, key_format, keys = given_keys
    codec, columns = codec_of(types, key_format), columns_of(types, keys)
    whole = codec.canonical(columns)
    tail = [column[1:] for column in columns]
    assert codec.canonical(tail).equals(whole[1:])
    assert same(codec.parse(whole[1:]), tail)
    assert same(codec.parse(whole[:0]), [column[:0] for column in columns])


@given(tables_and_keys())
def test_different_keys_have_different_spellings_and_state_keys(
    given_keys: tuple[list[str], str, list[list[Any]]],
) -> None:
    types, key_format, keys = given_keys
    codec, columns = codec_of(types, key_format), columns_of(types, keys)
    distinct = {tuple(key) for key in keys}
    assert len(set(codec.canonical(columns).to_pylist())) == len(distinct)
    assert len(set(codec.state_keys(columns).to_pylist())) == len(distinct)


@st.composite
def nearly_keys(draw: st.DrawFn) -> tuple[list[str], str, bytes]:
    """Any bytes, or a canonical key with some bytes changed."""
    types, key_format, keys = draw(tables_and_keys(keys_max=1))
    if draw(st.integers(0, 3)) == 0:
        return types, key_format, draw(st.binary(max_size=20))
    spelling = bytearray(model_canonical(types, key_format, keys[0]))
    piece = st.sampled_from(list(b'0123456789+-.eE "\\/u[]{},:TZtznull\0\xff\x80=')).map(
        lambda code: bytes((code,))
    )
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(spelling)))
        spelling[place : place + draw(st.integers(0, 2))] = draw(piece | st.just(b""))
    return types, key_format, bytes(spelling)


@given(nearly_keys())
@example((["bigint"], "raw", b"0x10"))
@example((["date"], "raw", b"0000-01-01"))
@example((["decimal(38,6)"], "raw", b"340282366920938463463.374607431768211457"))
def test_any_bytes_are_one_key_or_are_refused(given_key: tuple[list[str], str, bytes]) -> None:
    types, key_format, spelling = given_key
    codec = codec_of(types, key_format)
    try:
        columns = codec.parse(binary(spelling))
    except TableError as error:
        assert error.table_code is TableCode.key_refused
        assert error.index == 0
        return
    assert [len(column) for column in columns] == [1] * len(types)
    assert codec.canonical(columns).to_pylist() == [spelling]


@given(
    st.lists(
        st.sampled_from([b"[1]", b"[2]", b"[1", b"2]", b"[1],[2]", b"", b"]", b"[", b"[1]]"]), max_size=5
    )
)
def test_a_json_key_is_judged_without_its_neighbours(spellings: list[bytes]) -> None:
    codec = codec_of(["bigint"], "json")
    bad = [index for index, spelling in enumerate(spellings) if spelling not in (b"[1]", b"[2]")]
    if bad:
        assert refusal(codec.parse, binary(*spellings)).index == bad[0]
    else:
        assert codec.parse(binary(*spellings))[0].to_pylist() == [spelling[1] - 48 for spelling in spellings]


@given(
    TYPE_NAMES.flatmap(
        lambda name: st.tuples(st.just(name), st.lists(values_of_type(name), min_size=2, max_size=9))
    )
)
def test_first_refused_key_is_named(given_keys: tuple[str, list[Any]]) -> None:
    name, values = given_keys
    codec = codec_of([name], "json")
    good = codec.canonical(columns_of([name], [[value] for value in values])).to_pylist()
    middle = len(good) // 2
    error = refusal(codec.parse, binary(*good[:middle], b"[", *good[middle:], b"]"))
    assert error.index == middle


# Refusals and limits.


@pytest.mark.parametrize(
    ("types", "key_format", "spelling", "canonical"),
    [
        (["bigint"], "raw", b"007", "b'7'"),
        (["bigint"], "raw", b" +7 ", "b'7'"),
        (["boolean"], "raw", b"TRUE", "b'true'"),
        (["date"], "raw", b"20240229", "b'2024-02-29'"),
        (["timestamp"], "raw", b"2024-02-29T12:34:56+01:00", "b'2024-02-29T11:34:56Z'"),
        (["timestamp_ntz"], "raw", b"2024-02-29 12:34:56.50", "b'2024-02-29T12:34:56.5'"),
        (["decimal(5,2)"], "raw", b"1e2", "b'100.00'"),
        (["binary"], "json", b'["YQ"]', """b'["YQ=="]'"""),
        (["string", "bigint"], "json", b'["\\u0041", 7.0]', """b'["A",7]'"""),
    ],
)
def test_error_says_how_to_spell_the_key(
    types: list[str], key_format: str, spelling: bytes, canonical: str
) -> None:
    error = refusal(codec_of(types, key_format).parse, binary(spelling))
    assert f"spell it {canonical}" in error.message


@pytest.mark.parametrize(
    ("name", "key_format", "spelling"),
    [
        ("timestamp", "raw", b"2024-02-29T12:34:56"),
        ("timestamp", "raw", b"2024-02-29T12:34:56.1234567Z"),
        ("timestamp_ntz", "raw", b"2024-02-29T12:34:56+01:00"),
        ("decimal(5,2)", "raw", b"1.005"),
        ("decimal(5,2)", "raw", b"1e999999999"),
        ("bigint", "raw", b"1" * 4096),
        ("binary", "json", b"[97]"),
        ("string", "json", b"[" * 4096),
    ],
)
def test_error_offers_no_spelling_of_another_value(name: str, key_format: str, spelling: bytes) -> None:
    error = refusal(codec_of([name], key_format).parse, binary(spelling))
    assert "spell it" not in error.message
    assert len(error.message) < 200


def test_missing_key_is_refused() -> None:
    assert refusal(codec_of(["string"], "raw").parse, binary(b"a", None)).index == 1


def test_empty_key_is_a_key() -> None:
    assert codec_of(["string"], "raw").parse(binary(b""))[0].to_pylist() == [""]
    assert codec_of(["binary"], "raw").parse(binary(b""))[0].to_pylist() == [b""]


def test_keys_have_a_longest_length_in_both_directions() -> None:
    codec = codec_of(["string"], "raw")
    longest = "a" * KEY_BYTES_MAX
    assert codec.parse(codec.canonical([pa.array([longest])]))[0].to_pylist() == [longest]
    assert refusal(codec.canonical, [pa.array(["a", longest + "a"])]).index == 1
    assert refusal(codec.parse, binary(b"a", longest.encode() + b"a")).index == 1


def test_null_in_a_key_column_is_refused_with_its_row() -> None:
    codec = codec_of(["string", "bigint"], "json")
    columns = [pa.array(["a", "b"]), pa.array([1, None], pa.int64())]
    assert refusal(codec.canonical, columns).index == 1
    assert refusal(codec.state_keys, columns).index == 1


def from_buffer(data_type: pa.DataType, *values: bytes) -> pa.Array:
    if data_type == pa.string():
        return pa.Array.from_buffers(data_type, len(values), binary(*values).buffers())
    return pa.Array.from_buffers(data_type, len(values), [None, pa.py_buffer(b"".join(values))])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("date", [2_932_896, 2_932_897]),
        ("date", [-719_162, -719_163]),
        ("timestamp", [0, 253_402_300_800_000_000]),
        ("timestamp_ntz", [0, -62_135_596_800_000_001]),
        ("decimal(5,2)", [99_999, 100_000]),
        ("decimal(5,2)", [-99_999, -100_000]),
        ("decimal(38,0)", [10**38 - 1, 10**38]),
        ("decimal(38,0)", [-(10**38) + 1, -(10**38)]),
        ("decimal(19,0)", [10**19 - 1, 2**64 + 5]),
        ("decimal(20,0)", [-(2**64), -(10**20)]),
    ],
)
def test_value_without_a_spelling_is_refused_with_its_row(name: str, values: list[int]) -> None:
    codec = codec_of([name], "raw")
    width = arrow_type(name).byte_width
    column = from_buffer(
        arrow_type(name), *(value.to_bytes(width, "little", signed=True) for value in values)
    )
    assert refusal(codec.canonical, [column]).index == 1
    assert codec.canonical([column[:1]]).to_pylist() == [model_canonical([name], "raw", values[:1])]


def test_string_column_that_is_not_utf8_is_refused() -> None:
    column = from_buffer(pa.string(), b"a", b"b", b"\xff", b"\xfe")
    assert refusal(codec_of(["string"], "json").canonical, [column]).index == 2


def test_columns_must_be_those_of_the_key() -> None:
    codec = codec_of(["string", "bigint"], "json")
    for columns in (
        [pa.array(["a"])],
        [pa.array(["a"]), pa.array([1], pa.int32())],
        [pa.array(["a"]), pa.array([1, 2])],
    ):
        refusal(codec.canonical, columns)
        refusal(codec.state_keys, columns)


def test_chunks_are_taken_as_one_column() -> None:
    codec = codec_of(["bigint"], "raw")
    assert codec.canonical([pa.chunked_array([[1], [2, 3]])]).to_pylist() == [b"1", b"2", b"3"]
    assert codec.parse(pa.chunked_array([binary(b"1"), binary(b"2")]))[0].to_pylist() == [1, 2]


# Schemas.


def schema_of(data_type: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field("k", data_type, nullable=False), pa.field("v", pa.string())])


@pytest.mark.parametrize(
    "data_type",
    [
        pa.float32(),
        pa.float64(),
        pa.list_(pa.int64()),
        pa.struct([("a", pa.int64())]),
        pa.duration("us"),
        pa.time64("us"),
        pa.timestamp("ns"),
        pa.timestamp("ms", "UTC"),
        pa.timestamp("us", "Europe/Berlin"),
        pa.uint64(),
        pa.decimal256(10, 2),
        pa.decimal128(10, -2),
        pa.large_string(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_types_with_no_single_spelling_cannot_be_keys(data_type: pa.DataType) -> None:
    with pytest.raises(TableError, match="cannot be a key column: ") as caught:
        check_key_columns(schema_of(data_type), ["k"])
    assert caught.value.table_code is TableCode.invalid_schema


@pytest.mark.parametrize(
    ("primary_key", "complaint"),
    [
        ([], "names no column"),
        (["x"], "not in the schema"),
        (["k", "k"], "twice"),
        (["v"], "may be null"),
    ],
)
def test_primary_key_must_name_columns_that_are_never_null(primary_key: list[str], complaint: str) -> None:
    with pytest.raises(TableError, match=complaint) as caught:
        check_key_columns(schema_of(pa.int64()), primary_key)
    assert caught.value.table_code is TableCode.invalid_schema


def test_column_that_is_twice_in_the_schema_cannot_be_a_key() -> None:
    field = pa.field("k", pa.int64(), nullable=False)
    with pytest.raises(TableError, match="2 times"):
        check_key_columns(pa.schema([field, field]), ["k"])


def test_default_format_is_raw_for_one_column() -> None:
    assert default_key_format(["a"]) == "raw"
    assert default_key_format(["a", "b"]) == "json"


def test_raw_keys_have_one_column_and_formats_are_known() -> None:
    schema = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in "ab"])
    with pytest.raises(TableError, match="use the key format json"):
        KeyCodec(schema, ["a", "b"], "raw")
    with pytest.raises(TableError, match="no key format 'avro'"):
        KeyCodec(schema, ["a"], "avro")


def test_columns_are_in_the_order_of_the_primary_key() -> None:
    schema = pa.schema(
        [pa.field("a", pa.int64(), nullable=False), pa.field("b", pa.string(), nullable=False)]
    )
    codec = KeyCodec(schema, ["b", "a"], "json")
    assert codec.canonical(codec.columns_from([{"a": 1, "b": "x"}])).to_pylist() == [b'["x",1]']


# Keys as users give them.


PAIRS = [("eu", 1), ("us", -2)]
ROWS = [{"c0": "eu", "c1": 1, "other": None}, {"c1": -2, "c0": "us"}]


@pytest.mark.parametrize(
    "keys",
    [
        PAIRS,
        [list(pair) for pair in PAIRS],
        iter(PAIRS),
        ROWS,
        [ROWS[0], PAIRS[1]],
        pa.table({"c1": [1, -2], "c0": ["eu", "us"], "other": [1, 2]}),
        pa.record_batch({"c0": ["eu", "us"], "c1": pa.array([1, -2], pa.int8())}),
        pa.table({"c0": pa.array(["eu", "us"]).dictionary_encode(), "c1": [1, -2]}),
        pa.table({"c0": pa.array(["eu", "us"], pa.large_string()), "c1": pa.chunked_array([[1], [-2]])}),
        pd.DataFrame({"c0": ["eu", "us"], "c1": [1, -2], "dtype": [0, 0]}),
        pl.DataFrame({"c0": ["eu", "us"], "c1": [1, -2]}),
    ],
    ids=lambda keys: type(keys).__name__,
)
def test_keys_of_several_columns_are_taken_in_many_forms(keys: Any) -> None:
    columns = codec_of(["string", "bigint"], "json").columns_from(keys)
    assert same(columns, [pa.array(["eu", "us"]), pa.array([1, -2], pa.int64())])


@pytest.mark.parametrize(
    "keys",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        [(1,), {"c0": 2}],
        np.array([1, 2]),
        pd.Series([1, 2]),
        pl.Series([1, 2]),
        pa.array([1, 2], pa.uint8()),
        pa.chunked_array([[1], [2]]),
    ],
    ids=lambda keys: type(keys).__name__,
)
def test_keys_of_one_column_are_also_taken_as_plain_values(keys: Any) -> None:
    assert same(codec_of(["bigint"], "raw").columns_from(keys), [pa.array([1, 2], pa.int64())])


def test_no_keys_give_empty_columns() -> None:
    columns = codec_of(["string", "bigint"], "json").columns_from([])
    assert same(columns, [pa.array([], pa.string()), pa.array([], pa.int64())])


@pytest.mark.parametrize(
    ("name", "value", "canonical"),
    [
        ("boolean", np.True_, b"true"),
        ("binary", bytearray(b"x"), b"x"),
        ("date", dt.date(1, 1, 1), b"0001-01-01"),
        (
            "timestamp",
            dt.datetime(2024, 1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2))),
            b"2023-12-31T23:00:00Z",
        ),
        ("timestamp", pd.Timestamp("2024-01-01T00:00:00.5Z"), b"2024-01-01T00:00:00.5Z"),
        ("timestamp_ntz", dt.datetime(2024, 1, 1), b"2024-01-01T00:00:00"),  # noqa: DTZ001
        ("decimal(5,2)", Decimal("-1.5"), b"-1.50"),
        ("decimal(5,2)", 7, b"7.00"),
        ("decimal(38,0)", 10**38 - 1, b"9" * 38),
    ],
)
def test_python_values_become_keys(name: str, value: Any, canonical: bytes) -> None:
    codec = codec_of([name], "raw")
    assert codec.canonical(codec.columns_from([value])).to_pylist() == [canonical]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("boolean", 1),
        ("boolean", "true"),
        ("bigint", True),
        ("bigint", "1"),
        ("bigint", 1.0),
        ("bigint", None),
        ("bigint", 2**63),
        ("tinyint", -129),
        ("string", 1),
        ("string", b"a"),
        ("string", "\ud800"),
        ("binary", "a"),
        ("date", dt.datetime(2024, 1, 1)),  # noqa: DTZ001
        ("date", "2024-01-01"),
        ("timestamp", dt.datetime(2024, 1, 1)),  # noqa: DTZ001
        ("timestamp", dt.date(2024, 1, 1)),
        ("timestamp", dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2)))),
        ("timestamp", pd.Timestamp("2024-01-01T00:00:00.000000001Z")),
        ("timestamp_ntz", dt.datetime(2024, 1, 1, tzinfo=UTC)),
        ("timestamp_ntz", pd.NaT),
        ("decimal(5,2)", Decimal("1.005")),
        ("decimal(5,2)", Decimal(1000)),
        ("decimal(5,2)", Decimal("NaN")),
        ("decimal(5,2)", 1.5),
        ("decimal(5,2)", True),
        ("decimal(38,0)", 10**38),
        ("decimal(38,0)", 2**128 + 1),
    ],
)
def test_values_of_another_kind_or_size_are_refused_with_their_row(name: str, value: Any) -> None:
    codec = codec_of([name], "raw")
    fine = {
        "boolean": True,
        "bigint": 1,
        "tinyint": 1,
        "string": "a",
        "binary": b"a",
        "date": dt.date(2024, 1, 1),
    }
    times = {"timestamp": dt.datetime(2024, 1, 1, tzinfo=UTC), "timestamp_ntz": dt.datetime(2024, 1, 1)}  # noqa: DTZ001
    good = (fine | times).get(name, Decimal(1))
    error = refusal(codec.columns_from, [good, value])
    assert error.index == 1
    assert "'c0'" in error.message
    refusal(codec.bound, [value])


@pytest.mark.parametrize(
    ("column", "index"),
    [
        (pa.array([1.0]), None),
        (pa.array(["1"]), None),
        (pa.array([1, None], pa.int64()), 1),
        (pa.array([1, 2**63], pa.uint64()), 1),
        (pa.array([True]), None),
    ],
)
def test_arrow_columns_of_another_kind_or_size_are_refused(column: pa.Array, index: int | None) -> None:
    assert refusal(codec_of(["bigint"], "raw").columns_from, column).index == index


def test_arrow_timestamps_keep_their_meaning() -> None:
    codec = codec_of(["timestamp"], "raw")
    berlin = pa.array([0, 1_000], pa.timestamp("ns", "Europe/Berlin"))
    assert codec.columns_from(berlin)[0].equals(columns_of(["timestamp"], [[0], [1]])[0])
    assert refusal(codec.columns_from, pa.array([0, 1], pa.timestamp("ns", "UTC"))).index == 1
    refusal(codec.columns_from, pa.array([0], pa.timestamp("us")))


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ("eu", "into a list"),
        (7, "into a list"),
        ({"c0": "eu", "c1": 1}, "into a list"),
        (["eu"], "tuple or a mapping of: c0, c1"),
        ([("eu",)], "1 values instead of 2"),
        ([{"c0": "eu"}], "no value for c1"),
        (pa.table({"c0": ["eu"]}), "no column 'c1'"),
        (pa.array(["eu"]), "one array for a key of 2"),
    ],
)
def test_keys_in_the_wrong_form_are_refused_with_the_right_one(keys: Any, complaint: str) -> None:
    assert complaint in refusal(codec_of(["string", "bigint"], "json").columns_from, keys).message
