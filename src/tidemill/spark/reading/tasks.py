"""The tasks of a read: each reads a range of a log, or a range of keys of one bucket.

A task gives the same rows whenever it is run: it reads committed records between two offsets, or rows of a
state that a pin or a lease holds still.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from tidemill.client.cluster import Cluster
from tidemill.client.consuming.splitting import split_bucket
from tidemill.client.keeping import keep_alive
from tidemill.client.tables.bucket_scanner import AsyncBucketScanner, BucketScan
from tidemill.client.tables.values import SNAPSHOT
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError
from tidemill.records.columns.arrays import from_numpy, repeated
from tidemill.spark.reading.edges import checked_start, committed_ends, log_starts
from tidemill.spark.reading.positions import LogRange, TopicPartition
from tidemill.spark.reading.schemas import METADATA_SCHEMA, TIMESTAMP
from tidemill.spark.reading.source import Source

if TYPE_CHECKING:
    from tidemill.client.consuming.batch_reader import BatchReader, FetchedBatches
    from tidemill.client.tables.table import AsyncTable

__all__ = ("BucketTask", "LogTask", "read_task", "split_scans")

_FETCH_BYTES: Final = 4 * 1024 * 1024
_WAIT_MS: Final = 500
_KEEP_SECONDS: Final = 20.0
#: Small batches are joined up to so many rows: each batch costs Spark as much as some thousand rows.
_ROWS_AT_ONCE: Final = 32_768
_BYTES_AT_ONCE: Final = 4 * 1024 * 1024
#: Errors for a scan session that the server has closed, as after a restart. Under a lease the task opens
#: another one and goes on.
_LOST: Final = frozenset({TableCode.scanner_expired, TableCode.unknown_scanner_id})


class LogTask(InputPartition):
    """A task of Spark that reads a range of one partition's log."""

    def __init__(self, part: LogRange) -> None:
        self.part = part


@dataclass
class BucketTask(InputPartition):
    """A task of Spark that reads a range of one bucket's keys."""

    scan: BucketScan


