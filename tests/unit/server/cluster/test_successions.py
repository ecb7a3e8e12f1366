"""A leader resigns when the metadata wants another one, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

from support.other_nodes import FakeCluster
from support.quiet_node import start_quiet_node
from tidemill.control.commands import CreateTopic
from tidemill.control.records import PartitionImage
from tidemill.replication.partition import Partition
from tidemill.server.broker import Broker
from tidemill.server.cluster import successions
from tidemill.server.cluster.successions import Successions

LED = PartitionImage(1, 3, (2, 1), (2, 1))
WISHED = PartitionImage(1, 3, (2, 1), (2, 1), successor=2)
GIVEN_UP = PartitionImage(2, 4, (2, 1), (2, 1))


class World:
    """A node in a cluster of two that leads t-0; what it resigns from is noted."""

    def __init__(self, broker: Broker, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.resigned: asyncio.Queue[int] = asyncio.Queue()
        self.successions = Successions(broker, self._resign)
        broker.controller.subscribe(lambda old, new, delta: self.successions.metadata_changed(new, delta))

    async def _resign(self, partition: Partition) -> None:
        self.resigned.put_nowait(partition.leader_epoch)

    async def next_resignation(self) -> int:
        async with asyncio.timeout(120):
            return await self.resigned.get()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(successions, "_AGAIN_S", 0.001)
    node = await start_quiet_node(tmp_path)
    cluster = await FakeCluster.around(node.broker, {2: None})
    await node.broker.controller.submit(CreateTopic(name="t", topic_id=uuid4(), assignments=((1, 2),)))
    await cluster.place("t", 0, LED)
    node.broker.find.partition(node.broker.find.topic("t"), 0)
    world = World(node.broker, cluster)
    yield world
    await world.successions.stop()
    await node.stop()


async def test_a_leader_resigns_again_and_again_until_the_successor_leads(world: World) -> None:
    await world.cluster.place("t", 0, WISHED)
    assert [await world.next_resignation() for _ in range(3)] == [3, 3, 3]
    (task,) = world.successions._tasks.values()
    await world.cluster.place("t", 0, GIVEN_UP)
    async with asyncio.timeout(120):
        await task


async def test_a_wish_that_is_gone_is_not_obeyed_any_more(world: World) -> None:
    await world.cluster.place("t", 0, WISHED)
    await world.next_resignation()
    (task,) = world.successions._tasks.values()
    await world.cluster.place("t", 0, LED)
    async with asyncio.timeout(120):
        await task


async def test_nobody_resigns_without_a_wish_or_for_another_leader(world: World) -> None:
    await world.cluster.place("t", 0, LED)
    await world.cluster.place("t", 0, PartitionImage(2, 4, (1, 2), (1, 2), successor=1))
    assert world.successions._tasks == {}
