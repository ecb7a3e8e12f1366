"""Limits of metadata and replica placement: Kafka's rules. Pure.

A new topic's partitions go round the nodes, starting with the node that holds the fewest replicas. With
each full round the followers of a leader shift by one node, so that a failing leader's load spreads over
all the others.

Replicas go to nodes that are live and that no operator takes out. Those of one partition are spread over
racks, and over machines within a rack. Racks count only if every node names one.
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
    "OFFLINE_TAGS",
    "ControlLimits",
    "check_assignments",
    "check_counts",
    "check_node_limits",
    "check_partition_limit",
    "place_replicas",
    "placeable_nodes",
)

OFFLINE_TAGS = frozenset({"PERMANENT_OFFLINE", "TEMPORARY_OFFLINE"})
"""Tags of nodes that get no new replicas and, if there is another, no leaderships."""

PARTITIONS_PER_TOPIC_CEILING = 50_000
_REPLICAS_MAX = 100
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
        # Not all of very many: a request may name as many as it has room for.
        unknown = [node_id for node_id in replicas[:_REPLICAS_MAX] if node_id not in nodes]
        if not replicas:
            problem = "has no replicas"
        elif len(replicas) > _REPLICAS_MAX:
            problem = f"names {len(replicas)} nodes, {_REPLICAS_MAX} are the most"
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
    if replication > len(nodes := placeable_nodes(image)):
        raise ApiError(
            ErrorCode.invalid_replication_factor,
            f"topic {name!r} cannot have {replication} replicas: {len(image.nodes)} nodes are registered, and"
            f" {len(nodes)} of them can take replicas now",
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


def placeable_nodes(image: MetadataImage) -> list[int]:
    """The nodes that new replicas can go to, the one with the fewest replicas first."""
    nodes = (
        node_id for node_id in image.live_nodes if OFFLINE_TAGS.isdisjoint(image.node_tags.get(node_id, ()))
    )
    return sorted(nodes, key=lambda node_id: (image.replica_counts.get(node_id, 0), node_id))


def place_replicas(
    image: MetadataImage, first: int, count: int, replication: int
) -> tuple[tuple[int, ...], ...]:
    """Replicas for ``count`` partitions from ``first`` on; ``check_counts`` says whether there are enough."""
    nodes = placeable_nodes(image)
    racks, machines = _domains(image, nodes)
    if len({*racks.values()}) in (1, len(nodes)) and len({*machines.values()}) == len(nodes):
        return tuple(_replicas(nodes, index, replication) for index in range(first, first + count))
    nodes = _interleaved(_interleaved(nodes, machines), racks)
    # The same round comes again and again.
    rounds: dict[int, tuple[int, ...]] = {}
    period = len(nodes) * max(1, len(nodes) - 1)
    placed = []
    for index in range(first, first + count):
        replicas = rounds.get(index % period)
        if replicas is None:
            order = _replicas(nodes, index, len(nodes))
            replicas = rounds[index % period] = _spread(order, replication, racks, machines)
        placed.append(replicas)
    return tuple(placed)


def _domains(image: MetadataImage, nodes: list[int]) -> tuple[dict[int, str], dict[int, str]]:
    """Rack and machine of each node. If one has no rack, racks do not count, as in Kafka."""
    found = [image.nodes[node_id] for node_id in nodes]
    with_racks = all(node.rack is not None for node in found)
    racks = {node.id: (node.rack or "") if with_racks else "" for node in found}
    # A machine's name cannot begin with a space, so a node that names none is on one of its own.
    machines = {node.id: node.machine or f" {node.id}" for node in found}
    return racks, machines


def _interleaved(nodes: list[int], domains: dict[int, str]) -> list[int]:
    """The nodes so that neighbours are in different domains as far as possible; else their order stays."""
    turns: Counter[str] = Counter()
    ranked = []
    for position, node_id in enumerate(nodes):
        ranked.append((turns[domains[node_id]], position, node_id))
        turns[domains[node_id]] += 1
    return [node_id for _, _, node_id in sorted(ranked)]


def _spread(
    order: tuple[int, ...], replication: int, racks: dict[int, str], machines: dict[int, str]
) -> tuple[int, ...]:
    """The first node of ``order`` and others of it: on new racks, then on new machines, then by order."""
    chosen = [order[0]]
    while len(chosen) < replication:
        used_racks = [racks[node_id] for node_id in chosen]
        used_machines = [machines[node_id] for node_id in chosen]
        rest = [node_id for node_id in order if node_id not in chosen]
        costs = [(used_racks.count(racks[n]), used_machines.count(machines[n])) for n in rest]
        chosen.append(rest[costs.index(min(costs))])
    return tuple(chosen)


def _replicas(nodes: list[int], index: int, replication: int) -> tuple[int, ...]:
    leader, shift = index % len(nodes), index // len(nodes)
    others = len(nodes) - 1
    followers = [nodes[(leader + 1 + (shift + j) % others) % len(nodes)] for j in range(replication - 1)]
    return (nodes[leader], *followers)
