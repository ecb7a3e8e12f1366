"""From a group's members and topics to a new epoch and a new target assignment, as records. Pure.

``advance`` is what every request that may change a group ends with: it persists what the member asked for,
raises the group's epoch if subscriptions or topics changed, computes a new target if the epoch is ahead of
it, and takes the member one step towards its target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tidemill.groups.consumer.assignors import ASSIGNORS, AssignedMember
from tidemill.groups.consumer.group import preferred_assignor
from tidemill.groups.consumer.member import NO_PARTITIONS, reconcile
from tidemill.groups.consumer.records import (
    CurrentAssignment,
    CurrentAssignmentRecord,
    EpochRecord,
    MemberMetadata,
    MemberMetadataRecord,
    PatternRecord,
    ResolvedPattern,
    SubscribedTopicsRecord,
    TargetEpochRecord,
    TargetRecord,
)
from tidemill.groups.patterns import matching_topics

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

    from tidemill.groups.consumer.group import ConsumerGroup
    from tidemill.groups.consumer.member import ConsumerMember, Partitions
    from tidemill.groups.consumer.records import ConsumerRecord
    from tidemill.groups.topics import SubscribedTopic, Topics

__all__ = ("Advance", "advance", "raise_epoch")

_PATTERN_REFRESH_MIN_MS: Final = 1_000
"""Patterns are matched against all topics again at most this often, however fast topics come and go."""


@dataclass(frozen=True, slots=True)
class Advance:
    """The records of a change, and the member as it will be. ``revision``: that of the topics looked at."""

    records: tuple[ConsumerRecord, ...]
    member: ConsumerMember
    revision: int | None


def advance(
    group: ConsumerGroup,
    topics: Topics,
    asked: ConsumerMember,
    owned: Partitions | None,
    now_ms: int,
) -> Advance:
    """Plan the records that give a member, new or known, the subscription in ``asked``.

    Where that is due they also raise the epoch, compute a target and move the member. Does not change
    ``group``.
    """
    known = group.members.get(asked.member_id)
    records: list[ConsumerRecord] = []
    if known is None or MemberMetadata.of(known) != MemberMetadata.of(asked):
        records.append(MemberMetadataRecord(group.group_id, asked.member_id, MemberMetadata.of(asked)))
    members = {**group.members, asked.member_id: asked}
    changed = known is None or (known.topics, known.regex) != (asked.topics, asked.regex)
    planner = _Planner(group, topics, members)
    revision = group.seen_revision
    if changed or revision != topics.revision:
        # A pattern that was matched a moment ago is left for later. The revision then counts as not seen.
        fresh = planner.resolve_patterns(now_ms)
        revision = topics.revision if fresh else None
        planner.raise_epoch_if_needed(changed)
    target_epoch, target = group.target_epoch, group.target_of(asked.member_id)
    if planner.epoch > target_epoch:
        target_epoch, target = planner.epoch, planner.compute_target(asked.member_id)
    records += planner.records
    moved = reconcile(asked, target_epoch, target, group.holder, owned)
    if known is None or CurrentAssignment.of(known) != CurrentAssignment.of(moved):
        records.append(CurrentAssignmentRecord(group.group_id, moved.member_id, CurrentAssignment.of(moved)))
    return Advance(tuple(records), moved, revision)


def raise_epoch(group: ConsumerGroup, topics: Topics, gone: Iterable[str]) -> list[ConsumerRecord]:
    """The records that remove the members in ``gone`` and raise the epoch."""
    group_id, leaving = group.group_id, tuple(gone)
    records: list[ConsumerRecord] = []
    for member_id in leaving:
        records.append(CurrentAssignmentRecord(group_id, member_id, None))
        if member_id in group.targets:
            records.append(TargetRecord(group_id, member_id, None))
        records.append(MemberMetadataRecord(group_id, member_id, None))
    left = {member_id: member for member_id, member in group.members.items() if member_id not in leaving}
    planner = _Planner(group, topics, left)
    planner.drop_unused_patterns()
    planner.raise_epoch_if_needed(True)
    return records + planner.records


class _Planner:
    """Plans the records of a new epoch and a new target, for a group with these members."""

    def __init__(self, group: ConsumerGroup, topics: Topics, members: Mapping[str, ConsumerMember]) -> None:
        self._group = group
        self._topics = topics
        self._members = members
        self._patterns = dict(group.patterns)
        self._subscribed: Mapping[str, SubscribedTopic] = group.subscribed_topics
        self.epoch = group.epoch
        self.records: list[ConsumerRecord] = []
        self._patterns_changed = False

    def resolve_patterns(self, now_ms: int) -> bool:
        """Match patterns against the topics that exist now; False if one was left for later."""
        self.drop_unused_patterns()
        all_fresh = True
        revision = self._topics.revision
        for pattern in sorted({member.regex for member in self._members.values() if member.regex}):
            before = self._patterns.get(pattern)
            if before is not None and before.revision == revision:
                continue
            if before is not None and now_ms - before.resolved_at_ms < _PATTERN_REFRESH_MIN_MS:
                all_fresh = False
                continue
            found = matching_topics(pattern, self._topics.names())
            resolved = self._patterns[pattern] = ResolvedPattern(found, revision, now_ms)
            if before is None or before.topics != found:
                self._patterns_changed = True
                self.records.append(PatternRecord(self._group.group_id, pattern, resolved))
        return all_fresh

    def drop_unused_patterns(self) -> None:
        used = {member.regex for member in self._members.values()}
        for pattern in [each for each in self._patterns if each not in used]:
            del self._patterns[pattern]
            self.records.append(PatternRecord(self._group.group_id, pattern, None))

    def raise_epoch_if_needed(self, changed: bool) -> None:
        """Raise the epoch if ``changed``, or if the subscribed topics are not what they were."""
        group_id = self._group.group_id
        distinct = {(member.topics, member.regex): member for member in self._members.values()}
        topics_of = self._group.topics_of
        names = sorted(
            frozenset[str]().union(*(topics_of(member, self._patterns) for member in distinct.values()))
        )
        found = (self._topics.find(name) for name in names)
        subscribed = {topic.name: topic for topic in found if topic is not None}
        if subscribed != self._subscribed:
            self._subscribed = subscribed
            self.records.append(SubscribedTopicsRecord(group_id, tuple(subscribed.values())))
            changed = True
        if changed or self._patterns_changed:
            self.epoch += 1
            self.records.append(EpochRecord(group_id, self.epoch))

    def compute_target(self, member_id: str) -> Partitions:
        """Plan the records of a new target; gives what ``member_id`` has in it."""
        group = self._group
        ids_by_subscription: dict[tuple[frozenset[str], str], frozenset[UUID]] = {}

        def ids(member: ConsumerMember) -> frozenset[UUID]:
            subscription = (member.topics, member.regex)
            if subscription not in ids_by_subscription:
                names = group.topics_of(member, self._patterns)
                ids_by_subscription[subscription] = frozenset(
                    self._subscribed[name].id for name in names if name in self._subscribed
                )
            return ids_by_subscription[subscription]

        members = {
            each.member_id: AssignedMember(ids(each), group.target_of(each.member_id), each.instance_id)
            for each in self._members.values()
        }
        counts = {topic.id: topic.partitions for topic in self._subscribed.values()}
        targets = ASSIGNORS[preferred_assignor(self._members.values())](members, counts)
        self.records += (
            TargetRecord(group.group_id, each, target)
            for each, target in targets.items()
            if group.targets.get(each) != target
        )
        self.records.append(TargetEpochRecord(group.group_id, self.epoch))
        return targets.get(member_id, NO_PARTITIONS)
