from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from tidemill.control.stores.sqlite import SCHEMA_VERSION, SqliteStore, _SqliteEngine
from tidemill.control.stores.store import Change, Put, Txn
from tidemill.errors import CorruptData, DataDirectoryInUse, DiskFull, StorageError

if TYPE_CHECKING:
    from pathlib import Path

WRITER = """
import asyncio, sys
from tidemill.control.stores.sqlite import SqliteStore
from tidemill.control.stores.store import Put, Txn

async def main():
    store = SqliteStore(sys.argv[1])
    revision = (await store.read()).revision
    while True:
        value = str(revision + 1).encode()
        revision = await store.commit(Txn(puts=(Put(f"k{revision + 1}", value), Put("last", value))))
        print(revision, flush=True)

asyncio.run(main())
"""


async def commit(store: SqliteStore, **values: bytes) -> int:
    return await store.commit(Txn(puts=tuple(Put(key, value) for key, value in values.items())))


def database(store: SqliteStore) -> sqlite3.Connection:
    engine = store._engine
    assert isinstance(engine, _SqliteEngine)
    return engine._db


async def filled(path: Path) -> None:
    store = SqliteStore(path)
    for i in range(50):
        await commit(store, **{f"key{i}": b"some value " * 20})
    await store.close()


def kill_after(path: Path, acknowledgements: int) -> int:
    """Run the writer, kill -9 it after so many acknowledgements; gives the last revision it acknowledged."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = 0
    for _ in range(acknowledgements):
        acknowledged = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    rest = writer.stdout.read().split("\n")
    writer.stdout.close()
    assert writer.wait() == -signal.SIGKILL
    # What follows the last line break may be half a line.
    return max([acknowledged, *map(int, filter(None, rest[:-1]))])


async def test_every_acknowledged_commit_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    for acknowledgements in (1, 40, 150):
        acknowledged = kill_after(path, acknowledgements)
        store = SqliteStore(path)
        snapshot = await store.read()
        await store.close()
        assert snapshot.revision >= acknowledged
        expected = {f"k{r}": str(r).encode() for r in range(1, snapshot.revision + 1)}
        found = {key: entry.value for key, entry in snapshot.entries.items()}
        assert found.pop("last") == str(snapshot.revision).encode()
        assert found == expected


async def test_a_commit_is_synced_before_it_is_acknowledged(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "metadata.db")
    (synchronous,) = database(store).execute("PRAGMA synchronous").fetchone()
    (journal,) = database(store).execute("PRAGMA journal_mode").fetchone()
    await store.close()
    assert (synchronous, journal) == (2, "wal")


async def test_a_second_user_of_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    store = SqliteStore(path)
    with pytest.raises(DataDirectoryInUse, match=r"metadata\.db"):
        SqliteStore(path)
    await commit(store, a=b"the first goes on")
    await store.close()
    await SqliteStore(path).close()


@pytest.mark.parametrize("damage", ["empty", "truncated", "header", "not a database", "no tables"])
async def test_a_damaged_file_is_reported_and_left_as_it_is(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "metadata.db"
    await filled(path)
    whole = path.read_bytes()
    if damage == "no tables":
        path.unlink()
        other = sqlite3.connect(path)
        other.execute("CREATE TABLE something (a)")
        other.close()
    else:
        path.write_bytes(
            {
                "empty": b"",
                "truncated": whole[: len(whole) // 2],
                "header": os.urandom(100) + whole[100:],
                "not a database": b"hello " * 1000,
            }[damage]
        )
    damaged = path.read_bytes()
    with pytest.raises(CorruptData, match=r"metadata\.db"):
        SqliteStore(path)
    if damage != "no tables":  # opening any SQLite file marks its header for the write-ahead log
        assert path.read_bytes() == damaged


async def test_a_flipped_bit_anywhere_is_reported_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    await filled(path)
    whole = path.read_bytes()
    store = SqliteStore(path)
    expected = await store.read()
    await store.close()
    reported = 0
    for position in range(100, len(whole), len(whole) // 150):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        try:
            store = SqliteStore(path)
        except StorageError:
            reported += 1
            continue
        try:
            assert await store.read() == expected
        except StorageError:
            reported += 1
        finally:
            await store.close()
        (tmp_path / "metadata.db-wal").unlink(missing_ok=True)
    assert reported > 20


async def test_a_key_that_only_its_index_lost_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    await filled(path)
    whole = path.read_bytes()
    places = [i for i in range(len(whole)) if whole.startswith(b"key17", i)]
    assert len(places) == 2, "once in the table and once in the index"
    for place in places:
        path.write_bytes(whole[: place + 4] + b"\x59" + whole[place + 5 :])
        with pytest.raises(CorruptData, match="damaged"):
            SqliteStore(path)


async def test_keys_bound_to_a_lease_of_an_earlier_process_are_deleted_as_a_change(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    store = SqliteStore(path)
    lease = await store.grant_lease(1_000_000)
    revision = await store.commit(Txn(puts=(Put("mine", b"", lease), Put("all", b""))))
    await store.close()
    store = SqliteStore(path)
    assert set((await store.read()).entries) == {"all"}
    watch = store.watch(revision + 1)
    assert (await anext(watch)).changes == (Change("mine", None),)
    await watch.aclose()
    await store.close()


async def test_the_file_holds_no_more_than_the_state_and_the_kept_history(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "metadata.db", history_revisions=10)
    for i in range(100):
        await store.commit(Txn(puts=(Put(f"k{i}", b""), Put("same", b""))))
        await store.commit(Txn(deletes=(f"k{i}",)))
    (rows,) = database(store).execute("SELECT count(*) FROM entries").fetchone()
    await store.close()
    assert rows < 50


async def test_a_watch_hears_of_a_commit_whose_caller_was_cancelled(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "metadata.db")
    entered, go_on = threading.Event(), threading.Event()
    commit_now = store._engine.commit

    def slow_commit(txn: Txn) -> int:
        entered.set()
        go_on.wait(120)
        return commit_now(txn)

    store._engine.commit = slow_commit  # type: ignore[method-assign]  # A commit that a test can hold.
    watch = store.watch(1)
    heard = asyncio.create_task(anext(watch))
    for _ in range(3):
        # The store does one thing after the other: the watch has found nothing and waits.
        await store.read()
    caller = asyncio.create_task(commit(store, a=b"1"))
    assert await asyncio.to_thread(entered.wait, 120)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    go_on.set()
    async with asyncio.timeout(120):
        assert (await heard).changes == (Change("a", b"1"),)
    await watch.aclose()
    await store.close()


async def test_a_changed_value_fails_its_crc_and_the_store_stops(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    await filled(path)
    db = sqlite3.connect(path)
    db.execute("UPDATE entries SET value = 'other' WHERE key = 'key7'")
    db.commit()
    db.close()
    store = SqliteStore(path)
    with pytest.raises(CorruptData, match="'key7'"):
        await store.read()
    with pytest.raises(StorageError, match="earlier error"):
        await commit(store, a=b"")


async def test_a_missing_file_with_a_write_ahead_log_is_not_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    (tmp_path / "metadata.db-wal").write_bytes(b"committed transactions")
    with pytest.raises(CorruptData, match="missing"):
        SqliteStore(path)
    assert not path.exists()


async def test_a_crash_while_the_file_is_made_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    path.with_name("metadata.db.new").write_bytes(b"half a file")
    store = SqliteStore(path)
    await commit(store, a=b"1")
    await store.close()


async def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    await filled(path)
    db = sqlite3.connect(path)
    db.execute("UPDATE meta SET value = ? WHERE name = 'schema_version'", (SCHEMA_VERSION + 1,))
    db.commit()
    db.close()
    with pytest.raises(StorageError, match="newer Tidemill"):
        SqliteStore(path)


async def test_a_full_disk_fails_the_commit_and_later_commits_work(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "metadata.db")
    db = database(store)
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count={pages + 2}")
    revision = await commit(store, a=b"1")
    with pytest.raises(DiskFull, match="nothing was changed"):
        await commit(store, b=bytes(100_000))
    assert (await store.read()).revision == revision
    db.execute("PRAGMA max_page_count=1000000")
    assert await commit(store, b=bytes(100_000)) == revision + 1
    await store.close()


async def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        SqliteStore(tmp_path / "nowhere" / "metadata.db")
