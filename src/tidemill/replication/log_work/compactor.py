"""Compacts partitions in a thread of its own, one at a time, the dirtiest first.

The thread reads and writes files; what changes a log in memory happens on the event loop, in one step. A full
disk or a deleted topic ends a run without a trace, and it is tried again later. Damage that a run finds ends
compaction of that partition until the node is started again, and is reported: nothing is removed that could
not be read.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar
from uuid import UUID

from tidemill.coordination.metrics import Metric, counter, gauge
from tidemill.coordination.turns import pause_after
from tidemill.errors import CorruptData, StorageError
from tidemill.log.compaction.cleaner import CleanedSegment, CleaningRun, CleaningStopped
from tidemill.log.compaction.runs import carry_swap
from tidemill.log.pace import MakePace, Pace
from tidemill.log.storage import Storage, StorageFile
from tidemill.replication.partition import Partition

__all__ = ("COMPACTION_METRICS", "CompactionCounts", "Compactor")

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_LOOKED_AT_PER_TURN = 5


@dataclass(slots=True)
class CompactionCounts:
    """Counters of compaction since the start of the node."""

    runs: int = 0
    runs_given_up: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    records_in: int = 0
    records_kept: int = 0
    seconds: float = 0.0
    last_run_ms: int = 0
    #: Bytes written by the last run, for each byte that was there.
    last_ratio: float = 0.0
    #: The damage that ended compaction of a partition, by topic id and index.
    damaged: dict[tuple[UUID, int], StorageError] = field(default_factory=dict)


class Compactor:
    """Compacts the partitions of a node, one at a time. ``compact`` runs on the event loop."""

    def __init__(
        self,
        storage: Storage,
        pool: Executor,
        *,
        map_bytes: int,
        bytes_per_second: int,
        max_decompressed_bytes: int,
        clock_ms: Callable[[], int],
        pace: MakePace = Pace,
    ) -> None:
        self._storage = storage
        self._map_bytes = map_bytes
        self._bytes_per_second = bytes_per_second
        self._max_decompressed_bytes = max_decompressed_bytes
        self._clock_ms = clock_ms
        self._pace = pace
        #: An executor with one thread.
        self._pool = pool
        self._turn = asyncio.Lock()
        self._closing = False
        self._changed = threading.Condition()
        self._topic_at_work: UUID | None = None
        self.counts = CompactionCounts()

    async def compact(self, partitions: Iterable[Partition]) -> None:
        """Compact all of ``partitions`` that are due; those of which most is dirty come first.

        Calls wait for each other: two runs over one partition would take each other's segments away.
        """
        async with self._turn:
            await self._compact_due(partitions)

    async def _compact_due(self, partitions: Iterable[Partition]) -> None:
        now_ms = self._clock_ms()
        due = []
        for number, partition in enumerate(partitions, start=1):
            await pause_after(number, _LOOKED_AT_PER_TURN)
            if (partition.topic_id, partition.index) in self.counts.damaged:
                continue
            try:
                ratio = partition.compaction_due(now_ms)
            except StorageError as error:
                logger.warning("%r is not looked at for compaction now: %s", partition, error)
                continue
            if ratio is not None:
                due.append((ratio, partition))
        for _, partition in sorted(due, key=lambda entry: -entry[0]):
            if partition.local_log.failure is None and not self._closing:
                await self._compact(partition)

    async def _compact(self, partition: Partition) -> None:
        name = f"{partition.topic}-{partition.index}"
        try:
            while not await self._run(partition):
                pass
        except CleaningStopped:
            return
        except CorruptData as error:
            self.counts.damaged[partition.topic_id, partition.index] = error
            logger.error("%s is not compacted any more: %s", name, error)
        except StorageError as error:
            self.counts.runs_given_up += 1
            logger.warning("a compaction of %s was given up, it is tried again later: %s", name, error)

    async def _run(self, partition: Partition) -> bool:
        """Compact a partition once. False if the map of keys was full before everything was compacted."""
        started, now_ms = time.perf_counter(), self._clock_ms()
        order, cut_count = partition.order_cleaning(now_ms), partition.as_follower.cut_count
        if order is None:
            return True
        run = CleaningRun(
            self._storage,
            order,
            map_bytes=self._map_bytes,
            pace=self._pace(self._bytes_per_second),
            max_decompressed_bytes=self._max_decompressed_bytes,
            is_stopped=lambda: self._closing or partition.local_log.failure is not None,
        )
        await self._in_thread(partition, run.map_keys)
        written_before = 0
        while (cleaned := await self._in_thread(partition, run.next)) is not None:
            written_before += sum(segment.size_bytes for segment in cleaned.old)
            await self._swap(partition, cleaned)
        await self._in_thread(partition, run.finish)
        if partition.as_follower.cut_count == cut_count:
            partition.local_log.first_dirty_offset = run.mapped_to
        self._count(run, written_before, time.perf_counter() - started, now_ms)
        return run.is_complete

    async def _swap(self, partition: Partition, cleaned: CleanedSegment) -> None:
        """Replace old segments by a compacted one."""
        partition.begin_swap(cleaned)
        try:
            directory = partition.local_log.directory
            await self._in_thread(partition, partial(carry_swap, self._storage, directory, cleaned))
        except StorageError as error:
            partition.end_swap(cleaned, error)
            raise
        files = partition.end_swap(cleaned)
        await self._in_thread(partition, partial(_close, files))

    def _count(self, run: CleaningRun, bytes_before: int, seconds: float, now_ms: int) -> None:
        counts = self.counts
        counts.runs += 1
        counts.bytes_in += run.bytes_in
        counts.bytes_out += run.bytes_out
        counts.records_in += run.records[0]
        counts.records_kept += run.records[1]
        counts.seconds += seconds
        counts.last_run_ms = now_ms
        counts.last_ratio = run.bytes_out / bytes_before if bytes_before else 1.0

    # --- the thread

    async def _in_thread(self, partition: Partition, work: Callable[[], _T]) -> _T:
        def run() -> _T:
            with self._changed:
                self._topic_at_work = partition.topic_id
            try:
                return work()
            finally:
                with self._changed:
                    self._topic_at_work = None
                    self._changed.notify_all()

        return await asyncio.get_running_loop().run_in_executor(self._pool, run)

    def wait_until_off(self, topic_id: UUID) -> None:
        """Wait, in another thread, until no file of the topic is being read or written.

        Its partitions are stopped already, so that does not take long and does not begin again.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._topic_at_work != topic_id)

    def close(self) -> None:
        """Stop what is under way; the next start removes what it leaves."""
        self._closing = True
        self._pool.shutdown(wait=True)


