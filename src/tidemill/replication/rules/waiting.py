"""Waiting for an offset of a partition: each waiter is called once, with success or with an error."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from tidemill.errors import TidemillError

__all__ = ("OffsetWaiters", "Waiter")

#: Called with None when the offset has been reached, or with the error that ends the waiting.
Waiter = Callable[[TidemillError | None], None]


class OffsetWaiters:
    """Waiters for offsets of one log. They are called by offset, and for one offset as they were added."""

    __slots__ = ("_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Waiter]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, offset: int, waiter: Waiter) -> None:
        """Call ``waiter`` once everything below ``offset`` is reached."""
        heapq.heappush(self._heap, (offset, next(self._numbers), waiter))

    def reached(self, offset: int) -> None:
        """Call the waiters for ``offset`` and below."""
        while self._heap and self._heap[0][0] <= offset:
            heapq.heappop(self._heap)[2](None)

    def fail(self, error: TidemillError) -> None:
        """Call all waiters with an error."""
        waiters, self._heap = self._heap, []
        for _, _, waiter in waiters:
            waiter(error)
