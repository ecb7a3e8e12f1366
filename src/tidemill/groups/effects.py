"""The states of a classic group, and what an event on it causes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tidemill.groups.messages import Reply

if TYPE_CHECKING:
    from tidemill.groups.messages import JoinReply, SyncReply
    from tidemill.groups.records import GroupMetadata

__all__ = ("Effects", "GroupState", "Turn")


class GroupState(StrEnum):
    """The states of a classic group, by the names that Kafka shows."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


@dataclass(frozen=True, slots=True)
class Effects:
    """What an event caused: replies to send and, before them, group metadata to persist."""

    replies: tuple[Reply, ...] = ()
    records: tuple[GroupMetadata, ...] = ()


class Turn:
    """The effects of one event while it is being worked on."""

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self._replies: list[Reply] = []
        self.records: list[GroupMetadata] = []

    def reply(self, token: object, body: JoinReply | SyncReply) -> None:
        """Answer the request that was given ``token``."""
        self._replies.append(Reply(token, body))

    def effects(self) -> Effects:
        """All that was collected."""
        return Effects(tuple(self._replies), tuple(self.records))
