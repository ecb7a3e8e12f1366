"""What goes into and comes out of the group coordinator: plain values, no wire format.

The server maps Kafka's requests onto these and these onto Kafka's responses. ``version`` is the version of
the client's request where the behaviour depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from tidemill.config.values import TopicPartition
from tidemill.errors import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = (
    "CommittedOffset",
    "DeleteOffsetsResult",
    "FetchOffsetsResult",
    "GroupDescription",
    "GroupListing",
    "HeartbeatRequest",
    "JoinProtocol",
    "JoinReply",
    "JoinRequest",
    "JoinedMember",
    "LeaveReply",
    "LeavingMember",
    "LeftMember",
    "ListGroupsResult",
    "MemberDescription",
    "OffsetCommitRequest",
    "OffsetToCommit",
    "Reply",
    "SyncReply",
    "SyncRequest",
    "TopicPartition",
    "TransactionalCommitRequest",
)


_FIRST_VERSION_WITH_REQUIRED_MEMBER_ID = 4
_FIRST_VERSION_WITH_SKIP_ASSIGNMENT = 9


class JoinProtocol(msgspec.Struct, frozen=True):
    """A way of assigning partitions that a member supports, and what it tells the leader about itself."""

    name: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """JoinGroup. An empty ``member_id`` asks for one; a negative rebalance timeout was not sent at all."""

    group_id: str
    member_id: str
    protocol_type: str
    protocols: tuple[JoinProtocol, ...]
    session_timeout_ms: int
    rebalance_timeout_ms: int = -1
    instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    version: int = 9

    @property
    def metadata_bytes(self) -> int:
        """The size of the member's protocols: their names, and its metadata for them."""
        return sum(len(protocol.name) + len(protocol.metadata) for protocol in self.protocols)

    @property
    def must_know_member_id(self) -> bool:
        """Whether this client can be told its id first and be asked to join again with it."""
        return self.version >= _FIRST_VERSION_WITH_REQUIRED_MEMBER_ID

    @property
    def can_skip_assignment(self) -> bool:
        """Whether a leader can be told that its group already has assignments."""
        return self.version >= _FIRST_VERSION_WITH_SKIP_ASSIGNMENT


class JoinedMember(msgspec.Struct, frozen=True):
    """A member as the leader sees it, to compute assignments from."""

    member_id: str
    instance_id: str | None
    metadata: bytes


@dataclass(frozen=True, slots=True)
class JoinReply:
    """Answer to JoinGroup. Only the leader gets ``members``."""

    error: ErrorCode = ErrorCode.none
    member_id: str = ""
    generation: int = -1
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str = ""
    skip_assignment: bool = False
    members: tuple[JoinedMember, ...] = ()


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """SyncGroup. Only the leader sends ``assignments`` (member id to bytes)."""

    group_id: str
    member_id: str
    generation: int
    assignments: Mapping[str, bytes] = field(default_factory=dict)
    instance_id: str | None = None
    protocol_type: str | None = None
    protocol_name: str | None = None


class SyncReply(msgspec.Struct, frozen=True):
    """Answer to SyncGroup."""

    error: ErrorCode = ErrorCode.none
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = b""


class Reply(msgspec.Struct, frozen=True):
    """An answer addressed to the request that was given ``token``."""

    token: object
    body: JoinReply | SyncReply


class HeartbeatRequest(msgspec.Struct, frozen=True):
    """Heartbeat: the member is alive and thinks it is in ``generation``."""

    group_id: str
    member_id: str
    generation: int
    instance_id: str | None = None


class LeavingMember(msgspec.Struct, frozen=True):
    """A member to remove: by id, or with an empty id by ``instance_id`` (how an operator removes one)."""

    member_id: str
    instance_id: str | None = None


class LeftMember(msgspec.Struct, frozen=True):
    """The result for one ``LeavingMember``."""

    member_id: str
    instance_id: str | None
    error: ErrorCode = ErrorCode.none


class LeaveReply(msgspec.Struct, frozen=True):
    """Answer to LeaveGroup. Before version 3 a client is told its one member's error instead of ``error``."""

    error: ErrorCode = ErrorCode.none
    members: tuple[LeftMember, ...] = ()


class OffsetToCommit(msgspec.Struct, frozen=True):
    """One partition of a commit. ``metadata`` None is stored as an empty string."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str | None = None


class OffsetCommitRequest(msgspec.Struct, frozen=True):
    """OffsetCommit. ``generation`` -1 is a client that manages its partitions itself."""

    group_id: str
    offsets: Sequence[OffsetToCommit]
    generation: int = -1
    member_id: str = ""
    instance_id: str | None = None
    retention_ms: int = -1
    version: int = 9
    client_host: str = ""


class TransactionalCommitRequest(msgspec.Struct, frozen=True):
    """TxnOffsetCommit: a commit that counts if the producer's transaction does."""

    commit: OffsetCommitRequest
    producer_id: int
    producer_epoch: int


class CommittedOffset(msgspec.Struct, frozen=True):
    """One partition of an offset fetch; -1 if nothing is committed or there is an error."""

    offset: int = -1
    leader_epoch: int = -1
    metadata: str = ""
    error: ErrorCode = ErrorCode.none


class FetchOffsetsResult(msgspec.Struct, frozen=True):
    """Answer to OffsetFetch for one group, in the order in which partitions were asked for."""

    error: ErrorCode = ErrorCode.none
    offsets: Mapping[TopicPartition, CommittedOffset] = msgspec.field(default_factory=dict)


class DeleteOffsetsResult(msgspec.Struct, frozen=True):
    """Answer to OffsetDelete."""

    error: ErrorCode = ErrorCode.none
    partitions: Mapping[TopicPartition, ErrorCode] = msgspec.field(default_factory=dict)


class GroupListing(msgspec.Struct, frozen=True):
    """One group in ListGroups."""

    group_id: str
    protocol_type: str
    state: str
    group_type: str = "classic"


class ListGroupsResult(msgspec.Struct, frozen=True):
    """Answer to ListGroups. With an error, ``groups`` holds those of the partitions that did load."""

    error: ErrorCode = ErrorCode.none
    groups: tuple[GroupListing, ...] = ()


class MemberDescription(msgspec.Struct, frozen=True):
    """A member in DescribeGroups. ``metadata`` is known only while the group is stable."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


class GroupDescription(msgspec.Struct, frozen=True):
    """One group in DescribeGroups. A group that does not exist has the state ``Dead`` and no error."""

    group_id: str
    error: ErrorCode = ErrorCode.none
    state: str = ""
    protocol_type: str = ""
    protocol_name: str = ""
    members: tuple[MemberDescription, ...] = ()
