"""Suspicions: what is found out, what is told, and when it ends."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tidemill.cluster.suspicion import Suspicions

EPOCHS = {1: 10, 2: 20, 3: 30}


def make(node_id: int = 1) -> Suspicions:
    return Suspicions(node_id, random.Random(7))


def test_each_node_is_asked_once_in_a_round() -> None:
    suspicions = make()
    rounds = [[suspicions.next_target({1, 2, 3, 4}) for _ in range(3)] for _ in range(20)]
    assert all(set(each) == {2, 3, 4} for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1, "the order is random"


def test_a_node_that_is_alone_asks_nobody() -> None:
    assert make().next_target({1}) is None


def test_who_left_is_not_asked_and_who_came_is() -> None:
    suspicions = make()
    suspicions.next_target({1, 2, 3})
    assert {suspicions.next_target({1, 5}) for _ in range(2)} == {5}


def test_who_was_not_reached_is_suspected_until_it_answers() -> None:
    suspicions = make()
    suspicions.not_reached(2, 20, 0)
    assert suspicions.current(EPOCHS, 100) == {2}
    suspicions.reached(2, 200)
    assert suspicions.current(EPOCHS, 200) == frozenset()


def test_a_suspicion_that_nobody_renews_ends() -> None:
    suspicions = make()
    suspicions.not_reached(2, 20, 0)
    assert suspicions.current(EPOCHS, 9_999) == {2}
    assert suspicions.current(EPOCHS, 10_000) == frozenset()


def test_a_node_that_registered_again_is_not_suspected() -> None:
    suspicions = make()
    suspicions.not_reached(2, 19, 0)
    assert suspicions.current(EPOCHS, 1) == frozenset()


def test_what_others_tell_counts_but_is_not_told_on() -> None:
    suspicions = make()
    suspicions.told({3: 30}, 0)
    assert suspicions.current(EPOCHS, 1) == {3}
    assert suspicions.to_tell(1) == {}


def test_an_answer_of_the_node_itself_outweighs_what_others_tell() -> None:
    suspicions = make()
    suspicions.reached(3, 0)
    suspicions.told({3: 30}, 2_999)
    assert suspicions.current(EPOCHS, 2_999) == frozenset()
    suspicions.told({3: 30}, 3_000)
    assert suspicions.current(EPOCHS, 3_000) == {3}


def test_nobody_suspects_itself() -> None:
    suspicions = make()
    suspicions.told({1: 10}, 0)
    assert suspicions.current(EPOCHS, 1) == frozenset()


def test_a_rumour_does_not_hide_what_was_found_out() -> None:
    suspicions = make()
    suspicions.not_reached(2, 20, 0)
    suspicions.told({2: 19}, 1)
    assert suspicions.to_tell(2) == {2: 20}


def test_suspects_are_not_asked_for_help() -> None:
    suspicions = make()
    suspicions.not_reached(3, 30, 0)
    assert suspicions.helpers(2, {1, 2, 3, 4}, 2) == [4]


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["reached", "lost", "told"])), max_size=30))
def test_two_nodes_that_tell_each_other_forget_in_the_end(events: list[tuple[int, str]]) -> None:
    first, second = make(4), make(5)
    for now, (node_id, kind) in enumerate(events):
        if kind == "reached":
            first.reached(node_id, now)
        elif kind == "lost":
            first.not_reached(node_id, EPOCHS[node_id], now)
        else:
            second.told(first.to_tell(now), now)
            first.told(second.to_tell(now), now)
    for now in range(100, 20_000, 1_000):
        second.told(first.to_tell(now), now)
        first.told(second.to_tell(now), now)
    assert first.current(EPOCHS, 20_000) == second.current(EPOCHS, 20_000) == frozenset()
