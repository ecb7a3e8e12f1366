"""Frames: a 4-byte big-endian length and that many bytes.

The limits hold before anything is allocated for a frame: a length above the limit ends the connection.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from tidemill.errors import ProtocolError

__all__ = (
    "FRAME_LENGTH_BYTES",
    "MAX_FRAME_BYTES",
    "frame_length",
    "split_frames",
)

FRAME_LENGTH_BYTES: Final = 4
MAX_FRAME_BYTES: Final = 100 * 1024 * 1024

_read_length: Final = Struct(">i").unpack_from


def frame_length(buffer: bytes | bytearray | memoryview, offset: int, max_bytes: int) -> int:
    """The length in the four bytes at ``offset``. Raises ProtocolError if it is negative or too large."""
    length: int = _read_length(buffer, offset)[0]
    if not 0 <= length <= max_bytes:
        if bytes(buffer[offset : offset + FRAME_LENGTH_BYTES]) == b"HTTP":
            raise ProtocolError("it speaks HTTP")
        raise ProtocolError(f"a frame of {length} bytes: at most {max_bytes} are accepted")
    return length


def split_frames(buffer: bytearray, max_bytes: int = MAX_FRAME_BYTES) -> list[bytes]:
    """Take all whole frames off the front of ``buffer``, without their lengths; what is left is incomplete.

    >>> received = bytearray(b"\\0\\0\\0\\2ab\\0\\0")
    >>> split_frames(received), bytes(received)
    ([b'ab'], b'\\x00\\x00')
    """
    frames: list[bytes] = []
    position = 0
    while position + FRAME_LENGTH_BYTES <= len(buffer):
        start = position + FRAME_LENGTH_BYTES
        end = start + frame_length(buffer, position, max_bytes)
        if end > len(buffer):
            break
        frames.append(bytes(buffer[start:end]))
        position = end
    del buffer[:position]
    return frames
