"""The records of ``__share_group_state``, in Kafka's own binary format.

| record | key | value |
| --- | --- | --- |
| ShareSnapshot | v0: group, topic id, partition | v0: the whole state; null forgets it |
| ShareUpdate | v1: the same | v0: what has changed since |

Tagged fields from 1000 on are our own; a reader that does not know them passes over them. They say of a
batch until when it is delayed and why it dies, and of an update that is part of a transaction which state it
was made for. ``log_offset``, ``log_epoch`` and ``log_history`` are the state's ``LogPosition``;
``cut_offset`` says where the log was cut, so that the state from there on is forgotten.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill.coordination.share_state import NO_CUT, DeliveryState, SharePartitionKey, StateBatch
from tidemill.coordination.stored import Codec, RecordType, RecordTypes, Struct
from tidemill.errors import StorageError
from tidemill.wire.declare import Field
from tidemill.wire.guard import write_uvarint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

__all__ = (
    "RECORD_TYPES",
    "CorruptShareRecord",
    "ShareRecord",
    "Snapshot",
    "SnapshotRecord",
    "Update",
    "UpdateRecord",
    "decode_record",
    "encode_record",
)


class CorruptShareRecord(StorageError):
    """A committed record of the share state topic that cannot be decoded. Its shard does not load."""


class Snapshot(NamedTuple):
    """The whole state of a share partition."""

    snapshot_epoch: int
    state_epoch: int
    leader_epoch: int
    start_offset: int
    created_ms: int
    written_ms: int
    batches: Sequence[StateBatch]
    delivery_complete_count: int = -1
    log_offset: int = -1
    log_epoch: int = -1
    log_history: bytes = b""


class Update(NamedTuple):
    """What has changed. ``producer_epoch`` and ``state_epoch`` are -1 outside of a transaction."""

    snapshot_epoch: int
    leader_epoch: int
    start_offset: int
    batches: Sequence[StateBatch]
    delivery_complete_count: int = -1
    producer_epoch: int = -1
    state_epoch: int = -1
    log_offset: int = -1
    log_epoch: int = -1
    log_history: bytes = b""
    cut_offset: int = NO_CUT


class SnapshotRecord(NamedTuple):
    """A snapshot, or None in its place: the state is forgotten."""

    group_id: str
    topic_id: UUID
    partition: int
    value: Snapshot | None

    @property
    def share_partition(self) -> SharePartitionKey:
        """Key of the share partition whose state the snapshot holds."""
        return SharePartitionKey(self.group_id, self.topic_id, self.partition)


class UpdateRecord(NamedTuple):
    """An update. It never has a tombstone of its own; one that is read says nothing."""

    group_id: str
    topic_id: UUID
    partition: int
    value: Update | None

    @property
    def share_partition(self) -> SharePartitionKey:
        """Key of the share partition that the update changes."""
        return SharePartitionKey(self.group_id, self.topic_id, self.partition)


ShareRecord = SnapshotRecord | UpdateRecord


def encode_record(record: ShareRecord) -> tuple[bytes, bytes | None]:
    """Key and value as they go into the log."""
    return RECORD_TYPES.encode(record)


def decode_record(key: bytes | None, value: bytes | None) -> ShareRecord | None:
    """The inverse of ``encode_record``; None for a key version that this program does not know."""
    return RECORD_TYPES.decode(key, value)


# -- the types -------------------------------------------------------------------------------------------

_STORED_STATES: Final = frozenset(DeliveryState) - {DeliveryState.ACQUIRED}


def _state(number: int) -> DeliveryState:
    if number not in _STORED_STATES:
        raise ValueError(f"delivery state {number} does not exist in a log")
    return DeliveryState(number)


def _batch(
    first_offset: int, last_offset: int, state: DeliveryState, count: int, not_before_ms: int, reason: str
) -> StateBatch:
    if first_offset > last_offset:
        raise ValueError(f"a batch goes from offset {first_offset} to {last_offset}")
    return StateBatch(first_offset, last_offset, state, count, not_before_ms, reason=reason)


_BATCH: Final = Struct(
    _batch,
    {
        "first_offset": "int64",
        "last_offset": "int64",
        "state": "int8",
        "delivery_count": "int16",
        "not_before_ms": Field("int64", tag=1_000, default=0),
        "reason": Field("string", tag=1_001, default=""),
    },
    {"state": Codec(unpack=_state)},
)

_FIXED_FIELDS: Final = struct.Struct(">qqbh").pack
_NO_TAGS: Final = b"\0"
_NOT_BEFORE: Final = write_uvarint(1_000) + b"\x08"
_REASON: Final = write_uvarint(1_001)


def _write_batches(batches: Sequence[StateBatch], out: bytearray) -> None:
    """Write batches as ``_BATCH`` declares them, ten times as fast: a snapshot has thousands."""
    out += write_uvarint(len(batches) + 1)
    for first, last, state, count, not_before_ms, _, _, reason in batches:
        out += _FIXED_FIELDS(first, last, state, count)
        if not not_before_ms and not reason:
            out += _NO_TAGS
            continue
        out.append((not_before_ms != 0) + (reason != ""))
        if not_before_ms:
            out += _NOT_BEFORE + not_before_ms.to_bytes(8, "big", signed=True)
        if reason:
            text = reason.encode()
            size = write_uvarint(len(text) + 1)
            out += _REASON + write_uvarint(len(size) + len(text)) + size + text


_BATCHES: Final = Codec(write=_write_batches)

_KEY: Final = {"group_id": "string", "topic_id": "uuid", "partition": "int32"}

_SNAPSHOT: Final = RecordType(
    "ShareSnapshot",
    SnapshotRecord,
    key_versions=(0,),
    key=_KEY,
    value=Struct(
        Snapshot,
        {
            "snapshot_epoch": "int32",
            "state_epoch": "int32",
            "leader_epoch": "int32",
            "start_offset": "int64",
            "created_ms": "int64",
            "written_ms": "int64",
            "batches": [_BATCH],
            "delivery_complete_count": Field("int32", tag=0, default=-1),
            "log_offset": Field("int64", tag=1_000, default=-1),
            "log_epoch": Field("int32", tag=1_001, default=-1),
            "log_history": Field("bytes", tag=1_002, default=b""),
        },
        {"batches": _BATCHES},
    ),
    versions=range(1),
    written=0,
)

_UPDATE: Final = RecordType(
    "ShareUpdate",
    UpdateRecord,
    key_versions=(1,),
    key=_KEY,
    value=Struct(
        Update,
        {
            "snapshot_epoch": "int32",
            "leader_epoch": "int32",
            "start_offset": "int64",
            "batches": [_BATCH],
            "delivery_complete_count": Field("int32", tag=0, default=-1),
            "producer_epoch": Field("int16", tag=1_000, default=-1),
            "state_epoch": Field("int32", tag=1_001, default=-1),
            "log_offset": Field("int64", tag=1_002, default=-1),
            "log_epoch": Field("int32", tag=1_003, default=-1),
            "log_history": Field("bytes", tag=1_005, default=b""),
            "cut_offset": Field("int64", tag=1_004, default=NO_CUT),
        },
        {"batches": _BATCHES},
    ),
    versions=range(1),
    written=0,
)

RECORD_TYPES: Final[RecordTypes[ShareRecord]] = RecordTypes(
    "a share state record", CorruptShareRecord, _SNAPSHOT, _UPDATE
)
