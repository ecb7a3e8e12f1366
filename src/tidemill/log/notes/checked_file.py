"""Small files that carry their own checksum: indexes, producer snapshots, epoch histories.

A reader gets the payload exactly as written, or ``CorruptData``: never a guess.
"""

from __future__ import annotations

import struct

from tidemill.errors import CorruptData
from tidemill.log.storage import Storage
from tidemill.records.checksum import crc32c

__all__ = ("pack_checked", "read_checked", "unpack_checked")

_MAGIC = b"TM"
_HEADER = struct.Struct(">2sBBII")  # magic, version, kind, payload length, crc-32c of the payload
_VERSION = 1


def pack_checked(kind: int, payload: bytes) -> bytes:
    """The content of a file that holds ``payload``; a reader must name the same ``kind``."""
    return _HEADER.pack(_MAGIC, _VERSION, kind, len(payload), crc32c(payload)) + payload


def unpack_checked(kind: int, data: bytes, path: str) -> bytes:
    """The payload of ``data``; ``path`` is for the error message."""
    if len(data) < _HEADER.size:
        raise CorruptData(f"{len(data)} bytes are too few for a checked file", path=path, position=0)
    magic, version, found_kind, length, crc = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or found_kind != kind:
        raise CorruptData("not the expected kind of file", path=path, position=0)
    payload = data[_HEADER.size :]
    if len(payload) != length or crc32c(payload) != crc:
        raise CorruptData("the checksum does not fit", path=path, position=_HEADER.size)
    return payload


def read_checked(storage: Storage, path: str, kind: int) -> bytes:
    """The payload of a file; ``StorageError`` if it is not there, ``CorruptData`` if it is not whole."""
    return unpack_checked(kind, storage.read_file(path), path)
