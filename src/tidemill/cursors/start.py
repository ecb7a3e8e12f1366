"""Where a cursor begins, or is set to: the words for it, and what they mean. Pure.

>>> parse_start("-10 minutes", now_ms=1_000_000)
StartAt(kind='time', value=400000)
>>> parse_start("earliest", now_ms=0)
StartAt(kind='earliest', value=0)
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Final, Literal, NamedTuple

from tidemill.config.values import time_unit_ms
from tidemill.errors import ConfigError

__all__ = ("StartAt", "parse_start")

_AGO: Final = re.compile(r"-\s*([0-9]{1,12})\s*([a-z]+)")
_WORDS: Final = (
    "'earliest', 'latest', an offset, a time like '2026-11-18T10:00:00Z', or how long ago like '-10 minutes'"
)

Kind = Literal["earliest", "latest", "offset", "time"]


class StartAt(NamedTuple):
    """A place in every partition. ``value`` is the offset, or the time in milliseconds since 1970."""

    kind: Kind
    value: int = 0


def parse_start(start: str | int | datetime | timedelta, *, now_ms: int) -> StartAt:
    """What a caller means. Raises ``ConfigError`` for words that mean nothing."""
    if isinstance(start, bool) or not isinstance(start, str | int | datetime | timedelta):
        raise ConfigError(f"a cursor starts at {_WORDS}, not at {start!r}")
    if isinstance(start, int):
        return _offset(start)
    if isinstance(start, datetime):
        return _at(start, start)
    if isinstance(start, timedelta):
        return _ago(int(-start.total_seconds() * 1_000) if start < timedelta(0) else -1, now_ms, start)
    return _from_text(start.strip(), now_ms)


def _from_text(text: str, now_ms: int) -> StartAt:
    if text in ("earliest", "latest"):
        return StartAt("earliest" if text == "earliest" else "latest")
    if text.isascii() and text.isdigit():
        return _offset(int(text))
    if (match := _AGO.fullmatch(text.lower())) and (unit_ms := time_unit_ms(match[2])):
        return _ago(int(match[1]) * unit_ms, now_ms, text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"a cursor starts at {_WORDS}, not at {text!r}") from None
    return _at(moment, text)


def _at(moment: datetime, shown: object) -> StartAt:
    """A time; without a zone it is local, as everywhere in Python and on the command line."""
    try:
        time_ms = round(moment.timestamp() * 1_000)
    except (ValueError, OverflowError, OSError):
        time_ms = -1
    if time_ms < 0:
        raise ConfigError(f"{shown} lies before 1970, where no record can be")
    return StartAt("time", time_ms)


def _offset(offset: int) -> StartAt:
    if not 0 <= offset < 2**63:
        raise ConfigError(f"an offset is a number from 0, not {offset}")
    return StartAt("offset", offset)


def _ago(duration_ms: int, now_ms: int, shown: object) -> StartAt:
    if duration_ms < 0:
        raise ConfigError(f"{shown} is in the future: how long ago has a minus in front")
    return StartAt("time", max(0, now_ms - duration_ms))
