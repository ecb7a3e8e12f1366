"""The new consumer protocol (KIP-848): from Kafka's messages to the coordinator's and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final
from uuid import UUID

from tidemill.coordination.turns import in_slices
from tidemill.errors import ErrorCode
from tidemill.groups.consumer_member import Partitions
from tidemill.groups.consumer_messages import (
    ConsumerGroupDescription,
    ConsumerHeartbeatReply,
    ConsumerHeartbeatRequest,
    ConsumerMemberDescription,
    DescribedTopic,
)
from tidemill.server.broker import Broker
from tidemill.server.call import Call
from tidemill.server.handlers.authorized_operations import GROUP_OPERATIONS, NOT_ASKED_FOR
from tidemill.server.handlers.committed_offsets import has_groups, prepare_groups
from tidemill.wire.requests import ms

__all__ = ("consumer_group_describe", "consumer_group_heartbeat")

#: Each is kept for each member, and looked at in each rebalance.
_SUBSCRIBED_NAMES_MAX: Final = 5_000
_CLASSIC_MEMBER: Final = 0
_CONSUMER_MEMBER: Final = 1
_FIRST_DESCRIBE_WITH_MEMBER_TYPE: Final = 1


async def consumer_group_heartbeat(broker: Broker, call: Call) -> dict[str, Any]:
    """A member joins, stays, or leaves, and is told what it may read."""
    error = await prepare_groups(broker)
    if len(call.request.subscribed_topic_names or ()) > _SUBSCRIBED_NAMES_MAX:
        reply = ConsumerHeartbeatReply(
            ErrorCode.invalid_request,
            f"a member may name {_SUBSCRIBED_NAMES_MAX} topics; subscribe to more by a regular expression",
        )
    elif error is ErrorCode.none:
        reply = await broker.groups.consumer_heartbeat(await _heartbeat_request(call))
    else:
        reply = ConsumerHeartbeatReply(error, "groups cannot be stored right now; try again")
    return {
        "error_code": reply.error,
        "error_message": reply.message,
        "member_id": reply.member_id,
        "member_epoch": reply.member_epoch,
        "heartbeat_interval": reply.heartbeat_interval_ms,
        "assignment": None
        if reply.assignment is None
        else {"topic_partitions": _topic_partitions(reply.assignment)},
    }


async def _heartbeat_request(call: Call) -> ConsumerHeartbeatRequest:
    request = call.request
    names, owned = request.subscribed_topic_names, request.topic_partitions
    return ConsumerHeartbeatRequest(
        group_id=request.group_id,
        member_id=request.member_id,
        member_epoch=request.member_epoch,
        instance_id=request.instance_id,
        rack_id=request.rack_id,
        rebalance_timeout_ms=ms(request.rebalance_timeout),
        topics=None if names is None else frozenset(names),
        regex=call.field("subscribed_topic_regex"),
        assignor=request.server_assignor,
        owned=None if owned is None else frozenset(await in_slices(_partitions(owned))),
        client_id=call.client_id,
        client_host=call.client_host,
        version=call.version,
    )


def _partitions(topics: Iterable[Any]) -> Iterator[tuple[UUID, int]]:
    return ((topic.topic_id, index) for topic in topics for index in topic.partitions)


def _topic_partitions(partitions: Partitions) -> list[dict[str, Any]]:
    by_topic: dict[UUID, list[int]] = {}
    for topic_id, index in sorted(partitions):
        by_topic.setdefault(topic_id, []).append(index)
    return [{"topic_id": topic_id, "partitions": indexes} for topic_id, indexes in by_topic.items()]


async def consumer_group_describe(broker: Broker, call: Call) -> dict[str, Any]:
    """Members, assignments and targets of groups of the new protocol, each once; any other is not found."""
    ids = tuple(dict.fromkeys(call.request.group_ids))
    if has_groups(broker):
        descriptions = await broker.groups.describe_consumer_groups(ids)
    else:
        descriptions = [
            ConsumerGroupDescription(each, ErrorCode.group_id_not_found, f"there is no group {each[:200]!r}")
            for each in ids
        ]
    return {"groups": await in_slices(_described(call, each) for each in descriptions)}


def _described(call: Call, group: ConsumerGroupDescription) -> dict[str, Any]:
    return {
        "error_code": group.error,
        "error_message": group.message,
        "group_id": group.group_id,
        "group_state": group.state,
        "group_epoch": group.epoch,
        "assignment_epoch": group.target_epoch,
        "assignor_name": group.assignor,
        "members": [_described_member(call, each) for each in group.members],
        "authorized_operations": (
            GROUP_OPERATIONS
            if group.error is ErrorCode.none and call.request.include_authorized_operations
            else NOT_ASKED_FOR
        ),
    }


def _described_member(call: Call, member: ConsumerMemberDescription) -> dict[str, Any]:
    body = {
        "member_id": member.member_id,
        "instance_id": member.instance_id,
        "rack_id": member.rack_id,
        "member_epoch": member.member_epoch,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "subscribed_topic_names": member.topics,
        "subscribed_topic_regex": member.regex,
        "assignment": _assignment(member.assignment),
        "target_assignment": _assignment(member.target),
    }
    if call.version >= _FIRST_DESCRIBE_WITH_MEMBER_TYPE:
        body["member_type"] = _CLASSIC_MEMBER if member.is_classic else _CONSUMER_MEMBER
    return body


def _assignment(topics: tuple[DescribedTopic, ...]) -> dict[str, Any]:
    return {
        "topic_partitions": [
            {"topic_id": topic.id, "topic_name": topic.name, "partitions": topic.partitions}
            for topic in topics
        ]
    }
