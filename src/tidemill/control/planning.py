"""Planning: from an image and a command to the keys to write, or to Kafka's error. Pure.

Here are the cluster and its topics; ``node_planning`` has nodes, ``partition_planning`` leaders and in-sync
sets, ``tables/planning.py`` databases and tables, ``tables/lease_planning.py`` leases of snapshots. ``plans``
says what a plan must guard.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar, cast

from tidemill.config.topic_names import check_topic_name
from tidemill.control import records
from tidemill.control.commands import (
    AllocateProducerIds,
    Assignments,
    Command,
    CreatePartitions,
    CreateTopic,
    DeleteTopic,
    SetClusterId,
    SetGroupConfigs,
    SetNodeConfigs,
    SetTopicConfigs,
)
from tidemill.control.image import MetadataImage, PartitionImage, TopicImage
from tidemill.control.insync import minimum_of, new_partition
from tidemill.control.placement import (
    ControlLimits,
    check_assignments,
    check_counts,
    check_node_limits,
    check_partition_limit,
    place_replicas,
)
from tidemill.control.plans import (
    Plan,
    chunk_writes,
    guards,
    planner,
    topic_deletes,
    topic_named,
    topic_write,
    write_one,
)
from tidemill.control.records import PARTITIONS_PER_CHUNK, chunk_count, chunk_key, encode, node_key, topic_key
from tidemill.errors import ApiError, ErrorCode, MetadataConflict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# These register their commands with the planner.
from tidemill.control import node_planning, partition_planning  # noqa: F401
from tidemill.control.tables import lease_planning, planning  # noqa: F401
from tidemill.control.tables.images import TableImage, TablePartition

__all__ = ("Plan", "plan")

R = TypeVar("R")

_PRODUCER_ID_MAX = 2**63 - 1
#: Groups with configs of their own: every node keeps them all in memory.
_GROUP_CONFIGS_MAX = 10_000
_GROUP_ID_BYTES_MAX = 1024


def plan(image: MetadataImage, command: Command[R], limits: ControlLimits) -> Plan[R]:
    """Plan what ``command`` writes to ``image``. Raises ``ApiError`` if Kafka would refuse it."""
    return cast("Plan[R]", planner(command, image, limits))


@planner.register(SetClusterId)
def _(command: SetClusterId, image: MetadataImage, limits: ControlLimits) -> Plan[None]:
    if image.cluster_id == command.cluster_id and (image.replicated or not command.replicated):
        return Plan({}, {}, None)
    if image.cluster_id not in (None, command.cluster_id):
        raise ApiError(
            ErrorCode.inconsistent_cluster_id,
            f"this is cluster {image.cluster_id!r}, it cannot become {command.cluster_id!r}",
        )
    record = records.ClusterRecord(
        cluster_id=command.cluster_id, replicated=command.replicated, secret=command.secret
    )
    return write_one(image, records.CLUSTER_KEY, encode(record), None)


@planner.register(AllocateProducerIds)
def _(command: AllocateProducerIds, image: MetadataImage, limits: ControlLimits) -> Plan[int]:
    first = image.next_producer_id
    if command.count < 1 or first > _PRODUCER_ID_MAX - command.count:
        raise ApiError(
            ErrorCode.invalid_request, f"{command.count} producer ids from {first} on cannot be allocated"
        )
    record = records.ProducerIdsRecord(next_producer_id=first + command.count)
    return write_one(image, records.PRODUCER_IDS_KEY, encode(record), first)


@planner.register(SetNodeConfigs)
def _(command: SetNodeConfigs, image: MetadataImage, limits: ControlLimits) -> Plan[None]:
    if command.node_id is not None and command.node_id not in image.nodes:
        raise ApiError(ErrorCode.broker_id_not_registered, f"there is no node {command.node_id}")
    current = image.node_configs.get(command.node_id, {})
    if current == command.configs:
        return Plan({}, {}, None)
    _check_base(command.base, current, f"node {command.node_id}")
    value = encode(records.NodeConfigsRecord(configs=command.configs)) if command.configs else None
    return write_one(image, records.node_configs_key(command.node_id), value, None)


@planner.register(SetGroupConfigs)
def _(command: SetGroupConfigs, image: MetadataImage, limits: ControlLimits) -> Plan[None]:
    size = len(command.group_id.encode())
    if not 0 < size <= _GROUP_ID_BYTES_MAX:
        raise ApiError(
            ErrorCode.invalid_group_id,
            f"a group with configs has a name of 1 to {_GROUP_ID_BYTES_MAX} bytes, not {size}",
        )
    current = image.group_configs.get(command.group_id, {}) or {}
    if current == command.configs:
        return Plan({}, {}, None)
    _check_base(command.base, current, f"group {command.group_id!r}")
    if not current and len(image.group_configs) >= _GROUP_CONFIGS_MAX:
        raise ApiError(
            ErrorCode.policy_violation,
            f"{_GROUP_CONFIGS_MAX} groups have configs of their own: delete those of another group first",
        )
    value = encode(records.GroupConfigsRecord(configs=command.configs)) if command.configs else None
    return write_one(image, records.group_configs_key(command.group_id), value, None)


@planner.register(CreateTopic)
def _(command: CreateTopic, image: MetadataImage, limits: ControlLimits) -> Plan[TopicImage]:
    check_topic_name(command.name)
    there = image.topics.get(command.name)
    if there is not None and there.id == command.topic_id:
        return Plan({}, {}, there)
    _check_name_is_free(image, command.name)
    used = command.topic_id in image.topic_names_by_id or command.topic_id in image.deleted_topics
    if command.topic_id.int == 0 or used:
        raise ApiError(
            ErrorCode.invalid_request, f"topic id {command.topic_id} cannot be used for a new topic"
        )
    assignments = command.assignments
    if assignments is not None:
        if command.partitions is not None or command.replication is not None:
            raise ApiError(
                ErrorCode.invalid_request,
                f"topic {command.name!r} has both assignments and a partition or replica count; give one",
            )
        check_assignments(assignments, image.nodes)
        replication = len(assignments[0])
        count = len(assignments)
    else:
        replication = command.replication if command.replication is not None else 1
        count = command.partitions if command.partitions is not None else 1
        check_counts(command.name, count, replication, image)
    check_partition_limit(command.name, count, limits)
    if assignments is None:
        assignments = place_replicas(image, 0, count, replication)
    check_node_limits(command.name, assignments, image, limits)
    partitions = _new_partitions(image, command.configs, assignments)
    topic = TopicImage(command.name, command.topic_id, partitions, MappingProxyType(dict(command.configs)))
    return Plan(
        {**topic_write(topic), **chunk_writes(topic, range(chunk_count(count)))},
        {**_guard_topic(image, topic.name), **_guard_absent(image, assignments)},
        topic,
    )


@planner.register(DeleteTopic)
def _(command: DeleteTopic, image: MetadataImage, limits: ControlLimits) -> Plan[TopicImage]:
    topic = topic_named(image, command.name)
    if command.topic_id is not None and command.topic_id != topic.id:
        raise ApiError(
            ErrorCode.unknown_topic_id, f"topic {topic.name!r} has id {topic.id}, not {command.topic_id}"
        )
    owner = image.table_of_topic(topic.id)
    if owner is not None:
        raise _is_a_log(topic, *owner)
    deletes = topic_deletes(image, topic, command.command_id)
    return Plan(deletes, _guard_topic(image, topic.name), topic)


@planner.register(CreatePartitions)
def _(command: CreatePartitions, image: MetadataImage, limits: ControlLimits) -> Plan[TopicImage]:
    topic = topic_named(image, command.name)
    owner = image.table_of_topic(topic.id)
    if owner is not None:
        table, _ = owner
        raise ApiError(
            ErrorCode.policy_violation,
            f"topic {topic.name!r} is the log of table {table.name!r}, whose keys are spread over"
            f" {table.buckets} buckets for good: create a table with more buckets and copy the rows",
        )
    have = len(topic.partitions)
    if command.new_count <= have:
        raise ApiError(
            ErrorCode.invalid_partitions,
            f"topic {topic.name!r} has {have} partitions; there can only be more, not {command.new_count}",
        )
    check_partition_limit(topic.name, command.new_count, limits)
    first = topic.partitions[0]
    replication = len(first.replicas) - len(first.adding)
    assignments = command.assignments
    if assignments is None:
        check_counts(topic.name, command.new_count, replication, image)
        assignments = place_replicas(image, have, command.new_count - have, replication)
    else:
        if len(assignments) != command.new_count - have:
            raise ApiError(
                ErrorCode.invalid_replica_assignment,
                f"topic {topic.name!r} would get {command.new_count - have} more partitions, and"
                f" {len(assignments)} assignments are given",
            )
        check_assignments(assignments, image.nodes, replication)
    check_node_limits(topic.name, assignments, image, limits)
    added = _new_partitions(image, topic.configs, assignments)
    grown = replace(topic, partitions=topic.partitions + added)
    chunks = range(have // PARTITIONS_PER_CHUNK, chunk_count(command.new_count))
    seen = {
        **_guard_topic(image, topic.name),
        **_guard_chunks(image, grown, chunks),
        **_guard_absent(image, assignments),
    }
    return Plan({**topic_write(grown), **chunk_writes(grown, chunks)}, seen, grown)


@planner.register(SetTopicConfigs)
def _(command: SetTopicConfigs, image: MetadataImage, limits: ControlLimits) -> Plan[TopicImage]:
    topic = topic_named(image, command.name)
    if topic.configs == command.configs:
        return Plan({}, {}, topic)
    _check_base(command.base, topic.configs, f"topic {topic.name!r}")
    changed = replace(topic, configs=MappingProxyType(dict(command.configs)))
    return Plan(topic_write(changed), _guard_topic(image, topic.name), changed)


def _new_partitions(
    image: MetadataImage, configs: Mapping[str, str], assignments: Assignments
) -> tuple[PartitionImage, ...]:
    live, minimum = image.live_nodes, minimum_of(image, configs)
    for index, replicas in enumerate(assignments):
        if live.isdisjoint(replicas):
            raise ApiError(
                ErrorCode.invalid_replica_assignment,
                f"assignment {index} names nodes that are all down: {list(replicas)}",
            )
    return tuple(new_partition(replicas, live, minimum) for replicas in assignments)


def _guard_absent(image: MetadataImage, assignments: Assignments) -> dict[str, int]:
    """Guards of assigned nodes that are down: they must not be removed from the cluster meanwhile."""
    live = image.live_nodes
    absent = {node_id for replicas in assignments for node_id in replicas if node_id not in live}
    return guards(image, (node_key(node_id) for node_id in sorted(absent)))


def _guard_topic(image: MetadataImage, name: str) -> dict[str, int]:
    return guards(image, (topic_key(name),))


def _guard_chunks(image: MetadataImage, topic: TopicImage, chunks: Iterable[int]) -> dict[str, int]:
    return guards(image, (chunk_key(topic.id, chunk) for chunk in chunks))


def _is_a_log(topic: TopicImage, table: TableImage, partition: TablePartition) -> ApiError:
    if partition.value is None:
        what, instead = f"table {table.name!r}", f"use 'tidemill table drop {table.name}'"
    else:
        what = f"partition {partition.value!r} of table {table.name!r}"
        instead = "drop that partition of the table instead"
    return ApiError(ErrorCode.policy_violation, f"topic {topic.name!r} is the log of {what}: {instead}")


def _check_name_is_free(image: MetadataImage, name: str) -> None:
    normalised = records.normalised_name(name)
    # A partitioned table has no topic of its own name, and nobody else may have one either.
    for what, other in (
        ("topic", image.topic_names_by_normalised.get(normalised)),
        ("table", image.catalog.table_names_by_normalised.get(normalised)),
    ):
        if other == name:
            raise ApiError(ErrorCode.topic_already_exists, f"{what} {name!r} already exists")
        if other is not None:
            raise ApiError(
                ErrorCode.invalid_topic_exception,
                f"topic {name!r} collides with {what} {other!r}: names may not differ by '.' and '_' only",
            )


def _check_base(base: Mapping[str, str] | None, current: Mapping[str, str], what: str) -> None:
    if base is not None and base != current:
        raise MetadataConflict(
            f"the configs of {what} were changed by somebody else; read them again and retry"
        )
