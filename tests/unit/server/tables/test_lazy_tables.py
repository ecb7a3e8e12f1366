"""The services of tables are loaded once, and answered for while nobody needed them."""

from __future__ import annotations

import asyncio

from support.broker_topics import create, leader
from support.table_world import TableWorld
from tidemill.server.broker import Broker


async def test_services_are_loaded_by_the_first_of_many_who_need_them(broker: Broker) -> None:
    assert broker.tables.loaded is None
    first, second = await asyncio.gather(broker.tables.load(), broker.tables.load())
    assert first is second is broker.tables.loaded


async def test_housekeeping_and_a_stop_load_nothing(broker: Broker) -> None:
    await broker.tables.housekeep()
    broker.tables.pause_compactions(True)
    await broker.tables.close()
    assert broker.tables.loaded is None


async def test_logs_of_tables_keep_everything_until_their_services_say_what_is_needed(
    world: TableWorld,
) -> None:
    await create(world.broker, "plain")
    table = await world.create()
    await world.upsert(table, [{"id": 1}])
    services, world.broker.tables.loaded = world.broker.tables.loaded, None
    assert leader(world.broker, "plain").retention_floor() > 0
    assert leader(world.broker, table.name).retention_floor() == 0
    world.broker.tables.loaded = services
