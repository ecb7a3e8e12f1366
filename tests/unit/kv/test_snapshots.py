"""A snapshot is whole or not there, says what is wrong with it, and goes only when nobody needs it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from tidemill.errors import CorruptData, DiskFull, StorageError
from tidemill.kv.contract import WriteStalled
from tidemill.kv.files import Files
from tidemill.kv.manifest import MANIFEST_NAME, FileEntry, Manifest, pack_manifest, unpack_manifest
from tidemill.kv.rocks.resources import RocksResources
from tidemill.kv.rocks.store import RocksStore, open_read_only
from tidemill.kv.snapshots import SnapshotInfo, SnapshotStore

ID = b"\x00table"


class Crash(BaseException):
    """The process ends here."""


class Recording(Files):
    """Notes every operation that changes something, and may stop before one of them."""

    CHANGES = ("make_directory", "write", "link", "rename", "remove", "remove_tree", "sync")

    def __init__(self, stop_before: int | None = None, stop: Callable[[], BaseException] = Crash) -> None:
        self.done: list[tuple[str, tuple[Path, ...]]] = []
        self.checksummed: list[str] = []
        self._stop_before = stop_before
        self._stop = stop

    def checksum(self, path: Path) -> tuple[int, int]:
        self.checksummed.append(path.name)
        return super().checksum(path)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in Recording.CHANGES:
            return found

        def noted(*arguments: Any) -> Any:
            if len(self.done) == self._stop_before:
                self._stop_before = None
                if name == "remove_tree":
                    # In the middle of it, not before it.
                    _remove_something(arguments[0])
                raise self._stop()
            self.done.append((name, tuple(part for part in arguments if isinstance(part, Path))))
            return found(*arguments)

        return noted


def _remove_something(directory: Path) -> None:
    for path in list(directory.glob("*"))[:1]:
        path.unlink()


def open_store(directory: Path, resources: RocksResources) -> RocksStore:
    return RocksStore.open(directory / "live", resources, ID)


def fill(store: RocksStore, number: int) -> None:
    store.write([b"%d-%04d" % (number, i) for i in range(500)], [os.urandom(20)] * 500, [], number)


def content(path: Path, resources: RocksResources) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    with open_read_only(path, resources, ID) as reader:
        start: bytes | None = b""
        while start is not None:
            piece = reader.read(start, None, 1 << 20, 100_000)
            found.update(zip(piece.keys, piece.values, strict=True))
            start = piece.next_start
    return found


def ids(directory: Path) -> list[int]:
    return [info.snapshot_id for info in SnapshotStore(directory).list()]


@pytest.fixture
def bucket(tmp_path: Path, resources: RocksResources) -> Path:
    """A bucket at offset 2 with a snapshot of offset 1 and one of offset 2."""
    directory = tmp_path / "bucket"
    with open_store(directory, resources) as store:
        for number in (1, 2):
            fill(store, number)
            SnapshotStore(directory).create(store, 1000 + number)
    return directory


def test_a_snapshot_is_the_state_at_its_offset(bucket: Path, resources: RocksResources) -> None:
    snapshots = SnapshotStore(bucket)
    first, second = snapshots.list()
    assert (first.snapshot_id, first.log_offset, first.created_ms, first.identity) == (1, 1, 1001, ID)
    assert (second.snapshot_id, second.log_offset, second.created_ms) == (2, 2, 1002)
    assert snapshots.newest_offset == 2
    assert snapshots.broken() == ()
    assert len(content(first.path, resources)) == 500
    assert len(content(second.path, resources)) == 1000
    for entry in first.files:
        assert entry.name == "CURRENT" or entry.name.startswith("MANIFEST-") or entry.name.endswith(".sst")
    assert first.size_bytes == sum((first.path / entry.name).stat().st_size for entry in first.files)
    # Reading a snapshot leaves it as it was.
    for info in snapshots.list():
        snapshots.verify(info)


def test_a_restored_snapshot_is_written_to_without_harm_to_it(
    bucket: Path, resources: RocksResources, tmp_path: Path
) -> None:
    snapshots = SnapshotStore(bucket)
    first = snapshots.list()[0]
    before = content(first.path, resources)
    snapshots.restore(first, tmp_path / "restored")
    for entry in first.files:
        is_shared = (first.path / entry.name).samefile(tmp_path / "restored" / entry.name)
        assert is_shared == entry.name.endswith(".sst"), entry.name
    with RocksStore.open(tmp_path / "restored", resources, ID) as store:
        assert store.applied_offset == 1
        store.write([b"1-0000"], [b"changed"], [b"1-0001"], 5)
        store.flush()
        store._database.compact_range(None, None)
    snapshots.verify(first)
    assert content(first.path, resources) == before
    assert len(content(tmp_path / "restored", resources)) == 499
    with pytest.raises(StorageError, match="exists"):
        snapshots.restore(first, tmp_path / "restored")


def test_only_new_files_are_read_for_their_checksum(bucket: Path, resources: RocksResources) -> None:
    files = Recording()
    with open_store(bucket, resources) as store:
        fill(store, 3)
        info = SnapshotStore(bucket, files).create(store, 0)
    assert len([name for name in files.checksummed if name.endswith(".sst")]) == 1
    assert len([entry for entry in info.files if entry.name.endswith(".sst")]) == 3
    SnapshotStore(bucket).verify(info)


def test_a_new_file_under_an_old_name_is_read_for_its_checksum(
    bucket: Path, resources: RocksResources
) -> None:
    snapshots = SnapshotStore(bucket)
    first, second = snapshots.list()
    shutil.rmtree(bucket / "live")
    snapshots.restore(first, bucket / "live")
    with open_store(bucket, resources) as store:
        for number in range(2, 20):
            fill(store, number)
            third = snapshots.create(store, 0)
            old = {entry.name: entry for entry in second.files}
            if any(entry.name in old and entry != old[entry.name] for entry in third.files):
                break
            snapshots.remove(third.snapshot_id)
        else:
            pytest.fail("no file got a name that the second snapshot has: the test shows nothing")
    snapshots.verify(second)
    snapshots.verify(third)


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.unlink()
    path.write_bytes(data)


def _table_of(info: SnapshotInfo) -> Path:
    """A file that the snapshot before does not have."""
    return info.path / max(entry.name for entry in info.files if entry.name.endswith(".sst"))


BREAKING: dict[str, tuple[Callable[[SnapshotInfo], object], str]] = {
    "manifest flipped": (
        lambda info: _flip(info.path / MANIFEST_NAME, 100),
        "manifest .* does not check out",
    ),
    "manifest cut": (
        lambda info: os.truncate(info.path / MANIFEST_NAME, 90),
        "manifest .* does not check out",
    ),
    "manifest emptied": (
        lambda info: os.truncate(info.path / MANIFEST_NAME, 0),
        "manifest .* does not check out",
    ),
    "manifest lost": (lambda info: (info.path / MANIFEST_NAME).unlink(), "manifest .* lost"),
    "manifest of another": (
        lambda info: shutil.copy(info.path.parent / "1" / MANIFEST_NAME, info.path / MANIFEST_NAME),
        "is of snapshot 1",
    ),
    "table file lost": (lambda info: _table_of(info).unlink(), r"\.sst of the snapshot is lost"),
    "table file cut": (
        lambda info: os.truncate(_table_of(info), 77),
        r"\.sst .* has 77 bytes and should have",
    ),
    "CURRENT lost": (lambda info: (info.path / "CURRENT").unlink(), "CURRENT of the snapshot is lost"),
}


@pytest.mark.parametrize("breaking", BREAKING)
def test_a_broken_snapshot_is_reported_and_neither_used_nor_removed(bucket: Path, breaking: str) -> None:
    damage, expected = BREAKING[breaking]
    snapshots = SnapshotStore(bucket)
    second = snapshots.list()[1]
    damage(second)
    assert ids(bucket) == [1]
    (broken,) = snapshots.broken()
    assert broken.path == second.path
    with pytest.raises(StorageError, match=expected):
        raise StorageError(broken.reason)
    assert snapshots.newest_offset == 1
    snapshots.clean()
    assert snapshots.prune(1, set()) == ()
    assert second.path.exists()
    assert ids(bucket) == [1]


@pytest.mark.parametrize("kind", [".sst", "MANIFEST-", "CURRENT"])
def test_a_flipped_bit_is_found_by_its_checksum(bucket: Path, tmp_path: Path, kind: str) -> None:
    snapshots = SnapshotStore(bucket)
    info = snapshots.list()[1]
    name = next(entry.name for entry in reversed(info.files) if kind in entry.name)
    _flip(info.path / name, 5)
    assert ids(bucket) == [1, 2]
    with pytest.raises(CorruptData, match=f"file {name} of snapshot 2") as caught:
        snapshots.verify(info)
    assert caught.value.path == str(info.path / name)
    with pytest.raises(CorruptData, match=name):
        snapshots.restore(info, tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def test_the_newest_and_the_leased_are_kept(bucket: Path, resources: RocksResources) -> None:
    snapshots = SnapshotStore(bucket)
    with open_store(bucket, resources) as store:
        for number in range(3, 7):
            fill(store, number)
            snapshots.create(store, number)
    (snapshots.list()[3].path / MANIFEST_NAME).write_bytes(b"broken")
    assert ids(bucket) == [1, 2, 3, 5, 6]
    assert snapshots.prune(2, {2, 99}) == (1, 3)
    assert ids(bucket) == [2, 5, 6]
    assert snapshots.prune(2, {2, 99}) == ()
    assert snapshots.prune(2, set()) == (2,)
    assert ids(bucket) == [5, 6]
    assert [broken.path.name for broken in snapshots.broken()] == ["4"]
    for info in snapshots.list():
        snapshots.verify(info)


def test_a_number_is_never_given_twice(bucket: Path, resources: RocksResources) -> None:
    with open_store(bucket, resources) as store:
        for expected in (3, 4):
            assert SnapshotStore(bucket).create(store, 0).snapshot_id == expected
            SnapshotStore(bucket).remove(expected)
        SnapshotStore(bucket).remove(2)
        assert SnapshotStore(bucket).create(store, 0).snapshot_id == 5
    assert ids(bucket) == [1, 5]
    with pytest.raises(StorageError, match="no snapshot 4"):
        SnapshotStore(bucket).remove(4)


def test_everything_is_durable_before_the_name_is(bucket: Path, resources: RocksResources) -> None:
    files = Recording()
    with open_store(bucket, resources) as store:
        fill(store, 3)
        info = SnapshotStore(bucket, files).create(store, 0)
    temporary = bucket / "snapshots" / "tmp-3"
    renamed = files.done.index(("rename", (temporary, info.path)))
    synced = {paths[0].name: at for at, (action, paths) in enumerate(files.done) if action == "sync"}
    changed = {paths[0].name: at for at, (action, paths) in enumerate(files.done) if action == "write"}
    previous = {entry.name for entry in SnapshotStore(bucket).list()[1].files if entry.name.endswith(".sst")}
    for name in [MANIFEST_NAME, *(entry.name for entry in info.files if entry.name not in previous)]:
        assert changed.get(name, -1) < synced[name] < synced["tmp-3"] < renamed
    assert files.done[renamed + 1 :] == [("sync", (bucket / "snapshots",))]


def _steps(work: Callable[[Recording], object]) -> int:
    files = Recording()
    work(files)
    return len(files.done)


def _create(directory: Path, resources: RocksResources, files: Files) -> None:
    store = open_store(directory, resources)
    try:
        fill(store, 3)
        SnapshotStore(directory, files).create(store, 0)
    finally:
        store.close()


def _copy(bucket: Path, target: Path) -> Path:
    shutil.copytree(bucket, target)
    return target


def test_a_crash_while_a_snapshot_is_made_leaves_the_old_set_or_the_new_one(
    bucket: Path, resources: RocksResources, tmp_path: Path
) -> None:
    steps = _steps(lambda files: _create(_copy(bucket, tmp_path / "all"), resources, files))
    assert steps > 10
    outcomes: list[list[int]] = []
    for step in range(steps):
        directory = _copy(bucket, tmp_path / f"crash-{step}")
        with pytest.raises(Crash):
            _create(directory, resources, Recording(stop_before=step))
        snapshots = SnapshotStore(directory)
        outcomes.append(ids(directory))
        assert snapshots.broken() == ()
        snapshots.clean()
        left = sorted(path.name for path in (directory / "snapshots").iterdir())
        assert left == [str(number) for number in outcomes[-1]]
        for info in snapshots.list():
            snapshots.verify(info)
            assert len(content(info.path, resources)) == 500 * info.log_offset
        # The next one works.
        with open_store(directory, resources) as store:
            snapshots.create(store, 0)
        shutil.rmtree(directory)
    # The only step after the rename is the sync of the directory.
    assert outcomes == [[1, 2]] * (steps - 1) + [[1, 2, 3]]


def test_a_failure_while_a_snapshot_is_made_changes_nothing(
    bucket: Path, resources: RocksResources, tmp_path: Path
) -> None:
    steps = _steps(lambda files: _create(_copy(bucket, tmp_path / "all"), resources, files))
    directory = _copy(bucket, tmp_path / "failing")
    with open_store(directory, resources) as store:
        fill(store, 3)
        for step in range(steps - 1):
            files = Recording(stop_before=step, stop=lambda: DiskFull("no room"))
            with pytest.raises(DiskFull):
                SnapshotStore(directory, files).create(store, 0)
            assert sorted(path.name for path in (directory / "snapshots").iterdir()) == ["1", "2"]
        assert SnapshotStore(directory).create(store, 0).log_offset == 3


def test_a_crash_while_a_snapshot_is_removed_leaves_it_whole_or_gone(bucket: Path, tmp_path: Path) -> None:
    def remove(directory: Path, files: Files) -> None:
        SnapshotStore(directory, files).remove(2)

    steps = _steps(lambda files: remove(_copy(bucket, tmp_path / "all"), files))
    for step in range(steps):
        directory = _copy(bucket, tmp_path / f"crash-{step}")
        with pytest.raises(Crash):
            remove(directory, Recording(stop_before=step))
        snapshots = SnapshotStore(directory)
        assert ids(directory) in ([1], [1, 2])
        assert snapshots.broken() == ()
        for info in snapshots.list():
            snapshots.verify(info)
        snapshots.clean()
        assert {path.name for path in (directory / "snapshots").iterdir()} <= {"1", "2", "last-id"}


def test_snapshots_taken_under_writes_and_compactions_are_the_state_at_their_offset(
    tmp_path: Path, small_resources: RocksResources
) -> None:
    done = threading.Event()
    with open_store(tmp_path, small_resources) as store:

        def write() -> None:
            # Write number n puts 20 keys of its own, and takes away those of number n - 100.
            while store.applied_offset < 1500:
                number = store.applied_offset
                keys = [b"%04d-%02d" % (number, i) for i in range(20)]
                gone = [b"%04d-%02d" % (number - 100, i) for i in range(20)] if number >= 100 else []
                with contextlib.suppress(WriteStalled):
                    store.write(keys, [os.urandom(100) for _ in keys], gone, number + 1)
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        snapshots = SnapshotStore(tmp_path)
        taken = 0
        while not done.is_set() or not taken:
            snapshots.create(store, 0)
            taken += 1
        writer.join()
    for info in snapshots.list():
        snapshots.verify(info)
        reached = info.log_offset
        expected = {b"%04d-%02d" % (n, i) for n in range(max(0, reached - 100), reached) for i in range(20)}
        assert set(content(info.path, small_resources)) == expected


class Compacting(Files):
    """Some table files go away between the copy of the list and the links, as in a compaction."""

    def __init__(self, times: int) -> None:
        self.times = times

    def link(self, source: Path, target: Path) -> bool:
        if self.times:
            self.times -= 1
            return False
        return super().link(source, target)


def test_a_copy_into_which_a_compaction_came_is_made_again(bucket: Path, resources: RocksResources) -> None:
    with open_store(bucket, resources) as store:
        fill(store, 3)
        files = Compacting(times=4)
        info = SnapshotStore(bucket, files).create(store, 0)
        assert files.times == 0
        assert len(content(info.path, resources)) == 1500
        with pytest.raises(StorageError, match="change too fast or one is lost"):
            SnapshotStore(bucket, Compacting(times=1000)).create(store, 0)
    assert ids(bucket) == [1, 2, 3]


@pytest.mark.parametrize("from_end", [300, 500])
def test_state_that_cannot_be_copied_because_a_file_is_damaged_is_reported_as_damaged(
    bucket: Path, resources: RocksResources, from_end: int
) -> None:
    damaged = max((bucket / "live").glob("*.sst"))
    with open_store(bucket, resources) as store:
        fill(store, 3)
        # Behind the rows are the blocks that everybody reads who opens the file.
        with damaged.open("r+b") as file:
            file.seek(-from_end, os.SEEK_END)
            file.write(bytes(100))
        with pytest.raises(CorruptData, match="cannot be copied") as refused:
            SnapshotStore(bucket).create(store, 0)
    # Some of what RocksDB finds it does not find in a file.
    assert refused.value.path in (str(damaged), str(damaged.parent))
    assert ids(bucket) == [1, 2]


class OldList(Files):
    """Gives the list of files as it was before the last flush, once."""

    def __init__(self, size: int) -> None:
        self.size = size

    def read(self, path: Path) -> bytes | None:
        found = super().read(path)
        if path.name.startswith("MANIFEST-") and self.size and found is not None:
            found, self.size = found[: self.size], 0
        return found


def test_a_copy_of_an_older_state_is_made_again(bucket: Path, resources: RocksResources) -> None:
    with open_store(bucket, resources) as store:
        files = OldList(next((bucket / "live").glob("MANIFEST-*")).stat().st_size)
        fill(store, 3)
        info = SnapshotStore(bucket, files).create(store, 0)
    assert files.size == 0
    assert info.log_offset == 3
    assert len(content(info.path, resources)) == 1500


def test_two_objects_of_one_directory_do_not_disturb_each_other(bucket: Path) -> None:
    (bucket / "snapshots" / "tmp-3").mkdir()
    assert ids(bucket) == [1, 2]
    assert (bucket / "snapshots" / "tmp-3").exists(), "looking has removed what another one is making"


def test_a_directory_without_snapshots_has_none(tmp_path: Path) -> None:
    snapshots = SnapshotStore(tmp_path / "missing")
    assert snapshots.list() == ()
    assert snapshots.newest_offset is None
    snapshots.clean()
    assert not (tmp_path / "missing").exists()


def test_a_manifest_that_names_files_elsewhere_is_refused() -> None:
    for name in ("../live/000001.sst", "/etc/passwd", "..", ""):
        manifest = Manifest(1, 1, "", 0, 0, (FileEntry(name, 1, 1),))
        with pytest.raises(CorruptData, match="outside"):
            unpack_manifest(pack_manifest(manifest), "m")
    newer = Manifest(2, 1, "", 0, 0, ())
    with pytest.raises(CorruptData, match="version 2"):
        unpack_manifest(pack_manifest(newer), "m")
    good = Manifest(1, 1, "00ff", 5, 6, (FileEntry("CURRENT", 1, 1),))
    assert unpack_manifest(pack_manifest(good), "m") == good


def test_snapshots_that_share_a_damaged_file_are_never_used_again(bucket: Path) -> None:
    snapshots = SnapshotStore(bucket)
    first, second = snapshots.list()
    only_in_second = {entry.name for entry in second.files} - {entry.name for entry in first.files}
    (name,) = (name for name in only_in_second if name.endswith(".sst"))
    assert snapshots.spoil(bucket / "live" / name) == (2,)
    assert ids(bucket) == [1]
    assert snapshots.newest_offset == 1
    (broken,) = snapshots.broken()
    assert broken.path == second.path
    assert "do not check out" in broken.reason
    # Where it was found is not known: every file of the state may be the one.
    assert snapshots.spoil(bucket / "live") == (1,)
    assert ids(bucket) == []
    assert snapshots.spoil(bucket / "live" / "000999.sst") == ()


def test_what_a_manifest_consists_of_is_settled_before_threads_come_to_read_one() -> None:
    # msgspec looks the fields' types up by name when it makes the first decoder of a class. Threads that get
    # there at the same time crash the process, in one of five tries: so it must be done by the import.
    program = """
