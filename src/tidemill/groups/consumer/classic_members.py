"""Members of the classic protocol in a consumer group: JoinGroup, SyncGroup, Heartbeat, LeaveGroup. Pure.

None of them is the leader: the server assigns. A member joins and is told its epoch as the generation, syncs
and is told its partitions, and is sent back to join whenever it has something to give up, to collect or to
catch up with. Its subscription says what it owns. A member that cannot say so (an eager one) has given up
everything before it joins.

Like ``heartbeats``: functions look and tell, change nothing, and raise ``Refused``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tidemill.errors import ErrorCode, ProtocolError
from tidemill.groups.consumer.heartbeats import refuse_if_full, replace_static_member, require_static_member
from tidemill.groups.consumer.member import JOIN_EPOCH, ClassicMetadata, ConsumerMember, MemberState
from tidemill.groups.consumer.messages import Refused
from tidemill.groups.consumer.migration import assignment_bytes, by_id
from tidemill.groups.consumer.target_assignment import Advance, advance
from tidemill.wire.consumer_protocol import CONSUMER_PROTOCOL, parse_full_subscription

if TYPE_CHECKING:
    from tidemill.groups.consumer.group import ConsumerGroup
    from tidemill.groups.consumer.records import ConsumerRecord
    from tidemill.groups.messages import HeartbeatRequest, JoinRequest, LeavingMember, SyncRequest
    from tidemill.groups.topics import Topics
    from tidemill.wire.consumer_protocol import Subscription

__all__ = (
    "assignment_for_sync",
    "check_classic_heartbeat",
    "must_join_again",
    "plan_join",
    "require_leaving",
)


def plan_join(
    group: ConsumerGroup, topics: Topics, request: JoinRequest, fresh_member_id: str, now_ms: int
) -> Advance:
    """Plan a JoinGroup of a member that is new, is known, or replaces a static one."""
    member_id = request.member_id or fresh_member_id
    refuse_if_full(group, member_id)
    if not _is_supported(group, request, member_id):
        raise Refused(
            ErrorCode.inconsistent_group_protocol,
            f"group {group.group_id!r} has members with other protocols",
        )
    if not request.member_id and request.instance_id is None and request.must_know_member_id:
        raise Refused(ErrorCode.member_id_required, "join again with the member id of this answer")
    before, predecessor = _find_member(group, request, member_id)
    replaced: tuple[ConsumerRecord, ...] = ()
    if predecessor is not None:
        group, replaced = replace_static_member(group, predecessor, before)
    subscription = _subscription(request)
    asked = _asked(before, request, subscription)
    step = advance(group, topics, asked, by_id(subscription.owned, topics), now_ms)
    return replace(step, records=(*replaced, *step.records))


def _is_supported(group: ConsumerGroup, request: JoinRequest, member_id: str) -> bool:
    if request.protocol_type != CONSUMER_PROTOCOL or not request.protocols:
        return False
    others = [
        member.classic.protocol_names
        for member in group.classic_members
        if member.member_id != member_id and member.classic is not None
    ]
    return any(all(protocol.name in names for names in others) for protocol in request.protocols)


def _find_member(
    group: ConsumerGroup, request: JoinRequest, member_id: str
) -> tuple[ConsumerMember, ConsumerMember | None]:
    """The member, new or known, and the static member that it replaces, if any."""
    if request.instance_id is None:
        return group.members.get(member_id) or ConsumerMember(member_id), None
    if request.member_id:
        return require_static_member(group, request.instance_id, member_id), None
    holder = group.static_member(request.instance_id)
    if holder is None:
        return ConsumerMember(member_id), None
    return replace(holder, member_id=member_id, epoch=JOIN_EPOCH, previous_epoch=JOIN_EPOCH), holder


def _subscription(request: JoinRequest) -> Subscription:
    try:
        return parse_full_subscription(request.protocols[0].metadata)
    except ProtocolError as error:
        raise Refused(
            ErrorCode.inconsistent_group_protocol, f"the member's subscription cannot be read: {error}"
        ) from error


def _asked(member: ConsumerMember, request: JoinRequest, subscription: Subscription) -> ConsumerMember:
    timeout_ms = request.rebalance_timeout_ms
    return replace(
        member,
        instance_id=member.instance_id if request.instance_id is None else request.instance_id,
        rack_id=member.rack_id if subscription.rack_id is None else subscription.rack_id,
        rebalance_timeout_ms=request.session_timeout_ms if timeout_ms < 0 else timeout_ms,
        assignor=None,
        topics=subscription.topics,
        regex="",
        client_id=request.client_id,
        client_host=request.client_host,
        classic=ClassicMetadata(request.session_timeout_ms, request.protocols),
    )


def assignment_for_sync(
    group: ConsumerGroup, topics: Topics, request: SyncRequest
) -> tuple[ConsumerMember, bytes]:
    """Member and assignment for a SyncGroup. Raises ``Refused`` REBALANCE_IN_PROGRESS: it must join again."""
    member, classic = _require_classic(group, request.member_id, request.instance_id)
    _check_generation(member, request.generation)
    if request.protocol_type not in (None, CONSUMER_PROTOCOL) or request.protocol_name not in (
        None,
        classic.protocols[0].name,
    ):
        raise Refused(ErrorCode.inconsistent_group_protocol, "the member was told another protocol")
    if group.epoch > member.epoch and member.state is not MemberState.UNREVOKED_PARTITIONS:
        # A member that must revoke has joined already; it learns here what it keeps, and joins again after
        # that.
        raise Refused(ErrorCode.rebalance_in_progress, "the group has changed; join again")
    return member, assignment_bytes(member.assigned, classic, topics)


def check_classic_heartbeat(group: ConsumerGroup, request: HeartbeatRequest) -> ConsumerMember:
    """The member that sent a Heartbeat. Raises ``Refused`` if it is unknown, or in another epoch."""
    member, _ = _require_classic(group, request.member_id, request.instance_id)
    _check_generation(member, request.generation)
    return member


def must_join_again(group: ConsumerGroup, member: ConsumerMember) -> bool:
    """Whether the member has something to catch up with, to give up, or to collect."""
    if member.epoch < group.epoch or member.state is MemberState.UNREVOKED_PARTITIONS:
        return True
    return member.state is MemberState.UNRELEASED_PARTITIONS and not group.waits_for_others(member)


def require_leaving(group: ConsumerGroup, leaving: LeavingMember) -> ConsumerMember:
    """The member that a LeaveGroup names, of either protocol; a static one may be named by instance id."""
    instance_id = leaving.instance_id
    if instance_id is None:
        member = group.members.get(leaving.member_id)
    elif leaving.member_id:
        return require_static_member(group, instance_id, leaving.member_id)
    else:
        member = group.static_member(instance_id)
    if member is None:
        raise Refused(
            ErrorCode.unknown_member_id,
            f"group {group.group_id!r} has no member {(instance_id or leaving.member_id)[:200]!r}",
        )
    return member


def _require_classic(
    group: ConsumerGroup, member_id: str, instance_id: str | None
) -> tuple[ConsumerMember, ClassicMetadata]:
    if instance_id is not None:
        require_static_member(group, instance_id, member_id)
    member = group.members.get(member_id)
    if member is None or member.classic is None:
        raise Refused(
            ErrorCode.unknown_member_id,
            f"group {group.group_id!r} has no member {member_id[:200]!r} of the classic protocol",
        )
    return member, member.classic


def _check_generation(member: ConsumerMember, generation: int) -> None:
    if generation != member.epoch:
        raise Refused(
            ErrorCode.illegal_generation,
            f"member {member.member_id!r} is in generation {member.epoch}, not {generation}",
        )
