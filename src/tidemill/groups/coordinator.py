"""The group coordinator: which shard a group lives in, loading shards, and Kafka's error codes.

A group lives in the partition of ``__consumer_offsets`` that its id hashes to, and is served by the node that
leads that partition. Shards load at ``start`` or when first asked for; requests wait for that. Every public
function that serves a client answers with error codes; none raises for what a client sends or a disk does.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from functools import partial
from typing import TYPE_CHECKING, Protocol

from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.groups.binary import LONGEST_STRING
from tidemill.groups.messages import (
    DeleteOffsetsResult,
    FetchOffsetsResult,
    GroupDescription,
    JoinReply,
    LeaveReply,
    ListGroupsResult,
    SyncReply,
)
from tidemill.groups.shard import CoordinatorLog, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from tidemill.groups.clock import Clock
    from tidemill.groups.messages import (
        GroupListing,
        HeartbeatRequest,
        JoinRequest,
        LeavingMember,
        OffsetCommitRequest,
        SyncRequest,
        TopicPartition,
    )
    from tidemill.groups.settings import GroupSettings

__all__ = ("CoordinatorLog", "GroupCoordinator", "LogAccess", "partition_of_group")

_logger = logging.getLogger(__name__)

_LOAD_RETRY_MS = 1_000
_LONGEST_CLIENT_ID_IN_MEMBER_ID = 255
_CLIENT_SEES = {
    ErrorCode.unknown_topic_or_partition: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas: ErrorCode.coordinator_not_available,
    ErrorCode.request_timed_out: ErrorCode.coordinator_not_available,
    ErrorCode.kafka_storage_error: ErrorCode.coordinator_not_available,
    ErrorCode.not_leader_or_follower: ErrorCode.not_coordinator,
    ErrorCode.message_too_large: ErrorCode.unknown_server_error,
    ErrorCode.record_list_too_large: ErrorCode.unknown_server_error,
}
"""The log's errors, in words that a client of the coordinator understands."""


class LogAccess(Protocol):
    """Where the coordinator gets its logs from."""

    def open_log(self, partition: int) -> CoordinatorLog:
        """The log of a partition of ``__consumer_offsets``.

        Raises ApiError(not_coordinator) if this node does not lead it, StorageError if it is not usable.
        """


def partition_of_group(group_id: str, partitions: int) -> int:
    """The partition of ``__consumer_offsets`` that a group lives in: Java's string hash, made non-negative.

    >>> partition_of_group("hello", 50)  # Java: "hello".hashCode() == 99162322
    22
    """
    hash_code = 0
    units = group_id.encode("utf-16-be", "surrogatepass")
    for index in range(0, len(units), 2):
        hash_code = (31 * hash_code + (units[index] << 8 | units[index + 1])) & 0xFFFFFFFF
    return (hash_code & 0x7FFFFFFF) % partitions


