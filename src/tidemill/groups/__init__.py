"""Consumer groups and committed offsets: folds over ``__consumer_offsets``.

| module | what |
| --- | --- |
| coordinator, shard, clock | the shell: shards, their logs and timers, what waits for durability |
| state | one shard's groups and offsets: handlers return replies, append records, replay them |
| classic, rebalance, roster, effects | the classic group as a state machine |
| offsets | committed offsets |
| records, subscription, binary | what is in the log and in a member's metadata |
| messages, settings | values that go in and out |
"""

from __future__ import annotations

from tidemill.groups.clock import Clock, LoopClock, Timer
from tidemill.groups.coordinator import CoordinatorLog, GroupCoordinator, LogAccess, partition_of_group
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
)
from tidemill.groups.settings import GroupSettings

__all__ = (
    "Clock",
    "CommittedOffset",
    "CoordinatorLog",
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
    "LogAccess",
    "LoopClock",
    "MemberDescription",
    "OffsetCommitRequest",
    "OffsetToCommit",
    "SyncReply",
    "SyncRequest",
    "Timer",
    "TopicPartition",
    "partition_of_group",
)
