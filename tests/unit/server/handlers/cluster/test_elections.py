"""ElectLeaders, in every version: preferred and unclean, on a node whose metadata has others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest

from support.other_nodes import FakeCluster
from tidemill.cluster.messages import ClusterErrorCode, PartitionId, ReplicaEnd
from tidemill.control.commands import CreateTopic
from tidemill.control.image import TopicImage
from tidemill.control.records import PartitionImage
from tidemill.errors import ErrorCode, NodeUnavailable
from tidemill.server.broker import Broker
from tidemill.server.cluster.replica_ends import Ends, ReplicaEnds, furthest
from tidemill.wire.apis import APIS_BY_NAME

Ask = Callable[..., Awaitable[Any]]
VERSIONS = APIS_BY_NAME["ElectLeaders"].versions
PREFERRED, UNCLEAN = 0, 1
WHERE = PartitionId(UUID(int=1), 0)


@pytest.fixture
async def cluster(broker: Broker) -> FakeCluster:
    """Nodes 1 to 3, all live; node 1 is the broker's."""
    return await FakeCluster.around(broker, {2: None, 3: None})


async def create(broker: Broker, name: str, *assignments: tuple[int, ...]) -> None:
    await broker.controller.submit(
        CreateTopic(name=name, topic_id=uuid4(), assignments=assignments or ((1,),))
    )


def codes(answer: Any) -> dict[str, list[tuple[int, ErrorCode]]]:
    return {
        topic.topic: [(each.partition_id, each.error_code) for each in topic.partition_result]
        for topic in answer.replica_election_results
    }


async def elect(broker: Broker, ask: Ask, version: int, *topics: str, **body: Any) -> Any:
    asked = [{"topic": name, "partitions": [0]} for name in topics] or None
    return await ask(broker, "ElectLeaders", version, topic_partitions=asked, **{"timeout": 60_000, **body})


@pytest.mark.parametrize("version", VERSIONS)
async def test_elect_leaders_of_named_partitions(broker: Broker, ask: Ask, version: int) -> None:
    await create(broker, "a", (1,), (1,))
    asked = [{"topic": "a", "partitions": [0, 9]}, {"topic": "missing", "partitions": [0]}]
    answer = await ask(broker, "ElectLeaders", version, topic_partitions=asked, election_type=PREFERRED)
    assert codes(answer) == {
        "a": [(0, ErrorCode.election_not_needed), (9, ErrorCode.unknown_topic_or_partition)],
        "missing": [(0, ErrorCode.unknown_topic_or_partition)],
    }
    assert all(each.error_message for each in answer.replica_election_results[0].partition_result)
    if version >= 1:
        assert answer.error_code is ErrorCode.none


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_preferred_leader_takes_over_once_the_present_one_has_resigned(
    broker: Broker, cluster: FakeCluster, ask: Ask, version: int
) -> None:
    await create(broker, "moved", (2, 1))
    await create(broker, "behind", (2, 1))
    await create(broker, "fine", (1, 2))
    await cluster.place("moved", 0, PartitionImage(1, 4, (2, 1), (2, 1)))
    await cluster.place("behind", 0, PartitionImage(1, 4, (2, 1), (1,)))
    asked = asyncio.ensure_future(elect(broker, ask, version))
    wished = asyncio.Event()
    unsubscribe = broker.controller.subscribe(lambda old, new, delta: wished.set())
    await wished.wait()
    unsubscribe()
    assert broker.image.topics["moved"].partitions[0].successor == 2
    assert not asked.done(), "the present leader has to resign first"
    await cluster.place("moved", 0, PartitionImage(2, 5, (2, 1), (2, 1)))
    assert codes(await asked) == {
        "moved": [(0, ErrorCode.none)],
        "behind": [(0, ErrorCode.preferred_leader_not_available)],
    }


async def test_a_leader_that_does_not_resign_in_time_is_told(
    broker: Broker, cluster: FakeCluster, ask: Ask
) -> None:
    await create(broker, "t", (2, 1))
    await cluster.place("t", 0, PartitionImage(1, 4, (2, 1), (2, 1)))
    assert codes(await elect(broker, ask, 2, "t", timeout=0)) == {"t": [(0, ErrorCode.request_timed_out)]}


