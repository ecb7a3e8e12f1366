"""The throttle of moves: how much a leader sends in a second to replicas that a reassignment adds. Pure."""

from __future__ import annotations

from tidemill.replication.partition import Partition

__all__ = ("MoveThrottle",)


class MoveThrottle:
    """Spreads what is sent over time; ``bytes_per_second`` 0 means unlimited.

    A whole answer may be sent as soon as what was sent before is paid for: the rate is right on average.
    Replicas that were in sync before, for instance those of a node that was restarted, are never held back.
    """

    def __init__(self, bytes_per_second: int) -> None:
        self._bytes_per_second = bytes_per_second
        self._paid_until_s = 0.0

    def applies_to(self, partition: Partition, node_id: int) -> bool:
        """Whether this replica of a partition is one that a move adds, and has not caught up yet."""
        assignment = partition.assignment
        if not self._bytes_per_second or assignment is None:
            return False
        return node_id in assignment.adding and node_id not in assignment.isr

    def wait_s(self, now_s: float) -> float:
        """How long nothing may be sent; 0 if something may be sent now."""
        return max(0.0, self._paid_until_s - now_s)

    def sent(self, size_bytes: int, now_s: float) -> None:
        """Account for what is sent now."""
        if self._bytes_per_second:
            self._paid_until_s = max(self._paid_until_s, now_s) + size_bytes / self._bytes_per_second
