"""Finds the records of an uncompressed body, and their fields, with numpy.

This is the one walk over records by columns: checks of what producers send, columns of rows, searches by time
and compaction all read through it.

- A record is found by the length in front of it, so that one walk over the lengths comes first. Where records
  of one length follow each other it leaps; else it is a Python loop that does nothing but look up and add.
- A field is read by loading eight bytes at its position in every record. Seven bytes of number is the most
  that is decoded so.
- Whatever cannot be judged so is ``Unusual``, an ``IndexError`` or an ``ApiError``: the caller then looks at
  one record after the other, which has the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tidemill.records.columns.scalar import Body, Int64s
from tidemill.records.columns.varints import STRIDES, Unusual, Words, load_numbers, numbers_at
from tidemill.records.record import corrupt, read_bounded_varint
from tidemill.records.rewriting import no_breath

__all__ = (
    "BODY_MARGIN_BYTES",
    "PLAIN_TIMESTAMP_MAX",
    "WINDOW_RECORDS",
    "Breathe",
    "Fields",
    "Int64s",
    "Times",
    "Unusual",
    "Words",
    "find_starts",
    "read_fields",
    "read_times",
    "with_headers",
    "words_of",
)

Breathe = Callable[[], None]

#: So many records at once are enough that what each numpy call costs does not count any more, and so few that
#: no call keeps other threads waiting.
WINDOW_RECORDS: Final = 8192
#: Who puts so many zeros behind a body can load eight bytes at any field of a record, and behind a key.
BODY_MARGIN_BYTES: Final = 128
#: Timestamps this far from zero can be added to any number of seven bytes.
PLAIN_TIMESTAMP_MAX: Final = 2**62
_WORD_BYTES = 8
#: So many equal lengths in a row are looked for first, if so many records are left; else so many are walked.
_LEAP_RECORDS_MIN = 64
_LEAP_WORTH_RECORDS = 256
_WALKED_RECORDS = 1024


def words_of(body: Body) -> Words:
    """A view of the body that gives the eight bytes from each position on."""
    return np.ndarray((len(body) - _WORD_BYTES + 1,), np.dtype("<u8"), body, strides=(1,))


# --- where records begin


def find_starts(body: Body, position: int, count: int, breathe: Breathe = no_breath) -> tuple[Int64s, int]:
    """Where each of ``count`` records from ``position`` on begins, and where the last one ends.

    That may be outside of the body. Raises ``ApiError`` for a length that is not one.
    """
    starts = np.empty(count, np.int64)
    found = 0
    while found < count:
        leap = stride = 0
        if count - found >= _LEAP_WORTH_RECORDS:
            leap, stride = _equal_records(body, position, min(count - found, WINDOW_RECORDS))
        if leap < _LEAP_RECORDS_MIN:
            leap = min(_WALKED_RECORDS, count - found)
            walked = np.fromiter(_walk(body, position), np.int64, leap + 1)
            starts[found : found + leap] = walked[:-1]
            position = int(walked[-1])
        else:
            starts[found : found + leap] = np.arange(position, position + leap * stride, stride)
            position += leap * stride
        found += leap
        breathe()
    return starts, position


def _equal_records(body: Body, position: int, count: int) -> tuple[int, int]:
    """The number of records from ``position`` on with the same length, and how far apart they are."""
    behind, end = _record_at(body, position)
    stride, words = end - position, words_of(body)
    if behind - position >= _WORD_BYTES or position >= len(words):
        return 0, 0
    mask = np.uint64(2 ** (8 * (behind - position)) - 1)
    front = words[position] & mask
    run, window = 0, _LEAP_RECORDS_MIN
    while True:
        first = position + run * stride
        window = min(window, count - run)
        same = (words[first : first + window * stride : stride] & mask) == front
        equal = len(same) if same.all() else int(same.argmin())
        run += equal
        if equal < window or run == count:
            return run, stride
        window *= 2


def _walk(body: Body, position: int) -> Iterator[int]:
    """Positions of records, from ``position`` on. Raises ``ApiError`` behind the end of the body."""
    strides = STRIDES
    while True:
        yield position
        try:
            position += strides[body[position]][body[position + 1]]
        except IndexError:
            _, position = _record_at(body, position)


def _record_at(body: Body, position: int) -> tuple[int, int]:
    """The position behind the length of the record at ``position``, and the position where it ends."""
    length, behind = read_bounded_varint(body, position)
    if length < 0 or behind + length > len(body):
        raise corrupt(f"a record of {length} bytes does not fit in the batch")
    return behind, behind + length


# --- what is in them


class Times(NamedTuple):
    """Timestamp and offset of each record, relative to their batch."""

    #: Positions behind the timestamps.
    after_timestamps: Int64s
    timestamp_deltas: Int64s
    offset_deltas: Int64s
    #: Positions behind the offsets, where the lengths of the keys are.
    behind: Int64s


class Fields(NamedTuple):
    """The fields of each record up to its key."""

    times: Times
    #: Negative where there is no key.
    key_lengths: Int64s
    key_starts: Int64s
    #: Positions of the lengths of the values.
    key_ends: Int64s


def read_times(words: Words, starts: Int64s) -> Times:
    """Read timestamps and offsets of the records at ``starts``."""
    _, _, positions = load_numbers(words, starts)
    # One byte of attributes, which mean nothing, stands before the timestamp.
    timestamp_deltas, after_timestamps = numbers_at(words, positions + 1)
    offset_deltas, behind = numbers_at(words, after_timestamps)
    return Times(after_timestamps, timestamp_deltas, offset_deltas, behind)


def read_fields(words: Words, starts: Int64s) -> Fields:
    """Read the fields up to the keys of the records at ``starts``."""
    times = read_times(words, starts)
    key_lengths, key_starts = numbers_at(words, times.behind)
    return Fields(times, key_lengths, key_starts, key_starts + np.maximum(key_lengths, 0))


def with_headers(data: npt.NDArray[np.uint8], value_ends: Int64s, ends: Int64s) -> list[int]:
    """Numbers of the records that do not end with a header count of 0 behind their value.

    Raises ``Unusual`` if a value leaves no room for that count. Positions only grow, so that otherwise all
    fields are inside their record.
    """
    if (value_ends >= ends).any():
        raise Unusual
    found: list[int] = np.flatnonzero((value_ends != ends - 1) | (data[value_ends] != 0)).tolist()
    return found
