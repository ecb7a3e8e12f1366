"""Random predicates and rows, for the tests of filters.

``predicates()`` are over any columns and literals, for codecs. ``fitting_predicates()`` fit ``SCHEMA``, whose
rows ``batches()`` makes, and stay where DuckDB's answers are meant to be the same as ours:

- integers against floats: DuckDB rounds the column to a double, so integers stay below 2**53;
- decimals against floats: the same, so the decimals have 9 digits;
- numbers of at most 18 digits, since DuckDB casts both sides to a type that may overflow;
- timestamps in whole microseconds, 1700 to 2200: DuckDB's literals are not finer, its nanoseconds overflow;
- no comparison of a text with a date or a time, which is tested by example.
"""

# Timestamps without a zone are among what is tested.
# ruff: noqa: DTZ001

from __future__ import annotations

import math
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from tidemill.tables.predicate import (
    OPERATORS,
    Always,
    And,
    Compare,
    In,
    IsNull,
    Never,
    Not,
    Or,
    Predicate,
    Prefix,
    TimeOfDay,
    Timestamp,
)

_YEARS = (datetime(1700, 1, 1), datetime(2200, 1, 1))
_SAFE = 2**53
DAY_NS = 86_400 * 10**9

texts = st.text(st.characters(codec="utf-8"), max_size=6)
decimals = st.builds(
    lambda unscaled, places: Decimal((unscaled < 0, tuple(map(int, str(abs(unscaled)))), -places)),
    st.integers(-(10**38) + 1, 10**38 - 1),
    st.integers(0, 38),
)
literals = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**76) + 1, 10**76 - 1),
    st.integers(-10, 10),
    st.floats(),
    decimals,
    texts,
    st.binary(max_size=6),
    st.dates(),
    st.builds(
        Timestamp,
        st.integers(-62_135_596_800 * 10**9, 253_402_300_800 * 10**9 - 1),
        st.booleans(),
    ),
    st.builds(TimeOfDay, st.integers(0, DAY_NS - 1)),
)
paths = st.lists(texts.filter(bool), min_size=1, max_size=6).map(tuple)


def _joined(leaves: st.SearchStrategy[Predicate], max_leaves: int) -> st.SearchStrategy[Predicate]:
    def grow(terms: st.SearchStrategy[Predicate]) -> st.SearchStrategy[Predicate]:
        several = st.lists(terms, min_size=2, max_size=4).map(tuple)
        return st.one_of(several.map(And), several.map(Or), terms.map(Not))

    return st.recursive(leaves, grow, max_leaves=max_leaves)


def predicates() -> st.SearchStrategy[Predicate]:
    """Any predicate that can be made."""
    leaves = st.one_of(
        st.builds(Compare, paths, st.sampled_from(OPERATORS), literals),
        st.builds(In, paths, st.lists(literals, min_size=1, max_size=4).map(tuple), st.booleans()),
        st.builds(IsNull, paths, st.booleans()),
        st.builds(Prefix, paths, texts),
        st.just(Always()),
        st.just(Never()),
    )
    return _joined(leaves, max_leaves=12)


_small = st.integers(-4, 4)
_wide = st.one_of(_small, st.integers(-_SAFE, _SAFE))
_floats = st.one_of(_small.map(float), st.sampled_from([0.1, -0.1, 0.5, -0.0, math.nan, math.inf, -math.inf]))
_short_decimals = st.integers(-600, 600).map(lambda count: Decimal(count).scaleb(-2))
_numbers = st.one_of(
    _wide,
    _floats,
    _short_decimals,
    st.sampled_from([127, 128, -128, -129, 255, 256, 10**15, 0.25, Decimal("0.125"), Decimal("1e-9")]),
)
_letters = st.text("ab\x00\uffff\U0010ffff", max_size=3)
_octets = st.sampled_from([b"", b"a", b"ab", b"b", b"\x00", b"ba", b"\xff\xff"])
_dates = st.one_of(
    st.sampled_from([date(1970, 1, 1), date(1970, 1, 2)]), st.dates(date(1700, 1, 1), date(2200, 1, 1))
)
_moments = st.one_of(
    st.sampled_from([datetime(1970, 1, 1), datetime(1970, 1, 1, 0, 0, 1), datetime(1970, 1, 1, 0, 0, 0, 1)]),
    st.datetimes(*_YEARS),
)
_seconds = _moments.map(lambda moment: moment.replace(microsecond=0))
_times = st.one_of(st.sampled_from([time(0), time(0, 0, 1), time(23, 59, 59, 999_999)]), st.times())
_aware = _moments.map(lambda moment: moment.replace(tzinfo=UTC))

