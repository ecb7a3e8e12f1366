"""Metadata, DescribeCluster, DescribeTopicPartitions, FindCoordinator: who leads and coordinates what.

- Clients are sent to live nodes only. A node that is down is an offline replica, and leads and coordinates
  nothing, also while the metadata still names it. Any node takes requests for the controller; clients are
  told the real one if there is one.
- A partition whose log is stopped on this node has no leader (LEADER_NOT_AVAILABLE), and this node is among
  its offline replicas: what Kafka says of a partition in a log directory that failed.
- Authorized operations are told to clients that ask for them; DescribeTopicPartitions tells them always.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from tidemill.config.topic_names import check_topic_name
from tidemill.config.values import Address
from tidemill.control.image import INTERNAL_TOPICS, TopicImage
from tidemill.coordination.turns import distinct_in_slices, give_way, in_slices, sorted_in_slices
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.server.broker import Broker
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.handlers.authorized_operations import NOT_ASKED_FOR, authorized_operations
from tidemill.server.handlers.outcome import outcome, refused
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import (
    CLUSTER,
    CLUSTER_NAME,
    CREATE,
    DESCRIBE,
    GROUP,
    TOPIC,
    TRANSACTIONAL_ID,
    for_each,
)
from tidemill.server.requests.call import Call

__all__ = ("describe_cluster", "describe_topic_partitions", "find_coordinator", "metadata")

_NO_NODE: Final = -1
#: Kafka's max.request.partition.size.limit.
_DESCRIBED_PARTITIONS_MAX: Final = 2_000

_ENDPOINT_BROKER: Final = 1
_ENDPOINT_CONTROLLER: Final = 2


# --- Metadata


@serves("Metadata", for_each(DESCRIBE, TOPIC), for_each(CREATE, TOPIC), for_each(CREATE, CLUSTER))
async def metadata(broker: Broker, call: Call) -> dict[str, Any]:
    """Describe all topics or those asked for, which may be created by that."""
    asked = call.request.topics
    if asked is None or (call.version == 0 and not asked):
        image_topics = broker.image.topics
        names = await sorted_in_slices(tuple(image_topics))
        named = (image_topics[name] for name in names)
        topics = await in_slices(
            _topic_body(broker, call, topic) for topic in named if call.may(DESCRIBE, TOPIC, topic.name)
        )
    else:
        creating = broker.settings.auto_create_topics and call.field("allow_auto_topic_creation", True)
        errors = await _create_missing(broker, call, asked) if creating else {}
        topics = await _asked_topics(broker, call, asked, errors)
    return {
        "brokers": _nodes(broker, "node_id"),
        "cluster_id": broker.image.cluster_id,
        "controller_id": _controller_id(broker),
        "cluster_authorized_operations": _cluster_operations(call),
        "topics": topics,
    }


def _controller_id(broker: Broker) -> int:
    """The controller; while there is none, a live node, which passes requests on when there is one."""
    live, controller = broker.image.live_nodes, broker.image.controller
    if controller is not None and controller.node_id in live:
        return controller.node_id
    return broker.node_id if broker.node_id in live else min(live, default=_NO_NODE)


def _cluster_operations(call: Call) -> int:
    asked = call.field("include_cluster_authorized_operations", False)
    return authorized_operations(call, CLUSTER, CLUSTER_NAME) if asked else NOT_ASKED_FOR


async def _create_missing(broker: Broker, call: Call, asked: Iterable[Any]) -> dict[str, TidemillError]:
    """Create the named topics that do not exist; gives those that could not be created, and why."""
    missing: dict[str, None] = {}
    errors: dict[str, TidemillError] = {}
    for topic in asked:
        by_name = getattr(topic, "topic_id", None) is None and topic.name is not None
        if by_name and topic.name not in broker.image.topics:
            try:
                call.authorize(DESCRIBE, TOPIC, topic.name)
                call.authorize_creation(topic.name)
                missing[topic.name] = None
            except ApiError as error:
                errors[topic.name] = error
        await give_way()
    creatable = [name for name in missing if name not in INTERNAL_TOPICS]
    try:
        for row in broker.coordinators.rows:
            if row.topic in missing:
                await broker.coordinators.ensure_topic(row)
        if creatable:
            errors.update(await broker.catalogue.auto_create(creatable))
    except TidemillError as error:
        errors.update(dict.fromkeys(missing, error))
    return errors


async def _asked_topics(
    broker: Broker, call: Call, asked: Iterable[Any], errors: dict[str, TidemillError]
) -> list[dict[str, Any]]:
    bodies: dict[Any, dict[str, Any]] = {}
    for topic in asked:
        topic_id, name = getattr(topic, "topic_id", None), topic.name
        if (topic_id or name) in bodies:
            continue
        try:
            if topic_id is not None and call.version < 12:
                raise refused("topics cannot be asked for by id before version 12")
            if topic_id is None and name is None:
                raise refused("a topic with neither name nor id")
            if name in errors:
                raise errors[name]
            if topic_id is None:
                call.authorize(DESCRIBE, TOPIC, name)
                image = _named(broker, name)
            else:
                image = broker.find.topic_by_id(topic_id)
                call.authorize(DESCRIBE, TOPIC, image.name)
            bodies[topic_id or name] = _topic_body(broker, call, image)
        except TidemillError as error:
            bodies[topic_id or name] = _failed_topic(call, topic_id, name, error)
        await give_way()
    return list(bodies.values())


def _failed_topic(call: Call, topic_id: Any, name: str | None, error: TidemillError) -> dict[str, Any]:
    # Only from v12 on can an answer leave the name out.
    shown = None if topic_id is not None and call.version >= 12 else name
    return {
        "error_code": error.code,
        "name": "" if shown is None and call.version < 12 else shown,
        "topic_id": topic_id,
        "is_internal": name in INTERNAL_TOPICS,
    }


def _named(broker: Broker, name: str) -> TopicImage:
    """The topic of that name. Raises ``ApiError``, which tells a missing topic from an impossible name."""
    found = broker.image.topics.get(name)
    if found is None:
        check_topic_name(name)
        return broker.find.topic(name)
    return found


def _topic_body(broker: Broker, call: Call, topic: TopicImage) -> dict[str, Any]:
    live = broker.image.live_nodes
    partitions = [_partition_body(broker, topic, index, live) for index in range(len(topic.partitions))]
    for body in partitions:
        if body["leader_id"] == _NO_NODE:
            body["error_code"] = ErrorCode.leader_not_available
        elif call.version == 0:
            _leave_out_unknown_nodes(live, body)
    return {
        "error_code": ErrorCode.none,
        "name": topic.name,
        "topic_id": topic.id,
        "is_internal": topic.internal,
        "partitions": partitions,
        "topic_authorized_operations": (
            authorized_operations(call, TOPIC, topic.name)
            if call.field("include_topic_authorized_operations", False)
            else NOT_ASKED_FOR
        ),
    }


def _leave_out_unknown_nodes(live: frozenset[int], body: dict[str, Any]) -> None:
    """For the first version: name only nodes that are among the brokers, and say that others are missing."""
    for field in ("replica_nodes", "isr_nodes"):
        present = [node_id for node_id in body[field] if node_id in live]
        if len(present) < len(body[field]):
            body[field] = present
            body["error_code"] = ErrorCode.replica_not_available


def _partition_body(broker: Broker, topic: TopicImage, index: int, live: frozenset[int]) -> dict[str, Any]:
    placed = topic.partitions[index]
    offline = [
        node for node in placed.replicas if node not in live or not _is_in_service(broker, topic, index, node)
    ]
    leader, leader_epoch = broker.find.leader_of(topic, index)
    return {
        "error_code": ErrorCode.none,
        "partition_index": index,
        "leader_id": _NO_NODE if leader in offline else leader,
        "leader_epoch": leader_epoch,
        "replica_nodes": placed.replicas,
        "isr_nodes": placed.isr,
        "offline_replicas": offline,
    }


def _is_in_service(broker: Broker, topic: TopicImage, index: int, node_id: int) -> bool:
    """Whether a replica's log is not stopped, as far as this node knows."""
    if node_id != broker.node_id:
        return True
    if (topic.id, index) in broker.replicas.offline:
        return False
    partition = broker.replicas.peek(topic.id, index)
    return partition is None or partition.failure is None


