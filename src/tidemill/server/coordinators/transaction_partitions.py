"""The partitions that transactions write to, for a transaction coordinator: those of this node and of others.

``LocalTransactionPartitions`` writes markers to partitions that this node leads. ``TransactionPartitions``
finds the leader of each, and sends other nodes the markers of a decision for all of their partitions in one
WriteTxnMarkers; the handler there does what is done here.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, Protocol

from tidemill.coordination.turns import TurnQueue, give_way, in_chunks, side_by_side
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.records.control import Marker
from tidemill.replication.coordinator_log import wait_committed
from tidemill.replication.rules.assignment import NO_LEADER
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.coordinators.share_state import SHARE_STATE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from tidemill.coordination.moments import MomentGate
    from tidemill.replication.partition import Partition
    from tidemill.server.broker.bundle import Broker
    from tidemill.server.broker.finding import PartitionFinder
    from tidemill.server.coordinators.registry import CoordinatorRow
    from tidemill.transactions.messages import Producer, TopicPartition, TransactionEnd

    AskNode = Callable[[int, str, int, Mapping[str, Any]], Awaitable[Any]]
    Markers = Mapping[TopicPartition, Sequence[TransactionEnd]]

__all__ = ("MARKERS_MAX", "LocalTransactionPartitions", "NodeTransactionPartitions")

#: So many partitions that were never written to get their first files at a time.
_CREATED_AT_ONCE: Final = 4
#: Markers that are written in one turn of the event loop, and then those of one more partition at most.
_MARKERS_PER_TURN: Final = 100
#: Markers of one partition that become visible together: more than a job has open attempts.
_MARKERS_TOGETHER_MAX: Final = 2_000
#: Partitions whose markers are written side by side.
_PARTITIONS_AT_ONCE: Final = 2_000
_MARKERS_VERSION: Final = 1
#: The most markers in one request to another node: it has at most three elements for each, and a node takes
#: 100,000 of them.
MARKERS_MAX: Final = 20_000
#: The coordinators that transactions write to, by their internal topics.
_WRITTEN_TO: Final[Mapping[str, CoordinatorRow[Any]]] = {row.topic: row for row in (GROUPS, SHARE_STATE)}


class EndsTransactions(Protocol):
    """A coordinator that transactions write to, as TxnOffsetCommit does to that of groups."""

    async def complete_transaction(
        self, partition: int, producer_id: int, producer_epoch: int, *, commit: bool, coordinator_epoch: int
    ) -> None:
        """End a producer's transaction in a partition of its topic; returns once that is durable."""


class LocalTransactionPartitions:
    """Writes markers to partitions of this node; to those of coordinators through these."""

    def __init__(
        self,
        find: PartitionFinder,
        coordinator_of: Callable[[str], EndsTransactions | None],
        moments: MomentGate,
        clock_ms: Callable[[], int],
    ) -> None:
        self._find = find
        #: The coordinator whose internal topic has this name; None for all other topics.
        self._coordinator_of = coordinator_of
        self._moments = moments
        self._clock_ms = clock_ms
        self._creations = asyncio.Semaphore(_CREATED_AT_ONCE)
        #: Decisions that were begun in different turns may come to their markers in the same one.
        self._turns = TurnQueue(_MARKERS_PER_TURN)

    @classmethod
    def of(cls, broker: Broker) -> LocalTransactionPartitions:
        """Make the writer of markers for the partitions that this node leads."""

        def coordinator_of(topic: str) -> EndsTransactions | None:
            # Made when a transaction first writes to its topic: most never do.
            row = _WRITTEN_TO.get(topic)
            return None if row is None else broker.coordinators.of(row)

        return cls(broker.find, coordinator_of, broker.moments, broker.clock_ms)

    def allow_writes(self, topic_partition: TopicPartition, producer: Producer) -> None:
        # A partition that cannot be used now will ask the coordinator when a write comes.
        with contextlib.suppress(TidemillError):
            topic, index = topic_partition
            self._find.partition(self._find.topic(topic), index).begin_transaction(*producer)

    async def write_all(self, markers: Markers) -> dict[TopicPartition, TidemillError]:
        """Write the markers of partitions that this node leads; gives what failed."""
        failures: dict[TopicPartition, TidemillError] = {}
        for some in in_chunks(list(markers), _PARTITIONS_AT_ONCE):
            outcomes = await side_by_side(
                ((len(markers[each]), self._outcome(each, markers[each])) for each in some),
                _MARKERS_PER_TURN,
            )
            failures |= {each: error for each, error in zip(some, outcomes, strict=True) if error is not None}
            await asyncio.sleep(0)
        return failures

    async def _outcome(
        self, partition: TopicPartition, markers: Sequence[TransactionEnd]
    ) -> TidemillError | None:
        try:
            await self.write_markers(partition, markers)
        except TidemillError as error:
            return error
        return None

    async def write_markers(self, topic_partition: TopicPartition, markers: Sequence[TransactionEnd]) -> None:
        """End transactions in one partition; returns once that is durable. Raises ``TidemillError``."""
        partition = await self._partition(topic_partition)
        coordinator = self._coordinator_of(partition.topic)
        if coordinator is not None:
            # Nobody reads the state of several groups as one.
            for marker in markers:
                await coordinator.complete_transaction(
                    topic_partition[1],
                    *marker.producer,
                    commit=marker.commit,
                    coordinator_epoch=marker.coordinator_epoch,
                )
            return
        for some in in_chunks(markers, _MARKERS_TOGETHER_MAX):
            ends = [(*marker.producer, Marker(marker.commit, marker.coordinator_epoch)) for marker in some]
            await self._turns.turn(len(ends))
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
        if len(partitions) > 1 and any(map(self._is_of_table, {topic for topic, _ in partitions})):
            return self._moments.changing()
        return contextlib.nullcontext()

    def _is_of_table(self, topic_name: str) -> bool:
        image = self._find.image
        topic = image.topics.get(topic_name)
        return topic is not None and image.table_of_topic(topic.id) is not None


