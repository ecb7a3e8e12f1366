"""Produce and Fetch at the wrong node, or with an old epoch, tell the present leader and where it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from support.batches import plain_batch
from support.other_nodes import FakeCluster
from tidemill.control.commands import CreateTopic
from tidemill.control.records import PartitionImage
from tidemill.errors import ErrorCode
from tidemill.server.broker import Broker
from tidemill.server.handlers.records.current_leaders import CurrentLeaders
from tidemill.wire.apis import APIS_BY_NAME

Ask = Callable[..., Awaitable[Any]]
PRODUCE, FETCH = APIS_BY_NAME["Produce"].versions, APIS_BY_NAME["Fetch"].versions


@pytest.fixture
async def cluster(broker: Broker) -> FakeCluster:
    cluster = await FakeCluster.around(broker, {2: "b", 3: None})
    await broker.controller.submit(CreateTopic(name="t", topic_id=uuid4(), assignments=((1, 2),)))
    await cluster.place("t", 0, PartitionImage(2, 7, (1, 2), (1, 2)))
    return cluster


def topic(broker: Broker, version: int, by_name: str) -> dict[str, Any]:
    return {"topic_id": broker.image.topics["t"].id} if version >= 13 else {by_name: "t"}


async def produce(broker: Broker, ask: Ask, version: int) -> tuple[Any, Any]:
    data = [{"index": 0, "records": plain_batch("v")}]
    body = [{**topic(broker, version, "name"), "partition_data": data}]
    answer = await ask(broker, "Produce", version, acks=-1, timeout=1_000, topic_data=body)
    return answer, answer.responses[0].partition_responses[0]


async def fetch(broker: Broker, ask: Ask, version: int, epoch: int = -1) -> tuple[Any, Any]:
    part: dict[str, Any] = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 100}
    if version >= 9:
        part["current_leader_epoch"] = epoch
    body = [{**topic(broker, version, "topic"), "partitions": [part]}]
    answer = await ask(broker, "Fetch", version, max_wait=0, min_bytes=0, max_bytes=100, topics=body)
    return answer, answer.responses[0].partitions[0]


@pytest.mark.parametrize("version", PRODUCE)
async def test_a_producer_at_the_wrong_node_is_told_the_leader(
    broker: Broker, cluster: FakeCluster, ask: Ask, version: int
) -> None:
    answer, partition = await produce(broker, ask, version)
    assert partition.error_code is ErrorCode.not_leader_or_follower
    if version >= 10:
        assert (partition.current_leader.leader_id, partition.current_leader.leader_epoch) == (2, 7)
        (node,) = answer.node_endpoints
        assert (node.node_id, node.host, node.port, node.rack) == (2, "host2", 9002, "b")


@pytest.mark.parametrize("version", FETCH)
async def test_a_consumer_at_the_wrong_node_is_told_the_leader(
    broker: Broker, cluster: FakeCluster, ask: Ask, version: int
) -> None:
    await cluster.place("t", 0, PartitionImage(2, 7, (2, 3), (2, 3)))
    answer, partition = await fetch(broker, ask, version)
    assert partition.error_code is ErrorCode.not_leader_or_follower
    if version >= 16:
        assert (partition.current_leader.leader_id, partition.current_leader.leader_epoch) == (2, 7)
        (node,) = answer.node_endpoints
        assert (node.node_id, node.host, node.port, node.rack) == (2, "host2", 9002, "b")


async def test_a_consumer_with_an_old_epoch_is_told_the_new_one(
    broker: Broker, cluster: FakeCluster, ask: Ask
) -> None:
    await cluster.place("t", 0, PartitionImage(1, 8, (1, 2), (1, 2)))
    answer, partition = await fetch(broker, ask, 16, epoch=7)
    assert partition.error_code is ErrorCode.fenced_leader_epoch
    assert (partition.current_leader.leader_id, partition.current_leader.leader_epoch) == (1, 8)
    assert [(node.node_id, node.host) for node in answer.node_endpoints] == [(1, "advertised")]


async def test_a_dead_leader_is_not_told(broker: Broker, cluster: FakeCluster, ask: Ask) -> None:
    await cluster.kill(2)
    answer, partition = await produce(broker, ask, 12)
    assert partition.error_code is ErrorCode.not_leader_or_follower
    assert partition.current_leader.leader_id == -1
    assert not answer.node_endpoints


async def test_other_errors_and_unknown_partitions_have_no_leader(
    broker: Broker, cluster: FakeCluster
) -> None:
    leaders = CurrentLeaders(broker)
    wrong = ErrorCode.not_leader_or_follower
    assert leaders.of("t", 0, ErrorCode.offset_out_of_range) is None
    assert leaders.of("t", 9, wrong) is None
    assert leaders.of("missing", 0, wrong) is None
    assert leaders.of(uuid4(), 0, wrong) is None
    assert leaders.endpoints == []
    assert leaders.of("t", 0, wrong) == (2, 7)
