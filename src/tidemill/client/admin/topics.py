"""Topics, configs, offsets and the cluster, over the Kafka protocol: typed async functions.

Each takes the ``Cluster`` first and raises ``ApiError`` with the server's code and words when it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.config.values import Address
from tidemill.errors import ErrorCode, NodeUnavailable
from tidemill.net.answers import check

__all__ = (
    "EARLIEST",
    "LATEST",
    "ClusterDescription",
    "ConfigEntry",
    "CreatedTopic",
    "EpochEnd",
    "LogDirectory",
    "OffsetAt",
    "alter_topic_configs",
    "create_partitions",
    "create_topic",
    "delete_records",
    "delete_topic",
    "describe_cluster",
    "describe_log_directories",
    "describe_node_configs",
    "describe_topic_configs",
    "epoch_ends",
    "list_offsets",
)

EARLIEST: Final = -2
LATEST: Final = -1
"""``list_offsets`` takes ``LATEST`` and ``EARLIEST`` in place of a time."""

_TOPIC_RESOURCE: Final = 2
_NODE_RESOURCE: Final = 4
_CONFIG_SOURCES: Final = {1: "topic", 2: "node", 3: "cluster", 4: "node", 5: "default", 6: "group"}


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    """A topic that was created, or would be with ``validate_only``."""

    name: str
    topic_id: UUID | None
    partitions: int
    replication: int


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One config of a topic, and whether the topic, the node or nobody set it."""

    name: str
    value: str | None
    source: str
    documentation: str | None


@dataclass(frozen=True, slots=True)
class OffsetAt:
    """The offset of the first record at or after a time; -1 if no record is that young."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The largest epoch that a log has, not above the one asked for, and where it ended; -1 if unknown."""

    leader_epoch: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class LogDirectory:
    """A data directory of a node, and the bytes of each partition in it."""

    node_id: int
    path: str
    error: str | None
    total_bytes: int
    usable_bytes: int
    partition_bytes: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """The cluster and its nodes."""

    cluster_id: str
    controller_id: int
    nodes: Mapping[int, Address]


# --- topics


async def create_topic(
    cluster: Cluster,
    name: str,
    *,
    partitions: int = -1,
    replication: int = -1,
    configs: Mapping[str, str] | None = None,
    validate_only: bool = False,
) -> CreatedTopic:
    """Create a topic; -1 leaves a number to the server's default."""
    body = {
        "topics": [
            {
                "name": name,
                "num_partitions": partitions,
                "replication_factor": replication,
                "configs": [{"name": key, "value": value} for key, value in (configs or {}).items()],
            }
        ],
        "timeout": cluster.timeout_ms,
        "validate_only": validate_only,
    }

    async def ask() -> CreatedTopic:
        (result,) = (await cluster.to_controller("CreateTopics", body)).topics
        check(result.error_code, getattr(result, "error_message", None), f"creating topic {name!r}")
        return CreatedTopic(
            name,
            getattr(result, "topic_id", None),
            getattr(result, "num_partitions", partitions),
            getattr(result, "replication_factor", replication),
        )

    created = await cluster.retrying(ask)
    cluster.forget()
    return created


async def delete_topic(cluster: Cluster, name: str) -> None:
    """Delete a topic and all of its records."""
    body = {"topics": [{"name": name}], "topic_names": [name], "timeout": cluster.timeout_ms}
    answer_was_lost = False

    async def ask() -> None:
        nonlocal answer_was_lost
        try:
            (result,) = (await cluster.to_controller("DeleteTopics", body)).responses
        except NodeUnavailable:
            answer_was_lost = True
            raise
        # A topic that is gone after a lost answer was deleted by the request that the answer was for.
        if not (answer_was_lost and result.error_code == ErrorCode.unknown_topic_or_partition):
            check(result.error_code, getattr(result, "error_message", None), f"deleting topic {name!r}")

    await cluster.retrying(ask)
    cluster.forget()


async def create_partitions(cluster: Cluster, topic: str, count: int) -> None:
    """Raise a topic's number of partitions to ``count``."""
    body = {
        "topics": [{"name": topic, "count": count, "assignments": None}],
        "timeout": cluster.timeout_ms,
        "validate_only": False,
    }

    async def ask() -> None:
        (result,) = (await cluster.to_controller("CreatePartitions", body)).results
        check(result.error_code, result.error_message, f"adding partitions to topic {topic!r}")

    await cluster.retrying(ask)
    cluster.forget()


