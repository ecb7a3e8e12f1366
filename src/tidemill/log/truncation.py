"""Cutting the end of a log: what a follower does when its log has diverged from its leader's.

    job = log.begin_truncation(offset, now_ms)   owner
    job.run()                                    any thread: it waits for the disk several times
    log.finish_truncation(job)                   owner; or ``truncation_failed``

The order of the steps is the safeguard. A start finds the old log or the cut one, wherever a crash comes:

1. The recovery point goes down durably. From here on a start reads everything above it anew: the batches,
   their epochs and their producers. If what follows is lost, what it finds is the old log.
2. What is derived is brought down: epoch history, clean point, the index of the segment that is cut. All of
   it may be lower than the log, never higher.
3. The bytes that go are kept in a file beside; the file and its name are durable.
4. The segment is cut and synced, or, if the cut falls between two segments, the first one above is put aside
   and the directory synced. That is the moment of the cut: what follows begins behind a gap, and any start
   puts it aside.
5. The segments above are put aside, producer snapshots above are removed, and the directory is synced, so
   that none of it is there when the log grows over these offsets again.

So what was cut may come back in a crash until ``run`` has returned, and never afterwards. It does no harm
until then: nothing is appended meanwhile, and a follower reports no durable offset for what it has not
matched with its leader.

If nothing of the log is left it starts anew, at the offset that was asked for. The new start is noted last: a
crash before that leaves an empty log at the old start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tidemill.errors import DamagedBatch
from tidemill.log.compaction.swap import save_clean_point
from tidemill.log.epochs import EPOCHS_KIND, EPOCHS_NAME, EpochHistory
from tidemill.log.notes.checked_file import pack_checked
from tidemill.log.notes.checkpoint import Checkpoint, CheckpointFile
from tidemill.log.notes.repaired import unmark_repaired
from tidemill.log.producer_state.producer_snapshots import (
    list_snapshots,
    newest_snapshot,
    replay_segment,
    snapshot_name,
)
from tidemill.log.producer_state.producers import ProducerStates
from tidemill.log.reading import ReadableLog
from tidemill.log.segments.segment import Segment
from tidemill.log.segments.torn import Cut, keep_tail, put_aside
from tidemill.log.storage import Storage, StorageFile, write_atomic

__all__ = ("CutPlan", "TruncationJob", "plan_cut")

_REASON = "it is not in the leader's log"


class CutPlan(NamedTuple):
    """What a cut does with the segments of a log."""

    #: Where the first batch that goes begins.
    offset: int
    #: Segments that stay, the cut one among them in its new form.
    kept: list[Segment]
    #: The segment that is cut, as it was; None if the cut falls between two segments.
    cut: Segment | None
    #: Segments that go as a whole.
    following: list[Segment]


def plan_cut(log: ReadableLog, offset: int) -> CutPlan:
    """Plan the cut of everything from the batch that holds ``offset`` on, which is in the log."""
    segment = next(log.segments_from(offset))
    try:
        found = log.reader(segment).find(offset)
        assert found is not None, "the offset is below the log end"
        position, first_offset = found[0], found[1].base_offset
    except DamagedBatch as damage:
        position, first_offset = damage.position, damage.first_offset
    segments = list(log.segments)
    number = segments.index(segment)
    if position == 0:
        return CutPlan(first_offset, segments[:number], None, segments[number:])
    kept = [*segments[:number], segment.cut_to(position, first_offset)]
    return CutPlan(first_offset, kept, segment, segments[number + 1 :])


@dataclass(slots=True)
class TruncationJob:
    """The cut of a log from ``offset`` on, which is where a batch begins."""

    storage: Storage
    directory: str
    checkpoint: CheckpointFile
    offset: int
    #: Segments that stay, the cut one among them in its new form.
    kept: list[Segment]
    #: The segment that is cut, as it was; None if the cut falls between two segments.
    cut: Segment | None
    #: An open file of the cut segment: readers may open the segment's own meanwhile.
    cut_file: StorageFile | None
    #: Segments that go as a whole.
    following: list[Segment]
    epochs: EpochHistory
    first_dirty_offset: int
    clean_point_changed: bool
    #: The new start if nothing stays, else None.
    start_offset: int | None
    now_ms: int
    #: The states of producers before ``offset``; set by ``run``.
    producers: ProducerStates = field(default_factory=ProducerStates)
    cuts: list[Cut] = field(default_factory=list)
    #: Whether a part of the log was cut: after an error only a start can tell what is there.
    committed: bool = False

    def run(self) -> None:
        """Cut the log. After an error before ``committed`` it is as before, except for its recovery point."""
        self._replay_producers()
        self.checkpoint.lower(self.offset)
        self._lower_derived()
        self._cut_first()
        self._put_following_aside()
        self._remove_snapshots()
        self.storage.sync_dir(self.directory)
        if self.start_offset is not None:
            self.checkpoint.save(Checkpoint(self.start_offset, self.start_offset))
            # What a repair has left is gone.
            unmark_repaired(self.storage, self.directory)

    # --- the steps

    def _replay_producers(self) -> None:
        """Find the producers' states before ``offset``. Done first: nothing is changed yet if it fails."""
        if self.start_offset is not None:
            self.producers.forgetful = self.start_offset > 0
            return
        self.producers, from_offset = newest_snapshot(
            self.storage, self.directory, self.offset, lambda path, error: None
        )
        if from_offset == 0 and self.kept[0].base_offset > 0:
            self.producers.forgetful = True
        for segment in self.kept:
            if segment.next_offset <= from_offset:
                continue
            file = self.storage.open(segment.log_path)
            try:
                replay_segment(
                    self.producers, file, segment.base_offset, segment.size_bytes, from_offset, self.now_ms
                )
            finally:
                file.close()

    def _lower_derived(self) -> None:
        data = pack_checked(EPOCHS_KIND, self.epochs.to_bytes())
        write_atomic(self.storage, f"{self.directory}/{EPOCHS_NAME}", data)
        if self.clean_point_changed:
            save_clean_point(self.storage, self.directory, self.first_dirty_offset)

    def _cut_first(self) -> None:
        """Take step 4: cut the segment or put the first one above aside, durably."""
        if self.cut is None or self.cut_file is None:
            self.committed = True
            for first in self.following[:1]:
                self._put_aside(first)
                self.storage.sync_dir(self.directory)
            return
        position = self.kept[-1].size_bytes
        self.cuts.append(keep_tail(self.storage, self.cut_file, self.cut.log_path, position, _REASON))
        # Otherwise the index would seem to fit once the segment has grown to its old length with other
        # batches.
        self._remove(self.cut.index_path)
        self.storage.sync_dir(self.directory)
        self.committed = True
        self.cut_file.truncate(position)
        self.cut_file.sync()

    def _put_following_aside(self) -> None:
        for segment in self.following[0 if self.cut is not None else 1 :]:
            self._put_aside(segment)

    def _put_aside(self, segment: Segment) -> None:
        if segment.size_bytes:
            self.cuts.append(put_aside(self.storage, segment.log_path, segment.size_bytes, _REASON))
        else:
            self._remove(segment.log_path)
        self._remove(segment.index_path)

    def _remove_snapshots(self) -> None:
        for offset in list_snapshots(self.storage, self.directory):
            if offset > self.offset or self.start_offset is not None:
                self._remove(f"{self.directory}/{snapshot_name(offset)}")

    def _remove(self, path: str) -> None:
        if self.storage.exists(path):
            self.storage.remove(path)
