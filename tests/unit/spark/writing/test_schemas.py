"""Whether a DataFrame fits a table or a topic: every problem in one message, and what to do."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType, YearMonthIntervalType

from tidemill.spark.errors import SchemaMismatch
from tidemill.spark.writing.schemas import (
    arrow_schema,
    columns_in_words,
    created_schema,
    fit_table,
    fit_topic,
)
from tidemill.tables.definition import TableDefinition
from tidemill.tables.keys.routing import BucketMap
from tidemill.tables.rows.ddl import read_columns
from tidemill.tables.rows.types import parse_columns

WIDE = (
    "id bigint not null, small smallint, real float, price decimal(10,2), flag boolean, day date, "
    "at timestamp, local timestamp_ntz, data binary, tags array<string>, counts map<string,int>, "
    "who struct<name:string,age:int>"
)


def definition(columns: str, primary_key: tuple[str, ...] = ("id",)) -> TableDefinition:
    return TableDefinition(
        name="shop.orders", table_id=1, schemas=(parse_columns(columns),), primary_key=primary_key, buckets=1,
        bucket_map=BucketMap.hashed(1), row_format="row", key_format="composite", partition_column=None,
        partitions=(), properties={}, comment=None, created_ms=0,
    )  # fmt: skip


def spark(ddl: str) -> pa.Schema:
    frame = from_arrow_schema(pa.schema(read_columns(ddl)), prefer_timestamp_ntz=True)
    return arrow_schema(frame)


def refusal(given: str, columns: str, operation: str | None = None, **table: tuple[str, ...]) -> str:
    with pytest.raises(SchemaMismatch) as caught:
        fit_table(spark(given), definition(columns, **table), operation)
    return str(caught.value)


def test_all_types_of_spark_fit_their_own() -> None:
    fitted = fit_table(spark(WIDE), definition(WIDE), None)
    assert fitted.names == tuple(parse_columns(WIDE).names)
    assert fitted.indexes == tuple(range(len(fitted.names)))


def test_columns_are_found_in_any_order_and_case() -> None:
    fitted = fit_table(spark("Name string, ID bigint"), definition("id bigint not null, name string"), None)
    assert dict(zip(fitted.names, fitted.indexes, strict=True)) == {"name": 0, "id": 1}


def test_a_column_that_may_fit_is_left_to_the_values() -> None:
    fitted = fit_table(spark("id bigint, n bigint"), definition("id bigint not null, n int"), None)
    assert tuple(fitted.names) == ("id", "n")


def test_everything_that_does_not_fit_is_told_at_once() -> None:
    message = refusal(
        "ID string, more int, n double", "id bigint not null, n int, must string not null, may date"
    )
    assert "column 'id' is string, and the table has bigint" in message
    assert "column 'more' is not in the table (id, n, must, may are)" in message
    assert "column 'n' is double, and the table has int" in message
    assert "column 'must' is missing, and it is not nullable" in message
    assert message.endswith('.selectExpr("CAST(id AS bigint) AS id", "CAST(n AS int) AS n", "... AS must")')


def test_a_column_that_is_there_twice_is_told() -> None:
    assert "column 'id' is there twice" in refusal("id bigint, ID bigint", "id bigint not null")


def test_the_columns_of_changes_are_left_out_but_for_the_operation() -> None:
    changes = "id bigint, _tidemill_op string, _tidemill_bucket int, _tidemill_offset bigint"
    fitted = fit_table(spark(changes), definition("id bigint not null"), None)
    assert (fitted.names, fitted.operation) == (("id",), 1)


def test_a_named_column_says_the_operation_and_is_written_only_if_the_table_has_it() -> None:
    given = spark("id bigint, Op string")
    left_out = fit_table(given, definition("id bigint not null"), "op")
    assert (left_out.names, left_out.operation) == (("id",), 1)
    written = fit_table(given, definition("id bigint not null, op string"), "op")
    assert (written.names, written.operation) == (("id", "op"), 1)


def test_deletions_need_the_key_only() -> None:
    columns = "id bigint not null, must string not null"
    assert fit_table(spark("id bigint, op string"), definition(columns), "op").names == ("id",)
    assert "column 'id' is missing" in refusal("must string, op string", columns, "op")


def test_an_operation_column_is_there_and_text() -> None:
    assert "there is no column 'op'" in refusal("id bigint", "id bigint not null", "op")
    assert "it is int" in refusal("id bigint, op int", "id bigint not null", "op")


def test_a_type_that_no_table_has_is_told() -> None:
    with pytest.raises(SchemaMismatch, match="cannot be written"):
        arrow_schema(StructType().add("i", YearMonthIntervalType()))


def test_a_new_table_has_the_columns_of_the_frame() -> None:
    given = spark("id bigint not null, `odd name` string, _tidemill_op string, _tidemill_offset bigint")
    schema = created_schema(given, None)
    assert columns_in_words(schema) == "id bigint not null, `odd name` string"
    assert parse_columns(columns_in_words(schema)) == schema


# --- topics


def test_records_have_the_columns_of_kafkas_sink() -> None:
    columns = fit_topic(
        spark("value string, key binary, headers array<struct<key:string,value:binary>>, partition int, "
              "timestamp timestamp, topic string"), None
    )  # fmt: skip
    assert (columns.value, columns.key, columns.headers) == (0, 1, 2)
    assert (columns.partition, columns.timestamp, columns.topic) == (3, 4, 5)


def test_what_reading_a_topic_gives_can_be_written_to_another() -> None:
    given = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, " \
            "timestampType int"  # fmt: skip
    assert fit_topic(spark(given), "copy").topic is None


def test_columns_that_are_no_records_are_told_at_once() -> None:
    with pytest.raises(SchemaMismatch) as caught:
        fit_topic(spark("id bigint, key int, headers array<string>"), "t")
    message = str(caught.value)
    assert "cannot be written to topic 't'" in message
    for problem in (
        "column 'id' is not one of a record",
        "column 'key' is int; it is string or binary",
        "column 'headers' is array<string>",
        "column 'value' is missing",
        "to_json(struct(*)) AS value",
    ):
        assert problem in message


def test_without_a_topic_a_column_names_it() -> None:
    with pytest.raises(SchemaMismatch, match="nothing says which topic"):
        fit_topic(spark("value string"), None)
