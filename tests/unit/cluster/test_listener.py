"""Being asked by other nodes: order, errors, limits, deadlines; and anything that is sent ends well."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any
from uuid import UUID

import msgspec
import pytest

from support.cluster_nodes import ClusterNode, RawPeer, identity_of, virtually
from support.sim_network import SimNetwork
from tidemill.cluster.frames import decode_response, encode
from tidemill.cluster.handshake import HANDSHAKE_BYTES_MAX, AskingHandshake, PeerInfo
from tidemill.cluster.listener import ListenerLimits
from tidemill.cluster.messages import (
    AppendRequest,
    AppendResponse,
    ClusterErrorCode,
    ClusterResponse,
    ErrorResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    KafkaRequest,
    KafkaResponse,
    MetadataProposalResponse,
    PartitionId,
    ProbeRequest,
    ProbeResponse,
    ProposeMetadataRequest,
    RequestHeader,
    ResponseHeader,
)
from tidemill.errors import ApiError, ConfigError, ErrorCode


def header(number: int = 1, *, source: int = 1, timeout_ms: int = 60_000, version: int = 1) -> RequestHeader:
    return RequestHeader(version, number, source, timeout_ms)


async def answer_to(raw: RawPeer) -> ClusterResponse:
    frame = await raw.frame()
    assert frame, "the connection has ended"
    return decode_response(memoryview(frame))


async def code_of(raw: RawPeer) -> tuple[int, ClusterErrorCode]:
    response = await answer_to(raw)
    assert isinstance(response, ErrorResponse)
    return response.header.correlation_id, ClusterErrorCode(response.header.error_code)


def handlers_of(network: SimNetwork, log: list[Any]) -> dict[Any, Any]:
    async def probe(peer: PeerInfo, request: ProbeRequest) -> ProbeResponse:
        """Waits for as long as it is told."""
        log.append(("start", request.target))
        try:
            await asyncio.sleep((request.target or 0) / 1000)
        except asyncio.CancelledError:
            log.append(("cancelled", request.target))
            raise
        log.append(("end", request.target))
        return ProbeResponse(request.header.answer())

    async def kafka(peer: PeerInfo, request: KafkaRequest) -> KafkaResponse:
        """Answers with as many bytes as it is told."""
        log.append(("kafka", len(request.frame)))
        return KafkaResponse(request.header.answer(), memoryview(bytes(int(bytes(request.frame)))))

    return {ProbeRequest: probe, KafkaRequest: kafka}


# --- requests and answers


@pytest.mark.parametrize("seed", range(5))
def test_requests_start_in_order_and_run_side_by_side(seed: int) -> None:
    async def story(network: SimNetwork) -> None:
        log: list[Any] = []
        two = await ClusterNode(network, 2, handlers=handlers_of(network, log)).start()
        raw = await RawPeer.proven(network, two.address)
        waits = [500, 400, 300, 200, 100]
        for number, wait in enumerate(waits):
            raw.send(ProbeRequest(header(number), wait))
        numbers = [(await answer_to(raw)).header.correlation_id for _ in waits]
        assert [each for each in log if each[0] == "start"] == [("start", wait) for wait in waits]
        assert numbers == [4, 3, 2, 1, 0]

    virtually(story, seed=seed)


def test_what_a_handler_raises_is_answered_with_its_code(caplog: pytest.LogCaptureFixture) -> None:
    async def story(network: SimNetwork) -> None:
        async def refuse(peer: PeerInfo, request: ProbeRequest) -> ProbeResponse:
            raise ApiError(ErrorCode.not_controller, "ask node 3")

        async def break_(peer: PeerInfo, request: KafkaRequest) -> KafkaResponse:
            raise ZeroDivisionError("a bug")

        async def time_out(peer: PeerInfo, request: ProposeMetadataRequest) -> MetadataProposalResponse:
            raise TimeoutError("of something else")

        async def mistake(peer: PeerInfo, request: AppendRequest) -> AppendResponse:
            return AppendResponse(ResponseHeader(4711), 0)

        two = ClusterNode(network, 2)
        two.handlers |= {
            ProbeRequest: refuse,
            KafkaRequest: break_,
            ProposeMetadataRequest: time_out,
            AppendRequest: mistake,
        }
        raw = await RawPeer.proven(network, (await two.start()).address)
        raw.send(ProbeRequest(header(1)))
        response = await answer_to(raw)
        assert response == ErrorResponse(
            ResponseHeader(1, int(ClusterErrorCode.NOT_CONTROLLER), "ask node 3")
        )
        raw.send(KafkaRequest(header(2), memoryview(b"")))
        assert await code_of(raw) == (2, ClusterErrorCode.UNKNOWN)
        raw.send(ProposeMetadataRequest(header(3), msgspec.Raw(msgspec.msgpack.encode(1))))
        assert await code_of(raw) == (3, ClusterErrorCode.UNKNOWN)
        raw.send(AppendRequest(header(4), PartitionId(UUID(int=1), 0), memoryview(b""), 1, 1))
        assert await code_of(raw) == (4, ClusterErrorCode.UNKNOWN)

    virtually(story)
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(logged) == 3
    assert "KafkaRequest of node 1 failed" in logged[0].message


def test_a_quick_handler_answers_in_the_turn_of_its_request_or_leaves_it_to_the_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(network: SimNetwork) -> None:
        log: list[Any] = []

        def quick(peer: PeerInfo, request: ProbeRequest) -> ProbeResponse | None:
            if request.target == 1:
                raise ApiError(ErrorCode.not_controller, "ask node 3")
            if request.target == 2:
                raise ZeroDivisionError("a bug")
            return ProbeResponse(request.header.answer()) if request.target == 3 else None

        handlers = handlers_of(network, log)
        two = await ClusterNode(network, 2, handlers=handlers, quick_handlers={ProbeRequest: quick}).start()
        raw = await RawPeer.proven(network, two.address)
        raw.send(ProbeRequest(header(4), 4))
        for target in (1, 2, 3):
            raw.send(ProbeRequest(header(target), target))
        raw.send(ProbeRequest(header(5, version=9), 3))
        assert await code_of(raw) == (1, ClusterErrorCode.NOT_CONTROLLER)
        assert await code_of(raw) == (2, ClusterErrorCode.UNKNOWN)
        assert await answer_to(raw) == ProbeResponse(ResponseHeader(3))
        assert await code_of(raw) == (5, ClusterErrorCode.UNSUPPORTED_VERSION)
        assert await answer_to(raw) == ProbeResponse(ResponseHeader(4))
        assert log == [("start", 4), ("end", 4)], "only what it left"
        assert two.listener.bytes.used_bytes == 0

    virtually(story)
    assert "ProbeRequest of node 1 failed" in caplog.text


@pytest.mark.parametrize("result", [object(), "x" * 17_000_000])
def test_an_answer_that_cannot_be_sent_is_an_error(result: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def story(network: SimNetwork) -> None:
        async def propose(peer: PeerInfo, request: ProposeMetadataRequest) -> MetadataProposalResponse:
            return MetadataProposalResponse(request.header.answer(), result)

        two = await ClusterNode(network, 2, handlers={ProposeMetadataRequest: propose}).start()
        raw = await RawPeer.proven(network, two.address)
        raw.send(ProposeMetadataRequest(header(9), msgspec.Raw(msgspec.msgpack.encode(1))))
        assert await code_of(raw) == (9, ClusterErrorCode.UNKNOWN)

    virtually(story)
    assert "cannot be sent" in caplog.text


def test_a_request_that_takes_longer_than_its_sender_waits_is_cancelled() -> None:
    async def story(network: SimNetwork) -> None:
        log: list[Any] = []
        two = await ClusterNode(network, 2, handlers=handlers_of(network, log)).start()
        raw = await RawPeer.proven(network, two.address)
        raw.send(ProbeRequest(header(5, timeout_ms=100), 60_000))
        assert await code_of(raw) == (5, ClusterErrorCode.REQUEST_TIMED_OUT)
        assert log == [("start", 60_000), ("cancelled", 60_000)]
        raw.send(ProbeRequest(header(6, timeout_ms=-5), 1))
        assert await code_of(raw) == (6, ClusterErrorCode.REQUEST_TIMED_OUT)

    virtually(story)


def test_requests_that_are_not_understood_are_answered_and_harm_no_other() -> None:
    async def story(network: SimNetwork) -> None:
        two = await ClusterNode(network, 2).start()
        raw = await RawPeer.proven(network, two.address)
        whole = msgspec.msgpack.decode(b"".join(encode(HeartbeatRequest(header(1), [])))[4:])
        for fields, expected in (
            ({"type": "New"}, ClusterErrorCode.UNSUPPORTED_VERSION),
            ({"partitions": 1}, ClusterErrorCode.INVALID_REQUEST),
        ):
            body = msgspec.msgpack.encode(whole | fields)
            raw.transport.write(len(body).to_bytes(4, "big") + body)
            assert await code_of(raw) == (1, expected)
        raw.send(ProbeRequest(header(2)))
        assert await code_of(raw) == (2, ClusterErrorCode.UNSUPPORTED_VERSION), "nobody serves it here"
        raw.send(HeartbeatRequest(header(3, version=2), []))
        assert await code_of(raw) == (3, ClusterErrorCode.UNSUPPORTED_VERSION)
        raw.send(HeartbeatRequest(header(4, source=3), []))
        assert await code_of(raw) == (4, ClusterErrorCode.INVALID_REQUEST)
        raw.send(AskingHandshake(identity_of(1), 2, bytes(32)).hello(header(5)))
        assert await code_of(raw) == (5, ClusterErrorCode.UNSUPPORTED_VERSION)
        raw.send(HeartbeatRequest(header(6), []))
        assert await answer_to(raw) == HeartbeatResponse(ResponseHeader(6))

    virtually(story)


def test_the_requests_of_a_connection_end_with_it() -> None:
    async def story(network: SimNetwork) -> None:
        log: list[Any] = []
        two = await ClusterNode(network, 2, handlers=handlers_of(network, log)).start()
        raw = await RawPeer.proven(network, two.address)
        raw.send(ProbeRequest(header(), 60_000))
        await asyncio.sleep(0.1)
        assert two.listener.bytes.used_bytes > 0
        raw.transport.abort()
        await asyncio.sleep(1)
        assert log == [("start", 60_000), ("cancelled", 60_000)]
        assert two.listener.bytes.used_bytes == 0
        assert len(two.listener._connections) == 0

    virtually(story)


def test_closing_ends_connections_and_requests() -> None:
    async def story(network: SimNetwork) -> None:
        log: list[Any] = []
        two = await ClusterNode(network, 2, handlers=handlers_of(network, log)).start()
        raw = await RawPeer.proven(network, two.address)
        raw.send(ProbeRequest(header(), 60_000))
        await asyncio.sleep(0.1)
        await two.listener.close()
        assert log == [("start", 60_000), ("cancelled", 60_000)]
        await raw.ended.wait()
        with pytest.raises(ConnectionRefusedError):
            await RawPeer.connect(network, two.address)

    virtually(story)


def test_an_address_that_is_taken_is_told_with_the_flag() -> None:
    async def story(network: SimNetwork) -> None:
        two = await ClusterNode(network, 2).start()
        with pytest.raises(ConfigError, match=r"cannot listen for other nodes on n2:9093.*--cluster-listen"):
            await ClusterNode(network, 2).start()
        await two.stop()

    virtually(story)


# --- before the proof


def test_nothing_is_served_before_the_proof() -> None:
    async def story(network: SimNetwork) -> None:
        log: list[Any] = []
        two = await ClusterNode(network, 2, handlers=handlers_of(network, log)).start()
        raw = await RawPeer.connect(network, two.address)
        raw.send(ProbeRequest(header(1), 1))
        raw.send(ProbeRequest(header(2), 1))
        assert await code_of(raw) == (1, ClusterErrorCode.INVALID_REQUEST)
        assert await raw.frame() == b"", "and that was all"
        greeted = await RawPeer.connect(network, two.address)
        greeted.send(AskingHandshake(identity_of(1), 2, bytes(32)).hello(header(1)))
        await answer_to(greeted)
        greeted.send(ProbeRequest(header(2), 1))
        assert await code_of(greeted) == (2, ClusterErrorCode.INVALID_REQUEST)
        assert await greeted.frame() == b""
        assert log == []

    virtually(story)


def test_a_wrong_secret_is_logged_once_and_its_connection_closed(caplog: pytest.LogCaptureFixture) -> None:
    async def story(network: SimNetwork) -> None:
        two = await ClusterNode(network, 2).start()
        for _ in range(3):
            raw = await RawPeer.connect(network, two.address)
            guess = AskingHandshake(identity_of(1, secret=b"guess"), 2, bytes(32))
            raw.send(guess.hello(header(1)))
            raw.send(guess.prove(header(2), await answer_to(raw)))
            assert await code_of(raw) == (2, ClusterErrorCode.WRONG_SECRET)
            assert await raw.frame() == b""
        assert len(two.listener._connections) == 0

    virtually(story)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "refused a connection of a node from n1" in record.message
    assert "cluster_secret" in record.message


def test_frames_are_small_before_the_proof() -> None:
    async def story(network: SimNetwork) -> None:
        two = await ClusterNode(network, 2).start()
        raw = await RawPeer.connect(network, two.address)
        raw.transport.write((HANDSHAKE_BYTES_MAX + 1).to_bytes(4, "big"))
        assert await raw.frame() == b""
        assert network.loop.time() < 1

    virtually(story)


def test_the_proof_has_a_deadline() -> None:
    async def story(network: SimNetwork) -> None:
        two = await ClusterNode(network, 2).start()
        raw = await RawPeer.connect(network, two.address)
        raw.send(AskingHandshake(identity_of(1), 2, bytes(32)).hello(header(1)))
        await answer_to(raw)
        raw.transport.write(b"\x00")
        assert await raw.frame() == b""
        assert network.loop.time() == pytest.approx(5, abs=0.1)

    virtually(story)


def test_strangers_cannot_keep_nodes_out() -> None:
    async def story(network: SimNetwork) -> None:
        two = await ClusterNode(network, 2, limits=ListenerLimits(connections_max=3)).start()
        known = [await RawPeer.proven(network, two.address) for _ in range(2)]
        strangers = [await RawPeer.connect(network, two.address) for _ in range(5)]
        known.append(await RawPeer.proven(network, two.address))
        await asyncio.sleep(1)
        assert all(stranger.ended.is_set() for stranger in strangers)
        extra = await RawPeer.connect(network, two.address)
        assert await extra.frame() == b"", "all places are those of nodes"
        for raw in known:
            raw.send(HeartbeatRequest(header(), []))
            assert isinstance(await answer_to(raw), HeartbeatResponse)

    virtually(story)


# --- limits and deadlines after the proof


def test_a_node_that_stops_in_the_middle_of_a_message_is_closed() -> None:
    async def story(network: SimNetwork) -> None:
        two = await ClusterNode(network, 2).start()
        for beginning in (b"\x00", b"\x00\x00\x10\x00", b"\x00\x10\x00\x00" + bytes(100_000)):
            raw = await RawPeer.proven(network, two.address)
            started = network.loop.time()
            raw.transport.write(beginning)
            assert await raw.frame() == b""
            assert network.loop.time() - started == pytest.approx(30, abs=0.1)
        assert two.listener.bytes.used_bytes == 0

    virtually(story)


def test_a_node_that_asks_nothing_for_long_is_closed_but_not_while_it_waits() -> None:
    async def story(network: SimNetwork) -> None:
        two = await ClusterNode(network, 2, handlers=handlers_of(network, [])).start()
        raw = await RawPeer.proven(network, two.address)
        raw.send(ProbeRequest(header(timeout_ms=10_000_000), 2_000_000))
        assert isinstance(await answer_to(raw), ProbeResponse)
        assert network.loop.time() > 2_000
        answered = network.loop.time()
        assert await raw.frame() == b""
        assert 599 < network.loop.time() - answered < 1_201

    virtually(story)


def test_requests_under_way_are_limited_by_number() -> None:
    async def story(network: SimNetwork) -> None:
        log: list[Any] = []
        limits = ListenerLimits(requests_max=3)
        two = await ClusterNode(network, 2, handlers=handlers_of(network, log), limits=limits).start()
        raw = await RawPeer.proven(network, two.address)
        for number in range(10):
            raw.send(ProbeRequest(header(number), 1_000))
        await asyncio.sleep(0.5)
        assert len(log) == 3
        for _ in range(10):
            await answer_to(raw)
        assert len(log) == 20

    virtually(story)


@pytest.mark.parametrize("limits", [{"connection_bytes": 250_000}, {"total_bytes": 250_000}])
def test_requests_under_way_are_limited_by_bytes(limits: dict[str, int]) -> None:
    async def story(network: SimNetwork) -> None:
        started: list[int] = []
        release = asyncio.Event()

        async def hold(peer: PeerInfo, request: KafkaRequest) -> KafkaResponse:
            started.append(request.header.correlation_id)
            await release.wait()
            return KafkaResponse(request.header.answer(), memoryview(b""))

        two = ClusterNode(network, 2, handlers={KafkaRequest: hold}, limits=ListenerLimits(**limits))
        raw = await RawPeer.proven(network, (await two.start()).address)
        for number in range(6):
            raw.send(KafkaRequest(header(number), memoryview(bytes(100_000))))
        await asyncio.sleep(1)
        assert started == [0, 1]
        assert two.listener.bytes.used_bytes < 250_000
        release.set()
        assert [(await answer_to(raw)).header.correlation_id for _ in range(6)] == list(range(6))
        assert two.listener.bytes.used_bytes == 0

    virtually(story)


def test_a_node_that_reads_no_answers_is_read_no_more_and_closed_in_the_end() -> None:
    async def story(network: SimNetwork) -> None:
        log: list[Any] = []
        limits = ListenerLimits(unsent_bytes=100_000)
        two = await ClusterNode(network, 2, handlers=handlers_of(network, log), limits=limits).start()
        slow, other = [await RawPeer.proven(network, two.address, number) for number in (1, 3)]
        slow.transport.pause_reading()
        for number in range(50):
            slow.send(KafkaRequest(header(number), memoryview(b"100000")))
            await asyncio.sleep(0.01)
        assert len(log) < 10, "what is not read is not worked on"
        assert two.listener.bytes.used_bytes < 1_000_000
        other.send(HeartbeatRequest(header(source=3), []))
        assert isinstance(await answer_to(other), HeartbeatResponse)
        await asyncio.sleep(31)
        assert len(two.listener._connections) == 1
        assert two.listener.bytes.used_bytes == 0

    virtually(story)


def test_answers_that_are_ready_wait_for_a_slow_reader() -> None:
    async def story(network: SimNetwork) -> None:
        release = asyncio.Event()

        async def hold(peer: PeerInfo, request: KafkaRequest) -> KafkaResponse:
            await release.wait()
            return KafkaResponse(request.header.answer(), memoryview(bytes(100_000)))

        limits = ListenerLimits(unsent_bytes=200_000)
        two = await ClusterNode(network, 2, handlers={KafkaRequest: hold}, limits=limits).start()
        raw = await RawPeer.proven(network, two.address)
        for number in range(50):
            raw.send(KafkaRequest(header(number), memoryview(b"")))
        raw.transport.pause_reading()
        await asyncio.sleep(0.1)
        release.set()
        await asyncio.sleep(1)
        assert raw.transport.peer.get_write_buffer_size() < 400_000, "of five megabytes that are ready"
        assert two.listener.bytes.used_bytes > 4_000_000, "they count all the same"
        raw.transport.resume_reading()
        assert [(await answer_to(raw)).header.correlation_id for _ in range(50)] == list(range(50))
        assert two.listener.bytes.used_bytes == 0

    virtually(story)


def test_a_slow_reader_gets_everything_when_it_reads_again() -> None:
    async def story(network: SimNetwork) -> None:
        log: list[Any] = []
        limits = ListenerLimits(unsent_bytes=100_000)
        two = await ClusterNode(network, 2, handlers=handlers_of(network, log), limits=limits).start()
        raw = await RawPeer.proven(network, two.address)
        for number in range(30):
            raw.send(KafkaRequest(header(number), memoryview(b"100000")))
        for _ in range(10):
            raw.transport.pause_reading()
            await asyncio.sleep(5)
            raw.transport.resume_reading()
            await asyncio.sleep(0.004)
        assert [(await answer_to(raw)).header.correlation_id for _ in range(30)] == list(range(30))

    virtually(story)


# --- anything


def inputs(seed: int) -> bytes:
    """Bytes that are more or less what a node would send."""
    rng = random.Random(seed)
    handshake = AskingHandshake(identity_of(1), 2, bytes(32))
    valid = [
        b"".join(encode(message))
        for message in (
            handshake.hello(header(0)),
            HeartbeatRequest(header(1), []),
            ProbeRequest(header(2, timeout_ms=100), 1),
            KafkaRequest(header(3), memoryview(b"17")),
        )
    ]
    data = bytearray()
    for _ in range(rng.randint(1, 5)):
        part = bytearray(rng.choice(valid) if rng.random() < 0.9 else rng.randbytes(rng.randint(0, 50)))
        for _ in range(rng.choice((0, 0, 1, 3))):
            at = rng.randrange(len(part) + 1)
            part[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        data += part
    return bytes(data)


@pytest.mark.parametrize("is_proven", [False, True])
@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_anything_that_is_sent_is_answered_or_ends_the_connection(
    is_proven: bool, one_at_a_time: bool
) -> None:
    """And then the node serves others as ever, holds nothing, and nothing was raised anywhere."""

    async def story(network: SimNetwork) -> None:
        two = await ClusterNode(network, 2, handlers=handlers_of(network, [])).start()
        for seed in range(120):
            raw = await (RawPeer.proven if is_proven else RawPeer.connect)(network, two.address)
            data = inputs(seed)
            for piece in [data[at : at + 1] for at in range(len(data))] if one_at_a_time else [data]:
                raw.transport.write(piece)
            # Until everything is answered, and what was half sent has had its time.
            await asyncio.wait_for(raw.ended.wait(), 1_300)
            for frame in raw.frames:
                decode_response(memoryview(frame))
            assert two.listener.bytes.used_bytes == 0
            assert len(two.listener._connections) == 0
        raw = await RawPeer.proven(network, two.address)
        raw.send(HeartbeatRequest(header(), []))
        assert isinstance(await answer_to(raw), HeartbeatResponse)

    virtually(story)
