"""The literals of predicates: their forms, how they are written in SQL, how times are read from text.

Each value has one form in the tree. ``datetime`` and ``time`` become ``Timestamp`` and ``TimeOfDay``, which
hold nanoseconds; zones become UTC; a decimal has no positive exponent and no negative zero. Two literals are
the same only if their types are: 1, 1e0, TRUE and 1. (a decimal) are four, and NaN is the same as NaN.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Final, NoReturn, TypeAlias

from tidemill.errors import TableCode, TableError

__all__ = (
    "DAY_NS",
    "DIGITS_MAX",
    "SECOND_NS",
    "TimeOfDay",
    "Timestamp",
    "Value",
    "checked_text",
    "literal_key",
    "literal_of",
    "literal_sql",
    "parse_date",
    "parse_time",
    "parse_timestamp",
    "quote_text",
    "refuse",
    "shorten",
    "to_date",
    "to_datetime",
    "to_days",
    "to_time",
)

DAY_NS: Final = 86_400_000_000_000
SECOND_NS: Final = 1_000_000_000
#: The most digits of an integer or a decimal: those of Arrow's widest decimal.
DIGITS_MAX: Final = 76

_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_TIMESTAMP_MIN: Final = (date.min.toordinal() - _EPOCH_DAY) * DAY_NS
_TIMESTAMP_MAX: Final = (date.max.toordinal() + 1 - _EPOCH_DAY) * DAY_NS - 1
_DATE_PATTERN: Final = r"(\d{4})-(\d\d)-(\d\d)"
_TIME_PATTERN: Final = r"(\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?"
_DATE: Final = re.compile(_DATE_PATTERN, re.ASCII)
_TIME: Final = re.compile(_TIME_PATTERN, re.ASCII)
_TIMESTAMP: Final = re.compile(
    rf"{_DATE_PATTERN}(?:[ T]{_TIME_PATTERN} ?(Z|UTC|[+-]\d\d(?::?\d\d)?)?)?", re.ASCII
)
_SHOWN_MAX: Final = 80


def refuse(message: str) -> NoReturn:
    """Raise ``TableError`` (``invalid_predicate``), the one error of these modules."""
    raise TableError(TableCode.invalid_predicate, message)


def shorten(text: str) -> str:
    """A text, cut to what a message should quote."""
    return text if len(text) <= _SHOWN_MAX else f"{text[: _SHOWN_MAX - 1]}…"


@dataclass(frozen=True, slots=True)
class Timestamp:
    """A point in time, in nanoseconds since 1970; ``zoned`` if it is UTC, else wall-clock time of no zone."""

    nanos: int
    zoned: bool

    def __post_init__(self) -> None:
        if not _TIMESTAMP_MIN <= self.nanos <= _TIMESTAMP_MAX:
            refuse("a timestamp in the predicate lies outside of the years 1 to 9999")

    @classmethod
    def of(cls, value: datetime) -> Timestamp:
        """The timestamp of a datetime; one of another zone becomes UTC."""
        # Not astimezone, which overflows near the years 1 and 9999: __post_init__ has a better error.
        shift = value.utcoffset()
        shift_seconds = 0 if shift is None else shift.days * 86_400 + shift.seconds
        # pandas keeps nanoseconds in a field of its own.
        nanos = _nanos_of_day(value.time()) + int(getattr(value, "nanosecond", 0))
        return cls(to_days(value) * DAY_NS + nanos - shift_seconds * SECOND_NS, shift is not None)

    def __str__(self) -> str:
        days, rest = divmod(self.nanos, DAY_NS)
        zone = "+00:00" if self.zoned else ""
        return f"{date.fromordinal(days + _EPOCH_DAY).isoformat()} {_clock(rest)}{zone}"


@dataclass(frozen=True, slots=True)
class TimeOfDay:
    """A time of day, in nanoseconds since midnight."""

    nanos: int

    def __post_init__(self) -> None:
        if not 0 <= self.nanos < DAY_NS:
            refuse("a time in the predicate lies outside of the day")

    def __str__(self) -> str:
        return _clock(self.nanos)


Value: TypeAlias = bool | int | float | Decimal | str | bytes | date | Timestamp | TimeOfDay | None


def literal_of(value: object) -> Value:
    """The literal for a plain Python value. Raises ``TableError`` for what cannot be one."""
    match value:
        case None | bool() | Timestamp() | TimeOfDay():
            return value
        case int():
            return _checked_int(int(value))
        case float():
            return float(value)
        case Decimal():
            return _checked_decimal(value)
        case str():
            return checked_text(str(value))
        case bytes() | bytearray() | memoryview():
            return bytes(value)
        case datetime():
            return Timestamp.of(value)
        case date():
            return value
        case time() if value.tzinfo is None:
            return TimeOfDay(_nanos_of_day(value))
    return refuse(
        f"a value of type {type(value).__name__} cannot be compared with a column; use None, bool, int, "
        "float, Decimal, str, bytes, date, datetime, or time without a zone"
    )


def checked_text(text: str) -> str:
    """Return ``text`` if it can be encoded as UTF-8; else refuse it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        refuse(f"{text[:20]!r} in the predicate holds half a surrogate pair, which is not text; remove it")
    return text


def literal_key(value: Value) -> tuple[str, object]:
    """A key that is equal for two literals exactly if they are the same."""
    name = type(value).__name__
    # The texts of floats tell -0.0 from 0.0, and NaN equals itself; the texts of decimals tell 1.0 from 1.00.
    return (name, repr(value)) if isinstance(value, float | Decimal) else (name, value)


