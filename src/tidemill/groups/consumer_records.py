"""The records of consumer groups in ``__consumer_offsets``. Their format is in ``consumer_codec``.

| key version | key | value |
| --- | --- | --- |
| 3 | group | the group's epoch |
| 4 | group | the subscribed topics as they were when the epoch was last raised |
| 5 | group, member | what the member asked for |
| 6 | group | the epoch of the target assignment |
| 7 | group, member | the member's target |
| 8 | group, member | the member's epochs and what it holds |
| 16 | group, pattern | the topics that the pattern matched |

A value of null is a tombstone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.groups.consumer_member import ClassicMetadata, ConsumerMember, MemberState, Partitions
    from tidemill.groups.topics import SubscribedTopic

__all__ = (
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

    @classmethod
    def of(cls, member: ConsumerMember) -> MemberMetadata:
        """What ``member`` asked for."""
        return cls(**{name: getattr(member, name) for name in cls.__slots__})

    def applied_to(self, member: ConsumerMember) -> ConsumerMember:
        """The member, having asked for this."""
        return replace(member, **{name: getattr(self, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class CurrentAssignment:
    """A member's progress."""

    epoch: int
    previous_epoch: int
    state: MemberState
    assigned: Partitions
    revoking: Partitions

    @classmethod
    def of(cls, member: ConsumerMember) -> CurrentAssignment:
        """How far ``member`` is."""
        return cls(member.epoch, member.previous_epoch, member.state, member.assigned, member.revoking)

    def applied_to(self, member: ConsumerMember) -> ConsumerMember:
        """The member, having come this far."""
        return replace(member, **{name: getattr(self, name) for name in self.__slots__})


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
