"""Pins and snapshots of a table do not see a transaction in one bucket and miss it in another.

One bucket's marker is held back while the other's is durable: that is where a torn view would be taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.coordination import settle
from support.table_world import TableWorld, rows_of
from tidemill.client.tables.rows_in import as_tables
from tidemill.client.tables.writer import prepare_upserts
from tidemill.records.columns.build import build_batch_columns
from tidemill.server.broker import Broker
from tidemill.server.coordinators.transaction_partitions import LocalTransactionPartitions
from tidemill.tables.definition import TableDefinition
from tidemill.transactions.messages import TopicPartition, TransactionEnd
from tidemill.wire.jobs import AttemptId

TRANSACTIONAL = 0x10
HELD_BUCKET = 1
ROWS = [{"id": number, "region": "eu", "amount": 1.0} for number in range(20)]


@pytest.fixture
async def table(world: TableWorld) -> TableDefinition:
    return await world.create(buckets=2)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Until it is set, the markers of one bucket are not written."""
    released = asyncio.Event()
    write = LocalTransactionPartitions.write_markers

    async def slow(
        self: LocalTransactionPartitions, place: TopicPartition, markers: list[TransactionEnd]
    ) -> None:
        if place[1] == HELD_BUCKET:
            await released.wait()
        await write(self, place, markers)

    monkeypatch.setattr(LocalTransactionPartitions, "write_markers", slow)
    return released


async def write_attempt(world: TableWorld, table: TableDefinition, rows: list[dict[str, Any]]) -> AttemptId:
    opened = await world.done("OpenAttempt", job="j", batch=0, timeout_ms=60_000)
    attempt = AttemptId(opened.transactional_id, opened.producer_id, opened.producer_epoch)
    topic = table.partitions[0].topic
    transaction = {**attempt._asdict(), "topics": [{"name": topic, "partitions": [0, 1]}]}
    await world.ask_kafka("AddPartitionsToTxn", 4, transactions=[transaction])
    for piece in as_tables(rows, table.schema):
        for prepared in prepare_upserts(table, piece):
            for (_, bucket), (keys, values, *_) in prepared.parts.items():
                await _produce(world, attempt, topic, bucket, keys, values)
    return attempt


async def _produce(
    world: TableWorld, attempt: AttemptId, topic: str, bucket: int, keys: Any, values: Any
) -> None:
    records = build_batch_columns(
        keys,
        values,
        timestamp_ms=1_000,
        producer_id=attempt.producer_id,
        producer_epoch=attempt.producer_epoch,
        base_sequence=0,
        attributes=TRANSACTIONAL,
    )
    part = {"name": topic, "partition_data": [{"index": bucket, "records": records}]}
    answer = await world.ask_kafka(
        "Produce",
        9,
        transactional_id=attempt.transactional_id,
        acks=-1,
        timeout=60_000,
        topic_data=[part],
    )
    assert answer.responses[0].partition_responses[0].error_code == 0


async def begin_publication(world: TableWorld, table: TableDefinition) -> asyncio.Task[Any]:
    """A publication of two attempts that has come as far as to the first bucket."""
    attempts = [await write_attempt(world, table, ROWS[:10]), await write_attempt(world, table, ROWS[10:])]
    listed = [attempt._asdict() for attempt in attempts]
    task = asyncio.create_task(world.done("PublishAttempts", job="j", batch=0, attempts=listed))
    log = _log(world.broker, table, 0)
    moved = asyncio.Event()
    log.subscribe(task, moved.set)
    async with asyncio.timeout(120):
        while log.last_stable_offset < log.local_log.end_offset or log.local_log.producers.transactions.open:
            moved.clear()
            await moved.wait()
    log.unsubscribe(task)
    assert _log(world.broker, table, HELD_BUCKET).last_stable_offset == 0
    return task


def _log(broker: Broker, table: TableDefinition, bucket: int) -> Any:
    return broker.find.partition(broker.find.topic(table.partitions[0].topic), bucket)


async def pinned_ids(world: TableWorld, table: TableDefinition) -> list[int]:
    pin = await world.done("PinTable", table_id=table.table_id, min_offsets=(), max_wait_ms=60_000, idle_ms=0)
    found = [
        row["id"]
        for bucket in (0, 1)
        for row in rows_of(await world.open_scan(table, bucket, pin_id=pin.pin_id))
    ]
    return sorted(found)


async def leased_ids(world: TableWorld, table: TableDefinition) -> list[int]:
    answer = await world.done(
        "AcquireLease", table=table.name, lease_id=None, holder="me", duration_ms=60_000, fresh=True
    )
    found = [
        row["id"]
        for bucket in (0, 1)
        for row in rows_of(await world.open_scan(table, bucket, lease_id=answer.lease.lease_id))
    ]
    return sorted(found)


async def snapshot_offsets(world: TableWorld, table: TableDefinition) -> list[int]:
    """20 ids if the snapshots are behind all markers."""
    answer = await world.done("CreateSnapshot", table=table.name)
    ends = [_log(world.broker, table, bucket).local_log.end_offset for bucket in (0, 1)]
    assert [each.log_offset for each in answer.snapshots] == ends
    return list(range(len(ROWS)))


@pytest.mark.parametrize("look", [pinned_ids, leased_ids, snapshot_offsets])
async def test_whoever_comes_in_the_middle_waits_and_sees_all(
    world: TableWorld,
    table: TableDefinition,
    held: asyncio.Event,
    look: Callable[[TableWorld, TableDefinition], Awaitable[list[int]]],
) -> None:
    publishing = await begin_publication(world, table)
    looking = asyncio.ensure_future(look(world, table))
    await settle()
    held.set()
    assert await looking == list(range(len(ROWS)))
    assert not (await publishing).already_published


async def test_a_pin_that_was_taken_before_sees_nothing(
    world: TableWorld, table: TableDefinition, held: asyncio.Event
) -> None:
    await write_attempt(world, table, ROWS)
    assert await pinned_ids(world, table) == []
    held.set()
