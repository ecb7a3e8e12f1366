"""Long work of the event loop in short turns.

Nothing that a client can send may hold the loop for more than 20 ms. A handler that does something for each
of the many things that a request can name does it here: after a few milliseconds everybody else has a turn.
What it reads may have changed then, so each step must be right by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TypeVar

__all__ = ("SLICE_SECONDS", "Stepper", "in_slices")

#: How long one piece of work may go on before others have their turn.
SLICE_SECONDS = 0.004

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
