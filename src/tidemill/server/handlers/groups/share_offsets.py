"""Where share groups start in their partitions and how far they are behind: described, altered, deleted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

# The coordinator reaches its persister through the broker.
import tidemill.server.share.node_share  # noqa: F401
from tidemill.control.image import TopicImage
from tidemill.coordination.shards import client_error
from tidemill.coordination.turns import distinct_in_slices, give_way, in_slices
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.groups.share.messages import PartitionOffset, ShareGroupOffsets
from tidemill.server.broker import Broker
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import (
    DELETE,
    DESCRIBE,
    GROUP,
    READ,
    TOPIC,
    for_each,
    for_one,
    refusal,
)
from tidemill.server.requests.call import Call
from tidemill.server.share.lag import ask_ends

__all__ = ("alter_share_group_offsets", "delete_share_group_offsets", "describe_share_group_offsets")

_FIRST_DESCRIBE_WITH_LAG: Final = 1
_NOT_KNOWN: Final = -1
#: Partitions in one request, for all topics of a group together.
_PARTITIONS_MAX: Final = 20_000
_TOPICS_MAX: Final = 5_000


# --- describing


@serves("DescribeShareGroupOffsets", for_each(DESCRIBE, GROUP), for_each(DESCRIBE, TOPIC))
async def describe_share_group_offsets(broker: Broker, call: Call) -> dict[str, Any]:
    """Tell where groups start, and how many records they have not finished."""
    return {"groups": [await _describe_group(broker, call, each) for each in call.request.groups]}


async def _describe_group(broker: Broker, call: Call, asked: Any) -> dict[str, Any]:
    group_id = asked.group_id
    await give_way()
    names = None if asked.topics is None else {topic.topic_name: topic.partitions for topic in asked.topics}
    try:
        call.authorize(DESCRIBE, GROUP, group_id)
        _check_size(asked.topics or ())
        if not broker.coordinators.has_topic(GROUPS):
            raise ApiError(ErrorCode.group_id_not_found, f"there is no share group {group_id[:200]!r}")
    except ApiError as error:
        found = ShareGroupOffsets(group_id, error.code, error.message)
    else:
        wanted = None if names is None else await _ids_of(broker, call, names)
        found = await broker.groups.share.describe_offsets(group_id, wanted)
    topics = []
    if found.error is ErrorCode.none:
        topics = await _describe_topics(broker, call, found.topics)
        topics += [await _refused_topic(broker, call, *each) for each in (names or {}).items()]
    return {
        "group_id": group_id,
        "topics": [topic for topic in topics if topic is not None],
        "error_code": found.error,
        "error_message": found.message,
    }


async def _ids_of(
    broker: Broker, call: Call, names: Mapping[str, Sequence[int]]
) -> dict[UUID, Sequence[int]]:
    """The partitions by their topic's id, of the topics that exist and may be described."""
    found: dict[UUID, Sequence[int]] = {}
    for name, indexes in names.items():
        topic = broker.image.topics.get(name)
        if topic is not None and call.may(DESCRIBE, TOPIC, name):
            found[topic.id] = list(await distinct_in_slices(indexes))
        await give_way()
    return found


async def _refused_topic(
    broker: Broker, call: Call, name: str, indexes: Sequence[int]
) -> dict[str, Any] | None:
    """The answer for a topic that was named and does not exist, or may not be described."""
    if not call.may(DESCRIBE, TOPIC, name):
        error = refusal(DESCRIBE, TOPIC, name)
    elif name not in broker.image.topics:
        error = ApiError(ErrorCode.unknown_topic_or_partition, f"there is no topic {name[:200]!r}")
    else:
        return None
    failed = PartitionOffset(error=error.code, message=error.message)
    partitions = await in_slices(
        _described(call, index, failed, _NOT_KNOWN) for index in await distinct_in_slices(indexes)
    )
    return {"topic_name": name, "topic_id": None, "partitions": partitions}


async def _describe_topics(
    broker: Broker, call: Call, topics: Mapping[UUID, Mapping[int, PartitionOffset]]
) -> list[dict[str, Any] | None]:
    described: list[dict[str, Any] | None] = []
    for topic_id, partitions in topics.items():
        name = broker.image.topic_names_by_id.get(topic_id)
        topic = None if name is None else broker.image.topics.get(name)
        if topic is None or not call.may(DESCRIBE, TOPIC, topic.name):
            continue
        ends: Mapping[int, int] = {}
        if call.version >= _FIRST_DESCRIBE_WITH_LAG:
            started = [index for index, offset in partitions.items() if offset.start_offset >= 0]
            ends = await _ends(broker, topic, started)
        entries = (
            _described(call, index, offset, ends.get(index, _NOT_KNOWN))
            for index, offset in partitions.items()
        )
        described.append(
            {"topic_name": topic.name, "topic_id": topic_id, "partitions": await in_slices(entries)}
        )
    return described


