"""LookupKv, PinTable, leases, snapshots and numbers: what is read beside scans, with a manual clock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import astuple
from typing import Any

import pytest

from support.table_world import ManualClock, TableWorld, count_views, rows_of
from tidemill.control.commands import BumpLeaderEpochs
from tidemill.coordination.fair_shares import Client
from tidemill.errors import ErrorCode, TableCode, TableError
from tidemill.server.broker import Broker
from tidemill.tables.definition import TableDefinition
from tidemill.tables.scanning import service as scans
from tidemill.tables.scanning.pins import Pin
from tidemill.tables.scanning.sessions import BucketKey
from tidemill.tables.state import folding

MakeBroker = Callable[..., Awaitable[Broker]]
Ask = Callable[..., Awaitable[Any]]

INVALID = 1068
IDLE_MS = 600_000
#: Room for three of the rows below, key and offset included.
SMALL = 128


def row(number: int, region: str = "eu") -> dict[str, Any]:
    return {"id": number, "region": region, "amount": number / 2}


ROWS = [row(number) for number in range(10)]


@pytest.fixture
async def table(world: TableWorld) -> TableDefinition:
    """Ten rows in one bucket."""
    table = await world.create()
    await world.upsert(table, ROWS)
    return table


@pytest.fixture
def make_world(make_broker: MakeBroker, ask: Ask, clock: ManualClock) -> Callable[..., Awaitable[TableWorld]]:
    async def make(**settings: Any) -> TableWorld:
        return TableWorld(await make_broker(clock_ms=clock, **settings), ask, clock)

    return make


def views(world: TableWorld, table: TableDefinition) -> int:
    """How many views of bucket 0 are held."""
    tables = world.broker.tables.loaded
    assert tables is not None
    return count_views(tables.service.bucket(BucketKey(table.table_id, 0, 0)).store)


# --- look-ups


async def look_up(world: TableWorld, table: TableDefinition, *ids: int, **more: Any) -> Any:
    keys = table.keys.state_keys(table.keys.columns_from(list(ids))).to_pylist() if ids else []
    body = {"table_id": table.table_id, "partition_id": 0, "bucket": 0, "leader_epoch": -1, "min_offset": -1}
    return await world.ask("LookupKv", **{**body, "keys": keys, "max_wait_ms": 10_000, **more})


async def test_rows_are_looked_up_each_with_the_number_of_its_key(
    world: TableWorld, table: TableDefinition
) -> None:
    response = await look_up(world, table, 7, 99, 3, 7, columns=["id"])
    assert response.error_code == 0
    assert rows_of(response) == [
        {"id": 7, "_tidemill_index": 0},
        {"id": 3, "_tidemill_index": 2},
        {"id": 7, "_tidemill_index": 3},
    ]
    assert response.log_offset == 10


async def test_keys_without_rows_give_no_records(world: TableWorld, table: TableDefinition) -> None:
    assert (await look_up(world, table, 98, 99)).records is None
    assert (await look_up(world, table)).records is None


async def test_a_look_up_sees_what_was_acknowledged_before_it_although_the_state_is_behind(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    await look_up(world, table, 1)
    may_go_on, apply = threading.Event(), folding.apply

    def apply_later(*arguments: Any) -> None:
        may_go_on.wait(120)
        apply(*arguments)

    monkeypatch.setattr(folding, "apply", apply_later)
    await world.upsert(table, [row(1, "new")])
    answer = asyncio.ensure_future(look_up(world, table, 1))
    refused = await look_up(world, table, 1, max_wait_ms=1)
    may_go_on.set()
    assert refused.error_code == TableCode.state_not_ready
    assert rows_of(await answer)[0]["region"] == "new"


async def test_a_look_up_waits_for_the_offset_that_it_names(
    world: TableWorld, table: TableDefinition
) -> None:
    waiting = asyncio.ensure_future(look_up(world, table, 77, min_offset=11))
    await asyncio.sleep(0)
    await world.upsert(table, [row(77)])
    response = await waiting
    assert rows_of(response) == [{**row(77), "_tidemill_index": 0}]
    assert response.log_offset == 11


async def test_a_look_up_that_may_not_wait_long_enough_is_told_to_try_again(
    world: TableWorld, table: TableDefinition
) -> None:
    await look_up(world, table, 1)
    response = await look_up(world, table, 1, min_offset=11, max_wait_ms=0)
    assert response.error_code == TableCode.state_not_ready
    assert TableCode.state_not_ready.retriable
    assert "is at offset 10 of 10, not yet at 11" in response.error_message


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"bucket": 1}, TableCode.bucket_not_found),
        ({"partition_id": 3}, TableCode.partition_not_found),
        ({"table_id": 999}, TableCode.table_not_found),
        ({"columns": ["colour"]}, TableCode.invalid_scan_request),
        ({"leader_epoch": 5}, ErrorCode.unknown_leader_epoch),
        ({"keys": [b"", b"a", b"b", b"c"]}, TableCode.invalid_scan_request),
    ],
)
async def test_a_look_up_of_what_there_is_not_is_refused(
    world: TableWorld,
    table: TableDefinition,
    changes: dict[str, Any],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scans, "_KEYS_MAX", 3)
    response = await look_up(world, table, 1, **changes)
    assert response.error_code == code
    assert response.error_message


# --- pins


async def pin(world: TableWorld, table: TableDefinition, **more: Any) -> Any:
    return await world.ask("PinTable", **{"table_id": table.table_id, "max_wait_ms": 10_000, **more})


async def test_several_tasks_share_a_pin_and_see_the_same_state(world: TableWorld) -> None:
    table = await world.create(buckets=2)
    written = await world.upsert(table, ROWS)
    pinned = await pin(world, table)
    assert {(table.name, each.bucket): each.log_offset for each in pinned.buckets} == written
    assert {each.leader_epoch for each in pinned.buckets} == {0}
    assert pinned.expires_in_ms == IDLE_MS
    await world.upsert(table, [row(number, "later") for number in range(20)])
    for _ in range(3):
        got = [
            each
            for bucket in (0, 1)
            for batch in await world.scan(table, bucket, pin_id=pinned.pin_id)
            for each in batch
        ]
        assert sorted(got, key=lambda each: each["id"]) == ROWS


async def test_a_pin_waits_for_the_offsets_that_it_names(world: TableWorld, table: TableDefinition) -> None:
    place = {"partition_id": 0, "bucket": 0}
    refused = await pin(world, table, min_offsets=[{**place, "offset": 11}], max_wait_ms=0)
    assert refused.error_code == TableCode.state_not_ready
    waiting = asyncio.ensure_future(pin(world, table, min_offsets=[{**place, "offset": 11}]))
    await asyncio.sleep(0)
    await world.upsert(table, [row(77)])
    assert (await waiting).buckets[0].log_offset == 11


async def test_a_pin_expires_when_nobody_uses_it(world: TableWorld, table: TableDefinition) -> None:
    pinned = await pin(world, table)
    world.clock.advance(IDLE_MS)
    await world.sweep()
    response = await world.open_scan(table, pin_id=pinned.pin_id)
    assert response.error_code == TableCode.pin_not_found
    assert "start the scan again" in response.error_message
    assert views(world, table) == 0


async def test_a_pin_lives_as_long_as_its_owner_wants_up_to_an_hour(
    world: TableWorld, table: TableDefinition
) -> None:
    short, long = await pin(world, table, idle_ms=1_000), await pin(world, table, idle_ms=2**31 - 1)
    assert (short.expires_in_ms, long.expires_in_ms) == (1_000, 3_600_000)
    world.clock.advance(1_000)
    await world.sweep()
    assert (await world.open_scan(table, pin_id=short.pin_id)).error_code == TableCode.pin_not_found
    assert (await world.open_scan(table, pin_id=long.pin_id)).error_code == 0


async def test_keep_alive_and_the_calls_of_its_sessions_keep_a_pin(
    world: TableWorld, table: TableDefinition
) -> None:
    pinned = await pin(world, table, idle_ms=1_000)
    first = await world.open_scan(table, pin_id=pinned.pin_id, batch_size_bytes=SMALL)

    async def by_pin() -> Any:
        return await world.ask("ReleasePin", pin_id=pinned.pin_id, keep_alive=True)

    async def by_session() -> Any:
        return await world.ask("ScanKv", scanner_id=first.scanner_id, keep_alive=True)

    async def by_call() -> Any:
        return await world.go_on(first.scanner_id, 0)

    for use in (by_pin, by_session, by_call):
        world.clock.advance(999)
        assert (await use()).error_code == 0
        await world.sweep()
    assert (await world.open_scan(table, pin_id=pinned.pin_id)).error_code == 0
    gone = await world.ask("ReleasePin", pin_id="made up", keep_alive=True)
    assert gone.error_code == TableCode.pin_not_found


async def test_a_session_goes_on_when_its_pin_is_released(world: TableWorld, table: TableDefinition) -> None:
    pinned = await pin(world, table)
    first = await world.open_scan(table, pin_id=pinned.pin_id, batch_size_bytes=SMALL)
    await world.upsert(table, [row(number, "later") for number in range(20)])
    for _ in range(2):
        assert (await world.ask("ReleasePin", pin_id=pinned.pin_id)).error_code == 0
    assert rows_of(await world.go_on(first.scanner_id, 1)) == ROWS[3:]
    assert (await world.open_scan(table, pin_id=pinned.pin_id)).error_code == TableCode.pin_not_found
    await world.close_scan(first.scanner_id)
    assert views(world, table) == 0


async def test_too_many_pins_are_told_to_come_back(make_world: Callable[..., Awaitable[TableWorld]]) -> None:
    world = await make_world(scan_pins=2)
    table = await world.create()
    await world.upsert(table, ROWS)
    answers = await asyncio.gather(*(pin(world, table) for _ in range(5)))
    assert sorted(answer.error_code for answer in answers) == [0, 0] + [TableCode.too_many_pins] * 3
    assert TableCode.too_many_pins.retriable
    assert views(world, table) == 2
    taken = next(answer for answer in answers if answer.error_code == 0)
    await world.ask("ReleasePin", pin_id=taken.pin_id)
    assert (await pin(world, table)).error_code == 0


async def test_a_hundred_unfinished_scans_of_one_client_leave_room_for_others(
    world: TableWorld, table: TableDefinition
) -> None:
    scans = (await world.broker.tables.load()).scans

    async def pin_as(*clients: Client) -> Pin:
        return [await scans.pin(table.table_id, {}, 1_000, 0, client) for client in clients][-1]

    hog = Client("10.0.0.1", 1)
    with pytest.raises(TableError, match="this connection holds 57 of them; close scans") as refused:
        await pin_as(*[hog] * 100)
    assert refused.value.table_code is TableCode.too_many_pins
    # Another program on the same machine, and one on another machine.
    for client in (Client("10.0.0.1", 2), Client("10.0.0.2", 3)):
        pinned = await pin_as(client)
        assert not (await world.open_scan(table, pin_id=pinned.id)).error_code
    # Also when the machine has taken all that it may have, with any number of connections.
    with pytest.raises(TableError, match=r"the connections of 10\.0\.0\.1 hold"):
        await pin_as(*(Client("10.0.0.1", 100 + number) for number in range(100)))
    await pin_as(Client("10.0.0.3", 1))


async def test_a_pin_of_another_table_holds_nothing_of_this_one(
    world: TableWorld, table: TableDefinition
) -> None:
    other = await world.create("shop.other")
    pinned = await pin(world, other)
    response = await world.open_scan(table, pin_id=pinned.pin_id)
    assert response.error_code == INVALID
    assert "the pin does not hold bucket 0" in response.error_message


async def test_a_new_leader_epoch_ends_pins(world: TableWorld, table: TableDefinition) -> None:
    pinned = await pin(world, table)
    await world.broker.controller.submit(BumpLeaderEpochs(name=table.name, partitions=(0,)))
    assert (await world.open_scan(table, pin_id=pinned.pin_id)).error_code == TableCode.pin_not_found
    assert views(world, table) == 0


# --- leased snapshots


async def lease(world: TableWorld, table: TableDefinition, **more: Any) -> Any:
    body = {"table": table.name, "holder": "a test", "duration_ms": 60_000, "fresh": True}
    return await world.ask("AcquireLease", **{**body, **more})


async def test_a_leased_snapshot_is_scanned_as_it_was(world: TableWorld, table: TableDefinition) -> None:
    leased = (await lease(world, table)).lease
    await world.upsert(table, [row(number, "later") for number in range(20)])
    for _ in range(2):
        first = await world.open_scan(table, lease_id=leased.lease_id, batch_size_bytes=SMALL)
        assert first.log_offset == leased.snapshots[0].log_offset == 10
        rest = await world.go_on(first.scanner_id, 1)
        assert rows_of(first) + rows_of(rest) == ROWS


async def test_a_lease_that_is_over_cannot_be_scanned(world: TableWorld, table: TableDefinition) -> None:
    leased = (await lease(world, table)).lease
    world.clock.advance(59_999)
    assert (await world.open_scan(table, lease_id=leased.lease_id)).error_code == 0
    world.clock.advance(1)
    response = await world.open_scan(table, lease_id=leased.lease_id)
    assert response.error_code == TableCode.lease_not_found
    assert leased.lease_id in response.error_message
    released = (await lease(world, table)).lease
    assert (await world.ask("ReleaseLease", lease_id=released.lease_id)).error_code == 0
    assert (await world.open_scan(table, lease_id=released.lease_id)).error_code == TableCode.lease_not_found
    assert (await world.open_scan(table, lease_id="made up")).error_code == TableCode.lease_not_found


async def test_a_lease_of_another_table_holds_no_snapshot_of_this_one(
    world: TableWorld, table: TableDefinition
) -> None:
    other = await world.create("shop.other")
    leased = (await lease(world, other)).lease
    response = await world.open_scan(table, lease_id=leased.lease_id)
    assert response.error_code == TableCode.snapshot_not_found
    assert "holds no snapshot of bucket 0" in response.error_message


async def test_a_scan_of_a_leased_snapshot_goes_on_when_the_lease_is_released(
    world: TableWorld, table: TableDefinition
) -> None:
    leased = (await lease(world, table)).lease
    first = await world.open_scan(table, lease_id=leased.lease_id, batch_size_bytes=SMALL)
    await world.done("ReleaseLease", lease_id=leased.lease_id)
    for step in range(3):
        await world.upsert(table, [row(step, "later")])
        await world.done("CreateSnapshot", table=table.name)
    # Its files stay while somebody reads them.
    held = leased.snapshots[0].snapshot_id
    listed = (await world.done("ListSnapshots", table=table.name)).snapshots
    assert held in [each.snapshot_id for each in listed]
    assert rows_of(await world.go_on(first.scanner_id, 1)) == ROWS[3:]


@pytest.mark.parametrize("duration_ms", [0, -1, 31 * 24 * 3_600_000])
async def test_a_lease_has_a_time_that_makes_sense(
    world: TableWorld, table: TableDefinition, duration_ms: int
) -> None:
    response = await lease(world, table, duration_ms=duration_ms)
    assert response.error_code == INVALID
    assert "from 1 ms to 30 days" in response.error_message


async def test_leases_are_listed_renewed_and_released(world: TableWorld, table: TableDefinition) -> None:
    leased = (await lease(world, table)).lease
    assert (leased.table, leased.holder) == (table.name, "a test")
    world.clock.advance(50_000)
    renewed = (await lease(world, table, lease_id=leased.lease_id)).lease
    assert renewed.expires_at_ms == leased.expires_at_ms + 50_000
    assert renewed.snapshots == leased.snapshots
    world.clock.advance(59_999)
    for name in (None, table.name):
        (listed,) = (await world.done("ListLeases", table=name)).leases
        assert astuple(listed) == astuple(renewed)
    world.clock.advance(1)
    assert (await world.done("ListLeases", table=None)).leases == ()
    await world.sweep()
    assert not world.broker.image.leases
    over = await lease(world, table, lease_id=leased.lease_id)
    assert over.error_code == TableCode.lease_not_found
    again = await world.ask("ReleaseLease", lease_id=leased.lease_id)
    assert again.error_code == TableCode.lease_not_found
    assert (await world.ask("ListLeases", table="shop.absent")).error_code == TableCode.table_not_found


# --- numbers and snapshots


async def test_the_numbers_of_a_table_count_its_scans(world: TableWorld, table: TableDefinition) -> None:
    await world.open_scan(table, batch_size_bytes=SMALL)
    (stats,) = (await world.done("TableStats", table=table.name)).buckets
    assert (stats.partition_id, stats.bucket, stats.scanner_count) == (0, 0, 1)
    assert (stats.log_start_offset, stats.log_end_offset) == (0, 10)
    assert (stats.applied_offset, stats.snapshot_count, stats.snapshot_offset) == (10, 0, -1)
    assert stats.problem is None


async def test_a_snapshot_is_taken_and_listed_and_two_are_kept(
    world: TableWorld, table: TableDefinition
) -> None:
    taken = []
    for step in range(4):
        await world.upsert(table, [row(step, "again")])
        (made,) = (await world.done("CreateSnapshot", table=table.name)).snapshots
        assert (made.bucket, made.created_ms, made.problem) == (0, world.clock.ms, None)
        taken.append(made)
        world.clock.advance(1_000)
    assert [each.log_offset for each in taken] == [11, 12, 13, 14]
    listed = (await world.done("ListSnapshots", table=table.name)).snapshots
    assert list(map(astuple, listed)) == list(map(astuple, taken[-2:]))
    (same,) = (await world.done("CreateSnapshot", table=table.name)).snapshots
    assert same.snapshot_id == taken[-1].snapshot_id


async def test_snapshots_of_a_table_without_a_key_or_of_none_are_refused(world: TableWorld) -> None:
    await world.create("shop.clicks", primary_key=())
    for api in ("CreateSnapshot", "ListSnapshots"):
        refused = await world.ask(api, table="shop.clicks")
        assert refused.error_code == TableCode.not_a_primary_key_table
        assert (await world.ask(api, table="shop.absent")).error_code == TableCode.table_not_found
    assert (await world.ask("TableStats", table="shop.absent")).error_code == TableCode.table_not_found
