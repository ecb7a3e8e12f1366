"""Domains: the position of a literal among the values that a column can hold.

SQL compares a column with any number or time of its kind, also with one that its type cannot hold. A domain
finds the position of the literal: on a value, between two neighbours, or beyond all; so the comparison loses
nothing.

| column | literals, and what they stand for |
| --- | --- |
| integer | integer, decimal, float: the exact number |
| decimal | integer, decimal: the exact number; float: the number of its shortest text |
| float | float: the exact number; integer, decimal: the nearest float, so that ``x = 0.1`` finds 0.1 |
| boolean, string, binary | the same kind only |
| date | date, timestamp, and text that spells a date |
| timestamp | timestamp, date (its midnight), and text that spells one; without a zone it means UTC |
| time | time, and text that spells one |

A domain works on *raw* values: plain Python values whose order is that of the column.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from tidemill.tables.predicates.literals import (
    DAY_NS,
    TimeOfDay,
    Timestamp,
    Value,
    parse_date,
    parse_time,
    parse_timestamp,
    to_date,
    to_datetime,
    to_days,
    to_time,
)

__all__ = ("Domain", "Position", "Rank", "Raw", "domain_of")

Raw: TypeAlias = Any
_UNIT_NS: Final = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_INT64: Final = (-(1 << 63), (1 << 63) - 1)


class Rank(enum.Enum):
    """The kind of a literal's position among the values of a column."""

    exact = "it is one of them"
    between = "just above the value given, and no value follows before it"
    below = "below all"
    above = "above all"


class Position(NamedTuple):
    """A literal's position among the values of a column. ``raw`` counts for ``exact`` and ``between``."""

    rank: Rank
    raw: Raw = None


class Domain:
    """The values of one Arrow type. ``evaluated`` is the type that kernels compare, reached by a cast."""

    def __init__(self, evaluated: pa.DataType) -> None:
        self.evaluated = evaluated

    def position_of(self, value: Value) -> Position | None:
        """The position of a literal other than NULL; None if it is of another kind."""
        raise NotImplementedError

    def array(self, raws: Sequence[Raw]) -> pa.Array:
        """An array of raw values in the evaluated type."""
        return pa.array(raws, self.evaluated)

    def around(self, raw: Raw) -> tuple[Any, Any] | None:
        """The nearest plain Python values not above and not below ``raw``; None if there are none."""
        return raw, raw


class _Same(Domain):
    """Domain of booleans, strings and bytes: only literals of the same kind, each of which is a value."""

    def __init__(self, evaluated: pa.DataType, kind: type) -> None:
        super().__init__(evaluated)
        self.kind = kind

    def position_of(self, value: Value) -> Position | None:
        return Position(Rank.exact, value) if type(value) is self.kind else None


class _FixedBytes(_Same):
    """Domain of bytes of one width. Bytes of another width can be compared, but are no value of the type."""

    def __init__(self, width: int) -> None:
        super().__init__(pa.binary(), bytes)
        self.width = width

    def around(self, raw: bytes) -> tuple[bytes, bytes] | None:
        return (raw, raw) if len(raw) == self.width else None


@dataclass(frozen=True)
class _Scale:
    """Integers from ``first`` to ``last``. ``measure`` turns a literal into a count of units."""

    first: int
    last: int
    measure: Callable[[Value], Fraction | float | None]


class _Whole(Domain):
    """Domain of all types that count units: integers, decimals, dates, times. Raw values are the counts."""

    def __init__(
        self, evaluated: pa.DataType, scale: _Scale, around: Callable[[int], tuple[Any, Any] | None]
    ) -> None:
        super().__init__(evaluated)
        self.scale = scale
        self._around = around

    def position_of(self, value: Value) -> Position | None:
        count = self.scale.measure(value)
        if count is None:
            return None
        if isinstance(count, float):
            # An infinity, or NaN, which is greater than every number.
            return Position(Rank.below if count < 0 else Rank.above)
        low = math.floor(count)
        if count < self.scale.first:
            return Position(Rank.below)
        if count > self.scale.last:
            return Position(Rank.above)
        return Position(Rank.exact if low == count else Rank.between, low)

    def around(self, raw: int) -> tuple[Any, Any] | None:
        return self._around(raw)


class _Decimals(_Whole):
    """Domain of decimals. Raw values are unscaled: multiples of 10**-decimals."""

    def __init__(self, evaluated: pa.DataType, precision: int, decimals: int) -> None:
        self.decimals = decimals
        last = 10**precision - 1
        factor = Fraction(10) ** decimals
        scale = _Scale(-last, last, lambda value: _decimal_count(value, factor))
        super().__init__(evaluated, scale, self._both)

    def array(self, raws: Sequence[int]) -> pa.Array:
        return pa.array([self._scaled(raw) for raw in raws], self.evaluated)

    def _scaled(self, raw: int) -> Decimal:
        # By its digits, because arithmetic on decimals rounds to 28 of them.
        digits = tuple(map(int, str(abs(raw))))
        return Decimal((raw < 0, digits, -self.decimals))

    def _both(self, raw: int) -> tuple[Decimal, Decimal]:
        return self._scaled(raw), self._scaled(raw)


