"""What clients see when the high watermark lags behind this node's disk, and when another node leads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from support.batches import plain_batch
from support.exchange import Answer, Exchange, fetch_part, produce_part
from support.leadership import change_in_sync, elect, follower_flushed, led
from tidemill.control.commands import CreateTopic
from tidemill.errors import ErrorCode
from tidemill.replication.partition import Partition
from tidemill.server.broker import Broker
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.coordinators.transactions import TRANSACTIONS

Ask = Callable[..., Awaitable[Any]]
LATEST = -1
LONG = 100_000
FOLLOWER, OTHER = 2, 2
PRODUCER = (7, 0, 0)


@pytest.fixture
async def node() -> AsyncIterator[Exchange]:
    async with Exchange({"t": (1, {})}) as started:
        yield started


def lagging(node: Exchange) -> Partition:
    """The partition with a second in-sync replica, of whose disk nothing is known yet."""
    partition = node.partition("t")
    change_in_sync(partition, (FOLLOWER,))
    return partition


def produced(answer: Answer) -> tuple[ErrorCode, int]:
    (result,) = answer.value.responses[0].partition_responses
    return ErrorCode(result.error_code), result.base_offset


def fetched(answer: Answer) -> Any:
    (result,) = answer.value.responses[0].partitions
    return result


# --- a high watermark below the durable offset


async def test_acks_all_wait_for_the_in_sync_replicas_and_acks_1_for_the_leaders_disk(
    node: Exchange,
) -> None:
    partition = lagging(node)
    one = node.produce(9, produce_part("t", plain_batch("a")), acks=1)
    await node.settle()
    assert not one.arrived, "not before the flush"
    await node.flush()
    assert produced(one) == (ErrorCode.none, 0)
    every = node.produce(9, produce_part("t", plain_batch("b")), acks=-1)
    await node.flush()
    assert not every.arrived
    follower_flushed(partition, FOLLOWER, 1)
    await node.settle()
    assert not every.arrived
    follower_flushed(partition, FOLLOWER, 2)
    await node.settle()
    assert produced(every) == (ErrorCode.none, 1)


@pytest.mark.parametrize("acks", [1, -1])
async def test_a_batch_that_was_there_already_is_answered_when_it_is_committed(
    node: Exchange, acks: int
) -> None:
    partition = lagging(node)
    batch = plain_batch("a", producer=PRODUCER)
    node.produce(9, produce_part("t", batch), acks=0)
    await node.flush()
    again = node.produce(9, produce_part("t", batch), acks=acks)
    await node.flush()
    assert not again.arrived
    follower_flushed(partition, FOLLOWER, 1)
    await node.settle()
    assert produced(again) == (ErrorCode.none, 0)


async def test_between_the_high_watermark_and_the_log_end_a_fetch_is_empty_and_waits(node: Exchange) -> None:
    partition = lagging(node)
    node.produce(9, produce_part("t", plain_batch("a", "b")), acks=0)
    await node.flush()
    for offset in (0, 1, 2):
        answer = node.fetch(12, fetch_part("t", offset))
        await node.settle()
        result = fetched(answer)
        assert (result.error_code, result.high_watermark, result.records) == (ErrorCode.none, 0, b"")
    waiting = node.fetch(12, fetch_part("t", 0), max_wait=LONG, min_bytes=1)
    await node.settle()
    assert not waiting.arrived
    follower_flushed(partition, FOLLOWER, 2)
    await node.settle()
    assert fetched(waiting).records
    behind = node.fetch(12, fetch_part("t", 3))
    await node.settle()
    assert fetched(behind).error_code == ErrorCode.offset_out_of_range


async def listed(node: Exchange, timestamp: int, version: int = 5) -> Any:
    partitions = [{"partition_index": 0, "timestamp": timestamp}]
    answer = await node.ask(
        "ListOffsets", version, replica_id=-1, topics=[{"name": "t", "partitions": partitions}]
    )
    return answer.topics[0].partitions[0]


async def test_the_latest_offset_is_not_told_before_it_is_known_to_be_no_older_than_one_that_was(
    node: Exchange,
) -> None:
    await node.write("t", "a", timestamp_ms=100)
    node.produce(9, produce_part("t", plain_batch("b", timestamp_ms=200)), acks=0)
    await node.settle()
    partition = node.partition("t")
    partition.become_leader(led(partition.leader_epoch + 1, (FOLLOWER,)))
    await node.flush()
    assert (partition.high_watermark, partition.log_end_offset) == (1, 2)
    assert (await listed(node, LATEST)).error_code == ErrorCode.offset_not_available
    assert (await listed(node, LATEST, version=4)).error_code == ErrorCode.leader_not_available
    assert (await listed(node, 150)).error_code == ErrorCode.offset_not_available
    assert (await listed(node, 50)).offset == 0, "what is found is known"
    follower_flushed(partition, FOLLOWER, 2)
    assert (await listed(node, LATEST)).offset == 2
    assert (await listed(node, 150)).offset == 1
    assert (await listed(node, 250)).error_code == ErrorCode.none


async def test_an_epoch_that_is_newer_than_all_known_is_another_log(node: Exchange) -> None:
    await node.write("t", "a", "b")
    epoch = node.partition("t").leader_epoch
    for offset in (2, 5):
        answer = node.fetch(
            12, fetch_part("t", offset, last_fetched_epoch=epoch + 3), max_wait=LONG, min_bytes=1
        )
        await node.settle()
        result = fetched(answer)
        assert result.error_code == ErrorCode.none
        assert (result.diverging_epoch.epoch, result.diverging_epoch.end_offset) == (epoch, 2)


# --- another leader


async def test_whoever_waits_hears_that_another_node_leads(node: Exchange) -> None:
    await node.write("t", "a")
    fetching = node.fetch(12, fetch_part("t", 1), max_wait=LONG, min_bytes=1)
    await node.settle()
    clients = [node.node.connect() for _ in range(3)]
    answers: list[Any] = []
    for client, acks in zip(clients[:2], (1, -1), strict=True):
        part = {"name": "t", "partition_data": [{"index": 0, "records": plain_batch("b")}]}
        body = {"acks": acks, "timeout": LONG, "topic_data": [part]}
        client.send(0, 9, body, answers.append)
    topics = [{"name": "t", "partitions": [{"partition_index": 0, "offset": 3}]}]
    clients[2].send(21, 2, {"topics": topics, "timeout": LONG}, answers.append)
    await node.settle()
    assert not fetching.arrived
    assert not answers
    await elect(node.node.broker.controller, "t", 0, OTHER)
    await node.settle()
    for client in clients:
        client.receive()
    assert fetched(fetching).error_code == ErrorCode.not_leader_or_follower
    codes = [answer.responses[0].partition_responses[0].error_code for answer in answers[:2]]
    codes.append(answers[2].topics[0].partitions[0].error_code)
    assert codes == [ErrorCode.not_leader_or_follower] * 3
    await node.flush()
    assert len(answers) == 3, "nobody is answered twice"


async def test_the_epoch_of_a_request_is_compared_before_it_is_asked_who_leads(node: Exchange) -> None:
    await node.write("t", "a")
    epoch = await elect(node.node.broker.controller, "t", 0, OTHER)
    codes = []
    for named in (-1, epoch - 1, epoch, epoch + 1):
        answer = node.fetch(12, fetch_part("t", current_leader_epoch=named))
        await node.settle()
        codes.append(ErrorCode(fetched(answer).error_code))
    assert codes == [
        ErrorCode.not_leader_or_follower,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.not_leader_or_follower,
        ErrorCode.unknown_leader_epoch,
    ]


async def test_this_node_leads_again_at_a_higher_epoch(node: Exchange) -> None:
    await node.write("t", "a")
    await elect(node.node.broker.controller, "t", 0, OTHER)
    refused = node.produce(9, produce_part("t", plain_batch("b")))
    await node.flush()
    assert produced(refused)[0] == ErrorCode.not_leader_or_follower
    epoch = await elect(node.node.broker.controller, "t", 0, node.node.broker.node_id)
    assert await node.write("t", "b") == 1
    latest = await listed(node, LATEST)
    assert (latest.offset, latest.leader_epoch) == (2, epoch)


# --- coordinators


async def elect_all(broker: Broker, topic: str, leader: int) -> None:
    for index in range(len(broker.image.topics[topic].partitions)):
        await elect(broker.controller, topic, index, leader)


async def test_a_group_is_not_coordinated_here_once_another_node_leads_its_log(
    broker: Broker, ask: Ask
) -> None:
    await broker.controller.submit(CreateTopic(name="t", topic_id=uuid4(), partitions=1, replication=1))
    join = {
        "group_id": "g",
        "session_timeout": 10_000,
        "rebalance_timeout": 10_000,
        "member_id": "",
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b""}],
    }
    joined = await ask(broker, "JoinGroup", 3, **join)
    member = {"group_id": "g", "generation_id": joined.generation_id, "member_id": joined.member_id}
    sync = await ask(broker, "SyncGroup", 3, **member, assignments=[])
    assert (await ask(broker, "Heartbeat", 3, **member)).error_code == sync.error_code == ErrorCode.none
    entry = {"partition_index": 0, "committed_offset": 5, "committed_leader_epoch": 0}
    commit = {
        "group_id": "g",
        "generation_id_or_member_epoch": joined.generation_id,
        "member_id": joined.member_id,
        "topics": [{"name": "t", "partitions": [entry]}],
    }
    committed = await ask(broker, "OffsetCommit", 7, **commit)
    assert committed.topics[0].partitions[0].error_code == ErrorCode.none
    await elect_all(broker, GROUPS.topic, OTHER)
    assert (await ask(broker, "Heartbeat", 3, **member)).error_code == ErrorCode.not_coordinator
    refused = await ask(broker, "OffsetCommit", 7, **commit)
    assert refused.topics[0].partitions[0].error_code == ErrorCode.not_coordinator
    await elect_all(broker, GROUPS.topic, broker.node_id)
    stored = await ask(broker, "OffsetFetch", 7, group_id="g", topics=None)
    assert stored.topics[0].partitions[0].committed_offset == 5, "what was kept is found again"
    assert (await ask(broker, "Heartbeat", 3, **member)).error_code == ErrorCode.none


async def test_a_transactional_id_is_not_coordinated_here_once_another_node_leads_its_log(
    broker: Broker, ask: Ask
) -> None:
    init = {"transactional_id": "x", "transaction_timeout": 60_000}
    first = await ask(broker, "InitProducerId", 1, **init)
    assert (first.error_code, first.producer_epoch) == (ErrorCode.none, 0)
    await elect_all(broker, TRANSACTIONS.topic, OTHER)
    assert (await ask(broker, "InitProducerId", 1, **init)).error_code == ErrorCode.not_coordinator
    await elect_all(broker, TRANSACTIONS.topic, broker.node_id)
    again = await ask(broker, "InitProducerId", 1, **init)
    assert (again.producer_id, again.producer_epoch) == (first.producer_id, 1), "what was kept is found again"
