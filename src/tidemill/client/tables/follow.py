"""A table's rows and then its changes: what is in the snapshot, and every change after it, once and in order.

The pin of the snapshot says for every bucket up to which log offset its rows stand; the changes are read from
there on, committed ones only. Nothing is between the two, and nothing is in both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.client.consuming.batch_reader import BatchReader, FetchedBatches
from tidemill.client.process_bound import Unpicklable, opening_of_table
from tidemill.client.tables.values import DELETE, INSERT, SNAPSHOT, UPSERT
from tidemill.errors import ApiError, ErrorCode, TableError
from tidemill.records.columns import compute as pc
from tidemill.records.columns.arrays import from_numpy, repeated
from tidemill.records.columns.read import RecordColumns, read_columns
from tidemill.tables.definition import TableDefinition

if TYPE_CHECKING:
    from tidemill.client.tables.table import AsyncTable
    from tidemill.client.tables.table_scan import AsyncScan

__all__ = ("DELETE", "INSERT", "SNAPSHOT", "UPSERT", "AsyncFollow", "Change", "ChangeBatch", "decoded")

_NEW_PARTITIONS_SECONDS = 2.0


class Change(NamedTuple):
    """One row of a ``ChangeBatch``. For a deletion ``row`` holds the key columns only."""

    op: str
    row: dict[str, Any]
    bucket: int
    offset: int


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """Rows of one bucket, or of the snapshot.

    ``ops`` says of each row what happened to it: ``snapshot``, ``upsert``, ``delete`` (the other columns are
    null then), or ``insert`` in a table without a primary key. ``offsets`` has the log offset of each; -1 in
    the snapshot.
    """

    rows: pa.RecordBatch
    ops: pa.Array
    offsets: pa.Array
    timestamps_ms: pa.Array
    topic: str
    bucket: int
    #: Everything below this offset of the bucket's log has been given.
    next_offset: int

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def __iter__(self) -> Iterator[Change]:
        rows, ops, offsets = self.rows.to_pylist(), self.ops.to_pylist(), self.offsets.to_pylist()
        for row, op, offset in zip(rows, ops, offsets, strict=True):
            yield Change(op, row, self.bucket, offset)

    def to_arrow(self) -> pa.RecordBatch:
        """The rows, with columns for the change of each.

        They are ``_tidemill_op``, ``_tidemill_bucket``, ``_tidemill_offset`` and ``_tidemill_timestamp_ms``.
        """
        batch = self.rows.append_column("_tidemill_op", self.ops)
        batch = batch.append_column(
            "_tidemill_bucket", pa.repeat(pa.scalar(self.bucket, pa.int32()), len(self))
        )
        batch = batch.append_column("_tidemill_offset", self.offsets)
        return batch.append_column("_tidemill_timestamp_ms", self.timestamps_ms)


class AsyncFollow(Unpicklable):
    """Rows of a table, then its changes: ``async for batch in table.follow()``. ``until_now`` ends it."""

    def __init__(
        self,
        table: AsyncTable,
        scan: AsyncScan | None,
        *,
        from_offsets: Mapping[tuple[str, int], int] | None,
        until_now: bool,
    ) -> None:
        self._table = table
        self._scan = scan
        self._from_offsets = from_offsets
        self._until_now = until_now
        self._look_again_at = 0.0
        #: Ids of the table partitions that are followed, by topic.
        self._partition_ids: dict[str, int] = {}

    def __repr__(self) -> str:
        if self._scan is not None:
            what = "rows, then changes"
        elif self._from_offsets:
            what = "changes from given offsets on"
        else:
            what = "changes from now on"
        return f"<follow of {self._table.name}: {what}{', until now' if self._until_now else ''}>"

    def _instead_of_a_pickle(self) -> str:
        opening = opening_of_table(self._table.cluster.servers, self._table.name)
        return f"Follow the table there: {opening}.follow()"

    def __aiter__(self) -> AsyncIterator[ChangeBatch]:
        return self.batches()

    async def batches(self) -> AsyncGenerator[ChangeBatch]:
        """The snapshot's rows, then changes as they come."""
        positions = dict(self._from_offsets or {})
        if self._scan is not None:
            async with contextlib.aclosing(self._scan.batches()) as batches:
                async for batch in batches:
                    yield _snapshot_batch(self._table.definition, batch)
            positions = self._scan.log_offsets
        elif not positions:
            positions = await self._table.starts()
        reader = BatchReader(self._table.cluster, positions, committed=True)
        await self._follow_partitions(reader)
        ends = await self._ends(reader.positions) if self._until_now else None
        try:
            while ends is None or any(
                reader.positions.get(bucket, end) < end for bucket, end in ends.items()
            ):
                for fetched in await self._poll(reader):
                    for change in await self._changes(fetched):
                        yield change
                if ends is None:
                    await self._follow_partitions(reader)
        finally:
            await reader.close()

    async def _ends(self, positions: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int]:
        ends = await self._table.committed_ends(positions)
        for (topic, bucket), end in ends.items():
            if positions[topic, bucket] > end:
                raise ApiError(
                    ErrorCode.offset_out_of_range,
                    f"{topic}-{bucket} ends before offset {end}, there is no offset "
                    f"{positions[topic, bucket]}: it may be of an older table of that name",
                )
        return ends

    async def _poll(self, reader: BatchReader) -> list[FetchedBatches]:
        try:
            return await reader.poll()
        except ApiError as error:
            if error.code != ErrorCode.unknown_topic_or_partition:
                raise
        # A table partition was dropped, or the table itself; in that case the next step raises.
        self._look_again_at = 0.0
        self._table.cluster.forget()
        await self._table.renew()
        await self._follow_partitions(reader)
        return []

    async def _follow_partitions(self, reader: BatchReader) -> None:
        """Read new table partitions from their beginning, and stop reading those that were dropped."""
        table, now = self._table, asyncio.get_running_loop().time()
        if table.definition.partition_column is None or now < self._look_again_at:
            return
        self._look_again_at = now + _NEW_PARTITIONS_SECONDS
        await table.renew()
        topics, known = {each.topic: each.id for each in table.definition.partitions}, self._partition_ids
        for topic, bucket in list(reader.positions):
            # A table partition that was dropped and made again has the same topic name and another id.
            if topic not in topics or known.get(topic, topics[topic]) != topics[topic]:
                del reader.positions[topic, bucket]
        self._partition_ids = topics
        for partition in table.topic_partitions():
            reader.positions.setdefault(partition, 0)

    async def _changes(self, fetched: FetchedBatches) -> list[ChangeBatch]:
        try:
            return list(decoded(self._table.definition, fetched))
        except TableError:
            # The batch may have rows of a newer schema than the definition that this client has.
            known = self._table.definition.schema_id
            await self._table.renew()
            if self._table.definition.schema_id == known:
                raise
            return list(decoded(self._table.definition, fetched))


