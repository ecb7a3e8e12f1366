"""Records with headers, built from columns: the same bytes as from records."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.records.columns.build import build_batch_columns, encode_headers, split_by_bytes
from tidemill.records.compression import CODEC_NAMES
from tidemill.records.record import Record, build_batch, read_records

Pairs = list[tuple[str, bytes | None]]

HEADERS = pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))
PAIRS = st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=200)), max_size=3)
ROWS = st.lists(st.none() | PAIRS, min_size=1, max_size=12)


def column(rows: list[Pairs | None]) -> pa.ListArray:
    entries = [
        None if row is None else [{"key": name, "value": value} for name, value in row] for row in rows
    ]
    return pa.array(entries, HEADERS)


@given(ROWS, st.sampled_from(sorted(CODEC_NAMES)), st.integers(0, 2))
def test_headers_are_built_as_those_of_records_are(rows: list[Pairs | None], codec: int, before: int) -> None:
    records = [Record(None, b"v%d" % n, n, tuple(row or ())) for n, row in enumerate(rows)]
    skipped: list[Pairs | None] = [[("not", b"this")]] * before
    built = build_batch_columns(
        None,
        pa.array([record.value for record in records]),
        timestamp_ms=np.array([record.timestamp_ms for record in records]),
        headers=encode_headers(column([*skipped, *rows])[before:]),
        codec=codec,
        attributes=0x10,
    )
    assert built == build_batch(records, codec=codec, attributes=0x10)


@given(ROWS, st.integers(80, 400))
def test_slices_count_headers(rows: list[Pairs | None], max_bytes: int) -> None:
    values, headers = pa.array([b"v"] * len(rows)), encode_headers(column(rows))
    pieces = split_by_bytes(None, values, max_bytes, headers=headers)
    assert [n for piece in pieces for n in range(piece.start, piece.stop)] == list(range(len(rows)))
    for piece in pieces:
        part = None if headers is None else headers[piece]
        built = build_batch_columns(None, values[piece], timestamp_ms=0, headers=part)
        assert len(built) <= max_bytes or piece.stop - piece.start == 1


def test_where_no_record_has_headers_they_cost_nothing() -> None:
    assert encode_headers(column([None, [], None])) is None


def test_many_records_with_headers_are_read_back() -> None:
    rows: list[Pairs | None] = [[("n", b"%d" % n)] for n in range(600)]
    values = pa.array([b"v"] * len(rows))
    built = build_batch_columns(None, values, timestamp_ms=0, headers=encode_headers(column(rows)))
    assert [list(record.headers) for record in read_records(built)] == rows


def test_a_header_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="a header has no name"):
        encode_headers(pa.array([[{"key": None, "value": b"x"}]], HEADERS))


def test_headers_that_do_not_fit_the_values_are_refused() -> None:
    with pytest.raises(ValueError, match="1 headers do not fit 2 values"):
        build_batch_columns(None, pa.array([b"a", b"b"]), timestamp_ms=0, headers=pa.array([b"\0"]))