#: Name, type, values of rows, literals that it is compared with.
COLUMNS: tuple[tuple[str, Any, st.SearchStrategy[Any], st.SearchStrategy[Any]], ...] = (
    ("flag", pa.bool_(), st.booleans(), st.booleans()),
    ("tiny", pa.int8(), st.one_of(_small, st.sampled_from([127, -128])), _numbers),
    ("octet", pa.uint8(), st.one_of(st.integers(0, 4), st.just(255)), _numbers),
    ("wide", pa.int64(), _wide, _numbers),
    ("single", pa.float32(), st.one_of(_floats, st.just(float(2**24))), _numbers),
    ("double", pa.float64(), _floats, _numbers),
    ("money", pa.decimal128(9, 2), _short_decimals, _numbers),
    ("name", pa.string(), _letters, _letters),
    ("long_name", pa.large_string(), _letters, _letters),
    ("data", pa.binary(), _octets, _octets),
    ("code", pa.binary(2), _octets.filter(lambda octets: len(octets) == 2), _octets),
    ("day", pa.date32(), _dates, st.one_of(_dates, _moments)),
    ("moment", pa.timestamp("us"), _moments, st.one_of(_dates, _moments)),
    ("exact", pa.timestamp("ns"), _moments, st.one_of(_dates, _moments)),
    ("rough", pa.timestamp("s"), _seconds, st.one_of(_dates, _moments)),
    ("zoned", pa.timestamp("us", "UTC"), _aware, st.one_of(_dates, _moments, _aware)),
    ("clock", pa.time64("us"), _times, _times),
    ("label", pa.dictionary(pa.int32(), pa.string()), _letters, _letters),
)
_INNER = pa.struct([("city", pa.string()), ("number", pa.int16())])
SCHEMA = pa.schema([(name, data_type) for name, data_type, *_ in COLUMNS] + [("address", _INNER)])
_INNER_VALUES = st.fixed_dictionaries({"city": st.none() | _letters, "number": st.none() | _small})
_FIELDS = (
    *(((name,), data_type, fitting) for name, data_type, _, fitting in COLUMNS),
    (("address", "city"), pa.string(), _letters),
    (("address", "number"), pa.int16(), _numbers),
)


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    """Rows of ``SCHEMA``, with nulls, as a slice of a longer batch."""
    count = draw(st.integers(0, 6)) + 2
    columns = [
        pa.array(draw(st.lists(st.none() | values, min_size=count, max_size=count)), data_type)
        for _, data_type, values, _ in COLUMNS
    ]
    inner = draw(st.lists(st.none() | _INNER_VALUES, min_size=count, max_size=count))
    return pa.record_batch([*columns, pa.array(inner, _INNER)], schema=SCHEMA).slice(1, count - 2)


@st.composite
def _fitting_leaf(draw: st.DrawFn) -> Predicate:
    path, data_type, fitting = draw(st.sampled_from(_FIELDS))
    choice = draw(st.integers(0, 9))
    if choice == 0:
        return IsNull(path, draw(st.booleans()))
    if choice == 1 and (pa.types.is_string(data_type) or pa.types.is_large_string(data_type)):
        return Prefix(path, draw(_letters))
    if choice <= 3:
        return In(
            path, tuple(draw(st.lists(st.none() | fitting, min_size=1, max_size=4))), draw(st.booleans())
        )
    if choice == 4:
        return draw(st.sampled_from([Always(), Never(), IsNull(("address",))]))
    literal = draw(st.one_of(fitting, fitting, fitting, st.none()))
    return Compare(path, draw(st.sampled_from(OPERATORS)), literal)


def fitting_predicates() -> st.SearchStrategy[Predicate]:
    """Predicates that fit ``SCHEMA``; see the module for their limits."""
    return _joined(_fitting_leaf(), max_leaves=6)
