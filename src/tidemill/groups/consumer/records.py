"""The records of consumer groups (KIP-848) in ``__consumer_offsets``, in Kafka's own binary format.

All values are version 0 and flexible. ``coordination.stored`` has the rules of stored records.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from tidemill.coordination.stored import NOT_KEPT, Codec, RecordType, Struct
from tidemill.groups.consumer.member import ClassicMetadata, MemberState, Partitions
from tidemill.groups.messages import JoinProtocol
from tidemill.groups.stored_fields import (
    EPOCH,
    GROUP_KEY,
    MEMBER_KEY,
    PARTITIONS,
    SORTED_SET,
    TARGET,
    TOPIC_PARTITIONS,
    record_type,
)
from tidemill.groups.topics import SubscribedTopic
from tidemill.wire.declare import Field

if TYPE_CHECKING:
    from tidemill.groups.consumer.member import ConsumerMember
    from tidemill.wire.declare import Fields

__all__ = (
    "CONSUMER_RECORD_TYPES",
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
)


class MemberMetadata(msgspec.Struct, frozen=True):
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

    @classmethod
    def of(cls, member: ConsumerMember) -> MemberMetadata:
        """The stored subscription of ``member``."""
        return cls(**{name: getattr(member, name) for name in cls.__struct_fields__})

    def applied_to(self, member: ConsumerMember) -> ConsumerMember:
        """``member`` with the subscription of this record."""
        return replace(member, **{name: getattr(self, name) for name in self.__struct_fields__})


class CurrentAssignment(msgspec.Struct, frozen=True):
    """How far a member is: its epochs, and the partitions that it has and must let go of."""

    epoch: int
    previous_epoch: int
    state: MemberState
    assigned: Partitions
    revoking: Partitions

    @classmethod
    def of(cls, member: ConsumerMember) -> CurrentAssignment:
        """The stored assignment of ``member``: its epochs, and what it has and gives up."""
        return cls(member.epoch, member.previous_epoch, member.state, member.assigned, member.revoking)

    def applied_to(self, member: ConsumerMember) -> ConsumerMember:
        """``member`` with the epochs and partitions of this record."""
        return replace(member, **{name: getattr(self, name) for name in self.__struct_fields__})


class ResolvedPattern(msgspec.Struct, frozen=True):
    """The topics that a pattern matched, at which revision of the metadata, and when."""

    topics: frozenset[str]
    revision: int
    resolved_at_ms: int


class EpochRecord(msgspec.Struct, frozen=True):
    """The epoch of a group. A tombstone deletes the group; by then it has no members."""

    group_id: str
    value: int | None


class SubscribedTopicsRecord(msgspec.Struct, frozen=True):
    """The topics that the group's members subscribe to and that exist, by name."""

    group_id: str
    value: tuple[SubscribedTopic, ...] | None


class MemberMetadataRecord(msgspec.Struct, frozen=True):
    """What a member asked for. A tombstone removes the member."""

    group_id: str
    member_id: str
    value: MemberMetadata | None


class TargetEpochRecord(msgspec.Struct, frozen=True):
    """The epoch of the group for which the targets were computed."""

    group_id: str
    value: int | None


class TargetRecord(msgspec.Struct, frozen=True):
    """The target assignment of one member."""

    group_id: str
    member_id: str
    value: Partitions | None


class CurrentAssignmentRecord(msgspec.Struct, frozen=True):
    """Progress of a member. A tombstone: it holds nothing any more."""

    group_id: str
    member_id: str
    value: CurrentAssignment | None


class PatternRecord(msgspec.Struct, frozen=True):
    """The topics that a pattern matched. A tombstone: no member subscribes with it any more."""

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


# -- the types -------------------------------------------------------------------------------------------


def _member_state(number: int) -> MemberState:
    if number not in _MEMBER_STATES:
        raise ValueError(f"member state {number} is unknown")
    return MemberState(number)


def _classic_metadata(session_timeout_ms: int, protocols: tuple[JoinProtocol, ...]) -> ClassicMetadata:
    if not protocols:
        raise ValueError("a classic member supports no protocol")
    return ClassicMetadata(session_timeout_ms, protocols)


_MEMBER_STATES: Final = frozenset(MemberState)
_TOPIC: Final = Struct(
    SubscribedTopic,
    {
        "id": "uuid",
        "name": "string",
        "partitions": "int32",
        # Kafka has not used the racks of partitions since 4.0.
        "racks": [{"partition": "int32", "racks": ["string"]}],
    },
    {"racks": NOT_KEPT},
)

_MEMBER: Final = Struct(
    MemberMetadata,
    {
        "instance_id": "string?",
        "rack_id": "string?",
        "client_id": "string",
        "client_host": "string",
        "topics": ["string"],
        "regex": "string?",
        "rebalance_timeout_ms": "int32",
        "assignor": "string?",
        "classic": Field(
            Struct(
                _classic_metadata,
                {
                    "session_timeout_ms": "int32",
                    "protocols": [Struct(JoinProtocol, {"name": "string", "metadata": "bytes"})],
                },
            ),
            tag=0,
            nullable=True,
        ),
    },
    {"topics": SORTED_SET, "regex": Codec(unpack=lambda regex: regex or "")},
)

_CURRENT: Final = Struct(
    CurrentAssignment,
    {
        "epoch": "int32",
        "previous_epoch": "int32",
        "state": "int8",
        "assigned": [TOPIC_PARTITIONS],
        "revoking": [TOPIC_PARTITIONS],
    },
    {"state": Codec(unpack=_member_state), "assigned": PARTITIONS, "revoking": PARTITIONS},
)

_RESOLVED: Final = Struct(
    ResolvedPattern,
    {"topics": ["string"], "revision": "int64", "resolved_at_ms": "int64"},
    {"topics": SORTED_SET},
)

_GROUP_PATTERN: Final[Fields] = {"group_id": "string", "pattern": "string"}


CONSUMER_RECORD_TYPES: Final[tuple[RecordType[ConsumerRecord], ...]] = (
    record_type(3, EpochRecord, GROUP_KEY, EPOCH),
    record_type(4, SubscribedTopicsRecord, GROUP_KEY, Struct(None, {"topics": [_TOPIC]})),
    record_type(5, MemberMetadataRecord, MEMBER_KEY, _MEMBER),
    record_type(6, TargetEpochRecord, GROUP_KEY, EPOCH),
    record_type(7, TargetRecord, MEMBER_KEY, TARGET),
    record_type(8, CurrentAssignmentRecord, MEMBER_KEY, _CURRENT),
    record_type(16, PatternRecord, _GROUP_PATTERN, _RESOLVED),
)
"""The types by the version of their keys, which are Kafka's."""
