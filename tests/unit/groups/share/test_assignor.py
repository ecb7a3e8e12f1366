"""The simple assignor: every partition is read, members are spread, and who has something keeps it."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from tidemill.groups.share.assignor import assign_partitions

T, U = UUID(int=1), UUID(int=2)


def counts(assignment: dict[str, frozenset[tuple[UUID, int]]]) -> Counter[tuple[UUID, int]]:
    return Counter(partition for taken in assignment.values() for partition in taken)


def test_fewer_members_than_partitions_share_them_out() -> None:
    found = assign_partitions({"a": frozenset({T}), "b": frozenset({T})}, {T: range(5)}, {})
    assert sorted(len(taken) for taken in found.values()) == [2, 3]
    assert counts(found) == {(T, index): 1 for index in range(5)}


def test_more_members_than_partitions_are_spread_over_them() -> None:
    members = [f"m{number}" for number in range(7)]
    found = assign_partitions(dict.fromkeys(members, frozenset({T})), {T: range(3)}, {})
    assert all(found[member] for member in members)
    assert set(counts(found).values()) == {3}


def test_one_partition_is_read_by_all() -> None:
    members = [f"m{number}" for number in range(50)]
    found = assign_partitions(dict.fromkeys(members, frozenset({T})), {T: [0]}, {})
    assert set(found.values()) == {frozenset({(T, 0)})}


def test_a_topic_is_read_by_its_subscribers_only() -> None:
    wanted = {"a": frozenset({T}), "b": frozenset({U}), "c": frozenset({T, U})}
    found = assign_partitions(wanted, {T: range(4), U: range(2)}, {})
    for member, topics in wanted.items():
        assert {topic for topic, _ in found[member]} == topics
    assert len(counts(found)) == 6


def test_a_member_that_leaves_takes_nothing_from_others() -> None:
    three = dict.fromkeys("abc", frozenset({T}))
    before = assign_partitions(three, {T: range(9)}, {})
    after = assign_partitions(dict.fromkeys("ab", frozenset({T})), {T: range(9)}, before)
    assert before["a"] <= after["a"]
    assert before["b"] <= after["b"]
    assert assign_partitions(three, {T: range(9)}, before) == before


IDS = [UUID(int=number) for number in range(1, 4)]
SUBSCRIPTIONS = st.dictionaries(
    st.sampled_from("abcdefghij"), st.frozensets(st.sampled_from(IDS), max_size=3), min_size=1
)
PARTITIONS = st.dictionaries(st.sampled_from(IDS), st.frozensets(st.integers(0, 6), max_size=7))


@given(SUBSCRIPTIONS, PARTITIONS, st.lists(st.tuples(SUBSCRIPTIONS, PARTITIONS), max_size=3))
def test_whatever_came_before_all_is_covered_and_even(
    subscriptions: dict[str, frozenset[UUID]],
    partitions: dict[UUID, frozenset[int]],
    before: list[tuple[dict[str, frozenset[UUID]], dict[UUID, frozenset[int]]]],
) -> None:
    current: dict[str, frozenset[tuple[UUID, int]]] = {}
    for earlier in before:
        current = assign_partitions(*earlier, current)
    found = assign_partitions(subscriptions, partitions, current)
    assert found.keys() == subscriptions.keys()
    for member, taken in found.items():
        assert all(topic in subscriptions[member] and index in partitions[topic] for topic, index in taken)
    read = counts(found)
    for topic, indexes in partitions.items():
        subscribers = [member for member, topics in subscriptions.items() if topic in topics]
        for index in indexes:
            assert bool(read[topic, index]) == bool(subscribers)
    if len(set(subscriptions.values())) == 1:
        pool = [
            (topic, index)
            for topic in next(iter(subscriptions.values())) & partitions.keys()
            for index in partitions[topic]
        ]
        if pool:
            sizes = [len(taken) for taken in found.values()]
            assert min(sizes) >= 1
            assert max(read.values()) <= -(-len(subscriptions) // len(pool))
            assert max(sizes) - min(sizes) <= 2
    assert assign_partitions(subscriptions, partitions, found) == found
