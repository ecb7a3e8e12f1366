"""A store keeps what was written, says how far it got, and refuses what is damaged, foreign or closed."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rocksdict import Rdict

from tidemill.errors import CorruptData, DiskFull, StorageError
from tidemill.kv.contract import WriteStalled
from tidemill.kv.rocks import opening
from tidemill.kv.rocks import store as store_module
from tidemill.kv.rocks.resources import RocksResources
from tidemill.kv.rocks.store import RocksStore, open_read_only
from tidemill.kv.rocks.view import RocksView

ID = b"table 1, bucket 0"


def rows(view: RocksView) -> dict[bytes, bytes]:
    """All rows, read in one go or in several."""
    found: dict[bytes, bytes] = {}
    start: bytes | None = b""
    while start is not None:
        piece = view.read(start, None, 1 << 20, 1000)
        found.update(zip(piece.keys, piece.values, strict=True))
        start = piece.next_start
    return found


def content(store: RocksStore) -> dict[bytes, bytes]:
    with store.view() as view:
        return rows(view)


def test_what_was_written_is_found(tmp_path: Path, resources: RocksResources) -> None:
    with RocksStore.open(tmp_path / "live", resources, ID) as store:
        store.write([b"a", b"", b"\x00\xff"], [b"1", b"2", b""], [], 3)
        store.write([b"a", b"c"], [b"3", b"4"], [b"", b"never there", b"c"], 7)
        assert store.get_many([b"a", b"", b"b", b"c", b"\x00\xff"]) == [b"3", None, None, None, b""]
        assert content(store) == {b"a": b"3", b"\x00\xff": b""}
        assert store.applied_offset == 7
        assert store.get_many([]) == []


def test_threads_open_one_at_a_time(
    tmp_path: Path, resources: RocksResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_alone: list[bool] = []

    def watched(*args: Any) -> Any:
        was_alone.append(opening._opening.locked())
        return Rdict(*args)

    monkeypatch.setattr(opening, "Rdict", watched)
    RocksStore.open(tmp_path / "live", resources, ID).close()
    open_read_only(tmp_path / "live", resources, ID).close()
    assert was_alone == [True, True]
    assert not opening._opening.locked()


def test_a_new_database_is_made_before_rocksdict_opens_it(
    tmp_path: Path, resources: RocksResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []

    def watched(path: str, *args: Any) -> Any:
        found.append(sorted(os.listdir(path)))
        return Rdict(path, *args)

    monkeypatch.setattr(opening, "Rdict", watched)
    with RocksStore.open(tmp_path / "live", resources, ID) as store:
        store.write([b"k"], [b"v"], [], 9)
    assert found == [["CURRENT", "IDENTITY", "MANIFEST-000001"]]
    with RocksStore.open(tmp_path / "live", resources, ID) as store:
        assert content(store) == {b"k": b"v"}


@pytest.mark.parametrize("step", range(4))
def test_a_database_whose_making_was_interrupted_is_made_anew(
    step: int, tmp_path: Path, resources: RocksResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, synced = os.fsync, list[int]()

    def interrupted(descriptor: int) -> None:
        if len(synced) == step:
            raise OSError(errno.ENOSPC, "no space left on device")
        synced.append(descriptor)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(DiskFull):
        RocksStore.open(tmp_path / "live", resources, ID)
    monkeypatch.setattr(os, "fsync", fsync)
    with RocksStore.open(tmp_path / "live", resources, ID, first_offset=5) as store:
        assert (store.was_created, store.applied_offset) == (True, 5)


def test_state_and_offset_are_there_after_a_restart(tmp_path: Path, resources: RocksResources) -> None:
    with RocksStore.open(tmp_path / "live", resources, ID, first_offset=5) as store:
        assert store.was_created
        assert store.applied_offset == 5
        store.write([b"k"], [b"v"], [], 9)
    with RocksStore.open(tmp_path / "live", resources, ID, first_offset=77) as store:
        assert not store.was_created
        assert (store.applied_offset, store.identity) == (9, ID)
        assert content(store) == {b"k": b"v"}


def test_nothing_is_written_to_a_write_ahead_log(tmp_path: Path, resources: RocksResources) -> None:
    with RocksStore.open(tmp_path / "live", resources, ID) as store:
        store.write([b"k"] * 10, [bytes(100_000)] * 10, [], 1)
        assert [path.stat().st_size for path in (tmp_path / "live").glob("*.log")] == [0]


def test_an_offset_never_goes_back(tmp_path: Path, resources: RocksResources) -> None:
    with RocksStore.open(tmp_path / "live", resources, ID) as store:
        store.write([], [], [], 9)
        store.write([b"k"], [b"v"], [], 9)
        with pytest.raises(AssertionError):
            store.write([], [], [], 8)
        with pytest.raises(ValueError, match="shorter"):
            store.write([b"k", b"l"], [b"v"], [], 10)
        assert store.applied_offset == 9


def test_sizes_follow_what_is_written(tmp_path: Path, resources: RocksResources) -> None:
    with RocksStore.open(tmp_path / "live", resources, ID) as store:
        store.write([b"%d" % i for i in range(1000)], [os.urandom(100)] * 1000, [], 1000)
        assert 900 < store.count_estimate() < 1100
        assert store.size_bytes() > 100_000
        store.flush()
        assert 10_000 < store.size_bytes() < 1_000_000


def test_a_database_of_another_identity_is_not_opened(tmp_path: Path, resources: RocksResources) -> None:
    RocksStore.open(tmp_path / "live", resources, ID).close()
    with pytest.raises(CorruptData, match=r"bucket 0.*not of b'another'"):
        RocksStore.open(tmp_path / "live", resources, b"another")
    RocksStore.open(tmp_path / "live", resources, ID).close()


def test_a_store_is_opened_once_at_a_time(tmp_path: Path, resources: RocksResources) -> None:
    with (
        RocksStore.open(tmp_path / "live", resources, ID),
        pytest.raises(StorageError, match="it is open") as caught,
    ):
        RocksStore.open(tmp_path / "live", resources, ID)
    assert not isinstance(caught.value, CorruptData)


def test_a_newer_format_is_refused(
    tmp_path: Path, resources: RocksResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "FORMAT_VERSION", 2)
    RocksStore.open(tmp_path / "live", resources, ID).close()
    monkeypatch.undo()
    with pytest.raises(StorageError, match="run the version that wrote it") as caught:
        RocksStore.open(tmp_path / "live", resources, ID)
    assert not isinstance(caught.value, CorruptData)


def test_after_close_every_call_is_an_error_and_never_a_crash(
    tmp_path: Path, resources: RocksResources
) -> None:
    store = RocksStore.open(tmp_path / "live", resources, ID)
    store.write([b"k"], [b"v"], [], 1)
    view = store.view()
    store.close()
    store.close()
    assert store.is_closed
    calls: list[Callable[[], Any]] = [
        lambda: store.write([b"k"], [b"v"], [], 2),
        lambda: store.get_many([b"k"]),
        store.view,
        store.count_estimate,
        store.size_bytes,
        store.flush,
        lambda: store.checkpoint(tmp_path / "copy"),
        lambda: view.read(b"", None, 100, 100),
    ]
    for call in calls:
        with pytest.raises(StorageError, match="closed"):
            call()
    assert store.memtable_bytes() == 0
    store.start_flush()
    assert store.applied_offset == 1


def test_open_views_do_not_keep_a_closed_store_open(tmp_path: Path, resources: RocksResources) -> None:
    store = RocksStore.open(tmp_path / "live", resources, ID)
    store.write([b"k"], [b"v"], [], 1)
    views = [store.view() for _ in range(3)]
    assert rows(views[0]) == {b"k": b"v"}
    store.close()
    RocksStore.open(tmp_path / "live", resources, ID).close()
    for view in views:
        with pytest.raises(StorageError, match="closed"):
            view.read(b"", None, 100, 100)
        view.close()


def test_closing_waits_for_calls_under_way_and_refuses_new_ones(
    tmp_path: Path, resources: RocksResources
) -> None:
    store = RocksStore.open(tmp_path / "live", resources, ID)
    closer = threading.Thread(target=store.close)
    with store._gate:
        closer.start()
        closer.join(0.2)
        assert closer.is_alive()
        assert store.is_closed
        with pytest.raises(StorageError, match="closed"):
            store.get_many([b"x"])
        assert store._database.get(b"x") is None, "the database was closed under a call"
    closer.join()


def test_readers_in_other_threads_see_the_end_of_a_store_as_an_error(
    tmp_path: Path, resources: RocksResources
) -> None:
    store = RocksStore.open(tmp_path / "live", resources, ID)
    keys = [b"%06d" % i for i in range(2000)]
    store.write(keys, keys, [], 1)
    reading, outcomes = threading.Barrier(5), list[str]()

    def read_until_closed(number: int) -> None:
        view = store.view()
        reading.wait()
        try:
            while True:
                if number % 2:
                    assert len(rows(view)) == 2000
                else:
                    assert store.get_many(keys) == keys
        except StorageError as error:
            outcomes.append(error.message)

    threads = [threading.Thread(target=read_until_closed, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    reading.wait()
    store.close()
    RocksStore.open(tmp_path / "live", resources, ID).close()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4
    assert all("closed" in outcome for outcome in outcomes)


def _flip(path: Path, position: int) -> None:
    # In a new file: the old one may have other names.
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.unlink()
    path.write_bytes(data)


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink()


def _damaged(directory: Path, resources: RocksResources) -> Path:
    live = directory / "live"
    with RocksStore.open(live, resources, ID) as store:
        store.write([b"%06d" % i for i in range(2000)], [os.urandom(50) for _ in range(2000)], [], 2000)
    return live


DAMAGE: dict[str, Callable[[Path], object]] = {
    "table file cut": lambda live: os.truncate(next(live.glob("*.sst")), 1000),
    "table file lost": lambda live: next(live.glob("*.sst")).unlink(),
    "footer flipped": lambda live: _flip(next(live.glob("*.sst")), -20),
    "list flipped": lambda live: _flip(next(live.glob("MANIFEST-*")), 40),
    "list cut": lambda live: os.truncate(next(live.glob("MANIFEST-*")), 60),
    "list lost": lambda live: next(live.glob("MANIFEST-*")).unlink(),
    "CURRENT emptied": lambda live: os.truncate(live / "CURRENT", 0),
    "CURRENT garbled": lambda live: (live / "CURRENT").write_bytes(b"garbage\n"),
    "CURRENT lost": lambda live: _remove(live / "CURRENT"),
    "CURRENT lost in a restored one": lambda live: _remove(live / "CURRENT", *live.glob("*.log")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_database_is_not_opened(damage: str, tmp_path: Path, resources: RocksResources) -> None:
    live = _damaged(tmp_path, resources)
    DAMAGE[damage](live)
    before = sorted(live.glob("*.sst"))
    with pytest.raises(CorruptData, match=str(live)):
        RocksStore.open(live, resources, ID)
    assert sorted(live.glob("*.sst")) == before


def test_damaged_rows_are_found_when_they_are_read_and_never_passed_over(
    tmp_path: Path, resources: RocksResources
) -> None:
    live = _damaged(tmp_path, resources)
    table = next(live.glob("*.sst"))
    _flip(table, 40_000)
    store = RocksStore.open(live, resources, ID)
    with pytest.raises(CorruptData, match="checksum") as while_scanning:
        content(store)
    assert while_scanning.value.path == str(table)
    assert 0 < while_scanning.value.position <= 40_000
    with pytest.raises(CorruptData, match="checksum"):
        store.get_many([b"%06d" % i for i in range(2000)])
    store.close()
    # The error, with its traceback, is still held: it must not hold the database.
    RocksStore.open(live, resources, ID).close()
    assert while_scanning.tb is not None


def test_rows_without_metadata_are_damage(
    tmp_path: Path, resources: RocksResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RocksStore.open(tmp_path / "live", resources, ID) as store:
        store.write([b"k"], [b"v"], [], 1)
    for name, expected in (("FORMAT_KEY", "some of the metadata"), ("everything", "rows, but no metadata")):
        for key in ("FORMAT_KEY", "IDENTITY_KEY", "APPLIED_KEY") if name == "everything" else (name,):
            monkeypatch.setattr(store_module, key, b"\x00elsewhere")
        with pytest.raises(CorruptData, match=expected):
            RocksStore.open(tmp_path / "live", resources, ID)
        monkeypatch.undo()


KILLED = """
import sys
from tidemill.kv.contract import WriteStalled
from tidemill.kv.rocks.resources import RocksResources
from tidemill.kv.rocks.store import RocksStore
resources = RocksResources(block_cache_bytes=1 << 20, write_buffer_bytes=8 << 20, store_buffer_bytes=64 << 10)
store = RocksStore.open(sys.argv[1], resources, b"id")
number = 0
while True:
    # Write number n puts key n and removes key n / 2, if n is even.
    keys = [b"%08d-%02d" % (number, part) for part in range(20)]
    gone = [] if number % 2 else [b"%08d-%02d" % (number // 2, part) for part in range(20)]
    try:
        store.write(keys, [b"%d" % number * 20] * 20, gone, number + 1)
    except WriteStalled:
        continue
    number += 1
    if number % 500 == 0:
        print(number, flush=True)
"""


@pytest.mark.parametrize("reports", [3, 7])
def test_after_a_kill_there_is_a_prefix_of_the_writes(
    tmp_path: Path, resources: RocksResources, reports: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "live")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(reports):
        assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with RocksStore.open(tmp_path / "live", resources, b"id") as store:
        reached = store.applied_offset
        assert reached > 0, "nothing was flushed: the test shows nothing"
        expected = {number: b"%d" % number * 20 for number in range(reached)}
        for number in range(0, reached, 2):
            if number:
                del expected[number // 2]
        # The first write removes what it puts.
        expected.pop(0, None)
        assert content(store) == {
            b"%08d-%02d" % (number, part): value for number, value in expected.items() for part in range(20)
        }


def test_a_write_in_a_stall_is_refused_at_once_and_writes_nothing(
    tmp_path: Path, small_resources: RocksResources
) -> None:
    store = RocksStore.open(tmp_path / "live", small_resources, ID)
    # Without background work memtables are never flushed, and soon there is no room for another.
    store._database.cancel_all_background(True)
    written = 0

    def write_until_refused() -> None:
        nonlocal written
        while True:
            store.write([b"%d" % written], [os.urandom(4000)], [], written + 1)
            written += 1

    with pytest.raises(WriteStalled):
        write_until_refused()
    assert 0 < store.applied_offset == written
    last, refused = store.get_many([b"%d" % (written - 1), b"%d" % written])
    assert last is not None
    assert refused is None
    with contextlib.suppress(StorageError):
        store.close()


def test_a_copy_is_read_while_the_original_moves_on(tmp_path: Path, resources: RocksResources) -> None:
    with RocksStore.open(tmp_path / "live", resources, ID) as store:
        store.write([b"a", b"b"], [b"1", b"2"], [], 2)
        assert store.checkpoint(tmp_path / "copy") == 2
        store.write([b"a"], [b"3"], [b"b"], 4)
        with (
            open_read_only(tmp_path / "copy", resources, ID) as copy,
            open_read_only(tmp_path / "copy", resources) as twin,
        ):
            for reader in (copy, twin):
                assert (reader.applied_offset, reader.identity) == (2, ID)
                assert reader.get_many([b"b", b"c", b"a"]) == [b"2", None, b"1"]
                assert reader.read(b"", b"b", 100, 100).values == [b"1"]
                assert reader.read(b"b", None, 100, 100).keys == [b"b"]
            with pytest.raises(CorruptData, match="another"):
                open_read_only(tmp_path / "copy", resources, b"another")
        assert content(store) == {b"a": b"3"}
    with pytest.raises(StorageError, match="closed"):
        copy.read(b"", None, 100, 100)
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert not any(name.endswith(".log") for name in names), "there is a write-ahead log"


def test_reading_what_is_not_there_makes_nothing(tmp_path: Path, resources: RocksResources) -> None:
    with pytest.raises(StorageError, match="no database"):
        open_read_only(tmp_path / "missing", resources)
    assert not (tmp_path / "missing").exists()
