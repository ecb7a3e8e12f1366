"""A limit for the bytes of requests and answers under way: of one connection, and of all together.

A connection asks before it takes memory for a frame. If there are too few bytes, it is remembered and called
when others were given back; nobody overtakes those who wait for the bytes of all. Answers exist already when
they are counted, so they may go over the limit, and then nothing is read until enough of them is sent.

A frame is always admitted if nothing else is held, however small the limits: so everybody goes on one day.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ("ByteLimit", "ByteShare")


class ByteLimit:
    """The bytes of all connections."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self.used_bytes = 0
        #: Shares whose connections wait for the bytes of all, in the order in which they asked.
        self._waiting: dict[ByteShare, None] = {}

    def admits(self, share: ByteShare, count: int) -> bool:
        """Whether ``count`` more bytes fit; if not, the share is called when they may."""
        first = next(iter(self._waiting), share)
        if first is share and (not self.used_bytes or self.used_bytes + count <= self._total_bytes):
            self._waiting.pop(share, None)
            return True
        self._waiting[share] = None
        return False

    def forget(self, share: ByteShare) -> None:
        """A connection has ended, or does not read: it waits for nothing more."""
        self._waiting.pop(share, None)
        self.wake()

    def wake(self) -> None:
        """Let those who wait ask again, until one of them still has to wait."""
        while (share := next(iter(self._waiting), None)) is not None:
            share.go_on()
            if next(iter(self._waiting), None) is share:
                return


class ByteShare:
    """The bytes of one connection; ``go_on`` is called when it may ask again."""

    def __init__(self, limit: ByteLimit, connection_bytes: int, go_on: Callable[[], None]) -> None:
        self.go_on = go_on
        self.held_bytes = 0
        self._limit = limit
        self._connection_bytes = connection_bytes
        self._waits_for_itself = False
        self._is_closed = False

    def take_if_admitted(self, count: int) -> bool:
        """Take the bytes of a frame before there is memory for it; False if it has to wait."""
        if self.held_bytes and self.held_bytes + count > self._connection_bytes:
            self._waits_for_itself = True
            return False
        if not self._limit.admits(self, count):
            return False
        self.take(count)
        return True

    def take(self, count: int) -> None:
        """Take bytes that are there already."""
        if not self._is_closed:
            self.held_bytes += count
            self._limit.used_bytes += count

    def give_back(self, count: int) -> None:
        """Return bytes, and let those who wait for them go on."""
        if self._is_closed:
            return
        self.held_bytes -= count
        assert self.held_bytes >= 0, "more bytes were given back than taken"
        self._limit.used_bytes -= count
        if self._waits_for_itself:
            self._waits_for_itself = False
            self.go_on()
        self._limit.wake()

    def wait_no_more(self) -> None:
        """Let others go first: the connection reads nothing for now, and asks again when it does."""
        self._limit.forget(self)

    def close(self) -> None:
        """Return everything; what is given back afterwards is not counted."""
        if not self._is_closed:
            self._is_closed = True
            self._limit.used_bytes -= self.held_bytes
            self.held_bytes = 0
            self._limit.forget(self)
