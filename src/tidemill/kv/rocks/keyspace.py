"""The layout of a RocksDB database: state under one first byte, metadata under another.

    0x00 <name>   metadata: ``format``, ``identity``, ``applied`` and, if it is known, ``epoch``
    0x01 <key>    state

So metadata is written in the same atomic batch as the state that it speaks of, and no scan ever meets it.
"""

from __future__ import annotations

import struct

__all__ = (
    "APPLIED_KEY",
    "EPOCH_KEY",
    "FORMAT_KEY",
    "FORMAT_VERSION",
    "IDENTITY_KEY",
    "STATE_END",
    "STATE_PREFIX",
    "pack_offset",
    "unpack_offset",
)

FORMAT_VERSION = 1
STATE_PREFIX = b"\x01"
#: The end of the state: above every state key.
STATE_END = b"\x02"
FORMAT_KEY = b"\x00format"
IDENTITY_KEY = b"\x00identity"
APPLIED_KEY = b"\x00applied"
#: The leader epoch of the record before the applied offset. States of older versions do not have it.
EPOCH_KEY = b"\x00epoch"

_OFFSET = struct.Struct(">q")


def pack_offset(offset: int) -> bytes:
    """Encode a log offset, or another whole number, as metadata stores it."""
    return _OFFSET.pack(offset)


def unpack_offset(data: bytes) -> int:
    """Decode an offset; ``ValueError`` if the bytes are not one."""
    if len(data) != _OFFSET.size:
        raise ValueError(f"an offset has {_OFFSET.size} bytes, not {len(data)}")
    offset: int = _OFFSET.unpack(data)[0]
    return offset