def _described(call: Call, index: int, offset: PartitionOffset, end: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "partition_index": index,
        "start_offset": offset.start_offset,
        "leader_epoch": offset.leader_epoch,
        "error_code": offset.error,
        "error_message": offset.message,
    }
    if call.version >= _FIRST_DESCRIBE_WITH_LAG:
        body["lag"] = _lag(offset, end)
    return body


def _lag(offset: PartitionOffset, end: int) -> int:
    """Records that are not finished; -1 if the group has not begun, or the end is not known."""
    finished = offset.delivery_complete_count
    if min(offset.start_offset, finished, end) < 0:
        return _NOT_KNOWN
    return max(0, end - offset.start_offset - finished)


async def _ends(broker: Broker, topic: TopicImage, indexes: Sequence[int]) -> dict[int, int]:
    """The ends of partitions, asked of their leaders. Those that cannot be told are left out."""
    elsewhere: dict[int, list[int]] = {}
    found: dict[int, int] = {}
    for index in indexes:
        leader = broker.find.leader_of(topic, index)[0] if index < len(topic.partitions) else -1
        if leader != broker.node_id:
            elsewhere.setdefault(leader, []).append(index)
            continue
        try:
            partition = broker.find.partition(topic, index)
            partition.check_leads()
            found[index] = partition.latest_offset(committed=False)
        except TidemillError:
            pass
        await give_way()
    for node_id, some in elsewhere.items():
        if node_id >= 0:
            told = await ask_ends(broker, node_id, {topic.name: some})
            found |= {index: end for (_, index), end in told.items()}
    return found


# --- altering


@serves("AlterShareGroupOffsets", for_one(READ, GROUP, "group_id"), for_each(READ, TOPIC))
async def alter_share_group_offsets(broker: Broker, call: Call) -> dict[str, Any]:
    """Move where a group without members starts."""
    request = call.request
    try:
        _check_size(request.topics)
        _require_groups(broker, request.group_id)
        allowed = frozenset(await call.allowed(READ, TOPIC, [topic.topic_name for topic in request.topics]))
        offsets = {
            (topic.topic_name, entry.partition_index): entry.start_offset
            for topic in request.topics
            if topic.topic_name in allowed
            for entry in topic.partitions
        }
        results = await broker.groups.share.alter_offsets(request.group_id, offsets, call.client_host)
    except TidemillError as error:
        return {"error_code": client_error(error), "error_message": error.message, "responses": []}
    responses = []
    for topic in request.topics:
        entries = []
        for entry in topic.partitions:
            if topic.topic_name in allowed:
                result = results[topic.topic_name, entry.partition_index]
                code, message = result.error, result.message
            else:
                refused = refusal(READ, TOPIC, topic.topic_name)
                code, message = refused.code, refused.message
            entries.append(
                {"partition_index": entry.partition_index, "error_code": code, "error_message": message}
            )
            await give_way()
        responses.append(
            {
                "topic_name": topic.topic_name,
                "topic_id": _id_of(broker, topic.topic_name),
                "partitions": entries,
            }
        )
    return {"responses": responses}


def _id_of(broker: Broker, name: str) -> UUID | None:
    topic = broker.image.topics.get(name)
    return None if topic is None else topic.id


def _check_size(topics: Sequence[Any]) -> None:
    if sum(1 + len(topic.partitions) for topic in topics) > _PARTITIONS_MAX:
        raise ApiError(
            ErrorCode.invalid_request,
            f"a request may name {_PARTITIONS_MAX} topics and partitions of a group; divide it",
        )


def _require_groups(broker: Broker, group_id: str) -> None:
    if not group_id:
        raise ApiError(ErrorCode.invalid_group_id, "the group id is empty")
    if not broker.coordinators.has_topic(GROUPS):
        raise ApiError(ErrorCode.group_id_not_found, f"there is no share group {group_id[:200]!r}")


# --- deleting


@serves("DeleteShareGroupOffsets", for_one(DELETE, GROUP, "group_id"), for_each(READ, TOPIC))
async def delete_share_group_offsets(broker: Broker, call: Call) -> dict[str, Any]:
    """Forget topics of a group without members: it starts anew there when it reads them again."""
    request = call.request
    names = list(await distinct_in_slices(topic.topic_name for topic in request.topics))
    allowed = await call.allowed(READ, TOPIC, names)
    try:
        if len(names) > _TOPICS_MAX:
            raise ApiError(ErrorCode.invalid_request, f"a request may name {_TOPICS_MAX} topics; divide it")
        _require_groups(broker, request.group_id)
        results = await broker.groups.share.delete_offsets(request.group_id, allowed)
    except TidemillError as error:
        return {"error_code": client_error(error), "error_message": error.message, "responses": []}
    responses = []
    for name in names:
        code, message = ErrorCode.none, None
        if name in results:
            code, message = results[name].error, results[name].message
        else:
            refused = refusal(READ, TOPIC, name)
            code, message = refused.code, refused.message
        responses.append(
            {
                "topic_name": name,
                "topic_id": _id_of(broker, name),
                "error_code": code,
                "error_message": message,
            }
        )
        await give_way()
    return {"responses": responses}