class NodeTransactionPartitions:
    """The partitions of all nodes as one node's coordinator reaches them; has ``TransactionPartitions``."""

    def __init__(
        self, local: LocalTransactionPartitions, find: PartitionFinder, node_id: int, ask_node: AskNode
    ) -> None:
        self._local = local
        self._find = find
        self._node_id = node_id
        self._ask_node = ask_node
        self.allow_writes = local.allow_writes
        self.together = local.together

    def by_leader(
        self, partitions: Collection[TopicPartition]
    ) -> tuple[list[TopicPartition], list[list[TopicPartition]]]:
        here: list[TopicPartition] = []
        elsewhere: dict[int, list[TopicPartition]] = {}
        for partition in partitions:
            leader = self._leader(partition)
            if leader in (None, self._node_id):
                here.append(partition)
            else:
                assert leader is not None
                elsewhere.setdefault(leader, []).append(partition)
        return here, list(elsewhere.values())

    def _leader(self, partition: TopicPartition) -> int | None:
        """The node that leads a partition, or ``NO_LEADER``; None if there is no such partition any more.

        The image is never older than the transaction: the node that made the partition a part of it knew the
        partition, and led this shard then, or this node did. So what is missing in it was deleted.
        """
        topic = self._find.image.topics.get(partition[0])
        if topic is None or not 0 <= partition[1] < len(topic.partitions):
            return None
        return topic.partitions[partition[1]].leader

    async def write(self, markers: Markers) -> Mapping[TopicPartition, TidemillError]:
        leader = self._leader(next(iter(markers)))
        if leader is None or leader == self._node_id:
            return await self._local.write_all(markers)
        failures: dict[TopicPartition, TidemillError] = {}
        for part in _parts(markers):
            try:
                if leader == NO_LEADER:
                    raise ApiError(ErrorCode.leader_not_available, "the partition has no leader now")
                failures |= await self._send(leader, part)
            except TidemillError as error:
                failures |= dict.fromkeys(part, error)
            await give_way()
        return failures

    async def _send(self, node_id: int, markers: Markers) -> dict[TopicPartition, TidemillError]:
        body = {"markers": _bodies(markers)}
        answer = await self._ask_node(node_id, "WriteTxnMarkers", _MARKERS_VERSION, body)
        codes: dict[TopicPartition, ErrorCode] = {}
        for marker in answer.markers:
            for topic in marker.topics:
                for each in topic.partitions:
                    partition, code = (topic.name, each.partition_index), ErrorCode(each.error_code)
                    if codes.get(partition, ErrorCode.none) in _LEAST_WEIGHT:
                        codes[partition] = code if code is not ErrorCode.none else codes.get(partition, code)
        return {
            partition: _failure(node_id, partition, codes.get(partition, ErrorCode.unknown_server_error))
            for partition in markers
            if codes.get(partition) is not ErrorCode.none
        }


#: What says that a marker was written, or is not needed: an error of another marker counts for more.
_LEAST_WEIGHT: Final = (ErrorCode.none, ErrorCode.invalid_producer_epoch)


def _failure(node_id: int, partition: TopicPartition, code: ErrorCode) -> ApiError:
    if code is ErrorCode.unknown_topic_or_partition:
        # This node's metadata has the partition. Either node may be behind; once this one does not have it
        # any more, it is deleted.
        code = ErrorCode.not_leader_or_follower
    return ApiError(code, f"node {node_id} wrote no marker to {partition[0]}-{partition[1]}: {code.name}")


def _parts(markers: Markers) -> Iterator[Markers]:
    """The markers in parts that fit one request each; those of one partition stay together."""
    part: dict[TopicPartition, Sequence[TransactionEnd]] = {}
    count = 0
    for partition, ends in markers.items():
        if part and count + len(ends) > MARKERS_MAX:
            yield part
            part, count = {}, 0
        part[partition] = ends
        count += len(ends)
    if part:
        yield part


def _bodies(markers: Markers) -> list[dict[str, Any]]:
    """The markers as WriteTxnMarkers has them: for each, the partitions by topic."""
    partitions: dict[TransactionEnd, dict[str, list[int]]] = {}
    for (topic, index), ends in markers.items():
        for end in ends:
            partitions.setdefault(end, {}).setdefault(topic, []).append(index)
    return [
        {
            "producer_id": end.producer.id,
            "producer_epoch": end.producer.epoch,
            "transaction_result": end.commit,
            "coordinator_epoch": end.coordinator_epoch,
            "topics": [{"name": name, "partition_indexes": indexes} for name, indexes in topics.items()],
        }
        for end, topics in partitions.items()
    ]
