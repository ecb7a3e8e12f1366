"""A table's types, rows brought to them, and their names in Spark's words."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.table_values import has_nan, schemas, tables, to_batch, types
from tidemill.errors import TableCode, TableError
from tidemill.tables.rows.types import (
    FIELDS_MAX,
    NESTING_MAX,
    conform,
    describe_type,
    normalise_schema,
    parse_columns,
)

# Schemas.


def one(data_type: pa.DataType) -> pa.Schema:
    return pa.schema([("c", data_type)])


def refused_schema(schema: pa.Schema) -> str:
    with pytest.raises(TableError) as caught:
        normalise_schema(schema)
    assert caught.value.table_code == TableCode.invalid_schema
    return caught.value.message


@settings(deadline=None)
@given(schemas())
def test_a_table_s_own_types_stay_as_they_are(schema: pa.Schema) -> None:
    assert normalise_schema(schema).equals(schema, check_metadata=True)


@pytest.mark.parametrize(
    ("given_type", "expected"),
    [
        (pa.large_string(), pa.string()),
        (pa.string_view(), pa.string()),
        (pa.large_binary(), pa.binary()),
        (pa.binary_view(), pa.binary()),
        (pa.timestamp("s"), pa.timestamp("us")),
        (pa.timestamp("ms", "Europe/Berlin"), pa.timestamp("us", "UTC")),
        (pa.timestamp("us", "+02:00"), pa.timestamp("us", "UTC")),
        (pa.dictionary(pa.int8(), pa.large_string()), pa.string()),
        (pa.run_end_encoded(pa.int32(), pa.int64()), pa.int64()),
        (pa.date64(), pa.date32()),
        (pa.duration("s"), pa.duration("us")),
        (pa.duration("ms"), pa.duration("us")),
        (pa.time32("s"), pa.time64("ns")),
        (pa.time64("us"), pa.time64("ns")),
        (pa.decimal32(5, 2), pa.decimal128(5, 2)),
        (pa.decimal64(15, 2), pa.decimal128(15, 2)),
        (pa.list_(pa.int8()), pa.list_(pa.field("element", pa.int8()))),
        (
            pa.list_(pa.field("x", pa.int8(), nullable=False)),
            pa.list_(pa.field("element", pa.int8(), nullable=False)),
        ),
        (pa.large_list(pa.date64()), pa.list_(pa.field("element", pa.date32()))),
        (pa.list_view(pa.int8()), pa.list_(pa.field("element", pa.int8()))),
        (pa.large_list_view(pa.int8()), pa.list_(pa.field("element", pa.int8()))),
        (
            pa.map_(pa.large_string(), pa.field("v", pa.date64(), nullable=False), keys_sorted=True),
            pa.map_(pa.string(), pa.field("value", pa.date32(), nullable=False)),
        ),
        (pa.struct([("a", pa.large_string())]), pa.struct([("a", pa.string())])),
    ],
)
def test_other_spellings_of_the_same_values_become_ours(
    given_type: pa.DataType, expected: pa.DataType
) -> None:
    assert normalise_schema(one(given_type)).equals(one(expected))


def test_names_inside_lists_and_maps_become_ours() -> None:
    schema = normalise_schema(
        one(pa.map_(pa.field("k", pa.int8(), nullable=False), pa.field("v", pa.list_(pa.int8()))))
    )
    assert str(schema.types[0].field(0).type) == "struct<key: int8 not null, value: list<element: int8>>"


def test_only_comments_are_kept_of_metadata() -> None:
    inner = pa.field("b", pa.int8(), metadata={"comment": "inner", "x": "y"})
    field = pa.field("a", pa.struct([inner]), nullable=False, metadata={"comment": "outer", "PARQUET": "1"})
    schema = normalise_schema(pa.schema([field, pa.field("c", pa.int8())], metadata={"pandas": "{}"}))
    assert schema.metadata is None
    assert schema.field("a").metadata == {b"comment": b"outer"}
    assert schema.field("a").type.field("b").metadata == {b"comment": b"inner"}
    assert schema.field("c").metadata is None
    assert not schema.field("a").nullable


@pytest.mark.parametrize(
    ("data_type", "instead"),
    [
        (pa.uint8(), "smallint"),
        (pa.uint16(), "int (int32)"),
        (pa.uint32(), "bigint"),
        (pa.uint64(), "decimal(20,0)"),
        (pa.float16(), "float (float32)"),
        (pa.timestamp("ns"), "timestamp('us')"),
        (pa.timestamp("ns", "UTC"), "timestamp('us')"),
        (pa.duration("ns"), "duration('us')"),
        (pa.null(), "the type that the values will have"),
        (pa.dense_union([pa.field("a", pa.int8())]), "a struct"),
        (pa.sparse_union([pa.field("a", pa.int8())]), "a struct"),
        (pa.decimal256(50, 2), "decimal128"),
        (pa.decimal128(5, -1), "a scale"),
        (pa.decimal128(5, 6), "a scale"),
        (pa.month_day_nano_interval(), "interval day to second"),
        (pa.binary(16), "binary"),
        (pa.list_(pa.int8(), 3), "list<int8>"),
        (pa.struct([]), "a struct of at least one field"),
        (pa.map_(pa.map_(pa.int8(), pa.int8()), pa.int8()), "keys without a map"),
        (pa.map_(pa.struct([("m", pa.map_(pa.int8(), pa.int8()))]), pa.int8()), "keys without a map"),
        (pa.uuid(), "its storage type, fixed_size_binary[16]"),
    ],
)
def test_types_that_a_table_cannot_have_are_refused_with_what_to_use(
    data_type: pa.DataType, instead: str
) -> None:
    message = refused_schema(one(data_type))
    assert message.startswith("column 'c' has type ")
    assert f"use {instead}" in message
    nested = refused_schema(one(pa.list_(pa.struct([("x", data_type)]))))
    assert nested.startswith("column 'c.element.x' has type ")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "at least one column"),
        (["a", "b", "a"], "'a' and 'a' have one name"),
        (["Straße", "STRAßE"], "'Straße' and 'STRAßE'"),
        ([""], "empty name"),
        (["a\nb"], "control character"),
        (["a\x7f"], "control character"),
        (["x" * 256], "256 characters"),
        (["_tidemill_offset"], "reserved"),
        (["_TideMill"], "reserved"),
    ],
)
def test_names_that_columns_cannot_have_are_refused(names: list[str], words: str) -> None:
    assert words in refused_schema(pa.schema([(name, pa.int8()) for name in names]))


def test_names_inside_a_struct_have_the_same_rules() -> None:
    assert "'c.a' and 'c.A'" in refused_schema(one(pa.struct([("a", pa.int8()), ("A", pa.int8())])))
    assert "field of column 'c' has an empty name" in refused_schema(one(pa.struct([("", pa.int8())])))
    normalise_schema(one(pa.struct([("_tidemill", pa.int8())])))


def test_odd_names_of_up_to_255_characters_are_allowed() -> None:
    normalise_schema(
        pa.schema([(name, pa.int8()) for name in ("x" * 255, " ", "a.b", "`", "日本", "tidemill")])
    )


def test_fields_are_counted_with_nested_ones() -> None:
    half = pa.struct([(f"f{number}", pa.int8()) for number in range(FIELDS_MAX // 2 - 1)])
    normalise_schema(pa.schema([("a", half), ("b", half)]))
    assert "more than 1000" in refused_schema(pa.schema([("a", half), ("b", half), ("c", pa.int8())]))
    assert "more than 1000" in refused_schema(pa.schema([("a", half), ("b", pa.list_(half))]))
    maps = [(f"m{number}", pa.map_(pa.int8(), pa.int8())) for number in range(FIELDS_MAX // 3 + 1)]
    normalise_schema(pa.schema(maps[:-1]))
    assert "more than 1000" in refused_schema(pa.schema(maps))


def test_nesting_has_a_limit() -> None:
    data_type: pa.DataType = pa.int8()
    for _ in range(NESTING_MAX):
        data_type = pa.list_(data_type)
    normalise_schema(one(data_type))
    assert "nested deeper" in refused_schema(one(pa.struct([("x", data_type)])))


# Words.


def parse_type(words: str) -> pa.DataType:
    return parse_columns(f"c {words}").field("c").type


@settings(deadline=None)
@given(types())
def test_types_are_read_back_from_their_words(data_type: pa.DataType) -> None:
    assert parse_type(describe_type(data_type)).equals(data_type)


@pytest.mark.parametrize(
    ("words", "data_type"),
    [
        ("bigint", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestamp_ntz", pa.timestamp("us")),
        ("decimal(10,2)", pa.decimal128(10, 2)),
        ("interval day to second", pa.duration("us")),
        (
            "array<struct<a:int,b:string>>",
            pa.list_(pa.field("element", pa.struct([("a", pa.int32()), ("b", pa.string())]))),
        ),
        ("map<string,int not null>", pa.map_(pa.string(), pa.field("value", pa.int32(), nullable=False))),
        ("struct<`a b`:int,`c``d`:int not null>", None),
    ],
)
def test_types_are_described_in_sparks_words(words: str, data_type: pa.DataType | None) -> None:
    if data_type is not None:
        assert describe_type(data_type) == words
    assert describe_type(parse_type(words)) == words


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("  BIGINT\n", "bigint"),
        ("long", "bigint"),
        ("short", "smallint"),
        ("byte", "tinyint"),
        ("Integer", "int"),
        ("real", "float"),
        ("timestamp_ltz", "timestamp"),
        ("decimal", "decimal(10,0)"),
        ("numeric(5)", "decimal(5,0)"),
        ("DEC ( 5 , 1 )", "decimal(5,1)"),
        ("struct<a int, b: string NOT NULL COMMENT 'x'>", "struct<a:int,b:string not null>"),
        ("array< array<int>>", "array<array<int>>"),
    ],
)
def test_other_words_for_the_same_types_are_read(words: str, same: str) -> None:
    assert describe_type(parse_type(words)) == same


def test_columns_are_read_with_nullability_and_comments() -> None:
    schema = parse_columns(
        "id bigint not null, name string comment 'it\\'s \"free\"', tags: array<string>,\n"
        '`odd ``name` map<int,date> NOT NULL COMMENT "x"'
    )
    assert schema.names == ["id", "name", "tags", "odd `name"]
    assert [field.nullable for field in schema] == [False, True, True, False]
    assert schema.field("name").metadata == {b"comment": b'it\'s "free"'}
    assert schema.field("odd `name").metadata == {b"comment": b"x"}


@pytest.mark.parametrize(
    ("words", "position", "expected"),
    [
        ("", 1, "a column"),
        ("id", 3, "a type"),
        ("id bigintt", 4, "a type such as"),
        ("id bigint not", 14, "'null'"),
        ("id bigint,", 11, "a column"),
        ("id bigint name string", 11, "the end, or a comma"),
        ("id decimal(39,0)", 12, "a number from 1 to 38"),
        ("id decimal(5,6)", 14, "a number from 0 to 5"),
        ("id decimal(5", 13, "')'"),
        ("id array<int", 13, "'>'"),
        ("id map<int>", 11, "','"),
        ("id struct<>", 11, "a column"),
        ("id int comment x", 16, "a comment in quotes"),
        ("id int comment 'x", 16, "a comment in quotes"),
        ("id; int", 3, "a type"),
        ("id interval year", 13, "'day'"),
        ("id " + "array<" * 1000, 394, "fewer nested types"),
        ("id decimal(" + "9" * 10_000 + ")", 12, "a number"),
    ],
)
def test_wrong_words_are_refused_with_their_position(words: str, position: int, expected: str) -> None:
    with pytest.raises(TableError) as caught:
        parse_columns(words)
    assert caught.value.table_code == TableCode.invalid_schema
    assert expected in caught.value.message
    assert f"at character {position}," in caught.value.message
    assert len(caught.value.message) < 20_500


@settings(deadline=None)
@given(st.text(alphabet="ab<>(),:`'\" not null int array struct decimal 0 9 \\", max_size=40))
def test_any_words_are_columns_or_refused(words: str) -> None:
    try:
        schema = parse_columns(words)
    except TableError as error:
        assert error.table_code == TableCode.invalid_schema
    else:
        assert normalise_schema(schema).equals(schema)


def test_parsed_columns_obey_the_rules_of_a_schema() -> None:
    with pytest.raises(TableError, match="have one name"):
        parse_columns("a int, A int")
    with pytest.raises(TableError, match="nested deeper"):
        parse_type("array<" * 17 + "int" + ">" * 17)


# Rows.


def refused_rows(data: pa.Table | pa.RecordBatch, schema: pa.Schema) -> TableError:
    with pytest.raises(TableError) as caught:
        conform(data, schema)
    assert caught.value.table_code == TableCode.row_refused
    return caught.value


def refused_column(values: pa.Array, words: str) -> TableError:
    """Two good rows in a chunk of their own, then the values."""
    schema = parse_columns(f"c {words}")
    good = pa.nulls(2, values.type)
    table = pa.table({"c": pa.chunked_array([good, values])})
    return refused_rows(table, schema)


@settings(deadline=None)
@given(tables())
def test_rows_of_the_schema_stay_as_they_are(table: tuple[pa.Schema, list[dict[str, Any]]]) -> None:
    schema, rows = table
    batch = to_batch(schema, rows)
    assert conform(batch, schema).schema.equals(schema)
    assert conform(batch, schema).equals(pa.table(batch)) or has_nan(rows), "for Arrow, no NaN equals another"


def test_columns_are_found_by_name_in_any_order_and_missing_ones_are_null() -> None:
    schema = parse_columns("a int, b string, c array<struct<x:int not null>>")
    table = conform(pa.table({"b": ["x", "y"], "a": pa.array([1, 2], pa.int8())}), schema)
    assert table.schema.equals(schema)
    assert table.to_pylist() == [{"a": 1, "b": "x", "c": None}, {"a": 2, "b": "y", "c": None}]
    table.validate(full=True)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"a": [1], "b": [1], "x": [1]}, "a column 'x', which the table does not have: it has a, b"),
        ({"a": [1], "B": [1]}, "a column 'B', which the table does not have: did you mean 'b'?"),
        ({"b": [1]}, "column 'a' is missing, and it is not nullable"),
    ],
)
def test_columns_must_be_those_of_the_table(data: dict[str, list[int]], words: str) -> None:
    assert words in refused_rows(pa.table(data), parse_columns("a bigint not null, b bigint")).message


def test_a_column_twice_is_refused() -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    assert "two columns 'a'" in refused_rows(table, parse_columns("a bigint")).message


UTC = dt.UTC


@pytest.mark.parametrize(
    ("values", "words", "expected"),
    [
        (pa.array([1, None, 127], pa.int64()), "tinyint", [1, None, 127]),
        (pa.array([255], pa.uint8()), "smallint", [255]),
        (pa.array([1], pa.uint64()), "bigint", [1]),
        (pa.array([2**53]), "double", [2.0**53]),
        (pa.array([1.5], pa.float16()), "float", [1.5]),
        (pa.array([1.5, None, float("inf")]), "float", [1.5, None, float("inf")]),
        (pa.array([5]), "decimal(3,2)", [Decimal("5.00")]),
        (pa.array([2**64 - 1], pa.uint64()), "decimal(38,18)", [Decimal(2**64 - 1)]),
        (pa.array([Decimal("1.50")]), "decimal(2,1)", [Decimal("1.5")]),
        (pa.array([Decimal("1.5")], pa.decimal256(50, 1)), "decimal(3,2)", [Decimal("1.50")]),
        (pa.array(["a"], pa.large_string()), "string", ["a"]),
        (pa.array(["a"], pa.string_view()), "string", ["a"]),
        (pa.array(["a", None]).dictionary_encode(), "string", ["a", None]),
        (pa.array([b"a"], pa.large_binary()), "binary", [b"a"]),
        (pa.array([b"ab"], pa.binary(2)), "binary", [b"ab"]),
        (pa.array([dt.date(2024, 1, 1)], pa.date64()), "date", [dt.date(2024, 1, 1)]),
        (
            pa.array([10**9], pa.timestamp("ns")),
            "timestamp_ntz",
            [dt.datetime(1970, 1, 1, 0, 0, 1)],  # noqa: DTZ001 it has no zone,
        ),
        (
            pa.array([0], pa.timestamp("s", "Asia/Tokyo")),
            "timestamp",
            [dt.datetime(1970, 1, 1, tzinfo=UTC)],
        ),
        (pa.array([dt.time(1, 2)], pa.time32("s")), "time", [dt.time(1, 2)]),
        (pa.array([5000], pa.duration("ns")), "interval day to second", [dt.timedelta(microseconds=5)]),
        (pa.nulls(2), "array<int>", [None, None]),
        (pa.array([[1], None, []], pa.large_list(pa.int64())), "array<int>", [[1], None, []]),
        (pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), "array<int>", [[1, 2], None]),
        (pa.array([[1]], pa.list_view(pa.int64())), "array<int>", [[1]]),
        (
            pa.array([[(1, "a")], None], pa.map_(pa.int64(), pa.large_string())),
            "map<int,string>",
            [[(1, "a")], None],
        ),
        (
            pa.array([{"b": 1}, None, {"b": None}]),
            "struct<a:string,b:int>",
            [{"a": None, "b": 1}, None, {"a": None, "b": None}],
        ),
        (
            pa.array([None, [None, {"x": 1}]]),
            "array<struct<x:int not null>>",
            [None, [None, {"x": 1}]],
        ),
        (
            pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)], pa.binary(16))),
            "binary",
            [bytes(16)],
        ),
        (pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), [7]), "int", [7, 7]),
    ],
)
def test_values_are_cast_where_they_stay_what_they_are(
    values: pa.Array, words: str, expected: list[Any]
) -> None:
    schema = parse_columns(f"c {words}")
    for data in (pa.record_batch({"c": values}), pa.table({"c": pa.chunked_array([values])})):
        table = conform(data, schema)
        table.validate(full=True)
        assert table.schema.equals(schema)
        assert table["c"].to_pylist() == expected


@pytest.mark.parametrize(
    ("values", "words", "index", "text"),
    [
        (pa.array([1, 128]), "tinyint", 1, "'c' is 128 (int64), which tinyint cannot hold exactly"),
        (pa.array([2**53 + 1]), "double", 0, "which double cannot hold"),
        (pa.array([0.5, 0.1]), "float", 1, "'c' is 0.1 (double)"),
        (pa.array([100]), "decimal(3,2)", 0, "which decimal(3,2) cannot hold"),
        (pa.array([Decimal("1.0"), Decimal("1.5")]), "decimal(1,0)", 1, "'c' is 1.5"),
        (pa.array([0, 1500], pa.timestamp("ns")), "timestamp_ntz", 1, "cannot hold exactly"),
        (pa.array([2**60], pa.timestamp("s")), "timestamp_ntz", 0, "cannot hold exactly"),
        (pa.array([1], pa.duration("ns")), "interval day to second", 0, "cannot hold exactly"),
        (pa.array([[1], None, [1, 300]]), "array<tinyint>", 2, "'c.element' is 300"),
        (pa.array([None, {"x": 300}]), "struct<x:tinyint>", 1, "'c.x' is 300"),
        (pa.array([[(1, 300)]], pa.map_(pa.int8(), pa.int64())), "map<int,tinyint>", 0, "'c.value' is 300"),
        (pa.array([[1], [2, None]]), "array<bigint not null>", 1, "'c.element' is null, and"),
        (pa.array([None, {"x": None}]), "struct<x:int not null>", 1, "'c.x' is null, and"),
        (
            pa.array([None, [None, {"x": 1}], [{"x": None}]]),
            "array<struct<x:bigint not null>>",
            2,
            "'c.element.x' is null, and",
        ),
    ],
)
def test_a_value_that_would_change_is_refused_with_its_row(
    values: pa.Array, words: str, index: int, text: str
) -> None:
    error = refused_column(values, words)
    assert error.index == index + 2
    assert error.message.startswith(f"row {index + 2}: column ")
    assert text in error.message


def test_a_null_in_a_column_that_is_not_nullable_is_refused() -> None:
    error = refused_rows(pa.table({"c": [1, None]}), parse_columns("c bigint not null"))
    assert error.index == 1
    error = refused_rows(pa.table({"c": pa.nulls(1)}), parse_columns("c bigint not null"))
    assert error.index == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (pa.array(["1"]), "int"),
        (pa.array([1]), "string"),
        (pa.array([1.0]), "int"),
        (pa.array([True]), "int"),
        (pa.array([1]), "boolean"),
        (pa.array(["a"]), "binary"),
        (pa.array([b"a"]), "string"),
        (pa.array([1.5]), "decimal(3,1)"),
        (pa.array([Decimal(1)]), "int"),
        (pa.array([Decimal(1)]), "double"),
        (pa.array(["2024-01-01"]), "date"),
        (pa.array([0], pa.timestamp("us")), "date"),
        (pa.array([0], pa.timestamp("us")), "timestamp"),
        (pa.array([0], pa.timestamp("us", "UTC")), "timestamp_ntz"),
        (pa.array([0]), "timestamp"),
        (pa.array([[1]]), "int"),
        (pa.array([1]), "array<int>"),
        (pa.array([{"a": 1}]), "map<string,int>"),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())), "struct<a:int>"),
    ],
)
def test_a_type_of_another_kind_is_refused(values: pa.Array, words: str) -> None:
    message = refused_column(values, words).message
    assert "column 'c' has type " in message
    assert f"and the table has {words}: cast it" in message


def test_fields_of_structs_must_be_those_of_the_table() -> None:
    assert (
        "in column 'c' there is a field 'y'" in refused_column(pa.array([{"y": 1}]), "struct<x:int>").message
    )
    missing = refused_column(pa.array([{"y": 1}]), "struct<x:int not null,y:int>").message
    assert "in column 'c' field 'x' is missing" in missing


def test_arrow_data_that_is_not_valid_is_refused_before_it_is_read() -> None:
    offsets = pa.py_buffer(np.array([0, 1_000_000, 3], np.int32))
    beyond = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"abc")])
    assert "not valid Arrow data" in refused_rows(pa.table({"c": beyond}), parse_columns("c string")).message
    octets = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff")]
    )
    assert "not valid Arrow data" in refused_rows(pa.table({"c": octets}), parse_columns("c string")).message
    time = pa.array([-1], pa.int64()).view(pa.time64("ns"))
    assert "not valid Arrow data" in refused_rows(pa.table({"c": time}), parse_columns("c time")).message


def test_slices_are_conformed_as_their_rows() -> None:
    schema = parse_columns("a struct<x:tinyint not null>, m map<string,tinyint>, l array<tinyint>")
    batch = pa.record_batch(
        {
            "a": pa.array([{"x": 1}, None, {"x": 3}, {"x": 4}]),
            "m": pa.array([[("a", 1)], [("b", 2)], None, [("d", 4)]], pa.map_(pa.string(), pa.int64())),
            "l": pa.array([[1, 1], [2], [], None]),
        }
    )
    for first in range(5):
        for last in range(first, 5):
            part = batch[first:last]
            assert conform(part, schema).to_pylist() == part.to_pylist()


def test_no_rows_conform() -> None:
    schema = parse_columns("a struct<x:int>, m map<string,int>, l array<int>, s string")
    for data in (schema.empty_table(), pa.table({"s": pa.nulls(0)})):
        assert (conform(data, schema).num_rows, conform(data, schema).schema) == (0, schema)
