from __future__ import annotations

from collections import Counter
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.config.topic_names import check_topic_name
from tidemill.control.image import MetadataImage, NodeImage
from tidemill.control.placement import ControlLimits, check_assignments, place_replicas
from tidemill.errors import ApiError, ConfigError, ErrorCode


def image_with_nodes(count: int, replica_counts: dict[int, int] | None = None) -> MetadataImage:
    nodes = {i: NodeImage(i, f"n{i}", "localhost", 9092, None, UUID(int=i)) for i in range(count)}
    return MetadataImage(nodes=nodes, replica_counts=replica_counts or {})


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 249, "...", "__consumer_offsets"])
def test_names_that_kafka_accepts(name: str) -> None:
    check_topic_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "x" * 250, "a b", "a/b", "ü", "a\n", "a:b"])
def test_names_that_kafka_refuses(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_topic_name(name)
    assert caught.value.code is ErrorCode.invalid_topic_exception


@pytest.mark.parametrize(
    "assignments",
    [(), ((),), ((0, 0),), ((0,), (9,)), ((0, 1), (1,))],
    ids=["none", "no replicas", "node twice", "unknown node", "uneven"],
)
def test_assignments_that_kafka_refuses(assignments: Any) -> None:
    with pytest.raises(ApiError) as caught:
        check_assignments(assignments, {0, 1, 2})
    assert caught.value.code is ErrorCode.invalid_replica_assignment


@given(st.integers(1, 7), st.integers(0, 50), st.integers(1, 60), st.data())
def test_replicas_are_different_nodes_and_leaders_are_spread_evenly(
    nodes: Any, first: int, count: int, data: Any
) -> None:
    replication = data.draw(st.integers(1, nodes))
    placed = place_replicas(image_with_nodes(nodes), first, count, replication)
    assert len(placed) == count
    assert all(len(set(replicas)) == replication for replicas in placed)
    check_assignments(placed, range(nodes), replication)
    leaders = Counter(replicas[0] for replicas in placed)
    assert max(leaders.values()) - min(leaders[node] for node in range(nodes)) <= 1


def test_followers_of_one_leader_are_spread_over_the_others() -> None:
    placed = place_replicas(image_with_nodes(4), 0, 12, 2)
    assert {replicas[1] for replicas in placed if replicas[0] == 0} == {1, 2, 3}


def test_a_topic_starts_on_the_emptiest_node() -> None:
    assert place_replicas(image_with_nodes(3, {0: 5, 1: 2, 2: 9}), 0, 1, 1) == ((1,),)


@pytest.mark.parametrize("partitions", [0, 50_001])
def test_a_limit_that_the_store_could_not_hold_is_refused(partitions: int) -> None:
    with pytest.raises(ConfigError, match="partitions per topic"):
        ControlLimits(partitions_per_topic=partitions)


def cluster(*nodes: tuple[str | None, str], counts: dict[int, int] | None = None) -> MetadataImage:
    """An image of nodes 0, 1, ... with these racks and machines."""
    images = {
        i: NodeImage(i, f"n{i}", "h", 1, rack, UUID(int=i), machine=machine)
        for i, (rack, machine) in enumerate(nodes)
    }
    return MetadataImage(nodes=images, replica_counts=counts or {})


@given(st.lists(st.sampled_from("abc"), min_size=3, max_size=9), st.integers(0, 20), st.integers(1, 40))
def test_replicas_of_a_partition_are_on_as_many_racks_as_there_are(
    racks: list[str], first: int, count: int
) -> None:
    image = cluster(*((rack, "") for rack in racks))
    for replicas in place_replicas(image, first, count, 3):
        assert len({*replicas}) == 3
        assert len({racks[node] for node in replicas}) == min(3, len({*racks}))


@given(st.lists(st.sampled_from("ab"), min_size=2, max_size=8), st.integers(1, 60))
def test_leaders_go_round_also_with_racks(racks: list[str], count: int) -> None:
    image = cluster(*((rack, "") for rack in racks))
    leaders = Counter(replicas[0] for replicas in place_replicas(image, 0, count, 2))
    assert max(leaders.values()) - min(leaders[node] for node in range(len(racks))) <= 1


def test_within_racks_replicas_are_spread_over_machines() -> None:
    # Two racks of two machines of two nodes each.
    image = cluster(*((rack, f"{rack}{machine}") for rack in "ab" for machine in (1, 2) for _ in (1, 2)))
    for replicas in place_replicas(image, 0, 56, 4):
        nodes = [image.nodes[node] for node in replicas]
        assert Counter(node.rack for node in nodes) == {"a": 2, "b": 2}
        assert len({node.machine for node in nodes}) == 4


def test_without_racks_machines_count_alone() -> None:
    image = cluster((None, "m"), (None, "m"), (None, "n"))
    for replicas in place_replicas(image, 0, 12, 2):
        assert {image.nodes[node].machine for node in replicas} == {"m", "n"}


def test_racks_do_not_count_if_a_node_has_none() -> None:
    mixed = cluster(("a", ""), ("a", ""), (None, ""))
    without = cluster((None, ""), (None, ""), (None, ""))
    assert place_replicas(mixed, 0, 12, 2) == place_replicas(without, 0, 12, 2)


def test_with_racks_a_topic_starts_on_the_emptiest_node_too() -> None:
    image = cluster(("a", ""), ("a", ""), ("b", ""), counts={0: 5, 1: 2, 2: 9})
    assert place_replicas(image, 0, 1, 1) == ((1,),)
