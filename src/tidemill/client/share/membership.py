"""Membership in a share group: join, heartbeats, the partitions to fetch from, leave.

The member's id is its own choice and stays the same when it has to join again. The group's coordinator tells
in its answers how often it wants to hear from the member, and, when it changes, what to fetch from.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final
from uuid import UUID, uuid4

from tidemill.client.cluster import Cluster
from tidemill.errors import ErrorCode, TidemillError
from tidemill.net.answers import check

__all__ = ("Assigned", "ShareMembership")

_log = logging.getLogger(__name__)

_JOIN: Final = 0
_LEAVE: Final = -1
_FIRST_INTERVAL_SECONDS: Final = 5.0
_LEAVE_TIMEOUT_MS: Final = 5_000
#: The group went on without this member: it joins again.
_JOIN_AGAIN: Final = frozenset({ErrorCode.fenced_member_epoch, ErrorCode.unknown_member_id})
#: How often a member that was put out joins again before it says so.
_JOINS_IN_A_ROW: Final = 10

Assigned = frozenset[tuple[UUID, int]]
"""Partitions by the ids of their topics."""


class ShareMembership:
    """The membership of this consumer in one share group.

    ``on_assigned`` is called with the partitions whenever they change.
    """

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        topics: Sequence[str],
        on_assigned: Callable[[Assigned], None],
        *,
        rack: str | None = None,
    ) -> None:
        self._cluster = cluster
        self._group = group
        self.topics = topics
        self._on_assigned = on_assigned
        self._rack = rack
        self.member_id = str(uuid4())
        self._epoch = _JOIN
        self._interval_seconds = _FIRST_INTERVAL_SECONDS
        #: Whether the coordinator has the topics that this member subscribes to.
        self._subscribed = False

    @property
    def is_joined(self) -> bool:
        """Whether the group's coordinator has let this member in."""
        return self._epoch > _JOIN

    def subscribe(self, topics: Sequence[str]) -> None:
        """Subscribe to these topics from the next heartbeat on."""
        self.topics = topics
        self._subscribed = False

    async def join(self) -> None:
        """Become a member. Raises ``TidemillError`` if the group does not take it."""
        for _ in range(_JOINS_IN_A_ROW):
            if await self._beat():
                return
        raise TidemillError(
            f"group {self._group!r} has put this member out {_JOINS_IN_A_ROW} times in a row; look at the "
            f"group with 'tidemill share describe {self._group}', and at the log of its coordinator's node",
            code=ErrorCode.fenced_member_epoch,
        )

    async def stay(self) -> None:
        """Send heartbeats until this is cancelled. Raises ``TidemillError`` when the membership is over."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            if not await self._beat():
                _log.warning("group %r went on without this member; joining it again", self._group)
                await self.join()

    async def leave(self) -> None:
        """Tell the coordinator, so that the others need not wait for the session's end."""
        if not self.is_joined:
            return
        self._epoch = _LEAVE
        # Without contact the session ends by itself.
        with contextlib.suppress(TidemillError):
            await self._ask(_LEAVE_TIMEOUT_MS)

    async def _beat(self) -> bool:
        """Send one heartbeat, again until it is answered; False if the group went on without this member."""
        topics = self.topics
        answer = await self._cluster.retrying(self._answered)
        if answer.error_code in _JOIN_AGAIN:
            self._epoch, self._subscribed = _JOIN, False
            self._on_assigned(frozenset())
            return False
        self._subscribed = self.topics is topics
        self._epoch = answer.member_epoch
        self._interval_seconds = answer.heartbeat_interval.total_seconds() or _FIRST_INTERVAL_SECONDS
        if answer.assignment is not None:
            self._on_assigned(
                frozenset(
                    (topic.topic_id, partition)
                    for topic in answer.assignment.topic_partitions
                    for partition in topic.partitions
                )
            )
        return True

    async def _answered(self) -> Any:
        answer = await self._ask(self._cluster.timeout_ms)
        if answer.error_code not in _JOIN_AGAIN:
            check(answer.error_code, answer.error_message, f"staying in share group {self._group!r}")
        return answer

    async def _ask(self, timeout_ms: int) -> Any:
        body = {
            "group_id": self._group,
            "member_id": self.member_id,
            "member_epoch": self._epoch,
            "rack_id": self._rack if self._epoch == _JOIN else None,
            "subscribed_topic_names": None if self._subscribed else list(self.topics),
        }
        return await self._cluster.to_coordinator(
            self._group, "ShareGroupHeartbeat", body, timeout_ms=timeout_ms
        )
