"""Asking other nodes: matching answers, time limits, purposes, and what happens when a node is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest

from support.cluster_nodes import PORT, ClusterNode, heartbeat, identity_of, virtually
from support.sim_network import SimNetwork
from tidemill.cluster.codes import cluster_code
from tidemill.cluster.handshake import HANDSHAKE_BYTES_MAX, PeerInfo
from tidemill.cluster.messages import (
    ClusterErrorCode,
    FetchedPartition,
    FetchRequest,
    FetchResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    PartitionId,
    ProbeRequest,
    ProbeResponse,
)
from tidemill.cluster.peer import Peer
from tidemill.config.values import Address
from tidemill.errors import (
    ApiError,
    ConnectionClosed,
    ErrorCode,
    NodeUnavailable,
    ProtocolError,
    TidemillError,
)

fetch = partial(FetchRequest, partitions=[])


async def failure(work: Coroutine[Any, Any, Any]) -> TidemillError:
    with pytest.raises(TidemillError) as caught:
        await work
    return caught.value


async def two_nodes(network: SimNetwork, **options: Any) -> tuple[ClusterNode, ClusterNode]:
    return await ClusterNode(network, 1).start(), await ClusterNode(network, 2, **options).start()


@pytest.mark.parametrize("seed", range(5))
def test_answers_find_their_requests_in_whatever_order_they_come(seed: int) -> None:
    async def story(network: SimNetwork) -> None:
        async def slowly(peer: PeerInfo, request: ProbeRequest) -> ProbeResponse:
            assert peer.node_id == request.header.source == 1
            assert request.header.node_epoch == 101
            await asyncio.sleep(network.loop.rng.random())
            return ProbeResponse(request.header.answer(), suspects=request.suspects)

        one, _ = await two_nodes(network, handlers={ProbeRequest: slowly})

        async def ask(number: int) -> None:
            make = partial(ProbeRequest, suspects={number: 0})
            answer = await one.peers.request(2, make, ProbeResponse, timeout_ms=5_000)
            assert answer.suspects == {number: 0}

        await asyncio.gather(*map(ask, range(50)))
        await one.stop()

    virtually(story, seed=seed)


def test_a_late_answer_fails_its_request_alone_and_is_dropped() -> None:
    async def story(network: SimNetwork) -> None:
        release = asyncio.Event()

        async def held(peer: PeerInfo, request: ProbeRequest) -> ProbeResponse:
            try:
                await release.wait()
            except asyncio.CancelledError:
                await release.wait()  # As if the node were too busy to notice.
            return ProbeResponse(request.header.answer())

        one, two = await two_nodes(network, handlers={ProbeRequest: held})
        await one.ask(2)
        late = await failure(one.peers.request(2, ProbeRequest, ProbeResponse, timeout_ms=50))
        assert late.code is ErrorCode.request_timed_out
        assert "node 2 at n2:9093 sent no Probe answer within 50 ms" in late.message
        release.set()
        for _ in range(3):
            await one.ask(2)
        assert len(two.listener._connections) == 1, "the same one"
        await one.stop()

    virtually(story)


def test_a_silent_connection_fails_with_all_its_requests() -> None:
    async def story(network: SimNetwork) -> None:
        one, _ = await two_nodes(network)
        peer = await Peer.open(2, Address("n2", 9093), one.context)
        network.cut("n2", "n1")
        patient = asyncio.create_task(failure(peer.request(heartbeat, HeartbeatResponse, timeout_ms=60_000)))
        started = network.loop.time()
        while not patient.done():
            error = await failure(peer.request(heartbeat, HeartbeatResponse, timeout_ms=500))
            assert error.code is ErrorCode.request_timed_out
            assert peer.failed == (network.loop.time() - started >= 3)
            await asyncio.sleep(0)
        assert isinstance(await patient, NodeUnavailable)
        again = await failure(peer.request(heartbeat, HeartbeatResponse, timeout_ms=500))
        assert "nothing came from it" in again.message
        network.heal()
        await one.ask(2)

    virtually(story)


def test_an_idle_connection_is_not_silent() -> None:
    async def story(network: SimNetwork) -> None:
        one, _ = await two_nodes(network)
        peer = await Peer.open(2, Address("n2", 9093), one.context)
        await peer.request(heartbeat, HeartbeatResponse, timeout_ms=500)
        await asyncio.sleep(60)
        network.cut("n2", "n1")
        await failure(peer.request(heartbeat, HeartbeatResponse, timeout_ms=500))
        assert not peer.failed
        await peer.close()

    virtually(story)


def test_control_is_not_behind_a_fetch() -> None:
    async def story(network: SimNetwork) -> None:
        parked: list[FetchRequest] = []

        async def park(peer: PeerInfo, request: FetchRequest) -> FetchResponse:
            parked.append(request)
            await asyncio.sleep(3_600)
            raise AssertionError

        one, two = await two_nodes(network, handlers={FetchRequest: park})
        waiting = asyncio.create_task(
            failure(one.peers.request(2, fetch, FetchResponse, timeout_ms=7_000_000, purpose="fetch"))
        )
        await asyncio.sleep(0.1)
        assert len(parked) == 1
        await one.ask(2)
        assert len(two.listener._connections) == 2, "each purpose has a connection of its own"
        one.peers.forget(2)
        assert isinstance(await waiting, NodeUnavailable)

    virtually(story)


def test_an_error_of_the_other_node_is_raised_with_its_code() -> None:
    async def story(network: SimNetwork) -> None:
        async def refuse(peer: PeerInfo, request: ProbeRequest) -> ProbeResponse:
            raise ApiError(ErrorCode.fenced_leader_epoch, "epoch 3 is over; the leader's is 4")

        one, _ = await two_nodes(network, handlers={ProbeRequest: refuse})
        error = await failure(one.peers.request(2, ProbeRequest, ProbeResponse, timeout_ms=500))
        assert (error.code, error.message) == (
            ErrorCode.fenced_leader_epoch,
            "epoch 3 is over; the leader's is 4",
        )

    virtually(story)


def test_an_answer_of_another_kind_fails_the_connection() -> None:
    async def story(network: SimNetwork) -> None:
        async def confuse(peer: PeerInfo, request: ProbeRequest) -> HeartbeatResponse:
            return HeartbeatResponse(request.header.answer())

        one, _ = await two_nodes(network, handlers={ProbeRequest: confuse})
        error = await failure(one.peers.request(2, ProbeRequest, ProbeResponse, timeout_ms=500))
        assert isinstance(error, ProtocolError)
        assert "HeartbeatResponse instead of ProbeResponse" in error.message
        await one.ask(2)

    virtually(story)


def test_a_message_that_is_too_large_harms_no_other() -> None:
    async def story(network: SimNetwork) -> None:
        one, two = await two_nodes(network)
        large = partial(ProbeRequest, suspects=dict.fromkeys(range(2000000), 2**40))
        error = await failure(one.peers.request(2, large, ProbeResponse, timeout_ms=500))
        assert error.code is ErrorCode.message_too_large
        await one.ask(2)
        assert len(two.listener._connections) == 1

    virtually(story)


# --- nodes that are away


def test_a_node_that_is_away_is_tried_again_with_growing_pauses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(network: SimNetwork) -> None:
        one, tries = ClusterNode(network, 1), list[float]()
        connect = one.context.transport.connect

        async def counted(*args: Any) -> Any:
            tries.append(network.loop.time())
            return await connect(*args)

        monkeypatch.setattr(one.context.transport, "connect", counted)
        while network.loop.time() < 6:
            before, tried = network.loop.time(), len(tries)
            error = await failure(one.ask(2))
            assert isinstance(error, NodeUnavailable)
            if len(tries) == tried:
                assert network.loop.time() == before, "told at once"
                assert "tried again in" in error.message
            await asyncio.sleep(0.01)
        pauses = [after - before for before, after in pairwise(tries)]
        expected = [0.05, 0.1, 0.2, 0.4, 0.8, 1, 1]
        assert pauses[:7] == [pytest.approx(pause, abs=0.03) for pause in expected]
        await ClusterNode(network, 2).start()
        await asyncio.sleep(1)
        await one.ask(2)
        await one.stop()

    caplog.set_level(logging.INFO)
    virtually(story)
    messages = [record.message for record in caplog.records if record.name == "tidemill.cluster.peer"]
    assert len(messages) == 2, "that it is away and that it is back, each once"
    assert "cannot reach node 2 at n2:9093" in messages[0]
    assert "is reached again" in messages[1]


def test_many_who_ask_at_once_share_one_connection() -> None:
    async def story(network: SimNetwork) -> None:
        one, two = await two_nodes(network)
        await asyncio.gather(*(one.ask(2) for _ in range(20)))
        assert len(two.listener._connections) == 1

    virtually(story)


def test_who_asks_waits_no_longer_than_it_said_and_others_go_on() -> None:
    async def story(network: SimNetwork) -> None:
        one, _ = await two_nodes(network)
        network.cut("n1", "n2")
        patient = asyncio.create_task(one.ask(2, timeout_ms=4_000))
        error = await failure(one.ask(2, timeout_ms=100))
        assert isinstance(error, NodeUnavailable)
        assert network.loop.time() == pytest.approx(0.1)
        network.heal()
        await patient
        await one.stop()

    virtually(story)


def test_a_node_without_an_address_is_unavailable() -> None:
    async def story(network: SimNetwork) -> None:
        one = ClusterNode(network, 1)
        one.addresses[2] = None
        assert "node 2 has no address" in (await failure(one.ask(2))).message

    virtually(story)


def test_forgetting_a_node_uses_its_new_address_at_once() -> None:
    async def story(network: SimNetwork) -> None:
        one, _ = await two_nodes(network)
        one.addresses[2] = Address("nowhere", 1)
        await failure(one.ask(2))
        one.addresses[2] = Address("n2", 9093)
        assert isinstance(await failure(one.ask(2)), NodeUnavailable)
        one.peers.forget(2)
        await one.ask(2)

    virtually(story)


def test_forgetting_a_node_that_is_being_connected_to_fails_those_who_wait() -> None:
    async def story(network: SimNetwork) -> None:
        one, two = await two_nodes(network)
        network.cut("n1", "n2")
        waiting = asyncio.create_task(failure(one.ask(2)))
        await asyncio.sleep(0.1)
        one.peers.forget(2)
        assert isinstance(await waiting, NodeUnavailable)
        assert network.loop.time() == pytest.approx(0.1)
        network.heal()
        await asyncio.sleep(1)
        assert len(two.listener._connections) == 0

    virtually(story)


def test_a_node_that_was_restarted_is_reached_again() -> None:
    async def story(network: SimNetwork) -> None:
        one, _ = await two_nodes(network)
        await one.ask(2)
        network.reset("n2")
        await asyncio.sleep(0.1)
        assert isinstance(await failure(one.ask(2)), NodeUnavailable)
        await ClusterNode(network, 2).start()
        await asyncio.sleep(1)
        await one.ask(2)

    virtually(story)


def test_after_closing_nothing_is_asked() -> None:
    async def story(network: SimNetwork) -> None:
        one, two = await two_nodes(network)
        await one.ask(2)
        network.cut("n2", "n1")
        waiting = asyncio.create_task(failure(one.ask(2)))
        await asyncio.sleep(0.01)
        await one.peers.close()
        assert isinstance(await waiting, NodeUnavailable)
        assert isinstance(await failure(one.ask(2)), ConnectionClosed)
        await asyncio.sleep(1)
        assert len(two.listener._connections) == 0
        await one.peers.close()

    virtually(story)


# --- nodes that are not of this cluster


@pytest.mark.parametrize(
    ("other", "code", "word"),
    [
        (identity_of(2, secret=b"another"), ClusterErrorCode.WRONG_SECRET, "cluster_secret"),
        (identity_of(2, cluster="lagoon"), ClusterErrorCode.WRONG_CLUSTER, "setting cluster"),
        (identity_of(3), ClusterErrorCode.INVALID_REQUEST, "node 3 answers at the address of node 2"),
    ],
)
def test_a_node_that_is_not_of_this_cluster_is_refused(
    other: Any, code: ClusterErrorCode, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(network: SimNetwork) -> None:
        one, two = await two_nodes(network, identity=other)
        error = await failure(one.ask(2))
        assert isinstance(error, NodeUnavailable)
        assert word in error.message
        assert isinstance(error.__cause__, TidemillError)
        assert cluster_code(error.__cause__) is code
        await asyncio.sleep(0.1)
        assert len(two.listener._connections) == 0

    virtually(story)
    assert any(word in record.message for record in caplog.records)


def test_frames_are_small_before_the_proof() -> None:
    """What answers may be anybody: no memory is taken for what it announces."""

    async def story(network: SimNetwork) -> None:
        class Stranger(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                assert isinstance(transport, asyncio.Transport)
                transport.write((HANDSHAKE_BYTES_MAX + 1).to_bytes(4, "big"))

        listener = await network.transport("n2").listen(Address("n2", PORT), Stranger, 1)
        await listener.start_serving()
        error = await failure(ClusterNode(network, 1).ask(2))
        assert isinstance(error.__cause__, ProtocolError)
        assert "a frame of 65537 bytes" in error.message
        assert network.loop.time() < 1

    virtually(story)


def test_clocks_that_differ_are_noticed() -> None:
    async def story(network: SimNetwork) -> None:
        one, _ = await two_nodes(network, clock_ms=12_345)
        assert one.peers.clocks_ahead_ms() == {}
        await one.ask(2)
        assert one.peers.clocks_ahead_ms() == {2: 12_345}

    virtually(story)


def test_large_answers_arrive_whole() -> None:
    async def story(network: SimNetwork) -> None:
        records = [bytes([number]) * 300_000 for number in range(20)]

        async def give(peer: PeerInfo, request: FetchRequest) -> FetchResponse:
            partitions = [
                FetchedPartition(PartitionId(UUID(int=1), number), 1, 0, records=memoryview(each))
                for number, each in enumerate(records)
            ]
            return FetchResponse(request.header.answer(), partitions)

        one, _ = await two_nodes(network, handlers={FetchRequest: give})
        for _ in range(3):
            answer = await one.peers.request(2, fetch, FetchResponse, timeout_ms=5_000, purpose="fetch")
            assert [bytes(each.records) for each in answer.partitions] == records
        await one.stop()

    virtually(story)


def test_heartbeats_reach_their_handler() -> None:
    """The helper's own answer, so that the other tests mean something."""

    async def story(network: SimNetwork) -> None:
        heard: list[int] = []

        async def hear(peer: PeerInfo, request: HeartbeatRequest) -> HeartbeatResponse:
            heard.append(peer.node_id)
            return HeartbeatResponse(request.header.answer())

        one, two = await two_nodes(network, handlers={HeartbeatRequest: hear})
        await one.ask(2)
        assert heard == [1]
        assert (await two.ask(1)).stale == []

    virtually(story)
