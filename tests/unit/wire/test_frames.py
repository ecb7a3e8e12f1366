"""Cutting a buffer into frames."""

from __future__ import annotations

import pytest

from tidemill.errors import ProtocolError
from tidemill.wire.frames import MAX_FRAME_BYTES, frame_length, split_frames


def test_whole_frames_are_taken_and_the_rest_stays() -> None:
    stream = b"\0\0\0\3abc" + b"\0\0\0\0" + b"\0\0\0\2de"
    received, frames = bytearray(), []
    for position in range(len(stream)):
        received += stream[position : position + 1]
        frames += split_frames(received)
    assert frames == [b"abc", b"", b"de"]
    assert received == b""
    received = bytearray(stream[:-1])
    assert split_frames(received) == [b"abc", b""]
    assert received == b"\0\0\0\2d"


@pytest.mark.parametrize("length", [-1, -(2**31), MAX_FRAME_BYTES + 1, 2**31 - 1])
def test_a_length_beyond_the_limit_is_refused_before_its_bytes_arrive(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"a frame of {length} bytes"):
        split_frames(bytearray(length.to_bytes(4, "big", signed=True)))


def test_the_limit_itself_is_accepted() -> None:
    assert frame_length(b"\0\0\0\x10", 0, 16) == 16
    with pytest.raises(ProtocolError, match="at most 15 are accepted"):
        frame_length(b"\0\0\0\x10", 0, 15)
