"""Filters: the tree and its limits, its bytes, and what it says about rows and keys."""

# Timestamps without a zone are among what is tested.
# ruff: noqa: DTZ001

from __future__ import annotations

import math
import time as clock
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import duckdb
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.machine import slowness
from support.predicates import SCHEMA, batches, fitting_predicates, predicates
from tidemill.errors import TableCode, TableError
from tidemill.tables.predicates.literals import Value
from tidemill.tables.predicates.predicate import (
    DEPTH_MAX,
    ENCODED_BYTES_MAX,
    LITERALS_MAX,
    TERMS_MAX,
    Always,
    And,
    Bound,
    Compare,
    In,
    IsNull,
    KeyBounds,
    Never,
    Not,
    Or,
    Predicate,
    Prefix,
    TimeOfDay,
    Timestamp,
    all_of,
    any_of,
    bind,
    decode,
    encode,
    to_sql,
)

A, B = ("a",), ("b",)
DAY, WIDE, NAME = ("day",), ("wide",), ("name",)
NEW_YEAR = date(2024, 1, 1)
LOW, HIGH = Compare(A, ">", 1), Compare(A, "<", 9)


def refusal(call: Any, *arguments: Any) -> str:
    with pytest.raises(TableError) as caught:
        call(*arguments)
    assert caught.value.table_code is TableCode.invalid_predicate
    return caught.value.message


def passing(predicate: Predicate, values: list[Any], data_type: Any) -> list[Any]:
    """The values of a column ``a`` that pass."""
    batch = pa.record_batch([pa.array(values, data_type)], ["a"])
    mask = bind(predicate, batch.schema).mask(batch)
    assert mask.type == pa.bool_()
    assert not mask.null_count
    return [value for value, passes in zip(values, mask.to_pylist(), strict=True) if passes]


class TestTree:
    def test_and_in_and_is_one_and(self) -> None:
        assert And((LOW, And((HIGH, IsNull(B))))) == And((LOW, HIGH, IsNull(B)))
        assert Or((Or((LOW, HIGH)), IsNull(B))) == Or((LOW, HIGH, IsNull(B)))
        assert And((LOW, Or((HIGH, IsNull(B))))) != And((LOW, HIGH, IsNull(B)))

    def test_literals_are_equal_only_with_their_types(self) -> None:
        numbers: list[Value] = [1, 1.0, True, Decimal(1), Decimal("1.0"), 0.0, -0.0, math.nan]
        values = [*numbers, "1", b"1", None]
        nodes = [Compare(A, "=", value) for value in values]
        assert [[one == other for other in nodes] for one in nodes] == np.eye(len(nodes), dtype=bool).tolist()
        assert len(set(nodes)) == len(nodes)
        assert Compare(A, "=", float("nan")) == Compare(A, "=", math.nan)

    def test_times_become_one_form(self) -> None:
        berlin = datetime(2024, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
        assert Compare(A, "=", berlin) == Compare(A, "=", datetime(2024, 1, 1, tzinfo=UTC))
        assert Compare(A, "=", berlin) != Compare(A, "=", datetime(2024, 1, 1))
        assert Compare(A, "=", time(0, 0, 1)).literal == TimeOfDay(10**9)  # type: ignore[arg-type]  # Made one.
        assert Compare(A, "=", datetime(1969, 12, 31, 23, 59, 59, 999_999)).literal == Timestamp(-1000, False)

    def test_decimals_become_one_form(self) -> None:
        assert str(Compare(A, "=", Decimal("1E+3"))) == '"a" = 1000.'
        assert str(Compare(A, "=", Decimal("-0.00"))) == '"a" = 0.00'

    @pytest.mark.parametrize(
        "value",
        [
            10**76,
            -(10**76),
            10**100_000,
            Decimal("1E+76"),
            Decimal("1E-77"),
            Decimal("1E+999999"),
            Decimal("NaN"),
            Decimal("-Infinity"),
            "\ud800",
            time(1, tzinfo=UTC),
            datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1))),
            object(),
            [1],
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_values_that_are_no_literal_are_refused(self, value: Any) -> None:
        refusal(Compare, A, "=", value)

    @pytest.mark.parametrize("path", ["a", (), ("",), (1,), ("\ud800",), ("a",) * 65])
    def test_what_is_no_path_of_names_is_refused(self, path: Any) -> None:
        refusal(IsNull, path)

    def test_malformed_nodes_are_refused(self) -> None:
        assert "'=='" in refusal(Compare, A, "==", 1)
        refusal(In, A, ())
        refusal(And, (LOW,))
        refusal(Or, ())
        refusal(Not, "a")

    def test_none_and_one_joined(self) -> None:
        assert (all_of([]), any_of([])) == (Always(), Never())
        assert all_of([LOW]) is any_of([LOW]) is LOW

    def test_depth_is_limited(self) -> None:
        node: Predicate = LOW
        for _ in range(DEPTH_MAX):
            node = Not(node)
        assert str(node).count("NOT") == DEPTH_MAX
        assert "65 levels" in refusal(Not, node)
        assert "65 levels" in refusal(And, (node, LOW))

    def test_numbers_of_values_and_parts_are_limited(self) -> None:
        full = In(A, tuple(range(LITERALS_MAX)))
        assert f"{LITERALS_MAX + 1} values" in refusal(And, (full, LOW))
        refusal(In, A, tuple(range(LITERALS_MAX + 1)))
        And((full, *[IsNull(A)] * (TERMS_MAX - 1)))
        assert "parts" in refusal(Or, (IsNull(A),) * (TERMS_MAX + 1))

    def test_shows_itself_as_sql(self) -> None:
        node = Or((And((LOW, In(B, ("x", None), True))), Not(Prefix(("s", 'q"'), "it's")), Always()))
        expected = (
            """("a" > 1 AND "b" NOT IN ('x', NULL)) OR """
            'NOT (starts_with("s"."q""", \'it\'\'s\')) OR TRUE'
        )
        assert str(node) == to_sql(node) == expected
        assert repr(node) == f"<Or {expected}>"


