"""Memory for large frames, used again: fresh memory of a megabyte costs more than reading into it."""

from __future__ import annotations

__all__ = ("FrameBuffers",)


class FrameBuffers:
    """A few buffers of one size. A buffer is given back only when nothing refers to it any more."""

    def __init__(self, size_bytes: int, keep: int) -> None:
        self.size_bytes = size_bytes
        self._keep = keep
        self._free: list[bytearray] = []

    def take(self) -> bytearray:
        return self._free.pop() if self._free else bytearray(self.size_bytes)

    def give_back(self, buffer: bytearray) -> None:
        if len(buffer) == self.size_bytes and len(self._free) < self._keep:
            self._free.append(buffer)
