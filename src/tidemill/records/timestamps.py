"""Finding a record of a batch by its timestamp, without decoding more than timestamps and offsets.

Older releases did not check records when they came in, so nothing is trusted here: bytes that are not records
raise ``ApiError``. A search stops at the first record that fits, and a batch of millions of records is
looked at in windows, in memory that does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tidemill.errors import ApiError
from tidemill.records.batch import HEADER_BYTES, BatchHeader
from tidemill.records.columns.fields import (
    PLAIN_TIMESTAMP_MAX,
    WINDOW_RECORDS,
    Unusual,
    find_starts,
    read_times,
    words_of,
)
from tidemill.records.columns.scalar import Int64s
from tidemill.records.compression import decompress
from tidemill.records.record import RECORD_BYTES_MIN, corrupt, read_bounded_varint
from tidemill.records.rewriting import no_breath

__all__ = ("find_first_at", "find_largest")

#: (timestamp, offset) of a record.
Timed = tuple[int, int]


def find_first_at(
    data: bytes | memoryview,
    header: BatchHeader,
    least: Timed,
    max_bytes: int,
    breathe: Callable[[], None] = no_breath,
) -> Timed | None:
    """The first record of a batch whose timestamp and offset are both at or above ``least``.

    >>> from tidemill.records.batch import parse_header
    >>> from tidemill.records.record import Record, build_batch
    >>> data = build_batch([Record(None, b"", time) for time in (5, 9, 7)])
    >>> find_first_at(data, parse_header(data), (6, 0), 1000)
    (9, 1)
    """
    for timestamps, offsets in _windows(data, header, max_bytes, breathe):
        found = np.flatnonzero((timestamps >= least[0]) & (offsets >= least[1]))
        if len(found):
            return int(timestamps[found[0]]), int(offsets[found[0]])
    return None


def find_largest(
    data: bytes | memoryview,
    header: BatchHeader,
    least: Timed,
    max_bytes: int,
    breathe: Callable[[], None] = no_breath,
) -> Timed | None:
    """The record with the largest timestamp, the first of several, among those at or above ``least``."""
    best: Timed | None = None
    for timestamps, offsets in _windows(data, header, max_bytes, breathe):
        found = np.flatnonzero((timestamps >= least[0]) & (offsets >= least[1]))
        if len(found):
            index = found[timestamps[found].argmax()]
            if best is None or timestamps[index] > best[0]:
                best = int(timestamps[index]), int(offsets[index])
    return best


def _windows(
    data: bytes | memoryview, header: BatchHeader, max_bytes: int, breathe: Callable[[], None]
) -> Iterator[tuple[Int64s, Int64s]]:
    """Timestamps and offsets of the records, in order. Raises ``ApiError`` for bytes that are not records."""
    body = memoryview(decompress(header.codec, memoryview(data)[HEADER_BYTES : header.size_bytes], max_bytes))
    breathe()
    count = header.record_count
    if count < 0 or count * RECORD_BYTES_MIN > len(body):
        raise corrupt(f"{count} records do not fit in {len(body)} bytes")
    position = 0
    for first in range(0, count, WINDOW_RECORDS):
        number = min(WINDOW_RECORDS, count - first)
        try:
            deltas, offsets, position = _read_columns(header, body, position, number)
        except (Unusual, IndexError, ApiError):
            deltas, offsets, position = _read_one_by_one(header, body, position, number)
        timestamps = np.full(number, header.max_timestamp) if header.is_append_time else deltas
        yield timestamps, offsets
        breathe()


def _read_columns(
    header: BatchHeader, body: memoryview, position: int, count: int
) -> tuple[Int64s, Int64s, int]:
    if abs(header.base_timestamp) > PLAIN_TIMESTAMP_MAX:
        raise Unusual
    starts, end = find_starts(body, position, count)
    times = read_times(words_of(body), starts)
    if end > len(body) or (times.behind > np.append(starts[1:], end)).any():
        raise Unusual
    return times.timestamp_deltas + header.base_timestamp, times.offset_deltas + header.base_offset, end


def _read_one_by_one(
    header: BatchHeader, body: memoryview, position: int, count: int
) -> tuple[Int64s, Int64s, int]:
    found: list[Timed] = []
    for _ in range(count):
        length, start = read_bounded_varint(body, position)
        position = start + length
        if length < 0 or position > len(body):
            raise corrupt(f"a record of {length} bytes does not fit in the batch")
        delta, position = read_bounded_varint(body, start + 1)
        offset, _ = read_bounded_varint(body, position)
        found.append((header.base_timestamp + delta, header.base_offset + offset))
    try:
        columns = np.array(found, np.int64).reshape(-1, 2).T
    except OverflowError:
        raise corrupt("a timestamp does not fit in 64 bits") from None
    return columns[0], columns[1], position
