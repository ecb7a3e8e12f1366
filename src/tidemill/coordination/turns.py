"""Long work of the event loop in short turns.

Nothing that a client can send may hold the loop for more than 20 ms. Whatever does something for each of the
many things that a request can name awaits ``give_way`` between two of them: after a few milliseconds
everybody else has a turn. What was read before may have changed then, so each step must be right by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from typing import TypeVar

__all__ = ("SLICE_SECONDS", "begin_slice", "give_way", "in_chunks", "in_slices", "sorted_in_slices")

#: How long one piece of work may go on before others have their turn.
SLICE_SECONDS = 0.004
_SORTED_AT_ONCE = 2_000

T = TypeVar("T")


class _Slice:
    """Until when the present piece of work may go on. One event loop serves everybody, so one is enough; with
    several in a process (embedded nodes) they merely give way more often.
    """

    until = float("inf")


def begin_slice() -> None:
    """The loop begins with a piece of work, for instance with a step of a request's handler."""
    _Slice.until = time.perf_counter() + SLICE_SECONDS


async def give_way() -> None:
    """Let others have their turn if this piece of work has had its own."""
    if time.perf_counter() >= _Slice.until:
        await asyncio.sleep(0)
        begin_slice()


async def in_slices(steps: Iterable[T]) -> list[T]:
    """What ``steps`` gives, as a list; between two of them others may have their turn."""
    collected: list[T] = []
    for item in steps:
        collected.append(item)
        if time.perf_counter() >= _Slice.until:
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


def in_chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items, so many at a time.

    >>> list(in_chunks("abcde", 2))
    ['ab', 'cd', 'e']
    """
    for start in range(0, len(items), size):
        yield items[start : start + size]
