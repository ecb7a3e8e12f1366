"""A ``MetadataStore`` in one SQLite file: the default of a single node.

Rules:

- ``commit`` returns after SQLite has synced its write-ahead log (``synchronous=FULL``).
- One process at a time: the file stays locked while it is open.
- A new file is made under another name, synced and renamed, so a file that exists is complete. One that is
  empty, torn or otherwise damaged is reported as ``CorruptData`` and left as it is, never made anew.
- Each row carries a CRC, because SQLite checks the structure of its pages and not their content.
- After a failed sync nothing more is read or written: what is on disk is unknown.

The table is a history, as in etcd: one row per key and revision, a deletion is a row without a value. The
newest row of a key is its state. Compaction deletes rows that only revisions before the kept ones could
see.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import zlib
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tidemill.control.stores.local import LocalStore, check_watchable, monotonic_ms
from tidemill.control.stores.store import Change, ChangeBatch, Entry, RevisionCompacted, StoredKeys, Txn
from tidemill.coordination.pools import Pools, thread_pool
from tidemill.errors import (
    CorruptData,
    DataDirectoryInUse,
    DiskFull,
    MetadataConflict,
    StorageError,
    SyncFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ("SCHEMA_VERSION", "SqliteStore")

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE entries (
    key TEXT NOT NULL,
    mod_revision INTEGER NOT NULL,
    value BLOB,
    lease_id INTEGER NOT NULL,
    crc INTEGER NOT NULL
);
CREATE UNIQUE INDEX entries_by_key ON entries (key, mod_revision);
CREATE INDEX entries_by_revision ON entries (mod_revision);
CREATE INDEX entries_by_lease ON entries (lease_id) WHERE lease_id != 0;
"""

_AFTER_ASCII = "\x7f"
_MEBIBYTE = 1024 * 1024

Result = TypeVar("Result")


