"""What a partition does as a follower: takes what it fetched, cuts what its leader does not have.

``following`` has the rules. While the log is cut nothing is appended or flushed, and no role is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tidemill.cluster.messages import FetchedPartition, FetchPartition, HeartbeatPartition, ReplicaProgress
from tidemill.errors import ApiError, ErrorCode, StorageError
from tidemill.log.segments.segment import Segment
from tidemill.log.segments.segment_reader import ReadBudget
from tidemill.log.truncation import TruncationJob
from tidemill.replication.rules.assignment import NO_LEADER
from tidemill.replication.rules.following import FollowerStep
from tidemill.replication.rules.state import ReplicationState

if TYPE_CHECKING:
    from tidemill.replication.partition import Partition

__all__ = ("FollowerSide",)


class FollowerSide:
    """The part of a ``Partition`` that only a follower needs."""

    __slots__ = ("_partition", "_state", "cut_count", "on_cut", "on_deleted", "on_progress")

    def __init__(self, partition: Partition, state: ReplicationState) -> None:
        self._partition = partition
        self._state = state
        #: How often the end of the log was cut since it was opened.
        self.cut_count = 0
        #: Told when there is something to report to the leader.
        self.on_progress: Callable[[Partition], None] = lambda partition: None
        #: Told that the log was cut, and where it ends now: what was folded from above it is void.
        self.on_cut: Callable[[Partition, int], None] = lambda partition, end_offset: None
        #: Given segments that were deleted at the log start.
        self.on_deleted: Callable[[Partition, list[Segment]], None] = lambda partition, segments: (
            partition.discard(segments)
        )

    @property
    def leader(self) -> int:
        """The node that this one follows; ``NO_LEADER`` if it follows nobody."""
        return NO_LEADER if self._state.following is None else self._state.following.leader

    def follows(self, node_id: int, leader_epoch: int) -> bool:
        """Whether this replica follows that node in that leader epoch, and knows of no later one."""
        return self.leader == node_id and self._state.leader_epoch == leader_epoch

    @property
    def lag(self) -> int:
        """How many committed offsets this replica lacks, as far as its leader has told; 0 if it leads."""
        following = self._state.following
        if following is None:
            return 0
        return max(0, following.leader_high_watermark - self._partition.log_end_offset)

    # --- fetching and reporting

    def fetch_position(self, max_bytes: int) -> FetchPartition | None:
        """What this follower asks its leader for next; None if it cannot take anything now."""
        log, following = self._partition.local_log, self._state.following
        if following is None or following.leader == NO_LEADER or log.is_truncating or log.failure:
            return None
        return FetchPartition(
            self._partition.id,
            offset=log.end_offset,
            max_bytes=max_bytes,
            leader_epoch=self._state.leader_epoch,
            last_epoch=log.epochs.latest_epoch,
            durable=following.reported_durable(log.durable_offset),
        )

    def progress(self) -> ReplicaProgress | None:
        """What this follower reports to its leader; None while it has nothing to say."""
        log, following = self._partition.local_log, self._state.following
        if following is None or not following.may_report or log.failure is not None:
            return None
        return ReplicaProgress(
            self._partition.id,
            log_end=log.end_offset,
            high_watermark=self._state.high_watermark,
            durable=following.reported_durable(log.durable_offset),
            leader_epoch=self._state.leader_epoch,
            log_start=log.log_start_offset,
        )

    def take_answer(self, wanted: FetchPartition, answer: FetchedPartition, now_ms: int) -> FollowerStep:
        """Take what the leader has answered to ``wanted``. The step says whether the log has to be cut.

        An answer that comes late, behind a change of leader or of the log, changes nothing. Raises
        ``ApiError`` if the records are not what they must be, and ``StorageError``.
        """
        log, following = self._partition.local_log, self._state.following
        is_late = wanted.leader_epoch != self._state.leader_epoch or wanted.offset != log.end_offset
        if following is None or is_late or log.is_truncating or answer.error:
            return FollowerStep()
        was_matched, was_empty = following.is_matched, log.end_offset == log.log_start_offset
        step = following.answered(
            answer,
            end_offset=log.end_offset,
            is_empty=was_empty,
            epochs=log.epochs,
            delete_retention_ms=log.config.delete_retention_ms,
            now_ms=now_ms,
        )
        if step.cut_at is not None or step.start_anew_at is not None:
            return step
        try:
            if len(answer.records):
                log.append_as_follower(answer.records, self._state.leader_epoch, now_ms)
                if was_empty and answer.removed_below > wanted.offset:
                    # A copy: it lacks the tombstones that the leader has removed, and has to say so when it
                    # leads. Before anything of it is durable, so that no complete copy is without the note.
                    log.copied_compacted(answer.removed_below)
        finally:
            # Also behind an error, which may come when a part of the records is in the log.
            if log.end_offset > wanted.offset:
                self._partition.appended_as_follower(now_ms)
        self._told_high_watermark(answer.high_watermark)
        if self.follow_log_start() or not was_matched:
            self.on_progress(self._partition)
        return step

    def heartbeat(self, told: HeartbeatPartition, node_id: int) -> bool:
        """Take the high watermark that a leader tells. False if that node's leadership is over."""
        if told.leader_epoch < self._state.leader_epoch:
            return False
        if told.leader_epoch == self._state.leader_epoch and self.leader == node_id:
            self._told_high_watermark(told.high_watermark)
        return True

    def _told_high_watermark(self, of_leader: int) -> None:
        log = self._partition.local_log
        if self._state.told_high_watermark(of_leader, log.end_offset):
            log.note_high_watermark(self._state.high_watermark)
            self._partition.wake_readers()

    def flushed(self) -> None:
        """Note that more is durable here, which the next report tells the leader."""
        self.follow_log_start()
        self.on_progress(self._partition)

    def follow_log_start(self) -> bool:
        """Move the log start to the leader's, as far as this replica is durable. True if it moved."""
        log, following = self._partition.local_log, self._state.following
        if following is None or not following.is_matched or log.failure is not None:
            return False
        target = min(following.leader_log_start, log.durable_offset, self._state.high_watermark)
        if target <= log.log_start_offset:
            return False
        self.on_deleted(self._partition, self._partition.move_start(target))
        return True

    # --- cutting what the leader does not have

    def begin_cut(self, step: FollowerStep, leader_epoch: int, now_ms: int) -> TruncationJob | None:
        """The job that cuts the log as ``step`` says; ``finish_cut`` or ``cut_failed`` has to follow.

        None if there is nothing to run: the role has changed, or the log ends there already. Raises
        ``StorageError`` while a flush or a compaction is at work on the log.
        """
        log = self._partition.local_log
        if self._state.following is None or self._state.leader_epoch != leader_epoch:
            return None
        if step.start_anew_at is not None:
            job = log.begin_starting_anew(step.start_anew_at, now_ms)
            if job is None:
                self._cut(anew=True)
            return job
        assert step.cut_at is not None
        return log.begin_truncation(step.cut_at, now_ms)

    def finish_cut(self, job: TruncationJob) -> None:
        """Take over the result of a job whose ``run`` returned."""
        self._partition.local_log.finish_truncation(job)
        self._cut(anew=job.start_offset is not None)
        self._partition.resume_after_cut()

    def cut_failed(self, job: TruncationJob, error: StorageError) -> None:
        """Handle a job whose ``run`` raised. It may be tried again unless the log is stopped now."""
        log = self._partition.local_log
        log.truncation_failed(job, error)
        if log.failure is not None:
            self._partition.flush_failed(log.failure)
        self._partition.resume_after_cut()

    def _cut(self, *, anew: bool) -> None:
        log = self._partition.local_log
        self.cut_count += 1
        self._state.cut(log.end_offset, log.durable_offset, anew=anew)
        log.note_high_watermark(self._state.high_watermark)
        self.on_cut(self._partition, log.end_offset)
        self._partition.wake_readers()

    # --- clients that read from the closest replica

    @property
    def serves_clients(self) -> bool:
        """Whether clients may read from this follower: its log is known to be a part of the leader's."""
        following = self._state.following
        return following is not None and following.is_matched and self._partition.failure is None

    def check_position(self, offset: int) -> None:
        """Raise ``ApiError`` unless this follower has everything below ``offset``, and knows it committed.

        The error is OFFSET_NOT_AVAILABLE, with which clients go to the leader: only that says "out of range".
        """
        partition = self._partition
        if not partition.log_start_offset <= offset <= self._state.high_watermark:
            raise ApiError(
                ErrorCode.offset_not_available,
                f"offset {offset} of {partition.topic}-{partition.index} is not on this follower, which has "
                f"{partition.log_start_offset} … {self._state.high_watermark}; ask the leader",
            )

    def read(
        self,
        offset: int,
        max_bytes: int,
        *,
        at_least_one: bool,
        committed: bool = False,
        budget: ReadBudget | None = None,
    ) -> memoryview:
        """Whole batches below this follower's high watermark.

        Raises ``ApiError`` OFFSET_NOT_AVAILABLE as ``check_position`` does.
        """
        log = self._partition.local_log
        if log.failure is not None:
            raise log.failure
        self.check_position(offset)
        upper = self._partition.upper_offset(committed=committed)
        if offset >= upper:
            return memoryview(b"")
        return log.read_on(offset, max_bytes, upper, at_least_one=at_least_one, budget=budget)
