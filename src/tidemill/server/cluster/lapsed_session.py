"""What a node does whose session has lapsed: it asks the other nodes which of its leaderships are over.

A node that is cut off from etcd alone hears of no election. It would go on as a leader that can commit
nothing, and would send clients to itself. So while its session is not renewed it asks another node for the
metadata of what it leads (FetchMetadata), and gives up what is led elsewhere at a newer epoch. What the other
node tells was committed: it is what the watch would have told. If etcd is away for everybody, nobody knows
more, and all leaders go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from tidemill.cluster.messages import FetchMetadataRequest, MetadataResponse, TopicMetadata
from tidemill.coordination.turns import begin_slice, give_way
from tidemill.errors import TidemillError
from tidemill.replication.rules.assignment import NO_LEADER, PartitionAssignment
from tidemill.replication.rules.state import Role

if TYPE_CHECKING:
    from tidemill.control.session import Session
    from tidemill.replication.fetching.peer_requests import PeerRequests
    from tidemill.server.broker import Broker

__all__ = ("LapsedSession",)

logger = logging.getLogger(__name__)

_INTERVAL_S: Final = 1.0
_TIMEOUT_MS: Final = 2_000
#: Topics in one request: an answer stays far below the limit of a message.
_TOPICS_PER_REQUEST: Final = 200


class LapsedSession:
    """Learns from other nodes what this node leads no longer, while its session is not renewed."""

    def __init__(
        self, broker: Broker, session: Session, peers: PeerRequests, clock_ms: Callable[[], int]
    ) -> None:
        self._broker = broker
        self._session = session
        self._peers = peers
        self._clock_ms = clock_ms
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look after the session from now on; it has begun."""
        self._task = asyncio.create_task(self._run(), name="lapsed session")

    async def stop(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            if self._clock_ms() >= self._session.serving_until_ms:
                try:
                    await self.ask_others()
                except Exception:
                    logger.exception("the other nodes could not be asked what this node leads; tried again")

    async def ask_others(self) -> None:
        """Ask the other nodes for what this one leads: all of them, because others may be cut off, too."""
        names = sorted({each.topic for each in self._broker.replicas if each.role is Role.LEADER})
        for node_id in sorted(self._broker.image.live_nodes - {self._broker.node_id}):
            for first in range(0, len(names), _TOPICS_PER_REQUEST):
                topics = names[first : first + _TOPICS_PER_REQUEST]
                try:
                    answer = await self._peers.request(
                        node_id,
                        partial(FetchMetadataRequest, topics=topics),
                        MetadataResponse,
                        timeout_ms=_TIMEOUT_MS,
                    )
                except TidemillError:
                    break
                if answer.revision <= self._broker.image.revision:
                    break
                await self._take(node_id, answer.topics)

    async def _take(self, told_by: int, topics: Sequence[TopicMetadata]) -> None:
        """Follow the leaders of newer epochs."""
        own = self._broker.node_id
        begin_slice()
        for topic in topics:
            for told in topic.partitions:
                partition = self._broker.replicas.peek(topic.topic_id, told.partition_index)
                if (
                    partition is not None
                    and partition.role is Role.LEADER
                    and told.leader_epoch > partition.leader_epoch
                    and told.leader_id != own
                ):
                    leader = NO_LEADER if told.leader_id is None else told.leader_id
                    logger.warning(
                        "%r: this node's session has lapsed, and node %d says that node %d leads at epoch %d",
                        *(partition, told_by, leader, told.leader_epoch),
                    )
                    partition.apply(PartitionAssignment.led_elsewhere(leader, told.leader_epoch), own)
                await give_way()
