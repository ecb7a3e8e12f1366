"""What a cursor gets of batches that were read from a log: which to deliver, and why others are passed over.

Pure, and without Arrow: the filter, which needs that, is given. The ranges say why offsets are missing:

- a batch of an aborted transaction, a marker, a batch that compaction has emptied;
- with a filter also the offsets that compaction has taken out of and from between batches, because the rest
  of what is missing is then filtered; without a filter nothing is decoded here, and the rest is compaction's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from tidemill.cursors.position import Reason
from tidemill.errors import ApiError, ErrorCode
from tidemill.records.batch import HEADER_BYTES, BatchHeader, parse_header
from tidemill.records.control import read_marker

__all__ = ("SKIPPED_MAX", "BatchFilter", "Filtered", "Skipped", "Walked", "walk")

#: A walk ends behind the batch with which it has so many ranges. Only if one batch alone has more, some are
#: left out, and counted.
SKIPPED_MAX: Final = 1_000

Buffer = bytes | memoryview
Batch = tuple[BatchHeader, memoryview]


class Skipped(NamedTuple):
    """A range of offsets that are not delivered, both ends included."""

    first_offset: int
    last_offset: int
    reason: Reason


class Filtered(NamedTuple):
    """What a filter leaves of a batch: bytes, or None for nothing; and offsets that the batch has not."""

    data: Buffer | None
    record_count: int
    holes: Sequence[tuple[int, int]] = ()


class BatchFilter(Protocol):
    """Takes records out of batches."""

    def apply(self, batches: Sequence[Batch]) -> list[Filtered]:
        """Give the part of each batch that passes the filter."""
        ...


@dataclass(slots=True)
class Walked:
    """The batches to deliver, in order, and what was passed over up to ``next_offset``."""

    next_offset: int
    batches: list[Buffer] = field(default_factory=list)
    record_count: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    skipped_dropped: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.batches))

    @property
    def is_full(self) -> bool:
        """Whether there are as many ranges as there may be."""
        return len(self.skipped) >= SKIPPED_MAX

    def skip(self, first_offset: int, last_offset: int, reason: Reason) -> None:
        if last_offset < first_offset:
            return
        if self.skipped and self.skipped[-1].reason == reason:
            last = self.skipped[-1]
            if last.last_offset + 1 == first_offset:
                self.skipped[-1] = last._replace(last_offset=last_offset)
                return
        if len(self.skipped) >= SKIPPED_MAX:
            self.skipped_dropped += 1
        else:
            self.skipped.append(Skipped(first_offset, last_offset, reason))


def walk(
    data: memoryview, offset: int, aborted: Iterable[tuple[int, int]], batch_filter: BatchFilter | None = None
) -> Walked:
    """Choose what to deliver of ``data``, whole batches from the one that holds ``offset``.

    ``aborted`` are (first offset, producer id) of aborted transactions with batches in it: a producer's
    batches count again behind its marker.
    """
    walked = Walked(offset)
    wanted: list[Batch] = []
    waiting = sorted(aborted, reverse=True)
    aborting: set[int] = set()
    for header, batch in _batches(data):
        while waiting and waiting[-1][0] <= header.last_offset:
            aborting.add(waiting.pop()[1])
        reason = _reason(header, batch, aborting)
        if reason is None:
            wanted.append((header, batch))
        else:
            _deliver(walked, wanted, offset, batch_filter)
            wanted = []
            if walked.is_full:
                return walked
            _skip_before(walked, header, batch_filter)
            walked.skip(max(offset, header.base_offset), header.last_offset, reason)
            walked.next_offset = max(walked.next_offset, header.next_offset)
    _deliver(walked, wanted, offset, batch_filter)
    return walked


def _reason(header: BatchHeader, batch: memoryview, aborting: set[int]) -> Reason | None:
    """Why a batch is not delivered; None if it is."""
    if header.is_control:
        marker = read_marker(batch)
        if marker is not None and not marker.commit:
            aborting.discard(header.producer_id)
        return Reason.CONTROL
    if header.is_transactional and header.producer_id in aborting:
        return Reason.ABORTED
    return None if header.record_count else Reason.COMPACTION


def _deliver(walked: Walked, wanted: list[Batch], offset: int, batch_filter: BatchFilter | None) -> None:
    if batch_filter is None:
        for header, batch in wanted:
            walked.batches.append(batch)
            walked.record_count += header.record_count
            walked.next_offset = max(walked.next_offset, header.next_offset)
        return
    for (header, _), left in zip(wanted, batch_filter.apply(wanted) if wanted else (), strict=True):
        if walked.is_full:
            return
        _skip_before(walked, header, batch_filter)
        for first, last in left.holes:
            walked.skip(max(first, offset), last, Reason.COMPACTION)
        if left.data is not None:
            walked.batches.append(left.data)
            walked.record_count += left.record_count
        walked.next_offset = max(walked.next_offset, header.next_offset)


def _skip_before(walked: Walked, header: BatchHeader, batch_filter: BatchFilter | None) -> None:
    """Note what compaction has removed between the last batch and this one."""
    if batch_filter is not None and header.base_offset > walked.next_offset:
        walked.skip(walked.next_offset, header.base_offset - 1, Reason.COMPACTION)


def _batches(data: memoryview) -> Iterable[Batch]:
    position = 0
    while position + HEADER_BYTES <= len(data):
        header = parse_header(data, position)
        end = position + header.size_bytes
        if header.size_bytes < HEADER_BYTES or end > len(data):
            raise ApiError(ErrorCode.corrupt_message, f"a batch at offset {header.base_offset} is cut short")
        yield header, data[position:end]
        position = end
