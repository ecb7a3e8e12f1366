"""Whether a DataFrame fits what it is written to: looked at on the driver, before anything is written.

- Everything that does not fit is told in one message, with what to do.
- Names are found without regard to case, as in Spark.
- Columns that Tidemill itself adds to what it returns (``_tidemill_…``) are left out, so that the changes of
  one table can be written to another; ``_tidemill_op`` says what happens to each row.
- A column that only sometimes fits (a bigint for an int, a nullable column for one that is not) is accepted:
  tasks look at the values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyarrow import types as arrow

from tidemill.errors import TableError
from tidemill.spark.errors import SchemaMismatch
from tidemill.tables.definition import TableDefinition
from tidemill.tables.rows.types import RESERVED_PREFIX, conform, describe_type, normalise_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = (
    "OPERATION_COLUMN",
    "TableColumns",
    "TopicColumns",
    "arrow_schema",
    "columns_in_words",
    "created_schema",
    "fit_table",
    "fit_topic",
)

#: The column of a stream of changes that says what happened to a row.
OPERATION_COLUMN: Final = "_tidemill_op"
#: What reading a topic gives beside the columns that writing takes: left out, so that topics can be copied.
_LEFT_OUT: Final = frozenset({"offset", "timestamptype"})


@dataclass(frozen=True, slots=True)
class TableColumns:
    """Indexes of the DataFrame's columns that become the table's, and of the one with the operation."""

    indexes: tuple[int, ...]
    names: tuple[str, ...]
    operation: int | None


@dataclass(frozen=True, slots=True)
class TopicColumns:
    """Indexes of the DataFrame's columns that become the parts of records."""

    value: int
    key: int | None
    headers: int | None
    partition: int | None
    timestamp: int | None
    topic: int | None


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema in which a DataFrame's rows come to tasks."""
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")
    except Exception as error:
        raise SchemaMismatch(
            f"the DataFrame has a type that cannot be written: {error}; cast it, or leave the column out"
        ) from error


# --- tables


def fit_table(given: pa.Schema, table: TableDefinition, operation_column: str | None) -> TableColumns:
    """Match a DataFrame's columns with a table's. Raises ``SchemaMismatch`` if they do not fit."""
    operation = _operation(given, operation_column)
    known = {field.name.lower(): field for field in table.schema}
    found: dict[str, int] = {}
    problems: list[str] = []
    for index, field in enumerate(given):
        target = known.get(field.name.lower())
        if target is None:
            if index != operation and not field.name.lower().startswith(RESERVED_PREFIX):
                problems.append(
                    f"column {field.name!r} is not in the table ({', '.join(table.schema.names)} are)"
                )
        elif target.name in found:
            problems.append(f"column {target.name!r} is there twice")
        else:
            found[target.name] = index
            problems += _type_problem(field.type, target)
    needed = table.primary_key if operation is not None and table.primary_key else table.schema.names
    for name in needed:
        if name not in found and not table.schema.field(name).nullable:
            problems.append(f"column {name!r} is missing, and it is not nullable")
    if problems:
        raise SchemaMismatch(
            f"the DataFrame does not fit table {table.name!r}: {'; '.join(problems)}. Bring it to the "
            f"table's columns before it is written: .selectExpr({_example(given, table.schema)})"
        )
    return TableColumns(tuple(found.values()), tuple(found), operation)


def created_schema(given: pa.Schema, operation_column: str | None) -> pa.Schema:
    """The columns of a table that is made for a DataFrame."""
    operation = _operation(given, operation_column)
    return normalise_schema(
        pa.schema(
            [
                field
                for index, field in enumerate(given)
                if index != operation and not field.name.lower().startswith(RESERVED_PREFIX)
            ]
        )
    )


def columns_in_words(schema: pa.Schema) -> str:
    """Columns as ``tidemill table create --columns`` takes them."""
    return ", ".join(
        f"{_quoted(field.name)} {describe_type(field.type)}{'' if field.nullable else ' not null'}"
        for field in schema
    )


