"""The rows of a writing task, on their way from Spark's Arrow batches to records.

- Batches are gathered, so that what is sent is large enough to be cheap and small enough to be held.
- Preparing is work for the processor and happens in the task's own thread; what is prepared is sent by the
  connection's thread meanwhile.
- Rows of one task keep their order, so that of two operations on one key the later one counts.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.client.admin.topics import describe_topic_configs
from tidemill.client.producing.attempts import Attempt
from tidemill.client.producing.columns import BATCH_BYTES
from tidemill.client.producing.topic_rows import records_by_partition
from tidemill.client.tables.table import AsyncTable
from tidemill.client.tables.writer import prepare_changes, prepare_upserts
from tidemill.errors import TableCode, TableError
from tidemill.records.columns import compute as pc
from tidemill.records.columns.arrays import from_numpy
from tidemill.spark.connection import Connected
from tidemill.spark.errors import SchemaMismatch
from tidemill.spark.writing.schemas import TableColumns, TopicColumns
from tidemill.tables.rows.types import conform

__all__ = ("RowsOut", "TableOut", "TopicOut", "gathered")

Sending = Coroutine[Any, Any, None]
#: About so many bytes of rows are prepared at once.
CHUNK_BYTES: Final = 4 * 1024 * 1024
_DELETES: Final = frozenset({"delete", "d"})
_UPSERTS: Final = frozenset({"upsert", "insert", "update", "snapshot", "u", "c", "r", "i"})
_SIZE_CONFIGS: Final = ("max.message.bytes", "segment.bytes")
_SHOWN_CHARACTERS: Final = 60


class RowsOut(Protocol):
    """Turns chunks of rows into sends, which the connection's thread must begin in order."""

    def sendings(self, attempt: Attempt, rows: pa.Table) -> Iterator[Sending]: ...


def gathered(batches: Iterable[pa.RecordBatch], chunk_bytes: int = CHUNK_BYTES) -> Iterator[pa.Table]:
    """Join batches to chunks of about ``chunk_bytes``; none is empty."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        size += batch.nbytes
        if size >= chunk_bytes:
            yield pa.Table.from_batches(held)
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held)


class TableOut:
    """Writes rows to a table, as upserts and deletions."""

    def __init__(self, table: AsyncTable, columns: TableColumns) -> None:
        self._table = table
        self._columns = columns
        self._key_schema = pa.schema([table.schema.field(name) for name in table.primary_key])

    def sendings(self, attempt: Attempt, rows: pa.Table) -> Iterator[Sending]:
        definition, columns = self._table.definition, self._columns
        own = rows.select(columns.indexes).rename_columns(columns.names)
        deletes = None if columns.operation is None else are_deletes(rows.column(columns.operation))
        if deletes is None or not deletes.any():
            prepared = prepare_upserts(definition, conform(own, self._table.schema))
        else:
            if not definition.has_primary_key:
                raise TableError(
                    TableCode.not_a_primary_key_table,
                    f"a row says 'delete', and table {definition.name!r} has no primary key: its rows are "
                    "only appended; filter such rows out before the write",
                )
            keys = conform(own.select(definition.primary_key), self._key_schema)
            upserts = self._table.schema.empty_table()
            if not deletes.all():
                upserts = conform(own.filter(from_numpy(~deletes)), self._table.schema)
            prepared = prepare_changes(definition, keys, upserts, deletes)
        for each in prepared:
            yield attempt.send_rows(self._table, each)


def are_deletes(operations: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Which rows are to be deleted. Raises ``SchemaMismatch`` for an unknown operation."""
    encoded = operations.combine_chunks().dictionary_encode()
    words = [None if word is None else word.strip().lower() for word in encoded.dictionary.to_pylist()]
    for word in words:
        if word is not None and word not in _UPSERTS and word not in _DELETES:
            raise SchemaMismatch(
                f"an operation is {word[:_SHOWN_CHARACTERS]!r}; it is upsert (also insert, update, snapshot, "
                "u, c, r, i, or null) or delete (also d)"
            )
    meaning = pa.array([word in _DELETES for word in words], pa.bool_())
    found: npt.NDArray[np.bool_] = (
        pc.take(meaning, encoded.indices).fill_null(False).to_numpy(zero_copy_only=False)
    )
    return found


class TopicOut:
    """Writes records to one topic, or to those that a column names."""

    def __init__(self, link: Connected, topic: str | None, columns: TopicColumns) -> None:
        self._link = link
        self._topic = topic
        self._columns = columns
        self._known: dict[str, tuple[int, int]] = {}
        self._turn = 0

    def sendings(self, attempt: Attempt, rows: pa.Table) -> Iterator[Sending]:
        for topic, own in self._by_topic(rows):
            partition_count, batch_bytes = self._about(topic)
            self._turn = (self._turn + 1) % partition_count
            parts = records_by_partition(
                topic,
                partition_count,
                self._turn,
                partition=self._column(own, self._columns.partition),
                keys=self._column(own, self._columns.key),
                values=own.column(self._columns.value),
                timestamps_ms=self._column(own, self._columns.timestamp),
                headers=self._column(own, self._columns.headers),
            )
            yield attempt.send_records(topic, parts, batch_bytes=batch_bytes)

    @staticmethod
    def _column(rows: pa.Table, index: int | None) -> pa.ChunkedArray | None:
        return None if index is None else rows.column(index)

    def _by_topic(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        if self._topic is not None:
            yield self._topic, rows
            return
        assert self._columns.topic is not None, "a topic or a column of topics is there"
        encoded = rows.column(self._columns.topic).combine_chunks().dictionary_encode()
        if encoded.indices.null_count:
            raise SchemaMismatch("column 'topic' is null in a row, and there is no option topic: fill it")
        for number, topic in enumerate(encoded.dictionary.to_pylist()):
            yield topic, rows.filter(pc.equal(encoded.indices, number))

    def _about(self, topic: str) -> tuple[int, int]:
        """The number of partitions of a topic, and the largest batch that it takes."""
        if topic not in self._known:
            self._known[topic] = self._link.run(self._ask(topic))
        return self._known[topic]

    async def _ask(self, topic: str) -> tuple[int, int]:
        partitions = (await self._link.cluster.topic(topic)).partitions
        configs = {each.name: each.value for each in await describe_topic_configs(self._link.cluster, topic)}
        limits = [int(value) for name in _SIZE_CONFIGS if (value := configs.get(name)) is not None]
        return len(partitions), min([BATCH_BYTES, *limits])
