"""Consumers read from the closest replica (KIP-392): the leader sends them there, a follower serves them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from support.batches import plain_batch
from support.leadership import follower_flushed
from support.other_nodes import FakeCluster
from tidemill.cluster.messages import Diverging, FetchedPartition
from tidemill.control.commands import CreateTopic
from tidemill.control.records import PartitionImage
from tidemill.errors import ErrorCode
from tidemill.replication.coordinator_log import wait_committed
from tidemill.replication.partition import Partition
from tidemill.server.broker import Broker
from tidemill.wire.apis import APIS_BY_NAME

Ask = Callable[..., Awaitable[Any]]
VERSIONS = [version for version in APIS_BY_NAME["Fetch"].versions if version >= 11]
NOBODY = -1


@pytest.fixture
async def cluster(broker: Broker) -> FakeCluster:
    """This node is in rack a, the others in b; this one leads t-0 with two records, and all have them."""
    cluster = await FakeCluster.around(broker, {2: "b", 3: "b"}, own_rack="a")
    await broker.controller.submit(CreateTopic(name="t", topic_id=uuid4(), assignments=((1, 2, 3),)))
    partition = led(broker)
    for value in ("one", "two"):
        partition.append(plain_batch(value), 1_000)
    follower_flushed(partition, 2, 2)
    follower_flushed(partition, 3, 2)
    await wait_committed(partition, 2)
    return cluster


def led(broker: Broker) -> Partition:
    return broker.find.partition(broker.find.topic("t"), 0)


async def fetch(broker: Broker, ask: Ask, version: int, offset: int, **fields: Any) -> Any:
    part = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 10_000}
    name = {"topic": "t"} if version < 13 else {"topic_id": broker.find.topic("t").id}
    body = {"max_wait": 0, "min_bytes": 0, "max_bytes": 10_000, **fields}
    answer = await ask(broker, "Fetch", version, topics=[{**name, "partitions": [part]}], **body)
    return answer.responses[0].partitions[0]


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_consumer_is_sent_to_an_in_sync_replica_in_its_rack(
    broker: Broker, cluster: FakeCluster, ask: Ask, version: int
) -> None:
    sent = await fetch(broker, ask, version, 0, rack_id="b", max_wait=60_000, min_bytes=10**6)
    assert (sent.error_code, sent.preferred_read_replica, sent.records) == (ErrorCode.none, 2, b"")
    for rack in ("", "a", "c"):
        served = await fetch(broker, ask, version, 0, rack_id=rack)
        assert (served.preferred_read_replica, bool(served.records)) == (NOBODY, True), rack


async def test_only_a_live_replica_that_is_in_sync_and_far_enough_is_named(
    broker: Broker, cluster: FakeCluster, ask: Ask
) -> None:
    await cluster.kill(2)
    assert (await fetch(broker, ask, 11, 0, rack_id="b")).preferred_read_replica == 3
    assert (await fetch(broker, ask, 11, 2, rack_id="b")).preferred_read_replica == NOBODY, (
        "nothing there yet"
    )
    await cluster.place("t", 0, PartitionImage(1, 0, (1, 2, 3), (1,)))
    served = await fetch(broker, ask, 11, 0, rack_id="b")
    assert (served.preferred_read_replica, bool(served.records)) == (NOBODY, True)
    out_of_range = await fetch(broker, ask, 11, 9, rack_id="b")
    assert out_of_range.error_code is ErrorCode.offset_out_of_range


async def test_without_racks_the_leader_serves(broker: Broker, ask: Ask) -> None:
    await FakeCluster.around(broker, {2: "b"})
    await broker.controller.submit(CreateTopic(name="t", topic_id=uuid4(), assignments=((1, 2),)))
    led(broker).append(plain_batch("one"), 1_000)
    follower_flushed(led(broker), 2, 1)
    await wait_committed(led(broker), 1)
    served = await fetch(broker, ask, 11, 0, rack_id="b")
    assert (served.preferred_read_replica, bool(served.records)) == (NOBODY, True)


# --- a follower


async def follow(broker: Broker, cluster: FakeCluster, high_watermark: int | None) -> Partition:
    """Let node 2 lead; it has answered a first Fetch with its high watermark, or (None) not yet."""
    partition = led(broker)
    await cluster.place("t", 0, PartitionImage(2, 5, (1, 2, 3), (1, 2, 3)))
    if high_watermark is not None:
        answered(partition, high_watermark)
    return partition


def answered(partition: Partition, high_watermark: int) -> None:
    wanted = partition.as_follower.fetch_position(1_000)
    assert wanted is not None
    partition.as_follower.take_answer(wanted, FetchedPartition(partition.id, high_watermark, 0), 1_000)


@pytest.mark.parametrize("version", APIS_BY_NAME["Fetch"].versions)
async def test_a_follower_serves_what_is_committed(
    broker: Broker, cluster: FakeCluster, ask: Ask, version: int
) -> None:
    await follow(broker, cluster, 2)
    served = await fetch(broker, ask, version, 1)
    if version < 11:
        assert served.error_code is ErrorCode.not_leader_or_follower, "older clients know leaders only"
        return
    assert (served.error_code, served.high_watermark, bool(served.records)) == (ErrorCode.none, 2, True)
    at_the_end = await fetch(broker, ask, version, 2)
    assert (at_the_end.error_code, at_the_end.records) == (ErrorCode.none, b"")
    for offset in (-1, 3, 99):
        elsewhere = await fetch(broker, ask, version, offset)
        assert elsewhere.error_code is ErrorCode.offset_not_available, "only leaders say out of range"
    named = await fetch(broker, ask, version, 0, max_wait=60_000, min_bytes=1, rack_id="b")
    assert (named.preferred_read_replica, bool(named.records)) == (NOBODY, True)


async def test_log_dirs_tell_how_many_committed_records_a_follower_lacks(
    broker: Broker, cluster: FakeCluster, ask: Ask
) -> None:
    async def lags() -> list[int]:
        answer = await ask(broker, "DescribeLogDirs", 4, topics=None)
        return [each.offset_lag for topic in answer.results[0].topics for each in topic.partitions]

    assert await lags() == [0], "the leader lacks nothing"
    partition = await follow(broker, cluster, 9)
    assert await lags() == [9 - partition.log_end_offset]
    answered(partition, partition.log_end_offset)
    assert await lags() == [9 - partition.log_end_offset], "an older high watermark tells nothing new"


async def test_a_follower_that_has_not_heard_of_its_leader_serves_nobody(
    broker: Broker, cluster: FakeCluster, ask: Ask
) -> None:
    partition = await follow(broker, cluster, None)
    assert (await fetch(broker, ask, 16, 0)).error_code is ErrorCode.not_leader_or_follower
    wanted = partition.as_follower.fetch_position(1_000)
    assert wanted is not None
    diverging = FetchedPartition(partition.id, 2, 0, diverging=Diverging(0, 1))
    partition.as_follower.take_answer(wanted, diverging, 1_000)
    assert (await fetch(broker, ask, 16, 0)).error_code is ErrorCode.not_leader_or_follower
    answered(partition, 2)
    assert (await fetch(broker, ask, 16, 0)).error_code is ErrorCode.none


async def test_a_node_that_is_no_replica_or_not_live_serves_nobody(
    broker: Broker, cluster: FakeCluster, ask: Ask
) -> None:
    await follow(broker, cluster, 2)
    await cluster.kill(1)
    assert (await fetch(broker, ask, 16, 0)).error_code is ErrorCode.not_leader_or_follower
    await FakeCluster.around(broker, {2: "b", 3: "b"}, own_rack="a")
    assert (await fetch(broker, ask, 16, 0)).error_code is ErrorCode.none
    await cluster.place("t", 0, PartitionImage(2, 5, (2, 3), (2, 3)))
    assert (await fetch(broker, ask, 16, 0)).error_code is ErrorCode.not_leader_or_follower


async def test_a_fetch_waits_at_a_follower_until_more_is_committed(
    broker: Broker, cluster: FakeCluster, ask: Ask
) -> None:
    partition = await follow(broker, cluster, 1)
    assert partition.high_watermark == 2, "what this node knew to be committed stays so"
    waiting = asyncio.ensure_future(fetch(broker, ask, 12, 2, max_wait=60_000, min_bytes=1))
    await asyncio.sleep(0)
    wanted = partition.as_follower.fetch_position(1_000)
    assert wanted is not None
    batch = bytearray(plain_batch("three"))
    batch[0:8] = (2).to_bytes(8, "big")
    batch[12:16] = (5).to_bytes(4, "big")
    news = FetchedPartition(partition.id, 3, 0, records=memoryview(bytes(batch)))
    partition.as_follower.take_answer(wanted, news, 1_000)
    assert bool((await waiting).records)
