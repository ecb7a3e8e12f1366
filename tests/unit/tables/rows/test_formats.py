"""The formats of a table's log: rows, JSON, raw."""

from __future__ import annotations

import base64
import json
import math
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import types as arrow

from support.table_values import has_nan, model_row, tables, to_batch, types
from tidemill.errors import TableCode, TableError
from tidemill.tables.rows.formats import FORMATS, RowFormat, make_format
from tidemill.tables.rows.types import parse_columns

Rows = tuple[pa.Schema, list[dict[str, Any]]]


def packed(values: list[bytes], gap: bytes = b"") -> tuple[bytes, np.ndarray, np.ndarray]:
    data, starts, ends = gap, [], []
    for value in values:
        starts.append(len(data))
        data += value
        ends.append(len(data))
        data += gap
    return data, np.array(starts, np.int64), np.array(ends, np.int64)


def json_format(columns: str) -> RowFormat:
    return make_format("json", {0: parse_columns(columns)}, 0, ())


def read(columns: str, *values: str | bytes) -> list[dict[str, Any]]:
    encoded = [value if isinstance(value, bytes) else value.encode() for value in values]
    batch = json_format(columns).to_batch(*packed(encoded))
    batch.validate(full=True)
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


def refused(columns: str, *values: str | bytes) -> TableError:
    with pytest.raises(TableError) as caught:
        read(columns, *values)
    assert caught.value.table_code == TableCode.row_refused
    return caught.value


# Values that JSON cannot say: years beyond four digits, and a key twice in one map.


def sayable(value: Any, data_type: pa.DataType) -> bool:
    if value is None:
        return True
    if arrow.is_date(data_type):
        return bool(-719_528 <= value <= 2_932_896)
    if arrow.is_timestamp(data_type):
        return bool(-719_528 * 86_400_000_000 <= value < 2_932_897 * 86_400_000_000)
    if arrow.is_map(data_type):
        keys = [key for key, _ in value]
        once = not arrow.is_string(data_type.key_type) or len(set(keys)) == len(keys)
        inside = all(
            sayable(key, data_type.key_type) and sayable(item, data_type.item_type) for key, item in value
        )
        return once and inside
    if arrow.is_list(data_type):
        return all(sayable(one, data_type.value_type) for one in value)
    if arrow.is_struct(data_type):
        return all(sayable(value[field.name], field.type) for field in data_type)
    return True


@settings(deadline=None)
@given(tables(), st.sampled_from([b"", b" \n", b'"a":']))
def test_json_rows_are_read_back_exactly(table: Rows, gap: bytes) -> None:
    schema, rows = table
    values = make_format("json", {3: schema}, 3, ())
    batch = to_batch(schema, rows)
    cannot = [
        index
        for index, row in enumerate(rows)
        if not all(sayable(row[field.name], field.type) for field in schema)
    ]
    try:
        encoded = values.from_batch(batch)
    except TableError as error:
        assert error.index in cannot
        return
    assert not cannot
    assert encoded.type == pa.binary()
    for text in encoded.to_pylist():
        assert list(json.loads(text)) == schema.names
    again = values.to_batch(*packed(encoded.to_pylist(), gap))
    again.validate(full=True)
    assert again.equals(batch) or has_nan(rows)
    assert values.from_batch(again).equals(encoded)


