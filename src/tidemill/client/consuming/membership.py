"""Membership in a consumer group: join, sync, heartbeat, leave (the classic protocol, range assignor).

``join`` gives the partitions to read. From then on heartbeats run by themselves; when ``must_rejoin`` is set
the group is rebalancing, and the member should commit what it has done and call ``join`` again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Final

from tidemill.client.admin.groups import Identity
from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.client.consuming.assignment import pack_assignment, parse_assignment, range_assignment
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.net.answers import check
from tidemill.wire.consumer_protocol import CONSUMER_PROTOCOL, pack_subscription, parse_subscription

__all__ = ("Membership",)

_RANGE: Final = "range"
_ANSWER_MARGIN_MS: Final = 10_000
_START_ANEW: Final = frozenset(
    {
        ErrorCode.illegal_generation,
        ErrorCode.rebalance_in_progress,
        ErrorCode.unknown_member_id,
        ErrorCode.member_id_required,
    }
)


class Membership:
    """The membership of this client in one group."""

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        topics: Sequence[str],
        *,
        session_timeout_ms: int = 10_000,
        rebalance_timeout_ms: int = 60_000,
        heartbeat_interval_ms: int = 3_000,
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._topics = tuple(topics)
        self._session_timeout_ms = session_timeout_ms
        self._rebalance_timeout_ms = rebalance_timeout_ms
        self._heartbeat_seconds = heartbeat_interval_ms / 1000
        self._member_id = ""
        self._generation = -1
        self.must_rejoin = asyncio.Event()
        self._heartbeats: asyncio.Task[None] | None = None

    @property
    def identity(self) -> Identity:
        """The member and generation in whose name this member commits."""
        return Identity(self._member_id, self._generation)

    async def join(self) -> tuple[TopicPartition, ...]:
        """Take part in the rebalance until this member has its partitions."""
        await self._stop_heartbeats()
        while True:
            try:
                assignment = await self._cluster.retrying(self._join_and_sync)
            except ApiError as error:
                if error.code not in _START_ANEW:
                    raise
                if error.code == ErrorCode.unknown_member_id:
                    self._member_id = ""
                continue
            self.must_rejoin.clear()
            self._heartbeats = asyncio.get_running_loop().create_task(self._beat())
            return assignment

    async def leave(self) -> None:
        """Leave the group, so that the others need not wait for the session to end."""
        await self._stop_heartbeats()
        if not self._member_id:
            return
        body = {
            "group_id": self._group,
            "member_id": self._member_id,
            "members": [{"member_id": self._member_id, "reason": "the consumer was closed"}],
        }
        # A coordinator that cannot be reached ends the session by itself.
        with contextlib.suppress(TidemillError):
            await self._cluster.to_coordinator(self._group, "LeaveGroup", body)
        self._member_id = ""

    async def _join_and_sync(self) -> tuple[TopicPartition, ...]:
        joined = await self._ask(
            "JoinGroup",
            {
                "session_timeout": self._session_timeout_ms,
                "rebalance_timeout": self._rebalance_timeout_ms,
                "member_id": self._member_id,
                "protocol_type": CONSUMER_PROTOCOL,
                "protocols": [{"name": _RANGE, "metadata": pack_subscription(self._topics)}],
            },
        )
        if joined.error_code == ErrorCode.member_id_required:
            self._member_id = joined.member_id
        check(joined.error_code, None, f"joining group {self._group!r}")
        self._member_id, self._generation = joined.member_id, joined.generation_id
        leads = joined.leader == joined.member_id and not getattr(joined, "skip_assignment", False)
        synced = await self._ask(
            "SyncGroup",
            {
                "generation_id": self._generation,
                "member_id": self._member_id,
                "protocol_type": CONSUMER_PROTOCOL,
                "protocol_name": joined.protocol_name,
                "assignments": await self._assign(joined.members) if leads else [],
            },
        )
        check(synced.error_code, None, f"joining group {self._group!r}")
        return parse_assignment(synced.assignment)

    async def _ask(self, name: str, body: dict[str, Any]) -> Any:
        return await self._cluster.to_coordinator(
            self._group,
            name,
            {"group_id": self._group, **body},
            timeout_ms=self._rebalance_timeout_ms + _ANSWER_MARGIN_MS,
        )

    async def _assign(self, members: Sequence[Any]) -> list[dict[str, Any]]:
        """Assign partitions to all members, as the leader of the group."""
        subscriptions = {member.member_id: parse_subscription(member.metadata) for member in members}
        counts: dict[str, int] = {}
        for topic in sorted(set().union(*subscriptions.values())):
            # A topic that does not exist yet has nothing to read.
            with contextlib.suppress(ApiError):
                counts[topic] = len((await self._cluster.topic(topic)).partitions)
        return [
            {"member_id": member_id, "assignment": pack_assignment(partitions)}
            for member_id, partitions in range_assignment(subscriptions, counts).items()
        ]

    # --- heartbeats

    async def _beat(self) -> None:
        while not self.must_rejoin.is_set():
            await asyncio.sleep(self._heartbeat_seconds)
            try:
                await self._cluster.retrying(self._beat_once, timeout_ms=self._session_timeout_ms)
            except TidemillError:
                # Whatever the error was, joining again either resolves it or raises it.
                self.must_rejoin.set()

    async def _beat_once(self) -> None:
        body = {"group_id": self._group, "generation_id": self._generation, "member_id": self._member_id}
        response = await self._cluster.to_coordinator(
            self._group, "Heartbeat", body, timeout_ms=self._session_timeout_ms
        )
        check(response.error_code, None, f"staying in group {self._group!r}")

    async def _stop_heartbeats(self) -> None:
        heartbeats, self._heartbeats = self._heartbeats, None
        if heartbeats is not None:
            heartbeats.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await heartbeats
