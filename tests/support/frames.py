"""Frames out of bytes that were sent to a test."""

from __future__ import annotations

from tidemill.wire.frames import FRAME_LENGTH_BYTES, MAX_FRAME_BYTES, frame_length

__all__ = ("split_frames",)


def split_frames(buffer: bytearray) -> list[bytes]:
    """Take all whole frames off the front of ``buffer``, without their lengths; what is left is incomplete.

    >>> received = bytearray(b"\\0\\0\\0\\2ab\\0\\0")
    >>> split_frames(received), bytes(received)
    ([b'ab'], b'\\x00\\x00')
    """
    frames: list[bytes] = []
    position = 0
    while position + FRAME_LENGTH_BYTES <= len(buffer):
        start = position + FRAME_LENGTH_BYTES
        end = start + frame_length(buffer, position, MAX_FRAME_BYTES)
        if end > len(buffer):
            break
        frames.append(bytes(buffer[start:end]))
        position = end
    del buffer[:position]
    return frames
