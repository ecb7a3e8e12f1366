"""ShareGroupHeartbeat: joining, staying in and leaving a share group, as Kafka 4 does it. Pure.

Functions here look at a group and tell what a request does to it: records to append, the answer, and state
that is to be initialized. They change nothing. A request that must be refused raises ``Refused``.

| member epoch | what it says |
| --- | --- |
| 0 | I join, or join again |
| > 0 | I am alive, in this epoch |
| -1 | I leave |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from tidemill.errors import ErrorCode
from tidemill.groups.consumer.member import JOIN_EPOCH, LEAVE_EPOCH, NO_PARTITIONS
from tidemill.groups.consumer.messages import Refused
from tidemill.groups.memory import GROUP_BYTES
from tidemill.groups.share.assignor import assign_partitions
from tidemill.groups.share.group import ShareGroup
from tidemill.groups.share.member import MEMBER_ID_CHARACTERS_MAX, ShareMember
from tidemill.groups.share.messages import Initialization, ShareHeartbeatReply
from tidemill.groups.share.records import (
    ShareAssignment,
    ShareAssignmentRecord,
    ShareEpoch,
    ShareEpochRecord,
    ShareMemberMetadata,
    ShareMemberRecord,
    ShareTargetEpochRecord,
    ShareTargetRecord,
    StateTopicsRecord,
)
from tidemill.groups.share.state_topics import by_id, due, initialization_begun
from tidemill.wire.guard import MAX_STRING_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

    from tidemill.groups.consumer.member import Partitions
    from tidemill.groups.share.messages import ShareHeartbeatRequest
    from tidemill.groups.share.records import ShareRecord
    from tidemill.groups.topics import SubscribedTopic, Topics

__all__ = (
    "Planned",
    "asked_bytes",
    "check_heartbeat",
    "is_settled",
    "plan_heartbeat",
    "plan_removal",
    "require_member",
    "topics_hash",
)

_NONE: Final[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Planned:
    """What a heartbeat does.

    ``revision``: that of the topics for which the target is right. ``awaited``: subscribed topics that are
    initializing then. ``initialization``: state to begin once the records are committed.
    """

    records: tuple[ShareRecord, ...]
    member: ShareMember
    revision: int
    awaited: frozenset[UUID]
    reply: ShareHeartbeatReply
    initialization: Initialization | None = None


def check_heartbeat(request: ShareHeartbeatRequest) -> None:
    """Raise ``Refused`` for a heartbeat that no group could accept."""
    _refuse_if(not request.group_id.strip(), "the group id is empty")
    _refuse_if(not request.member_id.strip(), "the member id is empty")
    _refuse_if(
        len(request.member_id) > MEMBER_ID_CHARACTERS_MAX,
        f"a member id may have {MEMBER_ID_CHARACTERS_MAX} characters, as a UUID has",
    )
    _refuse_if(request.rack_id is not None and not request.rack_id.strip(), "the rack id is empty")
    texts = (request.group_id, request.rack_id or "", request.client_id, request.client_host)
    _refuse_if(
        any(len(text.encode()) > MAX_STRING_BYTES for text in texts),
        "a group id, rack id or client id is too long to be stored",
    )
    _refuse_if(request.member_epoch < LEAVE_EPOCH, f"the member epoch {request.member_epoch} is invalid")
    _refuse_if(
        request.member_epoch == JOIN_EPOCH and not request.topics,
        "a member that joins must subscribe to topics",
    )


def _refuse_if(condition: bool, message: str) -> None:
    if condition:
        raise Refused(ErrorCode.invalid_request, message)


def require_member(group: ShareGroup, member_id: str) -> ShareMember:
    """The member. Raises ``Refused`` if there is none."""
    member = group.members.get(member_id)
    if member is None:
        raise Refused(
            ErrorCode.unknown_member_id, f"group {group.group_id!r} has no member {member_id[:200]!r}"
        )
    return member


def _find_member(group: ShareGroup, request: ShareHeartbeatRequest) -> ShareMember:
    """The member, new or known. One that joins again is what it was: share partitions have no owner."""
    epoch = request.member_epoch
    if epoch == JOIN_EPOCH:
        if request.member_id not in group.members and group.is_full:
            raise Refused(
                ErrorCode.group_max_size_reached,
                f"group {group.group_id!r} has {len(group.members)} members, which is as many as it may have",
            )
        return group.members.get(request.member_id) or ShareMember(request.member_id)
    member = require_member(group, request.member_id)
    if epoch not in (member.epoch, member.previous_epoch):
        raise Refused(
            ErrorCode.fenced_member_epoch,
            f"member {member.member_id!r} is in epoch {member.epoch}, not {epoch}; it must join again",
        )
    return member


def _asked(member: ShareMember, request: ShareHeartbeatRequest) -> ShareMember:
    """The member with the fields that the request sets; the others stay."""
    return replace(
        member,
        rack_id=member.rack_id if request.rack_id is None else request.rack_id,
        topics=member.topics if request.topics is None else request.topics,
        client_id=request.client_id,
        client_host=request.client_host,
    )


def asked_bytes(group: object, request: ShareHeartbeatRequest) -> int:
    """Estimate of the memory that a heartbeat needs for new data in it, without an assignment."""
    if request.member_epoch < JOIN_EPOCH or not request.topics:
        return 0
    members = group.members if isinstance(group, ShareGroup) else {}
    known = members.get(request.member_id)
    asked = _asked(known or ShareMember(request.member_id), request)
    new_group = GROUP_BYTES + len(request.group_id) if group is None else 0
    return new_group + asked.said_bytes - (0 if known is None else known.said_bytes)


def is_settled(group: ShareGroup, topics: Topics, request: ShareHeartbeatRequest, now_ms: int) -> bool:
    """Whether the heartbeat calls for no new target: at most the member moves to the one that is there."""
    member = group.members.get(request.member_id)
    return (
        member is not None
        and group.epoch == group.target_epoch
        and group.seen_revision == topics.revision
        and not group.must_initialize_again(now_ms)
        and ShareMemberMetadata.of(_asked(member, request)) == ShareMemberMetadata.of(member)
    )


def plan_heartbeat(group: ShareGroup, topics: Topics, request: ShareHeartbeatRequest, now_ms: int) -> Planned:
    """Plan a heartbeat that joins or stays. Does not change ``group``, which need not be in the log yet."""
    before = _find_member(group, request)
    asked = _asked(before, request)
    records: list[ShareRecord] = []
    initialization, awaited = None, group.awaited
    target_epoch, target = group.target_epoch, group.target_of(asked.member_id)
    if not is_settled(group, topics, request, now_ms):
        planner = _Planner(group, topics, asked, now_ms)
        target_epoch, target = planner.work_out()
        records, initialization, awaited = planner.records, planner.initialization, planner.awaited
    moved = asked.moved_to(target_epoch, target)
    if asked.member_id not in group.members or ShareAssignment.of(moved) != ShareAssignment.of(before):
        records.append(ShareAssignmentRecord(group.group_id, moved.member_id, ShareAssignment.of(moved)))
    says_all = request.member_epoch == JOIN_EPOCH or request.topics is not None
    # A member in its previous epoch has not heard of the present one.
    told_anew = says_all or moved.assigned != before.assigned or request.member_epoch != before.epoch
    reply = ShareHeartbeatReply(
        member_id=moved.member_id,
        member_epoch=moved.epoch,
        heartbeat_interval_ms=group.settings.share_heartbeat_interval_ms_of(group.group_id),
        assignment=moved.assigned if told_anew else None,
    )
    return Planned(tuple(records), moved, topics.revision, awaited, reply, initialization)


def plan_removal(group: ShareGroup, gone: Iterable[str]) -> list[ShareRecord]:
    """The records that remove members and raise the epoch. The next heartbeat computes the target."""
    group_id = group.group_id
    records: list[ShareRecord] = []
    for member_id in gone:
        records.append(ShareAssignmentRecord(group_id, member_id, None))
        if member_id in group.targets:
            records.append(ShareTargetRecord(group_id, member_id, None))
        records.append(ShareMemberRecord(group_id, member_id, None))
    records.append(ShareEpochRecord(group_id, ShareEpoch(group.epoch + 1, group.topics_hash)))
    return records


def topics_hash(topics: Iterable[SubscribedTopic]) -> int:
    """A number that differs if the topics do; 0 for none. Kafka's differs, and is never compared."""
    digest = blake2b(digest_size=8)
    count = 0
    for topic in sorted(topics, key=lambda each: each.id.int):
        count += 1
        digest.update(topic.id.bytes + topic.partitions.to_bytes(4, "big"))
    return int.from_bytes(digest.digest(), "big", signed=True) if count else 0


