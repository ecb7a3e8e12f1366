"""The shards of one coordinator that this node serves: loading them, finding them, closing them.

A key lives in the partition of the coordinator's topic that it hashes to, and is served by the node that
leads that partition. Shards load at ``start`` or when first asked for; requests wait for that.

A shard whose log is damaged is not served until the log is repaired and the node started again: what it
would serve is a part of what was committed. Its clients get UNKNOWN_SERVER_ERROR, the one code that all of
them show to their application for every request. COORDINATOR_NOT_AVAILABLE and KAFKA_STORAGE_ERROR, which
tell of trouble that passes, they would retry for ever without a word to anybody.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from tidemill.coordination.shell import ShardShell
from tidemill.coordination.turns import give_way
from tidemill.errors import ApiError, CorruptData, ErrorCode, TidemillError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidemill.coordination.clock import Clock

__all__ = ("Shards", "client_error", "partition_of_key")

_logger = logging.getLogger(__name__)

_LOAD_RETRY_MS = 1_000
_CLIENT_SEES = {
    ErrorCode.unknown_topic_or_partition: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas: ErrorCode.coordinator_not_available,
    ErrorCode.request_timed_out: ErrorCode.coordinator_not_available,
    ErrorCode.kafka_storage_error: ErrorCode.coordinator_not_available,
    ErrorCode.not_leader_or_follower: ErrorCode.not_coordinator,
    ErrorCode.message_too_large: ErrorCode.unknown_server_error,
    ErrorCode.record_list_too_large: ErrorCode.unknown_server_error,
}
"""The log's errors, in words that a client of a coordinator understands."""

S = TypeVar("S", bound=ShardShell)


def partition_of_key(key: str, partitions: int) -> int:
    """The partition of an internal topic that a key lives in: Java's string hash, made non-negative.

    >>> partition_of_key("hello", 50)  # Java: "hello".hashCode() == 99162322
    22
    """
    hash_code = 0
    units = key.encode("utf-16-be", "surrogatepass")
    for index in range(0, len(units), 2):
        hash_code = (31 * hash_code + (units[index] << 8 | units[index + 1])) & 0xFFFFFFFF
    return (hash_code & 0x7FFFFFFF) % partitions


def client_error(failure: TidemillError) -> ErrorCode:
    """What a client of a coordinator is told when the log failed so."""
    if isinstance(failure, CorruptData):
        return ErrorCode.unknown_server_error
    return _CLIENT_SEES.get(failure.code, failure.code)


class Shards(Generic[S]):
    """The shards by partition. ``make`` opens a partition's log and gives a shard that is not loaded yet.

    ``make`` is also given what the shard must call when it stops.
    """

    def __init__(
        self, topic: str, partitions: int, clock: Clock, make: Callable[[int, Callable[[S], None]], S]
    ) -> None:
        self._topic = topic
        self._partitions = partitions
        self._clock = clock
        self._make = make
        self._shards: dict[int, S] = {}
        self._loading: dict[int, asyncio.Task[S | TidemillError]] = {}
        self._load_failed: dict[int, tuple[int, TidemillError]] = {}
        #: Partitions whose log is damaged; they are not tried again.
        self._damaged: dict[int, CorruptData] = {}
        self._closed = False

    def partition_of(self, key: str) -> int:
        """The partition that decides which node coordinates ``key``."""
        return partition_of_key(key, self._partitions)

    def loaded(self) -> list[S]:
        """The shards that are in service now."""
        return list(self._shards.values())

    def damaged(self) -> dict[tuple[str, int], CorruptData]:
        """The partitions, as topic and number, that are not served because their log is damaged."""
        return {(self._topic, partition): damage for partition, damage in sorted(self._damaged.items())}

    async def close(self) -> None:
        """Answer whoever waits with COORDINATOR_NOT_AVAILABLE and stop all timers."""
        self._closed = True
        await asyncio.gather(*self._loading.values())
        for shard in tuple(self._shards.values()):
            await shard.close()

    async def keep_up(self, action: Callable[[S, int], None]) -> None:
        """Run an action on every shard of this node that is not damaged; returns once it is durable.

        Raises the first error that kept a shard from it; the call can be repeated.
        """
        for failure in await self.on_all(action):
            if not isinstance(failure, CorruptData):
                raise failure

    async def on_all(self, action: Callable[[S, int], None]) -> list[TidemillError]:
        """Run an action on every shard of this node; returns once it is durable, with what went wrong."""
        shards, failures = await self.all()
        for shard in shards:
            try:
                await shard.call(None, partial(action, shard))
            except TidemillError as failure:
                failures.append(failure)
        return failures

    async def all(self) -> tuple[list[S], list[TidemillError]]:
        """The shards that this node leads, and what kept others from loading."""
        shards, failures = [], []
        for partition in range(self._partitions):
            try:
                shards.append(await self.get(partition))
            except TidemillError as failure:
                if failure.code is not ErrorCode.not_coordinator:
                    failures.append(failure)
        return shards, failures

    async def of(self, key: str) -> S:
        """The shard that ``key`` lives in. Raises TidemillError if it is not served here."""
        # A request may name as many keys as it likes.
        await give_way()
        return await self.get(self.partition_of(key))

    async def get(self, partition: int) -> S:
        """The shard of a partition. Raises TidemillError if it is not served here."""
        if self._closed:
            raise ApiError(
                ErrorCode.coordinator_not_available, "the node is shutting down; find the coordinator anew"
            )
        shard = self._shards.get(partition)
        if shard is not None:
            return shard
        if partition in self._damaged:
            raise self._damaged[partition]
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

    async def _load(self, partition: int) -> S | TidemillError:
        try:
            shard = self._make(partition, self._forget)
            await shard.load()
        except ApiError as failure:
            return failure
        except CorruptData as damage:
            _logger.error("%s-%d is not served: %s", self._topic, partition, damage)
            self._damaged[partition] = damage
            return damage
        except TidemillError as failure:
            _logger.error("%s-%d cannot be loaded: %s", self._topic, partition, failure.message)
            self._load_failed[partition] = (self._clock.now_ms() + _LOAD_RETRY_MS, failure)
            return failure
        finally:
            del self._loading[partition]
        self._load_failed.pop(partition, None)
        self._shards[partition] = shard
        return shard

    def _forget(self, shard: S) -> None:
        if self._shards.get(shard.partition) is shard:
            del self._shards[shard.partition]
