"""Tidemill's own async client against a real node, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.processes import NodeProcess
from tidemill.client.admin import groups as group_admin
from tidemill.client.admin import topics as admin
from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.client.consuming.group_consumer import GroupConsumer
from tidemill.client.consuming.record_reader import Message, RecordReader
from tidemill.client.producing.producer import Producer
from tidemill.config.values import Address
from tidemill.errors import ApiError, ErrorCode, NodeUnavailable, ProtocolError
from tidemill.net.connection import Connection
from tidemill.records.partitioner import partition_for_key
from tidemill.records.record import Record
from tidemill.wire.encode import encode_response


@pytest.fixture
async def cluster(node: NodeProcess) -> AsyncIterator[Cluster]:
    async with Cluster(node.bootstrap_servers) as connected:
        yield connected


def record(value: bytes, key: bytes | None = None) -> Record:
    """A record of now: the nodes of these tests soon delete what is older than the retention."""
    return Record(key, value, time.time_ns() // 1_000_000)


async def write(cluster: Cluster, topic: str, values: Sequence[bytes], **options: int) -> None:
    async with Producer(cluster, **options) as producer:
        deliveries = [await producer.send(topic, record(value)) for value in values]
    assert all(delivery.result().offset >= 0 for delivery in deliveries)


async def drain(cluster: Cluster, topic: str) -> list[Message]:
    """Every record of the topic."""
    partitions = [(topic, partition.index) for partition in (await cluster.topic(topic)).partitions]
    starts = await admin.list_offsets(cluster, dict.fromkeys(partitions, admin.EARLIEST))
    ends = await admin.list_offsets(cluster, dict.fromkeys(partitions, admin.LATEST))
    reader = RecordReader(cluster, {each: at.offset for each, at in starts.items()})
    messages: list[Message] = []
    while any(reader.positions[each] < at.offset for each, at in ends.items()):
        messages += await reader.poll()
    await reader.close()
    return messages


async def from_the_start(partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
    return dict.fromkeys(partitions, 0)


# --- producing and reading


async def test_keys_go_to_javas_partitions_and_keep_their_order(cluster: Cluster, topic: str) -> None:
    await admin.create_topic(cluster, topic, partitions=5)
    async with Producer(cluster, batch_bytes=500) as producer:
        for number in range(300):
            await producer.send(topic, record(b"%d" % number, b"key-%d" % (number % 7)))
    by_key: dict[bytes, list[int]] = {}
    for message in await drain(cluster, topic):
        key, value = message.record.key or b"", message.record.value or b""
        assert message.partition == partition_for_key(key, 5)
        by_key.setdefault(key, []).append(int(value))
    assert sum(map(len, by_key.values())) == 300
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


async def test_records_without_a_key_are_spread_in_batches(cluster: Cluster, topic: str) -> None:
    await admin.create_topic(cluster, topic, partitions=3)
    await write(cluster, topic, [b"x" * 100] * 300, batch_bytes=2_000)
    assert {message.partition for message in await drain(cluster, topic)} == {0, 1, 2}


async def test_batch_that_is_refused_fails_its_records_and_the_next_are_written(
    cluster: Cluster, topic: str
) -> None:
    await admin.create_topic(cluster, topic, configs={"max.message.bytes": "1000"})
    async with Producer(cluster, batch_bytes=100) as producer:
        before = await producer.send(topic, record(b"before"))
        large = await producer.send(topic, record(b"x" * 5_000))
        after = await producer.send(topic, record(b"after"))
    with pytest.raises(ApiError) as caught:
        large.result()
    assert caught.value.code == ErrorCode.message_too_large
    assert (before.result().offset, after.result().offset) == (0, 1)


async def test_position_behind_the_log_start_is_moved_or_reported(cluster: Cluster, topic: str) -> None:
    await write(cluster, topic, [b"%d" % number for number in range(10)], batch_bytes=1)
    await admin.delete_records(cluster, {(topic, 0): 6})
    moved = RecordReader(cluster, {(topic, 0): 2}, out_of_range="earliest")
    messages: list[Message] = []
    while len(messages) < 4:
        messages += await moved.poll()
    assert messages[0].record.offset == 6
    await moved.close()
    with pytest.raises(ApiError, match="holds offsets 6 to 9") as caught:
        await RecordReader(cluster, {(topic, 0): 2}).poll()
    assert caught.value.code == ErrorCode.offset_out_of_range


async def test_cancelled_poll_loses_nothing(cluster: Cluster, topic: str) -> None:
    await admin.create_topic(cluster, topic)
    reader = RecordReader(cluster, {(topic, 0): 0}, max_wait_ms=20_000)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await reader.poll()
    await write(cluster, topic, [b"late"])
    assert [message.record.value for message in await reader.poll()] == [b"late"]
    await reader.close()


async def test_client_goes_on_when_the_node_comes_back(tmp_path: Path, topic: str) -> None:
    values = [b"%d" % number for number in range(400)]
    with NodeProcess(tmp_path / "data") as node:
        async with Cluster(node.bootstrap_servers) as cluster:
            await admin.create_topic(cluster, topic, partitions=2)
            async with Producer(cluster, batch_bytes=300) as producer:
                deliveries = []
                for number, value in enumerate(values):
                    deliveries.append(await producer.send(topic, record(value)))
                    if number in (100, 250):
                        await deliveries[number - 50]
                        node.kill()
                        await asyncio.to_thread(node.start)
            assert all(delivery.exception() is None for delivery in deliveries)
            read = [message.record.value for message in await drain(cluster, topic)]
    assert Counter(read) == Counter(values)


# --- groups


async def test_members_share_the_partitions_and_take_over_from_one_that_leaves(
    cluster: Cluster, node: NodeProcess, topic: str
) -> None:
    await admin.create_topic(cluster, topic, partitions=4)
    first = GroupConsumer(cluster, f"g-{topic}", [topic], from_the_start)
    await first.poll()
    assert len(first.positions) == 4
    async with Cluster(node.bootstrap_servers) as other_cluster:
        second = GroupConsumer(other_cluster, f"g-{topic}", [topic], from_the_start)

        async def poll_until_both_have_two(consumer: GroupConsumer) -> None:
            while len(first.positions) != 2 or len(second.positions) != 2:
                await consumer.poll()

        await asyncio.gather(poll_until_both_have_two(first), poll_until_both_have_two(second))
        assert first.positions.keys().isdisjoint(second.positions)
        described = await group_admin.describe_group(cluster, f"g-{topic}")
        assert sorted(len(member.assignment) for member in described.members) == [2, 2]
        await second.close()
    while len(first.positions) != 4:
        await first.poll()
    await first.close()
    assert (await group_admin.describe_group(cluster, f"g-{topic}")).idle


async def test_only_what_was_marked_is_committed(cluster: Cluster, topic: str) -> None:
    await write(cluster, topic, [b"%d" % number for number in range(10)])
    first = GroupConsumer(cluster, f"g-{topic}", [topic], from_the_start)
    messages: list[Message] = []
    while len(messages) < 10:
        messages += await first.poll()
    first.mark(messages[3])
    await first.close()
    assert await group_admin.fetch_offsets(cluster, f"g-{topic}") == {(topic, 0): 4}
    second = GroupConsumer(cluster, f"g-{topic}", [topic], from_the_start)
    again: list[Message] = []
    while not again:
        again = await second.poll()
    assert again[0].record.offset == 4
    await second.close()


# --- servers that misbehave

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handle: Handler) -> AsyncIterator[Address]:
    """A server of one connection that does what ``handle`` does."""

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await handle(reader, writer)
        writer.close()

    server = await asyncio.start_server(run, "127.0.0.1", 0)
    try:
        yield Address(*server.sockets[0].getsockname()[:2])
    finally:
        server.close()


def api_versions(*served: tuple[int, int, int]) -> bytes:
    entries = [{"api_key": key, "min_version": low, "max_version": high} for key, low, high in served]
    return bytes(encode_response(18, 0, 0, {"api_keys": entries}))


async def test_garbage_is_reported_as_another_protocol() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()

    async with serving(answer) as address:
        with pytest.raises(ProtocolError, match="does not answer as a Kafka server"):
            await Connection.open(address)


async def test_closed_connection_fails_what_is_under_way_and_what_comes_after() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(api_versions((3, 0, 13)))
        for _ in ("ApiVersions", "Metadata"):
            await reader.readexactly(int.from_bytes(await reader.readexactly(4)))

    async with serving(answer) as address:
        connection = await Connection.open(address)
        for _ in range(2):
            with pytest.raises(NodeUnavailable, match=str(address)):
                await connection.request("Metadata", {"topics": None})
        assert connection.failed
        await connection.close()


async def test_unanswered_request_ends_at_its_deadline() -> None:
    silent = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(api_versions((3, 0, 13)))
        await silent.wait()

    async with serving(answer) as address:
        connection = await Connection.open(address)
        with pytest.raises(NodeUnavailable, match="Metadata was not answered within 50 ms"):
            await connection.request("Metadata", {"topics": None}, timeout_ms=50)
        await connection.close()
        silent.set()


async def test_api_or_version_that_the_server_lacks_is_named() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(api_versions((3, 0, 13), (0, 0, 2)))
        await reader.read()

    async with serving(answer) as address:
        connection = await Connection.open(address)
        with pytest.raises(ApiError, match="does not serve CreateTopics") as lacking:
            await connection.request("CreateTopics", {})
        with pytest.raises(ApiError, match="serves Produce in versions 0 to 2") as outdated:
            await connection.request("Produce", {})
        assert lacking.value.code == outdated.value.code == ErrorCode.unsupported_version
        assert connection.version_of("Metadata", (0, 9)) == 9
        await connection.close()


async def test_newest_common_version_is_used(node: NodeProcess) -> None:
    connection = await Connection.open(Address(*node.address))
    assert connection.version_of("Metadata") == 13
    assert connection.version_of("Fetch", (4, 12)) == 12
    await connection.close()


async def test_requests_are_pipelined_and_matched_to_their_answers(node: NodeProcess) -> None:
    connection = await Connection.open(Address(*node.address))
    names = [f"missing-{number}" for number in range(50)]
    answers = await asyncio.gather(
        *(
            connection.request("Metadata", {"topics": [{"name": name}], "allow_auto_topic_creation": False})
            for name in names
        )
    )
    assert [answer.topics[0].name for answer in answers] == names
    await connection.close()
