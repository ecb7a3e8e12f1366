"""The node's memory for requests and answers under way, as one number of bytes.

A connection takes bytes before it reserves memory for a frame, and stops reading its socket while there are
none: TCP then slows the sender down. Rules:

- Waiting connections are served in order; while one waits, no other is granted anything, so that a large
  frame is not starved by small ones.
- The first in the queue is served as if the others in it held nothing: two half-read frames that wait for
  each other would wait for ever. Only that, and bytes that exist already, go over the limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

__all__ = ("ByteBudget",)

#: Takes what it needs and says True, or says False and stays in the queue.
Retry = Callable[[], bool]


class ByteBudget:
    """A counter with a queue."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        #: Who waits, and how much of what is in use each of them holds.
        self._waiting: deque[tuple[Retry, int]] = deque()
        self._held_by_waiting = 0
        self._serving = False

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)

    def try_take(self, count: int) -> bool:
        """Take ``count`` bytes if they are there. Something is always granted when nothing is in use."""
        if self._waiting and not self._serving:
            return False
        in_use = self.used_bytes - self._held_by_waiting
        if in_use and in_use + count > self.limit_bytes:
            return False
        self.used_bytes += count
        return True

    def take(self, count: int) -> None:
        """Take bytes that exist already (an answer that was just made); may go over the limit."""
        self.used_bytes += count

    def wait(self, retry: Retry, held_bytes: int = 0, *, at_front: bool = False) -> None:
        """Call ``retry`` whenever there may be room, until it says True; those behind it wait as long.

        ``held_bytes`` are those that the caller has taken and keeps while it waits.
        """
        if at_front:
            self._waiting.appendleft((retry, held_bytes))
        else:
            self._waiting.append((retry, held_bytes))
        self._held_by_waiting += held_bytes
        self._serve()

    def cancel(self, retry: Retry) -> None:
        """Leave the queue."""
        for entry in [entry for entry in self._waiting if entry[0] == retry]:
            self._waiting.remove(entry)
            self._held_by_waiting -= entry[1]

    def give_back(self, count: int) -> None:
        """Return bytes that were taken, and let those who wait for them go on."""
        self.used_bytes -= count
        assert self.used_bytes >= 0, "more bytes were given back than taken"
        self._serve()

    def _serve(self) -> None:
        if self._serving:
            # Somebody who is being served waits again or gives something back: the loop goes on with it.
            return
        self._serving = True
        try:
            while self._waiting:
                retry, held_bytes = self._waiting.popleft()
                self._held_by_waiting -= held_bytes
                if not retry():
                    self._waiting.appendleft((retry, held_bytes))
                    self._held_by_waiting += held_bytes
                    break
        finally:
            self._serving = False
