"""Retention over all partitions of a node, with the real disk and the real flusher."""

from __future__ import annotations

import pytest

from support.batches import plain_batch
from support.broker_topics import create, leader, settle_deletions, write
from support.other_nodes import FakeCluster
from tidemill.control.commands import DeleteTopic
from tidemill.control.records import PartitionImage
from tidemill.errors import StorageError
from tidemill.replication.coordinator_log import wait_committed
from tidemill.replication.partition import Partition
from tidemill.replication.replicas import Placement
from tidemill.server.broker import Broker

HOUR_MS = 3_600_000


async def test_retention_by_time_and_by_size(broker: Broker) -> None:
    await create(broker, "by_time", retention_ms=str(HOUR_MS), internal_segment_bytes="300")
    await create(broker, "by_size", retention_bytes="400", internal_segment_bytes="300")
    now_ms = broker.clock_ms()
    for age_ms in (3 * HOUR_MS, 2 * HOUR_MS, 0):
        await write(broker, "by_time", "x" * 200, timestamp_ms=now_ms - age_ms)
        await write(broker, "by_size", "x" * 200)
    await broker.log_cleanup.apply_retention()
    await settle_deletions(broker)
    assert leader(broker, "by_time").log_start_offset == 2
    assert len(leader(broker, "by_time").local_log.segments) == 1
    assert leader(broker, "by_size").log_start_offset == 1


async def test_all_of_a_log_may_expire_and_it_goes_on(broker: Broker) -> None:
    await create(broker, "t", retention_ms="1000")
    await write(broker, "t", "a", "b", timestamp_ms=broker.clock_ms() - HOUR_MS)
    await broker.log_cleanup.apply_retention()
    partition = leader(broker, "t")
    assert (partition.log_start_offset, partition.high_watermark) == (2, 2)
    await write(broker, "t", "c")
    assert partition.high_watermark == 3


async def test_partitions_opened_for_retention_are_closed_again(broker: Broker) -> None:
    await create(broker, "t", 3, retention_ms=str(HOUR_MS))
    await write(broker, "t", "a", index=1)
    broker.replicas.close_partition(leader(broker, "t", 1))
    opened = leader(broker, "t", 2)
    await broker.log_cleanup.apply_retention()
    assert list(broker.replicas) == [opened]
    assert leader(broker, "t", 1).high_watermark == 1


async def test_compacted_topics_are_not_cut(broker: Broker) -> None:
    await create(broker, "t", cleanup_policy="compact", retention_ms="1")
    partition = leader(broker, "t")
    assert partition.apply_retention(broker.clock_ms() + HOUR_MS) == []


async def test_a_partition_that_fails_does_not_keep_the_others_from_retention(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await create(broker, "t", 3, retention_ms="1000")
    for index in range(3):
        await write(broker, "t", "a", index=index, timestamp_ms=broker.clock_ms() - HOUR_MS)
    original = Partition.apply_retention

    def apply(self: Partition, now_ms: int, floor: int) -> object:
        if self.index == 1:
            raise StorageError("a bad disk")
        return original(self, now_ms, floor)

    monkeypatch.setattr(Partition, "apply_retention", apply)
    await broker.log_cleanup.apply_retention()
    assert [leader(broker, "t", index).log_start_offset for index in range(3)] == [1, 0, 1]
    assert "t-1: a bad disk" in caplog.text


async def test_a_topic_deleted_while_retention_is_under_way_is_not_opened_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(broker, "t")
    await write(broker, "t", "a")
    listed_before = list(broker.find.led_placements())
    await broker.controller.submit(DeleteTopic(name="t"))
    monkeypatch.setattr(broker.find, "led_placements", lambda: listed_before)
    opened: list[Placement] = []
    monkeypatch.setattr(broker.replicas, "open", opened.append)
    await broker.log_cleanup.apply_retention()
    assert opened == []


async def follow(broker: Broker, topic: str) -> Partition:
    """Make node 2 the leader of a topic's partition, which this node led before."""
    cluster = await FakeCluster.around(broker, {2: None})
    partition = leader(broker, topic)
    await cluster.place(topic, 0, PartitionImage(2, 5, (2, 1), (2, 1)))
    assert partition.leader == 2
    return partition


async def test_a_follower_forgets_producers_and_leaves_the_log_start_to_its_leader(broker: Broker) -> None:
    await create(broker, "t", retention_ms="1000")
    long_ago_ms = broker.clock_ms() - 48 * HOUR_MS
    partition = leader(broker, "t")
    partition.append(plain_batch("a", producer=(7, 0, 0), timestamp_ms=long_ago_ms), long_ago_ms)
    await wait_committed(partition, 1)
    await follow(broker, "t")
    assert [each.producer_id for each in partition.producers()] == [7]
    await broker.log_cleanup.apply_retention()
    assert list(partition.producers()) == []
    assert partition.log_start_offset == 0


async def test_a_follower_compacts_by_itself(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    await create(broker, "t", cleanup_policy="compact")
    await create(broker, "elsewhere", cleanup_policy="compact")
    partition = await follow(broker, "t")
    found: list[Partition] = []

    async def compact(partitions: list[Partition]) -> None:
        found.extend(partitions)

    monkeypatch.setattr(broker.compactor, "compact", compact)
    await broker.log_cleanup.compact()
    assert found == [partition]


async def test_in_a_cluster_nothing_is_opened_to_be_cleaned_up(broker: Broker) -> None:
    await create(broker, "t", retention_ms="1000")
    await write(broker, "t", "a")
    partition = await follow(broker, "t")
    broker.replicas.close_partition(partition)
    opened: list[Partition] = []
    broker.replicas.on_open = opened.append
    await broker.log_cleanup.apply_retention()
    assert opened == [], "replication would go on with a partition that is closed again"