# --- configs


async def describe_topic_configs(cluster: Cluster, topic: str) -> list[ConfigEntry]:
    """All configs of a topic, by name."""
    body = {
        "resources": [{"resource_type": _TOPIC_RESOURCE, "resource_name": topic, "configuration_keys": None}],
        "include_documentation": True,
    }

    async def ask() -> list[ConfigEntry]:
        (result,) = (await cluster.to_any("DescribeConfigs", body)).results
        check(result.error_code, result.error_message, f"the configs of topic {topic!r}")
        return _config_entries(result)

    return await cluster.retrying(ask)


async def describe_node_configs(cluster: Cluster, node_id: int, names: Iterable[str]) -> list[ConfigEntry]:
    """The named settings of a running node; those that it does not have are left out."""
    resource = {
        "resource_type": _NODE_RESOURCE,
        "resource_name": str(node_id),
        "configuration_keys": list(names),
    }

    async def ask() -> list[ConfigEntry]:
        connection = await cluster.connection(node_id)
        (result,) = (await connection.request("DescribeConfigs", {"resources": [resource]})).results
        check(result.error_code, result.error_message, f"the settings of node {node_id}")
        return _config_entries(result)

    return await cluster.retrying(ask)


def _config_entries(result: Any) -> list[ConfigEntry]:
    return [
        ConfigEntry(
            entry.name,
            entry.value,
            _CONFIG_SOURCES.get(entry.config_source, str(entry.config_source)),
            getattr(entry, "documentation", None),
        )
        for entry in sorted(result.configs, key=lambda entry: entry.name)
    ]


async def alter_topic_configs(
    cluster: Cluster, topic: str, *, to_set: Mapping[str, str], to_reset: Iterable[str] = ()
) -> None:
    """Set some configs of a topic and give others back to their defaults; all of it or nothing."""
    # Imported late: the table of all configs takes a while to load, and those who only read do not need it.
    from tidemill.config.topic import AlterOp

    changes: list[dict[str, Any]] = [
        {"name": name, "config_operation": AlterOp.SET, "value": value} for name, value in to_set.items()
    ]
    changes += [{"name": name, "config_operation": AlterOp.DELETE, "value": None} for name in to_reset]
    body = {
        "resources": [{"resource_type": _TOPIC_RESOURCE, "resource_name": topic, "configs": changes}],
        "validate_only": False,
    }

    async def ask() -> None:
        (result,) = (await cluster.to_controller("IncrementalAlterConfigs", body)).responses
        check(result.error_code, result.error_message, f"altering topic {topic!r}")

    await cluster.retrying(ask)


# --- offsets and records


async def list_offsets(
    cluster: Cluster, wanted: Mapping[TopicPartition, int], *, committed: bool = False
) -> dict[TopicPartition, OffsetAt]:
    """The offset of each partition at ``EARLIEST``, ``LATEST`` or a time in milliseconds.

    With ``committed`` the latest one is the last stable offset, behind which transactions may be open.
    """

    def body(partitions: Sequence[TopicPartition]) -> dict[str, Any]:
        topics = _by_topic(partitions, lambda each: {"partition_index": each[1], "timestamp": wanted[each]})
        return {
            "replica_id": -1,
            "isolation_level": 1 if committed else 0,
            "topics": topics,
            "timeout": cluster.timeout_ms,
        }

    found: dict[TopicPartition, OffsetAt] = {}

    def take(response: Any) -> None:
        for topic in response.topics:
            for entry in topic.partitions:
                check(entry.error_code, None, f"the offsets of {topic.name}-{entry.partition_index}")
                found[topic.name, entry.partition_index] = OffsetAt(
                    entry.offset, entry.timestamp, getattr(entry, "leader_epoch", -1)
                )

    await _ask_leaders(cluster, wanted, "ListOffsets", body, take)
    return found


