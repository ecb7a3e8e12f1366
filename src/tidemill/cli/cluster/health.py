"""The health of a cluster in one word, and the reasons in words. Pure.

====== ====================================================================================================
GREEN  every replica is in sync, every node is live, no node names a problem
YELLOW every partition has a leader, and something is not as it should be: a replica is not in sync, a node
       is down, etcd does not answer. Some writes may be refused: those with acks=all where fewer replicas are
       in sync than min.insync.replicas
RED    a partition has no leader: nobody can write or read it
====== ====================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidemill.client.admin.replicas import ClusterView
    from tidemill.client.cluster import PartitionInfo, TopicInfo

__all__ = ("Finding", "Health", "assess", "level_of")

_NAMED_MAX: Final = 5


class Health(IntEnum):
    """How well a cluster is; the value is the exit code of ``tidemill cluster status``."""

    GREEN = 0
    YELLOW = 1
    RED = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be."""

    level: Health
    reason: str


def level_of(findings: Sequence[Finding]) -> Health:
    """The health of a cluster with these findings."""
    return max((finding.level for finding in findings), default=Health.GREEN)


def assess(
    view: ClusterView,
    topics: Sequence[TopicInfo],
    problems: Mapping[int, Sequence[str]],
    unreachable: Mapping[int, str],
) -> list[Finding]:
    """List the problems of a cluster, the worst first.

    ``view`` is the cluster as one node sees it. ``problems`` is what each node says is wrong, and
    ``unreachable`` why a node that is live could not be asked.
    """
    found = [
        *_partitions(topics),
        *_nodes(view),
        *(
            Finding(Health.YELLOW, f"{_name(view, node_id)} cannot be asked: {why}")
            for node_id, why in unreachable.items()
        ),
        *_problems(view, problems),
    ]
    return sorted(found, key=lambda finding: -finding.level)


def _partitions(topics: Sequence[TopicInfo]) -> Iterator[Finding]:
    named = [(f"{topic.name}-{each.index}", each) for topic in topics for each in topic.partitions]
    leaderless = [name for name, each in named if each.leader < 0]
    behind = [(name, each) for name, each in named if each.leader >= 0 and _is_behind(each)]
    if leaderless:
        yield Finding(
            Health.RED,
            f"{_count(leaderless, 'partition')} without a leader: {_first(leaderless)}; start the nodes that "
            "hold them, or see 'tidemill cluster elect --help'",
        )
    if behind:
        some = [f"{name} ({len(each.isr)} of {len(each.replicas)})" for name, each in behind]
        yield Finding(
            Health.YELLOW, f"{_count(some, 'partition')} with replicas that are not in sync: {_first(some)}"
        )


def _is_behind(partition: PartitionInfo) -> bool:
    return len(partition.isr) < len(partition.replicas)


def _nodes(view: ClusterView) -> Iterator[Finding]:
    states = {
        "down": "is down: it has no session; start it, or drain and remove it",
        "joining": "runs, and the controller has not admitted it yet",
    }
    for node in view.nodes.values():
        if node.state in states:
            yield Finding(Health.YELLOW, f"{_name(view, node.node_id)} {states[node.state]}")
    if view.controller_id < 0:
        yield Finding(
            Health.YELLOW,
            "there is no controller: no leader can be elected until there is one; look whether etcd answers",
        )


def _problems(view: ClusterView, problems: Mapping[int, Sequence[str]]) -> Iterator[Finding]:
    """What nodes say, each sentence once: those about the cluster are told by several."""
    told_by: dict[str, list[str]] = {}
    for node_id, sentences in sorted(problems.items()):
        for sentence in sentences:
            told_by.setdefault(sentence, []).append(_name(view, node_id))
    for sentence, names in told_by.items():
        yield Finding(Health.YELLOW, f"{', '.join(names)}: {sentence}")


def _name(view: ClusterView, node_id: int) -> str:
    node = view.nodes.get(node_id)
    return f"node {node_id}" if node is None else f"node {node_id} ({node.name})"


def _count(items: Sequence[object], word: str) -> str:
    return f"{len(items)} {word}{'' if len(items) == 1 else 's'}"


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(names[:_NAMED_MAX]) + more
