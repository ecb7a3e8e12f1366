"""Frames: a 4-byte big-endian length and that many bytes.

The limits hold before anything is allocated for a frame: a length beyond them ends the connection.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from tidemill.errors import ProtocolError

__all__ = ("FRAME_LENGTH_BYTES", "MAX_FRAME_BYTES", "frame_length")

FRAME_LENGTH_BYTES: Final = 4
MAX_FRAME_BYTES: Final = 100 * 1024 * 1024

_read_length: Final = Struct(">i").unpack_from


def frame_length(
    buffer: bytes | bytearray | memoryview, offset: int, max_bytes: int, min_bytes: int = 0
) -> int:
    """The length in the four bytes at ``offset``. Raises ``ProtocolError`` if it is not within the limits."""
    length: int = _read_length(buffer, offset)[0]
    if not min_bytes <= length <= max_bytes:
        if bytes(buffer[offset : offset + FRAME_LENGTH_BYTES]) == b"HTTP":
            raise ProtocolError("it speaks HTTP")
        raise ProtocolError(f"a frame of {length} bytes; {min_bytes} to {max_bytes} are allowed")
    return length
