"""Consumer groups and committed offsets: folds over ``__consumer_offsets``.

| module | what |
| --- | --- |
| coordinator, shard | the shell around a shard's state, on top of ``tidemill.coordination`` |
| state | one shard's groups and offsets: handlers return replies, append records, replay them |
| classic, rebalance, roster, effects | the classic group as a state machine |
| offsets, pending | committed offsets, and those of open transactions |
| records, subscription | what is in the log and in a member's metadata |
| messages, settings | values that go in and out |
"""

from __future__ import annotations

from tidemill.groups.coordinator import GroupCoordinator
from tidemill.groups.messages import (
    CommittedOffset,
    DeleteOffsetsResult,
    FetchOffsetsResult,
    GroupDescription,
    GroupListing,
    HeartbeatRequest,
    JoinedMember,
    JoinProtocol,
    JoinReply,
    JoinRequest,
    LeaveReply,
    LeavingMember,
    LeftMember,
    ListGroupsResult,
    MemberDescription,
    OffsetCommitRequest,
    OffsetToCommit,
    SyncReply,
    SyncRequest,
    TopicPartition,
    TransactionalCommitRequest,
)
from tidemill.groups.settings import GroupSettings

__all__ = (
    "CommittedOffset",
    "DeleteOffsetsResult",
    "FetchOffsetsResult",
    "GroupCoordinator",
    "GroupDescription",
    "GroupListing",
    "GroupSettings",
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
    "SyncReply",
    "SyncRequest",
    "TopicPartition",
    "TransactionalCommitRequest",
)
