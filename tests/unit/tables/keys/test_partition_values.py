"""Which columns can part a table, and what the partitions are called."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import TableCode, TableError
from tidemill.tables.keys.partition_values import (
    check_partition_column,
    check_partition_value,
    partition_texts,
)

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("day", pa.date32(), nullable=False),
        pa.field("region", pa.string(), nullable=False),
        pa.field("flag", pa.bool_(), nullable=False),
        pa.field("small", pa.int8(), nullable=False),
        pa.field("maybe", pa.string()),
        pa.field("amount", pa.float64(), nullable=False),
        pa.field("at", pa.timestamp("us"), nullable=False),
        pa.field("data", pa.binary(), nullable=False),
        pa.field("many", pa.list_(pa.string()), nullable=False),
        pa.field("price", pa.decimal128(10, 2), nullable=False),
    ]
)


@pytest.mark.parametrize("name", ["id", "day", "region", "flag", "small"])
def test_strings_integers_dates_and_booleans_can_part_a_table(name: str) -> None:
    check_partition_column(SCHEMA, name, ())
    check_partition_column(SCHEMA, name, ("id", name))


@pytest.mark.parametrize(
    ("name", "primary_key", "message"),
    [
        ("absent", (), "'absent' is not in the schema"),
        ("maybe", (), "'maybe' must not be nullable"),
        ("region", ("id",), "'region' must be part of the primary key"),
        *((name, (), "cannot be partitioned by") for name in ("amount", "at", "data", "many", "price")),
    ],
)
def test_other_columns_cannot(name: str, primary_key: tuple[str, ...], message: str) -> None:
    with pytest.raises(TableError, match=message) as error:
        check_partition_column(SCHEMA, name, primary_key)
    assert error.value.table_code is TableCode.invalid_schema


@pytest.mark.parametrize(
    ("values", "kind", "texts"),
    [
        (["eu", "us-east_1"], pa.string(), ["eu", "us-east_1"]),
        ([0, -5, 2**63 - 1], pa.int64(), ["0", "-5", "9223372036854775807"]),
        ([-128], pa.int8(), ["-128"]),
        ([dt.date(2024, 2, 29), dt.date(1, 1, 1)], pa.date32(), ["2024-02-29", "0001-01-01"]),
        ([True, False], pa.bool_(), ["true", "false"]),
    ],
)
def test_a_value_names_its_partition(values: list[Any], kind: pa.DataType, texts: list[str]) -> None:
    assert partition_texts(pa.array(values, kind)).to_pylist() == texts


def test_a_column_without_rows_names_no_partition() -> None:
    assert partition_texts(pa.array([], pa.int64())).to_pylist() == []


@pytest.mark.parametrize("text", ["", "a b", "a.b", "a/b", "ü", "a\n", "x" * 81])
def test_a_text_that_cannot_be_part_of_a_topics_name_is_refused_with_its_row(text: str) -> None:
    with pytest.raises(TableError, match="cannot name a partition") as error:
        partition_texts(pa.array(["eu", text, "also bad"]))
    assert (error.value.table_code, error.value.index) == (TableCode.row_refused, 1)


@given(st.text(max_size=5) | st.from_regex(r"[A-Za-z0-9_-]{78,82}", fullmatch=True))
def test_a_value_is_right_for_rows_exactly_if_it_is_right_for_requests(text: str) -> None:
    def passes(check: Any, *value: Any) -> bool:
        try:
            check(*value)
        except TableError as error:
            assert error.table_code is TableCode.row_refused
            return False
        return True

    assert passes(partition_texts, pa.array([text])) == passes(check_partition_value, text, pa.string())


@given(st.sampled_from(["string", "int", "bool", "day"]), st.data())
def test_different_values_have_different_partitions(kind: str, data: st.DataObject) -> None:
    strategy, arrow_type = {
        "string": (st.from_regex(r"[A-Za-z0-9_-]{1,80}", fullmatch=True), pa.string()),
        "int": (st.integers(-(2**63), 2**63 - 1), pa.int64()),
        "bool": (st.booleans(), pa.bool_()),
        "day": (st.dates(), pa.date32()),
    }[kind]
    values = data.draw(st.lists(strategy, unique=True, max_size=8))
    assert len(set(partition_texts(pa.array(values, arrow_type)).to_pylist())) == len(values)


@pytest.mark.parametrize(
    ("value", "data_type"),
    [
        ("2025-1-1", pa.date32()),
        ("soon", pa.date32()),
        ("01", pa.int32()),
        ("+1", pa.int64()),
        ("True", pa.bool_()),
    ],
)
def test_a_partition_that_no_row_can_be_in_is_refused(value: str, data_type: pa.DataType) -> None:
    with pytest.raises(TableError) as refused:
        check_partition_value(value, data_type)
    assert refused.value.table_code == TableCode.row_refused


@pytest.mark.parametrize(
    ("value", "data_type"),
    [("2025-01-01", pa.date32()), ("-5", pa.int32()), ("true", pa.bool_()), ("eu", pa.string())],
)
def test_a_partition_that_rows_can_be_in_is_taken(value: str, data_type: pa.DataType) -> None:
    check_partition_value(value, data_type)
