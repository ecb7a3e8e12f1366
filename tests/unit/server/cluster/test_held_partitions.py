"""What a node holds: opened when the metadata gives it, removed when a move has taken it away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from uuid import uuid4

import pytest

from support.batches import plain_batch
from support.other_nodes import FakeCluster
from support.quiet_node import start_quiet_node
from tidemill.control.commands import CreateTopic
from tidemill.control.records import PartitionImage
from tidemill.errors import TooManyFiles
from tidemill.replication.coordinator_log import wait_committed
from tidemill.replication.replicas import Placement
from tidemill.server.broker import Broker
from tidemill.server.cluster import held_partitions
from tidemill.server.cluster.held_partitions import HeldPartitions

ELSEWHERE = PartitionImage(2, 5, (2, 3), (2, 3))
HERE = PartitionImage(1, 6, (1, 2), (1, 2))


class World:
    """A broker in a cluster of three nodes, and what it holds."""

    def __init__(self, broker: Broker, cluster: FakeCluster) -> None:
        self.broker = broker
        self.cluster = cluster
        self.held = HeldPartitions(broker)
        broker.controller.subscribe(lambda old, new, delta: self.held.metadata_changed(new, delta))

    async def write(self, *indexes: int) -> None:
        """Write a record to partitions of topic t that this node leads."""
        topic = self.broker.find.topic("t")
        for index in indexes:
            partition = self.broker.find.partition(topic, index)
            partition.append(plain_batch("a"), 1_000)
            await wait_committed(partition, 1)

    def has_files(self, index: int) -> bool:
        return self.broker.replicas.has_files("t", self.broker.find.topic("t").id, index)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    node = await start_quiet_node(tmp_path)
    cluster = await FakeCluster.around(node.broker, {2: None, 3: None})
    await node.broker.controller.submit(
        CreateTopic(name="t", topic_id=uuid4(), assignments=((1,), (1,), (1,)))
    )
    world = World(node.broker, cluster)
    yield world
    await world.held.stop()
    await node.stop()


async def test_a_partition_that_has_moved_to_other_nodes_is_removed(world: World) -> None:
    await world.write(0, 1)
    world.held.start()
    await world.cluster.place("t", 1, ELSEWHERE)
    await world.until(lambda: not world.has_files(1))
    topic = world.broker.find.topic("t")
    assert world.broker.replicas.peek(topic.id, 1) is None
    assert world.has_files(0)


async def test_a_replica_stays_until_its_move_is_complete(world: World) -> None:
    await world.write(0, 1)
    world.held.start()
    moving = PartitionImage(2, 5, (2, 3, 1), (2, 3, 1), adding=(2, 3), removing=(1,))
    await world.cluster.place("t", 0, moving)
    await world.cluster.place("t", 1, ELSEWHERE)
    await world.until(lambda: not world.has_files(1))
    assert world.has_files(0), "it was looked at before the other"


async def test_a_partition_that_comes_back_begins_empty(world: World) -> None:
    await world.write(0)
    world.held.start()
    await world.cluster.place("t", 0, ELSEWHERE)
    await world.until(lambda: not world.has_files(0))
    await world.cluster.place("t", 0, HERE)
    topic = world.broker.find.topic("t")
    await world.until(lambda: world.broker.replicas.peek(topic.id, 0) is not None)
    assert world.broker.find.partition(topic, 0).log_end_offset == 0


async def test_a_partition_that_was_opened_by_older_metadata_learns_the_newest(world: World) -> None:
    topic = world.broker.find.topic("t")
    before = world.broker.find.held_placement(topic.id, 0)
    assert before is not None
    await world.cluster.place("t", 0, PartitionImage(2, 7, (1, 2), (1, 2)))
    # As the start does it in a thread, while the metadata goes on.
    opened = world.broker.replicas.open(before)
    assert opened.leader_epoch < 7
    world.held.start()
    await world.until(lambda: (opened.leader, opened.leader_epoch) == (2, 7))


async def test_a_partition_that_could_not_be_opened_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_partitions, "_OPEN_AGAIN_S", 0.01)
    broker, topic = world.broker, world.broker.find.topic("t")
    tried = 0

    def refuse(placement: Placement) -> None:
        nonlocal tried
        tried += 1
        raise TooManyFiles("no descriptors are left")

    # A partition without files needs no descriptors.
    monkeypatch.setattr(broker.replicas, "exists_on_disk", lambda placement: True)
    broker.replicas.check_open = refuse
    world.held.start()
    await world.until(lambda: tried > 6)
    (problem,) = world.held.problems()
    assert problem.startswith("3 partitions cannot be opened")
    assert "no descriptors are left" in problem
    broker.replicas.check_open = lambda placement: None
    await world.until(lambda: all(broker.replicas.peek(topic.id, index) for index in range(3)))
    assert world.held.problems() == []


async def test_an_empty_partition_that_was_opened_by_older_metadata_is_closed(world: World) -> None:
    topic = world.broker.find.topic("t")
    before = world.broker.find.held_placement(topic.id, 0)
    assert before is not None
    await world.cluster.place("t", 0, ELSEWHERE)
    world.broker.replicas.open(before)
    assert not world.has_files(0)
    world.held.start()
    await world.until(lambda: world.broker.replicas.peek(topic.id, 0) is None)


async def test_what_moved_away_while_the_node_was_down_is_removed_at_its_start(world: World) -> None:
    await world.write(0, 1)
    await world.cluster.place("t", 0, ELSEWHERE)
    topic = world.broker.find.topic("t")
    on_disk = world.broker.replicas.found_on_disk()
    world.held.start((topic_id, index) for _, topic_id, index in on_disk)
    await world.until(lambda: not world.has_files(0))
    assert world.has_files(1)
    assert world.broker.replicas.peek(topic.id, 1) is not None


async def test_files_of_a_topic_that_no_metadata_knows_stay(world: World, tmp_path: Path) -> None:
    await world.write(0, 1)
    stranger = tmp_path / "logs" / "t" / f"{uuid4().hex}-0"
    stranger.mkdir()
    world.held.start((topic_id, index) for _, topic_id, index in world.broker.replicas.found_on_disk())
    await world.cluster.place("t", 1, ELSEWHERE)
    await world.until(lambda: not world.has_files(1))
    assert stranger.exists()
