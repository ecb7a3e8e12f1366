"""A consumer group (KIP-848): members, epochs, the target assignment. State and views only.

::

    EMPTY -> ASSIGNING -> RECONCILING -> STABLE        any -> ASSIGNING when the epoch is raised

- ``epoch`` rises with every change of members, subscriptions or subscribed topics.
- ``target_epoch`` is the epoch that the target assignment was computed for; behind ``epoch`` it is ASSIGNING.
- Members move to the target one by one (``reconcile``); until all are there it is RECONCILING.

``replay`` is the only door for changes of what is in the log: live operation and loading both come through
it. Deadlines are soft: they begin anew after a restart. What a request does is worked out in ``heartbeats``
and ``mixed``.

Invariants, checked by ``validate_state``: a partition is held by one member; an instance id belongs to one
member; no member is ahead of the target's epoch, and that is not ahead of the group's.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeVar

from tidemill.errors import ErrorCode
from tidemill.groups.assignors import DEFAULT_ASSIGNOR
from tidemill.groups.consumer_member import (
    LEAVE_EPOCH,
    NO_PARTITIONS,
    ConsumerMember,
    MemberState,
    Partitions,
)
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
from tidemill.groups.deadlines import Deadlines
from tidemill.groups.effects import Effects
from tidemill.groups.messages import GroupDescription, GroupListing
from tidemill.groups.subscription import CONSUMER_PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tidemill.groups.consumer_member import TopicIdPartition
    from tidemill.groups.consumer_records import ConsumerRecord
    from tidemill.groups.settings import GroupSettings
    from tidemill.groups.topics import SubscribedTopic

__all__ = ("ConsumerGroup", "ConsumerGroupState", "Wait", "preferred_assignor")

T = TypeVar("T")

_FIRST_COMMIT_VERSION_WITH_MEMBER_EPOCH: Final = 9
_GONE: Final = CurrentAssignment(LEAVE_EPOCH, LEAVE_EPOCH, MemberState.STABLE, NO_PARTITIONS, NO_PARTITIONS)


class ConsumerGroupState(StrEnum):
    """The states of a consumer group, by the names that Kafka shows."""

    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"
    DEAD = "Dead"


class Wait(StrEnum):
    """What a member must do in time, or it is removed."""

    SESSION = "show that it is alive"
    REBALANCE = "let go of partitions"
    JOIN = "join again (classic protocol)"
    SYNC = "fetch its assignment (classic protocol)"


class ConsumerGroup:
    """See the module's docstring."""

    protocol_type: Final = CONSUMER_PROTOCOL

    def __init__(self, group_id: str, settings: GroupSettings) -> None:
        self.group_id = group_id
        self.settings = settings
        self.epoch = 0
        self.target_epoch = 0
        self.members: dict[str, ConsumerMember] = {}
        self.targets: dict[str, Partitions] = {}
        self.subscribed_topics: dict[str, SubscribedTopic] = {}
        self.patterns: dict[str, ResolvedPattern] = {}
        self.deadlines: Deadlines[tuple[Wait, str]] = Deadlines()
        #: The revision of the topics at which subscriptions were last looked at; None: not since the start.
        self.seen_revision: int | None = None
        self._dead = False
        self._static: dict[str, str] = {}
        self._holders: dict[TopicIdPartition, str] = {}

    # -- replay ----------------------------------------------------------------------------------------

    def replay(self, record: ConsumerRecord) -> None:
        """Make one record that is in the log part of the state."""
        match record:
            case EpochRecord(value=epoch):
                # A tombstone deletes the group, which is up to whoever keeps the groups.
                self.epoch = 0 if epoch is None else epoch
            case TargetEpochRecord(value=epoch):
                self.target_epoch = 0 if epoch is None else epoch
            case SubscribedTopicsRecord(value=topics):
                self.subscribed_topics = {topic.name: topic for topic in topics or ()}
            case MemberMetadataRecord(value=None):
                self._remove(record.member_id)
            case MemberMetadataRecord(value=MemberMetadata() as metadata):
                self._put(metadata.applied_to(self._member_or_new(record.member_id)))
            case CurrentAssignmentRecord(value=None):
                if (member := self.members.get(record.member_id)) is not None:
                    self._put(_GONE.applied_to(member))
            case CurrentAssignmentRecord(value=CurrentAssignment() as current):
                self._put(current.applied_to(self._member_or_new(record.member_id)))
            case TargetRecord():
                _put_or_drop(self.targets, record.member_id, record.value)
            case PatternRecord():
                _put_or_drop(self.patterns, record.pattern, record.value)

    def _member_or_new(self, member_id: str) -> ConsumerMember:
        return self.members.get(member_id) or ConsumerMember(member_id)

    def _put(self, member: ConsumerMember) -> None:
        old = self.members.get(member.member_id)
        if old is not None:
            self._unlink(old)
        self.members[member.member_id] = member
        if member.instance_id is not None:
            self._static[member.instance_id] = member.member_id
        self._holders.update(dict.fromkeys(member.held, member.member_id))

    def _remove(self, member_id: str) -> None:
        member = self.members.pop(member_id, None)
        if member is not None:
            self._unlink(member)
        for wait in Wait:
            self.deadlines.cancel((wait, member_id))

    def _unlink(self, member: ConsumerMember) -> None:
        """Free what the member holds; what another member took over by a later record stays that one's."""
        member_id = member.member_id
        if member.instance_id is not None and self._static.get(member.instance_id) == member_id:
            del self._static[member.instance_id]
        for partition in member.held:
            if self._holders.get(partition) == member_id:
                del self._holders[partition]

    def copy(self) -> ConsumerGroup:
        """An independent group with the same members; a scratch pad to work out a change on."""
        other = ConsumerGroup(self.group_id, self.settings)
        other.epoch, other.target_epoch = self.epoch, self.target_epoch
        other.members = self.members.copy()
        other.targets = self.targets.copy()
        other.subscribed_topics = self.subscribed_topics.copy()
        other.patterns = self.patterns.copy()
        other.seen_revision = self.seen_revision
        other._static = self._static.copy()
        other._holders = self._holders.copy()
        return other

    # -- members ---------------------------------------------------------------------------------------

    def static_member(self, instance_id: str | None) -> ConsumerMember | None:
        """The member that holds the instance id."""
        member_id = None if instance_id is None else self._static.get(instance_id)
        return None if member_id is None else self.members[member_id]

    def holder(self, partition: TopicIdPartition) -> str | None:
        """The member that has the partition or has not yet let go of it."""
        return self._holders.get(partition)

    def target_of(self, member_id: str) -> Partitions:
        """What the member shall have."""
        return self.targets.get(member_id, NO_PARTITIONS)

    def topics_of(self, member: ConsumerMember, patterns: Mapping[str, ResolvedPattern]) -> frozenset[str]:
        """The names that the member subscribes to, by name or by pattern."""
        resolved = patterns.get(member.regex) if member.regex else None
        return member.topics if resolved is None else member.topics | resolved.topics

    @property
    def classic_members(self) -> list[ConsumerMember]:
        """The members that speak the classic protocol."""
        return [member for member in self.members.values() if member.classic is not None]

    def waits_for_others(self, member: ConsumerMember) -> bool:
        """Whether something of the member's target is still held by another member."""
        missing = self.target_of(member.member_id) - member.assigned
        return any(self.holder(partition) is not None for partition in missing)

    @property
    def assignor(self) -> str:
        """The assignor that most members ask for."""
        return preferred_assignor(self.members.values())

    @property
    def is_full(self) -> bool:
        """Whether another member would be too many."""
        return len(self.members) >= self.settings.consumer_max_size

    # -- time ------------------------------------------------------------------------------------------

    def next_deadline_ms(self) -> int | None:
        """When ``overdue`` is to be asked next. May be early, never late."""
        return self.deadlines.next_ms

    def overdue(self, now_ms: int) -> list[str]:
        """The members that must be removed."""
        return list(dict.fromkeys(member_id for _, member_id in self.deadlines.due(now_ms)))

    def start(self, now_ms: int) -> None:
        """Begin to serve after loading: sessions start anew."""
        for member in self.members.values():
            self.restart_session(member, now_ms)
            if member.classic is None:
                self.watch_revocation(member, now_ms)

    def restart_session(self, member: ConsumerMember, now_ms: int) -> None:
        """The member showed that it is alive."""
        timeout_ms = self.settings.consumer_session_timeout_ms
        if member.classic is not None:
            timeout_ms = member.classic.session_timeout_ms
        self.deadlines.set((Wait.SESSION, member.member_id), now_ms + timeout_ms)

    def watch_revocation(self, member: ConsumerMember, now_ms: int) -> None:
        """Give a member that must let go of partitions its time for that; call it when the member changed."""
        key = (Wait.REBALANCE, member.member_id)
        if member.state is MemberState.UNREVOKED_PARTITIONS:
            self.deadlines.set(key, now_ms + member.rebalance_timeout_ms)
        else:
            self.deadlines.cancel(key)

    def die(self, error: ErrorCode) -> Effects:
        """Stop for good. Nobody ever waits in a consumer group, so nobody is to be told."""
        del error
        self._dead = True
        self.deadlines = Deadlines()
        return Effects()

    # -- what other APIs ask ---------------------------------------------------------------------------

    @property
    def state(self) -> ConsumerGroupState:
        """Follows from members and epochs."""
        if self._dead:
            return ConsumerGroupState.DEAD
        if not self.members:
            return ConsumerGroupState.EMPTY
        if self.epoch > self.target_epoch:
            return ConsumerGroupState.ASSIGNING
        if all(member.is_reconciled_to(self.target_epoch) for member in self.members.values()):
            return ConsumerGroupState.STABLE
        return ConsumerGroupState.RECONCILING

    @property
    def is_empty(self) -> bool:
        """No members."""
        return not self.members

    @property
    def is_idle(self) -> bool:
        """No members; the same as ``is_empty``, because nobody is announced in this protocol."""
        return not self.members

    def check_commit(
        self, member_id: str, instance_id: str | None, epoch: int, version: int | None = None
    ) -> ErrorCode:
        """Whether this member, or a client outside the group (epoch -1), may commit offsets.

        ``version`` is that of OffsetCommit; None if it does not matter.
        """
        del instance_id  # The member id alone tells a static member from its successor.
        if epoch < 0 and not self.members:
            return ErrorCode.none
        member = self.members.get(member_id)
        if member is None:
            return ErrorCode.unknown_member_id
        too_old = version is not None and version < _FIRST_COMMIT_VERSION_WITH_MEMBER_EPOCH
        if too_old and member.classic is None:
            return ErrorCode.unsupported_version
        return _check_epoch(member, epoch)

    def check_transactional_commit(self, member_id: str, instance_id: str | None, epoch: int) -> ErrorCode:
        """The same for a commit inside a transaction, in the words that producers understand."""
        error = self.check_commit(member_id, instance_id, epoch)
        return ErrorCode.illegal_generation if error is ErrorCode.stale_member_epoch else error

    def check_fetch(self, member_id: str | None, epoch: int) -> ErrorCode:
        """Whether this member, or a client that does not say who it is, may read committed offsets."""
        if member_id is None and epoch < 0:
            return ErrorCode.none
        member = self.members.get(member_id or "")
        return ErrorCode.unknown_member_id if member is None else _check_epoch(member, epoch)

    def is_subscribed_to(self, topic: str) -> bool:
        """Whether members consume ``topic``."""
        return any(topic in self.topics_of(member, self.patterns) for member in self.members.values())

    def expiry_base_ms(self, committed_at_ms: int) -> int | None:
        """From when on an offset committed at that time grows old."""
        return committed_at_ms

    def tombstones(self) -> list[ConsumerRecord]:
        """The records that delete the group and everything in it, members first."""
        group_id = self.group_id
        records: list[ConsumerRecord] = []
        records += (CurrentAssignmentRecord(group_id, member_id, None) for member_id in self.members)
        records += (TargetRecord(group_id, member_id, None) for member_id in self.targets)
        records.append(TargetEpochRecord(group_id, None))
        records += (MemberMetadataRecord(group_id, member_id, None) for member_id in self.members)
        records += (PatternRecord(group_id, pattern, None) for pattern in self.patterns)
        records += (SubscribedTopicsRecord(group_id, None), EpochRecord(group_id, None))
        return records

    def listing(self) -> GroupListing:
        """The group's line in ListGroups."""
        return GroupListing(self.group_id, CONSUMER_PROTOCOL, str(self.state), "consumer")

    def describe(self) -> GroupDescription:
        """The group in DescribeGroups, which knows classic groups only."""
        return GroupDescription(self.group_id, state=ConsumerGroupState.DEAD.value)

    # -- invariants ------------------------------------------------------------------------------------

    def validate_state(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        held = Counter(partition for member in self.members.values() for partition in member.held)
        assert all(count == 1 for count in held.values()), f"{self.group_id!r}: held twice: {held}"
        holders = {p: member.member_id for member in self.members.values() for p in member.held}
        assert holders == self._holders, (holders, self._holders)
        static = {m.instance_id: m.member_id for m in self.members.values() if m.instance_id is not None}
        assert static == self._static, (static, self._static)
        assert self.target_epoch <= self.epoch, (self.target_epoch, self.epoch)
        for member in self.members.values():
            assert member.epoch <= self.target_epoch, member
            assert not member.assigned & member.revoking, member
            assert (member.state is MemberState.UNREVOKED_PARTITIONS) == bool(member.revoking), member
            assert (Wait.SESSION, member.member_id) in self.deadlines, member
        assert self.targets.keys() <= self.members.keys(), (self.targets, self.members)
        names = [member.classic.protocol_names for member in self.members.values() if member.classic]
        assert not names or frozenset.intersection(*names), (
            f"{self.group_id!r}: no protocol in common: {names}"
        )
        used = {member.regex for member in self.members.values() if member.regex}
        assert self.patterns.keys() == used, (self.patterns, used)


def preferred_assignor(members: Iterable[ConsumerMember]) -> str:
    """The assignor that most of the members ask for; the default if none does."""
    votes = Counter(member.assignor for member in members if member.assignor is not None)
    return min(votes, key=lambda name: (-votes[name], name)) if votes else DEFAULT_ASSIGNOR


def _put_or_drop(table: dict[str, T], key: str, value: T | None) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


def _check_epoch(member: ConsumerMember, epoch: int) -> ErrorCode:
    if epoch == member.epoch:
        return ErrorCode.none
    return ErrorCode.stale_member_epoch if member.classic is None else ErrorCode.illegal_generation
