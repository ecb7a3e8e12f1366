"""Being asked by other nodes: accepts connections, checks who is there, and has handlers answer requests.

Rules:

- Before the proof of the secret nothing but Hello and HelloProof is taken, in frames of 64 KiB at most, and
  within a deadline. A connection without a proof gives way when there are too many.
- The requests of one connection are started in the order in which they came, and run side by side. What needs
  no waiting is answered in the turn in which it came: a task and its timer cost more than a small answer.
- Every request has one answer. What a handler raises becomes an error code; a request that takes longer than
  its sender waits is cancelled.
- Nothing grows without limit: connections, requests of a connection, bytes of requests and answers under
  way. At a limit the node stops reading, and TCP slows the sender down. A peer that stops in the middle of a
  frame, does not read its answers or says nothing for long is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from tidemill.cluster.byte_limit import ByteLimit, ByteShare
from tidemill.cluster.codes import cluster_code, message_of
from tidemill.cluster.frames import Buffers, Undecodable, decode_request, encode
from tidemill.cluster.handshake import (
    HANDSHAKE_BYTES_MAX,
    NONCE_BYTES,
    ClusterIdentity,
    ListeningHandshake,
    PeerInfo,
)
from tidemill.cluster.messages import (
    MESSAGE_BYTES_MAX,
    ClusterErrorCode,
    ClusterRequest,
    ClusterResponse,
    ErrorResponse,
    RequestHeader,
    ResponseHeader,
)
from tidemill.cluster.stream import FrameStream
from tidemill.config.values import Address
from tidemill.coordination.ids import Ids
from tidemill.errors import TidemillError
from tidemill.net.errors import cannot_listen
from tidemill.net.transport import Listener, Transport

__all__ = ("ClusterListener", "Handler", "Handlers", "ListenerLimits", "QuickHandler", "QuickHandlers")

logger = logging.getLogger(__name__)

Handler = Callable[[PeerInfo, Any], Awaitable[ClusterResponse]]
"""Answers one kind of request. The buffers of its answer's records must not be written to any more."""
Handlers = Mapping[type[ClusterRequest], Handler]
QuickHandler = Callable[[PeerInfo, Any], ClusterResponse | None]
"""Answers one kind of request at once; None if it cannot, and the ``Handler`` has to, from the beginning."""
QuickHandlers = Mapping[type[ClusterRequest], QuickHandler]

_BACKLOG: Final = 128
_MIB: Final = 1024 * 1024
#: Hosts whose refusals are remembered, so that one that tries again and again is logged once.
_REMEMBERED_HOSTS: Final = 100


@dataclass(frozen=True)
class ListenerLimits:
    """Limits of memory and time for the connections of other nodes."""

    connections_max: int = 256
    #: Requests of one connection under way.
    requests_max: int = 256
    #: Bytes of requests and answers under way, of one connection and of all.
    connection_bytes: int = 32 * _MIB
    total_bytes: int = 256 * _MIB
    #: Bytes that the operating system has not taken yet; above it, answers wait and nothing is read.
    unsent_bytes: int = _MIB
    handshake_ms: int = 5_000
    #: From the first byte of a frame to its last.
    frame_ms: int = 30_000
    #: For a peer that takes no answers.
    unread_ms: int = 30_000
    #: For a peer that asks nothing.
    idle_ms: int = 600_000


