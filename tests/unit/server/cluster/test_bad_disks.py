"""A replica that was repaired with loss, and a directory that was restored from an old image."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Awaitable, Callable

import pytest

from support.faulty_storage import FaultyStorage
from support.product_cluster import ProductCluster
from support.virtual_loop import run_virtual
from tidemill.control.commands import Election, ElectLeaders
from tidemill.errors import ApiError, ErrorCode
from tidemill.log.notes.repaired import is_repaired
from tidemill.log.offline.repair import DamageTreatment, apply_repair, plan_repair
from tidemill.records.record import Record, build_batch
from tidemill.replication.partition import Partition
from tidemill.replication.replicas import partition_directory
from tidemill.replication.rules.following import FollowingState

Story = Callable[[ProductCluster], Awaitable[None]]


def on_nodes(size: int) -> Callable[[Story], Callable[[], None]]:
    """Run a test on the virtual loop, with a topic ``t`` of one partition on all nodes."""

    def decorate(story: Story) -> Callable[[], None]:
        @functools.wraps(story)
        def test() -> None:
            async def main() -> None:
                async with ProductCluster(size) as cluster:
                    await cluster.create("t", partitions=1, replication=size)
                    await story(cluster)

            run_virtual(main, seed=1)

        del test.__wrapped__
        return test

    return decorate


async def end(cluster: ProductCluster, node_id: int) -> None:
    """Kill a node, and wait until its session is over."""
    await cluster.kill(node_id)
    await asyncio.sleep(10)


async def write(cluster: ProductCluster, *values: str) -> None:
    """Write a batch for each value, and wait until all of them are committed."""
    await cluster.until(lambda: cluster.leader("t") != -1)
    for value in values:
        leader = cluster.leader("t")
        records = build_batch([Record(None, value.encode(), 0)])
        data = {"name": "t", "partition_data": [{"index": 0, "records": records}]}
        body = {"transactional_id": None, "acks": -1, "timeout": 30_000, "topic_data": [data]}
        answer = await cluster.ask(leader, "Produce", 9, **body)
        assert answer.responses[0].partition_responses[0].error_code is ErrorCode.none


def replica(cluster: ProductCluster, node_id: int) -> Partition:
    broker = cluster.broker(node_id)
    partition = broker.replicas.peek(broker.find.topic("t").id, 0)
    assert partition is not None
    return partition


def log_bytes(partition: Partition) -> bytes:
    log = partition.local_log
    return b"".join(log.read_batches(log.log_start_offset, log.end_offset))


def in_sync(cluster: ProductCluster) -> set[int]:
    return {*cluster.broker(cluster.some_id).image.topics["t"].partitions[0].isr}


def damage(cluster: ProductCluster, node_id: int, directory: str) -> FaultyStorage:
    """Flip a byte of the first batch of a node that is down."""
    disk = cluster.disks[node_id]
    file = disk.open(f"{directory}/{0:020d}.log")
    byte = bytes(file.read(70, 1))
    file.write(70, [bytes([byte[0] ^ 1])])
    file.sync()
    file.close()
    return disk


def directory_of(cluster: ProductCluster) -> str:
    topic = cluster.broker(cluster.some_id).image.topics["t"]
    return partition_directory("t", topic.id, 0)


async def repair(cluster: ProductCluster, node_id: int, treatment: DamageTreatment) -> None:
    """Kill a node, damage its replica, and repair that as ``tidemill log repair`` does."""
    directory = directory_of(cluster)
    await end(cluster, node_id)
    disk = damage(cluster, node_id, directory)
    plan = plan_repair(disk, directory, treatment)
    assert plan.loses_records
    apply_repair(plan, in_cluster=True)
    assert is_repaired(disk, directory)


def a_follower(cluster: ProductCluster) -> int:
    return next(node_id for node_id in cluster.nodes if node_id != cluster.leader("t"))


# --- repaired with loss


@pytest.mark.parametrize("treatment", list(DamageTreatment))
def test_a_replica_that_was_repaired_with_loss_is_copied_anew(treatment: DamageTreatment) -> None:
    @on_nodes(3)
    async def story(cluster: ProductCluster) -> None:
        await write(cluster, "a", "b", "c")
        follower = a_follower(cluster)
        await cluster.until(lambda: follower in in_sync(cluster))
        await repair(cluster, follower, treatment)
        await write(cluster, "d")
        await cluster.start(follower)
        await cluster.until(lambda: follower in in_sync(cluster))
        assert log_bytes(replica(cluster, follower)) == log_bytes(cluster.led("t"))
        assert not is_repaired(cluster.disks[follower], directory_of(cluster))

    story()


def test_without_the_mark_a_repaired_replica_would_be_in_sync_without_its_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ablation: with damaged records left out, its epochs and offsets are still those of the leader."""
    never = property(lambda self: False, lambda self, is_lost: None)
    monkeypatch.setattr(FollowingState, "is_lost", never)

    @on_nodes(3)
    async def story(cluster: ProductCluster) -> None:
        await write(cluster, "a", "b", "c")
        follower = a_follower(cluster)
        await cluster.until(lambda: follower in in_sync(cluster))
        await repair(cluster, follower, DamageTreatment.SKIP)
        await cluster.start(follower)
        await cluster.until(lambda: follower in in_sync(cluster))
        assert log_bytes(replica(cluster, follower)) != log_bytes(cluster.led("t"))

    story()