def read_task(source: Source, schema: pa.Schema, task: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a task, in exactly ``schema``."""
    link = source.connected()
    if isinstance(task, LogTask):
        yield from link.iterate(_log(source, schema, task.part))
    elif isinstance(task, BucketTask):
        yield from link.iterate(_bucket(source, schema, task.scan))


# --- cutting


async def split_scans(table: AsyncTable, scans: Sequence[BucketScan], min_parts: int) -> list[BucketScan]:
    """Split scans into about ``min_parts`` that read the same rows; leave them alone if there are so many."""
    if not scans or len(scans) >= min_parts:
        return list(scans)
    rows = sum(each.row_count for each in await table.stats())
    max_rows = max(1, -(-rows // min_parts))
    parts = []
    for scan in scans:
        pieces = await split_bucket(table.cluster, scan, max_rows=max_rows)
        parts += [replace(scan, start_key=each.start_key, end_key=each.end_key) for each in pieces]
    return parts


# --- logs


async def _log(source: Source, schema: pa.Schema, part: LogRange) -> AsyncGenerator[pa.RecordBatch]:
    # Imported late, like decoding: planning and tasks of buckets read no log.
    from tidemill.client.consuming.batch_reader import BatchReader

    link = source.connected()
    table = None if source.table is None else await source.opened()
    partition, end, gathering = (part.topic, part.partition), part.end, _Gathering()
    reader = BatchReader(
        link.cluster,
        {partition: part.start},
        committed=True,
        max_wait_ms=_WAIT_MS,
        max_bytes=_FETCH_BYTES,
        partition_max_bytes=_FETCH_BYTES,
        ends={partition: end},
    )
    patience = _Patience(source, part)
    await _look_again_if_unknown(link.cluster, partition)
    try:
        while reader.positions[partition] < end:
            for fetched in await _polled(source, reader, part):
                patience.moved()
                for batch in await _decoded(table, fetched, end, schema):
                    for ready in gathering.add(batch):
                        yield ready
            patience.check()
        for ready in gathering.rest():
            yield ready
    finally:
        await reader.close()


async def _look_again_if_unknown(cluster: Cluster, partition: TopicPartition) -> None:
    """Drop cached metadata that lacks the partition: a worker may have fetched it long ago."""
    try:
        await cluster.leaders([partition])
    except ApiError as error:
        if error.code is not ErrorCode.unknown_topic_or_partition:
            raise
        cluster.forget()


class _Patience:
    """Ends a wait for records that should be there and do not come."""

    def __init__(self, source: Source, part: LogRange) -> None:
        self._source, self._part = source, part
        self._seconds = source.options.timeout_ms / 1000
        self.moved()

    def moved(self) -> None:
        self._deadline = asyncio.get_running_loop().time() + self._seconds

    def check(self) -> None:
        if asyncio.get_running_loop().time() > self._deadline:
            raise ApiError(
                ErrorCode.request_timed_out,
                f"{self._part.topic}-{self._part.partition}: nothing came from offset {self._part.start} up "
                "to "
                f"{self._part.end} within {self._seconds:.0f} s; is the node well? ('tidemill doctor')",
            )


async def _polled(source: Source, reader: BatchReader, part: LogRange) -> list[FetchedBatches]:
    partition = (part.topic, part.partition)
    try:
        return await reader.poll()
    except ApiError as error:
        if error.code is not ErrorCode.offset_out_of_range:
            raise
    # The records were deleted between planning and reading.
    cluster = source.connected().cluster
    start = (await log_starts(cluster, [partition]))[partition]
    end = (await committed_ends(cluster, [partition]))[partition]
    position = reader.positions[partition]
    going_on = checked_start(partition, position, start, end, fail=source.options.fail_on_data_loss)
    reader.positions[partition] = max(position + 1, going_on)
    return []


async def _decoded(
    table: AsyncTable | None, fetched: FetchedBatches, end: int, schema: pa.Schema
) -> list[pa.RecordBatch]:
    from tidemill.spark.reading.decoding import change_batches, record_batches

    if table is None:
        return await asyncio.to_thread(lambda: list(record_batches(fetched, end, schema)))
    try:
        return await asyncio.to_thread(lambda: list(change_batches(table.definition, fetched, end, schema)))
    except TableError:
        # The batch may have rows of a schema that the table got after the query had begun.
        known = table.definition.schema_id
        await table.renew()
        if table.definition.schema_id == known:
            raise
        return list(change_batches(table.definition, fetched, end, schema))


# --- buckets


async def _bucket(source: Source, schema: pa.Schema, scan: BucketScan) -> AsyncGenerator[pa.RecordBatch]:
    gathering, cluster = _Gathering(), source.connected().cluster
    scan = replace(scan, columns=_scanned(scan, schema))
    while True:
        scanner = AsyncBucketScanner(cluster, scan, timeout_ms=source.options.timeout_ms)
        # Spark may work on a batch for long.
        keeper = asyncio.get_running_loop().create_task(keep_alive(_KEEP_SECONDS, scanner.keep_alive))
        try:
            while (rows := await scanner.next_batch()) is not None:
                going_on = scanner.next_key
                for ready in gathering.add(_snapshot_batch(rows, scan.bucket, schema)):
                    yield ready
                if going_on is not None:
                    scan = replace(scan, start_key=going_on)
            break
        except TableError as error:
            if scan.lease_id is None or error.table_code not in _LOST:
                raise _explained(error) from error
            # A lease's snapshot is the same after a restart: go on behind the last row.
        finally:
            keeper.cancel()
            await scanner.close()
    for ready in gathering.rest():
        yield ready


def _scanned(scan: BucketScan, schema: pa.Schema) -> tuple[str, ...]:
    """The columns to ask for: at least one, for the number of rows."""
    names = tuple(name for name in schema.names if name not in METADATA_SCHEMA.names)
    return names or scan.columns[:1]


def _explained(error: TableError) -> TableError:
    if error.table_code is TableCode.pin_not_found or error.table_code in _LOST:
        return TableError(
            error.table_code,
            "the table's state is not held any more: the node was started again, or the tasks waited for "
            "longer "
            f"than option pinIdle. Run the query again. ({error.message})",
        )
    return error


# --- batches for Spark


class _Gathering:
    """Puts small batches of one schema together."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Take a batch in; yields joined batches once they are large enough."""
        if batch.num_rows == 0:
            return
        self._batches.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= _ROWS_AT_ONCE or self._bytes >= _BYTES_AT_ONCE:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield what was taken in and not yielded yet."""
        batches, self._batches, self._rows, self._bytes = self._batches, [], 0, 0
        if len(batches) > 1:
            yield pa.concat_batches(batches)
        else:
            yield from batches


def _snapshot_batch(rows: pa.RecordBatch, bucket: int, schema: pa.Schema) -> pa.RecordBatch:
    """Rows of a scan, with the columns of changes if they are wanted."""
    count = rows.num_rows
    made: dict[str, Callable[[], Any]] = {
        "_tidemill_op": lambda: repeated(SNAPSHOT, count),
        "_tidemill_bucket": lambda: from_numpy(np.full(count, bucket, np.int32)),
        "_tidemill_offset": lambda: from_numpy(np.full(count, -1, np.int64)),
        "_tidemill_timestamp": lambda: pa.nulls(count, TIMESTAMP),
    }
    columns = [
        made[name]() if name in made else rows.column(rows.schema.get_field_index(name))
        for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
