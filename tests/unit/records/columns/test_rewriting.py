"""Records of many batches as columns are what one looks at one by one; batches that lose records keep the
rest.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.errors import ApiError
from tidemill.records.batch import HEADER_BYTES, BatchHeader, check_crc, parse_header, restamp_append_time
from tidemill.records.columns import rewriting as rewriting_columns
from tidemill.records.columns.fields import WINDOW_RECORDS
from tidemill.records.columns.rewriting import RecordIndex, index_batches
from tidemill.records.compression import decompress
from tidemill.records.record import Record, build_batch, read_records
from tidemill.records.rewriting import INDEX_FIELDS, delete_horizon, index_records

MAX_BYTES = 1 << 24
_optional_bytes = st.none() | st.binary(max_size=200)
_records = st.builds(
    Record,
    key=_optional_bytes,
    value=_optional_bytes,
    timestamp_ms=st.integers(0, 2**41),
    headers=st.lists(st.tuples(st.text(max_size=5), _optional_bytes), max_size=2).map(tuple),
)
_batches = st.builds(
    build_batch,
    st.lists(_records, min_size=1, max_size=20),
    base_offset=st.integers(0, 2**40),
    codec=st.sampled_from((0, 0, 1, 2, 3, 4)),
)

Row = tuple[int, int, int, int, bytes, int]


def stored(batches: Sequence[bytes]) -> list[tuple[BatchHeader, memoryview]]:
    return [(parse_header(batch), memoryview(batch)) for batch in batches]


def one_by_one(batch: bytes) -> list[Row] | None:
    """The fields of each record by ``index_records``, positions relative to the record's start."""
    header = parse_header(batch)
    try:
        body = bytes(decompress(header.codec, memoryview(batch)[HEADER_BYTES:], MAX_BYTES))
        flat = index_records(header, body)
    except ApiError:
        return None
    rows = []
    for place in range(0, len(flat), INDEX_FIELDS):
        start, after, stamp, delta, key_start, key_end, gone = flat[place : place + INDEX_FIELDS]
        key = b"none" if key_end < 0 else body[key_start:key_end]
        rows.append((after - start, stamp, header.base_offset + delta, key_start - start, key, gone))
    return rows


def together(batches: Sequence[bytes]) -> dict[int, list[Row]]:
    """The same by ``index_batches``, by place of the batch."""
    found: dict[int, list[Row]] = {}
    for part in index_batches(stored(batches), MAX_BYTES):
        for place, number in enumerate(part.numbers):
            rows = []
            for row in range(int(part.cuts[place]), int(part.cuts[place + 1])):
                start, key_start, key_end = (
                    int(column[row]) for column in (part.bounds, part.key_starts, part.key_ends)
                )
                rows.append(
                    (
                        int(part.after_timestamps[row]) - start,
                        int(part.timestamp_deltas[row]),
                        int(part.offsets[row]),
                        key_start - start,
                        b"none" if key_end < 0 else part.body[key_start:key_end],
                        int(part.has_no_value[row]),
                    )
                )
            found[number] = rows
    return found


def expected(batches: Sequence[bytes]) -> dict[int, list[Row]]:
    found = {number: one_by_one(batch) for number, batch in enumerate(batches)}
    return {number: rows for number, rows in found.items() if rows is not None}


@given(st.lists(_batches, max_size=12))
def test_many_batches_are_read_as_one_by_one(batches: list[bytes]) -> None:
    assert together(batches) == expected(batches)
    assert len(expected(batches)) == len(batches)


