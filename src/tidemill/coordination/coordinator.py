"""A coordinator as its node sees it: shards over one internal topic, started, expired and closed.

A service (groups, transactions) derives from ``Coordinator`` and adds what it answers to clients. The node
walks its coordinators and calls only what stands here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

from tidemill.coordination.shell import ShardShell

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tidemill.coordination.shards import ShardCounts, Shards
    from tidemill.errors import CorruptData

__all__ = ("Coordinator",)

S = TypeVar("S", bound=ShardShell)


class Coordinator(ABC, Generic[S]):
    """Base of the coordinators: the shards of the partitions that this node leads, and their life."""

    def __init__(self, shards: Shards[S]) -> None:
        self._shards = shards

    async def start(self, settle_ms: int = 0) -> None:
        """Load all shards that this node leads, so that deadlines run without anybody asking.

        One that carries out decisions waits as long as ``settle_ms`` for those that a crash has interrupted.
        """
        await self._shards.all()

    async def close(self) -> None:
        """Answer all waiting requests with COORDINATOR_NOT_AVAILABLE, and stop all work."""
        await self._shards.close()

    @abstractmethod
    async def expire(self) -> None:
        """Forget what is past its retention. The node calls it from time to time.

        Raises the first error that kept a shard from doing so; the call can be repeated.
        """

    # -- what happens to its topic, and to others ------------------------------------------------------

    async def take_over(self, partition: int) -> None:
        """This node leads the partition of the internal topic now: load what is kept in it.

        Returns once that is done, or another node leads. When another node leads a partition, its shard hears
        of that from its log.
        """
        await self._shards.take_over(partition)

    async def on_topics_deleted(self, topics: Collection[str]) -> None:
        """Forget what is kept about topics that were deleted. By default nothing is.

        Raises the first error that kept a shard from doing so; the call can be repeated.
        """

    async def forget_missing_topics(self, exists: Callable[[str], bool]) -> None:
        """Forget what is kept about topics that do not exist. Called before serving.

        Raises the first error that kept a shard from doing so; the call can be repeated.
        """

    # -- what it tells of itself -----------------------------------------------------------------------

    def partition_of(self, key: str) -> int:
        """The partition of the internal topic that decides which node coordinates ``key``."""
        return self._shards.partition_of(key)

    def damaged(self) -> dict[tuple[str, int], CorruptData]:
        """The partitions that are not served because their log is damaged, as topic and number."""
        return self._shards.damaged()

    def shard_counts(self) -> ShardCounts:
        """How many shards are in service, loading and damaged."""
        return self._shards.counts()
