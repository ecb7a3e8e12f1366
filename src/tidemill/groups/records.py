"""The records of ``__consumer_offsets``, in Kafka's own binary format.

| key version | key | value written | value read |
| --- | --- | --- | --- |
| 0, 1 (written: 1) | group, topic, partition | offset commit v3, v1 if it has its own expiry | v0-v4 |
| 2 | group | classic group metadata v3 | v0-v4 |
| 3-8, 16 | see ``consumer_records`` | | |

A value of null is a tombstone. An unknown key version comes from a newer writer and decodes to None, so that
the loader can skip it; every other defect is ``CorruptGroupRecord``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tidemill.coordination.binary import MalformedBytes, Reader, pack_bytes, pack_string
from tidemill.errors import StorageError
from tidemill.groups.consumer_codec import (
    CONSUMER_KEY_VERSIONS,
    decode_consumer_record,
    encode_consumer_record,
)
from tidemill.groups.consumer_records import ConsumerRecord

__all__ = (
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

_OFFSET_KEY_VERSIONS = (0, 1)
_GROUP_KEY_VERSION = 2
_NEWEST_VALUE_VERSION = 4
_FIRST_FLEXIBLE_VERSION = 4
_NO_TIMESTAMP = -1


class CorruptGroupRecord(StorageError):
    """A committed record of the group topic that cannot be decoded. The shard that holds it does not load."""


@dataclass(frozen=True, slots=True)
class OffsetCommit:
    """What a group committed for one partition.

    ``leader_epoch`` is -1 if unknown. ``expire_at_ms`` is set only if the commit named its own retention.
    """

    offset: int
    leader_epoch: int
    metadata: str
    committed_at_ms: int
    expire_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class StoredMember:
    """A member as persisted: its metadata for the group's chosen protocol only."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """One generation of a classic group. No members: the group is empty."""

    protocol_type: str
    generation: int
    protocol_name: str | None
    leader: str | None
    state_since_ms: int | None
    members: tuple[StoredMember, ...]


@dataclass(frozen=True, slots=True)
class OffsetCommitRecord:
    """``value`` None deletes the committed offset."""

    group_id: str
    topic: str
    partition: int
    value: OffsetCommit | None


@dataclass(frozen=True, slots=True)
class GroupMetadataRecord:
    """``value`` None deletes the group."""

    group_id: str
    value: GroupMetadata | None


GroupRecord = OffsetCommitRecord | GroupMetadataRecord | ConsumerRecord


def encode_record(record: GroupRecord) -> tuple[bytes, bytes | None]:
    """Key and value as they go into the log."""
    if isinstance(record, OffsetCommitRecord):
        names = pack_string(record.group_id) + pack_string(record.topic)
        key = struct.pack(">h", 1) + names + struct.pack(">i", record.partition)
        return key, None if record.value is None else _encode_offset(record.value)
    if not isinstance(record, GroupMetadataRecord):
        return encode_consumer_record(record)
    key = struct.pack(">h", _GROUP_KEY_VERSION) + pack_string(record.group_id)
    return key, None if record.value is None else _encode_group(record.value)


def decode_record(key: bytes | None, value: bytes | None) -> GroupRecord | None:
    """The inverse of ``encode_record``; None for a key version that this program does not know."""
    try:
        if key is None:
            raise MalformedBytes("it has no key")
        return _decode(Reader(key), value)
    except MalformedBytes as error:
        raise CorruptGroupRecord(f"a group record cannot be decoded: {error}") from error


def _decode(key: Reader, value: bytes | None) -> GroupRecord | None:
    version = key.int16()
    record: GroupRecord
    if version in _OFFSET_KEY_VERSIONS:
        group_id, topic, partition = key.string(), key.string(), key.int32()
        commit = None if value is None else _decode_offset(*_open_value(value))
        record = OffsetCommitRecord(group_id, topic, partition, commit)
    elif version == _GROUP_KEY_VERSION:
        group_id = key.string()
        record = GroupMetadataRecord(group_id, None if value is None else _decode_group(*_open_value(value)))
    elif version in CONSUMER_KEY_VERSIONS:
        return decode_consumer_record(version, key, value)
    else:
        return None
    key.end()
    return record


