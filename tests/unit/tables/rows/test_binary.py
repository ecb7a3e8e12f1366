"""The row format: exact, one spelling per row, and safe on any bytes."""

from __future__ import annotations

import math
import struct
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.table_values import has_nan, model_row, schemas, tables, to_batch
from tidemill.errors import TableCode, TableError
from tidemill.tables.rows.binary import RowCodec, VersionedRows
from tidemill.tables.rows.encoding import encode_tuples

Rows = tuple[pa.Schema, list[dict[str, Any]]]

PLAIN = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("ok", pa.bool_()),
        pa.field("name", pa.string()),
        pa.field("price", pa.decimal128(5, 2)),
        pa.field("at", pa.time64("ns")),
        pa.field("tags", pa.list_(pa.field("element", pa.string()))),
        pa.field("where", pa.struct([pa.field("x", pa.int32(), nullable=False), pa.field("y", pa.binary())])),
        pa.field("more", pa.map_(pa.string(), pa.bool_())),
        pa.field("bits", pa.list_(pa.field("element", pa.bool_(), nullable=False))),
    ]
)
ROW = {
    "id": 7,
    "ok": True,
    "name": "grün",
    "price": -99999,
    "at": 5,
    "tags": ["a", None, "bc"],
    "where": {"x": 3, "y": b"\x00"},
    "more": [("k", None), ("j", True)],
    "bits": [True, False],
}
EMPTY: dict[str, Any] = dict.fromkeys(ROW) | {"id": 1}


def packed(values: list[bytes], gap: bytes = b"") -> tuple[bytes, np.ndarray, np.ndarray]:
    """The values in one buffer, with something between them."""
    data, starts, ends = gap, [], []
    for value in values:
        starts.append(len(data))
        data += value
        ends.append(len(data))
        data += gap
    return data, np.array(starts, np.int64), np.array(ends, np.int64)


def decoded(codec: RowCodec, values: list[bytes], **options: Any) -> pa.RecordBatch:
    return codec.decode(*packed(values), **options)


def refused(codec: RowCodec, values: list[bytes]) -> TableError:
    with pytest.raises(TableError) as caught:
        decoded(codec, values, validate=True)
    assert caught.value.table_code == TableCode.row_refused
    return caught.value


@settings(deadline=None)
@given(tables())
def test_rows_are_written_as_the_model_writes_them(table: Rows) -> None:
    schema, rows = table
    encoded = RowCodec(schema, 513).encode(to_batch(schema, rows))
    assert encoded.to_pylist() == [model_row(schema, 513, row) for row in rows]


@settings(deadline=None)
@given(tables(), st.binary(max_size=3), st.booleans())
def test_rows_are_read_back_exactly(table: Rows, gap: bytes, validate: bool) -> None:
    schema, rows = table
    codec, batch = RowCodec(schema, 1), to_batch(*table)
    values = [model_row(schema, 1, row) for row in rows]
    data, starts, ends = packed(values, gap)
    read = codec.decode(data, starts, ends, validate=validate)
    read.validate(full=True)
    assert read.schema.equals(schema)
    assert read.equals(batch) or has_nan(rows), "for Arrow, no NaN equals another"
    assert codec.encode(read).to_pylist() == values


@settings(deadline=None)
@given(tables(), st.data())
def test_a_slice_of_a_batch_is_written_as_those_rows(table: Rows, data: st.DataObject) -> None:
    schema, rows = table
    first = data.draw(st.integers(0, len(rows)))
    codec = RowCodec(schema, 1)
    part = codec.encode(to_batch(schema, rows)[first:])
    assert part.to_pylist() == codec.encode(to_batch(schema, rows[first:])).to_pylist()


