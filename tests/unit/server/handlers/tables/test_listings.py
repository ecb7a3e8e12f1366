"""What lists or describes very many things lets others have their turn in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from support.table_world import TableWorld
from tidemill.control.tables.commands import PutLease
from tidemill.control.tables.images import LeasedSnapshot, LeaseImage
from tidemill.coordination import turns

MANY = 50


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From then on every turn is over as soon as somebody asks."""
    return lambda: monkeypatch.setattr(turns, "slice_is_over", lambda: True)


async def asked(world: TableWorld, api: str, **body: Any) -> tuple[Any, int]:
    """The answer, and how many turns others had meanwhile."""
    asking = asyncio.create_task(world.done(api, **body))
    count = 0
    while not asking.done():
        await asyncio.sleep(0)
        count += 1
    return asking.result(), count


def pairs(count: int) -> list[dict[str, str]]:
    return [{"key": f"user.{number:03}", "value": "v"} for number in range(count)]


async def test_databases_and_their_properties(world: TableWorld, short_turns: Callable[[], None]) -> None:
    for number in reversed(range(MANY)):
        await world.done("CreateDatabase", name=f"d{number:03}", properties=pairs(3))
    await world.done("CreateDatabase", name="fat", properties=pairs(500))
    short_turns()
    answer, count = await asked(world, "ListDatabases")
    assert [each.name for each in answer.databases] == [*(f"d{n:03}" for n in range(MANY)), "fat"]
    assert [pair.key for pair in answer.databases[-1].properties] == [f"user.{n:03}" for n in range(500)]
    assert count > MANY * 4 + 500


async def test_tables_and_one_that_is_dropped_meanwhile(
    world: TableWorld, short_turns: Callable[[], None]
) -> None:
    names = [f"shop.t{number:03}" for number in range(20)]
    for name in names:
        await world.create(name, partition_by="region", primary_key=())
    short_turns()
    for database in (None, "shop"):
        answer, count = await asked(world, "ListTables", database=database)
        assert [each.name for each in answer.tables] == names
        assert {each.column_count for each in answer.tables} == {3}
        assert count >= len(names)
    asking = asyncio.create_task(world.done("ListTables", database=None))
    await asyncio.sleep(0)
    await world.done("DropTable", name=names[-1])
    assert [each.name for each in (await asking).tables] in (names, names[:-1])
    _, count = await asked(world, "DropDatabase", name="shop", cascade=True)
    assert count >= len(names) - 1


async def test_properties_of_one_table(world: TableWorld, short_turns: Callable[[], None]) -> None:
    await world.create("shop.orders", properties={pair["key"]: pair["value"] for pair in pairs(300)})
    short_turns()
    answer, count = await asked(world, "DescribeTable", name="shop.orders")
    assert [pair.key for pair in answer.table.properties] == [f"user.{n:03}" for n in range(300)]
    assert count > 300


async def test_leases_and_their_snapshots(world: TableWorld, short_turns: Callable[[], None]) -> None:
    table = await world.create("shop.orders")
    snapshots = tuple(LeasedSnapshot(0, bucket, 1, bucket) for bucket in range(MANY))
    for number in reversed(range(10)):
        lease = LeaseImage(
            lease_id=f"l{number}",
            table_id=table.table_id,
            holder="me",
            expires_at_ms=world.clock() + 60_000,
            snapshots=snapshots,
        )
        await world.broker.controller.submit(PutLease(lease=lease))
    short_turns()
    for name in (None, "shop.orders"):
        answer, count = await asked(world, "ListLeases", table=name)
        assert [each.lease_id for each in answer.leases] == [f"l{number}" for number in range(10)]
        assert {len(each.snapshots) for each in answer.leases} == {MANY}
        assert count > 10 * MANY


async def test_jobs(world: TableWorld, short_turns: Callable[[], None]) -> None:
    for number in reversed(range(MANY)):
        await world.done("PublishAttempts", job=f"j{number:03}", batch=0)
    short_turns()
    answer, count = await asked(world, "ListJobs")
    assert [each.job for each in answer.jobs] == [f"j{number:03}" for number in range(MANY)]
    assert count > 2 * MANY


async def test_cursors(world: TableWorld, short_turns: Callable[[], None]) -> None:
    await world.create("shop.orders")
    topic = world.broker.image.topics["shop.orders"]
    position = {"partition": 0, "offset": 0, "leader_epoch": 0, "started": True, "finished": b""}
    body = {"topic": "shop.orders", "topic_id": topic.id, "region": b"", "shown": "", "owner": "me"}
    body |= {"lease_ms": 60_000, "force": True, "partitions": [position]}
    for number in reversed(range(MANY)):
        await world.done("TakeCursor", name=f"c{number:03}", **body)
    short_turns()
    answer, count = await asked(world, "ListCursors", topic=None)
    assert [each.name for each in answer.cursors] == [f"c{number:03}" for number in range(MANY)]
    assert count > 4 * MANY
