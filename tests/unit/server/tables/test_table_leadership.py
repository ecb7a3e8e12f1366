"""Buckets of tables when the leadership of their logs goes, and when it comes back."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.leadership import change_in_sync, elect, follower_flushed, led
from support.table_world import TableWorld
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError
from tidemill.log.recovery import open_log
from tidemill.replication.partition import Partition
from tidemill.tables.definition import TableDefinition
from tidemill.tables.scanning.sessions import BucketKey
from tidemill.tables.state.bucket import Bucket
from tidemill.tables.state.service import TableService

SOON = 20


def row(number: int) -> dict[str, Any]:
    return {"id": number, "region": "eu", "amount": number / 2}


def service(world: TableWorld) -> TableService:
    tables = world.broker.tables.loaded
    assert tables is not None
    return tables.service


def key_of(table: TableDefinition) -> BucketKey:
    return BucketKey(table.table_id, table.partitions[0].id, 0)


def bucket_of(world: TableWorld, table: TableDefinition) -> Bucket:
    return service(world).bucket(key_of(table))


async def all_rows(world: TableWorld, table: TableDefinition) -> list[int]:
    return [each["id"] for batch in await world.scan(table) for each in batch]


@pytest.fixture
async def table(world: TableWorld) -> TableDefinition:
    table = await world.create()
    await world.upsert(table, [row(number) for number in range(10)])
    assert len(await all_rows(world, table)) == 10
    return table


async def hand_over(world: TableWorld, table: TableDefinition, leader: int) -> int:
    return await elect(world.broker.controller, table.partitions[0].topic, 0, leader)


async def test_who_waits_for_the_state_is_told_when_another_node_leads(
    world: TableWorld, table: TableDefinition
) -> None:
    bucket = bucket_of(world, table)
    waiting = [asyncio.ensure_future(bucket.ready(1_000, SOON)) for _ in range(2)]
    await asyncio.sleep(0)
    stops = bucket.view()
    await hand_over(world, table, leader=2)
    waiters: list[Awaitable[Any]] = [*waiting, stops]
    for wait in waiters:
        with pytest.raises(ApiError) as caught:
            await wait
        assert caught.value.code == ErrorCode.not_leader_or_follower
    assert service(world).buckets() == [], "nothing is folded any more"
    refused = await world.open_scan(table)
    assert refused.error_code == ErrorCode.not_leader_or_follower


async def test_a_bucket_is_opened_anew_where_it_was_when_this_node_leads_again(
    world: TableWorld, table: TableDefinition, caplog: pytest.LogCaptureFixture
) -> None:
    before = bucket_of(world, table)
    await hand_over(world, table, leader=2)
    await hand_over(world, table, leader=1)
    after = bucket_of(world, table)
    assert after is not before
    change_in_sync(after.log, ())
    await world.upsert(table, [row(10)])
    assert len(await all_rows(world, table)) == 11
    assert not caplog.records, "its state is good, and nothing was given up"


async def test_a_table_that_is_dropped_while_a_bucket_is_being_closed_leaves_no_files(
    world: TableWorld, table: TableDefinition
) -> None:
    directory = service(world).directory(world.broker.find.topic(table.partitions[0].topic).id, 0)
    assert directory.exists()
    await hand_over(world, table, leader=2)
    await world.done("DropTable", name=table.name, if_exists=False)
    await asyncio.gather(*service(world)._removals)
    assert not directory.exists()


class TakenOver:
    """A bucket whose log this node leads since a crash; its in-sync follower has not reported yet."""

    FOLLOWER = 2

    def __init__(self, world: TableWorld, old: Bucket) -> None:
        tables = service(world)
        log, _ = open_log(world.broker.replicas.storage, old.log.local_log.directory, old.log.config)
        self.log = Partition(
            old.log.topic,
            old.log.topic_id,
            old.log.index,
            log,
            request_flush=world.broker.flusher.request,
            max_decompressed_bytes=1 << 20,
            assignment=led(old.log.leader_epoch + 1, (self.FOLLOWER,)),
        )
        self.directory = tables.directory(old.log.topic_id, old.log.index)
        self._threads = ThreadPoolExecutor(1)
        self.bucket = Bucket(
            old.key,
            lambda: tables.by_id(old.key.table_id),
            self.log,
            self.directory,
            tables.engine,
            self._threads,
            world.clock,
            world.clock,
            max_decompressed_bytes=1 << 20,
        )

    async def __aenter__(self) -> TakenOver:
        self.bucket.start()
        await self.settle()
        return self

    async def settle(self) -> None:
        """Let the fold go as far as it can: each of its steps is a job of the one thread."""
        for _ in range(10):
            await asyncio.get_running_loop().run_in_executor(self._threads, lambda: None)

    def follower_flushed(self, offset: int) -> None:
        follower_flushed(self.log, self.FOLLOWER, offset)

    def check_not_ready(self) -> None:
        with pytest.raises(TableError) as caught:
            self.bucket.store  # noqa: B018
        assert caught.value.table_code is TableCode.state_not_ready
        assert self.bucket.applied_offset == -1

    async def __aexit__(self, *args: object) -> None:
        await self.bucket.close()
        self.log.local_log.abandon()
        self._threads.shutdown()


async def test_state_ahead_of_the_high_watermark_is_kept_and_shown_once_it_is_committed(
    world: TableWorld, table: TableDefinition
) -> None:
    """A new leader does not know yet how far its predecessor had committed."""
    await world.upsert(table, [row(10)])
    assert len(await all_rows(world, table)) == 11
    old = bucket_of(world, table)
    await old.close()
    async with TakenOver(world, old) as new:
        assert new.log.high_watermark < new.log.log_end_offset == 11
        assert new.bucket._store is not None
        assert new.bucket._store.applied_offset == 11
        assert [path.name for path in new.directory.iterdir() if "damaged" in path.name] == []
        new.check_not_ready()
        waiting = asyncio.ensure_future(new.bucket.ready(11, SOON))
        new.follower_flushed(10)
        await new.settle()
        new.check_not_ready()
        new.follower_flushed(11)
        await waiting
        assert new.bucket.applied_offset == 11


async def test_a_new_leader_shows_no_state_that_is_older_than_what_was_told(
    world: TableWorld, table: TableDefinition
) -> None:
    """Its predecessor may have answered from everything that is in the log at the take-over."""
    for number in (10, 11):
        await world.upsert(table, [row(number)])
    old = bucket_of(world, table)
    await old.close()
    shutil.rmtree(service(world).directory(old.log.topic_id, 0))
    async with TakenOver(world, old) as new:
        new.follower_flushed(11)
        await new.settle()
        assert new.bucket._store is not None
        assert new.bucket._store.applied_offset == 11, "it folds what is committed"
        new.check_not_ready()
        new.follower_flushed(12)
        await new.bucket.ready(-1, SOON)
        assert new.bucket.applied_offset == 12
