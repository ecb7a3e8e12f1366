"""The classic group protocol: from Kafka's messages to the coordinator's and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tidemill.coordination.turns import give_way, in_chunks, in_slices
from tidemill.errors import ErrorCode
from tidemill.groups.messages import (
    GroupDescription,
    HeartbeatRequest,
    JoinProtocol,
    JoinReply,
    JoinRequest,
    LeaveReply,
    LeavingMember,
    LeftMember,
    ListGroupsResult,
    SyncReply,
    SyncRequest,
)
from tidemill.server.broker import Broker
from tidemill.server.call import Call
from tidemill.server.handlers.authorized_operations import GROUP_OPERATIONS, NOT_ASKED_FOR
from tidemill.server.handlers.committed_offsets import (
    has_groups,
    offset_commit,
    offset_delete,
    offset_fetch,
    prepare_groups,
)
from tidemill.wire.requests import ms

__all__ = (
    "delete_groups",
    "describe_groups",
    "heartbeat",
    "join_group",
    "leave_group",
    "list_groups",
    "offset_commit",
    "offset_delete",
    "offset_fetch",
    "sync_group",
)

_DEAD: Final = "Dead"
#: Each is kept for each member, and looked at in each rebalance; clients send one or two.
_PROTOCOLS_MAX: Final = 1_000
_LEAVING_AT_ONCE_MAX: Final = 500

_FIRST_JOIN_WITH_NULL_PROTOCOL: Final = 7
_FIRST_SYNC_WITH_PROTOCOL: Final = 5
_FIRST_LEAVE_OF_SEVERAL: Final = 3
_FIRST_DESCRIBE_WITH_NOT_FOUND: Final = 6


# --- membership


async def join_group(broker: Broker, call: Call) -> dict[str, Any]:
    """Answered when the group's rebalance is over."""
    request = call.request
    error = await prepare_groups(broker)
    if error is ErrorCode.none and len(request.protocols) > _PROTOCOLS_MAX:
        error = ErrorCode.invalid_request
    if error is ErrorCode.none:
        reply = await broker.groups.join(_join_request(call))
    else:
        reply = JoinReply(error, request.member_id)
    nullable = call.version >= _FIRST_JOIN_WITH_NULL_PROTOCOL
    return {
        "error_code": reply.error,
        "generation_id": reply.generation,
        "protocol_type": reply.protocol_type,
        "protocol_name": reply.protocol_name if nullable else reply.protocol_name or "",
        "leader": reply.leader,
        "skip_assignment": reply.skip_assignment,
        "member_id": reply.member_id,
        "members": [
            {"member_id": each.member_id, "group_instance_id": each.instance_id, "metadata": each.metadata}
            for each in reply.members
        ],
    }


def _join_request(call: Call) -> JoinRequest:
    request = call.request
    return JoinRequest(
        group_id=request.group_id,
        member_id=request.member_id,
        protocol_type=request.protocol_type,
        protocols=tuple(JoinProtocol(each.name, each.metadata) for each in request.protocols),
        session_timeout_ms=ms(request.session_timeout),
        rebalance_timeout_ms=ms(call.field("rebalance_timeout")),
        instance_id=call.field("group_instance_id"),
        client_id=call.client_id,
        client_host=call.client_host,
        version=call.version,
    )


async def sync_group(broker: Broker, call: Call) -> dict[str, Any]:
    """A follower is answered when the leader has brought the assignments."""
    request = call.request
    names_protocol = None not in (call.field("protocol_type"), call.field("protocol_name"))
    if call.version >= _FIRST_SYNC_WITH_PROTOCOL and not names_protocol:
        reply = SyncReply(ErrorCode.inconsistent_group_protocol)
    elif request.group_id and not has_groups(broker):
        reply = SyncReply(ErrorCode.unknown_member_id)
    else:
        reply = await broker.groups.sync(
            SyncRequest(
                group_id=request.group_id,
                member_id=request.member_id,
                generation=request.generation_id,
                assignments={each.member_id: each.assignment for each in request.assignments},
                instance_id=call.field("group_instance_id"),
                protocol_type=call.field("protocol_type"),
                protocol_name=call.field("protocol_name"),
            )
        )
    return {
        "error_code": reply.error,
        "protocol_type": reply.protocol_type,
        "protocol_name": reply.protocol_name,
        "assignment": reply.assignment,
    }


