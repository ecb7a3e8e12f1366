"""A client's connection: frames in, answers out, in the order of the requests.

Rules:

- Bytes are read straight into the frame they belong to. A frame's memory is taken from the node's budget
  before it is allocated, and grows with what arrives: a length that is only claimed costs next to nothing.
- A connection is read ahead of its answers up to a number of requests, and up to a number of bytes. Requests
  are started for a few milliseconds at a time: one packet can hold thousands of small ones.
- Requests of some APIs (``api_table``: Produce and Fetch) may overlap with each other; any other starts when
  everything before it is answered, and holds up everything behind it. Answers leave in the order of the
  requests.
- A frame must be complete within a deadline, the first one within its own; a silent connection is closed
  after the idle timeout, and a client that does not read its answers is not read from. While others wait for
  memory, a client that sends or takes too little is closed earlier (``budget.py``).
- Bytes that are not the protocol close the connection, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Set
from itertools import count
from mmap import mmap
from time import perf_counter
from typing import Any, Protocol, cast

from tidemill.config.settings import Settings
from tidemill.coordination.fair_shares import share_address
from tidemill.coordination.turns import SLICE_SECONDS
from tidemill.errors import ProtocolError
from tidemill.log.pace import Pace
from tidemill.server.connections.budget import Account, ByteBudget, Stall
from tidemill.server.connections.frame_buffers import FrameBuffers
from tidemill.server.requests.authorization import ANONYMOUS
from tidemill.server.requests.call import Call, ReplyBuffers
from tidemill.server.watchdog import begin_turn
from tidemill.wire.apis import PRODUCE, is_served
from tidemill.wire.frames import FRAME_LENGTH_BYTES, frame_length
from tidemill.wire.requests import (
    QUICK_REQUEST_ELEMENTS,
    RequestHeader,
    TooManyElements,
    decode_large_request,
    decode_request,
    parse_header,
)

__all__ = ("Connection", "Dispatcher")

#: API key, version and correlation id.
_FRAME_BYTES_MIN = 8
#: A frame's first memory, if little of it has arrived, it is not small, and none as large came before it.
_FIRST_BYTES = 16 * 1024
#: Requests and answers of one connection in memory, above which no other request is read or started.
_AHEAD_BYTES = 16 * 1024 * 1024
#: The largest frame of any request but Produce: what is in it is copied and looked at by the event loop.
_OTHER_FRAME_BYTES = 16 * 1024 * 1024
_API_KEY_BYTES = 2
#: The most that is read at once of a frame that just begins, while others wait for memory.
_CONTENDED_READ_BYTES = 16 * 1024
#: Numbers of connections; each is used once in the life of a process.
_IDS = count(1)


class Dispatcher(Protocol):
    """Takes the requests of connections, and hears of connections that come and go."""

    @property
    def overlapping(self) -> Set[int]:
        """Keys of the APIs whose requests may run beside each other, of those that are loaded."""
        ...

    def is_loaded(self, api_key: int, /) -> bool:
        """Whether requests of this API can be decoded and dispatched without loading anything large first."""
        ...

    def load(self, api_key: int, /) -> None:
        """Load what requests of this API need. Called in a thread."""
        ...

    def dispatch(self, call: Call) -> None:
        """Start working on a request. Raises ``ProtocolError`` if the connection must be closed."""
        ...

    def answered(
        self, api_key: int, seconds: float, waited_seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Count an answer that was handed to the transport, ``seconds`` after its request was complete."""
        ...

    def opened(self, connection: Connection) -> bool:
        """Note a new connection; False if there are too many."""
        ...

    def closed(self, connection: Connection) -> None:
        """Note that a connection is closed, also one that was refused."""
        ...

    def closing(self, connection: Connection, why: str) -> None:
        """Note that the node closes a connection because of what its client did."""
        ...


class _Slot:
    """A request that has started, in the order in which answers are sent."""

    __slots__ = ("answer_bytes", "barrier", "buffers", "call", "complete_at", "frame_bytes", "in_thread")

    def __init__(self, frame_bytes: int, barrier: bool, complete_at: float) -> None:
        self.frame_bytes = frame_bytes
        self.barrier = barrier
        self.answer_bytes = 0
        #: When the request's last byte had arrived, by the loop's clock.
        self.complete_at = complete_at
        self.buffers: ReplyBuffers | None = None
        self.call: Call | None = None
        #: Whether the request is being decoded in a thread.
        self.in_thread = False

    @property
    def keeps_frame(self) -> bool:
        """Whether the frame's memory is in use, also if the client is gone."""
        return self.in_thread or (self.buffers is None and self.call is not None and self.call.keeps_frame)

    def hurry(self) -> None:
        if self.buffers is None and self.call is not None:
            self.call.hurry()


