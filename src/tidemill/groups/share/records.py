"""The records of share groups (KIP-932) in ``__consumer_offsets``, in Kafka's own binary format.

All values are version 0 and flexible. ``coordination.stored`` has the rules of stored records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final
from uuid import UUID

import msgspec

from tidemill.coordination.stored import RecordType, Struct
from tidemill.groups.consumer.member import Partitions
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
from tidemill.wire.declare import Field

if TYPE_CHECKING:
    from tidemill.groups.share.member import ShareMember

__all__ = (
    "SHARE_RECORD_TYPES",
    "ShareAssignment",
    "ShareAssignmentRecord",
    "ShareEpoch",
    "ShareEpochRecord",
    "ShareMemberMetadata",
    "ShareMemberRecord",
    "ShareRecord",
    "ShareTargetEpochRecord",
    "ShareTargetRecord",
    "StateTopic",
    "StateTopics",
    "StateTopicsRecord",
)


class ShareMemberMetadata(msgspec.Struct, frozen=True):
    """What a member asked for: the fields of ``ShareMember`` that are not its progress."""

    rack_id: str | None
    client_id: str
    client_host: str
    topics: frozenset[str]

    @classmethod
    def of(cls, member: ShareMember) -> ShareMemberMetadata:
        """The stored subscription of ``member``."""
        return cls(member.rack_id, member.client_id, member.client_host, member.topics)

    def applied_to(self, member: ShareMember) -> ShareMember:
        """The member with these fields."""
        return replace(member, **{name: getattr(self, name) for name in self.__struct_fields__})


class ShareAssignment(msgspec.Struct, frozen=True):
    """What a member was told. ``state`` is 0 for ever: the members of share groups have one state only."""

    epoch: int
    previous_epoch: int
    state: int
    assigned: Partitions

    @classmethod
    def of(cls, member: ShareMember) -> ShareAssignment:
        """The stored assignment of ``member``."""
        return cls(member.epoch, member.previous_epoch, 0, member.assigned)

    def applied_to(self, member: ShareMember) -> ShareMember:
        """The member after it was told this."""
        return replace(member, epoch=self.epoch, previous_epoch=self.previous_epoch, assigned=self.assigned)


class ShareEpoch(msgspec.Struct, frozen=True):
    """The epoch of a group, and a hash of the topics that it was raised for."""

    epoch: int
    topics_hash: int


class StateTopic(msgspec.Struct, frozen=True):
    """Partitions of one topic whose state in ``__share_group_state`` is begun, there, or being deleted.

    ``since_ms`` is when that began; it is not kept for those that are being deleted.
    """

    id: UUID
    name: str
    partitions: frozenset[int]
    since_ms: int = 0


@dataclass(frozen=True, slots=True)
class StateTopics:
    """The topics of which a group has state, in the order of their ids."""

    initializing: tuple[StateTopic, ...] = ()
    initialized: tuple[StateTopic, ...] = ()
    deleting: tuple[StateTopic, ...] = ()


class ShareMemberRecord(msgspec.Struct, frozen=True):
    """What a member asked for. A tombstone removes the member."""

    group_id: str
    member_id: str
    value: ShareMemberMetadata | None


class ShareEpochRecord(msgspec.Struct, frozen=True):
    """The epoch of a group. A tombstone deletes the group; by then it has no members."""

    group_id: str
    value: ShareEpoch | None


class ShareTargetEpochRecord(msgspec.Struct, frozen=True):
    """The epoch of the group for which the targets were computed."""

    group_id: str
    value: int | None


class ShareTargetRecord(msgspec.Struct, frozen=True):
    """The target assignment of one member."""

    group_id: str
    member_id: str
    value: Partitions | None


class ShareAssignmentRecord(msgspec.Struct, frozen=True):
    """What a member was told. A tombstone: it was told nothing."""

    group_id: str
    member_id: str
    value: ShareAssignment | None


class StateTopicsRecord(msgspec.Struct, frozen=True):
    """The topics of which the group has state. A tombstone: of none."""

    group_id: str
    value: StateTopics | None


ShareRecord = (
    ShareMemberRecord
    | ShareEpochRecord
    | ShareTargetEpochRecord
    | ShareTargetRecord
    | ShareAssignmentRecord
    | StateTopicsRecord
)


# -- the types -------------------------------------------------------------------------------------------


_MEMBER: Final = Struct(
    ShareMemberMetadata,
    {"rack_id": "string?", "client_id": "string", "client_host": "string", "topics": ["string"]},
    {"topics": SORTED_SET},
)

_ASSIGNMENT: Final = Struct(
    ShareAssignment,
    {"epoch": "int32", "previous_epoch": "int32", "state": "int8", "assigned": [TOPIC_PARTITIONS]},
    {"assigned": PARTITIONS},
)

_STATE_TOPIC: Final = Struct(
    StateTopic,
    {"id": "uuid", "name": "string", "partitions": ["int32"], "since_ms": "int64"},
    {"partitions": SORTED_SET},
)

_DELETED_TOPIC: Final = Struct(
    StateTopic,
    {
        "id": "uuid",
        "name": "string",
        # Kafka does not keep them. Once the topic is gone nobody else knows which there were.
        "partitions": Field(["int32"], tag=0, default=()),
    },
    {"partitions": SORTED_SET},
)

_STATE_TOPICS: Final = Struct(
    StateTopics,
    {"initializing": [_STATE_TOPIC], "initialized": [_STATE_TOPIC], "deleting": [_DELETED_TOPIC]},
)

SHARE_RECORD_TYPES: Final[tuple[RecordType[ShareRecord], ...]] = (
    record_type(10, ShareMemberRecord, MEMBER_KEY, _MEMBER),
    record_type(
        11, ShareEpochRecord, GROUP_KEY, Struct(ShareEpoch, {"epoch": "int32", "topics_hash": "int64"})
    ),
    record_type(12, ShareTargetEpochRecord, GROUP_KEY, EPOCH),
    record_type(13, ShareTargetRecord, MEMBER_KEY, TARGET),
    record_type(14, ShareAssignmentRecord, MEMBER_KEY, _ASSIGNMENT),
    record_type(15, StateTopicsRecord, GROUP_KEY, _STATE_TOPICS),
)
"""The types by the version of their keys, which are Kafka's."""
