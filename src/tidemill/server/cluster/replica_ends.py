"""How far the replicas of a partition without a leader reach, by which an unclean election chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from tidemill.cluster.messages import (
    ClusterErrorCode,
    PartitionId,
    ReplicaEnd,
    ReplicaEndsRequest,
    ReplicaEndsResponse,
)
from tidemill.errors import StorageError, TidemillError

if TYPE_CHECKING:
    from tidemill.cluster.peer import Peers
    from tidemill.control.image import TopicImage
    from tidemill.server.broker import Broker

__all__ = ("ReplicaEnds", "furthest")

_TIMEOUT_MS: Final = 5_000

Ends = Mapping[int, ReplicaEnd | None]
"""By node: the end of its replica; None if the node did not answer."""


def furthest(ends: Ends) -> int | None:
    """The node to elect: the one with the highest (last epoch, end). None if none can lead.

    None also if a live node did not answer: it may have more than all others.
    """
    if None in ends.values():
        return None
    known = {node_id: end for node_id, end in ends.items() if end is not None and not end.error}
    if not known:
        return None
    return max(sorted(known), key=lambda node_id: (known[node_id].last_epoch, known[node_id].log_end))


class ReplicaEnds:
    """Tells the ends of this node's replicas, and asks other nodes for theirs."""

    def __init__(self, broker: Broker, peers: Peers) -> None:
        self._broker = broker
        self._peers = peers

    def here(self, where: PartitionId) -> ReplicaEnd:
        """The end of this node's replica."""
        placement = self._broker.find.held_placement(where.topic_id, where.index)
        if placement is None:
            return ReplicaEnd(where, ClusterErrorCode.NOT_REPLICA_FOR_PARTITION)
        try:
            partition = self._broker.replicas.open(placement)
        except StorageError:
            return ReplicaEnd(where, ClusterErrorCode.STORAGE_ERROR)
        if partition.failure is not None:
            return ReplicaEnd(where, ClusterErrorCode.STORAGE_ERROR)
        return ReplicaEnd(
            where,
            last_epoch=partition.last_epoch,
            log_end=partition.log_end_offset,
            high_watermark=partition.high_watermark,
        )

    async def of(self, topic: TopicImage, indexes: Sequence[int]) -> dict[int, Ends]:
        """By partition, the ends of its live replicas."""
        image = self._broker.image
        wanted: dict[int, list[PartitionId]] = {}
        for index in indexes:
            for node_id in topic.partitions[index].replicas:
                if image.live(node_id):
                    wanted.setdefault(node_id, []).append(PartitionId(topic.id, index))
        answers = await asyncio.gather(*(self._ask(node_id, where) for node_id, where in wanted.items()))
        found: dict[int, dict[int, ReplicaEnd | None]] = {index: {} for index in indexes}
        for (node_id, asked), ends in zip(wanted.items(), answers, strict=True):
            told = {end.partition: end for end in ends}
            for where in asked:
                found[where.index][node_id] = told.get(where)
        return {**found}

    async def _ask(self, node_id: int, partitions: list[PartitionId]) -> list[ReplicaEnd]:
        if node_id == self._broker.node_id:
            return [self.here(where) for where in partitions]
        make = partial(ReplicaEndsRequest, partitions=partitions)
        try:
            answer = await self._peers.request(node_id, make, ReplicaEndsResponse, timeout_ms=_TIMEOUT_MS)
        except TidemillError:
            return []
        return answer.partitions