@settings(deadline=None)
@given(types(), st.lists(st.binary(max_size=20), max_size=3), st.data())
def test_any_bytes_are_rows_or_refused(kind: pa.DataType, odd: list[bytes], data: st.DataObject) -> None:
    values = make_format("json", {0: pa.schema([("c", kind)])}, 0, ())
    numbers = st.integers() | st.floats(allow_nan=False)
    anything = st.recursive(
        st.none() | st.booleans() | numbers | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        ),
        max_leaves=5,
    )
    texts = [json.dumps({"c": value}).encode() for value in data.draw(st.lists(anything, max_size=3))]
    for given_values in ([*texts, *odd], texts, odd):
        try:
            batch = values.to_batch(*packed(given_values))
        except TableError as error:
            assert error.table_code == TableCode.row_refused
            assert error.index is not None
            values.to_batch(*packed(given_values[: error.index]))
            with pytest.raises(TableError):
                values.to_batch(*packed(given_values[error.index : error.index + 1]))
        else:
            batch.validate(full=True)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("tinyint", "-128", -128),
        ("bigint", "9223372036854775807", 2**63 - 1),
        ("double", "1", 1.0),
        ("double", "0.1", 0.1),
        ("double", '"Infinity"', math.inf),
        ("double", '"-Infinity"', -math.inf),
        ("float", "0.1", float(np.float32(0.1))),
        ("decimal(5,2)", '"12.50"', "12.50"),
        ("decimal(5,2)", "12.5", "12.50"),
        ("decimal(5,2)", "1e2", "100.00"),
        ("decimal(5,2)", "-999.99", "-999.99"),
        ("decimal(38,0)", "9" * 38, "9" * 38),
        ("boolean", "true", True),
        ("string", r'"a\"\\\u00e9\ud83d\ude00"', 'a"\\é😀'),
        ("binary", '"AP8="', b"\x00\xff"),
        ("date", '"0000-01-01"', -719_528),
        ("date", '"2024-02-29"', 19_782),
        ("timestamp", '"1970-01-01T00:00:01Z"', 1_000_000),
        ("timestamp", '"1970-01-01T02:00:00.000001+02:00"', 1),
        ("timestamp_ntz", '"9999-12-31T23:59:59.999999"', 253_402_300_799_999_999),
        ("time", '"23:59:59.999999999"', 86_399_999_999_999),
        ("time", '"00:00:01"', 10**9),
        ("interval day to second", "-5", -5),
        ("array<int>", "[1,null]", [1, None]),
        ("struct<a:int,b:string>", '{"b":"x"}', {"a": None, "b": "x"}),
        ("map<string,int>", '{"k":1,"j":null}', [("k", 1), ("j", None)]),
        ("map<int,string>", '[[1,"a"],[2,null]]', [(1, "a"), (2, None)]),
    ],
)
def test_each_type_is_spelt_so(kind: str, text: str, value: Any) -> None:
    schema = parse_columns(f"c {kind}")
    batch = make_format("json", {0: schema}, 0, ()).to_batch(*packed([b'{"c":%s}' % text.encode()]))
    column = batch.column("c")
    if arrow.is_temporal(column.type):
        column = column.view(pa.int32() if column.type == pa.date32() else pa.int64())
    found = column[0].as_py()
    assert (str(found) if arrow.is_decimal(column.type) else found) == value


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("int", "1.0", "Expected `int"),
        ("int", "1e2", "Expected `int"),
        ("int", '"1"', "Expected `int"),
        ("int", "true", "Expected `int"),
        ("int", "2147483648", "`$.c`"),
        ("tinyint", "-129", "-128"),
        ("interval day to second", "1.5", "Expected `int"),
        ("double", '"nan"', '"NaN", "Infinity" or "-Infinity" is expected'),
        ("double", "NaN", "malformed"),
        ("double", "1e999", "out of range"),
        ("double", "true", "Expected `float"),
        ("float", "1e39", "'c' is beyond the range of a float"),
        ("decimal(5,2)", '"1.234"', "'c' is '1.234', and a decimal(5,2)"),
        ("decimal(5,2)", "1000", "a decimal(5,2)"),
        ("decimal(5,2)", '"NaN"', "a decimal(5,2)"),
        ("decimal(5,2)", '" 1"', "a decimal(5,2)"),
        ("decimal(5,2)", '"1_0"', "a decimal(5,2)"),
        ("decimal(5,2)", '"1e999999999"', "a decimal(5,2)"),
        ("decimal(5,2)", "true", "a decimal(5,2)"),
        ("decimal(5,2)", "[1]", "a decimal(5,2)"),
        ("boolean", "1", "Expected `bool"),
        ("string", "1", "Expected `str"),
        ("string", r'"\ud800"', "`$"),
        ("binary", '"AP8"', "base64"),
        ("date", '"2023-02-29"', "'c' is '2023-02-29', and a date"),
        ("date", '"2023-2-9"', "a date such as"),
        ("date", "19782", "Expected `str"),
        ("timestamp", '"2024-01-01T00:00:00"', "a time such as"),
        ("timestamp", '"2024-01-01 00:00:00Z"', "a time such as"),
        ("timestamp", '"2024-01-01T00:00:00.1234567Z"', "a time such as"),
        ("timestamp", '"2024-01-01"', "a time such as"),
        ("timestamp", '"2024-01-01T24:00:00Z"', "a time such as"),
        ("timestamp", '"2024-01-01T00:00:00Z\\n"', "a time such as"),
        ("timestamp_ntz", '"2024-01-01T00:00:00Z"', "a time without zone"),
        ("time", '"24:00:00"', "a time such as 12:30"),
        ("time", '"12:30"', "a time such as 12:30"),
        ("time", '"00:00:00.1234567891"', "a time such as 12:30"),
        ("array<int>", "{}", "Expected `array"),
        ("array<int not null>", "[1,null]", "Expected `int"),
        ("array<date>", '["2024-01-01","x"]', "'c.element' is 'x'"),
        ("struct<a:int>", '{"b":1}', "unknown field `b`"),
        ("struct<a:int not null>", "{}", "missing required field `a`"),
        ("struct<a:date>", '{"a":"x"}', "'c.a' is 'x'"),
        ("map<string,int>", '[["k",1]]', "Expected `object"),
        ("map<int,int>", '{"1":1}', "Expected `array"),
        ("map<int,int>", "[[1]]", "Expected `array` of length 2"),
        ("map<int,int>", "[[null,1]]", "Expected `int"),
        ("map<decimal(3,0),int>", "[[null,1]]", "null"),
        ("int not null", "null", "Expected `int"),
        ("decimal(5,2) not null", "null", "'c' is null"),
    ],
)
def test_another_spelling_is_refused_and_says_what_is_expected(kind: str, text: str, words: str) -> None:
    error = refused(f"c {kind}", f'{{"c":{text}}}')
    assert error.index == 0
    if not words.startswith("`$"):
        assert words in error.message


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"", "truncated"),
        (b"{}", "missing required field `id`"),
        (b'{"id":1,"nope":2}', "unknown field `nope`"),
        (b'{"id":1} {}', "trailing"),
        (b"[1]", "Expected `object`"),
        (b"null", "Expected `object`"),
        (b'{"id":1,"name":"\xff"}', "utf-8"),
        (b'{"id":1,"name":"\xed\xa0\x80"}', "utf-8"),
        (b'{"id":1,"price":' + b"[" * 100_000, "is not as the table has it"),
    ],
)
def test_what_is_no_object_of_the_table_is_refused(value: bytes, words: str) -> None:
    error = refused("id int not null, name string, price decimal(5,2)", b'{"id":1}', value, b'{"id":1}')
    assert error.index == 1
    assert words in error.message


