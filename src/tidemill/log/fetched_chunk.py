"""A chunk of whole batches that a follower has fetched, checked before any of it is written. Pure.

No checksum covers a batch's base offset and leader epoch, and a follower keeps both as they are. So they are
checked against the batch before: offsets go on exactly where the log ends, epochs never go down and never
pass the leader's. There are no gaps: compaction leaves a batch without records for each stretch that it
empties. It may have joined such stretches since the follower was there, so the first batch of a chunk may
begin below the log end if it holds no records: only its rest is taken.
"""

from __future__ import annotations

from typing import NamedTuple

from tidemill.errors import ApiError, ErrorCode
from tidemill.log.storage import Buffer
from tidemill.records.batch import HEADER_BYTES, MAGIC, BatchHeader, check_crc, parse_header
from tidemill.records.control import Marker, read_marker
from tidemill.records.record import build_empty_batch

__all__ = ("FetchedBatch", "FetchedChunk", "check_chunk")


class FetchedBatch(NamedTuple):
    """One batch of a fetched chunk."""

    position: int
    header: BatchHeader
    #: The marker that the batch holds, if it is a control batch.
    marker: Marker | None


class FetchedChunk(NamedTuple):
    """Whole, sound batches that follow on from the log end."""

    data: memoryview
    batches: list[FetchedBatch]


def check_chunk(
    data: Buffer, end_offset: int, latest_epoch: int, leader_epoch: int, *, log_is_empty: bool
) -> FetchedChunk:
    """Check every batch of ``data``, fetched at ``leader_epoch``, against a log that ends at ``end_offset``.

    The first batch of an empty log may begin below it: the log start lies inside of that batch. Raises
    ``ApiError`` if anything is wrong.
    """
    view = memoryview(data)
    if len(view) >= HEADER_BYTES:
        view = _without_known_part(view, end_offset, log_is_empty)
    batches: list[FetchedBatch] = []
    position, expected, epoch = 0, end_offset, latest_epoch
    while position < len(view):
        header = _check_header(view, position)
        starts_below = log_is_empty and not batches and header.base_offset <= expected <= header.last_offset
        if not starts_below:
            _check_offset(header, expected)
        _check_epoch(header, epoch, leader_epoch)
        batch = view[position : position + header.size_bytes]
        marker = read_marker(batch) if header.is_control and header.record_count else None
        batches.append(FetchedBatch(position, header, marker))
        position, expected, epoch = position + header.size_bytes, header.next_offset, header.leader_epoch
    return FetchedChunk(view, batches)


def _without_known_part(view: memoryview, end_offset: int, log_is_empty: bool) -> memoryview:
    """The chunk with a first batch that begins at ``end_offset``, if it has no records and began below."""
    first = parse_header(view)
    if first.record_count or log_is_empty or not first.base_offset < end_offset <= first.last_offset:
        return view
    header = _check_header(view, 0)
    rest = build_empty_batch(end_offset, header.last_offset, header.leader_epoch)
    return memoryview(rest + view[header.size_bytes :])


def _check_header(view: memoryview, position: int) -> BatchHeader:
    left = len(view) - position
    if left < HEADER_BYTES:
        raise _corrupt(position, f"{left} bytes are fewer than a batch header's {HEADER_BYTES}")
    header = parse_header(view, position)
    if header.magic != MAGIC:
        raise _corrupt(position, f"record format {header.magic} instead of {MAGIC}")
    if not HEADER_BYTES <= header.size_bytes <= left:
        raise _corrupt(position, f"the batch claims {header.size_bytes} bytes, {left} were fetched")
    if header.base_offset < 0 or header.last_offset_delta < 0 or header.record_count < 0:
        raise _corrupt(position, "a negative offset or count")
    if not check_crc(view, header, position):
        raise _corrupt(position, "the checksum does not fit the bytes")
    return header


def _check_offset(header: BatchHeader, expected: int) -> None:
    if header.base_offset != expected:
        raise ApiError(
            ErrorCode.offset_out_of_range,
            f"a fetched batch has offset {header.base_offset} where {expected} must be",
        )


def _check_epoch(header: BatchHeader, epoch_before: int, leader_epoch: int) -> None:
    epoch = header.leader_epoch
    if epoch < max(epoch_before, 0):
        raise ApiError(
            ErrorCode.fenced_leader_epoch,
            f"the fetched batch at offset {header.base_offset} is of leader epoch {epoch}, the one before it "
            f"of {epoch_before}",
        )
    if epoch > leader_epoch:
        raise ApiError(
            ErrorCode.unknown_leader_epoch,
            f"the fetched batch at offset {header.base_offset} is of leader epoch {epoch}, its leader's is "
            f"{leader_epoch}",
        )


def _corrupt(position: int, what: str) -> ApiError:
    return ApiError(ErrorCode.corrupt_message, f"byte {position} of a fetched chunk: {what}")
