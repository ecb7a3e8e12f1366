"""Finding records of a partition's log by their timestamps.

The sparse index leads to the batch; only there are records decoded. Both can take long, so a search is a
generator that says what is to be done next, and its driver decides where: it gives None where others may have
their turn, and a ``BatchLookup`` where a batch is to be decoded, whose result it is sent. The log may change
between two steps, so what a search finds is right for the log as it was when that batch was read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, NamedTuple

from tidemill.errors import ApiError
from tidemill.records.batch import BatchHeader
from tidemill.records.compression import NONE
from tidemill.records.record import read_records
from tidemill.records.rewriting import no_breath
from tidemill.records.validation import SMALL_BATCH_RECORDS

if TYPE_CHECKING:
    from tidemill.log.reading import ReadableLog
    from tidemill.log.segments.segment import Segment

__all__ = ("BatchLookup", "TimeSearch", "TimedOffset", "find_max_timestamp", "find_time")

#: A batch within these limits is decoded in about a millisecond.
_QUICK_RECORDS = 4_096
_QUICK_BYTES = 2 * 1024 * 1024


class TimedOffset(NamedTuple):
    """Timestamp and offset of a record that a search by time found."""

    timestamp: int
    offset: int
    leader_epoch: int


class BatchLookup(NamedTuple):
    """A batch in which a record is to be found, at or above a timestamp and an offset."""

    data: bytes
    header: BatchHeader
    min_timestamp: int
    min_offset: int
    #: Look for the largest timestamp instead of the first one that is late enough.
    largest: bool = False

    @property
    def is_quick(self) -> bool:
        """Whether ``run`` is short enough for the event loop."""
        if self.header.codec != NONE or len(self.data) > _QUICK_BYTES:
            return False
        count = self.header.record_count
        has_numpy = "tidemill.records.timestamps" in sys.modules
        return count <= SMALL_BATCH_RECORDS or (count <= _QUICK_RECORDS and has_numpy)

    def run(self, max_bytes: int, breathe: Callable[[], None] = no_breath) -> TimedOffset | None:
        """Look for the record. May run in a thread.

        A batch that cannot be decoded, or unpacks to more than ``max_bytes``, must not make every search by
        time fail: the timestamps of its header are used then.
        """
        header = self.header
        try:
            if header.record_count <= SMALL_BATCH_RECORDS:
                found = self._find_in_few(max_bytes)
            else:
                found = self._find_in_many(max_bytes, breathe)
        except ApiError:
            found = header.max_timestamp, max(header.base_offset, self.min_offset)
        return None if found is None else TimedOffset(*found, header.leader_epoch)

    def _find_in_few(self, max_bytes: int) -> tuple[int, int] | None:
        wanted = [
            (record.timestamp_ms, record.offset)
            for record in read_records(self.data, max_bytes)
            if record.timestamp_ms >= self.min_timestamp and record.offset >= self.min_offset
        ]
        if not wanted:
            return None
        return max(wanted, key=lambda timed: timed[0]) if self.largest else wanted[0]

    def _find_in_many(self, max_bytes: int, breathe: Callable[[], None]) -> tuple[int, int] | None:
        # Imported late: it loads numpy, which a node needs only for large batches.
        from tidemill.records.timestamps import find_first_at, find_largest

        find = find_largest if self.largest else find_first_at
        least = self.min_timestamp, self.min_offset
        return find(self.data, self.header, least, max_bytes, breathe)


TimeSearch = Generator[BatchLookup | None, TimedOffset | None, TimedOffset | None]
"""A search in steps; the generator returns the record that it found."""


def find_time(log: ReadableLog, timestamp: int, upper_offset: int) -> TimeSearch:
    """Search for the first record at or after ``timestamp``, below ``upper_offset``."""
    for segment in log.segments:
        if segment.base_offset >= upper_offset:
            break
        if segment.max_timestamp < timestamp or segment.next_offset <= log.log_start_offset:
            continue
        found = yield from _search_segment(log, segment, timestamp, upper_offset)
        if found is not None:
            return found
    return None


def find_max_timestamp(log: ReadableLog, upper_offset: int) -> TimeSearch:
    """Search for the record with the largest timestamp, the first of several, below ``upper_offset``."""
    best = max((segment.max_timestamp for segment in log.segments), default=-1)
    if best < 0:
        return None
    # If that finds nothing, the record is deleted or at or above the upper offset: search all that are left.
    found = yield from find_time(log, best, upper_offset)
    if found is None:
        found = yield from _search_max_timestamp(log, upper_offset)
    return found


def _search_max_timestamp(log: ReadableLog, upper_offset: int) -> TimeSearch:
    best: TimedOffset | None = None
    for segment in log.segments:
        floor = best.timestamp + 1 if best else 0
        if segment.base_offset >= upper_offset:
            break
        if segment.max_timestamp < floor or segment.next_offset <= log.log_start_offset:
            continue
        found = yield from _search_segment(log, segment, floor, upper_offset, largest=True)
        best = found or best
    return best


def _search_segment(
    log: ReadableLog, segment: Segment, timestamp: int, upper_offset: int, *, largest: bool = False
) -> TimeSearch:
    """Search a segment for the first record at or after a time, or for the largest timestamp from it on."""
    best: TimedOffset | None = None
    end = log.end_position(segment, upper_offset)
    reader = log.reader(segment, end, min(upper_offset, segment.next_offset))
    for position, header in reader.batches_since(timestamp):
        yield None
        if header.max_timestamp < timestamp or header.last_offset < log.log_start_offset:
            continue
        data = segment.read_batch(position, header)
        found = yield BatchLookup(data, header, timestamp, log.log_start_offset, largest)
        if found is not None:
            best, timestamp = found, found.timestamp + 1
            if not largest:
                break
    return best