@pytest.mark.parametrize(
    ("columns", "value", "name"),
    [
        ("a int, b int", '{"a":1,"a":2}', "a"),
        ("a int, b int", '{"a":1,"b":null,"a":null}', "a"),
        ("a int, b int", '{"a":1,"\\u0061" :2}', "a"),
        ("a int, b int", '{"a" : 1 , "a"\n: 2}', "a"),
        ("a int, b string", '{"a":1,"a":1,"b":":"}', "a"),
        ("s struct<x:int,y:int>", '{"s":{"x":1,"x":2}}', "x"),
        ("s array<struct<x:int,y:int>>", '{"s":[{"y":1},{"x":1,"x":2}]}', "x"),
        ("m map<string,int>", '{"m":{"k":1,"k":2}}', "k"),
        ("m map<string,map<string,int>>", '{"m":{"j":{},"k":{"z":1,"z":2}}}', "z"),
    ],
)
def test_a_field_that_is_there_twice_is_refused(columns: str, value: str, name: str) -> None:
    error = refused(columns, "{}", value)
    assert error.index == 1
    assert f"field {name!r} twice" in error.message


@pytest.mark.parametrize("text", [":", '":"', " :", "a: b", '\\":', "::", '{"a":1}', '\n"a":'])
def test_colons_in_text_are_not_taken_for_fields(text: str) -> None:
    rows: list[dict[str, Any]] = [{"a": 1, "b": text}, {"a": None, "b": text}, {"b": text}, {}]
    expected = [{"a": row.get("a"), "b": row.get("b")} for row in rows]
    assert read("a int, b string", *map(json.dumps, rows)) == expected
    nested = [{"m": [[text, 1]], "l": [text]}, {}]
    texts = [json.dumps({"m": {text: 1}, "l": [text]}), "{}"]
    found = read("m map<string,int>, l array<string>", *texts)
    assert [{"m": [list(pair) for pair in found[0]["m"]], "l": found[0]["l"]}] == nested[:1]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["1", "null", '":"']))))
def test_duplicates_are_found_whatever_else_is_in_a_row(fields: list[tuple[str, str]]) -> None:
    text = "{" + ",".join(f'"{name}":{value}' for name, value in fields) + "}"
    columns = "a string, b string"
    names = [name for name, _ in fields]
    wrong = any(value == "1" for _, value in fields) or len(set(names)) != len(names)
    if wrong:
        refused(columns, text)
    else:
        assert len(read(columns, text)) == 1


