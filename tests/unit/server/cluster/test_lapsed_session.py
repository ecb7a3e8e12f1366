"""A node that is cut off from the metadata store alone, on three whole nodes in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from uuid import uuid4

from support.product_cluster import ProductCluster
from support.virtual_loop import run_virtual
from tidemill.control.commands import CreateTopic
from tidemill.errors import ErrorCode
from tidemill.records.record import Record, build_batch
from tidemill.replication.rules.state import Role

SESSION_SECONDS = 6
GROUP_KEY = 0


def on_three_nodes(story: Callable[[ProductCluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with ProductCluster(3) as cluster:
            await cluster.create("t", partitions=1)
            await story(cluster)

    run_virtual(main, seed=1)


async def write_at(
    cluster: ProductCluster, node_id: int, *, acks: int = -1, timeout_ms: int = 1_000
) -> tuple[ErrorCode, int]:
    """The answer of a node to a write, and the leader that it names."""
    records = build_batch([Record(None, b"x", 0)])
    data = {"name": "t", "partition_data": [{"index": 0, "records": records}]}
    body = {"transactional_id": None, "acks": acks, "timeout": timeout_ms, "topic_data": [data]}
    answer = await cluster.ask(node_id, "Produce", 10, **body)
    entry = answer.responses[0].partition_responses[0]
    return ErrorCode(entry.error_code), entry.current_leader.leader_id


async def leader_told_by(cluster: ProductCluster, node_id: int) -> int:
    answer = await cluster.ask(node_id, "Metadata", 9, topics=[{"name": "t"}])
    leader: int = answer.topics[0].partitions[0].leader_id
    return leader


def test_a_leader_that_only_etcd_cannot_reach_gives_up_what_another_node_leads() -> None:
    async def story(cluster: ProductCluster) -> None:
        old = cluster.leader("t")
        other = next(node_id for node_id in cluster.nodes if node_id != old)
        partition = cluster.led("t")
        cluster.ways[old].hang()

        def elected() -> int:
            return cluster.broker(other).image.topics["t"].partitions[0].leader

        await cluster.until(lambda: elected() not in (old, -1))
        new = elected()
        await cluster.until(lambda: partition.role is Role.FOLLOWER)
        assert cluster.broker(old).image.topics["t"].partitions[0].leader == old, "its metadata is late"
        assert await write_at(cluster, old) == (ErrorCode.not_leader_or_follower, new)
        assert await leader_told_by(cluster, old) == new
        assert (await write_at(cluster, new))[0] is ErrorCode.none
        await cluster.until(lambda: partition.log_end_offset == 1)
        cluster.ways[old].go_on()
        await cluster.until(lambda: cluster.broker(old).image.topics["t"].partitions[0].leader == new)
        await cluster.until(lambda: old in cluster.broker(new).image.topics["t"].partitions[0].isr)

    on_three_nodes(story)


def test_a_leader_asks_all_nodes_because_another_one_may_be_cut_off_too() -> None:
    async def story(cluster: ProductCluster) -> None:
        old = cluster.leader("t")
        # By their numbers, so the one that is cut off is asked first.
        stale, new = (node_id for node_id in sorted(cluster.nodes) if node_id != old)
        partition = cluster.led("t")
        cluster.ways[old].hang()
        command = CreateTopic(name="u", topic_id=uuid4(), partitions=1, replication=1)
        await cluster.run(new, cluster.broker(new).controller.submit(command))
        await cluster.until(lambda: "u" in cluster.broker(stale).image.topics)
        cluster.ways[stale].hang()
        await cluster.until(lambda: cluster.broker(new).image.topics["t"].partitions[0].leader == new)
        told = cluster.broker(stale).image
        assert told.topics["t"].partitions[0].leader == old, "it knows nothing of the election"
        assert told.revision > cluster.broker(old).image.revision
        await cluster.until(lambda: partition.role is Role.FOLLOWER)

    on_three_nodes(story)


def test_clients_are_sent_to_the_coordinator_that_the_other_nodes_know() -> None:
    async def story(cluster: ProductCluster) -> None:
        async def coordinator_told_by(node_id: int) -> tuple[ErrorCode, int]:
            found = await cluster.ask(node_id, "FindCoordinator", 3, key="g", key_type=GROUP_KEY)
            return ErrorCode(found.error_code), found.node_id

        some = cluster.some_id
        while (await coordinator_told_by(some))[0] is not ErrorCode.none:  # noqa: ASYNC110 - the state itself
            await asyncio.sleep(0.1)
        old = (await coordinator_told_by(some))[1]
        other = next(node_id for node_id in cluster.nodes if node_id != old)
        cluster.ways[old].hang()
        while (found := await coordinator_told_by(other)) == (ErrorCode.none, old) or found[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        async with asyncio.timeout(60):
            while await coordinator_told_by(old) != found:  # noqa: ASYNC110 - the state itself
                await asyncio.sleep(0.1)

    on_three_nodes(story)


def cut_off(cluster: ProductCluster, node_id: int) -> None:
    """The node reaches clients only."""
    cluster.ways[node_id].hang()
    cut_off_from_nodes(cluster, node_id)


def cut_off_from_nodes(cluster: ProductCluster, node_id: int) -> None:
    for other in set(cluster.nodes) - {node_id}:
        cluster.network.cut(f"n{node_id}", f"n{other}")
        cluster.network.cut(f"n{other}", f"n{node_id}")


async def until_refused(cluster: ProductCluster, node_id: int) -> None:
    async with asyncio.timeout(60):
        while (await write_at(cluster, node_id))[0] is not ErrorCode.not_leader_or_follower:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def test_a_leader_that_reaches_nobody_sends_its_clients_elsewhere() -> None:
    async def story(cluster: ProductCluster) -> None:
        old = cluster.leader("t")
        assert (await write_at(cluster, old))[0] is ErrorCode.none
        cut_off(cluster, old)
        waiting = asyncio.ensure_future(write_at(cluster, old, timeout_ms=600_000))
        began_s = asyncio.get_running_loop().time()
        async with asyncio.timeout(30):
            assert await waiting == (ErrorCode.not_leader_or_follower, -1), "nobody knows what becomes of it"
        assert asyncio.get_running_loop().time() - began_s > SESSION_SECONDS - 1
        assert await write_at(cluster, old, acks=1) == (ErrorCode.not_leader_or_follower, -1)
        answer = await cluster.ask(old, "Metadata", 9, topics=[{"name": "t"}])
        (told,) = answer.topics[0].partitions
        assert (told.leader_id, told.error_code) == (-1, ErrorCode.leader_not_available)
        assert {each.node_id for each in answer.brokers} == {1, 2, 3}, "clients ask one of the others next"
        await cluster.until(lambda: cluster.broker(old).find.is_isolated)
        problems = cluster.broker(old).problems()
        assert any("it takes no connections of clients" in each for each in problems)
        other = next(node_id for node_id in cluster.nodes if node_id != old)
        new = cluster.broker(other).image.topics["t"].partitions[0].leader
        assert new not in (old, -1)
        assert (await write_at(cluster, new))[0] is ErrorCode.none
        cluster.network.heal()
        cluster.ways[old].go_on()
        await cluster.until(lambda: cluster.leader("t") == new)
        await cluster.until(lambda: not cluster.broker(old).find.in_doubt)
        await cluster.until(lambda: not cluster.broker(old).find.is_isolated)

    on_three_nodes(story)


def test_a_node_that_leads_nothing_and_reaches_nobody_takes_no_connections() -> None:
    async def story(cluster: ProductCluster) -> None:
        other = next(node_id for node_id in cluster.nodes if node_id != cluster.leader("t"))
        cut_off(cluster, other)
        await cluster.until(lambda: cluster.broker(other).find.is_isolated)
        assert not cluster.broker(cluster.leader("t")).find.is_isolated
        cluster.network.heal()
        await cluster.until(lambda: not cluster.broker(other).find.is_isolated)

    on_three_nodes(story)


def test_a_leader_without_etcd_goes_on_as_soon_as_another_replica_is_heard_again() -> None:
    async def story(cluster: ProductCluster) -> None:
        leader = cluster.leader("t")
        epoch = cluster.led("t").leader_epoch
        for way in cluster.ways.values():
            way.hang()
        cut_off_from_nodes(cluster, leader)
        await until_refused(cluster, leader)
        assert await leader_told_by(cluster, leader) == -1
        cluster.network.heal()
        async with asyncio.timeout(60):
            while (await write_at(cluster, leader))[0] is not ErrorCode.none:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert (await leader_told_by(cluster, leader), cluster.led("t").leader_epoch) == (leader, epoch)

    on_three_nodes(story)


def test_a_leader_whose_session_lives_is_not_in_doubt_without_its_followers() -> None:
    async def story(cluster: ProductCluster) -> None:
        leader = cluster.leader("t")
        cut_off_from_nodes(cluster, leader)
        for _ in range(30):
            await asyncio.sleep(1)
            assert not cluster.broker(leader).find.in_doubt
            assert not cluster.broker(leader).find.is_isolated
        assert (await write_at(cluster, leader, acks=1))[0] is ErrorCode.none

    on_three_nodes(story)


def test_without_etcd_all_leaders_go_on() -> None:
    async def story(cluster: ProductCluster) -> None:
        leader = cluster.leader("t")
        for way in cluster.ways.values():
            way.hang()
        await asyncio.sleep(5 * SESSION_SECONDS)  # virtual
        assert cluster.led("t").role is Role.LEADER
        assert (await write_at(cluster, leader))[0] is ErrorCode.none
        assert not any(cluster.broker(node_id).find.is_isolated for node_id in cluster.nodes)

    on_three_nodes(story)