def _nodes(broker: Broker, id_field: str, *, with_fenced: bool = False) -> list[dict[str, Any]]:
    live, bodies = broker.image.live_nodes, []
    for node_id in sorted(broker.image.nodes if with_fenced else live):
        address = _address(broker, node_id)
        rack = broker.image.nodes[node_id].rack
        bodies.append({id_field: node_id, "host": address.host, "port": address.port, "rack": rack})
        if with_fenced:
            bodies[-1]["is_fenced"] = node_id not in live
    return bodies


def _address(broker: Broker, node_id: int) -> Address:
    if node_id == broker.node_id:
        return broker.advertised
    node = broker.image.nodes[node_id]
    return Address(node.host, node.port)


# --- DescribeCluster


@serves("DescribeCluster")
async def describe_cluster(broker: Broker, call: Call) -> dict[str, Any]:
    """The live nodes and the cluster's name; those that are down, too, if they are asked for."""
    endpoint_type = call.field("endpoint_type", _ENDPOINT_BROKER)
    if endpoint_type != _ENDPOINT_BROKER:
        known = endpoint_type == _ENDPOINT_CONTROLLER
        code = ErrorCode.mismatched_endpoint_type if known else ErrorCode.unsupported_endpoint_type
        message = f"this listener is of endpoint type {_ENDPOINT_BROKER} (broker), not of {endpoint_type}"
        return outcome(ApiError(code, message))
    return {
        "endpoint_type": _ENDPOINT_BROKER,
        "cluster_id": broker.image.cluster_id or "",
        "controller_id": _controller_id(broker),
        "brokers": _nodes(broker, "broker_id", with_fenced=bool(call.field("include_fenced_brokers", False))),
        "cluster_authorized_operations": _cluster_operations(call),
    }


