"""Buckets of tables when the leadership of their logs goes, and when it comes back."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from support.cutting import start_anew_at
from support.leadership import elect, follower_flushed, led
from support.table_world import TableWorld, rows_of
from tidemill.control.records import PartitionImage
from tidemill.control.tables.commands import PutLease
from tidemill.control.tables.images import LeasedSnapshot, LeaseImage
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError
from tidemill.log.compaction.policy import NO_FLOOR
from tidemill.log.recovery import open_log
from tidemill.replication.partition import Partition
from tidemill.replication.replicas import partition_directory
from tidemill.replication.rules.assignment import PartitionAssignment
from tidemill.replication.rules.following import FollowerStep
from tidemill.server.tables.node_tables import NodeTables
from tidemill.tables.definition import TableDefinition
from tidemill.tables.scanning.sessions import BucketKey
from tidemill.tables.state import rebuilding
from tidemill.tables.state.bucket import Bucket
from tidemill.tables.state.folding import read_for_fold
from tidemill.tables.state.service import TableService, _remove_unknown, is_standby

SOON = 120


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


def tables_of(world: TableWorld) -> NodeTables:
    tables = world.broker.tables.loaded
    assert tables is not None
    return tables


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


async def test_a_log_that_hears_of_another_leader_before_the_metadata_does_ends_the_fold(
    world: TableWorld, table: TableDefinition
) -> None:
    """What was prepared for its own records must not be taken for those of the other leader."""
    bucket = bucket_of(world, table)
    topic = world.broker.find.topic(table.partitions[0].topic)
    bucket.log.apply(PartitionAssignment.led_elsewhere(2, bucket.log.leader_epoch + 1), node_id=1)
    assert world.broker.find.topic(topic.name).partitions[0].leader == 1, "the metadata is late"
    assert service(world).buckets() == []
    with pytest.raises(ApiError) as caught:
        world.broker.find.partition(topic, 0)
    assert caught.value.code == ErrorCode.not_leader_or_follower
    refused = await world.open_scan(table)
    assert refused.error_code == ErrorCode.not_leader_or_follower
    assert service(world).buckets() == [], "it is not opened again"


async def test_a_bucket_is_opened_anew_where_it_was_when_this_node_leads_again(
    world: TableWorld, table: TableDefinition, caplog: pytest.LogCaptureFixture
) -> None:
    before = bucket_of(world, table)
    await hand_over(world, table, leader=2)
    await hand_over(world, table, leader=1)
    after = bucket_of(world, table)
    assert after is not before
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


async def test_a_high_watermark_that_rises_during_the_fold_does_not_let_older_state_be_shown(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fold has begun with a goal that is older than what the predecessor has shown."""
    await world.upsert(table, [row(10)])
    old = bucket_of(world, table)
    await old.close()
    shutil.rmtree(service(world).directory(old.log.topic_id, 0))
    new = TakenOver(world, old)
    seen: list[int] = []
    fold, release = new.bucket._fold_to, new.bucket._release_waiters

    async def fold_to(goal: int) -> None:
        await fold(goal)
        if goal == 10:
            # The follower has reported while the state went on its way to 10.
            new.follower_flushed(11)

    def release_waiters() -> None:
        seen.append(new.bucket.applied_offset)
        release()

    monkeypatch.setattr(new.bucket, "_fold_to", fold_to)
    monkeypatch.setattr(new.bucket, "_release_waiters", release_waiters)
    new.follower_flushed(10)
    async with new:
        await new.bucket.ready(-1, SOON)
        assert new.bucket.applied_offset == 11
    assert set(seen) == {11}


