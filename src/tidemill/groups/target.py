"""From a group's members and topics to a new epoch and a new target assignment, as records. Pure.

``advance`` is what every request that may change a group ends with: it persists what the member asked for,
raises the group's epoch if subscriptions or topics changed, computes a new target if the epoch is ahead of
it, and takes the member one step towards its target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tidemill.groups.assignors import ASSIGNORS, AssignedMember
from tidemill.groups.consumer_group import preferred_assignor
from tidemill.groups.consumer_member import NO_PARTITIONS
from tidemill.groups.consumer_records import (
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
from tidemill.groups.reconcile import reconcile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

    from tidemill.groups.consumer_group import ConsumerGroup
    from tidemill.groups.consumer_member import ConsumerMember, Partitions
    from tidemill.groups.consumer_records import ConsumerRecord
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
    """Let a member, new or known, be ``asked``; see the module's docstring. Does not change ``group``."""
    known = group.members.get(asked.member_id)
    records: list[ConsumerRecord] = []
    if known is None or MemberMetadata.of(known) != MemberMetadata.of(asked):
        records.append(MemberMetadataRecord(group.group_id, asked.member_id, MemberMetadata.of(asked)))
    members = {**group.members, asked.member_id: asked}
    changed = known is None or (known.topics, known.regex) != (asked.topics, asked.regex)
    view = _View(group, topics, members)
    revision = group.seen_revision
    if changed or revision != topics.revision:
        # A pattern that was matched only just now is looked at again later, and so is the revision.
        fresh = view.resolve_patterns(now_ms)
        revision = topics.revision if fresh else None
        view.raise_epoch_if_needed(changed)
    target_epoch, target = group.target_epoch, group.target_of(asked.member_id)
    if view.epoch > target_epoch:
        target_epoch, target = view.epoch, view.compute_target(asked.member_id)
    records += view.records
    moved = reconcile(asked, target_epoch, target, group.holder, owned)
    if known is None or CurrentAssignment.of(known) != CurrentAssignment.of(moved):
        records.append(CurrentAssignmentRecord(group.group_id, moved.member_id, CurrentAssignment.of(moved)))
    return Advance(tuple(records), moved, revision)


def raise_epoch(group: ConsumerGroup, topics: Topics, gone: Iterable[str]) -> list[ConsumerRecord]:
    """The records of members' departure: they are removed and the epoch rises."""
    group_id, leaving = group.group_id, tuple(gone)
    records: list[ConsumerRecord] = []
    for member_id in leaving:
        records.append(CurrentAssignmentRecord(group_id, member_id, None))
        if member_id in group.targets:
            records.append(TargetRecord(group_id, member_id, None))
        records.append(MemberMetadataRecord(group_id, member_id, None))
    left = {member_id: member for member_id, member in group.members.items() if member_id not in leaving}
    view = _View(group, topics, left)
    view.drop_unused_patterns()
    view.raise_epoch_if_needed(True)
    return records + view.records


class _View:
    """A group as it is about to be: with other members, and by and by with another epoch and target."""

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
        """Match patterns against the topics of now; False if one was left for later."""
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
        """Raise the epoch if the caller says so, or if subscribed topics are not what they were."""
        group_id = self._group.group_id
        distinct = {self._group.topics_of(member, self._patterns) for member in self._members.values()}
        names = sorted(frozenset[str]().union(*distinct))
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
        """Persist a new target for everybody whose target changes; gives that of ``member_id``."""
        group = self._group
        ids_of_names: dict[frozenset[str], frozenset[UUID]] = {}

        def ids(member: ConsumerMember) -> frozenset[UUID]:
            names = group.topics_of(member, self._patterns)
            if names not in ids_of_names:
                ids_of_names[names] = frozenset(
                    self._subscribed[name].id for name in names if name in self._subscribed
                )
            return ids_of_names[names]

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
