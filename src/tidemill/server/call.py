"""One request on its way through the server, and the way back of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from tidemill.coordination.shares import Client, share_address
from tidemill.server.watchdog import LoopWatchdog, begin_turn
from tidemill.wire.encode import Body, encode_response
from tidemill.wire.requests import RequestHeader

__all__ = ("Call", "ReplyBuffers")

ReplyBuffers = Sequence[bytes | bytearray | memoryview]

T = TypeVar("T")


class Call:
    """A request, with what was decoded of it.

    Exactly one of ``reply``, ``reply_buffers``, ``no_reply`` and ``abort`` is called, once.
    """

    __slots__ = (
        "_close",
        "_connection_id",
        "_send",
        "client_host",
        "header",
        "is_hurried",
        "keeps_frame",
        "on_hurry",
        "request",
        "turn",
        "waited_seconds",
        "watchdog",
    )

    def __init__(
        self,
        header: RequestHeader,
        request: Any,
        client_host: str,
        send: Callable[[ReplyBuffers], None],
        close: Callable[[], None],
        connection_id: int = 0,
    ) -> None:
        self.header = header
        self.request = request
        self.client_host = client_host
        self._send = send
        self._close = close
        self._connection_id = connection_id
        #: Set by a handler that waits for something: called when the answer should come now, because the
        #: client is gone or the node stops.
        self.on_hurry: Callable[[], None] | None = None
        #: Whether that has happened: whoever begins to wait then need not.
        self.is_hurried = False
        #: Set by a handler that waited because the client asked for it (a long poll): for how long.
        self.waited_seconds = 0.0
        #: Whether records of the request, which are views of its frame, are used after the dispatch.
        self.keeps_frame = False
        #: When the loop began to work on the request: before it is decoded.
        self.turn = begin_turn()
        #: Times what the loop does for the request; set when it is dispatched.
        self.watchdog: LoopWatchdog | None = None

    @property
    def version(self) -> int:
        return self.header.api_version

    @property
    def client_id(self) -> str:
        return self.header.client_id or ""

    @property
    def client(self) -> Client:
        """Who gets a share of what is limited."""
        return Client(share_address(self.client_host), self._connection_id)

    @property
    def who(self) -> str:
        """Who asks, for the log."""
        return f"{self.client_id or 'a client'} at {self.client_host or 'an unknown address'}"

    def field(self, name: str, default: Any = None) -> Any:
        """A field of the request that not every version has."""
        return getattr(self.request, name, default)

    def start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work on the request in a task of its own, whose turns of the loop count as this request's."""
        loop = asyncio.get_running_loop()
        if self.watchdog is None:
            return loop.create_task(work)
        return loop.create_task(self.watchdog.watch(work, self.header.api_key, self))

    def keep_frame(self) -> None:
        """The frame's memory must not be used again: its records are needed until the answer is there."""
        self.keeps_frame = True

    def hurry(self) -> None:
        self.is_hurried = True
        if self.on_hurry is not None:
            self.on_hurry()

    def reply(self, body: Body) -> None:
        header = self.header
        self._send([encode_response(header.api_key, header.api_version, header.correlation_id, body)])

    def reply_buffers(self, buffers: ReplyBuffers) -> None:
        """Answer with a whole frame, already encoded."""
        self._send(buffers)

    def no_reply(self) -> None:
        """The request wants no answer (acks = 0)."""
        self._send(())

    def abort(self) -> None:
        """There is no answer to give: close the connection."""
        self._close()
