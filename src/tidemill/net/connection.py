"""One connection to one node: version negotiation, pipelined requests, deadlines.

Rules:

- How it is opened is a parameter, a ``Transport``: TCP unless the caller says otherwise.
- A request goes out in the newest version that both sides and the calling code know.
- Answers are matched to requests by correlation id, so any number may be under way.
- A connection that failed once stays failed: every request under way and every later one gets the same
  error. For another try, open another connection.
- A request that is not answered in time fails the connection: its answer could otherwise come at any time and
  hold up those behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from struct import Struct
from typing import Any, Final, NamedTuple

from tidemill.config.values import Address
from tidemill.errors import (
    ApiError,
    ConnectionClosed,
    ErrorCode,
    NodeUnavailable,
    ProtocolError,
    TidemillError,
)
from tidemill.net.frame_receiver import FrameReceiver
from tidemill.net.transport import TcpTransport, Transport
from tidemill.wire.apis import APIS_BY_NAME, Api
from tidemill.wire.encode import encode_request
from tidemill.wire.frames import FRAME_LENGTH_BYTES
from tidemill.wire.requests import decode_response

__all__ = ("DEFAULT_TIMEOUT_MS", "Connection", "Versions")

DEFAULT_TIMEOUT_MS: Final = 30_000
_CONNECT_TIMEOUT_MS: Final = 10_000
_CORRELATION_MODULUS: Final = 2**31

Versions = tuple[int, int]
"""The oldest and the newest version that the calling code can write and read."""

_ANY_VERSION: Final[Versions] = (0, 0x7FFF)
_read_correlation_id: Final = Struct(">i").unpack_from


class _Pending(NamedTuple):
    api: Api
    version: int
    answer: asyncio.Future[Any]


class Connection:
    """An open connection; made by ``Connection.open``."""

    def __init__(self, address: Address, client_id: str) -> None:
        self.address = address
        self._client_id = client_id
        self._receiver = FrameReceiver(self._deliver, self._ended)
        self._transport: asyncio.WriteTransport | None = None
        self._pending: dict[int, _Pending] = {}
        self._next_correlation_id = 0
        self._failure: TidemillError | None = None
        #: What the node serves: API key to its oldest and newest version.
        self.served: dict[int, Versions] = {}

    @classmethod
    async def open(
        cls,
        address: Address,
        *,
        client_id: str = "tidemill",
        timeout_ms: int = _CONNECT_TIMEOUT_MS,
        transport: Transport | None = None,
    ) -> Connection:
        """Connect and learn what the node serves. Raises ``NodeUnavailable`` or ``ProtocolError``."""
        connection = cls(address, client_id)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                connection._transport = await (transport or TcpTransport()).connect(
                    address, lambda: connection._receiver
                )
        except TimeoutError:
            raise _unreachable(address, f"no connection within {timeout_ms} ms") from None
        except OSError as error:
            raise _not_connected(address, error) from error
        try:
            await connection._negotiate(timeout_ms)
        except BaseException:
            await connection.close()
            raise
        return connection

    @property
    def failed(self) -> bool:
        """Whether every further request would fail."""
        return self._failure is not None

    def version_of(self, name: str, versions: Versions = _ANY_VERSION) -> int:
        """The version in which a request of this API goes out. Raises ``ApiError`` UNSUPPORTED_VERSION."""
        api = APIS_BY_NAME[name]
        oldest, newest = max(api.min_version, versions[0]), min(api.max_version, versions[1])
        served = self.served.get(api.key)
        if served is None:
            raise ApiError(
                ErrorCode.unsupported_version,
                f"the node at {self.address} does not serve {name} (API key {api.key}); "
                "this needs another server, or a newer version of it",
            )
        if max(oldest, served[0]) > min(newest, served[1]):
            raise ApiError(
                ErrorCode.unsupported_version,
                f"the node at {self.address} serves {name} in versions {served[0]} to {served[1]}, "
                f"this side needs {oldest} to {newest}; update the older of the two",
            )
        return min(newest, served[1])

    async def request(
        self,
        name: str,
        body: Mapping[str, Any],
        *,
        versions: Versions = _ANY_VERSION,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
    ) -> Any:
        """Send a request and wait for its answer, which is kio's entity."""
        answer = self._send(APIS_BY_NAME[name], self.version_of(name, versions), body)
        return await self._answer_in_time(answer, name, timeout_ms)

    async def send_unanswered(
        self, name: str, body: Mapping[str, Any], *, versions: Versions = _ANY_VERSION
    ) -> None:
        """Send a request that the node does not answer (Produce with acks=0)."""
        self._write(APIS_BY_NAME[name], self.version_of(name, versions), body)
        await self._receiver.drain()
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Close; requests under way fail. Closing twice is fine."""
        self._fail(ConnectionClosed(f"the connection to {self.address} was closed on this side"))
        if self._transport is not None:
            await self._receiver.closed()

    async def _negotiate(self, timeout_ms: int) -> None:
        # Version 0 is the one that every server answers.
        answer = self._send(APIS_BY_NAME["ApiVersions"], 0, {})
        response = await self._answer_in_time(answer, "ApiVersions", timeout_ms)
        if response.error_code != ErrorCode.none:
            raise ApiError(
                response.error_code, f"the node at {self.address} refuses to say which API versions it serves"
            )
        self.served = {entry.api_key: (entry.min_version, entry.max_version) for entry in response.api_keys}

    def _send(self, api: Api, version: int, body: Mapping[str, Any]) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        correlation_id = self._write(api, version, body)
        self._pending[correlation_id] = _Pending(api, version, answer)
        return answer

    def _write(self, api: Api, version: int, body: Mapping[str, Any]) -> int:
        if self._failure is not None:
            raise self._failure
        correlation_id = self._next_correlation_id
        self._next_correlation_id = (correlation_id + 1) % _CORRELATION_MODULUS
        assert self._transport is not None
        self._transport.write(encode_request(api.key, version, correlation_id, self._client_id, body))
        return correlation_id

    async def _answer_in_time(self, answer: asyncio.Future[Any], name: str, timeout_ms: int) -> Any:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._receiver.drain()
                return await answer
        except TimeoutError:
            error = _unreachable(self.address, f"{name} was not answered within {timeout_ms} ms")
            raise self._fail(error) from None

    def _ended(self, error: Exception | None) -> None:
        if isinstance(error, ProtocolError):
            self._fail(
                ProtocolError(
                    f"{self.address} does not answer as a Kafka server would ({error.message}); "
                    "check that the address is the node's Kafka address"
                )
            )
        elif isinstance(error, OSError):
            self._fail(_not_connected(self.address, error))
        else:
            self._fail(_unreachable(self.address, "it closed the connection"))

    def _deliver(self, frame: memoryview) -> None:
        if len(frame) < FRAME_LENGTH_BYTES:
            raise ProtocolError(f"an answer of {len(frame)} bytes")
        (correlation_id,) = _read_correlation_id(frame, 0)
        pending = self._pending.pop(correlation_id, None)
        if pending is None:
            raise ProtocolError(f"an answer to request {correlation_id}, which was not asked")
        # The caller may have been cancelled meanwhile; then nobody needs the answer.
        if not pending.answer.done():
            try:
                response = decode_response(pending.api.key, pending.version, frame)[1]
            except ProtocolError:
                self._pending[correlation_id] = pending
                raise
            pending.answer.set_result(response)

    def _fail(self, error: TidemillError) -> TidemillError:
        """Fail the connection for good, unless it has failed before; returns ``error`` to be raised."""
        if self._failure is None:
            self._failure = error
            if self._transport is not None:
                self._transport.close()
        pending, self._pending = self._pending, {}
        for entry in pending.values():
            if not entry.answer.done():
                entry.answer.set_exception(error)
        return error


def _not_connected(address: Address, error: OSError) -> NodeUnavailable:
    # Imported late, because Spark's processes load this module and rarely need the words.
    from tidemill.net.errors import is_unknown_host, reason_of

    if is_unknown_host(error):
        return NodeUnavailable(
            f"cannot resolve host {address.host!r} of {address}: {reason_of(error)}; check the spelling, and "
            "whether this machine can look up names"
        )
    return _unreachable(address, reason_of(error))


def _unreachable(address: Address, reason: str) -> NodeUnavailable:
    return NodeUnavailable(
        f"cannot reach the node at {address}: {reason}; check the address, or start a node with 'tidemill up'"
    )
