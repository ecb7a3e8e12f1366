from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.batches import plain_batch
from support.exchange import Exchange, fetch_part
from support.fake_connection import Peer, make_budget
from tidemill.config.settings import Settings
from tidemill.server import dispatch
from tidemill.server.broker import Broker
from tidemill.server.call import Call
from tidemill.server.dispatch import BrokerDispatcher
from tidemill.server.metrics import RequestMetrics
from tidemill.wire.apis import APIS


@pytest.fixture
async def node() -> AsyncIterator[Exchange]:
    async with Exchange({"t": (1, {})}) as started:
        yield started


def test_every_api_in_the_table_has_a_handler() -> None:
    handled = {*dispatch._HANDLERS, *dispatch._HOT_HANDLERS, dispatch.API_VERSIONS_KEY}
    assert handled == set(APIS)


class FakeBroker:
    def __init__(self, **limits: int) -> None:
        self.settings = Settings(**limits)  # type: ignore[arg-type]
        self.budget = make_budget(self.settings.max_inflight_bytes, self.settings.max_frame_bytes)


def limited(**limits: int) -> tuple[BrokerDispatcher, RequestMetrics]:
    metrics = RequestMetrics()
    return BrokerDispatcher(FakeBroker(**limits), metrics), metrics  # type: ignore[arg-type]


async def test_connections_over_the_limit_are_closed_and_counted() -> None:
    dispatcher, metrics = limited(max_connections=2)
    peers = [Peer(dispatcher) for _ in range(3)]  # type: ignore[arg-type]
    assert [peer.transport.aborted for peer in peers] == [False, False, True]
    assert metrics.connections_refused == 1
    peers[2].lose()
    peers[0].lose()
    assert len(dispatcher.connections) == 1
    assert not Peer(dispatcher).transport.aborted  # type: ignore[arg-type]


async def test_one_address_may_have_a_limit_of_its_own() -> None:
    dispatcher, _ = limited(max_connections_per_ip=1)
    first, second = Peer(dispatcher), Peer(dispatcher)  # type: ignore[arg-type]
    assert (first.transport.aborted, second.transport.aborted) == (False, True)
    second.lose()
    first.lose()
    assert not Peer(dispatcher).transport.aborted  # type: ignore[arg-type]


async def test_addresses_of_one_ipv6_network_count_as_one() -> None:
    dispatcher, _ = limited(max_connections_per_ip=1)
    hosts = ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1")
    peers = [Peer(dispatcher, host=host) for host in hosts]  # type: ignore[arg-type]
    assert [peer.transport.aborted for peer in peers] == [False, True, False]
    for peer in peers:
        peer.lose()
    assert not dispatcher._per_address


async def test_a_flood_of_refused_connections_is_one_log_line_and_one_with_their_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(dispatch, "_now", lambda: now)
    dispatcher, metrics = limited(max_connections=1)
    peers = [Peer(dispatcher) for _ in range(901)]  # type: ignore[arg-type]
    assert metrics.connections_refused == 900
    assert caplog.messages == ["refused a connection of 10.0.0.1: max_connections (1) are open"]
    for now in (1.0, 5.0, 10.0, 11.0, 60.0):  # noqa: B007 - the clock of the dispatcher
        dispatcher.tick()
    more = "connections refused: 899 more in 10 s, most by 10.0.0.1 (899); the last one: "
    assert caplog.messages[1:] == [f"{more}max_connections (1) are open"]
    for peer in peers:
        peer.lose()


async def test_connections_that_are_closed_for_rubbish_do_not_flood_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    dispatcher, metrics = limited()
    for _ in range(100):
        peer = Peer(dispatcher)  # type: ignore[arg-type]
        peer.send(b"GET / HTTP/1.1\r\n\r\n")
        assert peer.is_lost
    assert metrics.connections_closed == 100
    assert len(caplog.messages) == 1
    await dispatcher.close()
    assert "connections closed: 99 more" in caplog.messages[1]


@pytest.mark.parametrize("api", ["Metadata", "Fetch"])
async def test_a_bug_in_a_handler_closes_the_connection_and_is_counted(
    node: Exchange, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(broker: Broker, call: Call) -> dict[str, Any]:
        raise KeyError("a bug")

    def broken_hot(broker: Broker, call: Call) -> None:
        raise KeyError("a bug")

    monkeypatch.setitem(dispatch._HANDLERS, 3, broken)
    monkeypatch.setitem(dispatch._HOT_HANDLERS, 1, broken_hot)
    if api == "Fetch":
        node.fetch(11, fetch_part("t"))
    else:
        node.send("Metadata", 1, topics=[])
    with pytest.raises(AssertionError, match="closed the connection"):
        await node.settle()
    assert node.node._dispatcher._metrics.failures == 1


async def test_an_answer_that_cannot_be_encoded_closes_the_connection(
    node: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unspeakable(broker: Broker, call: Call) -> dict[str, Any]:
        return {"throttle_time_ms": 0, "brokers": [{"node_id": "not a number"}]}

    monkeypatch.setitem(dispatch._HANDLERS, 3, unspeakable)
    node.send("Metadata", 1, topics=[])
    with pytest.raises(AssertionError, match="closed the connection"):
        await node.settle()


async def test_a_stop_answers_what_waits_before_it_closes(node: Exchange) -> None:
    """A long poll is answered at once; a write is answered when it is durable."""
    poll = node.fetch(11, fetch_part("t"), max_wait=2**31 - 1, min_bytes=1)
    await node.settle()
    write = node.node.connect()
    answers: list[Any] = []
    part = {"name": "t", "partition_data": [{"index": 0, "records": plain_batch("v")}]}
    write.send(0, 9, {"acks": -1, "timeout": 60_000, "topic_data": [part]}, answers.append)
    closing = asyncio.get_running_loop().create_task(node.node._dispatcher.close())
    await node.node.settle()
    assert node.client._transport.closed
    assert node.client._transport.sent
    assert not write._transport.closed
    while node.node.flusher.busy:
        node.node.flusher.step()
    await node.node.settle()
    assert write._transport.closed
    assert write._transport.sent
    for client in (node.client, node._writer, write):
        client._connection.connection_lost(None)
    await asyncio.wait_for(closing, 0.9)
    assert not poll.arrived
    assert not answers
