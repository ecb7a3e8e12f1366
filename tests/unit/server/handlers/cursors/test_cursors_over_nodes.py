"""Cursors in a cluster: read from every leader, positions survive their coordinator, cuts are told."""

from __future__ import annotations

import asyncio
from typing import Any

from support.product_cluster import ProductCluster
from support.virtual_loop import run_virtual
from tidemill.errors import ErrorCode, TableCode
from tidemill.records.record import Record, build_batch

TOPIC = "t"


async def produce(cluster: ProductCluster, count: int) -> None:
    data = build_batch([Record(b"k%d" % number, b"v", 1_000) for number in range(count)])
    answer = await cluster.ask(
        cluster.leader(TOPIC),
        "Produce",
        9,
        acks=-1,
        timeout=30_000,
        topic_data=[{"name": TOPIC, "partition_data": [{"index": 0, "records": data}]}],
    )
    assert answer.responses[0].partition_responses[0].error_code == ErrorCode.none


async def fetch(
    cluster: ProductCluster, node_id: int, offset: int, *, leader_epoch: int = -1, **region: Any
) -> Any:
    position = {"partition": 0, "offset": offset, "leader_epoch": leader_epoch, "current_leader_epoch": -1}
    topic_id = cluster.broker(node_id).image.topics[TOPIC].id
    answer = await cluster.ask(
        node_id,
        "FetchRegion",
        0,
        topic=TOPIC,
        topic_id=topic_id,
        max_bytes=10_000,
        partitions=[position],
        **region,
    )
    assert answer.error_code == ErrorCode.none, answer
    return answer.partitions[0]


def test_a_region_is_read_from_the_leader_and_a_cut_is_told() -> None:
    async def story() -> None:
        async with ProductCluster(3) as cluster:
            await cluster.create(TOPIC, partitions=1)
            await cluster.until(lambda: cluster.leader(TOPIC) > 0)
            await produce(cluster, 3)
            first = cluster.leader(TOPIC)
            found = await fetch(cluster, first, 0)
            assert (found.error_code, found.next_offset, found.leader_epoch) == (ErrorCode.none, 3, 0)
            other = next(node_id for node_id in cluster.nodes if node_id != first)
            assert (await fetch(cluster, other, 0)).error_code == ErrorCode.not_leader_or_follower
            second = await cluster.move(TOPIC)
            await cluster.until(lambda: cluster.led(TOPIC).has_reached_epoch_start)
            assert (await fetch(cluster, first, 3)).error_code == ErrorCode.not_leader_or_follower
            await produce(cluster, 2)
            epoch = cluster.led(TOPIC).leader_epoch
            found = await fetch(cluster, second, 3, leader_epoch=0)
            assert (found.error_code, found.next_offset, found.leader_epoch) == (ErrorCode.none, 5, epoch)
            # A cursor that has read up to offset 5 in the first epoch has read another log.
            found = await fetch(cluster, second, 5, leader_epoch=0)
            assert found.error_code == ErrorCode.offset_out_of_range
            assert (found.diverging_epoch, found.diverging_offset) == (0, 3)
            found = await fetch(cluster, second, 9)
            assert (found.error_code, found.log_end_offset) == (ErrorCode.offset_out_of_range, 5)
            filtered = await fetch(cluster, second, 0, key_prefix=b"k1")
            assert filtered.next_offset == 5
            assert filtered.records

    run_virtual(story, seed=3)


def test_a_waiting_request_is_answered_when_another_node_leads() -> None:
    async def story() -> None:
        async with ProductCluster(3) as cluster:
            await cluster.create(TOPIC, partitions=1)
            await cluster.until(lambda: cluster.leader(TOPIC) > 0)
            waiting = asyncio.ensure_future(fetch(cluster, cluster.leader(TOPIC), 0, max_wait_ms=60_000))
            await asyncio.sleep(1)
            assert not waiting.done()
            await cluster.move(TOPIC)
            found = await asyncio.wait_for(waiting, 10)
            assert found.error_code == ErrorCode.not_leader_or_follower

    run_virtual(story, seed=4)


