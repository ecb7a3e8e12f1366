"""The classic group protocol: from Kafka's messages to the coordinator's and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tidemill.coordination.turns import distinct_in_slices, give_way, in_chunks, in_slices
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
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.handlers.authorized_operations import NOT_ASKED_FOR, authorized_operations
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import (
    CLUSTER,
    CLUSTER_NAME,
    DELETE,
    DESCRIBE,
    GROUP,
    READ,
    for_each,
    for_one,
)
from tidemill.server.requests.call import Call
from tidemill.wire.requests import ms

__all__ = (
    "delete_groups",
    "describe_groups",
    "heartbeat",
    "join_group",
    "leave_group",
    "list_groups",
    "sync_group",
)

_DEAD: Final = "Dead"
#: Protocols of a member: each is stored, and looked at in each rebalance. Clients send one or two.
_PROTOCOLS_MAX: Final = 1_000
#: Bytes of names and metadata that one member may send, for all of its protocols together.
_MEMBER_METADATA_BYTES_MAX: Final = 1024 * 1024
#: Bytes of assignments that a leader may send for all members: they are stored as one record.
_ASSIGNMENT_BYTES_MAX: Final = 2 * 1024 * 1024
#: States and types in one request; there are fewer than ten of them.
_FILTERS_MAX: Final = 1_000
_LEAVING_AT_ONCE_MAX: Final = 500

_FIRST_JOIN_WITH_NULL_PROTOCOL: Final = 7
_FIRST_SYNC_WITH_PROTOCOL: Final = 5
_FIRST_LEAVE_OF_SEVERAL: Final = 3
_FIRST_DESCRIBE_WITH_NOT_FOUND: Final = 6


# --- membership


@serves("JoinGroup", for_one(READ, GROUP, "group_id"))
async def join_group(broker: Broker, call: Call) -> dict[str, Any]:
    """Join a group; answered when the group's rebalance is over."""
    request = call.request
    error = await broker.coordinators.prepare(GROUPS)
    if error is ErrorCode.none and not _is_subscription_small(request.protocols):
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


def _is_subscription_small(protocols: Sequence[Any]) -> bool:
    if len(protocols) > _PROTOCOLS_MAX:
        return False
    size_bytes = sum(len(protocol.name) + len(protocol.metadata) for protocol in protocols)
    return size_bytes <= _MEMBER_METADATA_BYTES_MAX


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


@serves("SyncGroup", for_one(READ, GROUP, "group_id"))
async def sync_group(broker: Broker, call: Call) -> dict[str, Any]:
    """Sync a group; followers are answered when the leader has sent the assignments."""
    request = call.request
    names_protocol = None not in (call.field("protocol_type"), call.field("protocol_name"))
    if call.version >= _FIRST_SYNC_WITH_PROTOCOL and not names_protocol:
        reply = SyncReply(ErrorCode.inconsistent_group_protocol)
    elif request.group_id and not broker.coordinators.has_topic(GROUPS):
        reply = SyncReply(ErrorCode.unknown_member_id)
    elif sum(len(each.assignment) for each in request.assignments) > _ASSIGNMENT_BYTES_MAX:
        reply = SyncReply(ErrorCode.invalid_request)
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


@serves("Heartbeat", for_one(READ, GROUP, "group_id"))
async def heartbeat(broker: Broker, call: Call) -> dict[str, Any]:
    """Note that a member is alive, and tell it whether the group is rebalancing."""
    request = call.request
    if request.group_id and not broker.coordinators.has_topic(GROUPS):
        return {"error_code": ErrorCode.unknown_member_id}
    beat = HeartbeatRequest(
        request.group_id, request.member_id, request.generation_id, call.field("group_instance_id")
    )
    return {"error_code": await broker.groups.heartbeat(beat)}


@serves("LeaveGroup", for_one(READ, GROUP, "group_id"))
async def leave_group(broker: Broker, call: Call) -> dict[str, Any]:
    """Remove a member from its group, or from v3 on several."""
    request = call.request
    several = call.version >= _FIRST_LEAVE_OF_SEVERAL
    if several:
        members_named = (LeavingMember(each.member_id, each.group_instance_id) for each in request.members)
        leaving = await in_slices(members_named)
    else:
        leaving = [LeavingMember(request.member_id)]
    if request.group_id and not broker.coordinators.has_topic(GROUPS):
        unknown = ErrorCode.unknown_member_id
        reply = LeaveReply(
            members=tuple(LeftMember(each.member_id, each.instance_id, unknown) for each in leaving)
        )
    else:
        reply = await _leave(broker, request.group_id, leaving)
    if not several:
        # The old format has one field for an error.
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


@serves("ListGroups", for_each(DESCRIBE, CLUSTER), for_each(DESCRIBE, GROUP))
async def list_groups(broker: Broker, call: Call) -> dict[str, Any]:
    """The groups that this node coordinates, filtered by state and type."""
    states, types = call.field("states_filter", ()), call.field("types_filter", ())
    result = ListGroupsResult()
    if len(states) + len(types) > _FILTERS_MAX:
        result = ListGroupsResult(ErrorCode.invalid_request)
    elif broker.coordinators.has_topic(GROUPS):
        result = await broker.groups.list_groups(states, types)
    groups = await in_slices(
        {
            "group_id": each.group_id,
            "protocol_type": each.protocol_type,
            "group_state": each.state,
            "group_type": each.group_type,
        }
        for each in result.groups
        if call.may(DESCRIBE, CLUSTER, CLUSTER_NAME) or call.may(DESCRIBE, GROUP, each.group_id)
    )
    return {"error_code": result.error, "groups": groups}


@serves("DescribeGroups", for_each(DESCRIBE, GROUP))
async def describe_groups(broker: Broker, call: Call) -> dict[str, Any]:
    """Describe members and assignments of groups, each group once.

    A group that does not exist has the state Dead, and from v6 on an error.
    """
    named = tuple(await distinct_in_slices(call.request.groups))
    ids = tuple(await call.allowed(DESCRIBE, GROUP, named))
    if broker.coordinators.has_topic(GROUPS):
        descriptions = await broker.groups.describe_groups(ids)
    else:
        descriptions = await in_slices(GroupDescription(group_id, state=_DEAD) for group_id in ids)
    if len(ids) < len(named):
        code, allowed = ErrorCode.group_authorization_failed, frozenset(ids)
        descriptions += [GroupDescription(each, code) for each in named if each not in allowed]
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
            authorized_operations(call, GROUP, group.group_id)
            if error is ErrorCode.none and call.field("include_authorized_operations", False)
            else NOT_ASKED_FOR
        ),
    }


@serves("DeleteGroups", for_each(DELETE, GROUP))
async def delete_groups(broker: Broker, call: Call) -> dict[str, Any]:
    """Delete groups without members, and what they have committed."""
    named = call.request.groups_names
    ids = await call.allowed(DELETE, GROUP, named)
    if broker.coordinators.has_topic(GROUPS):
        codes = await broker.groups.delete_groups(ids)
    else:
        codes = dict.fromkeys(await distinct_in_slices(ids), ErrorCode.group_id_not_found)
    if len(ids) < len(named):
        codes |= {each: ErrorCode.group_authorization_failed for each in named if each not in codes}
    results = ({"group_id": group_id, "error_code": code} for group_id, code in codes.items())
    return {"results": await in_slices(results)}