@settings(deadline=None)
@given(tables(max_rows=3), st.data())
def test_changed_bytes_are_refused_or_are_the_one_spelling_of_another_row(
    table: Rows, data: st.DataObject
) -> None:
    schema, rows = table
    codec = RowCodec(schema, 1)
    values = [bytearray(model_row(schema, 1, row)) for row in rows]
    for value in values:
        for _ in range(data.draw(st.integers(0, 2))):
            position = data.draw(st.integers(0, len(value) - 1))
            value[position] = data.draw(st.sampled_from([0, 1, 2, 4, 127, 128, 255]))
        if data.draw(st.booleans()):
            del value[data.draw(st.integers(0, len(value))) :]
    check_any_bytes(codec, [bytes(value) for value in values])


@settings(deadline=None)
@given(schemas(), st.lists(st.binary(max_size=80), max_size=4))
def test_any_bytes_are_refused_or_are_the_one_spelling_of_a_row(
    schema: pa.Schema, tails: list[bytes]
) -> None:
    check_any_bytes(RowCodec(schema, 1), [b"\x01\x00" + tail for tail in tails])
    check_any_bytes(RowCodec(schema, 1), tails)


def check_any_bytes(codec: RowCodec, values: list[bytes]) -> None:
    alone = [is_valid(codec, value) for value in values]
    try:
        batch = decoded(codec, values, validate=True)
    except TableError as error:
        assert error.index == alone.index(False)
    else:
        assert all(alone)
        batch.validate(full=True)
        assert codec.encode(batch).to_pylist() == values
    try:
        decoded(codec, values)
    except TableError as error:
        assert error.table_code == TableCode.row_refused


def is_valid(codec: RowCodec, value: bytes) -> bool:
    try:
        batch = decoded(codec, [value], validate=True)
    except TableError as error:
        assert error.table_code == TableCode.row_refused
        assert error.index == 0
        return False
    assert codec.encode(batch).to_pylist() == [value]
    return True


def test_every_single_byte_change_of_a_row_is_refused_or_another_row() -> None:
    codec = RowCodec(PLAIN, 1)
    value = model_row(PLAIN, 1, ROW)
    for position in range(len(value)):
        for flip in (1, 2, 0x80, 0xFF):
            changed = bytearray(value)
            changed[position] ^= flip
            is_valid(codec, bytes(changed))


def test_every_truncation_and_extension_is_refused() -> None:
    codec = RowCodec(PLAIN, 1)
    for row in (ROW, EMPTY):
        value = model_row(PLAIN, 1, row)
        assert is_valid(codec, value)
        assert not is_valid(codec, value + b"\x00")
        for length in range(len(value)):
            assert not is_valid(codec, value[:length])


ONE_INT = pa.schema([("a", pa.int32())])
ONE_BOOL = pa.schema([("a", pa.bool_())])
ONE_TEXT = pa.schema([("a", pa.string()), ("b", pa.string())])
ONE_LIST = pa.schema([("a", pa.list_(pa.field("element", pa.int8())))])
TEXTS = pa.schema([("a", pa.list_(pa.field("element", pa.string())))])


