"""A node's time: the time of day for stamps, a steady clock for intervals and timers."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("Clock", "LoopClock", "Timer", "boot_clock_ms", "pause", "wall_clock_ms")

#: Not everywhere: elsewhere a machine that sleeps does not hold leases of a cluster.
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def wall_clock_ms() -> int:
    """The time of day in milliseconds. It jumps when somebody sets the clock."""
    return time.time_ns() // 1_000_000


def boot_clock_ms() -> int:
    """Milliseconds since the machine was started, those included in which it slept. Never set by anybody."""
    return time.clock_gettime_ns(_SINCE_BOOT) // 1_000_000


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Keep the call from happening."""


class Clock(Protocol):
    """Milliseconds since the Unix epoch that never go back, and calls at such a time."""

    def now_ms(self) -> int:
        """The time in milliseconds since the Unix epoch. It never goes back."""

    def call_at(self, when_ms: int, callback: Callable[[], None]) -> Timer:
        """Call back once ``now_ms`` has reached ``when_ms``, never before this function has returned."""


class LoopClock:
    """The event loop's time, aligned with the wall clock once.

    Sessions must not expire because somebody sets the clock, so later changes of it are not followed.
    """

    def __init__(self, wall_ms: Callable[[], int] = wall_clock_ms) -> None:
        self._loop = asyncio.get_running_loop()
        self._start_ms = wall_ms() - self._loop.time() * 1_000

    def now_ms(self) -> int:
        """The time in whole milliseconds since the Unix epoch."""
        return int(self._start_ms + self._loop.time() * 1_000)

    def call_at(self, when_ms: int, callback: Callable[[], None]) -> Timer:
        """Call back on the event loop once ``now_ms`` has reached ``when_ms``."""
        # The next whole millisecond: a timer that fires a fraction early would find nothing due and spin.
        return self._loop.call_at((when_ms + 1 - self._start_ms) / 1_000, callback)


async def pause(clock: Clock, duration_ms: int) -> None:
    """Wait for some milliseconds of ``clock``."""
    awake: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not awake.done():
            awake.set_result(None)

    timer = clock.call_at(clock.now_ms() + duration_ms, wake)
    try:
        await awake
    finally:
        timer.cancel()
