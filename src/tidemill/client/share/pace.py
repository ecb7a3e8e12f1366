"""How many records a consumer asks for ahead of its handlers.

Records that wait here are locked, so nobody else can work on them, and each delivery counts. So the buffer
holds what the handlers get through in a short time, and nothing before the first one has been timed: slow
handlers get records when they are free, fast ones get thousands at a time.
"""

from __future__ import annotations

from typing import Final

__all__ = ("Pace",)

#: Records wait about this long before their turn comes.
_AHEAD_SECONDS: Final = 0.5
_WEIGHT: Final = 0.05
_WEIGHT_FIRST: Final = 0.5
_FIRST_SAMPLES: Final = 8


class Pace:
    """Estimates how many records to fetch ahead, from how long the handling of one takes.

    >>> pace = Pace(ahead_max=1_000)
    >>> pace.ahead(concurrency=16)
    0
    >>> pace.note(0.1)
    >>> pace.ahead(concurrency=16)
    80
    >>> slow = Pace(ahead_max=1_000)
    >>> slow.note(20.0)
    >>> slow.ahead(concurrency=16)
    0
    """

    def __init__(self, ahead_max: int) -> None:
        self._ahead_max = ahead_max
        self._seconds = 0.0
        self._samples = 0

    def note(self, seconds: float) -> None:
        """Add a sample: how many seconds the program worked on one record."""
        self._samples += 1
        if self._samples == 1:
            self._seconds = seconds
            return
        weight = _WEIGHT_FIRST if self._samples <= _FIRST_SAMPLES else _WEIGHT
        self._seconds += weight * (seconds - self._seconds)

    def ahead(self, concurrency: int) -> int:
        """How many records may wait while ``concurrency`` are worked on."""
        if not self._samples:
            return 0
        return int(min(self._ahead_max, concurrency * _AHEAD_SECONDS / max(self._seconds, 1e-6)))
