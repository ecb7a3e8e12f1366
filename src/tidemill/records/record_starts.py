"""Where the records of an uncompressed body begin, found by the lengths in front of them, with numpy.

Where records of one length follow each other it leaps; else it is a Python loop that does nothing but look up
and add.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tidemill.records.columns_scalar import Body, Int64s, corrupt, read_varint
from tidemill.records.word_numbers import STRIDES

__all__ = ("find_starts",)

#: So many equal lengths in a row are looked for first, if so many records are left; else so many are walked.
_LEAP_RECORDS_MIN = 64
_LEAP_WORTH_RECORDS = 256
_WALKED_RECORDS = 1024


def find_starts(body: Body, position: int, count: int) -> tuple[Int64s, int]:
    """Where each of ``count`` records from ``position`` on begins, and where the last one ends, which may be
    outside the body. Raises ``ApiError`` for a length that is not one.
    """
    starts = np.empty(count, np.int64)
    found = 0
    while found < count:
        leap = stride = 0
        if count - found >= _LEAP_WORTH_RECORDS:
            leap, stride = _equal_records(body, position, count - found)
        if leap < _LEAP_RECORDS_MIN:
            leap = min(_WALKED_RECORDS, count - found)
            walked = np.fromiter(_walk(body, position), np.int64, leap + 1)
            starts[found : found + leap] = walked[:-1]
            position = int(walked[-1])
        else:
            starts[found : found + leap] = np.arange(position, position + leap * stride, stride)
            position += leap * stride
        found += leap
    return starts, position


def _equal_records(body: Body, position: int, count: int) -> tuple[int, int]:
    """How many records from ``position`` on have the same length in front, and how far apart they are."""
    behind, end = _record_at(body, position)
    stride = end - position
    data = np.frombuffer(body, np.uint8)
    run, window = 0, _LEAP_RECORDS_MIN
    while True:
        first = position + run * stride
        window = min(window, count - run)
        same = np.ones(window, np.bool_)
        for place in range(behind - position):
            column = data[first + place :: stride][:window]
            same = same[: len(column)] & (column == data[position + place])
        equal = len(same) if same.all() else int(same.argmin())
        run += equal
        if equal < window or run == count:
            return run, stride
        window *= 2


def _walk(body: Body, position: int) -> Iterator[int]:
    """Where records begin, from ``position`` on. Raises ``ApiError`` when asked for one behind the end."""
    strides = STRIDES
    while True:
        yield position
        try:
            position += strides[body[position]][body[position + 1]]
        except IndexError:
            _, position = _record_at(body, position)


def _record_at(body: Body, position: int) -> tuple[int, int]:
    """Where the record at ``position`` begins behind its length, and where it ends."""
    length, behind = read_varint(body, position)
    if length < 0 or behind + length > len(body):
        raise corrupt(f"a record of {length} bytes does not fit in the batch")
    return behind, behind + length
