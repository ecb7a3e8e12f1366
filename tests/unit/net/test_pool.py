"""Connections are opened once, by whatever way they are told to, and replaced when they have failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tidemill.config.values import Address
from tidemill.errors import ConnectionClosed, NodeUnavailable
from tidemill.net.pool import ConnectionPool
from tidemill.net.transport import Listener
from tidemill.wire.encode import encode_response
from tidemill.wire.requests import parse_header

HERE, THERE, NOWHERE = Address("here", 1), Address("there", 2), Address("nowhere", 3)
API_VERSIONS = 18


class Peer(asyncio.Transport):
    """The other end of a connection, in memory: it answers ApiVersions in the next turn of the loop."""

    def __init__(self, protocol: Any) -> None:
        super().__init__()
        self._protocol = protocol

    def write(self, data: Any) -> None:
        correlation_id = parse_header(bytes(data)[4:]).correlation_id
        body = {"api_keys": [{"api_key": API_VERSIONS, "min_version": 0, "max_version": 0}]}
        answer = encode_response(API_VERSIONS, 0, correlation_id, body)
        asyncio.get_running_loop().call_soon(self._answer, bytes(answer))

    def _answer(self, data: bytes) -> None:
        self._protocol.get_buffer(len(data))[: len(data)] = data
        self._protocol.buffer_updated(len(data))

    def close(self) -> None:
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def break_off(self) -> None:
        self._protocol.connection_lost(OSError("broken"))


class Network:
    """Opens connections in memory, to every address but one."""

    def __init__(self) -> None:
        self.opened: list[Address] = []
        self.peers: list[Peer] = []
        self.may_open = asyncio.Event()
        self.may_open.set()
        #: One permit for every connection that was asked for.
        self.asked = asyncio.Semaphore(0)

    async def listen(
        self, address: Address, protocol: Callable[[], asyncio.BaseProtocol], backlog: int
    ) -> Listener:
        raise NotImplementedError

    async def connect(
        self, address: Address, protocol: Callable[[], asyncio.BaseProtocol]
    ) -> asyncio.Transport:
        self.opened.append(address)
        self.asked.release()
        await self.may_open.wait()
        if address == NOWHERE:
            raise ConnectionRefusedError(111, "refused")
        self.peers.append(Peer(protocol()))
        return self.peers[-1]


@pytest.fixture
async def network() -> Network:
    return Network()


@pytest.fixture
def pool(network: Network) -> ConnectionPool:
    return ConnectionPool(client_id="test", transport=network)


async def test_a_connection_is_opened_once_per_address_and_purpose(
    network: Network, pool: ConnectionPool
) -> None:
    connected_before = pool.was_connected
    first = await pool.get(HERE)
    assert (connected_before, pool.was_connected) == (False, True)
    assert await pool.get(HERE) is first
    assert first.served == {API_VERSIONS: (0, 0)}
    assert await pool.get(HERE, "fetch") is not first
    assert await pool.get(THERE) is not first
    assert network.opened == [HERE, HERE, THERE]
    await pool.close()


async def test_callers_that_need_the_same_connection_open_it_together(
    network: Network, pool: ConnectionPool
) -> None:
    network.may_open.clear()
    waiting = [asyncio.ensure_future(pool.get(HERE)) for _ in range(3)]
    other = asyncio.ensure_future(pool.get(THERE))
    for _ in range(2):
        await network.asked.acquire()
    network.may_open.set()
    assert len({id(connection) for connection in await asyncio.gather(*waiting)}) == 1
    await other
    assert network.opened == [HERE, THERE]
    await pool.close()


async def test_a_connection_that_failed_is_replaced(network: Network, pool: ConnectionPool) -> None:
    first = await pool.get(HERE)
    network.peers[0].break_off()
    assert first.failed
    assert await pool.get(HERE) is not first
    await pool.close()


async def test_the_first_address_that_answers_is_taken_and_kept(
    network: Network, pool: ConnectionPool
) -> None:
    found = await pool.get_any([NOWHERE, THERE, HERE])
    assert found.address == THERE
    assert await pool.get_any([NOWHERE, HERE, THERE]) is found
    assert network.opened == [NOWHERE, THERE]
    with pytest.raises(NodeUnavailable, match="cannot reach the node at nowhere:3: Connection refused"):
        await pool.get_any([NOWHERE])
    await pool.close()


async def test_a_closed_pool_opens_nothing(network: Network, pool: ConnectionPool) -> None:
    first = await pool.get(HERE)
    network.may_open.clear()
    late = asyncio.ensure_future(pool.get(THERE))
    for _ in range(2):
        await network.asked.acquire()
    await pool.close()
    network.may_open.set()
    with pytest.raises(ConnectionClosed):
        await late
    with pytest.raises(ConnectionClosed):
        await pool.get(HERE)
    assert first.failed
