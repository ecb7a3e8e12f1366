"""Opening a partition's log after an orderly stop or a crash.

After an orderly stop the checkpoint names the end of the log and the files are believed. After anything else
the segments from the recovery point on are read batch by batch, and the law of durability.md decides:

- damage below the recovery point is corruption: ``CorruptData``, and nothing is changed;
- the first batch at or above it that does not check out is where the log was torn: everything from there is
  cut, kept in a file beside, and reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.config.topic import TopicConfig
from tidemill.errors import CorruptData, DiskFull, StorageError
from tidemill.log.compaction.swap import CLEAN_POINT_NAME, finish_swaps, load_clean_point
from tidemill.log.epochs import EPOCHS_KIND, EPOCHS_NAME, EpochHistory
from tidemill.log.flush import SideFile
from tidemill.log.log import PartitionLog
from tidemill.log.notes.checked_file import pack_checked, read_checked
from tidemill.log.notes.checkpoint import CHECKPOINT_NAME, Checkpoint, CheckpointFile
from tidemill.log.notes.inventory import Inventory
from tidemill.log.producer_state.producer_snapshots import (
    list_snapshots,
    newest_snapshot,
    replay_segment,
    snapshot_file,
    snapshot_name,
)
from tidemill.log.producer_state.producers import ProducerStates
from tidemill.log.segments.index import IndexCache
from tidemill.log.segments.segment import Segment
from tidemill.log.segments.segment_reader import SegmentReader
from tidemill.log.segments.segment_walk import BrokenBatch, walk_contiguous
from tidemill.log.segments.torn import Cut, TornTail, put_aside
from tidemill.log.storage import Storage, write_atomic
from tidemill.records.batch import BatchHeader

__all__ = ("RecoveryReport", "files_are_gone", "list_segments", "open_log")

_LOG_ENDING = ".log"
_WRITE_BACK_BYTES = 1024 * 1024


@dataclass(slots=True)
class RecoveryReport:
    """A report of what recovery did when it opened a log."""

    directory: str
    clean: bool = True
    scanned_bytes: int = 0
    cuts: list[Cut] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def list_segments(storage: Storage, directory: str) -> list[int]:
    """Base offsets of the segments in a directory, in order."""
    return sorted(
        int(name.removesuffix(_LOG_ENDING))
        for name in storage.list_dir(directory)
        if name.endswith(_LOG_ENDING) and name.removesuffix(_LOG_ENDING).isdigit()
    )


def files_are_gone(directory: str) -> CorruptData:
    """The error for a partition that had data and has no files."""
    topic, _, partition = directory.removeprefix("logs/").partition("/")
    argument = f"{topic}:{partition.rpartition('-')[2]}"
    return CorruptData(
        f"it had data, and the files in {directory} are gone; stop the node and restore the directory from a "
        f"backup, or give up what was in it with 'tidemill log repair {argument} --accept-loss'",
        path=directory,
        position=0,
    )


def open_log(
    storage: Storage,
    directory: str,
    config: TopicConfig,
    cache: IndexCache | None = None,
    *,
    now_ms: int = 0,
    inventory: Inventory | None = None,
) -> tuple[PartitionLog, RecoveryReport]:
    """Open the log in ``directory``.

    A missing directory is an empty log, created at the first append, unless ``inventory`` knows that there
    were files: then it is damage, and ``CorruptData``.

    A producer whose state has to be read back from its batches counts as active at ``now_ms``: the batches'
    own timestamps may be years old, and expiring it would let its retries in as duplicates.
    """
    return _Opening(storage, directory, config, cache or IndexCache(), now_ms, inventory).run()


class _Opening:
    """The steps of ``open_log``, and the state that they share."""

    def __init__(
        self,
        storage: Storage,
        directory: str,
        config: TopicConfig,
        cache: IndexCache,
        now_ms: int,
        inventory: Inventory | None,
    ) -> None:
        self.inventory = inventory
        self.storage = storage
        self.directory = directory
        self.config = config
        self.cache = cache
        self.now_ms = now_ms
        self.report = RecoveryReport(directory)
        #: Segments below the log start: left-overs of a deletion that a crash brought back.
        self.stale: list[Segment] = []
        #: Side files that should be on disk and found no space there.
        self.due: list[SideFile] = []
        self.torn: TornTail | None = None
        self.seen_epochs: list[tuple[int, int]] = []

    def run(self) -> tuple[PartitionLog, RecoveryReport]:
        names = finish_swaps(self.storage, self.directory)
        bases = list_segments(self.storage, self.directory)
        if not self.storage.exists(f"{self.directory}/{CHECKPOINT_NAME}"):
            if bases:
                raise CorruptData(
                    "segments but no checkpoint; run 'tidemill log repair'", path=self.directory, position=0
                )
            if self.inventory is not None and self.directory in self.inventory:
                raise files_are_gone(self.directory)
            return self._log(None, []), self.report
        checkpoint = CheckpointFile.load(self.storage, self.directory)
        segments: list[Segment] = []
        try:
            segments = self._segments(bases, checkpoint.current)
            if not self._opened_clean(segments, checkpoint.current):
                self._recover(segments, checkpoint)
            if segments:
                segments[-1].reopen_for_append()
            log = self._log(checkpoint, segments)
            if CLEAN_POINT_NAME in names:
                log.first_dirty_offset = load_clean_point(self.storage, self.directory, log.end_offset)
            if not self.report.clean and not self.due:
                # Saved last: until all side files are on disk, the next start must read as much again.
                checkpoint.save(Checkpoint(log.log_start_offset, log.end_offset))
            for segment in self.stale:
                segment.remove()
            return log, self.report
        except BaseException:
            for segment in segments:
                segment.close()
            checkpoint.close()
            raise

    def _segments(self, bases: list[int], checkpoint: Checkpoint) -> list[Segment]:
        kept = [base for base in bases if base >= checkpoint.log_start_offset]
        below = [base for base in bases if base < checkpoint.log_start_offset]
        if below and not (kept and kept[0] == checkpoint.log_start_offset):
            # The last of these reaches over the log start; the others are left-overs of a deletion.
            kept.insert(0, below.pop())
        self.stale = [self._segment(base) for base in below]
        return [self._segment(base) for base in kept]

    def _segment(self, base: int) -> Segment:
        return Segment(self.storage, self.directory, base, self.config.index_interval_bytes, self.cache)

    # --- orderly stop

    def _opened_clean(self, segments: list[Segment], checkpoint: Checkpoint) -> bool:
        if not segments:
            return checkpoint.recovery_point <= checkpoint.log_start_offset
        active = segments[-1]
        if not checkpoint.clean or (active.base_offset, active.file.size()) != (
            checkpoint.active_base_offset,
            checkpoint.active_size_bytes,
        ):
            return False
        return (
            all(segment.load() for segment in segments)
            and active.next_offset == checkpoint.recovery_point
            and segments[0].base_offset <= checkpoint.log_start_offset
            and not any(self._gap_behind(segments, number) for number in range(len(segments)))
        )

    # --- anything else

    def _recover(self, segments: list[Segment], checkpoint: CheckpointFile) -> None:
        self.report.clean = False
        recovery_point = checkpoint.current.recovery_point
        self._check_first(segments, checkpoint.current)
        scanned = []
        for number, segment in enumerate(segments):
            sealed_below = number + 1 < len(segments) and segments[number + 1].base_offset <= recovery_point
            if sealed_below and segment.load():
                self._check_gap(segments, number, recovery_point)
                continue
            scanned.append(segment)
            whole = self._scan(segment, recovery_point)
            self._check_gap(segments, number, recovery_point)
            if not whole or self._gap_behind(segments, number):
                self._cut_following(segments, number)
                break
        end_offset = segments[-1].next_offset if segments else checkpoint.current.log_start_offset
        if end_offset < recovery_point:
            path = segments[-1].log_path if segments else self.directory
            size = segments[-1].size_bytes if segments else 0
            raise CorruptData(
                f"the log ends at offset {end_offset}, but {recovery_point} was durable; "
                "run 'tidemill log repair'",
                path=path,
                position=size,
            )
        # After a crash of the process alone, what was just read may still be in the page cache only.
        for segment in segments:
            if segment.next_offset >= recovery_point:
                self._write_back(segment, recovery_point)
                if segment is segments[-1] and self.torn is None:
                    # The file's end, too: a truncation whose sync failed may be undone by a power loss.
                    segment.file.truncate(segment.size_bytes + 1)
                    segment.file.truncate(segment.size_bytes)
                segment.file.sync()
        self.storage.sync_dir(self.directory)
        for segment in scanned:
            if segment is not segments[-1]:
                # Without its index file a sealed segment would be read in full at every start from now on.
                self._write_side_file(SideFile(segment.index_path, segment.seal(), segment.next_offset))

    def _write_back(self, segment: Segment, recovery_point: int) -> None:
        """Write what is above the recovery point once more, as it is.

        If the last process stopped because an fsync failed, the kernel may count those pages as clean
        although they never reached the disk; a sync alone would then say yes without writing them.
        """
        reader = SegmentReader(
            segment, segment.size_bytes, segment.next_offset, EpochHistory(), lambda damage: None
        )
        found = reader.find(recovery_point)
        position = segment.size_bytes if found is None else found[0]
        while position < segment.size_bytes:
            data = segment.file.read(position, min(_WRITE_BACK_BYTES, segment.size_bytes - position))
            segment.file.write(position, [data])
            position += len(data)

    def _write_side_file(self, side_file: SideFile) -> None:
        try:
            write_atomic(self.storage, side_file.path, side_file.data)
        except DiskFull as error:
            self.report.warnings.append(f"it is written when there is room: {error}")
            self.due.append(side_file)

    def _check_first(self, segments: list[Segment], checkpoint: Checkpoint) -> None:
        """Check that the oldest segment holds the log start; if it never became durable, no later one did."""
        start = checkpoint.log_start_offset
        if not segments or segments[0].base_offset <= start:
            return
        if checkpoint.recovery_point > start:
            raise CorruptData(
                f"offsets {start} … {segments[0].base_offset - 1} are missing; run 'tidemill log repair'",
                path=segments[0].log_path,
                position=0,
            )
        self._cut_following(segments, -1)

    def _scan(self, segment: Segment, recovery_point: int) -> bool:
        """Read all of a segment. False if it was cut."""
        try:
            for _, header in segment.rebuild(verify=True):
                if header.last_offset >= recovery_point:
                    # No checksum covers a batch's epoch, so below it the history alone is believed.
                    self._note_epoch(header)
        except BrokenBatch as broken:
            if segment.next_offset < recovery_point:
                raise CorruptData(
                    f"damage below the recovery point {recovery_point}: {broken.reason}; "
                    "run 'tidemill log verify' and 'tidemill log repair'",
                    path=segment.log_path,
                    position=broken.position,
                ) from broken
            self._cut_tail(segment, broken)
            return False
        finally:
            self.report.scanned_bytes += segment.size_bytes
        return True

    def _note_epoch(self, header: BatchHeader) -> None:
        if not self.seen_epochs or self.seen_epochs[-1][0] < header.leader_epoch:
            self.seen_epochs.append((header.leader_epoch, header.base_offset))

    def _gap_behind(self, segments: list[Segment], number: int) -> bool:
        return number + 1 < len(segments) and segments[number + 1].base_offset != segments[number].next_offset

    def _check_gap(self, segments: list[Segment], number: int, recovery_point: int) -> None:
        if not self._gap_behind(segments, number):
            return
        segment, following = segments[number], segments[number + 1]
        if following.base_offset < segment.next_offset:
            what = f"offsets {following.base_offset} … {segment.next_offset - 1} are there twice"
        elif segment.next_offset < recovery_point:
            what = f"offsets {segment.next_offset} … {following.base_offset - 1} are missing"
        else:
            return
        raise CorruptData(
            f"{what}; run 'tidemill log verify' and 'tidemill log repair'",
            path=segment.log_path,
            position=segment.size_bytes,
        )

    def _cut_tail(self, segment: Segment, broken: BrokenBatch) -> None:
        torn = TornTail(segment, broken.position, broken.reason)
        segment.size_bytes = broken.position
        try:
            self.report.cuts.append(torn.cut(self.storage))
        except DiskFull as error:
            # What is before the torn end can be read. The end is cut before anything is appended.
            self.torn = torn
            self.report.warnings.append(f"its torn end is cut when there is room: {error}")

    def _cut_following(self, segments: list[Segment], number: int) -> None:
        for segment in segments[number + 1 :]:
            size = segment.file.size()
            segment.close()
            reason = "it follows a batch that did not check out"
            self.report.cuts.append(put_aside(self.storage, segment.log_path, size, reason))
            if self.storage.exists(segment.index_path):
                self.storage.remove(segment.index_path)
        del segments[number + 1 :]

    # --- the folds

    def _log(self, checkpoint: CheckpointFile | None, segments: list[Segment]) -> PartitionLog:
        start = checkpoint.current.log_start_offset if checkpoint else 0
        end_offset = segments[-1].next_offset if segments else start
        producers = self._producers(segments, start, end_offset)
        epochs = self._epochs(segments, start, end_offset)
        if not self.report.clean:
            # Retention may delete any segment from now on, so the producers' states are saved first.
            self._write_side_file(snapshot_file(self.directory, producers, end_offset))
        return PartitionLog(
            self.storage,
            self.directory,
            self.config,
            cache=self.cache,
            checkpoint=checkpoint,
            segments=segments,
            producers=producers,
            epochs=epochs,
            due=self.due,
            inventory=self.inventory,
            torn=self.torn,
        )

    def _epochs(self, segments: list[Segment], start_offset: int, end_offset: int) -> EpochHistory:
        if not segments:
            return EpochHistory()
        history = EpochHistory()
        path = f"{self.directory}/{EPOCHS_NAME}"
        try:
            history = EpochHistory.from_bytes(read_checked(self.storage, path, EPOCHS_KIND))
            news = False
        except StorageError as error:
            if self.storage.exists(path):
                self.report.warnings.append(f"leader epochs are rebuilt from the log: {error}")
            news = True
            self.seen_epochs = []
            for segment in segments:
                end = self._end_position(segment)
                for _, header in walk_contiguous(segment.file, segment.base_offset, end):
                    self._note_epoch(header)
        # Written to disk, too: the log may grow over an entry for offsets that were cut, in an older epoch.
        news = history.truncate_end(end_offset) or news
        for epoch, offset in self.seen_epochs:
            news = history.assign(epoch, offset) or news
        history.truncate_start(start_offset)
        if news:
            self._write_side_file(SideFile(path, pack_checked(EPOCHS_KIND, history.to_bytes()), end_offset))
        return history

    def _end_position(self, segment: Segment) -> int:
        """The byte where the segment ends, or where it is torn."""
        torn = self.torn
        return torn.position if torn is not None and torn.segment is segment else segment.file.size()

    def _producers(self, segments: list[Segment], start_offset: int, end_offset: int) -> ProducerStates:
        states, offset = self._newest_snapshot(end_offset)
        if start_offset > 0 and offset == 0:
            states.forgetful = True
        for segment in self.stale:
            # It is below the log start, but it may hold the last batches of some producer.
            try:
                self._replay(states, segment, offset)
            except StorageError as error:
                self.report.warnings.append(f"producers are not read from a deleted segment: {error}")
        for segment in segments:
            if segment.next_offset > offset:
                self._replay(states, segment, offset)
        return states

    def _replay(self, states: ProducerStates, segment: Segment, offset: int) -> None:
        end = self._end_position(segment)
        replay_segment(states, segment.file, segment.base_offset, end, offset, self.now_ms)

    def _newest_snapshot(self, end_offset: int) -> tuple[ProducerStates, int]:
        for offset in list_snapshots(self.storage, self.directory):
            if offset > end_offset:
                # It covers batches that were cut: kept, it would be taken for valid when the log has grown
                # again.
                self.storage.remove(f"{self.directory}/{snapshot_name(offset)}")
        return newest_snapshot(self.storage, self.directory, end_offset, self._remove_snapshot)

    def _remove_snapshot(self, path: str, error: StorageError) -> None:
        # Removed, so that retention does not rely on it: segments are deleted once a snapshot covers them.
        self.report.warnings.append(f"a producer snapshot is removed: {error}")
        self.storage.remove(path)
