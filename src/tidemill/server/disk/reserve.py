"""The reserve file: disk space that is kept for reading and deleting when everything else is used up.

A full disk refuses writes. But RocksDB writes when it opens the state of a table, and to delete a topic the
metadata has to be written: without any space a full disk could neither be read from nor be cleaned up. So a
file of some size lies in the data directory. It is removed when its space is needed, and made again
before writes are taken again. ``DiskSpace`` decides when.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from tidemill.errors import DiskFull

__all__ = ("RESERVE_NAME", "ReserveFile")

RESERVE_NAME = "disk-reserve"
_UNFINISHED_NAME = "disk-reserve.tmp"
#: A small disk keeps this part of itself at most.
_DISK_PART = 16


class ReserveFile:
    """The reserve file in a data directory. Its methods block. With ``size_bytes`` 0 there is none."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self._path = directory / RESERVE_NAME
        self._unfinished_path = directory / _UNFINISHED_NAME
        self._configured_bytes = size_bytes

    @property
    def wanted_bytes(self) -> int:
        """The size that it should have: as configured, but never more than a part of the disk."""
        if not self._configured_bytes:
            return 0
        try:
            disk_bytes = shutil.disk_usage(self._path.parent).total
        except OSError:
            return self._configured_bytes
        return min(self._configured_bytes, disk_bytes // _DISK_PART)

    def held_bytes(self) -> int:
        """The size that it has; 0 if it is given up or was never made."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def make(self) -> None:
        """Bring it to its wanted size. Raises ``DiskFull`` if there is no space, and then it is not there.

        The blocks are allocated, not only promised. A crash leaves it whole, or not there at all.
        """
        wanted = self.wanted_bytes
        if self.held_bytes() == wanted:
            return
        self.release()
        if not wanted:
            return
        try:
            descriptor = os.open(self._unfinished_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(descriptor, 0, wanted)
            finally:
                os.close(descriptor)
            self._unfinished_path.rename(self._path)
        except OSError as error:
            self.release()
            raise DiskFull(f"no room for the reserve of {wanted} bytes: {error.strerror}") from error

    def release(self) -> int:
        """Remove the file; returns how many bytes that frees."""
        freed = self.held_bytes()
        for path in (self._path, self._unfinished_path):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        return freed