# --- DescribeTopicPartitions


@serves("DescribeTopicPartitions", for_each(DESCRIBE, TOPIC))
async def describe_topic_partitions(broker: Broker, call: Call) -> dict[str, Any]:
    """Describe partitions in the order of topic names, some at a time; a cursor says where to go on."""
    request = call.request
    everything = not request.topics
    topics_named = broker.image.topics if everything else (topic.name for topic in request.topics)
    asked = await sorted_in_slices(tuple(await distinct_in_slices(topics_named)))
    start = request.cursor
    if start is not None:
        problem = _cursor_problem(start, () if everything else asked)
        if problem is not None:
            return {"topics": [_undescribed(name, problem) for name in asked if not everything]}
        asked = [name for name in asked if name >= start.topic_name]
    partitions_left = max(1, min(request.response_partition_limit, _DESCRIBED_PARTITIONS_MAX))
    topics: list[dict[str, Any]] = []
    for name in asked:
        await give_way()
        if everything and not call.may(DESCRIBE, TOPIC, name):
            continue
        first = start.partition_index if start is not None and name == start.topic_name else 0
        if partitions_left == 0:
            return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": 0}}
        try:
            call.authorize(DESCRIBE, TOPIC, name)
            topic = _named(broker, name)
        except ApiError as error:
            topics.append(_undescribed(name, error))
            continue
        end = min(len(topic.partitions), first + partitions_left)
        topics.append(_described(broker, call, topic, range(first, end)))
        if end < len(topic.partitions):
            return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": end}}
        partitions_left -= max(0, end - first)
    return {"topics": topics}


def _cursor_problem(cursor: Any, asked: Iterable[str]) -> ApiError | None:
    if cursor.partition_index < 0:
        return refused(f"the cursor's partition {cursor.partition_index} cannot exist")
    if asked and cursor.topic_name not in asked:
        return refused("the cursor's topic must be one of the topics asked for")
    return None


def _described(broker: Broker, call: Call, topic: TopicImage, indexes: range) -> dict[str, Any]:
    live = broker.image.live_nodes
    bodies = [
        {
            **_partition_body(broker, topic, index, live),
            "eligible_leader_replicas": topic.partitions[index].elr,
            "last_known_elr": (),
        }
        for index in indexes
    ]
    return {
        "error_code": ErrorCode.none,
        "name": topic.name,
        "topic_id": topic.id,
        "is_internal": topic.internal,
        "partitions": bodies,
        "topic_authorized_operations": authorized_operations(call, TOPIC, topic.name),
    }


def _undescribed(name: str, error: TidemillError) -> dict[str, Any]:
    return {"error_code": error.code, "name": name, "is_internal": name in INTERNAL_TOPICS}


# --- FindCoordinator


@serves("FindCoordinator", for_each(DESCRIBE, GROUP), for_each(DESCRIBE, TRANSACTIONAL_ID))
async def find_coordinator(broker: Broker, call: Call) -> dict[str, Any]:
    """The node that coordinates a key: a group, a transactional id. From v4 on, of several at a time."""
    key_type = call.field("key_type", GROUPS.key_type)
    if call.version < 4:
        return await _coordinator(broker, call, key_type, call.request.key)
    keys = call.request.coordinator_keys
    return {"coordinators": [{"key": key, **await _coordinator(broker, call, key_type, key)} for key in keys]}


async def _coordinator(broker: Broker, call: Call, key_type: int, key: str) -> dict[str, Any]:
    await give_way()
    try:
        node_id = await _coordinator_id(broker, call, key_type, key)
        address = _address(broker, node_id)
    except TidemillError as error:
        return {**outcome(error), "node_id": _NO_NODE, "host": "", "port": -1}
    return {**outcome(None), "node_id": node_id, "host": address.host, "port": address.port}


async def _coordinator_id(broker: Broker, call: Call, key_type: int, key: str) -> int:
    coordinators = broker.coordinators
    row = coordinators.of_key_type(key_type)
    if row is None:
        known = ", ".join(f"{each.key_type} is for {each.name}" for each in coordinators.rows)
        raise refused(f"there is no coordinator for keys of type {key_type}; {known}")
    call.authorize(DESCRIBE, row.resource, row.resource_of(key))
    try:
        await coordinators.ensure_topic(row)
        name, index = coordinators.partition_of(row, key)
        topic = broker.find.topic(name)
    except TidemillError as error:
        raise ApiError(ErrorCode.coordinator_not_available, error.message) from error
    exists = index < len(topic.partitions)
    live = broker.image.live_nodes
    leader = int(_partition_body(broker, topic, index, live)["leader_id"]) if exists else _NO_NODE
    if leader == _NO_NODE:
        raise ApiError(
            ErrorCode.coordinator_not_available,
            f"{topic.name}-{index}, where {key[:200]!r} lives, has no leader",
        )
    return leader
