"""Asking other nodes: ``Peer`` is one connection to one node, ``Peers`` the connections to all of them.

Rules:

- Answers are matched to requests by correlation id, so any number may be under way.
- A request that is not answered in time fails alone, and its late answer is dropped. If nothing at all has
  come for a while, the connection fails, and with it every request.
- A connection that failed once stays failed: ``Peers`` opens another.
- A node has two connections to another, each with a purpose: ``fetch``, whose requests may wait at the other
  side and whose answers are large, and ``control`` for everything else, which is never behind those.
- A node that could not be reached is not tried again for a while: 50 ms, then twice as long each time, up to
  a second. Who asks meanwhile is told at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeVar

from tidemill.cluster.codes import raise_for
from tidemill.cluster.frames import decode_response, encode
from tidemill.cluster.handshake import HANDSHAKE_BYTES_MAX, NONCE_BYTES, AskingHandshake, ClusterIdentity
from tidemill.cluster.messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    ClusterRequest,
    ClusterResponse,
    HelloProofResponse,
    HelloResponse,
    RequestHeader,
)
from tidemill.cluster.stream import FrameStream
from tidemill.config.values import Address
from tidemill.coordination.ids import Ids
from tidemill.errors import (
    ApiError,
    ConnectionClosed,
    ErrorCode,
    NodeUnavailable,
    ProtocolError,
    TidemillError,
)
from tidemill.net.errors import reason_of
from tidemill.net.retry import backoff_ms
from tidemill.net.transport import Transport

__all__ = ("Peer", "PeerContext", "Peers", "Purpose", "RequestFactory")

logger = logging.getLogger(__name__)

Purpose = Literal["fetch", "control"]
RequestFactory = Callable[[RequestHeader], ClusterRequest]
"""Makes a request with the header that it is given, for instance ``partial(FetchRequest, partitions=…)``."""

_R = TypeVar("_R", bound=ClusterResponse)

#: A connection on which nothing has come for this long, while an answer was due, has failed.
_SILENCE_SECONDS: Final = 3.0
_OPEN_TIMEOUT_MS: Final = 5_000
_FIRST_PAUSE_MS: Final = 50
_LONGEST_PAUSE_MS: Final = 1_000


@dataclass(frozen=True)
class PeerContext:
    """What every outgoing connection needs: who asks, the way to others, random tokens, the time of day."""

    identity: ClusterIdentity
    transport: Transport
    ids: Ids
    wall_ms: Callable[[], int]


class _Pending(NamedTuple):
    expected: type[ClusterResponse]
    answer: asyncio.Future[Any]


class Peer:
    """An open connection to another node; made by ``Peer.open``."""

    def __init__(self, node_id: int, address: Address, context: PeerContext) -> None:
        self.node_id = node_id
        self.address = address
        #: How far the other node's time of day is ahead of this one's, give or take a round trip.
        self.clock_ahead_ms = 0
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._stream = FrameStream(self, HANDSHAKE_BYTES_MAX)
        self._version = PROTOCOL_VERSION
        self._pending: dict[int, _Pending] = {}
        self._next_correlation_id = 0
        #: Since when an answer is due and nothing has come; None if no answer is due.
        self._silent_since: float | None = None
        self._failure: TidemillError | None = None

    @classmethod
    async def open(
        cls, node_id: int, address: Address, context: PeerContext, *, timeout_ms: int = _OPEN_TIMEOUT_MS
    ) -> Peer:
        """Connect to a node, and prove the secret to each other.

        Raises ``NodeUnavailable``, ``ProtocolError``, or ``ApiError`` with the code of a refusal.
        """
        peer = cls(node_id, address, context)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await context.transport.connect(address, lambda: peer._stream)
                await peer._shake_hands(timeout_ms)
        except BaseException as error:
            peer._stream.abort()
            if isinstance(error, TimeoutError):
                raise peer._unreachable(f"no connection within {timeout_ms} ms") from None
            if isinstance(error, OSError):
                raise peer._unreachable(reason_of(error)) from error
            raise
        return peer

    async def _shake_hands(self, timeout_ms: int) -> None:
        context = self._context
        handshake = AskingHandshake(context.identity, self.node_id, context.ids.token(NONCE_BYTES))
        greeting = await self.request(handshake.hello, HelloResponse, timeout_ms=timeout_ms)
        shown = await self.request(
            lambda header: handshake.prove(header, greeting), HelloProofResponse, timeout_ms=timeout_ms
        )
        self.clock_ahead_ms = handshake.finish(shown).wall_ms - context.wall_ms()
        self._version = handshake.version
        self._stream.max_bytes = MESSAGE_BYTES_MAX

    @property
    def failed(self) -> bool:
        """Whether every further request would fail."""
        return self._failure is not None

    async def request(self, make: RequestFactory, answer: type[_R], *, timeout_ms: int) -> _R:
        """Send a request and wait for its answer.

        Raises ``ApiError`` with the answer's code, REQUEST_TIMED_OUT if there is none in time (what was asked
        may have been done), ``NodeUnavailable`` if the connection fails.
        """
        correlation_id: int | None = None
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._stream.room()
                correlation_id, future = self._send(make, answer, timeout_ms)
                response = await future
        except TimeoutError:
            raise self._late(answer, timeout_ms) from None
        finally:
            if correlation_id is not None:
                self._pending.pop(correlation_id, None)
        raise_for(response.header, f"node {self.node_id} refused {answer.__name__.removesuffix('Response')}")
        return response

    def _send(
        self, make: RequestFactory, answer: type[_R], timeout_ms: int
    ) -> tuple[int, asyncio.Future[_R]]:
        if self._failure is not None:
            raise self._failure
        correlation_id = self._next_correlation_id
        identity = self._context.identity
        header = RequestHeader(
            self._version, correlation_id, identity.node_id, timeout_ms, identity.node_epoch()
        )
        frame = encode(make(header))
        self._next_correlation_id = correlation_id + 1
        future: asyncio.Future[_R] = self._loop.create_future()
        self._pending[correlation_id] = _Pending(answer, future)
        if self._silent_since is None:
            self._silent_since = self._loop.time()
        self._stream.write(frame)
        return correlation_id, future

    def _late(self, answer: type[ClusterResponse], timeout_ms: int) -> TidemillError:
        """The error of a request that has no answer in time; fails the connection if it is silent."""
        since = self._silent_since
        if since is not None and self._loop.time() - since >= _SILENCE_SECONDS:
            self._fail(self._unreachable(f"nothing came from it for {self._loop.time() - since:.1f} s"))
        what = answer.__name__.removesuffix("Response")
        return ApiError(
            ErrorCode.request_timed_out,
            f"node {self.node_id} at {self.address} sent no {what} answer within {timeout_ms} ms",
        )

    async def close(self) -> None:
        """Close; requests under way fail. Closing twice is fine."""
        self.abort(ConnectionClosed(f"the connection to node {self.node_id} was closed on this side"))
        await self._stream.closed()

    def abort(self, error: TidemillError) -> None:
        """Close without waiting; requests under way fail with ``error``."""
        self._fail(error)

    # --- what the stream tells

    def opened(self) -> None:
        pass

    def admits(self, frame_bytes: int) -> bool:
        return True  # It answers something that was asked, and is within the limit of a frame.

    def progressed(self) -> None:
        self._silent_since = self._loop.time() if self._pending else None

    def received(self, frame: memoryview) -> None:
        response = decode_response(frame)
        correlation_id = response.header.correlation_id
        pending = self._pending.pop(correlation_id, None)
        if pending is None:
            if 0 <= correlation_id < self._next_correlation_id:
                return  # It was asked, and nobody waits for it any more.
            raise ProtocolError(f"an answer to request {correlation_id}, which was not asked")
        if pending.answer.done():
            return
        if isinstance(response, pending.expected) or response.header.error_code:
            pending.answer.set_result(response)
        else:
            self._pending[correlation_id] = pending
            raise ProtocolError(f"{type(response).__name__} instead of {pending.expected.__name__}")

    def writable(self, is_writable: bool) -> None:
        pass

    def ended(self, error: Exception | None) -> None:
        if isinstance(error, ProtocolError):
            self._fail(
                ProtocolError(
                    f"{self.address} does not answer as node {self.node_id} would ({error.message}); check "
                    "that the address is the node's cluster address"
                )
            )
        elif isinstance(error, OSError):
            self._fail(self._unreachable(reason_of(error)))
        else:
            self._fail(self._unreachable("it closed the connection"))

    def _fail(self, error: TidemillError) -> None:
        if self._failure is None:
            self._failure = error
            self._stream.abort()
            pending, self._pending = self._pending, {}
            for entry in pending.values():
                if not entry.answer.done():
                    entry.answer.set_exception(error)

    def _unreachable(self, reason: str) -> NodeUnavailable:
        return NodeUnavailable(
            f"cannot reach node {self.node_id} at {self.address}: {reason}; check that it runs, and that "
            "this machine can connect to its cluster address"
        )


class _Link:
    """The connection to one node for one purpose: open, being opened, or not there."""

    __slots__ = ("opening", "peer", "task")

    def __init__(self) -> None:
        self.peer: Peer | None = None
        self.opening: asyncio.Future[Peer] | None = None
        self.task: asyncio.Task[None] | None = None


class _Backoff:
    """How often a node could not be reached in a row, and when it is tried again."""

    __slots__ = ("failure", "failures", "retry_at")

    def __init__(self) -> None:
        self.failures = 0
        self.retry_at = 0.0
        self.failure = ""

    def failed(self, now: float, message: str) -> None:
        self.failures += 1
        pause_ms = backoff_ms(self.failures, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)
        self.retry_at = now + pause_ms / 1000
        self.failure = message


class Peers:
    """Connections of this node to all others, opened when they are needed.

    ``address_of`` gives the cluster address of a node as the metadata has it, None for one that is not there.
    """

    def __init__(self, context: PeerContext, address_of: Callable[[int], Address | None]) -> None:
        self._context = context
        self._address_of = address_of
        self._links: dict[tuple[int, Purpose], _Link] = {}
        self._backoffs: dict[int, _Backoff] = {}
        self._is_closed = False

    async def request(
        self,
        node_id: int,
        make: RequestFactory,
        answer: type[_R],
        *,
        timeout_ms: int,
        purpose: Purpose = "control",
    ) -> _R:
        """Send a request to a node and wait for its answer.

        Raises ``NodeUnavailable`` if the node cannot be reached, or could not be a moment ago; ``ApiError``
        with the answer's code, or REQUEST_TIMED_OUT if there is none in time.
        """
        link = self._links.get((node_id, purpose))
        if link is not None and link.peer is not None and not link.peer.failed:
            return await link.peer.request(make, answer, timeout_ms=timeout_ms)
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                peer = await asyncio.shield(self._opening(node_id, purpose))
        except TimeoutError:
            raise NodeUnavailable(f"no connection to node {node_id} within {timeout_ms} ms") from None
        left_ms = timeout_ms - int((loop.time() - started) * 1000)
        return await peer.request(make, answer, timeout_ms=max(1, left_ms))

    def forget(self, node_id: int) -> None:
        """Close the connections to a node: its address or its incarnation has changed, or it is gone.

        Requests under way fail, and the next one connects at once.
        """
        self._backoffs.pop(node_id, None)
        for key in [key for key in self._links if key[0] == node_id]:
            self._drop(key[0], self._links.pop(key))

    def clocks_ahead_ms(self) -> dict[int, int]:
        """How far the time of day of each connected node is ahead of this one's."""
        return {
            node_id: link.peer.clock_ahead_ms
            for (node_id, _), link in self._links.items()
            if link.peer is not None and not link.peer.failed
        }

    async def close(self) -> None:
        """Close every connection. Nothing can be opened afterwards."""
        self._is_closed = True
        links, self._links = self._links, {}
        for (node_id, _), link in links.items():
            self._drop(node_id, link)
        for link in links.values():
            if link.task is not None:
                await asyncio.gather(link.task, return_exceptions=True)
            if link.peer is not None:
                await link.peer.close()

    def _opening(self, node_id: int, purpose: Purpose) -> asyncio.Future[Peer]:
        """The connection that is being opened for this purpose. Raises ``NodeUnavailable``."""
        if self._is_closed:
            raise ConnectionClosed("this node is shutting down: it asks other nodes for nothing more")
        link = self._links.setdefault((node_id, purpose), _Link())
        if link.opening is not None:
            return link.opening
        loop = asyncio.get_running_loop()
        backoff = self._backoffs.setdefault(node_id, _Backoff())
        if (wait_seconds := backoff.retry_at - loop.time()) > 0:
            raise NodeUnavailable(f"{backoff.failure} (tried again in {int(wait_seconds * 1000) + 1} ms)")
        if (address := self._address_of(node_id)) is None:
            raise NodeUnavailable(f"node {node_id} has no address: it is not registered in the cluster")
        link.opening = loop.create_future()
        # The caller that wanted the connection may be gone when it fails.
        link.opening.add_done_callback(lambda done: done.cancelled() or done.exception())
        link.task = loop.create_task(self._open(node_id, address, link, link.opening, backoff))
        return link.opening

    async def _open(
        self, node_id: int, address: Address, link: _Link, opening: asyncio.Future[Peer], backoff: _Backoff
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            peer = await Peer.open(node_id, address, self._context)
        except TidemillError as error:
            if error.message != backoff.failure:
                logger.warning("%s", error.message)
            backoff.failed(loop.time(), error.message)
            link.opening = None
            unavailable = NodeUnavailable(error.message)
            unavailable.__cause__ = error
            if not opening.done():
                opening.set_exception(unavailable)
        else:
            if backoff.failures:
                logger.info("node %d at %s is reached again", node_id, address)
            self._backoffs.pop(node_id, None)
            link.peer, link.opening = peer, None
            if not opening.done():
                opening.set_result(peer)

    def _drop(self, node_id: int, link: _Link) -> None:
        error = NodeUnavailable(
            f"the connection to node {node_id} was given up: its address or incarnation has changed, or this "
            "node is shutting down"
        )
        if link.opening is not None and not link.opening.done():
            link.opening.set_exception(error)
        if link.task is not None:
            link.task.cancel()
        if link.peer is not None:
            link.peer.abort(error)
