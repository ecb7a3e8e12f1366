"""A lapsed session: how its node finds out which of its leaderships are over, or may be.

A node that is cut off from etcd alone hears of no election. It would go on as a leader that can commit
nothing, and would send clients to itself. So while its session is not renewed it asks another node for the
metadata of what it leads (FetchMetadata), and gives up what is led elsewhere at a newer epoch. What the other
node tells was committed: it is what the watch would have told. If etcd is away for everybody, nobody knows
more, and all leaders go on.

A node that is cut off from the other nodes, too, can ask nobody. A leadership of it is *in doubt* while its
session has lapsed, other replicas could have been elected, and none of them has fetched or reported for as
long as a session lives. Clients are sent elsewhere then: they get NOT_LEADER_OR_FOLLOWER, and the metadata
names no leader. The replica stays the leader all the same: as soon as one of the others is heard, it goes on.

A node is *isolated* while its session has lapsed and no other node has answered it for as long as a session
lives, though some are live as far as it knows. Its metadata is old, and clients whose only connection is to
it would believe that: they ask the node that they are connected to for leaders and coordinators. So it closes
their connections and takes no new ones, as if it did not run. Its HTTP port says why.
"""

from __future__ import annotations

import asyncio
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
    from tidemill.replication.partition import Partition
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
        self,
        broker: Broker,
        session: Session,
        peers: PeerRequests,
        clock_ms: Callable[[], int],
        *,
        silent_ms: Callable[[], int],
    ) -> None:
        """``silent_ms``: for how long no other node that was asked has answered."""
        self._broker = broker
        self._session = session
        self._peers = peers
        self._clock_ms = clock_ms
        self._silent_ms = silent_ms
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Look after the session from now on; it has begun."""
        self._tasks = [
            asyncio.create_task(self._ask_again_and_again(), name="lapsed session"),
            asyncio.create_task(self._look_for_doubt(), name="leaderships in doubt"),
        ]

    async def stop(self) -> None:
        """Stop looking after the session."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def problems(self) -> list[str]:
        """What an operator has to know, in words."""
        if self._broker.find.is_isolated:
            return [
                "this node reaches neither etcd nor another node: it takes no connections of clients, so "
                "that they go to other nodes. Look at its network"
            ]
        count = len(self._broker.find.in_doubt)
        if not count:
            return []
        return [
            f"this node reaches neither etcd nor the other replicas of {count} partitions that it leads: its "
            "clients are sent to other nodes. Look at its network"
        ]

    @property
    def _has_lapsed(self) -> bool:
        return self._clock_ms() >= self._session.serving_until_ms

    async def _look_for_doubt(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            try:
                await self._find_doubtful()
            except Exception:
                logger.exception("it could not be found out which leaderships are in doubt; tried again")

    async def _find_doubtful(self) -> None:
        """Note which leaderships are in doubt now, and fail the producers that wait for their replicas."""
        find = self._broker.find
        found: set[Partition] = set()
        is_isolated = self._has_lapsed and self._hears_nobody
        begin_slice()
        for partition in self._broker.replicas if self._has_lapsed else ():
            if self._is_doubtful(partition):
                found.add(partition)
                partition.fail_acknowledgements()
            await give_way()
        if bool(found) != bool(find.in_doubt):
            logger.warning(
                "this node's session has lapsed, and no other replica is heard in %d partitions that it "
                "leads: clients are sent elsewhere"
                if found
                else "the other replicas are heard again: this node serves %d partitions again",
                len(found or find.in_doubt),
            )
        find.in_doubt = found
        if is_isolated != find.is_isolated:
            logger.warning(
                "this node's session has lapsed, and no node answers it: no connections of clients are taken"
                if is_isolated
                else "this node reaches etcd or another node again: connections of clients are taken again"
            )
        find.is_isolated = is_isolated

    @property
    def _hears_nobody(self) -> bool:
        others = self._broker.image.live_nodes - {self._broker.node_id}
        return bool(others) and self._silent_ms() >= self._broker.settings.session_timeout_ms

    def _is_doubtful(self, partition: Partition) -> bool:
        if partition.role is not Role.LEADER or not (electable := partition.as_leader.electable):
            return False
        since_ms = self._broker.clock.now_ms() - self._broker.settings.session_timeout_ms
        followers = partition.as_leader.followers
        heard = (followers[node_id].heard_ms for node_id in electable if node_id in followers)
        return all(each is None or each < since_ms for each in heard)

    async def _ask_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            if self._has_lapsed:
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
