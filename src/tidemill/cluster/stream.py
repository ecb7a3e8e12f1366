"""Frames from and to a socket.

The length of a frame is checked, and its bytes are asked for, before memory is taken for it. A large frame is
received into a buffer of its own, where the views in its message stay good for as long as somebody has them;
small frames come through a buffer of the connection, and are copied out of it.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol, cast

from tidemill.cluster.frames import Buffers
from tidemill.errors import ProtocolError
from tidemill.wire.frames import FRAME_LENGTH_BYTES, frame_length

__all__ = ("FrameOwner", "FrameStream")

_SCRATCH_BYTES: Final = 64 * 1024
#: How long the last bytes of a connection that is closed may take.
_LINGER_SECONDS: Final = 5.0


class FrameOwner(Protocol):
    """Callbacks of a ``FrameStream`` to the connection that it belongs to."""

    def opened(self) -> None:
        """Called once, when the connection is established."""

    def admits(self, frame_bytes: int) -> bool:
        """Whether memory may be taken for a frame; if not, reading stops until ``FrameStream.go_on``."""

    def progressed(self) -> None:
        """Bytes have arrived and what was complete of them was handed over, or reading has stopped."""

    def received(self, frame: memoryview) -> None:
        """A frame is complete. May raise ``ProtocolError``, which ends the connection."""

    def writable(self, is_writable: bool) -> None:
        """The peer takes what is sent again, or takes it too slowly."""

    def ended(self, error: Exception | None) -> None:
        """No more frames come; called once. None: the peer, or this side, has closed the connection."""


class FrameStream(asyncio.BufferedProtocol):
    """One end of a connection. ``max_bytes`` is the largest frame, and may be changed at any time."""

    def __init__(self, owner: FrameOwner, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        #: The bytes from ``_start`` to ``_end`` are received, and not yet a part of a frame.
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._start = 0
        self._end = 0
        #: A frame that is larger than what had arrived of it, and how much of it is there.
        self._frame: bytearray | None = None
        self._filled = 0
        #: Whether the owner did not admit the next frame, and whether it wants none for now.
        self._is_refused = False
        self._is_held = False
        self._is_taking = False
        self._is_paused = False
        self._has_ended = False
        self._lingering: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._closed = asyncio.Event()

    @property
    def host(self) -> str:
        """Address of the peer; empty while there is no connection."""
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(peer[0]) if peer else ""

    @property
    def is_inside_frame(self) -> bool:
        """Whether a frame has begun, and its sender is to send the rest."""
        is_read = not self._is_refused and not self._is_held
        return is_read and (self._frame is not None or self._start < self._end)

    @property
    def has_ended(self) -> bool:
        """Whether no more frames come, and none can be sent."""
        return self._has_ended

    # --- receiving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._owner.opened()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._frame is not None:
            return memoryview(self._frame)[self._filled :]
        if self._end == len(self._scratch):
            self._make_room()
        return memoryview(self._scratch)[self._end :]

    def _make_room(self) -> None:
        """Move what is left to the beginning.

        It is more than half of the buffer only if a transport does not stop at once when it is told to.
        """
        rest = bytes(memoryview(self._scratch)[self._start : self._end])
        # Another buffer: views of the old one may still be held by the loop.
        self._scratch = bytearray(max(_SCRATCH_BYTES, 2 * len(rest)))
        self._scratch[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def buffer_updated(self, nbytes: int) -> None:
        if self._has_ended:
            return
        if self._frame is None:
            self._end += nbytes
        else:
            self._filled += nbytes
        self.go_on()

    def go_on(self) -> None:
        """Hand over the frames that are there, and read on unless the owner admits no more."""
        if self._is_taking or self._has_ended:
            return
        self._is_taking = True
        try:
            self._is_refused = False
            while not self.has_ended and not self._is_held and self._take():
                pass
        except ProtocolError as error:
            self._finish(error)
        finally:
            self._is_taking = False
        if not self.has_ended:
            self._read_or_not()
            self._owner.progressed()

    def _take(self) -> bool:
        """Hand over one frame, if it is complete. Raises ``ProtocolError`` for an impossible length."""
        if self._frame is not None:
            if self._filled < len(self._frame):
                return False
            frame, self._frame = self._frame, None
            self._owner.received(memoryview(frame).toreadonly())
            return True
        body = self._start + FRAME_LENGTH_BYTES
        if body > self._end:
            if self._start == self._end:
                self._start = self._end = 0
            return False
        length = frame_length(self._scratch, self._start, self.max_bytes, min_bytes=1)
        if not self._owner.admits(length):
            self._is_refused = True
            return False
        self._begin(body, length)
        return True

    def _begin(self, body: int, length: int) -> None:
        """Copy what there is of a frame; all of it, or the beginning of a larger one."""
        behind = min(body + length, self._end)
        self._frame = bytearray(length)
        self._filled = behind - body
        self._frame[: self._filled] = memoryview(self._scratch)[body:behind]
        self._start = behind
        if self._start == self._end:
            self._start = self._end = 0

    def hold(self, is_held: bool) -> None:
        """Read nothing, or read again, whatever is admitted."""
        if is_held != self._is_held:
            self._is_held = is_held
            self._read_or_not()
            if is_held:
                self._owner.progressed()
            else:
                self.go_on()

    def _read_or_not(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        paused = self._is_refused or self._is_held
        if paused != self._is_paused:
            self._is_paused = paused
            if paused:
                transport.pause_reading()
            else:
                transport.resume_reading()

    # --- sending

    def write(self, frame: Buffers) -> None:
        """Send a frame. What an ended connection is given is lost."""
        if self._transport is not None and not self._has_ended:
            self._transport.writelines(frame)

    def limit_unsent(self, high_bytes: int) -> None:
        """Set how many bytes may wait for the peer before ``room`` has to be waited for."""
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high_bytes)

    async def room(self) -> None:
        """Wait while the peer is slow; returns at once when the connection has ended."""
        # Those who waited before may have filled it up again.
        while not self._room.is_set():
            await self._room.wait()

    def pause_writing(self) -> None:
        if not self._has_ended:
            self._room.clear()
            self._owner.writable(False)

    def resume_writing(self) -> None:
        if not self._has_ended:
            self._room.set()
            self._owner.writable(True)

    # --- the end

    def close(self) -> None:
        """Take nothing more; what was written is still sent, if the peer takes it soon."""
        self._finish(None)
        transport = self._transport
        if transport is not None and not self._closed.is_set():
            transport.close()
            if self._lingering is None:
                loop = asyncio.get_running_loop()
                self._lingering = loop.call_later(_LINGER_SECONDS, transport.abort)

    def abort(self) -> None:
        """End at once; what was not sent is lost."""
        self._finish(None)
        if self._transport is not None:
            self._transport.abort()

    async def closed(self) -> None:
        """Wait until the socket is closed."""
        if self._transport is not None:
            await self._closed.wait()

    def eof_received(self) -> bool:
        self._finish(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()
        if self._lingering is not None:
            self._lingering.cancel()
        self._finish(exc)

    def _finish(self, error: Exception | None) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._frame = None
            self._scratch = bytearray(_SCRATCH_BYTES)
            self._start = self._end = 0
            self._room.set()
            self._owner.ended(error)
