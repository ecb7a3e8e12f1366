"""Opening a database, which rocksdict does with Python's lock held: what can be done before is done before.

RocksDB syncs ten times to make a database and five times to open one. So an empty one is made here, in the
form in which RocksDB itself begins: an identity, a manifest of one record, and the name of that manifest.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from rocksdict import AccessType, Options, Rdict

from tidemill.errors import CorruptData
from tidemill.kv.contract import TABLE_SUFFIX
from tidemill.records.checksum import crc32c

__all__ = ("has_database", "make_database", "open_database")

#: Held while a database is opened.
_opening = threading.Lock()
#: Just long enough for another thread to wake up and take Python's lock.
_BREATH_SECONDS: Final = 0.000_05

_MANIFEST: Final = "MANIFEST-000001"
#: Tags of a manifest's record: the database's id, the log number, the next file number, the last sequence.
_DATABASE_ID: Final = b"\x81\x40"
_NO_LOG: Final = b"\x02\x00"
_SECOND_FILE: Final = b"\x03\x02"
_NO_WRITES: Final = b"\x04\x00"
#: The header of a record: checksum, length, type. A checksum is stored rotated, with this added.
_RECORD_HEADER: Final = struct.Struct("<IHB")
_WHOLE_RECORD: Final = 1
_CHECKSUM_DELTA: Final = 0xA282EAD8


def has_database(directory: Path) -> bool:
    """Whether the directory has a database; ``CorruptData`` if it has only parts of one.

    RocksDB would start an empty one in a directory that has lost its ``CURRENT``.
    """
    if (directory / "CURRENT").exists():
        return True
    if directory.exists() and any(file.suffix == TABLE_SUFFIX for file in directory.iterdir()):
        raise CorruptData(
            "the database has lost the file CURRENT, which names its parts", path=str(directory), position=0
        )
    return False


def make_database(directory: Path) -> None:
    """Make an empty database, durably but for the directory's own name. Raises ``OSError``."""
    directory.mkdir(parents=True, exist_ok=True)
    identity = str(uuid4()).encode()
    edit = _DATABASE_ID + bytes([len(identity)]) + identity + _NO_LOG + _SECOND_FILE + _NO_WRITES
    checksum = crc32c(bytes([_WHOLE_RECORD]) + edit)
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    stored = (rotated + _CHECKSUM_DELTA) & 0xFFFFFFFF
    _write(directory / "IDENTITY", identity)
    _write(directory / _MANIFEST, _RECORD_HEADER.pack(stored, len(edit), _WHOLE_RECORD) + edit)
    # What makes it a database comes last.
    _write(directory / "CURRENT.new", _MANIFEST.encode() + b"\n")
    _sync_directory(directory)
    (directory / "CURRENT.new").rename(directory / "CURRENT")
    _sync_directory(directory)


def open_database(path: str, options: Options, access: AccessType) -> Any:
    """Open a database while no other thread does, and let the event loop have Python's lock behind it.

    Threads that open one after the other would pass the lock among themselves.
    """
    with _opening:
        try:
            return Rdict(path, options, {}, access)
        finally:
            time.sleep(_BREATH_SECONDS)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
