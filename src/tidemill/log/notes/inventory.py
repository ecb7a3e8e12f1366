"""The list of partitions that have files in a data directory, kept apart from those files.

A partition without files is either one that was never written to, or one whose files are gone. The list
tells the two apart, so that lost data is never taken for an empty log. It is one text file,
``partition-inventory``, with a line per change::

    <CRC-32C> + <offset> <directory>   it has files; offsets below <offset> may have been given out
    <CRC-32C> - <directory>            its files were removed on purpose

The order of writes is the safeguard: directory and checkpoint are durable before a line is written, and the
line is durable before anything in the partition is acknowledged. So a line whose checkpoint is not there is
damage, and files without a line are what a crash leaves: ``Replicas.take_inventory`` adds them at the start.

Offsets are noted ahead in large steps. They let a repair start a lost partition again without giving the
offset of a lost record to another one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator

from tidemill.errors import DiskFull, StorageError, SyncFailed
from tidemill.log.storage import Storage, StorageFile, write_atomic
from tidemill.records.checksum import crc32c

__all__ = ("INVENTORY_NAME", "OFFSETS_AHEAD", "Inventory")

INVENTORY_NAME = "partition-inventory"
#: How far ahead of the log's end offsets are noted.
OFFSETS_AHEAD = 2**20
#: The file is written anew at a start if it has this many more lines than partitions.
_STALE_LINES_MAX = 1_000

logger = logging.getLogger(__name__)


class Inventory:
    """The partitions that have files below one storage's root. Safe to use from several threads."""

    def __init__(self, storage: Storage, *, read_only: bool = False) -> None:
        """Read the list. Raises ``StorageError`` if it cannot be read."""
        self._storage = storage
        self._read_only = read_only
        self._file: StorageFile | None = None
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        #: Parent directory → name → offset below which offsets may have been given out.
        self._entries: dict[str, dict[str, int]] = {}
        #: Whether there was a list: a data directory of an older release has none.
        self.existed = storage.exists(INVENTORY_NAME)
        #: How many writes to the file there were, and how many are durable. Its first content counts as a
        #: write: it may be the unsynced work of a process that was killed.
        self._written = 1 if self.existed else 0
        self._synced = 0
        self._is_name_durable = False
        self._failure: SyncFailed | None = None
        #: Whether there may be bytes behind the last whole line.
        self._has_tail = self.existed
        self._end_position = self._read() if self.existed else 0

    def __contains__(self, directory: str) -> bool:
        return self.listed_below(directory) > 0

    def __iter__(self) -> Iterator[str]:
        """The directories, by parent."""
        with self._lock:
            found = [f"{parent}/{name}" for parent, names in self._entries.items() for name in names]
        return iter(found)

    def listed_below(self, directory: str) -> int:
        """Offsets below this one may have been given out; 0 if the partition is not in the list."""
        parent, _, name = directory.rpartition("/")
        return self._entries.get(parent, {}).get(name, 0)

    def add(self, bounds: Iterable[tuple[str, int]]) -> None:
        """Note partitions, each with the offset below which offsets may have been given out.

        Their directories and checkpoints must be durable. The note is durable after ``sync``. Raises
        ``DiskFull`` if there is no space, and then nothing was noted.
        """
        noted = list(bounds)
        with self._lock:
            self._append([f"+ {bound} {directory}" for directory, bound in noted])
            for directory, bound in noted:
                parent, _, name = directory.rpartition("/")
                self._entries.setdefault(parent, {})[name] = bound

    def remove(self, parent: str, name_start: str) -> None:
        """Forget the partitions in ``parent`` whose names start with ``name_start``: their files are deleted.

        Not synced: a line that comes back after a crash is of a topic that the metadata has forgotten.
        """
        with self._lock:
            names = self._entries.get(parent, {})
            gone = [name for name in names if name.startswith(name_start)]
            for name in gone:
                del names[name]
            if not names:
                self._entries.pop(parent, None)
            try:
                self._append([f"- {parent}/{name}" for name in gone])
            except DiskFull:
                logger.info(
                    "%s still lists %s/%s…; the next start corrects it", INVENTORY_NAME, parent, name_start
                )

    def remove_one(self, directory: str) -> None:
        """Forget one partition, whose files are deleted; durable after ``sync``.

        It may get files again. Raises ``DiskFull`` if there is no space, and then nothing was noted.
        """
        parent, _, name = directory.rpartition("/")
        with self._lock:
            names = self._entries.get(parent, {})
            if name in names:
                self._append([f"- {directory}"])
                del names[name]
                if not names:
                    del self._entries[parent]

    def sync(self) -> None:
        """Make everything that was added durable; several callers share one sync."""
        wanted = self._written
        with self._sync_lock:
            if self._synced >= wanted:
                return
            if self._failure is not None:
                raise self._failure
            with self._lock:
                reached, file = self._written, self._opened()
            try:
                if not self._is_name_durable:
                    self._storage.sync_dir("")
                    self._is_name_durable = True
                file.sync()
            except SyncFailed as error:
                self._failure = error
                raise
            self._synced = reached

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    # --- the file

    def _append(self, lines: list[str]) -> None:
        if not lines:
            return
        file, data = self._opened(), _pack(lines)
        if self._has_tail:
            file.truncate(self._end_position)
        self._has_tail = True
        file.write(self._end_position, [data])
        self._has_tail = False
        self._end_position += len(data)
        self._written += 1

    def _opened(self) -> StorageFile:
        if self._file is None:
            self._file = self._storage.open(INVENTORY_NAME, create=True)
        return self._file

    def _read(self) -> int:
        """Read all lines; returns the position of the next one."""
        position, lines = 0, 0
        unreadable: list[int] = []
        data = self._read_bytes()
        for line in data.splitlines(keepends=True):
            if not self._fold(line):
                unreadable.append(position)
            lines += 1
            position += len(line)
        damaged = [start for start in unreadable if data.find(b"\n", start) + 1 not in (0, len(data))]
        if damaged:
            # A torn last line is left out of the warning: any crash can leave one.
            logger.warning(
                "%s: %d lines do not check out, the first one at byte %d; what has files is listed anew",
                INVENTORY_NAME,
                len(damaged),
                damaged[0],
            )
        if self._read_only:
            return position
        if unreadable or lines > sum(map(len, self._entries.values())) + _STALE_LINES_MAX:
            try:
                return self._rewrite()
            except DiskFull:
                logger.info("%s is tidied up when there is room", INVENTORY_NAME)
        return data.rfind(b"\n") + 1

    def _read_bytes(self) -> bytes:
        try:
            return self._storage.read_file(INVENTORY_NAME)
        except StorageError as error:
            raise StorageError(
                f"{error.message}; it lists the partitions that have files: restore it from a backup, or "
                "move it away, and it is made anew from what is there"
            ) from error

    def _fold(self, line: bytes) -> bool:
        crc, _, text = line.partition(b" ")
        if not text.endswith(b"\n") or crc != b"%08x" % crc32c(text[:-1]):
            return False
        kind, _, rest = text[:-1].decode().partition(" ")
        bound, directory = ("0", rest) if kind == "-" else rest.split(" ", 1)
        parent, _, name = directory.rpartition("/")
        if kind == "+":
            self._entries.setdefault(parent, {})[name] = int(bound)
        else:
            self._entries.get(parent, {}).pop(name, None)
        return True

    def _rewrite(self) -> int:
        data = _pack(
            f"+ {bound} {parent}/{name}"
            for parent, names in self._entries.items()
            for name, bound in names.items()
        )
        write_atomic(self._storage, INVENTORY_NAME, data)
        return len(data)


def _pack(lines: Iterable[str]) -> bytes:
    texts = [line.encode() for line in lines]
    return b"".join(b"%08x %b\n" % (crc32c(text), text) for text in texts)
