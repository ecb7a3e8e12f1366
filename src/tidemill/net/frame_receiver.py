"""Frames from a socket: bytes are received where they are decoded.

The event loop writes straight into one buffer, which grows to the largest frame that came and is used again
for the next: no chunk is copied or put together. A frame is given on as a view that is valid during the call
only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tidemill.errors import ProtocolError
from tidemill.wire.frames import FRAME_LENGTH_BYTES, MAX_FRAME_BYTES, frame_length

__all__ = ("FrameReceiver",)

_FIRST_BYTES: Final = 64 * 1024
#: A buffer that grew beyond this for a large frame is replaced by a small one when it is empty.
_KEPT_BYTES: Final = 8 * 1024 * 1024


class FrameReceiver(asyncio.BufferedProtocol):
    """Receives frames, and knows whether the peer takes what is sent.

    ``on_frame`` gets each frame without its length and may raise ``ProtocolError``. ``on_end`` is called
    once: with what was wrong, or None if the peer has closed the connection.
    """

    def __init__(
        self, on_frame: Callable[[memoryview], None], on_end: Callable[[Exception | None], None]
    ) -> None:
        self._on_frame = on_frame
        self._on_end = on_end
        self._buffer = bytearray(_FIRST_BYTES)
        #: The bytes from ``_start`` to ``_end`` of the buffer are received and not yet delivered.
        self._start = 0
        self._end = 0
        self._ended = False
        self._room = asyncio.Event()
        self._room.set()
        self._closed = asyncio.Event()

    # --- receiving

    def get_buffer(self, sizehint: int) -> memoryview:
        needed = self._start + FRAME_LENGTH_BYTES
        if self._end >= needed and not self._ended:
            needed += frame_length(self._buffer, self._start, MAX_FRAME_BYTES)
        if needed > len(self._buffer) or self._end == len(self._buffer):
            self._reserve(needed - self._start)
        return memoryview(self._buffer)[self._end :]

    def _reserve(self, frame_bytes: int) -> None:
        """Move the received part of a frame to the beginning of a buffer that can hold the whole frame."""
        rest = memoryview(self._buffer)[self._start : self._end]
        # Another buffer: views of the old one may still be held by the loop.
        fresh = bytearray(max(frame_bytes, _FIRST_BYTES))
        fresh[: len(rest)] = rest
        self._buffer, self._start, self._end = fresh, 0, len(rest)

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        try:
            while not self._ended and self._take():
                pass
        except ProtocolError as error:
            self._finish(error)
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > _KEPT_BYTES:
                self._buffer = bytearray(_FIRST_BYTES)

    def _take(self) -> bool:
        """Deliver one frame, if it is complete. Raises ``ProtocolError`` for an impossible length."""
        body = self._start + FRAME_LENGTH_BYTES
        if body > self._end:
            return False
        behind = body + frame_length(self._buffer, self._start, MAX_FRAME_BYTES)
        if behind > self._end:
            return False
        self._start = behind
        self._on_frame(memoryview(self._buffer)[body:behind].toreadonly())
        return True

    def eof_received(self) -> bool:
        self._finish(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.set()
        self._closed.set()
        self._finish(exc)

    def _finish(self, error: Exception | None) -> None:
        if not self._ended:
            self._ended = True
            self._on_end(error)

    # --- sending

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    async def drain(self) -> None:
        """Wait while the peer is slow; returns at once when the connection has ended."""
        await self._room.wait()

    async def closed(self) -> None:
        """Wait until the socket is closed."""
        await self._closed.wait()
