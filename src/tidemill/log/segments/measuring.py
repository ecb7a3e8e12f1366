"""Measuring a log: the bytes between two offsets, and where a range of so many bytes ends.

Positions come from the segments and their sparse indexes; of the log itself only the headers of a few batches
near both ends are read. A batch counts as a whole if one of its offsets is in the range.
"""

from __future__ import annotations

from typing import NamedTuple

from tidemill.log.reading import ReadableLog
from tidemill.log.segments.segment import Segment

__all__ = ("Measured", "measure")


class Measured(NamedTuple):
    """The size of a range of a log that ends at ``end_offset``."""

    end_offset: int
    size_bytes: int


def measure(log: ReadableLog, start_offset: int, end_offset: int, max_bytes: int | None) -> Measured:
    """Measure ``start_offset … end_offset``, both of which the caller knows to be in the log.

    If there is more than ``max_bytes``, the end is the last one that keeps it within them, but at least one
    batch behind the start.
    """
    size = 0
    for segment in log.segments_from(start_offset):
        if segment.base_offset >= end_offset:
            break
        first_offset, first = _start(log, segment, start_offset)
        last = _end_position(log, segment, end_offset)
        if max_bytes is not None and size + last - first > max_bytes:
            return _cut(log, segment, first_offset, first, last, size, max_bytes, end_offset)
        size += last - first
    return Measured(end_offset, size)


def _start(log: ReadableLog, segment: Segment, offset: int) -> tuple[int, int]:
    """Base offset and position of the batch that holds ``offset``."""
    if offset <= segment.base_offset:
        return segment.base_offset, 0
    found = log.reader(segment).find(offset)
    return (segment.next_offset, segment.size_bytes) if found is None else (found[1].base_offset, found[0])


def _end_position(log: ReadableLog, segment: Segment, offset: int) -> int:
    """The position behind the batch that holds the last offset before ``offset``."""
    if offset >= segment.next_offset:
        return segment.size_bytes
    found = log.reader(segment).find(offset - 1)
    if found is None:
        return segment.size_bytes
    position, header = found
    return position + header.size_bytes if header.base_offset < offset else position


def _cut(
    log: ReadableLog,
    segment: Segment,
    first_offset: int,
    first: int,
    last: int,
    size_before: int,
    max_bytes: int,
    end_offset: int,
) -> Measured:
    """Stop in this segment, where the bytes from ``first`` on, with those before it, are too many."""
    target = first + max_bytes - size_before
    relative_offset, position = segment.index.entry_before_position(target)
    # In the segment that the range starts in this offset is not used: a batch is taken first.
    reached = Measured(segment.base_offset, size_before)
    if position > first:
        first_offset = segment.base_offset + relative_offset
        reached = Measured(first_offset, size_before + position - first)
    for start, header in log.reader(segment).batches_from(first_offset, max(first, position)):
        behind = start + header.size_bytes
        if start >= last or (behind > target and reached.size_bytes):
            break
        reached = Measured(min(header.next_offset, end_offset), size_before + behind - first)
    return reached
