from __future__ import annotations

from collections.abc import Callable

import pytest

from tidemill.server.budget import ByteBudget


def waiter(budget: ByteBudget, name: str, count: int, served: list[str]) -> Callable[[], bool]:
    def retry() -> bool:
        if not budget.try_take(count):
            return False
        served.append(name)
        return True

    return retry


def test_bytes_are_granted_up_to_the_limit() -> None:
    budget = ByteBudget(100)
    assert budget.try_take(60)
    assert not budget.try_take(41)
    assert budget.try_take(40)
    assert budget.available_bytes == 0


def test_something_is_granted_when_nothing_is_in_use() -> None:
    budget = ByteBudget(100)
    assert budget.try_take(500)
    assert not budget.try_take(1)


def test_what_exists_already_may_go_over_the_limit() -> None:
    budget = ByteBudget(100)
    budget.take(150)
    assert (budget.used_bytes, budget.available_bytes) == (150, 0)


def test_waiters_are_served_in_order_and_nobody_overtakes_them() -> None:
    budget, served = ByteBudget(100), list[str]()
    budget.take(100)
    budget.wait(waiter(budget, "large", 80, served))
    budget.wait(waiter(budget, "small", 10, served))
    budget.give_back(50)
    assert served == []
    assert not budget.try_take(1), "a newcomer must not take what the first waiter waits for"
    budget.give_back(30)
    assert served == ["large"]
    budget.give_back(20)
    assert served == ["large", "small"]
    assert budget.try_take(10)


def test_a_waiter_that_gives_bytes_back_while_it_is_served_does_not_serve_others_twice() -> None:
    budget, served = ByteBudget(100), list[str]()
    budget.take(100)

    def impatient() -> bool:
        served.append("impatient")
        budget.give_back(10)
        return True

    budget.wait(impatient)
    budget.wait(waiter(budget, "next", 20, served))
    budget.give_back(10)
    assert served == ["impatient", "next"]
    assert budget.used_bytes == 100


def test_the_first_waiter_is_served_as_if_the_others_in_the_queue_held_nothing() -> None:
    budget, served = ByteBudget(100), list[str]()
    budget.take(90)
    budget.wait(waiter(budget, "first", 60, served), 40)
    assert served == [], "50 bytes are in use by somebody who does not wait"
    budget.wait(waiter(budget, "second", 10, served), 50)
    assert served == ["first"]
    assert budget.used_bytes == 150
    budget.give_back(100)
    assert served == ["first", "second"]


def test_who_leaves_the_queue_is_not_served() -> None:
    budget, served = ByteBudget(100), list[str]()
    budget.take(100)
    leaving = waiter(budget, "leaving", 80, served)
    budget.wait(leaving, 30)
    budget.wait(waiter(budget, "next", 60, served))
    budget.cancel(leaving)
    budget.give_back(30)
    assert served == []
    budget.give_back(30)
    assert served == ["next"]


def test_a_waiter_may_go_to_the_front() -> None:
    budget, served = ByteBudget(100), list[str]()
    budget.take(100)
    budget.wait(waiter(budget, "one", 10, served))
    budget.wait(waiter(budget, "two", 10, served), at_front=True)
    budget.give_back(10)
    assert served == ["two"]


def test_giving_back_more_than_was_taken_is_found() -> None:
    budget = ByteBudget(100)
    budget.take(5)
    with pytest.raises(AssertionError, match="more bytes"):
        budget.give_back(6)
