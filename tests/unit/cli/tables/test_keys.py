"""Keys as people type them."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cli.tables.keys import key_fields, parse_key, parse_prefix, show_key
from tidemill.errors import TableError
from tidemill.tables.keys.codec import KeyCodec

UTC = dt.UTC
PAIR = [("region", pa.string()), ("id", pa.int64())]


def of(data_type: pa.DataType, text: str) -> Any:
    (value,) = parse_key(text, [("k", data_type)])
    return value


@pytest.mark.parametrize(
    ("data_type", "text", "value"),
    [
        (pa.int64(), "42", 42),
        (pa.int64(), "-7", -7),
        (pa.int64(), "[42]", 42),
        (pa.int64(), '{"k":"42"}', 42),
        (pa.string(), "eu west", "eu west"),
        (pa.string(), "", ""),
        (pa.string(), '"eu"', '"eu"'),
        (pa.string(), '["[odd]"]', "[odd]"),
        (pa.binary(), "hi", b"hi"),
        (pa.binary(), "\udcff", b"\xff"),
        (pa.binary(), '["AP8="]', b"\0\xff"),
        (pa.bool_(), "true", True),
        (pa.bool_(), "[false]", False),
        (pa.date32(), "2025-01-31", dt.date(2025, 1, 31)),
        (
            pa.timestamp("us", "UTC"),
            "2025-01-31T12:00:00.25Z",
            dt.datetime(2025, 1, 31, 12, 0, 0, 250_000, UTC),
        ),
        (pa.timestamp("us"), "2025-01-31T12:00", dt.datetime(2025, 1, 31, 12)),  # noqa: DTZ001 - local time
        (pa.decimal128(10, 2), "12.50", Decimal("12.50")),
        (pa.decimal128(10, 2), "[12.1]", Decimal("12.1")),
    ],
)
def test_text_is_read_as_the_type_of_its_column(data_type: pa.DataType, text: str, value: Any) -> None:
    assert of(data_type, text) == value


@pytest.mark.parametrize(
    ("data_type", "text", "said"),
    [
        (pa.int64(), "4.5", "a whole number like 42"),
        (pa.int64(), "x", "key column 'k' (bigint)"),
        (pa.int64(), "[true]", "a whole number"),
        (pa.int64(), "[4.0]", "a whole number"),
        (pa.int64(), "[null]", "a whole number"),
        (pa.bool_(), "yes", "true or false"),
        (pa.string(), "[5]", "give text"),
        (pa.string(), "[odd]", "begins like JSON and is none"),
        (pa.string(), "[" * 100_000, "begins like JSON and is none"),
        (pa.binary(), '["aG!k="]', "base64"),
        (pa.date32(), "31.1.2025", "a date like 2025-01-31"),
        (pa.timestamp("us", "UTC"), "2025-01-31T12:00", "with a zone"),
        (pa.timestamp("us"), "2025-01-31T12:00Z", "without zone"),
        (pa.timestamp("us"), "2025-01-31T12:00:00.1234567", "a time like"),
        (pa.decimal128(10, 2), "NaN", "a number like 12.50"),
        (pa.decimal128(10, 2), "1,5", "a number like 12.50"),
        (pa.int64(), "[1,2]", "2 values instead of 1"),
        (pa.int64(), "[]", "0 values instead of 1"),
        (pa.int64(), '{"id":1}', "names id"),
    ],
)
def test_text_that_is_no_value_is_refused_with_what_to_type(
    data_type: pa.DataType, text: str, said: str
) -> None:
    with pytest.raises(TableError) as caught:
        of(data_type, text)
    assert caught.value.name == "KEY_REFUSED"
    assert said in caught.value.message
    assert len(caught.value.message) < 400


def test_key_of_several_columns_is_an_array_or_an_object_in_any_order() -> None:
    assert parse_key('["eu",42]', PAIR) == ("eu", 42)
    assert parse_key('{"id":42,"region":"eu"}', PAIR) == ("eu", 42)
    with pytest.raises(TableError, match=r"1 of 2 values.*\[\"eu\",42\].*\{\"region\":\"eu\",\"id\":42\}"):
        parse_key("eu", PAIR)


def test_prefix_has_the_first_columns_only() -> None:
    assert parse_prefix("eu", PAIR) == ("eu",)
    assert parse_prefix('["eu"]', PAIR) == ("eu",)
    assert parse_prefix('{"region":"eu"}', PAIR) == ("eu",)
    with pytest.raises(TableError, match="names id"):
        parse_prefix('{"id":42}', PAIR)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (("eu",), "eu"),
        (("[eu]",), '["[eu]"]'),
        (("a\x1b\x7f",), r'["a\u001b\u007f"]'),
        ((b"hi",), '["aGk="]'),
        ((True,), "true"),
        (("eu", 42, True), '["eu",42,true]'),
    ],
)
def test_key_is_shown_as_it_is_typed(values: tuple[Any, ...], shown: str) -> None:
    assert show_key(values) == shown


VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"])),
    pa.binary(): st.binary(),
    pa.date32(): st.dates(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(UTC)),
    pa.timestamp("us"): st.datetimes(),
    pa.decimal128(20, 3): st.decimals(-(10**16), 10**16, places=3),
}
TYPES = st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=4)


@given(TYPES.flatmap(lambda types: st.tuples(st.just(types), st.tuples(*(VALUES[each] for each in types)))))
def test_key_that_is_shown_can_be_typed_again(key: tuple[list[pa.DataType], tuple[Any, ...]]) -> None:
    types, values = key
    names = [f"c{place}" for place in range(len(types))]
    schema = pa.schema([pa.field(name, each, False) for name, each in zip(names, types, strict=True)])
    codec = KeyCodec(schema, names, "json")
    shown = show_key(values)
    assert shown.isprintable()
    typed = parse_key(shown, key_fields(schema, names))
    assert codec.canonical(codec.columns_from([typed])).equals(codec.canonical(codec.columns_from([values])))
