"""TakeCursor, DescribeCursor, ListCursors and DeleteCursor on one node: wrong requests, and wide cursors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.broker_topics import create
from tidemill.errors import ErrorCode, TableCode
from tidemill.server.broker import Broker

Ask = Callable[..., Awaitable[Any]]


async def take(broker: Broker, ask: Ask, *partitions: int, name: str = "c", finished: bytes = b"") -> Any:
    topic = broker.find.topic("t")
    position = {"offset": 0, "leader_epoch": -1, "started": False, "finished": finished}
    return await ask(
        broker,
        "TakeCursor",
        0,
        name=name,
        topic="t",
        topic_id=topic.id,
        region=b"r",
        shown="topic t",
        owner="me",
        lease_ms=1_000,
        force=True,
        partitions=[{"partition": each, **position} for each in partitions],
    )


@pytest.mark.parametrize("partition", [-1, 3, 2**31 - 1])
async def test_a_cursor_has_only_partitions_that_its_topic_has(
    broker: Broker, ask: Ask, partition: int
) -> None:
    await create(broker, "t", partitions=3)
    answer = await take(broker, ask, 0, partition)
    assert answer.error_code == ErrorCode.unknown_topic_or_partition
    assert str(partition) in answer.error_message


@pytest.mark.parametrize("finished", [b"\0", bytes(128) + b"\1"])
async def test_finished_offsets_that_are_not_as_they_are_written_are_refused(
    broker: Broker, ask: Ask, finished: bytes
) -> None:
    await create(broker, "t", partitions=1)
    answer = await take(broker, ask, 0, finished=finished)
    assert answer.error_code == ErrorCode.invalid_request
    assert "finished offsets" in answer.error_message


async def test_a_wide_cursor_is_described_listed_and_deleted_as_a_whole(broker: Broker, ask: Ask) -> None:
    await create(broker, "t", partitions=1_200)
    for first in range(0, 1_200, 400):
        answer = await take(broker, ask, *range(first, first + 400))
        assert answer.error_code == 0, answer
    await take(broker, ask, 0, name="narrow")
    described = (await ask(broker, "DescribeCursor", 0, name="c")).cursor
    assert [each.partition for each in described.partitions] == list(range(1_200))
    listed = (await ask(broker, "ListCursors", 0, topic=None)).cursors
    assert {each.name: len(each.partitions) for each in listed} == {"c": 1_200, "narrow": 1}
    assert (await ask(broker, "DeleteCursor", 0, name="c", force=True)).error_code == 0
    assert (await ask(broker, "DescribeCursor", 0, name="c")).error_code == TableCode.cursor_not_found
    assert [each.name for each in (await ask(broker, "ListCursors", 0, topic=None)).cursors] == ["narrow"]
