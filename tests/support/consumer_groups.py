"""Consumer groups under a script: topics by hand, time by hand, every step checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, TypeVar
from uuid import UUID, uuid5

from support.group_invariants import check_groups
from tidemill.errors import ErrorCode
from tidemill.groups.consumer.draft import GroupDraft
from tidemill.groups.consumer.group import ConsumerGroup
from tidemill.groups.consumer.member import Partitions
from tidemill.groups.consumer.messages import ConsumerHeartbeatReply, ConsumerHeartbeatRequest, Refused
from tidemill.groups.messages import (
    HeartbeatRequest,
    JoinProtocol,
    JoinReply,
    JoinRequest,
    LeavingMember,
    Reply,
    SyncReply,
    SyncRequest,
)
from tidemill.groups.records import GroupRecord, decode_record, encode_record
from tidemill.groups.settings import GroupSettings
from tidemill.groups.state import ShardState
from tidemill.groups.topics import SubscribedTopic
from tidemill.wire.consumer_protocol import parse_assignment

__all__ = ("SETTINGS", "ConsumerScript", "FakeTopics", "subscription")

_NAMESPACE = UUID(int=1)
_T = TypeVar("_T")

SETTINGS = GroupSettings(
    initial_rebalance_delay_ms=0,
    min_session_timeout_ms=1_000,
    consumer_session_timeout_ms=45_000,
    consumer_heartbeat_interval_ms=5_000,
)


class FakeTopics:
    """Topics that a test makes, changes and deletes."""

    def __init__(self, **partitions: int) -> None:
        self.revision = 1
        self._topics: dict[str, SubscribedTopic] = {}
        self._made = 0
        for name, count in partitions.items():
            self.create(name, count)

    def create(self, name: str, partitions: int) -> None:
        self._made += 1
        self._topics[name] = SubscribedTopic(uuid5(_NAMESPACE, f"{name}-{self._made}"), name, partitions)
        self.revision += 1

    def grow(self, name: str, partitions: int) -> None:
        self._topics[name] = SubscribedTopic(self._topics[name].id, name, partitions)
        self.revision += 1

    def delete(self, name: str) -> None:
        del self._topics[name]
        self.revision += 1

    def find(self, name: str) -> SubscribedTopic | None:
        return self._topics.get(name)

    def name_of(self, topic_id: UUID) -> str | None:
        return next((topic.name for topic in self._topics.values() if topic.id == topic_id), None)

    def names(self) -> Iterable[str]:
        return list(self._topics)

    @property
    def count(self) -> int:
        return len(self._topics)

    @property
    def partition_count(self) -> int:
        return sum(topic.partitions for topic in self._topics.values())

    def frozen(self) -> FakeTopics:
        other = copy(self)
        other._topics = self._topics.copy()
        return other

    def all(self, *names: str) -> set[tuple[str, int]]:
        """All partitions of these topics, by name."""
        topics = [self._topics[name] for name in names if name in self._topics]
        return {(topic.name, index) for topic in topics for index in range(topic.partitions)}

    def named(self, partitions: Partitions) -> set[tuple[str, int]]:
        return {(self.name_of(topic_id) or str(topic_id), index) for topic_id, index in partitions}

    def ids(self, partitions: Iterable[tuple[str, int]]) -> Partitions:
        return frozenset((self._topics[name].id, index) for name, index in partitions if name in self._topics)


def subscription(topics: Sequence[str], owned: Iterable[tuple[str, int]] | None = None) -> bytes:
    """What a classic member joins with: version 0, or version 1 with what it owns."""
    raw = (0 if owned is None else 1).to_bytes(2, "big") + len(topics).to_bytes(4, "big")
    raw += b"".join(len(topic).to_bytes(2, "big") + topic.encode() for topic in topics) + b"\xff\xff\xff\xff"
    if owned is not None:
        by_topic: dict[str, list[int]] = {}
        for name, index in sorted(owned):
            by_topic.setdefault(name, []).append(index)
        raw += len(by_topic).to_bytes(4, "big")
        for name, indexes in by_topic.items():
            raw += len(name).to_bytes(2, "big") + name.encode() + len(indexes).to_bytes(4, "big")
            raw += b"".join(index.to_bytes(4, "big") for index in indexes)
    return raw


class ConsumerScript:
    """Drives the group ``g`` of a shard. What is appended goes through the binary format.

    ``on_drafts``: what happens to a consumer group happens to a draft of it, as if the group were large.
    """

    def __init__(
        self, topics: FakeTopics, settings: GroupSettings = SETTINGS, *, on_drafts: bool = False
    ) -> None:
        self.on_drafts = on_drafts
        self.topics = topics
        self.settings = settings
        self.log: list[tuple[bytes, bytes | None]] = []
        self.fail_append_with: Exception | None = None
        self.now_ms = 1_000_000
        self.replies: list[Reply] = []
        self.state = ShardState(settings, self._append, topics)
        self._fresh = 0

    def _append(self, records: Sequence[GroupRecord], producer: tuple[int, int] | None = None) -> None:
        del producer
        if self.fail_append_with is not None:
            raise self.fail_append_with
        self.log += [encode_record(record) for record in records]

    def _happens_on_draft(self) -> bool:
        group = self.state.groups.get("g")
        return self.on_drafts and isinstance(group, ConsumerGroup) and not group.is_empty

    def _on_draft(self, event: Callable[[GroupDraft], _T]) -> _T:
        """What a shard does for a large group, without the thread."""
        draft = self.state.draft("g", self.now_ms)
        before = len(self.log), self.group_as_stored()
        result, records = draft.run(event)
        assert draft.is_current()
        assert (len(self.log), self.group_as_stored()) == before, "the group itself changed"
        if records and self.fail_append_with is not None:
            raise self.fail_append_with
        self.log += records
        self.replies += draft.adopt()
        return result

    def group_as_stored(self) -> object:
        group = self.state.groups.get("g")
        if not isinstance(group, ConsumerGroup):
            return group
        return group.epoch, group.target_epoch, group.members.copy(), group.targets.copy(), group.version

    @property
    def group(self) -> ConsumerGroup:
        group = self.state.groups["g"]
        assert isinstance(group, ConsumerGroup)
        return group

    def fresh_id(self) -> str:
        self._fresh += 1
        return f"fresh-{self._fresh}"

    # -- the new protocol --------------------------------------------------------------------------------

    def send(self, member_id: str, epoch: int, **fields: Any) -> ConsumerHeartbeatReply:
        """Send one heartbeat, as it is given."""
        request = ConsumerHeartbeatRequest("g", member_id, epoch, client_id="c", client_host="/h", **fields)
        fresh_id = self.fresh_id()
        group = self.state.groups.get("g")
        if self.on_drafts and (epoch == 0 or isinstance(group, ConsumerGroup)):
            try:
                answer, _ = self._on_draft(
                    lambda draft: draft.handlers.heartbeat(request, fresh_id, draft.now_ms)
                )
            except Refused as refusal:
                answer = ConsumerHeartbeatReply(refusal.code, refusal.message)
        else:
            answer, replies = self.state.consumers.heartbeat(request, fresh_id, self.now_ms)
            self.replies += replies
        check_groups(self.state)
        return answer

    def join(self, member_id: str, *topics: str, **fields: Any) -> ConsumerHeartbeatReply:
        """A heartbeat that joins."""
        full: dict[str, Any] = {
            "topics": frozenset(topics) if topics else None,
            "rebalance_timeout_ms": 60_000,
            "owned": frozenset(),
        }
        return self.send(member_id, 0, **(full | fields))

    def beat(self, member_id: str, owned: Iterable[tuple[str, int]] | None = None) -> ConsumerHeartbeatReply:
        """A heartbeat in the member's epoch that tells what it owns, unless that is None."""
        epoch = self.group.members[member_id].epoch
        return self.send(member_id, epoch, owned=None if owned is None else self.topics.ids(owned))

    def assigned(self, member_id: str) -> set[tuple[str, int]]:
        return self.topics.named(self.group.members[member_id].assigned)

    def settle(self, *member_ids: str) -> None:
        """Let well-behaved members speak until nothing changes any more."""
        for _ in range(10):
            for member_id in member_ids:
                self.beat(member_id, self.assigned(member_id))

    # -- the classic protocol ----------------------------------------------------------------------------

    def classic_join(
        self, member_id: str = "", topics: Sequence[str] = ("t",), owned: Any = None, **fields: Any
    ) -> JoinReply | None:
        """JoinGroup; None while it waits."""
        defaults: dict[str, Any] = {
            "session_timeout_ms": 10_000,
            "rebalance_timeout_ms": 20_000,
            "protocols": (JoinProtocol("range", subscription(topics, owned)),),
            "version": 3,
        }
        request = JoinRequest("g", member_id, "consumer", **(defaults | fields))
        fresh_id = self.fresh_id()
        if self._happens_on_draft():
            replies = self._on_draft(
                lambda draft: draft.handlers.join(draft.group, request, "join", fresh_id, draft.now_ms)
            )
        else:
            replies = self.state.join(request, "join", fresh_id, self.now_ms)
        check_groups(self.state)
        mine = next((reply.body for reply in replies if reply.token == "join"), None)
        assert mine is None or isinstance(mine, JoinReply)
        return mine

    def classic_sync(self, member_id: str, generation: int, **fields: Any) -> SyncReply:
        """Send a SyncGroup of the classic protocol."""
        request = SyncRequest("g", member_id, generation, **fields)
        if self._happens_on_draft():
            replies = self._on_draft(
                lambda draft: draft.handlers.sync(draft.group, request, "sync", draft.now_ms)
            )
        else:
            replies = self.state.sync(request, "sync", self.now_ms)
        check_groups(self.state)
        (body,) = (reply.body for reply in replies)
        assert isinstance(body, SyncReply)
        return body

    def classic_beat(self, member_id: str, generation: int, instance_id: str | None = None) -> ErrorCode:
        """Send a Heartbeat of the classic protocol."""
        error = self.state.heartbeat(HeartbeatRequest("g", member_id, generation, instance_id), self.now_ms)
        check_groups(self.state)
        return error

    def classic_leave(self, *members: LeavingMember) -> list[ErrorCode]:
        if self._happens_on_draft():
            answer = self._on_draft(lambda draft: draft.handlers.leave(draft.group, members, draft.now_ms))
        else:
            answer, _ = self.state.leave("g", members, self.now_ms)
        check_groups(self.state)
        return [member.error for member in answer.members]

    @staticmethod
    def told(reply: SyncReply) -> set[tuple[str, int]]:
        return set(parse_assignment(reply.assignment))

    # -- time and the log --------------------------------------------------------------------------------

    def wait(self, duration_ms: int) -> None:
        """Let time pass, ticking exactly when the group asks for it."""
        end_ms = self.now_ms + duration_ms
        while (group := self.state.groups.get("g")) is not None:
            deadline_ms = group.next_deadline_ms()
            if deadline_ms is None or deadline_ms > end_ms:
                break
            self.now_ms = max(self.now_ms, deadline_ms)
            self.tick()
        self.now_ms = end_ms

    def tick(self) -> None:
        """Do what is due now."""
        if self._happens_on_draft():
            self._on_draft(lambda draft: draft.handlers.tick(draft.group, draft.now_ms))
        else:
            self.replies += self.state.tick("g", self.now_ms)
        check_groups(self.state)

    def reloaded(self) -> ShardState:
        """What a restart would find."""
        state = ShardState(self.settings, self._append, self.topics)
        for key, value in self.log:
            record = decode_record(key, value)
            assert record is not None
            state.replay(record, self.now_ms)
        return state

    def restart(self) -> None:
        self.state = self.reloaded()
        list(self.state.start(self.now_ms))
        check_groups(self.state)
