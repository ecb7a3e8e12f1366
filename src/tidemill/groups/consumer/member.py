"""A member of a consumer group (KIP-848): what it asked for, and how far it is on the way to its target.

::

    STABLE -> UNREVOKED_PARTITIONS -> (STABLE | UNRELEASED_PARTITIONS) -> STABLE

- UNREVOKED_PARTITIONS: it must let go of ``revoking`` before it moves to the next epoch.
- UNRELEASED_PARTITIONS: it is in the target's epoch and waits for partitions that others still hold.

Members are frozen values: a change makes a new one. ``reconcile`` is the step from one state to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Final
from uuid import UUID

from tidemill.groups.memory import MEMBER_BYTES, NAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

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
    "by_topic",
    "reconcile",
)

TopicIdPartition = tuple[UUID, int]
"""A partition by its topic's id: a topic that is deleted and created again is another one."""

Partitions = frozenset[TopicIdPartition]

NO_PARTITIONS: Final[Partitions] = frozenset()


def by_topic(partitions: Partitions) -> dict[UUID, list[int]]:
    """The partitions of each topic, in order.

    Numbers are sorted and not the ids themselves, which Python compares by a function of its own.
    """
    found: dict[UUID, list[int]] = {}
    for topic_id, index in sorted(partitions, key=lambda each: (each[0].int, each[1])):
        found.setdefault(topic_id, []).append(index)
    return found


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
    """Fields that only a member of the classic protocol has."""

    session_timeout_ms: int
    protocols: tuple[JoinProtocol, ...]

    @property
    def protocol_names(self) -> frozenset[str]:
        """Names of the protocols that the member supports."""
        return frozenset(protocol.name for protocol in self.protocols)


@dataclass(frozen=True, slots=True)
class ConsumerMember:
    """One member of a consumer group, as a value.

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
    def said_bytes(self) -> int:
        """Estimate of the memory for the member's own data."""
        texts = (self.member_id, self.instance_id, self.rack_id, self.client_id, self.regex)
        names = sum(map(len, self.topics)) + NAME_BYTES * len(self.topics)
        protocols = () if self.classic is None else self.classic.protocols
        classic = sum(len(protocol.name) + len(protocol.metadata) for protocol in protocols)
        return MEMBER_BYTES + sum(len(text or "") for text in texts) + names + classic

    @property
    def held(self) -> Partitions:
        """Partitions that nobody else may be given: it may still be reading them."""
        return self.assigned | self.revoking

    def is_reconciled_to(self, target_epoch: int) -> bool:
        """Whether the member has all of the target of that epoch, and nothing else."""
        return self.state is MemberState.STABLE and self.epoch == target_epoch


# -- towards the target ------------------------------------------------------------------------------------


def reconcile(
    member: ConsumerMember,
    target_epoch: int,
    target: Partitions,
    holder: Callable[[TopicIdPartition], str | None],
    owned: Partitions | None,
) -> ConsumerMember:
    """The member after one step towards its target assignment.

    A partition is given to its new owner only after its old owner has stopped reporting it, or has left the
    group. So the step is: first let go, then move to the target's epoch with what is free, then collect the
    rest as others release it.

    ``holder`` tells which member holds a partition. ``owned`` is what the member says it owns; None if it did
    not say, which is never taken for a release.
    """
    if member.is_reconciled_to(target_epoch):
        return member
    epoch = member.epoch
    if member.state is MemberState.UNREVOKED_PARTITIONS:
        if _still_owns(owned, member.revoking):
            return member
        epoch += 1
    kept = member.assigned & target
    to_revoke = member.assigned - target
    if to_revoke and _still_owns(owned, to_revoke):
        return _moved(
            member, MemberState.UNREVOKED_PARTITIONS, epoch=epoch, assigned=kept, revoking=to_revoke
        )
    wanted = target - kept
    free = frozenset(each for each in wanted if holder(each) in (None, member.member_id))
    state = MemberState.STABLE if len(free) == len(wanted) else MemberState.UNRELEASED_PARTITIONS
    return _moved(member, state, epoch=target_epoch, assigned=kept | free, revoking=NO_PARTITIONS)


def _still_owns(owned: Partitions | None, partitions: Partitions) -> bool:
    return owned is None or not owned.isdisjoint(partitions)


def _moved(
    member: ConsumerMember, state: MemberState, *, epoch: int, assigned: Partitions, revoking: Partitions
) -> ConsumerMember:
    previous_epoch = member.previous_epoch if epoch == member.epoch else member.epoch
    return replace(
        member,
        state=state,
        epoch=epoch,
        previous_epoch=previous_epoch,
        assigned=assigned,
        revoking=revoking,
    )
