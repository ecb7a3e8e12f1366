"""Connections in memory: order, delays, cuts, ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from support.sim_network import SimNetwork
from support.virtual_loop import current_loop, run_virtual
from tidemill.config.values import Address

T = TypeVar("T")
SERVER = Address("server", 1)


class Sink(asyncio.Protocol):
    """Keeps what arrives."""

    def __init__(self) -> None:
        self.received = b""
        self.is_open = True
        self.error: Exception | None = None
        self.transport: Any = None
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open, self.error = False, exc

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False


async def connected() -> tuple[SimNetwork, Sink, Sink]:
    network = SimNetwork(current_loop())
    near, far = Sink(), Sink()
    listener = await network.transport("server").listen(SERVER, lambda: far, 10)
    await listener.start_serving()
    await network.transport("client").connect(SERVER, lambda: near)
    return network, near, far


def virtually(story: Callable[[], Coroutine[Any, Any, T]], seed: int = 1) -> T:
    return run_virtual(story, seed=seed)


@pytest.mark.parametrize("seed", range(20))
def test_bytes_arrive_in_order_in_both_directions(seed: int) -> None:
    async def story() -> None:
        _, near, far = await connected()
        for number in range(50):
            near.transport.write(b"%d," % number)
            far.transport.writelines([b"%d" % number, b";"])
            await asyncio.sleep(0.0005 * (number % 3))
        await asyncio.sleep(1)
        assert far.received == b"".join(b"%d," % number for number in range(50))
        assert near.received == b"".join(b"%d;" % number for number in range(50))

    virtually(story, seed)


def test_nobody_is_reached_where_nobody_listens() -> None:
    async def story() -> None:
        network, _, _ = await connected()
        with pytest.raises(ConnectionRefusedError):
            await network.transport("client").connect(Address("server", 2), Sink)
        with pytest.raises(OSError, match="in use"):
            await network.transport("server").listen(SERVER, Sink, 10)

    virtually(story)


def test_a_cut_holds_bytes_back_until_it_is_healed() -> None:
    async def story() -> None:
        network, near, far = await connected()
        network.cut("client", "server")
        near.transport.write(b"held")
        far.transport.write(b"not held")
        await asyncio.sleep(100)
        assert far.received == b""
        assert near.received == b"not held"
        network.heal()
        await asyncio.sleep(1)
        assert far.received == b"held"

    virtually(story)


def test_a_connection_through_a_cut_waits() -> None:
    async def story() -> None:
        network, _, _ = await connected()
        network.cut("server", "client")
        connecting = asyncio.ensure_future(network.transport("client").connect(SERVER, Sink))
        await asyncio.sleep(100)
        assert not connecting.done()
        network.heal()
        await asyncio.sleep(1)
        assert connecting.done()

    virtually(story)


def test_what_was_written_before_a_close_arrives_before_the_end() -> None:
    async def story() -> None:
        _, near, far = await connected()
        near.transport.write(b"last words")
        near.transport.close()
        await asyncio.sleep(1)
        assert far.received == b"last words"
        assert not far.is_open
        assert far.error is None

    virtually(story)


def test_a_host_that_is_gone_resets_its_connections() -> None:
    async def story() -> None:
        network, near, _ = await connected()
        network.reset("server")
        await asyncio.sleep(1)
        assert isinstance(near.error, ConnectionResetError)
        assert not near.is_open
        with pytest.raises(ConnectionRefusedError):
            await network.transport("client").connect(SERVER, Sink)

    virtually(story)


def test_a_writer_is_paused_while_nobody_reads() -> None:
    async def story() -> None:
        _, near, far = await connected()
        far.transport.pause_reading()
        near.transport.write(bytes(1_000_000))
        assert near.paused
        await asyncio.sleep(100)
        assert far.received == b""
        far.transport.resume_reading()
        await asyncio.sleep(1)
        assert len(far.received) == 1_000_000
        assert not near.paused

    virtually(story)