@pytest.mark.parametrize(
    ("schema", "value", "words"),
    [
        (ONE_INT, "02 00 00 00 00 00 00", "schema id 2"),
        (ONE_INT, "01", "shorter than a schema id"),
        (ONE_INT, "01 00 00 00 00 00", "shorter than the 7 bytes"),
        (ONE_INT, "01 00 00 00 00 00 00 00", "does not end where"),
        (ONE_INT, "01 00 02 00 00 00 00", "belongs to no column"),
        (ONE_INT, "01 00 01 00 01 00 00", "'a' is null, and its slot is not zero"),
        (ONE_BOOL, "01 00 00 02", "'a' is a boolean that is neither"),
        (ONE_TEXT, "01 00 00 02 00 00 00 01 00 00 00 61 62", "go backwards"),
        (ONE_TEXT, "01 00 00 01 00 00 00 01 00 00 00 61 62", "does not end where"),
        (ONE_TEXT, "01 00 00 01 00 00 00 05 00 00 00 61 62", "does not end where"),
        (ONE_TEXT, "01 00 01 01 00 00 00 02 00 00 00 61 62", "'a' is null, and its cell is not empty"),
        (ONE_TEXT, "01 00 00 01 00 00 00 02 00 00 00 c3 a9", "'a' is not UTF-8"),
        (ONE_TEXT, "01 00 00 00 00 00 00 03 00 00 00 ed a0 80", "'b' is not UTF-8"),
        (ONE_LIST, "01 00 00 03 00 00 00 00 00 00", "'a' is shorter than its number"),
        (ONE_LIST, "01 00 00 05 00 00 00 ff ff ff ff 00", "'a' has a number of elements"),
        (
            ONE_LIST,
            "01 00 00 06 00 00 00 01 00 00 00 02 07",
            "bit set in its null bitmap that belongs to no el",
        ),
        (ONE_LIST, "01 00 00 06 00 00 00 01 00 00 00 01 07", "'a.element' is null, and its slot"),
        (TEXTS, "01 00 00 05 00 00 00 00 00 00 00 00", "'a' has a number of elements"),
        (
            TEXTS,
            "01 00 00 0a 00 00 00 01 00 00 00 00 02 00 00 00 61",
            "'a' does not end where its last element",
        ),
        (TEXTS, "01 00 00 0a 00 00 00 01 00 00 00 01 01 00 00 00 61", "'a.element' is null, and its cell"),
        (
            TEXTS,
            "01 00 00 0e 00 00 00 02 00 00 00 00 02 00 00 00 01 00 00 00 61",
            "'a' has end positions that go backwards",
        ),
    ],
)
def test_a_wrong_spelling_is_refused_and_says_why(schema: pa.Schema, value: str, words: str) -> None:
    error = refused(RowCodec(schema, 1), [bytes.fromhex(value)])
    assert words in error.message
    assert error.index == 0


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        (pa.field("a", pa.int32(), nullable=False), None, "'a' is null, and the column is not nullable"),
        (pa.field("a", pa.string(), nullable=False), None, "'a' is null, and the column is not nullable"),
        (pa.field("a", pa.decimal128(3, 1)), 1000, "'a' has more digits than the 3"),
        (pa.field("a", pa.decimal128(3, 1)), -1000, "'a' has more digits"),
        (pa.field("a", pa.decimal128(38, 1)), 10**38, "'a' has more digits"),
        (pa.field("a", pa.decimal128(38, 1)), -(10**38), "'a' has more digits"),
        (pa.field("a", pa.time64("ns")), 86_400 * 10**9, "'a' is a time outside of its day"),
        (pa.field("a", pa.time64("ns")), -1, "'a' is a time outside of its day"),
        (
            pa.field("a", pa.list_(pa.field("element", pa.int8(), nullable=False))),
            [1, None],
            "'a.element' is null, and the column is not nullable",
        ),
        (
            pa.field("a", pa.struct([pa.field("b", pa.int8(), nullable=False)])),
            {"b": None},
            "'a.b' is null, and the column is not nullable",
        ),
        (pa.field("a", pa.map_(pa.string(), pa.int8())), [(None, 1)], "'a.entries.key' is null"),
    ],
)
def test_a_value_that_the_column_cannot_have_is_refused(field: pa.Field, value: Any, words: str) -> None:
    schema = pa.schema([field])
    error = refused(RowCodec(schema, 1), [model_row(schema, 1, {"a": value})])
    assert words in error.message


@pytest.mark.parametrize("bound", [10**38 - 1, 1 - 10**38, 10**19, -(2**64), 0, -1])
def test_decimals_up_to_all_digits_are_accepted(bound: int) -> None:
    schema = pa.schema([("a", pa.decimal128(38, 0))])
    value = model_row(schema, 1, {"a": bound})
    assert int(decoded(RowCodec(schema, 1), [value], validate=True)["a"][0].as_py()) == bound


def test_the_first_bad_row_is_named_whatever_is_wrong_with_later_ones() -> None:
    codec = RowCodec(PLAIN, 1)
    good = model_row(PLAIN, 1, ROW)
    not_text = model_row(PLAIN, 1, ROW).replace("grün".encode(), b"gr\xff\xffn")
    values = [good] * 300 + [not_text] + [good] * 20 + [good[:-1]] + [good] * 20 + [b""]
    error = refused(codec, values)
    assert error.index == 300
    assert "'name' is not UTF-8" in error.message