@settings(max_examples=400)
@given(st.lists(_batches, min_size=1, max_size=5), st.data())
def test_damaged_batches_are_read_as_one_by_one(batches: list[bytes], data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        number = data.draw(st.integers(0, len(batches) - 1))
        damaged = bytearray(batches[number])
        place = data.draw(st.integers(21, len(damaged) - 1))
        damaged[place] = data.draw(st.sampled_from((0, 1, 0x7F, 0x80, 0xFF)) | st.integers(0, 255))
        batches[number] = bytes(damaged)
    assert together(batches) == expected(batches)


@settings(max_examples=400)
@given(st.lists(st.tuples(st.binary(max_size=60), st.integers(0, 8)), min_size=1, max_size=4))
def test_any_bytes_are_read_as_one_by_one(bodies: list[tuple[bytes, int]]) -> None:
    plain = build_batch([Record(b"k", b"v")])
    batches = []
    for body, count in bodies:
        header = bytearray(plain[:HEADER_BYTES])
        header[23:27] = max(0, count - 1).to_bytes(4, "big")
        header[57:61] = count.to_bytes(4, "big")
        batches.append(bytes(header) + body)
    assert together(batches) == expected(batches)


def test_records_of_one_length_are_leapt_over_up_to_the_first_that_differs() -> None:
    records = [Record(b"key", b"v" * 60)] * 500 + [Record(b"key", b"v" * 61)] + [Record(b"key", b"v")] * 200
    batches = [build_batch(records), build_batch(records[:3]), build_batch(records[400:])]
    assert together(batches) == expected(batches)


def test_long_records_are_found() -> None:
    choose = random.Random(3)
    records = [Record(b"k", bytes(choose.choice((1, 100, 9_000, 70_000)))) for _ in range(40)]
    batches = [build_batch(records), build_batch([Record(b"k", bytes(3_000_000))]), build_batch(records)]
    assert together(batches) == expected(batches)


def test_a_batch_of_more_records_than_a_part_has_is_a_part_of_its_own() -> None:
    large = build_batch([Record(b"%d" % number, b"v") for number in range(2 * WINDOW_RECORDS + 5)], codec=4)
    batches = [build_batch([Record(b"k", b"v")]), large, build_batch([Record(b"k", b"v")])]
    parts = list(index_batches(stored(batches), MAX_BYTES))
    assert [list(part.numbers) for part in parts] == [[0], [1], [2]]
    assert together(batches) == expected(batches)
    windows = list(parts[1].windows(0, len(parts[1].offsets)))
    assert len(windows) == 3


def test_one_odd_batch_does_not_make_the_others_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [build_batch([Record(b"k", b"v")] * 10) for _ in range(64)]
    batches[17] = batches[17][:-1] + b"\x7f" + batches[17][-1:]
    looked_at = []

    def index(header: BatchHeader, body: bytes, breathe: object) -> object:
        looked_at.append(header)
        return index_records(header, body)

    monkeypatch.setattr(rewriting_columns, "index_records", index)
    assert set(together(batches)) == set(range(64)) - {17}
    assert len(looked_at) == 1


def test_a_count_that_no_body_can_have_takes_no_memory() -> None:
    batch = bytearray(build_batch([Record(b"k", b"v")]))
    batch[23:27] = (2**31 - 2).to_bytes(4, "big")
    batch[57:61] = (2**31 - 1).to_bytes(4, "big")
    assert together([bytes(batch)]) == {}


def with_body(count: int, body: bytes) -> bytes:
    """A batch that claims to have so many records in ``body``."""
    header = bytearray(build_batch([Record(b"k", b"v")])[:HEADER_BYTES])
    header[23:27] = (count - 1).to_bytes(4, "big")
    header[57:61] = count.to_bytes(4, "big")
    return bytes(header) + body


def test_a_record_of_one_batch_does_not_make_up_for_one_that_another_lacks() -> None:
    # Only where batches end is wrong: the offsets would be right if the third record were the second's.
    records = [b"\x0e\0\0" + bytes([2 * delta]) + b"\x02k\x01\0" for delta in (0, 1, 0, 1, 2)]
    assert together([with_body(2, b"".join(records[:3])), with_body(3, b"".join(records[3:]))]) == {}
    assert set(together([with_body(2, b"".join(records[:2])), with_body(3, b"".join(records[2:]))])) == {0, 1}


def test_a_record_that_ends_with_its_key_is_refused() -> None:
    # Length, attributes, timestamp, offset, and a key of one byte; what follows is the next record.
    batch = with_body(2, b"\x0a\0\0\0\x02k" + b"\x0e\0\0\x02\x02k\x01\0")
    assert expected([batch]) == together([batch]) == {}


# --- without some of the records


def keep(part: RecordIndex, kept: Sequence[bool], horizons: Sequence[int | None]) -> list[bytes | None]:
    everything = np.ones(len(part.headers), np.bool_)
    return list(part.keep(np.array(kept, np.bool_), everything, horizons))


@given(st.lists(_batches, min_size=1, max_size=8), st.data())
def test_kept_records_keep_offset_time_and_headers(batches: list[bytes], data: st.DataObject) -> None:
    (part,) = index_batches(stored(batches), MAX_BYTES)
    count = int(part.cuts[-1])
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    kept[part.cuts[:-1]] = True  # The caller sees to batches that lose everything.
    rewritten = np.array([data.draw(st.booleans()) for _ in batches])
    horizons = [data.draw(st.none() | st.integers(0, 2**42)) for _ in batches]
    results = list(part.keep(kept, rewritten, horizons))
    chosen = [number for number in range(len(batches)) if rewritten[number]]
    for number, result in zip(chosen, results, strict=True):
        assert result is not None
        mask = kept[part.cuts[number] : part.cuts[number + 1]]
        header, changed = parse_header(batches[number]), parse_header(result)
        assert check_crc(result, changed)
        before = list(read_records(batches[number]))
        assert list(read_records(result)) == [one for one, stays in zip(before, mask, strict=True) if stays]
        assert changed[0:1] + changed[2:4] == header[0:1] + header[2:4]
        assert (changed.last_offset, changed.last_sequence) == (header.last_offset, header.last_sequence)
        assert changed.codec == header.codec
        assert delete_horizon(changed) == horizons[number]
        assert changed.max_timestamp == max(record.timestamp_ms for record in read_records(result))


def test_append_time_survives_a_delete_horizon() -> None:
    batch = bytes(restamp_append_time(build_batch([Record(b"k", None, 5), Record(b"l", b"v", 6)]), 1_000))
    (part,) = index_batches(stored([batch]), MAX_BYTES)
    (result,) = keep(part, [True, False], [9_999])
    assert result is not None
    assert [record.timestamp_ms for record in read_records(result)] == [1_000]
    assert delete_horizon(parse_header(result)) == 9_999


def test_no_horizon_is_set_where_timestamps_cannot_be_said_relative_to_it() -> None:
    batch = build_batch([Record(b"k", None, -(2**63) + 1)])
    (part,) = index_batches(stored([batch]), MAX_BYTES)
    assert keep(part, [True], [1_000]) == [None]


def test_a_large_batch_lets_others_have_their_turn() -> None:
    breaths: list[int] = []
    batch = build_batch([Record(b"k", b"v")] * 30_000)
    list(index_batches(stored([batch]), MAX_BYTES, lambda: breaths.append(1)))
    assert len(breaths) >= 6
