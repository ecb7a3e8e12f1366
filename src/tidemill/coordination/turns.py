"""Long work of the event loop in short turns.

Nothing that a client can send may hold the loop for more than 20 ms. Whatever does something for each of the
many things that a request can name awaits ``give_way`` between two of them: after a few milliseconds
everybody else has a turn. What was read before may have changed then, so each step must be right by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Hashable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import Any, TypeVar

__all__ = (
    "SLICE_SECONDS",
    "TurnQueue",
    "begin_slice",
    "distinct_in_slices",
    "free_in_slices",
    "give_way",
    "in_chunks",
    "in_slices",
    "pause_after",
    "repeated_in_slices",
    "side_by_side",
    "slice_is_over",
    "sorted_in_slices",
)

#: How long one piece of work may go on before others have their turn.
SLICE_SECONDS = 0.004
_SORTED_AT_ONCE = 2_000
#: How many items are processed between two looks at the clock.
_AT_ONCE = 50

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class _Slice:
    """When the current piece of work must let others have their turn.

    One event loop serves everybody, so one is enough; with several in a process (embedded nodes) they merely
    give way more often.
    """

    until = float("inf")


def begin_slice() -> None:
    """Start a slice: the loop begins with a piece of work, for instance a step of a request's handler."""
    _Slice.until = time.perf_counter() + SLICE_SECONDS


def slice_is_over() -> bool:
    """Whether the current piece of work has had its turn; for work that is not a coroutine."""
    return time.perf_counter() >= _Slice.until


class TurnQueue:
    """Lets very many tasks that one event has woken go on a few in each turn of the event loop.

    A task may weigh more than one: those of a turn weigh ``per_turn`` together, and one more at most, which
    then has the next turns to itself.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._is_scheduled = False

    async def turn(self, weight: int = 1) -> None:
        """Go on in this turn of the loop if it has places left, else in a later one, in order."""
        loop = asyncio.get_running_loop()
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._next_turn)
        if self._left > 0 and not self._waiting:
            self._left -= weight
            return
        place = loop.create_future()
        self._waiting.append((place, weight))
        await place

    def _next_turn(self) -> None:
        # A task that weighed more than one turn allows has used up a part of the next turns.
        self._left = min(self._per_turn, self._left + self._per_turn)
        while self._left > 0 and self._waiting:
            place, weight = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self._left -= weight
        self._is_scheduled = self._left < self._per_turn
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._next_turn)


async def give_way() -> None:
    """Let others have their turn if this piece of work has had its own."""
    if slice_is_over():
        await asyncio.sleep(0)
        begin_slice()


async def side_by_side(work: Iterable[tuple[int, Coroutine[Any, Any, T]]], per_turn: int) -> list[T]:
    """Run coroutines beside each other; gives their results in order.

    Each comes with its weight. Those that begin in one turn of the event loop weigh ``per_turn`` together,
    and then one more at most. If one raises, or the caller is cancelled, the others are cancelled.
    """
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[T]] = []
    begun = 0
    try:
        for weight, each in work:
            tasks.append(loop.create_task(each))
            begun += weight
            if begun >= per_turn:
                # Not until they are done: one that takes long must not hold up the others.
                await asyncio.sleep(0)
                begun = 0
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def pause_after(number: int, every: int) -> None:
    """Let others have their turn after every so many things, of which this is the ``number``-th.

    For work that no request has begun, so nobody has begun a slice for it. It does not look at the clock:
    what a simulation does must not depend on how fast it runs.
    """
    if number % every == 0:
        await asyncio.sleep(0)


async def in_slices(steps: Iterable[T]) -> list[T]:
    """The results of ``steps`` as a list; others may have their turn in between."""
    collected: list[T] = []
    for item in steps:
        collected.append(item)
        if slice_is_over():
            await asyncio.sleep(0)
            begin_slice()
    return collected


async def sorted_in_slices(items: Sequence[str]) -> list[str]:
    """The items in their order; others may have their turn meanwhile."""
    chunks: list[list[str]] = []
    for chunk in in_chunks(items, _SORTED_AT_ONCE):
        chunks.append(sorted(chunk))
        await give_way()
    return await in_slices(merge(*chunks))


async def distinct_in_slices(items: Iterable[K]) -> dict[K, None]:
    """The items, each once, in the order in which they first came; others may have their turn meanwhile."""
    found: dict[K, None] = {}
    left = iter(items)
    while some := list(islice(left, _AT_ONCE)):
        found.update(dict.fromkeys(some))
        await give_way()
    return found


async def repeated_in_slices(items: Iterable[K]) -> set[K]:
    """The items that occur more than once; others may have their turn meanwhile."""
    once: set[K] = set()
    twice: set[K] = set()
    left = iter(items)
    while some := list(islice(left, _AT_ONCE)):
        for item in some:
            (twice if item in once else once).add(item)
        await give_way()
    return twice


async def free_in_slices(body: dict[str, Any]) -> None:
    """Free an answer that nobody needs any more, with all that is in its arrays.

    Hundreds of thousands of objects that go at once hold the loop as long as making them did. The arrays
    themselves are left as they are: somebody else may have them.
    """
    # Each array is copied and taken from the end, so that nothing large is let go of at once.
    arrays = [[body.popitem()[1] for _ in range(len(body))]]
    count = 0
    while arrays:
        if not arrays[-1]:
            arrays.pop()
            continue
        value = arrays[-1].pop()
        if isinstance(value, dict):
            arrays += [list(each) for each in value.values() if isinstance(each, list | tuple) and each]
            arrays += [[each] for each in value.values() if isinstance(each, dict)]
        elif isinstance(value, list | tuple) and value:
            arrays.append(list(value))
        del value
        count += 1
        if count % _AT_ONCE == 0:
            await give_way()


def in_chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items, so many at a time.

    >>> list(in_chunks("abcde", 2))
    ['ab', 'cd', 'e']
    """
    for start in range(0, len(items), size):
        yield items[start : start + size]
