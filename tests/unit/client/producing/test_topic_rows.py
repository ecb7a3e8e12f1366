"""Columns of records by partition: named, by key as Java chooses, or in turn."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.client.producing.topic_rows import records_by_partition
from tidemill.errors import ApiError
from tidemill.records.partitioner import partition_for_key

ROW = st.tuples(st.none() | st.binary(max_size=9), st.none() | st.integers(0, 6))


def parts(values: Any, *, partitions: int = 4, turn: int = 0, **columns: Any) -> Any:
    given_columns = dict.fromkeys(("partition", "keys", "timestamps_ms", "headers")) | columns
    return records_by_partition("t", partitions, turn, values=values, **given_columns)


@given(st.lists(ROW, max_size=20), st.integers(7, 9), st.integers(0, 6))
def test_every_record_is_where_a_simple_model_puts_it(
    rows: list[tuple[bytes | None, int | None]], count: int, turn: int
) -> None:
    values = [b"%d" % n for n in range(len(rows))]
    expected: dict[int, list[bytes]] = {}
    for value, (key, named) in zip(values, rows, strict=True):
        by_key = turn if key is None else partition_for_key(key, count)
        expected.setdefault(by_key if named is None else named, []).append(value)
    found = parts(
        pa.array(values, pa.binary()),
        partitions=count,
        turn=turn,
        keys=pa.array([key for key, _ in rows], pa.binary()),
        partition=pa.array([named for _, named in rows], pa.int32()),
    )
    assert {index: records.values.to_pylist() for index, records in found.items()} == expected


def test_a_number_sends_all_records_to_one_partition() -> None:
    assert list(parts([b"a", b"b"], keys=[b"k", b"l"], partition=2)) == [2]


def test_a_partition_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ApiError, match=r"'t' has 4 partitions \(0 to 3\), there is no partition 4"):
        parts([b"a"], partition=[4])


def test_text_is_sent_as_utf8() -> None:
    (records,) = parts(pa.chunked_array([["ä"], ["b"]]), keys=pa.array(["ü", None]), partition=1).values()
    assert records.values.to_pylist() == ["ä".encode(), b"b"]
    assert records.keys.to_pylist() == ["ü".encode(), None]


def test_numbers_are_no_values() -> None:
    with pytest.raises(ApiError, match="the values have type int64: give them as text or bytes"):
        parts(pa.array([1]))


def test_times_are_milliseconds_and_now_where_there_is_none() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 678_999, tzinfo=UTC)
    before = time.time_ns() // 1_000_000
    times = pa.array([moment, None], pa.timestamp("us", "UTC"))
    (records,) = parts([b"a", b"b"], timestamps_ms=times).values()
    assert records.timestamps_ms[0] == int(moment.timestamp() * 1000)
    assert before <= records.timestamps_ms[1] <= time.time_ns() // 1_000_000


def test_no_records_make_no_parts() -> None:
    assert parts(pa.array([], pa.binary())) == {}
