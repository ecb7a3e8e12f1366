"""Reads a batch's records as columns: where every key and value is, with numpy instead of a loop.

- What ``read_records`` accepts is accepted here, and what it refuses is refused with the same code. The one
  exception: an offset beyond 64 bits, which a column cannot hold, is corrupt.
- A record is found by the length in front of it, so that one walk over the lengths comes first. Where records
  of one length follow each other, it leaps; else it is a Python loop that does nothing but look up and add.
- A field is read by loading eight bytes at its position in every record. Seven bytes of number is the most
  that is decoded so, and nothing is loaded from outside the body.
- Whatever cannot be judged so (longer numbers, timestamps near the ends of 64 bits, anything that does not
  fit) is left to ``columns.scalar``, which reads one record after the other and has the last word. So are
  small batches.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.records import batch as batches
from tidemill.records.batch import HEADER_BYTES, BatchHeader
from tidemill.records.columns.arrays import from_numpy
from tidemill.records.columns.fields import (
    PLAIN_TIMESTAMP_MAX,
    Unusual,
    find_starts,
    read_fields,
    with_headers,
    words_of,
)
from tidemill.records.columns.scalar import Body, Int64s, read_headers, read_one_by_one
from tidemill.records.columns.varints import numbers_at
from tidemill.records.compression import decompress
from tidemill.records.record import MAX_DECOMPRESSED_BYTES, RECORD_BYTES_MIN, Header, corrupt

__all__ = ("RecordColumns", "read_columns")

Bools = npt.NDArray[np.bool_]

#: Below so many records a loop in Python is faster than the fixed cost of some sixty numpy calls.
_SMALL_BATCH_RECORDS = 32
#: Positions in a body are 32-bit offsets in Arrow.
_BODY_BYTES_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, eq=False)
class RecordColumns:
    """The records of one batch as columns of ``record_count`` entries; starts and ends are in ``body``.

    Where a batch is not compressed, ``body`` is a view of the bytes that were read: they must not change.
    """

    header: BatchHeader
    #: The records, uncompressed.
    body: Body
    #: From the length in front of a record to behind its last header.
    record_starts: Int64s
    record_ends: Int64s
    #: Where there is no key, start and end are the same, and ``key_null`` says so; likewise for values.
    key_starts: Int64s
    key_ends: Int64s
    key_null: Bools
    value_starts: Int64s
    value_ends: Int64s
    value_null: Bools
    #: Absolute offsets, not relative to the batch.
    offsets: Int64s
    #: Timestamps in milliseconds; the broker's time for all records if the batch says so.
    timestamps: Int64s
    header_counts: Int64s

    @property
    def record_count(self) -> int:
        return len(self.offsets)

    def keys(self) -> pa.BinaryArray:
        """A copy of all keys; null where there is none."""
        return _binary_array(self.body, self.key_starts, self.key_ends, self.key_null)

    def values(self) -> pa.BinaryArray:
        """A copy of all values; null where there is none."""
        return _binary_array(self.body, self.value_starts, self.value_ends, self.value_null)

    def headers(self, index: int) -> tuple[Header, ...]:
        """The headers of one record, decoded now."""
        if not self.header_counts[index]:
            return ()
        headers, _ = read_headers(self.body, int(self.value_ends[index]), int(self.record_ends[index]))
        return headers

    def take(self, indexes: Int64s | Bools) -> RecordColumns:
        """The records at ``indexes``, in that order, or those where it is true, over the same body."""
        chosen: dict[str, Any] = {name: getattr(self, name)[indexes] for name in _ARRAY_NAMES}
        return RecordColumns(header=self.header, body=self.body, **chosen)


_ARRAY_NAMES = tuple(field.name for field in fields(RecordColumns) if field.name not in ("header", "body"))


def read_columns(
    batch: bytes | bytearray | memoryview, max_bytes: int = MAX_DECOMPRESSED_BYTES
) -> RecordColumns:
    """Decode the one batch that ``batch`` holds. Raises ``ApiError`` where bytes do not fit.

    The columns take 74 bytes a record, and twice that while they are made; but a record may have only seven.
    Code that reads what clients send sets ``max_bytes`` with that in mind.
    """
    if len(batch) < HEADER_BYTES:
        raise corrupt(f"{len(batch)} bytes are fewer than a batch header's {HEADER_BYTES}")
    header = batches.parse_header(batch)
    if not HEADER_BYTES <= header.size_bytes <= len(batch):
        raise corrupt(f"the batch claims {header.size_bytes} bytes, {len(batch)} are there")
    packed = memoryview(batch)[HEADER_BYTES : header.size_bytes]
    body = decompress(header.codec, packed, min(max_bytes, _BODY_BYTES_MAX))
    if header.record_count < 0 or header.record_count * RECORD_BYTES_MIN > len(body):
        raise corrupt(f"{header.record_count} records do not fit in {len(body)} bytes")
    if header.record_count >= _SMALL_BATCH_RECORDS:
        columns = _read_at_once(header, body)
        if columns is not None:
            return columns
    return _read_slowly(header, body)


def _read_slowly(header: BatchHeader, body: Body) -> RecordColumns:
    table = read_one_by_one(header, body)
    starts, ends, key_starts, key_lengths, value_starts, value_lengths, offsets, timestamps, counts = table
    return RecordColumns(
        header=header,
        body=body,
        record_starts=starts,
        record_ends=ends,
        key_starts=key_starts,
        key_ends=key_starts + np.maximum(key_lengths, 0),
        key_null=key_lengths < 0,
        value_starts=value_starts,
        value_ends=value_starts + np.maximum(value_lengths, 0),
        value_null=value_lengths < 0,
        offsets=offsets,
        timestamps=timestamps,
        header_counts=counts,
    )


# --- all records at once


def _read_at_once(header: BatchHeader, body: Body) -> RecordColumns | None:
    """Read the columns with numpy; None if the records must be read one by one."""
    size = len(body)
    words = words_of(body)
    try:
        starts, end = find_starts(body, 0, header.record_count)
        if end != size:
            return None
        ends = np.append(starts[1:], size)
        times, key_lengths, key_starts, key_ends = read_fields(words, starts)
        value_lengths, value_starts = numbers_at(words, key_ends)
        value_ends = value_starts + np.maximum(value_lengths, 0)
        more = with_headers(np.frombuffer(body, np.uint8), value_ends, ends)
    except (Unusual, IndexError):
        return None
    timestamps = _timestamps(header, times.timestamp_deltas)
    if timestamps is None or not _fits_offsets(header, times.offset_deltas):
        return None
    return RecordColumns(
        header=header,
        body=body,
        record_starts=starts,
        record_ends=ends,
        key_starts=key_starts,
        key_ends=key_ends,
        key_null=key_lengths < 0,
        value_starts=value_starts,
        value_ends=value_ends,
        value_null=value_lengths < 0,
        offsets=times.offset_deltas + header.base_offset,
        timestamps=timestamps,
        header_counts=_header_counts(body, value_ends, ends, more),
    )


def _timestamps(header: BatchHeader, deltas: Int64s) -> Int64s | None:
    if header.is_append_time:
        return np.full(len(deltas), header.max_timestamp, np.int64)
    if abs(header.base_timestamp) > PLAIN_TIMESTAMP_MAX:
        return None
    return deltas + header.base_timestamp


def _fits_offsets(header: BatchHeader, deltas: Int64s) -> bool:
    if header.base_offset + header.last_offset_delta > _INT64_MAX:
        return False
    return bool(deltas.min() >= 0 and deltas.max() <= header.last_offset_delta)


def _header_counts(body: Body, value_ends: Int64s, ends: Int64s, more: list[int]) -> Int64s:
    """The number of headers of each record. Those of ``more`` are read, to check that they are sound."""
    counts = np.zeros(len(ends), np.int64)
    for index in more:
        end = int(ends[index])
        headers, position = read_headers(body, int(value_ends[index]), end)
        if position != end:
            raise corrupt("a record's length does not fit its fields")
        counts[index] = len(headers)
    return counts


def _binary_array(body: Body, starts: Int64s, ends: Int64s, null: Bools) -> pa.BinaryArray:
    """Copy slices of ``body`` into an Arrow array.

    Arrow has no kernel for that, but it takes entries of an array by index: so the body is made into one
    whose entries are, by turns, a wanted slice and what lies before the next.
    """
    if not len(starts):
        return pa.array([], pa.binary())
    order: npt.NDArray[np.intp] | None = None
    if (starts[1:] < ends[:-1]).any():
        # Some are out of order or chosen twice: slices must follow each other to be entries of one array.
        starts, first, order = np.unique(starts, return_index=True, return_inverse=True)
        ends = ends[first]
    cuts = np.empty(2 * len(starts), np.int32)
    cuts[0::2] = starts
    cuts[1::2] = ends
    entries = pa.BinaryArray.from_buffers(
        pa.binary(), len(cuts) - 1, [None, pa.py_buffer(cuts), pa.py_buffer(body)]
    )
    wanted = 2 * (np.arange(len(starts)) if order is None else order)
    return entries.take(from_numpy(wanted, null))
