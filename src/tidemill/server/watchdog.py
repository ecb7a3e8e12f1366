"""The watchdog of the event loop: how long its turns are, and which API's requests make them long.

One thread serves everybody, so a turn that takes long makes every client wait. No request should take more
than 20 ms of it; what takes longer is bounded, stepped (``coordination.turns``) or done in a thread. The
watchdog shows whether that holds:

- Each request is timed while the loop works on it: decoding and dispatching, and every step of its handler.
- A heartbeat finds what is left: a beat that comes late although no request explains it counts as ``other``
  (a callback, a garbage collection, a thread that keeps the interpreter, a machine without a free core).

Both the time by the clock and the loop's own processor time are kept. Where only the first is long, the
loop waited, for a disk or for a core; where both are, the request was too much work. The log tells only of
the latter: on a busy machine everybody waits, and nothing of ours is to blame.
"""

from __future__ import annotations

import asyncio
import logging
import time
import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from tidemill.coordination.metrics import Metric, counters, gauges
from tidemill.coordination.turns import begin_slice
from tidemill.wire.apis import APIS

__all__ = ("SLOW_TURN_SECONDS", "WATCHDOG_METRICS", "LoopWatchdog", "TurnStart", "begin_turn")

logger = logging.getLogger(__name__)

#: No request may hold the loop for longer.
SLOW_TURN_SECONDS = 0.020
#: A turn with so much processor time is logged, but only one of them in so many seconds.
_WARNING_SECONDS = 0.200
_WARNING_INTERVAL_SECONDS = 10.0
#: How often the heartbeat comes, while there are no requests and while there are. The latter is often, so
#: that few long turns fall between two beats unnoticed: a turn is noticed by the beat that it delays.
_IDLE_BEAT_SECONDS = 0.050
_BUSY_BEAT_SECONDS = 0.005
#: So many quick beats follow a request: it may have left work behind.
_BUSY_BEATS = 200
#: How long the longest turn is remembered as a recent one.
_RECENT_SECONDS = 60.0
#: The API of turns that no request explains.
OTHER = "other"

T = TypeVar("T")


class TurnStart(NamedTuple):
    """When a turn began: by the clock, and in processor time of the loop's thread."""

    seconds: float
    cpu_seconds: float


def begin_turn() -> TurnStart:
    """Note that the loop begins to work on a request."""
    return TurnStart(time.perf_counter(), time.thread_time())


class Asker(Protocol):
    """A request, as the watchdog names it in the log."""

    @property
    def who(self) -> str:
        """The client in words, for the log."""
        ...


class _Longest(NamedTuple):
    """The longest turn of some span of time."""

    seconds: float = 0.0
    api: str = OTHER


