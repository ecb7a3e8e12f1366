"""The health of a cluster: which word, and which reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidemill.cli.cluster.health import Finding, Health, assess, level_of
from tidemill.client.admin.replicas import ClusterView, NodeView
from tidemill.client.cluster import PartitionInfo, TopicInfo
from tidemill.config.values import Address


def node(node_id: int, state: str = "live") -> NodeView:
    address = Address("h", 9092 + node_id)
    return NodeView(node_id, f"n{node_id}", address, address, None, "m", state, 0)


def view(*nodes: NodeView, controller: int = 1) -> ClusterView:
    return ClusterView(1, True, controller, 7, 9, (), {each.node_id: each for each in nodes})


def topic(*partitions: PartitionInfo, name: str = "t") -> TopicInfo:
    return TopicInfo(name, None, False, partitions)


def partition(index: int, leader: int, isr: tuple[int, ...], replicas: tuple[int, ...]) -> PartitionInfo:
    return PartitionInfo(index, leader, 1, replicas, isr, ())


WELL = view(node(1), node(2))
GOOD = topic(partition(0, 1, (1, 2), (1, 2)))


def test_a_cluster_without_findings_is_green() -> None:
    assert assess(WELL, [GOOD], {1: (), 2: ()}, {}) == []
    assert level_of([]) is Health.GREEN


@pytest.mark.parametrize(
    ("seen", "topics", "problems", "unreachable", "reason"),
    [
        (WELL, [topic(partition(3, 1, (1,), (1, 2)))], {}, {}, "t-3 (1 of 2)"),
        (view(node(1), node(2, "down")), [GOOD], {}, {}, "node 2 (n2) is down"),
        (view(node(1), node(2, "joining")), [GOOD], {}, {}, "node 2 (n2) runs, and the controller has not"),
        (replace(WELL, controller_id=-1), [GOOD], {}, {}, "there is no controller"),
        (WELL, [GOOD], {1: ("etcd does not answer: x",)}, {}, "node 1 (n1): etcd does not answer"),
        (WELL, [GOOD], {}, {2: "connection refused"}, "node 2 (n2) cannot be asked: connection refused"),
    ],
)
def test_what_is_not_as_it_should_be_is_yellow(
    seen: ClusterView,
    topics: list[TopicInfo],
    problems: dict[int, tuple[str, ...]],
    unreachable: dict[int, str],
    reason: str,
) -> None:
    (finding,) = assess(seen, topics, problems, unreachable)
    assert finding.level is Health.YELLOW
    assert reason in finding.reason


def test_a_partition_without_a_leader_is_red_and_comes_first() -> None:
    topics = [topic(partition(0, 1, (1,), (1, 2)), partition(1, -1, (2,), (1, 2)))]
    found = assess(view(node(1), node(2, "down")), topics, {}, {})
    assert [each.level for each in found] == [Health.RED, Health.YELLOW, Health.YELLOW]
    assert "1 partition without a leader: t-1" in found[0].reason
    assert level_of(found) is Health.RED


def test_what_several_nodes_say_is_told_once() -> None:
    (finding,) = assess(WELL, [GOOD], {1: ("no leader",), 2: ("no leader",)}, {})
    assert finding == Finding(Health.YELLOW, "node 1 (n1), node 2 (n2): no leader")


def test_of_many_partitions_only_the_first_are_named() -> None:
    many = topic(*(partition(index, -1, (1,), (1,)) for index in range(9)))
    (finding,) = assess(WELL, [many], {}, {})
    assert "9 partitions without a leader: t-0, t-1, t-2, t-3, t-4 and 4 more" in finding.reason
