"""The broker of a node without sockets, and a way to ask it through the wire format in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.quiet_node import start_quiet_node
from support.served_apis import served_apis
from support.typos import refuse_typos
from tidemill.server.broker import Broker
from tidemill.server.node import Node
from tidemill.server.requests.call import Call, ReplyBuffers
from tidemill.server.requests.dispatch import BrokerDispatcher
from tidemill.server.traffic import Traffic
from tidemill.wire.apis import APIS_BY_NAME
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_request, decode_response, parse_header

if TYPE_CHECKING:
    from support.table_world import ManualClock, TableWorld

MakeBroker = Callable[..., Awaitable[Broker]]

CORRELATION_ID = 77

# Requests get here without a connection, which would have their handlers loaded.
served_apis()


@pytest.fixture(autouse=True)
def _search_for_typos() -> Iterator[None]:
    refuse_typos(True)
    yield
    refuse_typos(False)


@pytest.fixture
async def make_broker(tmp_path: Path) -> AsyncIterator[MakeBroker]:
    """Starts a node with other settings or clocks than the default, and gives its broker."""
    started: list[Node] = []

    async def make(**options: Any) -> Broker:
        node = await start_quiet_node(tmp_path, **options)
        started.append(node)
        return node.broker

    yield make
    for node in started:
        await node.stop()


@pytest.fixture
async def broker(make_broker: MakeBroker) -> Broker:
    return await make_broker()


@pytest.fixture
def ask() -> Callable[..., Awaitable[Any]]:
    """``await ask(broker, "Metadata", 12, topics=None)`` gives the decoded response.

    ``is_gone``: the client has gone before its request is looked at.
    """

    async def send(broker: Broker, api: str, version: int, /, *, is_gone: bool = False, **body: Any) -> Any:
        key = APIS_BY_NAME[api].key
        frame = encode_request(key, version, CORRELATION_ID, "the-client", body)[4:]
        header = parse_header(frame)
        sent: asyncio.Future[ReplyBuffers] = asyncio.get_running_loop().create_future()
        aborted = ConnectionError("the connection was closed")
        call = Call(
            header,
            decode_request(header, frame),
            "10.1.2.3",
            sent.set_result,
            lambda: sent.set_exception(aborted),
        )
        if is_gone:
            call.hurry()
        BrokerDispatcher(broker, Traffic()).dispatch(call)
        response = b"".join(await sent)
        correlation_id, entity = decode_response(key, version, response[4:])
        assert correlation_id == CORRELATION_ID
        return entity

    return send


@pytest.fixture
def clock() -> ManualClock:
    """Time that passes when a test says so."""
    # Here, because most of the tests need neither Arrow nor RocksDB.
    from support.table_world import ManualClock

    return ManualClock()


@pytest.fixture
async def world(
    make_broker: MakeBroker, ask: Callable[..., Awaitable[Any]], clock: ManualClock
) -> TableWorld:
    """A broker with a manual clock, and short ways to ask it about tables."""
    from support.table_world import TableWorld

    broker = await make_broker(clock_ms=clock)
    return TableWorld(broker, ask, clock)
