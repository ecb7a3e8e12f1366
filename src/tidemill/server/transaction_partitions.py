"""Where the transaction coordinator keeps its state, and how it reaches the partitions of transactions."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.records.control import Marker as LogMarker
from tidemill.replication.coordinator_log import PartitionCoordinatorLog, wait_committed
from tidemill.transactions.shard import TRANSACTIONS_TOPIC

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from contextlib import AbstractAsyncContextManager

    from tidemill.server.broker import Broker
    from tidemill.transactions.messages import Marker, Producer, TopicPartition

__all__ = ("BrokerTransactionPartitions", "TransactionLogs")


#: A publication of many attempts says the same of each: compressed, it fits ``max.message.bytes``.
_COMPRESS_ABOVE_BYTES = 64 * 1024


class TransactionLogs:
    """The partitions of ``__transaction_state`` that this node leads."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def open_log(self, partition: int) -> PartitionCoordinatorLog:
        """The log behind one shard of the transaction coordinator."""
        broker = self._broker
        try:
            leader = broker.partition(broker.topic(TRANSACTIONS_TOPIC), partition)
        except ApiError as error:
            raise ApiError(ErrorCode.not_coordinator, error.message) from error
        return PartitionCoordinatorLog(leader, broker.clock_ms, compress_above_bytes=_COMPRESS_ABOVE_BYTES)


class BrokerTransactionPartitions:
    """The partitions of this node. Those of groups get their markers through the group coordinator."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def allow_writes(self, place: TopicPartition, producer: Producer) -> None:
        # A partition that cannot be used now asks the coordinator when a write comes.
        with contextlib.suppress(TidemillError):
            topic, index = place
            self._broker.partition(self._broker.topic(topic), index).begin_transaction(*producer)

    async def write_marker(self, place: TopicPartition, marker: Marker) -> None:
        broker = self._broker
        topic = broker.topic(place[0])
        partition = broker.partition(topic, place[1])
        if broker.coordinates_groups(topic):
            await broker.groups.complete_transaction(
                place[1],
                *marker.producer,
                commit=marker.commit,
                coordinator_epoch=marker.coordinator_epoch,
            )
            return
        appended = partition.write_marker(
            *marker.producer,
            commit=marker.commit,
            coordinator_epoch=marker.coordinator_epoch,
            now_ms=broker.clock_ms(),
        )
        await wait_committed(partition, appended.last_offset + 1)

    async def write_markers(self, place: TopicPartition, markers: Sequence[Marker]) -> None:
        broker = self._broker
        topic = broker.topic(place[0])
        partition = broker.partition(topic, place[1])
        if broker.coordinates_groups(topic):
            # Offsets of groups: nobody reads those of several groups as one.
            for marker in markers:
                await self.write_marker(place, marker)
            return
        ends = [(*marker.producer, LogMarker(marker.commit, marker.coordinator_epoch)) for marker in markers]
        appended = partition.write_markers(ends, now_ms=broker.clock_ms())
        await wait_committed(partition, appended.last_offset + 1)

    def together(self, places: Collection[TopicPartition]) -> AbstractAsyncContextManager[object]:
        """Pins of tables are what takes moments; other readers of several partitions cannot."""
        if len(places) > 1 and any(self._is_of_table(topic) for topic, _ in places):
            return self._broker.moments.changing()
        return contextlib.nullcontext()

    def _is_of_table(self, topic_name: str) -> bool:
        topic = self._broker.image.topics.get(topic_name)
        return topic is not None and self._broker.image.table_of_topic(topic.id) is not None
