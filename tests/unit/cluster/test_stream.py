"""Frames are handed over whole and in order, however they arrive, and no memory is taken before it may be."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cluster.messages import MESSAGE_BYTES_MAX
from tidemill.cluster.stream import FrameStream
from tidemill.errors import ProtocolError


class Socket:
    """What a stream is told to do with its socket."""

    def __init__(self) -> None:
        self.is_paused = False
        self.is_closed = False
        self.written: list[bytes] = []

    def pause_reading(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused
        self.is_paused = False

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        self.is_closed = True

    def writelines(self, buffers: Iterable[Any]) -> None:
        self.written += map(bytes, buffers)

    def get_extra_info(self, name: str) -> Any:
        return ("10.0.0.7", 1) if name == "peername" else None


class Owner:
    """Keeps what a stream tells."""

    def __init__(self, *, room_bytes: int = 2**60, max_bytes: int = MESSAGE_BYTES_MAX) -> None:
        self.room_bytes = room_bytes
        self.frames: list[memoryview] = []
        self.ends: list[Exception | None] = []
        self.asked: list[int] = []
        self.stream = FrameStream(self, max_bytes)
        self.socket = Socket()
        self.stream.connection_made(self.socket)  # type: ignore[arg-type]

    def opened(self) -> None:
        pass

    def admits(self, frame_bytes: int) -> bool:
        self.asked.append(frame_bytes)
        if frame_bytes > self.room_bytes:
            return False
        self.room_bytes -= frame_bytes
        return True

    def progressed(self) -> None:
        pass

    def received(self, frame: memoryview) -> None:
        if bytes(frame) == b"bad":
            raise ProtocolError("bad")
        self.frames.append(frame)

    def writable(self, is_writable: bool) -> None:
        pass

    def ended(self, error: Exception | None) -> None:
        self.ends.append(error)

    def feed(self, data: bytes, sizes: Iterable[int] = ()) -> None:
        """As an event loop does."""
        position, turns = 0, iter(sizes)
        while position < len(data):
            buffer = self.stream.get_buffer(-1)
            assert len(buffer) > 0
            count = min(len(buffer), next(turns, 2**20), len(data) - position)
            buffer[:count] = data[position : position + count]
            self.stream.buffer_updated(count)
            position += count


def framed(*bodies: bytes) -> bytes:
    return b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


#: Lengths, not bytes: those would be printed when a test fails.
LENGTHS = st.lists(st.integers(1, 40) | st.integers(60_000, 200_000), max_size=12)


def bodies_of(lengths: list[int]) -> list[bytes]:
    return [bytes([number]) * length for number, length in enumerate(lengths)]


@given(LENGTHS, st.lists(st.integers(1, 100_000), max_size=60))
def test_frames_come_out_as_they_went_in(lengths: list[int], sizes: list[int]) -> None:
    owner, bodies = Owner(), bodies_of(lengths)
    owner.feed(framed(*bodies), sizes)
    assert owner.frames == bodies, "and what was handed over earlier is not overwritten later"
    assert owner.ends == []
    assert not owner.stream.is_inside_frame


def test_one_byte_at_a_time() -> None:
    owner = Owner()
    owner.feed(framed(b"one", b"two", bytes(70_000)), [1] * 71_000)
    assert owner.frames == [b"one", b"two", bytes(70_000)]


@given(LENGTHS, st.lists(st.integers(1, 100_000), max_size=60), st.integers(5_000, 250_000))
def test_reading_stops_until_a_frame_is_admitted(lengths: list[int], sizes: list[int], step: int) -> None:
    owner, bodies = Owner(room_bytes=0), bodies_of(lengths)
    # Some transports go on for a while after they were told to stop; nothing of that is lost.
    owner.feed(framed(*bodies), sizes)
    assert owner.frames == []
    for _ in range(10_000):
        if len(owner.frames) == len(bodies):
            break
        assert owner.socket.is_paused
        assert not owner.stream.is_inside_frame, "its sender is not to blame"
        owner.room_bytes += step
        owner.stream.go_on()
    assert owner.frames == bodies
    assert not owner.socket.is_paused


def test_memory_is_asked_for_before_it_is_taken() -> None:
    owner = Owner(room_bytes=0)
    tracemalloc.start()
    owner.feed(MESSAGE_BYTES_MAX.to_bytes(4, "big") + b"beginning")
    refused = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert owner.asked == [MESSAGE_BYTES_MAX]
    assert owner.socket.is_paused
    assert refused < 1024 * 1024


@pytest.mark.parametrize("length", [-1, 0, MESSAGE_BYTES_MAX + 1, 2**31 - 1])
def test_a_length_that_cannot_be_ends_the_connection_before_memory_is_taken(length: int) -> None:
    owner = Owner()
    tracemalloc.start()
    owner.feed(framed(b"fine") + length.to_bytes(4, "big", signed=True) + b"more")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert owner.frames == [b"fine"]
    assert owner.asked == [4], "not asked for what cannot be"
    assert peak < 1024 * 1024
    (end,) = owner.ends
    assert isinstance(end, ProtocolError)


def test_the_limit_can_be_raised() -> None:
    owner = Owner(max_bytes=10)
    owner.feed(framed(b"x" * 10))
    owner.stream.max_bytes = 20
    owner.feed(framed(b"x" * 20))
    assert len(owner.frames) == 2
    owner.feed(framed(b"x" * 21))
    assert len(owner.ends) == 1


def test_nothing_is_handed_over_after_the_end() -> None:
    owner = Owner()
    owner.feed(framed(b"bad", b"good"))
    assert owner.frames == []
    for _ in range(10):
        owner.feed(framed(b"good") * 10_000)
    owner.stream.connection_lost(None)
    assert owner.frames == []
    assert len(owner.ends) == 1
    assert len(owner.stream.get_buffer(-1)) <= 64 * 1024, "and nothing of it is kept"


def test_a_stream_that_is_held_reads_nothing_and_loses_nothing() -> None:
    owner = Owner()
    owner.stream.hold(True)
    assert owner.socket.is_paused
    owner.feed(framed(b"one", b"two"))
    assert owner.frames == []
    owner.stream.hold(False)
    assert owner.frames == [b"one", b"two"]
    assert not owner.socket.is_paused


async def test_those_who_wait_for_a_slow_peer_go_on_when_the_connection_ends() -> None:
    owner = Owner()
    await owner.stream.room()
    owner.stream.pause_writing()
    waiting = asyncio.create_task(owner.stream.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    owner.stream.connection_lost(ConnectionResetError())
    await waiting
    owner.stream.pause_writing()
    await owner.stream.room()
    owner.stream.write([b"lost"])
    assert owner.socket.written == []


async def test_those_who_wait_go_on_one_by_one() -> None:
    owner = Owner()
    owner.stream.pause_writing()
    wrote: list[int] = []

    async def write(number: int) -> None:
        await owner.stream.room()
        wrote.append(number)
        owner.stream.pause_writing()

    tasks = [asyncio.create_task(write(number)) for number in range(3)]
    for number in range(3):
        await asyncio.sleep(0)
        owner.stream.resume_writing()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(wrote) == number + 1
    await asyncio.gather(*tasks)
