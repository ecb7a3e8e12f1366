"""Batches that lose some of their records, as compaction makes them.

Nothing is decoded that need not be: a record is found by its length, its key is a slice, and what is kept is
copied as the bytes that are there, because offsets and timestamps are relative to the batch, whose base
stays.

The one exception is the delete horizon. When a batch with tombstones, or a marker whose transaction has
nothing left, is first compacted, the time from which these may go is written where the base timestamp was,
under an attribute bit (KIP-534). The timestamps of its records are then written anew, relative to that.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from crc32c import crc32c

from tidemill.errors import ApiError, ErrorCode
from tidemill.records.batch import HEADER_BYTES, LENGTH_PREFIX_BYTES, NO_TIMESTAMP, BatchHeader
from tidemill.records.compression import compress

__all__ = (
    "DELETE_HORIZON_BIT",
    "RecordSlice",
    "delete_horizon",
    "header_only",
    "index_records",
    "keep_records",
)

_VARINT_SHIFT_MAX = 63

DELETE_HORIZON_BIT = 0x40
_CODEC_MASK = 0x07
#: So many records are looked at between two calls of ``breathe``.
_RECORDS_PER_BREATH = 256

#: (start, end, offset delta, key, whether there is no value): where a record is in the body, and what it is.
RecordSlice = tuple[int, int, int, bytes | None, bool]


def _no_breath() -> None:
    return


def delete_horizon(header: BatchHeader) -> int | None:
    """The time from which tombstones and markers in the batch may go; None if it was not set yet."""
    return header.base_timestamp if header.attributes & DELETE_HORIZON_BIT else None


def index_records(body: bytes, count: int, breathe: Callable[[], None] = _no_breath) -> list[RecordSlice]:
    """Find every record in the uncompressed ``body``. Raises ``ApiError`` if it is not exactly ``count``
    records.

    ``breathe`` is called now and then, so that a large batch does not keep other threads waiting.
    """
    found: list[RecordSlice] = []
    position = 0
    try:
        while len(found) < count:
            wanted = min(_RECORDS_PER_BREATH, count - len(found))
            position = _index_some(body, position, wanted, found)
            breathe()
    except IndexError:
        raise _not_records() from None
    if position != len(body):
        raise _not_records()
    return found


def _index_some(body: bytes, position: int, count: int, found: list[RecordSlice]) -> int:
    """Add ``count`` records from ``position`` on to ``found``; returns where the next one starts.

    Nearly all numbers have one or two bytes, and a call costs as much as all the rest of a record: so these
    are read in place. Runs past the end as an ``IndexError``.
    """
    size, append = len(body), found.append
    for _ in range(count):
        start = position
        length, second = body[position], body[position + 1]
        if length < 0x80:
            position += 1
        elif second < 0x80:
            length = (length & 0x7F) | (second << 7)
            position += 2
        else:
            length, position = _varint(body, position)
            length <<= 1
        end = position + (length >> 1)
        position += 1  # the record's attributes, which mean nothing
        while body[position] > 0x7F:
            position += 1
        position += 1  # behind the timestamp
        offset_delta, second = body[position], body[position + 1]
        if offset_delta < 0x80:
            offset_delta >>= 1
            position += 1
        elif second < 0x80:
            offset_delta = ((offset_delta & 0x7F) | (second << 7)) >> 1
            position += 2
        else:
            offset_delta, position = _varint(body, position)
        key_length = body[position]
        position += 1
        key = None
        # The sign is the lowest bit of the first byte, and below zero there is only "none".
        if not key_length & 1:
            if key_length < 0x80:
                key_end = position + (key_length >> 1)
            else:
                key_length, position = _varint(body, position - 1)
                key_end = position + key_length
            key = body[position:key_end]
            position = key_end
        if length & 1 or not position < end <= size:
            raise _not_records()
        append((start, end, offset_delta, key, body[position] & 1 == 1))
        position = end
    return position


def keep_records(
    header: BatchHeader, body: bytes, kept: Sequence[RecordSlice], new_horizon_ms: int | None = None
) -> bytes:
    """The batch with only the ``kept`` records of its uncompressed ``body``, compressed as it was.

    Offsets, timestamps and the producer's fields stay what they were; ``new_horizon_ms`` sets a delete
    horizon.
    """
    base_timestamp, max_timestamp = header.base_timestamp, header.max_timestamp
    if new_horizon_ms is not None:
        base_timestamp = new_horizon_ms
    if header.is_append_time:
        # All records have the batch's largest timestamp; what they say themselves is not looked at.
        parts = [body[start:end] for start, end, *_ in kept]
    else:
        max_timestamp = NO_TIMESTAMP
        parts = []
        for start, end, *_ in kept:
            _, fields = _varint(body, start)
            delta, rest = _varint(body, fields + 1)
            timestamp = header.base_timestamp + delta
            max_timestamp = max(max_timestamp, timestamp)
            if new_horizon_ms is None:
                parts.append(body[start:end])
            else:
                inner = b"\x00" + _to_varint(timestamp - new_horizon_ms) + body[rest:end]
                parts.append(_to_varint(len(inner)) + inner)
    attributes = header.attributes | (0 if new_horizon_ms is None else DELETE_HORIZON_BIT)
    changed = header._replace(
        attributes=attributes,
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
        record_count=len(kept),
    )
    return _frame(changed, compress(header.codec, b"".join(parts)))


def header_only(header: BatchHeader) -> bytes:
    """The batch without its records: it still says what its producer's sequence numbers were."""
    changed = header._replace(
        attributes=header.attributes & ~(_CODEC_MASK | DELETE_HORIZON_BIT),
        base_timestamp=NO_TIMESTAMP,
        record_count=0,
    )
    return _frame(changed, b"")


def _frame(header: BatchHeader, body: bytes) -> bytes:
    """``header`` in front of ``body``, with the length and the checksum that fit."""
    checked = (
        struct.pack(
            ">hiqqqhii",
            header.attributes,
            header.last_offset_delta,
            header.base_timestamp,
            header.max_timestamp,
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
            header.record_count,
        )
        + body
    )
    length = HEADER_BYTES - LENGTH_PREFIX_BYTES + len(body)
    prefix = struct.pack(
        ">qiibI", header.base_offset, length, header.leader_epoch, header.magic, crc32c(checked)
    )
    return prefix + checked


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A zigzag number and the position behind it."""
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (result >> 1) ^ -(result & 1), position
        shift += 7
        if shift > _VARINT_SHIFT_MAX:
            raise _not_records()


def _to_varint(value: int) -> bytes:
    zigzag = (value << 1) ^ (value >> 63)
    out = bytearray()
    while zigzag > 0x7F:
        out.append((zigzag & 0x7F) | 0x80)
        zigzag >>= 7
    out.append(zigzag)
    return bytes(out)


def _not_records() -> ApiError:
    return ApiError(ErrorCode.corrupt_message, "corrupt record batch: its records do not fit its length")
