"""The header of a Kafka v2 record batch: reading, checking and stamping it.

A batch is stored and served as the bytes that arrived. Only two fields may change without touching the
checksum: the base offset and the leader epoch, which stand in front of it.

    byte  field                      byte  field
       0  base offset        i64       27  base timestamp    i64
       8  batch length       i32       35  max timestamp     i64
      12  leader epoch       i32       43  producer id       i64
      16  magic              i8        51  producer epoch    i16
      17  crc-32c of 21…     u32       53  base sequence     i32
      21  attributes         i16       57  record count      i32
      23  last offset delta  i32       61  records
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tidemill.errors import ApiError, ErrorCode
from tidemill.records.checksum import crc32c

__all__ = (
    "CODEC_MASK",
    "CRC_START",
    "HEADER_BYTES",
    "LENGTH_PREFIX_BYTES",
    "MAGIC",
    "NO_PRODUCER_ID",
    "NO_SEQUENCE",
    "NO_TIMESTAMP",
    "SEQUENCE_MODULUS",
    "STAMPED_BYTES",
    "TRANSACTIONAL_BIT",
    "BatchHeader",
    "behind_empty_batches",
    "check_batch",
    "check_crc",
    "next_sequence",
    "pack_batch",
    "parse_header",
    "restamp_append_time",
    "restamp_max_timestamp",
    "stamp_prefix",
    "with_body",
)

HEADER_BYTES = 61
#: Base offset and batch length: what must be there to know how long a batch is.
LENGTH_PREFIX_BYTES = 12
#: Base offset, batch length and leader epoch: what the log rewrites.
STAMPED_BYTES = 16
MAGIC = 2
NO_PRODUCER_ID = -1
NO_SEQUENCE = -1
NO_TIMESTAMP = -1

_CRC_FIELD = 17
#: The checksum covers a batch from this byte on.
CRC_START = 21
_MAX_TIMESTAMP_FIELD = 35
#: Bits of a header's attributes.
CODEC_MASK = 0x07
_APPEND_TIME_BIT = 0x08
TRANSACTIONAL_BIT = 0x10
_CONTROL_BIT = 0x20
#: Sequence numbers wrap to 0 here.
SEQUENCE_MODULUS = 1 << 31

_HEADER = struct.Struct(">qiibIhiqqqhii")
_PREFIX = struct.Struct(">qii")
_pack_start = struct.Struct(">qiibI").pack
_pack_checked = struct.Struct(">hiqqqhii").pack


class BatchHeader(NamedTuple):
    """The header of a batch, as it stands in its bytes."""

    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole batch, its first twelve included."""
        return self.batch_length + LENGTH_PREFIX_BYTES

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> int:
        """Number of the compression codec; 0 is none."""
        return self.attributes & CODEC_MASK

    @property
    def is_append_time(self) -> bool:
        return bool(self.attributes & _APPEND_TIME_BIT)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & _CONTROL_BIT)

    @property
    def is_idempotent(self) -> bool:
        return self.producer_id != NO_PRODUCER_ID

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last record; sequences wrap from 2**31 - 1 to 0."""
        if self.base_sequence == NO_SEQUENCE:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) % SEQUENCE_MODULUS


def next_sequence(sequence: int) -> int:
    """The sequence number that must follow ``sequence``.

    >>> next_sequence(-1), next_sequence(7), next_sequence(2**31 - 1)
    (0, 8, 0)
    """
    return (sequence + 1) % SEQUENCE_MODULUS


def pack_batch(
    body: bytes | memoryview,
    *,
    base_offset: int,
    leader_epoch: int,
    attributes: int,
    last_offset_delta: int,
    timestamps: tuple[int, int],
    producer: tuple[int, int, int],
    record_count: int,
) -> bytes:
    """A batch of a header and ``body``, with the length and the checksum that fit.

    ``timestamps``: the base and the largest one. ``producer``: id, epoch and base sequence.
    """
    checked = _pack_checked(attributes, last_offset_delta, *timestamps, *producer, record_count) + body
    length = HEADER_BYTES - LENGTH_PREFIX_BYTES + len(body)
    return _pack_start(base_offset, length, leader_epoch, MAGIC, crc32c(checked)) + checked


def with_body(header: BatchHeader, body: bytes | memoryview) -> bytes:
    """A batch of ``header`` in front of another ``body``, with the length and the checksum that fit."""
    return pack_batch(
        body,
        base_offset=header.base_offset,
        leader_epoch=header.leader_epoch,
        attributes=header.attributes,
        last_offset_delta=header.last_offset_delta,
        timestamps=(header.base_timestamp, header.max_timestamp),
        producer=(header.producer_id, header.producer_epoch, header.base_sequence),
        record_count=header.record_count,
    )


def parse_header(data: bytes | bytearray | memoryview, position: int = 0) -> BatchHeader:
    """Read a header without checking it. ``data`` must have at least ``HEADER_BYTES``."""
    return BatchHeader._make(_HEADER.unpack_from(data, position))


def behind_empty_batches(data: bytes | bytearray | memoryview) -> int | None:
    """The offset behind whole batches that all are empty; None if one has records, or there are none."""
    position, behind = 0, None
    while position + HEADER_BYTES <= len(data):
        header = parse_header(data, position)
        if header.record_count:
            return None
        behind = header.next_offset
        position += header.size_bytes
    return behind


def check_crc(data: bytes | bytearray | memoryview, header: BatchHeader, position: int = 0) -> bool:
    """Whether the checksum of the batch at ``position`` fits its bytes."""
    view = memoryview(data)[position + CRC_START : position + header.size_bytes]
    return crc32c(view) == header.crc


def check_batch(data: bytes | bytearray | memoryview, header: BatchHeader | None = None) -> BatchHeader:
    """Check that ``data`` is exactly one sound v2 batch as a producer may send it.

    The records inside are not decoded: count, length and checksum must agree. ``header`` is what
    ``parse_header`` gave, if the caller has called it already. Raises ``ApiError`` with the code that Kafka
    would answer.
    """
    if len(data) < HEADER_BYTES:
        if len(data) > MAGIC_POSITION and data[MAGIC_POSITION] < MAGIC:
            raise _old_format(data[MAGIC_POSITION])
        raise _corrupt(f"{len(data)} bytes are fewer than a batch header's {HEADER_BYTES}")
    if header is None:
        header = parse_header(data)
    if header.magic < 0 or header.magic > MAGIC:
        raise _corrupt(f"record format {header.magic} does not exist")
    if header.magic != MAGIC:
        raise _old_format(header.magic)
    if header.size_bytes < HEADER_BYTES or header.size_bytes > len(data):
        raise _corrupt(f"the batch claims {header.size_bytes} bytes, {len(data)} were sent")
    if header.size_bytes != len(data):
        raise ApiError(
            ErrorCode.invalid_record,
            f"one batch per partition is allowed, but {len(data) - header.size_bytes} bytes follow the first",
        )
    if not check_crc(data, header):
        raise _corrupt("the checksum does not fit the bytes")
    if header.record_count <= 0 or header.last_offset_delta != header.record_count - 1:
        raise ApiError(
            ErrorCode.invalid_record,
            f"{header.record_count} records do not fit a last offset delta of {header.last_offset_delta}",
        )
    _check_producer_fields(header)
    return header


MAGIC_POSITION = 16


def _check_producer_fields(header: BatchHeader) -> None:
    if header.is_append_time:
        raise ApiError(ErrorCode.invalid_timestamp, "only the broker may mark a batch as LogAppendTime")
    if header.is_control:
        raise ApiError(ErrorCode.invalid_record, "clients may not write control batches")
    if not header.is_idempotent:
        if header.is_transactional:
            raise ApiError(ErrorCode.invalid_record, "a transactional batch needs a producer id")
        return
    if header.producer_id < 0 or header.producer_epoch < 0 or header.base_sequence < 0:
        raise ApiError(
            ErrorCode.invalid_record,
            f"producer id {header.producer_id}, epoch {header.producer_epoch} and sequence "
            f"{header.base_sequence} do not belong together",
        )


def stamp_prefix(header: BatchHeader, base_offset: int, leader_epoch: int) -> bytes:
    """The first sixteen bytes of a batch as the log stores it; the rest follows unchanged."""
    return _PREFIX.pack(base_offset, header.batch_length, leader_epoch)


def restamp_append_time(data: bytes | bytearray | memoryview, timestamp_ms: int) -> bytearray:
    """A copy of the batch whose records all carry the broker's time (``LogAppendTime``)."""
    (attributes,) = struct.unpack_from(">h", data, CRC_START)
    return _restamped(data, attributes | _APPEND_TIME_BIT, timestamp_ms)


def restamp_max_timestamp(data: bytes | bytearray | memoryview, timestamp_ms: int) -> bytearray:
    """A copy of the batch whose header says that this is the largest timestamp of its records."""
    (attributes,) = struct.unpack_from(">h", data, CRC_START)
    return _restamped(data, attributes, timestamp_ms)


def _restamped(data: bytes | bytearray | memoryview, attributes: int, max_timestamp: int) -> bytearray:
    copy = bytearray(data)
    struct.pack_into(">h", copy, CRC_START, attributes)
    struct.pack_into(">q", copy, _MAX_TIMESTAMP_FIELD, max_timestamp)
    struct.pack_into(">I", copy, _CRC_FIELD, crc32c(memoryview(copy)[CRC_START:]))
    return copy


def _corrupt(what: str) -> ApiError:
    return ApiError(ErrorCode.corrupt_message, f"corrupt record batch: {what}")


def _old_format(magic: int) -> ApiError:
    return ApiError(
        ErrorCode.unsupported_for_message_format,
        f"record format v{magic} is not supported, use a client that writes v2 (Kafka 0.11 or newer)",
    )
