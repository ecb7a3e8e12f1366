"""A connection without a socket and without a clock: bytes and time move when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tidemill.config.settings import Settings
from tidemill.server.connections.budget import Account, BudgetLimits, ByteBudget, Stall
from tidemill.server.connections.connection import Connection
from tidemill.server.connections.frame_buffers import FrameBuffers
from tidemill.server.requests.call import Call
from tidemill.server.traffic import Traffic

__all__ = ("FakeDispatcher", "FakeLoop", "FakeTransport", "Peer", "filled", "make_budget")


def make_budget(total_bytes: int, frame_bytes: int, **limits: Any) -> ByteBudget:
    """A budget of ``total_bytes`` for frames of at most ``frame_bytes``."""
    return ByteBudget(BudgetLimits(total_bytes, frame_bytes, **limits))


class _Nobody:
    """Owns an account that a test uses as it likes."""

    def unwritten_bytes(self) -> int:
        return 0

    def give_way(self, why: Stall) -> None:
        pass


def filled(budget: ByteBudget, count: int, address: str = "10.9.9.9") -> Account:
    """An account of somebody else, who has taken ``count`` bytes."""
    account = budget.open(address, _Nobody())
    account.take(count)
    return account


@dataclass
class _Timer:
    due_seconds: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """What a connection asks of an event loop."""

    def __init__(self) -> None:
        self._now = 1_000.0
        #: With a list, what is to be done in the next turn waits in it; else it is done at once.
        self.next_turn: list[Callable[[], None]] | None = None
        self._timers: list[_Timer] = []
        #: Work for threads, which is done when the test says so.
        self._blocking: list[tuple[Future[Any], Callable[[], Any]]] = []

    def run_in_executor(self, executor: None, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        self._blocking.append((done, partial(work, *arguments)))
        return done

    def run_threads(self) -> None:
        """Do all work for threads that there is."""
        waiting, self._blocking = self._blocking, []
        for done, work in waiting:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

    def time(self) -> float:
        return self._now

    def call_later(self, delay_seconds: float, callback: Callable[[], None]) -> _Timer:
        timer = _Timer(self._now + delay_seconds, callback)
        self._timers.append(timer)
        return timer

    def call_soon(self, callback: Callable[[], None]) -> None:
        if self.next_turn is None:
            callback()
        else:
            self.next_turn.append(callback)

    @property
    def armed(self) -> int:
        return sum(not timer.cancelled for timer in self._timers)

    def advance(self, seconds: float) -> None:
        """Let time pass, and everything happen that is due in it, in its order."""
        end = self._now + seconds
        while True:
            due = [timer for timer in self._timers if not timer.cancelled and timer.due_seconds <= end]
            if not due:
                break
            timer = min(due, key=lambda timer: timer.due_seconds)
            self._timers.remove(timer)
            self._now = timer.due_seconds
            timer.callback()
        self._now = end


class FakeDispatcher:
    """Keeps the calls, to be answered by the test; ``on_call`` sees each as it starts."""

    #: Produce and Fetch.
    overlapping = frozenset({0, 1})

    def __init__(self, on_call: Callable[[Call], None] | None = None) -> None:
        self.calls: list[Call] = []
        self.closed_connections: list[Connection] = []
        self.closing_reasons: list[str] = []
        self.traffic = Traffic()
        self.answered = self.traffic.answered
        self.lets_in = True
        self._on_call = on_call

        #: Keys of the APIs whose code is to be loaded first, and those that were.
        self.unloaded: set[int] = set()
        self.loaded: list[int] = []

    def is_loaded(self, api_key: int) -> bool:
        return api_key not in self.unloaded

    def load(self, api_key: int) -> None:
        self.unloaded.discard(api_key)
        self.loaded.append(api_key)

    def dispatch(self, call: Call) -> None:
        self.calls.append(call)
        if self._on_call is not None:
            self._on_call(call)

    def opened(self, connection: Connection) -> bool:
        return self.lets_in

    def closed(self, connection: Connection) -> None:
        self.closed_connections.append(connection)

    def closing(self, connection: Connection, why: str) -> None:
        self.closing_reasons.append(why)

    @property
    def started(self) -> list[int]:
        """Correlation ids in the order in which the requests started."""
        return [call.header.correlation_id for call in self.calls]

    def answer(self, correlation_id: int, size_bytes: int = 8) -> None:
        """Answer a request with a frame of zeros behind its correlation id."""
        (call,) = [call for call in self.calls if call.header.correlation_id == correlation_id]
        call.reply_buffers(
            [size_bytes.to_bytes(4, "big"), correlation_id.to_bytes(4, "big"), bytes(size_bytes - 4)]
        )


@dataclass
class FakeTransport:
    """Keeps to the rules of a real one with write limits of 0: not all sent means that writing is paused."""

    connection: Any = None
    reading: bool = True
    closing: bool = False
    aborted: bool = False
    takes_writes: bool = True
    host: str = "10.0.0.1"
    arrived: bytearray = field(default_factory=bytearray)
    sent: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)

    def get_extra_info(self, name: str) -> Any:
        return (self.host, 4711)

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        assert (high, low) == (0, 0)

    def get_write_buffer_size(self) -> int:
        return len(self.unsent)

    def writelines(self, buffers: list[bytes]) -> None:
        data = b"".join(buffers)
        if self.takes_writes:
            self.sent += data
            return
        was_empty = not self.unsent
        self.unsent += data
        if was_empty:
            self.connection.pause_writing()

    def is_reading(self) -> bool:
        return self.reading and not self.closing

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading or self.closing
        self.reading = True

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True


class Peer:
    """A client's end of a connection."""

    def __init__(
        self,
        dispatcher: FakeDispatcher | None = None,
        *,
        loop: FakeLoop | None = None,
        budget: ByteBudget | None = None,
        buffers: FrameBuffers | None = None,
        host: str = "10.0.0.1",
        **limits: Any,
    ) -> None:
        self.dispatcher = dispatcher or FakeDispatcher()
        self.loop = loop or FakeLoop()
        self.limits = Settings(**limits)
        self.budget = budget or make_budget(self.limits.max_inflight_bytes, self.limits.max_frame_bytes)
        self.transport = FakeTransport(host=host)
        self.connection = Connection(
            self.loop,  # type: ignore[arg-type]
            self.dispatcher,
            self.budget,
            self.limits,
            buffers or FrameBuffers(),
        )
        self.transport.connection = self.connection
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self.is_lost = False

    def send(self, data: bytes, chunk_bytes: int = 2**30) -> None:
        """Send bytes; the node reads as many of them as it wants to, at most ``chunk_bytes`` at a time."""
        self.transport.arrived += data
        self.deliver(chunk_bytes)

    def deliver(self, chunk_bytes: int = 2**30) -> None:
        """Let the node read what it left before."""
        transport = self.transport
        while transport.arrived and transport.is_reading():
            buffer = self.connection.get_buffer(-1)
            assert len(buffer), "a loop that reads needs room"
            count = min(len(buffer), len(transport.arrived), chunk_bytes)
            buffer[:count] = transport.arrived[:count]
            del transport.arrived[:count]
            self.connection.buffer_updated(count)
        if transport.aborted:
            self.lose()

    def take_answers(self) -> None:
        """Read everything that the node could not send before."""
        transport = self.transport
        transport.takes_writes = True
        if transport.unsent:
            transport.sent += transport.unsent
            transport.unsent.clear()
            self.connection.resume_writing()

    @property
    def answered(self) -> list[int]:
        """Correlation ids of the answers that arrived."""
        found, data = [], bytes(self.transport.sent)
        while data:
            size = int.from_bytes(data[:4], "big")
            found.append(int.from_bytes(data[4:8], "big"))
            data = data[4 + size :]
        return found

    def lose(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            self.connection.connection_lost(None)
