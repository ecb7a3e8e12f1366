"""The state of one shard: the groups and offsets that live in one partition of ``__consumer_offsets``. Pure.

Every change follows one pattern: the new records are handed to ``append`` and, once they are in the log,
``replay`` makes them part of the state; loading calls the same ``replay``. If ``append`` raises, nothing was
appended, the state is as before, and the error goes to the caller. Each handler therefore either happens or
does not.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Protocol

from tidemill.errors import ErrorCode
from tidemill.groups.classic.group import ClassicGroup, Effects, GroupState
from tidemill.groups.consumer.draft import GroupDraft, is_large, needs_draft
from tidemill.groups.consumer.group import ConsumerGroup
from tidemill.groups.consumer.handlers import ConsumerGroupHandlers
from tidemill.groups.consumer.records import ConsumerRecord
from tidemill.groups.messages import (
    DeleteOffsetsResult,
    FetchOffsetsResult,
    GroupDescription,
    JoinReply,
    LeaveReply,
    LeftMember,
    Reply,
    SyncReply,
)
from tidemill.groups.offsets import NO_PRODUCER_ID, OffsetStore
from tidemill.groups.records import GroupMetadata, GroupMetadataRecord, OffsetCommitRecord
from tidemill.groups.share.draft import ShareDraft, needs_share_draft
from tidemill.groups.share.group import ShareGroup
from tidemill.groups.share.handlers import ShareGroupHandlers
from tidemill.wire.consumer_protocol import CONSUMER_PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tidemill.groups.consumer.handlers import Group
    from tidemill.groups.consumer.messages import ConsumerHeartbeatRequest
    from tidemill.groups.messages import (
        GroupListing,
        HeartbeatRequest,
        JoinRequest,
        LeavingMember,
        OffsetCommitRequest,
        SyncRequest,
        TopicPartition,
        TransactionalCommitRequest,
    )
    from tidemill.groups.records import GroupRecord
    from tidemill.groups.settings import GroupSettings
    from tidemill.groups.share.messages import ShareHeartbeatRequest
    from tidemill.groups.topics import Topics

__all__ = ("NO_MEMBER", "ShardState")

_RECORDS_PER_APPEND = 1_000
#: Groups and offsets that are looked at in one step of a long change.
_WEIGHT_PER_STEP = 1_000
_FIRST_COMMIT_VERSION_WITH_GROUP_ID_NOT_FOUND = 9
_FIRST_TRANSACTIONAL_COMMIT_WITH_GROUP_ID_NOT_FOUND = 6

Replies = tuple[Reply, ...]

NO_MEMBER: tuple[str | None, int] = (None, -1)
"""Id and epoch of a client that reads offsets without saying that it is a member."""


class Append(Protocol):
    """Puts records into the log as one batch, or raises and leaves the log as it was."""

    def __call__(self, records: Sequence[GroupRecord], producer: tuple[int, int] | None = None) -> None:
        """Append ``records``; ``producer`` is id and epoch if they are part of its transaction."""


class ShardState:
    """Groups and offsets of one shard. Groups of all protocols share one space of names."""

    def __init__(self, settings: GroupSettings, append: Append, topics: Topics) -> None:
        self.settings = settings
        self.groups: dict[str, Group] = {}
        self.offsets = OffsetStore()
        self._append = append
        self._topics = topics
        self.consumers = ConsumerGroupHandlers(settings, self.groups, append, self._append_and_replay, topics)
        self.shares = ShareGroupHandlers(
            settings, self.groups.get, self._put_share_group, self._append_and_replay, topics
        )

    def _put_share_group(self, group_id: str, group: ShareGroup | None) -> None:
        if group is None:
            del self.groups[group_id]
        else:
            self.groups[group_id] = group

    # -- replay ----------------------------------------------------------------------------------------

    def replay(self, record: GroupRecord, now_ms: int, producer_id: int = NO_PRODUCER_ID) -> None:
        """Make one record that is in the log part of the state; offsets may be part of a transaction."""
        if isinstance(record, GroupMetadataRecord):
            self._replay_classic(record, now_ms)
        elif isinstance(record, OffsetCommitRecord):
            self.offsets.replay(record, producer_id)
            if record.value is not None and record.group_id not in self.groups:
                # A client may keep offsets here without ever joining: a group without a protocol type.
                self.groups[record.group_id] = ClassicGroup(record.group_id, self.settings, now_ms)
        elif isinstance(record, ConsumerRecord):
            self.consumers.replay(record)
        else:
            self.shares.replay(record)

    def _replay_classic(self, record: GroupMetadataRecord, now_ms: int) -> None:
        group = self.groups.get(record.group_id)
        if record.value is not None:
            if not isinstance(group, ClassicGroup):
                group = self.groups[record.group_id] = ClassicGroup(record.group_id, self.settings, now_ms)
            group.apply(record.value)
        elif isinstance(group, ClassicGroup):
            del self.groups[record.group_id]

    def replay_marker(self, producer_id: int, *, commit: bool) -> None:
        """Settle the offsets of a producer's transaction that has ended."""
        self.offsets.replay_marker(producer_id, commit=commit)

    def _append_and_replay(self, records: Sequence[GroupRecord], now_ms: int) -> None:
        if records:
            self._append(records)
            for record in records:
                self.replay(record, now_ms)

    def _settle(self, group: ClassicGroup, event: Callable[[], Effects]) -> Replies:
        """Run an event of a group; undo it if its records cannot be appended."""
        before = group.checkpoint()
        effects = event()
        if effects.records:
            try:
                self._append([GroupMetadataRecord(group.group_id, value) for value in effects.records])
            except Exception:
                group.restore(before)
                raise
        return effects.replies

    # -- membership ------------------------------------------------------------------------------------

    def join(self, request: JoinRequest, token: object, fresh_member_id: str, now_ms: int) -> Replies:
        """JoinGroup. The reply to ``token`` comes in this or in a later call's result."""
        group = self.groups.get(request.group_id)
        if isinstance(group, ClassicGroup):
            return self._settle(group, lambda: group.join(request, token, fresh_member_id, now_ms))
        if isinstance(group, ShareGroup):
            return (Reply(token, JoinReply(ErrorCode.inconsistent_group_protocol, request.member_id)),)
        if group is not None and not group.is_empty:
            return self.consumers.join(group, request, token, fresh_member_id, now_ms)
        if request.member_id:
            return (Reply(token, JoinReply(ErrorCode.unknown_member_id, request.member_id)),)
        return self._join_new_group(request, token, fresh_member_id, now_ms)

    def _join_new_group(self, request: JoinRequest, token: object, member_id: str, now_ms: int) -> Replies:
        group = ClassicGroup(request.group_id, self.settings, now_ms)
        effects = group.join(request, token, member_id, now_ms)
        refused = any(
            reply.body.error not in (ErrorCode.none, ErrorCode.member_id_required)
            for reply in effects.replies
        )
        if not refused:
            created = GroupMetadata("", 0, None, None, now_ms, ())
            # A consumer group without members is replaced by the classic one.
            former = self.groups.get(request.group_id)
            tombstones = [] if former is None else former.tombstones()
            self._append([*tombstones, GroupMetadataRecord(request.group_id, created)])
            self.groups[request.group_id] = group
        return effects.replies

    def sync(self, request: SyncRequest, token: object, now_ms: int) -> Replies:
        """SyncGroup. The reply to ``token`` comes in this or in a later call's result."""
        group = self.groups.get(request.group_id)
        if group is None or isinstance(group, ShareGroup):
            return (Reply(token, SyncReply(ErrorCode.unknown_member_id)),)
        if isinstance(group, ConsumerGroup):
            return self.consumers.sync(group, request, token, now_ms)
        return self._settle(group, lambda: group.sync(request, token, now_ms))

    def heartbeat(self, request: HeartbeatRequest, now_ms: int) -> ErrorCode:
        """Heartbeat. Appends nothing."""
        group = self.groups.get(request.group_id)
        if isinstance(group, ConsumerGroup):
            return self.consumers.classic_heartbeat(group, request, now_ms)
        if isinstance(group, ClassicGroup):
            return group.heartbeat(request, now_ms)
        return ErrorCode.unknown_member_id

    def leave(
        self, group_id: str, members: Sequence[LeavingMember], now_ms: int
    ) -> tuple[LeaveReply, Replies]:
        """LeaveGroup for several members at once."""
        group = self.groups.get(group_id)
        if group is None or isinstance(group, ShareGroup):
            unknown = (LeftMember(m.member_id, m.instance_id, ErrorCode.unknown_member_id) for m in members)
            return LeaveReply(members=tuple(unknown)), ()
        if isinstance(group, ConsumerGroup):
            return self.consumers.leave(group, members, now_ms), ()
        answer = LeaveReply()

        def event() -> Effects:
            nonlocal answer
            answer, effects = group.leave(members, now_ms)
            return effects

        replies = self._settle(group, event)
        return answer, replies

    def tick(self, group_id: str, now_ms: int) -> Replies:
        """Do what is due in a group at ``now_ms``."""
        group = self.groups.get(group_id)
        if isinstance(group, ConsumerGroup):
            self.consumers.tick(group, now_ms)
            return ()
        if isinstance(group, ShareGroup):
            self.shares.tick(group, now_ms)
            return ()
        return () if group is None else self._settle(group, lambda: group.tick(now_ms))

    def start(self, now_ms: int) -> Iterator[str]:
        """Begin to serve what was loaded; yields each group that has begun."""
        for group_id, group in tuple(self.groups.items()):
            group.start(now_ms)
            yield group_id

    def die(self, error: ErrorCode) -> Replies:
        """Stop for good; every waiting request of any group is answered with ``error``."""
        waited_for = (
            group for group in self.groups.values() if isinstance(group, ClassicGroup) and group.has_waiting
        )
        return tuple(reply for group in waited_for for reply in group.die(error))

    # -- large groups ----------------------------------------------------------------------------------

    def needs_share_draft(self, request: ShareHeartbeatRequest, now_ms: int) -> bool:
        """Whether a heartbeat of a share group may be long work, to be done on a draft."""
        return needs_share_draft(self.groups.get(request.group_id), self._topics, request, now_ms)

    def share_draft(self, request: ShareHeartbeatRequest, now_ms: int) -> ShareDraft:
        """A copy of a share group for a heartbeat. Raises ``Refused`` if there is no such group."""
        return ShareDraft(self.shares, self.groups.get, self._topics, request, now_ms)

    def needs_draft(self, request: ConsumerHeartbeatRequest) -> bool:
        """Whether a heartbeat may be long work, to be done on a draft."""
        return needs_draft(self.groups.get(request.group_id), self._topics, request)

    def is_large_consumer_group(self, group_id: str) -> bool:
        """Whether changes of the group are long work, to be done on a draft."""
        group = self.groups.get(group_id)
        return isinstance(group, ConsumerGroup) and not group.is_empty and is_large(group, self._topics)

    def is_large_join(self, group_id: str) -> bool:
        """Whether a JoinGroup in a consumer group may be long work: it may subscribe to any topics."""
        group = self.groups.get(group_id)
        if not isinstance(group, ConsumerGroup) or group.is_empty:
            return False
        return is_large(group, self._topics, partitions=self._topics.partition_count)

    def draft(self, group_id: str, now_ms: int) -> GroupDraft:
        """A copy of a consumer group, or of what a classic one becomes. Raises ``Refused`` if it cannot."""
        return GroupDraft(group_id, self.settings, self.groups, self._topics, now_ms)

    # -- offsets ---------------------------------------------------------------------------------------

    def commit_offsets(self, request: OffsetCommitRequest, now_ms: int) -> dict[TopicPartition, ErrorCode]:
        """OffsetCommit: all accepted partitions go into one batch."""
        error = self._check_commit(request)
        if error is not ErrorCode.none:
            return {(entry.topic, entry.partition): error for entry in request.offsets}
        records, results = self.offsets.commit(request, self.settings, now_ms)
        self._append_and_replay(records, now_ms)
        if records:
            self.offsets.note_committer(request.group_id, request.client_host)
        group = self.groups.get(request.group_id)
        if isinstance(group, ClassicGroup) and not group.is_empty:
            group.touch(request.member_id, now_ms)
        return results

    def commit_transactional_offsets(
        self, request: TransactionalCommitRequest, now_ms: int
    ) -> dict[TopicPartition, ErrorCode]:
        """TxnOffsetCommit: the offsets are pending until the transaction ends."""
        commit = request.commit
        error = self._check_transactional_commit(commit)
        if error is not ErrorCode.none:
            return {(entry.topic, entry.partition): error for entry in commit.offsets}
        records, results = self.offsets.commit(commit, self.settings, now_ms)
        if records:
            self._append(records, (request.producer_id, request.producer_epoch))
            for record in records:
                self.replay(record, now_ms, request.producer_id)
            self.offsets.note_committer(commit.group_id, commit.client_host)
        return results

    def _check_transactional_commit(self, request: OffsetCommitRequest) -> ErrorCode:
        group = self.groups.get(request.group_id)
        if group is not None:
            return group.check_transactional_commit(
                request.member_id, request.instance_id, request.generation
            )
        if request.generation < 0:
            return ErrorCode.none
        if request.version >= _FIRST_TRANSACTIONAL_COMMIT_WITH_GROUP_ID_NOT_FOUND:
            return ErrorCode.group_id_not_found
        return ErrorCode.illegal_generation

    def _check_commit(self, request: OffsetCommitRequest) -> ErrorCode:
        group = self.groups.get(request.group_id)
        if isinstance(group, ConsumerGroup):
            return group.check_commit(
                request.member_id, request.instance_id, request.generation, request.version
            )
        if group is not None:
            return group.check_commit(request.member_id, request.instance_id, request.generation)
        if request.generation < 0:
            return ErrorCode.none
        if request.version >= _FIRST_COMMIT_VERSION_WITH_GROUP_ID_NOT_FOUND:
            return ErrorCode.group_id_not_found
        return ErrorCode.illegal_generation

    def fetch_offsets(
        self,
        group_id: str,
        partitions: Iterable[TopicPartition] | None,
        *,
        require_stable: bool = False,
        member: tuple[str | None, int] = NO_MEMBER,
    ) -> FetchOffsetsResult:
        """OffsetFetch for one group. ``member``: id and epoch of the member that asks, if it says so."""
        group = self.groups.get(group_id)
        if isinstance(group, ConsumerGroup) and (error := group.check_fetch(*member)) is not ErrorCode.none:
            return FetchOffsetsResult(error)
        return FetchOffsetsResult(
            offsets=self.offsets.fetch(group_id, partitions, require_stable=require_stable)
        )

    def delete_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition], now_ms: int
    ) -> DeleteOffsetsResult:
        """OffsetDelete: forget the committed offsets of partitions that nobody consumes."""
        group = self.groups.get(group_id)
        if group is None:
            return DeleteOffsetsResult(ErrorCode.group_id_not_found)
        if isinstance(group, ShareGroup):
            return DeleteOffsetsResult(ErrorCode.group_id_not_found)
        if not group.is_empty and group.protocol_type != CONSUMER_PROTOCOL:
            # What members of another kind of group consume is unknown here.
            return DeleteOffsetsResult(ErrorCode.non_empty_group)
        records, results = self.offsets.delete(group, partitions)
        self._append_and_replay(records, now_ms)
        return DeleteOffsetsResult(partitions=results)

    def forget_topics(self, is_gone: Callable[[str], bool], now_ms: int) -> Iterator[str]:
        """Delete the offsets committed for topics that are gone, and what share groups have of them.

        Yields between the steps: the group that was looked at.
        """
        weight = 0
        for group_id in {*self.groups, *self.offsets.sized()}:
            group = self.groups.get(group_id)
            if isinstance(group, ShareGroup):
                self.shares.forget_missing_topics(group, now_ms)
                weight += len(group.topics.initialized)
            weight += 1 + self.offsets.topic_count(group_id)
            while records := self.offsets.tombstones_of_topics(group_id, is_gone, _RECORDS_PER_APPEND):
                self._append_and_replay(records, now_ms)
                yield group_id
            if weight > _WEIGHT_PER_STEP:
                yield group_id
                weight = 0

    def expire(self, now_ms: int) -> Iterator[str]:
        """Delete offsets past their retention, and groups that have neither offsets nor members.

        Yields between the steps: the group that was looked at.
        """
        weight = 0
        for group_id in tuple(self.groups):
            while records := self._expired(group_id, now_ms):
                self._append_and_replay(records, now_ms)
                yield group_id
            weight += 1 + self.offsets.count(group_id)
            if weight > _WEIGHT_PER_STEP:
                yield group_id
                weight = 0

    def _expired(self, group_id: str, now_ms: int) -> list[GroupRecord]:
        """Tombstones for what is past its retention in a group: some of them, if there are very many."""
        group = self.groups.get(group_id)
        if group is None or isinstance(group, ShareGroup):
            return []
        expired = self.offsets.expired(group, self.settings, now_ms)
        records: list[GroupRecord] = [*islice(expired, _RECORDS_PER_APPEND)]
        is_used = not group.is_idle or self.offsets.pending.has_any(group_id)
        if not is_used and len(records) == self.offsets.count(group_id):
            records += group.tombstones()
        return records

    # -- groups ----------------------------------------------------------------------------------------

    def delete_group(self, group_id: str, now_ms: int) -> ErrorCode | None:
        """DeleteGroups for one group: its offsets and the group itself.

        The state of a share group must be deleted before. None: only a part of the offsets is deleted, as
        there are very many; ask again.
        """
        group = self.groups.get(group_id)
        if group is None:
            return ErrorCode.group_id_not_found
        if not group.is_empty or (isinstance(group, ShareGroup) and group.has_state):
            return ErrorCode.non_empty_group
        offsets = self.offsets.tombstones_of_group(group_id)
        if len(offsets) > _RECORDS_PER_APPEND:
            self._append_and_replay(offsets[:_RECORDS_PER_APPEND], now_ms)
            return None
        self._append_and_replay([*offsets, *group.tombstones()], now_ms)
        return ErrorCode.none

    def list_groups(
        self, group_ids: Iterable[str], states: frozenset[str], types: frozenset[str]
    ) -> list[GroupListing]:
        """ListGroups for these groups, as far as they exist.

        States and types are in lower case; an empty filter lets everything through.
        """
        found = (self.groups[group_id] for group_id in group_ids if group_id in self.groups)
        return [
            listing
            for listing in (group.listing() for group in found)
            if (not states or listing.state.lower() in states) and (not types or listing.group_type in types)
        ]

    def describe_group(self, group_id: str) -> GroupDescription:
        """DescribeGroups for one group."""
        group = self.groups.get(group_id)
        return GroupDescription(group_id, state=GroupState.DEAD.value) if group is None else group.describe()
