"""How often a worker may start again after its handler has failed. Pure.

A restart goes back to the last committed position. Retrying one record, or parking it, is no restart.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tidemill.errors import ConfigError

__all__ = ("Bounded", "Once", "RestartBudget", "RestartPolicy")

_BACKOFF_FIRST_MS = 100
_BACKOFF_MAX_MS = 30_000


@dataclass(frozen=True, slots=True)
class Once:
    """One restart in the life of a worker."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """At most ``max_restarts`` restarts within any ``within_seconds``: the window rolls.

    >>> Bounded(5, within_seconds=60)
    Bounded(max_restarts=5, within_seconds=60)
    """

    max_restarts: int
    within_seconds: float

    def __post_init__(self) -> None:
        most: object = self.max_restarts
        within: object = self.within_seconds
        if not isinstance(most, int) or most < 0:
            raise ConfigError(f"max_restarts is a whole number of at least 0, not {most!r:.60}")
        if not isinstance(within, int | float) or not within > 0:
            raise ConfigError(f"within_seconds is a number of seconds above 0, not {within!r:.60}")


RestartPolicy = Once | Bounded


class RestartBudget:
    """Counts the restarts of one worker. Times are those of a clock that never goes back."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        #: Restarts since the worker began.
        self.restarts = 0
        self._recent_ms: deque[int] = deque()

    def take(self, now_ms: int) -> int | None:
        """Use one restart; how long to wait before it, in ms. None: the budget is exhausted.

        The wait doubles with every restart in the window, so that a handler whose database is away does not
        use the budget up in an instant.
        """
        recent = self._recent(now_ms)
        if recent >= (1 if isinstance(self.policy, Once) else self.policy.max_restarts):
            return None
        self._recent_ms.append(now_ms)
        self.restarts += 1
        return min(_BACKOFF_FIRST_MS << min(recent, 20), _BACKOFF_MAX_MS)

    def left(self, now_ms: int) -> int:
        """How many restarts are left at this time."""
        most = 1 if isinstance(self.policy, Once) else self.policy.max_restarts
        return most - self._recent(now_ms)

    def _recent(self, now_ms: int) -> int:
        if isinstance(self.policy, Bounded):
            over_ms = now_ms - int(self.policy.within_seconds * 1_000)
            while self._recent_ms and self._recent_ms[0] <= over_ms:
                self._recent_ms.popleft()
        return len(self._recent_ms)
