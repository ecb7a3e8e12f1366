"""Clients that do what no client should. After each of them the node must serve everybody else."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.processes import NodeProcess, wait_until
from support.raw import RawClient, batch_of, fetch_body
from tidemill.errors import ErrorCode
from tidemill.wire.requests import decode_response

MIB = 2**20
_MAX_CONNECTIONS = 60
_API_VERSIONS = "ApiVersions"


@pytest.fixture(scope="module")
def impatient_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with tight limits."""
    limits = {
        "frame_deadline_ms": 1_500,
        "handshake_deadline_ms": 2_500,
        "max_frame_bytes": 4 * MIB,
        "max_inflight_bytes": 32 * MIB,
        "max_connections": _MAX_CONNECTIONS,
    }
    with NodeProcess(tmp_path_factory.mktemp("impatient") / "data", **limits) as running:
        yield running


@pytest.fixture
def node(impatient_node: NodeProcess, topic: str) -> Iterator[NodeProcess]:
    """The node, and behind every test the question whether it still serves others."""
    yield impatient_node
    with RawClient(impatient_node.address) as other:
        create_topic(other, f"{topic}-after")
        assert other.produce(f"{topic}-after", batch_of(b"v")).error_code == ErrorCode.none
        assert b"v" in other.fetch(f"{topic}-after").records
    assert impatient_node.readiness() == {"ready": True, "problems": [], "problem_kinds": []}


@pytest.fixture
def raw(node: NodeProcess) -> Iterator[RawClient]:
    with RawClient(node.address) as client:
        yield client


def create_topic(client: RawClient, topic: str, **configs: str) -> Any:
    overrides = [{"name": name.replace("_", "."), "value": value} for name, value in configs.items()]
    wanted = {
        "name": topic,
        "num_partitions": 1,
        "replication_factor": 1,
        "assignments": [],
        "configs": overrides,
    }
    answer = client.request("CreateTopics", 7, {"topics": [wanted], "timeout": 30_000})
    return answer.topics[0].error_code


# --- bytes


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_close_the_connection(raw: RawClient, seed: int) -> None:
    rng = random.Random(seed)
    raw.send(rng.randbytes(rng.randrange(1, 5_000)))
    raw.wait_for_close()


@pytest.mark.parametrize("length", [-1, -(2**31), 0, 7, 4 * MIB + 1, 2**31 - 1])
def test_a_frame_of_an_impossible_length_closes_the_connection(raw: RawClient, length: int) -> None:
    raw.send(struct.pack(">i", length))
    assert raw.wait_for_close() == 0


@pytest.mark.parametrize("sent", [0, 3, 4, 10])
def test_a_client_that_falls_silent_is_closed_after_the_deadline(raw: RawClient, sent: int) -> None:
    raw.send(raw.encode(_API_VERSIONS, 0, {})[:sent])
    assert raw.wait_for_close() == 0


def test_a_client_that_trickles_is_closed_although_it_never_falls_silent(raw: RawClient) -> None:
    frame = raw.encode("Metadata", 1, {"topics": [{"name": "t" * 200}]})
    assert raw.request(_API_VERSIONS, 0, {}).error_code == ErrorCode.none
    raw.socket.settimeout(0.05)
    with pytest.raises(ConnectionError):
        trickle(raw, frame)


def trickle(raw: RawClient, data: bytes) -> None:
    """Send one byte at a time, and look for an answer after each."""
    for position in range(len(data)):
        raw.send(data[position : position + 1])
        with contextlib.suppress(TimeoutError):
            raw.read_frame()


def test_a_request_that_arrives_byte_by_byte_in_time_is_answered(raw: RawClient) -> None:
    for byte in raw.encode(_API_VERSIONS, 0, {}):
        raw.send(bytes([byte]))
    assert decode_response(18, 0, raw.read_frame())[0] == raw.correlation_id


def test_a_frame_whose_length_is_only_claimed_costs_no_memory(node: NodeProcess) -> None:
    before = node.resident_bytes()
    clients = [RawClient(node.address) for _ in range(_MAX_CONNECTIONS - 10)]
    for client in clients:
        # The first request of a connection has a limit of its own.
        client.request(_API_VERSIONS, 0, {})
        client.send(struct.pack(">i", 4 * MIB) + bytes(100))
    for client in clients:
        client.wait_for_close()
        client.close()
    # All of them together claimed 200 MiB; 16 KiB each is what they get at first.
    assert node.resident_bytes() - before < 20 * MIB


