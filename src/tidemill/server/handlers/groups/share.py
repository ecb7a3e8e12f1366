"""Share groups (KIP-932): from Kafka's messages to the coordinator's and back."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

# The coordinator reaches its persister through the broker.
import tidemill.server.share.node_share  # noqa: F401
from tidemill.coordination.turns import distinct_in_slices, give_way, in_slices
from tidemill.errors import ErrorCode
from tidemill.groups.consumer.member import Partitions
from tidemill.groups.share.member import ShareMember
from tidemill.groups.share.messages import (
    ShareGroupDescription,
    ShareHeartbeatReply,
    ShareHeartbeatRequest,
)
from tidemill.server.broker import Broker
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.handlers.authorized_operations import NOT_ASKED_FOR, authorized_operations
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import DESCRIBE, GROUP, READ, TOPIC, for_each, for_one, refusal
from tidemill.server.requests.call import Call

__all__ = ("share_group_describe", "share_group_heartbeat")

#: Topics that a member may subscribe to: each is stored, and looked at whenever the group changes.
_SUBSCRIBED_NAMES_MAX: Final = 5_000


@serves("ShareGroupHeartbeat", for_one(READ, GROUP, "group_id"), for_each(DESCRIBE, TOPIC))
async def share_group_heartbeat(broker: Broker, call: Call) -> dict[str, Any]:
    """Let a member join, stay or leave, and tell it its assignment."""
    request = call.request
    names = request.subscribed_topic_names
    if len(await call.allowed(DESCRIBE, TOPIC, names or ())) < len(names or ()):
        return {"error_code": ErrorCode.topic_authorization_failed}
    error = await broker.coordinators.prepare(GROUPS)
    if len(names or ()) > _SUBSCRIBED_NAMES_MAX:
        reply = ShareHeartbeatReply(
            ErrorCode.invalid_request,
            f"a member may subscribe to {_SUBSCRIBED_NAMES_MAX} topics; divide them among several groups",
        )
    elif error is ErrorCode.none:
        reply = await broker.groups.share.heartbeat(
            ShareHeartbeatRequest(
                request.group_id,
                request.member_id,
                request.member_epoch,
                request.rack_id,
                None if names is None else frozenset(names),
                call.client_id,
                call.client_host,
            )
        )
    else:
        reply = ShareHeartbeatReply(error, "groups cannot be stored right now; try again")
    assignment = reply.assignment
    return {
        "error_code": reply.error,
        "error_message": reply.message,
        "member_id": reply.member_id,
        "member_epoch": reply.member_epoch,
        "heartbeat_interval": reply.heartbeat_interval_ms,
        "assignment": None if assignment is None else {"topic_partitions": await _by_topic(assignment)},
    }


async def _by_topic(partitions: Partitions) -> list[dict[str, Any]]:
    return await in_slices(
        {"topic_id": topic_id, "partitions": sorted(indexes)}
        for topic_id, indexes in (await _indexes_by_topic(partitions)).items()
    )


async def _indexes_by_topic(partitions: Partitions) -> dict[UUID, list[int]]:
    by_topic: dict[UUID, list[int]] = {}
    for topic_id, index in partitions:
        by_topic.setdefault(topic_id, []).append(index)
        await give_way()
    return by_topic


@serves("ShareGroupDescribe", for_each(DESCRIBE, GROUP), for_each(DESCRIBE, TOPIC))
async def share_group_describe(broker: Broker, call: Call) -> dict[str, Any]:
    """Describe share groups, each once: members and assignments. Other groups are not found."""
    named = tuple(await distinct_in_slices(call.request.group_ids))
    allowed = frozenset(await call.allowed(DESCRIBE, GROUP, named))
    return {"groups": [await _describe(broker, call, each, may=each in allowed) for each in named]}


async def _describe(broker: Broker, call: Call, group_id: str, *, may: bool) -> dict[str, Any]:
    await give_way()
    if not may:
        error = refusal(DESCRIBE, GROUP, group_id)
        group = ShareGroupDescription(group_id, error.code, error.message)
    elif broker.coordinators.has_topic(GROUPS):
        group = await broker.groups.share.describe(group_id)
    else:
        message = f"there is no share group {group_id[:200]!r}"
        group = ShareGroupDescription(group_id, ErrorCode.group_id_not_found, message)
    group = await _permitted(call, group)
    return {
        "error_code": group.error,
        "error_message": group.message,
        "group_id": group.group_id,
        "group_state": group.state,
        "group_epoch": group.epoch,
        "assignment_epoch": group.target_epoch,
        "assignor_name": group.assignor,
        "members": [await _described_member(broker, member) for member in group.members],
        "authorized_operations": (
            authorized_operations(call, GROUP, group_id)
            if group.error is ErrorCode.none and call.request.include_authorized_operations
            else NOT_ASKED_FOR
        ),
    }


async def _permitted(call: Call, group: ShareGroupDescription) -> ShareGroupDescription:
    """The group, or an error if its members name a topic that may not be described."""
    if call.authorizer is None:
        return group
    for name in await distinct_in_slices(name for member in group.members for name in member.topics):
        if not call.may(DESCRIBE, TOPIC, name):
            error = refusal(DESCRIBE, TOPIC, name)
            return ShareGroupDescription(group.group_id, error.code, error.message)
        await give_way()
    return group


async def _described_member(broker: Broker, member: ShareMember) -> dict[str, Any]:
    names = broker.image.topic_names_by_id
    assigned = await _indexes_by_topic(member.assigned)
    return {
        "member_id": member.member_id,
        "rack_id": member.rack_id,
        "member_epoch": member.epoch,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "subscribed_topic_names": sorted(member.topics),
        "assignment": {
            "topic_partitions": await in_slices(
                {"topic_id": topic_id, "topic_name": names[topic_id], "partitions": sorted(indexes)}
                for topic_id, indexes in assigned.items()
                if topic_id in names
            )
        },
    }
