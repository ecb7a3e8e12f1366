"""The state of a bucket when something goes wrong: damage, a full disk, a drop, gaps in the log."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from support.table_world import TableWorld, batch_of
from tidemill.errors import CorruptData, DiskFull, StorageError, TableCode, TableError
from tidemill.kv import recovery as kv_recovery
from tidemill.kv.contract import KvStore, WriteStalled
from tidemill.kv.rocks.store import RocksStore
from tidemill.kv.snapshots import SnapshotStore
from tidemill.records.columns.read import read_columns
from tidemill.server.tables import node_tables
from tidemill.tables.definition import TableDefinition
from tidemill.tables.scanning.sessions import BucketKey
from tidemill.tables.state import bucket as buckets
from tidemill.tables.state import folding
from tidemill.tables.state.bucket import Bucket
from tidemill.tables.state.changes import prepare
from tidemill.tables.state.folding import read_for_fold
from tidemill.tables.state.metrics import measure_tables

SOON = 120


def row(number: int, region: str = "eu") -> dict[str, Any]:
    return {"id": number, "region": region, "amount": number / 2}


def bucket_of(world: TableWorld, table: TableDefinition, number: int = 0) -> Bucket:
    tables = world.broker.tables.loaded
    assert tables is not None
    return tables.service.bucket(BucketKey(table.table_id, table.partitions[0].id, number))


async def all_rows(world: TableWorld, table: TableDefinition) -> list[dict[str, Any]]:
    return [each for batch in await world.scan(table) for each in batch]


@pytest.fixture
async def table(world: TableWorld) -> TableDefinition:
    table = await world.create()
    await world.upsert(table, [row(number) for number in range(10)])
    await all_rows(world, table)
    return table


class Once:
    """Raises when it is called for the first time, and is the real thing afterwards."""

    def __init__(self, real: Callable[..., Any], error: BaseException) -> None:
        self.real = real
        self.error: BaseException | None = error

    def __call__(self, *args: Any, **named: Any) -> Any:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self.real(*args, **named)

    def __get__(self, instance: Any, owner: type) -> Any:
        return lambda *args, **named: self(instance, *args, **named)


async def test_a_batch_that_is_half_in_the_state_is_folded_to_its_end(
    world: TableWorld, table: TableDefinition
) -> None:
    # As after a crash: what RocksDB had flushed ends in the middle of a batch.
    await world.upsert(table, [row(number, "new") for number in range(3 * folding._WRITE_ROWS)])
    bucket = bucket_of(world, table)
    await all_rows(world, table)
    store = bucket.store
    assert isinstance(store, RocksStore)
    end = store.applied_offset
    store._applied_offset = end - 10
    changes = prepare(table, read_columns(bytes(bucket.log.read(10, 1 << 20, at_least_one=True))))
    folding.apply(store, changes, end)
    assert store.applied_offset == end


async def test_where_compaction_has_left_a_gap_at_the_end_the_fold_goes_on(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_of(world, table)
    # Nothing is left of what is between the last batch and the end of the log.
    monkeypatch.setattr(type(bucket.log), "last_stable_offset", property(lambda log: 15))
    async with asyncio.timeout(SOON):
        view, offset = await bucket.view()
    view.close()
    assert offset == 15


async def test_a_snapshot_without_room_leaves_the_state_as_it_is(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_of(world, table)
    store = bucket.store
    monkeypatch.setattr(SnapshotStore, "create", Once(SnapshotStore.create, DiskFull("no room")))
    with pytest.raises(DiskFull):
        await bucket.snapshot()
    assert len(await all_rows(world, table)) == 10
    assert bucket.store is store
    assert (await bucket.snapshot()).log_offset == 10


async def test_a_full_disk_pauses_the_fold_and_throws_nothing_away(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_of(world, table)
    damaged: list[Any] = []
    monkeypatch.setattr(buckets, "mark_damaged", lambda *given: damaged.append(given))
    monkeypatch.setattr(buckets, "_FIRST_PAUSE_MS", 10)
    monkeypatch.setattr(RocksStore, "write", Once(RocksStore.write, DiskFull("no room")))
    await world.upsert(table, [row(77)])
    async with asyncio.timeout(SOON):
        while bucket.applied_offset < 11:  # noqa: ASYNC110 - a test waits for a state
            await asyncio.sleep(0.01)
    assert {each["id"] for each in await all_rows(world, table)} == {*range(10), 77}
    assert damaged == []


class Stalling:
    """Writes of one store, refused in the middle of a batch for as long as ``lasts`` is set."""

    def __init__(self, store: KvStore, after_rows: int) -> None:
        self.lasts = threading.Event()
        self.refused = threading.Event()
        self._store, self._rows_left, self._real = store, after_rows, RocksStore.write
        self.lasts.set()

    def __get__(self, instance: Any, owner: type) -> Any:
        def write(keys: Any, *given: Any) -> None:
            if instance is self._store:
                self._rows_left -= len(keys)
                if self._rows_left < 0 and self.lasts.is_set():
                    self.refused.set()
                    raise WriteStalled("compactions are behind")
            self._real(instance, keys, *given)

        return write


async def test_a_stalled_engine_delays_its_own_bucket_alone(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await world.create("shop.others")
    stalling = Stalling(bucket_of(world, table).store, after_rows=2 * folding._WRITE_ROWS)
    monkeypatch.setattr(RocksStore, "write", stalling)
    numbers = range(3 * folding._WRITE_ROWS)
    await world.upsert(table, [row(number, "new") for number in numbers])
    assert await asyncio.to_thread(stalling.refused.wait, SOON)
    await world.upsert(other, [row(1)])
    assert [each["id"] for each in await all_rows(world, other)] == [1]
    assert bucket_of(world, table).applied_offset == 10 + 2 * folding._WRITE_ROWS
    stalling.lasts.clear()
    assert {(each["id"], each["region"]) for each in await all_rows(world, table)} == {
        (number, "new") for number in numbers
    }


async def test_a_stall_that_does_not_end_opens_the_state_again(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "_STALL_SECONDS_MAX", 0.0)
    monkeypatch.setattr(buckets, "_FIRST_PAUSE_MS", 10)
    bucket = bucket_of(world, table)
    store = bucket.store
    stalling = Stalling(store, after_rows=0)
    monkeypatch.setattr(RocksStore, "write", stalling)
    await world.upsert(table, [row(77)])
    with pytest.raises(TableError, match="opened again in a moment: compactions are behind"):
        await bucket.ready(11, SOON)
    async with asyncio.timeout(SOON):
        while bucket.applied_offset < 11:  # noqa: ASYNC110 - a test waits for a state
            await asyncio.sleep(0.01)
    assert bucket.store is not store


async def test_a_bucket_is_closed_while_its_engine_is_stalled(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_of(world, table)
    stalling = Stalling(bucket.store, after_rows=0)
    monkeypatch.setattr(RocksStore, "write", stalling)
    await world.upsert(table, [row(77)])
    assert await asyncio.to_thread(stalling.refused.wait, SOON)
    async with asyncio.timeout(SOON):
        await bucket.close()
    assert stalling.lasts.is_set()


async def test_while_the_fold_pauses_readers_are_told_why(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_of(world, table)
    monkeypatch.setattr(buckets, "_FIRST_PAUSE_MS", 30_000)
    monkeypatch.setattr(RocksStore, "write", Once(RocksStore.write, DiskFull("no room")))
    waiting = asyncio.ensure_future(bucket.ready(11, SOON))
    await world.upsert(table, [row(77)])
    with pytest.raises(TableError, match="no room") as refused:
        await waiting
    assert refused.value.table_code == TableCode.state_damaged
    assert refused.value.retriable
    tables = world.broker.tables.loaded
    assert tables is not None
    assert any("no room" in problem for problem in tables.service.problems())


async def test_damage_that_several_readers_find_is_repaired_once(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_of(world, table)
    recovered: list[int] = []
    real = kv_recovery.recover

    def recover(*args: Any, **named: Any) -> KvStore:
        recovered.append(1)
        return real(*args, **named)

    monkeypatch.setattr(buckets, "recover", recover)
    error = CorruptData("bits", path="x", position=0)
    await asyncio.gather(*(bucket.give_up_state(error) for _ in range(3)))
    assert len(await all_rows(world, table)) == 10
    assert recovered == [1]
    (numbers,) = (await measure_tables((await world.broker.tables.load()).service)).values()
    assert (numbers.rebuilds, numbers.fold_lag) == (1, 0)


async def test_state_that_cannot_even_be_closed_is_built_again(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_of(world, table)
    store, real = bucket.store, RocksStore.close

    def close(closed: RocksStore) -> None:
        real(closed)
        if closed is store:
            raise StorageError("nothing works")

    monkeypatch.setattr(RocksStore, "close", close)
    await bucket.give_up_state(CorruptData("bits", path="x", position=0))
    async with asyncio.timeout(SOON):
        assert len(await all_rows(world, table)) == 10


async def test_a_log_that_cannot_be_read_does_not_cost_the_state(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_of(world, table)
    store, damaged = bucket.store, list[Any]()
    monkeypatch.setattr(buckets, "mark_damaged", lambda *given: damaged.append(given))
    error = CorruptData("the file ends inside a batch", path="x", position=0)
    monkeypatch.setattr(type(bucket.log), "read", Once(type(bucket.log).read, error))
    await world.upsert(table, [row(77)])
    with pytest.raises(TableError, match=r"the log of shop\.orders-0 cannot be read: the file ends"):
        await bucket.ready(11, SOON)
    assert damaged == []
    assert isinstance(store, RocksStore)
    assert not store.is_closed


async def test_a_batch_that_does_not_fit_its_checksum_is_not_folded(
    world: TableWorld, table: TableDefinition
) -> None:
    bucket = bucket_of(world, table)
    (path,) = (world.broker.settings.data_dir / "logs" / table.name).rglob("*.log")
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x01
    path.write_bytes(data)
    with pytest.raises(TableError, match=r"the log of shop\.orders-0 cannot be read: .* checksum"):
        read_for_fold(bucket.log, 0)


@pytest.mark.parametrize("byte", [7, 22, 50, 90])
async def test_a_state_is_not_built_from_a_damaged_log_and_says_where_the_damage_is(
    world: TableWorld, table: TableDefinition, byte: int
) -> None:
    await world.upsert(table, [row(number) for number in range(10, 20)])
    bucket = bucket_of(world, table)
    await all_rows(world, table)
    path, position = bucket.log.local_log.position_of(10)
    file = world.broker.settings.data_dir / path
    data = bytearray(file.read_bytes())
    data[position + byte] ^= 0x20
    file.write_bytes(data)
    # The state is lost, and has to be built from the log.
    await bucket.give_up_state(CorruptData("flipped", path="x", position=0))
    async with asyncio.timeout(SOON):
        while bucket.problem is None:  # noqa: ASYNC110 - a test waits for a state
            await asyncio.sleep(0.01)
    with pytest.raises(TableError, match=rf"{path} at byte {position}") as caught:
        await bucket.ready(20, SOON)
    assert caught.value.table_code is TableCode.state_damaged
    (damage,) = world.broker.replicas.damage
    assert (damage.first.path, damage.first.position) == (path, position)


async def test_a_batch_that_nobody_should_have_let_in_stops_the_fold_with_its_place(
    world: TableWorld, table: TableDefinition
) -> None:
    bucket = bucket_of(world, table)
    bucket.log.append(batch_of((b"no number", b"no row")), 1)
    with pytest.raises(
        TableError, match=r"the batch at offset 10 of a log of table 'shop\.orders'"
    ) as stopped:
        await bucket.ready(11, SOON)
    assert stopped.value.table_code == TableCode.state_damaged


async def test_whoever_waits_for_a_bucket_that_is_dropped_is_told_so_and_not_cancelled(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_of(world, table)
    begun, may_end, real = threading.Event(), threading.Event(), SnapshotStore.create

    def create(*args: Any) -> Any:
        begun.set()
        may_end.wait(SOON)
        return real(*args)

    monkeypatch.setattr(SnapshotStore, "create", create)
    waiting = asyncio.ensure_future(bucket.snapshot())
    await asyncio.to_thread(begun.wait, SOON)
    dropping = asyncio.ensure_future(world.done("DropTable", name=table.name, if_exists=False))
    await asyncio.sleep(0)
    await dropping
    may_end.set()
    async with asyncio.timeout(SOON):
        with pytest.raises(TableError, match="is being closed"):
            await waiting


async def test_a_bucket_that_is_closed_refuses_instead_of_waiting_for_ever(
    world: TableWorld, table: TableDefinition
) -> None:
    bucket = bucket_of(world, table)
    await bucket.close()
    for ask in (bucket.view, lambda: bucket.store):
        with pytest.raises(TableError, match="is being closed"):
            ask()
    with pytest.raises(TableError, match="is being closed"):
        await bucket.ready(0, SOON)
    await bucket.close()


async def test_a_bucket_that_is_closed_while_it_recovers_leaves_nothing_open(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_of(world, table)
    begun, may_end, real = threading.Event(), threading.Event(), kv_recovery.recover
    opened: list[KvStore] = []

    def recover(*args: Any, **named: Any) -> KvStore:
        begun.set()
        may_end.wait(SOON)
        opened.append(real(*args, **named))
        return opened[-1]

    monkeypatch.setattr(buckets, "recover", recover)
    await bucket.give_up_state(CorruptData("bits", path="x", position=0))
    await asyncio.to_thread(begun.wait, SOON)
    closing = asyncio.ensure_future(bucket.close())
    await asyncio.sleep(0)
    may_end.set()
    await closing
    assert [isinstance(store, RocksStore) and store.is_closed for store in opened] == [True]


async def test_an_unexpected_error_of_a_call_at_the_stable_end_reaches_its_caller(
    world: TableWorld, table: TableDefinition
) -> None:
    bucket = bucket_of(world, table)

    async def fail() -> None:
        raise ValueError("a mistake")

    async with asyncio.timeout(SOON):
        with pytest.raises(ValueError, match="a mistake"):
            await bucket.at_stable_end(fail)
    assert len(await all_rows(world, table)) == 10


async def test_a_rehearsal_that_fails_keeps_no_node_from_starting(
    world: TableWorld,
    table: TableDefinition,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("an engine that does not run here")

    monkeypatch.setattr(node_tables, "rehearse", fail)
    await (await world.broker.tables.load()).prepare()
    assert "tables are not prepared before their first use" in caplog.text
    assert len(await all_rows(world, table)) == 10


async def test_a_rehearsal_leaves_nothing_behind_not_even_of_one_that_was_killed(world: TableWorld) -> None:
    left = world.broker.settings.data_dir / "rehearsal"
    left.mkdir(parents=True)
    (left / "CURRENT").write_text("of a node that was killed")
    await (await world.broker.tables.load()).prepare()
    assert not left.exists()
