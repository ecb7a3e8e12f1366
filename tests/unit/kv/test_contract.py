"""What every engine behind ``tidemill.kv.contract`` does: RocksDB, and the dictionaries of the simulation."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.dict_engine import DictEngine
from support.faulty_storage import FaultyStorage
from tidemill.errors import CorruptData, StorageError
from tidemill.kv.contract import KvEngine, KvLimits, KvStore, KvView
from tidemill.kv.recovery import mark_damaged, newest_offset, recover
from tidemill.kv.rocks.engine import make_engine
from tidemill.kv.snapshots import SnapshotStore

ID = b"table/0"
NO_LIMIT = 1 << 40


class World:
    """A machine with an engine. ``crash`` leaves what a crash may leave, and starts another engine on it."""

    engine: KvEngine
    directory: Path

    def crash(self) -> None:
        raise NotImplementedError


class RocksWorld(World):
    def __init__(self, directory: Path) -> None:
        self._root = directory
        self._crashes = 0
        self._start()

    def _start(self) -> None:
        self.directory = self._root / str(self._crashes)
        self.directory.mkdir(exist_ok=True)
        self.engine = make_engine(KvLimits(1 << 20, 1 << 20), lambda error: False)

    def crash(self) -> None:
        """The files as they are while the store is still open: what was only in memory is not in them."""
        left = self.directory
        self._crashes += 1
        target = self._root / str(self._crashes)
        while True:
            try:
                shutil.copytree(left, target)
                break
            except shutil.Error:  # RocksDB removes old files in the background.
                shutil.rmtree(target)
        self._start()


class DictWorld(World):
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._storage = FaultyStorage(self._rng)
        self.directory = Path("sim/kv/bucket")
        self._start()
        self.engine.files.make_directory(self.directory)

    def _start(self) -> None:
        self.engine = DictEngine(self._storage, self._rng, flush_share=0.2, early_share=0.1)

    def crash(self) -> None:
        self._storage = self._storage.crash()
        self._start()


@pytest.fixture(params=["rocks", *(f"dict {seed}" for seed in range(10))])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    name, _, seed = request.param.partition(" ")
    return RocksWorld(tmp_path) if name == "rocks" else DictWorld(int(seed))


def rows_of(view: KvView, max_bytes: int = NO_LIMIT, max_rows: int = 1000) -> dict[bytes, bytes]:
    """All rows, slice by slice."""
    found: dict[bytes, bytes] = {}
    start: bytes | None = b""
    while start is not None:
        piece = view.read(start, None, max_bytes, max_rows)
        assert piece.keys == sorted(piece.keys)
        assert all(key >= start for key in piece.keys)
        found |= dict(zip(piece.keys, piece.values, strict=True))
        start = piece.next_start
    return found


def content(store: KvStore) -> dict[bytes, bytes]:
    with store.view() as view:
        assert view.applied_offset == store.applied_offset
        return rows_of(view)


def fill(store: KvStore, end: int) -> None:
    """One write for each offset. Each puts two rows and deletes the two of ten offsets before."""
    for offset in range(store.applied_offset, end):
        old = [b"%s%06d" % (half, offset - 10) for half in (b"a", b"b")]
        store.write([b"a%06d" % offset, b"b%06d" % offset], [b"x", b"%d" % offset], old, offset + 1)


def filled(end: int) -> dict[bytes, bytes]:
    live = range(max(0, end - 10), end)
    return {b"a%06d" % i: b"x" for i in live} | {b"b%06d" % i: b"%d" % i for i in live}


def test_what_is_written_is_found_and_what_is_deleted_is_not(world: World) -> None:
    with world.engine.open(world.directory / "live", ID) as store:
        assert (store.applied_offset, store.was_created, store.identity) == (0, True, ID)
        store.write([b"a", b"b", b""], [b"1", b"2", b"empty"], [b"nobody"], 3)
        store.write([b"a"], [b""], [b"b"], 5)
        assert store.get_many([b"a", b"b", b"c", b"", b"a"]) == [b"", None, None, b"empty", b""]
        assert content(store) == {b"": b"empty", b"a": b""}
        store.write([], [], [], 9)
        assert store.applied_offset == 9
        assert store.size_bytes() > 0


def test_what_is_put_and_deleted_by_one_write_is_deleted(world: World) -> None:
    with world.engine.open(world.directory / "live", ID) as store:
        store.write([b"a", b"b"], [b"1", b"2"], [b"a"], 1)
        assert content(store) == {b"b": b"2"}


def test_everything_is_there_after_a_close(world: World) -> None:
    path = world.directory / "live"
    with world.engine.open(path, ID, first_offset=5) as store:
        assert store.applied_offset == 5
        fill(store, 40)
    with world.engine.open(path, ID, first_offset=77) as store:
        assert (store.applied_offset, store.was_created) == (40, False)
        assert content(store) == filled(40)


def test_a_crash_leaves_the_writes_up_to_an_offset_and_nothing_of_those_behind(world: World) -> None:
    store = world.engine.open(world.directory / "live", ID)
    for end in (10, 30, 50):
        fill(store, end)
        if end == 30:
            store.flush()
            for folder in world.directory.parents[:2]:
                world.engine.files.sync(folder)
            world.engine.files.sync(world.directory)
        world.crash()
        store = world.engine.open(world.directory / "live", ID)
        assert content(store) == filled(store.applied_offset)
        assert store.applied_offset <= end
    assert store.applied_offset >= 30, "it was flushed"
    store.close()


def test_a_view_does_not_move(world: World) -> None:
    with world.engine.open(world.directory / "live", ID) as store:
        fill(store, 20)
        with store.view() as view:
            fill(store, 60)
            assert view.applied_offset == 20
            assert rows_of(view, max_bytes=30) == filled(20)
        assert content(store) == filled(60)


@pytest.mark.parametrize("max_bytes", [0, 1, 25, 100, NO_LIMIT])
@pytest.mark.parametrize("max_rows", [1, 3, 1000])
def test_slices_of_any_size_give_all_rows(world: World, max_bytes: int, max_rows: int) -> None:
    with world.engine.open(world.directory / "live", ID) as store:
        expected = {bytes([number % 7, number]): b"v" * (number % 20) for number in range(100)}
        store.write(expected.keys(), expected.values(), [], 1)
        with store.view() as view:
            assert rows_of(view, max_bytes, max_rows) == expected
            _check_values(view, expected, max_bytes, max_rows)
            _check_measure(view, expected, max_bytes, max_rows)


def _check_values(view: KvView, expected: dict[bytes, bytes], max_bytes: int, max_rows: int) -> None:
    found: list[bytes] = []
    start: bytes | None = b"\x02"
    while start is not None:
        piece = view.read_values(start, b"\x05", max_bytes, max_rows)
        assert len(piece.values) <= max_rows
        assert piece.size_bytes <= max_bytes or len(piece.values) == 1
        found += piece.values
        start = piece.next_start
    assert found == [expected[key] for key in sorted(expected) if b"\x02" <= key < b"\x05"]


def _check_measure(view: KvView, expected: dict[bytes, bytes], max_bytes: int, max_rows: int) -> None:
    rows = size = 0
    start: bytes | None = b""
    while start is not None:
        extent = view.measure(start, None, max_bytes, max_rows, at_least_one=True)
        assert extent.rows <= max_rows
        assert extent.size_bytes <= max_bytes or extent.rows == 1
        rows, size, start = rows + extent.rows, size + extent.size_bytes, extent.next_start
    assert rows == len(expected)
    assert size == sum(len(key) + len(value) for key, value in expected.items())
    extent = view.measure(b"", None, 0, max_rows, at_least_one=False)
    assert (extent.rows, extent.next_start, extent.is_full) == (0, min(expected), True)


def test_a_store_of_another_identity_is_not_opened(world: World) -> None:
    path = world.directory / "live"
    with world.engine.open(path, ID) as store:
        fill(store, 5)
    with pytest.raises(CorruptData):
        world.engine.open(path, b"another")
    with pytest.raises(CorruptData):
        world.engine.open_read_only(path, b"another")
    world.engine.open(path, ID).close()


def test_a_store_is_open_once_at_a_time(world: World) -> None:
    with world.engine.open(world.directory / "live", ID):
        with pytest.raises(StorageError) as caught:
            world.engine.open(world.directory / "live", ID)
        assert not isinstance(caught.value, CorruptData)


def test_after_close_every_call_is_an_error(world: World) -> None:
    store = world.engine.open(world.directory / "live", ID)
    fill(store, 5)
    view = store.view()
    store.close()
    store.close()
    for call in (
        lambda: store.write([], [], [], 9),
        lambda: store.get_many([b"a"]),
        store.view,
        store.flush,
        store.count_estimate,
        store.size_bytes,
        lambda: view.read(b"", None, 1, 1),
        lambda: view.read_values(b"", None, 1, 1),
        lambda: view.measure(b"", None, 1, 1, at_least_one=True),
    ):
        with pytest.raises(StorageError):
            call()
    view.close()


def test_a_store_that_has_lost_its_list_of_files_is_damaged_and_not_new(world: World) -> None:
    path = world.directory / "live"
    with world.engine.open(path, ID) as store:
        fill(store, 5)
    world.engine.files.remove(path / "CURRENT")
    with pytest.raises(CorruptData):
        world.engine.open(path, ID)


def test_nothing_is_no_state_to_read(world: World) -> None:
    with pytest.raises(StorageError):
        world.engine.open_read_only(world.directory / "nowhere")
    assert world.engine.files.stat(world.directory / "nowhere") is None


def test_a_snapshot_outlives_crashes_and_what_is_written_later(world: World) -> None:
    store = world.engine.open(world.directory / "live", ID)
    snapshots = SnapshotStore(world.directory, world.engine.files)
    fill(store, 20)
    info = snapshots.create(store, 1_000)
    assert info.log_offset == 20
    fill(store, 60)
    with world.engine.open_read_only(info.path, info.identity) as reader:
        assert (reader.applied_offset, rows_of(reader)) == (20, filled(20))
    world.crash()
    (found,) = SnapshotStore(world.directory, world.engine.files).list()
    assert (found.snapshot_id, found.log_offset) == (info.snapshot_id, 20)
    with world.engine.open_read_only(found.path, ID) as reader:
        assert (reader.applied_offset, rows_of(reader)) == (20, filled(20))


def test_recovery_goes_from_live_to_snapshots_to_nothing(world: World) -> None:
    def recovered(**more: int) -> KvStore:
        bounds: dict[str, Any] = {"log_start": 0, "log_end": 1_000, **more}
        return recover(
            world.directory, world.engine, ID, log_is_complete=True, on_warning=warnings.append, **bounds
        )

    warnings: list[str] = []
    with recovered() as store:
        assert store.was_created
        fill(store, 20)
        SnapshotStore(world.directory, world.engine.files).create(store, 1_000)
        fill(store, 30)
    with recovered() as store:
        assert (store.applied_offset, content(store)) == (30, filled(30))
    assert newest_offset(world.directory, world.engine, ID) == 30
    mark_damaged(world.directory, world.engine.files)
    assert newest_offset(world.directory, world.engine, ID) == 20
    with recovered() as store:
        assert (store.applied_offset, content(store)) == (20, filled(20))
    with recovered(log_end=10) as store:
        assert (store.applied_offset, content(store)) == (0, {})
    assert warnings


def test_the_leader_epoch_is_that_of_the_last_write_also_after_a_restart(world: World) -> None:
    path = world.directory / "live"
    with world.engine.open(path, ID) as store:
        assert store.leader_epoch == -1, "nothing was written yet"
        store.write([b"a"], [b"1"], [], 1, 4)
        store.write([b"b"], [b"2"], [], 2, 4)
        store.write([], [], [], 3, 7)
        assert store.leader_epoch == 7
    with world.engine.open(path, ID) as store:
        assert (store.applied_offset, store.leader_epoch) == (3, 7)
        store.write([b"c"], [b"3"], [], 4)
    with world.engine.open(path, ID) as store:
        assert store.leader_epoch == -1, "whoever does not say it does not know it"
