"""The log of one partition: segments of batches, appended at the end, deleted at the start.

Offsets, and who moves them (see durability.md):

    log_start_offset  ≤  durable_offset  ≤  end_offset

``append`` moves the end, a finished flush moves the durable offset, deletion moves the start. The caller
owns the log: all methods run on one thread, except ``FlushJob.run``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, DamagedBatch, DiskFull, ErrorCode, StorageError
from tidemill.log import by_time
from tidemill.log.by_time import TimeSearch
from tidemill.log.checked_file import pack_checked
from tidemill.log.checkpoint import Checkpoint, CheckpointFile
from tidemill.log.epochs import EpochHistory
from tidemill.log.flush import FlushJob, SideFile
from tidemill.log.index import IndexCache
from tidemill.log.inventory import OFFSETS_AHEAD, Inventory
from tidemill.log.producers import ProducerStates
from tidemill.log.reading import ReadBudget, SegmentReader
from tidemill.log.segment import Segment, segment_name
from tidemill.log.storage import Buffer, Storage, write_atomic
from tidemill.log.torn import TornTail
from tidemill.log.transactions import AbortedTransaction, with_markers
from tidemill.records.batch import (
    HEADER_BYTES,
    LENGTH_PREFIX_BYTES,
    BatchHeader,
    behind_empty_batches,
    parse_header,
    stamp_prefix,
)
from tidemill.records.control import Marker

__all__ = (
    "EPOCHS_KIND",
    "EPOCHS_NAME",
    "SNAPSHOT_KIND",
    "Appended",
    "PartitionLog",
    "list_snapshots",
    "snapshot_name",
)

SNAPSHOT_KIND = 2
EPOCHS_KIND = 3
EPOCHS_NAME = "leader-epochs"
_SNAPSHOT_ENDING = ".producers"
_STAMPED_BYTES = 16
#: Offsets inside a segment are kept relative, in 31 bits, as Kafka does.
_RELATIVE_OFFSET_MAX = 2**31 - 1
#: No offset is too high for a log that no inventory lists.
_NO_LIST = 2**63 - 1


def snapshot_name(offset: int) -> str:
    """File of the producer states as they were before ``offset``."""
    return f"{segment_name(offset)}{_SNAPSHOT_ENDING}"


def list_snapshots(storage: Storage, directory: str) -> list[int]:
    """Offsets of the producer snapshots in a directory, in order."""
    names = (name for name in storage.list_dir(directory) if name.endswith(_SNAPSHOT_ENDING))
    texts = (name.removesuffix(_SNAPSHOT_ENDING) for name in names)
    return sorted(int(text) for text in texts if text.isdigit())


class Appended(NamedTuple):
    """Where a batch is in the log."""

    base_offset: int
    last_offset: int
    #: It was there already: the producer had sent it before.
    duplicate: bool


_READ_AHEAD_BYTES = 1024 * 1024
#: How many stretches that compaction has emptied one read passes over.
_EMPTY_READS_MAX = 1_000


class PartitionLog:
    """Made by ``tidemill.log.recovery.open_log``; everything it is given is consistent already."""

    def __init__(
        self,
        storage: Storage,
        directory: str,
        config: TopicConfig,
        *,
        cache: IndexCache,
        checkpoint: CheckpointFile | None,
        segments: list[Segment],
        producers: ProducerStates,
        epochs: EpochHistory,
        due: list[SideFile],
        inventory: Inventory | None = None,
        torn: TornTail | None = None,
    ) -> None:
        self._storage = storage
        self._inventory = inventory
        #: The inventory has this partition, and says that offsets below may have been given out.
        self._listed_below = _NO_LIST if inventory is None else inventory.listed_below(directory)
        self._is_listing_durable = inventory is None
        self._cache = cache
        self._checkpoint = checkpoint
        self._segments = segments
        self._directory_changed = False
        self._side_files: list[SideFile] = []
        #: Those that a flush had no room for; they alone are no reason for another flush.
        self._deferred_side_files = due
        self.directory = directory
        self.config = config
        self.producers = producers
        self.epochs = epochs
        self.log_start_offset = checkpoint.current.log_start_offset if checkpoint else 0
        #: Segments whose files are being replaced: they are still read, and must not be removed by name.
        self.held: frozenset[Segment] = frozenset()
        #: Below it no key is there twice: compaction has been there. Of no meaning in other logs.
        self.first_dirty_offset = 0
        self.durable_offset = self.end_offset
        self._durable_segment = segments[-1].base_offset if segments else 0
        self._durable_position = segments[-1].size_bytes if segments else 0
        #: Told of batches that do not check out, each time that one is met.
        self.on_damage: Callable[[DamagedBatch], None] = lambda damage: None
        #: Set when durability is unknown; nothing is written any more.
        self.failure: StorageError | None = None
        #: Set while the owner takes no appends; reads go on.
        self.refusal: StorageError | None = None
        #: What a start found behind the last whole batch and had no room to keep; cut before the next append.
        self._torn = torn

    # --- what is where

    @property
    def end_offset(self) -> int:
        return self._segments[-1].next_offset if self._segments else self.log_start_offset

    @property
    def last_stable_offset(self) -> int:
        """Where readers of committed data stop: never above the durable offset."""
        return self.producers.transactions.last_stable_offset(self.durable_offset)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    # --- writing

    def _check_writable(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.refusal is not None:
            raise self.refusal

    def append(self, data: Buffer, header: BatchHeader, leader_epoch: int, now_ms: int) -> Appended:
        """Write one checked batch at the end, or find that it is there already.

        Raises ``ApiError`` (bad sequence) or ``StorageError`` (no room, disk trouble): then the log and the
        producer's state are as before.
        """
        self._check_writable()
        if header.is_idempotent:
            known = self.producers.check(header)
            if known is not None:
                return Appended(known.base_offset, known.last_offset, duplicate=True)
        base_offset = self._write(data, header, leader_epoch, now_ms)
        if header.is_idempotent:
            self.producers.record(header, base_offset, now_ms)
        return Appended(base_offset, base_offset + header.last_offset_delta, duplicate=False)

    def append_marker(self, data: Buffer, marker: Marker, leader_epoch: int, now_ms: int) -> Appended:
        """Write a control batch that ends a transaction. Raises as ``append`` does."""
        self._check_writable()
        header = parse_header(data)
        self.producers.check_marker(header, marker)
        offset = self._write(data, header, leader_epoch, now_ms)
        self.producers.record_marker(header, marker, offset, now_ms)
        return Appended(offset, offset, duplicate=False)

    def append_markers(
        self, markers: Sequence[tuple[Buffer, Marker]], leader_epoch: int, now_ms: int
    ) -> Appended:
        """Write several such batches at once: all of them, or none. Raises as ``append`` does."""
        self._check_writable()
        batches = [(data, parse_header(data)) for data, _ in markers]
        for (_, marker), (_, header) in zip(markers, batches, strict=True):
            self.producers.check_marker(header, marker)
        offset = self._write_together(batches, leader_epoch, now_ms)
        for number, ((_, marker), (_, header)) in enumerate(zip(markers, batches, strict=True)):
            self.producers.record_marker(header, marker, offset + number, now_ms)
        return Appended(offset, offset + len(markers) - 1, duplicate=False)

    def _write_together(
        self, batches: Sequence[tuple[Buffer, BatchHeader]], leader_epoch: int, now_ms: int
    ) -> int:
        """Put control batches, of one record each, at the end by one write; returns the first's offset."""
        size_bytes = sum(header.size_bytes for _, header in batches)
        as_one = batches[0][1]._replace(
            batch_length=size_bytes - LENGTH_PREFIX_BYTES, last_offset_delta=len(batches) - 1
        )
        segment = self._segment_for_append(as_one, now_ms)
        base_offset = segment.next_offset
        written = bytearray()
        for number, (data, header) in enumerate(batches):
            written += stamp_prefix(header, base_offset + number, leader_epoch)
            written += memoryview(data)[_STAMPED_BYTES:]
        try:
            segment.file.write(segment.size_bytes, [written])
        except StorageError:
            self._undo_write(segment)
            raise
        for number, (_, header) in enumerate(batches):
            segment.note(segment.size_bytes, header, base_offset + number, header.max_timestamp)
        self._note_written(segment, base_offset, leader_epoch, now_ms)
        return base_offset

    def _write(self, data: Buffer, header: BatchHeader, leader_epoch: int, now_ms: int) -> int:
        """Put a batch at the end; returns its base offset."""
        segment = self._segment_for_append(header, now_ms)
        base_offset = segment.next_offset
        prefix = stamp_prefix(header, base_offset, leader_epoch)
        try:
            segment.append(
                [prefix, memoryview(data)[_STAMPED_BYTES:]], header, base_offset, header.max_timestamp
            )
        except StorageError:
            self._undo_write(segment)
            raise
        self._note_written(segment, base_offset, leader_epoch, now_ms)
        return base_offset

    def _note_written(self, segment: Segment, base_offset: int, leader_epoch: int, now_ms: int) -> None:
        if segment.first_append_ms == 0:
            segment.first_append_ms = now_ms
        if self.epochs.assign(leader_epoch, base_offset):
            self._side_files.append(
                SideFile(f"{self.directory}/{EPOCHS_NAME}", self._epoch_bytes(), self.end_offset)
            )

    def _segment_for_append(self, header: BatchHeader, now_ms: int) -> Segment:
        self._cut_torn()
        segment = self._segment_with_room(header, now_ms)
        last_offset = segment.next_offset + header.last_offset_delta
        if last_offset >= self._listed_below:
            self._list(last_offset + 1 + OFFSETS_AHEAD)
        return segment

    def _cut_torn(self) -> None:
        """Cut the torn end that the start left, durably: nothing may come to lie behind it."""
        if self._torn is None:
            return
        assert self._checkpoint is not None, "a segment exists only behind a checkpoint"
        self._torn.cut(self._storage)
        try:
            self._checkpoint.sync_beside_flushes(self._torn.segment.file)
        except StorageError as error:
            self.fail(error)
            raise
        self._torn = None

    def _list(self, bound: int) -> None:
        """Have the inventory say that this partition has files, and offsets below ``bound``."""
        assert self._inventory is not None
        self._inventory.add([(self.directory, bound)])
        self._listed_below = bound
        self._is_listing_durable = False

    def _segment_with_room(self, header: BatchHeader, now_ms: int) -> Segment:
        if not self._segments:
            return self._add_segment(self.log_start_offset)
        active = self._segments[-1]
        if active.size_bytes == 0 or not self._must_roll(active, header, now_ms):
            return active
        return self.roll()

    def _must_roll(self, active: Segment, header: BatchHeader, now_ms: int) -> bool:
        too_old = active.age_ms(now_ms) >= self.config.segment_age_max_ms
        return (
            too_old
            or active.size_bytes + header.size_bytes > self.config.segment_bytes
            or active.next_offset + header.last_offset_delta - active.base_offset > _RELATIVE_OFFSET_MAX
        )

    def roll(self) -> Segment:
        """Start a new segment, unless the active one is empty.

        The old one is sealed, and its index and producer snapshot are due.
        """
        old = self._segments[-1]
        if not old.size_bytes:
            return old
        self._cut_torn()
        new = self._add_segment(old.next_offset)
        self._side_files.append(SideFile(old.index_path, old.seal(), new.base_offset))
        self._side_files.append(self._snapshot_file(new.base_offset))
        return new

    def _add_segment(self, base_offset: int) -> Segment:
        if self._checkpoint is None:
            self._create_directory()
        elif not self._segments:
            # The checkpoint may be the work of a process that was killed before it synced the name.
            self._storage.sync_dir(self.directory)
        segment = Segment(
            self._storage, self.directory, base_offset, self.config.index_interval_bytes, self._cache
        )
        segment.create()
        self._segments.append(segment)
        self._directory_changed = True
        return segment

    def _create_directory(self) -> None:
        # The directory is durable before the checkpoint exists, so whoever finds one need not sync the
        # parents; the checkpoint is durable before the first segment exists, so a segment without one is
        # damage and never an unfinished start.
        self._storage.make_dir(self.directory)
        parent = self.directory
        while parent:
            parent = parent.rpartition("/")[0]
            self._storage.sync_dir(parent)
        checkpoint = Checkpoint(self.log_start_offset, self.log_start_offset)
        self._checkpoint = CheckpointFile.create(self._storage, self.directory, checkpoint)

    def _undo_write(self, segment: Segment) -> None:
        assert self._checkpoint is not None, "a segment exists only behind a checkpoint"
        try:
            segment.file.truncate(segment.size_bytes)
            # If the segment is rolled without another batch, no flush would sync it again, and a crash could
            # bring the remains back behind batches that count as durable.
            self._checkpoint.sync_beside_flushes(segment.file)
        except StorageError as error:
            self.fail(error)

    def fail(self, error: StorageError) -> None:
        """Stop the log for good: what is on disk is unknown."""
        if self.failure is None:
            self.failure = error

    # --- flushing

    def begin_flush(self) -> FlushJob | None:
        """A job for everything appended so far; None if all of it is durable. One job at a time."""
        if self.failure is not None or self._checkpoint is None:
            return None
        if self.durable_offset == self.end_offset and not self._side_files:
            return None
        dirty = [
            segment
            for segment in self._segments
            if segment.next_offset > self.durable_offset or not segment.size_bytes
        ]
        job = FlushJob(
            self._storage,
            self.directory,
            self._checkpoint,
            self.end_offset,
            self._segments[-1].base_offset,
            self._segments[-1].size_bytes,
            [segment.file for segment in dirty],
            self._directory_changed,
            self._deferred_side_files + self._side_files,
            None if self._is_listing_durable else self._inventory,
        )
        self._is_listing_durable = True
        self._directory_changed = False
        self._side_files, self._deferred_side_files = [], []
        return job

    def finish_flush(self, job: FlushJob) -> None:
        """Take account of a job whose ``run`` returned."""
        self.durable_offset = job.target_offset
        self._durable_segment = job.segment_base_offset
        self._durable_position = job.position
        self._deferred_side_files = job.side_files

    def close(self) -> None:
        """Flush, note that the stop was orderly, and let go of the files."""
        try:
            if self.failure is None and self._checkpoint is not None and self._segments:
                self._close_cleanly(self._checkpoint)
        except DiskFull:
            # Everything is durable all the same; the next start reads the active segment instead of a note.
            return
        finally:
            self.abandon()

    def _close_cleanly(self, checkpoint: CheckpointFile) -> None:
        active = self._segments[-1]
        self._side_files = self._deferred_side_files + self._side_files
        self._deferred_side_files = []
        job = self.begin_flush()
        if job is not None:
            job.run()
            self.finish_flush(job)
            if self._deferred_side_files:
                return
        current = checkpoint.current
        if current.clean and (current.active_base_offset, current.active_size_bytes) == (
            active.base_offset,
            active.size_bytes,
        ):
            return
        index = SideFile(active.index_path, active.index_bytes(), self.end_offset)
        for side_file in (index, self._snapshot_file(self.end_offset)):
            self._write_unsynced(side_file)
        checkpoint.save(
            Checkpoint(
                self.log_start_offset, self.durable_offset, True, active.base_offset, active.size_bytes
            )
        )

    def _write_unsynced(self, side_file: SideFile) -> None:
        """Write a file that may be lost; but one that is durable is never put at risk."""
        if self._storage.exists(side_file.path):
            write_atomic(self._storage, side_file.path, side_file.data)
            return
        file = self._storage.open(side_file.path, create=True)
        file.write(0, [side_file.data])
        file.close()

    def abandon(self) -> None:
        """Let go of the files without writing anything, as a crash would."""
        for segment in self._segments:
            segment.close()
        if self._checkpoint is not None:
            self._checkpoint.close()

    def remove(self) -> None:
        """Delete the whole log."""
        self.fail(StorageError(f"{self.directory} was deleted"))
        self.abandon()
        self._storage.remove_tree(self.directory)

    def _snapshot_file(self, offset: int) -> SideFile:
        data = pack_checked(SNAPSHOT_KIND, self.producers.to_bytes())
        return SideFile(f"{self.directory}/{snapshot_name(offset)}", data, offset)

    def _epoch_bytes(self) -> bytes:
        return pack_checked(EPOCHS_KIND, self.epochs.to_bytes())

    # --- reading

    def read(
        self,
        offset: int,
        max_bytes: int,
        upper_offset: int,
        *,
        at_least_one: bool = True,
        budget: ReadBudget | None = None,
    ) -> memoryview:
        """Whole, checked batches from the one that holds ``offset``, none at or above ``upper_offset``.

        Empty at its end, and if the budget is spent. Raises ``DamagedBatch`` if the offset cannot be read.
        """
        self.check_readable(offset, upper_offset)
        budget = budget or ReadBudget()
        for segment in self.segments_from(offset):
            if segment.base_offset >= upper_offset:
                break
            data = self._read_segment(segment, offset, max_bytes, upper_offset, budget, at_least_one)
            if data is not None:
                return data
        return memoryview(b"")

    def _read_segment(
        self,
        segment: Segment,
        offset: int,
        max_bytes: int,
        upper_offset: int,
        budget: ReadBudget,
        at_least_one: bool,
    ) -> memoryview | None:
        end_offset = min(upper_offset, segment.next_offset)
        try:
            try:
                end = self.end_position(segment, upper_offset)
            except DamagedBatch as damage:
                # Where the reader must stop is not known; what lies in front of the damage is below it.
                if offset >= damage.first_offset:
                    raise
                end, end_offset = damage.position, damage.first_offset
            reader = self.reader(segment, end, end_offset)
            return reader.read(offset, max_bytes, budget, at_least_one=at_least_one)
        except DamagedBatch as damage:
            self.on_damage(damage)
            raise

    def reader(
        self, segment: Segment, end: int | None = None, end_offset: int | None = None
    ) -> SegmentReader:
        """Reads a segment up to byte ``end``, where the batch of ``end_offset`` begins; all by default."""
        if end is None or end_offset is None:
            end, end_offset = segment.size_bytes, segment.next_offset
        return SegmentReader(segment, end, end_offset, self.epochs, self.on_damage)

    def read_on(
        self,
        offset: int,
        max_bytes: int,
        upper_offset: int,
        *,
        at_least_one: bool = True,
        budget: ReadBudget | None = None,
    ) -> memoryview:
        """As ``read``, but what compaction has emptied is passed over, as far as there are records behind it.

        A client that gets nothing but empty batches several times in a row takes that for an error.
        """
        budget = budget or ReadBudget()
        data = self.read(offset, max_bytes, upper_offset, at_least_one=at_least_one, budget=budget)
        for _ in range(_EMPTY_READS_MAX if self.config.compacts or self.first_dirty_offset else 0):
            behind = behind_empty_batches(data)
            if behind is None or behind >= upper_offset or budget.batches <= 0:
                break
            try:
                following = self.read(
                    behind, max_bytes, upper_offset, at_least_one=at_least_one, budget=budget
                )
            except DamagedBatch:
                break  # Told to whoever asks for that offset.
            if not following:
                break
            data = following
        return data

    def aborted_in(self, data: memoryview) -> list[AbortedTransaction]:
        """Aborted transactions with batches in what ``read`` gave; may name a few that lie just behind it."""
        transactions = self.producers.transactions
        if not transactions.aborted_count or not data:
            return []
        first = parse_header(data).base_offset
        segment = next(self.segments_from(first))
        behind = segment.index.offset_behind(first - segment.base_offset, len(data))
        end = segment.next_offset if behind is None else segment.base_offset + behind
        found = transactions.aborted_between(first, end)
        if found and (self.config.compacts or self.first_dirty_offset):
            found = with_markers(found, data)
        return found

    def check_readable(self, offset: int, upper_offset: int) -> None:
        if offset < self.log_start_offset or offset > upper_offset:
            raise ApiError(
                ErrorCode.offset_out_of_range,
                f"offset {offset} is not within {self.log_start_offset} … {upper_offset}",
            )

    def available_bytes(self, offset: int, upper_offset: int, enough: int) -> int:
        """Bytes between the two offsets, counted until ``enough``: what a waiting fetch asks repeatedly."""
        if offset < upper_offset and enough <= HEADER_BYTES:
            return HEADER_BYTES  # No batch is smaller.
        total = 0
        for segment in self.segments_from(offset):
            if segment.base_offset >= upper_offset or total >= enough:
                break
            end = self.end_position(segment, upper_offset)
            start = 0
            if offset > segment.base_offset:
                found = self.reader(segment, end, min(upper_offset, segment.next_offset)).find(offset)
                start = end if found is None else found[0]
            total += end - start
        return total

    def read_batches(self, offset: int, upper_offset: int) -> Iterator[bytes]:
        """Each batch from the one that holds ``offset`` up to ``upper_offset``, checked.

        Raises ``DamagedBatch`` at the first that is damaged.
        """
        while offset < upper_offset:
            data = self.read(offset, _READ_AHEAD_BYTES, upper_offset)
            if not data:
                return
            position = 0
            while position < len(data):
                header = parse_header(data, position)
                yield bytes(data[position : position + header.size_bytes])
                position, offset = position + header.size_bytes, header.next_offset

    def place_of(self, offset: int) -> tuple[str, int]:
        """File and position of the batch that holds ``offset``; the end of the log if there is none."""
        path, position = self.directory, 0
        for segment in self.segments_from(offset):
            found = self.reader(segment).find(offset)
            path, position = segment.log_path, segment.size_bytes if found is None else found[0]
            if found is not None:
                break
        return path, position

    def segments_from(self, offset: int) -> Iterator[Segment]:
        """The segment that holds ``offset``, and those behind it."""
        low, high = 0, len(self._segments)
        while low < high:
            middle = (low + high) // 2
            if self._segments[middle].base_offset <= offset:
                low = middle + 1
            else:
                high = middle
        for number in range(max(low - 1, 0), len(self._segments)):
            yield self._segments[number]

    def end_position(self, segment: Segment, upper_offset: int) -> int:
        """Byte behind the last batch of ``segment`` that lies below ``upper_offset``."""
        if upper_offset == self.durable_offset:
            if segment.base_offset == self._durable_segment:
                return self._durable_position
            if segment.base_offset < self._durable_segment:
                return segment.size_bytes
        if upper_offset >= segment.next_offset:
            return segment.size_bytes
        found = self.reader(segment).find(upper_offset)
        return segment.size_bytes if found is None else found[0]

    # --- by time

    def find_time(self, timestamp: int, upper_offset: int) -> TimeSearch:
        """Search for the first record at or after ``timestamp``, below ``upper_offset``.

        Raises ``DamagedBatch``.
        """
        with self._noting_damage():
            return (yield from by_time.find_time(self, timestamp, upper_offset))

    def find_max_timestamp(self, upper_offset: int) -> TimeSearch:
        """Search for the record with the largest timestamp, the first of several, below ``upper_offset``.

        Raises ``DamagedBatch``.
        """
        with self._noting_damage():
            return (yield from by_time.find_max_timestamp(self, upper_offset))

    @contextmanager
    def _noting_damage(self) -> Iterator[None]:
        try:
            yield
        except DamagedBatch as damage:
            self.on_damage(damage)
            raise

    # --- compaction

    @property
    def storage(self) -> Storage:
        return self._storage

    @property
    def index_cache(self) -> IndexCache:
        return self._cache

    def exchange(self, old: Sequence[Segment], new: Segment) -> None:
        """Put a segment in the place of neighbours with the same offsets; the files are the caller's."""
        place = self._segments.index(old[0])
        assert self._segments[place : place + len(old)] == list(old)
        self._segments[place : place + len(old)] = [new]
        if old[0].base_offset <= self._durable_segment < new.next_offset:
            # All of it is durable, so the place where that ends is the beginning of the next.
            self._durable_segment, self._durable_position = new.next_offset, 0
        stale = {segment.index_path for segment in old}
        for side_files in (self._side_files, self._deferred_side_files):
            side_files[:] = [side_file for side_file in side_files if side_file.path not in stale]

    # --- deleting from the start

    def delete_before(self, offset: int) -> list[Segment]:
        """Move the log start up to ``offset`` and remove the files of what lies wholly below it."""
        removed = self.move_start(offset)
        self.discard(removed)
        return removed

    def move_start(self, offset: int) -> list[Segment]:
        """Move the log start up to ``offset``, durably; returns the segments that ``discard`` can take."""
        assert offset <= self.durable_offset, "only what is durable can be deleted on purpose"
        if offset > self.log_start_offset:
            if self._checkpoint is not None:
                if self._directory_changed:
                    # The segment that holds the new start must not vanish in a crash that keeps the start.
                    self._storage.sync_dir(self.directory)
                self._checkpoint.save_log_start(offset)
            self.log_start_offset = offset
        removed = []
        forgettable = self._producers_kept_below() if self._is_first_below_start() else 0
        while (
            self._is_first_below_start()
            and self._segments[0].next_offset <= forgettable
            and self._segments[0] not in self.held
        ):
            removed.append(self._segments.pop(0))
        if removed:
            self.producers.forgetful = True
            self.epochs.truncate_start(self.log_start_offset)
            self.producers.transactions.truncate_start(self.log_start_offset)
        return removed

    def _is_first_below_start(self) -> bool:
        return len(self._segments) > 1 and self._segments[0].next_offset <= self.log_start_offset

    def _producers_kept_below(self) -> int:
        """The offset below which no segment is needed any more to know the producers.

        Deleting the batches of a producer without a snapshot behind them would let its retries in twice.
        """
        due = [side_file for side_file in self._side_files if side_file.offset <= self.durable_offset]
        try:
            for side_file in due:
                write_atomic(self._storage, side_file.path, side_file.data)
                self._side_files.remove(side_file)
        except DiskFull:
            # Deleting is how room is made, so it must work without any; forgetting producers is the
            # lesser evil.
            return self.durable_offset
        snapshots = list_snapshots(self._storage, self.directory)
        if not snapshots:
            return 0
        # The one that an orderly stop left is not synced.
        file = self._storage.open(f"{self.directory}/{snapshot_name(snapshots[-1])}")
        try:
            file.sync()
        finally:
            file.close()
        self._storage.sync_dir(self.directory)
        return snapshots[-1]

    def discard(self, segments: list[Segment]) -> None:
        """Remove the files of segments that are no longer part of the log. May run in another thread."""
        for segment in segments:
            segment.remove()
        for offset in list_snapshots(self._storage, self.directory) if segments else ():
            if offset < segments[-1].next_offset:
                self._storage.remove(f"{self.directory}/{snapshot_name(offset)}")
