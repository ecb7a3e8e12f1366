"""The records of consumer groups in Kafka's binary format: classic keys, flexible values.

Newer writers add tagged fields; these are passed over. Any bytes either decode or raise ``MalformedBytes``.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from uuid import UUID

from tidemill.coordination.binary import MalformedBytes, Reader, pack_string
from tidemill.groups.consumer_member import ClassicMetadata, MemberState
from tidemill.groups.consumer_records import (
    CurrentAssignment,
    CurrentAssignmentRecord,
    EpochRecord,
    MemberMetadata,
    MemberMetadataRecord,
    PatternRecord,
    ResolvedPattern,
    SubscribedTopicsRecord,
    TargetEpochRecord,
    TargetRecord,
)
from tidemill.groups.messages import JoinProtocol
from tidemill.groups.topics import SubscribedTopic

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tidemill.groups.consumer_member import Partitions, TopicIdPartition
    from tidemill.groups.consumer_records import ConsumerRecord

__all__ = ("CONSUMER_KEY_VERSIONS", "decode_consumer_record", "encode_consumer_record")

T = TypeVar("T")

_VALUE_VERSION: Final = b"\x00\x00"
_NO_TAGS: Final = b"\x00"
_CLASSIC_METADATA_TAG: Final = 0
_UUID_BYTES: Final = 16


def encode_consumer_record(record: ConsumerRecord) -> tuple[bytes, bytes | None]:
    """Key and value as they go into the log."""
    kind = _KINDS[_KEY_VERSIONS[type(record)]]
    key = struct.pack(">h", _KEY_VERSIONS[type(record)]) + pack_string(record.group_id)
    match record:
        case MemberMetadataRecord() | TargetRecord() | CurrentAssignmentRecord():
            key += pack_string(record.member_id)
        case PatternRecord():
            key += pack_string(record.pattern)
        case _:
            assert not kind.has_name, record
    return key, None if record.value is None else _VALUE_VERSION + kind.encode(record.value)


def decode_consumer_record(version: int, key: Reader, value: bytes | None) -> ConsumerRecord:
    """The record whose key, behind ``version``, is read from ``key``. Raises ``MalformedBytes``."""
    kind = _KINDS[version]
    names = [key.string()] + ([key.string()] if kind.has_name else [])
    key.end()
    if value is None:
        return kind.record(*names, None)
    reader = Reader(value, flexible=True)
    if (value_version := reader.int16()) != 0:
        raise MalformedBytes(f"value version {value_version} of a consumer group's record is unknown")
    decoded = kind.decode(reader)
    reader.end()
    return kind.record(*names, decoded)


# -- values ------------------------------------------------------------------------------------------------


def _encode_epoch(epoch: int) -> bytes:
    return struct.pack(">i", epoch) + _NO_TAGS


def _decode_epoch(reader: Reader) -> int:
    epoch = reader.int32()
    reader.skip_tagged_fields()
    return epoch


def _encode_topics(topics: tuple[SubscribedTopic, ...]) -> bytes:
    return _array(topics, _encode_topic) + _NO_TAGS


def _encode_topic(topic: SubscribedTopic) -> bytes:
    count = struct.pack(">i", topic.partitions)
    # The racks of partitions have not been used since Kafka 4.0: an empty array.
    return topic.id.bytes + _string(topic.name) + count + _uvarint(1) + _NO_TAGS


def _decode_topics(reader: Reader) -> tuple[SubscribedTopic, ...]:
    topics = tuple(_decode_topic(reader) for _ in range(reader.count(smallest_element=23)))
    reader.skip_tagged_fields()
    return topics


def _decode_topic(reader: Reader) -> SubscribedTopic:
    topic = SubscribedTopic(UUID(bytes=reader.take(_UUID_BYTES)), reader.string(), reader.int32())
    for _ in range(reader.count(smallest_element=6)):
        reader.int32()
        for _ in range(reader.count(smallest_element=1)):
            reader.string()
        reader.skip_tagged_fields()
    reader.skip_tagged_fields()
    return topic


def _encode_member(member: MemberMetadata) -> bytes:
    head = b"".join(
        (
            _string(member.instance_id),
            _string(member.rack_id),
            _string(member.client_id),
            _string(member.client_host),
            _array(sorted(member.topics), _string),
            _string(member.regex),
            struct.pack(">i", member.rebalance_timeout_ms),
            _string(member.assignor),
        )
    )
    if member.classic is None:
        return head + _NO_TAGS
    # A nullable struct begins with one byte that says that it is there.
    classic = _uvarint(1) + _encode_classic(member.classic)
    return head + _uvarint(1) + _uvarint(_CLASSIC_METADATA_TAG) + _uvarint(len(classic)) + classic


def _encode_classic(classic: ClassicMetadata) -> bytes:
    protocols = _array(classic.protocols, lambda each: _string(each.name) + _bytes(each.metadata) + _NO_TAGS)
    return struct.pack(">i", classic.session_timeout_ms) + protocols + _NO_TAGS


def _decode_member(reader: Reader) -> MemberMetadata:
    member = MemberMetadata(
        instance_id=reader.nullable_string(),
        rack_id=reader.nullable_string(),
        client_id=reader.string(),
        client_host=reader.string(),
        topics=_decode_names(reader),
        regex=reader.nullable_string() or "",
        rebalance_timeout_ms=reader.int32(),
        assignor=reader.nullable_string(),
        classic=None,
    )
    for _ in range(reader.uvarint()):
        tag, content = reader.uvarint(), reader.take(reader.uvarint())
        if tag == _CLASSIC_METADATA_TAG:
            member = replace(member, classic=_decode_classic(content))
    return member


def _decode_classic(content: bytes) -> ClassicMetadata:
    reader = Reader(content, flexible=True)
    if reader.uvarint() != 1:
        raise MalformedBytes("the metadata of a classic member is tagged but absent")
    session_timeout_ms = reader.int32()
    protocols = []
    for _ in range(reader.count(smallest_element=3)):
        protocols.append(JoinProtocol(reader.string(), reader.bytes_()))
        reader.skip_tagged_fields()
    reader.skip_tagged_fields()
    reader.end()
    if not protocols:
        raise MalformedBytes("a classic member supports no protocol")
    return ClassicMetadata(session_timeout_ms, tuple(protocols))


def _encode_target(partitions: Partitions) -> bytes:
    return _encode_partitions(partitions) + _NO_TAGS


def _decode_target(reader: Reader) -> Partitions:
    partitions = _decode_partitions(reader)
    reader.skip_tagged_fields()
    return partitions


def _encode_current(current: CurrentAssignment) -> bytes:
    head = struct.pack(">iib", current.epoch, current.previous_epoch, current.state)
    return head + _encode_partitions(current.assigned) + _encode_partitions(current.revoking) + _NO_TAGS


def _decode_current(reader: Reader) -> CurrentAssignment:
    epoch, previous_epoch, state = reader.int32(), reader.int32(), reader.take(1)[0]
    if state not in _MEMBER_STATES:
        raise MalformedBytes(f"member state {state} is unknown")
    current = CurrentAssignment(
        epoch, previous_epoch, MemberState(state), _decode_partitions(reader), _decode_partitions(reader)
    )
    reader.skip_tagged_fields()
    return current


def _encode_pattern(resolved: ResolvedPattern) -> bytes:
    times = struct.pack(">qq", resolved.revision, resolved.resolved_at_ms)
    return _array(sorted(resolved.topics), _string) + times + _NO_TAGS


def _decode_pattern(reader: Reader) -> ResolvedPattern:
    resolved = ResolvedPattern(_decode_names(reader), reader.int64(), reader.int64())
    reader.skip_tagged_fields()
    return resolved


# -- parts -------------------------------------------------------------------------------------------------


def _encode_partitions(partitions: Partitions) -> bytes:
    by_topic: dict[UUID, list[int]] = {}
    for topic_id, index in sorted(partitions):
        by_topic.setdefault(topic_id, []).append(index)
    return _array(
        by_topic.items(),
        lambda item: item[0].bytes + _array(item[1], lambda index: struct.pack(">i", index)) + _NO_TAGS,
    )


def _decode_partitions(reader: Reader) -> Partitions:
    found: set[TopicIdPartition] = set()
    for _ in range(reader.count(smallest_element=18)):
        topic_id = UUID(bytes=reader.take(_UUID_BYTES))
        found.update((topic_id, reader.int32()) for _ in range(reader.count(smallest_element=4)))
        reader.skip_tagged_fields()
    return frozenset(found)


def _decode_names(reader: Reader) -> frozenset[str]:
    return frozenset(reader.string() for _ in range(reader.count(smallest_element=1)))


def _uvarint(number: int) -> bytes:
    packed = bytearray()
    while number >= 0x80:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)
    return bytes(packed)


def _string(text: str | None) -> bytes:
    return b"\x00" if text is None else _bytes(text.encode())


def _bytes(raw: bytes) -> bytes:
    return _uvarint(len(raw) + 1) + raw


def _array(items: Collection[T], encode: Callable[[T], bytes]) -> bytes:
    return _uvarint(len(items) + 1) + b"".join(map(encode, items))


# -- the table ---------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """How one kind of record is made. ``has_name``: a member or a pattern follows the group in the key."""

    record: Callable[..., ConsumerRecord]
    has_name: bool
    encode: Callable[[Any], bytes]
    decode: Callable[[Reader], Any]


_KINDS: Final = {
    3: _Kind(EpochRecord, False, _encode_epoch, _decode_epoch),
    4: _Kind(SubscribedTopicsRecord, False, _encode_topics, _decode_topics),
    5: _Kind(MemberMetadataRecord, True, _encode_member, _decode_member),
    6: _Kind(TargetEpochRecord, False, _encode_epoch, _decode_epoch),
    7: _Kind(TargetRecord, True, _encode_target, _decode_target),
    8: _Kind(CurrentAssignmentRecord, True, _encode_current, _decode_current),
    16: _Kind(PatternRecord, True, _encode_pattern, _decode_pattern),
}
_KEY_VERSIONS: Final[dict[Any, int]] = {kind.record: version for version, kind in _KINDS.items()}
_MEMBER_STATES: Final = frozenset(MemberState)

CONSUMER_KEY_VERSIONS: Final = frozenset(_KINDS)
