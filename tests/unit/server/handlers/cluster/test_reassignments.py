"""AlterPartitionReassignments and ListPartitionReassignments, in every version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from support.other_nodes import FakeCluster
from tidemill.control.commands import AlterReassignment, CreateTopic
from tidemill.control.records import PartitionImage
from tidemill.errors import ErrorCode, NodeUnavailable
from tidemill.server.broker import Broker
from tidemill.wire.apis import APIS_BY_NAME

Ask = Callable[..., Awaitable[Any]]
ALTER = APIS_BY_NAME["AlterPartitionReassignments"].versions


@pytest.fixture
async def cluster(broker: Broker) -> FakeCluster:
    """Nodes 1 to 4, and a topic with two partitions on nodes 1 and 2."""
    cluster = await FakeCluster.around(broker, {2: None, 3: None, 4: None})
    await broker.controller.submit(CreateTopic(name="t", topic_id=uuid4(), assignments=((1, 2), (2, 1))))
    return cluster


async def move(
    broker: Broker, ask: Ask, index: int, replicas: list[int] | None, *, version: int = 1, **fields: Any
) -> Any:
    topics = [
        {"name": fields.pop("topic", "t"), "partitions": [{"partition_index": index, "replicas": replicas}]}
    ]
    answer = await ask(broker, "AlterPartitionReassignments", version, topics=topics, timeout=1_000, **fields)
    assert answer.error_code is ErrorCode.none
    return answer.responses[0].partitions[0]


async def moving(broker: Broker, ask: Ask, topics: Any = None) -> list[tuple[Any, ...]]:
    answer = await ask(broker, "ListPartitionReassignments", 0, topics=topics, timeout=1_000)
    assert answer.error_code is ErrorCode.none
    return [
        (topic.name, each.partition_index, each.replicas, each.adding_replicas, each.removing_replicas)
        for topic in answer.topics
        for each in topic.partitions
    ]


@pytest.mark.parametrize("version", ALTER)
async def test_a_move_begins_is_listed_and_can_be_cancelled(
    broker: Broker, cluster: FakeCluster, ask: Ask, version: int
) -> None:
    begun = await move(broker, ask, 0, [3, 1], version=version)
    assert (begun.error_code, begun.error_message) == (ErrorCode.none, None)
    assert await moving(broker, ask) == [("t", 0, (3, 1, 2), (3,), (2,))]
    again = await move(broker, ask, 0, [3, 1], version=version)
    assert again.error_code is ErrorCode.none
    cancelled = await move(broker, ask, 0, None, version=version)
    assert cancelled.error_code is ErrorCode.none
    assert await moving(broker, ask) == []
    assert broker.image.topics["t"].partitions[0].replicas == (1, 2)
    nothing = await move(broker, ask, 0, None, version=version)
    assert nothing.error_code is ErrorCode.no_reassignment_in_progress


async def test_another_target_replaces_the_one_of_a_move_under_way(
    broker: Broker, cluster: FakeCluster, ask: Ask
) -> None:
    await move(broker, ask, 0, [3, 1])
    assert (await move(broker, ask, 0, [9, 1])).error_code is ErrorCode.invalid_replica_assignment
    assert await moving(broker, ask) == [("t", 0, (3, 1, 2), (3,), (2,))], "a bad target changes nothing"
    assert (await move(broker, ask, 0, [4, 1])).error_code is ErrorCode.none
    assert await moving(broker, ask) == [("t", 0, (4, 1, 2), (4,), (2,))]


async def test_only_moves_that_are_asked_for_are_listed(
    broker: Broker, cluster: FakeCluster, ask: Ask
) -> None:
    await move(broker, ask, 0, [3, 1])
    await move(broker, ask, 1, [2, 3])

    def asked(name: str, *indexes: int) -> dict[str, Any]:
        return {"name": name, "partition_indexes": indexes}

    found = await moving(broker, ask, [asked("t", 1, 9), asked("missing", 0)])
    assert found == [("t", 1, (2, 3, 1), (3,), (1,))]
    assert await moving(broker, ask, []) == []


@pytest.mark.parametrize(
    ("topic", "index", "replicas", "code"),
    [
        ("missing", 0, [1], ErrorCode.unknown_topic_or_partition),
        ("t", 7, [1], ErrorCode.unknown_topic_or_partition),
        ("t", 0, [], ErrorCode.invalid_replica_assignment),
        ("t", 0, [1, 1], ErrorCode.invalid_replica_assignment),
        ("t", 0, [1, 9], ErrorCode.invalid_replica_assignment),
    ],
)
async def test_a_move_that_cannot_be_is_refused(
    broker: Broker,
    cluster: FakeCluster,
    ask: Ask,
    topic: str,
    index: int,
    replicas: list[int],
    code: ErrorCode,
) -> None:
    result = await move(broker, ask, index, replicas, topic=topic)
    assert (result.error_code, bool(result.error_message)) == (code, True)
    assert await moving(broker, ask) == []


async def test_the_number_of_replicas_changes_only_if_the_request_allows_it(
    broker: Broker, cluster: FakeCluster, ask: Ask
) -> None:
    more = [1, 2, 3]
    refused = await move(broker, ask, 0, more, allow_replication_factor_change=False)
    assert refused.error_code is ErrorCode.invalid_replication_factor
    assert (await move(broker, ask, 0, more)).error_code is ErrorCode.none


async def test_the_controller_decides_and_its_absence_is_told(
    broker: Broker, cluster: FakeCluster, ask: Ask
) -> None:
    asked: list[Any] = []

    async def propose(command: Any) -> Any:
        asked.append(command)
        raise NodeUnavailable("no controller")

    broker.propose = propose
    assert (await move(broker, ask, 0, [3, 1])).error_code is ErrorCode.broker_not_available
    assert asked == [AlterReassignment(name="t", index=0, replicas=(3, 1))]


async def test_a_finished_move_is_not_listed(broker: Broker, cluster: FakeCluster, ask: Ask) -> None:
    await move(broker, ask, 0, [3, 1])
    await cluster.place("t", 0, PartitionImage(1, 0, (3, 1), (3, 1)))
    assert await moving(broker, ask) == []