def _close(files: list[StorageFile]) -> None:
    for file in files:
        # The last handle of a removed file: closing it is what frees the space, and takes its time.
        file.close()


COMPACTION_METRICS: Final[Sequence[Metric[CompactionCounts]]] = (
    counter("tidemill_compaction_runs_total", "Compactions of a partition.", lambda counts: counts.runs),
    counter(
        "tidemill_compaction_given_up_total",
        "Compactions given up, to be tried again.",
        lambda counts: counts.runs_given_up,
    ),
    counter(
        "tidemill_compaction_read_bytes_total", "Bytes read for compaction.", lambda counts: counts.bytes_in
    ),
    counter(
        "tidemill_compaction_written_bytes_total",
        "Bytes written by compaction.",
        lambda counts: counts.bytes_out,
    ),
    counter(
        "tidemill_compaction_records_total",
        "Records looked at by compaction.",
        lambda counts: counts.records_in,
    ),
    counter(
        "tidemill_compaction_records_kept_total",
        "Records that compaction left in place.",
        lambda counts: counts.records_kept,
    ),
    counter("tidemill_compaction_seconds_total", "Time spent in compaction.", lambda counts: counts.seconds),
    gauge(
        "tidemill_compaction_last_run_timestamp_ms",
        "When the last compaction began.",
        lambda counts: counts.last_run_ms,
    ),
    gauge(
        "tidemill_compaction_last_ratio",
        "Bytes that the last compaction left, of each byte.",
        lambda counts: counts.last_ratio,
    ),
    gauge(
        "tidemill_compaction_damaged_partitions",
        "Partitions that cannot be compacted.",
        lambda counts: len(counts.damaged),
    ),
)
