"""Short ways to make batches."""

from __future__ import annotations

import struct

from crc32c import crc32c

from tidemill.records.batch import HEADER_BYTES, BatchHeader, parse_header
from tidemill.records.record import Record, build_batch

__all__ = ("make_batch", "plain_batch", "undecodable_batch")

_CRC_AT = 17


def plain_batch(
    *values: str, timestamp_ms: int = 1, producer: tuple[int, int, int] | None = None, codec: int = 0
) -> bytes:
    """One batch with a record per value; ``producer`` is (id, epoch, base sequence)."""
    producer_id, epoch, sequence = producer or (-1, -1, -1)
    records = [Record(None, value.encode(), timestamp_ms) for value in values]
    return build_batch(
        records, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence, codec=codec
    )


def make_batch(
    *values: str, timestamp_ms: int = 1, producer: tuple[int, int, int] | None = None, codec: int = 0
) -> tuple[bytes, BatchHeader]:
    """A ``plain_batch`` with its header: the first two arguments of ``PartitionLog.append``."""
    data = plain_batch(*values, timestamp_ms=timestamp_ms, producer=producer, codec=codec)
    return data, parse_header(data)


def undecodable_batch(*values: str) -> tuple[bytes, BatchHeader]:
    """A batch whose checksum fits and whose records are no records: what an old node may have let in."""
    data = bytearray(plain_batch(*values))
    data[HEADER_BYTES] = 0x03  # The first record claims a negative length.
    struct.pack_into(">I", data, _CRC_AT, crc32c(bytes(data[_CRC_AT + 4 :])))
    return bytes(data), parse_header(data)
