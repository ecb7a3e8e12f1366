"""SQL text to filters: what is understood, what is refused and how, and that hostile text is harmless."""

# Timestamps without a zone are among what is tested.
# ruff: noqa: DTZ001

from __future__ import annotations

import math
import sys
import time as clock
from datetime import UTC, date, datetime, time
from decimal import Decimal
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.machine import slowness
from support.predicates import predicates
from tidemill.errors import TableCode, TableError
from tidemill.tables.predicates.predicate import (
    DEPTH_MAX,
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
    to_sql,
)
from tidemill.tables.predicates.sql import TEXT_BYTES_MAX, parse_sql

A, B, C, D = ("a",), ("b",), ("c",), ("d",)


def refusal(text: str) -> str:
    with pytest.raises(TableError) as caught:
        parse_sql(text)
    assert caught.value.table_code is TableCode.invalid_predicate
    return caught.value.message


@given(predicates())
@example(Not(Not(In(A, (None, -1, Decimal(-1), -1e-300), True))))
@example(Compare(("NOT", "and", "`", '"', "'"), "=", "\\"))
def test_sql_of_a_tree_is_read_as_the_same_tree(predicate: Predicate) -> None:
    assert parse_sql(to_sql(predicate)) == predicate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1", Compare(A, "=", 1)),
        ("a == 1", Compare(A, "=", 1)),
        ("a <> 1", Compare(A, "!=", 1)),
        ("a != 1", Compare(A, "!=", 1)),
        ("a<1", Compare(A, "<", 1)),
        ("a <= 1", Compare(A, "<=", 1)),
        ("a > 1", Compare(A, ">", 1)),
        ("a >= 1", Compare(A, ">=", 1)),
        ("a <=> NULL", Compare(A, "<=>", None)),
        ("a IS NOT DISTINCT FROM 1", Compare(A, "<=>", 1)),
        ("a is distinct from 1", Not(Compare(A, "<=>", 1))),
        ("1 < a", Compare(A, ">", 1)),
        ("1 >= a", Compare(A, "<=", 1)),
        ("1 = a", Compare(A, "=", 1)),
        ("1 <=> a", Compare(A, "<=>", 1)),
        ("NULL = a", Compare(A, "=", None)),
        ("(a) = ((1))", Compare(A, "=", 1)),
        ("a IN (1, 'x', NULL)", In(A, (1, "x", None))),
        ("a NOT IN (1)", In(A, (1,), True)),
        ("NOT a IN (1)", Not(In(A, (1,)))),
        ("a IN ((1), -(2))", In(A, (1, -2))),
        ("a BETWEEN 1 AND 2", And((Compare(A, ">=", 1), Compare(A, "<=", 2)))),
        ("a NOT BETWEEN 1 AND 2", Not(And((Compare(A, ">=", 1), Compare(A, "<=", 2))))),
        (
            "a BETWEEN 1 AND 2 AND b BETWEEN 3 AND 4 OR c",
            Or(
                (
                    And((Compare(A, ">=", 1), Compare(A, "<=", 2), Compare(B, ">=", 3), Compare(B, "<=", 4))),
                    Compare(C, "=", True),
                )
            ),
        ),
        ("a IS NULL", IsNull(A)),
        ("a IS NOT NULL", IsNull(A, True)),
        ("NOT a IS NULL", Not(IsNull(A))),
        ("a IS TRUE", Compare(A, "<=>", True)),
        ("a IS NOT FALSE", Not(Compare(A, "<=>", False))),
        ("a", Compare(A, "=", True)),
        ("NOT a", Not(Compare(A, "=", True))),
        ("(a)", Compare(A, "=", True)),
        ("TRUE", Always()),
        ("false", Never()),
        ("a LIKE 'abc%'", Prefix(A, "abc")),
        ("a NOT LIKE 'abc%'", Not(Prefix(A, "abc"))),
        ("a LIKE 'abc'", Compare(A, "=", "abc")),
        ("a LIKE '%'", Prefix(A, "")),
        (r"a LIKE '5\%\_\\%'", Prefix(A, "5%_\\")),
        ("a LIKE '5!%!_!!%' ESCAPE '!'", Prefix(A, "5%_!")),
        ("a NOT LIKE '5!%%' ESCAPE '!'", Not(Prefix(A, "5%"))),
        (r"a LIKE 'c:\x%' ESCAPE '!'", Prefix(A, "c:\\x")),
        ("starts_with(a, 'x%')", Prefix(A, "x%")),
        ("STARTSWITH(a.b, '')", Prefix(("a", "b"), "")),
        (
            "a = 1 OR b = 2 AND NOT c = 3",
            Or((Compare(A, "=", 1), And((Compare(B, "=", 2), Not(Compare(C, "=", 3)))))),
        ),
        (
            "(a OR b) AND (c OR d)",
            And((Or((parse_sql("a"), parse_sql("b"))), Or((parse_sql("c"), parse_sql("d"))))),
        ),
        ("NOT (a OR b) AND c", And((Not(Or((parse_sql("a"), parse_sql("b")))), parse_sql("c")))),
        ("NOT NOT a", Not(Not(parse_sql("a")))),
        ("a AND (b AND (c AND d))", And(tuple(map(parse_sql, "abcd")))),
        ("((a = 1))", Compare(A, "=", 1)),
        ("((a) = 1)", Compare(A, "=", 1)),
        ('"Strange Name" = 1', Compare(("Strange Name",), "=", 1)),
        ("`Strange Name` = 1", Compare(("Strange Name",), "=", 1)),
        ('"a""b".`c``d` = 1', Compare(('a"b', "c`d"), "=", 1)),
        ("a.b.c.d.e.f = 1", Compare(tuple("abcdef"), "=", 1)),
        ("address.city = 'x'", Compare(("address", "city"), "=", "x")),
        ("key = 1 AND value = 2", And((Compare(("key",), "=", 1), Compare(("value",), "=", 2)))),
        ("date > 1 OR timestamp > 2", Or((Compare(("date",), ">", 1), Compare(("timestamp",), ">", 2)))),
        (
            "offset > 1 AND partition = 2",
            And((Compare(("offset",), ">", 1), Compare(("partition",), "=", 2))),
        ),
        ("größe = 1", Compare(("größe",), "=", 1)),
        ("a = 1 -- comment", Compare(A, "=", 1)),
    ],
)
def test_understands(text: str, expected: Predicate) -> None:
    assert parse_sql(text) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'it''s \\n'", "it's \\n"),
        ("''", ""),
        ("0", 0),
        ("-7", -7),
        ("99999999999999999999999999999999999999", 10**38 - 1),
        ("1.50", Decimal("1.50")),
        ("-1.5", Decimal("-1.5")),
        (".5", Decimal("0.5")),
        ("5.", Decimal(5)),
        ("-" + "1" * 37 + ".1", Decimal("-" + "1" * 37 + ".1")),
        ("1e3", 1000.0),
        ("-1.5E-3", -0.0015),
        ("true", True),
        ("NULL", None),
        ("X'00ff'", b"\x00\xff"),
        ("x''", b""),
        ("DATE '2024-02-29'", date(2024, 2, 29)),
        ("CAST('2024-02-29' AS DATE)", date(2024, 2, 29)),
        ("'2024-02-29'::date", date(2024, 2, 29)),
        ("TIMESTAMP '2024-02-29 12:30:00.25'", datetime(2024, 2, 29, 12, 30, 0, 250_000)),
        ("TIMESTAMP '2024-02-29'", datetime(2024, 2, 29)),
        ("TIMESTAMP '1970-01-01T00:00:00.123456789'", Timestamp(123_456_789, False)),
        ("TIMESTAMP '2024-02-29 12:30:00+02:00'", datetime(2024, 2, 29, 10, 30, tzinfo=UTC)),
        ("TIMESTAMPTZ '2024-02-29 12:30'", datetime(2024, 2, 29, 12, 30, tzinfo=UTC)),
        ("CAST('2024-02-29 12:30Z' AS TIMESTAMP WITH TIME ZONE)", datetime(2024, 2, 29, 12, 30, tzinfo=UTC)),
        ("CAST('2024-02-29' AS TIMESTAMP_NTZ)", datetime(2024, 2, 29)),
        ("TIME '23:59:59.999999'", time(23, 59, 59, 999_999)),
        ("TIME '00:00:00.000000001'", TimeOfDay(1)),
        ("CAST('NaN' AS DOUBLE)", math.nan),
        ("CAST('-Infinity' AS DOUBLE)", -math.inf),
    ],
)
def test_literals_have_their_types(text: str, value: Any) -> None:
    assert parse_sql(f"a = {text}") == Compare(A, "=", value)
    assert parse_sql(f"a IN ({text}, 1)") == In(A, (value, 1))


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("-- only a comment", "empty"),
        ("a =", "a ="),
        ("= 1", "= 1"),
        ("a = 1 AND", "AND"),
        ("AND a = 1", "AND"),
        ("a = 1 OR OR b", "OR"),
        ("NOT", "NOT"),
        ("a = 1 b = 2", "a = 1 b = 2"),
        ("(a = 1) b", "b"),
        ("(a = 1) (b = 2)", "(b = 2)"),
        ("(a = 1", "(a = 1"),
        ("a = 1)", ")"),
        ("()", ")"),
        ("a = (1", "(1"),
        ("a = 1; DROP TABLE t", "a = 1; DROP TABLE t"),
        ("a = 'open", "not SQL"),
        ("a = b", "two columns"),
        ("a = a.b", "two columns"),
        ("1 = 1", "1 = 1"),
        ("1", "1"),
        ("'x'", "'x'"),
        ("NULL", "NULL"),
        ("a + 1 = 2", "a + 1 = 2"),
        ("a = 1 + 1", "1 + 1"),
        ("a = 1 = 2", "a = 1 = 2"),
        ("a < 1 < 2", "a < 1 < 2"),
        ("lower(a) = 'x'", "lower(a)"),
        ("a = now()", "now()"),
        ("a = current_date", "current_date"),
        ("a = -'x'", "no number"),
        ("a = -TRUE", "no number"),
        ("a IN (SELECT 1)", "SELECT 1"),
        ("a IN ()", "no values"),
        ("a IN (b)", "a IN (b)"),
        ("(a, b) IN ((1, 2))", "(a, b)"),
        ("1 IN (1)", "1 IN (1)"),
        ("a = (SELECT 1)", "SELECT 1"),
        ("EXISTS (SELECT 1)", "EXISTS"),
        ("SELECT 1", "SELECT 1"),
        ("a BETWEEN 1", "BETWEEN 1"),
        ("a BETWEEN SYMMETRIC 1 AND 2", "SYMMETRIC"),
        ("1 BETWEEN a AND b", "1 BETWEEN a"),
        ("a IS 1", "IS 1"),
        ("a LIKE '%x'", "wildcard"),
        ("a LIKE 'x_'", "wildcard"),
        ("a LIKE 'x%y%'", "wildcard"),
        ("a LIKE 'x%%'", "wildcard"),
        (r"a LIKE 'x\'", "\\"),
        (r"a LIKE 'x\y'", "\\"),
        ("a LIKE 'x' ESCAPE '!!'", "ESCAPE"),
        ("a LIKE 'x' ESCAPE b", "ESCAPE b"),
        ("a LIKE b", "LIKE b"),
        ("a LIKE 1", "LIKE 1"),
        ("a LIKE ANY ('x')", "ANY"),
        ("a ILIKE 'x%'", "ILIKE"),
        ("a RLIKE 'x'", "RLIKE"),
        ("a SIMILAR TO 'x'", "SIMILAR"),
        ("starts_with(a)", "starts_with(a)"),
        ("starts_with(a, b)", "starts_with(a, b)"),
        ("starts_with('x', 'x')", "starts_with('x', 'x')"),
        ("CASE WHEN a THEN b END", "CASE"),
        ("a = CASE WHEN TRUE THEN 1 END", "CASE"),
        ("a = ?", "a = ?"),
        ("a = :x", ":x"),
        ("a = @x", "@x"),
        ("a[1] = 1", "a[1]"),
        ("a:b = 1", "a:b"),
        ("a->'$.b' = 1", "->"),
        ("a.* = 1", "a.*"),
        ("* = 1", "* = 1"),
        ("a = 1e999", "too large"),
        ("a = 1_000", "1_000"),
        ("a = 10L", "10L"),
        ("a = 0x1f", "0x1f"),
        (f"a = {'9' * 77}", "76"),
        (f"a = {'9' * 5000}", "76"),
        ("a = X'0'", "hexadecimal"),
        ("a = X'zz'", "X'zz'"),
        ("a = N'x'", "N'x'"),
        ("a = 'x' 'y'", "'x' 'y'"),
        ("a = 'x' || 'y'", "||"),
        ("a = DATE '2024-02-30'", "DATE"),
        ("a = TIMESTAMP 'yesterday'", "yesterday"),
        ("a = TIMESTAMP_NTZ '2024-01-01 00:00Z'", "TIMESTAMPNTZ"),
        ("a = TIME '24:00'", "TIME"),
        ("a = CAST('x' AS DOUBLE)", "DOUBLE"),
        ("a = CAST(1 AS DATE)", "CAST"),
        ("a = CAST('1' AS INT)", "CAST"),
        ("a = CAST(b AS DATE)", "CAST"),
        ("CAST(a AS DATE) = DATE '2024-01-01'", "CAST"),
        ("a = TRY_CAST('2024-01-01' AS DATE)", "TRY_CAST"),
        ("a = CAST('12:00' AS TIMESTAMP(3))", "CAST"),
        ("a = INTERVAL '1' DAY", "INTERVAL"),
        ("a COLLATE x = 'y'", "COLLATE"),
        ("a = 1 XOR b", "XOR"),
        ('"" = 1', "empty"),
        ("a AS b", "AS b"),
        ("a = 1 ORDER BY a", "ORDER BY"),
        ("a = 1 LIMIT 1", "LIMIT"),
    ],
)
def test_refuses_and_quotes_the_part_at_fault(text: str, quoted: str) -> None:
    message = refusal(text)
    assert quoted in message
    assert len(message) < 500