class ClusterListener:
    """The cluster address of a node.

    ``handlers`` may be filled until ``start``; what is not in it is answered UNSUPPORTED_VERSION.
    """

    def __init__(
        self,
        identity: ClusterIdentity,
        handlers: Handlers,
        *,
        quick_handlers: QuickHandlers = MappingProxyType({}),
        transport: Transport,
        ids: Ids,
        wall_ms: Callable[[], int],
        limits: ListenerLimits | None = None,
    ) -> None:
        self.identity = identity
        self.handlers = handlers
        self.quick_handlers = quick_handlers
        self.ids = ids
        self.wall_ms = wall_ms
        self.limits = limits or ListenerLimits()
        self.bytes = ByteLimit(self.limits.total_bytes)
        self._transport = transport
        self._listener: Listener | None = None
        self._connections: dict[_Connection, None] = {}
        #: Those that have not proven anything, the oldest first.
        self._unproven: dict[_Connection, None] = {}
        self._refusals: dict[str, str] = {}
        self._is_closed = False

    async def start(self, address: Address) -> Address:
        """Listen; returns the address with the real port. Raises ``ConfigError``."""
        try:
            self._listener = await self._transport.listen(address, lambda: _Connection(self).stream, _BACKLOG)
        except OSError as error:
            raise cannot_listen("listen for other nodes", address, error, "--cluster-listen") from error
        await self._listener.start_serving()
        return self._listener.address

    async def close(self) -> None:
        """Accept nothing more, end all connections and cancel what they have asked for."""
        self._is_closed = True
        if self._listener is not None:
            self._listener.close()
        connections = list(self._connections)
        for connection in connections:
            connection.give_up("this node is shutting down")
        for connection in connections:
            await connection.closed()

    # --- what connections tell

    def opened(self, connection: _Connection) -> None:
        """A connection was accepted; one gives way if there are too many."""
        self._connections[connection] = self._unproven[connection] = None
        if self._is_closed:
            connection.give_up("this node is shutting down")
        elif len(self._connections) > self.limits.connections_max:
            oldest = next(iter(self._unproven))
            oldest.give_up(f"{self.limits.connections_max} connections of nodes are open")

    def proven(self, connection: _Connection, host: str) -> None:
        """The other side has shown that it has the secret."""
        self._unproven.pop(connection, None)
        self._refusals.pop(host, None)

    def refused(self, host: str, message: str) -> None:
        """A handshake has failed: logged once for each host and reason."""
        if self._refusals.get(host) != message:
            logger.warning("refused a connection of a node from %s: %s", host or "unknown", message)
            if len(self._refusals) < _REMEMBERED_HOSTS:
                self._refusals[host] = message

    def ended(self, connection: _Connection) -> None:
        """Forget a connection that has ended."""
        self._connections.pop(connection, None)
        self._unproven.pop(connection, None)


