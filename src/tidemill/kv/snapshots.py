"""Durable snapshots of one bucket's state.

Names in the bucket's directory::

    snapshots/<id>/          a snapshot: table files, their list, and the manifest that has their checksums
    snapshots/tmp-<id>/      being made; worth nothing
    snapshots/removing-<id>/ being removed; worth nothing
    snapshots/last-id        the highest number ever given, once its snapshot was removed

- A snapshot comes and goes by a rename of its directory, once everything in it is durable: a crash leaves the
  set as it was before, or as it is after.
- Table files are hard links to those of the live state: a snapshot costs the space of what has changed since.
  It also means that damage to such a file is damage to both.
- A snapshot whose manifest does not check out, whose files are not all there, or that was spoilt, is never
  used and never removed by itself: ``broken`` reports it.
- A file may have been damaged before its snapshot was taken: then its checksum is that of the damage, and
  only a reader of the rows finds out. It then calls ``spoil``.
- Numbers only grow: a number never means two snapshots.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.errors import CorruptData, StorageError
from tidemill.kv.contract import TABLE_SUFFIX, KvStore
from tidemill.kv.files import Files
from tidemill.kv.manifest import (
    MANIFEST_NAME,
    MANIFEST_VERSION,
    FileEntry,
    Manifest,
    pack_manifest,
    unpack_manifest,
)

__all__ = ("DAMAGED_MARK", "BrokenSnapshot", "SnapshotInfo", "SnapshotStore")

_SNAPSHOTS = "snapshots"
_TEMPORARY = "tmp-"
_REMOVING = "removing-"
_LAST_ID = "last-id"
DAMAGED_MARK = "DAMAGED"
_RESTORING = ".restoring"
#: The bucket's directory, that of all buckets, and the data directory.
_FOLDERS_ABOVE = 3


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A snapshot that has all its files."""

    snapshot_id: int
    #: The log offset of the state: everything below it is in the snapshot.
    log_offset: int
    created_ms: int
    size_bytes: int
    path: Path
    identity: bytes = field(repr=False)
    files: tuple[FileEntry, ...] = field(repr=False)
    #: The leader epoch that wrote the last record below ``log_offset``; -1 if it is not known.
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class BrokenSnapshot:
    """A snapshot that is not used, and why."""

    path: Path
    reason: str