class TestBytes:
    @given(predicates())
    @example(Compare(A, "=", math.nan))
    @example(In(A, (2**63 - 1, 2**63, -(2**63), -(2**63) - 1)))
    def test_come_back_as_the_same_tree(self, predicate: Predicate) -> None:
        assert decode(encode(predicate)) == predicate

    @given(st.binary(max_size=64))
    def test_any_bytes_are_a_tree_or_refused(self, data: bytes) -> None:
        try:
            assert isinstance(decode(data), Predicate)
        except TableError as error:
            assert error.table_code is TableCode.invalid_predicate

    @given(predicates(), st.data())
    def test_damaged_bytes_are_a_tree_or_refused(self, predicate: Predicate, data: st.DataObject) -> None:
        damaged = bytearray(encode(predicate))
        place = data.draw(st.integers(0, len(damaged) - 1))
        if data.draw(st.booleans()):
            damaged[place] = data.draw(st.integers(0, 255))
        else:
            del damaged[place:]
        try:
            assert isinstance(decode(bytes(damaged)), Predicate)
        except TableError as error:
            assert error.table_code is TableCode.invalid_predicate

    @pytest.mark.parametrize(
        "nodes",
        [
            [],
            [[8], [8]],
            [[5, 2], [8], [8]],
            [[8], [5, 1]],
            [[8], [8], [5, 3]],
            [[8], [5, -1]],
            [[7]],
            [[8], [8], [5, 2], [8], [5, 2]],
            [[1, ["a"], "==", [0]]],
            [[1, ["a"], "=", [12, 0]]],
            [[1, ["a"], "=", [3, "1_0"]]],
            [[1, ["a"], "=", [3, "9" * 5000]]],
            [[1, ["a"], "=", [5, "1e5"]]],
            [[1, ["a"], "=", [5, "NaN"]]],
            [[1, ["a"], "=", [8, 2**40]]],
            [[1, ["a"], "=", [9, 2**62, 0]]],
            [[1, ["a"], "=", [10, 0, 10**9]]],
            [[1, ["a"], "=", [11, -1]]],
            [[1, ["a"], "=", [2, True]]],
            [[1, [], "=", [0]]],
            [[1, ["a"], "=", [0], 0]],
            [[2, ["a"], [], False]],
            [[2, ["a"], [[0]] * (LITERALS_MAX + 1), False]],
            [[2, ["a"], [[0]] * 6000, False]] * 2 + [[5, 2]],
            [[8]] * (TERMS_MAX + 1),
            [[8]] + [[7]] * (DEPTH_MAX + 1),
            [[9], [9], [6, 2]] + [[9], [5, 2], [9], [6, 2]] * DEPTH_MAX,
            [[10]],
        ],
        ids=lambda nodes: str(nodes)[:40],
    )
    def test_what_encode_never_writes_is_refused(self, nodes: Any) -> None:
        refusal(decode, msgspec.msgpack.encode([1, nodes]))

    def test_a_newer_version_is_refused_by_name(self) -> None:
        assert "version 2" in refusal(decode, msgspec.msgpack.encode([2, [[8]]]))

    def test_size_is_limited_on_both_sides(self) -> None:
        big = Compare(A, "=", "x" * ENCODED_BYTES_MAX)
        assert "split" in refusal(encode, big)
        assert "split" in refusal(decode, bytes(ENCODED_BYTES_MAX + 1))

    @pytest.mark.parametrize(
        "data",
        [
            b"\x92\x01\xdd\xff\xff\xff\xff",
            b"\x91" * ENCODED_BYTES_MAX,
            b"\x92\x01" + b"\x91" * (ENCODED_BYTES_MAX - 2),
            b"\x92\x01\xdd\x00\x07\xff\xff" + b"\x91\x08" * 524_000,
            b"\x92\x01\x91\x94\x02\x91\xa1a\xdd\xff\xff\xff\xff",
        ],
        ids=["count", "depth", "nodes-depth", "nodes", "values"],
    )
    def test_hostile_bytes_are_refused_quickly(self, data: bytes) -> None:
        started = clock.process_time()
        refusal(decode, data)
        assert clock.process_time() - started < 2 * slowness()