from tidemill.kv import manifest

made = manifest.Manifest(1, 2, "00", 3, 4, (manifest.FileEntry("a", 5, 6),))
data = manifest.pack_manifest(made)
del manifest.FileEntry
assert manifest.unpack_manifest(data, "x") == made
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_manifest_of_an_older_version_has_an_unknown_leader_epoch() -> None:
    good = Manifest(1, 1, "00ff", 5, 6, (FileEntry("CURRENT", 1, 1),), 9)
    data = pack_manifest(good)
    assert unpack_manifest(data, "m").leader_epoch == 9
    body = data.partition(b"\n")[2].replace(b',\n "leader_epoch": 9', b"")
    older = b"tidemill-snapshot %d %08x\n%s" % (len(body), crc32c(body), body)
    assert unpack_manifest(older, "m") == Manifest(1, 1, "00ff", 5, 6, good.files, -1)


def test_the_newest_snapshot_is_that_of_the_latest_state_whatever_its_number(
    tmp_path: Path, resources: RocksResources
) -> None:
    """A snapshot that was built again for a lease is younger than its state."""
    snapshots = SnapshotStore(tmp_path / "bucket")
    for name, offset in (("late", 20), ("early", 10)):
        with RocksStore.open(tmp_path / name, resources, b"id") as store:
            store.write([b"a"], [b"1"], [], offset, 2)
            snapshots.create(store, 0)
            assert snapshots.newest_offset == 20
    assert [(info.snapshot_id, info.log_offset) for info in snapshots.list()] == [(2, 10), (1, 20)]
    assert snapshots.list()[0].leader_epoch == 2
    assert snapshots.prune(1, frozenset()) == (2,)
