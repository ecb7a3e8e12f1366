"""How fast a worker thread may go: a byte rate, and a pause now and then that gives others their turn."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ("Pace",)

#: Work for at most about this long, then let go of the interpreter.
_BREATH_INTERVAL_SECONDS = 0.001
#: Long enough for another thread to wake up and take over; shorter, and this one is back first.
_BREATH_SECONDS = 0.000_05


class Pace:
    """One worker's. ``bytes_per_second`` 0 is no limit."""

    def __init__(
        self,
        bytes_per_second: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._last_breath = clock()
        self._paid_until = clock()

    def breathe(self) -> None:
        """Call often; pauses only if the last pause is some time ago."""
        now = self._clock()
        if now - self._last_breath >= _BREATH_INTERVAL_SECONDS:
            self._sleep(_BREATH_SECONDS)
            self._last_breath = self._clock()

    def spend(self, size_bytes: int) -> None:
        """Account for bytes read or written; sleeps if there were too many for the time that has passed."""
        if not self._bytes_per_second:
            return
        now = self._clock()
        self._paid_until = max(self._paid_until, now) + size_bytes / self._bytes_per_second
        # Sleeping in small pieces of a second, not in microseconds: the rate is right on average.
        if self._paid_until - now > 0.01:
            self._sleep(self._paid_until - now)