class TestRows:
    @settings(deadline=None, max_examples=400)
    @given(batches(), fitting_predicates())
    def test_pass_exactly_where_duckdb_says_true(self, batch: pa.RecordBatch, predicate: Predicate) -> None:
        bound = bind(predicate, SCHEMA)
        # A batch need not have the columns that the filter does not read, nor any order.
        needed = (
            pa.RecordBatch.from_arrays(
                [batch.column(name) for name in sorted(bound.columns)], sorted(bound.columns)
            )
            if bound.columns
            else batch
        )
        assert bound.mask(needed).to_pylist() == duckdb_answers(batch, predicate)

    @pytest.mark.parametrize(
        ("predicate", "expected"),
        [
            (Compare(A, "=", 3.5), []),
            (Compare(A, "!=", 3.5), [-128, 3, 4, 127]),
            (Compare(A, "<", 3.5), [-128, 3]),
            (Compare(A, "<=", Decimal("3.5")), [-128, 3]),
            (Compare(A, ">", 3.5), [4, 127]),
            (Compare(A, ">=", Decimal("3.5")), [4, 127]),
            (Not(Compare(A, "<", 3.5)), [4, 127]),
            (Compare(A, "<", Decimal("-127.5")), [-128]),
            (Compare(A, "<", 10**70), [-128, 3, 4, 127]),
            (Compare(A, ">", 10**70), []),
            (Compare(A, ">=", -129), [-128, 3, 4, 127]),
            (Compare(A, "=", 128), []),
            (Compare(A, "<=>", 128), []),
            (Not(Compare(A, "<=>", 128)), [-128, 3, 4, None, 127]),
            (Not(Compare(A, "<=>", 3)), [-128, 4, None, 127]),
            (Compare(A, "<=>", None), [None]),
            (Not(Compare(A, "<=>", None)), [-128, 3, 4, 127]),
            (Compare(A, "<", math.inf), [-128, 3, 4, 127]),
            (Compare(A, "<", math.nan), [-128, 3, 4, 127]),
            (Compare(A, ">", -math.inf), [-128, 3, 4, 127]),
            (In(A, (3.5, 300, 4)), [4]),
            (In(A, (3.5, 300), True), [-128, 3, 4, 127]),
            (In(A, (3.5, 300)), []),
            (In(A, (3, None)), [3]),
            (In(A, (3, None), True), []),
            (Not(In(A, (3, 4))), [-128, 127]),
            (Compare(A, "=", None), []),
            (Not(Compare(A, "!=", None)), []),
            (Or((Compare(A, "=", None), IsNull(A))), [None]),
        ],
        ids=str,
    )
    def test_integers_are_compared_without_loss(self, predicate: Predicate, expected: list[Any]) -> None:
        assert passing(predicate, [-128, 3, 4, None, 127], pa.int8()) == expected

    def test_integers_beyond_doubles_are_compared_exactly(self) -> None:
        values = [2**53, 2**53 + 1, 2**62, 2**63 - 1]
        assert passing(Compare(A, "=", 2.0**53), values, pa.int64()) == [2**53]
        assert passing(Compare(A, "<", 2.0**63), values, pa.int64()) == values
        assert passing(Compare(A, ">=", 2.0**62), values, pa.int64()) == values[2:]

    @pytest.mark.parametrize(
        ("predicate", "expected"),
        [
            (Compare(A, "=", Decimal("0.1")), [float(np.float32(0.1))]),
            (Compare(A, "=", 0.1), []),
            (Compare(A, "<=", 0.1), [-math.inf, -0.0]),
            (Compare(A, ">", 0.1), [float(np.float32(0.1)), math.inf]),
            (Compare(A, "<", 10**39), [-math.inf, -0.0, float(np.float32(0.1))]),
            (Compare(A, "<", -(10**39)), [-math.inf]),
            (Compare(A, "<=", 1e300), [-math.inf, -0.0, float(np.float32(0.1))]),
            (Compare(A, "=", 0), [-0.0]),
            (In(A, (0.5, Decimal("0.1"))), [float(np.float32(0.1))]),
            (In(A, (0.5, 0.1)), []),
        ],
        ids=str,
    )
    def test_single_floats(self, predicate: Predicate, expected: list[Any]) -> None:
        values = [-math.inf, -0.0, float(np.float32(0.1)), math.inf]
        assert passing(predicate, values, pa.float32()) == expected

    @pytest.mark.parametrize("data_type", [pa.float16(), pa.float32(), pa.float64()], ids=str)
    @pytest.mark.parametrize(
        ("predicate", "expected"),
        [
            (Compare(A, "=", math.nan), [1]),
            (Compare(A, "!=", math.nan), [0, 3, 4]),
            (Compare(A, "<", math.nan), [0, 3, 4]),
            (Compare(A, "<=", math.nan), [0, 1, 3, 4]),
            (Compare(A, ">", math.nan), []),
            (Compare(A, ">=", math.nan), [1]),
            (Compare(A, ">", 1), [1, 4]),
            (Compare(A, ">=", math.inf), [1, 4]),
            (Compare(A, "<=", 0), [0]),
            (Not(Compare(A, "<=", 0)), [1, 3, 4]),
            (In(A, (math.nan, 0.0)), [0, 1]),
            (In(A, (math.nan, 0.0), True), [3, 4]),
            (In(A, (1.0, 0.0)), [0, 3]),
            (In(A, (1.0, 0.0), True), [1, 4]),
            (In(A, (math.nan,)), [1]),
            (Or((Compare(A, "=", math.nan), Compare(A, "=", 1), Compare(A, "=", math.inf))), [1, 3, 4]),
            (And((Compare(A, "!=", math.nan), Compare(A, "!=", 1))), [0, 4]),
        ],
        ids=str,
    )
    def test_nan_equals_nan_and_is_greater_than_all(
        self, predicate: Predicate, expected: list[int], data_type: Any
    ) -> None:
        values = np.array([-0.0, -math.nan, 0, 1, math.inf])
        column = pa.array(values, pa.float64(), mask=np.arange(5) == 2).cast(data_type)
        batch = pa.record_batch([column], ["a"])
        mask = bind(predicate, batch.schema).mask(batch).to_pylist()
        assert [index for index, passes in enumerate(mask) if passes] == expected

    @pytest.mark.parametrize(
        "data_type",
        [pa.decimal32(6, 2), pa.decimal64(12, 2), pa.decimal128(38, 2), pa.decimal256(60, 2)],
        ids=str,
    )
    def test_decimals(self, data_type: Any) -> None:
        values = [Decimal("-1.10"), Decimal("0.10"), Decimal("1.00"), None]
        assert passing(Compare(A, "=", 0.1), values, data_type) == [Decimal("0.10")]
        assert passing(Compare(A, "=", 1), values, data_type) == [Decimal("1.00")]
        assert passing(Compare(A, ">", Decimal("0.105")), values, data_type) == [Decimal("1.00")]
        assert passing(Compare(A, "<", Decimal("-1.095")), values, data_type) == [Decimal("-1.10")]
        assert passing(Compare(A, "<", 10**60), values, data_type) == values[:3]
        assert passing(In(A, (Decimal("0.1000"), Decimal("0.101"), 1)), values, data_type) == values[1:3]

    def test_decimals_of_many_digits_are_not_rounded(self) -> None:
        values = [Decimal("1" * 36 + ".10"), Decimal("1" * 36 + ".11")]
        assert passing(Compare(A, "=", values[1]), values, pa.decimal128(38, 2)) == values[1:]
        assert passing(In(A, (values[1], 5)), values, pa.decimal128(38, 2)) == values[1:]

    def test_times_of_every_unit_against_finer_literals(self) -> None:
        half = datetime(1970, 1, 1, 0, 0, 1, 500_000)
        for unit, counts in (("s", [1, 2]), ("ms", [1499, 1501]), ("us", [1_499_999, 1_500_001])):
            for zone in (None, "UTC", "Europe/Berlin"):
                stamps = pa.timestamp(unit, zone)
                assert passing(Compare(A, "<", half), counts, stamps) == counts[:1]
                assert passing(Compare(A, ">", half.replace(tzinfo=UTC)), counts, stamps) == counts[1:]
                assert passing(Compare(A, "=", half), counts, stamps) == []
        exact = Timestamp(1_500_000_001, False)
        counts = [1_500_000_000, 1_500_000_001]
        assert passing(Compare(A, ">=", exact), counts, pa.timestamp("ns")) == counts[1:]
        assert passing(Compare(A, "<", datetime(3000, 1, 1)), [1, None], pa.timestamp("ns")) == [1]
        assert passing(Compare(A, "<", datetime(1000, 1, 1)), [1, None], pa.timestamp("ns")) == []

    def test_dates_and_times_as_text(self) -> None:
        day = date(2024, 2, 29)
        assert passing(Compare(A, "=", "2024-02-29"), [day, None], pa.date32()) == [day]
        assert passing(Compare(A, ">=", datetime(2024, 2, 28, 1)), [day], pa.date64()) == [day]
        assert passing(Compare(A, ">", datetime(2024, 2, 29, 1)), [day], pa.date64()) == []
        moment = datetime(2024, 2, 29, 12, 30)
        for text in ("2024-02-29 12:30", "2024-02-29T12:30:00.000Z", "2024-02-29 14:30:00+02:00"):
            assert passing(Compare(A, "=", text), [moment], pa.timestamp("us")) == [moment]
        assert passing(Compare(A, ">", day), [moment], pa.timestamp("us")) == [moment]
        assert passing(Compare(A, "<", "2024-02-29"), [moment], pa.timestamp("us")) == []
        noon = time(12)
        for unit in (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")):
            assert passing(In(A, ("12:00", "12:00:00.5")), [noon, time(13)], unit) == [noon]

    @pytest.mark.parametrize("text", ["2024-02-30", "2024-2-3", "now", "2024-01-01 12:00", ""])
    def test_text_that_is_no_date_is_refused(self, text: str) -> None:
        assert "date32" in refusal(bind, Compare(A, "=", text), pa.schema({"a": pa.date32()}))

    @pytest.mark.parametrize(
        "data_type",
        [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.large_string())],
        ids=str,
    )
    def test_strings_of_every_layout(self, data_type: Any) -> None:
        values = ["", "a", "ab", "b", None]
        assert passing(Prefix(A, "a"), values, data_type) == ["a", "ab"]
        assert passing(Not(Prefix(A, "a")), values, data_type) == ["", "b"]
        assert passing(Prefix(A, ""), values, data_type) == values[:4]
        assert passing(Compare(A, ">", "a"), values, data_type) == ["ab", "b"]
        assert passing(In(A, ("a", "x", "b")), values, data_type) == ["a", "b"]

    @pytest.mark.parametrize(
        "data_type", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2)], ids=str
    )
    def test_bytes_of_every_layout(self, data_type: Any) -> None:
        values = [b"aa", b"b\xff", None]
        assert passing(Compare(A, "<", b"b"), values, data_type) == [b"aa"]
        assert passing(Compare(A, "!=", b"b"), values, data_type) == values[:2]
        assert passing(In(A, (b"aa", b"a", b"b\xff")), values, data_type) == values[:2]

    def test_nested_fields_are_null_with_their_struct(self) -> None:
        inner = pa.struct([("x", pa.int32()), ("y", pa.struct([("z", pa.string())]))])
        rows = [{"x": 1, "y": {"z": "q"}}, {"x": None, "y": None}, None]
        batch = pa.record_batch([pa.array(rows, inner)], ["s"])

        def mask(predicate: Predicate) -> list[bool]:
            bound = bind(predicate, batch.schema)
            assert bound.columns == {"s"}
            kept: list[bool] = bound.mask(batch).to_pylist()
            return kept

        assert mask(Compare(("s", "y", "z"), "=", "q")) == [True, False, False]
        assert mask(IsNull(("s", "y", "z"))) == [False, True, True]
        assert mask(IsNull(("s",))) == [False, False, True]
        assert mask(Compare(("S", "Y", "Z"), "!=", "r")) == [True, False, False]

    def test_constants_need_no_column(self) -> None:
        batch = pa.record_batch([pa.array([1, None])], ["a"])
        for predicate, expected in (
            (Always(), True),
            (Never(), False),
            (Compare(A, "=", None), False),
            (Or((LOW, Always())), True),
            (And((LOW, Not(Always()))), False),
        ):
            bound = bind(predicate, batch.schema)
            assert bound.columns == frozenset()
            assert bound.mask(batch).to_pylist() == [expected] * 2
            assert len(bound.mask(batch.slice(0, 0))) == 0

    def test_a_column_of_nulls_only_passes_is_null(self) -> None:
        values = [None, None]
        assert passing(IsNull(A), values, pa.null()) == values
        for predicate in (LOW, Not(LOW), In(A, ("x",), True), Prefix(A, "x"), Not(Prefix(A, "x"))):
            assert passing(predicate, values, pa.null()) == []
        assert passing(Not(Compare(A, "<=>", 1)), values, pa.null()) == values

    def test_many_equalities_become_one_lookup(self) -> None:
        batch = pa.record_batch([pa.array(np.arange(100_000))], ["a"])
        chain = any_of(Compare(A, "=", number * 10) for number in range(10_000))
        bound = bind(chain, batch.schema)
        started = clock.process_time()
        assert bound.mask(batch).true_count == 10_000
        # One by one they would take seconds.
        assert clock.process_time() - started < 0.5 * slowness()
        assert bind(Not(chain), batch.schema).mask(batch).true_count == 90_000

    def test_numbers_with_equal_hashes_are_bound_quickly(self) -> None:
        # Python's hash of an integer is its rest by this prime.
        numbers = [(2**61 - 1) * count for count in range(1, 10_001)]
        schema = pa.schema({"a": pa.decimal128(38, 0)})
        started = clock.process_time()
        bind(In(A, tuple(numbers)), schema)
        bind(Or(tuple(Compare(A, "<", number) for number in numbers)), schema)
        assert clock.process_time() - started < 2 * slowness()

    @pytest.mark.parametrize(
        ("data_type", "literal"),
        [
            (pa.int32(), "1"),
            (pa.int32(), True),
            (pa.int32(), b"1"),
            (pa.int32(), date(2024, 1, 1)),
            (pa.float64(), "1"),
            (pa.float64(), True),
            (pa.decimal128(5, 2), "1"),
            (pa.decimal128(5, 2), False),
            (pa.bool_(), 1),
            (pa.bool_(), "true"),
            (pa.string(), 1),
            (pa.string(), b"x"),
            (pa.string(), date(2024, 1, 1)),
            (pa.binary(), "x"),
            (pa.date32(), 1),
            (pa.date32(), time(1)),
            (pa.timestamp("us"), 1),
            (pa.timestamp("us"), "soon"),
            (pa.time64("us"), datetime(2024, 1, 1)),
            (pa.time64("us"), "25:00"),
            (pa.list_(pa.int32()), 1),
            (pa.list_(pa.int32()), None),
            (pa.map_(pa.string(), pa.int32()), "x"),
            (pa.struct([("x", pa.int32())]), 1),
            (pa.duration("us"), 1),
        ],
        ids=str,
    )
    def test_literals_of_another_kind_are_refused(self, data_type: Any, literal: Any) -> None:
        schema = pa.schema({"Total": data_type})
        column = ("total",)
        for predicate in (
            Compare(column, "=", literal),
            In(column, (literal,)),
            Compare(column, "<=>", literal),
        ):
            message = refusal(bind, predicate, schema)
            assert "total" in message
            assert str(data_type) in message

    def test_prefix_of_what_is_no_string_is_refused(self) -> None:
        for data_type in (pa.int32(), pa.date32(), pa.binary(), pa.timestamp("us")):
            refusal(bind, Prefix(A, "2024-01-01"), pa.schema({"a": data_type}))

    def test_lists_maps_and_structs_know_is_null(self) -> None:
        for data_type, value in (
            (pa.list_(pa.int32()), [1]),
            (pa.map_(pa.string(), pa.int32()), [("x", 1)]),
            (pa.struct([("x", pa.int32())]), {"x": 1}),
            (pa.duration("us"), timedelta(1)),
        ):
            assert passing(IsNull(A, negated=True), [value, None], data_type) == [value]

    def test_columns_are_found_exactly_or_in_any_case_if_unique(self) -> None:
        schema = pa.schema({"Key": pa.int32(), "KEY": pa.int32(), "Other": pa.int32()})
        assert bind(Compare(("KEY",), "=", 1), schema).columns == {"KEY"}
        assert bind(Compare(("other",), "=", 1), schema).columns == {"Other"}
        assert "Key, KEY" in refusal(bind, Compare(("key",), "=", 1), schema)
        assert "Other" in refusal(bind, Compare(("missing",), "=", 1), schema)
        assert "int32" in refusal(bind, Compare(("other", "x"), "=", 1), schema)
        twice = pa.schema([("a", pa.int32()), ("a", pa.int32())])
        assert "ambiguous" in refusal(bind, LOW, twice)


