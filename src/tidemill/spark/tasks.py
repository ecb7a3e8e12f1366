"""What one task reads: a range of a log, or a range of keys of one bucket.

A task gives the same rows whenever it is run: it reads committed records between two offsets, or rows of a
state that a pin or a lease holds still.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from tidemill.client.cluster import Cluster
from tidemill.client.tables.scanner import BucketScan, KvBatchScanner
from tidemill.errors import ApiError, ErrorCode, NodeUnavailable, TableCode, TableError
from tidemill.spark.batches import Gathering, snapshot_batch
from tidemill.spark.edges import checked_start, committed_ends, log_starts
from tidemill.spark.positions import LogRange, Place
from tidemill.spark.reading import Source
from tidemill.spark.schemas import METADATA_SCHEMA

if TYPE_CHECKING:
    from tidemill.client.fetching import BatchReader, FetchedBatches
    from tidemill.client.tables.table import AsyncTable

__all__ = ("BucketTask", "LogTask", "read_task")

_FETCH_BYTES: Final = 4 * 1024 * 1024
_WAIT_MS: Final = 500
_KEEP_SECONDS: Final = 20.0
#: How often a scan under a lease is taken up again where it was, as after a restart of the node.
_LOST: Final = frozenset({TableCode.scanner_expired, TableCode.unknown_scanner_id})


class LogTask(InputPartition):
    """Records of one partition."""

    def __init__(self, part: LogRange) -> None:
        self.part = part


@dataclass
class BucketTask(InputPartition):
    """Rows of one bucket."""

    scan: BucketScan


def read_task(source: Source, schema: pa.Schema, task: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a task, in exactly ``schema``."""
    link = source.connected()
    if isinstance(task, LogTask):
        yield from link.iterate(_log(source, schema, task.part))
    elif isinstance(task, BucketTask):
        yield from link.iterate(_bucket(source, schema, task.scan))


# --- logs


async def _log(source: Source, schema: pa.Schema, part: LogRange) -> AsyncGenerator[pa.RecordBatch]:
    # Late, like decoding: planning and tasks of buckets read no log.
    from tidemill.client.fetching import BatchReader

    link = source.connected()
    table = None if source.table is None else await source.opened()
    place, end, gathering = (part.topic, part.partition), part.end, Gathering()
    reader = BatchReader(
        link.cluster,
        {place: part.start},
        committed=True,
        max_wait_ms=_WAIT_MS,
        max_bytes=_FETCH_BYTES,
        partition_max_bytes=_FETCH_BYTES,
        ends={place: end},
    )
    patience = _Patience(source, part)
    await _look_again_if_unknown(link.cluster, place)
    try:
        while reader.positions[place] < end:
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


async def _look_again_if_unknown(cluster: Cluster, place: Place) -> None:
    """A worker may know its topics from long ago."""
    try:
        await cluster.leaders([place])
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
    place = (part.topic, part.partition)
    try:
        return await reader.poll()
    except ApiError as error:
        if error.code is not ErrorCode.offset_out_of_range:
            raise
    # Deleted between planning and reading.
    cluster = source.connected().cluster
    start = (await log_starts(cluster, [place]))[place]
    end = (await committed_ends(cluster, [place]))[place]
    position = reader.positions[place]
    going_on = checked_start(place, position, start, end, fail=source.options.fail_on_data_loss)
    reader.positions[place] = max(position + 1, going_on)
    return []


async def _decoded(
    table: AsyncTable | None, fetched: FetchedBatches, end: int, schema: pa.Schema
) -> list[pa.RecordBatch]:
    from tidemill.spark.decoding import change_batches, record_batches

    if table is None:
        return await asyncio.to_thread(lambda: list(record_batches(fetched, end, schema)))
    try:
        return await asyncio.to_thread(lambda: list(change_batches(table.definition, fetched, end, schema)))
    except TableError:
        # Rows of a schema that the table got after the query had begun.
        known = table.definition.schema_id
        await table.renew()
        if table.definition.schema_id == known:
            raise
        return list(change_batches(table.definition, fetched, end, schema))


# --- buckets


async def _bucket(source: Source, schema: pa.Schema, scan: BucketScan) -> AsyncGenerator[pa.RecordBatch]:
    gathering, cluster = Gathering(), source.connected().cluster
    scan = replace(scan, columns=_scanned(scan, schema))
    while True:
        scanner = KvBatchScanner(cluster, scan, timeout_ms=source.options.timeout_ms)
        keeper = asyncio.get_running_loop().create_task(_keep(scanner))
        try:
            while (rows := await scanner.next_batch()) is not None:
                going_on = scanner.next_key
                for ready in gathering.add(snapshot_batch(rows, scan.bucket, schema)):
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


async def _keep(scanner: KvBatchScanner) -> None:
    """Spark may take long over a batch."""
    while True:
        await asyncio.sleep(_KEEP_SECONDS)
        with contextlib.suppress(ApiError, NodeUnavailable, OSError):
            await scanner.keep_alive()


def _explained(error: TableError) -> TableError:
    if error.table_code is TableCode.pin_not_found or error.table_code in _LOST:
        return TableError(
            error.table_code,
            "the table's state is not held any more: the node was started again, or the tasks waited for "
            "longer "
            f"than option pinIdle. Run the query again. ({error.message})",
        )
    return error
