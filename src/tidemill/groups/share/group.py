"""A share group (KIP-932): members, epochs, the target assignment, the topics with state. State and views.

::

    EMPTY <-> STABLE        DEAD: the group is not served here any more

- ``epoch`` rises with every change of members, subscriptions, subscribed topics or readable partitions.
- ``target_epoch`` is the epoch that the target assignment was computed for. The next heartbeat of any member
  brings it up to ``epoch``, and every member moves to it with its own next heartbeat.
- A partition can be read once its state is initialized; only then is it part of a target.

``replay`` is the only door for changes of what is in the log: live operation and loading both come through
it. Deadlines are soft: they begin anew after a restart. What a request does is worked out in ``heartbeats``
and ``state_topics``.

Invariants: no member is ahead of the target's epoch, and that is not ahead of the group's. A topic is
initializing, initialized or being deleted in whole steps: if any partition of it is initialized, so are all
that it had when that began.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from tidemill.errors import ErrorCode
from tidemill.groups.consumer.group import Deadlines
from tidemill.groups.consumer.member import NO_PARTITIONS
from tidemill.groups.memory import GROUP_BYTES, NAME_BYTES, PARTITION_BYTES
from tidemill.groups.messages import GroupDescription, GroupListing
from tidemill.groups.share.member import ShareMember
from tidemill.groups.share.records import (
    ShareAssignment,
    ShareAssignmentRecord,
    ShareEpochRecord,
    ShareMemberMetadata,
    ShareMemberRecord,
    ShareTargetEpochRecord,
    ShareTargetRecord,
    StateTopic,
    StateTopics,
    StateTopicsRecord,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from tidemill.groups.consumer.member import Partitions
    from tidemill.groups.messages import Reply
    from tidemill.groups.settings import GroupSettings
    from tidemill.groups.share.records import ShareRecord

__all__ = ("INITIALIZE_RETRY_MS", "SHARE_PROTOCOL", "ShareGroup", "ShareGroupState")

SHARE_PROTOCOL: Final = "share"

INITIALIZE_RETRY_MS: Final = 30_000
"""How long state may be initializing before it is begun again."""
_RETRY_AFTER_FAILURE_MS: Final = 1_000
_DELETE_RETRY_MS: Final = 30_000
_TOLD_NOTHING: Final = ShareAssignment(0, 0, 0, NO_PARTITIONS)


class ShareGroupState(StrEnum):
    """The states of a share group, by the names that Kafka shows."""

    EMPTY = "Empty"
    STABLE = "Stable"
    DEAD = "Dead"


class ShareGroup:
    """One share group: members, epochs, the target assignment and the topics with state."""

    protocol_type: Final = SHARE_PROTOCOL

    def __init__(self, group_id: str, settings: GroupSettings) -> None:
        self.group_id = group_id
        self.settings = settings
        self.epoch = 0
        self.topics_hash = 0
        self.target_epoch = 0
        self.members: dict[str, ShareMember] = {}
        self.targets: dict[str, Partitions] = {}
        self.topics = StateTopics()
        self.sessions: Deadlines[str] = Deadlines()
        #: When the deletion of state is to be tried again; None if there is nothing to delete.
        self.delete_at_ms: int | None = None
        #: Revision of the topics for which the target was last found to be right; None: not since a change.
        self.seen_revision: int | None = None
        #: Subscribed topics that were initializing when the target was last looked at.
        self.awaited: frozenset[UUID] = frozenset()
        #: How often the state has changed: a draft sees by it whether the group is still the one that it
        #: copied.
        self.version = 0
        #: Memory for each member's own data; the host of the client that joined last.
        self._said_bytes: dict[str, int] = {}
        self._last_host = ""
        #: The version that ``bytes_by_host`` was last worked out for, and the result.
        self._sizes: tuple[int, Mapping[str, int]] = (-1, {})
        self._failed_at_ms = -INITIALIZE_RETRY_MS
        self._dead = False

    # -- replay ----------------------------------------------------------------------------------------

    def replay(self, record: ShareRecord) -> None:
        """Make one record that is in the log part of the state."""
        self.version += 1
        if not isinstance(record, ShareAssignmentRecord):
            self.seen_revision = None
        match record:
            case ShareEpochRecord(value=epoch):
                # The shard removes a group that a tombstone deletes.
                self.epoch, self.topics_hash = (0, 0) if epoch is None else (epoch.epoch, epoch.topics_hash)
            case ShareTargetEpochRecord(value=target_epoch):
                self.target_epoch = target_epoch or 0
            case ShareMemberRecord(value=None):
                self.members.pop(record.member_id, None)
                self._said_bytes.pop(record.member_id, None)
                self.sessions.cancel(record.member_id)
            case ShareMemberRecord(value=ShareMemberMetadata() as metadata):
                member = metadata.applied_to(self._member_or_new(record.member_id))
                self.members[record.member_id] = member
                self._said_bytes[record.member_id] = member.said_bytes
                self._last_host = member.client_host
            case ShareAssignmentRecord(value=None):
                if (known := self.members.get(record.member_id)) is not None:
                    self.members[record.member_id] = _TOLD_NOTHING.applied_to(known)
            case ShareAssignmentRecord(value=ShareAssignment() as assignment):
                self.members[record.member_id] = assignment.applied_to(self._member_or_new(record.member_id))
            case ShareTargetRecord(value=target):
                self.targets.pop(record.member_id, None)
                if target is not None:
                    self.targets[record.member_id] = target
            case StateTopicsRecord(value=topics):
                self.topics = topics or StateTopics()

    def _member_or_new(self, member_id: str) -> ShareMember:
        return self.members.get(member_id) or ShareMember(member_id)

    def copy(self) -> ShareGroup:
        """An independent group with the same members; to work out a change on, in a thread."""
        other = ShareGroup(self.group_id, self.settings)
        other.epoch, other.topics_hash, other.target_epoch = self.epoch, self.topics_hash, self.target_epoch
        other.members = self.members.copy()
        other.targets = self.targets.copy()
        other.topics = self.topics
        other.seen_revision, other.awaited = self.seen_revision, self.awaited
        other.version = self.version
        other._said_bytes, other._last_host = self._said_bytes.copy(), self._last_host
        other._failed_at_ms = self._failed_at_ms
        return other

    # -- members ---------------------------------------------------------------------------------------

    def target_of(self, member_id: str) -> Partitions:
        """The target assignment of the member."""
        return self.targets.get(member_id, NO_PARTITIONS)

    @property
    def bytes_by_host(self) -> Mapping[str, int]:
        """Estimate of the memory for members and their assignments, by client host.

        The group itself and its topics with state count for the client that joined last.
        """
        if self._sizes[0] != self.version:
            self._sizes = self.version, self._count_bytes()
        return self._sizes[1]

    def _count_bytes(self) -> Mapping[str, int]:
        topics = (*self.topics.initializing, *self.topics.initialized, *self.topics.deleting)
        state = sum(NAME_BYTES + PARTITION_BYTES * len(topic.partitions) for topic in topics)
        sizes = Counter({self._last_host: GROUP_BYTES + len(self.group_id) + state})
        for member_id, member in self.members.items():
            partitions = len(member.assigned) + len(self.target_of(member_id))
            sizes[member.client_host] += self.said_bytes_of(member_id) + PARTITION_BYTES * partitions
        return sizes

    def said_bytes_of(self, member_id: str) -> int:
        """Estimate of the memory for a member's own data; 0 if there is no such member."""
        return self._said_bytes.get(member_id, 0)

    @property
    def is_full(self) -> bool:
        """Whether the group has as many members as it may have."""
        return len(self.members) >= self.settings.share_max_size

    # -- state in ``__share_group_state`` --------------------------------------------------------------

    def is_initializing(self, topic: StateTopic, now_ms: int) -> bool:
        """Whether to wait for the end of an initialization; if not, it failed or nobody works on it."""
        if now_ms - topic.since_ms >= INITIALIZE_RETRY_MS:
            return False
        return topic.since_ms > self._failed_at_ms or now_ms - self._failed_at_ms < _RETRY_AFTER_FAILURE_MS

    def must_initialize_again(self, now_ms: int) -> bool:
        """Whether an initialization that members wait for has failed, or takes too long."""
        return any(
            topic.id in self.awaited and not self.is_initializing(topic, now_ms)
            for topic in self.topics.initializing
        )

    def initialization_failed(self, now_ms: int) -> None:
        """Note that nobody works any more on what began until now, so that a heartbeat begins it again."""
        self._failed_at_ms = now_ms

    @property
    def has_state(self) -> bool:
        """Whether anything of the group is in ``__share_group_state``, or may be."""
        return self.topics != StateTopics()

    def retry_deletion_later(self, now_ms: int) -> None:
        """Set the time of the next attempt to delete state, if there is any to delete."""
        self.delete_at_ms = now_ms + _DELETE_RETRY_MS if self.topics.deleting else None

    # -- time ------------------------------------------------------------------------------------------

    def next_deadline_ms(self) -> int | None:
        """When ``overdue`` and ``delete_at_ms`` are to be looked at next. May be early, never late."""
        due = [at_ms for at_ms in (self.sessions.next_ms, self.delete_at_ms) if at_ms is not None]
        return min(due, default=None)

    def overdue(self, now_ms: int) -> list[str]:
        """The ids of the members that were silent for too long."""
        return self.sessions.due(now_ms)

    def start(self, now_ms: int) -> None:
        """Begin to serve after loading: sessions start anew, and nobody works on what was begun."""
        for member_id in self.members:
            self.restart_session(member_id, now_ms)
        # An earlier leader may still be initializing. That is harmless: the epoch is the same or lower.
        self._failed_at_ms = now_ms - _RETRY_AFTER_FAILURE_MS
        for topic in self.topics.initializing:
            self._failed_at_ms = max(self._failed_at_ms, topic.since_ms)
        if self.topics.deleting:
            self.delete_at_ms = now_ms

    def restart_session(self, member_id: str, now_ms: int) -> None:
        """Restart the session of a member that showed that it is alive."""
        self.sessions.set(member_id, now_ms + self.settings.share_session_timeout_ms_of(self.group_id))

    def die(self, error: ErrorCode) -> tuple[Reply, ...]:
        """Stop for good. Nobody ever waits in a share group, so nobody is to be told ``error``."""
        del error
        self._dead = True
        self.sessions = Deadlines()
        self.delete_at_ms = None
        return ()

    # -- what other APIs ask ---------------------------------------------------------------------------

    @property
    def state(self) -> ShareGroupState:
        """The state of the group."""
        if self._dead:
            return ShareGroupState.DEAD
        return ShareGroupState.STABLE if self.members else ShareGroupState.EMPTY

    @property
    def is_empty(self) -> bool:
        """Whether the group has no members."""
        return not self.members

    @property
    def is_idle(self) -> bool:
        """Whether the group may expire: never, as its state says where it would go on."""
        return False

    def check_commit(self, member_id: str, instance_id: str | None, epoch: int) -> ErrorCode:
        """Refuse to commit offsets: a share group has none, as its state is in ``__share_group_state``."""
        del member_id, instance_id, epoch
        return ErrorCode.group_id_not_found

    def check_transactional_commit(self, member_id: str, instance_id: str | None, epoch: int) -> ErrorCode:
        """Nobody commits offsets for a share group in a transaction either."""
        return self.check_commit(member_id, instance_id, epoch)

    def is_subscribed_to(self, topic: str) -> bool:
        """Whether members consume ``topic``."""
        return any(topic in member.topics for member in self.members.values())

    def expiry_base_ms(self, committed_at_ms: int) -> int | None:
        """When the retention of an offset starts: never, as there are none."""
        del committed_at_ms
        return None

    def tombstones(self) -> list[ShareRecord]:
        """The records that delete the group and everything in it, members first."""
        group_id = self.group_id
        records: list[ShareRecord] = []
        records += (ShareAssignmentRecord(group_id, member_id, None) for member_id in self.members)
        records += (ShareTargetRecord(group_id, member_id, None) for member_id in self.targets)
        records.append(ShareTargetEpochRecord(group_id, None))
        records += (ShareMemberRecord(group_id, member_id, None) for member_id in self.members)
        records += (StateTopicsRecord(group_id, None), ShareEpochRecord(group_id, None))
        return records

    def listing(self) -> GroupListing:
        """The group's line in ListGroups."""
        return GroupListing(self.group_id, SHARE_PROTOCOL, str(self.state), "share")

    def describe(self) -> GroupDescription:
        """The group in DescribeGroups, which knows classic groups only."""
        return GroupDescription(self.group_id, state=ShareGroupState.DEAD.value)
