"""Applies the rules of ``validation`` to thousands of records at once, with numpy.

A window of records is looked at as columns: one load of eight bytes for each field of every record. Where a
window has anything that columns cannot judge (numbers of eight bytes and more, whatever does not fit), its
records are looked at one by one, and that says what is wrong, if anything is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tidemill.errors import ApiError
from tidemill.records.batch import NO_TIMESTAMP, BatchHeader
from tidemill.records.columns.fields import (
    PLAIN_TIMESTAMP_MAX,
    WINDOW_RECORDS,
    Unusual,
    Words,
    find_starts,
    read_fields,
    with_headers,
    words_of,
)
from tidemill.records.columns.scalar import Int64s, read_headers
from tidemill.records.columns.varints import numbers_at
from tidemill.records.validation import Body, RecordRules, check_each, record_faults

__all__ = ("check_in_windows",)


def check_in_windows(
    header: BatchHeader, body: Body, rules: RecordRules, breathe: Callable[[], None]
) -> tuple[int, int]:
    """Check all records that ``header`` counts. Raises ``InvalidRecords``.

    Returns where they end, and their largest timestamp.
    """
    view = memoryview(body)
    words = words_of(view)
    data = np.frombuffer(view, np.uint8)
    position, count, largest = 0, header.record_count, NO_TIMESTAMP
    for first in range(0, count, WINDOW_RECORDS):
        numbers = range(first, min(first + WINDOW_RECORDS, count))
        try:
            starts, end = find_starts(view, position, len(numbers))
            ends = np.append(starts[1:], end)
            newest, keyless, untimely = _check_columns(header, view, words, data, starts, ends, first, rules)
        except (Unusual, IndexError, ApiError):
            position, newest = check_each(header, view, position, numbers, rules, breathe)
        else:
            record_faults(rules, keyless, untimely)
            position = end
        largest = max(largest, newest)
        breathe()
    return position, largest


def _check_columns(
    header: BatchHeader,
    body: memoryview,
    words: Words,
    data: np.ndarray[tuple[int], np.dtype[np.uint8]],
    starts: Int64s,
    ends: Int64s,
    first: int,
    rules: RecordRules,
) -> tuple[int, list[int], list[int]]:
    """The largest timestamp, and the numbers of the records that the topic refuses. Raises ``Unusual``.

    These are records without a key, and records with a timestamp beyond the limits.
    """
    if ends[-1] > len(body):
        raise Unusual
    times, key_lengths, _, key_ends = read_fields(words, starts)
    if (times.offset_deltas != np.arange(first, first + len(starts))).any():
        raise Unusual
    value_lengths, value_starts = numbers_at(words, key_ends)
    if min(key_lengths.min(), value_lengths.min()) < -1:
        raise Unusual
    value_ends = value_starts + np.maximum(value_lengths, 0)
    for index in with_headers(data, value_ends, ends):
        end = int(ends[index])
        if read_headers(body, int(value_ends[index]), end)[1] != end:
            raise Unusual
    if abs(header.base_timestamp) > PLAIN_TIMESTAMP_MAX:
        raise Unusual
    keyless = (first + np.flatnonzero(key_lengths < 0)).tolist() if rules.needs_keys else []
    newest, untimely = _check_times(times.timestamp_deltas + header.base_timestamp, first, rules)
    return newest, keyless, untimely


def _check_times(timestamps: Int64s, first: int, rules: RecordRules) -> tuple[int, list[int]]:
    """The largest timestamp, and the numbers of the records whose timestamp is beyond the limits."""
    oldest, newest = int(timestamps.min()), int(timestamps.max())
    if rules.min_timestamp_ms <= oldest and newest <= rules.max_timestamp_ms:
        return newest, []
    beyond = (timestamps < rules.min_timestamp_ms) | (timestamps > rules.max_timestamp_ms)
    return newest, (first + np.flatnonzero(beyond & (timestamps != NO_TIMESTAMP))).tolist()
