"""Three whole nodes in virtual time: what is acknowledged is there after kills and lost disks."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest

from support.cluster_clients import ClusterClient, IdempotentProducer, Reader
from support.history import History, check
from support.virtual_loop import run_virtual
from support.whole_cluster import WholeCluster
from tidemill.config.values import Address
from tidemill.server.cluster.membership import Membership

TOPIC = "orders"


class World:
    """A cluster, a topic of one partition, and a producer who writes all the time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cluster = WholeCluster(self.rng, 3)
        addresses = [Address(self.cluster.host(node_id), 9092) for node_id in self.cluster.ids]
        self.client = ClusterClient(self.cluster.network, self.rng, addresses)
        self.history = History()
        self.producer = IdempotentProducer(self.client, self.history, TOPIC, 0, 1_000)

    async def start(self) -> asyncio.Task[None]:
        await self.cluster.start_all()
        topic = {
            "name": TOPIC,
            "num_partitions": 1,
            "replication_factor": 3,
            "assignments": [],
            "configs": [],
        }
        await self.client.ask_any("CreateTopics", {"topics": [topic], "timeout": 3_000}, 5)
        writing = asyncio.get_running_loop().create_task(self.producer.run())
        await asyncio.sleep(10)
        return writing

    def leader(self) -> int:
        image = self.cluster.nodes[min(self.cluster.started)].broker.image
        return image.topics[TOPIC].partitions[0].leader

    async def finish(self, writing: asyncio.Task[None]) -> None:
        """Everything that was acknowledged is read, once and in order."""
        self.producer.is_closing = True
        async with asyncio.timeout(120):
            await writing
            drain = Reader(self.client, self.history, "drain", TOPIC, 0)
            while not await drain.drain():
                await self.client.pause()
        assert not check(self.history, "drain")
        assert not self.client.strange
        assert sum(1 for _ in self.history.of("acked")) > 20


async def killed_and_back(world: World, *, lost_disk: bool) -> asyncio.Task[None]:
    """The leader is killed and comes back at once; gives the task of the producer."""
    writing = await world.start()
    leader = world.leader()
    await world.cluster.kill(leader, power_loss=True)
    if lost_disk:
        world.cluster.lose_disk(leader)
    # At once: the session of the process before it lives for some seconds.
    world.cluster.start(leader)
    await asyncio.sleep(20)
    return writing


async def story(seed: int, *, lost_disk: bool) -> None:
    world = World(seed)
    await world.finish(await killed_and_back(world, lost_disk=lost_disk))


async def acknowledged_and_kept(seed: int) -> tuple[int, int]:
    """How many records were acknowledged, and how many the leader has that has come back without its disk."""
    world = World(seed)
    await killed_and_back(world, lost_disk=True)
    leader = world.leader()
    (log_end,) = {
        each.log_end_offset for node_id, each in world.cluster.partitions(TOPIC) if node_id == leader
    }
    return sum(1 for _ in world.history.of("acked")), log_end


@pytest.mark.parametrize("lost_disk", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_leader_comes_back_and_nothing_acknowledged_is_lost(seed: int, lost_disk: bool) -> None:
    run_virtual(lambda: story(seed, lost_disk=lost_disk), seed=seed)


def test_ablation_a_leader_that_is_back_with_an_empty_disk_has_others_cut_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a look at the incarnation it leads at its old epoch while its old session lives."""
    made = Membership.__init__

    def forgetful(self: Membership, *args: object) -> None:
        made(self, *args)  # type: ignore[arg-type]
        self._broker.find.own_incarnation = None

    acknowledged, kept = run_virtual(partial(acknowledged_and_kept, 1), seed=1)
    assert kept >= acknowledged > 20
    monkeypatch.setattr(Membership, "__init__", forgetful)
    acknowledged, kept = run_virtual(partial(acknowledged_and_kept, 1), seed=1)
    assert kept < acknowledged, "the others have cut what was acknowledged"
