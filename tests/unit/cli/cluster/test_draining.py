"""Draining a node: who leads, and who holds replicas afterwards; what cannot move, and why."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.cli.cluster.draining import plan_leaderships, plan_replicas
from tidemill.client.cluster import PartitionInfo, TopicInfo

LIVE = frozenset({1, 2, 3, 4})
NO_RACKS: dict[int, str | None] = {}


def topic(*placed: tuple[int, tuple[int, ...], tuple[int, ...]]) -> TopicInfo:
    """A topic of partitions (leader, replicas, isr)."""
    partitions = (
        PartitionInfo(index, leader, 1, replicas, isr, ())
        for index, (leader, replicas, isr) in enumerate(placed)
    )
    return TopicInfo("t", None, False, tuple(partitions))


def test_a_leadership_goes_to_an_in_sync_live_replica_and_does_not_come_back() -> None:
    plan = plan_leaderships([topic((1, (1, 2, 3), (1, 3)))], 1, LIVE)
    assert plan.targets == {("t", 0): (3, 2, 1)}
    assert plan.stuck == {}


def test_a_preferred_leader_that_follows_gives_up_its_place() -> None:
    assert plan_leaderships([topic((2, (1, 2), (1, 2)))], 1, LIVE).targets == {("t", 0): (2, 1)}


def test_what_others_lead_is_left_alone() -> None:
    assert plan_leaderships([topic((2, (2, 1), (1, 2)))], 1, LIVE).targets == {}


def test_what_nobody_else_can_lead_is_named_with_the_reason() -> None:
    plan = plan_leaderships([topic((1, (1,), (1,)), (1, (1, 2), (1,)), (1, (1, 5), (1, 5)))], 1, LIVE)
    assert plan.targets == {}
    assert "one replica; move it with --replicas" in plan.stuck["t", 0]
    assert "no other replica is in sync and live (the others are on 2)" in plan.stuck["t", 1]
    assert "(the others are on 5)" in plan.stuck["t", 2]


def test_a_replica_goes_to_the_node_that_holds_least() -> None:
    plan = plan_replicas([topic((1, (1, 2), (1, 2)), (2, (2, 3), (2, 3)))], 1, LIVE, NO_RACKS)
    assert plan.targets == {("t", 0): (2, 4)}


def test_replicas_are_kept_in_different_racks_if_possible() -> None:
    racks: dict[int, str | None] = {1: "a", 2: "b", 3: "b", 4: "c"}
    placed = topic((1, (1, 2), (1, 2)), (4, (4,), (4,)), (4, (4,), (4,)))
    assert plan_replicas([placed], 1, LIVE, racks).targets == {("t", 0): (2, 4)}


def test_a_node_that_is_drained_too_takes_nothing() -> None:
    placed = [topic((1, (1, 2), (1, 2)), (2, (2, 3), (2, 3)))]
    plan = plan_replicas(placed, 1, LIVE, NO_RACKS, drained=frozenset({1, 4}))
    assert plan.targets == {("t", 0): (2, 3)}


def test_a_replica_that_no_other_node_can_take_is_named() -> None:
    plan = plan_replicas([topic((1, (1, 2), (1, 2)))], 1, frozenset({1, 2}), NO_RACKS)
    assert plan.stuck == {("t", 0): "it has 2 replicas, and no other live node that has none of it"}


@st.composite
def clusters(draw: st.DrawFn) -> tuple[TopicInfo, frozenset[int]]:
    nodes = st.integers(1, 6)
    placed = []
    for _ in range(draw(st.integers(1, 6))):
        replicas = tuple(draw(st.lists(nodes, min_size=1, max_size=4, unique=True)))
        isr = tuple(draw(st.lists(st.sampled_from(replicas), min_size=1, unique=True)))
        placed.append((draw(st.sampled_from((*isr, -1))), replicas, isr))
    return topic(*placed), draw(st.frozensets(nodes))


@given(clusters(), st.integers(1, 6))
def test_a_plan_keeps_the_number_of_replicas_and_leaves_nothing_out(
    cluster: tuple[TopicInfo, frozenset[int]], node_id: int
) -> None:
    placed, live = cluster
    leaderships, replicas = (
        plan_leaderships([placed], node_id, live),
        plan_replicas([placed], node_id, live, NO_RACKS),
    )
    for each in placed.partitions:
        key = "t", each.index
        if each.leader == node_id:
            assert (key in leaderships.targets) != (key in leaderships.stuck)
        if key in leaderships.targets:
            target = leaderships.targets[key]
            assert sorted(target) == sorted(each.replicas)
            assert target[0] != node_id
            assert target[0] in live & {*each.isr}
        assert (node_id in each.replicas) == ((key in replicas.targets) or (key in replicas.stuck))
        if key in replicas.targets:
            target = replicas.targets[key]
            assert len({*target}) == len(target) == len(each.replicas)
            assert node_id not in target
            assert {*target} - {*each.replicas} <= live
