"""Planning a stream on the driver: where it begins, how far each batch goes, and what it tells about itself.

- Nothing of a batch depends on memory: the same two positions give the same tasks, in another process too.
- The positions are Spark's to keep. When Spark asks for the next batch, the last one is done: then the
  progress is published as a group's offsets, and the lease of a snapshot that has been read is released.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tidemill.client.splitting import measure, split_bucket
from tidemill.client.tables.requests import ask_controller
from tidemill.client.tables.scanner import BucketScan
from tidemill.errors import TidemillError
from tidemill.spark.advancing import furthest, shares, split_ranges
from tidemill.spark.edges import checked_start, committed_ends, log_starts, resolve
from tidemill.spark.errors import DataLost, InvalidOption
from tidemill.spark.options import Edge
from tidemill.spark.positions import BucketRange, LogRange, Place, SnapshotPosition, StreamPosition, between
from tidemill.spark.progress import Progress
from tidemill.spark.reading import Source
from tidemill.spark.schemas import requested_schema
from tidemill.spark.splits import split_scans
from tidemill.spark.tasks import BucketTask, LogTask, read_task

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from tidemill.client.tables.table import AsyncTable

__all__ = ("TidemillStreamReader",)

_RUN_BYTES: Final = 6
_RENEWALS: Final = 4


class TidemillStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """See the module."""

    def __init__(self, source: Source, schema: StructType) -> None:
        self._source = source
        self._schema = requested_schema(schema, source.schema, source.name)
        self._driver: _Driver | None = None
        _refuse_streams_without_changes(source)

    def __getstate__(self) -> dict[str, Any]:
        # To the tasks only what reading needs.
        return {"_source": self._source, "_schema": self._schema, "_driver": None}

    def _here(self) -> _Driver:
        if self._driver is None:
            self._driver = _Driver(self._source)
        return self._driver

    def initialOffset(self) -> dict[str, Any]:
        return self._here().beginning.to_json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        position = StreamPosition.from_json(start)
        end = self._here().next_end(position, _Limit.of(self._source, limit))
        # The very same text if nothing is new: that is how Spark sees it.
        return start if end == position else end.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self._source.options
        if options.max_rows is not None:
            return ReadMaxRows(options.max_rows)
        if options.max_bytes is not None:
            return ReadMaxBytes(options.max_bytes)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._here().report()

    def prepareForTriggerAvailableNow(self) -> None:
        self._here().stop_at_present_end()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return self._here().tasks(StreamPosition.from_json(start), StreamPosition.from_json(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_task(self._source, self._schema, partition)

    def commit(self, end: dict[str, Any]) -> None:
        self._here().done(StreamPosition.from_json(end))

    def stop(self) -> None:
        if self._driver is not None:
            self._driver.stop()


class _Limit:
    """How much a batch may take; None: no limit."""

    def __init__(self, rows: int | None, size_bytes: int | None) -> None:
        self.rows = rows
        self.bytes = size_bytes

    @classmethod
    def of(cls, source: Source, limit: ReadLimit) -> _Limit:
        """Spark has one limit, the options have two."""
        if isinstance(limit, ReadAllAvailable):
            return cls(None, None)
        rows, size_bytes = source.options.max_rows, source.options.max_bytes
        if isinstance(limit, ReadMaxRows):
            rows = limit.max_rows
        if isinstance(limit, ReadMaxBytes):
            size_bytes = limit.max_bytes
        return cls(rows, size_bytes)


class _Driver:
    """The part of a stream that lives on the driver."""

    def __init__(self, source: Source) -> None:
        self.beginning = StreamPosition(secrets.token_hex(_RUN_BYTES), is_new=True)
        self._source = source
        self._link = source.connected()
        self._progress = Progress(self._link)
        #: Under AvailableNow, where to stop.
        self._targets: dict[Place, int] | None = None
        self._ends: dict[Place, int] = {}
        self._planned: StreamPosition | None = None
        self._keeper: tuple[str, Future[None]] | None = None
        self._released: set[str] = set()

    # --- how far the next batch goes

    def next_end(self, start: StreamPosition, limit: _Limit) -> StreamPosition:
        """The end of the batch that begins at ``start``, which is where the last one has ended."""
        if not start.is_new:
            self.done(start)
        self._planned = self._link.run(self._next_end(start, limit))
        if self._planned.snapshot is not None:
            self._keep(self._planned.snapshot)
        return self._planned

    async def _next_end(self, start: StreamPosition, limit: _Limit) -> StreamPosition:
        position = replace(start, began=None)
        if start.is_new:
            position = await self._begun(start)
        if position.snapshot is not None:
            if position.snapshot.left:
                self._ends = await committed_ends(self._link.cluster, position.at)
                return replace(position, snapshot=await self._further(position, limit))
            position = replace(position, snapshot=None)
        self._ends = await self._present_ends(position)
        at = await self._log_end(position, limit)
        if at == position.at and not start.is_new:
            return start
        return replace(position, at=at)

    async def _begun(self, start: StreamPosition) -> StreamPosition:
        source, now_ms = self._source, time.time_ns() // 1_000_000
        edge = source.options.start or Edge("snapshot" if source.shape == "changes" else "latest")
        if edge.kind != "snapshot":
            at = await resolve(self._link.cluster, await source.places(), edge, now_ms)
            return StreamPosition(start.run, at, began=at)
        table = await source.opened()
        lease = await table.lease(
            duration_ms=source.options.lease_ms, holder=self._group(start), fresh=True
        ).acquire()
        at = dict(lease.log_offsets)
        left = dict.fromkeys(at, b"")
        return StreamPosition(start.run, at, began=at, snapshot=SnapshotPosition(lease.lease_id, left))

    async def _further(self, position: StreamPosition, limit: _Limit) -> SnapshotPosition:
        """How far into the snapshot: each bucket that is left gets its share."""
        snapshot = position.snapshot
        assert snapshot is not None
        if limit.rows is None and limit.bytes is None:
            return replace(snapshot, left={})
        table, left = await self._source.opened(), dict(snapshot.left)
        rows, size_bytes, buckets = limit.rows, limit.bytes, len(left)
        for place, key in sorted(snapshot.left.items()):
            if (rows is not None and rows < 1) or (size_bytes is not None and size_bytes < 1):
                break
            pieces = await split_bucket(
                table.cluster,
                _scan_of(table, place, snapshot.lease, key, None),
                max_rows=0 if rows is None else max(1, rows // buckets),
                max_bytes=0 if size_bytes is None else max(1, size_bytes // buckets),
                max_pieces=1,
            )
            buckets -= 1
            if not pieces or pieces[0].end_key is None:
                del left[place]
            else:
                left[place] = pieces[0].end_key
            for piece in pieces:
                rows = None if rows is None else rows - piece.rows
                size_bytes = None if size_bytes is None else size_bytes - piece.size_bytes
        return replace(snapshot, left=left)

    async def _present_ends(self, position: StreamPosition) -> dict[Place, int]:
        places = await self._source.places()
        gone = sorted(set(position.at) - set(places))
        if gone and self._source.options.fail_on_data_loss:
            names = ", ".join(f"{topic}-{number}" for topic, number in gone[:10])
            raise DataLost(
                f"{names}: deleted while the query read it. To go on with what is there, set failOnDataLoss "
                "to false"
            )
        return await committed_ends(self._link.cluster, places)

    async def _log_end(self, position: StreamPosition, limit: _Limit) -> dict[Place, int]:
        ends, at = dict(self._ends), position.at
        if self._targets is not None:
            # A partition that is newer than the query's start is for its next run.
            ends = {
                place: min(end, self._targets.get(place, 0))
                for place, end in ends.items()
                if place in self._targets or place in at
            }
        starts = await log_starts(self._link.cluster, list(ends))
        at = {
            place: self._checked(place, at[place], starts[place]) if place in at else starts[place]
            for place in ends
        }
        ends = {place: max(end, at[place]) for place, end in ends.items()}
        furthest_at = furthest(at, ends, limit.rows)
        if limit.bytes is None:
            return furthest_at
        return await self._within_bytes(at, furthest_at, limit.bytes)

    def _checked(self, place: Place, start: int, log_start: int) -> int:
        fail = self._source.options.fail_on_data_loss
        return checked_start(place, start, log_start, self._ends[place], fail=fail)

    async def _within_bytes(
        self, at: dict[Place, int], ends: dict[Place, int], max_bytes: int
    ) -> dict[Place, int]:
        ranges = {place: (at[place], end, -1) for place, end in ends.items() if end > at[place]}
        sizes = {
            place: each.size_bytes for place, each in (await measure(self._link.cluster, ranges)).items()
        }
        if sum(sizes.values()) <= max_bytes:
            return ends
        taken = shares(sizes, max_bytes)
        limited = {place: (*ranges[place][:2], max(1, taken[place])) for place in ranges}
        measured = await measure(self._link.cluster, limited)
        for each in measured.values():
            if each.error is not None:
                raise each.error
        return ends | {place: each.end_offset for place, each in measured.items()}

    def stop_at_present_end(self) -> None:
        """AvailableNow: what comes later is not for this run."""

        async def present() -> dict[Place, int]:
            return await committed_ends(self._link.cluster, await self._source.places())

        self._targets = self._link.run(present())

    # --- a batch's tasks

    def tasks(self, start: StreamPosition, end: StreamPosition) -> list[InputPartition]:
        """What the tasks of a batch read."""
        logs, rows = between(start, end)
        self._planned = end
        if end.snapshot is not None and rows:
            self._keep(end.snapshot)
        return self._link.run(self._tasks(end, logs, rows))

    async def _tasks(
        self, end: StreamPosition, logs: list[LogRange], rows: list[BucketRange]
    ) -> list[InputPartition]:
        tasks: list[InputPartition] = []
        minimum = self._source.options.min_partitions
        if rows:
            assert end.snapshot is not None
            await self._check_lease(end.snapshot)
            tasks += await self._bucket_tasks(end.snapshot.lease, rows, minimum)
        if logs:
            logs = await self._still_there(logs)
        return [*tasks, *(LogTask(part) for part in split_ranges(logs, minimum))]

    async def _bucket_tasks(self, lease: str, rows: list[BucketRange], minimum: int) -> list[InputPartition]:
        table = await self._source.opened()
        scans = [
            _scan_of(table, (each.topic, each.bucket), lease, each.start_key, each.end_key) for each in rows
        ]
        scans = await split_scans(table, scans, minimum)
        return [BucketTask(scan) for scan in scans]

    async def _still_there(self, logs: list[LogRange]) -> list[LogRange]:
        places = [(each.topic, each.partition) for each in logs]
        starts = await log_starts(self._link.cluster, places)
        ends = await committed_ends(self._link.cluster, places)
        found = []
        for each, place in zip(logs, places, strict=True):
            fail = self._source.options.fail_on_data_loss
            checked_start(place, each.end, min(starts[place], each.end), ends[place], fail=fail)
            start = checked_start(place, each.start, starts[place], max(ends[place], each.start), fail=fail)
            end = min(each.end, ends[place])
            if end > start:
                found.append(each._replace(start=start, end=end))
        return found

    # --- what has been done

    def done(self, position: StreamPosition) -> None:
        """Everything before ``position`` has been processed."""
        self._progress.publish(self._group(position), position.at)
        snapshot = position.snapshot
        if snapshot is not None and not snapshot.left and snapshot.lease not in self._released:
            self._released.add(snapshot.lease)
            self._stop_keeping()
            # It ends by itself if it cannot be released.
            with contextlib.suppress(TidemillError):
                self._link.run(self._link.client.release_lease(snapshot.lease))

    def report(self) -> dict[str, Any] | None:
        """For the query's progress: the present ends, and how much the planned batch leaves."""
        if self._planned is None:
            return None
        at = self._planned.at
        behind = {place: max(0, end - at.get(place, 0)) for place, end in self._ends.items()}
        value = StreamPosition(self._planned.run, self._ends).to_json()
        value["rowsBehind"] = sum(behind.values())
        value["group"] = self._group(self._planned)
        if self._planned.snapshot is not None:
            value["snapshotBucketsLeft"] = len(self._planned.snapshot.left)
        return value

    def _group(self, position: StreamPosition) -> str:
        return self._source.options.group_id or f"spark-{self._source.title}-{position.run}"

    # --- the lease of a snapshot

    async def _check_lease(self, snapshot: SnapshotPosition) -> None:
        table = await self._source.opened()
        try:
            await table.held_by(snapshot.lease)
        except TidemillError as error:
            raise DataLost(
                f"the snapshot of {self._source.name} that the query was reading is gone: the query was "
                "stopped "
                "for longer than option snapshotLease, or the lease was released. Start it anew with another "
                f"checkpoint folder ({error})"
            ) from error

    def _keep(self, snapshot: SnapshotPosition) -> None:
        """Renew the lease while this process lives."""
        if self._keeper is None or self._keeper[0] != snapshot.lease:
            self._stop_keeping()
            self._keeper = snapshot.lease, self._link.spawn(self._renewing(snapshot.lease))

    async def _renewing(self, lease: str) -> None:
        options = self._source.options
        body = {
            "table": self._source.table,
            "lease_id": lease,
            "holder": options.group_id or f"spark-{self._source.title}",
            "duration_ms": options.lease_ms,
            "fresh": False,
        }
        while True:
            with contextlib.suppress(TidemillError):
                await ask_controller(self._link.cluster, "AcquireLease", body, "renewing a lease")
            await asyncio.sleep(options.lease_ms / _RENEWALS / 1000)

    def _stop_keeping(self) -> None:
        if self._keeper is not None:
            self._keeper[1].cancel()
            self._keeper = None

    def stop(self) -> None:
        """The query has ended; the lease stays for when it goes on."""
        self._stop_keeping()


def _scan_of(
    table: AsyncTable, place: Place, lease: str, start_key: bytes, end_key: bytes | None
) -> BucketScan:
    topic, bucket = place
    definition = table.definition
    (partition,) = [each for each in definition.partitions if each.topic == topic]
    return BucketScan(
        table_id=definition.table_id,
        partition_id=partition.id,
        topic=topic,
        bucket=bucket,
        lease_id=lease,
        columns=tuple(table.schema.names),
        start_key=start_key or None,
        end_key=end_key,
    )


def _refuse_streams_without_changes(source: Source) -> None:
    if source.shape == "rows":
        raise InvalidOption(
            f"a stream of {source.name} is a stream of its changes: "
            'add .option("changes", "true"), which gives the columns '
            "_tidemill_op, _tidemill_bucket, _tidemill_offset and _tidemill_timestamp"
        )
    if source.options.end is not None:
        raise InvalidOption(
            "a stream has no ending offsets; read a batch, or use .trigger(availableNow=True)"
        )
    if (
        source.options.start is not None
        and source.options.start.kind == "snapshot"
        and source.shape != "changes"
    ):
        raise InvalidOption("startingOffsets=snapshot is for tables with a primary key and option changes")
