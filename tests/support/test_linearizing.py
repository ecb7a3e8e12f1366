"""The search for an order, on histories of a register whose writes and reads are known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable

import pytest

from support.linearizing import UNKNOWN, Operation, explains


def put(called_at: float, answered_at: float, value: int) -> Operation:
    return Operation(called_at, answered_at, lambda _: (value,))


def get(called_at: float, answered_at: float, value: int | None) -> Operation:
    return Operation(called_at, answered_at, lambda state: (state,) if state == value else None)


@pytest.mark.parametrize(
    ("history", "is_explained"),
    [
        ([], True),
        ([put(0, 1, 1), get(2, 3, 1)], True),
        ([put(0, 1, 1), get(2, 3, None)], False),
        ([put(0, 4, 1), get(1, 2, None), get(3, 5, 1)], True),
        ([put(0, 9, 1), get(1, 2, 1), get(3, 4, None)], False),
        ([put(0, 2, 1), put(1, 3, 2), get(4, 5, 1), get(6, 7, 1)], True),
        ([put(0, 2, 1), put(1, 3, 2), get(4, 5, 1), get(6, 7, 2)], False),
        ([put(0, UNKNOWN, 1), get(1, 2, None), get(8, 9, 1)], True),
        ([put(0, UNKNOWN, 1), get(1, 2, None), get(8, 9, None)], True),
        ([put(0, UNKNOWN, 1), get(1, 2, 1), get(8, 9, None)], False),
    ],
)
def test_a_register(history: list[Operation], *, is_explained: bool) -> None:
    assert explains(history, None) == is_explained


@pytest.mark.parametrize("seed", range(30))
def test_what_all_orders_say(seed: int) -> None:
    rng = random.Random(seed)
    history = []
    for number in range(6):
        called_at = rng.randrange(8)
        answered_at = called_at + rng.randint(1, 4)
        make = rng.choice((put, get))
        history.append(make(called_at + number / 10, answered_at, rng.randint(1, 2)))
    assert explains(history, None) == any(map(_is_order, itertools.permutations(history)))


def _is_order(order: tuple[Operation, ...]) -> bool:
    state: Hashable = None
    for earlier, later in itertools.combinations(order, 2):
        if later.answered_at < earlier.called_at:
            return False
    for each in order:
        after = each.apply(state)
        if after is None:
            return False
        state = after[0]
    return True