async def test_what_is_committed_during_the_fold_is_folded_though_nobody_asks(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby hears of it once; if it missed that, it would stay behind until the next write."""
    await world.upsert(table, [row(10)])
    old = bucket_of(world, table)
    await old.close()
    shutil.rmtree(service(world).directory(old.log.topic_id, 0))
    new = TakenOver(world, old)
    fold = new.bucket._fold_to

    async def fold_to(goal: int) -> None:
        await fold(goal)
        if goal == 10:
            new.follower_flushed(11)

    monkeypatch.setattr(new.bucket, "_fold_to", fold_to)
    new.follower_flushed(10)
    async with new:
        await new.settle()
        assert new.bucket.applied_offset == 11


# --- standbys


async def stand_by(world: TableWorld, table: TableDefinition) -> None:
    """Node 2 leads, and this one follows in sync."""
    await elect(world.broker.controller, table.partitions[0].topic, 0, 2, followers=[1])


async def test_the_first_follower_keeps_the_state_ready_and_shows_it_to_nobody(
    world: TableWorld, table: TableDefinition
) -> None:
    await stand_by(world, table)
    standby = service(world)._standbys[key_of(table)]
    waiting = asyncio.ensure_future(standby.ready(-1, SOON))
    await until_folded(standby, 10)
    assert standby.applied_offset == -1
    assert not waiting.done()
    assert service(world).buckets() == []
    for read in (look_up, pin, open_scan):
        assert (await read(world, table)).error_code == ErrorCode.not_leader_or_follower
    assert (await world.ask("CreateSnapshot", table=table.name)).error_code != 0

    await hand_over(world, table, leader=1)
    assert bucket_of(world, table) is standby, "what it has folded is not folded again"
    assert not service(world)._standbys
    await waiting
    assert standby.counts.folded_rows == 0
    assert len(await all_rows(world, table)) == 10


async def test_a_standby_that_could_not_fold_is_opened_anew_when_its_node_leads(
    world: TableWorld, table: TableDefinition
) -> None:
    await stand_by(world, table)
    standby = service(world)._standbys[key_of(table)]
    standby._stop(TableError(TableCode.state_damaged, "for the test"))
    await hand_over(world, table, leader=1)
    assert bucket_of(world, table) is not standby
    assert len(await all_rows(world, table)) == 10


async def take_snapshots(world: TableWorld) -> None:
    world.clock.advance(service(world).host.settings.kv_snapshot_interval_ms)
    await service(world).take_due_snapshots()


async def test_a_standby_takes_snapshots_of_its_own_so_that_its_log_can_be_compacted(
    world: TableWorld, table: TableDefinition
) -> None:
    await stand_by(world, table)
    tables = service(world)
    standby = tables._standbys[key_of(table)]
    await until_folded(standby, 10)
    assert tables.log_floor(standby.log) == 0, "it would need all of its log again"
    await take_snapshots(world)
    (info,) = standby.snapshots.list()
    assert (info.log_offset, info.leader_epoch) == (10, standby.log.epochs.epoch_at(9))
    assert tables.log_floor(standby.log) == 10
    await take_snapshots(world)
    assert standby.counts.snapshots == 1, "nothing was folded since"
    assert standby.applied_offset == -1, "and nothing was shown"


async def test_a_standby_that_is_not_sure_of_its_state_takes_no_snapshot_of_it(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stand_by(world, table)
    standby = service(world)._standbys[key_of(table)]
    await until_folded(standby, 10)
    monkeypatch.setattr(standby.log._state, "high_watermark", 9)
    await take_snapshots(world)
    assert standby.snapshots.list() == ()
    taking = standby.snapshot(shows=False)
    await settle(standby)
    assert not taking.done()
    monkeypatch.undo()
    standby._wanted.set()
    assert (await taking).log_offset == 10


async def settle(bucket: Bucket) -> None:
    """Let the fold go as far as it can."""
    for _ in range(10):
        await asyncio.get_running_loop().run_in_executor(bucket._threads, lambda: None)


async def test_a_replica_that_does_not_fold_needs_nothing_of_its_log_but_what_is_leased(
    world: TableWorld, table: TableDefinition
) -> None:
    tables, log = service(world), bucket_of(world, table).log
    await bucket_of(world, table).snapshot()
    assert tables.log_floor(log) <= 10
    await hand_over(world, table, leader=2)
    assert not tables._standbys
    assert log.retention_floor() == NO_FLOOR
    assert log._compaction_floor() == 0, "its leader has not told yet what others need"
    assert log._state.following is not None
    log._state.following.compaction_floor = 7
    assert log._compaction_floor() == 7
    await world.broker.controller.submit(PutLease(lease=lease_at(world, table, 5, 0)))
    assert log._compaction_floor() == 5


async def test_nobody_else_folds(world: TableWorld, table: TableDefinition) -> None:
    placed = PartitionImage(2, 1, (3, 1, 2), (2, 3))
    assert [is_standby(placed, node) for node in (1, 2, 3)] == [False, False, True]
    assert not is_standby(PartitionImage(1, 1, (1,), (1,)), 1)
    assert is_standby(PartitionImage(-1, 1, (1, 2), (1,)), 1), "without a leader, it may be the next one"


async def test_state_of_a_log_that_was_started_anew_is_void(
    world: TableWorld, table: TableDefinition
) -> None:
    """What would have undone its rows may be compacted away in the log that comes."""
    await stand_by(world, table)
    tables, key = service(world), key_of(table)
    standby = tables._standbys[key]
    await until_folded(standby, 10)
    log, directory = standby.log, tables.directory(standby.log.topic_id, 0)
    assert directory.exists()
    job = log.as_follower.begin_cut(FollowerStep(start_anew_at=0), log.leader_epoch, 0)
    assert job is not None
    job.run()
    log.as_follower.finish_cut(job)
    again = tables._standbys[key]
    assert again is not standby
    await until_folded(again, 0)
    assert again.log.log_end_offset == 0
    with again._store.view() as view:  # type: ignore[union-attr]
        assert view.read(b"", None, 1 << 20, 100).keys == []


async def test_the_state_of_a_bucket_that_has_moved_away_is_removed(
    world: TableWorld, table: TableDefinition
) -> None:
    await stand_by(world, table)
    tables, key = service(world), key_of(table)
    await until_folded(tables._standbys[key], 10)
    directory = tables.directory(tables._standbys[key].log.topic_id, 0)
    assert directory.exists()
    await world.broker.tables.remove_state(tables._standbys[key].log.topic_id, 0)
    assert not directory.exists()
    assert key not in tables._standbys


async def test_state_that_was_left_by_a_bucket_that_has_moved_away_is_removed_at_the_start(
    world: TableWorld, table: TableDefinition
) -> None:
    tables = service(world)
    topic = world.broker.find.topic(table.partitions[0].topic)
    directory = tables.directory(topic.id, 0)
    remove = partial(_remove_unknown, tables.engine.files, world.broker.settings.data_dir)
    remove(lambda: world.broker.image, 9)
    assert directory.exists(), "its log is here"
    shutil.rmtree(world.broker.settings.data_dir / partition_directory(topic.name, topic.id, 0))
    remove(lambda: world.broker.image, 1)
    assert directory.exists(), "this node holds it"
    remove(lambda: world.broker.image, 9)
    assert not directory.exists()


async def test_state_that_an_earlier_replica_has_left_is_not_taken_for_that_of_an_empty_log(
    world: TableWorld, table: TableDefinition
) -> None:
    await hand_over(world, table, leader=2)
    tables = service(world)
    log = world.broker.find.held(world.broker.find.topic(table.partitions[0].topic), 0)
    assert log is not None
    directory = tables.directory(log.topic_id, 0)
    tables.partition_opened(log)
    await asyncio.gather(*tables._removals)
    assert directory.exists(), "a log with records goes with its state"
    start_anew_at(log.local_log, 0, 0)
    tables.partition_opened(log)
    await asyncio.gather(*tables._removals)
    assert not directory.exists()


async def until_folded(bucket: Bucket, offset: int) -> None:
    """Wait until the state has reached that offset, whether or not it may be shown."""
    async with asyncio.timeout(SOON):
        while bucket._store is None or bucket._store.applied_offset != offset:
            # Each step of the fold is a job of a thread.
            await asyncio.get_running_loop().run_in_executor(bucket._threads, lambda: None)


# --- rule 12: newest answers


class Unsure:
    """A node whose session may be over; other nodes confirm that it leads, or do not."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.confirms = False

    def may_answer(self, partition: Partition) -> bool:
        return False

    async def confirm(self, partitions: Collection[Partition]) -> None:
        self.asked += [each.topic for each in partitions]
        if not self.confirms:
            raise ApiError(ErrorCode.not_leader_or_follower, "the session may be over")


async def look_up(world: TableWorld, table: TableDefinition) -> Any:
    key = table.keys.state_keys(table.keys.columns_from([3])).to_pylist()
    body = {"table_id": table.table_id, "partition_id": 0, "bucket": 0, "leader_epoch": -1, "keys": key}
    return await world.ask("LookupKv", **body, columns=[], min_offset=-1, max_wait_ms=1_000)


async def pin(world: TableWorld, table: TableDefinition, **more: Any) -> Any:
    return await world.ask("PinTable", table_id=table.table_id, min_offsets=[], max_wait_ms=1_000, **more)


async def open_scan(world: TableWorld, table: TableDefinition) -> Any:
    return await world.open_scan(table)


@pytest.mark.parametrize("read", [look_up, pin, open_scan])
async def test_a_node_whose_session_may_be_over_does_not_say_what_is_newest(
    world: TableWorld, table: TableDefinition, read: Any
) -> None:
    unsure = Unsure()
    world.broker.newest = unsure
    answer = await read(world, table)
    assert answer.error_code == ErrorCode.not_leader_or_follower
    assert "session" in answer.error_message
    assert unsure.asked == [table.partitions[0].topic]
    assert len(tables_of(world).scans.pins) == 0
    assert world.sessions == 0
    unsure.confirms = True
    assert (await read(world, table)).error_code == 0


async def test_a_pin_is_of_a_moment_that_has_been_checked_and_can_be_scanned_without_a_session(
    world: TableWorld, table: TableDefinition
) -> None:
    pinned = await pin(world, table)
    world.broker.newest = Unsure()
    assert (await world.open_scan(table, pin_id=pinned.pin_id)).error_code == 0


async def test_an_answer_of_an_older_leadership_is_not_given(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leadership changes after the state was read and before the answer leaves."""
    scans = tables_of(world).scans
    real = scans._read

    async def read(*arguments: Any) -> Any:
        found = await real(*arguments)
        await hand_over(world, table, leader=2)
        return found

    monkeypatch.setattr(scans, "_read", read)
    assert (await look_up(world, table)).error_code in (
        ErrorCode.not_leader_or_follower,
        ErrorCode.fenced_leader_epoch,
    )


# --- requests that name buckets


def named(*buckets: int) -> list[dict[str, int]]:
    return [{"partition_id": 0, "bucket": bucket} for bucket in buckets]


async def test_a_node_pins_the_buckets_that_it_leads_under_the_id_that_the_client_chose(
    world: TableWorld,
) -> None:
    table = await world.create("shop.wide", buckets=3)
    await elect(world.broker.controller, table.partitions[0].topic, 1, 2)
    pin_id = "0123456789abcdef01234567"
    refused = await pin(world, table)
    assert refused.error_code == ErrorCode.not_leader_or_follower, "all of them, or an error"
    refused = await pin(world, table, buckets=named(0, 1), pin_id=pin_id)
    assert refused.error_code == ErrorCode.not_leader_or_follower
    pinned = await pin(world, table, buckets=named(0, 2), pin_id=pin_id)
    assert (pinned.error_code, pinned.pin_id) == (0, pin_id)
    assert [each.bucket for each in pinned.buckets] == [0, 2]
    assert (await world.open_scan(table, 2, pin_id=pin_id)).error_code == 0
    again = await pin(world, table, buckets=named(0, 2), pin_id=pin_id)
    assert again.error_code == TableCode.invalid_scan_request
    guessable = await pin(world, table, buckets=named(0, 2), pin_id="mine")
    assert guessable.error_code == TableCode.invalid_scan_request
    await elect(world.broker.controller, table.partitions[0].topic, 1, 1)
    lost = await world.open_scan(table, 1, pin_id=pin_id)
    assert lost.error_code == TableCode.pin_not_found, "the node that held it has lost it"


async def test_numbers_snapshots_and_leases_are_of_the_named_buckets(world: TableWorld) -> None:
    table = await world.create("shop.wide", buckets=3)
    await elect(world.broker.controller, table.partitions[0].topic, 1, 2)
    for name in ("TableStats", "CreateSnapshot", "ListSnapshots"):
        refused = await world.ask(name, table=table.name, buckets=named(1))
        assert refused.error_code == ErrorCode.not_leader_or_follower, name
        answer = await world.done(name, table=table.name, buckets=named(0, 2))
        found = answer.buckets if name == "TableStats" else answer.snapshots
        assert [each.bucket for each in found] == [0, 2], name
    body = {"table": table.name, "holder": "me", "duration_ms": 60_000, "fresh": False}
    begun = (await world.done("AcquireLease", **body, lease_id=None, buckets=named(0))).lease
    assert [each.bucket for each in begun.snapshots] == [0]
    more = (await world.done("AcquireLease", **body, lease_id=begun.lease_id, buckets=named(2))).lease
    assert more.lease_id == begun.lease_id
    assert [each.bucket for each in more.snapshots] == [0, 2]


# --- leases over a fail-over


async def leased_by_another_node(world: TableWorld, table: TableDefinition) -> str:
    """A lease as another leader would have taken it: this node has no snapshot of it."""
    log = bucket_of(world, table).log
    offset = log.last_stable_offset
    lease = lease_at(world, table, offset, log.epochs.epoch_at(offset - 1))
    return (await world.broker.controller.submit(PutLease(lease=lease))).lease_id


def lease_at(world: TableWorld, table: TableDefinition, offset: int, leader_epoch: int) -> LeaseImage:
    return LeaseImage(
        lease_id="theirs",
        table_id=table.table_id,
        holder="h",
        expires_at_ms=world.broker.steady_ms() + 60_000,
        snapshots=(LeasedSnapshot(0, 0, 17, offset, leader_epoch, 2),),
    )


async def test_a_lease_that_another_node_took_is_served_from_the_log(
    world: TableWorld, table: TableDefinition
) -> None:
    await world.delete(table, [4])
    before = sorted(await all_rows(world, table))
    lease_id = await leased_by_another_node(world, table)
    await world.upsert(table, [row(50)])
    await world.delete(table, [0])
    for _ in range(2):
        leased = [each["id"] for batch in await world.scan(table, lease_id=lease_id) for each in batch]
        assert sorted(leased) == before
    bucket = bucket_of(world, table)
    assert [info.log_offset for info in bucket.snapshots.list()] == [11], "built once"
    assert service(world).keeper.floor(bucket.log.topic_id, 0) <= 11
    names = [path.name for path in bucket.snapshots.list()[0].path.parent.iterdir()]
    assert not any(name.startswith("tmp") for name in names)


async def test_a_leased_state_of_another_history_or_of_a_compacted_log_is_not_made_up(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_id = await leased_by_another_node(world, table)
    log = bucket_of(world, table).log
    for name, value in (("first_dirty_offset", 11), ("log_start_offset", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(log.local_log, name, value)
            answer = await world.open_scan(table, lease_id=lease_id)
        assert answer.error_code == TableCode.snapshot_not_found, name
        assert "take a new lease" in answer.error_message
    with monkeypatch.context() as patch:
        patch.setattr(log, "divergence", lambda epoch, offset: (0, 5))
        assert (await world.open_scan(table, lease_id=lease_id)).error_code == TableCode.snapshot_not_found


async def test_a_lease_keeps_the_log_above_its_offset_on_every_replica(
    world: TableWorld, table: TableDefinition
) -> None:
    bucket = bucket_of(world, table)
    await bucket.snapshot()
    await world.upsert(table, [row(10), row(11)])
    assert await all_rows(world, table)
    lease_id = await leased_by_another_node(world, table)
    await world.upsert(table, [row(number) for number in range(12, 30)])
    for _ in range(3):
        await world.upsert(table, [row(1)])
        await world.done("CreateSnapshot", table=table.name)
    keeper, log = service(world).keeper, bucket.log
    await keeper.prune(bucket)
    assert keeper.floor(log.topic_id, 0) == 12, "the leased offset, of which there is no snapshot here"
    await world.done("ReleaseLease", lease_id=lease_id)
    assert keeper.floor(log.topic_id, 0) > 12


async def test_a_snapshot_of_records_that_were_cut_is_not_leased_as_the_state_at_its_offset(
    world: TableWorld, table: TableDefinition
) -> None:
    """The log was cut and has grown again: another state has the offset of the snapshot now."""
    log = bucket_of(world, table).log
    await world.upsert(table, [row(77)])
    await world.done("CreateSnapshot", table=table.name)
    await replace_the_last_record(world, table)
    wanted = [*range(10), 88]
    assert sorted(await all_rows(world, table)) == wanted

    body = {"table": table.name, "holder": "me", "duration_ms": 60_000, "fresh": False, "lease_id": None}
    lease = (await world.done("AcquireLease", **body)).lease
    leased = [each["id"] for batch in await world.scan(table, lease_id=lease.lease_id) for each in batch]
    assert sorted(leased) == wanted
    assert {(each.log_offset, each.leader_epoch) for each in bucket_of(world, table).snapshots.list()} == {
        (11, 0),
        (11, log.leader_epoch),
    }


async def replace_the_last_record(world: TableWorld, table: TableDefinition) -> None:
    """Record 10 is cut, as after an unclean election, and there is another one at a higher epoch."""
    log = bucket_of(world, table).log
    await stand_by(world, table)
    job = log.as_follower.begin_cut(FollowerStep(cut_at=10), log.leader_epoch, 0)
    assert job is not None
    job.run()
    log.as_follower.finish_cut(job)
    await hand_over(world, table, leader=1)
    await world.upsert(table, [row(88)])
    assert log.last_stable_offset == 11


async def test_a_leased_state_of_records_that_were_cut_is_not_shown(
    world: TableWorld, table: TableDefinition
) -> None:
    await world.upsert(table, [row(77)])
    body = {"table": table.name, "holder": "me", "duration_ms": 60_000, "fresh": True, "lease_id": None}
    lease = (await world.done("AcquireLease", **body)).lease
    assert (await world.open_scan(table, lease_id=lease.lease_id)).error_code == 0
    await replace_the_last_record(world, table)
    answer = await world.open_scan(table, lease_id=lease.lease_id)
    assert answer.error_code == TableCode.snapshot_not_found
    assert "those records were cut; take a new lease" in answer.error_message


# --- scans that go on at another node


async def at_offset(world: TableWorld, table: TableDefinition, offset: int, epoch: int, **more: Any) -> Any:
    return await world.open_scan(table, log_offset=offset, log_epoch=epoch, **more)


async def test_a_scan_at_an_offset_shows_the_rows_that_a_pin_had_there(
    world: TableWorld, table: TableDefinition
) -> None:
    await world.delete(table, [4])
    (pinned,) = (await pin(world, table)).buckets
    before = sorted(await all_rows(world, table))
    assert (pinned.log_offset, pinned.log_epoch) == (11, 0)
    await stand_by(world, table)
    await hand_over(world, table, leader=1)
    await world.upsert(table, [row(50)])
    await world.delete(table, [0])
    bucket = bucket_of(world, table)
    for _ in range(2):
        answer = await at_offset(world, table, 11, 0)
        assert (answer.error_code, answer.log_offset) == (0, 11)
        assert sorted(each["id"] for each in rows_of(answer)) == before
        await world.close_scan(answer.scanner_id)
    assert [info.log_offset for info in bucket.snapshots.list()] == [11], "built once"
    assert (await at_offset(world, table, 0, -1)).records is None, "before the first record"


async def test_a_scan_at_an_offset_is_refused_where_the_state_cannot_be_the_same(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.upsert(table, [row(77)])
    await replace_the_last_record(world, table)
    log = bucket_of(world, table).log
    cut = await at_offset(world, table, 11, 0)
    assert cut.error_code == TableCode.snapshot_not_found
    assert "those records were cut; start the scan again" in cut.error_message
    assert (await at_offset(world, table, 11, log.leader_epoch)).error_code == 0
    monkeypatch.setattr(log.local_log, "first_dirty_offset", 11)
    assert (await at_offset(world, table, 10, 0)).error_code == TableCode.snapshot_not_found
    for more in ({"pin_id": "a"}, {"lease_id": "a"}):
        refused = await at_offset(world, table, 10, 0, **more)
        assert refused.error_code == TableCode.invalid_scan_request
    assert (await at_offset(world, table, 10, -1)).error_code == TableCode.invalid_scan_request


@pytest.mark.parametrize(("is_readable", "first_offset"), [(True, 10), (False, 0)])
async def test_older_state_is_built_from_the_newest_snapshot_before_it(
    world: TableWorld,
    table: TableDefinition,
    monkeypatch: pytest.MonkeyPatch,
    is_readable: bool,
    first_offset: int,
) -> None:
    bucket = bucket_of(world, table)
    await bucket.snapshot()
    await world.delete(table, [4])
    await world.upsert(table, [row(50)])
    await bucket.snapshot()
    read: list[int] = []

    def noted(log: Partition, offset: int) -> Any:
        read.append(offset)
        return read_for_fold(log, offset)

    monkeypatch.setattr(rebuilding, "read_for_fold", noted)
    if not is_readable:
        for path in bucket.snapshots.list()[0].path.glob("*.sst"):
            path.unlink()
            path.write_bytes(b"")
    answer = await at_offset(world, table, 11, 0)
    assert sorted(each["id"] for each in rows_of(answer)) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert read[0] == first_offset
