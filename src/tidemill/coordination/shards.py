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
import sys
from array import array
from functools import partial
from operator import mul
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from tidemill.coordination.clock import pause
from tidemill.coordination.shell import ShardShell
from tidemill.coordination.turns import give_way, pause_after
from tidemill.errors import ApiError, CorruptData, ErrorCode, TidemillError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tidemill.coordination.clock import Clock
    from tidemill.coordination.log import CoordinatorLog, LogAccess

__all__ = ("ShardCounts", "Shards", "client_error", "java_hash", "partition_of_key")

_logger = logging.getLogger(__name__)

_LOAD_RETRY_MS = 1_000
_SHARDS_PER_TURN = 5
_CLIENT_SEES = {
    ErrorCode.unknown_topic_or_partition: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas: ErrorCode.coordinator_not_available,
    ErrorCode.request_timed_out: ErrorCode.coordinator_not_available,
    ErrorCode.kafka_storage_error: ErrorCode.coordinator_not_available,
    ErrorCode.not_leader_or_follower: ErrorCode.not_coordinator,
    ErrorCode.message_too_large: ErrorCode.unknown_server_error,
    ErrorCode.record_list_too_large: ErrorCode.unknown_server_error,
}
"""What a coordinator answers for an error of its log: clients of coordinators do not know the others."""

S = TypeVar("S", bound=ShardShell)

_NATIVE_UTF16 = "utf-16-le" if sys.byteorder == "little" else "utf-16-be"
#: Powers of 31, as many as the longest key so far has needed.
_POWERS = [1]


def partition_of_key(key: str, partitions: int) -> int:
    """The partition of an internal topic that a key lives in: Java's string hash, made non-negative.

    >>> partition_of_key("hello", 50)  # Java: "hello".hashCode() == 99162322
    22
    """
    return (java_hash(key) & 0x7FFFFFFF) % partitions


def java_hash(text: str) -> int:
    """Java's ``String.hashCode``: a signed number of 32 bits.

    >>> java_hash("hello"), java_hash("polygenelubricants")
    (99162322, -2147483648)
    """
    units = array("H", text.encode(_NATIVE_UTF16, "surrogatepass"))
    while len(_POWERS) < len(units):
        _POWERS.append(31 * _POWERS[-1] & 0xFFFFFFFF)
    # The sum in one call: a key has up to 32,767 characters, and a request many keys.
    hash_code: int = sum(map(mul, reversed(units), _POWERS)) & 0xFFFFFFFF
    return hash_code - 2**32 if hash_code >= 2**31 else hash_code


def client_error(failure: TidemillError) -> ErrorCode:
    """The code that a client of a coordinator is told for a failure of its log."""
    if isinstance(failure, CorruptData):
        return ErrorCode.unknown_server_error
    return _CLIENT_SEES.get(failure.code, failure.code)


class ShardCounts(NamedTuple):
    """How many shards of a coordinator are in which state on this node."""

    serving: int
    loading: int
    damaged: int