@pytest.fixture
def stalled(tmp_path: Path, topic: str) -> Iterator[tuple[NodeProcess, list[RawClient]]]:
    """A node whose memory for large requests is held by eight clients, which send most of one and then stop.

    Deadlines are so long that nothing here ends by itself.
    """
    limits = {
        "frame_deadline_ms": 3_600_000,
        "stall_timeout_ms": 6_000,
        "max_frame_bytes": 10 * MIB,
        "max_inflight_bytes": 52 * MIB,
    }
    with NodeProcess(tmp_path / "data", **limits) as node, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawClient(node.address)) for _ in range(8)]
        create_topic(clients[0], topic)
        for client in clients:
            client.request(_API_VERSIONS, 0, {})
        senders = [threading.Thread(target=send_most_of_a_frame, args=(client,)) for client in clients]
        for sender in senders:
            sender.start()
        try:
            wait_until(
                lambda: node.metric("tidemill_connections_waiting") > 0, "there is no memory for more of it"
            )
            yield node, clients
        finally:
            for client in clients:
                with contextlib.suppress(OSError):
                    client.socket.shutdown(socket.SHUT_RDWR)
            for sender in senders:
                sender.join()


def send_most_of_a_frame(client: RawClient) -> None:
    with contextlib.suppress(OSError):
        client.send(struct.pack(">i", 9 * MIB) + struct.pack(">hhih", 0, 9, 1, -1) + bytes(8 * MIB))


def test_eight_stalled_large_requests_hold_up_nobody_and_give_way(
    stalled: tuple[NodeProcess, list[RawClient]], topic: str
) -> None:
    node, _ = stalled
    assert node.metric("tidemill_connections_closed_total") == 0
    with RawClient(node.address) as other:
        for number in range(50):
            assert other.request(_API_VERSIONS, 0, {}).error_code == ErrorCode.none
            assert other.produce(topic, batch_of(b"small")).base_offset == number
            assert len(other.fetch(topic).records) > 0
        # Also what is large is read, as soon as one of those who stalled has given way.
        assert other.produce(topic, batch_of(bytes(900_000))).error_code == ErrorCode.none
    assert node.metric("tidemill_inflight_bytes") <= 52 * MIB
    wait_until(lambda: node.metric("tidemill_connections_closed_total") > 0, "a stalled client is closed")


# --- requests


@pytest.mark.parametrize(("api_key", "version"), [(999, 0), (-5, 0), (3, 99), (0, 2)])
def test_an_unknown_api_or_version_closes_the_connection(raw: RawClient, api_key: int, version: int) -> None:
    header = struct.pack(">hhih", api_key, version, 1, -1)
    raw.send(struct.pack(">i", len(header) + 20) + header + bytes(20))
    assert raw.wait_for_close() == 0


def test_api_versions_of_an_unknown_version_is_answered_in_the_oldest_format(raw: RawClient) -> None:
    body = struct.pack(">hhih", 18, 99, 4711, -1) + b"whatever a future version holds"
    raw.send(struct.pack(">i", len(body)) + body)
    correlation_id, answer = decode_response(18, 0, raw.read_frame())
    assert (correlation_id, answer.error_code) == (4711, ErrorCode.unsupported_version)
    assert {api.api_key: api.max_version for api in answer.api_keys}[18] >= 3
    assert raw.request(_API_VERSIONS, 3, {}).error_code == ErrorCode.none


def test_a_corrupt_batch_is_refused_and_the_connection_goes_on(raw: RawClient, topic: str) -> None:
    create_topic(raw, topic)
    damaged = bytearray(batch_of(b"some text"))
    damaged[-3] ^= 1
    assert raw.produce(topic, bytes(damaged)).error_code == ErrorCode.corrupt_message
    assert raw.produce(topic, batch_of(b"cut short")[:-4]).error_code == ErrorCode.corrupt_message
    assert raw.produce(topic, bytes(200)).error_code != ErrorCode.none
    good = raw.produce(topic, batch_of(b"good"))
    assert (good.error_code, good.base_offset) == (ErrorCode.none, 0)
    assert raw.fetch(topic).high_watermark == 1


def test_a_refused_batch_uses_no_sequence_number(raw: RawClient, topic: str) -> None:
    create_topic(raw, topic)
    producer = raw.request("InitProducerId", 4, {"transaction_timeout": 60_000})

    def batch(sequence: int, value: bytes = b"v") -> bytes:
        return batch_of(
            value,
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            base_sequence=sequence,
        )

    damaged = bytearray(batch(0))
    damaged[-1] ^= 1
    assert raw.produce(topic, bytes(damaged)).error_code == ErrorCode.corrupt_message
    too_large = raw.produce(topic, batch(0, b"x" * 2 * MIB))
    assert too_large.error_code == ErrorCode.message_too_large
    assert raw.produce(topic, batch(0)).base_offset == 0
    assert raw.produce(topic, batch(2)).error_code == ErrorCode.out_of_order_sequence_number
    assert raw.produce(topic, batch(1)).base_offset == 1
    again = raw.produce(topic, batch(1))
    assert (again.error_code, again.base_offset) == (ErrorCode.none, 1)
    assert raw.fetch(topic).high_watermark == 2


