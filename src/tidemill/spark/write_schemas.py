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
from tidemill.tables.types import RESERVED_PREFIX, conform, describe_type, normalise_schema

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

#: As streams of changes name it.
OPERATION_COLUMN: Final = "_tidemill_op"
#: What reading a topic gives beside the columns that writing takes: left out, so that topics can be copied.
_LEFT_OUT: Final = frozenset({"offset", "timestamptype"})


@dataclass(frozen=True, slots=True)
class TableColumns:
    """Which columns of the DataFrame become which of the table, by place, and which says the operation."""

    places: tuple[int, ...]
    names: tuple[str, ...]
    operation: int | None


@dataclass(frozen=True, slots=True)
class TopicColumns:
    """Where the columns of records are in the DataFrame."""

    value: int
    key: int | None
    headers: int | None
    partition: int | None
    timestamp: int | None
    topic: int | None


def arrow_schema(schema: StructType) -> pa.Schema:
    """The DataFrame's columns as its rows come to tasks."""
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")
    except Exception as error:
        raise SchemaMismatch(
            f"the DataFrame has a type that cannot be written: {error}; cast it, or leave the column out"
        ) from error


# --- tables


def fit_table(given: pa.Schema, table: TableDefinition, operation_column: str | None) -> TableColumns:
    """How the columns of a DataFrame become those of a table. Raises ``SchemaMismatch`` if they do not."""
    operation = _operation(given, operation_column)
    known = {field.name.lower(): field for field in table.schema}
    found: dict[str, int] = {}
    problems: list[str] = []
    for place, field in enumerate(given):
        target = known.get(field.name.lower())
        if target is None:
            if place != operation and not field.name.lower().startswith(RESERVED_PREFIX):
                problems.append(
                    f"column {field.name!r} is not in the table ({', '.join(table.schema.names)} are)"
                )
        elif target.name in found:
            problems.append(f"column {target.name!r} is there twice")
        else:
            found[target.name] = place
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
                for place, field in enumerate(given)
                if place != operation and not field.name.lower().startswith(RESERVED_PREFIX)
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
    places = [
        place
        for place, field in enumerate(given.names)
        if field.lower() == (name or OPERATION_COLUMN).lower()
    ]
    if not places:
        if name is None:
            return None
        raise SchemaMismatch(
            f"there is no column {name!r}, which option operationColumn names; the DataFrame has "
            f"{', '.join(given.names)}"
        )
    kind = given.field(places[0]).type
    if not arrow.is_string(kind) and not arrow.is_large_string(kind):
        raise SchemaMismatch(
            f"column {given.names[places[0]]!r} says what happens to each row, as text (upsert or delete); "
            f"it is {describe_type(kind)}"
        )
    return places[0]


def _type_problem(kind: pa.DataType, target: pa.Field) -> list[str]:
    # Without rows: whether values of the one type can ever be values of the other.
    try:
        conform(pa.table([pa.array([], kind)], names=[target.name]), pa.schema([target.with_nullable(True)]))
    except TableError:
        return [
            f"column {target.name!r} is {describe_type(kind)}, and the table has {describe_type(target.type)}"
        ]
    return []


def _example(given: pa.Schema, wanted: pa.Schema) -> str:
    """What would fit, as arguments of ``selectExpr``."""
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
    """Where the columns of records are. Raises ``SchemaMismatch`` if they are not those of Kafka's sink."""
    places: dict[str, int] = {}
    problems: list[str] = []
    for place, field in enumerate(given):
        name = field.name.lower()
        if name in places:
            problems.append(f"column {name!r} is there twice")
        elif name in _RECORD_TYPES:
            places[name] = place
            wanted, fits = _RECORD_TYPES[name]
            if not fits(field.type):
                problems.append(f"column {name!r} is {describe_type(field.type)}; it is {wanted}")
        elif name not in _LEFT_OUT and not name.startswith(RESERVED_PREFIX):
            problems.append(f"column {field.name!r} is not one of a record")
    if "value" not in places:
        problems.append("column 'value' is missing")
    if topic is None and "topic" not in places:
        problems.append("nothing says which topic: give the option topic, or a column 'topic'")
    if problems:
        where = "topics" if topic is None else f"topic {topic!r}"
        raise SchemaMismatch(
            f"the DataFrame cannot be written to {where}: {'; '.join(problems)}. Records have the columns "
            "value and, if wanted, key, headers, partition, timestamp and topic; rows of other columns can "
            'be written as JSON: .selectExpr("to_json(struct(*)) AS value")'
        )
    return TopicColumns(
        places["value"],
        places.get("key"),
        places.get("headers"),
        places.get("partition"),
        places.get("timestamp"),
        None if topic is not None else places["topic"],
    )


def _is_octets(kind: pa.DataType) -> bool:
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
        _is_text(fields[0].type) and _is_octets(fields[1].type)
    )


_RECORD_TYPES: Final = {
    "value": ("string or binary", _is_octets),
    "key": ("string or binary", _is_octets),
    "headers": ("array<struct<key:string,value:binary>>", _are_headers),
    "partition": ("int", arrow.is_integer),
    "timestamp": ("timestamp", _is_instant),
    "topic": ("string", _is_text),
}