class LoopWatchdog:
    """Times the turns of one event loop. Used on that loop's thread only."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        #: By API, since the start: the longest turn, the most processor time of one, and how many were slow.
        self._longest: dict[str, float] = {}
        self._longest_cpu: dict[str, float] = {}
        self._slow: dict[str, int] = {}
        #: The longest turn of the present minute and of the one before it.
        self._recent = self._recent_before = _Longest()
        self._recent_since = clock()
        #: What requests took since the last beat, by the clock and in processor time.
        self._explained_seconds = self._explained_cpu_seconds = 0.0
        #: Whether there was a request since the last beat.
        self._has_worked = False
        self._warned_at = float("-inf")
        self._unwarned = 0

    def end_turn(self, start: TurnStart, api_key: int, asker: Asker) -> None:
        """Note that the loop has worked on a request since ``start``."""
        seconds = self._clock() - start.seconds
        self._explained_seconds += seconds
        self._has_worked = True
        api = APIS[api_key].name if api_key in APIS else OTHER
        cpu_seconds = self._cpu_clock() - start.cpu_seconds
        self._explained_cpu_seconds += cpu_seconds
        if cpu_seconds > self._longest_cpu.get(api, 0.0):
            self._longest_cpu[api] = cpu_seconds
        self._note(seconds, cpu_seconds, api, asker)

    @types.coroutine
    def watch(self, work: Coroutine[Any, Any, T], api_key: int, asker: Asker) -> Generator[Any, Any, T]:
        """Run a handler, and time each of its steps on the loop."""
        value: Any = None
        error: BaseException | None = None
        while True:
            start = TurnStart(self._clock(), self._cpu_clock())
            begin_slice()
            try:
                waits_for = work.send(value) if error is None else work.throw(error)
            except StopIteration as done:
                result: T = done.value
                return result
            finally:
                self.end_turn(start, api_key, asker)
            value = error = None
            try:
                value = yield waits_for
            except BaseException as thrown:  # noqa: BLE001 - handed on to the handler
                error = thrown

    async def beat(self) -> None:
        """The heartbeat; runs until it is cancelled."""
        quick_beats = 0
        while True:
            quick_beats = _BUSY_BEATS if self._has_worked else max(0, quick_beats - 1)
            self._has_worked = False
            interval = _BUSY_BEAT_SECONDS if quick_beats else _IDLE_BEAT_SECONDS
            due, cpu_before = self._clock() + interval, self._cpu_clock()
            self._explained_seconds = self._explained_cpu_seconds = 0.0
            await asyncio.sleep(interval)
            self.beaten(self._clock() - due, self._cpu_clock() - cpu_before)

    def beaten(self, late_seconds: float, cpu_seconds: float) -> None:
        """Note a beat that came late, and how long the loop has worked since the one before.

        What requests do not explain is noted as something else.
        """
        unexplained = late_seconds - self._explained_seconds
        # Not more than the delay: what was done before the beat was due did not hold it up.
        unexplained_cpu = min(unexplained, cpu_seconds - self._explained_cpu_seconds)
        if unexplained_cpu > self._longest_cpu.get(OTHER, 0.0):
            self._longest_cpu[OTHER] = unexplained_cpu
        if unexplained > SLOW_TURN_SECONDS:
            self._note(unexplained, unexplained_cpu, OTHER, None)
        now = self._clock()
        if now - self._recent_since > _RECENT_SECONDS:
            self._recent_before, self._recent, self._recent_since = self._recent, _Longest(), now

    def _note(self, seconds: float, cpu_seconds: float, api: str, asker: Asker | None) -> None:
        if seconds > self._longest.get(api, 0.0):
            self._longest[api] = seconds
        if seconds > self._recent.seconds:
            self._recent = _Longest(seconds, api)
        if seconds > SLOW_TURN_SECONDS:
            self._slow[api] = self._slow.get(api, 0) + 1
        if cpu_seconds > _WARNING_SECONDS:
            self._warn(seconds, api, asker)

    def _warn(self, seconds: float, api: str, asker: Asker | None) -> None:
        now = self._clock()
        if now - self._warned_at < _WARNING_INTERVAL_SECONDS:
            self._unwarned += 1
            return
        logger.warning(
            "the event loop stood still for %d ms: %s%s%s; everybody waited (tidemill_loop_* in /metrics)",
            round(seconds * 1000),
            f"a request of {api}" if api != OTHER else "no request explains it",
            f" by {asker.who}" if asker is not None else "",
            f", and {self._unwarned} more times since the last warning" if self._unwarned else "",
        )
        self._warned_at, self._unwarned = now, 0

    def longest_cpu_seconds(self) -> dict[str, float]:
        """The most processor time that one turn took, by API."""
        return dict(self._longest_cpu)

    def longest_recent(self) -> tuple[tuple[str], float]:
        """The API and the length of the longest turn of the last one or two minutes."""
        recent = max(self._recent, self._recent_before)
        return (recent.api,), recent.seconds

    def longest_seconds(self) -> dict[str, float]:
        """The longest turn, by API."""
        return dict(self._longest)

    def slow_turns(self) -> dict[str, int]:
        """How many turns were slow, by API."""
        return dict(self._slow)


def _by_api(values: Mapping[str, float]) -> list[tuple[tuple[str], float]]:
    return [((api,), value) for api, value in sorted(values.items())]


WATCHDOG_METRICS: Final[Sequence[Metric[LoopWatchdog]]] = (
    gauges(
        "tidemill_loop_longest_turn_seconds",
        "Longest turn of the event loop in the last one or two minutes, and whose request it was.",
        ("api",),
        lambda watchdog: [watchdog.longest_recent()],
    ),
    gauges(
        "tidemill_loop_turn_seconds_max",
        "Longest turn of the event loop since the start.",
        ("api",),
        lambda watchdog: _by_api(watchdog.longest_seconds()),
    ),
    gauges(
        "tidemill_loop_turn_cpu_seconds_max",
        "Most processor time of a turn since the start.",
        ("api",),
        lambda watchdog: _by_api(watchdog.longest_cpu_seconds()),
    ),
    counters(
        "tidemill_loop_slow_turns_total",
        "Turns of the event loop above 20 ms.",
        ("api",),
        lambda watchdog: _by_api(watchdog.slow_turns()),
    ),
)