def _open_value(value: bytes) -> tuple[int, Reader]:
    reader = Reader(value)
    version = reader.int16()
    if not 0 <= version <= _NEWEST_VALUE_VERSION:
        raise MalformedBytes(f"value version {version} is unknown")
    reader.flexible = version >= _FIRST_FLEXIBLE_VERSION
    return version, reader


def _encode_offset(commit: OffsetCommit) -> bytes:
    metadata = pack_string(commit.metadata)
    if commit.expire_at_ms is None:
        head = struct.pack(">hqi", 3, commit.offset, commit.leader_epoch)
        return head + metadata + struct.pack(">q", commit.committed_at_ms)
    # Only version 1 has room for an expiry of its own; it has none for the leader epoch.
    times = struct.pack(">qq", commit.committed_at_ms, commit.expire_at_ms)
    return struct.pack(">hq", 1, commit.offset) + metadata + times


def _decode_offset(version: int, reader: Reader) -> OffsetCommit:
    offset = reader.int64()
    leader_epoch = reader.int32() if version >= 3 else -1
    metadata = reader.string()
    committed_at_ms = reader.int64()
    expire_at_ms = reader.int64() if version == 1 else _NO_TIMESTAMP
    reader.skip_tagged_fields()
    reader.end()
    return OffsetCommit(
        offset,
        leader_epoch,
        metadata,
        committed_at_ms,
        None if expire_at_ms == _NO_TIMESTAMP else expire_at_ms,
    )


def _encode_group(group: GroupMetadata) -> bytes:
    since_ms = _NO_TIMESTAMP if group.state_since_ms is None else group.state_since_ms
    parts = [
        struct.pack(">h", 3),
        pack_string(group.protocol_type),
        struct.pack(">i", group.generation),
        pack_string(group.protocol_name),
        pack_string(group.leader),
        struct.pack(">qi", since_ms, len(group.members)),
    ]
    for member in group.members:
        parts += (
            pack_string(member.member_id),
            pack_string(member.instance_id),
            pack_string(member.client_id),
            pack_string(member.client_host),
            struct.pack(">ii", member.rebalance_timeout_ms, member.session_timeout_ms),
            pack_bytes(member.subscription),
            pack_bytes(member.assignment),
        )
    return b"".join(parts)


def _decode_group(version: int, reader: Reader) -> GroupMetadata:
    protocol_type = reader.string()
    generation = reader.int32()
    protocol_name = reader.nullable_string()
    leader = reader.nullable_string()
    since_ms = reader.int64() if version >= 2 else _NO_TIMESTAMP
    count = reader.count(smallest_element=8)
    members = tuple(_decode_member(version, reader) for _ in range(count))
    reader.skip_tagged_fields()
    reader.end()
    if members and protocol_name is None:
        raise MalformedBytes("a group with members has no protocol")
    if len({member.member_id for member in members}) != len(members):
        raise MalformedBytes("a group has two members with one id")
    static_ids = [member.instance_id for member in members if member.instance_id is not None]
    if len(set(static_ids)) != len(static_ids):
        raise MalformedBytes("a group has two members with one instance id")
    if members and leader not in {member.member_id for member in members}:
        raise MalformedBytes(f"the group's leader {leader!r} is not one of its members")
    return GroupMetadata(
        protocol_type,
        generation,
        protocol_name,
        leader,
        None if since_ms == _NO_TIMESTAMP else since_ms,
        members,
    )


def _decode_member(version: int, reader: Reader) -> StoredMember:
    member_id = reader.string()
    instance_id = reader.nullable_string() if version >= 3 else None
    client_id, client_host = reader.string(), reader.string()
    rebalance_timeout_ms = reader.int32() if version >= 1 else -1
    session_timeout_ms = reader.int32()
    member = StoredMember(
        member_id,
        instance_id,
        client_id,
        client_host,
        session_timeout_ms if rebalance_timeout_ms == -1 else rebalance_timeout_ms,
        session_timeout_ms,
        subscription=reader.bytes_(),
        assignment=reader.bytes_(),
    )
    reader.skip_tagged_fields()
    return member