class Connection(asyncio.BufferedProtocol):
    """The connection of one client."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        dispatcher: Dispatcher,
        budget: ByteBudget,
        limits: Settings,
        buffers: FrameBuffers,
    ) -> None:
        self._id = next(_IDS)
        self._loop = loop
        self._dispatcher = dispatcher
        self._overlapping = dispatcher.overlapping
        self._budget = budget
        self._account: Account
        self._limits = limits
        self._buffers = buffers
        self._transport: asyncio.Transport | None = None
        self._prefix = b""
        #: Frames that arrived together with too many others; nothing is read until they are queued.
        self._unparsed = memoryview(b"")
        self._frame: bytearray | mmap | None = None
        self._frame_view: memoryview | None = None
        self._frame_length = 0
        self._filled = 0
        self._trusted_bytes = 0
        #: Requests that have not started, with the time at which each was complete.
        self._queue: deque[tuple[RequestHeader, bytes | memoryview, float]] = deque()
        self._queued_bytes = 0
        self._slots: deque[_Slot] = deque()
        self._running_barrier = False
        self._unsent = 0
        self._writable = True
        #: Whether requests are being started, or will be in the next turn of the loop.
        self._going_on = False
        self._closing_after_replies = False
        self._was_answered = False
        self._had_request = False
        self._deadline: asyncio.TimerHandle | None = None
        self._deadline_kind = ""
        self._last_active = 0.0
        self.host = ""
        #: Who the client is; there is no authentication yet.
        self.principal = ANONYMOUS
        self.client_id = ""

    @property
    def id(self) -> int:
        """The number of the connection; each is used once in the life of a process."""
        return self._id

    # --- transport events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do everything that asyncio's do, without being a subclass.
        self._transport = transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.host = peer[0] if isinstance(peer, tuple) and peer else ""
        self._account = self._budget.open(share_address(self.host), self)
        if not self._dispatcher.opened(self):
            transport.abort()
            return
        # The loop then tells exactly when everything is sent, which is when the bytes can be given back.
        transport.set_write_buffer_limits(high=0, low=0)
        self._set_deadline(self._limits.handshake_deadline_ms, "no request")

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        self._set_deadline(None)
        self._account.close(sum(slot.frame_bytes for slot in self._slots if slot.keeps_frame))
        self._queued_bytes = self._unsent = 0
        self._unparsed = memoryview(b"")
        unanswered = list(self._slots)
        self._slots.clear()
        self._queue.clear()
        self._frame = self._frame_view = None
        for slot in unanswered:
            slot.hurry()
        self._dispatcher.closed(self)

    def pause_writing(self) -> None:
        self._writable = False
        self._update_reading()

    def resume_writing(self) -> None:
        self._writable = True
        unsent, self._unsent = self._unsent, 0
        self._account.give_back(unsent)
        self._go_on()

    def close(self) -> None:
        """Close at once, without sending what is still to be sent."""
        if self._transport is not None:
            self._transport.abort()

    def close_when_answered(self) -> None:
        """Take no more requests; close when those that run are answered."""
        self._closing_after_replies = True
        self._update_reading()
        for slot in list(self._slots):
            slot.hurry()
        if self._transport is not None and not self._slots:
            self._transport.close()

    # --- memory

    def unwritten_bytes(self) -> int:
        """Bytes of answers that the client has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def give_way(self, why: Stall) -> None:
        """Give memory back: answer waiting requests early, or close the connection if its client stalls."""
        if why is Stall.REQUESTS:
            for slot in list(self._slots):
                slot.hurry()
        else:
            self._close_because(why.value)

    # --- bytes in

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._frame_view is not None:
            return self._frame_view[self._filled :]
        scratch = self._buffers.scratch
        return scratch[:_CONTENDED_READ_BYTES] if self._budget.waiting else scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._account.moved_bytes += nbytes
        try:
            if self._frame_view is not None:
                self._filled += nbytes
                if self._filled == self._frame_length:
                    self._frame_complete()
                elif self._filled == len(self._frame_view):
                    self._grow_frame()
            else:
                self._take_scratch(nbytes)
        except ProtocolError as error:
            self._refuse(error)
            return
        self._go_on()

    def _refuse(self, error: ProtocolError) -> None:
        self._close_because(str(error))

    def _close_because(self, why: str) -> None:
        self._dispatcher.closing(self, why)
        self.close()

    def _take_scratch(self, nbytes: int) -> None:
        data: memoryview = self._buffers.scratch[:nbytes]
        if self._prefix:
            data = memoryview(self._prefix + bytes(data))
            self._prefix = b""
        self._parse(data)
        if self._unparsed:
            # Copied, because the scratch buffer is reused.
            self._unparsed = memoryview(bytes(self._unparsed))
            self._account.take(len(self._unparsed))

    def _parse_on(self) -> None:
        """Go on with bytes that arrived when too many requests were queued."""
        data = self._unparsed
        self._parse(data)
        self._account.give_back(len(data) - len(self._unparsed))

    def _parse(self, data: memoryview) -> None:
        """Queue the frames in ``data``; those that are too many for the queue are left in ``_unparsed``."""
        self._unparsed = memoryview(b"")
        position = 0
        while len(data) - position >= FRAME_LENGTH_BYTES:
            length = frame_length(data, position, self._frame_bytes_max(), _FRAME_BYTES_MIN)
            start = position + FRAME_LENGTH_BYTES
            if len(data) - start < length:
                self._begin_frame(length, data[start:])
                return
            if self._is_far_ahead():
                self._unparsed = data[position:]
                return
            self._account.take(length)
            self._enqueue(bytes(data[start : start + length]))
            position = start + length
        self._prefix = bytes(data[position:])
        self._set_deadline_for_input()
        if not self._account.may_read_on():
            # These frames have arrived already; no more are read until the budget has memory.
            self._account.wait(0, self._update_reading)

    def _frame_bytes_max(self) -> int:
        limits = self._limits
        return limits.max_frame_bytes if self._was_answered else limits.max_first_frame_bytes

    def _check_api(self, start: memoryview | bytearray | mmap) -> None:
        """Refuse a large frame that is not of Produce, as soon as that is known and before more is read."""
        length = self._frame_length
        if length > _OTHER_FRAME_BYTES and len(start) >= _API_KEY_BYTES:
            api_key = int.from_bytes(start[:_API_KEY_BYTES], "big", signed=True)
            if api_key != PRODUCE:
                raise ProtocolError(
                    f"a request of {length} bytes to API {api_key}; all but Produce may have "
                    f"{_OTHER_FRAME_BYTES}"
                )

    def _begin_frame(self, length: int, start: memoryview) -> None:
        self._frame_length = length
        self._check_api(start)
        self._filled = arrived = len(start)
        whole = self._account.begin_frame(length)
        size = length if whole else min(length, max(_FIRST_BYTES, 2 * arrived, self._trusted_bytes))
        is_reserved = self._account.reserve(size)
        if is_reserved:
            self._frame = self._buffers.take_growing(size, length)
            self._frame[:arrived] = start
            self._frame_view = memoryview(self._frame)[:size]
        else:
            # What has arrived is taken in any case; for the rest it waits.
            self._account.reserve_arrived(arrived)
            self._frame = bytearray(start)
            self._frame_view = memoryview(self._frame)
        self._set_deadline_for_input()
        if not is_reserved:
            self._account.wait(size - arrived, lambda: self._frame_has_memory(size))

    def _grow_frame(self) -> None:
        """Double the memory of the frame that is being read, or wait until the budget allows it."""
        if self._frame is not None:
            self._check_api(self._frame)
        size = min(self._frame_length, 2 * self._filled)
        if self._account.reserve(size - self._filled):
            self._frame_has_memory(size)
        else:
            self._account.wait(size - self._filled, lambda: self._frame_has_memory(size))

    def _frame_has_memory(self, size: int) -> None:
        """Go on reading: ``size`` bytes of the frame are taken from the budget."""
        frame = self._frame
        assert frame is not None
        if len(frame) < size:
            # The loop still holds the old buffer, so it cannot be resized in place. A large frame comes here
            # once: then there is address space for all of it.
            full, frame = frame, self._buffers.take_growing(size, self._frame_length)
            frame[: self._filled] = memoryview(full)[: self._filled]
            self._frame = frame
            self._buffers.give_back(full)
        self._frame_view = memoryview(frame)[:size]
        self._update_reading()

    def _frame_complete(self) -> None:
        view = self._frame_view
        assert view is not None
        self._frame = self._frame_view = None
        # The next one is likely to be as large: growing it in steps would cost more than reading it.
        self._trusted_bytes = min(self._frame_length, self._buffers.size_bytes)
        self._account.frame_complete()
        self._enqueue(view.toreadonly())
        self._set_deadline_for_input()

    # --- flow control

    def _update_reading(self) -> None:
        if self._transport is None:
            return
        stop = (
            self._account.is_waiting
            or len(self._unparsed) > 0
            or self._closing_after_replies
            or not self._writable
            or (self._frame is None and self._is_far_ahead())
        )
        if stop and self._transport.is_reading():
            self._transport.pause_reading()
            self._set_deadline_for_input()
        elif not stop and not self._transport.is_reading():
            self._transport.resume_reading()
            self._set_deadline_for_input()

    def _is_far_ahead(self) -> bool:
        """Whether its answers have to go out before another request is read."""
        requests = len(self._queue) + len(self._slots)
        return (
            requests >= self._limits.max_in_flight_requests_per_connection
            or self._account.held_bytes >= _AHEAD_BYTES
        )

    def _set_deadline_for_input(self) -> None:
        if not self._had_request:
            # Until there is a whole request, the deadline of the first one runs on.
            return
        # A frame that is not read cannot be late: its time starts again when reading does.
        begun = self._frame is not None or self._prefix
        if begun and self._transport is not None and self._transport.is_reading():
            if self._deadline_kind != "frame":
                self._set_deadline(self._limits.frame_deadline_ms, "frame")
        else:
            self._set_deadline(self._limits.idle_timeout_ms, "idle")

    def _set_deadline(self, delay_ms: int | None, kind: str = "") -> None:
        if delay_ms is not None and kind == "idle" and self._deadline_kind == "idle":
            # Rearming a timer for every request is dear; note the time and look again when it fires.
            self._last_active = self._loop.time()
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._deadline_kind = kind
        self._last_active = self._loop.time()
        if delay_ms is not None:
            self._deadline = self._loop.call_later(delay_ms / 1000, self._deadline_passed)

    def _deadline_passed(self) -> None:
        self._deadline = None
        if self._deadline_kind == "idle":
            idle_seconds = self._loop.time() - self._last_active
            left = self._limits.idle_timeout_ms / 1000 - idle_seconds
            if self._slots or left > 0:
                self._deadline = self._loop.call_later(max(left, 1.0), self._deadline_passed)
                return
        self._close_because(f"{self._deadline_kind} timeout")

    # --- requests

    def _enqueue(self, frame: bytes | memoryview) -> None:
        """Queue a frame, whose bytes are taken from the budget already."""
        self._queued_bytes += len(frame)
        header = parse_header(frame)
        self._had_request = True
        self._queue.append((header, frame, self._loop.time()))
        if self._deadline_kind != "idle":
            # The deadline was this frame's; the next one gets its own.
            self._set_deadline(self._limits.idle_timeout_ms, "idle")

    def _go_on(self) -> None:
        """Start the requests that may start now, and read on if limits allow it."""
        if self._going_on:
            self._update_reading()
        else:
            self._going_on = True
            self._go_on_for_a_while()

    def _go_on_for_a_while(self) -> None:
        until = perf_counter() + SLICE_SECONDS
        try:
            while self._start_next() or self._parse_next():
                if perf_counter() >= until and (self._queue or self._unparsed):
                    # Others have their turn.
                    self._loop.call_soon(self._go_on_for_a_while)
                    self._update_reading()
                    return
        except ProtocolError as error:
            self._refuse(error)
        self._going_on = False
        self._update_reading()

    def _start_next(self) -> bool:
        """Start the next request; False if there is none, or if it has to wait."""
        if not self._queue or not self._may_start():
            return False
        header, frame, complete_at = self._queue[0]
        barrier = header.api_key not in self._overlapping
        if self._running_barrier or (barrier and self._slots):
            return False
        self._queue.popleft()
        self._start(header, frame, barrier, complete_at)
        return True

    def _parse_next(self) -> bool:
        """Queue more of what has arrived; False if nothing is left, or if it has to wait."""
        if not self._unparsed or self._is_far_ahead():
            return False
        self._parse_on()
        return True

    def _may_start(self) -> bool:
        if self._transport is None or not self._writable or self._closing_after_replies:
            return False
        # Answers that wait behind a slow one take memory as those that the client does not read.
        return not self._slots or self._account.held_bytes - self._queued_bytes < _AHEAD_BYTES

    def _start(
        self, header: RequestHeader, frame: bytes | memoryview, barrier: bool, complete_at: float
    ) -> None:
        slot = _Slot(len(frame), barrier, complete_at)
        call = Call(
            header,
            None,
            self.host,
            lambda buffers: self._answered(slot, buffers),
            lambda: self._aborted(slot),
            self._id,
            self.principal,
        )
        try:
            served = is_served(header.api_key, header.api_version)
            is_slow = served and not self._dispatcher.is_loaded(header.api_key)
            if served and not is_slow:
                call.request = decode_request(header, frame, QUICK_REQUEST_ELEMENTS)
        except TooManyElements:
            is_slow = True
        if is_slow:
            # What it needs is loaded, and it is decoded, in a thread; later requests wait for that.
            slot.barrier = True
        slot.call = call
        self._queued_bytes -= len(frame)
        self._slots.append(slot)
        self._running_barrier = slot.barrier
        self.client_id = header.client_id or self.client_id
        if is_slow:
            slot.in_thread = True
            decoding = self._loop.run_in_executor(None, self._load_and_decode, header, frame)
            decoding.add_done_callback(lambda done: self._decoded(slot, call, frame, done))
        else:
            self._dispatch(call, frame)

    def _load_and_decode(self, header: RequestHeader, frame: bytes | memoryview) -> Any:
        """The decoded body of a request that the event loop must not decode; runs in a thread."""
        self._dispatcher.load(header.api_key)
        return decode_large_request(header, frame, Pace().breathe)

    def _decoded(self, slot: _Slot, call: Call, frame: bytes | memoryview, done: asyncio.Future[Any]) -> None:
        """Dispatch a request that was decoded in a thread."""
        slot.in_thread = False
        if self._transport is None:
            slot.call = None
            self._account.give_back(slot.frame_bytes)
            return
        if done.cancelled():
            return
        error = done.exception()
        if isinstance(error, ProtocolError):
            self._refuse(error)
        elif error is not None:
            # A bug, or code that cannot be loaded: the client must not wait for ever.
            self._aborted(slot)
            raise error
        else:
            call.request = done.result()
            call.turn = begin_turn()
            self._dispatch(call, frame)

    def _dispatch(self, call: Call, frame: bytes | memoryview) -> None:
        self._dispatcher.dispatch(call)
        # Records are in the log now, unless a gate holds them, and everything else was copied when decoded.
        if not call.keeps_frame and isinstance(frame, memoryview) and isinstance(frame.obj, bytearray):
            self._buffers.give_back(frame.obj)

    def _aborted(self, slot: _Slot) -> None:
        """Close the connection, because a request will have no answer."""
        self._over(slot, ())
        # The call knows its slot: its frame must not wait for the garbage collector.
        slot.call = None
        self.close()

    def _over(self, slot: _Slot, buffers: ReplyBuffers) -> None:
        """Note that a request is done; if its client is gone, its memory is given back now."""
        kept = slot.keeps_frame
        slot.buffers = buffers
        if self._transport is None:
            # The call knows its slot: without this its frame would wait for the garbage collector.
            slot.call = None
            if kept:
                self._account.give_back(slot.frame_bytes)

    def _answered(self, slot: _Slot, buffers: ReplyBuffers) -> None:
        self._over(slot, buffers)
        if self._transport is None:
            return
        slot.answer_bytes = sum(map(len, buffers))
        self._account.take(slot.answer_bytes)
        if slot.barrier:
            self._running_barrier = False
        if slot is self._slots[0]:
            self._send_ready()
            self._go_on()

    def _send_ready(self) -> None:
        """Send the answers at the head of the queue that are ready."""
        self._was_answered = True
        out: list[bytes | bytearray | memoryview] = []
        freed = 0
        now = self._loop.time()
        while self._slots and self._slots[0].buffers is not None:
            slot = self._slots.popleft()
            freed += slot.frame_bytes
            self._unsent += slot.answer_bytes
            self._account.moved_bytes += slot.answer_bytes
            out += slot.buffers or ()
            self._note_answered(slot, now)
        transport = self._transport
        assert transport is not None
        if out:
            transport.writelines(out)
            if transport.get_write_buffer_size() == 0:
                freed += self._unsent
                self._unsent = 0
        self._set_deadline_for_input()
        self._account.give_back(freed)
        if self._closing_after_replies and not self._slots:
            transport.close()

    def _note_answered(self, slot: _Slot, now: float) -> None:
        # The call knows its slot: its frame must not wait for the garbage collector.
        call, slot.call = slot.call, None
        if call is not None:
            self._dispatcher.answered(
                call.header.api_key,
                now - slot.complete_at,
                call.waited_seconds,
                slot.frame_bytes + FRAME_LENGTH_BYTES,
                slot.answer_bytes,
            )
