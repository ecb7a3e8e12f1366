"""The rules of ``validation`` on thousands of records at once, with numpy.

A window of records is looked at as columns: one load of eight bytes for each field of every record. Where a
window has anything that columns cannot judge (numbers of eight bytes and more, whatever does not fit), its
records are looked at one by one, and that says what is wrong, if anything is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tidemill.errors import ApiError
from tidemill.records.batch import NO_TIMESTAMP, BatchHeader
from tidemill.records.columns_scalar import Int64s, read_headers
from tidemill.records.record_starts import find_starts
from tidemill.records.validation import Body, RecordRules, check_each, record_faults
from tidemill.records.word_numbers import Unusual, Words, load_numbers, numbers_at

__all__ = ("check_in_windows",)

#: So few that no call of numpy keeps other threads waiting, and enough that what a call costs does not count.
_WINDOW_RECORDS = 8192
_WORD_BYTES = 8
#: Timestamps this far from zero can be added to any number of seven bytes.
_PLAIN_TIMESTAMP_MAX = 2**62


def check_in_windows(header: BatchHeader, body: Body, rules: RecordRules, breathe: Callable[[], None]) -> int:
    """Check all records that ``header`` counts; gives where they end. Raises ``InvalidRecords``."""
    view = memoryview(body)
    words: Words = np.ndarray((len(view) - _WORD_BYTES + 1,), np.dtype("<u8"), view, strides=(1,))
    data = np.frombuffer(view, np.uint8)
    position, count = 0, header.record_count
    for first in range(0, count, _WINDOW_RECORDS):
        numbers = range(first, min(first + _WINDOW_RECORDS, count))
        try:
            starts, end = find_starts(view, position, len(numbers))
            ends = np.append(starts[1:], end)
            faults = _check_columns(header, view, words, data, starts, ends, first, rules)
        except (Unusual, IndexError, ApiError):
            position = check_each(header, view, position, numbers, rules, breathe)
        else:
            record_faults(rules, *faults)
            position = end
        breathe()
    return position


def _check_columns(
    header: BatchHeader,
    body: memoryview,
    words: Words,
    data: np.ndarray[tuple[int], np.dtype[np.uint8]],
    starts: Int64s,
    ends: Int64s,
    first: int,
    rules: RecordRules,
) -> tuple[list[int], list[int]]:
    """The records without a key and those that are too old, where the topic minds. Raises ``Unusual``."""
    if ends[-1] > len(body):
        raise Unusual
    _, _, places = load_numbers(words, starts)
    timestamp_deltas, places = numbers_at(words, places + 1)  # behind attributes that mean nothing
    offset_deltas, places = numbers_at(words, places)
    if (offset_deltas != np.arange(first, first + len(starts))).any():
        raise Unusual
    key_lengths, places = numbers_at(words, places)
    value_lengths, places = numbers_at(words, places + np.maximum(key_lengths, 0))
    if min(key_lengths.min(), value_lengths.min()) < -1:
        raise Unusual
    value_ends = places + np.maximum(value_lengths, 0)
    # Places only grow, so that all fields are inside their record if there is room behind the last one for
    # the number of headers.
    if (value_ends >= ends).any():
        raise Unusual
    _check_headers(body, data, value_ends, ends)
    if abs(header.base_timestamp) > _PLAIN_TIMESTAMP_MAX:
        raise Unusual
    keyless = first + np.flatnonzero(key_lengths < 0) if rules.needs_keys else ()
    old = _old(header, timestamp_deltas, first, rules.min_timestamp_ms)
    return list(map(int, keyless)), old


def _check_headers(
    body: memoryview, data: np.ndarray[tuple[int], np.dtype[np.uint8]], value_ends: Int64s, ends: Int64s
) -> None:
    """Read the headers of those records that have any."""
    has_more = (value_ends != ends - 1) | (data[value_ends] != 0)
    for index in np.flatnonzero(has_more).tolist():
        end = int(ends[index])
        if read_headers(body, int(value_ends[index]), end)[1] != end:
            raise Unusual


def _old(header: BatchHeader, deltas: Int64s, first: int, min_timestamp_ms: int | None) -> list[int]:
    if min_timestamp_ms is None:
        return []
    timestamps = deltas + header.base_timestamp
    too_old = (timestamps < min_timestamp_ms) & (timestamps != NO_TIMESTAMP)
    return (first + np.flatnonzero(too_old)).tolist()
