"""The partitions that transactions write to, for the transaction coordinator of the same node."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from tidemill.errors import TidemillError
from tidemill.groups.shard import GROUPS_TOPIC
from tidemill.records.control import Marker
from tidemill.replication.coordinator_log import wait_committed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from contextlib import AbstractAsyncContextManager

    from tidemill.coordination.moments import MomentGate
    from tidemill.groups.coordinator import GroupCoordinator
    from tidemill.replication.partition import Partition
    from tidemill.server.broker.finding import PartitionFinder
    from tidemill.transactions.messages import Producer, TopicPartition, TransactionEnd

__all__ = ("LocalTransactionPartitions",)

#: So many partitions that were never written to get their first files at a time.
_CREATED_AT_ONCE = 4


class LocalTransactionPartitions:
    """Writes markers to partitions of this node; to those of groups through the group coordinator."""

    def __init__(
        self,
        find: PartitionFinder,
        groups: GroupCoordinator,
        moments: MomentGate,
        clock_ms: Callable[[], int],
    ) -> None:
        self._find = find
        self._groups = groups
        self._moments = moments
        self._clock_ms = clock_ms
        self._creations = asyncio.Semaphore(_CREATED_AT_ONCE)

    def allow_writes(self, topic_partition: TopicPartition, producer: Producer) -> None:
        # A partition that cannot be used now will ask the coordinator when a write comes.
        with contextlib.suppress(TidemillError):
            topic, index = topic_partition
            self._find.partition(self._find.topic(topic), index).begin_transaction(*producer)

    async def write_marker(self, topic_partition: TopicPartition, marker: TransactionEnd) -> None:
        partition = await self._partition(topic_partition)
        if partition.topic == GROUPS_TOPIC:
            await self._groups.complete_transaction(
                topic_partition[1],
                *marker.producer,
                commit=marker.commit,
                coordinator_epoch=marker.coordinator_epoch,
            )
            return
        appended = partition.write_marker(
            *marker.producer,
            commit=marker.commit,
            coordinator_epoch=marker.coordinator_epoch,
            now_ms=self._clock_ms(),
        )
        await wait_committed(partition, appended.last_offset + 1)

    async def write_markers(self, topic_partition: TopicPartition, markers: Sequence[TransactionEnd]) -> None:
        partition = await self._partition(topic_partition)
        if partition.topic == GROUPS_TOPIC:
            # Offsets of groups: nobody reads those of several groups as one.
            for marker in markers:
                await self.write_marker(topic_partition, marker)
            return
        ends = [(*marker.producer, Marker(marker.commit, marker.coordinator_epoch)) for marker in markers]
        appended = partition.write_markers(ends, now_ms=self._clock_ms())
        await wait_committed(partition, appended.last_offset + 1)

    async def _partition(self, topic_partition: TopicPartition) -> Partition:
        """The partition, ready for a marker. One that was never written to gets its files now."""
        topic, index = topic_partition
        partition = self._find.partition(self._find.topic(topic), index)
        if partition.has_files:
            return partition
        # A few at a time: the first writes of other clients need the same threads.
        async with self._creations:
            return await self._find.partition_with_files(topic, index)

    def together(self, partitions: Collection[TopicPartition]) -> AbstractAsyncContextManager[object]:
        """A block in which no pin takes a moment, if several partitions change and one is of a table."""
        if len(partitions) > 1 and any(self._is_of_table(topic) for topic, _ in partitions):
            return self._moments.changing()
        return contextlib.nullcontext()

    def _is_of_table(self, topic_name: str) -> bool:
        image = self._find.image
        topic = image.topics.get(topic_name)
        return topic is not None and image.table_of_topic(topic.id) is not None
