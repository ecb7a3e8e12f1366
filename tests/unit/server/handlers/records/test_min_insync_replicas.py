"""acks=all waits for enough in-sync replicas; acks=1 is answered from the leader's own disk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.batches import plain_batch
from support.exchange import Answer, Exchange, produce_part
from support.leadership import change_in_sync, follower_flushed
from tidemill.errors import ErrorCode


@pytest.fixture
async def node() -> AsyncIterator[Exchange]:
    async with Exchange({"t": (1, {"min.insync.replicas": "2"})}) as started:
        yield started


def result(answer: Answer) -> Any:
    (topic,) = answer.value.responses
    (partition,) = topic.partition_responses
    return partition


def produce(node: Exchange, acks: int) -> Answer:
    return node.produce(9, produce_part("t", plain_batch("v")), acks=acks)


@pytest.mark.parametrize(
    ("acks", "code", "end"), [(-1, ErrorCode.not_enough_replicas, 0), (1, ErrorCode.none, 1)]
)
async def test_too_few_replicas_refuse_acks_all_only(
    node: Exchange, acks: int, code: ErrorCode, end: int
) -> None:
    change_in_sync(node.partition("t"), [], min_isr=2)
    answer = produce(node, acks)
    await node.flush()
    assert (result(answer).error_code, node.partition("t").log_end_offset) == (code, end)


async def test_min_insync_replicas_above_the_number_of_replicas_means_all_of_them(node: Exchange) -> None:
    answer = produce(node, -1)
    await node.flush()
    assert result(answer).error_code == ErrorCode.none


async def test_acks_all_waits_for_the_followers_disk_and_acks_1_does_not(node: Exchange) -> None:
    partition = node.partition("t")
    change_in_sync(partition, [2], min_isr=2)
    one, everybody = produce(node, 1), produce(node, -1)
    await node.settle()
    assert not one.arrived, "not before the leader's own flush"
    await node.flush()
    assert (one.arrived, everybody.arrived) == (True, False)
    follower_flushed(partition, 2, 2)
    await node.settle()
    assert (result(one).base_offset, result(everybody).base_offset) == (0, 1)


async def test_a_set_that_shrinks_too_far_meanwhile_is_told_as_unknown(node: Exchange) -> None:
    partition = node.partition("t")
    change_in_sync(partition, [2], min_isr=2)
    answer = produce(node, -1)
    await node.flush()
    assert not answer.arrived
    change_in_sync(partition, [], min_isr=2)
    await node.settle()
    assert result(answer).error_code == ErrorCode.not_enough_replicas_after_append
