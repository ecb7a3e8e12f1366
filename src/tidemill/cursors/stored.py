"""The records of ``__cursors``: what a cursor is, and where it stands in each partition.

| | key | value |
| --- | --- | --- |
| cursor | v0: name | v0: topic and its id, identity of the region, the region in words, paused, created |
| | | v1: and where the position is kept |
| position | v1: name, partition | v0: epoch, position, finished offsets above it, owner, committed |
| | | v1: and the owner's lease, the origin of the position, whether it has moved since |

A value of null is a tombstone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from tidemill.coordination.stored import Codec, RecordType, RecordTypes, Struct
from tidemill.cursors.checkpoint import check_finished
from tidemill.errors import StorageError
from tidemill.wire.declare import Field

__all__ = (
    "NO_ORIGIN",
    "RECORD_TYPES",
    "CorruptCursorRecord",
    "Home",
    "StoredCursor",
    "StoredPosition",
    "StoredRecord",
    "decode_record",
    "encode_record",
)

_ZERO: Final = UUID(int=0)
#: The origin of positions that were set before there were origins.
NO_ORIGIN: Final = _ZERO


class Home(enum.IntEnum):
    """Where a cursor keeps the position that counts; the numbers are part of the protocol."""

    UNKNOWN = -1
    """In the cluster or in its transactions: stored by a version that told no more."""
    CLUSTER = 0
    """In the cluster: what is shown here is the position."""
    TRANSACTIONS = 1
    """In its transactions: what is shown here may be older."""
    FILE = 2
    """In a file of its owner: what is shown here may be older."""
    DATABASE = 3
    """In a database of its owner: what is shown here may be older."""


class CorruptCursorRecord(StorageError):
    """A committed record of the topic of cursors that cannot be decoded. Its shard does not load."""


@dataclass(frozen=True, slots=True)
class StoredCursor:
    """What a cursor reads, whether it is paused, and where its position is kept."""

    topic: str
    topic_id: UUID
    region: bytes
    shown: str
    paused: bool
    created_ms: int
    home: Home = Home.CLUSTER


@dataclass(frozen=True, slots=True)
class StoredPosition:
    """Where a cursor stands in one partition.

    Attributes:
        epoch: fences earlier owners. It begins with a time, so that a deleted cursor's are never used again.
        finished: a bitmap of offsets above the position that are done.
        owner: who has taken it; empty if it was given up or set since.
        lease_ms: for how long after a sign of life the owner is taken to be alive; 0 if that is not known.
        origin: an id of the last time that the position was set: by its first owner, or by ``alter``. A
            position that is kept elsewhere and names another origin is of before that.
        moved: whether a commit has moved it since it was set.
    """

    epoch: int
    offset: int
    leader_epoch: int
    started: bool
    finished: bytes
    owner: str
    committed_ms: int
    lease_ms: int = 0
    origin: UUID = NO_ORIGIN
    moved: bool = False

    def __post_init__(self) -> None:
        check_finished(self.finished)


StoredRecord = tuple[str, int | None, StoredCursor | StoredPosition | None]
"""Name, partition (None for the cursor itself), and the new value; None is a tombstone."""


def encode_record(name: str, partition: int | None, value: object) -> tuple[bytes, bytes | None]:
    """Key and value as they go into the log."""
    if partition is None:
        return _CURSOR.encode((name,), value)
    return _POSITION.encode((name, partition), value)


def decode_record(key: bytes | None, value: bytes | None) -> StoredRecord | None:
    """The inverse of ``encode_record``; None for a key version that this program does not know."""
    return RECORD_TYPES.decode(key, value)


_ID: Final = Codec(unpack=lambda found: found or _ZERO)

_CURSOR: Final[RecordType[StoredRecord]] = RecordType(
    "Cursor",
    lambda name, value: (name, None, value),
    key_versions=(0,),
    key={"name": "string"},
    value=Struct(
        StoredCursor,
        {
            "topic": "string",
            "topic_id": "uuid",
            "region": "bytes",
            "shown": "string",
            "paused": "bool",
            "created_ms": "int64",
            "home": Field("int8", since=1, default=int(Home.UNKNOWN)),
        },
        {"topic_id": _ID, "home": Codec(unpack=Home)},
    ),
    versions=range(2),
    written=1,
)

_POSITION: Final[RecordType[StoredRecord]] = RecordType(
    "CursorPosition",
    lambda name, partition, value: (name, partition, value),
    key_versions=(1,),
    key={"name": "string", "partition": "int32"},
    value=Struct(
        StoredPosition,
        {
            "epoch": "int64",
            "offset": "int64",
            "leader_epoch": "int32",
            "started": "bool",
            "finished": "bytes",
            "owner": "string",
            "committed_ms": "int64",
            "lease_ms": Field("int32", since=1, default=0),
            "origin": Field("uuid", since=1),
            "moved": Field("bool", since=1, default=False),
        },
        {"origin": _ID},
    ),
    versions=range(2),
    written=1,
)

RECORD_TYPES: Final[RecordTypes[StoredRecord]] = RecordTypes(
    "a record of cursors", CorruptCursorRecord, _CURSOR, _POSITION
)
