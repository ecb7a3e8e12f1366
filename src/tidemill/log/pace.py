"""The throttle of a worker thread: a byte rate, and short pauses in which other threads can run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ("MakePace", "Pace")

#: Time between two pauses, in each of which the thread gives up the interpreter lock.
_BREATH_INTERVAL_SECONDS = 0.001
#: The length of a pause: just long enough for another thread to wake up and take the lock.
_BREATH_SECONDS = 0.000_05


class Pace:
    """The throttle of one worker thread; ``bytes_per_second`` 0 means unlimited.

    ``end`` wakes a thread that sleeps, and none sleeps after it; only the ``sleep`` of a simulation goes on.
    """

    def __init__(
        self,
        bytes_per_second: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._ended = threading.Event()
        self._sleep = self._ended.wait if sleep is None else sleep
        self._last_breath = clock()
        self._paid_until = clock()

    def breathe(self) -> None:
        """Pause if the last pause is some time ago. Call it often."""
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
        # Short sleeps are saved up, because very short ones are inexact: the rate is right on average.
        if self._paid_until - now > 0.01:
            self._sleep(self._paid_until - now)

    def end(self) -> None:
        """Throttle no more: the worker is to stop. Any thread may call it."""
        self._ended.set()


MakePace = Callable[[int], Pace]
"""A function that makes a throttle of so many bytes per second; 0 means unlimited."""