def test_only_the_part_at_fault_is_quoted() -> None:
    message = refusal("good = 1 AND (fine IS NULL OR lower(bad) = 'x')")
    assert "'lower(bad) = \\'x\\''" in message or "\"lower(bad) = 'x'\"" in message
    assert "good" not in message
    assert "= <> <" in message


def test_brackets_nest_to_the_limit_and_no_deeper() -> None:
    assert parse_sql("(" * DEPTH_MAX + "a" + ")" * DEPTH_MAX) == parse_sql("a")
    assert str(DEPTH_MAX) in refusal("(" * (DEPTH_MAX + 1) + "a" + ")" * (DEPTH_MAX + 1))
    alternating = "a" + "".join(f" {'AND' if level % 2 else 'OR'} b)" for level in range(DEPTH_MAX))
    assert parse_sql("(" * DEPTH_MAX + alternating).size.depth == DEPTH_MAX
    assert parse_sql("NOT " * DEPTH_MAX + "a").size.depth == DEPTH_MAX
    assert "levels" in refusal("NOT " * (DEPTH_MAX + 1) + "a")


def test_nesting_needs_little_stack() -> None:
    depth = len(clock_frames())
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + 400)
    try:
        parse_sql("(" * DEPTH_MAX + "a = 1 AND b" + ")" * DEPTH_MAX)
    finally:
        sys.setrecursionlimit(limit)


