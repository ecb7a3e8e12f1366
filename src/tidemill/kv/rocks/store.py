"""One bucket's state in RocksDB: written in atomic batches, read by key or through views.

- Every write carries the log offset that the state has reached with it. There is no write-ahead log: after a
  crash the store has a prefix of the writes, and ``applied_offset`` says which one. The log has the rest.
- A store belongs to one identity (table, bucket, …, in bytes that only the caller understands); a database of
  another identity is not opened.
- Blocking code for threads. Opening and writing hold Python's lock: about 1 ms and five syncs to open, so
  threads open one at a time, with a pause (``opening``); about 1 µs per row to write, so a batch has at most
  ``BATCH_ROWS_MAX`` rows. Lookups and flushes do not hold it.
- After ``close``, or while it waits, every call is a ``StorageError``.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

from rocksdict import AccessType, WriteBatch

from tidemill.errors import CorruptData, DiskFull, StorageError
from tidemill.kv.contract import KvExtent, KvRows, KvValues
from tidemill.kv.files import Files
from tidemill.kv.rocks.copying import copy_database, keep_only
from tidemill.kv.rocks.faults import RocksTranslated
from tidemill.kv.rocks.gate import Gate
from tidemill.kv.rocks.keyspace import (
    APPLIED_KEY,
    EPOCH_KEY,
    FORMAT_KEY,
    FORMAT_VERSION,
    IDENTITY_KEY,
    STATE_PREFIX,
    pack_offset,
    unpack_offset,
)
from tidemill.kv.rocks.opening import has_database, make_database, open_database
from tidemill.kv.rocks.resources import RocksResources
from tidemill.kv.rocks.view import RocksView

__all__ = ("BATCH_ROWS_MAX", "RocksReader", "RocksStore", "open_read_only")

#: The most rows that callers should put into one write.
BATCH_ROWS_MAX = 2_000

_UNKNOWN_EPOCH = -1
#: The fewest that RocksDB allows: a copy is only inspected, so its files need not be kept open.
_COPY_OPEN_FILES = 20


class _Database:
    """An open RocksDB database and its views. The base of the store and of the reader."""

    def __init__(self, database: Any, path: str, resources: RocksResources) -> None:
        self.path = path
        self._database = database
        self._resources = resources
        self._gate = Gate(path)
        self._views: weakref.WeakSet[RocksView] = weakref.WeakSet()
        self._views_lock = threading.Lock()
        self._reading = RocksTranslated("read", path)
        self._applied_offset = 0
        self._leader_epoch = _UNKNOWN_EPOCH
        self.identity = b""

    @property
    def applied_offset(self) -> int:
        """The log offset that the state has reached: everything below it is in the state."""
        return self._applied_offset

    @property
    def leader_epoch(self) -> int:
        """The leader epoch that wrote the last record below ``applied_offset``; -1 if it is not known."""
        return self._leader_epoch

    @property
    def is_closed(self) -> bool:
        return self._gate.is_closed

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, None where there is none. Does not hold Python's lock while it reads."""
        with self._gate, self._reading:
            values: list[bytes | None] = self._database.get([STATE_PREFIX + key for key in keys])
            return values

    def view(self) -> RocksView:
        """A view of the state as it is now. Cheap, waits for no writer, pins memory until it is closed."""
        with self._gate:
            view = RocksView(
                lambda: self._database.iter(self._resources.scan_options()),
                self._gate,
                self.path,
                self._forget_view,
            )
            with self._views_lock:
                self._views.add(view)
            return view

    def count_estimate(self) -> int:
        """About how many keys the state has; some that were overwritten or deleted may still count."""
        return self._number("estimate-num-keys")

    def size_bytes(self) -> int:
        """Size of the files of the present state, and of what is not in files yet."""
        return self._number("live-sst-files-size") + self._number("cur-size-all-mem-tables")

    def close(self) -> None:
        """Wait for calls under way, close the views, flush, and close the database. Closing twice is fine."""
        if not self._gate.close():
            return
        with self._views_lock:
            views = list(self._views)
        for view in views:
            view.drop()
        with RocksTranslated("close", self.path):
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget_view(self, view: RocksView) -> None:
        with self._views_lock:
            self._views.discard(view)

    def _number(self, name: str) -> int:
        with self._gate, self._reading:
            return self._database.property_int_value(f"rocksdb.{name}") or 0

    def _load(self, identity: bytes | None) -> bool:
        """Read the metadata and check the identity. False if the database is new and has no metadata."""
        with self._reading:
            stored: list[bytes | None] = self._database.get(
                [FORMAT_KEY, IDENTITY_KEY, APPLIED_KEY, EPOCH_KEY]
            )
        version, found, applied, epoch = stored
        if version is None and found is None and applied is None:
            if self._first_key() is not None:
                raise CorruptData("there are rows, but no metadata", path=self.path, position=0)
            return False
        if version is None or found is None or applied is None:
            raise CorruptData("some of the metadata is missing", path=self.path, position=0)
        if version != pack_offset(FORMAT_VERSION):
            raise StorageError(
                f"{self.path} has the state in format {version.hex()}, this version knows {FORMAT_VERSION}; "
                "run the version that wrote it, or remove the directory to have it built again"
            )
        if identity is not None and found != identity:
            raise CorruptData(f"the state is of {found!r}, not of {identity!r}", path=self.path, position=0)
        self.identity = found
        try:
            self._applied_offset = unpack_offset(applied)
            self._leader_epoch = _UNKNOWN_EPOCH if epoch is None else unpack_offset(epoch)
        except ValueError as error:
            raise CorruptData(f"no applied offset: {error}", path=self.path, position=0) from error
        return True

    def _first_key(self) -> bytes | None:
        with self._reading:
            iterator = self._database.iter(self._resources.scan_options())
            try:
                iterator.seek_to_first()
                key: bytes | None = iterator.key()
                iterator.status()
                return key
            finally:
                # An error keeps this frame alive, and with it the iterator, which would keep the database
                # open.
                iterator = None