def test_the_index_of_a_bad_value_deep_inside_is_that_of_its_row() -> None:
    inner = pa.struct([pa.field("t", pa.list_(pa.field("element", pa.string())))])
    schema = pa.schema([("a", pa.list_(pa.field("element", inner)))])
    rows: list[dict[str, Any]] = [
        {"a": None},
        {"a": []},
        {"a": [None, {"t": None}, {"t": []}]},
        {"a": [{"t": ["é"]}]},
    ]
    values = [model_row(schema, 1, row) for row in rows]
    values.append(values[3].replace("é".encode(), b"\xff\xff"))
    assert refused(RowCodec(schema, 1), values).index == 4


def test_a_nan_keeps_its_payload_and_zero_its_sign() -> None:
    schema = pa.schema([("d", pa.float64()), ("f", pa.float32())])
    bits = struct.pack("<HBQI", 1, 0, 0x7FF8_0000_0000_BEEF, 0xFFC0_0001)
    minus = struct.pack("<HBdf", 1, 0, -0.0, -0.0)
    batch = decoded(RowCodec(schema, 1), [bits, minus], validate=True)
    assert RowCodec(schema, 1).encode(batch).to_pylist() == [bits, minus]
    assert math.copysign(1, batch["d"][1].as_py()) == -1


def test_what_arrow_keeps_beneath_nulls_is_not_written() -> None:
    valid = pa.py_buffer(b"\x00")
    number = pa.Array.from_buffers(pa.int64(), 1, [valid, pa.py_buffer(struct.pack("<q", 99))])
    offsets = pa.py_buffer(struct.pack("<ii", 0, 3))
    text = pa.Array.from_buffers(pa.string(), 1, [valid, offsets, pa.py_buffer(b"abc")])
    lists = pa.Array.from_buffers(
        pa.list_(pa.field("element", pa.int8())),
        1,
        [valid, offsets],
        children=[pa.array([1, 2, 3], pa.int8())],
    )
    batch = pa.record_batch({"n": number, "t": text, "l": lists})
    assert RowCodec(batch.schema, 1).encode(batch).to_pylist() == [
        model_row(batch.schema, 1, {"n": None, "t": None, "l": None})
    ]


def test_beneath_a_null_struct_stand_empty_values_where_no_null_may_be() -> None:
    inner = pa.struct([pa.field("t", pa.string(), nullable=False), pa.field("n", pa.int8())])
    schema = pa.schema([("a", inner)])
    rows: list[dict[str, Any]] = [{"a": {"t": "long text", "n": 1}}, {"a": None}, {"a": None}]
    for given_rows in (rows, rows[1:]):
        values = [model_row(schema, 1, row) for row in given_rows]
        texts = decoded(RowCodec(schema, 1), values).column("a").field(0)
        assert texts.null_count == 0
        assert texts.to_pylist() == ["" if row["a"] is None else "long text" for row in given_rows]


def test_columns_are_chosen_in_the_given_order() -> None:
    codec = RowCodec(PLAIN, 1)
    batch = to_batch(PLAIN, [ROW, EMPTY])
    values = codec.encode(batch).to_pylist()
    for validate in (False, True):
        assert decoded(codec, values, columns=["tags", "id"], validate=validate).equals(
            batch.select(["tags", "id"])
        )
    nothing = decoded(codec, values, columns=[])
    assert (nothing.num_rows, nothing.num_columns) == (2, 0)
    with pytest.raises(TableError) as caught:
        decoded(codec, values, columns=["nope"])
    assert caught.value.table_code == TableCode.invalid_scan_request


def test_validation_looks_at_columns_that_were_not_chosen() -> None:
    bad = model_row(PLAIN, 1, ROW).replace("grün".encode(), b"gr\xff\xffn")
    with pytest.raises(TableError):
        decoded(RowCodec(PLAIN, 1), [bad], columns=["id"], validate=True)