class _Planner:
    """Plans the records of a new epoch and a new target, for a group in which ``asked`` is a member."""

    def __init__(self, group: ShareGroup, topics: Topics, asked: ShareMember, now_ms: int) -> None:
        self._group = group
        self._asked = asked
        self._now_ms = now_ms
        self._members = {**group.members, asked.member_id: asked}
        names = frozenset[str]().union(*{member.topics for member in self._members.values()})
        found = (topics.find(name) for name in sorted(names))
        self._subscribed = {topic.name: topic for topic in found if topic is not None}
        self.records: list[ShareRecord] = []
        self.initialization: Initialization | None = None
        self.awaited: frozenset[UUID] = frozenset()

    def work_out(self) -> tuple[int, Partitions]:
        """Plan everything; gives the epoch of the target and what ``asked`` has in it."""
        group, asked = self._group, self._asked
        known = group.members.get(asked.member_id)
        if known is None or ShareMemberMetadata.of(known) != ShareMemberMetadata.of(asked):
            metadata = ShareMemberMetadata.of(asked)
            self.records.append(ShareMemberRecord(group.group_id, asked.member_id, metadata))
        topics_now = topics_hash(self._subscribed.values())
        readable = self._readable()
        changed = known is None or known.topics != asked.topics or topics_now != group.topics_hash
        if not changed and group.epoch == group.target_epoch:
            # Partitions became readable, or are not any more, since the target was computed.
            changed = _flat(readable) != NO_PARTITIONS.union(*group.targets.values())
        epoch = group.epoch + changed
        if changed:
            self.records.append(ShareEpochRecord(group.group_id, ShareEpoch(epoch, topics_now)))
        target = group.target_of(asked.member_id)
        if epoch > group.target_epoch:
            target = self._compute_target(readable, epoch)
        self._initialize(epoch)
        return epoch, target

    def _readable(self) -> dict[UUID, frozenset[int]]:
        """The partitions of subscribed topics that exist and have state."""
        initialized = by_id(self._group.topics.initialized)
        return {
            topic.id: initialized[topic.id].partitions & frozenset(range(topic.partitions))
            for topic in self._subscribed.values()
            if topic.id in initialized
        }

    def _compute_target(self, readable: Mapping[UUID, frozenset[int]], epoch: int) -> Partitions:
        group = self._group
        ids_of: dict[frozenset[str], frozenset[UUID]] = {}
        for names in {member.topics for member in self._members.values()}:
            ids = (self._subscribed[name].id for name in names if name in self._subscribed)
            ids_of[names] = frozenset(each for each in ids if each in readable)
        subscriptions = {each.member_id: ids_of[each.topics] for each in self._members.values()}
        targets = assign_partitions(subscriptions, readable, group.targets)
        self.records += (
            ShareTargetRecord(group.group_id, member_id, target)
            for member_id, target in targets.items()
            if group.targets.get(member_id) != target
        )
        self.records.append(ShareTargetEpochRecord(group.group_id, epoch))
        return targets[self._asked.member_id]

    def _initialize(self, epoch: int) -> None:
        group = self._group
        work = due(group, self._subscribed.values(), self._now_ms)
        names = {topic.id: topic.name for topic in self._subscribed.values()}
        initializing = {*work, *(topic.id for topic in group.topics.initializing)}
        self.awaited = frozenset(initializing & names.keys())
        if work:
            begun = initialization_begun(group.topics, names, work, self._now_ms)
            self.records.append(StateTopicsRecord(group.group_id, begun))
            self.initialization = Initialization(group.group_id, epoch, work)


def _flat(partitions: Mapping[UUID, frozenset[int]]) -> Partitions:
    return frozenset((topic_id, index) for topic_id, indexes in partitions.items() for index in indexes)