class TestKeys:
    KEY = ("day", "wide", "name")
    KEYS = (
        "flag",
        "tiny",
        "wide",
        "double",
        "money",
        "name",
        "data",
        "day",
        "exact",
        "rough",
        "zoned",
        "clock",
    )

    @pytest.mark.parametrize(
        ("predicate", "expected"),
        [
            (Compare(NAME, "=", "x"), None),
            (Always(), None),
            (Never(), KeyBounds(empty=True)),
            (IsNull(DAY, negated=True), None),
            (Compare(DAY, "!=", NEW_YEAR), None),
            (Compare(DAY, "=", NEW_YEAR), KeyBounds((NEW_YEAR,))),
            (Compare(DAY, "<=>", NEW_YEAR), KeyBounds((NEW_YEAR,))),
            (Compare(DAY, ">", datetime(2024, 1, 1, 5)), KeyBounds(lower=Bound(NEW_YEAR, False))),
            (
                And((Compare(DAY, "=", NEW_YEAR), Compare(WIDE, ">=", 3.5), Compare(WIDE, "<", 9))),
                KeyBounds((NEW_YEAR,), Bound(3, False), Bound(9, False)),
            ),
            (
                And((Compare(DAY, "=", NEW_YEAR), In(WIDE, (7, 5, 300.5)), Prefix(NAME, "a"))),
                KeyBounds((NEW_YEAR,), Bound(5, True), Bound(7, True)),
            ),
            (
                And((Compare(DAY, "=", NEW_YEAR), In(WIDE, (7,)), Prefix(NAME, "a\U0010ffff"))),
                KeyBounds((NEW_YEAR, 7), Bound("a\U0010ffff", True), Bound("b", False)),
            ),
            (
                Or((Compare(DAY, "=", NEW_YEAR), Compare(DAY, "<", "2023-01-01"))),
                KeyBounds(upper=Bound(NEW_YEAR, True)),
            ),
            (Or((Compare(DAY, "=", NEW_YEAR), Compare(WIDE, "=", 1))), None),
            (
                And((Compare(DAY, "<", NEW_YEAR), Compare(DAY, ">=", NEW_YEAR))),
                KeyBounds(empty=True),
            ),
            (Not(Compare(DAY, ">=", NEW_YEAR)), KeyBounds(upper=Bound(NEW_YEAR, False))),
            (
                And((Compare(DAY, ">", NEW_YEAR), Compare(WIDE, "=", 1))),
                KeyBounds(lower=Bound(NEW_YEAR, False)),
            ),
        ],
        ids=lambda value: str(value)[:60] if isinstance(value, Predicate) else "",
    )
    def test_bounds(self, predicate: Predicate, expected: KeyBounds | None) -> None:
        assert bind(predicate, SCHEMA).key_bounds(self.KEY) == expected

    def test_equal_ends_are_inclusive_in_or_and_exclusive_in_and(self) -> None:
        below, up_to = Compare(WIDE, "<", 5), Compare(WIDE, "<=", 5)
        for terms in ((below, up_to), (up_to, below)):
            assert bind(Or(terms), SCHEMA).key_bounds(WIDE) == KeyBounds(upper=Bound(5, True))
            assert bind(And(terms), SCHEMA).key_bounds(WIDE) == KeyBounds(upper=Bound(5, False))

    def test_a_prefix_ends_before_the_next_character(self) -> None:
        def bounds(text: str) -> KeyBounds | None:
            return bind(Prefix(("name",), text), SCHEMA).key_bounds(("name",))

        assert bounds("a\ud7ff") == KeyBounds(lower=Bound("a\ud7ff", True), upper=Bound("a\ue000", False))
        assert bounds("\U0010ffff") == KeyBounds(lower=Bound("\U0010ffff", True))
        assert bounds("") == KeyBounds(lower=Bound("", True))

    def test_a_timestamp_is_in_the_zone_of_its_column(self) -> None:
        moment = datetime(2024, 1, 1)
        predicate = Compare(A, "=", moment)
        zoned = bind(predicate, pa.schema({"a": pa.timestamp("us", "Europe/Berlin")})).key_bounds(A)
        assert zoned == KeyBounds((moment.replace(tzinfo=UTC),))
        assert bind(predicate, pa.schema({"a": pa.timestamp("ms")})).key_bounds(A) == KeyBounds((moment,))

    def test_nanoseconds_are_widened_to_microseconds(self) -> None:
        schema = pa.schema({"a": pa.timestamp("ns")})
        epoch, next_one = datetime(1970, 1, 1), datetime(1970, 1, 1, 0, 0, 0, 1)
        bounds = bind(Compare(A, "=", Timestamp(1, False)), schema).key_bounds(A)
        assert bounds == KeyBounds(lower=Bound(epoch, True), upper=Bound(next_one, True))
        bounds = bind(Compare(A, ">", Timestamp(1, False)), schema).key_bounds(A)
        assert bounds == KeyBounds(lower=Bound(epoch, True))

    def test_bytes_of_another_width_give_no_bounds(self) -> None:
        code = ("code",)
        assert bind(Compare(code, ">", b"a"), SCHEMA).key_bounds(code) is None
        assert bind(Compare(code, ">", b"aa"), SCHEMA).key_bounds(code) == KeyBounds(
            lower=Bound(b"aa", False)
        )

    def test_floats_give_no_bounds(self) -> None:
        assert bind(Compare(("double",), "=", 1.0), SCHEMA).key_bounds(("double",)) is None

    def test_a_field_of_a_struct_is_not_the_column_of_its_name(self) -> None:
        schema = pa.schema({"a": pa.struct([("b", pa.int32())]), "b": pa.int32()})
        assert bind(Compare(("a", "b"), "=", 1), schema).key_bounds(("a", "b")) is None

    @settings(deadline=None, max_examples=600)
    @given(batches(), st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True), st.data())
    def test_no_row_that_passes_lies_outside(
        self, batch: pa.RecordBatch, key: list[str], data: st.DataObject
    ) -> None:
        terms = st.lists(fitting_predicates(key), min_size=1, max_size=3)
        predicate = data.draw(terms.map(all_of))
        bound = bind(predicate, SCHEMA)
        bounds = bound.key_bounds(key)
        passed = batch.filter(bound.mask(batch)).select(key).to_pylist()
        for row in passed:
            values = [row[name] for name in key]
            # Columns of a primary key are never null.
            assert bounds is None or None in values or is_inside(values, bounds)


def is_inside(values: list[Any], bounds: KeyBounds) -> bool:
    pinned = len(bounds.equal)
    if bounds.empty or tuple(values[:pinned]) != bounds.equal:
        return False
    if bounds.lower is not None:
        low, inclusive = bounds.lower
        if not (values[pinned] > low or (inclusive and values[pinned] == low)):
            return False
    if bounds.upper is not None:
        high, inclusive = bounds.upper
        if not (values[pinned] < high or (inclusive and values[pinned] == high)):
            return False
    return True


_DUCKDB = duckdb.connect(config={"threads": 1})
_DUCKDB.execute("SET TimeZone = 'UTC'")


def duckdb_answers(batch: pa.RecordBatch, predicate: Predicate) -> list[bool]:
    _DUCKDB.register("rows", pa.Table.from_batches([batch]))
    try:
        answers = _DUCKDB.execute(f"SELECT {to_sql(predicate)} FROM rows").fetchall()
    finally:
        _DUCKDB.unregister("rows")
    return [answer is True for (answer,) in answers]
