"""Memory for reading, used again: fresh memory of a megabyte costs more than reading into it.

One ``FrameBuffers`` belongs to one event loop. The loop reads one socket at a time and hands the bytes over
before it reads the next, so one scratch buffer serves all of its connections, and an idle connection has no
buffer of its own. Two loops in one process must not share it.
"""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

__all__ = ("FrameBuffers",)

_SCRATCH_BYTES = 256 * 1024
_FRAME_BYTES = 1024 * 1024 + 64 * 1024
_KEEP = 8


class FrameBuffers:
    """A scratch buffer, and a few buffers of one size for large frames.

    A frame buffer is given back only when nobody needs what is in it any more.
    """

    def __init__(
        self, size_bytes: int = _FRAME_BYTES, keep: int = _KEEP, scratch_bytes: int = _SCRATCH_BYTES
    ) -> None:
        assert scratch_bytes <= size_bytes, "a frame buffer must hold what was read into the scratch buffer"
        self.size_bytes = size_bytes
        self.scratch = memoryview(bytearray(scratch_bytes))
        self._pooled_min_bytes = size_bytes // 8
        self._keep = keep
        self._free: list[bytearray] = []

    def take(self, size: int) -> bytearray:
        """Memory for at least ``size`` bytes. Never much more than that, unless it is there already."""
        if self._pooled_min_bytes <= size <= self.size_bytes and self._free:
            return self._free.pop()
        if self.size_bytes // 2 <= size <= self.size_bytes:
            return bytearray(self.size_bytes)
        return bytearray(size)

    def take_growing(self, size: int, length: int) -> bytearray | mmap:
        """Memory for ``size`` bytes of a frame of ``length``. For a large frame it is there for all of it.

        Such a frame is address space, and takes memory page by page as bytes arrive: it never has to be
        copied to grow, which would hold the loop for as long as tens of megabytes take.
        """
        if size <= self.size_bytes:
            return self.take(size)
        try:
            return mmap(-1, length, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        except OSError:
            # Address space is limited here; then it is copied.
            return bytearray(size)

    def give_back(self, buffer: bytearray | mmap) -> None:
        """Take back any buffer that a frame had; those of the common size are used again."""
        if isinstance(buffer, mmap):
            return
        if len(buffer) == self.size_bytes and len(self._free) < self._keep:
            self._free.append(buffer)
