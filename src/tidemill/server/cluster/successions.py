"""Leaders obey the metadata's wish for another leader: they resign, and the successor takes over.

Leadership is not taken from a node whose session lives. So a preferred election, or a move away from the
leader, puts a wish into the partition's record, and the leader gives up by itself. A leader that has not
heard of it, because its metadata is late, can be asked with an ElectLeader message.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final
from uuid import UUID

from tidemill.cluster.messages import ElectLeaderRequest, ElectLeaderResponse, PartitionId
from tidemill.errors import TidemillError
from tidemill.replication.rules.assignment import NO_LEADER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tidemill.control.image import MetadataDelta, MetadataImage, TopicImage
    from tidemill.replication.fetching.peer_requests import PeerRequests
    from tidemill.replication.partition import Partition
    from tidemill.server.broker import Broker

__all__ = ("Successions", "ask_to_resign")

_AGAIN_S: Final = 0.2
_ASK_TIMEOUT_MS: Final = 5_000

logger = logging.getLogger(__name__)


class Successions:
    """Resigns from what another node is to lead, and tries again until the wish is granted or gone."""

    def __init__(self, broker: Broker, resign: Callable[[Partition], Awaitable[None]]) -> None:
        """``resign`` gives a leadership up if it can, and raises nothing if it cannot."""
        self._broker = broker
        self._resign = resign
        #: By partition and leader epoch.
        self._tasks: dict[tuple[UUID, int, int], asyncio.Task[None]] = {}

    def metadata_changed(self, new: MetadataImage, delta: MetadataDelta) -> None:
        """Begin to give up leaderships that the metadata wants another replica to have."""
        for changed in (*delta.leader_changed, *delta.replicas_changed):
            topic = new.topics[changed.topic]
            key = topic.id, changed.partition, topic.partitions[changed.partition].leader_epoch
            if self._is_wished(*key) and key not in self._tasks:
                self._tasks[key] = asyncio.create_task(self._give_up(*key))
                self._tasks[key].add_done_callback(partial(self._ended, key))

    def _ended(self, key: tuple[UUID, int, int], task: asyncio.Task[None]) -> None:
        del self._tasks[key]

    async def stop(self) -> None:
        """Try no more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _give_up(self, topic_id: UUID, index: int, leader_epoch: int) -> None:
        while self._is_wished(topic_id, index, leader_epoch):
            partition = self._broker.replicas.peek(topic_id, index)
            if partition is not None:
                await self._resign(partition)
            if self._is_wished(topic_id, index, leader_epoch):
                await asyncio.sleep(_AGAIN_S)

    def _is_wished(self, topic_id: UUID, index: int, leader_epoch: int) -> bool:
        """Whether this node leads at that epoch, and another is to lead."""
        topic = self._broker.image.topic_by_id(topic_id)
        if topic is None or index >= len(topic.partitions):
            return False
        placed = topic.partitions[index]
        is_mine = (placed.leader, placed.leader_epoch) == (self._broker.node_id, leader_epoch)
        return is_mine and placed.successor not in (NO_LEADER, placed.leader)


async def ask_to_resign(peers: PeerRequests, topic: TopicImage, indexes: Sequence[int]) -> None:
    """Ask the leaders of partitions that have a successor to resign. Whether they do, the metadata tells."""
    await asyncio.gather(*(_ask_to_resign(peers, topic, index) for index in indexes))


async def _ask_to_resign(peers: PeerRequests, topic: TopicImage, index: int) -> None:
    placed = topic.partitions[index]
    make = partial(
        ElectLeaderRequest,
        partition=PartitionId(topic.id, index),
        preferred_leader=placed.successor,
        mode="resign",
    )
    try:
        await peers.request(placed.leader, make, ElectLeaderResponse, timeout_ms=_ASK_TIMEOUT_MS)
    except TidemillError as error:
        logger.info("the leader of %s-%d does not resign: %s", topic.name, index, error.message)
