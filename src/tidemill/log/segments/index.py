"""The sparse index of a segment: offset → position and time → position.

One entry for about every ``index.interval.bytes`` of log, three columns:

- the base offset of a batch, relative to the segment's,
- the byte where that batch starts,
- the largest timestamp of all batches *before* it, so that the column never falls and can be searched.

An index is a cache of the log: if its file is missing or damaged it is built again from the segment.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ("IndexCache", "SegmentSummary", "SparseIndex")

_BYTES_PER_ENTRY = 24


class SegmentSummary(NamedTuple):
    """Figures of a whole segment, kept in front of its index so that opening needs no scan."""

    next_offset: int
    size_bytes: int
    max_timestamp: int
    #: Base offset of the batch that holds the largest timestamp.
    max_timestamp_batch: int
    first_append_ms: int


_SUMMARY = struct.Struct(">qqqqq")


class SparseIndex:
    """The sparse index of one segment: append-only while the segment is active, then only read."""

    __slots__ = ("_offsets", "_positions", "_times")

    def __init__(self) -> None:
        self._offsets = array("q")
        self._positions = array("q")
        self._times = array("q")

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def last_position(self) -> int:
        return self._positions[-1] if self._positions else 0

    @property
    def memory_bytes(self) -> int:
        return _BYTES_PER_ENTRY * len(self._offsets)

    def append(self, relative_offset: int, position: int, max_timestamp_before: int) -> None:
        assert not self._positions or position > self._positions[-1]
        self._offsets.append(relative_offset)
        self._positions.append(position)
        self._times.append(max_timestamp_before)

    def entry_before_offset(self, relative_offset: int) -> tuple[int, int]:
        """(relative offset, position) of a batch that starts at or before the one that holds the offset."""
        index = bisect_right(self._offsets, relative_offset)
        return (self._offsets[index - 1], self._positions[index - 1]) if index else (0, 0)

    def entry_behind_position(self, position: int) -> tuple[int, int] | None:
        """(relative offset, position) of the first entry whose batch starts behind the byte; None if none."""
        index = bisect_right(self._positions, position)
        return (self._offsets[index], self._positions[index]) if index < len(self._positions) else None

    def offset_behind(self, relative_offset: int, size_bytes: int) -> int | None:
        """An upper bound for the offset after reading ``size_bytes`` from the batch that holds the offset.

        None if the end of the segment is the only bound that is known.
        """
        following = bisect_right(self._offsets, relative_offset)
        if following == len(self._positions):
            return None
        end = bisect_left(self._positions, self._positions[following] + size_bytes)
        return self._offsets[end] if end < len(self._offsets) else None

    def entry_before_position(self, position: int) -> tuple[int, int]:
        """(relative offset, position) of a batch that starts at or before the byte."""
        index = bisect_right(self._positions, position)
        return (self._offsets[index - 1], self._positions[index - 1]) if index else (0, 0)

    def entry_before_time(self, timestamp: int) -> tuple[int, int]:
        """(relative offset, position) of a batch before which all are older than ``timestamp``."""
        index = bisect_left(self._times, timestamp)
        return (self._offsets[index - 1], self._positions[index - 1]) if index else (0, 0)

    def before_position(self, position: int) -> SparseIndex:
        """A copy without the entries of batches that start at or behind the byte."""
        count = bisect_left(self._positions, position)
        copy = SparseIndex()
        copy._offsets, copy._positions = self._offsets[:count], self._positions[:count]
        copy._times = self._times[:count]
        return copy

    @property
    def last_time(self) -> int | None:
        """The largest timestamp before the last entry's batch; None without entries."""
        return self._times[-1] if self._times else None

    def entries(self) -> Iterator[tuple[int, int, int]]:
        """(relative offset, position, largest timestamp before) of each entry."""
        return zip(self._offsets, self._positions, self._times, strict=True)

    def to_bytes(self, summary: SegmentSummary) -> bytes:
        columns = [_big_endian(column) for column in (self._offsets, self._positions, self._times)]
        return _SUMMARY.pack(*summary) + b"".join(columns)

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[SparseIndex, SegmentSummary]:
        summary = SegmentSummary._make(_SUMMARY.unpack_from(data))
        index = cls()
        length = (len(data) - _SUMMARY.size) // 3
        for number, column in enumerate((index._offsets, index._positions, index._times)):
            start = _SUMMARY.size + number * length
            column.frombytes(data[start : start + length])
            if sys.byteorder == "little":
                column.byteswap()
        return index, summary


def _big_endian(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        return column.tobytes()
    swapped = array("q", column)
    swapped.byteswap()
    return swapped.tobytes()


class IndexCache:
    """A cache of sealed segments' indexes; the least recently used are dropped. A node has many segments."""

    def __init__(self, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._indexes: OrderedDict[object, SparseIndex] = OrderedDict()

    def get(self, key: object) -> SparseIndex | None:
        index = self._indexes.get(key)
        if index is not None:
            self._indexes.move_to_end(key)
        return index

    def put(self, key: object, index: SparseIndex) -> None:
        self.drop(key)
        self._indexes[key] = index
        self._bytes += index.memory_bytes
        while self._bytes > self._max_bytes and len(self._indexes) > 1:
            _, evicted = self._indexes.popitem(last=False)
            self._bytes -= evicted.memory_bytes

    def drop(self, key: object) -> None:
        index = self._indexes.pop(key, None)
        if index is not None:
            self._bytes -= index.memory_bytes
