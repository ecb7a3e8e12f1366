"""Spark's filters on the server: no row that Spark would keep is left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import datasource as spark

from tidemill.spark.reading.filters import to_predicate
from tidemill.tables.predicates.predicate import bind
from tidemill.tables.rows.types import parse_columns

SCHEMA = parse_columns(
    "i bigint, d double, s string, b boolean, dt date, ts timestamp, de decimal(10,2), st struct<x:int>, "
    "l array<int>"
)


@pytest.mark.parametrize(
    ("given_filter", "sql"),
    [
        (spark.EqualTo(("i",), 5), '"i" = 5'),
        (spark.EqualNullSafe(("i",), None), '"i" IS NOT DISTINCT FROM NULL'),
        (spark.GreaterThan(("i",), 5), '"i" > 5'),
        (spark.LessThanOrEqual(("d",), 0.5), '"d" <= 0.5e0'),
        (spark.In(("s",), ("a", "b")), "\"s\" IN ('a', 'b')"),
        (spark.IsNull(("l",)), '"l" IS NULL'),
        (spark.IsNotNull(("st", "x")), '"st"."x" IS NOT NULL'),
        (spark.Not(spark.EqualTo(("b",), True)), None),
        (spark.StringStartsWith(("s",), "ab"), None),
        (spark.EqualTo(("dt",), date(2026, 1, 2)), None),
        (spark.LessThan(("ts",), datetime(2026, 1, 2, tzinfo=UTC)), None),
        (spark.GreaterThanOrEqual(("de",), Decimal("1.50")), None),
    ],
)
def test_a_filter_that_the_server_knows_is_sent(given_filter: Any, sql: str | None) -> None:
    predicate = to_predicate([given_filter], SCHEMA)
    assert predicate is not None
    if sql is not None:
        assert str(predicate) == sql


@pytest.mark.parametrize(
    "given_filter",
    [
        spark.StringContains(("s",), "x"),
        spark.StringEndsWith(("s",), "x"),
        spark.GreaterThan(("d",), 0.5),
        spark.Not(spark.LessThan(("d",), 0.5)),
        spark.EqualTo(("d",), math.nan),
        spark.In(("d",), (1.0, math.nan)),
        spark.EqualTo(("l",), [1]),
        spark.EqualTo(("missing",), 1),
    ],
)
def test_a_filter_that_could_lose_rows_or_is_unknown_is_left_to_spark(given_filter: Any) -> None:
    assert to_predicate([given_filter], SCHEMA) is None
    both = to_predicate([given_filter, spark.EqualTo(("i",), 5)], SCHEMA)
    assert str(both) == '"i" = 5'


numbers = st.none() | st.sampled_from([0.0, -0.0, 1.5, math.nan, math.inf, -math.inf])


def _spark_order(value: float) -> tuple[int, float]:
    """Spark's order of doubles: NaN is equal to itself and larger than everything."""
    return (1, 0.0) if math.isnan(value) else (0, value)


@given(st.lists(numbers, min_size=1), st.sampled_from([0.0, 1.5, math.inf]), st.booleans())
def test_no_double_that_spark_would_keep_is_lost(values: list[Any], literal: float, negated: bool) -> None:
    batch = pa.record_batch({"d": pa.array(values, pa.float64())})
    order: dict[Any, Callable[[float], bool]] = {
        spark.EqualTo: lambda v: _spark_order(v) == _spark_order(literal),
        spark.LessThan: lambda v: _spark_order(v) < _spark_order(literal),
        spark.LessThanOrEqual: lambda v: _spark_order(v) <= _spark_order(literal),
        spark.GreaterThan: lambda v: _spark_order(v) > _spark_order(literal),
        spark.GreaterThanOrEqual: lambda v: _spark_order(v) >= _spark_order(literal),
    }
    for kind, keeps in order.items():
        plain = kind(("d",), literal)
        predicate = to_predicate([spark.Not(plain) if negated else plain], batch.schema)
        if predicate is None:
            continue
        mask = bind(predicate, batch.schema).mask(batch).to_pylist()
        for value, passes in zip(values, mask, strict=True):
            kept = value is not None and keeps(value) is not negated
            assert passes or not kept, (kind.__name__, value, literal)