class RocksStore(_Database):
    """The live state of a bucket. One thread writes at a time (others wait), any number read."""

    def __init__(self, database: Any, path: str, resources: RocksResources) -> None:
        super().__init__(database, path, resources)
        self._write_lock = threading.Lock()
        self._writing = RocksTranslated("write to", path)
        #: Whether ``open`` made an empty state because there was none.
        self.was_created = False

    @classmethod
    def open(
        cls, path: str | Path, resources: RocksResources, identity: bytes, *, first_offset: int = 0
    ) -> RocksStore:
        """Open a database, or make an empty one whose applied offset is ``first_offset``.

        ``CorruptData`` if it is damaged or of another identity.
        """
        try:
            return cls._open(str(path), resources, identity, first_offset)
        except DiskFull as error:
            if not resources.give_up_reserve(error):
                raise
            return cls._open(str(path), resources, identity, first_offset)

    @classmethod
    def _open(cls, path: str, resources: RocksResources, identity: bytes, first_offset: int) -> RocksStore:
        with RocksTranslated("open", path):
            if not has_database(Path(path)):
                make_database(Path(path))
            database = open_database(path, resources.options(), AccessType.read_write())
            database.set_write_options(resources.write_options())
        store = cls(database, path, resources)
        try:
            if not store._load(identity):
                store._create(identity, first_offset)
        except BaseException:
            with contextlib.suppress(StorageError):
                store.close()
            raise
        resources.add(store)
        return store

    def write(
        self,
        puts_keys: Collection[bytes],
        puts_values: Collection[bytes],
        deletes: Collection[bytes],
        applied_offset: int,
        leader_epoch: int = _UNKNOWN_EPOCH,
    ) -> None:
        """Put, then delete, and set ``applied_offset`` and ``leader_epoch``: all of it or nothing.

        Durable after the next ``flush``; before that a crash may take it back, and everything after it.
        ``WriteStalled`` if RocksDB takes no writes now.
        """
        with self._gate, self._write_lock, self._writing:
            assert applied_offset >= self._applied_offset, "the applied offset never goes back"
            batch = WriteBatch(raw_mode=True)
            put, delete = batch.put, batch.delete
            for key, value in zip(puts_keys, puts_values, strict=True):
                put(STATE_PREFIX + key, value)
            for key in deletes:
                delete(STATE_PREFIX + key)
            put(APPLIED_KEY, pack_offset(applied_offset))
            if leader_epoch != self._leader_epoch:
                put(EPOCH_KEY, pack_offset(leader_epoch))
            self._database.write(batch)
            self._applied_offset, self._leader_epoch = applied_offset, leader_epoch
        self._resources.relieve()

    def flush(self) -> None:
        """Make everything written so far durable. Does not hold Python's lock."""
        with self._gate, RocksTranslated("flush", self.path):
            self._database.flush(True)

    def checkpoint(self, path: str | Path, files: Files | None = None) -> int:
        """Flush, and put a copy of the present state at ``path``, made of hard links. Returns its offset.

        Writers wait while what they wrote during the first flush is flushed, and files are linked. Python's
        lock is held for 2 to 5 ms of that, to open the copy once. The copy is not synced.
        """
        files = files or Files()
        with self._gate, RocksTranslated("copy", self.path):
            self._database.flush(True)
            with self._write_lock:
                self._database.flush(True)
                names = copy_database(Path(self.path), Path(path), files, self._inspect_copy)
                offset = self._applied_offset
            keep_only(Path(path), names, files)
            return offset

    def close(self) -> None:
        self._resources.remove(self)
        super().close()

    def memtable_bytes(self) -> int:
        """The size of the memtable that takes the writes; 0 if the store is closed."""
        try:
            return self._number("cur-size-active-mem-table")
        except StorageError:
            return 0

    def start_flush(self) -> None:
        """Start to flush in the background. Raises nothing: the caller may be another store's writer."""
        with contextlib.suppress(StorageError), self._gate, RocksTranslated("flush", self.path):
            self._database.flush(False)

    def pause_compactions(self, paused: bool) -> None:
        """Pause compactions, or resume them. Does nothing for a store that is closed or has failed."""
        with contextlib.suppress(StorageError), self._gate, RocksTranslated("set up", self.path):
            self._database.set_options({"disable_auto_compactions": str(paused).lower()})

    def _inspect_copy(self, path: Path) -> frozenset[str]:
        with open_read_only(path, self._resources, self.identity, open_files=_COPY_OPEN_FILES) as copy:
            if copy.applied_offset != self._applied_offset:
                raise CorruptData(
                    f"the copy is at offset {copy.applied_offset}, the state at {self._applied_offset}",
                    path=str(path),
                    position=0,
                )
            return copy.table_files()

    def _create(self, identity: bytes, first_offset: int) -> None:
        batch = WriteBatch(raw_mode=True)
        batch.put(FORMAT_KEY, pack_offset(FORMAT_VERSION))
        batch.put(IDENTITY_KEY, identity)
        batch.put(APPLIED_KEY, pack_offset(first_offset))
        with self._writing:
            self._database.write(batch)
        self.identity, self._applied_offset, self.was_created = identity, first_offset, True


