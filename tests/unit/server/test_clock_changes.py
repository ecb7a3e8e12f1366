"""Somebody sets the node's clock: what is measured in intervals goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.table_world import ManualClock, TableWorld
from tidemill.errors import TableCode
from tidemill.tables.definition import TableDefinition

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.fixture
def steady() -> ManualClock:
    """The time for intervals; the ``clock`` fixture is the time of day."""
    return ManualClock()


@pytest.fixture
async def world(
    make_broker: Callable[..., Any],
    ask: Callable[..., Awaitable[Any]],
    clock: ManualClock,
    steady: ManualClock,
) -> TableWorld:
    return TableWorld(await make_broker(clock_ms=clock, steady_ms=steady), ask, clock)


@pytest.fixture
async def table(world: TableWorld) -> TableDefinition:
    table = await world.create(properties={"snapshot.interval.ms": "60000"})
    await world.upsert(table, [{"id": number} for number in range(10)])
    await world.scan(table)
    return table


async def snapshot_offsets(world: TableWorld, table: TableDefinition) -> list[int]:
    answer = await world.done("ListSnapshots", table=table.name)
    return [each.log_offset for each in answer.snapshots]


@pytest.mark.parametrize("jump_ms", [-DAY_MS, DAY_MS])
async def test_snapshots_are_taken_at_their_interval_whatever_the_clock_does(
    world: TableWorld, table: TableDefinition, clock: ManualClock, steady: ManualClock, jump_ms: int
) -> None:
    clock.advance(jump_ms)
    steady.advance(59_000)
    await world.sweep()
    assert await snapshot_offsets(world, table) == []
    steady.advance(1_000)
    await world.sweep()
    assert await snapshot_offsets(world, table) == [10]


@pytest.mark.parametrize("jump_ms", [-DAY_MS, DAY_MS])
async def test_a_pin_lives_as_long_as_it_is_used_whatever_the_clock_does(
    world: TableWorld, table: TableDefinition, clock: ManualClock, steady: ManualClock, jump_ms: int
) -> None:
    pin = await world.done(
        "PinTable", table_id=table.table_id, min_offsets=(), max_wait_ms=60_000, idle_ms=HOUR_MS
    )
    clock.advance(jump_ms)
    steady.advance(HOUR_MS - 1)
    await world.sweep()
    assert (await world.ask("ReleasePin", pin_id=pin.pin_id, keep_alive=True)).error_code == 0
    steady.advance(HOUR_MS)
    await world.sweep()
    gone = await world.ask("ReleasePin", pin_id=pin.pin_id, keep_alive=True)
    assert gone.error_code == TableCode.pin_not_found


@pytest.mark.parametrize("jump_ms", [-DAY_MS, DAY_MS])
async def test_an_idle_scan_ends_at_its_time_whatever_the_clock_does(
    world: TableWorld, table: TableDefinition, clock: ManualClock, steady: ManualClock, jump_ms: int
) -> None:
    await world.open_scan(table, batch_size_bytes=1)
    clock.advance(jump_ms)
    await world.sweep()
    assert world.sessions == 1
    steady.advance(DAY_MS)
    await world.sweep()
    assert world.sessions == 0


@pytest.mark.parametrize("jump_ms", [-DAY_MS, DAY_MS])
async def test_a_lease_lasts_as_long_as_was_asked_for_whatever_the_clock_does(
    world: TableWorld, table: TableDefinition, clock: ManualClock, steady: ManualClock, jump_ms: int
) -> None:
    await world.done("AcquireLease", table=table.name, duration_ms=HOUR_MS, holder="me", fresh=True)
    clock.advance(jump_ms)
    steady.advance(HOUR_MS - 1)
    await world.sweep()
    assert len(world.broker.image.leases) == 1
    steady.advance(1)
    await world.sweep()
    assert len(world.broker.image.leases) == 0