def test_a_batch_that_is_not_of_the_schema_is_refused() -> None:
    codec = RowCodec(ONE_INT, 1)
    with pytest.raises(TableError, match="conform"):
        codec.encode(pa.record_batch({"a": pa.array([1], pa.int64())}))
    with pytest.raises(TableError, match="conform"):
        codec.encode(pa.record_batch({"b": pa.array([1], pa.int32())}))


def test_a_null_that_the_schema_forbids_is_not_written() -> None:
    inner = pa.struct([pa.field("b", pa.int8(), nullable=False)])
    schema = pa.schema([pa.field("a", pa.list_(pa.field("element", inner)))])
    batch = to_batch(schema, [{"a": None}, {"a": [None, {"b": 1}]}, {"a": [None, {"b": None}]}])
    with pytest.raises(TableError, match=r"^column 'a\.element\.b' is null") as caught:
        RowCodec(schema, 1).encode(batch)
    assert caught.value.index == 2


@pytest.mark.parametrize("slices", [([0, 3], [4, 7]), ([-1], [3]), ([0], [99]), ([5], [4]), ([0, 1], [1])])
def test_slices_that_are_no_rows_of_the_buffer_are_a_mistake(slices: tuple[list[int], list[int]]) -> None:
    with pytest.raises(ValueError, match="slices"):
        RowCodec(ONE_INT, 1).decode(bytes(7), np.array(slices[0]), np.array(slices[1]))


def test_a_buffer_beyond_two_gibibytes_is_read() -> None:
    codec = RowCodec(TEXTS, 1)
    values = [model_row(TEXTS, 1, {"a": ["x", None]}), model_row(TEXTS, 1, {"a": ["yz"]})]
    data = np.zeros(2**31 + 100, np.uint8)  # Pages that are never written take no memory.
    starts = np.array([5, 2**31 + 20])
    for value, start in zip(values, starts, strict=True):
        data[start : start + len(value)] = np.frombuffer(value, np.uint8)
    ends = starts + np.array([len(value) for value in values])
    batch = codec.decode(data.data, starts, ends, validate=True)
    assert batch.to_pylist() == [{"a": ["x", None]}, {"a": ["yz"]}]


def test_rows_beyond_two_gibibytes_are_refused_before_memory_is_taken() -> None:
    data = pa.py_buffer(np.zeros(2**30, np.uint8))
    offsets = pa.py_buffer(np.array([0, 2**30], np.int32))
    large = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, data])
    codec = RowCodec(pa.schema([(name, pa.binary()) for name in "ab"]), 1)
    with pytest.raises(TableError, match="write fewer rows at once"):
        encode_tuples(codec.layout, [large, large], 1, 1)


def test_null_structs_cannot_ask_for_much_more_memory_than_they_have_bytes() -> None:
    wide = pa.struct([pa.field(f"f{number}", pa.int64()) for number in range(900)])
    schema = pa.schema([("a", pa.list_(pa.field("element", wide)))])
    value = model_row(schema, 1, {"a": [None] * 100_000})
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    with pytest.raises(TableError, match="write fewer rows at once"):
        decoded(RowCodec(schema, 1), [value], validate=True)
    assert tracemalloc.get_traced_memory()[1] < 64 * 1024 * 1024
    tracemalloc.stop()
    assert pa.total_allocated_bytes() - before < 64 * 1024 * 1024


def test_no_rows_are_an_empty_batch() -> None:
    for validate in (False, True):
        empty = decoded(RowCodec(PLAIN, 1), [], validate=validate)
        assert (empty.num_rows, empty.schema) == (0, PLAIN)
        assert len(RowCodec(PLAIN, 1).encode(empty)) == 0
    assert VersionedRows({1: PLAIN}, 1).decode(b"", np.array([]), np.array([])).num_rows == 0


@pytest.mark.parametrize("schema_id", [-1, 65536])
def test_a_schema_id_has_sixteen_bits(schema_id: int) -> None:
    with pytest.raises(ValueError, match="schema id"):
        RowCodec(PLAIN, schema_id)


