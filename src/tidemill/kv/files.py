"""The few file operations of snapshots and recovery, so that a test can stop after any of them.

Every error is one of Tidemill's; ``SyncFailed`` if it is not known what has reached the disk. All of them
release Python's lock while they wait.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tidemill.kv.faults import Translated
from tidemill.records.checksum import crc32c

__all__ = ("Files",)

_CHUNK_BYTES = 1 << 20


class Files:
    """File operations on the real disk."""

    def names(self, directory: Path) -> list[str]:
        """The names in a directory, sorted; none if there is no such directory."""
        with Translated("list", str(directory)):
            try:
                return sorted(os.listdir(directory))
            except FileNotFoundError:
                return []

    def make_directory(self, directory: Path) -> None:
        with Translated("create", str(directory)):
            directory.mkdir(parents=True, exist_ok=True)

    def read(self, path: Path) -> bytes | None:
        """The content of a small file; None if there is none."""
        with Translated("read", str(path)):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                return None

    def write(self, path: Path, data: bytes) -> None:
        """Write a small file. It is durable after ``sync``."""
        with Translated("write", str(path)):
            path.write_bytes(data)

    def link(self, source: Path, target: Path) -> bool:
        """Link a file that never changes to a second name. False if the file is gone."""
        with Translated("link", str(source)):
            try:
                os.link(source, target)
            except FileNotFoundError:
                return False
            return True

    def rename(self, source: Path, target: Path) -> None:
        with Translated("rename", str(source)):
            os.rename(source, target)

    def remove(self, path: Path) -> None:
        with Translated("remove", str(path)):
            path.unlink(missing_ok=True)

    def remove_tree(self, directory: Path) -> None:
        """Remove a directory with all that is in it, or a file; fine if there is none."""
        with Translated("remove", str(directory)):
            try:
                shutil.rmtree(directory)
            except FileNotFoundError:
                return
            except NotADirectoryError:
                directory.unlink()

    def sync(self, path: Path) -> None:
        """Make a file's content durable, or the names in a directory."""
        with Translated("sync", str(path)):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def stat(self, path: Path) -> tuple[tuple[int, int], int] | None:
        """A file's identity on this machine (device, inode) and its size in bytes; None if there is none."""
        with Translated("look at", str(path)):
            try:
                found = path.stat()
            except FileNotFoundError:
                return None
            return (found.st_dev, found.st_ino), found.st_size

    def checksum(self, path: Path) -> tuple[int, int]:
        """The CRC-32C of a whole file, and its size in bytes."""
        with Translated("read", str(path)), path.open("rb", buffering=0) as file:
            crc, size, buffer = 0, 0, bytearray(_CHUNK_BYTES)
            while count := file.readinto(buffer):
                crc = crc32c(memoryview(buffer)[:count], crc)
                size += count
            return crc, size
