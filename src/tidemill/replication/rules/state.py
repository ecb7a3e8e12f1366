"""Replication state of one replica: its role, the leader epoch, and the high watermark. Pure.

- The high watermark is the least durable offset over the in-sync replicas, this one included. Only a leader
  decides it, and it never goes back: what somebody has read below it stays readable, whatever the in-sync set
  becomes.
- An epoch has one leader, so a change of role comes with a higher epoch.
- A new leader has every committed record, but does not know yet how far they were committed. Until the high
  watermark has reached the log end of its take-over, an answer about "the end" could be older than one that
  the leader before it gave.

``in_sync.InSyncReplicas`` is the part that only a leader has, ``following.FollowingState`` a follower's.
"""

from __future__ import annotations

from enum import Enum

from tidemill.replication.rules.assignment import NO_LEADER, PartitionAssignment
from tidemill.replication.rules.following import FollowingState
from tidemill.replication.rules.in_sync import InSyncReplicas, IsrProposal

__all__ = ("ReplicationState", "Role")


class Role(Enum):
    """The role of a replica."""

    LEADER = "leader"
    #: Another node leads, or nobody does.
    FOLLOWER = "follower"
    #: Stopped by its storage, for good.
    OFFLINE = "offline"


class ReplicationState:
    """Role, leader epoch, high watermark and durable offset of one replica.

    It starts as a follower of nobody, with the offsets that the log was opened with.

    Attributes:
        role: Leader, follower or offline.
        leader_epoch: The newest epoch that was told of; -1 before the first.
        epoch_start_offset: The log end when this replica began to lead in ``leader_epoch``.
        high_watermark: Everything below it is durable on every in-sync replica.
        durable_offset: Everything below it is durable on this replica.
        in_sync: The followers; None unless this replica leads.
        following: What is known of the leader; None unless this replica follows.
        is_lost: Its log was repaired with loss, and it must start anew as a follower.
    """

    __slots__ = (
        "durable_offset",
        "epoch_start_offset",
        "following",
        "high_watermark",
        "in_sync",
        "is_lost",
        "leader_epoch",
        "role",
    )

    def __init__(self, *, high_watermark: int, durable_offset: int, is_lost: bool = False) -> None:
        self.is_lost = is_lost
        self.role = Role.FOLLOWER
        self.leader_epoch = -1
        self.epoch_start_offset = 0
        self.high_watermark = high_watermark
        self.durable_offset = durable_offset
        self.in_sync: InSyncReplicas | None = None
        self.following: FollowingState | None = FollowingState(NO_LEADER, is_lost=is_lost)

    @property
    def has_reached_epoch_start(self) -> bool:
        """Whether everything that a leader before this one may have answered is below the high watermark."""
        return self.high_watermark >= self.epoch_start_offset

    # --- roles

    def become_leader(self, assignment: PartitionAssignment, log_end_offset: int) -> bool:
        """Lead from the assignment's epoch on.

        What followers have reported to another epoch's leader does not count. A replica that is offline stays
        so. True if the high watermark moved.
        """
        assert assignment.leader_epoch > self.leader_epoch, "an epoch has one leader"
        self.leader_epoch = assignment.leader_epoch
        if self.role is Role.OFFLINE:
            return False
        # Only an operator has a lost replica lead: then what it has is what counts.
        self.role, self.following, self.is_lost = Role.LEADER, None, False
        self.epoch_start_offset = log_end_offset
        self.in_sync = InSyncReplicas(assignment)
        return self.advance()

    def become_follower(self, epoch: int, leader: int) -> None:
        """Another node leads from ``epoch`` on, or nobody (``NO_LEADER``)."""
        assert epoch > self.leader_epoch, "an epoch has one leader"
        self.leader_epoch = epoch
        self.in_sync = None
        if self.role is not Role.OFFLINE:
            self.role, self.following = Role.FOLLOWER, FollowingState(leader, is_lost=self.is_lost)

    def go_offline(self) -> None:
        """The storage has stopped this replica."""
        self.role, self.in_sync, self.following = Role.OFFLINE, None, None

    # --- a leader's high watermark

    def flushed(self, durable_offset: int) -> bool:
        """This replica is durable up to the offset. True if the high watermark moved."""
        self.durable_offset = durable_offset
        return self.advance()

    def committed(self, assignment: PartitionAssignment) -> bool:
        """The metadata has another record at this leader epoch. True if it is newer than the one known."""
        return self.in_sync is not None and self.in_sync.committed(assignment)

    def proposal_ended(self, proposal: IsrProposal, *, refused: bool) -> bool:
        """End a proposal, as in ``InSyncReplicas``. True if the high watermark moved."""
        in_sync = self.in_sync
        return in_sync is not None and in_sync.proposal_ended(proposal, refused=refused) and self.advance()

    def advance(self) -> bool:
        """Let a leader's high watermark go as far as it may. True if it moved."""
        if self.in_sync is None:
            return False
        reached = self.in_sync.least(self.durable_offset)
        if reached is None or reached <= self.high_watermark:
            return False
        self.high_watermark = reached
        return True

    # --- a follower's

    def told_high_watermark(self, of_leader: int, log_end_offset: int) -> bool:
        """The leader of this epoch has told its high watermark. True if this replica's moved."""
        if self.following is None:
            return False
        self.following.leader_high_watermark = max(self.following.leader_high_watermark, of_leader)
        reached = self.following.high_watermark(of_leader, log_end_offset)
        if reached is None or reached <= self.high_watermark:
            return False
        self.high_watermark = reached
        return True

    def cut(self, log_end_offset: int, durable_offset: int, *, anew: bool) -> None:
        """The end of the log was cut, or the log starts anew: it ends at the offset now.

        Only an unclean election, or a log that is built again, takes something committed away.
        """
        self.high_watermark = log_end_offset if anew else min(self.high_watermark, log_end_offset)
        if anew:
            self.is_lost = False
            if self.following is not None:
                self.following.is_lost = False
        self.durable_offset = durable_offset