class _Connection:
    """One accepted connection, and the requests of it that are under way."""

    def __init__(self, listener: ClusterListener) -> None:
        self.stream = FrameStream(self, HANDSHAKE_BYTES_MAX)
        self._listener = listener
        self._limits = listener.limits
        self._loop = asyncio.get_running_loop()
        self._bytes = ByteShare(listener.bytes, self._limits.connection_bytes, self.stream.go_on)
        self._handshake: ListeningHandshake | None = None
        self._peer: PeerInfo | None = None
        self._running: dict[asyncio.Task[None], None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._opened_at = self._active_at = self._loop.time()
        #: Since when the frame that is arriving arrives, and since when the peer takes no answers.
        self._frame_since: float | None = None
        self._blocked_since: float | None = None

    # --- what the stream tells

    def opened(self) -> None:
        listener = self._listener
        self.stream.limit_unsent(self._limits.unsent_bytes)
        nonce = listener.ids.token(NONCE_BYTES)
        self._handshake = ListeningHandshake(listener.identity, nonce, self.stream.host)
        self._watch()
        listener.opened(self)

    def admits(self, frame_bytes: int) -> bool:
        # Before the proof, frames are small and answered at once.
        return self._peer is None or self._bytes.take_if_admitted(frame_bytes)

    def progressed(self) -> None:
        if not self.stream.is_inside_frame:
            self._frame_since = None
        elif self._frame_since is None:
            self._frame_since = self._loop.time()
            self._watch_by(self._frame_since + self._limits.frame_ms / 1000)

    def received(self, frame: memoryview) -> None:
        self._frame_since = None
        self._active_at = self._loop.time()
        if self._peer is None:
            self._shake_hands(frame)
        else:
            self._start(self._peer, frame)

    def writable(self, is_writable: bool) -> None:
        self._blocked_since = None if is_writable else self._loop.time()
        if self._blocked_since is not None:
            self._watch_by(self._blocked_since + self._limits.unread_ms / 1000)
        self._hold_or_not()

    def ended(self, error: Exception | None) -> None:
        if isinstance(error, TidemillError):
            if self._peer is None:
                self._listener.refused(self.stream.host, error.message)
            else:
                logger.warning("node %d broke the protocol: %s", self._peer.node_id, error.message)
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._running):
            task.cancel()
        self._bytes.close()
        self._listener.ended(self)
        self.stream.close()

    # --- deadlines

    def _deadlines(self, now: float) -> Iterator[tuple[float, str]]:
        limits = self._limits
        if self._peer is None:
            yield self._opened_at + limits.handshake_ms / 1000, "it has not proven that it has the secret"
            return
        if self._frame_since is not None and self.stream.is_inside_frame:
            yield self._frame_since + limits.frame_ms / 1000, "it stopped in the middle of a message"
        if self._blocked_since is not None:
            yield self._blocked_since + limits.unread_ms / 1000, "it does not read its answers"
        active_at = now if self._running else self._active_at
        yield active_at + limits.idle_ms / 1000, "it has asked nothing for long"

    def _watch(self) -> None:
        """End the connection if a deadline is over, else look again at the next one."""
        now = self._loop.time()
        when, reason = min(self._deadlines(now))
        if when <= now:
            self.give_up(reason)
        else:
            self._timer = self._loop.call_at(when, self._watch)

    def _watch_by(self, when: float) -> None:
        """Look at the deadlines at that time, if not before."""
        if self._timer is not None and self._timer.when() > when and not self.stream.has_ended:
            self._timer.cancel()
            self._timer = self._loop.call_at(when, self._watch)

    def give_up(self, reason: str) -> None:
        """End the connection at once."""
        if self._peer is None:
            self._listener.refused(self.stream.host, reason)
        else:
            logger.info("closed the connection of node %d: %s", self._peer.node_id, reason)
        self.stream.abort()

    async def closed(self) -> None:
        """Wait until the connection is closed and its requests are over."""
        if self._running:
            await asyncio.wait(list(self._running))
        await self.stream.closed()

    # --- requests

    def _shake_hands(self, frame: memoryview) -> None:
        """Answer a message of the handshake; a refusal is answered, too, and is the last answer."""
        assert self._handshake is not None
        try:
            request = decode_request(frame)
        except Undecodable as error:
            self._refuse(error.answer)
            return
        try:
            answer, self._peer = self._handshake.answer(request, self._listener.wall_ms())
        except TidemillError as error:
            self._refuse(_refusal(request.header, error))
            return
        self.stream.write(encode(answer))
        if self._peer is not None:
            self.stream.max_bytes = MESSAGE_BYTES_MAX
            self._listener.proven(self, self.stream.host)

    def _refuse(self, answer: ErrorResponse) -> None:
        self._listener.refused(self.stream.host, answer.header.error_message or "")
        self.stream.write(encode(answer))
        self.stream.close()

    def _start(self, peer: PeerInfo, frame: memoryview) -> None:
        """Start the request in a frame, whose bytes are taken already."""
        try:
            request = decode_request(frame)
        except Undecodable as error:
            work = self._reply(error.answer, len(frame))
        else:
            if self._answer_at_once(peer, request, len(frame)):
                return
            work = self._serve(peer, request, len(frame))
        task = self._loop.create_task(work)
        self._running[task] = None
        task.add_done_callback(self._over)
        self._hold_or_not()

    def _answer_at_once(self, peer: PeerInfo, request: ClusterRequest, frame_bytes: int) -> bool:
        """Answer a request in this turn. False if it needs a task."""
        handler = self._listener.quick_handlers.get(type(request))
        if handler is None or self._blocked_since is not None or _wrong_header(peer, request.header):
            return False
        answer: ClusterResponse | None
        try:
            answer = handler(peer, request)
        except TidemillError as error:
            answer = _refusal(request.header, error)
        except Exception:
            logger.exception("%s of node %d failed", type(request).__name__, peer.node_id)
            answer = self._failure(request)
        if answer is None:
            return False
        self.stream.write(_encoded(answer))
        self._bytes.give_back(frame_bytes)
        return True

    def _over(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._active_at = self._loop.time()
        self._hold_or_not()

    def _hold_or_not(self) -> None:
        if not self.stream.has_ended:
            is_full = len(self._running) >= self._limits.requests_max
            is_held = is_full or self._blocked_since is not None
            self.stream.hold(is_held)
            if is_held:
                self._bytes.wait_no_more()

    async def _serve(self, peer: PeerInfo, request: ClusterRequest, frame_bytes: int) -> None:
        await self._reply(await self._answer(peer, request), frame_bytes)

    async def _answer(self, peer: PeerInfo, request: ClusterRequest) -> ClusterResponse:
        """What the handler answers, or the error that stands for what it raised."""
        header, name = request.header, type(request).__name__
        handler = self._listener.handlers.get(type(request))
        if (refusal := _wrong_header(peer, header)) is not None:
            return refusal
        if handler is None:
            message = f"this node does not serve {name}"
            return ErrorResponse(header.answer(ClusterErrorCode.UNSUPPORTED_VERSION, message))
        scope = asyncio.timeout(max(0, header.timeout_ms) / 1000)
        try:
            async with scope:
                answer = await handler(peer, request)
            assert answer.header.correlation_id == header.correlation_id, "an answer to another request"
            return answer
        except TidemillError as error:
            return _refusal(header, error)
        except Exception as error:
            if isinstance(error, TimeoutError) and scope.expired():
                message = f"{name} was not done within {header.timeout_ms} ms; it may still take effect"
                return ErrorResponse(header.answer(ClusterErrorCode.REQUEST_TIMED_OUT, message))
            logger.exception("%s of node %d failed", name, peer.node_id)
            return self._failure(request)

    def _failure(self, request: ClusterRequest) -> ErrorResponse:
        """The answer to a request whose handler has a defect."""
        name = type(request).__name__
        message = f"node {self._listener.identity.node_id} failed at {name}; its log says why"
        return ErrorResponse(request.header.answer(ClusterErrorCode.UNKNOWN, message))

    async def _reply(self, answer: ClusterResponse, frame_bytes: int) -> None:
        """Send an answer once the peer takes it, and give back the bytes of its request."""
        buffers = _encoded(answer)
        answer_bytes = sum(map(len, buffers))
        self._bytes.take(answer_bytes)
        try:
            await self.stream.room()
            self.stream.write(buffers)
        finally:
            self._bytes.give_back(frame_bytes + answer_bytes)


def _encoded(answer: ClusterResponse) -> Buffers:
    """The frame of an answer, or of an error if it cannot be sent."""
    try:
        return encode(answer)
    except Exception as error:
        logger.exception("%s cannot be sent", type(answer).__name__)
        message = f"the answer cannot be sent: {error}"
        header = ResponseHeader(answer.header.correlation_id, int(ClusterErrorCode.UNKNOWN), message)
        return encode(ErrorResponse(header))


def _refusal(header: RequestHeader, error: TidemillError) -> ErrorResponse:
    return ErrorResponse(header.answer(cluster_code(error), message_of(error)))


def _wrong_header(peer: PeerInfo, header: RequestHeader) -> ErrorResponse | None:
    """The refusal of a request whose header is not that of its connection."""
    if header.source != peer.node_id:
        code = ClusterErrorCode.INVALID_REQUEST
        message = f"a request of node {header.source} on a connection of node {peer.node_id}"
    elif header.version != peer.version:
        code = ClusterErrorCode.UNSUPPORTED_VERSION
        message = f"a request in version {header.version} on a connection in version {peer.version}"
    else:
        return None
    return ErrorResponse(header.answer(code, message))