async def heartbeat(broker: Broker, call: Call) -> dict[str, Any]:
    """A member is alive."""
    request = call.request
    if request.group_id and not has_groups(broker):
        return {"error_code": ErrorCode.unknown_member_id}
    beat = HeartbeatRequest(
        request.group_id, request.member_id, request.generation_id, call.field("group_instance_id")
    )
    return {"error_code": await broker.groups.heartbeat(beat)}


async def leave_group(broker: Broker, call: Call) -> dict[str, Any]:
    """Members go: one, or from v3 on several."""
    request = call.request
    several = call.version >= _FIRST_LEAVE_OF_SEVERAL
    if several:
        members_named = (LeavingMember(each.member_id, each.group_instance_id) for each in request.members)
        leaving = await in_slices(members_named)
    else:
        leaving = [LeavingMember(request.member_id)]
    if request.group_id and not has_groups(broker):
        unknown = ErrorCode.unknown_member_id
        reply = LeaveReply(
            members=tuple(LeftMember(each.member_id, each.instance_id, unknown) for each in leaving)
        )
    else:
        reply = await _leave(broker, request.group_id, leaving)
    if not several:
        # The old format has one place for an error.
        codes = (reply.error, *(each.error for each in reply.members))
        return {"error_code": next((code for code in codes if code is not ErrorCode.none), ErrorCode.none)}
    members = (
        {"member_id": each.member_id, "group_instance_id": each.instance_id, "error_code": each.error}
        for each in reply.members
    )
    return {"error_code": reply.error, "members": await in_slices(members)}


async def _leave(broker: Broker, group_id: str, leaving: Sequence[LeavingMember]) -> LeaveReply:
    left: list[LeftMember] = []
    for chunk in list(in_chunks(leaving, _LEAVING_AT_ONCE_MAX)) or [leaving]:
        reply = await broker.groups.leave(group_id, chunk)
        if reply.error is not ErrorCode.none:
            return reply
        left += reply.members
        await give_way()
    return LeaveReply(members=tuple(left))


# --- groups as a whole


async def list_groups(broker: Broker, call: Call) -> dict[str, Any]:
    """The groups that this node coordinates, filtered by state and type."""
    result = ListGroupsResult()
    if has_groups(broker):
        result = await broker.groups.list_groups(
            call.field("states_filter", ()), call.field("types_filter", ())
        )
    groups = await in_slices(
        {
            "group_id": each.group_id,
            "protocol_type": each.protocol_type,
            "group_state": each.state,
            "group_type": each.group_type,
        }
        for each in result.groups
    )
    return {"error_code": result.error, "groups": groups}


async def describe_groups(broker: Broker, call: Call) -> dict[str, Any]:
    """Members and assignments of groups, each once. A group that does not exist is dead, from v6 on also an
    error.
    """
    ids = tuple(dict.fromkeys(call.request.groups))
    if has_groups(broker):
        descriptions = await broker.groups.describe_groups(ids)
    else:
        descriptions = await in_slices(GroupDescription(group_id, state=_DEAD) for group_id in ids)
    return {"groups": await in_slices(_described(call, each) for each in descriptions)}


def _described(call: Call, group: GroupDescription) -> dict[str, Any]:
    error, message = group.error, None
    missing = error is ErrorCode.none and group.state == _DEAD
    if missing and call.version >= _FIRST_DESCRIBE_WITH_NOT_FOUND:
        error, message = ErrorCode.group_id_not_found, f"there is no group {group.group_id[:200]!r}"
    return {
        "error_code": error,
        "error_message": message,
        "group_id": group.group_id,
        "group_state": group.state,
        "protocol_type": group.protocol_type,
        "protocol_data": group.protocol_name,
        "members": [
            {
                "member_id": each.member_id,
                "group_instance_id": each.instance_id,
                "client_id": each.client_id,
                "client_host": each.client_host,
                "member_metadata": each.metadata,
                "member_assignment": each.assignment,
            }
            for each in group.members
        ],
        "authorized_operations": (
            GROUP_OPERATIONS
            if error is ErrorCode.none and call.field("include_authorized_operations", False)
            else NOT_ASKED_FOR
        ),
    }


async def delete_groups(broker: Broker, call: Call) -> dict[str, Any]:
    """Delete groups without members, and what they have committed."""
    ids = call.request.groups_names
    if has_groups(broker):
        codes = await broker.groups.delete_groups(ids)
    else:
        codes = dict.fromkeys(ids, ErrorCode.group_id_not_found)
    return {"results": [{"group_id": group_id, "error_code": code} for group_id, code in codes.items()]}
