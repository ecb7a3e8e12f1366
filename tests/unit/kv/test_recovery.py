"""Whatever is left of a bucket's directory: recovery finds the newest state that the log leads on from, or
says why there is none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tidemill.errors import DiskFull, StorageError
from tidemill.kv.contract import KvStore
from tidemill.kv.files import Files
from tidemill.kv.manifest import MANIFEST_NAME
from tidemill.kv.recovery import mark_damaged, recover
from tidemill.kv.rocks.engine import RocksEngine
from tidemill.kv.rocks.resources import RocksResources
from tidemill.kv.rocks.store import RocksStore
from tidemill.kv.snapshots import SnapshotInfo, SnapshotStore

ID = b"table 7, bucket 3"


class Bucket:
    """A directory under recovery. Its log has one record per offset; the state has a row for each."""

    def __init__(self, directory: Path, resources: RocksResources) -> None:
        self.directory = directory
        self.resources = resources
        self.live = directory / "live"
        self.warnings: list[str] = []

    def replay(self, store: KvStore, end: int) -> None:
        """Bring a store to an offset."""
        offsets = range(store.applied_offset, end)
        store.write([b"%06d" % i for i in offsets], [b"value %d" % i for i in offsets], [], end)

    def recover(self, **changes: Any) -> KvStore:
        self.warnings = []
        arguments = {"log_start": 0, "log_end": 1000, "log_is_complete": True} | changes
        return recover(
            self.directory,
            RocksEngine(arguments.pop("resources", self.resources), arguments.pop("files", None)),
            arguments.pop("identity", ID),
            on_warning=self.warnings.append,
            **arguments,
        )

    def recovered_offset(self, **changes: Any) -> int:
        """The offset of the state that is found, which must have all rows below it."""
        with self.recover(**changes) as store:
            with store.view() as view:
                piece = view.read(b"", None, 1 << 20, 10_000)
            # All rows, or none where the log is to be replayed from its start.
            assert piece.keys in ([], [b"%06d" % offset for offset in range(store.applied_offset)])
            return store.applied_offset

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir() if path.name != "snapshots")

    def snapshot(self, number: int) -> SnapshotInfo:
        return next(info for info in SnapshotStore(self.directory).list() if info.snapshot_id == number)


@pytest.fixture
def bucket(tmp_path: Path, resources: RocksResources) -> Bucket:
    """Snapshots at 100 and 200, live at 300."""
    bucket = Bucket(tmp_path / "bucket", resources)
    with bucket.recover() as store:
        for end in (100, 200):
            bucket.replay(store, end)
            SnapshotStore(bucket.directory).create(store, end)
        bucket.replay(store, 300)
    assert bucket.warnings == []
    return bucket


def _flip(path: Path, position: int = 50) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.unlink()
    path.write_bytes(data)


def _cut(path: Path) -> None:
    # A file of its own: cutting the old one would cut that of a snapshot.
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:100])


def _own_table(info: SnapshotInfo) -> Path:
    return info.path / max(entry.name for entry in info.files if entry.name.endswith(".sst"))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "CURRENT lost": lambda live: (live / "CURRENT").unlink(),
    "CURRENT garbled": lambda live: (live / "CURRENT").write_text("?"),
    "list lost": lambda live: next(live.glob("MANIFEST-*")).unlink(),
    "list flipped": lambda live: _flip(next(live.glob("MANIFEST-*"))),
    "table file lost": lambda live: max(live.glob("*.sst")).unlink(),
    "table file cut": lambda live: _cut(max(live.glob("*.sst"))),
    "marked": lambda live: mark_damaged(live.parent, Files()),
}


def test_a_new_bucket_starts_empty(tmp_path: Path, resources: RocksResources) -> None:
    for log_start in (0, 7):
        bucket = Bucket(tmp_path / f"from {log_start}", resources)
        assert bucket.recovered_offset(log_start=log_start, log_end=log_start) == log_start
        assert bucket.recovered_offset(log_start=log_start, log_is_complete=False) == log_start
        assert bucket.warnings == []
        assert bucket.names() == ["live"]


def test_a_live_state_that_fits_the_log_is_used(bucket: Bucket) -> None:
    assert bucket.recovered_offset() == 300
    assert bucket.recovered_offset(log_start=300, log_end=300, log_is_complete=False) == 300
    assert bucket.warnings == []
    assert bucket.names() == ["live"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_live_state_is_moved_away_and_the_newest_snapshot_taken(
    bucket: Bucket, damage: str
) -> None:
    DAMAGE[damage](bucket.live)
    assert bucket.recovered_offset(log_start=150, log_is_complete=False) == 200
    (warning,) = bucket.warnings
    assert f"{bucket.live} is not used and was moved to live.damaged-1: " in warning
    assert bucket.names() == ["live", "live.damaged-1"]
    # And from now on it is the live state.
    with bucket.recover() as store:
        bucket.replay(store, 400)
    assert bucket.recovered_offset() == 400
    assert bucket.warnings == []


def test_a_snapshot_that_was_taken_of_a_damaged_state_is_not_taken_again_and_again(
    tmp_path: Path, resources: RocksResources
) -> None:
    bucket = Bucket(tmp_path / "bucket", resources)
    with bucket.recover() as store:
        bucket.replay(store, 100)
        SnapshotStore(bucket.directory).create(store, 100)
        bucket.replay(store, 30_000)
        store.flush()
        # Damage that nobody has met yet when the next snapshot gets its checksums.
        newest = max(bucket.live.glob("*.sst"), key=lambda path: path.name)
        _flip(newest, newest.stat().st_size // 2)
        SnapshotStore(bucket.directory).create(store, 30_000)
    mark_damaged(bucket.directory, Files())
    assert bucket.recovered_offset(log_end=100_000) == 100
    assert any("it is that of snapshot 2" in warning for warning in bucket.warnings)
    assert [info.snapshot_id for info in SnapshotStore(bucket.directory).list()] == [1]


def test_only_the_newest_damaged_state_is_kept(bucket: Bucket) -> None:
    for number in (1, 2, 3):
        mark_damaged(bucket.directory, Files())
        assert bucket.recovered_offset() == 200
        assert bucket.names() == ["live", f"live.damaged-{number}"]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ({"log_end": 299}, 200),
        ({"log_end": 200}, 200),
        ({"log_end": 150}, 100),
        ({"log_end": 50}, 0),
        ({"log_start": 250, "log_end": 299}, 250),
        ({"log_start": 301}, 301),
    ],
)
def test_a_state_that_the_log_does_not_lead_on_from_is_not_used(
    bucket: Bucket, log: dict[str, int], expected: int
) -> None:
    assert bucket.recovered_offset(**log) == expected
    assert "and the log" in bucket.warnings[0]
    assert bucket.names() == ["live", "live.damaged-1"]


def test_a_state_that_may_have_missed_deletions_is_built_again(bucket: Bucket) -> None:
    assert bucket.recovered_offset(removed_below=300) == 300
    assert bucket.recovered_offset(removed_below=301) == 0
    assert "compacted up to 301: deletions may be missing" in bucket.warnings[0]
    assert bucket.names() == ["live"], "nothing is wrong with it that somebody would look at"


def test_a_snapshot_that_may_have_missed_deletions_is_not_used(bucket: Bucket) -> None:
    mark_damaged(bucket.directory, Files())
    assert bucket.recovered_offset(removed_below=200) == 200
    mark_damaged(bucket.directory, Files())
    assert bucket.recovered_offset(removed_below=201) == 0


def test_the_only_state_of_an_incomplete_log_is_not_removed_though_it_may_have_missed_deletions(
    bucket: Bucket,
) -> None:
    with pytest.raises(StorageError, match="cannot be rebuilt"):
        bucket.recover(log_start=50, log_is_complete=False, removed_below=301)
    assert bucket.names() == ["live.damaged-1"]


def test_broken_snapshots_are_passed_over(bucket: Bucket) -> None:
    with bucket.recover() as store:
        SnapshotStore(bucket.directory).create(store, 0)
        bucket.replay(store, 400)
        SnapshotStore(bucket.directory).create(store, 0)
    (bucket.snapshot(4).path / MANIFEST_NAME).unlink()
    _flip(_own_table(bucket.snapshot(3)))
    mark_damaged(bucket.directory, Files())
    assert bucket.recovered_offset() == 200
    live, lost, flipped = bucket.warnings
    assert "live" in live
    assert "snapshots/4 is not used: the manifest of the snapshot is lost" in lost
    assert "snapshots/3 is not used: " in flipped
    assert "checksum" in flipped
    assert (bucket.directory / "snapshots" / "4").exists()
    assert (bucket.directory / "snapshots" / "3").exists()


def test_without_any_state_a_complete_log_is_replayed(bucket: Bucket) -> None:
    shutil.rmtree(bucket.live)
    for info in SnapshotStore(bucket.directory).list():
        (info.path / "CURRENT").unlink()
    assert bucket.recovered_offset() == 0
    assert len(bucket.warnings) == 2


def test_without_any_state_an_incomplete_log_is_an_error_that_says_why(bucket: Bucket) -> None:
    mark_damaged(bucket.directory, Files())
    _flip(_own_table(bucket.snapshot(2)))
    with pytest.raises(StorageError, match="cannot be rebuilt: the log begins at offset 120") as caught:
        bucket.recover(log_start=120, log_is_complete=False)
    for part in ("live.damaged-1", "snapshots/2 is not used", "checksum", "snapshots/1", "at offset 100"):
        assert part in caught.value.message
    empty = Bucket(bucket.directory.parent / "empty", bucket.resources)
    with pytest.raises(StorageError, match="neither a live state nor a snapshot"):
        empty.recover(log_start=1, log_is_complete=False)


def test_a_state_of_another_bucket_is_not_used(bucket: Bucket) -> None:
    with bucket.recover(identity=b"another") as store:
        assert store.applied_offset == 0
    assert len(bucket.warnings) == 3
    assert all("not of b'another'" in warning for warning in bucket.warnings)


def test_what_is_not_damage_changes_nothing(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket.recover(), pytest.raises(StorageError, match="it is open"):
        bucket.recover()
    assert bucket.names() == ["live"]

    def full(*_: object, **__: object) -> RocksStore:
        raise DiskFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(RocksStore, "open", full)
        with pytest.raises(DiskFull):
            bucket.recover()
    assert bucket.names() == ["live"]
    assert bucket.recovered_offset() == 300


def copy_open_database(source: Path, target: Path) -> None:
    """What a crash would leave. RocksDB removes old files behind the scenes, so a copy may find one gone."""
    while True:
        try:
            shutil.copytree(source, target)
        except shutil.Error:
            shutil.rmtree(target)
        else:
            return


def test_a_database_that_never_had_anything_does_not_hide_a_snapshot(bucket: Bucket, tmp_path: Path) -> None:
    shutil.rmtree(bucket.live)
    # A crash right after the database was made: its metadata was never flushed.
    store = RocksStore.open(tmp_path / "fresh", bucket.resources, ID)
    copy_open_database(tmp_path / "fresh", bucket.live)
    store.close()
    assert bucket.recovered_offset() == 200
    assert bucket.warnings == []
    shutil.rmtree(bucket.live)
    bucket.live.mkdir()
    assert bucket.recovered_offset() == 200
    assert bucket.warnings == []


class Crash(BaseException):
    """The process ends here."""


class Crashing(Files):
    """Stops before one of the operations that change something."""

    CHANGES = ("make_directory", "write", "link", "rename", "remove", "remove_tree", "sync")

    def __init__(self, stop_before: int) -> None:
        self.steps = 0
        self._stop_before = stop_before

    def _step(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if self.steps == self._stop_before:
            raise Crash
        self.steps += 1
        return work(*arguments)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return partial(self._step, found) if name in Crashing.CHANGES else found


def test_a_crash_at_any_point_of_a_recovery_does_no_harm(bucket: Bucket, tmp_path: Path) -> None:
    mark_damaged(bucket.directory, Files())
    step, finished = 0, False
    while not finished:
        directory = tmp_path / f"crash-{step}"
        shutil.copytree(bucket.directory, directory)
        copy = Bucket(directory, bucket.resources)
        try:
            copy.recover(files=Crashing(step), log_is_complete=False, log_start=150).close()
            finished = True
        except Crash:
            step += 1
        assert copy.recovered_offset(log_is_complete=False, log_start=150) == 200
        assert copy.names() == ["live", "live.damaged-1"]
        assert [info.snapshot_id for info in SnapshotStore(directory).list()] == [1, 2]
        shutil.rmtree(directory)
    assert step > 10


def test_leftovers_are_cleaned_away(bucket: Bucket) -> None:
    mark_damaged(bucket.directory, Files())
    for name in ("snapshots/tmp-9", "snapshots/removing-8", "live.restoring"):
        (bucket.directory / name).mkdir()
        (bucket.directory / name / "file").write_text("x")
    assert bucket.recovered_offset() == 200
    assert bucket.names() == ["live", "live.damaged-1"]
    assert sorted(os.listdir(bucket.directory / "snapshots")) == ["1", "2"]


def test_state_of_records_that_were_cut_is_void(bucket: Bucket) -> None:
    """Epoch 5 wrote from 150 on, and lost: the log has epoch 6 there instead."""
    with bucket.recover() as store:
        store.write([], [], [], 310, 5)
        SnapshotStore(bucket.directory).create(store, 310)

    def is_of_log(leader_epoch: int, offset: int) -> bool:
        return leader_epoch != 5

    assert bucket.recovered_offset(is_of_log=is_of_log) == 200, "its epoch is not known: the offset counts"
    assert [("snapshots/3" in each, "were cut" in each) for each in bucket.warnings] == [
        (False, True),
        (True, True),
    ]


def test_state_of_the_logs_own_history_is_kept(bucket: Bucket) -> None:
    with bucket.recover() as store:
        store.write([b"%06d" % i for i in range(300, 310)], [b"v"] * 10, [], 310, 5)
    asked = []

    def is_of_log(leader_epoch: int, offset: int) -> bool:
        asked.append((leader_epoch, offset))
        return True

    assert bucket.recovered_offset(is_of_log=is_of_log) == 310
    assert asked == [(5, 310)]
