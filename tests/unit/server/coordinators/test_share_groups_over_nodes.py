"""Share groups whose coordinator, state and partitions are on several nodes, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.product_cluster import ProductCluster
from support.virtual_loop import run_virtual
from tidemill.coordination.share_state import SharePartitionKey
from tidemill.errors import ErrorCode
from tidemill.records.record import Record, build_batch
from tidemill.replication.coordinator_log import wait_committed
from tidemill.replication.partition import Partition
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.coordinators.share_state import SHARE_STATE
from tidemill.server.share.lag import ShareLag

NONE = ErrorCode.none
ACCEPT = 1
#: What passes while leaders change.
PASSING = frozenset(
    {
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
        ErrorCode.not_leader_or_follower,
    }
)

Story = Callable[["Group"], Awaitable[None]]


class Group:
    """The share group ``g`` on a cluster, and one member of it."""

    def __init__(self, cluster: ProductCluster) -> None:
        self.cluster = cluster
        self.member_epoch = 0
        self.assigned: set[int] = set()
        self.sessions: dict[int, int] = {}

    @property
    def coordinator(self) -> int:
        broker = self.cluster.broker(self.cluster.some_id)
        return self.cluster.leader(*broker.coordinators.partition_of(GROUPS, "g"))

    @property
    def topic_id(self) -> Any:
        return self.cluster.broker(self.cluster.some_id).image.topics["t"].id

    def state_leader(self, index: int) -> int:
        """The node that has the state of a share partition."""
        broker = self.cluster.broker(self.cluster.some_id)
        key = str(SharePartitionKey("g", self.topic_id, index))
        return self.cluster.leader(*broker.coordinators.partition_of(SHARE_STATE, key))

    async def ask_coordinator(self, api: str, version: int, **body: Any) -> Any:
        """Ask the coordinator, whichever node that is by then."""
        async with asyncio.timeout(120):
            while True:
                node_id = self.coordinator
                if node_id in self.cluster.nodes:
                    answer = await self.cluster.ask(node_id, api, version, **body)
                    parts = [answer, *getattr(answer, "groups", ()), *getattr(answer, "results", ())]
                    if not any(getattr(part, "error_code", NONE) in PASSING for part in parts):
                        return answer
                await asyncio.sleep(0.1)

    async def beat(self, epoch: int | None = None, **fields: Any) -> Any:
        sent = self.member_epoch if epoch is None else epoch
        if sent == 0:
            fields["subscribed_topic_names"] = ["t"]
        answer = await self.ask_coordinator(
            "ShareGroupHeartbeat", 1, group_id="g", member_id="m", member_epoch=sent, **fields
        )
        assert answer.error_code is NONE, answer
        self.member_epoch = answer.member_epoch
        if answer.assignment is not None:
            self.assigned = {
                index for topic in answer.assignment.topic_partitions for index in topic.partitions
            }
        return answer

    async def beat_until_assigned(self, *indexes: int) -> None:
        async with asyncio.timeout(120):
            while self.assigned != set(indexes):
                await self.beat()
                await asyncio.sleep(1)

    async def write(self, index: int, *values: bytes) -> None:
        records = build_batch([Record(None, value, 0) for value in values])
        async with asyncio.timeout(120):
            while True:
                node_id = self.cluster.leader("t", index)
                if node_id in self.cluster.nodes:
                    data = [{"index": index, "records": records}]
                    answer = await self.cluster.ask(
                        node_id,
                        "Produce",
                        9,
                        acks=-1,
                        timeout=10_000,
                        topic_data=[{"name": "t", "partition_data": data}],
                    )
                    if answer.responses[0].partition_responses[0].error_code is NONE:
                        return
                await asyncio.sleep(0.1)

    async def take(self, index: int) -> list[int]:
        """Take records of a partition in a session of its own and accept them; gives their offsets."""
        topics: list[dict[str, Any]] = [
            {
                "topic_id": self.topic_id,
                "partitions": [{"partition_index": index, "acknowledgement_batches": []}],
            }
        ]
        named = {"group_id": "g", "member_id": f"m-{index}"}
        node_id, found = await self._fetch(index, named, topics)
        acquired = [(each.first_offset, each.last_offset) for each in found.acquired_records]
        batches = [
            {"first_offset": first, "last_offset": last, "acknowledge_types": [ACCEPT]}
            for first, last in acquired
        ]
        topics[0]["partitions"] = [{"partition_index": index, "acknowledgement_batches": batches}]
        closing = await self.cluster.ask(
            node_id, "ShareAcknowledge", 2, **named, share_session_epoch=-1, topics=topics
        )
        assert closing.error_code is NONE, closing
        assert closing.responses[0].partitions[0].error_code is NONE, closing
        return [offset for first, last in acquired for offset in range(first, last + 1)]

    async def _fetch(
        self, index: int, named: dict[str, Any], topics: list[dict[str, Any]]
    ) -> tuple[int, Any]:
        """Open a session at the leader, whichever node that is by then; gives it and its answer."""
        async with asyncio.timeout(120):
            while True:
                node_id = self.cluster.leader("t", index)
                if node_id in self.cluster.nodes:
                    answer = await self.cluster.ask(
                        node_id,
                        "ShareFetch",
                        2,
                        **named,
                        share_session_epoch=0,
                        max_wait=0,
                        min_bytes=1,
                        max_bytes=1 << 20,
                        max_records=500,
                        batch_size=500,
                        topics=topics,
                        forgotten_topics_data=[],
                    )
                    (found,) = answer.responses[0].partitions
                    if answer.error_code is NONE and found.error_code is NONE:
                        return node_id, found
                await asyncio.sleep(0.1)

    async def offsets(self) -> dict[int, tuple[int, int]]:
        answer = await self.ask_coordinator(
            "DescribeShareGroupOffsets", 1, groups=[{"group_id": "g", "topics": None}]
        )
        return {
            each.partition_index: (each.start_offset, each.lag)
            for topic in answer.groups[0].topics
            for each in topic.partitions
        }


def on_three_nodes(story: Story) -> Callable[[], None]:
    """Run a test on the virtual loop, with a topic ``t`` whose three partitions have three leaders."""

    @functools.wraps(story)
    def test() -> None:
        async def main() -> None:
            async with ProductCluster(3) as cluster:
                await cluster.create("t")
                assert {cluster.leader("t", index) for index in range(3)} == {1, 2, 3}
                # The first member of all has the internal topics made.
                await cluster.ask(1, "FindCoordinator", 4, key_type=0, coordinator_keys=["g"])
                group = Group(cluster)
                await cluster.until(lambda: GROUPS.topic in cluster.broker(1).image.topics)
                await story(group)

        run_virtual(main, seed=1)

    del test.__wrapped__
    return test


@on_three_nodes
async def test_state_lag_and_records_are_where_their_leaders_are(group: Group) -> None:
    await group.beat()
    await group.beat_until_assigned(0, 1, 2)
    for index in range(3):
        assert await group.take(index) == []
        await group.write(index, b"a", b"b")
    assert await group.offsets() == dict.fromkeys(range(3), (0, 2))
    assert [await group.take(index) for index in range(3)] == [[0, 1]] * 3
    assert await group.offsets() == dict.fromkeys(range(3), (2, 0))


@on_three_nodes
async def test_the_nodes_together_measure_the_lag_of_partitions_that_others_hold(group: Group) -> None:
    cluster = group.cluster
    await cluster.create("single", 6, replication=1)
    topic_id = cluster.broker(1).image.topics["single"].id
    leaders = [cluster.leader("single", index) for index in range(6)]
    keepers: list[int] = []
    for index in range(6):
        broker = cluster.broker(leaders[index])
        partition = broker.find.partition(broker.find.topic("single"), index)
        batch = build_batch([Record(None, b"v", 0)] * (index + 1))
        await cluster.run(leaders[index], _append(partition, batch))
        key = SharePartitionKey("h", topic_id, index)
        await cluster.run(leaders[index], broker.persister.initialize(key, 0, 0))
        keepers.append(cluster.leader(*broker.coordinators.partition_of(SHARE_STATE, str(key))))
    assert keepers != leaders, "some states are not where the records are"
    total = 0
    for node_id in cluster.nodes:
        report = await cluster.run(node_id, ShareLag(cluster.broker(node_id), 10).measure())
        total += report.lags.get("h", 0)
    assert total == 1 + 2 + 3 + 4 + 5 + 6


async def _append(partition: Partition, batch: bytes) -> None:
    await wait_committed(partition, partition.append(batch, 0).last_offset + 1)


@pytest.mark.parametrize("after_s", [0.002, 0.01, 0.05, 0.2, 0.8])
def test_the_coordinator_dies_while_state_is_initialized(after_s: float) -> None:
    """The one that comes after it goes on: nothing is lost, nothing starts elsewhere."""

    async def story(group: Group) -> None:
        joining = asyncio.ensure_future(group.beat())
        await asyncio.sleep(after_s)
        died = group.coordinator
        await group.cluster.kill(died)
        with contextlib.suppress(AssertionError, ConnectionError, asyncio.CancelledError, TimeoutError):
            await joining
        await group.beat(0)
        await group.beat_until_assigned(0, 1, 2)
        for index in range(3):
            assert await group.take(index) == []
            await group.write(index, b"a")
            assert await group.take(index) == [0]

    on_three_nodes(story)()


@on_three_nodes
async def test_accepted_records_stay_accepted_when_their_nodes_die(group: Group) -> None:
    await group.beat()
    await group.beat_until_assigned(0, 1, 2)
    assert await group.take(0) == []
    await group.write(0, b"a", b"b", b"c")
    assert await group.take(0) == [0, 1, 2]
    died = group.state_leader(0)
    await group.cluster.kill(died)
    await group.write(0, b"d")
    assert await group.take(0) == [3]
    await group.cluster.start(died)
    await group.cluster.until(lambda: group.state_leader(0) in group.cluster.nodes)
    leads = group.cluster.leader("t", 0)
    await group.cluster.move("t", 0)
    assert group.cluster.leader("t", 0) != leads
    assert await group.take(0) == []
    assert (await group.offsets())[0] == (4, 0)


@on_three_nodes
async def test_a_group_is_deleted_over_nodes_and_begins_anew(group: Group) -> None:
    await group.beat()
    await group.beat_until_assigned(0, 1, 2)
    for index in range(3):
        await group.take(index)
        await group.write(index, b"a")
        await group.take(index)
    await group.beat(-1)
    (result,) = (await group.ask_coordinator("DeleteGroups", 2, groups_names=["g"])).results
    assert result.error_code is NONE
    for index in range(3):
        key = SharePartitionKey("g", group.topic_id, index)
        node_id = group.cluster.some_id
        persister = group.cluster.broker(node_id).persister
        summary = await group.cluster.run(node_id, persister.read_summary(key, -1))
        assert summary.start_offset == -1
    group.member_epoch, group.assigned = 0, set()
    await group.beat(0)
    await group.beat_until_assigned(0, 1, 2)
    assert await group.take(1) == []
    await group.write(1, b"b")
    assert await group.take(1) == [1]
