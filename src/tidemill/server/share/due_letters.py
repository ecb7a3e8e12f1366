"""Due dead letters: has those written whose share partition is not loaded on any node.

A rejection is confirmed when the note that a letter is due is stored. If the leader of the records fails
then, the next one reads that note when it loads the share partition, which members of the group make it do.
Without members nobody would. So the nodes of the share coordinator, which have all notes, look through theirs
from time to time, and have the leaders of the records load those share partitions: they write what is due,
and end.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from tidemill.coordination.turns import side_by_side
from tidemill.errors import TidemillError
from tidemill.replication.rules.assignment import NO_LEADER

if TYPE_CHECKING:
    from tidemill.coordination.share_state import SharePartitionKey
    from tidemill.server.broker import Broker

__all__ = ("DueLetters",)

logger = logging.getLogger(__name__)

#: Share partitions that are looked after at a time; the others come next time.
_AT_ONCE: Final = 100
_PER_TURN: Final = 10


class DueLetters:
    """Looks after the dead letters that are due by the states that this node keeps."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def look_after(self) -> None:
        """Have leaders load share partitions with letters that are due. What fails is tried the next time."""
        keys = self._broker.share_states.with_due_letters(_AT_ONCE)
        await side_by_side(((1, self._load(key)) for key in keys), _PER_TURN)

    async def _load(self, key: SharePartitionKey) -> None:
        """Have the leader of the records load a share partition. One that it has loaded is left as it is."""
        broker = self._broker
        topic = broker.image.topic_by_id(key.topic_id)
        if topic is None or key.partition >= len(topic.partitions):
            return
        leader, _ = broker.find.leader_of(topic, key.partition)
        try:
            if leader == broker.node_id:
                await broker.share.find(key)
            elif leader != NO_LEADER:
                body = {"group_id": key.group_id, "topic": topic.name, "partition": key.partition}
                # It answers with what it has loaded; no more than that is wanted.
                await broker.ask_node(leader, "DescribeShareRecords", 0, body | {"states": [], "limit": 0})
        except TidemillError as error:
            logger.info("the dead letters of %s are due, and wait for their leader: %s", key, error.message)
