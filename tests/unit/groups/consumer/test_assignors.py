"""The server-side assignors, against what they promise."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from tidemill.groups.consumer.assignors import AssignedMember, assign_range, assign_uniform
from tidemill.groups.consumer.member import Partitions

TOPICS = [UUID(int=number) for number in range(1, 6)]
counts = st.dictionaries(st.sampled_from(TOPICS), st.integers(0, 12), min_size=1)
names = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True)
subscriptions = st.dictionaries(
    st.sampled_from("abcdefgh"), st.frozensets(st.sampled_from(TOPICS)), min_size=1, max_size=8
)


def everything(subscribed: dict[str, frozenset[UUID]], topics: dict[UUID, int]) -> set[tuple[UUID, int]]:
    wanted = frozenset[UUID]().union(*subscribed.values())
    return {(topic, index) for topic, count in topics.items() if topic in wanted for index in range(count)}


def check_complete(
    result: dict[str, Partitions], subscribed: dict[str, frozenset[UUID]], topics: dict[UUID, int]
) -> None:
    given_out = [partition for partitions in result.values() for partition in partitions]
    assert len(given_out) == len(set(given_out)), "a partition is given twice"
    assert set(given_out) == everything(subscribed, topics)
    for member, partitions in result.items():
        assert {topic for topic, _ in partitions} <= subscribed[member]


def uniform(
    subscribed: dict[str, frozenset[UUID]],
    topics: dict[UUID, int],
    before: dict[str, Partitions] | None = None,
) -> dict[str, Partitions]:
    before = before or {}
    members = {
        name: AssignedMember(topics_of, before.get(name, frozenset()))
        for name, topics_of in subscribed.items()
    }
    return assign_uniform(members, topics)


@given(subscriptions, counts)
def test_uniform_gives_everything_once_and_balanced(
    subscribed: dict[str, frozenset[UUID]], topics: dict[UUID, int]
) -> None:
    result = uniform(subscribed, topics)
    check_complete(result, subscribed, topics)
    for partitions in result.values():
        for topic, _ in partitions:
            for other, wanted in subscribed.items():
                if topic in wanted:
                    assert len(partitions) - len(result[other]) <= 1


@given(names, counts)
def test_uniform_differs_by_at_most_one_if_all_subscribe_alike(
    members: list[str], topics: dict[UUID, int]
) -> None:
    result = uniform(dict.fromkeys(members, frozenset(topics)), topics)
    sizes = [len(partitions) for partitions in result.values()]
    assert max(sizes) - min(sizes) <= 1


@given(names, names, counts)
def test_uniform_moves_no_more_than_it_must(
    before: list[str], after: list[str], topics: dict[UUID, int]
) -> None:
    subscribed = frozenset(topics)
    first = uniform(dict.fromkeys(before, subscribed), topics)
    second = uniform(dict.fromkeys(after, subscribed), topics, first)
    total = sum(topics.values())
    share, extra = divmod(total, len(after))
    kept_sizes = sorted((len(first.get(name, ())) for name in after), reverse=True)
    quotas = [share + (position < extra) for position in range(len(after))]
    most_that_can_stay = sum(min(size, quota) for size, quota in zip(kept_sizes, quotas, strict=True))
    stayed = sum(len(second[name] & first.get(name, frozenset())) for name in after)
    assert stayed == most_that_can_stay


@given(subscriptions, counts)
def test_uniform_leaves_a_balanced_group_alone(
    subscribed: dict[str, frozenset[UUID]], topics: dict[UUID, int]
) -> None:
    first = uniform(subscribed, topics)
    assert uniform(subscribed, topics, first) == first


def test_uniform_drops_what_is_gone_and_what_is_claimed_twice() -> None:
    first, second = TOPICS[:2]
    both = frozenset({(first, 0), (first, 7), (second, 0)})
    result = uniform(dict.fromkeys("ab", frozenset({first})), {first: 2}, {"a": both, "b": both})
    assert result == {"a": frozenset({(first, 0)}), "b": frozenset({(first, 1)})}


@given(subscriptions, counts)
def test_range_gives_contiguous_ranges_and_the_same_ones_of_equal_topics(
    subscribed: dict[str, frozenset[UUID]], topics: dict[UUID, int]
) -> None:
    members = {name: AssignedMember(topics_of, frozenset()) for name, topics_of in subscribed.items()}
    result = assign_range(members, topics)
    check_complete(result, subscribed, topics)
    ranges = {
        (name, topic): sorted(index for each, index in result[name] if each == topic)
        for name in members
        for topic in topics
    }
    for (name, topic), indexes in ranges.items():
        assert indexes == list(range(indexes[0], indexes[0] + len(indexes))) if indexes else True
        for other, count in topics.items():
            readers = [who for who in members if topic in subscribed[who]]
            other_readers = [who for who in members if other in subscribed[who]]
            if count == topics[topic] and readers == other_readers:
                assert ranges[name, other] == indexes


def test_range_orders_static_members_by_their_instance_id() -> None:
    (topic,) = TOPICS[:1]
    members = {
        "zz": AssignedMember(frozenset({topic}), frozenset(), "i1"),
        "aa": AssignedMember(frozenset({topic}), frozenset(), "i2"),
        "00": AssignedMember(frozenset({topic}), frozenset()),
    }
    result = assign_range(members, {topic: 4})
    assert result == {
        "zz": frozenset({(topic, 0), (topic, 1)}),
        "aa": frozenset({(topic, 2)}),
        "00": frozenset({(topic, 3)}),
    }
