"""A replica whose disk is full, hangs or has failed is not elected until it says that it is well.

Three whole nodes in virtual time. A follower's disk is in trouble; it would be the next leader. Then the
leader dies, and the third node after it.
"""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from support.product_cluster import ProductCluster
from support.virtual_loop import current_loop, run_virtual
from tidemill.control.records import PartitionImage
from tidemill.errors import ErrorCode
from tidemill.records.record import Record, build_batch
from tidemill.replication.partition import Partition
from tidemill.server.cluster.membership import Membership

#: So long a flush hangs: longer than the story lasts until the disk is well.
_HUNG_S = 60.0
#: A disk in trouble is reported after five seconds, and a follower that lags leaves after ten.
_TOLD_S = 7.0
#: After that the session of a node that was killed is over, and another leader is elected.
_OVER_S = 12.0

TROUBLES = ("full", "hung", "failed")


class Story:
    """A topic ``t`` of one partition: ``leader`` leads it, ``next`` would be the next leader."""

    def __init__(self, cluster: ProductCluster) -> None:
        self.cluster = cluster

    async def begin(self) -> None:
        await self.cluster.create("t", partitions=1)
        await self.cluster.until(lambda: self.cluster.leader("t") != -1)
        placed = self.placed()
        assert placed.leader == placed.replicas[0]
        self.leader, self.next, self.third = placed.replicas
        assert await self.write(acks=-1) is ErrorCode.none

    def placed(self) -> PartitionImage:
        return self.cluster.broker(self.cluster.some_id).image.topics["t"].partitions[0]

    async def write(self, acks: int) -> ErrorCode:
        records = build_batch([Record(None, b"x", 0)])
        data = {"name": "t", "partition_data": [{"index": 0, "records": records}]}
        body = {"transactional_id": None, "acks": acks, "timeout": 30_000, "topic_data": [data]}
        answer = await self.cluster.ask(self.placed().leader, "Produce", 9, **body)
        return ErrorCode(answer.responses[0].partition_responses[0].error_code)

    async def trouble(self, what: str, node_id: int) -> None:
        """The disk of a node is in trouble, and has something to write."""
        disk, loop = self.cluster.disks[node_id], current_loop()
        if what == "full":
            disk.capacity_bytes = disk.used_bytes
        elif what == "hung":
            disk.before_next("sync", ".log", partial(setattr, loop, "slept_seconds", _HUNG_S))
        else:
            disk.fail_next("sync", ".log")
        writing = asyncio.get_running_loop().create_task(self.write(acks=1))
        await asyncio.sleep(_TOLD_S)
        assert await writing in (ErrorCode.none, ErrorCode.not_leader_or_follower)

    async def mend(self, what: str) -> None:
        """The disk is well again; a replica that has stopped needs another process."""
        if what == "full":
            self.cluster.disks[self.next].capacity_bytes = None
        elif what == "hung":
            await asyncio.sleep(_HUNG_S)
        else:
            await self.cluster.kill(self.next)
            await asyncio.sleep(_OVER_S)
            await self.cluster.start(self.next)

    async def kill(self, node_id: int) -> None:
        await self.cluster.kill(node_id)
        await asyncio.sleep(_OVER_S)


async def tell(what: str) -> None:
    """The follower is passed over, also when nobody else is left, and leads when its disk is well."""
    async with ProductCluster(3) as cluster:
        story = Story(cluster)
        await story.begin()
        await story.trouble(what, story.next)
        has_failed = what == "failed"
        told = story.placed()
        assert story.next in told.unfit, "the controller knows"
        assert (story.next in told.isr) is not has_failed
        await story.kill(story.leader)
        assert story.placed().leader == story.third, "another one than the unfit one is elected"
        if has_failed:
            assert story.next not in story.placed().elr
        await story.kill(story.third)
        assert story.placed().leader == -1, "rather none than the unfit one"
        await story.mend(what)
        await asyncio.sleep(_OVER_S)
        after = story.placed()
        assert not after.unfit
        if has_failed:
            # What it has is not known to be complete: the partition waits for one of the others.
            assert after.leader == -1
            await cluster.start(story.third)
            await cluster.until(lambda: {story.next, story.third} <= {*story.placed().isr})
        else:
            assert after.leader == story.next


@pytest.mark.parametrize("what", TROUBLES)
def test_a_follower_whose_disk_is_in_trouble_is_not_elected_until_it_is_well(what: str) -> None:
    run_virtual(partial(tell, what), seed=1)


def test_a_leader_whose_flush_hangs_does_not_lead_again_while_it_hangs() -> None:
    async def story() -> None:
        async with ProductCluster(3) as cluster:
            story = Story(cluster)
            await story.begin()
            await story.trouble("hung", story.leader)
            for _ in range(20):
                placed = story.placed()
                assert (placed.leader, placed.unfit) == (story.next, (story.leader,))
                await asyncio.sleep(2)
            await asyncio.sleep(_HUNG_S)
            assert not story.placed().unfit
            assert len(story.placed().isr) == 3

    run_virtual(story, seed=1)


def _only_leaders_tell(self: Membership, partition: Partition) -> bool:
    """As if the rule were about leaders alone."""
    placed = self._placed(partition)
    return placed is not None and placed.leader == self._broker.node_id


@pytest.mark.parametrize("what", TROUBLES)
def test_ablation_a_follower_that_says_nothing_would_be_elected(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(Membership, "_has_unfit_to_tell", _only_leaders_tell)

    async def elected() -> None:
        async with ProductCluster(3) as cluster:
            story = Story(cluster)
            await story.begin()
            await story.trouble(what, story.next)
            await cluster.kill(story.leader)
            leaders = set[int]()
            for _ in range(200):
                leaders.add(story.placed().leader)
                await asyncio.sleep(_OVER_S / 200)
            assert story.next in leaders - {story.leader}, "the one whose disk is in trouble"

    run_virtual(elected, seed=1)
