"""Nodes over real sockets, with and without TLS, on either event loop."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pytest
import uvloop

from support.cluster_nodes import SeededIds, heartbeat, identity_of
from tidemill.cluster.handshake import PeerInfo
from tidemill.cluster.listener import ClusterListener, Handlers
from tidemill.cluster.messages import (
    FetchedPartition,
    FetchRequest,
    FetchResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    KafkaRequest,
    KafkaResponse,
    PartitionId,
)
from tidemill.cluster.peer import PeerContext, Peers
from tidemill.config.values import Address
from tidemill.errors import NodeUnavailable
from tidemill.net.transport import TcpTransport

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
RECORDS = [bytes([number]) * (1024 * 1024 + number) for number in range(5)]


class Contexts(NamedTuple):
    """TLS of a cluster: what a node listens with, and what it connects with."""

    server: ssl.SSLContext
    client: ssl.SSLContext

    @property
    def transport(self) -> TcpTransport:
        return TcpTransport(server_tls=self.server, client_tls=self.client)


def make_contexts(directory: Path, name: str) -> Contexts:
    """A certificate that signs itself, for 127.0.0.1; whoever connects trusts no other."""
    key, certificate = directory / f"{name}.key", directory / f"{name}.pem"
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name}"
    )
    files = ["-keyout", str(key), "-out", str(certificate), "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    return Contexts(server, ssl.create_default_context(cafile=str(certificate)))


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    return make_contexts(tmp_path_factory.mktemp("tls"), "ours")


async def hear(peer: PeerInfo, request: HeartbeatRequest) -> HeartbeatResponse:
    return HeartbeatResponse(request.header.answer())


async def give(peer: PeerInfo, request: FetchRequest) -> FetchResponse:
    partitions = [
        FetchedPartition(PartitionId(UUID(int=1), number), 1, 0, records=memoryview(each))
        for number, each in enumerate(RECORDS)
    ]
    return FetchResponse(request.header.answer(), partitions)


async def echo(peer: PeerInfo, request: KafkaRequest) -> KafkaResponse:
    return KafkaResponse(request.header.answer(), request.frame)


class Pair:
    """Node 2 listens, node 1 asks."""

    def __init__(self, server: TcpTransport, client: TcpTransport) -> None:
        handlers: Handlers = {HeartbeatRequest: hear, FetchRequest: give, KafkaRequest: echo}
        self.address: Address | None = None
        self.listener = ClusterListener(
            identity_of(2), handlers, transport=server, ids=SeededIds(2), wall_ms=lambda: 0
        )
        context = PeerContext(identity_of(1), client, SeededIds(1), lambda: 0)
        self.peers = Peers(context, lambda _: self.address)

    async def __aenter__(self) -> Pair:
        self.address = await self.listener.start(Address("127.0.0.1", 0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.peers.close()
        await self.listener.close()

    async def ask(self) -> HeartbeatResponse:
        return await self.peers.request(2, heartbeat, HeartbeatResponse, timeout_ms=30_000)


def run(
    story: Callable[[], Coroutine[Any, Any, None]], new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(story())


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_nodes_ask_each_other_over_sockets(
    is_encrypted: bool, new_loop: Callable[[], asyncio.AbstractEventLoop], contexts: Contexts
) -> None:
    async def story() -> None:
        transport = contexts.transport if is_encrypted else TcpTransport()
        async with Pair(transport, transport) as pair:
            frame = memoryview(bytes(range(256)) * 4_000)
            fetch = partial(FetchRequest, partitions=[])
            fetched, echoed, _ = await asyncio.gather(
                pair.peers.request(2, fetch, FetchResponse, timeout_ms=30_000, purpose="fetch"),
                pair.peers.request(2, partial(KafkaRequest, frame=frame), KafkaResponse, timeout_ms=30_000),
                asyncio.gather(*(pair.ask() for _ in range(20))),
            )
            assert [bytes(each.records) for each in fetched.partitions] == RECORDS
            assert echoed.frame == frame
            assert len(pair.listener._connections) == 2
        assert pair.listener.bytes.used_bytes == 0

    run(story, new_loop)


async def why_not(pair: Pair) -> str:
    with pytest.raises(NodeUnavailable) as caught:
        await pair.ask()
    return caught.value.message


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_certificate_that_is_not_trusted_is_named(
    new_loop: Callable[[], asyncio.AbstractEventLoop], contexts: Contexts, tmp_path: Path
) -> None:
    async def story() -> None:
        async with Pair(contexts.transport, make_contexts(tmp_path, "others").transport) as pair:
            message = await why_not(pair)
        assert "certificate verify failed" in message

    run(story, new_loop)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_tls_and_plain_text_do_not_meet(
    new_loop: Callable[[], asyncio.AbstractEventLoop], contexts: Contexts
) -> None:
    async def story() -> None:
        for server, client in ((TcpTransport(), contexts.transport), (contexts.transport, TcpTransport())):
            async with Pair(server, client) as pair:
                assert "cannot reach node 2" in await why_not(pair)

    run(story, new_loop)


async def test_a_node_that_does_not_run_is_named_with_its_address() -> None:
    async with Pair(TcpTransport(), TcpTransport()) as pair:
        await pair.listener.close()
        assert f"cannot reach node 2 at {pair.address}: Connection refused" in await why_not(pair)
