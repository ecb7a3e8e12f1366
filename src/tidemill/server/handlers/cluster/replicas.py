"""What operators ask of nodes and replicas.

UnregisterBroker is Kafka's. DescribeNodes, DescribeReplicas, ElectReplica and SetNodeTags are not.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from tidemill.control.commands import Election, ElectLeaders, RemoveNode, SetNodeTags
from tidemill.control.placement import OFFLINE_TAGS
from tidemill.coordination.turns import distinct_in_slices, give_way
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.server.broker import Broker
from tidemill.server.handlers.outcome import outcome
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import ALTER, DESCRIBE, for_cluster
from tidemill.server.requests.call import Call

if TYPE_CHECKING:
    from tidemill.replication.partition import Partition

__all__ = ("describe_nodes", "describe_replicas", "elect_replica", "set_node_tags", "unregister_broker")

logger = logging.getLogger(__name__)

_NOBODY: Final = -1


@serves("DescribeNodes", for_cluster(DESCRIBE))
async def describe_nodes(broker: Broker, call: Call) -> dict[str, Any]:
    """Describe the registered nodes and the controller, as this node sees them, and its own problems."""
    image = broker.image
    controller_id, epoch = _NOBODY, _NOBODY
    if image.controller is not None:
        controller_id, epoch = image.controller.node_id, image.controller.epoch
    elif not image.replicated:
        controller_id = broker.node_id
    return {
        **outcome(None),
        "node_id": broker.node_id,
        "replicated": image.replicated,
        "controller_id": controller_id,
        "controller_epoch": epoch,
        "revision": image.revision,
        "problems": broker.problems(),
        "nodes": [_node(broker, node_id) for node_id in sorted(image.nodes)],
    }


def _node(broker: Broker, node_id: int) -> dict[str, Any]:
    image = broker.image
    node = image.nodes[node_id]
    state = "live" if image.live(node_id) else "joining" if node_id in image.alive else "down"
    return {
        "node_id": node_id,
        "name": node.name,
        "host": node.host,
        "port": node.port,
        "cluster_host": node.cluster_host,
        "cluster_port": node.cluster_port,
        "rack": node.rack,
        "machine": node.machine,
        "state": state,
        "clock_ahead_ms": broker.clocks_ahead_ms().get(node_id, 0),
        "tags": list(image.node_tags.get(node_id, ())),
    }


@serves("DescribeReplicas", for_cluster(DESCRIBE))
async def describe_replicas(broker: Broker, call: Call) -> dict[str, Any]:
    """Describe the replicas that this node holds, and the followers of those that it leads."""
    wanted = await distinct_in_slices(call.request.topics)
    found = []
    for partition in list(broker.replicas):
        if not wanted or partition.topic in wanted:
            found.append(_replica(broker, partition))
        await give_way()
    return {**outcome(None), "replicas": found}


def _replica(broker: Broker, partition: Partition) -> dict[str, Any]:
    now_ms = broker.clock.now_ms()
    in_sync = () if partition.assignment is None else partition.assignment.isr
    return {
        "topic": partition.topic,
        "partition": partition.index,
        "role": partition.role.value,
        "leader_epoch": partition.leader_epoch,
        "last_epoch": partition.last_epoch,
        "log_start_offset": partition.log_start_offset,
        "log_end_offset": partition.log_end_offset,
        "durable_offset": partition.durable_offset,
        "high_watermark": partition.high_watermark,
        "problem": None if partition.failure is None else partition.failure.message,
        "followers": [
            {
                "node_id": node_id,
                "in_sync": node_id in in_sync,
                "log_end_offset": follower.matched_end,
                "durable_offset": follower.durable,
                "silent_ms": _NOBODY if follower.heard_ms is None else max(0, now_ms - follower.heard_ms),
            }
            for node_id, follower in partition.as_leader.followers.items()
        ],
    }


@serves("ElectReplica", for_cluster(ALTER))
async def elect_replica(broker: Broker, call: Call) -> dict[str, Any]:
    """Make the named replica the leader of a partition without one: what others have beyond it is lost."""
    request = call.request
    command = ElectLeaders(
        name=request.topic,
        partitions=(request.partition,),
        election=Election.UNCLEAN,
        leader=request.leader,
        who=call.who,
    )
    logger.warning(
        "unclean election of node %d for %s-%d, asked for by %s",
        request.leader,
        request.topic,
        request.partition,
        call.who,
    )
    try:
        codes = await broker.propose(command)
        # From another node they come as plain numbers.
        code = next(ErrorCode(each) for index, each in codes.items() if int(index) == request.partition)
        _check(code, request.topic, request.partition)
    except TidemillError as error:
        return outcome(error)
    return outcome(None)


@serves("SetNodeTags", for_cluster(ALTER))
async def set_node_tags(broker: Broker, call: Call) -> dict[str, Any]:
    """Replace the tags of a node, which keep new replicas away from it."""
    node_id = call.request.node_id
    tags = await distinct_in_slices(call.request.tags)
    try:
        _check_node(broker, node_id)
        if unknown := next((tag for tag in tags if tag not in OFFLINE_TAGS), None):
            known = ", ".join(sorted(OFFLINE_TAGS))
            raise ApiError(ErrorCode.invalid_request, f"{unknown!r} is no tag of a node; there are {known}")
        await broker.propose(SetNodeTags(node_id=node_id, tags=tuple(sorted(tags))))
    except TidemillError as error:
        return outcome(error)
    logger.info("the tags of node %d are now %s, asked for by %s", node_id, sorted(tags), call.who)
    return outcome(None)


@serves("UnregisterBroker", for_cluster(ALTER))
async def unregister_broker(broker: Broker, call: Call) -> dict[str, Any]:
    """Forget a node that is down and holds no replicas."""
    node_id = call.request.broker_id
    try:
        _check_node(broker, node_id)
        await broker.propose(RemoveNode(node_id=node_id))
    except TidemillError as error:
        return outcome(error)
    logger.warning("node %d is removed from the cluster, asked for by %s", node_id, call.who)
    return outcome(None)


def _check_node(broker: Broker, node_id: int) -> None:
    """Raise ``ApiError`` unless the node is one of several."""
    if node_id not in broker.image.nodes:
        raise ApiError(ErrorCode.broker_id_not_registered, f"there is no node {node_id}")
    if not broker.image.replicated:
        raise ApiError(ErrorCode.invalid_request, "this node is alone: no other could take its place")


def _check(code: ErrorCode, topic: str, partition: int) -> None:
    reasons = {
        ErrorCode.none: None,
        ErrorCode.election_not_needed: f"{topic}-{partition} has a leader",
        ErrorCode.eligible_leaders_not_available: "the named node is no live replica of the partition",
        ErrorCode.unknown_topic_or_partition: f"there is no partition {topic}-{partition}",
    }
    reason = reasons.get(code, f"the election was refused: {code.name}")
    if reason is not None:
        raise ApiError(code, reason)
