"""The log of one partition: segments of batches, appended at the end, deleted at the start.

Offsets, and who moves them (see durability.md):

    log_start_offset  ≤  durable_offset  ≤  end_offset

``append`` moves the end, a finished flush moves the durable offset, deletion moves the start. A replica whose
log has diverged from its leader's cuts its end (``truncation.py``). How the log is read is in ``reading.py``.

The caller owns the log: all methods run on one thread, except ``discard`` and the ``run`` of the jobs that
the log makes (``FlushJob``, ``TruncationJob``, ``LogCreation``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tidemill.config.topic import TopicConfig
from tidemill.errors import DiskFull, StorageError, SyncFailed
from tidemill.log.compaction.swap import save_clean_point
from tidemill.log.creation import LogCreation
from tidemill.log.epochs import EPOCHS_KIND, EPOCHS_NAME, EpochHistory
from tidemill.log.fetched_chunk import FetchedChunk, check_chunk
from tidemill.log.flush import FlushJob, SideFile, SideFilesDue
from tidemill.log.notes.checked_file import pack_checked
from tidemill.log.notes.checkpoint import Checkpoint, CheckpointFile
from tidemill.log.notes.inventory import OFFSETS_AHEAD, Inventory
from tidemill.log.notes.repaired import is_repaired, unmark_repaired
from tidemill.log.producer_state.producer_snapshots import list_snapshots, snapshot_file, snapshot_name
from tidemill.log.producer_state.producers import ProducerStates
from tidemill.log.reading import ReadableLog
from tidemill.log.segments.index import IndexCache
from tidemill.log.segments.segment import RELATIVE_OFFSET_MAX, Segment
from tidemill.log.segments.torn import TornTail
from tidemill.log.storage import Buffer, Storage, write_atomic
from tidemill.log.truncation import CutPlan, TruncationJob, plan_cut
from tidemill.records.batch import STAMPED_BYTES, BatchHeader, stamp_prefix
from tidemill.records.control import MARKER_BATCH_BYTES, MarkerEnd, build_markers

__all__ = ("SMALL_SEGMENTS_MAX", "Appended", "PartitionLog")

#: So many segments of a log may be as small and as short-lived as its topic says: opening, flushing and
#: deleting look at each of them on the event loop.
SMALL_SEGMENTS_MAX = 1_000
#: What the others have before the log rolls: Kafka's minimum of ``segment.bytes``, and a minute.
_LATER_SEGMENT_BYTES_MIN = 1024 * 1024
_LATER_SEGMENT_AGE_MS_MIN = 60_000
#: Stands for the listed bound of a log without an inventory: no offset is too high.
_NO_LIST = 2**63 - 1


class Appended(NamedTuple):
    """The offsets that an append got."""

    base_offset: int
    last_offset: int
    #: The batch was in the log already: the producer had sent it before.
    duplicate: bool


class PartitionLog(ReadableLog):
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
        super().__init__(
            directory,
            config,
            segments=segments,
            producers=producers,
            epochs=epochs,
            log_start_offset=checkpoint.current.log_start_offset if checkpoint else 0,
        )
        self._storage = storage
        self._inventory = inventory
        #: The inventory says that offsets below this one may have been given out.
        self._listed_below = _NO_LIST if inventory is None else inventory.listed_below(directory)
        self._is_listing_durable = inventory is None
        self._cache = cache
        self._checkpoint = checkpoint
        #: Makes the first files; None if there are files, or nobody has asked for them.
        self._creation: LogCreation | None = None
        self._directory_changed = False
        self._side_files = SideFilesDue(due)
        #: Segments whose files are being replaced: they are read, and must not be removed by name.
        self.held: frozenset[Segment] = frozenset()
        #: Called once before the first files are created; raises ``TooManyFiles`` if that must not be now.
        self.check_first_files: Callable[[], None] = lambda: None
        #: Set when durability is unknown; nothing is written any more.
        self.failure: StorageError | None = None
        #: Set while the owner accepts no appends; reads go on.
        self.refusal: StorageError | None = None
        #: Bytes behind the last whole batch that recovery had no disk space to keep; cut before the next
        #: append.
        self._torn = torn
        self._high_watermark = self._found_high_watermark()
        #: Repaired with loss: as a replica it has to start anew.
        self.is_repaired = checkpoint is not None and is_repaired(storage, directory)
        #: Whether a flush, or a cut of the end, was begun and not finished.
        self.is_flushing = False
        self.is_truncating = False

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

    def append_markers(self, ends: Sequence[MarkerEnd], leader_epoch: int, now_ms: int) -> Appended:
        """Write the control batches that end transactions at once: all of them, or none.

        Raises as ``append`` does.
        """
        self._check_writable()
        for end in ends:
            self.producers.check_end(*end)
        segment = self._segment_for_append(len(ends) * MARKER_BATCH_BYTES, len(ends) - 1, now_ms)
        offset = segment.next_offset
        written = build_markers(ends, timestamp_ms=now_ms, base_offset=offset, leader_epoch=leader_epoch)
        try:
            segment.file.write(segment.size_bytes, [written])
        except StorageError:
            self._undo_write(segment)
            raise
        segment.note_equal(len(ends), MARKER_BATCH_BYTES, now_ms)
        self._note_written(segment, offset, leader_epoch, now_ms)
        for number, end in enumerate(ends):
            self.producers.record_end(*end, offset + number, now_ms)
        return Appended(offset, offset + len(ends) - 1, duplicate=False)

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

    def copied_compacted(self, offset: int) -> None:
        """Note durably that this log is a copy of one that was compacted below ``offset``.

        If the log ends below the offset at the next start, the note goes: the copy has to begin anew then.
        """
        save_clean_point(self._storage, self.directory, offset)
        self.first_dirty_offset = offset

    def _write_fetched(self, fetched: FetchedChunk, start: int, now_ms: int) -> int:
        """Append as many batches as one segment takes, by one write; returns how many are done."""
        first = fetched.batches[start]
        if not self._segments or self._segments[-1].next_offset != first.header.base_offset:
            self._start_empty_log(first.header.base_offset)
        segment = self._segment_for_append(first.header.size_bytes, first.header.last_offset_delta, now_ms)
        stop, size_bytes = start + 1, segment.size_bytes + first.header.size_bytes
        for batch in fetched.batches[start + 1 :]:
            size_bytes += batch.header.size_bytes
            is_far = batch.header.last_offset - segment.base_offset > RELATIVE_OFFSET_MAX
            if size_bytes > self._segment_bytes_max or is_far:
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

    def _write(self, data: Buffer, header: BatchHeader, leader_epoch: int, now_ms: int) -> int:
        """Append a batch; returns its base offset."""
        segment = self._segment_for_append(header.size_bytes, header.last_offset_delta, now_ms)
        base_offset = segment.next_offset
        prefix = stamp_prefix(header, base_offset, leader_epoch)
        try:
            segment.append(
                [prefix, memoryview(data)[STAMPED_BYTES:]], header, base_offset, header.max_timestamp
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
            self._side_files.add(
                SideFile(f"{self.directory}/{EPOCHS_NAME}", self._epoch_bytes(), self.end_offset)
            )

    def _segment_for_append(self, size_bytes: int, last_offset_delta: int, now_ms: int) -> Segment:
        """The segment that takes so many bytes, whose last record is so far behind the log end."""
        self._cut_torn()
        segment = self._segment_with_capacity(size_bytes, last_offset_delta, now_ms)
        self._list_up_to(segment.next_offset + last_offset_delta)
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

    def _segment_with_capacity(self, size_bytes: int, last_offset_delta: int, now_ms: int) -> Segment:
        if not self._segments:
            return self._add_segment(self.log_start_offset)
        active = self._segments[-1]
        if active.size_bytes == 0 or not self._must_roll(active, size_bytes, last_offset_delta, now_ms):
            return active
        return self.roll()

    def _must_roll(self, active: Segment, size_bytes: int, last_offset_delta: int, now_ms: int) -> bool:
        age_ms_max = self.config.segment_age_max_ms
        if self._has_many_segments:
            age_ms_max = max(age_ms_max, _LATER_SEGMENT_AGE_MS_MIN)
        return (
            active.age_ms(now_ms) >= age_ms_max
            or active.size_bytes + size_bytes > self._segment_bytes_max
            or active.next_offset + last_offset_delta - active.base_offset > RELATIVE_OFFSET_MAX
        )

    @property
    def _segment_bytes_max(self) -> int:
        """The size that the active segment may grow to."""
        configured = self.config.segment_bytes
        return max(configured, _LATER_SEGMENT_BYTES_MIN) if self._has_many_segments else configured

    @property
    def _has_many_segments(self) -> bool:
        return len(self._segments) >= SMALL_SEGMENTS_MAX

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
        self._side_files.add(SideFile(old.index_path, old.seal(), new.base_offset))
        self._side_files.add(snapshot_file(self.directory, self.producers, new.base_offset))
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
        """What is best done in a thread before the first append; None if there is nothing to do.

        Raises ``TooManyFiles``.
        """
        if self._segments or self.failure is not None or self.refusal is not None:
            return None
        if self._creation is None:
            self._creation = self._new_creation()
        return None if self._creation.is_done else self._creation

    def _new_creation(self) -> LogCreation:
        self.check_first_files()
        return LogCreation(self._storage, self.directory, self._first_checkpoint(), self._checkpoint)

    def _first_checkpoint(self) -> Checkpoint:
        return Checkpoint(self.log_start_offset, self.log_start_offset, high_watermark=self._high_watermark)

    def _take_first_files(self) -> None:
        creation = self._creation or self._new_creation()
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
        if self.durable_offset == self.end_offset and not self._side_files.has_new:
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
            self._side_files.take(),
            None if self._is_listing_durable else self._inventory,
        )
        self.is_flushing = True
        self._is_listing_durable = True
        self._directory_changed = False
        return job

    def finish_flush(self, job: FlushJob) -> None:
        """Take over the result of a job whose ``run`` returned."""
        self.is_flushing = False
        self.durable_offset = job.target_offset
        self._durable_segment = job.segment_base_offset
        self._durable_position = job.position
        self._side_files.defer(job.side_files)

    def undo_flush(self, job: FlushJob) -> None:
        """Take back a job that could not open a file: the next one does all that it has left undone."""
        self.is_flushing = False
        self._directory_changed = self._directory_changed or job.sync_directory
        self._is_listing_durable = self._is_listing_durable and job.inventory is None
        self._side_files.put_back(job.side_files)

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
        self._side_files.retry_deferred()
        job = self.begin_flush()
        if job is not None:
            job.run()
            self.finish_flush(job)
            if self._side_files.has_deferred:
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
        self._side_files.keep_only(lambda side_file: side_file.path not in stale)

    # --- cutting the end

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
        plan = plan_cut(self, offset)
        if plan.offset <= self.log_start_offset:
            return self.begin_starting_anew(plan.offset, now_ms)
        return self._begin_truncation(plan, now_ms)

    def begin_starting_anew(self, offset: int, now_ms: int) -> TruncationJob | None:
        """A job that cuts everything, so that the log is empty at ``offset``; as ``begin_truncation``."""
        self._check_can_truncate()
        if self._checkpoint is None:
            self.log_start_offset = self.durable_offset = offset
            self.producers.forgetful = offset > 0
            return None
        everything = CutPlan(self.log_start_offset, [], None, list(self._segments))
        return self._begin_truncation(everything, now_ms, start_offset=offset)

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
        self, plan: CutPlan, now_ms: int, *, start_offset: int | None = None
    ) -> TruncationJob:
        assert self._checkpoint is not None, "a segment exists only behind a checkpoint"
        offset, kept, cut, following = plan
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
        self._side_files.keep_only(
            lambda side_file: (
                bool(job.kept) and side_file.offset <= end and not side_file.path.endswith(EPOCHS_NAME)
            )
        )
        if job.start_offset is not None:
            self.is_repaired = False
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

    def take_as_it_is(self) -> None:
        """Accept what a repair has left as the log, as an operator decided. Raises ``StorageError``."""
        if self.is_repaired:
            unmark_repaired(self._storage, self.directory)
            self._storage.sync_dir(self.directory)
            self.is_repaired = False

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
        try:
            self._side_files.write_new(self._storage, self.durable_offset)
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
