"""Records that a transaction accepts, while the leaders of data, state and transactions move or die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from support.product_cluster import ProductCluster
from support.virtual_loop import run_virtual
from tidemill.control.commands import SetGroupConfigs
from tidemill.coordination.share_state import SharePartitionKey
from tidemill.errors import ErrorCode
from tidemill.records.record import Record, build_batch
from tidemill.server.coordinators.share_state import SHARE_STATE
from tidemill.server.coordinators.transactions import TRANSACTIONS

ACCEPT = 1
Story = Callable[["World"], Awaitable[None]]


class World:
    """Three nodes, a topic with one partition, a share group, and a producer with the id ``x``."""

    def __init__(self, cluster: ProductCluster) -> None:
        self.cluster = cluster
        self.topic_id = cluster.broker(cluster.some_id).image.topics["t"].id
        self.key = SharePartitionKey("g", self.topic_id, 0)
        self.producer = (-1, -1)

    async def begin(self) -> None:
        cluster = self.cluster
        data = {
            "name": "t",
            "partition_data": [
                {"index": 0, "records": build_batch([Record(b"k", b"a"), Record(b"k", b"b")])}
            ],
        }
        answer = await cluster.ask(
            self.leader, "Produce", 9, transactional_id=None, acks=-1, timeout=9_000, topic_data=[data]
        )
        assert answer.responses[0].partition_responses[0].error_code is ErrorCode.none
        broker = cluster.broker(self.leader)
        await cluster.run(self.leader, broker.persister.initialize(self.key, 1, 0))
        await cluster.ask(1, "FindCoordinator", 4, key_type=1, coordinator_keys=["x"])
        await self.settled()
        started = await cluster.ask(
            cluster.leader(TRANSACTIONS.topic),
            "InitProducerId",
            4,
            transactional_id="x",
            transaction_timeout=600_000,
        )
        self.producer = started.producer_id, started.producer_epoch

    async def settled(self) -> None:
        """Wait until everything has a leader that runs."""
        cluster = self.cluster
        topics = ("t", SHARE_STATE.topic, TRANSACTIONS.topic)
        await cluster.until(lambda: {cluster.leader(topic) for topic in topics} <= set(cluster.nodes))

    @property
    def leader(self) -> int:
        return self.cluster.leader("t")

    async def fetch(self, member: str) -> list[tuple[int, int, int]]:
        """What a member with a new session is given."""
        for _ in range(50):
            await self.settled()
            answer = await self.cluster.ask(
                self.leader,
                "ShareFetch",
                2,
                group_id="g",
                member_id=member,
                share_session_epoch=0,
                max_wait=0,
                min_bytes=1,
                max_bytes=1 << 20,
                max_records=100,
                batch_size=100,
                topics=[{"topic_id": self.topic_id, "partitions": [{"partition_index": 0}]}],
                forgotten_topics_data=[],
            )
            parts = [part for topic in answer.responses for part in topic.partitions]
            if answer.error_code is ErrorCode.none and all(not part.error_code for part in parts):
                return [
                    (each.first_offset, each.last_offset, each.delivery_count)
                    for part in parts
                    for each in part.acquired_records
                ]
            await asyncio.sleep(0.2)
        raise AssertionError("the records cannot be fetched")

    async def accept(self, member: str, first: int, last: int) -> int:
        batch = {"first_offset": first, "last_offset": last, "acknowledge_types": [ACCEPT], "delay_ms": -1}
        partition = {"partition_index": 0, "batches": [batch | {"reason": None}]}
        answer = await self.cluster.ask(
            self.leader,
            "ShareSettle",
            0,
            group_id="g",
            member_id=member,
            share_session_epoch=1,
            transactional_id="x",
            producer_id=self.producer[0],
            producer_epoch=self.producer[1],
            topics=[{"topic_id": self.topic_id, "partitions": [partition]}],
        )
        return int(answer.error_code or answer.topics[0].partitions[0].error_code)

    async def end(self, *, commit: bool) -> None:
        for _ in range(50):
            await self.settled()
            answer = await self.cluster.ask(
                self.cluster.leader(TRANSACTIONS.topic),
                "EndTxn",
                3,
                transactional_id="x",
                producer_id=self.producer[0],
                producer_epoch=self.producer[1],
                committed=commit,
            )
            if answer.error_code is ErrorCode.none:
                return
            await asyncio.sleep(0.2)
        raise AssertionError("the transaction cannot be ended")

    async def start_offset(self) -> int:
        broker = self.cluster.broker(self.leader)
        summary = await self.cluster.run(self.leader, broker.persister.read_summary(self.key, -1))
        return int(summary.start_offset)


def on_three_nodes(story: Story) -> None:
    async def main() -> None:
        async with ProductCluster(3) as cluster:
            await cluster.create("t", partitions=1)
            command = SetGroupConfigs(group_id="g", configs={"share.auto.offset.reset": "earliest"})
            await cluster.run(1, cluster.broker(1).controller.submit(command))
            world = World(cluster)
            await world.begin()
            await story(world)

    run_virtual(main, seed=1)


async def trouble(world: World, what: str) -> None:
    """Something happens to the nodes while the transaction is open."""
    cluster = world.cluster
    match what:
        case "the leader of the data moves":
            await cluster.move("t")
        case "the leader of the state moves":
            await cluster.move(SHARE_STATE.topic)
        case "the coordinator of the transaction moves":
            await cluster.move(TRANSACTIONS.topic)
        case "the leader of the data dies":
            await cluster.kill(world.leader)
        case "the leader of the state dies":
            await cluster.kill(cluster.leader(SHARE_STATE.topic))
    await world.settled()


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize(
    "what",
    [
        "the leader of the data moves",
        "the leader of the state moves",
        "the coordinator of the transaction moves",
        "the leader of the data dies",
        "the leader of the state dies",
    ],
)
def test_accepted_records_are_held_until_the_transaction_ends_whatever_happens(
    what: str, commit: bool
) -> None:
    async def story(world: World) -> None:
        assert await world.fetch("m1") == [(0, 1, 1)]
        assert await world.accept("m1", 0, 1) == 0
        await trouble(world, what)
        for _ in range(3):
            assert await world.fetch("m2") == [], "the transaction has them"
            await asyncio.sleep(20)  # Longer than a lock, with those before.
        await world.end(commit=commit)
        if commit:
            async with asyncio.timeout(60):
                while await world.start_offset() < 2:  # noqa: ASYNC110 - the state itself
                    await asyncio.sleep(0.1)
            assert await world.fetch("m3") == []
        else:
            async with asyncio.timeout(60):
                while not (given := await world.fetch("m3")):  # noqa: ASYNC110 - the state itself
                    await asyncio.sleep(0.1)
            assert given == [(0, 1, 2)]

    on_three_nodes(story)
