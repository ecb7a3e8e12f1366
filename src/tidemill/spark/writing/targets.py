"""Targets of a write: a table, a topic, or topics that a column names. Found and checked on the driver.

A ``Target`` goes to the tasks: plain values, no connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from tidemill.client.tables.table import AsyncTable
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError
from tidemill.spark.connection import Connected
from tidemill.spark.errors import InvalidOption, SchemaMismatch
from tidemill.spark.writing.options import WriteOptions
from tidemill.spark.writing.rows import RowsOut, TableOut, TopicOut
from tidemill.spark.writing.schemas import (
    TableColumns,
    TopicColumns,
    arrow_schema,
    columns_in_words,
    created_schema,
    fit_table,
    fit_topic,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ("TableTarget", "Target", "TopicTarget", "open_target")


@dataclass(frozen=True, slots=True)
class TableTarget:
    """A table, and how a DataFrame's columns become its own."""

    table: str
    table_id: int
    columns: TableColumns
    is_keyed: bool

    @property
    def name(self) -> str:
        """The target's name in messages to people."""
        return f"table {self.table!r}"

    @property
    def title(self) -> str:
        """The target's name as a part of the name of a job."""
        return f"table:{self.table}"

    async def opened(self, link: Connected) -> RowsOut:
        """Open the table for a task that writes rows."""
        table = await link.client.table(self.table)
        if table.definition.table_id != self.table_id:
            raise TableError(
                TableCode.table_not_found,
                f"table {self.table!r} was dropped during the write, and is another one now: write again",
            )
        return TableOut(table, self.columns)


@dataclass(frozen=True, slots=True)
class TopicTarget:
    """A topic; or, if its name is None, the topics that a column names."""

    topic: str | None
    columns: TopicColumns
    is_keyed: bool = False

    @property
    def name(self) -> str:
        """The target's name in messages to people."""
        return "a topic" if self.topic is None else f"topic {self.topic!r}"

    @property
    def title(self) -> str:
        """The target's name as a part of the name of a job."""
        return "topics" if self.topic is None else f"topic:{self.topic}"

    async def opened(self, link: Connected) -> RowsOut:
        """Make what a task writes records with."""
        return TopicOut(link, self.topic, self.columns)


Target = TableTarget | TopicTarget


async def open_target(link: Connected, options: WriteOptions, schema: StructType) -> Target:
    """Find what the options name. Raises ``TidemillError`` if it is missing or the rows do not fit."""
    given = arrow_schema(schema)
    table = await _table(link, options, given)
    if table is not None:
        _check_key(table, options)
        columns = fit_table(given, table.definition, options.operation_column)
        return TableTarget(table.name, table.definition.table_id, columns, table.definition.has_primary_key)
    if options.operation_column is not None:
        raise InvalidOption("option operationColumn is for tables: a deletion in a topic is a null value")
    topic = options.topic or options.path
    if topic is None and "topic" not in (name.lower() for name in given.names):
        raise InvalidOption(
            'say where to write: save("database.table"), or one of the options table and topic, or a column '
            "'topic' in every row"
        )
    if topic is not None:
        await _check_topic(link, topic, given, options)
    return TopicTarget(topic, fit_topic(given, topic))


async def _table(link: Connected, options: WriteOptions, given: pa.Schema) -> AsyncTable | None:
    """The table that is meant, which is created if that is wanted; None if it is no table."""
    name = options.table_name
    if name is None:
        return None
    try:
        return await link.client.table(name)
    except TableError as error:
        missing = (TableCode.table_not_found, TableCode.database_not_found)
        # A path may be the name of a topic, which need not be one that tables can have.
        no_name = options.path is not None and error.table_code is TableCode.invalid_schema
        if error.table_code not in missing and not no_name:
            raise
    if options.create_table:
        return await _created(link, name, options, given)
    if options.path is not None:
        return None
    raise _no_table(name, options, given)


async def _created(link: Connected, name: str, options: WriteOptions, given: pa.Schema) -> AsyncTable:
    schema = created_schema(given, options.operation_column)
    unknown = [column for column in options.primary_key if column not in schema.names]
    if unknown:
        raise SchemaMismatch(
            f"option primaryKey names {', '.join(map(repr, unknown))}, which the DataFrame does not have; it "
            f"has {', '.join(schema.names)}"
        )
    return await link.client.create_table(
        name, schema, primary_key=options.primary_key, buckets=options.buckets, if_not_exists=True
    )


def _check_key(table: AsyncTable, options: WriteOptions) -> None:
    if options.primary_key and options.primary_key != table.primary_key:
        key = f"({', '.join(table.primary_key)})" if table.primary_key else "none"
        raise InvalidOption(
            f"option primaryKey is ({', '.join(options.primary_key)}), and table {table.name!r} is there "
            f"with another one: {key}; leave the option out, or write to another table"
        )


async def _check_topic(link: Connected, topic: str, given: pa.Schema, options: WriteOptions) -> None:
    try:
        await link.cluster.topic(topic)
    except ApiError as error:
        if error.code is not ErrorCode.unknown_topic_or_partition:
            raise
        if options.path is not None and "value" not in (name.lower() for name in given.names):
            raise _no_table(topic, options, given) from None
        what = "no table and no topic" if options.path is not None else "no topic"
        raise ApiError(
            ErrorCode.unknown_topic_or_partition,
            f"there is {what} {topic!r}; create it with: tidemill topic create {topic} --partitions 4",
        ) from None


def _no_table(name: str, options: WriteOptions, given: pa.Schema) -> TableError:
    columns = columns_in_words(created_schema(given, options.operation_column))
    key = ",".join(options.primary_key) or "COLUMN"
    what = "no table and no topic" if options.path is not None else "no table"
    return TableError(
        TableCode.table_not_found,
        f'there is {what} {name!r}; create it with: tidemill table create {name} --columns "{columns}" '
        f"--primary-key {key} (without a key, rows are only appended), or write with the options "
        f"createTable=true and primaryKey={key}",
    )
