"""pyarrow expressions to filters: the same rows as Arrow's own filter, literals with their types."""

# Timestamps without a zone are among what is tested.
# ruff: noqa: DTZ001

from __future__ import annotations

import math
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.predicates import COLUMNS, batches
from tidemill.errors import TableCode, TableError
from tidemill.tables.predicates.arrow import from_arrow
from tidemill.tables.predicates.predicate import (
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
    bind,
)

A, B = ("a",), ("b",)
a, b = pc.field("a"), pc.field("b")


def refusal(expression: Any) -> str:
    with pytest.raises(TableError) as caught:
        from_arrow(expression)
    assert caught.value.table_code is TableCode.invalid_predicate
    return caught.value.message


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (a == 1, Compare(A, "=", 1)),
        (a != 1, Compare(A, "!=", 1)),
        (a < 1, Compare(A, "<", 1)),
        (a <= 1, Compare(A, "<=", 1)),
        (a > 1, Compare(A, ">", 1)),
        (a >= 1, Compare(A, ">=", 1)),
        (pc.scalar(1) < a, Compare(A, ">", 1)),
        (pc.scalar(1) >= a, Compare(A, "<=", 1)),
        (pc.greater(a, 1), Compare(A, ">", 1)),
        (a == None, Compare(A, "=", None)),  # noqa: E711
        (pc.field("s", "t", "u") == 1, Compare(("s", "t", "u"), "=", 1)),
        (pc.field(("s", "t")).is_null(), IsNull(("s", "t"))),
        (pc.field("a.b'\n\"\u00e9") == 1, Compare(("a.b'\n\"\u00e9",), "=", 1)),
        (a.is_null(), IsNull(A)),
        (a.is_null(nan_is_null=True), Or((IsNull(A), Compare(A, "=", math.nan)))),
        (a.is_valid(), IsNull(A, True)),
        (a.is_nan(), Compare(A, "=", math.nan)),
        (a.isin([1, 2]), And((In(A, (1, 2)), IsNull(A, True)))),
        (a.isin(pa.array(["x"], pa.large_string())), And((In(A, ("x",)), IsNull(A, True)))),
        (a.isin([1, None]), Or((And((In(A, (1,)), IsNull(A, True))), IsNull(A)))),
        (a.isin([None]), IsNull(A)),
        (a.isin([]), Never()),
        (
            pc.is_in(a, value_set=pa.array([1, None]), skip_nulls=True),
            And((In(A, (1,)), IsNull(A, True))),
        ),
        (pc.starts_with(a, "x%"), Prefix(A, "x%")),
        (a, Compare(A, "=", True)),
        (~a, Not(Compare(A, "=", True))),
        (pc.scalar(True), Always()),
        (pc.scalar(False), Never()),
        ((a == 1) & (b == 2) & (a > 3), And((Compare(A, "=", 1), Compare(B, "=", 2), Compare(A, ">", 3)))),
        ((a == 1) & ((b == 2) & (a > 3)), And((Compare(A, "=", 1), Compare(B, "=", 2), Compare(A, ">", 3)))),
        (
            ((a == 1) | (b == 2)) & ~((a > 3) | b),
            And(
                (
                    Or((Compare(A, "=", 1), Compare(B, "=", 2))),
                    Not(Or((Compare(A, ">", 3), Compare(B, "=", True)))),
                )
            ),
        ),
    ],
    ids=str,
)
def test_understands(expression: Any, expected: Predicate) -> None:
    assert from_arrow(expression) == expected


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        (True, True),
        (1, 1),
        (pa.scalar(-1, pa.int8()), -1),
        (pa.scalar(2**64 - 1, pa.uint64()), 2**64 - 1),
        (1.5, 1.5),
        (pa.scalar(0.1, pa.float32()), float(np.float32(0.1))),
        (math.nan, math.nan),
        (-0.0, -0.0),
        (Decimal("1.50"), Decimal("1.50")),
        (pa.scalar(Decimal("1.5"), pa.decimal256(60, 3)), Decimal("1.500")),
        ("x\"'\n", "x\"'\n"),
        ("true", "true"),
        ("1", "1"),
        (pa.scalar("x", pa.large_string()), "x"),
        (b"\x00\xff", b"\x00\xff"),
        (pa.scalar(b"ab", pa.binary(2)), b"ab"),
        (date(2024, 2, 29), date(2024, 2, 29)),
        (pa.scalar(date(2024, 2, 29), pa.date64()), datetime(2024, 2, 29)),
        (datetime(2024, 2, 29, 1), datetime(2024, 2, 29, 1)),
        (datetime(2024, 2, 29, 1, tzinfo=UTC), datetime(2024, 2, 29, 1, tzinfo=UTC)),
        (pa.scalar(1, pa.timestamp("ns")), Timestamp(1, False)),
        (pa.scalar(1, pa.timestamp("s", "Europe/Berlin")), Timestamp(10**9, True)),
        (time(1, 2, 3), time(1, 2, 3)),
        (pa.scalar(1, pa.time64("ns")), TimeOfDay(1)),
        (pa.scalar(1, pa.time32("ms")), TimeOfDay(10**6)),
        (pa.scalar(None, pa.int8()), None),
    ],
    ids=repr,
)
def test_literals_keep_their_types(scalar: Any, value: Any) -> None:
    literal = scalar if isinstance(scalar, pa.Scalar) else pa.scalar(scalar)
    assert from_arrow(a == literal) == Compare(A, "=", value)
    if value is not None:
        members = pa.array(
            [literal.as_py()] if literal.type == pa.large_string() else [literal], literal.type
        )
        assert from_arrow(a.isin(members)) == And((In(A, (value,)), IsNull(A, True)))


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        (a == b, "something else than a field with a value"),
        (pc.scalar(1) == pc.scalar(1), "something else than a field"),
        (a + 1 == 2, "add"),
        (a.cast(pa.int8()) == 1, "cast"),
        (pc.if_else(a, b, a), "if_else"),
        (pc.and_(a, b), "joined by &"),
        (pc.or_(a, b), "joined by &, |"),
        (pc.xor(a, b), "xor"),
        (pc.starts_with(a, "x", ignore_case=True), "case"),
        (pc.match_substring(a, "x"), "match_substring"),
        (pc.is_in(a + 1, value_set=pa.array([1])), "add"),
        (a == pa.scalar([1]), "list"),
        (a == pa.scalar(1, pa.duration("s")), "duration"),
        (a == pa.scalar(10**9, pa.date32()), "years"),
        (a == pa.scalar(10**15, pa.timestamp("s")), "years"),
        (pc.field(0) == 1, "by number"),
        (pc.scalar(1), "neither true nor false"),
        (pc.scalar(None), "neither true nor false"),
        ((a == 1) & pc.scalar("x"), "neither true nor false"),
        ((a == 1) == True, "something else than a field"),  # noqa: E712
        ((a == 1).is_null(), "something else than a field"),
        (a.isin(range(10_001)), "10001"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refuses_what_no_filter_can_be(expression: Any, said: str) -> None:
    message = refusal(expression)
    assert said in message
    assert len(message) < 600


def test_long_chains_are_read_quickly() -> None:
    expression = a == 0
    for number in range(1, 3_000):
        expression = expression | (a == number)
    found = from_arrow(expression)
    assert isinstance(found, Or)
    assert len(found.terms) == 3_000


def test_deep_nesting_is_refused() -> None:
    expression = a
    for _ in range(65):
        expression = ~expression
    assert "levels" in refusal(expression)


#: Arrow compares float columns otherwise (NaN), and cannot compare some types with a literal of a wider one.
_COMPARED = [
    (name, data_type, values)
    for name, data_type, values, _ in COLUMNS
    if not pa.types.is_floating(data_type) and not pa.types.is_dictionary(data_type)
]


@st.composite
def _leaves(draw: st.DrawFn) -> Any:
    name, data_type, values = draw(st.sampled_from(_COMPARED))
    field = pc.field(name)
    literal = pa.scalar(draw(st.sampled_from(values)), data_type)
    members = pa.array(draw(st.lists(st.sampled_from([None, *values]), max_size=3)), data_type)
    choices = [
        field == literal,
        field != literal,
        field < literal,
        literal_expression(literal) <= field,
        field > literal,
        field >= literal,
        field.isin(members),
        pc.is_in(field, value_set=members, skip_nulls=True),
        field.is_null(),
        field.is_valid(),
        pc.field("flag"),
        pc.scalar(True),
    ]
    if pa.types.is_string(data_type):
        choices.append(pc.starts_with(field, literal.as_py()))
    return draw(st.sampled_from(choices))


def literal_expression(literal: pa.Scalar) -> Any:
    return pc.scalar(literal)


_expressions = st.recursive(
    _leaves(),
    lambda terms: st.one_of(
        st.tuples(terms, terms).map(lambda pair: pair[0] & pair[1]),
        st.tuples(terms, terms).map(lambda pair: pair[0] | pair[1]),
        terms.map(lambda term: ~term),
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=400)
@given(batches(), _expressions)
def test_passes_the_rows_that_arrow_passes(batch: pa.RecordBatch, expression: Any) -> None:
    numbered = pa.Table.from_batches([batch]).append_column(
        "number", pa.array(range(batch.num_rows), pa.int64())
    )
    expected = numbered.filter(expression)["number"].to_pylist()
    mask = bind(from_arrow(expression), batch.schema).mask(batch)
    assert [number for number, passes in enumerate(mask.to_pylist()) if passes] == expected
