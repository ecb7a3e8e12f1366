"""Reading a segment file for compaction: the batches of some megabytes at a time.

Small batches come in several groups, since the caller looks at each batch of a group before others have their
turn again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tidemill.log.pace import Pace
from tidemill.log.segments.segment_walk import BrokenBatch
from tidemill.log.storage import StorageFile
from tidemill.records.batch import HEADER_BYTES, BatchHeader, check_crc, parse_header

__all__ = ("CHUNK_BYTES", "Batches", "read_chunks")

CHUNK_BYTES = 2 * 1024 * 1024
#: Small, so that the garbage collector hardly ever sees them: objects that survive make full collections due.
_BATCHES_MAX = 256

Batches = list[tuple[BatchHeader, memoryview]]


def read_chunks(
    file: StorageFile, size: int, pace: Pace, check_stopped: Callable[[], None]
) -> Iterator[tuple[int, Batches]]:
    """Groups of batches with their headers, checksums verified, each with the position of its first batch.

    No group is empty. Raises ``BrokenBatch``.
    """
    position = 0
    while position < size:
        check_stopped()
        chunk = file.read(position, min(CHUNK_BYTES, size - position))
        if len(chunk) >= HEADER_BYTES:
            first_bytes = parse_header(chunk).size_bytes
            if len(chunk) < first_bytes <= size - position:
                chunk = file.read(position, first_bytes)
        pace.spend(len(chunk))
        batches: Batches = []
        view, start, first = memoryview(chunk), 0, 0
        while len(chunk) - start >= HEADER_BYTES:
            header = parse_header(chunk, start)
            end = start + header.size_bytes
            if end > len(chunk) and start:
                break
            _check(header, view[start:end], position + start)
            batches.append((header, view[start:end]))
            pace.breathe()
            start = end
            if len(batches) == _BATCHES_MAX:
                yield position + first, batches
                batches, first = [], start
        if not start:
            raise BrokenBatch(position, f"the file ends inside a batch header ({len(chunk)} bytes)")
        if batches:
            yield position + first, batches
        position += start


def _check(header: BatchHeader, data: memoryview, position: int) -> None:
    if (
        header.magic != 2
        or header.size_bytes < HEADER_BYTES
        or header.last_offset_delta < 0
        or header.record_count < 0
    ):
        raise BrokenBatch(position, "not a batch header")
    if len(data) != header.size_bytes or not check_crc(data, header):
        raise BrokenBatch(position, "the checksum does not fit the bytes")
