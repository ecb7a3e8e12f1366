"""What goes into and comes out of consumer groups (KIP-848): plain values, no wire format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tidemill.errors import ApiError, ErrorCode
from tidemill.groups.consumer.member import JOIN_EPOCH

if TYPE_CHECKING:
    from uuid import UUID

    from tidemill.groups.consumer.member import Partitions

__all__ = (
    "ConsumerGroupDescription",
    "ConsumerHeartbeatReply",
    "ConsumerHeartbeatRequest",
    "ConsumerMemberDescription",
    "DescribedTopic",
    "Refused",
)


class Refused(ApiError):
    """A request that the group refuses; nothing was changed. An error of the log is never one of these."""


class ConsumerHeartbeatRequest(msgspec.Struct, frozen=True):
    """ConsumerGroupHeartbeat. None, and -1 for the timeout, mean that the value is unchanged."""

    group_id: str
    member_id: str
    member_epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int = -1
    topics: frozenset[str] | None = None
    regex: str | None = None
    assignor: str | None = None
    owned: Partitions | None = None
    client_id: str = ""
    client_host: str = ""
    version: int = 1

    @property
    def subscribes(self) -> bool:
        """Whether the member joins, or says anew what it subscribes to."""
        is_said = self.topics is not None or self.regex is not None
        return self.member_epoch == JOIN_EPOCH or (is_said and self.member_epoch > JOIN_EPOCH)

    @property
    def is_full(self) -> bool:
        """Whether the request has every field, as it does when the member joins and after an error."""
        says_all = self.rebalance_timeout_ms != -1 and self.owned is not None
        return self.member_epoch == JOIN_EPOCH or (
            says_all and (self.topics is not None or self.regex is not None)
        )


class ConsumerHeartbeatReply(msgspec.Struct, frozen=True):
    """Answer to ConsumerGroupHeartbeat. ``assignment`` None: as in the last answer."""

    error: ErrorCode = ErrorCode.none
    message: str | None = None
    member_id: str | None = None
    member_epoch: int = 0
    heartbeat_interval_ms: int = 0
    assignment: Partitions | None = None


class DescribedTopic(msgspec.Struct, frozen=True):
    """Some partitions of one topic."""

    id: UUID
    name: str
    partitions: tuple[int, ...]


class ConsumerMemberDescription(msgspec.Struct, frozen=True):
    """A member in ConsumerGroupDescribe."""

    member_id: str
    instance_id: str | None
    rack_id: str | None
    member_epoch: int
    client_id: str
    client_host: str
    topics: tuple[str, ...]
    regex: str | None
    assignment: tuple[DescribedTopic, ...]
    target: tuple[DescribedTopic, ...]
    is_classic: bool


class ConsumerGroupDescription(msgspec.Struct, frozen=True):
    """One group in ConsumerGroupDescribe."""

    group_id: str
    error: ErrorCode = ErrorCode.none
    message: str | None = None
    state: str = ""
    epoch: int = 0
    target_epoch: int = 0
    assignor: str = ""
    members: tuple[ConsumerMemberDescription, ...] = ()