def literal_sql(value: Value) -> str:
    """The literal in SQL, which reads back with the same type."""
    match value:
        case None:
            return "NULL"
        case bool():
            return "TRUE" if value else "FALSE"
        case int():
            return str(value)
        case float():
            return _float_sql(value)
        case Decimal():
            return f"{value:f}" if value.as_tuple().exponent else f"{value:f}."
        case str():
            return quote_text(value)
        case bytes():
            return f"X'{value.hex()}'"
        case Timestamp():
            return f"TIMESTAMPTZ '{value}'" if value.zoned else f"TIMESTAMP '{value}'"
        case TimeOfDay():
            return f"TIME '{value}'"
        case date():
            return f"DATE '{value.isoformat()}'"


def quote_text(text: str) -> str:
    """The text as a string literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def parse_date(text: str) -> date | None:
    """Parse a date ``YYYY-MM-DD``; None for any other text."""
    found = _DATE.fullmatch(text.strip())
    try:
        return date(*map(int, found.groups())) if found else None
    except ValueError:
        return None


def parse_timestamp(text: str) -> Timestamp | None:
    """Parse a timestamp ``YYYY-MM-DD[ HH:MM[:SS[.digits]][zone]]``; None for any other text.

    The zone is ``Z``, ``UTC`` or an offset, and may be left out.
    """
    found = _TIMESTAMP.fullmatch(text.strip())
    if found is None:
        return None
    year, month, day, *clock, zone = found.groups()
    nanos = 0 if clock[0] is None else _read_clock(*clock)
    shift_minutes = _read_zone(zone)
    if nanos is None or shift_minutes is None:
        return None
    try:
        days = date(int(year), int(month), int(day)).toordinal() - _EPOCH_DAY
        return Timestamp(days * DAY_NS + nanos - shift_minutes * 60 * SECOND_NS, zone is not None)
    except (ValueError, TableError):
        return None


def parse_time(text: str) -> TimeOfDay | None:
    """Parse a time of day ``HH:MM[:SS[.digits]]``; None for any other text."""
    found = _TIME.fullmatch(text.strip())
    nanos = _read_clock(*found.groups()) if found else None
    return None if nanos is None else TimeOfDay(nanos)


def to_datetime(micros: int, zoned: bool) -> datetime | None:
    """The datetime for microseconds since 1970; None outside of the years 1 to 9999."""
    if not _TIMESTAMP_MIN <= micros * 1000 <= _TIMESTAMP_MAX:
        return None
    days, rest = divmod(micros, DAY_NS // 1000)
    return datetime.combine(date.fromordinal(days + _EPOCH_DAY), to_time(rest), tzinfo=UTC if zoned else None)


def to_date(days: int) -> date | None:
    """The date for days since 1970; None outside of the years 1 to 9999."""
    ordinal = days + _EPOCH_DAY
    return date.fromordinal(ordinal) if 1 <= ordinal <= date.max.toordinal() else None


def to_time(micros: int) -> time:
    """The time of day for microseconds since midnight."""
    seconds, micros = divmod(micros, 1_000_000)
    return time(seconds // 3600, seconds // 60 % 60, seconds % 60, micros)


def to_days(day: date) -> int:
    """Days of a date since 1970."""
    return day.toordinal() - _EPOCH_DAY


def _checked_int(value: int) -> int:
    # Bits first: formatting a huge number takes long, and Python refuses beyond 4,300 digits.
    if value.bit_length() > 256 or len(str(abs(value))) > DIGITS_MAX:
        refuse(f"an integer in the predicate has more than {DIGITS_MAX} digits")
    return value


def _checked_decimal(value: Decimal) -> Decimal:
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        refuse(f"{value} is no decimal that a column can hold; use a float for infinity and NaN")
    if max(len(digits) + max(exponent, 0), -exponent) > DIGITS_MAX:
        refuse(f"a decimal in the predicate has more than {DIGITS_MAX} digits")
    digits += (0,) * max(exponent, 0)
    return Decimal((sign if any(digits) else 0, digits, min(exponent, 0)))


def _nanos_of_day(clock: time) -> int:
    seconds = (clock.hour * 60 + clock.minute) * 60 + clock.second
    return seconds * SECOND_NS + clock.microsecond * 1000


def _clock(nanos: int) -> str:
    seconds, fraction = divmod(nanos, SECOND_NS)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    if not fraction:
        return text
    return f"{text}.{fraction:09}" if fraction % 1000 else f"{text}.{fraction // 1000:06}"


def _read_clock(hour: str, minute: str, second: str | None, fraction: str | None) -> int | None:
    hours, minutes, seconds = int(hour), int(minute), int(second or 0)
    if hours > 23 or minutes > 59 or seconds > 59:
        return None
    return ((hours * 60 + minutes) * 60 + seconds) * SECOND_NS + int((fraction or "").ljust(9, "0"))


def _read_zone(zone: str | None) -> int | None:
    """Minutes that a zone is ahead of UTC."""
    if zone in (None, "Z", "UTC"):
        return 0
    hours, minutes = int(zone[1:3]), int(zone[3:].lstrip(":") or 0)
    if hours > 18 or minutes > 59:
        return None
    return (hours * 60 + minutes) * (-1 if zone[0] == "-" else 1)


def _float_sql(value: float) -> str:
    if math.isnan(value):
        return "CAST('NaN' AS DOUBLE)"
    if math.isinf(value):
        return f"CAST('{'-' if value < 0 else ''}Infinity' AS DOUBLE)"
    text = repr(value)
    # SQL reads a number without an exponent as a decimal.
    return text if "e" in text else f"{text}e0"
