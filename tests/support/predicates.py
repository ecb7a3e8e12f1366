"""Random predicates and rows, for the tests of filters.

``predicates()`` are over any columns and literals, for codecs. ``fitting_predicates()`` fit ``SCHEMA``, whose
rows ``batches()`` makes, and stay where DuckDB's answers are meant to be the same as ours:

- integers against floats: DuckDB rounds the column to a double, so integers stay below 2**53;
- decimals against floats: the same, so the decimals have 9 digits;
- numbers of at most 18 digits, since DuckDB casts both sides to a type that may overflow;
- timestamps in whole microseconds, 1700 to 2200: DuckDB's literals are not finer, its nanoseconds overflow;
- no decimals beside floats in an IN on a float column: DuckDB turns all values of a list into one type, and
  here IN is an OR of equalities;
- no comparison of a text with a date or a time, which is tested by example.
"""

# Timestamps without a zone are among what is tested.
# ruff: noqa: DTZ001

from __future__ import annotations

import math
import random
from collections.abc import Collection
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from tidemill.tables.predicates.predicate import (
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


_SMALL = [-4, -1, 0, 1, 2, 3]
_WIDE = [*_SMALL, 127, 128, 255, 256, 10**15, _SAFE, -_SAFE]
_FLOATS = [-1.0, 0.0, -0.0, 1.0, 3.0, 0.1, -0.1, 0.5, math.nan, math.inf, -math.inf]
_DECIMALS = [Decimal(text) for text in ("-1.00", "0.00", "0.10", "0.50", "1.00", "3.00", "9999999.99")]
_NUMBERS = [*_WIDE, -128, -129, *_FLOATS, 0.25, 1e300, *_DECIMALS, Decimal("0.125"), Decimal("1e-9")]
_LETTERS = ["", "a", "aa", "ab", "b", "a\x00", "\uffff", "\U0010ffff", "\U0010ffffa"]
_OCTETS = [b"", b"a", b"ab", b"b", b"\x00", b"ba", b"\xff\xff"]
_DATES = [date(1700, 1, 1), date(1969, 12, 31), date(1970, 1, 1), date(1970, 1, 2), date(2024, 2, 29)]
_MOMENTS = [
    *(datetime(day.year, day.month, day.day) for day in _DATES),
    datetime(1969, 12, 31, 23, 59, 59),
    datetime(1969, 12, 31, 23, 59, 59, 999_999),
    datetime(1970, 1, 1, 0, 0, 0, 1),
    datetime(1970, 1, 1, 0, 0, 1),
    datetime(2199, 12, 31, 23, 59, 59),
]
_AWARE = [moment.replace(tzinfo=UTC) for moment in _MOMENTS]
_TIMES = [time(0), time(0, 0, 0, 1), time(0, 0, 1), time(12, 30), time(23, 59, 59, 999_999)]

#: Name, type, values of rows, literals that it is compared with. Few of each, so that they often meet.
COLUMNS: tuple[tuple[str, Any, list[Any], list[Any]], ...] = (
    ("flag", pa.bool_(), [False, True], [False, True]),
    ("tiny", pa.int8(), [*_SMALL, 127, -128], _NUMBERS),
    ("octet", pa.uint8(), [0, 1, 2, 3, 255], _NUMBERS),
    ("wide", pa.int64(), _WIDE, _NUMBERS),
    ("single", pa.float32(), [*_FLOATS, float(2**24)], _NUMBERS),
    ("double", pa.float64(), _FLOATS, _NUMBERS),
    ("money", pa.decimal128(9, 2), _DECIMALS, _NUMBERS),
    ("name", pa.string(), _LETTERS, _LETTERS),
    ("long_name", pa.large_string(), _LETTERS, _LETTERS),
    ("data", pa.binary(), _OCTETS, _OCTETS),
    ("code", pa.binary(2), [b"ab", b"ba", b"\xff\xff"], _OCTETS),
    ("day", pa.date32(), _DATES, [*_DATES, *_MOMENTS]),
    ("moment", pa.timestamp("us"), _MOMENTS, [*_DATES, *_MOMENTS]),
    ("exact", pa.timestamp("ns"), _MOMENTS, [*_DATES, *_MOMENTS]),
    (
        "rough",
        pa.timestamp("s"),
        [moment for moment in _MOMENTS if not moment.microsecond],
        [*_DATES, *_MOMENTS],
    ),
    ("zoned", pa.timestamp("us", "UTC"), _AWARE, [*_DATES, *_MOMENTS, *_AWARE]),
    ("clock", pa.time64("us"), _TIMES, _TIMES),
    ("label", pa.dictionary(pa.int32(), pa.string()), _LETTERS, _LETTERS),
)
_INNER = pa.struct([("city", pa.string()), ("number", pa.int16())])
_INNER_VALUES = [{"city": city, "number": number} for city in (None, "a", "ab") for number in (None, *_SMALL)]
SCHEMA = pa.schema([(name, data_type) for name, data_type, *_ in COLUMNS] + [("address", _INNER)])
_FIELDS = (
    *(((name,), data_type, fitting) for name, data_type, _, fitting in COLUMNS),
    (("address", "city"), pa.string(), _LETTERS),
    (("address", "number"), pa.int16(), _NUMBERS),
)


def batches() -> st.SearchStrategy[pa.RecordBatch]:
    """Rows of ``SCHEMA``, with nulls, as a slice of a longer batch."""
    return st.builds(_batch, st.integers(0, 2**32), st.sampled_from([0, 1, 40, 40, 40, 40]))


def _batch(seed: int, rows: int) -> pa.RecordBatch:
    # By a seed: drawing each value would leave hypothesis little for the predicates.
    chosen = random.Random(seed)
    count = rows + 2
    columns = [
        pa.array(chosen.choices([None, *values], k=count), data_type) for _, data_type, values, _ in COLUMNS
    ]
    inner = pa.array(chosen.choices([None, *_INNER_VALUES], k=count), _INNER)
    return pa.record_batch([*columns, inner], schema=SCHEMA).slice(1, rows)


@st.composite
def _fitting_leaf(draw: st.DrawFn, names: Collection[str] | None) -> Predicate:
    fields = [each for each in _FIELDS if names is None or each[0][0] in names]
    path, data_type, fitting = draw(st.sampled_from(fields))
    literals_here = st.sampled_from([None, *fitting])
    choice = draw(st.integers(0, 9))
    if choice == 0:
        return IsNull(path, draw(st.booleans()))
    if choice == 1 and (pa.types.is_string(data_type) or pa.types.is_large_string(data_type)):
        return Prefix(path, draw(st.sampled_from(_LETTERS)))
    if choice <= 3:
        values = draw(st.lists(literals_here, min_size=1, max_size=4))
        if pa.types.is_floating(data_type) and any(isinstance(value, float) for value in values):
            values = [value for value in values if not isinstance(value, Decimal)]
        return In(path, tuple(values), draw(st.booleans()))
    if choice == 4:
        return draw(st.sampled_from([Always(), Never(), IsNull(("address",))]))
    return Compare(path, draw(st.sampled_from(OPERATORS)), draw(literals_here))


def fitting_predicates(names: Collection[str] | None = None) -> st.SearchStrategy[Predicate]:
    """Predicates that fit ``SCHEMA``, on these columns; see the module for their limits."""
    return _joined(_fitting_leaf(names), max_leaves=4)
