"""Walking over the batches of a segment file, header by header."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.errors import CorruptData
from tidemill.log.storage import StorageFile
from tidemill.records.batch import HEADER_BYTES, LENGTH_PREFIX_BYTES, BatchHeader, check_crc, parse_header

__all__ = ("BrokenBatch", "walk", "walk_contiguous")

_CHUNK_BYTES = 256 * 1024


class BrokenBatch(Exception):
    """The bytes at ``position`` are not a sound batch."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position
        self.reason = reason


def walk(
    file: StorageFile, start: int, end: int, *, verify: bool = False
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of each batch in ``start … end``; ``verify`` checks every checksum as well.

    Raises ``BrokenBatch`` at the first position that does not hold a whole batch.
    """
    position, chunk, chunk_start = start, b"", start
    while position < end:
        if position + HEADER_BYTES > chunk_start + len(chunk):
            chunk, chunk_start = file.read(position, min(_CHUNK_BYTES, end - position)), position
            if len(chunk) < HEADER_BYTES:
                raise BrokenBatch(position, f"the file ends inside a batch header ({len(chunk)} bytes)")
        header = parse_header(chunk, position - chunk_start)
        _check_shape(header, position, end)
        if verify:
            batch_end = position + header.size_bytes
            if batch_end > chunk_start + len(chunk):
                size = max(_CHUNK_BYTES, header.size_bytes)
                chunk, chunk_start = file.read(position, min(size, end - position)), position
            if len(chunk) < batch_end - chunk_start or not check_crc(chunk, header, position - chunk_start):
                raise BrokenBatch(position, "the checksum does not fit the bytes")
        yield position, header
        position += header.size_bytes


def walk_contiguous(file: StorageFile, base_offset: int, end: int) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of each batch up to byte ``end``, checked, the first of ``base_offset``.

    Raises ``CorruptData`` where one is not sound or does not follow on.
    """
    expected = base_offset
    try:
        for position, header in walk(file, 0, end, verify=True):
            if header.base_offset != expected:
                raise BrokenBatch(position, f"offset {header.base_offset} where {expected} must be")
            expected = header.next_offset
            yield position, header
    except BrokenBatch as broken:
        raise CorruptData(broken.reason, path=file.path, position=broken.position) from broken


def _check_shape(header: BatchHeader, position: int, end: int) -> None:
    if header.magic != 2:
        raise BrokenBatch(position, f"record format {header.magic} instead of 2")
    if header.batch_length < HEADER_BYTES - LENGTH_PREFIX_BYTES:
        raise BrokenBatch(position, f"a batch length of {header.batch_length} is too short")
    if position + header.size_bytes > end:
        raise BrokenBatch(position, f"the batch needs {header.size_bytes} bytes, {end - position} are there")
    if header.base_offset < 0 or header.last_offset_delta < 0 or header.record_count < 0:
        raise BrokenBatch(position, "a negative offset or count")
