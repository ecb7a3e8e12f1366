"""Finding partitions: the image is asked each time, and says no in Kafka's words."""

from __future__ import annotations

from uuid import uuid4

import pytest
from msgspec.structs import replace

from support.batches import plain_batch
from support.broker_topics import create, leader, refused, write
from support.leadership import change_in_sync, elect, put_record
from tidemill.control.commands import SetTopicConfigs
from tidemill.errors import ApiError, ErrorCode
from tidemill.replication.coordinator_log import wait_committed
from tidemill.server.broker import Broker


async def test_unknown_topics_and_partitions_are_refused(broker: Broker) -> None:
    await create(broker, "t", 2)
    assert refused(broker.find.topic, "u") == ErrorCode.unknown_topic_or_partition
    assert refused(broker.find.topic_by_id, uuid4()) == ErrorCode.unknown_topic_id
    assert refused(broker.find.topic_by_id, None) == ErrorCode.unknown_topic_id
    for index in (-1, 2):
        assert (
            refused(broker.find.partition, broker.find.topic("t"), index)
            == ErrorCode.unknown_topic_or_partition
        )


async def test_a_partition_of_another_node_is_refused(broker: Broker) -> None:
    object.__setattr__(broker.settings, "node_id", 7)
    await create(broker, "t")
    assert refused(broker.find.partition, broker.find.topic("t"), 0) == ErrorCode.not_leader_or_follower
    assert list(broker.find.led_placements()) == []


async def test_an_open_partition_is_not_served_once_another_node_leads_it(broker: Broker) -> None:
    await create(broker, "t", 2)
    partition, stale = leader(broker, "t"), broker.find.topic("t")
    waiting = wait_committed(partition, partition.append(plain_batch("a"), 0).last_offset + 1)
    await elect(broker.controller, "t", 0, leader=2)
    with pytest.raises(ApiError) as caught:
        await waiting
    assert caught.value.code == ErrorCode.not_leader_or_follower
    for topic in (broker.find.topic("t"), stale):
        assert refused(broker.find.partition, topic, 0) == ErrorCode.not_leader_or_follower
    assert leader(broker, "t", 1) is not None
    epoch = await elect(broker.controller, "t", 0, leader=1)
    for topic in (broker.find.topic("t"), stale):
        assert broker.find.partition(topic, 0) is partition
    assert partition.leader_epoch == epoch == 2
    change_in_sync(partition, [])
    await write(broker, "t", "b")
    assert partition.high_watermark == 2


async def test_a_node_that_is_live_again_takes_what_it_did_not_take_meanwhile(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(broker, "t")
    partition = leader(broker, "t")
    placed = broker.find.topic("t").partitions[0]
    with monkeypatch.context() as patched:
        patched.setattr(broker.find, "_may_lead", lambda: False)
        await put_record(broker.controller, "t", 0, replace(placed, elr=(2,), partition_epoch=7))
    await create(broker, "u")
    assert partition.assignment is not None
    assert partition.assignment.partition_epoch == 7, "its proposals would be refused for ever"


async def test_a_partition_that_was_opened_for_an_older_epoch_takes_the_present_one(broker: Broker) -> None:
    """A start opens partitions in a thread, and the metadata may change meanwhile."""
    await create(broker, "t")
    older = broker.find.placement(broker.find.topic("t"), 0)
    await elect(broker.controller, "t", 0, leader=1)
    partition = broker.replicas.open(older)
    assert partition.leader_epoch == 0
    assert leader(broker, "t") is partition
    assert partition.leader_epoch == 1


async def test_a_config_change_reaches_open_partitions_and_later_ones(broker: Broker) -> None:
    await create(broker, "t", 2)
    opened = leader(broker, "t", 0)
    await broker.controller.submit(SetTopicConfigs(name="t", configs={"retention.ms": "5000"}))
    assert opened.config.retention_ms == 5_000
    assert leader(broker, "t", 1).config.retention_ms == 5_000
