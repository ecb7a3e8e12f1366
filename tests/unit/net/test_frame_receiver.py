"""Frames are given on whole and in order, however the bytes arrive."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import ProtocolError
from tidemill.net.frame_receiver import FrameReceiver
from tidemill.wire.frames import MAX_FRAME_BYTES


class Received:
    """Feeds a receiver as an event loop does, and keeps what it gives on."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.ends: list[Exception | None] = []
        self.receiver = FrameReceiver(lambda frame: self.frames.append(bytes(frame)), self.ends.append)

    def feed(self, data: bytes, sizes: Iterable[int]) -> None:
        position, turns = 0, iter(sizes)
        while position < len(data):
            buffer = self.receiver.get_buffer(-1)
            assert len(buffer) > 0
            count = min(len(buffer), next(turns, 2**20), len(data) - position)
            buffer[:count] = data[position : position + count]
            self.receiver.buffer_updated(count)
            position += count


def framed(bodies: Iterable[bytes]) -> bytes:
    return b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


@given(
    st.lists(
        st.binary(max_size=40) | st.integers(60_000, 200_000).map(lambda size: b"x" * size), max_size=12
    ),
    st.lists(st.integers(1, 100_000), max_size=60),
)
def test_frames_come_out_as_they_went_in(bodies: list[bytes], sizes: list[int]) -> None:
    received = Received()
    received.feed(framed(bodies), sizes)
    assert received.frames == bodies
    assert received.ends == []


def test_a_large_frame_does_not_keep_its_memory() -> None:
    received = Received()
    large = bytes(9 * 1024 * 1024)
    received.feed(framed([large, b"small"]), [])
    assert received.frames == [large, b"small"]
    assert len(received.receiver.get_buffer(-1)) < 1024 * 1024


@pytest.mark.parametrize("length", [-1, MAX_FRAME_BYTES + 1])
def test_a_length_that_cannot_be_ends_the_connection(length: int) -> None:
    received = Received()
    received.feed(framed([b"fine"]) + length.to_bytes(4, "big", signed=True) + b"more", [])
    assert received.frames == [b"fine"]
    (end,) = received.ends
    assert isinstance(end, ProtocolError)


def test_the_end_is_told_once() -> None:
    received = Received()
    assert not received.receiver.eof_received()
    received.receiver.connection_lost(OSError("late"))
    assert received.ends == [None]


async def test_writing_waits_while_the_peer_is_slow() -> None:
    receiver = Received().receiver
    await receiver.drain()
    receiver.pause_writing()
    receiver.resume_writing()
    await receiver.drain()
    receiver.pause_writing()
    receiver.connection_lost(None)
    await receiver.drain()
    await receiver.closed()
