"""Nodes that know nothing but the cluster's protocol, on a network in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar
from uuid import UUID

from support.sim_network import SimNetwork
from support.virtual_loop import current_loop, run_virtual
from tidemill.cluster.frames import decode_response, encode
from tidemill.cluster.handshake import AskingHandshake, ClusterIdentity, PeerInfo
from tidemill.cluster.listener import ClusterListener, Handlers, ListenerLimits, QuickHandlers
from tidemill.cluster.messages import (
    ClusterRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    HelloProof,
    HelloRequest,
    RequestHeader,
)
from tidemill.cluster.peer import PeerContext, Peers
from tidemill.config.values import Address

__all__ = ("PORT", "ClusterNode", "RawPeer", "SeededIds", "heartbeat", "identity_of", "virtually")

T = TypeVar("T")
PORT = 9093
CLUSTER = "harbour"
SECRET = b"known to all"

#: Asks for nothing, and is answered by every ``ClusterNode``.
heartbeat = partial(HeartbeatRequest, partitions=[])


class SeededIds:
    """The same ids and tokens on every run."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def uuid(self) -> UUID:
        return UUID(int=self._rng.getrandbits(128))

    def token(self, size_bytes: int) -> bytes:
        return self._rng.randbytes(size_bytes)


def identity_of(node_id: int, *, cluster: str = CLUSTER, secret: bytes = SECRET) -> ClusterIdentity:
    return ClusterIdentity(cluster, node_id, UUID(int=node_id), secret, lambda: 100 + node_id)


async def _heard(peer: PeerInfo, request: HeartbeatRequest) -> HeartbeatResponse:
    return HeartbeatResponse(request.header.answer())


class ClusterNode:
    """A listener and the connections to others. Node 7 is the host ``n7``."""

    def __init__(
        self,
        network: SimNetwork,
        node_id: int,
        *,
        handlers: Handlers | None = None,
        quick_handlers: QuickHandlers = MappingProxyType({}),
        limits: ListenerLimits | None = None,
        identity: ClusterIdentity | None = None,
        clock_ms: int = 0,
    ) -> None:
        self.network = network
        self.host = f"n{node_id}"
        self.identity = identity or identity_of(node_id)
        self.addresses: dict[int, Address | None] = {
            number: Address(f"n{number}", PORT) for number in range(9)
        }
        transport, ids = network.transport(self.host), SeededIds(node_id)
        self.context = PeerContext(self.identity, transport, ids, lambda: clock_ms)
        self.peers = Peers(self.context, lambda number: self.addresses[number])
        self.handlers: dict[type[ClusterRequest], Any] = {HeartbeatRequest: _heard} | dict(handlers or {})
        self.listener = ClusterListener(
            self.identity,
            self.handlers,
            quick_handlers=quick_handlers,
            transport=transport,
            ids=ids,
            wall_ms=lambda: clock_ms,
            limits=limits,
        )

    @property
    def address(self) -> Address:
        return Address(self.host, PORT)

    async def start(self) -> ClusterNode:
        await self.listener.start(self.address)
        return self

    async def stop(self) -> None:
        await self.peers.close()
        await self.listener.close()

    async def ask(self, node_id: int, *, timeout_ms: int = 1_000) -> HeartbeatResponse:
        """A heartbeat to another node."""
        return await self.peers.request(node_id, heartbeat, HeartbeatResponse, timeout_ms=timeout_ms)


class RawPeer(asyncio.Protocol):
    """A connection that sends what a test says, and keeps the frames that come."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.ended = asyncio.Event()
        self.arrived = asyncio.Event()
        self.transport: Any = None
        self._bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        while len(self._bytes) >= 4 + (length := int.from_bytes(self._bytes[:4], "big")):
            self.frames.append(self._bytes[4 : 4 + length])
            self._bytes = self._bytes[4 + length :]
            self.arrived.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        self.arrived.set()

    def send(self, message: ClusterRequest) -> None:
        self.transport.writelines(encode(message))

    async def frame(self) -> bytes:
        """The next frame; empty if the connection has ended."""
        while not self.frames and not self.ended.is_set():
            self.arrived.clear()
            await self.arrived.wait()
        return self.frames.pop(0) if self.frames else b""

    @classmethod
    async def connect(cls, network: SimNetwork, address: Address, host: str = "n1") -> RawPeer:
        raw = cls()
        await network.transport(host).connect(address, lambda: raw)
        return raw

    @classmethod
    async def proven(cls, network: SimNetwork, address: Address, node_id: int = 1) -> RawPeer:
        """A connection that has shown its proof to the node at ``address``, whose host is ``n<id>``."""
        raw = await cls.connect(network, address, f"n{node_id}")
        handshake = AskingHandshake(identity_of(node_id), int(address.host[1:]), bytes(32))
        header = RequestHeader(1, 0, node_id, 1_000)
        hello: HelloRequest = handshake.hello(header)
        raw.send(hello)
        proof: HelloProof = handshake.prove(header, decode_response(memoryview(await raw.frame())))
        raw.send(proof)
        handshake.finish(decode_response(memoryview(await raw.frame())))
        return raw


def virtually(story: Callable[[SimNetwork], Coroutine[Any, Any, T]], *, seed: int = 1) -> T:
    """Run a story on a network of its own, in virtual time."""

    async def main() -> T:
        return await story(SimNetwork(current_loop()))

    return run_virtual(main, seed=seed)
