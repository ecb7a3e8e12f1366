"""A request on its way through the server, and its answer on the way back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from tidemill.coordination.fair_shares import Client, share_address
from tidemill.coordination.turns import in_slices
from tidemill.server.requests.authorization import (
    ANONYMOUS,
    CLUSTER_NAME,
    AclOperation,
    Authorizer,
    Principal,
    ResourceType,
    refusal,
)
from tidemill.server.watchdog import LoopWatchdog, begin_turn
from tidemill.wire.encode import Body, encode_response
from tidemill.wire.requests import RequestHeader

__all__ = ("Call", "ReplyBuffers")

ReplyBuffers = Sequence[bytes | bytearray | memoryview]

T = TypeVar("T")


class Call:
    """A request with its decoded body, its client, and the functions that answer it.

    Exactly one of ``reply``, ``reply_buffers``, ``no_reply`` and ``abort`` is called, once.
    """

    __slots__ = (
        "_close",
        "_connection_id",
        "_send",
        "authorizer",
        "between_nodes",
        "client_host",
        "header",
        "is_hurried",
        "keeps_frame",
        "on_hurry",
        "principal",
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
        principal: Principal = ANONYMOUS,
    ) -> None:
        self.header = header
        self.request = request
        self.client_host = client_host
        self._send = send
        self._close = close
        self._connection_id = connection_id
        self.principal = principal
        #: Whether another node of the cluster asks, over the cluster's port.
        self.between_nodes = False
        #: Decides what the principal may do; None lets everybody do everything. Set by the dispatcher.
        self.authorizer: Authorizer | None = None
        #: Set by a handler that waits for something: called when the answer should come now, because the
        #: client is gone or the node stops.
        self.on_hurry: Callable[[], None] | None = None
        #: Whether ``hurry`` was called: a handler that would begin to wait answers at once.
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
        """The client whose share of limited resources the request uses."""
        return Client(share_address(self.client_host), self._connection_id)

    @property
    def who(self) -> str:
        """The client in words, for the log."""
        return f"{self.client_id or 'a client'} at {self.client_host or 'an unknown address'}"

    def may(self, operation: AclOperation, resource: ResourceType, name: str) -> bool:
        """Whether the principal may do this with the resource of that name."""
        authorizer = self.authorizer
        return authorizer is None or authorizer.allows(
            self.principal, self.client_host, operation, resource, name
        )

    def authorize(self, operation: AclOperation, resource: ResourceType, name: str) -> None:
        """Raise ``ApiError`` with Kafka's code for the kind of resource unless ``may`` says yes."""
        if not self.may(operation, resource, name):
            raise refusal(operation, resource, name)

    async def allowed(
        self, operation: AclOperation, resource: ResourceType, names: Sequence[str]
    ) -> Sequence[str]:
        """The names of the resources that the principal may do this with. Works in short turns."""
        if self.authorizer is None:
            return names
        return await in_slices(name for name in names if self.may(operation, resource, name))

    def authorize_creation(self, topic: str) -> None:
        """Raise unless the principal may create this topic, or any topic of the cluster."""
        if not self.may(AclOperation.CREATE, ResourceType.CLUSTER, CLUSTER_NAME):
            self.authorize(AclOperation.CREATE, ResourceType.TOPIC, topic)

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
        """Keep the frame's memory from being reused before the answer: its records are needed until then."""
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
        """Finish a request that wants no answer (acks = 0)."""
        self._send(())

    def abort(self) -> None:
        """Close the connection, because there is no answer to give."""
        self._close()
