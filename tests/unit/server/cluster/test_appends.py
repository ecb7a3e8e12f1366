"""Append: an internal writer's batch, at a leader on another node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from support.product_cluster import ProductCluster
from support.virtual_loop import run_virtual
from tidemill.cluster.messages import AppendRequest, AppendResponse, PartitionId
from tidemill.control.commands import SetTopicConfigs
from tidemill.errors import ApiError, ErrorCode
from tidemill.records.record import Record, build_batch

_TIMEOUT_MS = 10_000


def on_three_nodes(story: Callable[[ProductCluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with ProductCluster(3) as cluster:
            await cluster.create("t", partitions=1)
            await cluster.until(lambda: cluster.leader("t") != -1 and is_in_sync(cluster, 3))
            await story(cluster)

    run_virtual(main, seed=1)


def is_in_sync(cluster: ProductCluster, replicas: int) -> bool:
    return all(
        len(node.broker.image.topics["t"].partitions[0].isr) == replicas for node in cluster.nodes.values()
    )


async def append(cluster: ProductCluster, acks: int = -1, epochs_off: int = 0) -> AppendResponse:
    """Have the leader append one record, asked by another node."""
    leader = cluster.leader("t")
    other = next(node_id for node_id in cluster.nodes if node_id != leader)
    topic = cluster.broker(other).image.topics["t"]
    membership = cluster.nodes[other].node.membership
    assert membership is not None
    make = partial(
        AppendRequest,
        partition=PartitionId(topic.id, 0),
        records=memoryview(build_batch([Record(None, b"x", 0)])),
        required_acks=acks,
        leader_epoch=topic.partitions[0].leader_epoch + epochs_off,
    )
    asked = membership.peers.request(leader, make, AppendResponse, timeout_ms=_TIMEOUT_MS)
    answer: AppendResponse = await cluster.run(other, asked)
    return answer


@pytest.mark.parametrize("acks", [1, -1])
def test_a_batch_is_written_at_the_leader(acks: int) -> None:
    async def story(cluster: ProductCluster) -> None:
        assert [(await append(cluster, acks)).base_offset for _ in range(3)] == [0, 1, 2]
        await cluster.until(lambda: cluster.led("t").high_watermark == 3)

    on_three_nodes(story)


@pytest.mark.parametrize(
    ("acks", "epochs_off", "code"),
    [
        (0, 0, ErrorCode.invalid_required_acks),
        (2, 0, ErrorCode.invalid_required_acks),
        (-1, -1, ErrorCode.fenced_leader_epoch),
        (-1, 1, ErrorCode.unknown_leader_epoch),
    ],
)
def test_other_acks_and_other_epochs_are_refused(acks: int, epochs_off: int, code: ErrorCode) -> None:
    async def story(cluster: ProductCluster) -> None:
        await cluster.move("t")
        with pytest.raises(ApiError) as caught:
            await append(cluster, acks, epochs_off)
        assert caught.value.code is code
        assert cluster.led("t").log_end_offset == 0

    on_three_nodes(story)


def test_nothing_is_written_with_acks_all_while_too_few_replicas_are_in_sync() -> None:
    async def story(cluster: ProductCluster) -> None:
        command = SetTopicConfigs(name="t", configs={"min.insync.replicas": "3"})
        await cluster.run(1, cluster.broker(1).controller.submit(command))
        follower = next(node_id for node_id in cluster.nodes if node_id != cluster.leader("t"))
        await cluster.kill(follower)
        await cluster.until(lambda: is_in_sync(cluster, 2))
        await cluster.until(lambda: cluster.leader("t") != -1)
        with pytest.raises(ApiError) as caught:
            await append(cluster)
        assert caught.value.code is ErrorCode.not_enough_replicas
        assert cluster.led("t").log_end_offset == 0
        assert (await append(cluster, acks=1)).base_offset == 0

    on_three_nodes(story)
