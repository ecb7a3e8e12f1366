"""The scrubber: reads every durable batch of this node, slowly, again and again, to find damage.

A thread reads the segments through file handles of its own, at the pace that is set, and checks what it
reads. What is to be read next is decided on the event loop between two steps, from the log as it is then:
segments that are deleted or compacted meanwhile do no harm. A batch that seems to be damaged is read once
more in the log's own way, which notes it. A partition that was opened for a step is closed again at once.

Progress is kept in a small file, so that a pass goes on after a restart; without the file it begins anew.
Damage that was known is kept there too, and looked at again first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, NamedTuple

from tidemill.coordination.metrics import Metric, counter, gauge
from tidemill.coordination.turns import pause_after
from tidemill.errors import DamagedBatch, StorageError
from tidemill.log.epochs import EpochHistory
from tidemill.log.log import PartitionLog
from tidemill.log.notes.checked_file import pack_checked, read_checked
from tidemill.log.notes.scrub_progress import PartitionKey, ScrubProgress, Suspect
from tidemill.log.pace import MakePace, Pace
from tidemill.log.segments.batch_checks import check_batches
from tidemill.log.storage import StorageFile, write_atomic
from tidemill.records.batch import CRC_START, HEADER_BYTES, BatchHeader, parse_header
from tidemill.records.checksum import crc32c
from tidemill.replication.partition import Partition
from tidemill.replication.replicas import Placement, Replicas

__all__ = ("PROGRESS_NAME", "SCRUB_METRICS", "ScrubCounts", "Scrubber")

logger = logging.getLogger(__name__)

PROGRESS_NAME = "scrub-progress"
_PROGRESS_KIND = 5
#: Read at a time: what is checked without letting others have their turn.
_CHUNK_BYTES = 256 * 1024
#: Read between two looks at the log.
_STEP_BYTES = 32 * 1024 * 1024
_SAVE_INTERVAL_MS = 30_000
_LISTED_PER_TURN = 200
#: So many damaged batches in a row are noted in one turn of the event loop.
_DAMAGE_PER_TURN_MAX = 50


@dataclass(slots=True)
class ScrubCounts:
    """Counters of scrubbing since the start of the node."""

    bytes_read: int = 0
    batches: int = 0
    damaged_batches: int = 0
    #: Reads that the operating system refused.
    errors: int = 0
    #: Partitions that the present pass has to read, and how many of them it has read.
    partitions: int = 0
    partitions_read: int = 0


class _Stretch(NamedTuple):
    """Bytes of a segment to be read; the batch of ``offset`` begins at ``position``."""

    path: str
    position: int
    end: int
    offset: int
    epochs: EpochHistory


class _Step(NamedTuple):
    """The result of a step: it has read sound batches up to ``offset``."""

    size_bytes: int
    batches: int
    offset: int
    #: The next batch did not check out.
    is_broken: bool


class Scrubber:
    """Reads every durable batch of a node in passes. ``run`` is a task; an interval of 0 switches it off."""

    def __init__(
        self,
        replicas: Replicas,
        placements: Callable[[], Iterable[Placement]],
        placement: Callable[[PartitionKey], Placement | None],
        pool: Executor,
        *,
        bytes_per_second: int,
        interval_ms: int,
        clock_ms: Callable[[], int],
        steady_ms: Callable[[], int],
        pace: MakePace = Pace,
    ) -> None:
        self._replicas = replicas
        self._placements = placements
        self._placement = placement
        self.interval_ms = interval_ms
        self._clock_ms = clock_ms
        self._steady_ms = steady_ms
        self._stopping = threading.Event()
        self._pace = pace(bytes_per_second)
        #: An executor with one thread.
        self._pool = pool
        self._started = False
        self._saved: ScrubProgress | None = None
        self._saved_at_ms = 0
        self.progress = ScrubProgress()
        self.counts = ScrubCounts()

    # --- the task

    async def run(self) -> None:
        """Look at known damage again, then read everything whenever the interval is over."""
        self.load()
        await self._look_at_suspects()
        while self.interval_ms:
            now_ms = self._clock_ms()
            self.progress = self.progress.seen(now_ms)
            wait_ms = self.progress.due_in_ms(self.interval_ms, now_ms)
            if wait_ms > 0:
                await self._save_if_changed()
                await asyncio.sleep(min(wait_ms, _SAVE_INTERVAL_MS) / 1000)
            else:
                await self.scrub()

    def load(self) -> None:
        """Read the progress file of the last process. Called before everything else."""
        try:
            data = read_checked(self._replicas.storage, PROGRESS_NAME, _PROGRESS_KIND)
            self.progress = self._saved = ScrubProgress.from_bytes(data)
        except (StorageError, ValueError):
            self.progress = ScrubProgress()
        self.progress = self.progress.seen(self._clock_ms())
        self._started = True

    async def scrub(self) -> None:
        """Make one pass, or the rest of the one that was begun."""
        keys = []
        for number, placement in enumerate(self._placements(), start=1):
            keys.append((placement.topic_id, placement.index))
            await pause_after(number, _LISTED_PER_TURN)
        # By the ids' numbers, which is their order: comparing the ids themselves takes ten times as long.
        keys.sort(key=lambda key: (key[0].int, key[1]))
        first = self.progress.next_partition(keys)
        self.progress = self.progress.resumed(self._clock_ms())
        self.counts.partitions, self.counts.partitions_read = len(keys), first
        for key in keys[first:]:
            self.progress = self.progress.at(key)
            await self._scrub_partition(key)
            # Many have nothing to read: let requests have their turn.
            await asyncio.sleep(0)
            self.counts.partitions_read += 1
        self.progress = self.progress.ended(self._clock_ms())
        await self._save()
        logger.info("every batch has been read: %d damaged ones are known", self.damaged_count)

    @property
    def progress_ratio(self) -> float:
        """The part of the present pass that is done, by partitions; 0 between two passes."""
        if self.progress.partition is None or not self.counts.partitions:
            return 0.0
        return self.counts.partitions_read / self.counts.partitions

    @property
    def damaged_count(self) -> int:
        return sum(len(each.batches) for each in self._replicas.damage)

    async def _scrub_partition(self, key: PartitionKey) -> None:
        while True:
            stretch = self._next_stretch(key, self.progress.offset)
            if stretch is None:
                return
            if isinstance(stretch, int):
                self.progress = self.progress.read_to(stretch)
                await asyncio.sleep(0)
                continue
            step = await asyncio.get_running_loop().run_in_executor(self._pool, self._read, stretch)
            if isinstance(step, StorageError):
                offset = self._leave_out(key, stretch, step)
            else:
                self.counts.bytes_read += step.size_bytes
                self.counts.batches += step.batches
                offset = self._confirm(key, step.offset) if step.is_broken else step.offset
            self.progress = self.progress.read_to(offset)
            if self._steady_ms() - self._saved_at_ms >= _SAVE_INTERVAL_MS:
                await self._save()

    # --- on the event loop

    @contextlib.contextmanager
    def _opened(self, key: PartitionKey) -> Iterator[Partition | None]:
        """The partition, open while a block without any await runs; None if it is gone, empty or stopped."""
        placement = self._placement(key)
        partition = self._replicas.peek(*key)
        if placement is None or partition is not None:
            yield partition if placement is not None else None
            return
        try:
            partition = self._replicas.open(placement) if self._replicas.exists_on_disk(placement) else None
        except StorageError:
            partition = None  # Noted and logged where it was opened.
        if partition is None:
            yield None
            return
        try:
            yield partition
        finally:
            if not partition.flush_scheduled and not partition.is_dirty:
                self._replicas.close_partition(partition)

    def _next_stretch(self, key: PartitionKey, offset: int) -> _Stretch | int | None:
        """The next bytes to read; None if the partition has been read up to its durable end.

        Behind a good deal of damage it is an offset: where to look on in another turn of the event loop.
        """
        with self._opened(key) as partition:
            if partition is None or partition.local_log.failure is not None:
                return None
            log = partition.local_log
            offset = max(offset, log.log_start_offset)
            for _ in range(_DAMAGE_PER_TURN_MAX):
                if offset >= log.durable_offset:
                    return None
                try:
                    return _stretch_at(log, offset)
                except DamagedBatch as damage:
                    self._count_damage(log, damage)
                    offset = max(offset + 1, damage.next_offset)
                except StorageError as error:
                    self._count_error(error)
                    offset = next(log.segments_from(offset)).next_offset
            return offset

    def _confirm(self, key: PartitionKey, offset: int) -> int:
        """Read a batch again in the log's own way, which notes damage; returns the offset behind it."""
        with self._opened(key) as partition:
            if partition is None or partition.local_log.failure is not None:
                return offset
            log = partition.local_log
            offset = max(offset, log.log_start_offset)
            if offset >= log.durable_offset:
                return offset
            try:
                data = log.read(offset, 1, log.durable_offset)
                return parse_header(data).next_offset if data else log.durable_offset
            except DamagedBatch as damage:
                self._count_damage(log, damage)
                return max(offset + 1, damage.next_offset)
            except StorageError as error:
                self._count_error(error)
                return next(log.segments_from(offset)).next_offset

    def _leave_out(self, key: PartitionKey, stretch: _Stretch, error: StorageError) -> int:
        """The offset to go on from after a segment whose file could not be read, or that was replaced."""
        with self._opened(key) as partition:
            if partition is None or not partition.local_log.segments:
                return stretch.offset
            segment = next(partition.local_log.segments_from(stretch.offset))
            if segment.log_path != stretch.path or segment in partition.local_log.held:
                return stretch.offset
            self._count_error(error)
            return segment.next_offset

    def _count_damage(self, log: PartitionLog, damage: DamagedBatch) -> None:
        self.counts.damaged_batches += 1
        log.on_damage(damage)

    def _count_error(self, error: StorageError) -> None:
        self.counts.errors += 1
        logger.error("the scrubber cannot read a segment, and leaves it out: %s", error)

    async def _look_at_suspects(self) -> None:
        for suspect in self.progress.suspects:
            self._confirm((suspect.topic_id, suspect.partition), suspect.offset)
            await asyncio.sleep(0)

    # --- in the thread

    def _read(self, stretch: _Stretch) -> _Step | StorageError:
        """Read and check a stretch, as far as it is sound; the error if its file cannot be read."""
        try:
            file = self._replicas.storage.open(stretch.path)
            try:
                return self._check(file, stretch)
            finally:
                file.close()
        except StorageError as error:
            return error

    def _check(self, file: StorageFile, stretch: _Stretch) -> _Step:
        position, offset, batches = stretch.position, stretch.offset, 0
        step_end = min(stretch.end, position + _STEP_BYTES)
        while position < step_end and not self._stopping.is_set():
            try:
                chunk = memoryview(file.read(position, min(_CHUNK_BYTES, stretch.end - position)))
                checked = check_batches(chunk, offset, stretch.epochs)
                size, count, behind = checked.size_bytes, checked.batch_count, checked.next_offset
                if not checked.defect and not count and len(chunk) >= HEADER_BYTES:
                    header = parse_header(chunk)
                    if self._is_sound(file, position, header, stretch.end):
                        size, count, behind = header.size_bytes, 1, header.next_offset
            except StorageError:
                # A bad sector, most likely: the log's own way finds out which batch it is in.
                return _Step(position - stretch.position, batches, offset, True)
            position, offset, batches = position + size, behind, batches + count
            self._pace.spend(size)
            self._pace.breathe()
            if checked.defect or not count:
                return _Step(position - stretch.position, batches, offset, True)
        return _Step(position - stretch.position, batches, offset, False)

    def _is_sound(self, file: StorageFile, position: int, header: BatchHeader, end: int) -> bool:
        """Check a batch that is larger than a chunk, piece by piece."""
        behind, crc = position + header.size_bytes, 0
        if behind > end:
            return False
        start = position + CRC_START
        while start < behind and not self._stopping.is_set():
            piece = file.read(start, min(_CHUNK_BYTES, behind - start))
            if not piece:
                return False
            crc = crc32c(piece, crc)
            start += len(piece)
            self._pace.breathe()
        return crc == header.crc

    # --- progress

    async def _save_if_changed(self) -> None:
        if self._known() != self._saved:
            await self._save()

    async def _save(self) -> None:
        progress = self._known()
        self._saved_at_ms = self._steady_ms()
        await asyncio.get_running_loop().run_in_executor(self._pool, self._write, progress)

    def _known(self) -> ScrubProgress:
        suspects = [
            Suspect(each.topic_id, each.index, damage.first_offset)
            for each in self._replicas.damage
            for damage in each.batches.values()
        ]
        return self.progress.with_suspects(suspects)

    def _write(self, progress: ScrubProgress) -> None:
        try:
            write_atomic(
                self._replicas.storage, PROGRESS_NAME, pack_checked(_PROGRESS_KIND, progress.to_bytes())
            )
        except StorageError as error:
            # Nothing is lost but work: the next process finds the same damage again.
            logger.warning("the scrubber's progress cannot be noted: %s", error)
        else:
            self._saved = progress

    def close(self) -> None:
        """Stop what is under way, and note how far it has come."""
        self._stopping.set()
        self._pace.end()
        self._pool.shutdown(wait=True)
        known = self._known()
        if self._started and known != self._saved and (self.interval_ms or known.suspects):
            self._write(known)


