"""A whole node in virtual time, asked by the client connection that nodes and clients share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.batches import plain_batch
from support.faulty_storage import FaultyStorage
from support.memory_store import MemoryStore
from support.sim_network import SimNetwork
from support.sim_node import SimNode
from support.virtual_loop import current_loop, run_virtual
from tidemill.errors import ErrorCode, NodeUnavailable
from tidemill.net.connection import Connection

TOPIC = "orders"


class World:
    """A node on a disk, and whatever is asked of it."""

    def __init__(self) -> None:
        loop = current_loop()
        self.network = SimNetwork(loop)
        self.store = MemoryStore(clock_ms=loop.now_ms)
        self.storage = FaultyStorage(loop.rng)
        self.node = SimNode(self.storage, self.store, self.network)

    async def start(self) -> None:
        self.node = SimNode(self.storage, self.store, self.network)
        await self.node.start({TOPIC: (1, {})})

    async def connect(self) -> Connection:
        return await Connection.open(self.node.node.address, transport=self.network.transport("client"))


async def produce(connection: Connection, value: str, **options: Any) -> Any:
    body = {
        "acks": -1,
        "timeout": 30_000,
        "topic_data": [{"name": TOPIC, "partition_data": [{"index": 0, "records": plain_batch(value)}]}],
    }
    answer = await connection.request("Produce", body, versions=(9, 9), **options)
    return answer.responses[0].partition_responses[0]


@pytest.mark.parametrize("seed", range(5))
def test_a_client_writes_to_a_node_that_stops_and_starts(seed: int) -> None:
    async def story() -> None:
        world = World()
        await world.start()
        connection = await world.connect()
        assert (await produce(connection, "one")).base_offset == 0
        await connection.close()
        await world.node.stop()
        await world.start()
        assert world.node.node.directory.stopped_cleanly
        connection = await world.connect()
        assert (await produce(connection, "two")).base_offset == 1
        await connection.close()
        await world.node.stop()

    run_virtual(story, seed=seed)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_acknowledged_survives_the_power(seed: int) -> None:
    async def story() -> None:
        world = World()
        await world.start()
        connection = await world.connect()
        assert (await produce(connection, "one")).error_code == ErrorCode.none
        await world.node.crash()
        with pytest.raises(NodeUnavailable):
            await produce(connection, "nobody hears it")
        world.storage = world.storage.crash()
        await world.start()
        assert not world.node.node.directory.stopped_cleanly
        connection = await world.connect()
        assert (await produce(connection, "two")).base_offset == 1
        await connection.close()

    run_virtual(story, seed=seed)


def test_a_cut_network_is_a_timeout() -> None:
    async def story() -> None:
        world = World()
        await world.start()
        connection = await world.connect()
        world.network.cut("node", "client")
        with pytest.raises(NodeUnavailable):
            await produce(connection, "one", timeout_ms=5_000)
        world.network.heal()
        connection = await world.connect()
        assert (await produce(connection, "two")).base_offset == 1, "the first was written all the same"

    run_virtual(story, seed=1)


def test_a_full_disk_is_noticed_and_so_is_room() -> None:
    async def story() -> None:
        world = World()
        await world.start()
        connection = await world.connect()
        world.storage.capacity_bytes = world.storage.used_bytes
        assert (await produce(connection, "no room")).error_code == ErrorCode.kafka_storage_error
        assert "disk full" in world.node.node.problems()[0]
        world.storage.capacity_bytes = None
        await asyncio.sleep(2)
        assert world.node.node.problems() == []
        assert (await produce(connection, "room")).base_offset == 0

    run_virtual(story, seed=1)


def test_two_nodes_share_the_metadata_and_the_network_and_nothing_else() -> None:
    async def story() -> None:
        world = World()
        await world.start()
        disk = FaultyStorage(current_loop().rng)
        second = SimNode(disk, world.store, world.network, host="other", node_id=2)
        await second.start()
        connection = await Connection.open(
            second.node.address, transport=world.network.transport(world.node.host)
        )
        answer = await connection.request("Metadata", {"topics": None}, versions=(9, 9))
        assert {(each.node_id, each.host) for each in answer.brokers} == {(1, "node"), (2, "other")}
        assert (await produce(connection, "led by the first")).error_code == ErrorCode.not_leader_or_follower
        await second.crash()
        assert world.node.node.problems() == []
        assert (await produce(await world.connect(), "one")).base_offset == 0

    run_virtual(story, seed=1)


def test_hours_of_housekeeping_take_no_time() -> None:
    async def story() -> None:
        world = World()
        await world.start()
        connection = await world.connect()
        await produce(connection, "old")
        await asyncio.sleep(1_800)
        assert connection.failed, "it was idle for longer than clients may be"
        assert world.node.node.problems() == []
        await world.node.stop()

    run_virtual(story, seed=1)
