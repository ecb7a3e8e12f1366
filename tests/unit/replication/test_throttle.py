"""The throttle of moves: right on average, for replicas that a move adds and for no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.batches import plain_batch
from support.other_nodes import FakeCluster
from support.quiet_node import start_quiet_node
from tidemill.cluster.messages import FetchPartition, FetchRequest, RequestHeader
from tidemill.control.commands import CreateTopic, SetTopicConfigs
from tidemill.control.records import PartitionImage
from tidemill.replication.coordinator_log import wait_committed
from tidemill.replication.fetching.leader_service import LeaderService
from tidemill.replication.throttle import MoveThrottle, MoveWatch
from tidemill.server.broker import Broker

LEADS, ADDED, IN_SYNC, BACK = 1, 2, 3, 4
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
        throttle=MoveThrottle(bytes_per_second, node_id=LEADS),
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
    leaders.throttle.sent(PLENTY // 50, leaders._loop.time())
    assert await fetched(broker, leaders, ADDED, max_wait_ms=60_000) > 0


def test_another_rate_counts_at_once_for_what_was_sent_before() -> None:
    throttle = MoveThrottle(1)
    throttle.sent(1_000, 10.0)
    assert throttle.wait_s(110.0) == pytest.approx(900)
    throttle.set_rate(300, 110.0)
    assert throttle.wait_s(110.0) == pytest.approx(3)
    throttle.set_rate(0, 110.0)
    assert throttle.wait_s(110.0) == 0
    throttle.set_rate(1, 110.0)
    assert throttle.wait_s(110.0) == 0, "what was sent without a limit is not owed"


async def test_a_fetch_that_is_held_back_is_answered_when_the_rate_is_raised(broker: Broker) -> None:
    leaders = service(broker, 1)
    leaders.throttle.sent(PLENTY, leaders._loop.time())
    waiting = asyncio.create_task(fetched(broker, leaders, ADDED, max_wait_ms=3_600_000))
    while not leaders._held:  # noqa: ASYNC110 - the state itself
        await asyncio.sleep(0)
    leaders.set_rate(0)
    assert await waiting > 0


@pytest.mark.parametrize(
    ("named", "is_held"), [(f"0:{LEADS}", True), ("*", True), (f"1:{LEADS},0:{BACK}", False), ("", False)]
)
async def test_replicas_whose_topic_names_their_leader_are_held_back_until_they_are_in_sync(
    broker: Broker, named: str, is_held: bool
) -> None:
    configs = {"leader.replication.throttled.replicas": named}
    await broker.controller.submit(SetTopicConfigs(name="t", configs=configs))
    leaders = service(broker, 1)
    assert await fetched(broker, leaders, BACK) > 0
    assert (await fetched(broker, leaders, BACK) == 0) is is_held
    assert await fetched(broker, leaders, IN_SYNC) > 0


async def test_without_a_limit_nobody_is_held_back(broker: Broker) -> None:
    leaders = service(broker, 0)
    for _ in range(3):
        assert await fetched(broker, leaders, ADDED) > 0


# --- moves that never end


def test_a_replica_that_does_not_come_closer_within_half_a_minute_is_stalled() -> None:
    watch = MoveWatch()
    for second in range(31):
        watch.note({"closer": 100 - second, "further": 100 + second, "the same": 100}, 1_000 * second)
        assert second == 30 or watch.stalled == []
    assert watch.stalled == ["further", "the same"]
    watch.note({"further": 50, "the same": 100}, 61_000)
    assert watch.stalled == ["the same"]
    watch.note({}, 62_000)
    assert watch.stalled == [], "the move is over"


def test_a_replica_that_has_everything_is_not_stalled() -> None:
    watch = MoveWatch()
    watch.note({"idle": 0}, 0)
    watch.note({"idle": 0}, 60_000)
    assert watch.stalled == []


async def test_a_move_that_is_slower_than_the_producers_is_a_problem_in_words(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaders = service(broker, 1)
    partition = broker.find.partition(broker.find.topic("t"), 0)
    leaders._led[partition] = None
    await fetched(broker, leaders, ADDED)
    now_ms = broker.clock.now_ms()
    for seconds in (0, 31, 62):
        partition.append(plain_batch("more"), 1_000)
        monkeypatch.setattr(leaders, "_clock", SimpleNamespace(now_ms=lambda s=seconds: now_ms + 1_000 * s))
        await leaders._tick(shrink=False)
    (problem,) = leaders.problems()
    assert f"t-0 to node {ADDED}" in problem
    assert "the throttle of 1 bytes per second" in problem
    monkeypatch.setattr(leaders, "_suspected", lambda: {ADDED})
    await leaders._tick(shrink=False)
    assert leaders.problems() == [], "a node that is down is not slowed down by the throttle"
    monkeypatch.undo()
    leaders.set_rate(0)
    await leaders._tick(shrink=False)
    assert leaders.problems() == []