class RocksReader(_Database):
    """The state in a directory that nobody writes to, such as a snapshot's."""

    _view: RocksView

    def read(self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int) -> KvRows:
        """``RocksView.read`` of the reader's own view. Threads take turns, unless each takes a ``view``."""
        return self._view.read(start, end, max_bytes, max_rows)

    def read_values(self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int) -> KvValues:
        """``RocksView.read_values`` of the reader's own view."""
        return self._view.read_values(start, end, max_bytes, max_rows)

    def measure(
        self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int, *, at_least_one: bool
    ) -> KvExtent:
        """``RocksView.measure`` of the reader's own view."""
        return self._view.measure(start, end, max_bytes, max_rows, at_least_one=at_least_one)

    def table_files(self) -> frozenset[str]:
        """The names of the files that hold the rows."""
        with self._gate, self._reading:
            return frozenset(entry["name"].lstrip("/") for entry in self._database.live_files())

    def _load(self, identity: bytes | None) -> bool:
        if not super()._load(identity):
            raise CorruptData("there is no metadata", path=self.path, position=0)
        self._view = self.view()
        return True


def open_read_only(
    path: str | Path,
    resources: RocksResources,
    identity: bytes | None = None,
    *,
    open_files: int | None = None,
) -> RocksReader:
    """Open the database in a directory for reading only; several may be open at once.

    The directory must not go away before the reader is closed. rocksdict leaves a file of its own in it.
    """
    try:
        return _open_read_only(str(path), resources, identity, open_files)
    except DiskFull as error:
        if not resources.give_up_reserve(error):
            raise
        return _open_read_only(str(path), resources, identity, open_files)


def _open_read_only(
    path: str, resources: RocksResources, identity: bytes | None, open_files: int | None
) -> RocksReader:
    with RocksTranslated("open", path):
        if not has_database(Path(path)):
            raise StorageError(f"{path} has no database")
        options = resources.options(open_files=open_files)
        database = open_database(path, options, AccessType.read_only(False))
    reader = RocksReader(database, path, resources)
    try:
        reader._load(identity)
    except BaseException:
        with contextlib.suppress(StorageError):
            reader.close()
        raise
    return reader
