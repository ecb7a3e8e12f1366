"""Nodes, replicas, elections and moves of partitions: typed async functions.

Each takes the ``Cluster`` first and raises ``ApiError`` with the server's code and words when it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.config.broker_keys import FOLLOWER_RATE, LEADER_RATE
from tidemill.config.topic import AlterOp
from tidemill.config.topic_keys import LONG_MAX
from tidemill.config.values import Address
from tidemill.errors import ErrorCode, TidemillError
from tidemill.net.answers import check, checked

__all__ = (
    "ClusterView",
    "Follower",
    "Move",
    "NodeThrottle",
    "NodeView",
    "Replica",
    "alter_reassignments",
    "describe_nodes",
    "describe_replicas",
    "describe_throttles",
    "elect_leaders",
    "elect_replica",
    "eligible_leaders",
    "list_reassignments",
    "remove_node",
    "set_node_tags",
    "set_throttle",
)

_NODE_RESOURCE: Final = 4
_PREFERRED: Final = 0
_UNCLEAN: Final = 1
_PARTITIONS_AT_ONCE: Final = 2_000


@dataclass(frozen=True, slots=True)
class NodeView:
    """A registered node. ``state`` is live, joining or down; one with ``tags`` gets no new replicas."""

    node_id: int
    name: str
    address: Address
    cluster_address: Address | None
    rack: str | None
    machine: str
    state: str
    clock_ahead_ms: int
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster as one node sees it, and what that node says is wrong."""

    node_id: int
    replicated: bool
    controller_id: int
    controller_epoch: int
    revision: int
    problems: tuple[str, ...]
    nodes: Mapping[int, NodeView]


@dataclass(frozen=True, slots=True)
class Follower:
    """How far a follower is, as its leader knows; -1 for what is not known."""

    node_id: int
    in_sync: bool
    log_end_offset: int
    durable_offset: int
    silent_ms: int


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as the node that holds it describes it."""

    node_id: int
    topic: str
    partition: int
    role: str
    leader_epoch: int
    last_epoch: int
    log_start_offset: int
    log_end_offset: int
    durable_offset: int
    high_watermark: int
    problem: str | None
    followers: tuple[Follower, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A partition that gets other replicas."""

    topic: str
    partition: int
    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeThrottle:
    """How many bytes in a second a node sends and fetches for replicas that are moved; None is no limit."""

    send: int | None
    fetch: int | None


async def describe_nodes(cluster: Cluster, node_id: int | None = None) -> ClusterView:
    """The cluster as a node sees it; without ``node_id`` as any node does."""

    async def ask() -> ClusterView:
        if node_id is None:
            response = await cluster.to_any("DescribeNodes", {})
        else:
            response = await (await cluster.connection(node_id)).request("DescribeNodes", {})
        answer = checked(response, "describing the nodes")
        return ClusterView(
            answer.node_id,
            answer.replicated,
            answer.controller_id,
            answer.controller_epoch,
            answer.revision,
            tuple(answer.problems),
            {each.node_id: _node(each) for each in answer.nodes},
        )

    return await cluster.retrying(ask)


def _node(each: Any) -> NodeView:
    return NodeView(
        each.node_id,
        each.name,
        Address(each.host, each.port),
        Address(each.cluster_host, each.cluster_port) if each.cluster_port else None,
        each.rack,
        each.machine,
        each.state,
        each.clock_ahead_ms,
        tuple(each.tags),
    )


async def describe_replicas(
    cluster: Cluster, node_ids: Iterable[int], topics: Sequence[str] = ()
) -> dict[int, list[Replica] | TidemillError]:
    """The replicas of each of the nodes; of a node that cannot be asked, why."""
    found: dict[int, list[Replica] | TidemillError] = {}
    for node_id in node_ids:
        try:
            connection = await cluster.connection(node_id)
            response = await connection.request("DescribeReplicas", {"topics": list(topics)})
            answer = checked(response, f"describing the replicas of node {node_id}")
        except TidemillError as error:
            found[node_id] = error
        else:
            found[node_id] = [_replica(node_id, each) for each in answer.replicas]
    return found


