"""ConsumerGroupHeartbeat: joining, staying in and leaving a consumer group, as Kafka 4 does it. Pure.

Functions here look at a group and tell what a request does to it: records to append, and the answer. They
change nothing. A request that must be refused raises ``Refused``.

| member epoch | what it says |
| --- | --- |
| 0 | I join; I own nothing |
| > 0 | I am alive, in this epoch, and own what I say (or what I said last) |
| -1 | I leave |
| -2 | I leave and may come back under the same instance id: keep my partitions for me |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tidemill.errors import ErrorCode
from tidemill.groups.consumer.assignors import ASSIGNORS
from tidemill.groups.consumer.group import ConsumerGroup
from tidemill.groups.consumer.member import (
    JOIN_EPOCH,
    NO_PARTITIONS,
    STATIC_LEAVE_EPOCH,
    ConsumerMember,
    MemberState,
)
from tidemill.groups.consumer.messages import ConsumerHeartbeatReply, Refused
from tidemill.groups.consumer.records import (
    CurrentAssignment,
    CurrentAssignmentRecord,
    MemberMetadata,
    MemberMetadataRecord,
    TargetRecord,
)
from tidemill.groups.consumer.target_assignment import advance
from tidemill.groups.memory import GROUP_BYTES
from tidemill.groups.patterns import check_pattern
from tidemill.wire.guard import MAX_STRING_BYTES

if TYPE_CHECKING:
    from tidemill.groups.consumer.member import Partitions
    from tidemill.groups.consumer.messages import ConsumerHeartbeatRequest
    from tidemill.groups.consumer.records import ConsumerRecord
    from tidemill.groups.topics import Topics

__all__ = (
    "Planned",
    "asked_bytes",
    "changes_nothing",
    "check_heartbeat",
    "plan_heartbeat",
    "plan_static_leave",
    "refuse_if_full",
    "replace_static_member",
    "require_leaving_member",
    "require_static_member",
)

_FIRST_VERSION_WITH_MEMBER_ID_OF_THE_CLIENT = 1


@dataclass(frozen=True, slots=True)
class Planned:
    """What a heartbeat does: ``records`` to append, ``member`` as it will be, and the answer."""

    records: tuple[ConsumerRecord, ...]
    member: ConsumerMember
    revision: int | None
    reply: ConsumerHeartbeatReply


def check_heartbeat(request: ConsumerHeartbeatRequest) -> None:
    """Raise ``Refused`` for a heartbeat that no group could accept."""
    for name, text in (("group id", request.group_id), ("instance id", request.instance_id)):
        _refuse_if(text is not None and not text.strip(), f"the {name} is empty")
    _refuse_if(request.rack_id is not None and not request.rack_id.strip(), "the rack id is empty")
    for text in (request.group_id, request.member_id):
        _refuse_if(len(text.encode()) > MAX_STRING_BYTES, "a group id or member id is too long to be stored")
    generated_here = (
        request.member_epoch == JOIN_EPOCH and request.version < _FIRST_VERSION_WITH_MEMBER_ID_OF_THE_CLIENT
    )
    _refuse_if(not request.member_id.strip() and not generated_here, "the member id is empty")
    _refuse_if(
        request.member_epoch < STATIC_LEAVE_EPOCH, f"the member epoch {request.member_epoch} is invalid"
    )
    if request.member_epoch == JOIN_EPOCH:
        _refuse_if(request.rebalance_timeout_ms == -1, "a member that joins must give a rebalance timeout")
        _refuse_if(request.owned != NO_PARTITIONS, "a member that joins must own no partitions, and say so")
        _refuse_if(
            request.topics is None and request.regex is None,
            "a member that joins must subscribe to topics by name or by pattern",
        )
    _refuse_if(
        request.member_epoch == STATIC_LEAVE_EPOCH and request.instance_id is None,
        "only a member with an instance id can leave for a while",
    )
    if request.assignor is not None and request.assignor not in ASSIGNORS:
        raise Refused(
            ErrorCode.unsupported_assignor,
            f"there is no assignor {request.assignor[:200]!r}; choose one of {', '.join(ASSIGNORS)}",
        )
    if request.regex:
        check_pattern(request.regex)


def _refuse_if(condition: bool, message: str) -> None:
    if condition:
        raise Refused(ErrorCode.invalid_request, message)


def plan_heartbeat(
    group: ConsumerGroup, topics: Topics, request: ConsumerHeartbeatRequest, member_id: str, now_ms: int
) -> Planned:
    """Plan a heartbeat that joins or stays. Does not change ``group``, which need not be in the log yet."""
    refuse_if_full(group, request.member_id)
    replaced: tuple[ConsumerRecord, ...] = ()
    before, predecessor = _find_member(group, request, member_id)
    if predecessor is not None:
        group, replaced = replace_static_member(group, predecessor, before)
    asked = _asked(before, request)
    step = advance(group, topics, asked, request.owned, now_ms)
    told_anew = request.is_full or step.member.assigned != before.assigned
    reply = ConsumerHeartbeatReply(
        member_id=member_id,
        member_epoch=step.member.epoch,
        heartbeat_interval_ms=group.settings.heartbeat_interval_ms_of(group.group_id),
        assignment=step.member.assigned if told_anew else None,
    )
    return Planned((*replaced, *step.records), step.member, step.revision, reply)


def changes_nothing(group: ConsumerGroup, topics: Topics, request: ConsumerHeartbeatRequest) -> bool:
    """Whether the heartbeat only shows that the member is alive, as most do."""
    member = group.members.get(request.member_id)
    return (
        member is not None
        and request.member_epoch == member.epoch > JOIN_EPOCH
        and group.epoch == group.target_epoch
        and group.seen_revision == topics.revision
        and member.is_reconciled_to(group.target_epoch)
        and MemberMetadata.of(_asked(member, request)) == MemberMetadata.of(member)
    )


def asked_bytes(group: object, request: ConsumerHeartbeatRequest) -> int:
    """Estimate of the memory that a heartbeat needs for new data in it, without an assignment."""
    if not request.subscribes:
        return 0
    members = group.members if isinstance(group, ConsumerGroup) else {}
    known = members.get(request.member_id)
    asked = _asked(known or ConsumerMember(request.member_id), request)
    new_group = GROUP_BYTES + len(request.group_id) if group is None else 0
    return new_group + asked.said_bytes - (0 if known is None else known.said_bytes)


def refuse_if_full(group: ConsumerGroup, member_id: str) -> None:
    """Raise ``Refused`` if the member is new and the group is full."""
    if group.is_full and member_id not in group.members:
        raise Refused(
            ErrorCode.group_max_size_reached,
            f"group {group.group_id!r} has {len(group.members)} members, which is as many as it may have",
        )


def _find_member(
    group: ConsumerGroup, request: ConsumerHeartbeatRequest, member_id: str
) -> tuple[ConsumerMember, ConsumerMember | None]:
    """The member, new or known, and the static member that it replaces, if any."""
    joins = request.member_epoch == JOIN_EPOCH
    if request.instance_id is None:
        known = group.members.get(member_id)
        if known is None and not joins:
            raise _unknown_member(group, member_id)
        member = known or ConsumerMember(member_id)
        _check_epoch(member, request.member_epoch, request.owned)
        return member, None
    holder = group.static_member(request.instance_id)
    if not joins:
        member = require_static_member(group, request.instance_id, member_id)
        _check_epoch(member, request.member_epoch, request.owned)
        return member, None
    if holder is None:
        return group.members.get(member_id) or ConsumerMember(member_id), None
    in_use = holder.classic is None and holder.epoch != STATIC_LEAVE_EPOCH
    if in_use and holder.member_id == member_id:
        _check_epoch(holder, request.member_epoch, request.owned)
        return holder, None
    if in_use:
        raise Refused(
            ErrorCode.unreleased_instance_id,
            f"instance id {request.instance_id!r} of group {group.group_id!r} is in use by member "
            f"{holder.member_id!r}; stop that one first, or wait for the end of its session",
        )
    return replace(holder, member_id=member_id, epoch=JOIN_EPOCH, previous_epoch=JOIN_EPOCH), holder


def require_static_member(group: ConsumerGroup, instance_id: str, member_id: str) -> ConsumerMember:
    """The member with that instance id, which must be ``member_id``."""
    holder = group.static_member(instance_id)
    if holder is None:
        raise Refused(
            ErrorCode.unknown_member_id, f"group {group.group_id!r} has no instance {instance_id!r}"
        )
    if holder.member_id != member_id:
        raise Refused(
            ErrorCode.fenced_instance_id,
            f"instance {instance_id!r} of group {group.group_id!r} is now member {holder.member_id!r}",
        )
    return holder


def require_leaving_member(group: ConsumerGroup, request: ConsumerHeartbeatRequest) -> ConsumerMember:
    """The member that a leaving heartbeat names. Raises ``Refused`` if there is none."""
    if request.instance_id is not None:
        return require_static_member(group, request.instance_id, request.member_id)
    member = group.members.get(request.member_id)
    if member is None:
        raise _unknown_member(group, request.member_id)
    return member


def _unknown_member(group: ConsumerGroup, member_id: str) -> Refused:
    return Refused(ErrorCode.unknown_member_id, f"group {group.group_id!r} has no member {member_id[:200]!r}")


def _check_epoch(member: ConsumerMember, epoch: int, owned: Partitions | None) -> None:
    """Accept the current epoch, or the previous one if the answer with the current one may have been lost."""
    if epoch == member.epoch:
        return
    lost_answer = epoch == member.previous_epoch and owned is not None and owned <= member.assigned
    if epoch > member.epoch or not lost_answer:
        raise Refused(
            ErrorCode.fenced_member_epoch,
            f"member {member.member_id!r} is in epoch {member.epoch}, not {epoch}; it must give up its "
            "partitions and join again",
        )


def _asked(member: ConsumerMember, request: ConsumerHeartbeatRequest) -> ConsumerMember:
    """The member with the fields that the request sets; the others stay."""
    timeout_ms = request.rebalance_timeout_ms
    return replace(
        member,
        instance_id=member.instance_id if request.instance_id is None else request.instance_id,
        rack_id=member.rack_id if request.rack_id is None else request.rack_id,
        rebalance_timeout_ms=member.rebalance_timeout_ms if timeout_ms == -1 else timeout_ms,
        assignor=member.assignor if request.assignor is None else request.assignor,
        topics=member.topics if request.topics is None else request.topics,
        regex=member.regex if request.regex is None else request.regex,
        client_id=request.client_id,
        client_host=request.client_host,
        classic=None,
    )


def replace_static_member(
    group: ConsumerGroup, old: ConsumerMember, new: ConsumerMember
) -> tuple[ConsumerGroup, tuple[ConsumerRecord, ...]]:
    """A copy of the group in which ``new`` has all that ``old`` had, and the records of that."""
    group_id = group.group_id
    records: tuple[ConsumerRecord, ...] = (
        CurrentAssignmentRecord(group_id, old.member_id, None),
        TargetRecord(group_id, old.member_id, None),
        MemberMetadataRecord(group_id, old.member_id, None),
        MemberMetadataRecord(group_id, new.member_id, MemberMetadata.of(new)),
        TargetRecord(group_id, new.member_id, group.target_of(old.member_id)),
        CurrentAssignmentRecord(group_id, new.member_id, CurrentAssignment.of(new)),
    )
    scratch = group.copy()
    for record in records:
        scratch.replay(record)
    return scratch, records


def plan_static_leave(group: ConsumerGroup, member: ConsumerMember) -> tuple[ConsumerRecord, ...]:
    """Plan that a static member goes for a while: it keeps its partitions until its session ends."""
    gone = replace(member, epoch=STATIC_LEAVE_EPOCH, state=MemberState.STABLE, revoking=NO_PARTITIONS)
    return (CurrentAssignmentRecord(group.group_id, member.member_id, CurrentAssignment.of(gone)),)
