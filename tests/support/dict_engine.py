"""The state of tables in dictionaries, on the simulated disk: an engine for whole nodes in virtual time.

It keeps what RocksDB promises without its write-ahead log, and no more: a write is in memory with its offset
or not at all, and on disk after a flush. A flush happens when it is asked for, when the store is closed, and
now and then after a write. So a crash takes the state back to some earlier offset, or takes all of it, and
never leaves a part of a write. Reads stop before their limits now and then. All chance comes from one
``random.Random``.

Files of a store, all rows in one of them::

    CURRENT      the name of the table file; empty before the first flush
    <n>.sst      a checksum, then identity, offset and rows

``SimFiles`` is the disk as snapshots and recovery see it: those run as they are.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Self

import msgspec
from crc32c import crc32c

from support.faulty_storage import FaultyStorage
from tidemill.errors import CorruptData, DiskFull, StorageError
from tidemill.kv.contract import TABLE_SUFFIX, KvExtent, KvRows, KvValues
from tidemill.kv.files import Files

__all__ = ("DictEngine", "DictStore", "DictView", "SimFiles")

_CURRENT = "CURRENT"
_CHECKSUM_BYTES = 4


class SimFiles(Files):
    """The files of a ``FaultyStorage``, which stands for the directory ``root``."""

    def __init__(self, storage: FaultyStorage, root: Path = Path("sim")) -> None:
        self._storage = storage
        self._root = root

    def _name(self, path: Path) -> str:
        name = path.relative_to(self._root).as_posix()
        return "" if name == "." else name

    def names(self, directory: Path) -> list[str]:
        return self._storage.list_dir(self._name(directory))

    def make_directory(self, directory: Path) -> None:
        self._storage.make_dir(self._name(directory))

    def read(self, path: Path) -> bytes | None:
        name = self._name(path)
        return self._storage.read_file(name) if self._storage.exists(name) else None

    def write(self, path: Path, data: bytes) -> None:
        file = self._storage.open(self._name(path), create=True)
        file.truncate(0)
        file.write(0, [data])
        file.close()

    def link(self, source: Path, target: Path) -> bool:
        if not self._storage.exists(self._name(source)):
            return False
        self._storage.link(self._name(source), self._name(target))
        return True

    def rename(self, source: Path, target: Path) -> None:
        self._storage.rename(self._name(source), self._name(target))

    def remove(self, path: Path) -> None:
        name = self._name(path)
        if self._storage.exists(name):
            self._storage.remove(name)

    def remove_tree(self, directory: Path) -> None:
        self._storage.remove_tree(self._name(directory))

    def sync(self, path: Path) -> None:
        name = self._name(path)
        if self._storage.is_dir(name):
            self._storage.sync_dir(name)
        else:
            file = self._storage.open(name)
            file.sync()
            file.close()

    def stat(self, path: Path) -> tuple[tuple[int, int], int] | None:
        name = self._name(path)
        if not self._storage.exists(name):
            return None
        return (0, self._storage.file_number(name)), len(self._storage.read_file(name))

    def checksum(self, path: Path) -> tuple[int, int]:
        data = self._storage.read_file(self._name(path))
        return crc32c(data), len(data)


class DictView:
    """Implements ``KvView``: rows of one moment."""

    def __init__(
        self, rows: dict[bytes, bytes], applied_offset: int, stops_early: Callable[[], bool], path: Path
    ) -> None:
        self.applied_offset = applied_offset
        self._rows = rows
        self._keys = sorted(rows)
        self._stops_early = stops_early
        self._path = path
        self._closed = False

    def read(self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int) -> KvRows:
        keys, _, next_start, _ = self._slice(start, end, max_bytes, max_rows, at_least_one=True)
        return KvRows(keys, [self._rows[key] for key in keys], next_start)

    def read_values(self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int) -> KvValues:
        keys, size, next_start, _ = self._slice(start, end, max_bytes, max_rows, at_least_one=True)
        return KvValues([self._rows[key] for key in keys], size, next_start)

    def measure(
        self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int, *, at_least_one: bool
    ) -> KvExtent:
        keys, size, next_start, is_full = self._slice(
            start, end, max_bytes, max_rows, at_least_one=at_least_one
        )
        return KvExtent(len(keys), size, next_start, is_full)

    def _slice(
        self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int, *, at_least_one: bool
    ) -> tuple[list[bytes], int, bytes | None, bool]:
        """Keys, their bytes with values, where to go on, and whether the limits were what stopped it."""
        if self._closed:
            raise StorageError(f"a view of {self._path} was closed; take another one")
        first = bisect_left(self._keys, start)
        behind = len(self._keys) if end is None else bisect_left(self._keys, end)
        size, taken = 0, list[bytes]()
        for key in self._keys[first:behind]:
            grown = size + len(key) + len(self._rows[key])
            is_full = len(taken) == max_rows or (grown > max_bytes and not at_least_one)
            if is_full or (taken and self._stops_early()):
                return taken, size, key, is_full
            size, at_least_one = grown, False
            taken.append(key)
        return taken, size, None, False

    def close(self) -> None:
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DictStore:
    """Implements ``KvStore``."""

    def __init__(self, engine: DictEngine, path: Path, identity: bytes) -> None:
        self.path = path
        self.identity = identity
        self.applied_offset = 0
        self.leader_epoch = -1
        self.was_created = False
        self.is_closed = False
        self._engine = engine
        self._rows: dict[bytes, bytes] = {}
        self._views: list[DictView] = []
        self._flushed_offset = -1
        #: Why a flush that nobody waited for has failed: nothing is written after it.
        self._failure: StorageError | None = None

    def load(self, first_offset: int) -> None:
        """Take what is on disk, or begin with nothing."""
        files = self._engine.files
        table = _table_name(files, self.path)
        if table is None:
            files.make_directory(self.path)
            files.write(self.path / _CURRENT, b"")
            files.sync(self.path / _CURRENT)
            files.sync(self.path)
        if not table:
            self.applied_offset, self.was_created = first_offset, True
            return
        found, self.applied_offset, self.leader_epoch, self._rows = _read_table(files, self.path / table)
        self._flushed_offset = self.applied_offset
        _check_identity(found, self.identity, self.path)

    def write(
        self,
        puts_keys: Collection[bytes],
        puts_values: Collection[bytes],
        deletes: Collection[bytes],
        applied_offset: int,
        leader_epoch: int = -1,
    ) -> None:
        self._check_open()
        assert applied_offset >= self.applied_offset, "the applied offset never goes back"
        if self._failure is not None:
            raise self._failure
        self._rows.update(zip(puts_keys, puts_values, strict=True))
        for key in deletes:
            self._rows.pop(key, None)
        self.applied_offset, self.leader_epoch = applied_offset, leader_epoch
        if self._engine.flushes_now():
            try:
                self.flush()
            except StorageError as error:
                self._failure = error

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self._check_open()
        return [self._rows.get(key) for key in keys]

    def view(self) -> DictView:
        self._check_open()
        view = DictView(dict(self._rows), self.applied_offset, self._engine.stops_early, self.path)
        self._views.append(view)
        return view

    def count_estimate(self) -> int:
        self._check_open()
        return len(self._rows)

    def size_bytes(self) -> int:
        self._check_open()
        return sum(len(key) + len(value) for key, value in self._rows.items())

    def flush(self) -> None:
        self._check_open()
        if self._failure is not None:
            raise self._failure
        if self._flushed_offset == self.applied_offset:
            return
        files = self._engine.files
        tables = [name for name in files.names(self.path) if name.endswith(TABLE_SUFFIX)]
        number = max((int(name.removesuffix(TABLE_SUFFIX)) for name in tables), default=0) + 1
        table = f"{number:06d}{TABLE_SUFFIX}"
        packed = _pack_table(self.identity, self.applied_offset, self.leader_epoch, self._rows)
        files.write(self.path / table, packed)
        files.sync(self.path / table)
        temporary = self.path / f"{_CURRENT}.tmp"
        files.write(temporary, table.encode())
        files.sync(temporary)
        # Before the name: else it could name a file that is not there.
        files.sync(self.path)
        files.rename(temporary, self.path / _CURRENT)
        files.sync(self.path)
        self._flushed_offset = self.applied_offset
        for name in tables:
            files.remove(self.path / name)

    def checkpoint(self, path: Path, files: Files) -> int:
        self.flush()
        table = _table_name(files, self.path)
        files.remove_tree(path)
        files.make_directory(path)
        files.write(path / _CURRENT, (table or "").encode())
        if table:
            files.link(self.path / table, path / table)
        return self.applied_offset

    def close(self) -> None:
        if self.is_closed:
            return
        try:
            self.flush()
        finally:
            self.is_closed = True
            for view in self._views:
                view.close()
            self._engine.closed(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.is_closed:
            raise StorageError(f"the store {self.path} is closed; open it again")


class DictEngine:
    """Implements ``KvEngine``. ``flush_share`` of the writes are followed by a flush."""

    def __init__(
        self,
        storage: FaultyStorage,
        rng: random.Random,
        give_up_reserve: Callable[[DiskFull], bool] = lambda error: False,
        *,
        flush_share: float = 0.1,
        early_share: float = 0.02,
    ) -> None:
        self.files = SimFiles(storage)
        self.compactions_paused = False
        self.give_up_reserve = give_up_reserve
        self._rng = rng
        self._flush_share = flush_share
        self._early_share = early_share
        self._open: set[Path] = set()

    def flushes_now(self) -> bool:
        return self._rng.random() < self._flush_share

    def stops_early(self) -> bool:
        return self._rng.random() < self._early_share

    def closed(self, path: Path) -> None:
        self._open.discard(path)

    def open(self, path: Path, identity: bytes, *, first_offset: int = 0) -> DictStore:
        if path in self._open:
            raise StorageError(f"cannot open {path}: it is open already")
        store = DictStore(self, path, identity)
        store.load(first_offset)
        self._open.add(path)
        return store

    def open_read_only(self, path: Path, identity: bytes | None = None) -> DictView:
        table = _table_name(self.files, path)
        if not table:
            raise StorageError(f"{path} has no state")
        found, applied_offset, _, rows = _read_table(self.files, path / table)
        if identity is not None:
            _check_identity(found, identity, path)
        return DictView(rows, applied_offset, self.stops_early, path)

    def tell_stores_of_pause(self) -> None:
        """There are no compactions."""


def _table_name(files: Files, path: Path) -> str | None:
    """What ``CURRENT`` says; None if there is no store."""
    current = files.read(path / _CURRENT)
    if current is not None:
        return current.decode()
    if any(name.endswith(TABLE_SUFFIX) for name in files.names(path)):
        raise CorruptData("the store has lost the file CURRENT", path=str(path), position=0)
    return None


def _pack_table(identity: bytes, applied_offset: int, leader_epoch: int, rows: dict[bytes, bytes]) -> bytes:
    body = msgspec.msgpack.encode((identity, applied_offset, leader_epoch, rows))
    return crc32c(body).to_bytes(_CHECKSUM_BYTES, "big") + body


def _read_table(files: Files, path: Path) -> tuple[bytes, int, int, dict[bytes, bytes]]:
    data = files.read(path)
    if data is None:
        raise CorruptData("a table file is lost", path=str(path), position=0)
    body = data[_CHECKSUM_BYTES:]
    if int.from_bytes(data[:_CHECKSUM_BYTES], "big") != crc32c(body):
        raise CorruptData("a table file does not fit its checksum", path=str(path), position=0)
    return msgspec.msgpack.decode(body, type=tuple[bytes, int, int, dict[bytes, bytes]])


def _check_identity(found: bytes, wanted: bytes, path: Path) -> None:
    if found != wanted:
        raise CorruptData(f"the state is of {found!r}, not of {wanted!r}", path=str(path), position=0)
