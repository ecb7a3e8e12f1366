"""Tables that come, go and stop: together, in the wrong moment, or after a crash."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from support.table_world import TableWorld
from tidemill.client.tables.creating import creation_body
from tidemill.errors import StorageError, TableError
from tidemill.kv.rocks.store import RocksStore
from tidemill.tables.definition import TableDefinition
from tidemill.tables.scanning.sessions import BucketKey

SOON = 120


@pytest.fixture
async def table(world: TableWorld) -> TableDefinition:
    table = await world.create(buckets=2)
    await world.upsert(table, [{"id": number} for number in range(10)])
    return table


async def test_of_two_who_create_a_table_that_may_exist_one_creates_it(world: TableWorld) -> None:
    async def create_if_missing() -> Any:
        body = creation_body(
            "shop.orders",
            "id bigint",
            primary_key=("id",),
            buckets=1,
            boundaries=(),
            partition_by=None,
            row_format=None,
            key_format=None,
        )
        return await world.done("CreateTable", **body, properties=[], comment=None, if_not_exists=True)

    answers = await asyncio.gather(*(create_if_missing() for _ in range(4)))
    assert sorted(answer.created for answer in answers) == [False, False, False, True]
    assert len({answer.table_id for answer in answers}) == 1


async def test_of_two_who_drop_a_table_that_may_be_gone_one_drops_it(
    world: TableWorld, table: TableDefinition
) -> None:
    drops = (world.done("DropTable", name=table.name, if_exists=True) for _ in range(3))
    assert sorted(answer.dropped for answer in await asyncio.gather(*drops)) == [False, False, True]


async def test_state_of_a_table_that_was_dropped_before_a_crash_is_removed_at_the_next_start(
    world: TableWorld, tmp_path: Path
) -> None:
    gone, logged, other = uuid4().hex, uuid4().hex, "lost+found"
    for name in (f"{gone}-0", f"{gone}-1", f"{logged}-0", other):
        (tmp_path / "kv" / name).mkdir(parents=True)
    (tmp_path / "logs" / "topic" / f"{logged}-0").mkdir(parents=True)
    table = await world.create()
    await world.upsert(table, [{"id": 1}])
    service = (await world.broker.tables.load()).service
    for key in service.bucket_keys(table):
        await service.ready_bucket(key)
    async with asyncio.timeout(SOON):
        while list((tmp_path / "kv").glob(f"{gone}-*")):  # noqa: ASYNC110 - they go in a thread
            await asyncio.sleep(0.01)
    kept = {path.name.partition("-")[0] for path in (tmp_path / "kv").iterdir()}
    assert kept == {logged, other, world.broker.find.topic(table.name).id.hex}


async def test_a_store_that_cannot_be_closed_keeps_no_node_from_stopping(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.scan(table)
    await world.scan(table, 1)
    real, closed = RocksStore.close, list[RocksStore]()

    def close(store: RocksStore) -> None:
        real(store)
        closed.append(store)
        if len(closed) == 1:
            raise StorageError("no room for the last rows")

    monkeypatch.setattr(RocksStore, "close", close)
    assert await world.broker.close()
    assert len(closed) == 2


async def test_a_node_that_stops_opens_no_state_any_more(world: TableWorld, table: TableDefinition) -> None:
    tables = await world.broker.tables.load()
    await tables.close()
    with pytest.raises(TableError, match="the node stops"):
        tables.service.bucket(BucketKey(table.table_id, 0, 0))


async def test_a_drop_that_cannot_begin_changes_nothing(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise StorageError("no room for a marker")

    monkeypatch.setattr(world.broker.replicas, "mark_deleting", fail)
    response = await world.ask("DropTable", name=table.name, if_exists=False)
    assert "no room for a marker" in response.error_message
    assert table.name in world.broker.image.tables
    assert await world.scan(table)
