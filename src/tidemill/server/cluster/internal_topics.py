"""Internal topics have as many replicas as the cluster can give them: they rise when nodes join.

The first node of a cluster creates them before there is a second, and what they hold (committed offsets,
transactions) must not go with one node. Other topics keep the number that they were created with.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tidemill.control.commands import AlterReassignment
from tidemill.control.placement import OFFLINE_TAGS
from tidemill.coordination.turns import give_way

if TYPE_CHECKING:
    from collections.abc import Collection

    from tidemill.control.image import MetadataImage, TopicImage
    from tidemill.server.broker import Broker

__all__ = ("raise_internal_topics",)


async def raise_internal_topics(broker: Broker) -> None:
    """Give internal topics more replicas where there are nodes for them. Only the controller's node does.

    Raises ``TidemillError``; the call can be repeated.
    """
    image = broker.image
    if image.controller is None or image.controller.node_id != broker.node_id:
        return
    nodes = {
        node_id for node_id in image.live_nodes if not OFFLINE_TAGS & {*image.node_tags.get(node_id, ())}
    }
    wanted = min(broker.catalogue.default_replication, len(nodes))
    for topic in [each for each in image.topics.values() if each.internal]:
        held = Counter(node_id for placed in topic.partitions for node_id in placed.replicas)
        for index in range(len(topic.partitions)):
            replicas = _more_replicas(image, topic, index, nodes, wanted, held)
            if replicas is not None:
                await broker.propose(AlterReassignment(name=topic.name, index=index, replicas=replicas))
            await give_way()


def _more_replicas(
    image: MetadataImage,
    topic: TopicImage,
    index: int,
    nodes: Collection[int],
    wanted: int,
    held: Counter[int],
) -> tuple[int, ...] | None:
    """The replicas that a partition should have; None if it has enough, or is being moved.

    Another rack is better than the same, another machine, too; then a node that holds less of the topic.
    """
    placed = topic.partitions[index]
    if len(placed.replicas) >= wanted or placed.adding or placed.removing:
        return None
    replicas = list(placed.replicas)
    while len(replicas) < wanted:
        known = [image.nodes[node_id] for node_id in replicas if node_id in image.nodes]
        racks, machines = {node.rack for node in known} - {None}, {node.machine for node in known}
        free = [image.nodes[node_id] for node_id in nodes if node_id not in replicas]
        if not free:
            return None
        best = min(
            free, key=lambda node: (node.rack in racks, node.machine in machines, held[node.id], node.id)
        )
        held[best.id] += 1
        replicas.append(best.id)
    return tuple(replicas)
