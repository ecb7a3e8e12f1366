"""Whole control planes on one store, in virtual time: sessions, elections of the controller, fail-over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from uuid import UUID

import pytest

from support.control_world import register
from support.memory_store import MemoryStore
from support.store_proxy import StoreProxy
from support.virtual_loop import run_virtual
from tidemill.control.cluster_controller import ClusterController
from tidemill.control.commands import (
    AlterInSync,
    CreateTopic,
    DeleteTopic,
    Election,
    ElectLeaders,
    ForgetDeleted,
    Resign,
    SetClusterId,
    SetTopicConfigs,
)
from tidemill.control.controller import Controller
from tidemill.control.image import MetadataImage, PartitionImage
from tidemill.control.session import Session
from tidemill.control.stores.store import OutcomeUnknown
from tidemill.errors import ApiError, ErrorCode


def now_ms() -> int:
    return round(asyncio.get_running_loop().time() * 1_000)


class Node:
    """The control plane of one node."""

    def __init__(self, cluster: Cluster, node_id: int) -> None:
        self.cluster = cluster
        self.id = node_id
        self.proxy = StoreProxy(cluster.store)
        self.controller = Controller(self.proxy)
        self.session = Session(self.proxy, node_id, on_lost=self.register, clock_ms=now_ms)
        self.role = ClusterController(self.controller, self.proxy, self.session, node_id, compact_seconds=10)

    async def register(self, clean_of: UUID | None = None) -> UUID:
        self.cluster.incarnations += 1
        incarnation = self.cluster.incarnations
        await self.controller.submit(register(self.id, incarnation, clean_of=clean_of))
        return UUID(int=incarnation)

    async def start(self, clean_of: UUID | None = None) -> None:
        await self.controller.start()
        if self.controller.image.cluster_id is None:
            await self.controller.submit(SetClusterId(cluster_id="c", replicated=True))
        await self.session.start(await self.register(clean_of))
        self.role.start()

    async def stop(self) -> None:
        """An orderly stop."""
        await self.role.stop()
        await self.session.revoke()
        await self.controller.stop()

    async def die(self) -> None:
        """The process is gone; the lease lives on."""
        self.proxy.unavailable = True
        await self.role.stop()
        await self.session.stop()
        await self.controller.stop()

    @property
    def partition(self) -> PartitionImage:
        return self.controller.image.topics["t"].partitions[0]

    @property
    def is_controller(self) -> bool:
        return self.role.epoch is not None


class Cluster:
    """Nodes on one store."""

    def __init__(self) -> None:
        self.store = MemoryStore(clock_ms=now_ms)
        self.incarnations = 0
        self.nodes: dict[int, Node] = {}

    async def start(self, *node_ids: int) -> None:
        for node_id in node_ids:
            self.nodes[node_id] = Node(self, node_id)
            await self.nodes[node_id].start()
        await asyncio.sleep(2)

    def controllers(self) -> list[int]:
        return [node.id for node in self.nodes.values() if node.is_controller]


def story(tell: Callable[[Cluster], Awaitable[None]], seed: int = 1) -> None:
    """Run a story in virtual time."""

    async def main() -> None:
        cluster = Cluster()
        await tell(cluster)
        for node in cluster.nodes.values():
            node.proxy.unavailable = False
            node.proxy.go_on()
            await node.stop()

    run_virtual(main, seed=seed)


async def create(node: Node, *replicas: int) -> None:
    await node.controller.submit(
        CreateTopic(name="t", topic_id=UUID(int=77), assignments=(replicas,), configs={})
    )


def test_one_node_is_the_controller_and_admits_all() -> None:
    async def tell(cluster: Cluster) -> None:
        await cluster.start(1, 2, 3)
        assert cluster.controllers() == [1]
        for node in cluster.nodes.values():
            image = node.controller.image
            assert image.live_nodes == {1, 2, 3}
            assert image.controller is not None
            assert (image.controller.node_id, image.controller.epoch) == (1, cluster.nodes[1].role.epoch)

    story(tell)


def test_when_the_controller_dies_another_takes_over_and_elects_leaders() -> None:
    async def tell(cluster: Cluster) -> None:
        await cluster.start(1, 2, 3)
        await create(cluster.nodes[1], 1, 2, 3)
        first_epoch = cluster.nodes[1].role.epoch
        assert first_epoch is not None
        await cluster.nodes.pop(1).die()
        await asyncio.sleep(4)
        assert cluster.nodes[2].partition.leader == 1
        await asyncio.sleep(5)
        (new,) = cluster.controllers()
        assert (cluster.nodes[new].role.epoch or 0) > first_epoch
        partition = cluster.nodes[2].partition
        assert (partition.leader, partition.isr, partition.leader_epoch) == (2, (2, 3), 1)

    story(tell)


def test_a_node_that_is_back_before_the_controller_looks_leaves_first_and_is_admitted_then() -> None:
    async def tell(cluster: Cluster) -> None:
        await cluster.start(1, 2)
        await create(cluster.nodes[1], 2, 1)
        cluster.nodes[1].proxy.hang()
        await cluster.nodes.pop(2).stop()
        cluster.nodes[2] = Node(cluster, 2)
        await cluster.nodes[2].start()
        assert cluster.nodes[2].partition.leader == 2
        # It has one turn for all that happened.
        image = MetadataImage.from_stored(await cluster.store.read())
        cluster.nodes[1].controller._publish(image)
        cluster.nodes[1].proxy.go_on()
        await asyncio.sleep(0.5)
        partition = cluster.nodes[1].partition
        assert (partition.leader, partition.leader_epoch, partition.isr) == (1, 1, (1,))
        assert cluster.nodes[1].controller.image.live_nodes == {1, 2}

    story(tell)


def test_an_orderly_stop_of_the_controller_is_followed_at_once() -> None:
    async def tell(cluster: Cluster) -> None:
        await cluster.start(1, 2)
        await create(cluster.nodes[1], 1, 2)
        await cluster.nodes.pop(1).stop()
        await asyncio.sleep(0.5)
        assert cluster.controllers() == [2]
        assert cluster.nodes[2].partition.leader == 2

    story(tell)


def test_a_controller_that_lost_its_lease_commits_nothing_more_and_comes_back_as_a_node() -> None:
    async def tell(cluster: Cluster) -> None:
        await cluster.start(1, 2, 3)
        await create(cluster.nodes[2], 1, 2, 3)
        old = cluster.nodes[1]
        old.proxy.hang()
        proposal = AlterInSync(
            topic_id=UUID(int=77), index=0, leader=1, leader_epoch=0, partition_epoch=0, isr=(1,)
        )
        submitted = asyncio.create_task(old.role.submit(proposal))
        await asyncio.sleep(9)
        (new,) = [node_id for node_id in cluster.controllers() if node_id != 1]
        # It does not know yet, and its answers are still under way.
        assert cluster.controllers() == [1, new]
        assert old.session.serving_until_ms < now_ms()
        old.proxy.go_on()
        with pytest.raises(ApiError) as caught:
            await submitted
        assert caught.value.code is ErrorCode.not_controller
        await asyncio.sleep(5)
        assert cluster.controllers() == [new]
        assert cluster.nodes[new].controller.image.live_nodes == {1, 2, 3}
        partition = cluster.nodes[new].partition
        assert (partition.leader, partition.isr) == (2, (2, 3))

    story(tell)


@pytest.mark.parametrize("seed", range(5))
def test_lost_answers_and_trouble_leave_one_controller_and_a_led_partition(seed: int) -> None:
    async def tell(cluster: Cluster) -> None:
        await cluster.start(1, 2, 3)
        await create(cluster.nodes[1], 1, 2, 3)
        for turn in range(6):
            node = cluster.nodes[(turn + seed) % 3 + 1]
            node.proxy.lost_replies = (turn + seed) % 2
            node.proxy.lost_commits = 1
            node.proxy.unavailable = True
            await asyncio.sleep(2 + 3 * (turn % 3))
            node.proxy.unavailable = False
            await asyncio.sleep(1)
        for node in cluster.nodes.values():
            node.proxy.lost_replies = node.proxy.lost_commits = 0
        await asyncio.sleep(20)
        assert len(cluster.controllers()) == 1
        for node in cluster.nodes.values():
            assert node.controller.image.live_nodes == {1, 2, 3}
            assert node.partition.leader in node.partition.isr
            assert node.role.trouble is None
            assert node.controller.trouble is None

    story(tell, seed)


def test_a_node_that_is_not_the_controller_says_so() -> None:
    async def tell(cluster: Cluster) -> None:
        await cluster.start(1, 2)
        with pytest.raises(ApiError) as caught:
            await cluster.nodes[2].role.submit(ForgetDeleted(topic_id=UUID(int=1), node_id=1))
        assert caught.value.code is ErrorCode.not_controller

    story(tell)


def test_proposals_are_committed_and_what_follows_from_them_is_done() -> None:
    async def tell(cluster: Cluster) -> None:
        await cluster.start(1, 2)
        await create(cluster.nodes[1], 1, 2)
        role = cluster.nodes[1].role
        after = await role.submit(Resign(topic_id=UUID(int=77), index=0, node_id=1, leader_epoch=0))
        assert after.leader == 2
        await cluster.nodes[2].controller.submit(
            SetTopicConfigs(name="t", configs={"min.insync.replicas": "2"})
        )
        await asyncio.sleep(0.5)
        assert cluster.nodes[1].partition.min_isr == 2
        await cluster.nodes[2].controller.submit(DeleteTopic(name="t"))
        for node_id in (1, 2):
            assert cluster.nodes[1].controller.image.deleted_topics
            await role.submit(ForgetDeleted(topic_id=UUID(int=77), node_id=node_id))
        assert not cluster.nodes[1].controller.image.deleted_topics

    story(tell)


def test_proposals_that_come_while_one_is_committed_are_committed_together_each_with_its_own_result() -> None:
    async def tell(cluster: Cluster) -> None:
        await cluster.start(1, 2)
        await cluster.nodes[1].controller.submit(
            CreateTopic(name="t", topic_id=UUID(int=77), assignments=((1, 2),) * 100, configs={})
        )
        await asyncio.sleep(1)
        node = cluster.nodes[1]
        before = node.proxy.commits
        resignations = [
            node.role.submit(Resign(topic_id=UUID(int=77), index=index, node_id=1, leader_epoch=0))
            for index in range(101)
        ]
        *resigned, refused = await asyncio.gather(*resignations, return_exceptions=True)
        assert {each.leader for each in resigned if not isinstance(each, BaseException)} == {2}
        assert isinstance(refused, ApiError), "there are 100 partitions"
        assert node.proxy.commits - before <= 3

    story(tell)


def test_a_controller_that_stops_leaves_nobody_waiting_for_a_proposal() -> None:
    async def tell(cluster: Cluster) -> None:
        await cluster.start(1, 2)
        await create(cluster.nodes[1], 1, 2)
        node = cluster.nodes[1]
        node.proxy.hang()
        resign = Resign(topic_id=UUID(int=77), index=0, node_id=1, leader_epoch=0)
        first = asyncio.create_task(node.role.submit(resign))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(node.role.submit(resign))
        await asyncio.sleep(0.1)
        stopping = asyncio.create_task(node.role.stop())
        one, other = await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 5)
        assert isinstance(one, OutcomeUnknown)
        assert isinstance(other, ApiError)
        assert other.code is ErrorCode.not_controller
        node.proxy.go_on()
        await stopping

    story(tell)


def test_suspects_get_no_leaderships() -> None:
    async def tell(cluster: Cluster) -> None:
        await cluster.start(1, 2, 3)
        await create(cluster.nodes[1], 3, 2, 1)
        cluster.nodes[1].role.suspects = lambda: frozenset({2})
        await cluster.nodes.pop(3).die()
        await asyncio.sleep(8)
        assert cluster.nodes[1].partition.leader == 1

    story(tell)


def test_an_unclean_election_is_logged_with_who_asked(caplog: pytest.LogCaptureFixture) -> None:
    async def tell(cluster: Cluster) -> None:
        await cluster.start(1)
        await create(cluster.nodes[1], 1)
        command = ElectLeaders(
            name="t", partitions=(0,), election=Election.UNCLEAN, leader=1, who="User:alice"
        )
        with caplog.at_level(logging.WARNING):
            assert await cluster.nodes[1].role.submit(command) == {0: ErrorCode.election_not_needed}

    story(tell)
    assert "User:alice" in caplog.text


def test_partitions_that_lose_their_leader_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def tell(cluster: Cluster) -> None:
        await cluster.start(1, 2)
        await create(cluster.nodes[1], 2)
        await cluster.nodes.pop(2).die()
        await asyncio.sleep(8)
        assert cluster.nodes[1].partition.leader == -1

    story(tell)
    assert "have no leader" in caplog.text
    assert "t-0" in caplog.text


def test_only_the_controller_compacts_the_history_of_the_store() -> None:
    async def tell(cluster: Cluster) -> None:
        await cluster.start(1, 2)
        before = cluster.nodes[1].controller.image.revision
        await asyncio.sleep(25)
        assert cluster.nodes[1].proxy.compacted == [before]
        assert cluster.nodes[2].proxy.compacted == []

    story(tell)
