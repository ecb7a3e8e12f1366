"""Records inside a batch: building a batch, and reading one back under strict bounds.

Nothing here trusts a length: every field must lie inside the bytes that are there, so that any input either
gives records or an ``ApiError`` with ``CORRUPT_MESSAGE``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tidemill.errors import ApiError, ErrorCode
from tidemill.records import batch as batches
from tidemill.records.batch import CODEC_MASK, HEADER_BYTES, BatchHeader, pack_batch, with_body
from tidemill.records.compression import NONE, compress, decompress
from tidemill.records.varints import read_varint, write_varint

__all__ = (
    "MAX_DECOMPRESSED_BYTES",
    "RECORD_BYTES_MIN",
    "Header",
    "Record",
    "build_batch",
    "build_empty_batch",
    "corrupt",
    "read_bounded_varint",
    "read_records",
    "recompress",
)

#: What one batch may decompress to. Kafka has no such limit; a bomb must not take the node's memory.
MAX_DECOMPRESSED_BYTES = 256 * 1024 * 1024
#: The smallest record has seven fields of a byte each: length, attributes, timestamp, offset, length of the
#: key, length of the value, number of headers. A header that counts more records than fit is wrong.
RECORD_BYTES_MIN = 7
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1

Header = tuple[str, bytes | None]


class Record(NamedTuple):
    """One record. In ``build_batch`` the offset is ignored: records get consecutive offsets."""

    key: bytes | None
    value: bytes | None
    timestamp_ms: int = 0
    headers: tuple[Header, ...] = ()
    offset: int = -1


def build_batch(
    records: Sequence[Record],
    *,
    base_offset: int = 0,
    leader_epoch: int = -1,
    codec: int = NONE,
    producer_id: int = batches.NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = batches.NO_SEQUENCE,
    attributes: int = 0,
) -> bytes:
    """Encode ``records`` as one v2 batch.

    >>> data = build_batch([Record(b"k", b"v", timestamp_ms=5)])
    >>> [(r.key, r.value, r.offset) for r in read_records(data)]
    [(b'k', b'v', 0)]
    """
    if not records:
        raise ValueError("a batch has at least one record")
    base_timestamp = records[0].timestamp_ms
    body = bytearray()
    for delta, record in enumerate(records):
        _write_record(body, record, delta, record.timestamp_ms - base_timestamp)
    return pack_batch(
        compress(codec, bytes(body)),
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        attributes=attributes | codec,
        last_offset_delta=len(records) - 1,
        timestamps=(base_timestamp, max(record.timestamp_ms for record in records)),
        producer=(producer_id, producer_epoch, base_sequence),
        record_count=len(records),
    )


def build_empty_batch(base_offset: int, last_offset: int, leader_epoch: int) -> bytes:
    """Build a batch without records that stands for lost or removed ones: readers pass over its offsets."""
    return pack_batch(
        b"",
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        attributes=0,
        last_offset_delta=last_offset - base_offset,
        timestamps=(batches.NO_TIMESTAMP, batches.NO_TIMESTAMP),
        producer=(batches.NO_PRODUCER_ID, -1, batches.NO_SEQUENCE),
        record_count=0,
    )


def recompress(header: BatchHeader, plain: bytes | memoryview, codec: int) -> bytes:
    """Compress the batch of ``header``, whose uncompressed records are ``plain``, with another codec.

    Every header field but codec, length and checksum is kept.
    """
    changed = header._replace(attributes=(header.attributes & ~CODEC_MASK) | codec)
    return with_body(changed, plain if codec == NONE else compress(codec, plain))


def read_records(
    data: bytes | bytearray | memoryview,
    max_bytes: int = MAX_DECOMPRESSED_BYTES,
    offsets: tuple[int, int] | None = None,
) -> Iterator[Record]:
    """Decode the records of the one batch that ``data`` holds. Raises ``ApiError`` where bytes do not fit.

    With ``offsets``, the first and the last one that are wanted, records before are passed over and those
    behind are not looked at.
    """
    if len(data) < HEADER_BYTES:
        raise corrupt(f"{len(data)} bytes are fewer than a batch header's {HEADER_BYTES}")
    header = batches.parse_header(data)
    if not HEADER_BYTES <= header.size_bytes <= len(data):
        raise corrupt(f"the batch claims {header.size_bytes} bytes, {len(data)} are there")
    body = decompress(header.codec, memoryview(data)[HEADER_BYTES : header.size_bytes], max_bytes)
    reader = _Reader(bytes(body))
    # The smallest record has seven bytes, so a wrong count is found before any loop runs on it.
    if header.record_count < 0 or header.record_count * 7 > len(body):
        raise corrupt(f"{header.record_count} records do not fit in {len(body)} bytes")
    append_time = header.max_timestamp if header.is_append_time else None
    for _ in range(header.record_count):
        if offsets is not None:
            offset = _peek_offset(reader, header, offsets[0])
            if offset > offsets[1]:
                return
            if offset < offsets[0]:
                continue
        yield _read_record(reader, header, append_time)
    if reader.position != len(body):
        raise corrupt(f"{len(body) - reader.position} bytes follow the last record")


def _write_record(out: bytearray, record: Record, offset_delta: int, timestamp_delta: int) -> None:
    inner = bytearray(b"\x00")
    write_varint(inner, timestamp_delta)
    write_varint(inner, offset_delta)
    _write_bytes(inner, record.key)
    _write_bytes(inner, record.value)
    write_varint(inner, len(record.headers))
    for name, value in record.headers:
        _write_bytes(inner, name.encode())
        _write_bytes(inner, value)
    write_varint(out, len(inner))
    out += inner


def _write_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        write_varint(out, -1)
    else:
        write_varint(out, len(value))
        out += value


def _read_record(reader: _Reader, header: BatchHeader, append_time: int | None) -> Record:
    length = reader.varint()
    end = reader.position + length
    if length < 0 or end > len(reader.data):
        raise corrupt(f"a record of {length} bytes does not fit in the batch")
    reader.position += 1  # attributes, of which there are none
    timestamp_delta = reader.varint()
    offset_delta = reader.varint()
    key = reader.nullable_bytes()
    value = reader.nullable_bytes()
    headers: tuple[Header, ...] = ()
    count = reader.varint()
    if count:
        if count < 0 or count * 2 > end - reader.position:
            raise corrupt(f"{count} headers do not fit in a record")
        headers = tuple([reader.header() for _ in range(count)])
    if reader.position != end:
        raise corrupt("a record's length does not fit its fields")
    if not 0 <= offset_delta <= header.last_offset_delta:
        raise corrupt(f"an offset delta of {offset_delta} lies outside the batch")
    timestamp = append_time if append_time is not None else header.base_timestamp + timestamp_delta
    if not _INT64_MIN <= timestamp <= _INT64_MAX:
        raise corrupt("a timestamp does not fit in 64 bits")
    return Record(key, value, timestamp, headers, header.base_offset + offset_delta)


def _peek_offset(reader: _Reader, header: BatchHeader, first_wanted: int) -> int:
    """The offset of the next record; the record is passed over if it is below the first one wanted."""
    start = reader.position
    length = reader.varint()
    end = reader.position + length
    if length < 0 or end > len(reader.data):
        raise corrupt(f"a record of {length} bytes does not fit in the batch")
    reader.position += 1  # attributes, of which there are none
    reader.varint()
    offset = header.base_offset + reader.varint()
    reader.position = end if offset < first_wanted else start
    return offset


class _Reader:
    """A bounded cursor over decompressed records."""

    __slots__ = ("data", "position")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def varint(self) -> int:
        value, self.position = read_bounded_varint(self.data, self.position)
        return value

    def nullable_bytes(self) -> bytes | None:
        length = self.varint()
        if length < 0:
            return None
        end = self.position + length
        if end > len(self.data):
            raise corrupt(f"a field of {length} bytes does not fit in the batch")
        value = self.data[self.position : end]
        self.position = end
        return value

    def header(self) -> Header:
        name = self.nullable_bytes()
        if name is None:
            raise corrupt("a header has no name")
        try:
            text = name.decode()
        except UnicodeDecodeError:
            raise corrupt("a header's name is not UTF-8") from None
        return text, self.nullable_bytes()


def read_bounded_varint(body: bytes | memoryview, position: int) -> tuple[int, int]:
    """A zigzag number of at most ten bytes, and the position behind it. Raises ``ApiError`` if none fits."""
    try:
        byte = body[position]
        if byte < 0x80:
            return (byte >> 1) ^ -(byte & 1), position + 1
        return read_varint(body, position)
    except IndexError:
        raise corrupt("a number runs past the end of the batch") from None
    except OverflowError as error:
        raise corrupt(str(error)) from None


def corrupt(what: str) -> ApiError:
    """The error for a batch whose bytes do not fit together."""
    return ApiError(ErrorCode.corrupt_message, f"corrupt record batch: {what}")
