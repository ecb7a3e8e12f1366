"""The group coordinator: which shard a group lives in, loading shards, and Kafka's error codes.

A group lives in the partition of ``__consumer_offsets`` that its id hashes to, and is served by the node
that leads that partition. Every public function that serves a client answers with error codes; none raises
for what a client sends or a disk does.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from tidemill.control.image import GROUPS_TOPIC
from tidemill.coordination.coordinator import Coordinator
from tidemill.coordination.ids import Ids, RandomIds
from tidemill.coordination.shards import Shards, client_error
from tidemill.coordination.turns import give_way, in_chunks
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.groups.classic.group import ClassicGroup
from tidemill.groups.consumer.heartbeats import asked_bytes
from tidemill.groups.consumer.messages import ConsumerGroupDescription, ConsumerHeartbeatReply
from tidemill.groups.memory import (
    COMMITTED_BYTES_MAX,
    GROUP_BYTES,
    MEMBER_BYTES,
    MEMBER_BYTES_MAX,
    NO_MEMORY,
    GroupMemory,
)
from tidemill.groups.messages import (
    CommittedOffset,
    DeleteOffsetsResult,
    FetchOffsetsResult,
    GroupDescription,
    JoinReply,
    LeaveReply,
    ListGroupsResult,
    SyncReply,
)
from tidemill.groups.shard import Shard, membership_error
from tidemill.groups.share.coordinator import ShareGroups
from tidemill.groups.share.group import ShareGroup
from tidemill.groups.state import NO_MEMBER
from tidemill.wire.guard import MAX_STRING_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from tidemill.coordination.clock import Clock
    from tidemill.coordination.log import LogAccess
    from tidemill.coordination.share_state import Persister
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
    from tidemill.groups.settings import GroupSettings
    from tidemill.groups.topics import Topics

__all__ = ("GroupCoordinator",)

_LONGEST_CLIENT_ID_IN_MEMBER_ID = 255
_LISTED_AT_ONCE = 500
_FETCHED_AT_ONCE = 2_000


def _no_persister() -> Persister:
    raise ApiError(ErrorCode.coordinator_not_available, "this coordinator has no persister of share state")


class GroupCoordinator(Coordinator[Shard]):
    """Groups and committed offsets of the partitions that this node leads.

    ``topics`` tells which topics exist, which groups of the new protocol need to know. ``persister`` gives
    the way to the coordinators that keep the state of share partitions.
    """

    def __init__(
        self,
        logs: LogAccess,
        settings: GroupSettings,
        clock: Clock,
        topics: Topics,
        ids: Ids | None = None,
        persister: Callable[[], Persister] = _no_persister,
    ) -> None:
        one_draft = asyncio.Lock()
        shards: Shards[Shard] = Shards(
            GROUPS_TOPIC,
            logs,
            clock,
            lambda partition, log, on_stop: Shard(
                partition,
                log,
                settings,
                clock,
                on_stop,
                topics,
                one_draft,
                self.share.delete_later,
                self.member_memory,
                self.committed_memory,
            ),
        )
        #: The memory of the members of all groups that this node serves.
        self.member_memory = GroupMemory(MEMBER_BYTES_MAX)
        #: The memory of their committed offsets.
        self.committed_memory = GroupMemory(COMMITTED_BYTES_MAX)
        super().__init__(shards)
        self.share = ShareGroups(shards, persister, topics, self.member_memory)
        self._ids = ids or RandomIds()
        self._settings = settings

    async def close(self) -> None:
        """Answer every waiting request with COORDINATOR_NOT_AVAILABLE, and stop all work."""
        await self.share.close()
        await super().close()

    # -- membership ------------------------------------------------------------------------------------

    async def join(self, request: JoinRequest) -> JoinReply:
        """JoinGroup. May take as long as a rebalance."""
        error = self._check_join(request)
        if error is not ErrorCode.none:
            return JoinReply(error, request.member_id)
        prefix = request.client_id[:_LONGEST_CLIENT_ID_IN_MEMBER_ID]
        if request.instance_id is not None:
            prefix = request.instance_id
        fresh_member_id = f"{prefix}-{self._ids.uuid()}"
        try:
            shard = await self._shards.of(request.group_id)
            if not self._has_memory_for(shard, request):
                return JoinReply(ErrorCode.group_max_size_reached, request.member_id)
            if shard.state.is_large_join(request.group_id):
                done = await shard.on_draft(
                    request.group_id,
                    lambda: shard.state.is_large_join(request.group_id),
                    lambda draft: draft.handlers.join(
                        draft.group, request, None, fresh_member_id, draft.now_ms
                    ),
                    request.client_host,
                )
                if done is not None:
                    (reply,) = done[0]
                    assert isinstance(reply.body, JoinReply), reply
                    return reply.body
            return await shard.request(
                request.group_id,
                lambda token, now_ms: shard.state.join(request, token, fresh_member_id, now_ms),
            )
        except TidemillError as failure:
            return JoinReply(membership_error(failure), request.member_id)

    def _has_memory_for(self, shard: Shard, request: JoinRequest) -> bool:
        group = shard.state.groups.get(request.group_id)
        asked = MEMBER_BYTES + request.metadata_bytes
        if group is None:
            asked += GROUP_BYTES + len(request.group_id)
        elif not isinstance(group, ShareGroup):
            asked -= group.said_bytes_of(request.member_id)
        return self.member_memory.has_capacity(request.client_host, asked)

    def _has_memory_for_assignments(self, shard: Shard, request: SyncRequest) -> bool:
        group = shard.state.groups.get(request.group_id)
        if not isinstance(group, ClassicGroup) or not request.assignments:
            return True
        asked = sum(map(len, request.assignments.values()))
        return self.member_memory.has_capacity(
            group.client_host_of(request.member_id), asked - group.assignment_bytes
        )

    def _check_join(self, request: JoinRequest) -> ErrorCode:
        if not _is_group_id(request.group_id):
            return ErrorCode.invalid_group_id
        settings = self._settings
        if (
            not settings.min_session_timeout_ms
            <= request.session_timeout_ms
            <= settings.max_session_timeout_ms
        ):
            return ErrorCode.invalid_session_timeout
        texts = [request.protocol_type, request.client_id, request.client_host, request.instance_id or ""]
        texts += (protocol.name for protocol in request.protocols)
        # A member id is made of the instance id and 37 more characters.
        if any(len(text.encode()) > MAX_STRING_BYTES - 37 for text in texts):
            return ErrorCode.invalid_request
        return ErrorCode.none

    async def sync(self, request: SyncRequest) -> SyncReply:
        """SyncGroup. A follower waits for the leader."""
        if not _is_group_id(request.group_id):
            return SyncReply(ErrorCode.invalid_group_id)
        try:
            shard = await self._shards.of(request.group_id)
            if shard.state.is_large_consumer_group(request.group_id):
                done = await shard.on_draft(
                    request.group_id,
                    lambda: shard.state.is_large_consumer_group(request.group_id),
                    lambda draft: draft.handlers.sync(draft.group, request, None, draft.now_ms),
                )
                if done is not None:
                    (reply,) = done[0]
                    assert isinstance(reply.body, SyncReply), reply
                    return reply.body
            if not self._has_memory_for_assignments(shard, request):
                return SyncReply(ErrorCode.group_max_size_reached)
            return await shard.request(
                request.group_id, lambda token, now_ms: shard.state.sync(request, token, now_ms)
            )
        except TidemillError as failure:
            return SyncReply(membership_error(failure))

    async def heartbeat(self, request: HeartbeatRequest) -> ErrorCode:
        """Heartbeat: a member shows that it is alive."""
        if not _is_group_id(request.group_id):
            return ErrorCode.invalid_group_id
        try:
            shard = await self._shards.of(request.group_id)
            code = shard.call_now(request.group_id, lambda now_ms: shard.state.heartbeat(request, now_ms))
            await shard.confirm_newest()
            return code
        except TidemillError as failure:
            return client_error(failure)

    async def leave(self, group_id: str, members: Sequence[LeavingMember]) -> LeaveReply:
        """LeaveGroup, for one or several members."""
        if not _is_group_id(group_id):
            return LeaveReply(ErrorCode.invalid_group_id)
        try:
            shard = await self._shards.of(group_id)
            if shard.state.is_large_consumer_group(group_id):
                done = await shard.on_draft(
                    group_id,
                    lambda: shard.state.is_large_consumer_group(group_id),
                    lambda draft: draft.handlers.leave(draft.group, members, draft.now_ms),
                )
                if done is not None:
                    return done[0]

            def handler(now_ms: int) -> LeaveReply:
                answer, replies = shard.state.leave(group_id, members, now_ms)
                shard.send(replies)
                return answer

            return await shard.call(group_id, handler)
        except TidemillError as failure:
            return LeaveReply(client_error(failure))

    async def consumer_heartbeat(self, request: ConsumerHeartbeatRequest) -> ConsumerHeartbeatReply:
        """ConsumerGroupHeartbeat: join, stay in or leave a group of the new protocol."""
        fresh_member_id = str(self._ids.uuid())
        try:
            shard = await self._shards.of(request.group_id)
            asked = asked_bytes(shard.state.groups.get(request.group_id), request)
            if not self.member_memory.has_capacity(request.client_host, asked):
                return ConsumerHeartbeatReply(ErrorCode.group_max_size_reached, NO_MEMORY)
            if shard.state.needs_draft(request):
                done = await shard.on_draft(
                    request.group_id,
                    lambda: shard.state.needs_draft(request),
                    lambda draft: draft.handlers.heartbeat(request, fresh_member_id, draft.now_ms)[0],
                    request.client_host if request.subscribes else None,
                )
                if done is not None:
                    return done[0]

            def handler(now_ms: int) -> ConsumerHeartbeatReply:
                answer, replies = shard.state.consumers.heartbeat(request, fresh_member_id, now_ms)
                shard.send(replies)
                return answer

            return await shard.call(request.group_id, handler)
        except TidemillError as failure:
            return ConsumerHeartbeatReply(membership_error(failure), failure.message)

    # -- offsets ---------------------------------------------------------------------------------------

    async def commit_offsets(self, request: OffsetCommitRequest) -> dict[TopicPartition, ErrorCode]:
        """OffsetCommit: the result for each partition of the request."""
        try:
            _require_encodable(request.group_id, *(entry.topic for entry in request.offsets))
            shard = await self._shards.of(request.group_id)
            asked = shard.state.offsets.asked_bytes(request)
            if not self.committed_memory.has_capacity(request.client_host, asked):
                return _no_memory_for(request)
            return await shard.call(
                request.group_id, lambda now_ms: shard.state.commit_offsets(request, now_ms)
            )
        except TidemillError as failure:
            error = client_error(failure)
            return {(entry.topic, entry.partition): error for entry in request.offsets}

    async def commit_transactional_offsets(
        self, request: TransactionalCommitRequest
    ) -> dict[TopicPartition, ErrorCode]:
        """TxnOffsetCommit: the result for each partition of the request."""
        commit = request.commit
        try:
            _require_encodable(commit.group_id, *(entry.topic for entry in commit.offsets))
            shard = await self._shards.of(commit.group_id)
            asked = shard.state.offsets.asked_bytes(commit, request.producer_id)
            if shard.state.offsets.is_too_much(
                commit, request.producer_id
            ) or not self.committed_memory.has_capacity(commit.client_host, asked):
                return _no_memory_for(commit)
            return await shard.call(
                commit.group_id, lambda now_ms: shard.state.commit_transactional_offsets(request, now_ms)
            )
        except TidemillError as failure:
            error = client_error(failure)
            return {(entry.topic, entry.partition): error for entry in commit.offsets}

    async def complete_transaction(
        self, partition: int, producer_id: int, producer_epoch: int, *, commit: bool, coordinator_epoch: int
    ) -> None:
        """End a producer's transaction in a partition of ``__consumer_offsets``.

        Offsets that it had pending are committed or vanish. Returns once that is durable; raises
        TidemillError, and then it can be repeated.
        """
        shard = await self._shards.get(partition)
        await shard.call(
            None,
            lambda _: shard.complete_transaction(
                producer_id, producer_epoch, commit=commit, coordinator_epoch=coordinator_epoch
            ),
        )

    async def fetch_offsets(
        self,
        group_id: str,
        partitions: Sequence[TopicPartition] | None,
        *,
        require_stable: bool = False,
        member: tuple[str | None, int] = NO_MEMBER,
    ) -> FetchOffsetsResult:
        """OffsetFetch for one group; None asks for all partitions with a committed offset.

        ``member``: id and epoch of the member that asks, if it says so.
        """
        found: dict[TopicPartition, CommittedOffset] = {}
        try:
            shard = await self._shards.of(group_id)
            asked = partitions
            if asked is None:
                asked = [(topic, index) for topic, index, _ in shard.state.offsets.of(group_id)]

            def fetch(some: Sequence[TopicPartition], now_ms: int) -> FetchOffsetsResult:
                del now_ms
                return shard.state.fetch_offsets(group_id, some, require_stable=require_stable, member=member)

            for some in in_chunks(asked, _FETCHED_AT_ONCE) if asked else [asked]:
                result = await shard.call(None, partial(fetch, some))
                if result.error is not ErrorCode.none:
                    return result
                found.update(result.offsets)
                await give_way()
            if partitions is None:
                # Some may have been deleted meanwhile.
                return FetchOffsetsResult(offsets={k: v for k, v in found.items() if v != CommittedOffset()})
            return FetchOffsetsResult(offsets=found)
        except TidemillError as failure:
            return FetchOffsetsResult(client_error(failure))

    def committed_offsets(self) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
        """What the groups in service here have committed: each group's (topic, partition, offset).

        Groups may come and go between two steps.
        """
        for shard in self._shards.loaded():
            offsets = shard.state.offsets
            for group_id in offsets.groups():
                yield (
                    group_id,
                    [(topic, index, commit.offset) for topic, index, commit in offsets.of(group_id)],
                )

    async def delete_offsets(
        self, group_id: str, partitions: Sequence[TopicPartition]
    ) -> DeleteOffsetsResult:
        """OffsetDelete: forget the committed offsets of partitions that nobody consumes."""
        if not _is_group_id(group_id):
            return DeleteOffsetsResult(ErrorCode.invalid_group_id)
        try:
            shard = await self._shards.of(group_id)
            return await shard.call(
                group_id, lambda now_ms: shard.state.delete_offsets(group_id, partitions, now_ms)
            )
        except TidemillError as failure:
            return DeleteOffsetsResult(client_error(failure))

    async def on_topics_deleted(self, topics: Collection[str]) -> None:
        """Delete what any group has committed for topics that are gone.

        Raises the first error that kept a shard from doing so; the call can be repeated.
        """
        try:
            gone = frozenset(topics)
            await self._shards.keep_up(
                lambda shard, now_ms: shard.state.forget_topics(gone.__contains__, now_ms)
            )
        finally:
            self._delete_share_state()

    async def forget_missing_topics(self, exists: Callable[[str], bool]) -> None:
        """Delete what any group has committed for topics that do not exist. Called before serving.

        Raises the first error that kept a shard from doing so; the call can be repeated.
        """
        try:
            await self._shards.keep_up(
                lambda shard, now_ms: shard.state.forget_topics(lambda topic: not exists(topic), now_ms)
            )
        finally:
            self._delete_share_state()

    def _delete_share_state(self) -> None:
        for shard in self._shards.loaded():
            shard.schedule_deletions()

    async def expire(self) -> None:
        """Delete offsets past their retention, and groups that have nothing left. Called now and then.

        Raises the first error that kept a shard from doing so; the call can be repeated.
        """
        await self._shards.keep_up(lambda shard, now_ms: shard.state.expire(now_ms))

    # -- groups ----------------------------------------------------------------------------------------

    async def list_groups(
        self, states: Collection[str] = (), types: Collection[str] = ()
    ) -> ListGroupsResult:
        """ListGroups over all shards of this node, filtered by state and by group type (case is ignored)."""
        wanted_states = frozenset(state.strip().lower() for state in states)
        wanted_types = frozenset(group_type.strip().lower() for group_type in types)
        groups: list[GroupListing] = []
        shards, failures = await self._shards.all()
        for shard in shards:
            try:
                for some in in_chunks(tuple(shard.state.groups), _LISTED_AT_ONCE):
                    groups += await shard.call(
                        None, partial(_list_some, shard, some, wanted_states, wanted_types)
                    )
                    await give_way()
            except TidemillError as failure:
                failures.append(failure)
        return ListGroupsResult(client_error(failures[0]) if failures else ErrorCode.none, tuple(groups))

    async def describe_groups(self, group_ids: Sequence[str]) -> list[GroupDescription]:
        """DescribeGroups, in the order asked for."""
        return [await self._describe_group(group_id) for group_id in group_ids]

    async def _describe_group(self, group_id: str) -> GroupDescription:
        try:
            shard = await self._shards.of(group_id)
            return await shard.call(None, lambda _: shard.state.describe_group(group_id))
        except TidemillError as failure:
            return GroupDescription(group_id, client_error(failure))

    async def describe_consumer_groups(self, group_ids: Sequence[str]) -> list[ConsumerGroupDescription]:
        """ConsumerGroupDescribe, in the order asked for."""
        return [await self._describe_consumer_group(group_id) for group_id in group_ids]

    async def _describe_consumer_group(self, group_id: str) -> ConsumerGroupDescription:
        try:
            shard = await self._shards.of(group_id)
            if shard.state.is_large_consumer_group(group_id):
                done = await shard.on_draft(
                    group_id,
                    lambda: shard.state.is_large_consumer_group(group_id),
                    lambda draft: draft.handlers.describe(group_id),
                )
                if done is not None:
                    return done[0]
            return await shard.call(None, lambda _: shard.state.consumers.describe(group_id))
        except TidemillError as failure:
            return ConsumerGroupDescription(group_id, client_error(failure), failure.message)

    async def delete_groups(self, group_ids: Sequence[str]) -> dict[str, ErrorCode]:
        """DeleteGroups: the result for each group."""
        return {group_id: await self._delete_group(group_id) for group_id in group_ids}

    async def _delete_group(self, group_id: str) -> ErrorCode:
        try:
            shard = await self._shards.of(group_id)
            if isinstance(shard.state.groups.get(group_id), ShareGroup):
                await self.share.delete_group(group_id)
                return ErrorCode.none
            return await shard.delete_group(group_id)
        except TidemillError as failure:
            return client_error(failure)


def _no_memory_for(request: OffsetCommitRequest) -> dict[TopicPartition, ErrorCode]:
    refused = ErrorCode.invalid_commit_offset_size
    return {(entry.topic, entry.partition): refused for entry in request.offsets}


def _is_group_id(group_id: str) -> bool:
    return bool(group_id) and len(group_id.encode()) <= MAX_STRING_BYTES


def _require_encodable(*texts: str) -> None:
    for text in texts:
        if len(text.encode()) > MAX_STRING_BYTES:
            raise ApiError(
                ErrorCode.invalid_request, f"a name of {len(text)} characters is too long to be stored"
            )


def _list_some(
    shard: Shard, group_ids: Sequence[str], states: frozenset[str], types: frozenset[str], now_ms: int
) -> list[GroupListing]:
    del now_ms
    return shard.state.list_groups(group_ids, states, types)