def _stretch_at(log: PartitionLog, offset: int) -> _Stretch:
    """The durable bytes of a segment from the batch that holds ``offset`` on."""
    segment = next(log.segments_from(offset))
    end = log.end_position(segment, log.durable_offset)
    found = log.reader(segment).find(offset)
    assert found is not None, "an offset below the durable one is in the segment that it belongs to"
    position, header = found
    return _Stretch(
        segment.log_path,
        position,
        end,
        header.base_offset,
        EpochHistory(list(log.epochs.entries)),
    )


SCRUB_METRICS: Final[Sequence[Metric[Scrubber]]] = (
    counter(
        "tidemill_scrub_read_bytes_total",
        "Bytes of the logs read by the scrubber.",
        lambda scrubber: scrubber.counts.bytes_read,
    ),
    counter(
        "tidemill_scrub_batches_total",
        "Batches that the scrubber found to be sound.",
        lambda scrubber: scrubber.counts.batches,
    ),
    counter(
        "tidemill_scrub_damaged_total",
        "Damaged batches that the scrubber met.",
        lambda scrubber: scrubber.counts.damaged_batches,
    ),
    counter(
        "tidemill_scrub_errors_total",
        "Segments that the scrubber could not read.",
        lambda scrubber: scrubber.counts.errors,
    ),
    gauge(
        "tidemill_scrub_interval_ms",
        "How often a pass begins; 0 is never.",
        lambda scrubber: scrubber.interval_ms,
    ),
    gauge(
        "tidemill_scrub_last_pass_timestamp_ms",
        "When the last whole pass ended.",
        lambda scrubber: scrubber.progress.pass_ended_ms,
    ),
    gauge(
        "tidemill_scrub_progress_ratio",
        "Partitions read by the present pass, of all.",
        lambda scrubber: scrubber.progress_ratio,
    ),
)
