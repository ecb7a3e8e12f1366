"""A follower of a partition in one leader epoch: what it does with the answers of its leader. Pure.

- It fetches from its log end. Where the logs part, it cuts its own: by the epochs of both logs, never by its
  own high watermark.
- Until an answer has found its log to be a part of the leader's it reports no durable offset and takes no
  high watermark.
- Its high watermark is the leader's, or its log end if that is lower.
- Its log start is the leader's. A log that ends below it starts anew there.
- A log that was repaired with loss has not what its offsets promise: it starts anew, whatever they say.
- A log that ends where the leader has already removed tombstones and markers would keep what they delete: it
  starts anew, too, unless it was complete so short a time ago that none of them can have been removed since.
"""

from __future__ import annotations

from typing import NamedTuple

from tidemill.cluster.messages import FetchedPartition
from tidemill.log.epochs import EpochHistory

__all__ = ("FollowerStep", "FollowingState")


class FollowerStep(NamedTuple):
    """What to do with an answer: cut the log, start it anew, or else append."""

    cut_at: int | None = None
    start_anew_at: int | None = None


class FollowingState:
    """What a follower knows of its leader in one epoch.

    Attributes:
        leader: The node that leads.
        is_lost: The log was repaired with loss, and has not started anew since.
        is_matched: The log is known to be a part of the leader's.
        leader_log_start: The leader's log start, as far as it was told.
        leader_high_watermark: The leader's high watermark, as far as it was told.
        compaction_floor: No replica compacts at or above it.
    """

    __slots__ = (
        "_complete_ms",
        "compaction_floor",
        "is_lost",
        "is_matched",
        "leader",
        "leader_high_watermark",
        "leader_log_start",
    )

    def __init__(self, leader: int, *, is_lost: bool = False) -> None:
        self.leader = leader
        self.is_lost = is_lost
        self.is_matched = False
        self.leader_log_start = 0
        self.leader_high_watermark = 0
        #: Unknown until the leader has answered: nothing is compacted.
        self.compaction_floor = 0
        #: When nothing was missing that the leader may have removed since.
        self._complete_ms: int | None = None

    @property
    def may_report(self) -> bool:
        """Whether the durable offset may be reported: once this log is known to match the leader's."""
        return self.is_matched

    def reported_durable(self, durable_offset: int) -> int:
        """The durable offset that the leader is told; -1 while it may not hear it."""
        return durable_offset if self.may_report else -1

    def answered(
        self,
        answer: FetchedPartition,
        *,
        end_offset: int,
        is_empty: bool,
        epochs: EpochHistory,
        delete_retention_ms: int,
        now_ms: int,
    ) -> FollowerStep:
        """Take an answer without an error; returns what to do before anything is fetched again."""
        if self.is_lost:
            return self._anew(answer)
        if answer.diverging is not None:
            self.is_matched = False
            return FollowerStep(cut_at=self._common_end(answer, end_offset, epochs))
        self.leader_log_start = answer.log_start_offset
        self.compaction_floor = answer.compaction_floor
        if end_offset < answer.log_start_offset:
            return self._anew(answer)
        if is_empty or end_offset >= answer.removed_below:
            self._complete_ms = now_ms
        elif self._complete_ms is None or now_ms - self._complete_ms > delete_retention_ms // 2:
            return self._anew(answer)
        self.is_matched = True
        return FollowerStep()

    def _anew(self, answer: FetchedPartition) -> FollowerStep:
        self.is_matched = False
        return FollowerStep(start_anew_at=answer.log_start_offset)

    @staticmethod
    def _common_end(answer: FetchedPartition, end_offset: int, epochs: EpochHistory) -> int:
        """Where to cut: the end of the largest epoch that both logs can have in common, in either of them."""
        diverging = answer.diverging
        assert diverging is not None
        _, own_end = epochs.end_offset_for(diverging.epoch, end_offset)
        return min(diverging.end_offset, own_end if own_end >= 0 else end_offset)

    def high_watermark(self, of_leader: int, end_offset: int) -> int | None:
        """The high watermark that this follower may take; None while its log is not matched."""
        return min(of_leader, end_offset) if self.is_matched else None
