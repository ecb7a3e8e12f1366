"""The columns of a read, as Arrow types and as Spark types.

A table has the types that Spark has, so that every column has exactly one Spark type and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from tidemill.spark.errors import InvalidOption, SchemaMismatch
from tidemill.tables.rows.ddl import describe_type

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = (
    "KAFKA_SCHEMA",
    "METADATA_SCHEMA",
    "TIMESTAMP",
    "chosen_columns",
    "kafka_schema",
    "requested_schema",
    "to_spark",
    "with_changes",
)

TIMESTAMP: Final = pa.timestamp("us", "UTC")
_HEADER: Final = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
#: The columns of a record, as in Spark's Kafka source.
KAFKA_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", TIMESTAMP),
        pa.field("timestampType", pa.int32()),
    ]
)
HEADERS_FIELD: Final = pa.field("headers", pa.list_(pa.field("element", _HEADER)))
#: Columns beside those of a row: what happened to it, and where in the log.
METADATA_SCHEMA: Final = pa.schema(
    [
        pa.field("_tidemill_op", pa.string()),
        pa.field("_tidemill_bucket", pa.int32()),
        pa.field("_tidemill_offset", pa.int64()),
        pa.field("_tidemill_timestamp", TIMESTAMP),
    ]
)


def kafka_schema(*, headers: bool) -> pa.Schema:
    """The columns of records of plain topics."""
    return KAFKA_SCHEMA.append(HEADERS_FIELD) if headers else KAFKA_SCHEMA


def with_changes(schema: pa.Schema, primary_key: Sequence[str]) -> pa.Schema:
    """A table's columns in a stream of its changes. All but the key are nullable: deletions have no more."""
    lenient = [
        field.with_nullable(field.name not in primary_key) if primary_key else field for field in schema
    ]
    return pa.schema([*lenient, *METADATA_SCHEMA])


def to_spark(schema: pa.Schema) -> StructType:
    """An Arrow schema in Spark's types."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def chosen_columns(schema: pa.Schema, names: Sequence[str], what: str) -> pa.Schema:
    """The columns that were asked for, in that order; all if none was named."""
    unknown = [name for name in names if schema.get_field_index(name) < 0]
    if unknown:
        raise InvalidOption(
            f"option columns: {what} has no column {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(schema.names)}"
        )
    return pa.schema([schema.field(name) for name in names]) if names else schema


def requested_schema(wanted: StructType, available: pa.Schema, what: str) -> pa.Schema:
    """The Arrow schema that batches must have for the columns that Spark wants.

    A schema that a user gave may leave columns out; their types are those that are there.
    """
    from pyspark.sql.pandas.types import to_arrow_schema

    target = to_arrow_schema(wanted, timezone="UTC")
    problems = []
    for field in target:
        index = available.get_field_index(field.name)
        if index < 0:
            problems.append(f"there is no column {field.name!r} ({', '.join(available.names)} are there)")
            continue
        found = available.field(index)
        if found.type != field.type:
            problems.append(f"column {field.name!r} is {_words(found.type)}, not {_words(field.type)}")
        elif found.nullable and not field.nullable:
            problems.append(f"column {field.name!r} can be null")
    if problems:
        raise SchemaMismatch(
            f"the schema that was given does not fit {what}: {'; '.join(problems)}. Leave .schema(...) out, "
            "or "
            "give a part of the columns with their types"
        )
    return target


def _words(data_type: Any) -> str:
    try:
        return describe_type(data_type)
    except Exception:  # noqa: BLE001  # whatever it is, it only has to be shown
        return str(data_type)
