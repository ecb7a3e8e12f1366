"""The throttle of moves: right on average, for replicas that a move adds and for no others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.batches import plain_batch
from support.other_nodes import FakeCluster
from support.quiet_node import start_quiet_node
from tidemill.cluster.messages import FetchPartition, FetchRequest, RequestHeader
from tidemill.control.commands import CreateTopic
from tidemill.control.records import PartitionImage
from tidemill.replication.coordinator_log import wait_committed
from tidemill.replication.leader_service import LeaderService
from tidemill.replication.throttle import MoveThrottle
from tidemill.server.broker import Broker

ADDED, IN_SYNC, BACK = 2, 3, 4
PLENTY = 10**6


@given(st.lists(st.integers(0, 10_000), max_size=50), st.integers(1, 10_000))
def test_the_rate_is_right_on_average(sizes: list[int], rate: int) -> None:
    throttle, now_s = MoveThrottle(rate), 100.0
    for size in sizes:
        now_s += throttle.wait_s(now_s)
        throttle.sent(size, now_s)
    now_s += throttle.wait_s(now_s)
    assert now_s - 100.0 == pytest.approx(sum(sizes) / rate)


def test_zero_means_unlimited() -> None:
    throttle = MoveThrottle(0)
    throttle.sent(10**12, 1.0)
    assert throttle.wait_s(1.0) == 0


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    """A node that leads t-0, with two records, and moves it to one node more."""
    node = await start_quiet_node(tmp_path)
    broker = node.broker
    cluster = await FakeCluster.around(broker, {ADDED: None, IN_SYNC: None, BACK: None})
    await broker.controller.submit(CreateTopic(name="t", topic_id=uuid4(), assignments=((1,),)))
    partition = broker.find.partition(broker.find.topic("t"), 0)
    for value in ("one", "two"):
        partition.append(plain_batch(value), 1_000)
    await wait_committed(partition, 2)
    moving = PartitionImage(1, 0, (1, IN_SYNC, BACK, ADDED), (1, IN_SYNC), adding=(ADDED,))
    await cluster.place("t", 0, moving)
    yield broker
    await node.stop()


def service(broker: Broker, bytes_per_second: int) -> LeaderService:
    async def propose(*_: Any) -> None:
        raise AssertionError("no in-sync set changes here")

    return LeaderService(
        broker.replicas,
        None,  # type: ignore[arg-type]
        broker.clock,
        propose=propose,
        report_unfit=lambda partition, reason: None,
        move_bytes_per_second=bytes_per_second,
    )


async def fetched(broker: Broker, leaders: LeaderService, node_id: int, max_wait_ms: int = 0) -> int:
    """How many bytes of records a follower that has nothing gets."""
    partition = broker.find.partition(broker.find.topic("t"), 0)
    wanted = FetchPartition(partition.id, 0, PLENTY, partition.leader_epoch, -1, 0)
    request = FetchRequest(RequestHeader(1, 1, node_id, 60_000), [wanted], max_wait_ms)
    answer = await leaders.fetch(request)
    return sum(len(each.records) for each in answer.partitions)


async def test_only_a_replica_that_a_move_adds_is_held_back(broker: Broker) -> None:
    leaders = service(broker, 1)
    assert await fetched(broker, leaders, ADDED) > 0
    assert await fetched(broker, leaders, ADDED) == 0, "what it got is not paid for yet"
    for node_id in (IN_SYNC, BACK):
        assert await fetched(broker, leaders, node_id) > 0
        assert await fetched(broker, leaders, node_id) > 0


async def test_a_fetch_that_is_held_back_is_answered_when_the_throttle_lets_go(broker: Broker) -> None:
    leaders = service(broker, PLENTY)
    leaders._throttle.sent(PLENTY // 50, leaders._loop.time())
    assert await fetched(broker, leaders, ADDED, max_wait_ms=60_000) > 0


async def test_without_a_limit_nobody_is_held_back(broker: Broker) -> None:
    leaders = service(broker, 0)
    for _ in range(3):
        assert await fetched(broker, leaders, ADDED) > 0