def test_threads_do_not_count_each_others_fields() -> None:
    values = json_format("a int, b int")
    good = packed([b'{"a":1}', b"{}", b'{"b":1,"a":null}'] * 300)
    twice = packed([b'{"a":1}', b"{}", b'{"b":1,"b":null}'] * 300)

    def outcomes(slices: tuple[bytes, np.ndarray, np.ndarray]) -> set[int | None]:
        found: set[int | None] = set()
        for _ in range(20):
            try:
                values.to_batch(*slices)
                found.add(None)
            except TableError as error:
                found.add(error.index)
        return found

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(outcomes, [good, twice, good, twice])) == [{None}, {2}, {None}, {2}]


def test_the_first_bad_row_is_named_whatever_is_wrong_with_later_ones() -> None:
    good = '{"id":1,"at":"2024-01-01"}'
    values = [good] * 50 + ['{"id":1,"at":"x"}'] + [good] * 5 + ['{"id":1,"id":1}', '{"id":"a"}']
    assert refused("id int, at date", *values).index == 50


def test_binary_is_base64() -> None:
    values = json_format("c binary")
    batch = pa.record_batch({"c": pa.array([b"\x00\xff\xfe", None, b""], pa.binary())})
    encoded = [json.loads(value) for value in values.from_batch(batch).to_pylist()]
    assert encoded == [{"c": base64.b64encode(b"\x00\xff\xfe").decode()}, {"c": None}, {"c": ""}]


def test_text_is_escaped_where_json_asks_for_it() -> None:
    texts = [chr(code) for code in range(128)] + ['\\"', '"\\', "\\n\n", "\\\\", "é\u2028😀", ""]
    batch = pa.record_batch({"c": [*texts, "".join(texts)]})
    values = json_format("c string")
    written = values.from_batch(batch).to_pylist()
    assert [json.loads(value)["c"] for value in written] == batch["c"].to_pylist()
    assert values.to_batch(*packed(written)).equals(batch)


def test_floats_are_written_so_that_any_reader_gets_them_exactly() -> None:
    batch = pa.record_batch({"c": pa.array([0.1, -0.0, 1e38], pa.float32())})
    written = json_format("c float").from_batch(batch).to_pylist()
    assert written[0] == b'{"c":0.10000000149011612}'
    assert [math.copysign(1, json.loads(value)["c"]) for value in written] == [1, -1, 1]
    assert [json.loads(value)["c"] for value in written] == batch["c"].to_pylist()


def test_small_decimals_are_written_without_exponent() -> None:
    schema = parse_columns("c decimal(20,20)")
    batch = to_batch(schema, [{"c": 0}, {"c": None}, {"c": -1}, {"c": 10**19}])
    written = make_format("json", {0: schema}, 0, ()).from_batch(batch).to_pylist()
    assert [json.loads(value)["c"] for value in written] == [
        "0.00000000000000000000",
        None,
        "-0.00000000000000000001",
        "0.10000000000000000000",
    ]


@pytest.mark.parametrize(
    ("kind", "value"),
    [("date", 2_932_897), ("date", -719_529), ("timestamp", 2**62), ("timestamp_ntz", -(2**62))],
)
def test_years_that_json_cannot_say_are_refused(kind: str, value: int) -> None:
    schema = parse_columns(f"c {kind}")
    batch = to_batch(schema, [{"c": 0}, {"c": value}])
    with pytest.raises(TableError, match="years go from 0000 to 9999") as caught:
        make_format("json", {0: schema}, 0, ()).from_batch(batch)
    assert caught.value.index == 1


def test_a_map_with_a_key_twice_is_not_written_as_an_object() -> None:
    schema = parse_columns("c array<map<string,int>>")
    values: list[Any] = [None, [[("a", 1)], [("a", 1), ("b", 2)]], [None, [("b", 1), ("b", 2)]]]
    rows = [{"c": value} for value in values]
    with pytest.raises(TableError, match="key 'b' twice") as caught:
        make_format("json", {0: schema}, 0, ()).from_batch(to_batch(schema, rows))
    assert caught.value.index == 2


@pytest.mark.parametrize("name", ['a"b', "a\\b"])
def test_names_that_need_escapes_are_refused_for_json(name: str) -> None:
    inner = pa.struct([pa.field(name, pa.int8())])
    for schema in (pa.schema([(name, pa.int8())]), pa.schema([("c", pa.list_(inner))])):
        with pytest.raises(TableError) as caught:
            make_format("json", {0: schema}, 0, ())
        assert caught.value.table_code == TableCode.invalid_schema