def test_positions_survive_the_death_of_their_coordinator() -> None:
    async def story() -> None:
        async with ProductCluster(3) as cluster:
            await cluster.create(TOPIC, partitions=1)
            await cluster.until(lambda: cluster.leader(TOPIC) > 0)

            async def coordinator() -> int:
                node_id = -1
                while node_id not in cluster.nodes:
                    answer = await cluster.ask(
                        cluster.some_id, "FindCoordinator", 4, key_type=100, coordinator_keys=["c"]
                    )
                    node_id = answer.coordinators[0].node_id
                    await asyncio.sleep(0.1)
                return node_id

            async def until_served(api: str, **body: Any) -> Any:
                while True:
                    answer = await cluster.ask(await coordinator(), api, 0, **body)
                    if answer.error_code not in (
                        ErrorCode.not_coordinator,
                        ErrorCode.coordinator_not_available,
                        ErrorCode.coordinator_load_in_progress,
                    ):
                        return answer
                    await asyncio.sleep(0.1)

            topic_id = cluster.broker(1).image.topics[TOPIC].id
            position = {"partition": 0, "offset": 0, "leader_epoch": -1, "started": False, "finished": b""}
            take = {
                "name": "c",
                "topic": TOPIC,
                "topic_id": topic_id,
                "region": b"r",
                "owner": "me",
                "lease_ms": 10_000,
                "force": True,
                "partitions": [position],
            }
            taken = await until_served("TakeCursor", **take)
            assert taken.error_code == ErrorCode.none, taken
            epoch = taken.partitions[0].epoch
            step = position | {"epoch": epoch, "previous_offset": 0, "offset": 7, "started": True}
            committed = await until_served("CommitCursor", name="c", partitions=[step])
            assert committed.error_code == ErrorCode.none, committed
            await cluster.kill(await coordinator())
            # The same commit again, because its answer was lost; then one of an owner that was fenced.
            again = await until_served("CommitCursor", name="c", partitions=[step])
            assert again.error_code == ErrorCode.none, again
            # The owner's signs of life went to the node that is dead: its lease lasts on.
            standby = await until_served("TakeCursor", **(take | {"owner": "standby", "force": False}))
            assert standby.error_code == TableCode.cursor_in_use
            taken = await until_served("TakeCursor", **take)
            assert taken.partitions[0].epoch > epoch
            assert taken.partitions[0].offset == 7
            zombie = await until_served(
                "CommitCursor", name="c", partitions=[step | {"previous_offset": 7, "offset": 9}]
            )
            assert zombie.error_code == TableCode.cursor_fenced

    run_virtual(story, seed=5)


def test_retention_knows_cursors_that_other_nodes_coordinate() -> None:
    async def story() -> None:
        async with ProductCluster(3) as cluster:
            await cluster.create(TOPIC, partitions=1)
            await cluster.until(lambda: cluster.leader(TOPIC) > 0)
            topic_id = cluster.broker(1).image.topics[TOPIC].id
            found = await cluster.ask(1, "FindCoordinator", 4, key_type=100, coordinator_keys=["c"])
            coordinator = found.coordinators[0].node_id
            position = {"partition": 0, "offset": 4, "leader_epoch": -1, "started": False, "finished": b""}
            taken = await cluster.ask(
                coordinator,
                "TakeCursor",
                0,
                name="c",
                topic=TOPIC,
                topic_id=topic_id,
                lease_ms=1_000,
                partitions=[position],
            )
            assert taken.error_code == ErrorCode.none, taken
            for node_id in cluster.nodes:
                floors = cluster.broker(node_id).cursor_floors
                await cluster.run(node_id, floors.refresh())
                assert floors._is_complete
                assert floors._slowest[topic_id, 0].offset == 4

    run_virtual(story, seed=6)
