"""What goes into and comes out of share groups (KIP-932): plain values, no wire format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tidemill.errors import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from tidemill.groups.consumer.member import Partitions
    from tidemill.groups.share.member import ShareMember

__all__ = (
    "AlteredPartition",
    "DeletedTopic",
    "Initialization",
    "PartitionOffset",
    "ShareGroupDescription",
    "ShareGroupOffsets",
    "ShareHeartbeatReply",
    "ShareHeartbeatRequest",
)


@dataclass(frozen=True, slots=True)
class ShareHeartbeatRequest:
    """ShareGroupHeartbeat. None means that the value is unchanged."""

    group_id: str
    member_id: str
    member_epoch: int
    rack_id: str | None = None
    topics: frozenset[str] | None = None
    client_id: str = ""
    client_host: str = ""


@dataclass(frozen=True, slots=True)
class ShareHeartbeatReply:
    """Answer to ShareGroupHeartbeat. ``assignment`` None: as in the last answer."""

    error: ErrorCode = ErrorCode.none
    message: str | None = None
    member_id: str = ""
    member_epoch: int = 0
    heartbeat_interval_ms: int = 0
    assignment: Partitions | None = None


@dataclass(frozen=True, slots=True)
class Initialization:
    """State that is to be begun: for each topic its partitions, and the offset that each starts at."""

    group_id: str
    state_epoch: int
    topics: Mapping[UUID, Mapping[int, int]]


class ShareGroupDescription(msgspec.Struct, frozen=True):
    """One group in ShareGroupDescribe. ``members`` are values that nobody changes any more."""

    group_id: str
    error: ErrorCode = ErrorCode.none
    message: str | None = None
    state: str = ""
    epoch: int = 0
    target_epoch: int = 0
    assignor: str = ""
    members: tuple[ShareMember, ...] = ()


class PartitionOffset(msgspec.Struct, frozen=True):
    """Where a group starts in one partition; -1 if it has no state there, or has not read it yet."""

    start_offset: int = -1
    leader_epoch: int = 0
    #: Finished records at or after the start; -1 if that is not known.
    delivery_complete_count: int = -1
    error: ErrorCode = ErrorCode.none
    message: str | None = None


class ShareGroupOffsets(msgspec.Struct, frozen=True):
    """One group in DescribeShareGroupOffsets: by the topic's id, by partition."""

    group_id: str
    error: ErrorCode = ErrorCode.none
    message: str | None = None
    topics: Mapping[UUID, Mapping[int, PartitionOffset]] = msgspec.field(default_factory=dict)


class AlteredPartition(msgspec.Struct, frozen=True):
    """The result of AlterShareGroupOffsets for one partition."""

    error: ErrorCode = ErrorCode.none
    message: str | None = None


class DeletedTopic(msgspec.Struct, frozen=True):
    """The result of DeleteShareGroupOffsets for one topic."""

    error: ErrorCode = ErrorCode.none
    message: str | None = None