@pytest.mark.parametrize("element", ["{}", "null"])
def test_fields_that_are_not_there_cannot_ask_for_much_memory(element: str) -> None:
    inner = ",".join(f"f{number}:bigint" for number in range(900))
    value = b'{"c":[' + b",".join([element.encode()] * 100_000) + b"]}"
    values = json_format(f"c array<struct<{inner}>>")
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    with pytest.raises(TableError, match="write fewer rows at once"):
        values.to_batch(*packed([value]))
    assert tracemalloc.get_traced_memory()[1] < 64 * 1024 * 1024
    tracemalloc.stop()
    assert pa.total_allocated_bytes() - before < 64 * 1024 * 1024


def test_empty_rows_of_a_wide_table_cannot_ask_for_much_memory() -> None:
    values = json_format(",".join(f"f{number} bigint" for number in range(900)))
    starts = np.arange(100_000) * 2
    with pytest.raises(TableError, match="write fewer rows at once"):
        values.to_batch(b"{}" * 100_000, starts, starts + 2)


# Rows and raw bytes.


def test_rows_of_all_versions_are_read_and_the_newest_is_written() -> None:
    old, new = parse_columns("id int not null"), parse_columns("id int not null, name string")
    values = make_format("row", {0: old, 1: new}, 1, ("id",))
    assert (values.name, values.carries_keys, values.schema) == ("row", True, new)
    encoded = [model_row(old, 0, {"id": 1}), model_row(new, 1, {"id": 2, "name": "x"})]
    batch = values.to_batch(*packed(encoded))
    assert batch.to_pylist() == [{"id": 1, "name": None}, {"id": 2, "name": "x"}]
    assert values.from_batch(batch)[0].as_py() == model_row(new, 1, {"id": 1, "name": None})
    with pytest.raises(TableError) as caught:
        values.to_batch(*packed([*encoded, b"\x00\x00\x01\x00\x00\x00\x00"]))
    assert caught.value.index == 2


@pytest.mark.parametrize("kind", ["string", "binary"])
@pytest.mark.parametrize("null", ["", " not null"])
def test_raw_values_are_the_one_column_beside_the_key(kind: str, null: str) -> None:
    schema = parse_columns(f"id bigint, body {kind}{null}")
    values = make_format("raw", {0: schema}, 0, ("id",))
    assert (values.name, values.carries_keys, values.schema.names) == ("raw", False, ["body"])
    batch = values.to_batch(*packed([b"a", b"", "é".encode()], b"-"))
    assert batch.schema.equals(values.schema)
    assert values.from_batch(batch).to_pylist() == [b"a", b"", "é".encode()]
    whole = pa.record_batch({"id": [1], "body": pa.array([b"x"]).cast(batch.schema.types[0])})
    assert values.from_batch(whole).to_pylist() == [b"x"]


def test_raw_text_is_utf8() -> None:
    values = make_format("raw", {0: parse_columns("id bigint, body string")}, 0, ("id",))
    with pytest.raises(TableError, match="'body' is not UTF-8") as caught:
        values.to_batch(*packed([b"a", b"\xff"]))
    assert caught.value.index == 1


def test_a_null_is_no_raw_value() -> None:
    values = make_format("raw", {0: parse_columns("id bigint, body string")}, 0, ("id",))
    with pytest.raises(TableError, match="deletion") as caught:
        values.from_batch(pa.record_batch({"id": [1, 2], "body": ["a", None]}))
    assert caught.value.index == 1


@pytest.mark.parametrize(
    ("columns", "key"),
    [
        ("id bigint", ("id",)),
        ("id bigint, a string, b string", ("id",)),
        ("id bigint, a int", ("id",)),
        ("a array<string>", ()),
    ],
)
def test_tables_that_raw_values_cannot_hold_are_refused(columns: str, key: tuple[str, ...]) -> None:
    with pytest.raises(TableError) as caught:
        make_format("raw", {0: parse_columns(columns)}, 0, key)
    assert caught.value.table_code == TableCode.invalid_schema


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TableError) as caught:
        make_format("avro", {0: parse_columns("id int")}, 0, ())
    assert caught.value.table_code == TableCode.invalid_schema
    assert all(name in caught.value.message for name in FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_no_values_are_no_rows(name: str) -> None:
    values = make_format(name, {0: parse_columns("c string")}, 0, ())
    batch = values.to_batch(b"", np.array([], np.int64), np.array([], np.int64))
    assert (batch.num_rows, batch.schema) == (0, values.schema)
    assert len(values.from_batch(batch)) == 0
