"""The throttle of moves: how much a node sends, or fetches, in a second for replicas that are moved. Pure.

There is one throttle for what a node sends as a leader, and one for what it fetches. Throttled are replicas
that a reassignment adds, and those that Kafka's configs of their topic name; none that is in sync.

A rate below that of the producers would let a move go on for ever: ``MoveWatch`` notices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from tidemill.config.topic import TopicConfig
from tidemill.replication.partition import Partition

__all__ = ("MoveThrottle", "MoveWatch", "Side", "follower_side", "leader_side")

#: A replica that is no closer to its leader after this long is not getting there.
_WINDOW_MS: Final = 30_000
#: Less is left over by rounding, and would be waited for in steps too short for the clock.
_PAID_BYTES: Final = 0.001
_SHORTEST_S: Final = 1e-6


Side = Callable[[TopicConfig], frozenset[str]]
"""The replicas that a topic's config names for one side, as ``partition:node``, or ``*`` for all."""


def leader_side(config: TopicConfig) -> frozenset[str]:
    """Leaders whose replicas that are not in sync are throttled."""
    return config.leader_replication_throttled_replicas


def follower_side(config: TopicConfig) -> frozenset[str]:
    """Followers that are throttled until they are in sync."""
    return config.follower_replication_throttled_replicas


class MoveThrottle:
    """Spreads what one node sends or fetches over time; ``bytes_per_second`` 0 means unlimited.

    A whole answer may be sent as soon as what was sent before is paid for: the rate is right on average.
    What is not paid for yet is kept in bytes, so that another rate counts at once.
    """

    def __init__(self, bytes_per_second: int, node_id: int = -1, side: Side = leader_side) -> None:
        self.bytes_per_second = bytes_per_second
        self._node_id = node_id
        self._side = side
        self._owed_bytes = 0.0
        self._as_of_s = 0.0

    def set_rate(self, bytes_per_second: int, now_s: float) -> None:
        """Go by another rate from now on."""
        self._pay(now_s)
        self.bytes_per_second = bytes_per_second

    def applies_to(self, partition: Partition, follower: int) -> bool:
        """Whether this replica of a partition is throttled: it is added or named, and is not in sync."""
        assignment = partition.assignment
        if not self.bytes_per_second or assignment is None or follower in assignment.isr:
            return False
        if follower in assignment.adding:
            return True
        named = self._side(partition.config)
        return bool(named) and ("*" in named or f"{partition.index}:{self._node_id}" in named)

    def wait_s(self, now_s: float) -> float:
        """How long nothing may be sent; 0 if something may be sent now."""
        self._pay(now_s)
        if self._owed_bytes < _PAID_BYTES:
            return 0.0
        return max(_SHORTEST_S, self._owed_bytes / self.bytes_per_second)

    def sent(self, size_bytes: int, now_s: float) -> None:
        """Account for what is sent now."""
        self._pay(now_s)
        if self.bytes_per_second:
            self._owed_bytes += size_bytes

    def _pay(self, now_s: float) -> None:
        paid_bytes = (now_s - self._as_of_s) * self.bytes_per_second
        self._owed_bytes = max(0.0, self._owed_bytes - paid_bytes) if self.bytes_per_second else 0.0
        self._as_of_s = now_s


class _Seen(NamedTuple):
    at_ms: int
    lag: int
    is_stalled: bool = False


class MoveWatch:
    """Finds replicas that moves add and that do not come closer to their leaders.

    >>> watch = MoveWatch()
    >>> for second in range(0, 91, 10):
    ...     watch.note({"t-0 to node 4": 1_000 + second, "t-1 to node 4": 1_000 - second}, 1_000 * second)
    >>> watch.stalled
    ['t-0 to node 4']
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def note(self, lags: Mapping[str, int], now_ms: int) -> None:
        """How many offsets each replica of a throttled move lacks now. Others are forgotten."""
        self._seen = {name: self._next(self._seen.get(name), lag, now_ms) for name, lag in lags.items()}

    @staticmethod
    def _next(seen: _Seen | None, lag: int, now_ms: int) -> _Seen:
        if seen is None:
            return _Seen(now_ms, lag)
        if now_ms - seen.at_ms < _WINDOW_MS:
            return seen
        return _Seen(now_ms, lag, is_stalled=lag >= seen.lag > 0)

    @property
    def stalled(self) -> list[str]:
        """The replicas that were no closer at the end of the last half minute than at its beginning."""
        return sorted(name for name, seen in self._seen.items() if seen.is_stalled)