class _Floats(Domain):
    """Domain of floats. They give no bounds of keys: the order of NaN and -0.0 as keys is not known here."""

    def __init__(self, evaluated: pa.DataType, dtype: Any) -> None:
        super().__init__(evaluated)
        self.dtype = dtype

    def position_of(self, value: Value) -> Position | None:
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            return None
        wanted = float(value)
        with np.errstate(over="ignore"):
            near = self.dtype(wanted)
        if math.isinf(near) and not math.isinf(wanted):
            return Position(Rank.between, float(np.finfo(self.dtype).max) if wanted > 0 else -math.inf)
        if math.isnan(wanted) or float(near) == wanted or not isinstance(value, float):
            # Adding turns -0.0 into 0.0, which is the same value in SQL.
            return Position(Rank.exact, float(near) + 0.0)
        low = near if float(near) < wanted else np.nextafter(near, self.dtype(-math.inf))
        return Position(Rank.between, float(low))

    def around(self, raw: float) -> None:
        return None


def domain_of(data_type: pa.DataType) -> Domain | None:
    """The domain of a type; None if its values cannot be compared with a literal."""
    types = pa.types
    if types.is_dictionary(data_type):
        return domain_of(data_type.value_type)
    if types.is_boolean(data_type):
        return _Same(data_type, bool)
    if types.is_integer(data_type):
        return _integers(data_type)
    if types.is_floating(data_type):
        dtype = {16: np.float16, 32: np.float32, 64: np.float64}[data_type.bit_width]
        return _Floats(pa.float32() if data_type.bit_width == 16 else data_type, dtype)
    if types.is_decimal(data_type):
        narrow = data_type.bit_width < 128
        evaluated = pa.decimal128(data_type.precision, data_type.scale) if narrow else data_type
        return _Decimals(evaluated, data_type.precision, data_type.scale)
    if types.is_string(data_type) or types.is_large_string(data_type):
        return _Same(data_type, str)
    if types.is_binary(data_type) or types.is_large_binary(data_type):
        return _Same(data_type, bytes)
    if types.is_fixed_size_binary(data_type):
        return _FixedBytes(data_type.byte_width)
    if data_type == pa.string_view():
        return _Same(pa.large_string(), str)
    if data_type == pa.binary_view():
        return _Same(pa.large_binary(), bytes)
    return _temporal(data_type)


def _integers(data_type: pa.DataType) -> Domain:
    bits = data_type.bit_width
    signed = pa.types.is_signed_integer(data_type)
    first, last = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return _Whole(data_type, _Scale(first, last, _number), lambda raw: (raw, raw))


def _temporal(data_type: pa.DataType) -> Domain | None:
    types = pa.types
    if types.is_date32(data_type):
        days = _Scale(-(1 << 31), (1 << 31) - 1, lambda value: _time_count(value, DAY_NS, days_only=True))
        return _Whole(data_type, days, lambda raw: _pair(to_date(raw), to_date(raw)))
    if types.is_date64(data_type):
        scale = _Scale(*_INT64, lambda value: _time_count(value, _UNIT_NS["ms"], days_only=True))
        day_ms = DAY_NS // _UNIT_NS["ms"]
        return _Whole(data_type, scale, lambda raw: _pair(to_date(raw // day_ms), to_date(-(-raw // day_ms))))
    if types.is_timestamp(data_type):
        unit, zoned = _UNIT_NS[data_type.unit], data_type.tz is not None
        timestamps = _Scale(*_INT64, lambda value: _time_count(value, unit))
        return _Whole(
            data_type,
            timestamps,
            lambda raw: _pair(
                to_datetime(raw * unit // 1000, zoned), to_datetime(-(-raw * unit // 1000), zoned)
            ),
        )
    if types.is_time(data_type):
        unit = _UNIT_NS[data_type.unit]
        times = _Scale(0, DAY_NS // unit - 1, lambda value: _clock_count(value, unit))
        last = DAY_NS // 1000 - 1
        return _Whole(
            data_type,
            times,
            # The last microsecond of the day is the largest plain value.
            lambda raw: None if -(-raw * unit // 1000) > last else _time_pair(raw * unit),
        )
    return None


def _time_pair(nanos: int) -> tuple[Any, Any]:
    return to_time(nanos // 1000), to_time(-(-nanos // 1000))


def _pair(low: Any, high: Any) -> tuple[Any, Any] | None:
    return None if low is None or high is None else (low, high)


def _number(value: Value) -> Fraction | float | None:
    """The exact number of a literal; a float only for infinity and NaN; None for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return value
    return Fraction(value)


def _decimal_count(value: Value, factor: Fraction) -> Fraction | float | None:
    if isinstance(value, float) and math.isfinite(value):
        # Not the double nearest to 0.1 is meant, which has many digits, but 0.1.
        value = Decimal(repr(value))
    number = _number(value)
    return number if number is None or isinstance(number, float) else number * factor


def _time_count(value: Value, unit_ns: int, *, days_only: bool = False) -> Fraction | None:
    if isinstance(value, str):
        value = parse_date(value) if days_only else parse_timestamp(value)
    if isinstance(value, date):
        return Fraction(to_days(value) * DAY_NS, unit_ns)
    return Fraction(value.nanos, unit_ns) if isinstance(value, Timestamp) else None


def _clock_count(value: Value, unit_ns: int) -> Fraction | None:
    if isinstance(value, str):
        value = parse_time(value)
    return Fraction(value.nanos, unit_ns) if isinstance(value, TimeOfDay) else None