@on_nodes(1)
async def test_a_repaired_replica_that_was_the_last_leads_only_if_an_operator_says_so(
    cluster: ProductCluster,
) -> None:
    await write(cluster, "a", "b", "c")
    await repair(cluster, 1, DamageTreatment.SKIP)
    await cluster.start(1)
    placed = cluster.broker(1).image.topics["t"].partitions[0]
    assert (placed.leader, placed.isr, placed.elr) == (-1, (), ())
    assert is_repaired(cluster.disks[1], directory_of(cluster))
    elect = ElectLeaders(name="t", partitions=(0,), election=Election.UNCLEAN, leader=1, who="a test")
    await cluster.run(1, cluster.broker(1).propose(elect))
    await cluster.until(lambda: cluster.leader("t") == 1)
    await write(cluster, "d")
    assert not is_repaired(cluster.disks[1], directory_of(cluster))
    assert replica(cluster, 1).log_end_offset == 4


@on_nodes(3)
async def test_a_replica_whose_files_are_gone_leaves_the_in_sync_set_and_comes_back_after_a_repair(
    cluster: ProductCluster,
) -> None:
    await write(cluster, "a", "b", "c")
    follower = a_follower(cluster)
    await cluster.until(lambda: follower in in_sync(cluster))
    directory = directory_of(cluster)
    listed_below = cluster.broker(follower).replicas.inventory.listed_below(directory)
    await end(cluster, follower)
    disk = cluster.disks[follower]
    disk.remove_tree(directory)
    await cluster.start(follower)
    assert follower not in in_sync(cluster)
    await end(cluster, follower)
    disk = cluster.disks[follower]
    plan = plan_repair(disk, directory, listed_below=listed_below, accept_loss=True)
    apply_repair(plan, in_cluster=True)
    await write(cluster, "d")
    await cluster.start(follower)
    await cluster.until(lambda: follower in in_sync(cluster))
    assert log_bytes(replica(cluster, follower)) == log_bytes(cluster.led("t"))


# --- restored from an old image


async def restore_old_image(cluster: ProductCluster, node_id: int) -> None:
    """Take an image of a node's disk, let the node go on, and put the image back."""
    await write(cluster, "a")
    await end(cluster, node_id)
    image = taken(cluster.disks[node_id])
    await cluster.start(node_id)
    await write(cluster, "b")
    await end(cluster, node_id)
    cluster.disks[node_id] = image


def taken(disk: FaultyStorage) -> FaultyStorage:
    disk.on_call, disk.on_full = lambda call, path: None, lambda error: None
    return copy.deepcopy(disk)


async def refused(cluster: ProductCluster, node_id: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await cluster.start(node_id)
    await end(cluster, node_id)
    return caught.value


@pytest.mark.parametrize("size", [1, 3])
def test_a_directory_that_was_restored_from_an_old_image_is_refused(size: int) -> None:
    @on_nodes(size)
    async def story(cluster: ProductCluster) -> None:
        node_id = 1
        await restore_old_image(cluster, node_id)
        error = await refused(cluster, node_id)
        assert error.code is ErrorCode.duplicate_broker_registration
        assert "restored" in error.message
        assert "--replace-directory" in error.message
        again = await refused(cluster, node_id)
        assert again.message == error.message, "a refusal teaches the directory nothing"

    story()


@on_nodes(3)
async def test_an_old_image_that_an_operator_accepts_is_brought_up_to_date_before_it_counts(
    cluster: ProductCluster,
) -> None:
    await restore_old_image(cluster, 1)
    await cluster.start(1, replace_directory=True)
    assert not cluster.broker(1).image.nodes[1].lost
    await cluster.until(lambda: in_sync(cluster) == {1, 2, 3})
    assert log_bytes(replica(cluster, 1)) == log_bytes(replica(cluster, 2))


@on_nodes(1)
async def test_an_old_image_of_the_last_replica_leads_nothing(cluster: ProductCluster) -> None:
    await restore_old_image(cluster, 1)
    await cluster.start(1, replace_directory=True)
    placed = cluster.broker(1).image.topics["t"].partitions[0]
    assert (placed.leader, placed.isr, placed.elr) == (-1, (), ())


@on_nodes(1)
async def test_a_directory_is_known_after_any_number_of_starts(cluster: ProductCluster) -> None:
    for value in "abc":
        await write(cluster, value)
        await end(cluster, 1)
        await cluster.start(1)
    assert replica(cluster, 1).log_end_offset == 3
