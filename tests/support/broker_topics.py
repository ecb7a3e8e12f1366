"""Topics and records on a broker without sockets, with the real disk and the real flusher."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import UUID, uuid4

import pytest

from support.batches import plain_batch
from tidemill.control.commands import CreateTopic
from tidemill.errors import ApiError, ErrorCode
from tidemill.replication.coordinator_log import wait_committed
from tidemill.replication.partition import Partition
from tidemill.server.broker import Broker

__all__ = ("create", "leader", "refused", "settle_deletions", "write")


async def create(broker: Broker, name: str, partitions: int = 1, **configs: str) -> UUID:
    """Create a topic; names of configs have underscores for dots."""
    overrides = {key.replace("_", "."): value for key, value in configs.items()}
    topic = await broker.controller.submit(
        CreateTopic(name=name, topic_id=uuid4(), partitions=partitions, replication=1, configs=overrides)
    )
    return topic.id


def leader(broker: Broker, topic: str, index: int = 0) -> Partition:
    """The partition, which this node leads."""
    return broker.find.partition(broker.find.topic(topic), index)


async def write(broker: Broker, topic: str, *values: str, index: int = 0, timestamp_ms: int = 0) -> None:
    """Append one batch; returns when it is committed."""
    partition = leader(broker, topic, index)
    batch = plain_batch(*values, timestamp_ms=timestamp_ms or broker.clock_ms())
    await wait_committed(partition, partition.append(batch, broker.clock_ms()).last_offset + 1)


async def settle_deletions(broker: Broker) -> None:
    """Wait until the files of what was deleted are gone."""
    await asyncio.wrap_future(broker.removal._thread.submit(lambda: None))


def refused(call: Callable[..., object], *arguments: object) -> ErrorCode:
    """What the call is refused with."""
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    return caught.value.code
