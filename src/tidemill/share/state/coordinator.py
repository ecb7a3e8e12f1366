"""The share coordinator: which shard a share partition's state lives in, and what is asked of it.

Every function raises ``ApiError`` with a code of Kafka's share coordinator, and returns once what it did, or
tells, is committed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from tidemill.control.image import SHARE_STATE_TOPIC
from tidemill.coordination.coordinator import Coordinator
from tidemill.coordination.shards import Shards, client_error, java_hash
from tidemill.coordination.turns import give_way
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.share.state.shard import ShareStateShard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from uuid import UUID

    from tidemill.coordination.clock import Clock
    from tidemill.coordination.log import LogAccess
    from tidemill.coordination.share_state import SharePartitionKey, ShareState, ShareStateSummary
    from tidemill.share.state.states import ShareStates, StateWrite

__all__ = ("ShareStateCoordinator", "partition_of_share_key")

_T = TypeVar("_T")

#: A state whose snapshot is older than so many updates' worth of records is written anew.
_SNAPSHOTS_BEHIND: Final = 10
_STATES_PER_TURN: Final = 50


def partition_of_share_key(key: str, partitions: int) -> int:
    """The partition of ``__share_group_state`` that a key lives in: the absolute value of Java's string hash.

    >>> partition_of_share_key("hello", 50)  # Java: "hello".hashCode() == 99162322
    22
    """
    hash_code = java_hash(key)
    # Java has no positive form of its least number; Kafka takes 0 for it.
    return (0 if hash_code == -(2**31) else abs(hash_code)) % partitions


class ShareStateCoordinator(Coordinator[ShareStateShard]):
    """The states of share partitions in those partitions of ``__share_group_state`` that this node leads."""

    def __init__(
        self,
        logs: LogAccess,
        updates_per_snapshot: int,
        clock: Clock,
        topic_exists: Callable[[UUID], bool],
    ) -> None:
        super().__init__(
            Shards(
                SHARE_STATE_TOPIC,
                logs,
                clock,
                lambda partition, log, on_stop: ShareStateShard(
                    partition, log, updates_per_snapshot, clock, on_stop
                ),
                partition_of_share_key,
            )
        )
        self._records_behind = updates_per_snapshot * _SNAPSHOTS_BEHIND
        self._topic_exists = topic_exists

    # -- requests --------------------------------------------------------------------------------------

    async def initialize(self, key: SharePartitionKey, state_epoch: int, start_offset: int) -> None:
        """Begin the state, or begin it anew at a higher epoch."""
        if not self._topic_exists(key.topic_id):
            # This node's metadata may be behind that of the node which asks.
            raise ApiError(
                ErrorCode.unknown_topic_or_partition, f"there is no topic {key.topic_id}, for {key}"
            )
        await self._call(
            key, lambda states, now_ms: states.initialize(key, state_epoch, start_offset, now_ms)
        )

    async def read(self, key: SharePartitionKey, leader_epoch: int) -> ShareState:
        """The state, for the leader of the data partition at ``leader_epoch``."""
        return await self._call(key, lambda states, now_ms: states.read(key, leader_epoch, now_ms))

    async def write(self, key: SharePartitionKey, write: StateWrite) -> None:
        """Change the state. In a transaction: the partition of the topic must be part of that."""
        await self._call(key, lambda states, now_ms: states.write(key, write, now_ms))

    async def delete(self, key: SharePartitionKey) -> None:
        """Forget the state, if there is one."""
        await self._call(key, lambda states, now_ms: states.delete(key))

    async def summary(self, key: SharePartitionKey) -> ShareStateSummary:
        """Epochs, start offset and finished count of a share partition, for its description."""
        return await self._call(key, lambda states, now_ms: states.summary(key))

    async def complete_transaction(
        self, partition: int, producer_id: int, producer_epoch: int, *, commit: bool, coordinator_epoch: int
    ) -> None:
        """End a producer's transaction in a partition of ``__share_group_state``.

        Returns once that is durable; raises TidemillError, and then it can be repeated.
        """
        shard = await self._shards.get(partition)
        await shard.call(
            None,
            lambda _: shard.complete_transaction(
                producer_id, producer_epoch, commit=commit, coordinator_epoch=coordinator_epoch
            ),
        )

    async def _call(self, key: SharePartitionKey, handler: Callable[[ShareStates, int], _T]) -> _T:
        try:
            shard = await self._shards.of(str(key))
            return await shard.call(None, lambda now_ms: handler(shard.states, now_ms))
        except TidemillError as failure:
            raise ApiError(client_error(failure), failure.message) from failure

    # -- housekeeping ----------------------------------------------------------------------------------

    async def expire(self) -> None:
        """Write snapshots of states that nobody has changed for long, and give up what is not needed.

        Raises the first error that kept a shard from doing so; the call can be repeated.
        """
        shards, _ = await self._shards.all()
        for shard in shards:
            await self._prune(shard)

    async def _prune(self, shard: ShareStateShard) -> None:
        before = shard.log.end_offset - self._records_behind
        await self._in_turns(shard, lambda states, now_ms: states.refresh(before, _STATES_PER_TURN, now_ms))
        if shard.log.end_offset:
            shard.call_now(None, lambda _: shard.prune())

    async def on_topics_deleted(self, topics: Collection[str]) -> None:
        """Forget the states of topics that are gone; which those are is asked by their ids."""
        shards, _ = await self._shards.all()
        for shard in shards:
            await self._in_turns(
                shard, lambda states, _: states.forget_topics(self._topic_exists, _STATES_PER_TURN)
            )

    async def forget_missing_topics(self, exists: Callable[[str], bool]) -> None:
        """Forget the states of topics that do not exist."""
        del exists  # By name; states know ids.
        await self.on_topics_deleted(())

    async def _in_turns(self, shard: ShareStateShard, action: Callable[[ShareStates, int], int]) -> None:
        """Repeat an action, which does a part of the work, until it has found nothing to do."""
        while await shard.call(None, lambda now_ms: action(shard.states, now_ms)):
            await give_way()

    def with_due_letters(self, most: int) -> list[SharePartitionKey]:
        """Share partitions with dead letters that are due, in the shards that are loaded; some of them."""
        found: list[SharePartitionKey] = []
        for shard in self._shards.loaded():
            found += shard.states.with_due_letters(most - len(found))
        return found

    def summaries(self) -> Iterator[tuple[SharePartitionKey, ShareStateSummary]]:
        """The states in the shards that are loaded. Some may come and go between two steps."""
        for shard in self._shards.loaded():
            for key in list(shard.states.partitions):
                if key in shard.states.partitions:
                    yield key, shard.states.summary(key)

    def count(self) -> int:
        """How many share partitions have a state in the shards that are loaded."""
        return sum(len(shard.states.partitions) for shard in self._shards.loaded())
