"""The range assignor, and the bytes of the consumer protocol."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.client.consuming.assignment import pack_assignment, parse_assignment, range_assignment
from tidemill.wire.consumer_protocol import pack_subscription, parse_subscription

topics = st.sampled_from(["a", "b", "c", "ü"])
partitions = st.tuples(topics, st.integers(0, 1000))


@given(st.sets(partitions))
def test_assignment_survives_its_bytes(given_partitions: set[tuple[str, int]]) -> None:
    assert parse_assignment(pack_assignment(given_partitions)) == tuple(sorted(given_partitions))


@given(st.sets(topics))
def test_subscription_is_read_by_the_coordinator(names: set[str]) -> None:
    assert parse_subscription(pack_subscription(names)) == names


@given(st.binary())
def test_bytes_that_are_no_assignment_give_no_error(data: bytes) -> None:
    parse_assignment(data)


def test_empty_assignment_of_a_rebalancing_group_is_no_partition() -> None:
    assert parse_assignment(b"") == ()


def test_ranges_are_contiguous_and_the_first_members_take_the_rest() -> None:
    assignment = range_assignment({"m2": ["t"], "m1": ["t"], "m3": ["t"]}, {"t": 7})
    assert [[index for _, index in assignment[member]] for member in ("m1", "m2", "m3")] == [
        [0, 1, 2],
        [3, 4],
        [5, 6],
    ]


def test_member_gets_only_topics_that_it_subscribed_to() -> None:
    assignment = range_assignment({"m1": ["a"], "m2": ["a", "b"]}, {"a": 2, "b": 2})
    assert assignment == {"m1": [("a", 0)], "m2": [("a", 1), ("b", 0), ("b", 1)]}


def test_topic_that_does_not_exist_is_assigned_to_nobody() -> None:
    assert range_assignment({"m1": ["gone"]}, {}) == {"m1": []}


@given(
    st.dictionaries(st.text("xyz", min_size=1, max_size=3), st.sets(topics), min_size=1),
    st.dictionaries(topics, st.integers(0, 20)),
)
def test_every_partition_of_a_wanted_topic_goes_to_exactly_one_member(
    subscriptions: dict[str, set[str]], counts: dict[str, int]
) -> None:
    assignment = range_assignment(subscriptions, counts)
    given_out = [partition for each in assignment.values() for partition in each]
    wanted = set().union(*subscriptions.values())
    assert sorted(given_out) == sorted(
        (topic, index) for topic in wanted for index in range(counts.get(topic, 0))
    )
    for member, assigned in assignment.items():
        assert {topic for topic, _ in assigned} <= subscriptions[member]
