"""The node's memory for requests and answers under way, as one number of bytes.

A connection takes bytes before it reserves memory for a frame, and stops reading its socket while there are
none: TCP then slows the sender down. Waiting connections are served in order; while one waits, no other is
granted anything, so that a large frame is not starved by small ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

__all__ = ("ByteBudget",)


class ByteBudget:
    """A counter with a queue."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._waiting: deque[Callable[[], bool]] = deque()
        self._serving = False

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)

    def try_take(self, count: int) -> bool:
        """Take ``count`` bytes if they are there. Something is always granted when nothing is in use."""
        if self._waiting and not self._serving:
            return False
        if self.used_bytes and self.used_bytes + count > self.limit_bytes:
            return False
        self.used_bytes += count
        return True

    def take(self, count: int) -> None:
        """Take bytes that exist already (an answer that was just made); may go over the limit."""
        self.used_bytes += count

    def wait(self, retry: Callable[[], bool]) -> None:
        """Call ``retry`` when bytes were given back, until it says True; those behind it wait as long."""
        self._waiting.append(retry)

    def give_back(self, count: int) -> None:
        self.used_bytes -= count
        assert self.used_bytes >= 0, "more bytes were given back than taken"
        if self._serving:
            # A waiter that is being served gives something back: the loop below goes on with it.
            return
        self._serving = True
        try:
            while self._waiting and (self.used_bytes < self.limit_bytes or not self.used_bytes):
                if not self._waiting[0]():
                    break
                self._waiting.popleft()
        finally:
            self._serving = False
