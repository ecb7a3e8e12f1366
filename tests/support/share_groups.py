"""Share groups under a script: topics by hand, time by hand, a persister in memory, every step checked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.consumer_groups import FakeTopics
from support.group_invariants import check_groups
from tidemill.coordination.share_state import (
    NO_CUT,
    NO_POSITION,
    LogPosition,
    SharePartitionKey,
    ShareState,
    ShareStateSummary,
    StateBatch,
)
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.groups.consumer.messages import Refused
from tidemill.groups.records import GroupRecord, decode_record, encode_record
from tidemill.groups.settings import GroupSettings
from tidemill.groups.share.group import ShareGroup
from tidemill.groups.share.messages import Initialization, ShareHeartbeatReply, ShareHeartbeatRequest
from tidemill.groups.state import ShardState

__all__ = ("SETTINGS", "FakePersister", "ShareScript")

SETTINGS = GroupSettings(share_session_timeout_ms=45_000, share_heartbeat_interval_ms=5_000)


@dataclass
class FakePersister:
    """State of share partitions in memory. ``fail_with`` is raised instead of an answer."""

    states: dict[SharePartitionKey, ShareStateSummary] = field(default_factory=dict)
    calls: list[tuple[str, SharePartitionKey]] = field(default_factory=list)
    fail_with: TidemillError | None = None
    #: Calls for these partitions fail; None: all do.
    fails: frozenset[int] | None = None
    #: Set while calls may go on.
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.goes_on.set()

    async def _call(self, name: str, key: SharePartitionKey) -> None:
        self.calls.append((name, key))
        await self.goes_on.wait()
        await asyncio.sleep(0)
        if self.fail_with is not None and (self.fails is None or key.partition in self.fails):
            raise self.fail_with

    async def initialize(self, key: SharePartitionKey, state_epoch: int, start_offset: int) -> None:
        await self._call("initialize", key)
        known = self.states.get(key)
        if known is not None and state_epoch < known.state_epoch:
            raise ApiError(ErrorCode.fenced_state_epoch, f"the state is in epoch {known.state_epoch}")
        if known is None or state_epoch > known.state_epoch:
            self.states[key] = ShareStateSummary(state_epoch, 0, start_offset, 0)

    async def delete(self, key: SharePartitionKey) -> None:
        await self._call("delete", key)
        self.states.pop(key, None)

    async def read_summary(self, key: SharePartitionKey, leader_epoch: int) -> ShareStateSummary:
        await self._call("read_summary", key)
        if key not in self.states:
            raise ApiError(ErrorCode.invalid_request, "there is no such state")
        return self.states[key]

    async def read_state(self, key: SharePartitionKey, leader_epoch: int) -> ShareState:
        raise NotImplementedError

    async def write_state(
        self,
        key: SharePartitionKey,
        state_epoch: int,
        leader_epoch: int,
        start_offset: int,
        delivery_complete_count: int,
        batches: Sequence[StateBatch],
        log_position: LogPosition = NO_POSITION,
        cut_offset: int = NO_CUT,
    ) -> None:
        raise NotImplementedError

    def starts(self) -> dict[int, int]:
        """By partition, the offset that its state starts at."""
        return {key.partition: state.start_offset for key, state in sorted(self.states.items())}


class ShareScript:
    """Drives the share group ``g`` of a shard. What is appended goes through the binary format.

    State is initialized when the test says so: ``work`` has what is to be.
    """

    def __init__(
        self, topics: FakeTopics, settings: GroupSettings = SETTINGS, *, on_drafts: bool = False
    ) -> None:
        self.topics = topics
        self.settings = settings
        self.on_drafts = on_drafts
        self.log: list[tuple[bytes, bytes | None]] = []
        self.fail_append_with: Exception | None = None
        self.now_ms = 1_000_000
        self.work: list[Initialization] = []
        self.state = ShardState(settings, self._append, topics)

    def _append(self, records: Sequence[GroupRecord], producer: tuple[int, int] | None = None) -> None:
        del producer
        if self.fail_append_with is not None:
            raise self.fail_append_with
        self.log += [encode_record(record) for record in records]

    @property
    def group(self) -> ShareGroup:
        group = self.state.groups["g"]
        assert isinstance(group, ShareGroup)
        return group

    def send(self, member_id: str, epoch: int, **fields: Any) -> ShareHeartbeatReply:
        """Send one heartbeat, as it is given."""
        request = ShareHeartbeatRequest("g", member_id, epoch, client_id="c", client_host="/h", **fields)
        try:
            reply, work = self._beat(request)
        except Refused as refusal:
            reply, work = ShareHeartbeatReply(refusal.code, refusal.message), None
        if work is not None:
            self.work.append(work)
        check_groups(self.state)
        return reply

    def _beat(self, request: ShareHeartbeatRequest) -> tuple[ShareHeartbeatReply, Initialization | None]:
        if not self.on_drafts or request.member_epoch < 0:
            return self.state.shares.heartbeat(request, self.now_ms)
        draft = self.state.share_draft(request, self.now_ms)
        before = len(self.log), self.as_stored()
        plan, records = draft.run()
        assert draft.is_current()
        assert (len(self.log), self.as_stored()) == before, "the group itself changed"
        if records and self.fail_append_with is not None:
            raise self.fail_append_with
        self.log += records
        draft.adopt()
        return plan.reply, plan.initialization

    def join(self, member_id: str, *topics: str, **fields: Any) -> ShareHeartbeatReply:
        """A heartbeat that joins."""
        return self.send(member_id, 0, topics=frozenset(topics), **fields)

    def beat(self, member_id: str, **fields: Any) -> ShareHeartbeatReply:
        """A heartbeat in the member's epoch."""
        return self.send(member_id, self.group.members[member_id].epoch, **fields)

    def initialize(self, failed: Sequence[str] = (), above_epoch: int = -1) -> list[Initialization]:
        """Let all initializations that wait end; those of topics in ``failed`` fail."""
        done, self.work = self.work, []
        ids = {topic.id for name in failed if (topic := self.topics.find(name)) is not None}
        for work in done:
            lost = {(topic_id, index) for topic_id in ids for index in work.topics.get(topic_id, ())}
            self.state.shares.initialized(work, lost, above_epoch, self.now_ms)
        check_groups(self.state)
        return done

    def starts(self, work: Initialization) -> dict[str, dict[int, int]]:
        """What an initialization writes, by the name of the topic."""
        return {self.topics.name_of(each) or "?": dict(starts) for each, starts in work.topics.items()}

    def told(self, reply: ShareHeartbeatReply) -> set[tuple[str, int]] | None:
        """The assignment in an answer, by name."""
        return None if reply.assignment is None else self.topics.named(reply.assignment)

    def assigned(self, member_id: str) -> set[tuple[str, int]]:
        return self.topics.named(self.group.members[member_id].assigned)

    def settle(self, *member_ids: str) -> None:
        """Let members speak, and state be initialized, until nothing changes any more."""
        for _ in range(4):
            for member_id in member_ids:
                self.beat(member_id)
            self.initialize()

    def wait(self, duration_ms: int) -> None:
        """Let time pass, ticking exactly when the group asks for it."""
        end_ms = self.now_ms + duration_ms
        while True:
            group = self.state.groups.get("g")
            deadline_ms = None if group is None else group.next_deadline_ms()
            if deadline_ms is None or deadline_ms > end_ms:
                break
            self.now_ms = max(self.now_ms, deadline_ms)
            self.state.tick("g", self.now_ms)
            if isinstance(group, ShareGroup) and group.delete_at_ms == deadline_ms:
                group.retry_deletion_later(self.now_ms)
            check_groups(self.state)
        self.now_ms = end_ms

    def as_stored(self) -> object:
        """What of the group is in the log."""
        group = self.state.groups.get("g")
        return stored(group) if isinstance(group, ShareGroup) else group

    def reload(self, *, start: bool = True) -> ShardState:
        """What a restart, or another leader, finds."""
        state = ShardState(self.settings, self._append, self.topics)
        for key, value in self.log:
            record = decode_record(key, value)
            assert record is not None
            state.replay(record, self.now_ms)
        if start:
            list(state.start(self.now_ms))
        return state

    def restart(self) -> None:
        """Go on with what another leader finds. What was under way is lost."""
        before = self.as_stored()
        self.work = []
        self.state = self.reload()
        assert self.as_stored() == before


def stored(group: ShareGroup) -> Mapping[str, object]:
    """What of a group is in the log."""
    return {
        "epoch": (group.epoch, group.topics_hash),
        "target_epoch": group.target_epoch,
        "members": group.members.copy(),
        "targets": group.targets.copy(),
        "topics": group.topics,
    }
