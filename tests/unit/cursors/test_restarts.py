"""The restart budget: once in a life, or so many in a window that rolls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cursors.restarts import Bounded, Once, RestartBudget
from tidemill.errors import ConfigError


def test_once_is_one_restart_in_a_life() -> None:
    budget = RestartBudget(Once())
    assert budget.take(0) is not None
    assert budget.take(10**9) is None
    assert budget.restarts == 1


def test_a_bounded_budget_is_exhausted_within_its_window_and_whole_again_behind_it() -> None:
    budget = RestartBudget(Bounded(2, within_seconds=10))
    assert budget.take(0) is not None
    assert budget.take(5_000) is not None
    assert budget.take(9_999) is None
    # The window rolls: the first restart has left it, the second has not.
    assert budget.take(10_000) is not None
    assert budget.take(10_001) is None
    assert budget.left(15_000) == 1


def test_the_wait_before_a_restart_doubles_while_the_window_is_the_same() -> None:
    budget = RestartBudget(Bounded(4, within_seconds=10))
    assert [budget.take(each) for each in (0, 1, 2)] == [100, 200, 400]
    assert budget.take(60_000) == 100


def test_a_budget_without_restarts_is_exhausted_at_once() -> None:
    assert RestartBudget(Bounded(0, within_seconds=1)).take(0) is None


@pytest.mark.parametrize(("count", "seconds"), [(-1, 1), (1, 0), (1, -1), (1, float("nan"))])
def test_a_policy_that_makes_no_sense_is_refused(count: int, seconds: float) -> None:
    with pytest.raises(ConfigError):
        Bounded(count, seconds)


@given(
    st.integers(0, 5),
    st.integers(1, 20),
    st.lists(st.integers(0, 15_000), max_size=40).map(sorted),
)
def test_no_window_has_more_restarts_than_the_policy_says(most: int, seconds: int, times: list[int]) -> None:
    budget = RestartBudget(Bounded(most, seconds))
    taken = [each for each in times if budget.take(each) is not None]
    for start in taken:
        assert sum(start <= each < start + seconds * 1_000 for each in taken) <= most
