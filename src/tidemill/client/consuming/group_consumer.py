"""Reading topics as a member of a consumer group, with commits of what the caller has dealt with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from tidemill.client.admin.groups import commit_offsets, fetch_offsets
from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.client.consuming.membership import Membership
from tidemill.client.consuming.record_reader import Message, RecordReader
from tidemill.errors import ApiError, ErrorCode, UndecodableBatch

__all__ = ("GroupConsumer", "StartOffsets")

StartOffsets = Callable[[Sequence[TopicPartition]], Awaitable[dict[TopicPartition, int]]]
"""Gives the offsets to start from in partitions for which the group has no committed offset."""

_COMMIT_INTERVAL_SECONDS: Final = 5.0
#: Errors of a commit after the group went on without this member: another one reads the records again.
_TOO_LATE: Final = frozenset(
    {ErrorCode.illegal_generation, ErrorCode.unknown_member_id, ErrorCode.rebalance_in_progress}
)


class GroupConsumer:
    """A member of a group that reads at least once: only what was passed to ``mark`` is committed.

    ``on_undecodable`` is that of ``RecordReader``.
    """

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        topics: Sequence[str],
        start: StartOffsets,
        *,
        on_undecodable: Callable[[UndecodableBatch], None] | None = None,
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._start = start
        self._membership = Membership(cluster, group, topics)
        self._membership.must_rejoin.set()
        self._reader = RecordReader(cluster, out_of_range="earliest", on_undecodable=on_undecodable)
        self._marked: dict[TopicPartition, int] = {}
        self._committed_at = asyncio.get_running_loop().time()
        #: Rises by one with every assignment.
        self.assignments = 0

    @property
    def positions(self) -> dict[TopicPartition, int]:
        """The next offset of each partition that this member reads now."""
        return self._reader.positions

    def mark(self, message: Message) -> None:
        """Note that ``message`` and all before it in its partition are done: the next commit covers them."""
        self._marked[message.topic, message.partition] = message.record.offset + 1

    async def poll(self) -> list[Message]:
        """The next messages; joins the group first if need be. May be empty."""
        if self._membership.must_rejoin.is_set():
            await self.commit()
            await self._rejoin()
        elif asyncio.get_running_loop().time() - self._committed_at > _COMMIT_INTERVAL_SECONDS:
            await self.commit()
        return await self._reader.poll()

    async def commit(self) -> None:
        """Commit the offsets of the records that were marked as handled."""
        marked, self._marked = self._marked, {}
        self._committed_at = asyncio.get_running_loop().time()
        if not marked:
            return
        try:
            await commit_offsets(self._cluster, self._group, marked, self._membership.identity)
        except ApiError as error:
            if error.code not in _TOO_LATE:
                raise

    async def close(self) -> None:
        """Commit what is marked, and leave the group."""
        await self._reader.close()
        try:
            await self.commit()
        finally:
            await self._membership.leave()

    async def _rejoin(self) -> None:
        # What is fetched ahead belongs to the old assignment.
        await self._reader.assign({})
        partitions = await self._membership.join()
        positions: dict[TopicPartition, int] = {}
        if partitions:
            positions = await fetch_offsets(self._cluster, self._group, partitions, require_stable=True)
        fresh = [partition for partition in partitions if partition not in positions]
        if fresh:
            positions |= await self._start(fresh)
        await self._reader.assign(positions)
        self.assignments += 1
