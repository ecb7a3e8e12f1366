"""Consumer groups and committed offsets: folds over ``__consumer_offsets``.

| module | what |
| --- | --- |
| coordinator, shard | the shell around a shard's state, on top of ``tidemill.coordination`` |
| state | one shard's groups and offsets: handlers return replies, append records, replay them |
| classic, rebalance, roster, effects | the classic group as a state machine |
| consumer_group, consumer_member | the consumer group of the new protocol (KIP-848): state and views |
| consumers | what requests and time do to consumer groups |
| heartbeats, mixed, migration | the new protocol, the classic one beside it, from one to the other |
| target, assignors, reconcile | who shall have which partition, and how a member gets there |
| topics, patterns, deadlines | which topics exist, subscriptions by pattern, what is due when |
| offsets, pending | committed offsets, and those of open transactions |
| records, consumer_records, consumer_codec | what is in the log |
| subscription | what classic members tell each other |
| messages, consumer_messages, settings | values that go in and out |
"""

from __future__ import annotations

from tidemill.groups.consumer_messages import (
    ConsumerGroupDescription,
    ConsumerHeartbeatReply,
    ConsumerHeartbeatRequest,
)
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
from tidemill.groups.topics import ImageTopics, Topics

__all__ = (
    "CommittedOffset",
    "ConsumerGroupDescription",
    "ConsumerHeartbeatReply",
    "ConsumerHeartbeatRequest",
    "DeleteOffsetsResult",
    "FetchOffsetsResult",
    "GroupCoordinator",
    "GroupDescription",
    "GroupListing",
    "GroupSettings",
    "HeartbeatRequest",
    "ImageTopics",
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
    "Topics",
    "TransactionalCommitRequest",
)
