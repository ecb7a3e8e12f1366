"""Replication state of one replica: its role, the leader epoch, and the high watermark. Pure.

- The high watermark is the least durable offset over the in-sync replicas, this one included. Only a leader
  moves it, and it never goes back: what somebody has read below it stays readable, whatever the in-sync set
  becomes.
- An epoch has one leader, so a change of role comes with a higher epoch.
- A new leader has every committed record, but does not know yet how far they were committed. Until the high
  watermark has reached the log end of its take-over, an answer about "the end" could be older than one that
  the leader before it gave.

Today the in-sync set is this node alone, and the high watermark follows its own durable offset.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

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
    """

    __slots__ = (
        "_followers",
        "durable_offset",
        "epoch_start_offset",
        "high_watermark",
        "leader_epoch",
        "role",
    )

    def __init__(self, *, high_watermark: int, durable_offset: int) -> None:
        self.role = Role.FOLLOWER
        self.leader_epoch = -1
        self.epoch_start_offset = 0
        self.high_watermark = high_watermark
        self.durable_offset = durable_offset
        #: The other in-sync replicas, and the durable offset that each has reported in this epoch.
        self._followers: dict[int, int] = {}

    @property
    def has_reached_epoch_start(self) -> bool:
        """Whether everything that a leader before this one may have answered is below the high watermark."""
        return self.high_watermark >= self.epoch_start_offset

    # --- roles

    def become_leader(self, epoch: int, log_end_offset: int, followers: Iterable[int] = ()) -> bool:
        """Lead from ``epoch`` on, with ``followers`` as the other in-sync replicas.

        What they have reported to another epoch's leader does not count. A replica that is offline stays so.
        True if the high watermark moved.
        """
        assert epoch > self.leader_epoch, "an epoch has one leader"
        self.leader_epoch = epoch
        if self.role is Role.OFFLINE:
            return False
        self.role = Role.LEADER
        self.epoch_start_offset = log_end_offset
        self._followers = dict.fromkeys(followers, 0)
        return self._advance()

    def become_follower(self, epoch: int) -> None:
        """Another node leads from ``epoch`` on, or nobody."""
        assert epoch > self.leader_epoch, "an epoch has one leader"
        self.leader_epoch = epoch
        self._followers = {}
        if self.role is not Role.OFFLINE:
            self.role = Role.FOLLOWER

    def go_offline(self) -> None:
        """The storage has stopped this replica."""
        self.role = Role.OFFLINE
        self._followers = {}

    # --- offsets

    def flushed(self, durable_offset: int) -> bool:
        """This replica is durable up to the offset. True if the high watermark moved."""
        self.durable_offset = durable_offset
        return self._advance()

    def follower_flushed(self, node_id: int, durable_offset: int) -> bool:
        """An in-sync follower reports its durable offset in this epoch. True if the high watermark moved.

        Reports of others do not count, nor does an older one that arrives late.
        """
        known = self._followers.get(node_id)
        if known is None or durable_offset <= known:
            return False
        self._followers[node_id] = durable_offset
        return self._advance()

    def change_in_sync(self, followers: Iterable[int]) -> bool:
        """The in-sync set is now this leader and ``followers``. True if the high watermark moved."""
        self._followers = {node_id: self._followers.get(node_id, 0) for node_id in followers}
        return self._advance()

    def _advance(self) -> bool:
        if self.role is not Role.LEADER:
            return False
        reached = self.durable_offset
        if self._followers:
            reached = min(reached, *self._followers.values())
        if reached <= self.high_watermark:
            return False
        self.high_watermark = reached
        return True