def decoded(
    table: TableDefinition, fetched: FetchedBatches, end_offset: int | None = None
) -> Iterator[ChangeBatch]:
    """The changes in fetched batches, those before ``end_offset``.

    Raises ``TableError`` for rows of a schema that ``table`` does not have yet.
    """
    for batch in fetched.batches:
        columns = read_columns(batch)
        keep = columns.offsets >= fetched.from_offset
        if end_offset is not None:
            keep &= columns.offsets < end_offset
        if keep.any():
            yield _change_batch(table, columns, keep, fetched.partition)


def _snapshot_batch(table: TableDefinition, batch: pa.RecordBatch) -> ChangeBatch:
    count = batch.num_rows
    none = from_numpy(np.full(count, -1, np.int64))
    return ChangeBatch(_lenient(table, batch), repeated(SNAPSHOT, count), none, none, table.name, -1, -1)


def _lenient(table: TableDefinition, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows in the schema of all change batches, in which only the key is not nullable."""
    if not table.has_primary_key:
        return rows
    return pa.RecordBatch.from_arrays(rows.columns, schema=_lenient_schema(table, rows.schema))


def _lenient_schema(table: TableDefinition, schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(field.name not in table.primary_key) for field in schema])


def _change_batch(
    table: TableDefinition, columns: RecordColumns, keep: Any, bucket: tuple[str, int]
) -> ChangeBatch:
    chosen = np.flatnonzero(keep)
    dead = columns.value_null[chosen]
    live_at, dead_at = chosen[~dead], chosen[dead]
    rows = table.format.to_batch(columns.body, columns.value_starts[live_at], columns.value_ends[live_at])
    if not table.format.carries_keys:
        rows = _with_keys(table, rows, table.keys.parse(columns.keys().take(from_numpy(live_at))))
    if len(dead_at):
        rows = _with_deletions(table, rows, columns, live_at, dead_at)
    return ChangeBatch(
        _lenient(table, rows),
        _operations(table, dead),
        from_numpy(columns.offsets[chosen]),
        from_numpy(columns.timestamps[chosen]),
        bucket[0],
        bucket[1],
        int(columns.offsets[-1]) + 1,
    )


def _operations(table: TableDefinition, dead: npt.NDArray[np.bool_]) -> pa.StringArray:
    alive = repeated(UPSERT if table.has_primary_key else INSERT, len(dead))
    if not dead.any():
        return alive
    return pc.if_else(from_numpy(dead), repeated(DELETE, len(dead)), alive)


def _with_keys(table: TableDefinition, rows: pa.RecordBatch, keys: list[pa.Array]) -> pa.RecordBatch:
    by_name = dict(zip(table.primary_key, keys, strict=True))
    by_name |= {name: rows.column(name) for name in rows.schema.names}
    return pa.RecordBatch.from_arrays([by_name[name] for name in table.schema.names], schema=table.schema)


def _with_deletions(
    table: TableDefinition, rows: pa.RecordBatch, columns: RecordColumns, live_at: Any, dead_at: Any
) -> pa.RecordBatch:
    """Rows and deletions in the order of their offsets. Deletions have the key columns only."""
    keys_of_dead = table.keys.parse(columns.keys().take(from_numpy(dead_at)))
    keys = dict(zip(table.primary_key, keys_of_dead, strict=True))
    order = from_numpy(np.argsort(np.concatenate([live_at, dead_at]), kind="stable"))
    merged = []
    for field in table.schema:
        gone = keys.get(field.name)
        gone = pa.nulls(len(dead_at), field.type) if gone is None else gone
        merged.append(pa.concat_arrays([rows.column(field.name), gone]).take(order))
    return pa.RecordBatch.from_arrays(merged, schema=_lenient_schema(table, table.schema))
