"""What a shard knows of each job besides its transactions: what it published, its slots, its signs of life.

A ``Job`` is an index over the transactions of its slots, kept by the same ``replay`` that keeps them, so that
neither giving out a slot nor a publication looks at slots that are not concerned. It is dropped with its last
slot; what it published is a small value of its own that is kept for longer. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from tidemill.transactions.attempts import is_free, is_open

if TYPE_CHECKING:
    from tidemill.transactions.transaction import Transaction

__all__ = ("NOTHING_PUBLISHED", "Job", "Publication")


@dataclass(frozen=True, slots=True)
class Publication:
    """The last batch that a job has published, and when. Batches up to it are never published again."""

    batch: int
    published_ms: int


NOTHING_PUBLISHED = Publication(-1, -1)


class Job:
    """The slots of one job by number: ``open`` ones, ``busy`` ones and free ones."""

    def __init__(self) -> None:
        #: When any of its attempts last showed that it is alive; a restart counts.
        self.alive_ms = 0
        self.open: set[int] = set()
        self.busy: set[int] = set()
        self._free: set[int] = set()
        #: The free slots as a heap; may also hold numbers that are not free any more, each once.
        self._free_heap: list[int] = []
        self._in_heap: set[int] = set()
        self._next_slot = 0

    @property
    def slot_count(self) -> int:
        return len(self.open) + len(self.busy) + len(self._free)

    def replay_slot(self, slot: int, value: Transaction | None) -> None:
        """Set the value of a slot; None forgets it."""
        self.open.discard(slot)
        self.busy.discard(slot)
        self._free.discard(slot)
        if value is None:
            return
        self._next_slot = max(self._next_slot, slot + 1)
        if is_open(value):
            self.open.add(slot)
        elif is_free(value):
            self._free.add(slot)
            if slot not in self._in_heap:
                self._in_heap.add(slot)
                heappush(self._free_heap, slot)
        else:
            self.busy.add(slot)

    def next_slot(self) -> int:
        """Number of the next attempt's slot: the lowest that is free, or a new one. Does not reserve it."""
        while self._free_heap:
            if self._free_heap[0] in self._free:
                return self._free_heap[0]
            self._in_heap.remove(heappop(self._free_heap))
        return self._next_slot
