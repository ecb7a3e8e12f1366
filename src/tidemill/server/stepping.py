"""Long work of the event loop in short turns.

Nothing that a client can send may hold the loop for more than 20 ms. A handler that does something for each
of the many things that a request can name does it here: after a few milliseconds everybody else has a turn.
What it reads may have changed then, so each step must be right by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

__all__ = ("HEAVY_ELEMENTS", "SLICE_SECONDS", "Stepper", "in_slices", "is_heavy")

#: How long one piece of work may go on before others have their turn.
SLICE_SECONDS = 0.004

#: An answer with more elements is encoded in a thread.
HEAVY_ELEMENTS = 1_000

T = TypeVar("T")


class Stepper:
    """Says when it is time to let others have their turn."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.perf_counter() + SLICE_SECONDS

    @property
    def is_due(self) -> bool:
        """Whether the slice is used up."""
        return time.perf_counter() >= self._until

    async def step(self) -> None:
        """Call after each small piece of work; lets others go on if the slice is used up."""
        if time.perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + SLICE_SECONDS


async def in_slices(steps: Iterable[T], stepper: Stepper | None = None) -> list[T]:
    """What ``steps`` gives, as a list; between two of them others may have their turn.

    One ``stepper`` for several calls in a row lets them share a slice.
    """
    stepper = stepper or Stepper()
    collected: list[T] = []
    for item in steps:
        collected.append(item)
        if stepper.is_due:
            await stepper.step()
    return collected


def is_heavy(body: Mapping[str, Any]) -> bool:
    """Whether an answer has so many elements that encoding it would take the loop some milliseconds.

    >>> is_heavy({"topics": [{"partitions": [{}] * 100}] * 9}), is_heavy({"topics": [{}] * 1_001})
    (False, True)
    """
    return _count(body, HEAVY_ELEMENTS) > HEAVY_ELEMENTS


def _count(body: Mapping[str, Any], enough: int) -> int:
    """Elements of all arrays in the body, counted until there are more than enough."""
    total = 0
    for value in body.values():
        if isinstance(value, list | tuple):
            total += len(value)
            if total > enough:
                break
            for element in value:
                if not isinstance(element, Mapping):
                    break
                total += _count(element, enough - total)
                if total > enough:
                    return total
    return total
