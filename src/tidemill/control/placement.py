"""Limits of metadata and replica placement: Kafka's rules. Pure.

A new topic's partitions go round the nodes, starting with the node that holds the fewest replicas. With
each full round the followers of a leader shift by one node, so that a failing leader's load spreads over
all the others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill.errors import ApiError, ConfigError, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from tidemill.control.image import MetadataImage

__all__ = (
    "ControlLimits",
    "check_assignments",
    "check_counts",
    "check_node_limits",
    "check_partition_limit",
    "place_replicas",
)


PARTITIONS_PER_TOPIC_CEILING = 50_000
"""Above this, changing all partitions of a topic would not fit into one transaction of the store."""


@dataclass(frozen=True, slots=True)
class ControlLimits:
    """Limits of metadata. A partition costs a node files, memory and time at start."""

    partitions_per_topic: int = 10_000
    partitions_per_node: int = 20_000

    def __post_init__(self) -> None:
        if not 1 <= self.partitions_per_topic <= PARTITIONS_PER_TOPIC_CEILING:
            raise ConfigError(
                f"the limit of partitions per topic is {self.partitions_per_topic}; it must be from 1 to"
                f" {PARTITIONS_PER_TOPIC_CEILING}"
            )


def check_assignments(
    assignments: tuple[tuple[int, ...], ...], nodes: Container[int], replication: int | None = None
) -> None:
    """Raise ``ApiError`` unless each partition is on the same number of different, known nodes."""
    if not assignments:
        raise ApiError(
            ErrorCode.invalid_replica_assignment, "no partition is assigned; give replicas for each"
        )
    expected = len(assignments[0]) if replication is None else replication
    for index, replicas in enumerate(assignments):
        unknown = [node_id for node_id in replicas if node_id not in nodes]
        if not replicas:
            problem = "has no replicas"
        elif len(set(replicas)) != len(replicas):
            problem = f"names a node twice: {list(replicas)}"
        elif unknown:
            problem = f"names nodes that are not registered: {unknown}"
        elif len(replicas) != expected:
            problem = f"has {len(replicas)} replicas where the others have {expected}"
        else:
            continue
        raise ApiError(ErrorCode.invalid_replica_assignment, f"assignment {index} {problem}")


def check_counts(name: str, count: int, replication: int, image: MetadataImage) -> None:
    """Raise ``ApiError`` unless there can be that many partitions with that many replicas."""
    if replication < 1:
        raise ApiError(
            ErrorCode.invalid_replication_factor,
            f"topic {name!r} cannot have {replication} replicas; ask for 1 or more",
        )
    if count < 1:
        raise ApiError(
            ErrorCode.invalid_partitions, f"topic {name!r} cannot have {count} partitions; ask for 1 or more"
        )
    if replication > len(image.nodes):
        raise ApiError(
            ErrorCode.invalid_replication_factor,
            f"topic {name!r} cannot have {replication} replicas: {len(image.nodes)} nodes are registered",
        )


def check_partition_limit(name: str, count: int, limits: ControlLimits) -> None:
    """Raise ``ApiError`` if a topic would have too many partitions."""
    if count > limits.partitions_per_topic:
        raise ApiError(
            ErrorCode.invalid_partitions,
            f"topic {name!r} cannot have {count} partitions: the limit is {limits.partitions_per_topic}",
        )


def check_node_limits(
    name: str, assignments: Iterable[tuple[int, ...]], image: MetadataImage, limits: ControlLimits
) -> None:
    """Raise ``ApiError`` if a node would hold too many partitions."""
    added = Counter(node_id for replicas in assignments for node_id in replicas)
    for node_id, count in sorted(added.items()):
        have = image.replica_counts.get(node_id, 0)
        if have + count > limits.partitions_per_node:
            raise ApiError(
                ErrorCode.policy_violation,
                f"{count} partitions of topic {name!r} do not fit on node {node_id}: it has {have}, the limit"
                f" is {limits.partitions_per_node}; delete topics or ask for fewer partitions",
            )


def place_replicas(
    image: MetadataImage, first: int, count: int, replication: int
) -> tuple[tuple[int, ...], ...]:
    """Replicas for ``count`` partitions from ``first`` on. ``replication`` is at most the number of nodes."""
    nodes = sorted(image.nodes, key=lambda node_id: (image.replica_counts.get(node_id, 0), node_id))
    return tuple(_replicas(nodes, index, replication) for index in range(first, first + count))


def _replicas(nodes: list[int], index: int, replication: int) -> tuple[int, ...]:
    leader, shift = index % len(nodes), index // len(nodes)
    others = len(nodes) - 1
    followers = [nodes[(leader + 1 + (shift + j) % others) % len(nodes)] for j in range(replication - 1)]
    return (nodes[leader], *followers)
