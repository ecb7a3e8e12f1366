"""Drafts of heartbeats of large share groups: worked out in a thread instead of the event loop.

Looking up and assigning ten thousand partitions takes tens of milliseconds. The plan is made on a copy of
the group; its records are appended if the group is still as it was, else the work is done again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidemill.errors import ErrorCode
from tidemill.groups.consumer.member import JOIN_EPOCH
from tidemill.groups.consumer.messages import Refused
from tidemill.groups.records import encode_record
from tidemill.groups.share.group import ShareGroup
from tidemill.groups.share.heartbeats import check_heartbeat, is_settled, plan_heartbeat

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidemill.groups.messages import Reply
    from tidemill.groups.share.handlers import ShareGroupHandlers
    from tidemill.groups.share.heartbeats import Planned
    from tidemill.groups.share.messages import ShareHeartbeatRequest
    from tidemill.groups.topics import Topics

__all__ = ("ShareDraft", "needs_share_draft")

_LARGE: Final = 500
"""From so many names, partitions and members on, a change of a group takes several milliseconds."""
_RECORDS_BYTES_MAX: Final = 4 * 1024 * 1024
"""The most bytes of records of one change: they are appended on the event loop, in one batch."""


def needs_share_draft(group: object, topics: Topics, request: ShareHeartbeatRequest, now_ms: int) -> bool:
    """Whether a heartbeat may take long, and so needs a draft."""
    if request.member_epoch < JOIN_EPOCH:
        return False
    size = 0
    if isinstance(group, ShareGroup):
        if is_settled(group, topics, request, now_ms):
            return False
        size += len(group.members) + sum(len(member.topics) for member in group.members.values())
        size += sum(len(topic.partitions) for topic in group.topics.initialized)
        if group.seen_revision != topics.revision and size <= _LARGE:
            # Topics may have more partitions now.
            names = frozenset[str]().union(*(member.topics for member in group.members.values()))
            found = (topics.find(name) for name in names)
            size += sum(topic.partitions for topic in found if topic is not None)
    elif group is not None or request.member_epoch != JOIN_EPOCH:
        return False
    for name in request.topics or ():
        if (topic := topics.find(name)) is not None:
            size += 1 + topic.partitions
    return size > _LARGE


class ShareDraft:
    """A heartbeat that is planned on a copy of its group.

    Made and adopted on the event loop; ``run`` may be called in a thread.
    """

    def __init__(
        self,
        handlers: ShareGroupHandlers,
        find: Callable[[str], object],
        topics: Topics,
        request: ShareHeartbeatRequest,
        now_ms: int,
    ) -> None:
        check_heartbeat(request)
        self._handlers = handlers
        self._find = find
        self._original = find(request.group_id)
        self._copy = handlers.group_for(request).copy()
        self._version = self._copy.version
        self._topics = topics.frozen()
        self._request = request
        self._now_ms = now_ms
        self._plan: Planned | None = None
        #: Estimate of the group's memory once the draft is adopted.
        self.size_bytes = 0

    def run(self) -> tuple[Planned, list[tuple[bytes, bytes | None]]]:
        """The plan, and the records to append."""
        plan = self._plan = plan_heartbeat(self._copy, self._topics, self._request, self._now_ms)
        encoded = [encode_record(record) for record in plan.records]
        size_bytes = sum(len(key) + len(value or b"") for key, value in encoded)
        if size_bytes > _RECORDS_BYTES_MAX:
            raise Refused(
                ErrorCode.invalid_request,
                f"group {self._request.group_id!r} would have {size_bytes} bytes of assignments to store; "
                f"{_RECORDS_BYTES_MAX} are allowed: subscribe to fewer topics, or divide them among groups",
            )
        for record in plan.records:
            self._copy.replay(record)
        self.size_bytes = sum(self._copy.bytes_by_host.values())
        return plan, encoded

    def is_current(self) -> bool:
        """Whether the group is still the one that was copied, and unchanged."""
        group = self._find(self._request.group_id)
        if group is not self._original:
            return False
        return not isinstance(group, ShareGroup) or group.version == self._version

    def adopt(self) -> tuple[Reply, ...]:
        """Make the plan part of the state; its records are in the log."""
        assert self._plan is not None
        for record in self._plan.records:
            self._handlers.replay(record)
        self._handlers.settle(self._request.group_id, self._plan, self._now_ms)
        return ()
