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
from tidemill.errors import ApiError, DamagedBatch, DiskFull, ErrorCode, StorageError, SyncFailed
from tidemill.log import by_time
from tidemill.log.by_time import TimeSearch
from tidemill.log.checked_file import pack_checked
from tidemill.log.checkpoint import Checkpoint, CheckpointFile
from tidemill.log.creation import LogCreation
from tidemill.log.epochs import EPOCHS_KIND, EPOCHS_NAME, EpochHistory
from tidemill.log.fetched_chunk import FetchedChunk, check_chunk
from tidemill.log.flush import FlushJob, SideFile
from tidemill.log.index import IndexCache
from tidemill.log.inventory import OFFSETS_AHEAD, Inventory
from tidemill.log.producer_snapshots import list_snapshots, snapshot_file, snapshot_name
from tidemill.log.producers import ProducerStates
from tidemill.log.segment import RELATIVE_OFFSET_MAX, Segment
from tidemill.log.segment_reader import ReadBudget, SegmentReader
from tidemill.log.storage import Buffer, Storage, write_atomic
from tidemill.log.torn import Cut, TornTail
from tidemill.log.transactions import AbortedTransaction, with_markers
from tidemill.log.truncation import TruncationJob
from tidemill.records.batch import (
    HEADER_BYTES,
    LENGTH_PREFIX_BYTES,
    BatchHeader,
    behind_empty_batches,
    parse_header,
    stamp_prefix,
)
from tidemill.records.control import Marker

__all__ = ("Appended", "PartitionLog")

_STAMPED_BYTES = 16
#: Stands for the listed bound of a log without an inventory: no offset is too high.
_NO_LIST = 2**63 - 1


class Appended(NamedTuple):
    """The offsets that an append got."""

    base_offset: int
    last_offset: int
    #: The batch was in the log already: the producer had sent it before.
    duplicate: bool


_READ_AHEAD_BYTES = 1024 * 1024
#: How many reads that give only empty batches, as compaction leaves them, one call passes over.
_EMPTY_READS_MAX = 1_000


