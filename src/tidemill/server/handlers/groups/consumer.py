"""The new consumer protocol (KIP-848): from Kafka's messages to the coordinator's and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final
from uuid import UUID

from tidemill.coordination.turns import distinct_in_slices, give_way, in_slices
from tidemill.errors import ErrorCode
from tidemill.groups.consumer.member import Partitions
from tidemill.groups.consumer.messages import (
    ConsumerGroupDescription,
    ConsumerHeartbeatReply,
    ConsumerHeartbeatRequest,
    ConsumerMemberDescription,
    DescribedTopic,
)
from tidemill.server.broker import Broker
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.handlers.authorized_operations import NOT_ASKED_FOR, authorized_operations
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import DESCRIBE, GROUP, READ, TOPIC, for_each, for_one, refusal
from tidemill.server.requests.call import Call
from tidemill.wire.requests import ms

__all__ = ("consumer_group_describe", "consumer_group_heartbeat")

#: Topics that a member may subscribe to: each is stored, and looked at in each rebalance.
_SUBSCRIBED_NAMES_MAX: Final = 5_000
_CLASSIC_MEMBER: Final = 0
_CONSUMER_MEMBER: Final = 1
_FIRST_DESCRIBE_WITH_MEMBER_TYPE: Final = 1


@serves("ConsumerGroupHeartbeat", for_one(READ, GROUP, "group_id"), for_each(DESCRIBE, TOPIC))
async def consumer_group_heartbeat(broker: Broker, call: Call) -> dict[str, Any]:
    """Let a member join, stay or leave, and tell it its assignment."""
    names = call.request.subscribed_topic_names or ()
    if len(await call.allowed(DESCRIBE, TOPIC, names)) < len(names):
        return {"error_code": ErrorCode.topic_authorization_failed}
    error = await broker.coordinators.prepare(GROUPS)
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
        else {"topic_partitions": await _topic_partitions(reply.assignment)},
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
        owned=None if owned is None else frozenset(await distinct_in_slices(_partitions(owned))),
        client_id=call.client_id,
        client_host=call.client_host,
        version=call.version,
    )


def _partitions(topics: Iterable[Any]) -> Iterator[tuple[UUID, int]]:
    return ((topic.topic_id, index) for topic in topics for index in topic.partitions)


async def _topic_partitions(partitions: Partitions) -> list[dict[str, Any]]:
    by_topic: dict[UUID, list[int]] = {}
    for topic_id, index in partitions:
        by_topic.setdefault(topic_id, []).append(index)
        await give_way()
    return await in_slices(
        {"topic_id": topic_id, "partitions": sorted(indexes)} for topic_id, indexes in by_topic.items()
    )


@serves("ConsumerGroupDescribe", for_each(DESCRIBE, GROUP), for_each(DESCRIBE, TOPIC))
async def consumer_group_describe(broker: Broker, call: Call) -> dict[str, Any]:
    """Describe groups of the new protocol, each once: members, assignments, targets. Others are not found."""
    named = tuple(await distinct_in_slices(call.request.group_ids))
    ids = tuple(await call.allowed(DESCRIBE, GROUP, named))
    if broker.coordinators.has_topic(GROUPS):
        descriptions = await broker.groups.describe_consumer_groups(ids)
    else:
        descriptions = await in_slices(
            ConsumerGroupDescription(each, ErrorCode.group_id_not_found, f"there is no group {each[:200]!r}")
            for each in ids
        )
    if call.authorizer is not None:
        descriptions = await in_slices(_permitted(call, each) for each in descriptions)
        allowed = frozenset(ids)
        for each in named:
            if each not in allowed:
                error = refusal(DESCRIBE, GROUP, each)
                descriptions.append(ConsumerGroupDescription(each, error.code, error.message))
            await give_way()
    return {"groups": [await _described(call, each) for each in descriptions]}


def _permitted(call: Call, group: ConsumerGroupDescription) -> ConsumerGroupDescription:
    """The group, or an error if its members name a topic that may not be described."""
    for member in group.members:
        assigned = (topic.name for topic in (*member.assignment, *member.target))
        for name in (*member.topics, *assigned):
            if not call.may(DESCRIBE, TOPIC, name):
                error = refusal(DESCRIBE, TOPIC, name)
                return ConsumerGroupDescription(group.group_id, error.code, error.message)
    return group


async def _described(call: Call, group: ConsumerGroupDescription) -> dict[str, Any]:
    await give_way()
    return {
        "error_code": group.error,
        "error_message": group.message,
        "group_id": group.group_id,
        "group_state": group.state,
        "group_epoch": group.epoch,
        "assignment_epoch": group.target_epoch,
        "assignor_name": group.assignor,
        "members": [await _described_member(call, each) for each in group.members],
        "authorized_operations": (
            authorized_operations(call, GROUP, group.group_id)
            if group.error is ErrorCode.none and call.request.include_authorized_operations
            else NOT_ASKED_FOR
        ),
    }


async def _described_member(call: Call, member: ConsumerMemberDescription) -> dict[str, Any]:
    body = {
        "member_id": member.member_id,
        "instance_id": member.instance_id,
        "rack_id": member.rack_id,
        "member_epoch": member.member_epoch,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "subscribed_topic_names": member.topics,
        "subscribed_topic_regex": member.regex,
        "assignment": await _assignment(member.assignment),
        "target_assignment": await _assignment(member.target),
    }
    if call.version >= _FIRST_DESCRIBE_WITH_MEMBER_TYPE:
        body["member_type"] = _CLASSIC_MEMBER if member.is_classic else _CONSUMER_MEMBER
    return body


async def _assignment(topics: tuple[DescribedTopic, ...]) -> dict[str, Any]:
    return {
        "topic_partitions": await in_slices(
            {"topic_id": topic.id, "topic_name": topic.name, "partitions": topic.partitions}
            for topic in topics
        )
    }
