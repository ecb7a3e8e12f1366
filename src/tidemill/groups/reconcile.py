"""One step of a member towards its target assignment. Pure.

The rule that makes it safe: a partition is given to its new owner only after its old owner has stopped
reporting it, or has left the group. So the step is: first let go, then move to the target's epoch with what
is free, then collect the rest as others release it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tidemill.groups.consumer_member import NO_PARTITIONS, ConsumerMember, MemberState, Partitions

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidemill.groups.consumer_member import TopicIdPartition

__all__ = ("reconcile",)


def reconcile(
    member: ConsumerMember,
    target_epoch: int,
    target: Partitions,
    holder: Callable[[TopicIdPartition], str | None],
    owned: Partitions | None,
) -> ConsumerMember:
    """The member after one step.

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
