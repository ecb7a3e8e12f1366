"""Share groups of the group coordinator: the shell around their handlers, and the calls to the persister.

Membership is a matter of the group's shard. State of share partitions is a matter of the share coordinator,
which may be on another node, so an operation that concerns both has a beginning that is committed in the
shard, then the calls to the persister, then an end that is committed. Any node that leads the shard later
finds the beginning and goes on. On one node the operations of a group wait for each other.

A heartbeat never fails because of the persister: what could not be initialized is tried again by the next
one. A heartbeat that joins waits a moment for the state that it needs, so that it can be told an assignment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakValueDictionary

from tidemill.coordination.shards import client_error
from tidemill.coordination.share_state import SharePartitionKey
from tidemill.coordination.turns import in_chunks
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.groups.consumer.member import JOIN_EPOCH
from tidemill.groups.memory import NO_MEMORY, PARTITION_BYTES
from tidemill.groups.shard import membership_error
from tidemill.groups.share.heartbeats import asked_bytes
from tidemill.groups.share.messages import (
    AlteredPartition,
    DeletedTopic,
    PartitionOffset,
    ShareGroupDescription,
    ShareGroupOffsets,
    ShareHeartbeatReply,
)

if TYPE_CHECKING:
    from uuid import UUID

    from tidemill.config.values import TopicPartition
    from tidemill.coordination.shards import Shards
    from tidemill.coordination.share_state import Persister
    from tidemill.groups.memory import GroupMemory
    from tidemill.groups.shard import Shard
    from tidemill.groups.share.messages import Initialization, ShareHeartbeatRequest
    from tidemill.groups.share.records import StateTopic, StateTopics
    from tidemill.groups.topics import Topics

__all__ = ("ShareGroups",)

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: How long a member that joins waits for state that is being initialized before it is told that it has
#: nothing to read yet. Its next heartbeat is seconds away.
_JOIN_WAIT_S: Final = 1.0
#: Calls to the persister that one operation has under way; as many may begin in one turn of the event loop.
_CALLS_AT_ONCE: Final = 16
_ANY_LEADER_EPOCH: Final = -1
_ALTERED_AT_ONCE: Final = 500

#: A topic is initialized as a whole. As long as a partition is missing, the next heartbeat begins all of them
#: again, and an offset that was written is lost.
_NOT_AS_A_WHOLE: Final = ApiError(
    ErrorCode.coordinator_not_available,
    "another partition of the topic could not be initialized: alter the offsets of all of them again",
)

Partition = tuple["UUID", int]


class ShareGroups:
    """The share groups in the shards that this node serves."""

    def __init__(
        self,
        shards: Shards[Shard],
        persister: Callable[[], Persister],
        topics: Topics,
        member_memory: GroupMemory,
    ) -> None:
        self._shards = shards
        self._member_memory = member_memory
        self._persister = persister
        self._topics = topics
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[Any]] = set()
        #: By group: the last initialization that began and is not over.
        self._initializing: dict[str, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Stop all work with the persister. The next leader of a group takes it up again."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- membership ------------------------------------------------------------------------------------

    async def heartbeat(self, request: ShareHeartbeatRequest) -> ShareHeartbeatReply:
        """ShareGroupHeartbeat: join, stay in or leave a share group."""
        try:
            shard = await self._shards.of(request.group_id)
            asked = asked_bytes(shard.state.groups.get(request.group_id), request)
            if not self._member_memory.has_capacity(request.client_host, asked):
                return ShareHeartbeatReply(ErrorCode.group_max_size_reached, NO_MEMORY)
            reply, work = await self._beat(shard, request)
        except TidemillError as failure:
            return ShareHeartbeatReply(membership_error(failure), failure.message)
        if work is not None:
            self._begin_initialization(shard, work)
        running = self._initializing.get(request.group_id)
        if running is None or (work is None and request.member_epoch != JOIN_EPOCH):
            return reply
        await asyncio.wait({running}, timeout=_JOIN_WAIT_S)
        return await self._beat_again(shard, request, reply) if running.done() else reply

    async def _beat_again(
        self, shard: Shard, request: ShareHeartbeatRequest, reply: ShareHeartbeatReply
    ) -> ShareHeartbeatReply:
        """A second answer, with partitions that became readable since; ``reply`` itself if that fails."""
        again = replace(request, member_epoch=reply.member_epoch)
        try:
            second, work = await self._beat(shard, again)
        except TidemillError:
            return reply
        if work is not None:
            self._begin_initialization(shard, work)
        return second if second.assignment is not None else replace(second, assignment=reply.assignment)

    async def _beat(
        self, shard: Shard, request: ShareHeartbeatRequest
    ) -> tuple[ShareHeartbeatReply, Initialization | None]:
        def needed() -> bool:
            return shard.state.needs_share_draft(request, shard.clock.now_ms())

        if needed():
            done = await shard.on_share_draft(request, needed)
            if done is not None:
                return done.reply, done.initialization
        return await shard.call(
            request.group_id, lambda now_ms: shard.state.shares.heartbeat(request, now_ms)
        )

    async def describe(self, group_id: str) -> ShareGroupDescription:
        """ShareGroupDescribe for one group."""
        try:
            shard = await self._shards.of(group_id)
            return await shard.call(None, lambda _: shard.state.shares.describe(group_id))
        except TidemillError as failure:
            return ShareGroupDescription(group_id, client_error(failure), failure.message)

    # -- initializing state ----------------------------------------------------------------------------

    def _begin_initialization(self, shard: Shard, work: Initialization) -> None:
        task = self._run_behind(self._initialize(shard, work))
        self._initializing[work.group_id] = task

        def over(_: object) -> None:
            if self._initializing.get(work.group_id) is task:
                del self._initializing[work.group_id]

        task.add_done_callback(over)

    async def _initialize(self, shard: Shard, work: Initialization) -> None:
        async with self._lock(work.group_id):
            wanted = shard.state.shares.still_wanted(work)
            if shard.stopped is not None or wanted is None:
                return
            work = wanted
            failures, above_epoch = await self._begin_states(work)
            if failures:
                _logger.warning(
                    "group %r: the state of %d share partitions could not be initialized; a heartbeat tries "
                    "again: %s",
                    work.group_id,
                    len(failures),
                    next(iter(failures.values())).message,
                )
            try:
                await shard.call(
                    work.group_id,
                    lambda now_ms: shard.state.shares.initialized(work, failures, above_epoch, now_ms),
                )
            except TidemillError as error:
                _logger.info(
                    "group %r: its next coordinator will initialize its state again: %s",
                    work.group_id,
                    error.message,
                )

    async def _begin_states(self, work: Initialization) -> tuple[dict[Partition, TidemillError], int]:
        """Initialize state at the persister; gives failures, and the highest epoch of state that refused."""
        above_epoch = -1

        async def begin(partition: Partition) -> None:
            nonlocal above_epoch
            persister = self._persister()
            topic_id, index = partition
            key = SharePartitionKey(work.group_id, topic_id, index)
            try:
                await persister.initialize(key, work.state_epoch, work.topics[topic_id][index])
            except ApiError as error:
                if error.code is ErrorCode.fenced_state_epoch:
                    summary = await persister.read_summary(key, _ANY_LEADER_EPOCH)
                    above_epoch = max(above_epoch, summary.state_epoch)
                raise

        failures = await _on_each(begin, _partitions_of(work.topics))
        return failures, above_epoch

    # -- offsets ---------------------------------------------------------------------------------------

    async def describe_offsets(
        self, group_id: str, wanted: Mapping[UUID, Sequence[int]] | None
    ) -> ShareGroupOffsets:
        """DescribeShareGroupOffsets for one group; None asks for all partitions that have state."""
        try:
            shard = await self._shards.of(group_id)
            topics = await shard.call(None, lambda _: shard.state.shares.require(group_id).topics)
        except TidemillError as failure:
            return ShareGroupOffsets(group_id, client_error(failure), failure.message)
        known = {topic.id: topic.partitions for topic in topics.initialized}
        if wanted is None:
            wanted = {topic_id: sorted(indexes) for topic_id, indexes in known.items()}
        found: dict[UUID, dict[int, PartitionOffset]] = {
            topic_id: dict.fromkeys(indexes, PartitionOffset()) for topic_id, indexes in wanted.items()
        }

        async def read(partition: Partition) -> None:
            topic_id, index = partition
            summary = await self._persister().read_summary(
                SharePartitionKey(group_id, topic_id, index), _ANY_LEADER_EPOCH
            )
            found[topic_id][index] = PartitionOffset(
                summary.start_offset, summary.leader_epoch, summary.delivery_complete_count
            )

        readable = (each for each in _partitions_of(wanted) if each[1] in known.get(each[0], ()))
        for (topic_id, index), error in (await _on_each(read, readable)).items():
            found[topic_id][index] = PartitionOffset(error=client_error(error), message=error.message)
        return ShareGroupOffsets(group_id, topics=found)

    async def alter_offsets(
        self, group_id: str, offsets: Mapping[TopicPartition, int], host: str = ""
    ) -> dict[TopicPartition, AlteredPartition]:
        """AlterShareGroupOffsets: move where a group without members starts. Raises TidemillError.

        ``host`` is that of the client that asks.
        """
        return await self._to_the_end(self._alter_offsets(group_id, offsets, host))

    async def _alter_offsets(
        self, group_id: str, offsets: Mapping[TopicPartition, int], host: str
    ) -> dict[TopicPartition, AlteredPartition]:
        async with self._lock(group_id):
            shard = await self._shards.of(group_id)
            topics = await self._topics_of(shard, group_id)
            await self._delete_states(shard, group_id, topics.deleting)
            known = {topic.name: topic.partitions for topic in (*topics.initialized, *topics.initializing)}
            new = [name for name, index in offsets if index not in known.get(name, ())]
            if not self._member_memory.has_capacity(host, PARTITION_BYTES * len(new)):
                raise ApiError(ErrorCode.group_max_size_reached, NO_MEMORY)
            results: dict[TopicPartition, AlteredPartition] = {}
            for some in in_chunks(tuple(offsets.items()), _ALTERED_AT_ONCE):
                results |= await self._alter_some(shard, group_id, dict(some))
        return results

    async def _alter_some(
        self, shard: Shard, group_id: str, offsets: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, AlteredPartition]:
        work, results = await shard.call(
            group_id, lambda now_ms: shard.state.shares.begin_alter(group_id, offsets, now_ms)
        )
        ids = {name: topic.id for name, _ in offsets if (topic := self._topics.find(name)) is not None}
        failures, above_epoch = await self._begin_states(work)
        await shard.call(
            group_id, lambda now_ms: shard.state.shares.initialized(work, failures, above_epoch, now_ms)
        )
        unfinished = await self._unfinished(shard, group_id)
        for name, index in offsets:
            if (name, index) not in results:
                partition = ids[name], index
                error = failures.get(partition)
                if error is None and partition in unfinished:
                    error = _NOT_AS_A_WHOLE
                results[name, index] = (
                    AlteredPartition()
                    if error is None
                    else AlteredPartition(client_error(error), error.message)
                )
        return results

    async def _unfinished(self, shard: Shard, group_id: str) -> set[Partition]:
        """The partitions whose topics are not initialized, perhaps because of another partition."""
        topics = (await self._topics_of(shard, group_id)).initializing
        return set(_partitions_of({topic.id: topic.partitions for topic in topics}))

    async def delete_offsets(self, group_id: str, names: Sequence[str]) -> dict[str, DeletedTopic]:
        """DeleteShareGroupOffsets: forget topics of a group without members. Raises TidemillError."""
        return await self._to_the_end(self._delete_offsets(group_id, names))

    async def _delete_offsets(self, group_id: str, names: Sequence[str]) -> dict[str, DeletedTopic]:
        async with self._lock(group_id):
            shard = await self._shards.of(group_id)
            topics, ids, results = await shard.call(
                group_id, lambda now_ms: shard.state.shares.begin_delete_offsets(group_id, names, now_ms)
            )
            wanted = frozenset(ids.values())
            failures = await self._delete_states(
                shard, group_id, [topic for topic in topics.deleting if topic.id in wanted]
            )
        errors = {topic_id: error for (topic_id, _), error in failures.items()}
        for name, topic_id in ids.items():
            error = errors.get(topic_id)
            results[name] = (
                DeletedTopic() if error is None else DeletedTopic(client_error(error), error.message)
            )
        return results

    # -- deleting --------------------------------------------------------------------------------------

    async def delete_group(self, group_id: str) -> None:
        """DeleteGroups for a share group: its state, then the group. Raises TidemillError."""
        await self._to_the_end(self._delete_group(group_id))

    async def _delete_group(self, group_id: str) -> None:
        async with self._lock(group_id):
            shard = await self._shards.of(group_id)
            topics = await shard.call(
                group_id, lambda now_ms: shard.state.shares.begin_delete_group(group_id, now_ms)
            )
            for error in (await self._delete_states(shard, group_id, topics.deleting)).values():
                raise error
            code = await shard.delete_group(group_id)
        if code is not ErrorCode.none:
            raise ApiError(code, f"group {group_id!r} got members while it was deleted")

    def delete_later(self, shard: Shard, group_id: str) -> None:
        """Delete the state that a group began to delete and has left. The group's deadline calls this."""
        self._run_behind(self._delete_left(shard, group_id))

    async def _delete_left(self, shard: Shard, group_id: str) -> None:
        try:
            async with self._lock(group_id):
                topics = await self._topics_of(shard, group_id)
                failures = await self._delete_states(shard, group_id, topics.deleting)
        except TidemillError as error:
            _logger.info("group %r: state is deleted later: %s", group_id, error.message)
            return
        if failures:
            _logger.warning(
                "group %r: the state of %d share partitions could not be deleted; tried again later: %s",
                group_id,
                len(failures),
                next(iter(failures.values())).message,
            )

    async def _topics_of(self, shard: Shard, group_id: str) -> StateTopics:
        return await shard.call(None, lambda _: shard.state.shares.require(group_id).topics)

    async def _delete_states(
        self, shard: Shard, group_id: str, topics: Sequence[StateTopic]
    ) -> dict[Partition, TidemillError]:
        """Delete state whose deletion is committed as begun; notes what is gone, gives what has failed."""
        if not topics:
            return {}
        wanted = {topic.id: topic.partitions for topic in topics}

        async def delete(partition: Partition) -> None:
            await self._persister().delete(SharePartitionKey(group_id, *partition))

        failures = await _on_each(delete, _partitions_of(wanted))
        failed = {topic_id for topic_id, _ in failures}
        gone = {topic_id: indexes for topic_id, indexes in wanted.items() if topic_id not in failed}
        await shard.call(group_id, lambda now_ms: shard.state.shares.deleted(group_id, gone, now_ms))
        return failures

    # -- tasks -----------------------------------------------------------------------------------------

    def _lock(self, group_id: str) -> asyncio.Lock:
        """Held while the persister is called for a group."""
        lock = self._locks.get(group_id)
        if lock is None:
            lock = self._locks[group_id] = asyncio.Lock()
        return lock

    def _run(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _run_behind(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work in the background; an error is logged, because nobody waits for it."""
        task = self._run(work)
        task.add_done_callback(_log_accident)
        return task

    async def _to_the_end(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do all of the work, even if the client that asked for it goes away."""
        return await asyncio.shield(self._run(work))


def _log_accident(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _logger.error("work on the state of a share group failed; it is tried again later", exc_info=error)


def _partitions_of(topics: Mapping[UUID, Iterable[int]]) -> Iterable[Partition]:
    return ((topic_id, index) for topic_id, indexes in topics.items() for index in indexes)


async def _on_each(
    work: Callable[[Partition], Coroutine[Any, Any, None]], partitions: Iterable[Partition]
) -> dict[Partition, TidemillError]:
    """Do work for each partition, several at a time; gives the errors."""
    waiting = iter(partitions)
    failures: dict[Partition, TidemillError] = {}

    async def work_on() -> None:
        for partition in waiting:
            try:
                await work(partition)
            except TidemillError as error:
                failures[partition] = error
            # However long the work took: no request has begun a slice for it, and simulations must not depend
            # on it.
            await asyncio.sleep(0)

    await asyncio.gather(*(work_on() for _ in range(_CALLS_AT_ONCE)))
    return failures
