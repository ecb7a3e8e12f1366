"""Bounds of the primary key that follow from a predicate: the range of keys that a scan has to read.

For each key column, in order, an interval that holds its values in all rows that pass: AND intersects, OR
takes the hull. Columns pinned to one value make a prefix; the first that is not pinned may add a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, NamedTuple, TypeAlias

from tidemill.tables.predicates.binding import (
    BoundColumn,
    CompareTest,
    Joined,
    MemberTest,
    NullTest,
    PrefixTest,
    Test,
)
from tidemill.tables.predicates.domains import Raw

__all__ = ("Bound", "KeyBounds", "key_bounds_of")

_CHARACTER_MAX: Final = 0x10FFFF
_SURROGATES: Final = range(0xD800, 0xE000)


class Bound(NamedTuple):
    """A value, and whether the range includes it."""

    value: Any
    inclusive: bool


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """The keys that can pass: the first columns equal ``equal``, the next lies from ``lower`` to ``upper``.

    Values are plain Python values that fit the column's type exactly: int, bool, str, bytes, Decimal, date,
    time, and datetime, in UTC if the column has a zone. ``empty`` means that no row can pass.
    """

    equal: tuple[Any, ...] = ()
    lower: Bound | None = None
    upper: Bound | None = None
    empty: bool = False


class _Interval(NamedTuple):
    """Raw values from ``lower`` to ``upper``; None is unbounded."""

    lower: Bound | None = None
    upper: Bound | None = None

    @property
    def is_empty(self) -> bool:
        if self.lower is None or self.upper is None:
            return False
        low, high = self.lower, self.upper
        if low.value == high.value:
            return not (low.inclusive and high.inclusive)
        return bool(low.value > high.value)


_FULL: Final = _Interval()
#: An interval, or None for one without values.
_Range: TypeAlias = _Interval | None


def key_bounds_of(test: Test, primary_key: Sequence[str]) -> KeyBounds | None:
    """The bounds of a primary key of these columns; None if the predicate does not restrict it."""
    if test is False:
        return KeyBounds(empty=True)
    equal: list[Any] = []
    for name in primary_key:
        column = _column_named(test, name)
        if column is None or column.domain is None:
            break
        interval = _interval(test, column)
        if interval is None:
            return KeyBounds(empty=True)
        lower, upper = _plain_lower(interval.lower, column), _plain_upper(interval.upper, column)
        if lower is not None and upper is not None and lower == upper and lower.inclusive:
            equal.append(lower.value)
            continue
        if lower is None and upper is None:
            break
        return KeyBounds(tuple(equal), lower, upper)
    return KeyBounds(tuple(equal)) if equal else None


def _column_named(test: Test, name: str) -> BoundColumn | None:
    if isinstance(test, bool):
        return None
    if isinstance(test, Joined):
        found = (_column_named(term, name) for term in test.terms)
        return next((column for column in found if column is not None), None)
    return test.column if test.column.name == name and not test.column.fields else None


def _interval(test: Test, column: BoundColumn) -> _Range:
    match test:
        case Joined(all_must, terms):
            ranges = [_interval(term, column) for term in terms]
            return reduce(_intersect if all_must else _hull, ranges)
        case bool():
            return _FULL if test else None
        case NullTest():
            return _FULL
    if test.column != column or column.is_float:
        # Floats give no bounds: they have two zeros and many NaN, whose order as keys is not known here.
        return _FULL
    return _leaf_interval(test)


def _leaf_interval(test: CompareTest | MemberTest | PrefixTest) -> _Interval:
    match test:
        case CompareTest(_, "=", raw):
            return _Interval(Bound(raw, True), Bound(raw, True))
        case CompareTest(_, "<" | "<=", raw):
            return _Interval(upper=Bound(raw, test.op == "<="))
        case CompareTest(_, ">" | ">=", raw):
            return _Interval(lower=Bound(raw, test.op == ">="))
        case MemberTest(_, raws, False):
            return _Interval(Bound(min(raws), True), Bound(max(raws), True))
        case PrefixTest(_, text, False):
            after = _after(text)
            return _Interval(Bound(text, True), None if after is None else Bound(after, False))
    return _FULL


def _intersect(one: _Range, other: _Range) -> _Range:
    if one is None or other is None:
        return None
    lower = _tighter(one.lower, other.lower, largest=True)
    upper = _tighter(one.upper, other.upper, largest=False)
    both = _Interval(lower, upper)
    return None if both.is_empty else both


def _hull(one: _Range, other: _Range) -> _Range:
    if one is None or other is None:
        return one if other is None else other
    return _Interval(
        _wider(one.lower, other.lower, largest=False), _wider(one.upper, other.upper, largest=True)
    )


def _tighter(one: Bound | None, other: Bound | None, *, largest: bool) -> Bound | None:
    if one is None or other is None:
        return one if other is None else other
    if one.value == other.value:
        return Bound(one.value, one.inclusive and other.inclusive)
    return one if (one.value > other.value) is largest else other


def _wider(one: Bound | None, other: Bound | None, *, largest: bool) -> Bound | None:
    if one is None or other is None:
        return None
    if one.value == other.value:
        return Bound(one.value, one.inclusive or other.inclusive)
    return one if (one.value > other.value) is largest else other


def _plain_lower(bound: Bound | None, column: BoundColumn) -> Bound | None:
    pair = None if bound is None else _around(bound.value, column)
    if bound is None or pair is None:
        return None
    return Bound(pair[0], bound.inclusive or pair[0] != pair[1])


def _plain_upper(bound: Bound | None, column: BoundColumn) -> Bound | None:
    pair = None if bound is None else _around(bound.value, column)
    if bound is None or pair is None:
        return None
    return Bound(pair[1], bound.inclusive or pair[0] != pair[1])


def _around(raw: Raw, column: BoundColumn) -> tuple[Any, Any] | None:
    assert column.domain is not None
    return column.domain.around(raw)


def _after(text: str) -> str | None:
    """The smallest string above all that begin with ``text``; None if there is none."""
    kept = text.rstrip(chr(_CHARACTER_MAX))
    if not kept:
        return None
    following = ord(kept[-1]) + 1
    # Surrogates are not characters: skip over them.
    return kept[:-1] + chr(_SURROGATES.stop if following in _SURROGATES else following)
