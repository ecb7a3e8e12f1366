"""Records for a load test: numbered, so that a reader can tell whether each is there once and in order.

A value starts with a magic, the number of the run and the record's own number in its partition; the rest is
filler. Batches are made by patching numbers into a template: making the load must not be what is measured.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from tidemill.records.batch import CRC_START, HEADER_BYTES, parse_header
from tidemill.records.checksum import crc32c
from tidemill.records.compression import NONE
from tidemill.records.record import Record, build_batch, recompress

__all__ = ("VALUE_BYTES_MIN", "BatchTemplate", "IntegrityCheck", "percentile")

_STAMP = struct.Struct(">4sqq")
_MAGIC = b"TMLD"
VALUE_BYTES_MIN = _STAMP.size

_CRC_FIELD = 17
_TIMES_AND_PRODUCER = struct.Struct(">qqqhi")
_TIMES_FIELD = 27


class BatchTemplate:
    """A batch of ``count`` records with values of ``value_bytes`` bytes each."""

    def __init__(self, count: int, value_bytes: int, run: int) -> None:
        if value_bytes < VALUE_BYTES_MIN:
            raise ValueError(f"a value needs at least {VALUE_BYTES_MIN} bytes")
        self.count = count
        filler = bytes(index * 31 % 251 for index in range(value_bytes - VALUE_BYTES_MIN))
        records = [Record(None, _STAMP.pack(_MAGIC, run, number) + filler) for number in range(count)]
        self._data = bytearray(build_batch(records))
        self._number_positions = self._find_numbers(run)

    def _find_numbers(self, run: int) -> list[int]:
        positions, position = [], HEADER_BYTES
        for number in range(self.count):
            stamp = _STAMP.pack(_MAGIC, run, number)
            position = self._data.index(stamp, position) + len(stamp)
            positions.append(position - 8)
        return positions

    def fill(
        self, first_number: int, timestamp_ms: int, producer: tuple[int, int, int], codec: int = NONE
    ) -> bytes:
        """The batch with records numbered from ``first_number``; ``producer`` is (id, epoch, sequence)."""
        data = self._data
        for number, position in enumerate(self._number_positions, first_number):
            struct.pack_into(">q", data, position, number)
        _TIMES_AND_PRODUCER.pack_into(data, _TIMES_FIELD, timestamp_ms, timestamp_ms, *producer)
        struct.pack_into(">I", data, _CRC_FIELD, crc32c(memoryview(data)[CRC_START:]))
        if codec == NONE:
            return bytes(data)
        return recompress(parse_header(data), memoryview(data)[HEADER_BYTES:], codec)


@dataclass(slots=True)
class IntegrityCheck:
    """Checks records as they are read: finds those that are missing, repeated or out of order."""

    run: int
    found: int = 0
    foreign: int = 0
    repeated: int = 0
    skipped: int = 0
    _next: dict[int, int] = field(default_factory=dict)

    def note(self, partition: int, value: bytes | None) -> None:
        """Check one record. The records of a partition have to be given in the order of their offsets."""
        if value is None or len(value) < VALUE_BYTES_MIN:
            self.foreign += 1
            return
        magic, run, number = _STAMP.unpack_from(value)
        if magic != _MAGIC or run != self.run:
            self.foreign += 1
            return
        expected = self._next.get(partition, 0)
        if number < expected:
            self.repeated += 1
            return
        self.skipped += number - expected
        self.found += 1
        self._next[partition] = number + 1

    def finish(self, sent: dict[int, int]) -> None:
        """Count what is missing at the end. ``sent`` is the number of records by partition."""
        for partition, count in sent.items():
            self.skipped += count - self._next.get(partition, 0)

    @property
    def is_whole(self) -> bool:
        return not self.repeated and not self.skipped


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed (nearest rank); 0 of none.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 0.5), percentile([], 0.99)
    (2.0, 0.0)
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * share // 1) - 1)]