def clock_frames() -> list[Any]:
    frames: list[Any] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def test_length_and_numbers_are_limited() -> None:
    assert "bytes" in refusal("a = '" + "x" * TEXT_BYTES_MAX + "'")
    assert "bytes" in refusal("a = '" + "é" * (TEXT_BYTES_MAX // 2) + "'")
    most = parse_sql(f"a IN ({','.join(['1'] * 10_000)})")
    assert isinstance(most, In)
    assert len(most.values) == 10_000
    assert "values" in refusal(f"a IN ({','.join(['1'] * 10_001)})")
    assert "10000" in refusal(" OR ".join(["a"] * 10_001))


@pytest.mark.parametrize(
    "text",
    [
        "(" * 60_000,
        ")" * 60_000,
        "NOT " * 16_000 + "a",
        "a = " + "- " * 30_000 + "1",
        "a = " + "(" * 30_000 + "1" + ")" * 30_000,
        "a = " + "(" * 60 + "1" + ")" * 60,
        "a" + ".a" * 30_000 + " = 1",
        "a = 1" + " + 1" * 15_000,
        "a" + " = a" * 15_000,
        "CASE WHEN " * 6_000,
        "a IN (" * 10_000,
        "a IN (" + "CASE " * 12_000 + ")",
        "a = " + "DATE " * 12_000,
        "a" + "[a" * 30_000,
        "a" + "::date" * 10_000,
        "a BETWEEN " * 6_000,
        "a IS NOT DISTINCT FROM " * 2_800 + "1",
        "EXISTS " * 9_000,
        "SELECT " * 9_000,
        "INTERVAL " * 7_000,
        "a LIKE " * 9_000 + "'x'",
        "'" * 60_001,
        "/*" * 30_000,
        ";" * 60_000,
        "," * 60_000,
        "a OR " * 12_000 + "a",
    ],
    ids=lambda text: text[:16],
)
def test_hostile_text_is_refused_in_little_time(text: str) -> None:
    started = clock.process_time()
    refusal(text)
    assert clock.process_time() - started < 3 * slowness()


_SPACED = r"""
    a b `e` . , ( ) = <> < <=> - + * / || [ ] { } ? : :: ; @ # $ -> => ~ ! % & | ^ \ é
    1 -1 2.5 3e4 'x' '%' X'00'
    AND OR NOT IN IS NULL BETWEEN LIKE ESCAPE DISTINCT FROM TRUE DATE TIMESTAMP CAST AS CASE WHEN THEN END
    SELECT WITH EXISTS ANY ALL INTERVAL starts_with UNION ORDER BY
"""
_WORDS = st.sampled_from([*_SPACED.split(), '"c d"', "\n", "\x00"])


@given(st.lists(_WORDS, max_size=12).map(" ".join))
def test_any_words_are_a_tree_or_refused(text: str) -> None:
    try:
        predicate = parse_sql(text)
    except TableError as error:
        assert error.table_code is TableCode.invalid_predicate
    else:
        assert parse_sql(to_sql(predicate)) == predicate


@given(st.text(max_size=20))
def test_any_text_is_a_tree_or_refused(text: str) -> None:
    try:
        assert isinstance(parse_sql(text), Predicate)
    except TableError as error:
        assert error.table_code is TableCode.invalid_predicate
