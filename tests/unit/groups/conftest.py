"""A group under a script: requests by name, time by hand, every step checked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from support.consumer_groups import FakeTopics
from support.group_invariants import check_groups
from tidemill.errors import ErrorCode
from tidemill.groups.classic.group import ClassicGroup
from tidemill.groups.messages import (
    HeartbeatRequest,
    JoinProtocol,
    JoinReply,
    JoinRequest,
    LeavingMember,
    SyncReply,
    SyncRequest,
)
from tidemill.groups.settings import GroupSettings
from tidemill.groups.state import ShardState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidemill.groups.messages import LeaveReply, Reply
    from tidemill.groups.records import GroupRecord

SETTINGS = GroupSettings(
    initial_rebalance_delay_ms=3_000,
    min_session_timeout_ms=1_000,
    max_session_timeout_ms=60_000,
    new_member_join_timeout_ms=300_000,
)


class Script:
    """Drives one group of a shard. Tokens are names; ``replies`` maps a name to its answer."""

    def __init__(self, settings: GroupSettings = SETTINGS) -> None:
        self.log: list[GroupRecord] = []
        self.fail_append_with: Exception | None = None
        self.now_ms = 1_000_000
        self.replies: dict[str, JoinReply | SyncReply] = {}
        self.waiting: set[str] = set()
        self.state = ShardState(settings, self._append, FakeTopics())
        self._fresh = 0

    def _append(self, records: Sequence[GroupRecord], producer: tuple[int, int] | None = None) -> None:
        if self.fail_append_with is not None:
            raise self.fail_append_with
        self.log += records

    @property
    def group(self) -> ClassicGroup:
        group = self.state.groups["g"]
        assert isinstance(group, ClassicGroup)
        return group

    def _collect(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            assert isinstance(reply.token, str)
            assert reply.token in self.waiting, f"{reply.token} is answered twice"
            self.waiting.remove(reply.token)
            self.replies[reply.token] = reply.body
        check_groups(self.state)

    def send_join(self, token: str, member_id: str = "", **changes: Any) -> JoinReply | None:
        request = JoinRequest(
            "g",
            member_id,
            "consumer",
            (JoinProtocol("range", b"m"),),
            session_timeout_ms=10_000,
            rebalance_timeout_ms=20_000,
            client_id="client",
            client_host="/127.0.0.1",
        )
        self._fresh += 1
        self.waiting.add(token)
        try:
            replies = self.state.join(
                replace(request, **changes),
                token,
                f"id{self._fresh}",
                self.now_ms,
            )
        except Exception:
            self.waiting.remove(token)
            raise
        self._collect(replies)
        return self.join_reply(token)

    def join_reply(self, token: str) -> JoinReply | None:
        reply = self.replies.get(token)
        assert reply is None or isinstance(reply, JoinReply)
        return reply

    def sync_reply(self, token: str) -> SyncReply | None:
        reply = self.replies.get(token)
        assert reply is None or isinstance(reply, SyncReply)
        return reply

    def send_sync(self, token: str, member_id: str, generation: int, **changes: Any) -> SyncReply | None:
        request = replace(SyncRequest("g", member_id, generation), **changes)
        self.waiting.add(token)
        try:
            replies = self.state.sync(request, token, self.now_ms)
        except Exception:
            self.waiting.remove(token)
            raise
        self._collect(replies)
        return self.sync_reply(token)

    def heartbeat(self, member_id: str, generation: int, instance_id: str | None = None) -> ErrorCode:
        error = self.state.heartbeat(HeartbeatRequest("g", member_id, generation, instance_id), self.now_ms)
        check_groups(self.state)
        return error

    def leave(self, *members: LeavingMember) -> LeaveReply:
        answer, replies = self.state.leave("g", members, self.now_ms)
        self._collect(replies)
        return answer

    def wait(self, duration_ms: int) -> None:
        """Let time pass, ticking exactly when the group asks for it."""
        end_ms = self.now_ms + duration_ms
        while True:
            group = self.state.groups.get("g")
            deadline_ms = None if group is None else group.next_deadline_ms()
            if deadline_ms is None or deadline_ms > end_ms:
                break
            self.now_ms = max(self.now_ms, deadline_ms)
            self._collect(self.state.tick("g", self.now_ms))
        self.now_ms = end_ms

    def wait_for(self, token: str) -> None:
        """Let time pass until a request is answered."""
        for _ in range(1_000):
            if token in self.replies:
                return
            self.wait(100)
        raise AssertionError(f"{token} is never answered")

    def stable(self, *names: str, **changes: Any) -> list[str]:
        """A stable group of members that joined with the names as tokens; returns their ids, leader first."""
        for name in names:
            self.send_join(name, version=3, **changes)
        self.wait_for(names[0])
        ids = []
        for name in names:
            reply = self.join_reply(name)
            assert reply is not None
            assert reply.error is ErrorCode.none
            ids.append(reply.member_id)
        generation = self.group.generation
        for name, member_id in zip(names[1:], ids[1:], strict=True):
            assert self.send_sync(f"{name}-sync", member_id, generation) is None
        assignments = {member_id: f"part-{name}".encode() for name, member_id in zip(names, ids, strict=True)}
        assert self.send_sync(f"{names[0]}-sync", ids[0], generation, assignments=assignments) is not None
        assert str(self.group.state) == "Stable"
        return ids

    def reload(self) -> ShardState:
        """What a restart would find."""
        state = ShardState(self.state.settings, self._append, FakeTopics())
        for record in self.log:
            state.replay(record, self.now_ms)
        return state


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def make_script() -> type[Script]:
    return Script
