from __future__ import annotations

import pytest

from tidemill.server.frame_buffers import FrameBuffers


def test_a_large_frames_buffer_is_used_again() -> None:
    buffers = FrameBuffers(size_bytes=800, keep=2, scratch_bytes=10)
    first = buffers.take(500)
    assert len(first) == 800
    assert buffers.take(500) is not first
    buffers.give_back(first)
    assert buffers.take(100) is first, "what is there already costs nothing more"


def test_the_memory_of_a_large_frame_has_its_exact_size() -> None:
    assert len(FrameBuffers(size_bytes=800, scratch_bytes=10).take(10_000)) == 10_000


def test_a_small_frame_gets_memory_of_its_own_size() -> None:
    buffers = FrameBuffers(size_bytes=800, keep=2, scratch_bytes=10)
    small = buffers.take(99)
    assert len(small) == 99
    buffers.give_back(small)
    assert len(buffers.take(300)) == 300, "half of a frame buffer would be too much for it"
    assert len(buffers.take(400)) == 800


def test_only_a_few_buffers_are_kept() -> None:
    buffers = FrameBuffers(size_bytes=800, keep=1, scratch_bytes=10)
    one, two = buffers.take(800), buffers.take(800)
    buffers.give_back(one)
    buffers.give_back(two)
    assert buffers.take(800) is one
    assert buffers.take(800) is not two


def test_what_was_read_into_the_scratch_buffer_must_fit_into_a_frame_buffer() -> None:
    with pytest.raises(AssertionError, match="scratch"):
        FrameBuffers(size_bytes=100, scratch_bytes=101)
