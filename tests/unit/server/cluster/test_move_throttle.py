"""The throttle of moves by Kafka's dynamic configs: on both sides, changed while a move runs, kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from support.product_cluster import ProductCluster
from support.virtual_loop import run_virtual
from tidemill.config.broker_keys import FOLLOWER_RATE, LEADER_RATE
from tidemill.control.commands import CreateTopic
from tidemill.errors import ErrorCode
from tidemill.records.record import Record, build_batch
from tidemill.replication.partition import Partition

TOPIC, BROKER = 2, 4
SET, DELETE = 0, 1
HOME, TARGET = 1, 2
#: More than a leader gives for one partition in one answer.
BATCHES, BATCH_BYTES = 30, 100_000
SLOW = "100"


def on_two_nodes(story: Callable[[ProductCluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with ProductCluster(2) as cluster:
            command = CreateTopic(
                name="t", topic_id=uuid4(), assignments=((HOME,),), configs={"retention.ms": "-1"}
            )
            await cluster.run(HOME, cluster.broker(HOME).controller.submit(command))
            await cluster.until(lambda: cluster.leader("t") == HOME)
            batch = build_batch([Record(None, bytes(BATCH_BYTES), 0)])
            for _ in range(BATCHES):
                await cluster.run(HOME, append(cluster, batch))
            await cluster.until(lambda: cluster.led("t").high_watermark == BATCHES)
            await story(cluster)

    run_virtual(main, seed=1)


async def append(cluster: ProductCluster, batch: bytes) -> None:
    cluster.led("t").append(batch, 0)


async def alter(cluster: ProductCluster, kind: int, name: str, **rates: str | None) -> None:
    """Set configs, or remove those that are None, as Kafka's tools do; any node takes that."""
    changes = [
        {"name": key.replace("_", "."), "config_operation": DELETE if value is None else SET, "value": value}
        for key, value in rates.items()
    ]
    asked = [{"resource_type": kind, "resource_name": name, "configs": changes}]
    answer = await cluster.ask(HOME, "IncrementalAlterConfigs", 1, resources=asked, validate_only=False)
    assert answer.responses[0].error_code is ErrorCode.none, answer


def as_names(name: str, value: str | None) -> dict[str, str | None]:
    return {name.replace(".", "_"): value}


async def move(cluster: ProductCluster, *target: int) -> None:
    partitions: list[dict[str, Any]] = [{"partition_index": 0, "replicas": list(target)}]
    answer = await cluster.ask(
        HOME,
        "AlterPartitionReassignments",
        0,
        timeout=10_000,
        topics=[{"name": "t", "partitions": partitions}],
    )
    assert answer.responses[0].partitions[0].error_code is ErrorCode.none, answer


def copy(cluster: ProductCluster, node_id: int = TARGET) -> Partition | None:
    """The replica that a node has."""
    broker = cluster.broker(node_id)
    topic = broker.image.topics.get("t")
    return None if topic is None else broker.replicas.peek(topic.id, 0)


def copied(cluster: ProductCluster) -> int:
    replica = copy(cluster)
    return 0 if replica is None else replica.log_end_offset


async def is_slow(cluster: ProductCluster) -> None:
    """One answer is copied, and half an hour of virtual time later there is no other."""
    await cluster.until(lambda: copied(cluster) > 0)
    first = copied(cluster)
    assert first < BATCHES
    await asyncio.sleep(1_800)
    assert copied(cluster) == first


def in_sync(cluster: ProductCluster) -> int:
    return len(cluster.broker(HOME).image.topics["t"].partitions[0].isr)


def is_moved(cluster: ProductCluster) -> bool:
    return cluster.broker(HOME).image.topics["t"].partitions[0].replicas == (TARGET,)


@pytest.mark.parametrize(
    ("rate", "node", "after"),
    [
        (LEADER_RATE, HOME, "100000000"),
        (FOLLOWER_RATE, TARGET, None),
        (LEADER_RATE, "", None),
        (FOLLOWER_RATE, "", "100000000"),
    ],
)
def test_a_move_keeps_to_the_rate_of_either_side_until_it_is_raised_or_removed(
    rate: str, node: int | str, after: str | None
) -> None:
    async def story(cluster: ProductCluster) -> None:
        await alter(cluster, BROKER, str(node), **as_names(rate, SLOW))
        await move(cluster, TARGET)
        await is_slow(cluster)
        await alter(cluster, BROKER, str(node), **as_names(rate, after))
        await cluster.until(lambda: is_moved(cluster))

    on_two_nodes(story)


@pytest.mark.parametrize(("rate", "node"), [(LEADER_RATE, TARGET), (FOLLOWER_RATE, HOME)])
def test_the_rate_of_a_node_that_is_not_on_that_side_slows_nothing_down(rate: str, node: int) -> None:
    async def story(cluster: ProductCluster) -> None:
        await alter(cluster, BROKER, str(node), **as_names(rate, SLOW))
        await move(cluster, TARGET)
        await cluster.until(lambda: is_moved(cluster))

    on_two_nodes(story)


@pytest.mark.parametrize(
    ("rate", "replicas", "named"),
    [
        (LEADER_RATE, "leader_replication_throttled_replicas", HOME),
        (FOLLOWER_RATE, "follower_replication_throttled_replicas", TARGET),
    ],
)
def test_a_replica_that_comes_back_is_throttled_if_its_topic_says_so(
    rate: str, replicas: str, named: int
) -> None:
    async def story(cluster: ProductCluster) -> None:
        await move(cluster, HOME, TARGET)
        await cluster.until(lambda: in_sync(cluster) == 2)
        await cluster.kill(TARGET)
        await cluster.until(lambda: in_sync(cluster) == 1)
        batch = build_batch([Record(None, bytes(BATCH_BYTES), 0)])
        for _ in range(BATCHES):
            await cluster.run(HOME, append(cluster, batch))
        await alter(cluster, BROKER, "", **as_names(rate, SLOW))
        await alter(cluster, TOPIC, "t", **{replicas: f"0:{named}"})
        await cluster.start(TARGET)
        await cluster.until(lambda: copied(cluster) > BATCHES)
        first = copied(cluster)
        await asyncio.sleep(1_800)
        assert copied(cluster) == first < 2 * BATCHES
        await alter(cluster, TOPIC, "t", **{replicas: None})
        await cluster.until(lambda: in_sync(cluster) == 2)

    on_two_nodes(story)


def test_rates_are_kept_over_a_restart_and_the_nodes_own_comes_first() -> None:
    async def story(cluster: ProductCluster) -> None:
        await alter(cluster, BROKER, "", **as_names(LEADER_RATE, "400"), **as_names(FOLLOWER_RATE, "300"))
        await alter(cluster, BROKER, str(TARGET), **as_names(FOLLOWER_RATE, "200"))
        await cluster.kill(TARGET)
        await cluster.until(lambda: not cluster.broker(HOME).image.live(TARGET))
        await cluster.start(TARGET, move_bytes_per_second=77)
        membership = cluster.nodes[TARGET].node.membership
        assert membership is not None
        sides = membership.leaders.throttle, membership.fetcher.throttle
        assert [each.bytes_per_second for each in sides] == [400, 200]
        await alter(cluster, BROKER, "", **as_names(LEADER_RATE, None), **as_names(FOLLOWER_RATE, None))
        await cluster.until(lambda: [each.bytes_per_second for each in sides] == [77, 200])

    on_two_nodes(story)
