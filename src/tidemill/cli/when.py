"""Places in a log as people write them.

===================  ==========================================================
text                 place
===================  ==========================================================
``earliest``         the oldest record that is still there
``latest``           the end: only records that come from now on
``1234``             that offset
``2025-01-31T12:00``  the first record at or after that time; local unless it names a zone
``-10m``             the first record of the last ten minutes (ms, s, m, h, d, w)
``-5`` ``+5``        five back or forward, from where the command says
===================  ==========================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Final

__all__ = ("Place", "PlaceKind", "parse_place")

_UNIT_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_OFFSET = re.compile(r"[0-9]{1,19}")
_SHIFT = re.compile(r"[+-][0-9]{1,19}")
_AGO = re.compile(r"-([0-9]{1,12})(ms|[smhdw])")
_EXPECTED: Final = (
    "earliest, latest, an offset like 1234, a time like 2025-01-31T12:00 or 2025-01-31T12:00:00Z, "
    "an age like -10m (ms, s, m, h, d, w), or a shift like -5 or +5"
)


class PlaceKind(Enum):
    """What the number of a ``Place`` means."""

    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSET = "offset"
    TIME = "time in milliseconds"
    SHIFT = "shift"


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a log; ``value`` is an offset, milliseconds since 1970, or a number of records."""

    kind: PlaceKind
    value: int = 0


def parse_place(text: str, now_ms: int) -> Place:
    """The place that ``text`` names. Raises ValueError that says what is allowed.

    >>> parse_place("-10m", now_ms=1_000_000).value
    400000
    """
    text = text.strip()
    if text in ("earliest", "latest"):
        return Place(PlaceKind(text))
    if _OFFSET.fullmatch(text):
        return Place(PlaceKind.OFFSET, int(text))
    if _SHIFT.fullmatch(text):
        return Place(PlaceKind.SHIFT, int(text))
    if match := _AGO.fullmatch(text):
        return Place(PlaceKind.TIME, max(0, now_ms - int(match[1]) * _UNIT_MS[match[2]]))
    try:
        moment = datetime.fromisoformat(text)
        time_ms = round(moment.timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text[:100]!r} is no place in a log: use {_EXPECTED}") from None
    if time_ms < 0:
        raise ValueError(f"{text!r} lies before 1970, where no record can be")
    return Place(PlaceKind.TIME, time_ms)
