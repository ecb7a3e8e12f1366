"""What the handlers share, with the real disk and the real flusher."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from support.batches import plain_batch
from tidemill.control.commands import CreateTopic, DeleteTopic, SetTopicConfigs
from tidemill.errors import ApiError, ErrorCode, StorageError
from tidemill.replication.coordinator_log import wait_committed
from tidemill.replication.partition import Partition
from tidemill.replication.replicas import Placement
from tidemill.server.broker import Broker

HOUR_MS = 3_600_000


async def create(broker: Broker, name: str, partitions: int = 1, **configs: str) -> UUID:
    overrides = {key.replace("_", "."): value for key, value in configs.items()}
    topic = await broker.controller.submit(
        CreateTopic(name=name, topic_id=uuid4(), partitions=partitions, replication=1, configs=overrides)
    )
    return topic.id


def leader(broker: Broker, topic: str, index: int = 0) -> Partition:
    return broker.partition(broker.topic(topic), index)


async def write(broker: Broker, topic: str, *values: str, index: int = 0, timestamp_ms: int = 0) -> None:
    partition = leader(broker, topic, index)
    batch = plain_batch(*values, timestamp_ms=timestamp_ms or broker.clock_ms())
    await wait_committed(partition, partition.append(batch, broker.clock_ms()).last_offset + 1)


async def settle_deletions(broker: Broker) -> None:
    await asyncio.wrap_future(broker._deleter.submit(lambda: None))


def refused(call: object, *arguments: object) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value.code


# --- partitions


async def test_unknown_topics_and_partitions_are_refused(broker: Broker) -> None:
    await create(broker, "t", 2)
    assert refused(broker.topic, "u") == ErrorCode.unknown_topic_or_partition
    assert refused(broker.topic_by_id, uuid4()) == ErrorCode.unknown_topic_id
    assert refused(broker.topic_by_id, None) == ErrorCode.unknown_topic_id
    for index in (-1, 2):
        assert refused(broker.partition, broker.topic("t"), index) == ErrorCode.unknown_topic_or_partition


async def test_a_partition_of_another_node_is_refused(broker: Broker) -> None:
    object.__setattr__(broker.settings, "node_id", 7)
    await create(broker, "t")
    assert refused(broker.partition, broker.topic("t"), 0) == ErrorCode.not_leader_or_follower
    assert broker.led_placements() == []


async def test_a_config_change_reaches_open_partitions_and_later_ones(broker: Broker) -> None:
    await create(broker, "t", 2)
    opened = leader(broker, "t", 0)
    await broker.controller.submit(SetTopicConfigs(name="t", configs={"retention.ms": "5000"}))
    assert opened.config.retention_ms == 5_000
    assert leader(broker, "t", 1).config.retention_ms == 5_000


async def test_producer_ids_are_never_given_twice(broker: Broker) -> None:
    ids = await asyncio.gather(*(broker.next_producer_id() for _ in range(2_500)))
    assert len(set(ids)) == 2_500


# --- deletion


async def test_a_deleted_topic_takes_its_files_along(broker: Broker, tmp_path: Path) -> None:
    await create(broker, "t")
    await write(broker, "t", "a")
    await broker.delete_topic(broker.topic("t"))
    await settle_deletions(broker)
    assert list((tmp_path / "logs" / "t").iterdir()) == []
    assert refused(broker.topic, "t") == ErrorCode.unknown_topic_or_partition


async def test_a_refused_deletion_leaves_no_marker(broker: Broker, tmp_path: Path) -> None:
    topic_id = await create(broker, "t")
    await write(broker, "t", "a")
    stale = broker.topic("t")
    await broker.controller.submit(DeleteTopic(name="t"))
    with pytest.raises(ApiError):
        await broker.delete_topic(stale)
    names = [path.name for path in (tmp_path / "logs" / "t").iterdir()]
    assert names == [f"{topic_id.hex}-0"]


async def test_files_that_cannot_be_removed_are_reported(
    broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(topic: str, topic_id: UUID) -> None:
        raise StorageError("cannot remove it")

    monkeypatch.setattr(broker.replicas, "remove_files", fail)
    broker.remove_files("t", uuid4())
    await settle_deletions(broker)
    assert "cannot remove it" in caplog.text


# --- retention


async def test_retention_by_time_and_by_size(broker: Broker) -> None:
    await create(broker, "by_time", retention_ms=str(HOUR_MS), internal_segment_bytes="300")
    await create(broker, "by_size", retention_bytes="400", internal_segment_bytes="300")
    now_ms = broker.clock_ms()
    for age_ms in (3 * HOUR_MS, 2 * HOUR_MS, 0):
        await write(broker, "by_time", "x" * 200, timestamp_ms=now_ms - age_ms)
        await write(broker, "by_size", "x" * 200)
    await broker.apply_retention()
    await settle_deletions(broker)
    assert leader(broker, "by_time").log_start_offset == 2
    assert len(leader(broker, "by_time").log.segments) == 1
    assert leader(broker, "by_size").log_start_offset == 1


async def test_all_of_a_log_may_expire_and_it_goes_on(broker: Broker) -> None:
    await create(broker, "t", retention_ms="1000")
    await write(broker, "t", "a", "b", timestamp_ms=broker.clock_ms() - HOUR_MS)
    await broker.apply_retention()
    partition = leader(broker, "t")
    assert (partition.log_start_offset, partition.high_watermark) == (2, 2)
    await write(broker, "t", "c")
    assert partition.high_watermark == 3


async def test_partitions_opened_for_retention_are_closed_again(broker: Broker) -> None:
    await create(broker, "t", 3, retention_ms=str(HOUR_MS))
    await write(broker, "t", "a", index=1)
    broker.replicas.close_partition(leader(broker, "t", 1))
    opened = leader(broker, "t", 2)
    await broker.apply_retention()
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

    def apply(self: Partition, now_ms: int) -> object:
        if self.index == 1:
            raise StorageError("a bad disk")
        return original(self, now_ms)

    monkeypatch.setattr(Partition, "apply_retention", apply)
    await broker.apply_retention()
    assert [leader(broker, "t", index).log_start_offset for index in range(3)] == [1, 0, 1]
    assert "t-1: a bad disk" in caplog.text


async def test_a_topic_deleted_while_retention_is_under_way_is_not_opened_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(broker, "t")
    await write(broker, "t", "a")
    listed_before = broker.led_placements()
    await broker.controller.submit(DeleteTopic(name="t"))
    monkeypatch.setattr(broker, "led_placements", lambda: listed_before)
    opened: list[Placement] = []
    monkeypatch.setattr(broker.replicas, "open", opened.append)
    await broker.apply_retention()
    assert opened == []


async def test_a_stop_gives_up_writes_that_take_too_long_to_look_at(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tidemill.server.broker._GATE_CLOSE_SECONDS", 0.01)
    endless = asyncio.get_running_loop().create_task(asyncio.Event().wait())
    broker.gated_writes["t", 0] = endless  # type: ignore[assignment]
    endless.add_done_callback(lambda _: broker.gated_writes.clear())
    await broker.close()
    assert endless.cancelled()
    assert "1 writes that were not acknowledged are given up" in caplog.text
