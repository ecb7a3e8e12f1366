"""Long work of the event loop in short turns."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Awaitable
from itertools import pairwise
from typing import Any, TypeVar

from tidemill.coordination.turns import (
    SLICE_SECONDS,
    TurnQueue,
    begin_slice,
    distinct_in_slices,
    free_in_slices,
    repeated_in_slices,
    sorted_in_slices,
)

T = TypeVar("T")


async def while_others_have_turns(work: Awaitable[T]) -> tuple[T, int]:
    """What ``work`` gives, and how many turns somebody else had meanwhile."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.get_running_loop().create_task(others())
    begin_slice()
    result = await work
    other.cancel()
    return result, turns


async def test_sorting_very_many_names_lets_others_have_their_turn() -> None:
    names = [f"name-{number}" for number in range(100_000)]
    random.Random(1).shuffle(names)
    found, turns = await while_others_have_turns(sorted_in_slices(names))
    assert found == sorted(names)
    assert turns > 3, f"slices of {SLICE_SECONDS} s"
    assert await sorted_in_slices(()) == []


async def test_what_is_named_once_or_twice_is_found_in_short_turns() -> None:
    names = [f"name-{number % 400_000}" for number in range(410_000)]
    once, turns = await while_others_have_turns(distinct_in_slices(names))
    assert list(once) == [f"name-{number}" for number in range(400_000)]
    assert turns > 2
    twice, turns = await while_others_have_turns(repeated_in_slices(names))
    assert twice == {f"name-{number}" for number in range(10_000)}
    assert turns > 2


class Counted(dict[str, Any]):
    """A part of an answer that can be watched."""


async def test_a_large_answer_is_freed_in_short_turns() -> None:
    parts = [Counted(configs=[{"name": "n"} for _ in range(20)]) for _ in range(10_000)]
    alive = [weakref.ref(part) for part in parts]
    body: dict[str, Any] = {"topics": parts, "throttle": 0}
    kept = parts[:2]
    del parts
    _, turns = await while_others_have_turns(free_in_slices(body))
    gc.collect()
    assert body == {}
    assert sum(ref() is not None for ref in alive) == len(kept)
    assert [len(part["configs"]) for part in kept] == [20, 20], "what somebody else has is left alone"
    assert turns > 2


async def test_tasks_that_are_woken_together_go_on_a_few_in_each_turn() -> None:
    turns, gone_on = TurnQueue(2), list[int]()

    async def go_on(number: int) -> None:
        await turns.turn()
        gone_on.append(number)

    tasks = [asyncio.create_task(go_on(number)) for number in range(5)]
    seen = []
    while len(gone_on) < 5:
        await asyncio.sleep(0)
        seen.append(len(gone_on))
    assert gone_on == [0, 1, 2, 3, 4]
    assert max(after - before for before, after in pairwise([0, *seen])) == 2
    await asyncio.gather(*tasks)


async def test_a_heavy_task_has_the_next_turns_to_itself() -> None:
    turns, gone_on = TurnQueue(2), list[int]()

    async def go_on(number: int, weight: int) -> None:
        await turns.turn(weight)
        gone_on.append(number)

    tasks = [asyncio.create_task(go_on(number, weight)) for number, weight in enumerate((1, 6, 6, 1, 1))]
    seen = []
    while len(gone_on) < 5:
        await asyncio.sleep(0)
        seen.append(len(gone_on))
    await asyncio.gather(*tasks)
    assert gone_on == [0, 1, 2, 3, 4]
    assert seen.count(2) >= 3, "the second heavy one waits as long as the first has turns to itself"
    assert seen.count(3) >= 3


async def test_a_task_that_is_cancelled_while_it_waits_takes_no_turn() -> None:
    turns = TurnQueue(1)
    first, cancelled, waiting = (asyncio.create_task(turns.turn()) for _ in range(3))
    await asyncio.sleep(0)
    assert first.done()
    cancelled.cancel()
    await asyncio.wait_for(waiting, 120)
    assert cancelled.cancelled()
