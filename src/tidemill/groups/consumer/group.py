"""A consumer group (KIP-848): members, epochs, the target assignment. State and views only.

::

    EMPTY -> ASSIGNING -> RECONCILING -> STABLE        any -> ASSIGNING when the epoch is raised

- ``epoch`` rises with every change of members, subscriptions or subscribed topics.
- ``target_epoch`` is the epoch that the target assignment was computed for; behind ``epoch`` it is ASSIGNING.
- Members move to the target one by one (``reconcile``); until all are there it is RECONCILING.

``replay`` is the only door for changes of what is in the log: live operation and loading both come through
it. Deadlines are soft: they begin anew after a restart. What a request does is worked out in ``heartbeats``
and ``classic_members``.

Invariants: a partition is held by one member; an instance id belongs to one
member; no member is ahead of the target's epoch, and that is not ahead of the group's.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from tidemill.errors import ErrorCode
from tidemill.groups.consumer.assignors import DEFAULT_ASSIGNOR
from tidemill.groups.consumer.member import (
    LEAVE_EPOCH,
    NO_PARTITIONS,
    ConsumerMember,
    MemberState,
    Partitions,
)
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
from tidemill.groups.memory import GROUP_BYTES, NAME_BYTES, PARTITION_BYTES
from tidemill.groups.messages import GroupDescription, GroupListing
from tidemill.wire.consumer_protocol import CONSUMER_PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tidemill.groups.consumer.member import TopicIdPartition
    from tidemill.groups.consumer.records import ConsumerRecord
    from tidemill.groups.messages import Reply
    from tidemill.groups.settings import GroupSettings
    from tidemill.groups.topics import SubscribedTopic

__all__ = ("ConsumerGroup", "ConsumerGroupState", "Deadlines", "Wait", "preferred_assignor")

K = TypeVar("K")
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
    """What a deadline is for: a member that has not done this in time is removed."""

    SESSION = "show that it is alive"
    REBALANCE = "let go of partitions"
    JOIN = "join again (classic protocol)"
    SYNC = "fetch its assignment (classic protocol)"


class Deadlines(Generic[K]):
    """Deadlines by key, with a cheap lower bound of the next one.

    ``next_ms`` may be early, because a deadline that moves does not recompute it; it is never late.
    """

    def __init__(self) -> None:
        self._at: dict[K, int] = {}
        self._earliest_ms: int | None = None

    def __contains__(self, key: object) -> bool:
        return key in self._at

    def set(self, key: K, at_ms: int) -> None:
        """Let ``key`` be due at ``at_ms``, whatever was set before."""
        self._at[key] = at_ms
        if self._earliest_ms is None or at_ms < self._earliest_ms:
            self._earliest_ms = at_ms

    def set_if_absent(self, key: K, at_ms: int) -> None:
        """Let ``key`` be due at ``at_ms``, unless it has a deadline already."""
        if key not in self._at:
            self.set(key, at_ms)

    def cancel(self, key: K) -> None:
        """Forget a deadline, if there is one."""
        self._at.pop(key, None)
        if not self._at:
            self._earliest_ms = None

    @property
    def next_ms(self) -> int | None:
        """The earliest time at which ``due`` may give a key; None if no key is set."""
        return self._earliest_ms

    def due(self, now_ms: int) -> list[K]:
        """The keys that are due, the longest overdue first. They stay until they are cancelled or set."""
        found = sorted((at_ms, index) for index, at_ms in enumerate(self._at.values()) if at_ms <= now_ms)
        keys = list(self._at)
        self._earliest_ms = min(self._at.values(), default=None)
        return [keys[index] for _, index in found]


class ConsumerGroup:
    """One consumer group: members, epochs and the target assignment, as the log has them."""

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
        #: Revision of the topics at which subscriptions were last resolved; None: not since the start.
        self.seen_revision: int | None = None
        #: How often the state has changed: a draft sees by it whether the group is still the one that it
        #: copied.
        self.version = 0
        self.partition_count = 0
        self._dead = False
        self._static: dict[str, str] = {}
        self._holders: dict[TopicIdPartition, str] = {}
        #: Memory for each member's own data; the host of the client that joined last.
        self._said_bytes: dict[str, int] = {}
        self._last_host = ""
        #: The version that ``bytes_by_host`` was last worked out for, and the result.
        self._sizes: tuple[int, Mapping[str, int]] = (-1, {})

    # -- replay ----------------------------------------------------------------------------------------

    def replay(self, record: ConsumerRecord) -> None:
        """Make one record that is in the log part of the state."""
        self.version += 1
        match record:
            case EpochRecord(value=epoch):
                # The shard removes a group that a tombstone deletes.
                self.epoch = 0 if epoch is None else epoch
            case TargetEpochRecord(value=epoch):
                self.target_epoch = 0 if epoch is None else epoch
            case SubscribedTopicsRecord(value=topics):
                self.subscribed_topics = {topic.name: topic for topic in topics or ()}
                self.partition_count = sum(topic.partitions for topic in topics or ())
            case MemberMetadataRecord(value=None):
                self._remove(record.member_id)
            case MemberMetadataRecord(value=MemberMetadata() as metadata):
                member = metadata.applied_to(self._member_or_new(record.member_id))
                self._put(member)
                self._said_bytes[member.member_id] = member.said_bytes
                self._last_host = member.client_host
            case CurrentAssignmentRecord(value=None):
                if (known := self.members.get(record.member_id)) is not None:
                    self._put(_GONE.applied_to(known))
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
            self._unlink(old, kept=member.held)
        self.members[member.member_id] = member
        if member.instance_id is not None:
            self._static[member.instance_id] = member.member_id
        self._holders.update(dict.fromkeys(member.held, member.member_id))

    def _remove(self, member_id: str) -> None:
        member = self.members.pop(member_id, None)
        self._said_bytes.pop(member_id, None)
        if member is not None:
            self._unlink(member)
        for wait in Wait:
            self.deadlines.cancel((wait, member_id))

    def _unlink(self, member: ConsumerMember, kept: Partitions = NO_PARTITIONS) -> None:
        """Free what the member holds, except ``kept`` and what a later record gave to another member."""
        member_id = member.member_id
        if member.instance_id is not None and self._static.get(member.instance_id) == member_id:
            del self._static[member.instance_id]
        for partition in member.held - kept:
            if self._holders.get(partition) == member_id:
                del self._holders[partition]

    def copy(self) -> ConsumerGroup:
        """An independent group with the same members, on which a change is worked out."""
        other = ConsumerGroup(self.group_id, self.settings)
        other.epoch, other.target_epoch = self.epoch, self.target_epoch
        other.members = self.members.copy()
        other.targets = self.targets.copy()
        other.subscribed_topics = self.subscribed_topics.copy()
        other.patterns = self.patterns.copy()
        other.seen_revision = self.seen_revision
        other.version, other.partition_count = self.version, self.partition_count
        other._static = self._static.copy()
        other._holders = self._holders.copy()
        other._said_bytes = self._said_bytes.copy()
        other._last_host = self._last_host
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
        """The target assignment of the member."""
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
    def bytes_by_host(self) -> Mapping[str, int]:
        """Estimate of the memory for members and their assignments, by client host.

        The group itself counts for the client that joined last.
        """
        if self._sizes[0] != self.version:
            self._sizes = self.version, self._count_bytes()
        return self._sizes[1]

    def _count_bytes(self) -> Mapping[str, int]:
        names = len(self.subscribed_topics) + sum(len(found.topics) for found in self.patterns.values())
        texts = len(self.group_id) + sum(map(len, self.patterns))
        sizes = Counter({self._last_host: GROUP_BYTES + texts + NAME_BYTES * names})
        for member_id, member in self.members.items():
            partitions = len(member.assigned) + len(member.revoking) + len(self.target_of(member_id))
            sizes[member.client_host] += self.said_bytes_of(member_id) + PARTITION_BYTES * partitions
        return sizes

    def said_bytes_of(self, member_id: str) -> int:
        """Estimate of the memory for a member's own data; 0 if there is no such member."""
        return self._said_bytes.get(member_id, 0)

    @property
    def assignor(self) -> str:
        """The assignor that most members ask for."""
        return preferred_assignor(self.members.values())

    @property
    def is_full(self) -> bool:
        """Whether the group has as many members as it may have."""
        return len(self.members) >= self.settings.consumer_max_size

    # -- time ------------------------------------------------------------------------------------------

    def next_deadline_ms(self) -> int | None:
        """When ``overdue`` is to be asked next. May be early, never late."""
        return self.deadlines.next_ms

    def overdue(self, now_ms: int) -> list[str]:
        """The ids of the members that missed a deadline and must be removed."""
        return list(dict.fromkeys(member_id for _, member_id in self.deadlines.due(now_ms)))

    def start(self, now_ms: int) -> None:
        """Begin to serve after loading: sessions start anew."""
        for member in self.members.values():
            self.restart_session(member, now_ms)
            if member.classic is None:
                self.watch_revocation(member, now_ms)

    def restart_session(self, member: ConsumerMember, now_ms: int) -> None:
        """Restart the session of a member that showed that it is alive."""
        timeout_ms = self.settings.session_timeout_ms_of(self.group_id)
        if member.classic is not None:
            timeout_ms = member.classic.session_timeout_ms
        self.deadlines.set((Wait.SESSION, member.member_id), now_ms + timeout_ms)

    def watch_revocation(self, member: ConsumerMember, now_ms: int) -> None:
        """Set the deadline for the member's revocations, or cancel it; call this when the member changed."""
        key = (Wait.REBALANCE, member.member_id)
        if member.state is MemberState.UNREVOKED_PARTITIONS:
            self.deadlines.set(key, now_ms + member.rebalance_timeout_ms)
        else:
            self.deadlines.cancel(key)

    def die(self, error: ErrorCode) -> tuple[Reply, ...]:
        """Stop for good. Nobody ever waits in a consumer group, so nobody is to be told ``error``."""
        del error
        self._dead = True
        self.deadlines = Deadlines()
        return ()

    # -- what other APIs ask ---------------------------------------------------------------------------

    @property
    def state(self) -> ConsumerGroupState:
        """The state of the group, which follows from its members and epochs."""
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
        """Whether the group has no members."""
        return not self.members

    @property
    def is_idle(self) -> bool:
        """Whether the group has no members: as ``is_empty``, because here no member ids are announced."""
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
        """Whether the member may commit offsets in a transaction, in the codes that producers understand."""
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
        patterns = (self.patterns.get(regex) for regex in {each.regex for each in self.members.values()})
        return any(topic in member.topics for member in self.members.values()) or any(
            topic in resolved.topics for resolved in patterns if resolved is not None
        )

    def expiry_base_ms(self, committed_at_ms: int) -> int | None:
        """When the retention of an offset committed at that time starts."""
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
