"""Reads that meet something else: a new schema, the end of a lease, a drop, rows too large for one answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pyarrow as pa
import pytest

from support.fake_connection import filled
from support.table_world import ManualClock, TableWorld, count_views, rows_of
from tidemill.coordination.fair_shares import NOBODY
from tidemill.errors import ErrorCode, TableCode, TableError
from tidemill.kv.rocks.store import RocksStore
from tidemill.server.broker import Broker
from tidemill.server.tables.node_tables import NodeTables
from tidemill.tables.definition import TableDefinition, pack_schema
from tidemill.tables.scanning import reading
from tidemill.tables.scanning.sessions import BucketKey
from tidemill.tables.state.bucket import Bucket

MakeBroker = Callable[..., Awaitable[Broker]]
Ask = Callable[..., Awaitable[Any]]

SOON = 120
MINUTE_MS = 60_000


def row(number: int, region: str = "eu") -> dict[str, Any]:
    return {"id": number, "region": region, "amount": number / 2}


@pytest.fixture
async def table(world: TableWorld) -> TableDefinition:
    """Ten rows in one bucket."""
    table = await world.create()
    await world.upsert(table, [row(number) for number in range(10)])
    return table


def tables_of(world: TableWorld) -> NodeTables:
    tables = world.broker.tables.loaded
    assert tables is not None
    return tables


def bucket_of(world: TableWorld, table: TableDefinition) -> Bucket:
    return tables_of(world).service.bucket(BucketKey(table.table_id, table.partitions[0].id, 0))


async def look_up(world: TableWorld, table: TableDefinition, *ids: int, **more: Any) -> Any:
    keys = table.keys.state_keys(table.keys.columns_from(list(ids))).to_pylist()
    body = {"table_id": table.table_id, "partition_id": 0, "bucket": 0, "leader_epoch": -1, "min_offset": -1}
    return await world.ask("LookupKv", **{**body, "keys": keys, "max_wait_ms": 10_000, **more})


async def widen(world: TableWorld, table: TableDefinition, schema: pa.Schema) -> TableDefinition:
    await world.done("AlterTable", name=table.name, add_columns=pack_schema(schema))
    return await world.definition(table.name)


# --- schemas that come in between


class Paused:
    """Keeps a call of the store until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.begun, self.may_go_on, real = threading.Event(), threading.Event(), getattr(RocksStore, name)

        def paused(store: RocksStore, *arguments: Any) -> Any:
            self.begun.set()
            self.may_go_on.wait(SOON)
            return real(store, *arguments)

        monkeypatch.setattr(RocksStore, name, paused)