def _replica(node_id: int, each: Any) -> Replica:
    return Replica(
        node_id,
        each.topic,
        each.partition,
        each.role,
        each.leader_epoch,
        each.last_epoch,
        each.log_start_offset,
        each.log_end_offset,
        each.durable_offset,
        each.high_watermark,
        each.problem,
        tuple(
            Follower(
                follower.node_id,
                follower.in_sync,
                follower.log_end_offset,
                follower.durable_offset,
                follower.silent_ms,
            )
            for follower in each.followers
        ),
    )


async def eligible_leaders(cluster: Cluster, topics: Iterable[str]) -> dict[TopicPartition, tuple[int, ...]]:
    """The eligible leader replicas (KIP-966) of the partitions of some topics, where there are any."""
    names = sorted(topics)
    found: dict[TopicPartition, tuple[int, ...]] = {}
    cursor: dict[str, Any] | None = None
    while names:
        body = {
            "topics": [{"name": name} for name in names],
            "response_partition_limit": _PARTITIONS_AT_ONCE,
            "cursor": cursor,
        }
        response = await cluster.retrying(lambda body=body: cluster.to_any("DescribeTopicPartitions", body))  # type: ignore[misc]
        for topic in response.topics:
            for partition in topic.partitions:
                if partition.eligible_leader_replicas:
                    found[topic.name, partition.partition_index] = tuple(partition.eligible_leader_replicas)
        if response.next_cursor is None:
            break
        after = response.next_cursor
        cursor = {"topic_name": after.topic_name, "partition_index": after.partition_index}
    return found


async def elect_leaders(
    cluster: Cluster, partitions: Sequence[TopicPartition] | None, *, unclean: bool = False
) -> dict[TopicPartition, str | None]:
    """Elect leaders of partitions (None: of all); gives the reason of each that was refused.

    The preferred ones, or with ``unclean``, of partitions without a leader, those that have the most.
    """
    topics = None
    if partitions is not None:
        by_topic: dict[str, list[int]] = {}
        for name, index in partitions:
            by_topic.setdefault(name, []).append(index)
        topics = [{"topic": name, "partitions": indexes} for name, indexes in by_topic.items()]
    body = {
        "election_type": _UNCLEAN if unclean else _PREFERRED,
        "topic_partitions": topics,
        "timeout": cluster.timeout_ms,
    }

    async def ask() -> dict[TopicPartition, str | None]:
        response = await cluster.to_any("ElectLeaders", body)
        check(response.error_code, None, "electing leaders")
        return {
            (topic.topic, each.partition_id): _reason(each)
            for topic in response.replica_election_results
            for each in topic.partition_result
        }

    outcomes = await cluster.retrying(ask)
    cluster.forget()
    return outcomes


def _reason(outcome: Any) -> str | None:
    if outcome.error_code == ErrorCode.none:
        return None
    name = ErrorCode(outcome.error_code).name.upper()
    return f"{name}: {outcome.error_message}" if outcome.error_message else name


async def elect_replica(cluster: Cluster, topic: str, partition: int, leader: int) -> None:
    """Make a replica the leader of a partition without one: what others have beyond its end is lost."""
    body = {"topic": topic, "partition": partition, "leader": leader}
    checked(await cluster.to_any("ElectReplica", body), f"electing node {leader} for {topic}-{partition}")
    cluster.forget()


async def set_node_tags(cluster: Cluster, node_id: int, tags: Iterable[str]) -> None:
    """Replace the tags of a node: with PERMANENT_OFFLINE it gets no new replicas, as it is to be removed."""
    body = {"node_id": node_id, "tags": sorted(tags)}

    async def ask() -> None:
        checked(await cluster.to_any("SetNodeTags", body), f"changing the tags of node {node_id}")

    await cluster.retrying(ask)


async def remove_node(cluster: Cluster, node_id: int) -> None:
    """Have the cluster forget a node that is down and holds no replicas."""

    async def ask() -> None:
        checked(await cluster.to_any("UnregisterBroker", {"broker_id": node_id}), f"removing node {node_id}")

    await cluster.retrying(ask)