class Shards(Generic[S]):
    """The shards by partition. ``make`` gives a shard over its log that is not loaded yet.

    ``make`` is also given what the shard must call when it stops. How many partitions there are is asked
    each time: the topic is created by the first key, maybe by another node with other settings.
    ``partition_of`` gives the partition of a key among so many.
    """

    def __init__(
        self,
        topic: str,
        logs: LogAccess,
        clock: Clock,
        make: Callable[[int, CoordinatorLog, Callable[[S], None]], S],
        partition_of: Callable[[str, int], int] = partition_of_key,
    ) -> None:
        self._topic = topic
        self._partition_of = partition_of
        self._logs = logs
        self._clock = clock
        self._make = make
        self._shards: dict[int, S] = {}
        self._loading: dict[int, asyncio.Task[S | TidemillError]] = {}
        #: Shards that are being loaded.
        self._unloaded: dict[S, None] = {}
        #: By partition: the making of its first files, which requests wait for.
        self._preparing: dict[int, asyncio.Task[None]] = {}
        #: Partitions whose first files were made for the shard that is in service.
        self._prepared: set[int] = set()
        self._load_failed: dict[int, tuple[int, TidemillError]] = {}
        #: Partitions whose log is damaged; they are not tried again.
        self._damaged: dict[int, CorruptData] = {}
        self._closed = False

    def partition_of(self, key: str) -> int:
        """The partition that decides which node coordinates ``key``."""
        return self._partition_of(key, self._logs.partition_count())

    def loaded(self) -> list[S]:
        """The shards that are in service now."""
        return list(self._shards.values())

    def damaged(self) -> dict[tuple[str, int], CorruptData]:
        """The partitions, as topic and number, that are not served because their log is damaged."""
        return {(self._topic, partition): damage for partition, damage in sorted(self._damaged.items())}

    def counts(self) -> ShardCounts:
        """How many shards are in service, loading and damaged."""
        return ShardCounts(len(self._shards), len(self._loading), len(self._damaged))

    async def take_over(self, partition: int) -> None:
        """Load the shard of a partition that this node leads now, so that its deadlines run.

        Tries again until it is loaded or damaged, or another node leads.
        """
        while not self._closed:
            try:
                await self.get(partition)
                return
            except CorruptData:
                return
            except TidemillError:
                # One that was loading when this node lost the lead has failed, although it leads again.
                if not self._logs.leads(partition):
                    return
            await pause(self._clock, _LOAD_RETRY_MS)

    async def close(self) -> None:
        """Answer all waiting requests with COORDINATOR_NOT_AVAILABLE, and stop all timers."""
        self._closed = True
        for shard in tuple(self._unloaded):
            shard.stop(ErrorCode.coordinator_not_available)
        await asyncio.gather(*self._loading.values(), *self._preparing.values())
        for shard in tuple(self._shards.values()):
            await shard.close()

    async def keep_up(self, steps: Callable[[S, int], Iterator[str | None]]) -> None:
        """Run the steps of an action on every shard of this node that is not damaged, one after the other.

        Returns once that is committed. Raises the first error that kept a shard from it; the call can be
        repeated.
        """
        for failure in await self._on_each(lambda shard: shard.change_in_steps(partial(steps, shard))):
            if not isinstance(failure, CorruptData):
                raise failure

    async def read_all(self, look: Callable[[S, int], None]) -> list[TidemillError]:
        """Look at every shard of this node; returns once what was seen is committed, with the errors."""
        return await self._on_each(lambda shard: shard.call(None, partial(look, shard)))

    async def _on_each(self, action: Callable[[S], Awaitable[None]]) -> list[TidemillError]:
        shards, failures = await self.all()
        for number, shard in enumerate(shards, start=1):
            try:
                await action(shard)
            except TidemillError as failure:
                failures.append(failure)
            await pause_after(number, _SHARDS_PER_TURN)
        return failures

    async def all(self) -> tuple[list[S], list[TidemillError]]:
        """The shards that this node leads, and the errors that kept others from loading."""
        shards, failures = [], []
        for partition in range(self._logs.partition_count()):
            try:
                shards.append(await self.get(partition))
            except TidemillError as failure:
                if failure.code is not ErrorCode.not_coordinator:
                    failures.append(failure)
        return shards, failures

    async def of(self, key: str) -> S:
        """The shard that ``key`` lives in. Raises TidemillError if it is not served here."""
        # A request may name any number of keys.
        await give_way()
        partition = self.partition_of(key)
        shard = await self.get(partition)
        preparing = self._preparing.get(partition)
        if preparing is None and partition not in self._prepared and not shard.log.end_offset:
            # Nothing was ever written there, and what the caller does may be the first to be.
            preparing = asyncio.get_running_loop().create_task(self._prepare(partition))
            self._preparing[partition] = preparing
        if preparing is not None:
            # All wait for the same, so that they go on in the order in which they came.
            await asyncio.shield(preparing)
        return shard

    async def _prepare(self, partition: int) -> None:
        try:
            await self._logs.prepare_append(partition)
            self._prepared.add(partition)
        finally:
            del self._preparing[partition]

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
            task = self._load_soon(partition)
        # Shielded: a client that gives up must not stop the loading that others wait for.
        loaded = await asyncio.shield(task)
        if isinstance(loaded, TidemillError):
            raise loaded
        return loaded

    def _load_soon(self, partition: int) -> asyncio.Task[S | TidemillError]:
        task = self._loading.get(partition)
        if task is None:
            task = self._loading[partition] = asyncio.get_running_loop().create_task(self._load(partition))
        return task

    async def _load(self, partition: int) -> S | TidemillError:
        shard: S | None = None
        try:
            shard = self._make(partition, self._logs.open_log(partition), self._forget)
            self._unloaded[shard] = None
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
            if shard is not None:
                self._unloaded.pop(shard, None)
        self._load_failed.pop(partition, None)
        self._shards[partition] = shard
        return shard

    def _forget(self, shard: S) -> None:
        if self._shards.get(shard.partition) is shard:
            del self._shards[shard.partition]
            self._prepared.discard(shard.partition)