async def test_a_look_up_reads_rows_of_a_schema_that_came_while_it_waited(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = Paused(monkeypatch, "get_many")
    looking = asyncio.ensure_future(look_up(world, table, 1, 77))
    await asyncio.to_thread(paused.begun.wait, SOON)
    wider = await widen(world, table, pa.schema([("note", pa.string())]))
    await world.upsert(wider, [{**row(77), "note": "new"}])
    await bucket_of(world, table).ready(11, SOON)
    paused.may_go_on.set()
    found = await looking
    assert (found.error_code, found.error_message) == (0, None)
    assert [each.get("note") for each in rows_of(found)] == [None, "new"]


async def test_a_scan_reads_rows_of_a_schema_that_came_before_its_moment(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = tables_of(world).service
    real = service.ready_bucket

    async def ready_bucket(*arguments: Any) -> Bucket:
        # Between the look at the table and the view.
        monkeypatch.setattr(service, "ready_bucket", real)
        wider = await widen(world, table, pa.schema([("note", pa.string())]))
        await world.upsert(wider, [{**row(77), "note": "new"}])
        return await real(*arguments)

    monkeypatch.setattr(service, "ready_bucket", ready_bucket)
    response = await world.open_scan(table)
    assert (response.error_code, response.error_message) == (0, None)
    assert rows_of(response)[-1] == {**row(77), "note": "new"}


async def test_a_definition_that_a_thread_made_from_an_old_image_is_not_kept(
    world: TableWorld, table: TableDefinition
) -> None:
    service = tables_of(world).service
    old = world.broker.image.tables[table.name]
    wider = await widen(world, table, pa.schema([("note", pa.string())]))
    # A thread that had looked at the image before the change is done with its work after it.
    service._definition(old)
    await world.upsert(wider, [{**row(77), "note": "new"}])
    assert rows_of(await look_up(world, wider, 77))[0]["note"] == "new"


# --- leased snapshots


async def lease(world: TableWorld, table: TableDefinition, **more: Any) -> Any:
    body = {"table": table.name, "lease_id": None, "holder": "me", "duration_ms": MINUTE_MS, "fresh": True}
    return (await world.done("AcquireLease", **{**body, **more})).lease


@pytest.fixture
async def tight(make_broker: MakeBroker, ask: Ask, clock: ManualClock) -> TableWorld:
    """A node that keeps one snapshot."""
    return TableWorld(await make_broker(clock_ms=clock, kv_snapshots_kept=1), ask, clock)


async def test_a_scan_of_a_leased_snapshot_goes_on_when_the_lease_is_over(tight: TableWorld) -> None:
    table = await tight.create()
    await tight.upsert(table, [row(number) for number in range(10)])
    held = await lease(tight, table)
    response = await tight.open_scan(table, lease_id=held.lease_id, batch_size_bytes=128)
    await tight.upsert(table, [row(99)])
    await tight.done("CreateSnapshot", table=table.name)
    await tight.done("ReleaseLease", lease_id=held.lease_id)
    bucket = bucket_of(tight, table)
    assert len(bucket.snapshots.list()) == 2
    got, sequence = rows_of(response), 0
    while response.has_more:
        sequence += 1
        response = await tight.go_on(response.scanner_id, sequence)
        assert (response.error_code, response.error_message) == (0, None)
        got += rows_of(response)
    assert [each["id"] for each in got] == list(range(10))
    await tight.close_scan(response.scanner_id)
    async with asyncio.timeout(SOON):
        while len(bucket.snapshots.list()) == 2:
            await tables_of(tight).service.keeper.prune(bucket)
            await asyncio.sleep(0.01)
    assert (await tight.open_scan(table, lease_id=held.lease_id)).error_code == TableCode.lease_not_found


async def test_a_snapshot_that_is_being_leased_is_not_removed(
    tight: TableWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = await tight.create()
    await tight.upsert(table, [row(1)])
    await tight.done("CreateSnapshot", table=table.name)
    bucket, service = bucket_of(tight, table), tables_of(tight).service
    chosen, may_go_on, real = asyncio.Event(), asyncio.Event(), tables_of(tight).leases._snapshots

    async def choose(*arguments: Any, **named: Any) -> Any:
        found = await real(*arguments, **named)
        chosen.set()
        await may_go_on.wait()
        return found

    monkeypatch.setattr(tables_of(tight).leases, "_snapshots", choose)
    leasing = asyncio.ensure_future(lease(tight, table, fresh=False))
    await chosen.wait()
    await tight.upsert(table, [row(2)])
    await bucket.snapshot()
    pruning = asyncio.ensure_future(service.keeper.prune(bucket))
    await asyncio.sleep(0)
    if not bucket.snapshots_turn._waiters:
        await pruning  # It did not wait for its turn, so the snapshot that was chosen may be gone.
    may_go_on.set()
    held = await leasing
    await pruning
    ids = [each["id"] for batch in await tight.scan(table, lease_id=held.lease_id) for each in batch]
    assert ids == [1]


async def test_what_was_kept_and_let_go_leaves_nothing_behind(
    world: TableWorld, table: TableDefinition
) -> None:
    held = await lease(world, table)
    await world.scan(table, lease_id=held.lease_id)
    tables = tables_of(world)
    world.clock.advance(MINUTE_MS)
    await world.sweep()
    async with asyncio.timeout(SOON):
        while tables.service.keeper._kept:  # noqa: ASYNC110 - it goes in a thread
            await asyncio.sleep(0.01)


# --- floors


async def test_the_floor_of_a_log_is_its_oldest_snapshot_and_nothing_is_read_on_the_loop(
    world: TableWorld, table: TableDefinition
) -> None:
    keeper = tables_of(world).service.keeper
    topic_id = world.broker.find.topic(table.name).id
    assert keeper.floor(topic_id, 0) == 0
    await world.done("CreateSnapshot", table=table.name)
    assert keeper.floor(topic_id, 0) == 10
    keeper.forget(topic_id)
    # As after a start: everything is needed until it is known what is.
    assert keeper.floor(topic_id, 0) == 0
    await keeper.close()
    assert keeper.floor(topic_id, 0) == 10
    await world.done("DropTable", name=table.name, if_exists=False)
    assert keeper._floors == {}


# --- how much


async def test_sessions_that_came_to_their_end_do_not_hold_their_views_without_a_limit(
    world: TableWorld, table: TableDefinition
) -> None:
    sessions = tables_of(world).scans.sessions
    limit = sessions.limits.lingering
    last = b""
    for _ in range(limit + 5):
        last = (await world.open_scan(table)).scanner_id
    assert count_views(bucket_of(world, table).store) <= limit
    assert rows_of(await world.go_on(last, 0)) == [row(number) for number in range(10)]


async def test_rows_that_are_too_much_for_one_answer_are_refused_and_one_row_is_not(
    make_broker: MakeBroker, ask: Ask, clock: ManualClock
) -> None:
    world = TableWorld(await make_broker(clock_ms=clock, scan_max_bytes=1_000), ask, clock)
    table = await world.create()
    await world.upsert(table, [row(number, "x" * 400) for number in range(1_000)])
    refused = await look_up(world, table, *range(1_000))
    assert refused.error_code == TableCode.answer_too_large
    assert len(rows_of(await look_up(world, table, 1, 2))) == 2
    await world.upsert(table, [row(5, "x" * 4_000)])
    assert len(rows_of(await look_up(world, table, 5))) == 1
    assert (await look_up(world, table, 5, 6)).error_code == TableCode.answer_too_large


async def test_old_rows_are_few_at_a_time_in_an_answer_that_new_columns_make_wide(
    make_broker: MakeBroker, ask: Ask, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_PIECE_SPREAD_BYTES", 64 * 1024)
    world = TableWorld(await make_broker(clock_ms=clock, scan_max_bytes=64 * 1024), ask, clock)
    table = await world.create("shop.wide", "id bigint")
    await world.upsert(table, [{"id": number} for number in range(500)])
    wider = await widen(world, table, pa.schema([(f"c{n}", pa.int64()) for n in range(300)]))
    response = await world.open_scan(wider, batch_size_bytes=64 * 1024)
    assert response.has_more
    assert len(response.records) < 4 * 64 * 1024
    total = sum(len(batch) for batch in await world.scan(wider, size=64 * 1024))
    assert total == 500
    assert (await look_up(world, wider, *range(500))).error_code == TableCode.answer_too_large


async def test_a_pin_that_names_too_many_offsets_is_refused(
    world: TableWorld, table: TableDefinition
) -> None:
    offsets = [{"partition_id": 0, "bucket": 0, "offset": 0}] * 30_001
    response = await world.ask(
        "PinTable", table_id=table.table_id, min_offsets=offsets, max_wait_ms=1_000, idle_ms=0
    )
    assert response.error_code == ErrorCode.invalid_request


# --- ends


async def test_a_look_up_of_a_store_that_is_closed_under_it_can_be_tried_again(
    world: TableWorld, table: TableDefinition
) -> None:
    await look_up(world, table, 1)
    bucket = bucket_of(world, table)
    store = bucket.store
    await asyncio.to_thread(store.close)
    response = await look_up(world, table, 1)
    assert response.error_code == TableCode.state_not_ready


async def test_a_pin_that_meets_a_bucket_being_dropped_is_refused_and_keeps_nothing(
    world: TableWorld,
) -> None:
    table = await world.create(buckets=2)
    await world.upsert(table, [row(number) for number in range(10)])
    service = tables_of(world).service
    first, second = (service.bucket(BucketKey(table.table_id, 0, number)) for number in (0, 1))
    await first.ready(0, SOON)
    await second.ready(0, SOON)
    real = first.view

    def view() -> Any:
        second._closed = True
        return real()

    first.view = view  # type: ignore[method-assign]
    async with asyncio.timeout(SOON):
        with pytest.raises(TableError, match="is being closed"):
            await tables_of(world).scans.pin(table.table_id, {}, 1_000, 0, NOBODY)
        while count_views(first.store):  # noqa: ASYNC110 - it is taken and let go in its turn
            await asyncio.sleep(0.01)
    second._closed = False


async def test_answers_are_small_while_the_memory_for_them_is_used_up(
    world: TableWorld, table: TableDefinition
) -> None:
    await world.upsert(table, [row(number, "x" * 1_000) for number in range(500)])
    assert not (await world.open_scan(table)).has_more
    other = filled(world.broker.budget, world.broker.budget.limits.total_bytes)
    try:
        response = await world.open_scan(table)
        assert response.has_more
        assert len(response.records) < 2 * 64 * 1024
        assert (await look_up(world, table, *range(500))).error_code == TableCode.answer_too_large
    finally:
        other.close()
    assert (await look_up(world, table, *range(500))).error_code == 0
