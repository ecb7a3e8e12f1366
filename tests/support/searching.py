"""Searches by time, driven to their end at once."""

from __future__ import annotations

from tidemill.log.segments.by_time import TimedOffset, TimeSearch

__all__ = ("searched",)


def searched(search: TimeSearch, max_bytes: int = 1 << 28) -> TimedOffset | None:
    """What the search finds."""
    found: TimedOffset | None = None
    while True:
        try:
            lookup = search.send(found)
        except StopIteration as done:
            result: TimedOffset | None = done.value
            return result
        found = None if lookup is None else lookup.run(max_bytes)
