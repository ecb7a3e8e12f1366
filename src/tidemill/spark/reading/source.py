"""Sources of a read: a table's rows, a table's changes, a typed log, or plain topics.

A ``Source`` is made on the driver and goes to the tasks: plain values, no connection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from tidemill.client.cluster import Cluster
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError
from tidemill.spark.connection import Connected, connected
from tidemill.spark.errors import InvalidOption
from tidemill.spark.reading.options import ReadOptions
from tidemill.spark.reading.positions import TopicPartition
from tidemill.spark.reading.schemas import (
    METADATA_SCHEMA,
    chosen_columns,
    kafka_schema,
    to_spark,
    with_changes,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from tidemill.client.tables.table import AsyncTable

__all__ = ("Source", "open_source")


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a query. ``schema`` has the columns that the option ``columns`` leaves."""

    options: ReadOptions
    shape: Literal["rows", "changes", "log", "records"]
    #: The table's name; None for plain topics.
    table: str | None
    table_id: int
    schema: pa.Schema
    topics: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The source's name in messages to people."""
        if self.table is not None:
            return f"table {self.table!r}"
        return (
            f"topics {self.options.topic_pattern!r}"
            if not self.topics
            else f"topic {','.join(self.topics)!r}"
        )

    @property
    def title(self) -> str:
        """The source's name as a part of the name of a group."""
        return self.table or ",".join(self.topics) or "topics"

    @property
    def spark_schema(self) -> StructType:
        return to_spark(self.schema)

    def connected(self) -> Connected:
        return connected(self.options.servers, self.options.timeout_ms)

    async def opened(self) -> AsyncTable:
        """Open the table. Raises if it is no longer the one that the query began with."""
        assert self.table is not None
        table = await self.connected().client.table(self.table)
        if table.definition.table_id != self.table_id:
            raise TableError(
                TableCode.table_not_found,
                f"table {self.table!r} was dropped, and is another one now: start the query anew, with a new "
                "checkpoint folder if it is a stream",
            )
        return table

    async def partitions(self) -> list[TopicPartition]:
        """All partitions that exist now."""
        if self.table is not None:
            return (await self.opened()).topic_partitions()
        cluster = self.connected().cluster
        return [
            (topic, each.index)
            for topic in await self._topics(cluster)
            for each in (await _known_topic(cluster, topic)).partitions
        ]

    async def _topics(self, cluster: Cluster) -> tuple[str, ...]:
        # The cached metadata may be as old as the query.
        cluster.forget()
        if self.options.topic_pattern is None:
            return self.topics
        pattern = re.compile(self.options.topic_pattern)
        names = [each.name for each in await cluster.all_topics() if not each.internal]
        return tuple(sorted(name for name in names if pattern.fullmatch(name)))


def open_source(options: Mapping[str, str], *, patient: bool = True) -> Source:
    """Find the source that the options name. Raises ``TidemillError`` if it does not exist."""
    read = ReadOptions.parse(options)
    link = connected(read.servers, read.timeout_ms, patient=patient)
    return link.run(_opened(link, read))


async def _opened(link: Connected, read: ReadOptions) -> Source:
    name = read.table or read.path
    if name is not None:
        try:
            return _table_source(read, await link.client.table(name))
        except TableError as error:
            gone = (TableCode.table_not_found, TableCode.database_not_found, TableCode.invalid_schema)
            if read.table is not None or error.table_code not in gone:
                raise
    topics = (read.path,) if read.path is not None else read.topics
    for topic in topics:
        await _known_topic(link.cluster, topic, is_guess=read.path is not None)
    for option, given in (("changes", read.changes), ("includeMetadata", read.metadata)):
        if given:
            raise InvalidOption(
                f"option {option} is for tables; {', '.join(topics) or 'topicPattern'} is a topic"
            )
    schema = chosen_columns(kafka_schema(headers=read.headers), read.columns, "a topic")
    return Source(read, "records", None, -1, schema, topics)


def _table_source(read: ReadOptions, table: AsyncTable) -> Source:
    definition, what = table.definition, f"table {table.name!r}"
    if read.headers:
        raise InvalidOption("option includeHeaders is for topics; read the table's topic with option topic")
    if read.changes and not definition.has_primary_key:
        raise InvalidOption(
            f"{what} has no primary key, so that it only grows: leave option changes out, and set "
            "includeMetadata to see where its rows are in the log"
        )
    schema, shape = table.schema, "rows" if definition.has_primary_key else "log"
    if read.columns:
        data = [name for name in read.columns if name not in METADATA_SCHEMA.names]
        schema = chosen_columns(schema, data, what) if data else pa.schema([])
    if read.changes or read.metadata:
        if shape == "rows" and not read.changes:
            raise InvalidOption(
                f"option includeMetadata: the rows of {what} are its state; set changes instead"
            )
        schema = with_changes(schema, definition.primary_key)
        shape = "changes" if read.changes else shape
    if read.columns:
        schema = chosen_columns(schema, read.columns, what)
    return Source(read, shape, table.name, definition.table_id, schema)  # type: ignore[arg-type]


async def _known_topic(cluster: Cluster, topic: str, *, is_guess: bool = False) -> Any:
    try:
        return await cluster.topic(topic)
    except ApiError as error:
        if error.code is not ErrorCode.unknown_topic_or_partition:
            raise
        kind = "table or topic" if is_guess else "topic"
        raise ApiError(
            error.code,
            f"there is no {kind} {topic!r}: 'tidemill topic list' and 'tidemill table list' show what is "
            "there",
        ) from error
