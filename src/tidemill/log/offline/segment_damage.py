"""Reading a segment that may be damaged: every sound batch, and every stretch that is not one.

Used by the tools only. Where the log itself stops at the first bad batch, this looks for the next good one
behind it, so that an operator sees how much is lost and how much is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tidemill.log.segments.segment_walk import BrokenBatch, walk
from tidemill.log.storage import StorageFile
from tidemill.records.batch import HEADER_BYTES, BatchHeader, parse_header

__all__ = ("Damage", "SoundBatch", "scan_segment")

_MAGIC_POSITION = 16
_WINDOW_BYTES = 4 * 1024 * 1024


class SoundBatch(NamedTuple):
    """A batch whose shape and checksum are right and whose offsets follow on."""

    position: int
    header: BatchHeader


@dataclass(frozen=True, slots=True)
class Damage:
    """A range of bytes that is no sound batch; it is empty where only offsets are missing."""

    position: int
    size_bytes: int
    reason: str
    #: Offsets from here on, up to the next sound batch, are not readable.
    first_offset: int
    #: Offset of that next batch; None if nothing sound follows in the segment.
    next_offset: int | None


def scan_segment(file: StorageFile, base_offset: int) -> Iterator[SoundBatch | Damage]:
    """The sound batches and damages of a segment file, in order; together they cover all of it."""
    position, expected, end = 0, base_offset, file.size()
    while position < end:
        reason = ""
        try:
            for found, header in walk(file, position, end, verify=True):
                if header.base_offset != expected:
                    position, reason = found, f"offset {header.base_offset} where {expected} must be"
                    break
                yield SoundBatch(found, header)
                position, expected = found + header.size_bytes, header.next_offset
        except BrokenBatch as broken:
            position, reason = broken.position, broken.reason
        if not reason:
            return
        following = _next_sound(file, position, end, expected)
        resume = end if following is None else following.position
        next_offset = None if following is None else following.header.base_offset
        yield Damage(position, resume - position, reason, expected, next_offset)
        if following is None:
            return
        position, expected = following.position, following.header.base_offset


def _next_sound(file: StorageFile, damaged: int, end: int, expected: int) -> SoundBatch | None:
    """The first sound batch at or behind ``damaged`` whose offset can follow ``expected``."""
    here = _sound_at(file, damaged, end, expected)
    if here is not None and _is_confirmed(file, here, end):
        return here
    if damaged + HEADER_BYTES <= end:
        # Most often one batch is damaged inside, and its length leads to the next.
        length = parse_header(file.read(damaged, HEADER_BYTES)).size_bytes
        behind = _sound_at(file, damaged + length, end, expected) if length >= HEADER_BYTES else None
        if behind is not None:
            return behind
    return _search(file, damaged + 1, end, expected)


def _is_confirmed(file: StorageFile, batch: SoundBatch, end: int) -> bool:
    """Whether the batch behind this one agrees with its offset, which no checksum covers.

    Without that the offset is what is damaged: a log is written without gaps.
    """
    behind = _sound_at(file, batch.position + batch.header.size_bytes, end, batch.header.next_offset)
    return behind is not None and behind.header.base_offset == batch.header.next_offset


def _search(file: StorageFile, start: int, end: int, expected: int) -> SoundBatch | None:
    while start + HEADER_BYTES <= end:
        window = file.read(start, min(_WINDOW_BYTES + HEADER_BYTES, end - start))
        magic = window.find(b"\x02", _MAGIC_POSITION)
        while 0 <= magic < _WINDOW_BYTES + _MAGIC_POSITION:
            found = _sound_at(file, start + magic - _MAGIC_POSITION, end, expected)
            if found is not None:
                return found
            magic = window.find(b"\x02", magic + 1)
        start += _WINDOW_BYTES
    return None


def _sound_at(file: StorageFile, position: int, end: int, expected: int) -> SoundBatch | None:
    if position + HEADER_BYTES > end:
        return None
    header = parse_header(file.read(position, HEADER_BYTES))
    if (
        header.base_offset < expected
        or header.size_bytes < HEADER_BYTES
        or position + header.size_bytes > end
    ):
        return None
    try:
        for found, sound in walk(file, position, position + header.size_bytes, verify=True):
            return SoundBatch(found, sound)
    except BrokenBatch:
        return None
    return None
