"""The records of ``__consumer_offsets``, in Kafka's own binary format.

Here are offset commits and classic groups; ``consumer.records`` and ``share.records`` have those of consumer
groups and of share groups. A new type is a class, a ``RecordType`` and an entry in ``RECORD_TYPES``;
``coordination.stored`` has the rules.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tidemill.coordination.stored import Codec, RecordType, RecordTypes, Struct
from tidemill.errors import StorageError
from tidemill.groups.consumer.records import CONSUMER_RECORD_TYPES, ConsumerRecord
from tidemill.groups.share.records import SHARE_RECORD_TYPES, ShareRecord
from tidemill.wire.declare import Field

__all__ = (
    "RECORD_TYPES",
    "CorruptGroupRecord",
    "GroupMetadata",
    "GroupMetadataRecord",
    "GroupRecord",
    "OffsetCommit",
    "OffsetCommitRecord",
    "StoredMember",
    "decode_record",
    "encode_record",
)

_NO_TIMESTAMP: Final = -1
_TIMESTAMP_OR_NONE: Final = Codec(
    unpack=lambda stored_ms: None if stored_ms == _NO_TIMESTAMP else stored_ms,
    pack=lambda at_ms: _NO_TIMESTAMP if at_ms is None else at_ms,
)


class CorruptGroupRecord(StorageError):
    """A committed record of the group topic that cannot be decoded. The shard that holds it does not load."""


class OffsetCommit(msgspec.Struct, frozen=True):
    """What a group committed for one partition.

    ``leader_epoch`` is -1 if unknown. ``expire_at_ms`` is set only if the commit named its own retention.
    """

    offset: int
    leader_epoch: int
    metadata: str
    committed_at_ms: int
    expire_at_ms: int | None = None


class StoredMember(msgspec.Struct, frozen=True):
    """A member as persisted: its metadata for the group's chosen protocol only."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


class GroupMetadata(msgspec.Struct, frozen=True):
    """One generation of a classic group. No members: the group is empty."""

    protocol_type: str
    generation: int
    protocol_name: str | None
    leader: str | None
    state_since_ms: int | None
    members: tuple[StoredMember, ...]


class OffsetCommitRecord(msgspec.Struct, frozen=True):
    """What a group committed for one partition. A tombstone deletes the committed offset."""

    group_id: str
    topic: str
    partition: int
    value: OffsetCommit | None


class GroupMetadataRecord(msgspec.Struct, frozen=True):
    """One generation of a classic group. A tombstone deletes the group."""

    group_id: str
    value: GroupMetadata | None


GroupRecord = OffsetCommitRecord | GroupMetadataRecord | ConsumerRecord | ShareRecord


def encode_record(record: GroupRecord) -> tuple[bytes, bytes | None]:
    """Key and value as they go into the log."""
    return RECORD_TYPES.encode(record)


def decode_record(key: bytes | None, value: bytes | None) -> GroupRecord | None:
    """The inverse of ``encode_record``; None for a key version that this program does not know."""
    return RECORD_TYPES.decode(key, value)


# -- the types -------------------------------------------------------------------------------------------


_OFFSET_COMMIT: Final = RecordType(
    "OffsetCommit",
    OffsetCommitRecord,
    key_versions=(1, 0),
    key={"group_id": "string", "topic": "string", "partition": "int32"},
    value=Struct(
        OffsetCommit,
        {
            "offset": "int64",
            "leader_epoch": Field("int32", since=3, default=-1),
            "metadata": "string",
            "committed_at_ms": "int64",
            "expire_at_ms": Field("int64", since=1, until=1, default=_NO_TIMESTAMP),
        },
        {"expire_at_ms": _TIMESTAMP_OR_NONE},
    ),
    versions=range(5),
    flexible_since=4,
    # Only version 1 has an expiry of its own; it has no leader epoch.
    written=lambda commit: 3 if commit.expire_at_ms is None else 1,
)


def _stored_member(
    member_id: str,
    instance_id: str | None,
    client_id: str,
    client_host: str,
    rebalance_timeout_ms: int,
    session_timeout_ms: int,
    subscription: bytes,
    assignment: bytes,
) -> StoredMember:
    if rebalance_timeout_ms == -1:
        rebalance_timeout_ms = session_timeout_ms
    return StoredMember(
        member_id,
        instance_id,
        client_id,
        client_host,
        rebalance_timeout_ms,
        session_timeout_ms,
        subscription,
        assignment,
    )


def _group_metadata(
    protocol_type: str,
    generation: int,
    protocol_name: str | None,
    leader: str | None,
    state_since_ms: int | None,
    members: tuple[StoredMember, ...],
) -> GroupMetadata:
    ids = {member.member_id for member in members}
    if members and protocol_name is None:
        raise ValueError("a group with members has no protocol")
    if len(ids) != len(members):
        raise ValueError("a group has two members with one id")
    static_ids = [member.instance_id for member in members if member.instance_id is not None]
    if len(set(static_ids)) != len(static_ids):
        raise ValueError("a group has two members with one instance id")
    if members and leader not in ids:
        raise ValueError(f"the group's leader {leader!r} is not one of its members")
    return GroupMetadata(protocol_type, generation, protocol_name, leader, state_since_ms, members)


_MEMBER: Final = Struct(
    _stored_member,
    {
        "member_id": "string",
        "instance_id": Field("string?", since=3),
        "client_id": "string",
        "client_host": "string",
        "rebalance_timeout_ms": Field("int32", since=1, default=-1),
        "session_timeout_ms": "int32",
        "subscription": "bytes",
        "assignment": "bytes",
    },
)

_GROUP_METADATA: Final = RecordType(
    "GroupMetadata",
    GroupMetadataRecord,
    key_versions=(2,),
    key={"group_id": "string"},
    value=Struct(
        _group_metadata,
        {
            "protocol_type": "string",
            "generation": "int32",
            "protocol_name": "string?",
            "leader": "string?",
            "state_since_ms": Field("int64", since=2, default=_NO_TIMESTAMP),
            "members": [_MEMBER],
        },
        {"state_since_ms": _TIMESTAMP_OR_NONE},
    ),
    versions=range(5),
    flexible_since=4,
    written=3,
)

RECORD_TYPES: Final[RecordTypes[GroupRecord]] = RecordTypes(
    "a group record",
    CorruptGroupRecord,
    _OFFSET_COMMIT,
    _GROUP_METADATA,
    *CONSUMER_RECORD_TYPES,
    *SHARE_RECORD_TYPES,
)
