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
