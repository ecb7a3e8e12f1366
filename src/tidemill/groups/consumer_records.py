"""The records of consumer groups in ``__consumer_offsets``, in Kafka's own binary format.

| key version | key | value (v0, flexible) |
| --- | --- | --- |
| 3 | group | the group's epoch |
| 4 | group | the subscribed topics as they were when the epoch was last raised |
| 5 | group, member | what the member asked for |
| 6 | group | the epoch of the target assignment |
| 7 | group, member | the member's target |
| 8 | group, member | the member's epochs and what it holds |
| 16 | group, pattern | the topics that the pattern matched |

A value of null is a tombstone. Keys have the classic form, values the flexible one. Newer writers add tagged
fields; these are passed over.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import UUID

from tidemill.coordination.binary import MalformedBytes, Reader, pack_string
from tidemill.groups.consumer_member import ClassicMetadata, MemberState, Partitions
from tidemill.groups.messages import JoinProtocol
from tidemill.groups.topics import SubscribedTopic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = (
    "CONSUMER_KEY_VERSIONS",
    "ConsumerRecord",
    "CurrentAssignment",
    "CurrentAssignmentRecord",
    "EpochRecord",
    "MemberMetadata",
    "MemberMetadataRecord",
    "PatternRecord",
    "ResolvedPattern",
    "SubscribedTopicsRecord",
    "TargetEpochRecord",
    "TargetRecord",
    "decode_consumer_record",
    "encode_consumer_record",
)

_VALUE_VERSION: Final = b"\x00\x00"
_NO_TAGS: Final = b"\x00"
_CLASSIC_METADATA_TAG: Final = 0
_UUID_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class MemberMetadata:
    """What a member asked for: the fields of ``ConsumerMember`` that are not its progress."""

    instance_id: str | None
    rack_id: str | None
    client_id: str
    client_host: str
    topics: frozenset[str]
    regex: str
    rebalance_timeout_ms: int
    assignor: str | None
    classic: ClassicMetadata | None


@dataclass(frozen=True, slots=True)
class CurrentAssignment:
    """A member's progress."""

    epoch: int
    previous_epoch: int
    state: MemberState
    assigned: Partitions
    revoking: Partitions


@dataclass(frozen=True, slots=True)
class ResolvedPattern:
    """What a pattern matched: at which revision of the metadata, and when."""

    topics: frozenset[str]
    revision: int
    resolved_at_ms: int


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """``value`` None deletes the group; by then it has no members."""

    group_id: str
    value: int | None


@dataclass(frozen=True, slots=True)
class SubscribedTopicsRecord:
    """The topics that the group's members subscribe to and that exist, by name."""

    group_id: str
    value: tuple[SubscribedTopic, ...] | None


@dataclass(frozen=True, slots=True)
class MemberMetadataRecord:
    """``value`` None removes the member."""

    group_id: str
    member_id: str
    value: MemberMetadata | None


@dataclass(frozen=True, slots=True)
class TargetEpochRecord:
    """The epoch of the group for which the targets were computed."""

    group_id: str
    value: int | None


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """What a member shall have."""

    group_id: str
    member_id: str
    value: Partitions | None


@dataclass(frozen=True, slots=True)
class CurrentAssignmentRecord:
    """``value`` None: the member holds nothing any more."""

    group_id: str
    member_id: str
    value: CurrentAssignment | None


@dataclass(frozen=True, slots=True)
class PatternRecord:
    """``value`` None: no member subscribes with the pattern any more."""

    group_id: str
    pattern: str
    value: ResolvedPattern | None


ConsumerRecord = (
    EpochRecord
    | SubscribedTopicsRecord
    | MemberMetadataRecord
    | TargetEpochRecord
    | TargetRecord
    | CurrentAssignmentRecord
    | PatternRecord
)

_GROUP_KEYS: Final = {3: EpochRecord, 4: SubscribedTopicsRecord, 6: TargetEpochRecord}
_MEMBER_KEYS: Final = {5: MemberMetadataRecord, 7: TargetRecord, 8: CurrentAssignmentRecord, 16: PatternRecord}
_KEY_VERSIONS: Final = {kind: version for version, kind in (*_GROUP_KEYS.items(), *_MEMBER_KEYS.items())}

CONSUMER_KEY_VERSIONS: Final = frozenset(_KEY_VERSIONS.values())


def encode_consumer_record(record: ConsumerRecord) -> tuple[bytes, bytes | None]:
    """Key and value as they go into the log."""
    key = struct.pack(">h", _KEY_VERSIONS[type(record)]) + pack_string(record.group_id)
    match record:
        case MemberMetadataRecord() | TargetRecord() | CurrentAssignmentRecord():
            key += pack_string(record.member_id)
        case PatternRecord():
            key += pack_string(record.pattern)
    return key, None if record.value is None else _VALUE_VERSION + _encode_value(record) + _NO_TAGS_OF[type(record)]


def _encode_value(record: ConsumerRecord) -> bytes:
    match record:
        case EpochRecord(value=int(epoch)) | TargetEpochRecord(value=int(epoch)):
            return struct.pack(">i", epoch)
        case SubscribedTopicsRecord(value=tuple(topics)):
            return _array(topics, _encode_topic)
        case MemberMetadataRecord(value=MemberMetadata() as metadata):
            return _encode_member(metadata)
        case TargetRecord(value=frozenset(partitions)):
            return _encode_partitions(partitions)
        case CurrentAssignmentRecord(value=CurrentAssignment() as current):
            head = struct.pack(">iib", current.epoch, current.previous_epoch, current.state)
            return head + _encode_partitions(current.assigned) + _encode_partitions(current.revoking)
        case PatternRecord(value=ResolvedPattern() as resolved):
            times = struct.pack(">qq", resolved.revision, resolved.resolved_at_ms)
            return _array(sorted(resolved.topics), _compact_string) + times
    raise TypeError(f"{record!r} has no value")


def decode_consumer_record(version: int, key: Reader, value: bytes | None) -> ConsumerRecord:
    """The record whose key, behind ``version``, is read from ``key``. Raises ``MalformedBytes``."""
    group_id = key.string()
    name = "" if version in _GROUP_KEYS else key.string()
    key.end()
    reader: Reader | None = None
    if value is not None:
        reader = Reader(value, flexible=True)
        if reader.int16() != 0:
            raise MalformedBytes("the version of a consumer group's value is unknown")
    record = _decode(version, group_id, name, reader)
    if reader is not None:
        if version != _KEY_VERSIONS[MemberMetadataRecord]:
            reader.skip_tagged_fields()
        reader.end()
    return record


def _decode(version: int, group_id: str, name: str, value: Reader | None) -> ConsumerRecord:
    match version:
        case 3:
            return EpochRecord(group_id, value and value.int32())
        case 4:
            return SubscribedTopicsRecord(group_id, value and _read_array(value, 22, _decode_topic))
        case 5:
            return MemberMetadataRecord(group_id, name, value and _decode_member(value))
        case 6:
            return TargetEpochRecord(group_id, value and value.int32())
        case 7:
            return TargetRecord(group_id, name, value and _decode_partitions(value))
        case 8:
            return CurrentAssignmentRecord(group_id, name, value and _decode_current(value))
        case _:
            return PatternRecord(group_id, name, value and _decode_pattern(value))