def test_thousands_of_pipelined_requests_are_answered_in_order(raw: RawClient, topic: str) -> None:
    create_topic(raw, topic)
    raw.produce(topic, batch_of(b"v"))
    first = raw.correlation_id + 1
    requests = [
        raw.encode(_API_VERSIONS, 0, {}) if number % 2 else raw.encode("Fetch", 12, fetch_body(topic))
        for number in range(5_000)
    ]
    sender = threading.Thread(target=raw.send, args=(b"".join(requests),))
    sender.start()
    answered = [struct.unpack(">i", raw.read_frame()[:4])[0] for _ in requests]
    sender.join()
    assert answered == list(range(first, first + len(requests)))


def test_clients_that_never_read_their_answers_cost_bounded_memory(
    raw: RawClient, node: NodeProcess, topic: str
) -> None:
    create_topic(raw, topic)
    for _ in range(8):
        assert raw.produce(topic, batch_of(random.Random(1).randbytes(MIB // 2))).error_code == ErrorCode.none
    before = node.resident_bytes()
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            deaf = stack.enter_context(RawClient(node.address, deadline_seconds=0.5))
            requests = deaf.encode("Fetch", 12, fetch_body(topic, max_bytes=4 * MIB)) * 1_000
            # That the socket takes no more shows that the node has stopped reading; a request asks for 4 MiB.
            with pytest.raises(TimeoutError):
                send_for_ever(deaf, requests)
        assert node.resident_bytes() - before < 100 * MIB
        # Another client is served while they are there.
        assert raw.fetch(topic).high_watermark == 8


def send_for_ever(raw: RawClient, data: bytes) -> None:
    while True:
        raw.send(data)


def test_a_connection_too_many_is_closed_at_once(node: NodeProcess) -> None:
    clients: list[RawClient] = []
    try:
        for _ in range(_MAX_CONNECTIONS):
            clients.append(RawClient(node.address))
            assert clients[-1].request(_API_VERSIONS, 0, {}).error_code == ErrorCode.none
        with RawClient(node.address) as refused:
            assert refused.wait_for_close() == 0
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(RawClient(node.address)).wait_for_close()
        assert node.log_text().count("refused a connection of 127.0.0.1") <= 1, "one line, then a sum"
        clients.pop().close()
        wait_until(lambda: accepts(node), "the place that became free is given to another client")
    finally:
        for client in clients:
            client.close()
    wait_until(lambda: accepts(node), "connections are taken again")


def accepts(node: NodeProcess) -> bool:
    with RawClient(node.address) as client:
        try:
            client.request(_API_VERSIONS, 0, {})
        except ConnectionError:
            return False
        return True


# --- the machine around the node


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_disk_refuses_writes_serves_reads_and_recovers(small_disk: Path, topic: str) -> None:
    filler = small_disk / "filler"
    large = bytes(100_000)
    with NodeProcess(small_disk / "data") as node, RawClient(node.address) as client:
        assert create_topic(client, topic) == ErrorCode.none
        assert client.produce(topic, batch_of(b"before")).base_offset == 0
        fill(filler)
        for _ in range(3):
            assert client.produce(topic, batch_of(large)).error_code == ErrorCode.kafka_storage_error
        found = client.fetch(topic)
        assert (found.error_code, found.high_watermark) == (ErrorCode.none, 1)
        assert b"before" in found.records
        assert create_topic(client, f"{topic}-2") != ErrorCode.none
        filler.unlink()
        answer = client.produce(topic, batch_of(large))
        assert (answer.error_code, answer.base_offset) == (ErrorCode.none, 1)
        assert create_topic(client, f"{topic}-2") == ErrorCode.none
        assert client.produce(f"{topic}-2", batch_of(b"new topic")).error_code == ErrorCode.none
        wait_until(lambda: node.readiness()["problems"] == [], "the disk no longer counts as full")
        node.stop()
        node.start()
        with RawClient(node.address) as again:
            assert again.fetch(topic).high_watermark == 2


def test_a_second_process_on_the_same_directory_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    with NodeProcess(tmp_path / "data") as first:
        second = NodeProcess(tmp_path / "data")
        named = rf"in use by process {first.pid} .*listening on {re.escape(first.bootstrap_servers)}"
        with pytest.raises(RuntimeError, match=named):
            second.start()
        assert accepts(first)
