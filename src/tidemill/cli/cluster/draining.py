"""Where leaderships and replicas go when a node is drained. Pure.

Both are moves in Kafka's sense: a partition gets a new list of replicas, whose first one is the preferred
leader. A list with the same nodes in another order moves nothing but the leadership.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidemill.client.cluster import PartitionInfo, TopicInfo, TopicPartition

__all__ = ("DRAINED", "DrainPlan", "plan_leaderships", "plan_replicas")


#: The tag of a node whose replicas are moved away for good: it gets no new ones.
DRAINED: Final = "PERMANENT_OFFLINE"


@dataclass(frozen=True, slots=True)
class DrainPlan:
    """The new replicas of partitions, and the partitions that cannot leave the node, with the reason."""

    targets: dict[TopicPartition, tuple[int, ...]] = field(default_factory=dict)
    stuck: dict[TopicPartition, str] = field(default_factory=dict)


def plan_leaderships(topics: Sequence[TopicInfo], node_id: int, live: frozenset[int]) -> DrainPlan:
    """Have others lead what ``node_id`` leads or is preferred for; it stays a follower."""
    plan = DrainPlan()
    for topic in topics:
        for each in topic.partitions:
            if each.leader == node_id or each.replicas[0] == node_id:
                key = topic.name, each.index
                others = _able_to_lead(each, node_id, live)
                if others:
                    plan.targets[key] = _ordered(each.replicas, others, last=node_id)
                elif each.leader == node_id:
                    plan.stuck[key] = _why_nobody_leads(each, node_id)
    return plan


def plan_replicas(
    topics: Sequence[TopicInfo],
    node_id: int,
    live: frozenset[int],
    racks: Mapping[int, str | None],
    *,
    drained: frozenset[int] = frozenset(),
) -> DrainPlan:
    """Give each replica of ``node_id`` to a live node: in another rack if possible, with few replicas.

    Nodes that are ``drained``, too, take none.
    """
    plan = DrainPlan()
    load = Counter(holder for topic in topics for each in topic.partitions for holder in each.replicas)
    for topic in topics:
        for each in topic.partitions:
            if node_id not in each.replicas:
                continue
            key = topic.name, each.index
            free = live - {*each.replicas} - {node_id} - drained
            if not free:
                plan.stuck[key] = (
                    f"it has {len(each.replicas)} replicas, and no other live node that has none of it"
                )
                continue
            stay = [holder for holder in each.replicas if holder != node_id]
            used = {racks.get(holder) for holder in stay} - {None}
            taker = min(free, key=lambda other: (racks.get(other) in used, load[other], other))
            load[taker] += 1
            leaders = _able_to_lead(each, node_id, live)
            plan.targets[key] = _ordered((*stay, taker), leaders, last=None)
    return plan


def _able_to_lead(partition: PartitionInfo, node_id: int, live: frozenset[int]) -> list[int]:
    return [
        holder
        for holder in partition.replicas
        if holder != node_id and holder in live and holder in partition.isr
    ]


def _ordered(replicas: Sequence[int], first: Sequence[int], *, last: int | None) -> tuple[int, ...]:
    rest = [each for each in replicas if each not in first and each != last]
    return (*first, *rest, *(() if last is None else (last,)))


def _why_nobody_leads(partition: PartitionInfo, node_id: int) -> str:
    if len(partition.replicas) == 1:
        return "it has one replica; move it with --replicas"
    others = ", ".join(str(each) for each in partition.replicas if each != node_id)
    return f"no other replica is in sync and live (the others are on {others})"
