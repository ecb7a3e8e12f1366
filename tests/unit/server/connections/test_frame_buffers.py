from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tidemill.server.connections import frame_buffers
from tidemill.server.connections.frame_buffers import FrameBuffers


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


def test_a_frame_that_grows_large_has_place_for_all_of_it_and_takes_memory_as_it_arrives() -> None:
    buffers = FrameBuffers()
    length = 512 * 1024 * 1024
    before = resident_bytes()
    frame = buffers.take_growing(2 * buffers.size_bytes, length)
    assert len(frame) == length, "it is never copied to grow"
    frame[: 3 * 1024 * 1024] = b"x" * (3 * 1024 * 1024)
    assert resident_bytes() - before < length // 8
    buffers.give_back(frame)
    assert isinstance(buffers.take_growing(buffers.size_bytes, length), bytearray), "a common size is pooled"


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_without_address_space_a_large_frame_gets_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(frame_buffers, "mmap", type("mmap", (), {"__new__": refuse}))
    assert len(FrameBuffers(size_bytes=800, scratch_bytes=10).take_growing(1_000, 5_000)) == 1_000
