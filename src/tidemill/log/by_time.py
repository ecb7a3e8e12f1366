"""Finding records of a partition's log by their timestamps.

The sparse index leads to the batch; only there are records decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from tidemill.errors import ApiError
from tidemill.records.record import Record, read_records

if TYPE_CHECKING:
    from tidemill.log.log import PartitionLog
    from tidemill.log.segment import Segment
    from tidemill.records.batch import BatchHeader

__all__ = ("TimedOffset", "find_max_timestamp", "find_time")


class TimedOffset(NamedTuple):
    """A record found by its timestamp."""

    timestamp: int
    offset: int
    leader_epoch: int


def find_time(log: PartitionLog, timestamp: int, upper_offset: int) -> TimedOffset | None:
    """The first record at or after ``timestamp``, below ``upper_offset``."""
    for segment in log.segments:
        if segment.base_offset >= upper_offset:
            break
        if segment.max_timestamp < timestamp or segment.next_offset <= log.log_start_offset:
            continue
        for position, header in _batches_since(log, segment, timestamp, upper_offset):
            for record in _readable_records(log, segment, position, header):
                if record.timestamp_ms >= timestamp:
                    return TimedOffset(record.timestamp_ms, record.offset, header.leader_epoch)
    return None


def find_max_timestamp(log: PartitionLog, upper_offset: int) -> TimedOffset | None:
    """The record with the largest timestamp, the first of several, below ``upper_offset``."""
    best = max((segment.max_timestamp for segment in log.segments), default=-1)
    if best < 0:
        return None
    # If that finds nothing, the largest is not below the upper offset, or deleted: look at all that are left.
    return find_time(log, best, upper_offset) or _search_max_timestamp(log, upper_offset)


def _search_max_timestamp(log: PartitionLog, upper_offset: int) -> TimedOffset | None:
    best: TimedOffset | None = None
    for segment in log.segments:
        if segment.base_offset >= upper_offset:
            break
        floor = best.timestamp + 1 if best else 0
        for position, header in _batches_since(log, segment, floor, upper_offset):
            if header.last_offset < log.log_start_offset or header.max_timestamp < floor:
                continue
            for record in _readable_records(log, segment, position, header):
                if record.timestamp_ms >= floor:
                    best = TimedOffset(record.timestamp_ms, record.offset, header.leader_epoch)
                    floor = record.timestamp_ms + 1
    return best


def _batches_since(
    log: PartitionLog, segment: Segment, timestamp: int, upper_offset: int
) -> Iterator[tuple[int, BatchHeader]]:
    end = log.end_position(segment, upper_offset)
    return log.reader(segment, end, min(upper_offset, segment.next_offset)).batches_since(timestamp)


def _readable_records(
    log: PartitionLog, segment: Segment, position: int, header: BatchHeader
) -> list[Record]:
    """The records of a batch that are not below the log start."""
    try:
        records = list(read_records(segment.read_batch(position, header)))
    except ApiError:
        # Batches are stored unread, so a producer can have sent one that nobody can decode. It must not take
        # the search by time away from everybody else: its header speaks for it.
        records = [Record(None, None, header.max_timestamp, (), header.base_offset)]
    return [record for record in records if record.offset >= log.log_start_offset]
