"""Invariants of groups, looked at from inside: raise AssertionError if one is broken."""

from __future__ import annotations

from collections import Counter

from tidemill.groups.classic.group import ClassicGroup, GroupState
from tidemill.groups.classic.roster import Roster
from tidemill.groups.consumer.group import ConsumerGroup, Wait
from tidemill.groups.consumer.member import NO_PARTITIONS, MemberState
from tidemill.groups.share.group import ShareGroup
from tidemill.groups.state import ShardState

__all__ = ("check_group", "check_groups")


def check_groups(state: ShardState) -> None:
    """All groups of a shard."""
    for group_id, group in state.groups.items():
        assert group.group_id == group_id
        check_group(group)


def check_group(group: ClassicGroup | ConsumerGroup | ShareGroup) -> None:
    """A group of any kind."""
    if isinstance(group, ClassicGroup):
        _check_classic_group(group)
    elif isinstance(group, ShareGroup):
        _check_share_group(group)
    else:
        _check_consumer_group(group)


def _check_classic_group(group: ClassicGroup) -> None:
    """A classic group that serves: ``start`` was called."""

    def require(holds: bool, broken: str) -> None:
        assert holds, f"group {group.group_id!r} in {group.state}: {broken}: {vars(group)}"

    state, members = group.state, {member.member_id for member in group._roster.members}
    _check_roster(group._roster)
    preparing, completing = (
        state is GroupState.PREPARING_REBALANCE,
        state is GroupState.COMPLETING_REBALANCE,
    )
    in_generation = completing or state is GroupState.STABLE
    require(group._joining.keys() <= members and (preparing or not group._joining), "joins wait wrongly")
    require(group._syncing.keys() <= members and (completing or not group._syncing), "syncs wait wrongly")
    require(not group._pending_join & members, "a pending member is a member")
    require(group._pending_sync <= members, "a sync is expected from a stranger")
    require(in_generation or not group._pending_sync, "syncs are expected outside a generation")
    require(state is not GroupState.EMPTY or not members, "an empty group has members")
    require(not in_generation or bool(members), "a generation has no members")
    if in_generation:
        require(group._roster.supported_by_all([group.protocol_name or ""]), "a protocol is not shared")
    require((group._join_deadline_ms is not None) == preparing, "the join deadline is wrong")
    require((group._sync_deadline_ms is not None) == bool(group._pending_sync), "the sync deadline is wrong")
    if state is not GroupState.DEAD:
        waiting = group._joining.keys() | group._syncing.keys()
        require(group._pending_join | (members - waiting) <= group._deadlines.keys(), "no session deadline")
    require(group._deadlines.keys() <= members | group._pending_join, "a stranger has a deadline")
    earliest_ms = min(group._deadlines.values(), default=None)
    if earliest_ms is not None:
        require((group._earliest_deadline_ms or 0) <= earliest_ms, "the next deadline is late")


def _check_roster(roster: Roster) -> None:
    """The member list of a classic group."""
    static = {m.instance_id: m.member_id for m in roster.members if m.instance_id is not None}
    assert static == roster._static, (static, roster._static)
    support = Counter(name for member in roster.members for name in member.protocol_names)
    assert roster._support == support, (roster._support, support)
    assert (roster.leader in roster._members) if roster._members else roster.leader is None, roster.leader
    assert not roster._members or roster.supported_by_all(support), support


def _check_consumer_group(group: ConsumerGroup) -> None:
    """A consumer group that serves."""
    held = Counter(partition for member in group.members.values() for partition in member.held)
    assert all(count == 1 for count in held.values()), f"{group.group_id!r}: held twice: {held}"
    holders = {p: member.member_id for member in group.members.values() for p in member.held}
    assert holders == group._holders, (holders, group._holders)
    static = {m.instance_id: m.member_id for m in group.members.values() if m.instance_id is not None}
    assert static == group._static, (static, group._static)
    assert group.target_epoch <= group.epoch, (group.target_epoch, group.epoch)
    for member in group.members.values():
        assert member.epoch <= group.target_epoch, member
        assert not member.assigned & member.revoking, member
        assert (member.state is MemberState.UNREVOKED_PARTITIONS) == bool(member.revoking), member
        assert (Wait.SESSION, member.member_id) in group.deadlines, member
    assert group.targets.keys() <= group.members.keys(), (group.targets, group.members)
    names = [member.classic.protocol_names for member in group.members.values() if member.classic]
    assert not names or frozenset.intersection(*names), f"{group.group_id!r}: no protocol in common: {names}"
    used = {member.regex for member in group.members.values() if member.regex}
    assert group.patterns.keys() == used, (group.patterns, used)


def _check_share_group(group: ShareGroup) -> None:
    """A share group that serves."""
    assert group.target_epoch <= group.epoch, (group.target_epoch, group.epoch)
    for member in group.members.values():
        assert member.epoch <= group.target_epoch, member
        assert member.previous_epoch <= member.epoch, member
        assert member.member_id in group.sessions, member
    assert group.targets.keys() <= group.members.keys(), (group.targets, group.members)
    readable = {(topic.id, index) for topic in group.topics.initialized for index in topic.partitions}
    if group.epoch == group.target_epoch and group.seen_revision is not None:
        assert NO_PARTITIONS.union(*group.targets.values()) <= readable, (group.targets, readable)
    deleting = {topic.id for topic in group.topics.deleting}
    begun = {topic.id for topic in (*group.topics.initializing, *group.topics.initialized)}
    assert not deleting & begun, group.topics