@pytest.mark.parametrize("version", [1, 2])
async def test_unclean_elections_are_for_partitions_without_a_leader(
    broker: Broker, ask: Ask, version: int
) -> None:
    await create(broker, "a")
    answer = await elect(broker, ask, version, "a", "missing", election_type=UNCLEAN)
    assert answer.error_code is ErrorCode.none
    assert codes(answer) == {
        "a": [(0, ErrorCode.election_not_needed)],
        "missing": [(0, ErrorCode.unknown_topic_or_partition)],
    }
    unknown = await elect(broker, ask, version, "a", election_type=7)
    assert (unknown.error_code, codes(unknown)) == (
        ErrorCode.invalid_request,
        {"a": [(0, ErrorCode.invalid_request)]},
    )


@pytest.mark.parametrize("version", [1, 2])
async def test_an_unclean_election_picks_the_replica_that_reaches_furthest(
    broker: Broker, cluster: FakeCluster, ask: Ask, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    await create(broker, "t", (1, 2, 3))
    await cluster.place("t", 0, PartitionImage(-1, 4, (1, 2, 3), ()))
    asked: list[tuple[str, Sequence[int]]] = []

    async def ends(topic: TopicImage, indexes: Sequence[int]) -> Mapping[int, Ends]:
        asked.append((topic.name, indexes))
        return {0: {1: ReplicaEnd(WHERE, 0, 3, 90), 3: ReplicaEnd(WHERE, 0, 4, 20)}}

    broker.replica_ends = ends
    assert codes(await elect(broker, ask, version, "t", election_type=UNCLEAN)) == {
        "t": [(0, ErrorCode.none)]
    }
    placed = broker.image.topics["t"].partitions[0]
    assert (placed.leader, placed.leader_epoch, placed.isr) == (3, 5, (3,))
    assert asked == [("t", [0])]
    assert "the-client" in caplog.text, "who asked is logged"


async def test_nobody_is_elected_uncleanly_while_a_live_replica_is_silent(
    broker: Broker, cluster: FakeCluster, ask: Ask
) -> None:
    await create(broker, "t", (1, 2, 3))
    await cluster.place("t", 0, PartitionImage(-1, 4, (1, 2, 3), ()))

    async def ends(topic: TopicImage, indexes: Sequence[int]) -> Mapping[int, Ends]:
        return {0: {1: ReplicaEnd(WHERE, 0, 3, 90), 2: None}}

    broker.replica_ends = ends
    answer = await elect(broker, ask, 2, "t", election_type=UNCLEAN)
    assert codes(answer) == {"t": [(0, ErrorCode.eligible_leaders_not_available)]}
    assert broker.image.topics["t"].partitions[0].leader == -1


def test_the_last_epoch_counts_before_the_end() -> None:
    def end(epoch: int, offset: int, error: int = 0) -> ReplicaEnd:
        return ReplicaEnd(WHERE, error, epoch, offset)

    assert furthest({1: end(2, 100), 2: end(3, 5), 3: end(3, 4)}) == 2
    assert furthest({1: end(3, 5), 2: end(3, 5)}) == 1
    assert furthest({1: end(3, 5), 2: end(9, 9, ClusterErrorCode.STORAGE_ERROR)}) == 1
    assert furthest({1: end(3, 5), 2: None}) is None
    assert furthest({2: end(9, 9, ClusterErrorCode.STORAGE_ERROR)}) is None
    assert furthest({}) is None


async def test_ends_come_from_this_node_and_from_others_that_are_live(
    broker: Broker, cluster: FakeCluster
) -> None:
    await create(broker, "t", (1, 2, 3))
    topic = broker.find.topic("t")
    broker.find.partition(topic, 0)
    await cluster.kill(3)
    asked: list[int] = []

    class Peers:
        async def request(self, node_id: int, *rest: Any, **options: Any) -> Any:
            asked.append(node_id)
            raise NodeUnavailable("away")

    ends = ReplicaEnds(broker, Peers())  # type: ignore[arg-type]
    found = await ends.of(topic, [0])
    where = PartitionId(topic.id, 0)
    assert found == {0: {1: ReplicaEnd(where, 0, -1, 0, 0), 2: None}}
    assert asked == [2]
    assert ends.here(PartitionId(topic.id, 7)).error == ClusterErrorCode.NOT_REPLICA_FOR_PARTITION
