"""All file access of the log, behind one small protocol.

The log never calls ``open`` or ``os`` itself, so that tests can put a disk under it that loses, tears and
reorders whatever was not synced. The rules that every implementation keeps:

- a write is visible to reads at once, and durable only after ``sync`` of its file returned;
- a created, renamed or removed name is durable only after ``sync_dir`` of its directory returned;
- a failed write may leave part of its bytes behind: the caller truncates;
- ``DiskFull`` means "no room", ``TooManyFiles`` "no file can be opened now", ``SyncFailed`` "durability
  unknown", ``StorageError`` anything else.

Paths are relative to the storage's root and use ``/``.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from tidemill.errors import DiskFull, StorageError, SyncFailed, TooManyFiles

__all__ = ("Buffer", "LocalStorage", "Storage", "StorageFile", "write_atomic")

Buffer = bytes | bytearray | memoryview

_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
#: One system call takes at most this many buffers (IOV_MAX is 1024 on Linux).
_BUFFERS_MAX = 512


class StorageFile(Protocol):
    """An open file, read and written at explicit positions."""

    @property
    def path(self) -> str: ...

    def size(self) -> int: ...

    def read(self, position: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``position``; fewer at the end of the file."""
        ...

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        """Write all buffers, one behind the other."""
        ...

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """Make everything written so far durable. May run in another thread than the writes."""
        ...

    def close(self) -> None: ...


class Storage(Protocol):
    """A directory tree with the files of logs."""

    def open(self, path: str, *, create: bool = False) -> StorageFile: ...

    def read_file(self, path: str) -> bytes: ...

    def exists(self, path: str) -> bool: ...

    def list_dir(self, path: str) -> list[str]:
        """Names in a directory, sorted; empty if there is no such directory."""
        ...

    def make_dir(self, path: str) -> None:
        """Create a directory and its parents; fine if it exists."""
        ...

    def rename(self, old: str, new: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def remove_tree(self, path: str) -> None: ...

    def sync_dir(self, path: str) -> None: ...


def write_atomic(storage: Storage, path: str, data: bytes) -> None:
    """Replace a small file so that a crash leaves the old one or the new one; durable on return."""
    temporary = f"{path}.tmp"
    file = storage.open(temporary, create=True)
    try:
        file.truncate(0)
        file.write(0, [data])
        file.sync()
    finally:
        file.close()
    storage.rename(temporary, path)
    storage.sync_dir(path.rpartition("/")[0])


class _Fail(Protocol):
    """Raises the storage error for an error of the operating system."""

    def __call__(self, action: str, path: str, error: OSError) -> NoReturn: ...


class LocalFile:
    """The ``StorageFile`` over a file of the operating system."""

    def __init__(self, path: str, descriptor: int, fail: _Fail) -> None:
        self._path = path
        self._descriptor = descriptor
        self._fail = fail

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, position: int, size: int) -> bytes:
        try:
            return os.pread(self._descriptor, size, position)
        except OSError as error:
            self._fail("read", self._path, error)

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        try:
            for start in range(0, len(buffers), _BUFFERS_MAX):
                position = self._write_group(position, buffers[start : start + _BUFFERS_MAX])
        except OSError as error:
            self._fail("write", self._path, error)

    def _write_group(self, position: int, buffers: Sequence[Buffer]) -> int:
        total = sum(len(buffer) for buffer in buffers)
        written = os.pwritev(self._descriptor, buffers, position)
        if written != total:
            # A short write: the rest goes out joined, which is rare enough to afford the copy.
            rest = memoryview(b"".join(buffers))[written:]
            while rest:
                count = os.pwrite(self._descriptor, rest, position + total - len(rest))
                rest = rest[count:]
        return position + total

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            self._fail("truncate", self._path, error)

    def sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise SyncFailed(f"fsync of {self._path} failed: {error.strerror}") from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LocalStorage:
    """The ``Storage`` over the real disk, below one root directory."""

    def __init__(self, root: str | Path, on_full: Callable[[DiskFull], None] | None = None) -> None:
        """``on_full`` is called for every write that finds no space, from any thread."""
        self._root = str(root)
        self._on_full = on_full

    def _full(self, path: str) -> str:
        return os.path.join(self._root, path) if path else self._root

    def open(self, path: str, *, create: bool = False) -> LocalFile:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            return LocalFile(path, os.open(self._full(path), flags, 0o644), self._fail)
        except OSError as error:
            self._fail("open", path, error)

    def read_file(self, path: str) -> bytes:
        try:
            with open(self._full(path), "rb") as file:
                return file.read()
        except OSError as error:
            self._fail("read", path, error)

    def exists(self, path: str) -> bool:
        return os.path.exists(self._full(path))

    def list_dir(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._full(path)))
        except FileNotFoundError:
            return []
        except OSError as error:
            self._fail("list", path, error)

    def make_dir(self, path: str) -> None:
        try:
            os.makedirs(self._full(path), exist_ok=True)
        except OSError as error:
            self._fail("create the directory", path, error)

    def rename(self, old: str, new: str) -> None:
        try:
            os.rename(self._full(old), self._full(new))
        except OSError as error:
            self._fail(f"rename to {new}", old, error)

    def remove(self, path: str) -> None:
        try:
            os.unlink(self._full(path))
        except OSError as error:
            self._fail("remove", path, error)

    def remove_tree(self, path: str) -> None:
        try:
            shutil.rmtree(self._full(path))
        except FileNotFoundError:
            return
        except OSError as error:
            self._fail("remove", path, error)

    def sync_dir(self, path: str) -> None:
        try:
            descriptor = os.open(self._full(path), os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                raise _too_many_files("sync the directory", path, error) from error
            raise SyncFailed(f"fsync of directory {path} failed: {error.strerror}") from error
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise SyncFailed(f"fsync of directory {path} failed: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def _fail(self, action: str, path: str, error: OSError) -> NoReturn:
        if error.errno in _NO_DESCRIPTOR:
            raise _too_many_files(action, path, error) from error
        message = f"cannot {action} {path}: {error.strerror}"
        if error.errno not in DiskFull.ERRNOS:
            raise StorageError(message) from error
        full = DiskFull(f"{message}; free some space and retry")
        if self._on_full is not None:
            self._on_full(full)
        raise full from error


def _too_many_files(action: str, path: str, error: OSError) -> TooManyFiles:
    return TooManyFiles(
        f"cannot {action} {path}: {error.strerror}; raise the limit of open files ('ulimit -n', or "
        "LimitNOFILE= of the service) and restart the node, or delete topics"
    )