class SqliteStore(LocalStore):
    """A ``MetadataStore`` in one SQLite file, which is created if it is not there.

    Opening is done in the caller (it takes a few milliseconds), every later call on one thread of its own.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        pools: Pools = thread_pool,
        *,
        history_revisions: int = 1_000,
        clock_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        super().__init__(_SqliteEngine(Path(path), history_revisions), clock_ms)
        self._executor = pools("metadata", 1)

    async def close(self) -> None:
        """Write the log back into the file and release both."""
        await super().close()
        self._executor.shutdown(wait=False)

    async def _run(self, work: Callable[[], Result]) -> Result:
        if self._closed:
            return self._guarded(work)
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._guarded, work)
        # The work goes on if the caller is cancelled, and then the watches must hear of it too.
        future.add_done_callback(lambda _: self._announce_news())
        return await asyncio.shield(future)


class _SqliteEngine:
    def __init__(self, path: Path, history_revisions: int) -> None:
        self._path = path
        self._history_revisions = history_revisions
        self._unusable: str | None = None
        #: Whether keys of an earlier process' store leases are left, because the disk was too full to delete.
        self._has_orphans = False
        with self._errors():
            if not path.exists():
                _create(path)
            elif path.stat().st_size == 0:
                raise self._corrupt("the metadata file is empty")
            self._db = _connect(path)
            try:
                self._check()
                try:
                    self._delete_orphans()
                except DiskFull:
                    self._has_orphans = True
            except BaseException:
                self._db.close()
                raise

    def read(self, prefix: str, revision: int | None) -> StoredKeys:
        with self._errors():
            at = self._revision if revision is None else revision
            if at < self._compacted:
                raise RevisionCompacted(
                    f"metadata revision {at} is gone; the oldest kept is {self._compacted}"
                )
            if at > self._revision:
                raise ValueError(f"metadata revision {at} does not exist yet; the newest is {self._revision}")
            # SQLite takes the other columns from the row that has the maximum.
            rows = self._db.execute(
                "SELECT key, max(mod_revision), value, lease_id, crc FROM entries"
                " WHERE key >= ? AND key < ? AND mod_revision <= ? GROUP BY key ORDER BY key",
                (prefix, prefix + _AFTER_ASCII, at),
            )
            entries: dict[str, Entry] = {}
            for key, mod_revision, value, lease_id, crc in rows:
                self._check_row(key, mod_revision, value, lease_id, crc)
                if value is not None:
                    entries[key] = Entry(value, mod_revision)
            return StoredKeys(at, entries)

    def commit(self, txn: Txn) -> int:
        # Compacts before the commit: a failure after it would report a durable commit as failed.
        self._compact_if_due()
        if self._has_orphans:
            self._delete_orphans()
            self._has_orphans = False
        with self._errors(), self._transaction():
            for compare in txn.compares:
                found = self._mod_revision(compare.key)
                if found != compare.mod_revision:
                    raise MetadataConflict(
                        f"metadata key {compare.key!r} is at revision {found}, not {compare.mod_revision};"
                        " read it again and retry"
                    )
            deleted = [key for key in txn.deletes if self._mod_revision(key)]
            revision = self._write(
                [
                    *((put.key, put.value, put.lease_id) for put in txn.puts),
                    *((key, None, 0) for key in deleted),
                ]
            )
        self._revision = revision
        return revision

    def history(self, from_revision: int, batches_max: int) -> Sequence[ChangeBatch]:
        if from_revision <= self._compacted:
            raise RevisionCompacted(
                f"the metadata history before revision {self._compacted + 1} is gone and a watch asked for"
                f" {from_revision}; read everything again and watch from there"
            )
        check_watchable(from_revision, self._revision)
        with self._errors():
            rows = self._db.execute(
                "SELECT mod_revision, key, value, lease_id, crc FROM entries"
                " WHERE mod_revision >= ? AND mod_revision < ? ORDER BY mod_revision, key",
                (from_revision, from_revision + batches_max),
            ).fetchall()
            for mod_revision, key, value, lease_id, crc in rows:
                self._check_row(key, mod_revision, value, lease_id, crc)
        return [
            ChangeBatch(revision, tuple(Change(row[1], row[2]) for row in group))
            for revision, group in groupby(rows, key=lambda row: int(row[0]))
        ]

    def compact(self, revision: int) -> None:
        if revision > self._revision:
            raise ValueError(
                f"metadata revision {revision} does not exist yet; the newest is {self._revision}"
            )
        if revision > self._compacted:
            self._compact(revision)

    def keys_of_lease(self, lease_id: int) -> Sequence[str]:
        with self._errors():
            rows = self._db.execute(
                "SELECT key FROM entries AS e WHERE lease_id = ? AND lease_id != 0 AND NOT EXISTS"
                " (SELECT 1 FROM entries WHERE key = e.key AND mod_revision > e.mod_revision) ORDER BY key",
                (lease_id,),
            )
            return [key for (key,) in rows]

    def delete_keys(self, keys: Sequence[str]) -> None:
        with self._errors(), self._transaction():
            revision = self._write([(key, None, 0) for key in keys])
        self._revision = revision

    def close(self) -> None:
        self._db.close()

    def _check(self) -> None:
        """Lock the file and check that it is whole; reads the revisions."""
        try:
            # Not quick_check: that does not find an index that has lost a key.
            (verdict,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
            if verdict != "ok":
                raise self._corrupt(f"the metadata file is damaged: {verdict}")
            meta = dict(self._db.execute("SELECT name, value FROM meta"))
            version, self._revision, self._compacted = (
                meta[name] for name in ("schema_version", "revision", "compacted_revision")
            )
        except (KeyError, sqlite3.OperationalError) as error:
            # A missing table or column is SQLITE_ERROR, text that is not UTF-8 has no code at all.
            if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) != sqlite3.SQLITE_ERROR:
                raise
            raise self._corrupt(f"the metadata file lacks what every metadata file has: {error}") from error
        if version > SCHEMA_VERSION:
            raise StorageError(
                f"{self._path} has metadata schema version {version}, this program knows up to"
                f" {SCHEMA_VERSION}; start the newer Tidemill that wrote it"
            )
        (newest,) = self._db.execute("SELECT coalesce(max(mod_revision), 0) FROM entries").fetchone()
        if newest > self._revision:
            raise self._corrupt(f"an entry has revision {newest}, past the store's own {self._revision}")

    def _delete_orphans(self) -> None:
        """Delete the keys that an earlier process had bound to store leases, which end with their process."""
        leases = [
            lease
            for (lease,) in self._db.execute("SELECT DISTINCT lease_id FROM entries WHERE lease_id != 0")
        ]
        keys = [key for lease_id in leases for key in self.keys_of_lease(lease_id)]
        if keys:
            self.delete_keys(keys)

    def _mod_revision(self, key: str) -> int:
        row = self._db.execute(
            "SELECT mod_revision, value IS NULL FROM entries WHERE key = ?"
            " ORDER BY mod_revision DESC LIMIT 1",
            (key,),
        ).fetchone()
        return 0 if row is None or row[1] else int(row[0])

    def _write(self, writes: Sequence[tuple[str, bytes | None, int]]) -> int:
        if not writes:
            return self._revision
        revision = self._revision + 1
        self._db.executemany(
            "INSERT INTO entries (key, mod_revision, value, lease_id, crc) VALUES (?, ?, ?, ?, ?)",
            [
                (key, revision, value, lease, _crc(key, revision, value, lease))
                for key, value, lease in writes
            ],
        )
        self._db.execute("UPDATE meta SET value = ? WHERE name = 'revision'", (revision,))
        return revision

    def _compact_if_due(self) -> None:
        # In strides, so that a commit costs the same whatever the length of the history.
        if self._revision - self._compacted < 2 * self._history_revisions:
            return
        self._compact(self._revision - self._history_revisions)

    def _compact(self, target: int) -> None:
        with self._errors(), self._transaction():
            self._db.execute(
                "DELETE FROM entries WHERE rowid IN (SELECT old.rowid FROM entries AS new JOIN entries AS old"
                " ON old.key = new.key AND old.mod_revision < new.mod_revision"
                " WHERE new.mod_revision > ? AND new.mod_revision <= ?)",
                (self._compacted, target),
            )
            self._db.execute("DELETE FROM entries WHERE mod_revision <= ? AND value IS NULL", (target,))
            self._db.execute("UPDATE meta SET value = ? WHERE name = 'compacted_revision'", (target,))
        self._compacted = target

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # SQLite has already rolled back by itself after some errors (a full disk, a failed write).
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _check_row(self, key: str, mod_revision: int, value: object, lease_id: int, crc: int) -> None:
        # A damaged record can also come back with other types than were stored.
        if not isinstance(value, bytes | None) or crc != _crc(key, mod_revision, value, lease_id):
            raise self._corrupt(f"the value of metadata key {key!r} at revision {mod_revision} fails its CRC")

    def _corrupt(self, what: str) -> CorruptData:
        return CorruptData(
            f"{what}; restore the file from a copy, it was left as it is", path=str(self._path), position=0
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn SQLite's errors into ours; notes those after which nothing of the file may be trusted."""
        if self._unusable is not None:
            raise StorageError(
                f"{self._path} is not used any more because of an earlier error: {self._unusable}"
            )
        try:
            yield
        except CorruptData as error:
            self._unusable = error.message
            raise
        except sqlite3.Error as error:
            failure = self._translate(error)
            if not isinstance(failure, (DiskFull, DataDirectoryInUse)):
                self._unusable = failure.message
            raise failure from error
        except OSError as error:
            raise StorageError(f"{self._path} cannot be used: {error}; check the data directory") from error

    def _translate(self, error: sqlite3.Error) -> StorageError:
        extended = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        match extended & 0xFF:
            case sqlite3.SQLITE_FULL:
                return DiskFull(f"no room to write {self._path}; free some space, nothing was changed")
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return DataDirectoryInUse(f"another process has {self._path} open; stop it first")
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return self._corrupt(f"the metadata file is damaged: {error}")
        if extended in (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC):
            return SyncFailed(f"syncing {self._path} failed ({error}); check the disk, then start again")
        return StorageError(f"{self._path} cannot be used: {error}; check the disk, then start again")


