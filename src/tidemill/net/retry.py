"""Trying again: which errors are worth it, how long to wait, and when to give up.

``RetryPolicy`` decides and knows neither clock nor event loop. ``retry`` is its only shell: the time is that
of the running event loop, so that a simulation brings its own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from tidemill.errors import ErrorCode, TableError, TidemillError

__all__ = ("RetryPolicy", "backoff_ms", "is_transient", "retry")

_T = TypeVar("_T")

_TRANSIENT: Final = frozenset(
    {
        ErrorCode.broker_not_available,
        ErrorCode.concurrent_transactions,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.leader_not_available,
        ErrorCode.network_exception,
        ErrorCode.not_controller,
        ErrorCode.not_coordinator,
        ErrorCode.not_enough_replicas,
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.not_leader_or_follower,
        ErrorCode.offset_not_available,
        ErrorCode.replica_not_available,
        ErrorCode.request_timed_out,
        ErrorCode.throttling_quota_exceeded,
        ErrorCode.unknown_leader_epoch,
        ErrorCode.unstable_offset_commit,
    }
)


def is_transient(error: TidemillError) -> bool:
    """Whether the same request may succeed if it is sent again soon.

    Narrower than Kafka's ``retriable``: a missing topic or a broken disk is reported, not waited for. The
    codes of tables say it themselves.
    """
    return error.retriable if isinstance(error, TableError) else error.code in _TRANSIENT


def backoff_ms(failures: int, first_ms: int, longest_ms: int) -> int:
    """The pause after the last of some failures: twice as long as the one before, up to the longest.

    >>> [backoff_ms(failures, 100, 300) for failures in (1, 2, 3, 4)]
    [100, 200, 300, 300]
    """
    return min(longest_ms, first_ms << min(failures - 1, 30))


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Decides how long to try, and how long to pause in between: each pause is twice as long as the last.

    A pause is shortened at random, by half at most, so that those who failed together do not come back
    together.

    >>> policy = RetryPolicy(timeout_ms=1_000, first_pause_ms=100, longest_pause_ms=300)
    >>> lost = TidemillError("the connection broke", code=ErrorCode.network_exception)
    >>> [policy.pause_seconds(lost, failures, elapsed_seconds=0.0) for failures in (1, 2, 3, 4)]
    [0.1, 0.2, 0.3, 0.3]
    >>> policy.pause_seconds(lost, 5, elapsed_seconds=0.8) is None
    True
    """

    #: None if only the number of failures ends it.
    timeout_ms: int | None
    first_pause_ms: int = 50
    longest_pause_ms: int = 1_000
    #: The failure that is reported whatever it is; None if only the time ends it.
    failures_max: int | None = None
    #: The codes that are worth another try; None for those of ``is_transient``.
    transient: frozenset[ErrorCode] | None = None

    def pause_seconds(
        self, error: TidemillError, failures: int, elapsed_seconds: float, jitter: float = 0.0
    ) -> float | None:
        """Seconds to wait after the last of some failures; None if ``error`` is to be reported.

        ``jitter``, from 0 to 1, says how much of the pause's second half is left out.
        """
        if not (is_transient(error) if self.transient is None else error.code in self.transient):
            return None
        if self.failures_max is not None and failures >= self.failures_max:
            return None
        pause_ms = backoff_ms(failures, self.first_pause_ms, self.longest_pause_ms)
        pause_seconds = pause_ms * (1 - jitter / 2) / 1000
        if self.timeout_ms is not None and elapsed_seconds + pause_seconds > self.timeout_ms / 1000:
            return None
        return pause_seconds


async def retry(
    action: Callable[[], Awaitable[_T]],
    policy: RetryPolicy,
    *,
    before_next: Callable[[], None] | None = None,
    jitter: Callable[[], float] = random.random,
    sleep: Callable[[float], Awaitable[None]] | None = None,
) -> _T:
    """Await ``action()`` until it succeeds, fails for good, or the policy gives up.

    ``before_next`` is called after each failure that is not the last: what was known is taken as stale.
    ``sleep`` makes the pauses, for those who go by another clock than the event loop's.
    """
    loop = asyncio.get_running_loop()
    started, failures = loop.time(), 0
    while True:
        try:
            return await action()
        except TidemillError as error:
            failures += 1
            pause_seconds = policy.pause_seconds(error, failures, loop.time() - started, jitter())
            if pause_seconds is None:
                raise
        if before_next is not None:
            before_next()
        await (asyncio.sleep if sleep is None else sleep)(pause_seconds)