# Several versions of one schema.

OLD = pa.schema([pa.field("id", pa.int64(), nullable=False)])
NEW = OLD.append(pa.field("name", pa.string())).append(pa.field("n", pa.int8()))
MIDDLE = pa.schema(list(NEW)[:2])
VERSIONS = {1: OLD, 4: MIDDLE, 9: NEW}


def mixed_rows() -> list[bytes]:
    return [
        model_row(NEW, 9, {"id": 0, "name": "a", "n": 1}),
        model_row(OLD, 1, {"id": 1}),
        model_row(MIDDLE, 4, {"id": 2, "name": "b"}),
        model_row(NEW, 9, {"id": 3, "name": None, "n": 2}),
        model_row(OLD, 1, {"id": 4}),
    ]


def test_rows_of_older_schemas_get_nulls_and_keep_their_place() -> None:
    table = VersionedRows(VERSIONS, 9)
    expected: list[dict[str, Any]] = [
        {"id": 0, "name": "a", "n": 1},
        {"id": 1, "name": None, "n": None},
        {"id": 2, "name": "b", "n": None},
        {"id": 3, "name": None, "n": 2},
        {"id": 4, "name": None, "n": None},
    ]
    packed_rows = packed(mixed_rows(), b"--")
    for batch in (table.decode(*packed_rows), table.validate(*packed_rows)):
        assert batch.schema.equals(NEW)
        assert batch.to_pylist() == expected
    chosen = table.decode(*packed_rows, columns=["n", "id"])
    assert chosen.to_pylist() == [{"n": row["n"], "id": row["id"]} for row in expected]


def test_rows_that_are_all_old_get_nulls() -> None:
    batch = VersionedRows(VERSIONS, 9).validate(*packed(mixed_rows()[1:2]))
    assert batch.to_pylist() == [{"id": 1, "name": None, "n": None}]


def test_an_unknown_schema_id_is_refused_with_its_row() -> None:
    table = VersionedRows(VERSIONS, 9)
    values = [*mixed_rows(), b"\x05\x00\x00", *mixed_rows()]
    for read in (table.decode, table.validate):
        with pytest.raises(TableError, match="the row has schema id 5, and the table has 1, 4, 9") as caught:
            read(*packed(values))
        assert caught.value.index == 5
    with pytest.raises(TableError, match="the row has schema id 5"):
        table.decode(*packed([b"\x05\x00\x00"]))
    with pytest.raises(TableError, match="the row is shorter than a schema id"):
        table.decode(*packed([b"", *mixed_rows()]))


def test_the_first_bad_row_is_named_among_rows_of_all_versions() -> None:
    rows = mixed_rows()
    values = [*rows, rows[4][:-1], rows[0][:-1], b"\x05\x00"]
    with pytest.raises(TableError) as caught:
        VersionedRows(VERSIONS, 9).validate(*packed(values))
    assert caught.value.index == 5


@pytest.mark.parametrize(
    "older",
    [
        pa.schema([pa.field("id", pa.int32(), nullable=False)]),
        pa.schema([pa.field("other", pa.int64(), nullable=False)]),
        pa.schema([]),
        NEW.append(pa.field("gone", pa.int8())),
    ],
)
def test_a_schema_that_the_newest_does_not_begin_with_is_refused(older: pa.Schema) -> None:
    with pytest.raises(TableError) as caught:
        VersionedRows({1: older, 2: NEW}, 2)
    assert caught.value.table_code == TableCode.invalid_schema


def test_old_rows_cannot_ask_for_much_more_memory_than_they_have_bytes() -> None:
    wide = pa.schema([*OLD, *(pa.field(f"f{number}", pa.int64()) for number in range(900))])
    count = 50_000
    row = model_row(OLD, 1, {"id": 1})
    starts = np.arange(count) * len(row)
    with pytest.raises(TableError, match="write fewer rows at once"):
        VersionedRows({1: OLD, 2: wide}, 2).validate(row * count, starts, starts + len(row))
