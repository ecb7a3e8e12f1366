"""The length in front of a frame is believed within its limits only."""

from __future__ import annotations

import pytest

from tidemill.errors import ProtocolError
from tidemill.wire.frames import MAX_FRAME_BYTES, frame_length


@pytest.mark.parametrize("length", [-1, -(2**31), MAX_FRAME_BYTES + 1, 2**31 - 1])
def test_a_length_beyond_the_limit_is_refused_before_its_bytes_arrive(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"a frame of {length} bytes"):
        frame_length(length.to_bytes(4, "big", signed=True), 0, MAX_FRAME_BYTES)


def test_the_limit_itself_is_accepted() -> None:
    assert frame_length(b"\0\0\0\x10", 0, 16) == 16
    with pytest.raises(ProtocolError, match="0 to 15 are allowed"):
        frame_length(b"\0\0\0\x10", 0, 15)


def test_a_length_below_the_least_is_refused() -> None:
    assert frame_length(b"\0\0\0\x08", 0, 16, 8) == 8
    with pytest.raises(ProtocolError, match="a frame of 7 bytes; 8 to 16 are allowed"):
        frame_length(b"\0\0\0\x07", 0, 16, 8)


def test_a_web_server_is_recognised() -> None:
    with pytest.raises(ProtocolError, match="it speaks HTTP"):
        frame_length(b"HTTP/1.1", 0, MAX_FRAME_BYTES)