async def alter_reassignments(
    cluster: Cluster, targets: Mapping[TopicPartition, Sequence[int] | None]
) -> dict[TopicPartition, str | None]:
    """Begin to move partitions to other replicas (None cancels); gives the reason of each refusal."""
    by_topic: dict[str, list[dict[str, Any]]] = {}
    for (name, index), replicas in targets.items():
        entry = {"partition_index": index, "replicas": None if replicas is None else list(replicas)}
        by_topic.setdefault(name, []).append(entry)
    body = {
        "timeout": cluster.timeout_ms,
        "topics": [{"name": name, "partitions": entries} for name, entries in by_topic.items()],
    }

    async def ask() -> dict[TopicPartition, str | None]:
        response = checked(await cluster.to_any("AlterPartitionReassignments", body), "moving partitions")
        return {
            (topic.name, each.partition_index): _reason(each)
            for topic in response.responses
            for each in topic.partitions
        }

    outcomes = await cluster.retrying(ask)
    cluster.forget()
    return outcomes


async def list_reassignments(cluster: Cluster) -> list[Move]:
    """The moves that are under way."""

    async def ask() -> list[Move]:
        body = {"timeout": cluster.timeout_ms, "topics": None}
        response = checked(await cluster.to_any("ListPartitionReassignments", body), "listing moves")
        return [
            Move(
                topic.name,
                each.partition_index,
                tuple(each.replicas),
                tuple(each.adding_replicas),
                tuple(each.removing_replicas),
            )
            for topic in response.topics
            for each in topic.partitions
        ]

    return await cluster.retrying(ask)


# --- the throttle of moves


async def describe_throttles(
    cluster: Cluster, node_ids: Iterable[int] | None = None
) -> dict[int, NodeThrottle]:
    """The throttle of moves of each of these nodes, or of all, that can be asked."""
    if node_ids is None:
        await cluster.all_topics()  # Its answer also lists the nodes.
        node_ids = cluster.nodes
    found: dict[int, NodeThrottle] = {}
    for node_id in sorted(node_ids):
        resource = {
            "resource_type": _NODE_RESOURCE,
            "resource_name": str(node_id),
            "configuration_keys": [LEADER_RATE, FOLLOWER_RATE],
        }
        try:
            connection = await cluster.connection(node_id)
            (result,) = (await connection.request("DescribeConfigs", {"resources": [resource]})).results
            check(result.error_code, result.error_message, f"the throttle of node {node_id}")
        except TidemillError:
            continue
        values = {entry.name: int(entry.value) for entry in result.configs}
        sides = (values.get(name, LONG_MAX) for name in (LEADER_RATE, FOLLOWER_RATE))
        found[node_id] = NodeThrottle(*(None if value == LONG_MAX else value for value in sides))
    return found


async def set_throttle(cluster: Cluster, bytes_per_second: int | None, node_id: int | None = None) -> None:
    """Limit what one node, or every node, sends and fetches for replicas that are moved; None removes it.

    A limit for every node takes the place of those that single nodes have.
    """
    changes = [_rate_change(name, bytes_per_second) for name in (LEADER_RATE, FOLLOWER_RATE)]
    removals = [_rate_change(name, None) for name in (LEADER_RATE, FOLLOWER_RATE)]
    if node_id is not None:
        by_name = {str(node_id): changes}
    else:
        # The new limit first, so that there is always one.
        by_name = {"": changes, **{str(each): removals for each in (await describe_nodes(cluster)).nodes}}
    body = {
        "resources": [
            {"resource_type": _NODE_RESOURCE, "resource_name": name, "configs": configs}
            for name, configs in by_name.items()
        ],
        "validate_only": False,
    }

    async def ask() -> None:
        for result in (await cluster.to_any("IncrementalAlterConfigs", body)).responses:
            check(result.error_code, result.error_message, "changing the throttle of moves")

    await cluster.retrying(ask)


def _rate_change(name: str, bytes_per_second: int | None) -> dict[str, Any]:
    if bytes_per_second is None:
        return {"name": name, "config_operation": AlterOp.DELETE, "value": None}
    return {"name": name, "config_operation": AlterOp.SET, "value": str(bytes_per_second)}
