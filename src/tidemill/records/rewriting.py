"""Rewrites batches without some of their records, as compaction needs it: headers, and records in a loop.

What is kept is copied as the bytes that are there, because offsets and timestamps are relative to the batch,
whose base stays. The one exception is the delete horizon. When a batch with tombstones, or a marker whose
transaction has nothing left, is first compacted, the time from which these may go is written where the base
timestamp was, under an attribute bit (KIP-534). The timestamps of its records are then written anew, relative
to that.

Records are found by ``columns.rewriting``, many batches at once. What it cannot judge it leaves to
``index_records`` here, which says what a record is: its numbers fit in 64 bits, all but value and headers,
which are not read here, is inside its length, and offsets grow within those of the batch. Compaction leaves
everything else as it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from tidemill.errors import ApiError, ErrorCode
from tidemill.records.batch import CODEC_MASK, NO_TIMESTAMP, BatchHeader, with_body
from tidemill.records.compression import compress
from tidemill.records.varints import read_varint

__all__ = (
    "DELETE_HORIZON_BIT",
    "INDEX_FIELDS",
    "delete_horizon",
    "fits_64_bits",
    "header_only",
    "index_records",
    "no_breath",
    "not_records",
    "rebuild_batch",
)

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1

DELETE_HORIZON_BIT = 0x40
#: So many records are looked at between two calls of ``breathe``.
_RECORDS_PER_BREATH = 256

#: Numbers for each record: where it starts, and where its timestamp ends; the timestamp and the offset,
#: relative to the batch; where its key starts and ends (-1 if there is none); whether it has no value.
INDEX_FIELDS = 7


def no_breath() -> None:
    """A ``breathe`` that does nothing, for callers that keep no other thread waiting."""


def delete_horizon(header: BatchHeader) -> int | None:
    """The delete horizon of a batch: when its tombstones and markers may go; None if it is not set yet."""
    return header.base_timestamp if header.attributes & DELETE_HORIZON_BIT else None


def index_records(header: BatchHeader, body: bytes, breathe: Callable[[], None] = no_breath) -> array[int]:
    """``INDEX_FIELDS`` numbers for each record in the uncompressed ``body``, one record after the other.

    Raises ``ApiError`` if these are not exactly the records that ``header`` counts. ``breathe`` is called
    now and then, so that a large batch does not keep other threads waiting.
    """
    found = array("q")
    position, offset_delta = 0, -1
    try:
        for number in range(header.record_count):
            position, offset_delta = _index_record(header, body, position, offset_delta, found)
            if not number % _RECORDS_PER_BREATH:
                breathe()
    except (IndexError, OverflowError):
        raise not_records() from None
    if position != len(body) or header.record_count < 0:
        raise not_records()
    return found


def _index_record(
    header: BatchHeader, body: bytes, start: int, offset_before: int, found: array[int]
) -> tuple[int, int]:
    """Add the record at ``start`` to ``found``; returns where it ends, and its relative offset."""
    length, position = read_varint(body, start)
    end = position + length
    timestamp_delta, after_timestamp = read_varint(body, position + 1)  # behind attributes that mean nothing
    offset_delta, position = read_varint(body, after_timestamp)
    key_length, key_start = read_varint(body, position)
    key_end = key_start + key_length if key_length >= 0 else -1
    position = max(key_start, key_end)
    if not position < end <= len(body) or not offset_before < offset_delta <= header.last_offset_delta:
        raise not_records()
    if not (fits_64_bits(timestamp_delta) and fits_64_bits(header.base_timestamp + timestamp_delta)):
        raise not_records()
    has_no_value = body[position] & 1  # the sign of its length
    found.extend((start, after_timestamp, timestamp_delta, offset_delta, key_start, key_end, has_no_value))
    return end, offset_delta


def rebuild_batch(
    header: BatchHeader, records: bytes, count: int, max_timestamp: int, new_horizon_ms: int | None
) -> bytes:
    """Build the batch with ``count`` other ``records``, compressed as it was.

    Offsets and the producer's fields stay what they were; ``new_horizon_ms`` sets a delete horizon.
    """
    has_new = new_horizon_ms is not None
    changed = header._replace(
        attributes=header.attributes | (DELETE_HORIZON_BIT if has_new else 0),
        base_timestamp=header.base_timestamp if new_horizon_ms is None else new_horizon_ms,
        max_timestamp=max_timestamp,
        record_count=count,
    )
    return with_body(changed, compress(header.codec, records))


def header_only(header: BatchHeader) -> bytes:
    """The batch without its records, which keeps its producer's sequence numbers in the log."""
    changed = header._replace(
        attributes=header.attributes & ~(CODEC_MASK | DELETE_HORIZON_BIT),
        base_timestamp=NO_TIMESTAMP,
        record_count=0,
    )
    return with_body(changed, b"")


def fits_64_bits(number: int) -> bool:
    """Whether the number fits into a signed 64-bit field."""
    return _INT64_MIN <= number <= _INT64_MAX


def not_records() -> ApiError:
    """The error for a body that does not hold the records that its header counts."""
    return ApiError(ErrorCode.corrupt_message, "corrupt record batch: its records do not fit its length")