async def epoch_ends(
    cluster: Cluster, epochs: Mapping[TopicPartition, int]
) -> dict[TopicPartition, EpochEnd]:
    """Where a leader epoch has ended in the log of each partition, by its leader (OffsetForLeaderEpoch)."""

    def body(partitions: Sequence[TopicPartition]) -> dict[str, Any]:
        topics = _by_topic(
            partitions,
            lambda each: {
                "partition": each[1],
                "current_leader_epoch": -1,
                "leader_epoch": epochs[each],
            },
            name="topic",
        )
        return {"replica_id": -1, "topics": topics}

    found: dict[TopicPartition, EpochEnd] = {}

    def take(response: Any) -> None:
        for topic in response.topics:
            for entry in topic.partitions:
                check(entry.error_code, None, f"the leader epochs of {topic.topic}-{entry.partition}")
                found[topic.topic, entry.partition] = EpochEnd(entry.leader_epoch, entry.end_offset)

    if epochs:
        await _ask_leaders(cluster, epochs, "OffsetForLeaderEpoch", body, take)
    return found


async def delete_records(cluster: Cluster, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Delete the records below an offset (-1: all) of each partition; gives the new log starts."""

    def body(partitions: Sequence[TopicPartition]) -> dict[str, Any]:
        topics = _by_topic(partitions, lambda each: {"partition_index": each[1], "offset": before[each]})
        return {"topics": topics, "timeout": cluster.timeout_ms}

    starts: dict[TopicPartition, int] = {}

    def take(response: Any) -> None:
        for topic in response.topics:
            for entry in topic.partitions:
                check(entry.error_code, None, f"deleting records of {topic.name}-{entry.partition_index}")
                starts[topic.name, entry.partition_index] = entry.low_watermark

    await _ask_leaders(cluster, before, "DeleteRecords", body, take)
    return starts


async def _ask_leaders(
    cluster: Cluster,
    partitions: Iterable[TopicPartition],
    name: str,
    body: Callable[[Sequence[TopicPartition]], dict[str, Any]],
    take: Callable[[Any], None],
) -> None:
    """Send each leader its share of ``partitions``; after a passing failure all are asked again."""

    async def ask() -> None:
        for node_id, led in (await cluster.leaders(partitions)).items():
            take(await (await cluster.connection(node_id)).request(name, body(led)))

    await cluster.retrying(ask)


def _by_topic(
    partitions: Sequence[TopicPartition],
    entry: Callable[[TopicPartition], dict[str, Any]],
    name: str = "name",
) -> list[dict[str, Any]]:
    topics: dict[str, list[dict[str, Any]]] = {}
    for each in partitions:
        topics.setdefault(each[0], []).append(entry(each))
    return [{name: topic, "partitions": entries} for topic, entries in topics.items()]


# --- the cluster


async def describe_cluster(cluster: Cluster) -> ClusterDescription:
    """The cluster's name and nodes."""

    async def ask() -> ClusterDescription:
        response = await cluster.to_any("DescribeCluster", {})
        check(response.error_code, response.error_message, "describing the cluster")
        nodes = {node.broker_id: Address(node.host, node.port) for node in response.brokers}
        cluster.nodes |= nodes
        return ClusterDescription(response.cluster_id, response.controller_id, nodes)

    return await cluster.retrying(ask)


async def describe_log_directories(cluster: Cluster) -> list[LogDirectory]:
    """The data directories of all nodes."""

    async def ask() -> list[LogDirectory]:
        found: list[LogDirectory] = []
        for node_id in (await describe_cluster(cluster)).nodes:
            connection = await cluster.connection(node_id)
            response = await connection.request("DescribeLogDirs", {"topics": None})
            check(getattr(response, "error_code", 0), None, f"the data directories of node {node_id}")
            found += [_log_directory(node_id, result) for result in response.results]
        return found

    return await cluster.retrying(ask)


def _log_directory(node_id: int, result: Any) -> LogDirectory:
    return LogDirectory(
        node_id,
        result.log_dir,
        None if result.error_code == ErrorCode.none else result.error_code.name,
        getattr(result, "total_bytes", -1),
        getattr(result, "usable_bytes", -1),
        {
            (topic.name, partition.partition_index): partition.partition_size
            for topic in result.topics
            for partition in topic.partitions
        },
    )
