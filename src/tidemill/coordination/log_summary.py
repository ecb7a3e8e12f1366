"""Log lines that clients can cause at will: the first at once, those that follow as a sum.

Thousands of lines a second fill disks and hide everything else. The first event of a kind is logged by
itself. Those within the interval after it are counted, and told in one line at its end. No clock: time is
passed in.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

__all__ = ("LogSummary",)

_INTERVAL_SECONDS = 10.0
_SOURCES_MAX = 1_000


@dataclass(slots=True)
class _Counted:
    """Events of one kind since the last line about them."""

    since: float
    level: int
    count: int = 0
    last: str = ""
    sources: Counter[str] = field(default_factory=Counter)


class LogSummary:
    """Counts events by kind, and says what is to be logged.

    >>> summary = LogSummary()
    >>> [summary.note("connections refused", "10.0.0.1", "too many are open", now) for now in (0.0, 0.1, 0.2)]
    [True, False, False]
    >>> for level, line in summary.due(10.0):
    ...     print(logging.getLevelName(level), line)
    WARNING connections refused: 2 more in 10 s, most by 10.0.0.1 (2); the last one: too many are open
    """

    def __init__(self, interval_seconds: float = _INTERVAL_SECONDS) -> None:
        self._interval_seconds = interval_seconds
        self._kinds: dict[str, _Counted] = {}

    def note(self, kind: str, source: str, detail: str, now: float, level: int = logging.WARNING) -> bool:
        """Count an event; True if it is to be logged by itself. ``kind`` is one of a few texts."""
        counted = self._kinds.get(kind)
        if counted is None:
            self._kinds[kind] = _Counted(now, level)
            return True
        counted.count += 1
        counted.last = detail
        if source in counted.sources or len(counted.sources) < _SOURCES_MAX:
            counted.sources[source] += 1
        return False

    def due(self, now: float) -> list[tuple[int, str]]:
        """The lines that are to be logged now, with their levels. Call it every second or so."""
        return self._lines(now, self._interval_seconds)

    def rest(self, now: float) -> list[tuple[int, str]]:
        """The lines about everything that was counted and not logged yet. Called at the end."""
        return self._lines(now, 0)

    def _lines(self, now: float, least_seconds: float) -> list[tuple[int, str]]:
        lines = []
        for kind, counted in list(self._kinds.items()):
            seconds = now - counted.since
            if seconds < least_seconds:
                continue
            if not counted.count:
                # It was quiet for a whole interval: the next one is news again.
                del self._kinds[kind]
                continue
            ((source, most),) = counted.sources.most_common(1)
            text = f"{kind}: {counted.count} more in {seconds:.0f} s, most by {source} ({most})"
            lines.append((counted.level, f"{text}; the last one: {counted.last}"))
            self._kinds[kind] = _Counted(now, counted.level)
        return lines