class GroupCoordinator:
    """Classic groups and committed offsets of the partitions that this node leads."""

    def __init__(self, logs: LogAccess, settings: GroupSettings, clock: Clock) -> None:
        self._logs = logs
        self._settings = settings
        self._clock = clock
        self._shards: dict[int, Shard] = {}
        self._loading: dict[int, asyncio.Task[Shard | TidemillError]] = {}
        self._load_failed: dict[int, tuple[int, TidemillError]] = {}
        self._closed = False

    async def start(self) -> None:
        """Load all shards that this node leads, so that sessions run without anybody asking."""
        await self._all_shards()

    async def close(self) -> None:
        """Answer whoever waits with COORDINATOR_NOT_AVAILABLE and stop all timers."""
        self._closed = True
        await asyncio.gather(*self._loading.values())
        for shard in tuple(self._shards.values()):
            await shard.close()

    def partition_of(self, group_id: str) -> int:
        """The partition that decides which node coordinates ``group_id``."""
        return partition_of_group(group_id, self._settings.partitions)

    # -- membership ------------------------------------------------------------------------------------

    async def join(self, request: JoinRequest) -> JoinReply:
        """JoinGroup. May take as long as a rebalance."""
        error = self._check_join(request)
        if error is not ErrorCode.none:
            return JoinReply(error, request.member_id)
        prefix = request.client_id[:_LONGEST_CLIENT_ID_IN_MEMBER_ID]
        if request.instance_id is not None:
            prefix = request.instance_id
        fresh_member_id = f"{prefix}-{uuid.uuid4()}"
        try:
            shard = await self._shard_of(request.group_id)
            return await shard.request(
                request.group_id,
                lambda token, now_ms: shard.state.join(request, token, fresh_member_id, now_ms),
            )
        except TidemillError as failure:
            return JoinReply(_client_error(failure), request.member_id)

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
        if any(len(text.encode()) > LONGEST_STRING - 37 for text in texts):
            return ErrorCode.invalid_request
        return ErrorCode.none

    async def sync(self, request: SyncRequest) -> SyncReply:
        """SyncGroup. A follower waits for the leader."""
        if not _is_group_id(request.group_id):
            return SyncReply(ErrorCode.invalid_group_id)
        try:
            shard = await self._shard_of(request.group_id)
            return await shard.request(
                request.group_id, lambda token, now_ms: shard.state.sync(request, token, now_ms)
            )
        except TidemillError as failure:
            return SyncReply(_client_error(failure))

    async def heartbeat(self, request: HeartbeatRequest) -> ErrorCode:
        """Heartbeat."""
        if not _is_group_id(request.group_id):
            return ErrorCode.invalid_group_id
        try:
            shard = await self._shard_of(request.group_id)
            return shard.call_now(request.group_id, lambda now_ms: shard.state.heartbeat(request, now_ms))
        except TidemillError as failure:
            return _client_error(failure)

    async def leave(self, group_id: str, members: Sequence[LeavingMember]) -> LeaveReply:
        """LeaveGroup, for one or several members."""
        if not _is_group_id(group_id):
            return LeaveReply(ErrorCode.invalid_group_id)
        try:
            shard = await self._shard_of(group_id)

            def handler(now_ms: int) -> LeaveReply:
                answer, replies = shard.state.leave(group_id, members, now_ms)
                shard.send(replies)
                return answer

            return await shard.call(group_id, handler)
        except TidemillError as failure:
            return LeaveReply(_client_error(failure))

    # -- offsets ---------------------------------------------------------------------------------------

    async def commit_offsets(self, request: OffsetCommitRequest) -> dict[TopicPartition, ErrorCode]:
        """OffsetCommit: the result for each partition of the request."""
        try:
            _require_encodable(request.group_id, *(entry.topic for entry in request.offsets))
            shard = await self._shard_of(request.group_id)
            return await shard.call(
                request.group_id, lambda now_ms: shard.state.commit_offsets(request, now_ms)
            )
        except TidemillError as failure:
            error = _client_error(failure)
            return {(entry.topic, entry.partition): error for entry in request.offsets}

    async def fetch_offsets(
        self, group_id: str, partitions: Sequence[TopicPartition] | None
    ) -> FetchOffsetsResult:
        """OffsetFetch for one group; None asks for all partitions with a committed offset."""
        try:
            shard = await self._shard_of(group_id)
            return await shard.call(None, lambda _: shard.state.fetch_offsets(group_id, partitions))
        except TidemillError as failure:
            return FetchOffsetsResult(_client_error(failure))

    async def delete_offsets(
        self, group_id: str, partitions: Sequence[TopicPartition]
    ) -> DeleteOffsetsResult:
        """OffsetDelete."""
        if not _is_group_id(group_id):
            return DeleteOffsetsResult(ErrorCode.invalid_group_id)
        try:
            shard = await self._shard_of(group_id)
            return await shard.call(
                group_id, lambda now_ms: shard.state.delete_offsets(group_id, partitions, now_ms)
            )
        except TidemillError as failure:
            return DeleteOffsetsResult(_client_error(failure))

    async def on_topics_deleted(self, topics: Collection[str]) -> None:
        """Delete what any group has committed for topics that are gone.

        Raises the first error that kept a shard from doing so; the call can be repeated.
        """
        _raise_first(
            await self._on_all_shards(lambda shard, now_ms: shard.state.forget_topics(topics, now_ms))
        )

    async def expire(self) -> None:
        """Delete offsets past their retention and groups that nothing is left of. Call it now and then.

        Raises the first error that kept a shard from doing so; the call can be repeated.
        """
        _raise_first(await self._on_all_shards(lambda shard, now_ms: shard.state.expire(now_ms)))

    # -- groups ----------------------------------------------------------------------------------------

    async def list_groups(
        self, states: Collection[str] = (), types: Collection[str] = ()
    ) -> ListGroupsResult:
        """ListGroups over all shards of this node, filtered by state and by group type (case is ignored)."""
        groups: list[GroupListing] = []

        def collect(shard: Shard, _: int) -> None:
            groups.extend(shard.state.list_groups(states, types))

        failures = await self._on_all_shards(collect)
        return ListGroupsResult(_client_error(failures[0]) if failures else ErrorCode.none, tuple(groups))

    async def describe_groups(self, group_ids: Sequence[str]) -> list[GroupDescription]:
        """DescribeGroups, in the order asked for."""
        return [await self._describe_group(group_id) for group_id in group_ids]

    async def _describe_group(self, group_id: str) -> GroupDescription:
        try:
            shard = await self._shard_of(group_id)
            return await shard.call(None, lambda _: shard.state.describe_group(group_id))
        except TidemillError as failure:
            return GroupDescription(group_id, _client_error(failure))

    async def delete_groups(self, group_ids: Sequence[str]) -> dict[str, ErrorCode]:
        """DeleteGroups: the result for each group."""
        return {group_id: await self._delete_group(group_id) for group_id in group_ids}

    async def _delete_group(self, group_id: str) -> ErrorCode:
        try:
            shard = await self._shard_of(group_id)
            return await shard.call(group_id, lambda now_ms: shard.state.delete_group(group_id, now_ms))
        except TidemillError as failure:
            return _client_error(failure)

    # -- shards ----------------------------------------------------------------------------------------

    async def _on_all_shards(self, action: Callable[[Shard, int], None]) -> list[TidemillError]:
        """Run an action on every shard of this node; returns once it is durable, with what went wrong."""
        shards, failures = await self._all_shards()
        for shard in shards:
            try:
                await shard.call(None, partial(action, shard))
            except TidemillError as failure:
                failures.append(failure)
        return failures

    async def _all_shards(self) -> tuple[list[Shard], list[TidemillError]]:
        """The shards that this node leads, and what kept others from loading."""
        shards, failures = [], []
        for partition in range(self._settings.partitions):
            try:
                shards.append(await self._shard(partition))
            except TidemillError as failure:
                if failure.code is not ErrorCode.not_coordinator:
                    failures.append(failure)
        return shards, failures

    async def _shard_of(self, group_id: str) -> Shard:
        return await self._shard(self.partition_of(group_id))

    async def _shard(self, partition: int) -> Shard:
        if self._closed:
            raise ApiError(
                ErrorCode.coordinator_not_available, "the node is shutting down; find the coordinator anew"
            )
        shard = self._shards.get(partition)
        if shard is not None:
            return shard
        task = self._loading.get(partition)
        if task is None:
            retry_at_ms, failure = self._load_failed.get(partition, (0, None))
            if failure is not None and self._clock.now_ms() < retry_at_ms:
                raise failure
            task = asyncio.get_running_loop().create_task(self._load(partition))
            self._loading[partition] = task
        # Shielded: a client that gives up must not stop the loading that others wait for.
        loaded = await asyncio.shield(task)
        if isinstance(loaded, TidemillError):
            raise loaded
        return loaded

    async def _load(self, partition: int) -> Shard | TidemillError:
        try:
            log = self._logs.open_log(partition)
            shard = Shard(partition, log, self._settings, self._clock, self._forget)
            await shard.load()
        except ApiError as failure:
            return failure
        except TidemillError as failure:
            _logger.error(
                "the groups of __consumer_offsets-%d cannot be loaded: %s", partition, failure.message
            )
            self._load_failed[partition] = (self._clock.now_ms() + _LOAD_RETRY_MS, failure)
            return failure
        finally:
            del self._loading[partition]
        self._load_failed.pop(partition, None)
        self._shards[partition] = shard
        return shard

    def _forget(self, shard: Shard) -> None:
        if self._shards.get(shard.partition) is shard:
            del self._shards[shard.partition]


def _is_group_id(group_id: str) -> bool:
    return bool(group_id) and len(group_id.encode()) <= LONGEST_STRING


def _require_encodable(*texts: str) -> None:
    for text in texts:
        if len(text.encode()) > LONGEST_STRING:
            raise ApiError(
                ErrorCode.invalid_request, f"a name of {len(text)} characters is too long to be stored"
            )


def _raise_first(failures: Sequence[TidemillError]) -> None:
    if failures:
        raise failures[0]


def _client_error(failure: TidemillError) -> ErrorCode:
    return _CLIENT_SEES.get(failure.code, failure.code)