def _operation(given: pa.Schema, name: str | None) -> int | None:
    indexes = [
        index
        for index, field in enumerate(given.names)
        if field.lower() == (name or OPERATION_COLUMN).lower()
    ]
    if not indexes:
        if name is None:
            return None
        raise SchemaMismatch(
            f"there is no column {name!r}, which option operationColumn names; the DataFrame has "
            f"{', '.join(given.names)}"
        )
    kind = given.field(indexes[0]).type
    if not arrow.is_string(kind) and not arrow.is_large_string(kind):
        raise SchemaMismatch(
            f"column {given.names[indexes[0]]!r} says what happens to each row, as text (upsert or delete); "
            f"it is {describe_type(kind)}"
        )
    return indexes[0]


def _type_problem(kind: pa.DataType, target: pa.Field) -> list[str]:
    # An empty array shows whether values of one type can ever become values of the other.
    try:
        conform(pa.table([pa.array([], kind)], names=[target.name]), pa.schema([target.with_nullable(True)]))
    except TableError:
        return [
            f"column {target.name!r} is {describe_type(kind)}, and the table has {describe_type(target.type)}"
        ]
    return []


def _example(given: pa.Schema, wanted: pa.Schema) -> str:
    """Columns that would fit, as arguments of ``selectExpr``."""
    types = {field.name.lower(): field.type for field in given}
    terms = []
    for field in wanted:
        name, kind = _quoted(field.name), types.get(field.name.lower())
        if kind is None and not field.nullable:
            terms.append(f"... AS {name}")
        elif kind is not None:
            fits = not _type_problem(kind, field)
            terms.append(name if fits else f"CAST({name} AS {describe_type(field.type)}) AS {name}")
    return ", ".join(f'"{term}"' for term in terms)


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else "`" + name.replace("`", "``") + "`"


# --- topics


def fit_topic(given: pa.Schema, topic: str | None) -> TopicColumns:
    """Find the columns of records. Raises ``SchemaMismatch`` if they are not those of Kafka's sink."""
    indexes: dict[str, int] = {}
    problems: list[str] = []
    for index, field in enumerate(given):
        name = field.name.lower()
        if name in indexes:
            problems.append(f"column {name!r} is there twice")
        elif name in _RECORD_TYPES:
            indexes[name] = index
            wanted, fits = _RECORD_TYPES[name]
            if not fits(field.type):
                problems.append(f"column {name!r} is {describe_type(field.type)}; it is {wanted}")
        elif name not in _LEFT_OUT and not name.startswith(RESERVED_PREFIX):
            problems.append(f"column {field.name!r} is not one of a record")
    if "value" not in indexes:
        problems.append("column 'value' is missing")
    if topic is None and "topic" not in indexes:
        problems.append("nothing says which topic: give the option topic, or a column 'topic'")
    if problems:
        where = "topics" if topic is None else f"topic {topic!r}"
        raise SchemaMismatch(
            f"the DataFrame cannot be written to {where}: {'; '.join(problems)}. Records have the columns "
            "value and, if wanted, key, headers, partition, timestamp and topic; rows of other columns can "
            'be written as JSON: .selectExpr("to_json(struct(*)) AS value")'
        )
    return TopicColumns(
        indexes["value"],
        indexes.get("key"),
        indexes.get("headers"),
        indexes.get("partition"),
        indexes.get("timestamp"),
        None if topic is not None else indexes["topic"],
    )


def _is_binary(kind: pa.DataType) -> bool:
    return _is_text(kind) or bool(arrow.is_binary(kind) or arrow.is_large_binary(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(arrow.is_string(kind) or arrow.is_large_string(kind))


def _is_instant(kind: pa.DataType) -> bool:
    return bool(arrow.is_timestamp(kind) and kind.tz is not None)


def _are_headers(kind: pa.DataType) -> bool:
    if not arrow.is_list(kind) or not arrow.is_struct(kind.value_type):
        return False
    fields: Sequence[pa.Field] = list(kind.value_type)
    return [field.name for field in fields] == ["key", "value"] and (
        _is_text(fields[0].type) and _is_binary(fields[1].type)
    )


_RECORD_TYPES: Final = {
    "value": ("string or binary", _is_binary),
    "key": ("string or binary", _is_binary),
    "headers": ("array<struct<key:string,value:binary>>", _are_headers),
    "partition": ("int", arrow.is_integer),
    "timestamp": ("timestamp", _is_instant),
    "topic": ("string", _is_text),
}
