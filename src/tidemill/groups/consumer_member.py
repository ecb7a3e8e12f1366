"""A member of a consumer group (KIP-848): what it asked for, and how far it is on the way to its target.

::

    STABLE -> UNREVOKED_PARTITIONS -> (STABLE | UNRELEASED_PARTITIONS) -> STABLE

- UNREVOKED_PARTITIONS: it must let go of ``revoking`` before it moves to the next epoch.
- UNRELEASED_PARTITIONS: it is in the target's epoch and waits for partitions that others still hold.

Members are frozen values: a change makes a new one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final
from uuid import UUID

if TYPE_CHECKING:
    from tidemill.groups.messages import JoinProtocol

__all__ = (
    "JOIN_EPOCH",
    "LEAVE_EPOCH",
    "NO_PARTITIONS",
    "STATIC_LEAVE_EPOCH",
    "ClassicMetadata",
    "ConsumerMember",
    "MemberState",
    "Partitions",
    "TopicIdPartition",
)

TopicIdPartition = tuple[UUID, int]
"""A partition by its topic's id: a topic that is deleted and created again is another one."""

Partitions = frozenset[TopicIdPartition]

NO_PARTITIONS: Final[Partitions] = frozenset()

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
STATIC_LEAVE_EPOCH: Final = -2
"""The epoch of a static member that has gone and may come back under another member id."""


class MemberState(IntEnum):
    """The states of a member, by the numbers that are in the log."""

    STABLE = 0
    UNREVOKED_PARTITIONS = 1
    UNRELEASED_PARTITIONS = 2


@dataclass(frozen=True, slots=True)
class ClassicMetadata:
    """What only a member that speaks the classic protocol has."""

    session_timeout_ms: int
    protocols: tuple[JoinProtocol, ...]

    @property
    def protocol_names(self) -> frozenset[str]:
        """The protocols that it supports."""
        return frozenset(protocol.name for protocol in self.protocols)


@dataclass(frozen=True, slots=True)
class ConsumerMember:
    """See the module's docstring.

    ``previous_epoch`` is accepted once more, because the answer with the new one may have been lost.
    ``regex`` is empty if it subscribes by names only. ``classic`` is None for a member that speaks the new
    protocol.
    """

    member_id: str
    epoch: int = JOIN_EPOCH
    previous_epoch: int = JOIN_EPOCH
    state: MemberState = MemberState.STABLE
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    topics: frozenset[str] = frozenset()
    regex: str = ""
    rebalance_timeout_ms: int = -1
    assignor: str | None = None
    classic: ClassicMetadata | None = None
    assigned: Partitions = NO_PARTITIONS
    revoking: Partitions = NO_PARTITIONS

    @property
    def held(self) -> Partitions:
        """Partitions that nobody else may be given: it may still be reading them."""
        return self.assigned | self.revoking

    def is_reconciled_to(self, target_epoch: int) -> bool:
        """Whether it has all of the target of that epoch, and nothing else."""
        return self.state is MemberState.STABLE and self.epoch == target_epoch