class SnapshotStore:
    """The snapshots below one directory. Thread-safe; changes take turns.

    Making the object touches no file, so that several may exist; only one of them may change anything.
    """

    def __init__(self, directory: str | Path, files: Files | None = None) -> None:
        self._directory = Path(directory) / _SNAPSHOTS
        self._files = files or Files()
        self._lock = threading.Lock()
        self._has_durable_names = False
        #: The log offset of the newest snapshot that this object has seen; None before it has seen one.
        self.newest_offset: int | None = None

    def create(self, store: KvStore, created_ms: int) -> SnapshotInfo:
        """Make a durable snapshot of the state as it is now.

        The store may be written to meanwhile. Its writers wait while the last of it is flushed and its files
        are linked (5 to 30 ms), not while most of it is flushed, checksums are worked out, and files synced.
        Python's lock is held for 2 to 5 ms.
        """
        with self._lock:
            snapshot_id = self._highest_id() + 1
            previous = self._scan()[0][-1:]
            temporary = self._directory / f"{_TEMPORARY}{snapshot_id}"
            target = self._directory / str(snapshot_id)
            try:
                self._files.make_directory(self._directory)
                self._make_names_durable()
                log_offset = store.checkpoint(temporary, self._files)
                entries = self._describe(temporary, previous[0] if previous else None)
                manifest = Manifest(
                    MANIFEST_VERSION,
                    snapshot_id,
                    store.identity.hex(),
                    log_offset,
                    created_ms,
                    entries,
                    # Of a store that was written to meanwhile it is that of a later record, or of none.
                    store.leader_epoch if store.applied_offset == log_offset else -1,
                )
                self._files.write(temporary / MANIFEST_NAME, pack_manifest(manifest))
                self._files.sync(temporary / MANIFEST_NAME)
                self._files.sync(temporary)
                self._files.rename(temporary, target)
            except StorageError:
                with contextlib.suppress(StorageError):
                    self._files.remove_tree(temporary)
                raise
            self._files.sync(self._directory)
            self.newest_offset = max(log_offset, self.newest_offset or 0)
            return _info(target, manifest)

    def working_directory(self, name: str) -> Path:
        """A directory for state on its way to a snapshot; ``clean`` removes what a crash leaves of it."""
        return self._directory / f"{_TEMPORARY}{name}"

    def _make_names_durable(self) -> None:
        """Sync the names of the directories above, once: else a power loss takes them with all snapshots."""
        if not self._has_durable_names:
            for folder in self._directory.parents[:_FOLDERS_ABOVE]:
                self._files.sync(folder)
            self._has_durable_names = True

    def list(self) -> tuple[SnapshotInfo, ...]:
        """The snapshots that have all their files, newest state last. Checks sizes, not checksums."""
        return self._scan()[0]

    def broken(self) -> tuple[BrokenSnapshot, ...]:
        """The snapshots that ``list`` leaves out."""
        return self._scan()[1]

    def verify(self, info: SnapshotInfo) -> None:
        """Read every file of a snapshot and compare its checksum; ``CorruptData`` names the first bad one."""
        for entry in info.files:
            path = info.path / entry.name
            self._check_size(path, entry)
            crc, size = self._files.checksum(path)
            if (crc, size) != (entry.crc32c, entry.size_bytes):
                raise CorruptData(
                    f"file {entry.name} of snapshot {info.snapshot_id} does not have its checksum any more",
                    path=str(path),
                    position=0,
                )

    def restore(self, info: SnapshotInfo, target: str | Path) -> None:
        """Verify a snapshot and put a database with its state at ``target``, where nothing may be yet."""
        target = Path(target)
        if self._files.stat(target) is not None:
            raise StorageError(f"cannot restore a snapshot to {target}: it exists; move it away first")
        self.verify(info)
        temporary = target.with_name(target.name + _RESTORING)
        self._files.remove_tree(temporary)
        self._files.make_directory(temporary)
        for entry in info.files:
            source, copy = info.path / entry.name, temporary / entry.name
            # RocksDB never changes a table file, but goes on writing to the others.
            if entry.name.endswith(TABLE_SUFFIX):
                is_there = self._files.link(source, copy)
            else:
                content = self._files.read(source)
                is_there = content is not None
                self._files.write(copy, content or b"")
                self._files.sync(copy)
            if not is_there:
                raise CorruptData("a file of the snapshot is lost", path=str(source), position=0)
        self._files.sync(temporary)
        self._files.rename(temporary, target)
        self._files.sync(target.parent)

    def spoil(self, path: str | Path) -> tuple[int, ...]:
        """Never use again the snapshots that share a file of the live state in which damage was found.

        If ``path`` is no table file, those that share any of the directory's. Returns their numbers.
        """
        path = Path(path)
        damaged = self._identities([path] if path.suffix == TABLE_SUFFIX else self._table_files(path))
        spoilt = []
        with self._lock:
            for info in self._scan()[0]:
                if damaged & self._identities(self._table_files(info.path)):
                    self._files.write(info.path / DAMAGED_MARK, b"")
                    self._files.sync(info.path)
                    spoilt.append(info.snapshot_id)
            self._scan()
        return tuple(spoilt)

    def _identities(self, paths: Iterable[Path]) -> set[tuple[int, int]]:
        """The identities of those files that exist."""
        return {found[0] for found in map(self._files.stat, paths) if found is not None}

    def _table_files(self, directory: Path) -> Sequence[Path]:
        return [directory / name for name in self._files.names(directory) if name.endswith(TABLE_SUFFIX)]

    def remove(self, snapshot_id: int) -> None:
        """Remove a snapshot, whole or broken."""
        with self._lock:
            self._remove(snapshot_id)

    def prune(self, keep: int, leased: AbstractSet[int]) -> tuple[int, ...]:
        """Remove all but the newest ``keep`` and the leased ones; broken ones neither count nor go.

        Returns the numbers of those that were removed.
        """
        assert keep > 0
        with self._lock:
            old = [info.snapshot_id for info in self._scan()[0][:-keep] if info.snapshot_id not in leased]
            for snapshot_id in old:
                self._remove(snapshot_id)
            return tuple(old)

    def clean(self) -> None:
        """Remove what a crash has left half made or half removed. Call it before anything is made."""
        with self._lock:
            for name in self._files.names(self._directory):
                if name.startswith((_TEMPORARY, _REMOVING)):
                    self._files.remove_tree(self._directory / name)

    def _scan(self) -> tuple[tuple[SnapshotInfo, ...], tuple[BrokenSnapshot, ...]]:
        whole: list[SnapshotInfo] = []
        broken: list[BrokenSnapshot] = []
        for snapshot_id in sorted(_numbers(self._files.names(self._directory))):
            path = self._directory / str(snapshot_id)
            try:
                whole.append(self._load(path, snapshot_id))
            except StorageError as error:
                broken.append(BrokenSnapshot(path, error.message))
        # A snapshot that was rebuilt for a lease has a new number and an old offset.
        whole.sort(key=lambda info: (info.log_offset, info.snapshot_id))
        self.newest_offset = whole[-1].log_offset if whole else None
        return tuple(whole), tuple(broken)

    def _load(self, path: Path, snapshot_id: int) -> SnapshotInfo:
        data = self._files.read(path / MANIFEST_NAME)
        if data is None:
            raise CorruptData(
                "the manifest of the snapshot is lost", path=str(path / MANIFEST_NAME), position=0
            )
        manifest = unpack_manifest(data, str(path / MANIFEST_NAME))
        if manifest.snapshot_id != snapshot_id:
            raise CorruptData(
                f"the manifest is of snapshot {manifest.snapshot_id}",
                path=str(path / MANIFEST_NAME),
                position=0,
            )
        if self._files.stat(path / DAMAGED_MARK) is not None:
            raise CorruptData(
                "rows were read from a file of the snapshot that do not check out", path=str(path), position=0
            )
        for entry in manifest.files:
            self._check_size(path / entry.name, entry)
        return _info(path, manifest)

    def _check_size(self, path: Path, entry: FileEntry) -> None:
        found = self._files.stat(path)
        if found is None:
            raise CorruptData(f"file {entry.name} of the snapshot is lost", path=str(path), position=0)
        if found[1] != entry.size_bytes:
            raise CorruptData(
                f"file {entry.name} of the snapshot has {found[1]} bytes and should have {entry.size_bytes}",
                path=str(path),
                position=min(found[1], entry.size_bytes),
            )

    def _describe(self, directory: Path, previous: SnapshotInfo | None) -> tuple[FileEntry, ...]:
        """Sync all files; gives their entries. Files of the previous snapshot are not read again."""
        known = {} if previous is None else {entry.name: entry for entry in previous.files}
        entries: list[FileEntry] = []
        for name in self._files.names(directory):
            path = directory / name
            entry = known.get(name)
            # After a restore RocksDB may give an old name to a new file, so the name alone proves nothing.
            if (
                entry is None
                or previous is None
                or self._files.stat(path) != self._files.stat(previous.path / name)
            ):
                crc, size = self._files.checksum(path)
                entry = FileEntry(name, size, crc)
                self._files.sync(path)
            entries.append(entry)
        return tuple(entries)

    def _highest_id(self) -> int:
        names = [name.removeprefix(_REMOVING) for name in self._files.names(self._directory)]
        noted = (self._files.read(self._directory / _LAST_ID) or b"").decode("ascii", "replace")
        return max([0, *_numbers([*names, noted])])

    def _remove(self, snapshot_id: int) -> None:
        path = self._directory / str(snapshot_id)
        if self._files.stat(path) is None:
            raise StorageError(f"there is no snapshot {snapshot_id} in {self._directory}")
        if snapshot_id == self._highest_id():
            self._note_last_id(snapshot_id)
        removing = self._directory / f"{_REMOVING}{snapshot_id}"
        self._files.remove_tree(removing)
        self._files.rename(path, removing)
        # Durable before the first file goes, or a crash could bring back a part of it.
        self._files.sync(self._directory)
        self._files.remove_tree(removing)

    def _note_last_id(self, snapshot_id: int) -> None:
        temporary = self._directory / f"{_TEMPORARY}{_LAST_ID}"
        self._files.write(temporary, str(snapshot_id).encode())
        self._files.sync(temporary)
        self._files.rename(temporary, self._directory / _LAST_ID)
        self._files.sync(self._directory)


def _numbers(names: Iterable[str]) -> Iterator[int]:
    """The names that are numbers of snapshots."""
    return (int(name) for name in names if name.isascii() and name.isdigit() and str(int(name)) == name)


def _info(path: Path, manifest: Manifest) -> SnapshotInfo:
    return SnapshotInfo(
        manifest.snapshot_id,
        manifest.log_offset,
        manifest.created_ms,
        sum(entry.size_bytes for entry in manifest.files),
        path,
        bytes.fromhex(manifest.identity),
        manifest.files,
        manifest.leader_epoch,
    )