class PartitionLog:
    """The log of one partition; made by ``recovery.open_log`` from files that it has checked."""

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
        #: The inventory says that offsets below this one may have been given out.
        self._listed_below = _NO_LIST if inventory is None else inventory.listed_below(directory)
        self._is_listing_durable = inventory is None
        self._cache = cache
        self._checkpoint = checkpoint
        #: Makes the first files; None if there are files, or nobody has asked for them.
        self._creation: LogCreation | None = None
        self._segments = segments
        self._directory_changed = False
        self._side_files: list[SideFile] = []
        #: Side files that a flush had no disk space for; they alone are no reason for another flush.
        self._deferred_side_files = due
        self.directory = directory
        self.config = config
        self.producers = producers
        self.epochs = epochs
        self.log_start_offset = checkpoint.current.log_start_offset if checkpoint else 0
        #: Segments whose files are being replaced: they are read, and must not be removed by name.
        self.held: frozenset[Segment] = frozenset()
        #: Below it no key occurs twice: that part was compacted. Of no meaning in logs without compaction.
        self.first_dirty_offset = 0
        self.durable_offset = self.end_offset
        self._durable_segment = segments[-1].base_offset if segments else 0
        self._durable_position = segments[-1].size_bytes if segments else 0
        #: Called with each batch that does not check out, every time that it is read.
        self.on_damage: Callable[[DamagedBatch], None] = lambda damage: None
        #: Set when durability is unknown; nothing is written any more.
        self.failure: StorageError | None = None
        #: Set while the owner accepts no appends; reads go on.
        self.refusal: StorageError | None = None
        #: Bytes behind the last whole batch that recovery had no disk space to keep; cut before the next
        #: append.
        self._torn = torn
        self._high_watermark = self._found_high_watermark()
        #: Whether a flush, or a cut of the end, was begun and not finished.
        self.is_flushing = False
        self.is_truncating = False

    # --- what is where

    @property
    def end_offset(self) -> int:
        return self._segments[-1].next_offset if self._segments else self.log_start_offset

    def last_stable_offset(self, high_watermark: int) -> int:
        """The last stable offset: where readers of committed data stop, given the owner's high watermark.

        The high watermark must never be above what is committed: a transaction has ended for good once its
        marker was below it.
        """
        return self.producers.transactions.last_stable_offset(high_watermark)

    # --- the high watermark, which is the owner's

    @property
    def high_watermark_checkpoint(self) -> int | None:
        """The high watermark that goes into the checkpoint, or that a start has found there; None if unknown.

        After a start it may be lower than what the owner last noted, and is never above the log end.
        """
        return self._high_watermark

    def note_high_watermark(self, offset: int) -> None:
        """Note the owner's high watermark; the next write of the checkpoint keeps it."""
        self._high_watermark = offset
        if self._checkpoint is not None:
            self._checkpoint.high_watermark = offset

    def _found_high_watermark(self) -> int | None:
        if self._checkpoint is None or self._checkpoint.high_watermark is None:
            return None
        found = min(max(self._checkpoint.high_watermark, self.log_start_offset), self.end_offset)
        self._checkpoint.high_watermark = found
        return found

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
        self.check_not_truncating()

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

    def append_as_follower(self, chunk: Buffer, leader_epoch: int, now_ms: int) -> Appended | None:
        """Write whole batches that were fetched from the leader of ``leader_epoch``, as they are.

        Offsets, epochs, producers and transactions are the leader's. Everything is checked before anything is
        written: with an ``ApiError`` the log is as before. A ``StorageError`` may come when a part of the
        chunk, whole batches, is in the log: the follower goes on from the log end. None if there was nothing.
        """
        self._check_writable()
        fetched = check_chunk(
            chunk,
            self.end_offset,
            self.epochs.latest_epoch,
            leader_epoch,
            log_is_empty=not any(segment.size_bytes for segment in self._segments),
        )
        done = 0
        while done < len(fetched.batches):
            done = self._write_fetched(fetched, done, now_ms)
        if not fetched.batches:
            return None
        first, last = fetched.batches[0].header, fetched.batches[-1].header
        return Appended(first.base_offset, last.last_offset, duplicate=False)

    def _write_fetched(self, fetched: FetchedChunk, start: int, now_ms: int) -> int:
        """Append as many batches as one segment takes, by one write; returns how many are done."""
        first = fetched.batches[start]
        if not self._segments or self._segments[-1].next_offset != first.header.base_offset:
            self._start_empty_log(first.header.base_offset)
        segment = self._segment_for_append(first.header, now_ms)
        stop, size_bytes = start + 1, segment.size_bytes + first.header.size_bytes
        for batch in fetched.batches[start + 1 :]:
            size_bytes += batch.header.size_bytes
            is_far = batch.header.last_offset - segment.base_offset > RELATIVE_OFFSET_MAX
            if size_bytes > self.config.segment_bytes or is_far:
                break
            stop += 1
        batches = fetched.batches[start:stop]
        last = batches[-1]
        self._list_up_to(last.header.last_offset)
        data = fetched.data[first.position : last.position + last.header.size_bytes]
        try:
            segment.file.write(segment.size_bytes, [data])
        except StorageError:
            self._undo_write(segment)
            raise
        for _, header, _ in batches:
            segment.note(segment.size_bytes, header, header.base_offset, header.max_timestamp)
        for _, header, marker in batches:
            self._note_written(segment, header.base_offset, header.leader_epoch, now_ms)
            self.producers.record_fetched(header, marker, now_ms)
        return stop

    def _start_empty_log(self, base_offset: int) -> None:
        """Make the first segment of a log whose start lies inside of its first batch."""
        for segment in self._segments:
            segment.remove()
            # A segment that a crash brought back would begin inside the batch.
            self._storage.sync_dir(self.directory)
        self._segments.clear()
        self._add_segment(base_offset)

    def _write_together(
        self, batches: Sequence[tuple[Buffer, BatchHeader]], leader_epoch: int, now_ms: int
    ) -> int:
        """Append control batches, of one record each, by one write; returns the first's offset."""
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
        """Append a batch; returns its base offset."""
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
        segment = self._segment_with_capacity(header, now_ms)
        self._list_up_to(segment.next_offset + header.last_offset_delta)
        return segment

    def _cut_torn(self) -> None:
        """Cut the torn end that recovery left, durably: nothing may be written behind it."""
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

    def _list_up_to(self, last_offset: int) -> None:
        """Have the inventory list this partition, with offsets up to ``last_offset``."""
        if last_offset < self._listed_below:
            return
        assert self._inventory is not None
        bound = last_offset + 1 + OFFSETS_AHEAD
        self._inventory.add([(self.directory, bound)])
        self._listed_below = bound
        self._is_listing_durable = False

    def _segment_with_capacity(self, header: BatchHeader, now_ms: int) -> Segment:
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
            or active.next_offset + header.last_offset_delta - active.base_offset > RELATIVE_OFFSET_MAX
        )

    def roll(self) -> Segment:
        """Start a new segment, unless the active one is empty.

        The old one is sealed, and its index and producer snapshot are due.
        """
        self.check_not_truncating()
        old = self._segments[-1]
        if not old.size_bytes:
            return old
        self._cut_torn()
        new = self._add_segment(old.next_offset)
        self._side_files.append(SideFile(old.index_path, old.seal(), new.base_offset))
        self._side_files.append(snapshot_file(self.directory, self.producers, new.base_offset))
        return new

    def _add_segment(self, base_offset: int) -> Segment:
        if not self._segments:
            self._take_first_files()
        segment = Segment(
            self._storage, self.directory, base_offset, self.config.index_interval_bytes, self._cache
        )
        segment.create()
        self._segments.append(segment)
        self._directory_changed = True
        return segment

    @property
    def has_files(self) -> bool:
        """Whether an append finds a segment to write to."""
        return bool(self._segments)

    def begin_creation(self) -> LogCreation | None:
        """What is best done in a thread before the first append; None if there is nothing to do."""
        if self._segments or self.failure is not None or self.refusal is not None:
            return None
        if self._creation is None:
            self._creation = LogCreation(
                self._storage, self.directory, self._first_checkpoint(), self._checkpoint
            )
        return None if self._creation.is_done else self._creation

    def _first_checkpoint(self) -> Checkpoint:
        return Checkpoint(self.log_start_offset, self.log_start_offset, high_watermark=self._high_watermark)

    def _take_first_files(self) -> None:
        creation = self._creation or LogCreation(
            self._storage, self.directory, self._first_checkpoint(), self._checkpoint
        )
        checkpoint = creation.take()
        self._creation = None
        if self._checkpoint is None:
            checkpoint.high_watermark = self._high_watermark
            if checkpoint.current.log_start_offset != self.log_start_offset:
                # The start was moved since the creation began.
                checkpoint.save(self._first_checkpoint())
            self._checkpoint = checkpoint

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
        """A job for everything appended so far; None if all of it is durable. One job at a time.

        None while the end is being cut, too: the owner asks again behind that.
        """
        if self.failure is not None or self._checkpoint is None or self.is_truncating:
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
        self.is_flushing = True
        self._is_listing_durable = True
        self._directory_changed = False
        self._side_files, self._deferred_side_files = [], []
        return job

    def finish_flush(self, job: FlushJob) -> None:
        """Take over the result of a job whose ``run`` returned."""
        self.is_flushing = False
        self.durable_offset = job.target_offset
        self._durable_segment = job.segment_base_offset
        self._durable_position = job.position
        self._deferred_side_files = job.side_files

    def undo_flush(self, job: FlushJob) -> None:
        """Take back a job that could not open a file: the next one does all that it has left undone."""
        self.is_flushing = False
        self._directory_changed = self._directory_changed or job.sync_directory
        self._is_listing_durable = self._is_listing_durable and job.inventory is None
        self._side_files = job.side_files + self._side_files

    def close(self) -> None:
        """Flush, note that the stop was orderly, and close the files."""
        try:
            if self.failure is None and self._checkpoint is not None and self._segments:
                self._close_cleanly(self._checkpoint)
        except DiskFull:
            # Everything is durable nevertheless; the next start reads the active segment.
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
        if current.clean and (
            current.active_base_offset,
            current.active_size_bytes,
            current.high_watermark,
        ) == (active.base_offset, active.size_bytes, checkpoint.high_watermark):
            return
        index = SideFile(active.index_path, active.index_bytes(), self.end_offset)
        for side_file in (index, snapshot_file(self.directory, self.producers, self.end_offset)):
            self._write_unsynced(side_file)
        checkpoint.save(
            Checkpoint(
                self.log_start_offset, self.durable_offset, True, active.base_offset, active.size_bytes
            )
        )

    def _write_unsynced(self, side_file: SideFile) -> None:
        """Write a side file without syncing it; one that is durable already is left alone."""
        if self._storage.exists(side_file.path):
            write_atomic(self._storage, side_file.path, side_file.data)
            return
        file = self._storage.open(side_file.path, create=True)
        file.write(0, [side_file.data])
        file.close()

    def abandon(self) -> None:
        """Close the files without writing anything, as a crash would."""
        for segment in self._segments:
            segment.close()
        if self._creation is not None:
            self._creation.give_up()
            self._creation = None
        if self._checkpoint is not None:
            self._checkpoint.close()

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
                # The position of the upper offset is not known; batches before the damage are below it.
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
        """Read as ``read`` does, but pass over batches that compaction has emptied if records follow them.

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
                break  # Raised when somebody asks for that offset.
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

    def position_of(self, offset: int) -> tuple[str, int]:
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
        """Replace neighbouring segments by one with the same offsets; the caller replaces the files."""
        first = self._segments.index(old[0])
        assert self._segments[first : first + len(old)] == list(old)
        self._segments[first : first + len(old)] = [new]
        if old[0].base_offset <= self._durable_segment < new.next_offset:
            # The whole segment is durable, so the durable end is the beginning of the next.
            self._durable_segment, self._durable_position = new.next_offset, 0
        stale = {segment.index_path for segment in old}
        for side_files in (self._side_files, self._deferred_side_files):
            side_files[:] = [side_file for side_file in side_files if side_file.path not in stale]

    # --- cutting the end

    def truncate_to(self, offset: int, now_ms: int) -> list[Cut]:
        """Cut everything from the batch that holds ``offset`` on, durably; returns what was taken off.

        All three steps of ``begin_truncation`` at once. Raises ``StorageError``.
        """
        return self._truncate(self.begin_truncation(offset, now_ms))

    def start_anew_at(self, offset: int, now_ms: int) -> list[Cut]:
        """Cut everything, durably, and go on with an empty log at ``offset``. Raises ``StorageError``."""
        return self._truncate(self.begin_starting_anew(offset, now_ms))

    def _truncate(self, job: TruncationJob | None) -> list[Cut]:
        if job is None:
            return []
        try:
            job.run()
        except StorageError as error:
            self.truncation_failed(job, error)
            raise
        self.finish_truncation(job)
        return job.cuts

    def begin_truncation(self, offset: int, now_ms: int) -> TruncationJob | None:
        """A job that cuts everything from the batch that holds ``offset`` on; None if the log ends there.

        If nothing is left, the log is empty at ``offset``, or where that batch began. No flush may be under
        way (``is_flushing``), nor the swap of a compaction: ``StorageError``. Until ``finish_truncation`` or
        ``truncation_failed`` nothing is appended, flushed or deleted.
        """
        self._check_can_truncate()
        if offset >= self.end_offset:
            return None
        if offset <= self.log_start_offset:
            return self.begin_starting_anew(offset, now_ms)
        segment = next(self.segments_from(offset))
        try:
            found = self.reader(segment).find(offset)
            assert found is not None, "the offset is below the log end"
            position, first_offset = found[0], found[1].base_offset
        except DamagedBatch as damage:
            position, first_offset = damage.position, damage.first_offset
        if first_offset <= self.log_start_offset:
            return self.begin_starting_anew(first_offset, now_ms)
        number = self._segments.index(segment)
        kept = self._segments[:number]
        if position == 0:
            return self._begin_truncation(first_offset, kept, None, self._segments[number:], now_ms)
        kept.append(segment.cut_to(position, first_offset))
        return self._begin_truncation(first_offset, kept, segment, self._segments[number + 1 :], now_ms)

    def begin_starting_anew(self, offset: int, now_ms: int) -> TruncationJob | None:
        """A job that cuts everything, so that the log is empty at ``offset``; as ``begin_truncation``."""
        self._check_can_truncate()
        if self._checkpoint is None:
            self.log_start_offset = self.durable_offset = offset
            self.producers.forgetful = offset > 0
            return None
        return self._begin_truncation(
            self.log_start_offset, [], None, list(self._segments), now_ms, start_offset=offset
        )

    def _check_can_truncate(self) -> None:
        self._check_writable()
        if self.is_flushing or self.held:
            what = "a flush is under way" if self.is_flushing else "a compaction is being put in place"
            raise StorageError(f"the end of {self.directory} cannot be cut while {what}; try again behind it")
        self._cut_torn()

    def check_not_truncating(self) -> None:
        """Raise ``StorageError`` while the end is being cut."""
        if self.is_truncating:
            raise StorageError(f"the end of {self.directory} is being cut; try again behind that")

    def _begin_truncation(
        self,
        offset: int,
        kept: list[Segment],
        cut: Segment | None,
        following: list[Segment],
        now_ms: int,
        *,
        start_offset: int | None = None,
    ) -> TruncationJob:
        assert self._checkpoint is not None, "a segment exists only behind a checkpoint"
        epochs = EpochHistory() if start_offset is not None else self.epochs.copy()
        epochs.truncate_end(offset)
        bound = offset if start_offset is None else 0
        self.is_truncating = True
        if self._high_watermark is not None:
            self.note_high_watermark(min(self._high_watermark, offset))
        return TruncationJob(
            self._storage,
            self.directory,
            self._checkpoint,
            offset,
            kept,
            cut,
            None if cut is None else cut.file,
            following,
            epochs,
            min(self.first_dirty_offset, bound),
            self.first_dirty_offset > bound,
            start_offset,
            now_ms,
        )

    def finish_truncation(self, job: TruncationJob) -> None:
        """Take over the result of a job whose ``run`` returned."""
        self.is_truncating = False
        end = job.offset if job.start_offset is None else job.start_offset
        if job.cut is not None:
            job.kept[-1].take_file(job.cut)
        elif job.kept:
            job.kept[-1].reopen_for_append()
        for segment in job.following:
            segment.close()
        self._segments = job.kept
        self.producers, self.epochs = job.producers, job.epochs
        self.first_dirty_offset = job.first_dirty_offset
        for side_files in (self._side_files, self._deferred_side_files):
            side_files[:] = [
                side_file
                for side_file in side_files
                if job.kept and side_file.offset <= end and not side_file.path.endswith(EPOCHS_NAME)
            ]
        if job.start_offset is not None:
            self.log_start_offset = self.durable_offset = end
            if self._high_watermark is not None:
                self.note_high_watermark(end)
        if self.durable_offset >= end:
            self.durable_offset = end
            self._durable_segment = self._segments[-1].base_offset if self._segments else end
            self._durable_position = self._segments[-1].size_bytes if self._segments else 0
        self._directory_changed = False

    def truncation_failed(self, job: TruncationJob, error: StorageError) -> None:
        """Handle a job whose ``run`` raised; the log stops if what is on disk is unknown."""
        self.is_truncating = False
        if job.committed or isinstance(error, SyncFailed):
            self.fail(error)

    # --- deleting from the start

    def move_start(self, offset: int) -> list[Segment]:
        """Move the log start up to ``offset``, durably; returns the segments that ``discard`` can take."""
        self.check_not_truncating()
        assert offset <= self.durable_offset, "only what is durable can be deleted on purpose"
        if offset > self.log_start_offset:
            if self._checkpoint is not None:
                if self._directory_changed:
                    # A crash that keeps the new start must not lose the segment that holds it.
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
        """The offset below which segments are not needed to know the states of producers.

        Without a producer snapshot, deleting a producer's batches would let its retries in twice.
        """
        due = [side_file for side_file in self._side_files if side_file.offset <= self.durable_offset]
        try:
            for side_file in due:
                write_atomic(self._storage, side_file.path, side_file.data)
                self._side_files.remove(side_file)
        except DiskFull:
            # Deleting frees disk space, so it must work without any; forgetting producers is the lesser evil.
            return self.durable_offset
        snapshots = list_snapshots(self._storage, self.directory)
        if not snapshots:
            return 0
        # A producer snapshot that an orderly stop wrote is not synced.
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