def _crc(key: str, mod_revision: int, value: bytes | None, lease_id: int) -> int:
    crc = zlib.crc32(f"{key} {mod_revision} {lease_id} {value is None}".encode())
    return zlib.crc32(value, crc) if value else crc


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    # Exclusive locking before the first access: no shared-memory file, and a second process is refused.
    db.execute("PRAGMA locking_mode=EXCLUSIVE")
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.execute(f"PRAGMA journal_size_limit={4 * _MEBIBYTE}")
    return db


def _create(path: Path) -> None:
    """Create a complete file under its name in one step, so that no crash leaves half of one."""
    if (log := path.with_name(path.name + "-wal")).exists():
        raise CorruptData(f"{path} is missing but its write-ahead log is there", path=str(log), position=0)
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    db = sqlite3.connect(draft, isolation_level=None)
    try:
        # No sync on the way: the finished file is synced below, before it gets its name.
        db.execute("PRAGMA synchronous=OFF")
        db.execute("PRAGMA journal_mode=MEMORY")
        db.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        rows = [("schema_version", SCHEMA_VERSION), ("revision", 0), ("compacted_revision", 0)]
        db.executemany("INSERT INTO meta (name, value) VALUES (?, ?)", rows)
    finally:
        db.close()
    _sync(draft)
    draft.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
