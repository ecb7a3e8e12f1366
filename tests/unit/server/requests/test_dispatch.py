from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from support.batches import plain_batch
from support.exchange import Exchange, fetch_part
from support.fake_connection import Peer, make_budget
from support.served_apis import served_apis
from tidemill.config.settings import Settings
from tidemill.server.broker import Broker
from tidemill.server.requests import dispatch
from tidemill.server.requests.call import Call
from tidemill.server.requests.dispatch import BrokerDispatcher
from tidemill.server.traffic import Traffic


@pytest.fixture
async def node() -> AsyncIterator[Exchange]:
    async with Exchange({"t": (1, {})}) as started:
        yield started


class FakeShare:
    """Notes which connections are gone: what their members held goes to others then."""

    def __init__(self) -> None:
        self.closed: list[int] = []

    def connection_closed(self, connection: int) -> None:
        self.closed.append(connection)


class FakeFinder:
    is_isolated = False


class FakeBroker:
    def __init__(self, **limits: Any) -> None:
        self.settings = Settings(**limits)
        self.find = FakeFinder()
        self.sharing = FakeShare()
        self.budget = make_budget(self.settings.max_inflight_bytes, self.settings.max_frame_bytes)


def limited(**limits: int) -> tuple[BrokerDispatcher, Traffic]:
    traffic = Traffic()
    return BrokerDispatcher(FakeBroker(**limits), traffic), traffic  # type: ignore[arg-type]


def peer_of(dispatcher: BrokerDispatcher, **options: Any) -> Peer:
    """A client of the real dispatcher, where other tests have one that answers by hand."""
    return Peer(dispatcher, **options)  # type: ignore[arg-type]


async def test_connections_over_the_limit_are_closed_and_counted() -> None:
    dispatcher, traffic = limited(max_connections=2)
    peers = [peer_of(dispatcher) for _ in range(3)]
    assert [peer.transport.aborted for peer in peers] == [False, False, True]
    assert traffic.connections_refused == 1
    peers[2].lose()
    peers[0].lose()
    assert len(dispatcher.connections) == 1
    assert not peer_of(dispatcher).transport.aborted


async def test_share_sessions_learn_of_the_end_of_their_connection_once_and_of_no_other() -> None:
    broker = FakeBroker(max_connections=2)
    dispatcher = BrokerDispatcher(broker, Traffic())  # type: ignore[arg-type]
    first, second, refused = (peer_of(dispatcher) for _ in range(3))
    first_id, second_id = (connection.id for connection in dispatcher.connections)
    refused.lose()
    assert broker.sharing.closed == []
    second.lose()
    assert broker.sharing.closed == [second_id]
    first.lose()
    assert broker.sharing.closed == [second_id, first_id]


async def test_an_isolated_node_closes_connections_and_takes_none_until_it_is_heard_again() -> None:
    broker, traffic = FakeBroker(), Traffic()
    dispatcher = BrokerDispatcher(broker, traffic)  # type: ignore[arg-type]
    peer = peer_of(dispatcher)
    aborted = []
    for broker.find.is_isolated in (False, True):
        await dispatcher.leave_to_others()
        aborted.append(peer.transport.aborted)
    aborted.append(peer_of(dispatcher).transport.aborted)
    assert (traffic.connections_closed, traffic.connections_refused) == (1, 1)
    broker.find.is_isolated = False
    aborted.append(peer_of(dispatcher).transport.aborted)
    assert aborted == [False, True, True, False]


async def test_one_address_may_have_a_limit_of_its_own() -> None:
    dispatcher, _ = limited(max_connections_per_ip=1)
    first, second = peer_of(dispatcher), peer_of(dispatcher)
    assert (first.transport.aborted, second.transport.aborted) == (False, True)
    second.lose()
    first.lose()
    assert not peer_of(dispatcher).transport.aborted


async def test_addresses_of_one_ipv6_network_count_as_one() -> None:
    dispatcher, _ = limited(max_connections_per_ip=1)
    hosts = ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1")
    peers = [peer_of(dispatcher, host=host) for host in hosts]
    assert [peer.transport.aborted for peer in peers] == [False, True, False]
    for peer in peers:
        peer.lose()
    assert not dispatcher._per_address


async def test_a_flood_of_refused_connections_is_one_log_line_and_one_with_their_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(dispatch, "_now", lambda: now)
    dispatcher, traffic = limited(max_connections=1)
    peers = [peer_of(dispatcher) for _ in range(901)]
    assert traffic.connections_refused == 900
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
    dispatcher, traffic = limited()
    for _ in range(100):
        peer = peer_of(dispatcher)
        peer.send(b"GET / HTTP/1.1\r\n\r\n")
        assert peer.is_lost
    assert traffic.connections_closed == 100
    assert len(caplog.messages) == 1
    await dispatcher.close()
    assert "connections closed: 99 more" in caplog.messages[1]


def handle(monkeypatch: pytest.MonkeyPatch, key: int, handler: Any) -> None:
    """Have another handler for an API."""
    rows = served_apis()
    monkeypatch.setitem(rows, key, replace(rows[key], handler=handler))


@pytest.mark.parametrize("api", ["Metadata", "Fetch"])
async def test_a_bug_in_a_handler_closes_the_connection_and_is_counted(
    node: Exchange, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(broker: Broker, call: Call) -> dict[str, Any]:
        raise KeyError("a bug")

    def broken_hot(broker: Broker, call: Call) -> None:
        raise KeyError("a bug")

    handle(monkeypatch, 3, broken)
    handle(monkeypatch, 1, broken_hot)
    if api == "Fetch":
        node.fetch(11, fetch_part("t"))
    else:
        node.send("Metadata", 1, topics=[])
    with pytest.raises(AssertionError, match="closed the connection"):
        await node.settle()
    assert node.node.dispatcher._traffic.failures == 1


async def test_an_answer_that_cannot_be_encoded_closes_the_connection(
    node: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unspeakable(broker: Broker, call: Call) -> dict[str, Any]:
        return {"throttle_time_ms": 0, "brokers": [{"node_id": "not a number"}]}

    handle(monkeypatch, 3, unspeakable)
    node.send("Metadata", 1, topics=[])
    with pytest.raises(AssertionError, match="closed the connection"):
        await node.settle()


async def test_a_stop_answers_what_waits_before_it_closes(
    node: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long poll is answered at once; a write is answered when it is durable."""
    # Nobody is waited for until the time for it is over.
    monkeypatch.setattr(dispatch, "_CLOSE_TIMEOUT_SECONDS", 10_000)
    poll = node.fetch(11, fetch_part("t"), max_wait=2**31 - 1, min_bytes=1)
    await node.settle()
    write = node.node.connect()
    answers: list[Any] = []
    part = {"name": "t", "partition_data": [{"index": 0, "records": plain_batch("v")}]}
    write.send(0, 9, {"acks": -1, "timeout": 60_000, "topic_data": [part]}, answers.append)
    closing = asyncio.get_running_loop().create_task(node.node.dispatcher.close())
    await node.node.settle()
    assert node.client.stream.closed
    assert node.client.stream.sent
    closed_before = write.stream.closed
    while node.node.flusher.busy:
        node.node.flusher.step()
    await node.node.settle()
    assert (closed_before, write.stream.closed) == (False, True)
    assert write.stream.sent
    for client in (node.client, node._writer, write):
        client.connection.connection_lost(None)
    await asyncio.wait_for(closing, 120)
    assert not poll.arrived
    assert not answers
