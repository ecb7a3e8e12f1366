"""Planning a stream on the driver: where it begins, how far each batch goes, and what it tells about itself.

- Nothing of a batch depends on memory: the same two positions give the same tasks, in another process too.
- The positions are Spark's to keep. When Spark asks for the next batch, the last one is done: then the
  progress is published as a group's offsets, and the lease of a snapshot that has been read is released.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
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

from tidemill.client.consuming.splitting import measure, split_bucket
from tidemill.client.tables.bucket_scanner import BucketScan
from tidemill.client.tables.requests import ask_controller
from tidemill.errors import ErrorCode, TidemillError
from tidemill.spark.connection import Connected
from tidemill.spark.errors import DataLost, InvalidOption
from tidemill.spark.reading.advancing import furthest, shares, split_ranges
from tidemill.spark.reading.edges import checked_start, committed_ends, log_starts, resolve
from tidemill.spark.reading.histories import epochs_at, newest_ends, parted
from tidemill.spark.reading.options import Edge
from tidemill.spark.reading.positions import (
    BucketRange,
    LogRange,
    SnapshotPosition,
    StreamPosition,
    TopicPartition,
    between,
)
from tidemill.spark.reading.schemas import requested_schema
from tidemill.spark.reading.source import Source
from tidemill.spark.reading.tasks import BucketTask, LogTask, read_task, split_scans

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from tidemill.client.tables.table import AsyncTable
    from tidemill.spark.reading.stream_cursor import StreamCursor

__all__ = ("TidemillStreamReader",)

_logger = logging.getLogger(__name__)
_RUN_BYTES: Final = 6
_RENEWALS: Final = 4


class TidemillStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the batches of a stream on the driver, and reads their tasks in Spark's workers."""

    def __init__(self, source: Source, schema: StructType) -> None:
        self._source = source
        self._schema = requested_schema(schema, source.schema, source.name)
        self._driver: _Driver | None = None
        _refuse_streams_without_changes(source)

    def __getstate__(self) -> dict[str, Any]:
        # Tasks get only what reading needs.
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
        # Spark compares texts: the very same one says that nothing is new.
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
    """The most rows and bytes that a batch may have; None means no limit."""

    def __init__(self, rows: int | None, size_bytes: int | None) -> None:
        self.rows = rows
        self.bytes = size_bytes

    @classmethod
    def of(cls, source: Source, limit: ReadLimit) -> _Limit:
        """Spark's limit, which is for rows or for bytes; the options limit the other."""
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
        self._progress = _Progress(self._link)
        self._cursor = None if source.options.cursor is None else _cursor(self._link, source.options.cursor)
        #: Where the trigger AvailableNow stops; None for other triggers.
        self._targets: dict[TopicPartition, int] | None = None
        self._ends: dict[TopicPartition, int] = {}
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
        leading = await self._find_ends(position)
        starts = await log_starts(self._link.cluster, list(self._ends))
        origin = await self._origin(position, starts, leading)
        at = await self._log_end(position, origin, limit)
        goes_back = any(offset < position.at.get(partition, 0) for partition, offset in origin.items())
        if at == position.at and not start.is_new and not goes_back:
            return start
        epochs = await self._epochs(position, origin, at, starts, leading)
        return replace(position, at=at, epochs=epochs, began=origin if goes_back else position.began)

    async def _begun(self, start: StreamPosition) -> StreamPosition:
        source, now_ms = self._source, time.time_ns() // 1_000_000
        if self._cursor is not None:
            at, epochs = await self._cursor.begin(await source.partitions(), now_ms)
            return StreamPosition(start.run, at, began=at, epochs=epochs)
        edge = source.options.start or Edge("snapshot" if source.shape == "changes" else "latest")
        if edge.kind != "snapshot":
            at = await resolve(self._link.cluster, await source.partitions(), edge, now_ms)
            return StreamPosition(start.run, at, began=at)
        table = await source.opened()
        lease = await table.lease(
            duration_ms=source.options.lease_ms, holder=self._group(start), fresh=True
        ).acquire()
        at = dict(lease.log_offsets)
        left = dict.fromkeys(at, b"")
        return StreamPosition(start.run, at, began=at, snapshot=SnapshotPosition(lease.lease_id, left))

    async def _further(self, position: StreamPosition, limit: _Limit) -> SnapshotPosition:
        """The position in the snapshot after the next batch: every bucket that is left gets its share."""
        snapshot = position.snapshot
        assert snapshot is not None
        if limit.rows is None and limit.bytes is None:
            return replace(snapshot, left={})
        table, left = await self._source.opened(), dict(snapshot.left)
        rows, size_bytes, buckets = limit.rows, limit.bytes, len(left)
        for partition, key in sorted(snapshot.left.items()):
            if (rows is not None and rows < 1) or (size_bytes is not None and size_bytes < 1):
                break
            pieces = await split_bucket(
                table.cluster,
                _scan_of(table, partition, snapshot.lease, key, None),
                max_rows=0 if rows is None else max(1, rows // buckets),
                max_bytes=0 if size_bytes is None else max(1, size_bytes // buckets),
                max_pieces=1,
            )
            buckets -= 1
            if not pieces or pieces[0].end_key is None:
                del left[partition]
            else:
                left[partition] = pieces[0].end_key
            for piece in pieces:
                rows = None if rows is None else rows - piece.rows
                size_bytes = None if size_bytes is None else size_bytes - piece.size_bytes
        return replace(snapshot, left=left)

    async def _find_ends(self, position: StreamPosition) -> dict[TopicPartition, int]:
        """Find the present ends of all partitions, ``_ends``; gives the epochs of their leaders."""
        partitions = await self._source.partitions()
        gone = sorted(set(position.at) - set(partitions))
        if gone and self._source.options.fail_on_data_loss:
            names = ", ".join(f"{topic}-{number}" for topic, number in gone[:10])
            raise DataLost(
                f"{names}: deleted while the query read it. To go on with what is there, set failOnDataLoss "
                "to false"
            )
        found = await newest_ends(self._link.cluster, partitions, position.epochs)
        self._ends = {partition: at.offset for partition, at in found.items()}
        return {partition: at.leader_epoch for partition, at in found.items()}

    async def _origin(
        self,
        position: StreamPosition,
        starts: Mapping[TopicPartition, int],
        leading: Mapping[TopicPartition, int],
    ) -> dict[TopicPartition, int]:
        """Where the next batch begins in each log: where the last one ended, if that is still in the log."""
        at, fail = position.at, self._source.options.fail_on_data_loss
        # Of a log without anything new nothing is read, so it need not be asked about.
        suspects = {
            partition: epoch
            for partition, epoch in position.epochs.items()
            if epoch != leading.get(partition, epoch) and self._ends[partition] > at[partition]
        }
        cut = await parted(self._link.cluster, at, suspects)
        if cut and fail:
            raise _cut_off(at, position.epochs, cut)
        origin = {}
        for partition, log_start in starts.items():
            begin = cut.get(partition, at.get(partition, log_start))
            origin[partition] = checked_start(partition, begin, log_start, self._ends[partition], fail=fail)
        return origin

    async def _epochs(
        self,
        position: StreamPosition,
        origin: Mapping[TopicPartition, int],
        at: Mapping[TopicPartition, int],
        starts: Mapping[TopicPartition, int],
        leading: Mapping[TopicPartition, int],
    ) -> dict[TopicPartition, int]:
        """The leader epochs of what is right below ``at``, where a batch ends that begins at ``origin``."""
        known, unknown = {}, {}
        for partition, offset in at.items():
            epoch = position.epochs.get(partition, -1)
            # A log that goes on in its epoch has no other behind it.
            same = origin[partition] == position.at.get(partition)
            if same and epoch >= 0 and (offset == origin[partition] or epoch == leading[partition]):
                known[partition] = epoch
            elif offset > starts[partition]:
                unknown[partition] = offset
        return known | await epochs_at(self._link.cluster, unknown, leading)

    async def _log_end(
        self, position: StreamPosition, origin: Mapping[TopicPartition, int], limit: _Limit
    ) -> dict[TopicPartition, int]:
        ends = dict(self._ends)
        if self._targets is not None:
            # A partition that was added after the start of the query is left to its next run.
            ends = {
                partition: min(end, self._targets.get(partition, 0))
                for partition, end in ends.items()
                if partition in self._targets or partition in position.at
            }
        at = {partition: origin[partition] for partition in ends}
        ends = {partition: max(end, at[partition]) for partition, end in ends.items()}
        furthest_at = furthest(at, ends, limit.rows)
        if limit.bytes is None:
            return furthest_at
        return await self._within_bytes(at, furthest_at, limit.bytes)

    async def _within_bytes(
        self, at: dict[TopicPartition, int], ends: dict[TopicPartition, int], max_bytes: int
    ) -> dict[TopicPartition, int]:
        ranges = {
            partition: (at[partition], end, -1) for partition, end in ends.items() if end > at[partition]
        }
        sizes = {
            partition: each.size_bytes
            for partition, each in (await measure(self._link.cluster, ranges)).items()
        }
        if sum(sizes.values()) <= max_bytes:
            return ends
        taken = shares(sizes, max_bytes)
        limited = {partition: (*ranges[partition][:2], max(1, taken[partition])) for partition in ranges}
        measured = await measure(self._link.cluster, limited)
        for each in measured.values():
            if each.error is not None:
                raise each.error
        return ends | {partition: each.end_offset for partition, each in measured.items()}

    def stop_at_present_end(self) -> None:
        """For the trigger AvailableNow: stop at the present ends of the logs."""

        async def present() -> dict[TopicPartition, int]:
            return await committed_ends(self._link.cluster, await self._source.partitions())

        self._targets = self._link.run(present())

    # --- a batch's tasks

    def tasks(self, start: StreamPosition, end: StreamPosition) -> list[InputPartition]:
        """The tasks of the batch between two positions."""
        logs, rows = between(start, end)
        if logs and end != self._planned:
            self._link.run(self._check_history(end))
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
            logs = await self._within_logs(logs)
        return [*tasks, *(LogTask(part) for part in split_ranges(logs, minimum))]

    async def _check_history(self, end: StreamPosition) -> None:
        """Check a batch that an earlier process has planned: its records must still be in the logs."""
        cut = await parted(self._link.cluster, end.at, end.epochs)
        if cut and self._source.options.fail_on_data_loss:
            raise _cut_off(end.at, end.epochs, cut)

    async def _bucket_tasks(self, lease: str, rows: list[BucketRange], minimum: int) -> list[InputPartition]:
        table = await self._source.opened()
        scans = [
            _scan_of(table, (each.topic, each.bucket), lease, each.start_key, each.end_key) for each in rows
        ]
        scans = await split_scans(table, scans, minimum)
        return [BucketTask(scan) for scan in scans]

    async def _within_logs(self, logs: list[LogRange]) -> list[LogRange]:
        partitions = [(each.topic, each.partition) for each in logs]
        starts = await log_starts(self._link.cluster, partitions)
        ends = await committed_ends(self._link.cluster, partitions)
        found = []
        for each, partition in zip(logs, partitions, strict=True):
            fail = self._source.options.fail_on_data_loss
            checked_start(partition, each.end, min(starts[partition], each.end), ends[partition], fail=fail)
            start = checked_start(
                partition, each.start, starts[partition], max(ends[partition], each.start), fail=fail
            )
            end = min(each.end, ends[partition])
            if end > start:
                found.append(each._replace(start=start, end=end))
        return found

    # --- what has been done

    def done(self, position: StreamPosition) -> None:
        """Publish the progress up to ``position``, and release a lease that is no longer needed."""
        self._progress.publish(self._group(position), position.at)
        if self._cursor is not None:
            self._cursor.move(position.at, position.epochs)
        snapshot = position.snapshot
        if snapshot is not None and not snapshot.left and snapshot.lease not in self._released:
            self._released.add(snapshot.lease)
            self._stop_keeping()
            # A lease that cannot be released expires.
            with contextlib.suppress(TidemillError):
                self._link.run(self._link.client.release_lease(snapshot.lease))

    def report(self) -> dict[str, Any] | None:
        """Figures for the query's progress: the present ends, and how much the planned batch leaves."""
        if self._planned is None:
            return None
        at = self._planned.at
        behind = {partition: max(0, end - at.get(partition, 0)) for partition, end in self._ends.items()}
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
        """Renew the lease of a snapshot for as long as this process lives."""
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
        """Stop renewing the lease, which stays valid for a while: the query may be started again."""
        self._stop_keeping()


def _cut_off(
    at: Mapping[TopicPartition, int],
    epochs: Mapping[TopicPartition, int],
    cut: Mapping[TopicPartition, int],
) -> DataLost:
    partition, offset = min(cut.items())
    topic, number = partition
    return DataLost(
        f"{topic}-{number} was cut at offset {offset}, and the query has read up to {at[partition]}, at "
        f"leader epoch {epochs[partition]}: an unclean election has given up records that it has read, or "
        "the topic was made anew. To go on with what is there, set failOnDataLoss to false"
    )


def _cursor(link: Connected, name: str) -> StreamCursor:
    # Imported late: few queries have one.
    from tidemill.spark.reading.stream_cursor import StreamCursor

    return StreamCursor(link, name)


def _scan_of(
    table: AsyncTable, log: TopicPartition, lease: str, start_key: bytes, end_key: bytes | None
) -> BucketScan:
    topic, bucket = log
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


class _Progress:
    """A stream's progress as the offsets of a group, so that its lag is seen where all lags are seen.

    It is for people: what a query goes on from is its checkpoint. So a failure is logged and nothing else.
    """

    def __init__(self, link: Connected) -> None:
        self._link = link
        self._published: dict[TopicPartition, int] = {}
        self._is_foreign = False

    def publish(self, group: str, at: Mapping[TopicPartition, int]) -> None:
        """Commit the offsets up to which everything is processed."""
        moved = {
            partition: offset for partition, offset in at.items() if self._published.get(partition) != offset
        }
        if not moved or self._is_foreign:
            return
        # Imported late: most queries show no progress.
        from tidemill.client.admin.groups import commit_offsets

        try:
            self._link.run(commit_offsets(self._link.cluster, group, moved))
        except TidemillError as error:
            self._is_foreign = error.code is ErrorCode.unknown_member_id
            reason = (
                "it has members of its own; give option groupId another name" if self._is_foreign else error
            )
            _logger.warning("the progress of the query is not shown as group %r: %s", group, reason)
        else:
            self._published |= moved
