"""OffsetCommit, OffsetFetch and OffsetDelete: the committed offsets of groups.

The topic that holds groups and offsets is created by the first call that may write to it. Until then every
group is unknown, which is what the other calls answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from tidemill.coordination.turns import give_way, in_chunks, in_slices, repeated_in_slices
from tidemill.errors import ApiError, ErrorCode
from tidemill.groups.messages import (
    CommittedOffset,
    DeleteOffsetsResult,
    FetchOffsetsResult,
    OffsetCommitRequest,
    OffsetToCommit,
    TopicPartition,
)
from tidemill.server.broker import Broker
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import DELETE, DESCRIBE, GROUP, READ, TOPIC, for_each, for_one
from tidemill.server.requests.call import Call
from tidemill.wire.requests import ms

__all__ = (
    "commit_existing",
    "offset_commit",
    "offset_delete",
    "offset_fetch",
)

#: So many offsets are written to, or read from, the coordinator without a break.
_COMMITTED_AT_ONCE_MAX: Final = 500
_FETCHED_AT_ONCE_MAX: Final = 2_000
_FIRST_FETCH_WITH_GROUP_ERROR: Final = 2
_FIRST_FETCH_OF_SEVERAL: Final = 8
_FIRST_FETCH_BY_ID: Final = 10


def _label(topic: Any) -> dict[str, Any]:
    """The fields of an answer that name a topic as its request did: by name, or from v10 on by id."""
    if hasattr(topic, "topic_id"):
        return {"topic_id": topic.topic_id}
    return {"name": topic.name}


Commit = Callable[[Broker, Call, list[OffsetToCommit]], Awaitable[Mapping[TopicPartition, ErrorCode]]]


@serves("OffsetCommit", for_each(READ, GROUP), for_each(READ, TOPIC))
async def offset_commit(broker: Broker, call: Call) -> dict[str, Any]:
    """Commit offsets of a group."""
    return await commit_existing(broker, call, _commit)


async def commit_existing(
    broker: Broker, call: Call, commit: Commit, check: Callable[[Call], None] = lambda call: None
) -> dict[str, Any]:
    """Commit offsets of existing partitions; one that is missing, or may not be read, is refused by itself.

    ``check`` raises the error that refuses all of them.
    """
    offsets: list[OffsetToCommit] = []
    checked: list[tuple[Any, list[tuple[int, ErrorCode, str]]]] = []
    for topic in call.request.topics:
        partitions: list[tuple[int, ErrorCode, str]] = []
        for entry in topic.partitions:
            index = entry.partition_index
            try:
                check(call)
                call.authorize(READ, GROUP, call.request.group_id)
                name = _existing_partition(broker, call, topic, index)
            except ApiError as error:
                partitions.append((index, error.code, ""))
                continue
            partitions.append((index, ErrorCode.none, name))
            offsets.append(_offset_to_commit(name, entry))
            await give_way()
        checked.append((topic, partitions))
    committed: dict[TopicPartition, ErrorCode] = {}
    for chunk in in_chunks(offsets, _COMMITTED_AT_ONCE_MAX):
        if broker.disk.growth_refusal is not None:
            # The log itself would take them, for the sake of members that come and go.
            refused = ErrorCode.coordinator_not_available
            committed.update(dict.fromkeys(((each.topic, each.partition) for each in chunk), refused))
        else:
            committed.update(await commit(broker, call, list(chunk)))
    topics = []
    for topic, partitions in checked:
        bodies = (
            {"partition_index": index, "error_code": committed[name, index] if name else refusal}
            for index, refusal, name in partitions
        )
        topics.append({**_label(topic), "partitions": await in_slices(bodies)})
    return {"topics": topics}


def _existing_partition(broker: Broker, call: Call, topic: Any, index: int) -> str:
    """The name of the partition's topic. Raises ``ApiError`` if there is none, or it may not be read."""
    by_id = hasattr(topic, "topic_id")
    if not by_id:
        call.authorize(READ, TOPIC, topic.name)
    found = broker.find.topic_by_id(topic.topic_id) if by_id else broker.find.topic(topic.name)
    if by_id:
        call.authorize(READ, TOPIC, found.name)
    if not 0 <= index < len(found.partitions):
        raise ApiError(ErrorCode.unknown_topic_or_partition, f"topic {found.name!r} has no partition {index}")
    return found.name


def _offset_to_commit(name: str, entry: Any) -> OffsetToCommit:
    return OffsetToCommit(
        topic=name,
        partition=entry.partition_index,
        offset=entry.committed_offset,
        leader_epoch=getattr(entry, "committed_leader_epoch", -1),
        metadata=entry.committed_metadata,
    )


async def _commit(
    broker: Broker, call: Call, offsets: list[OffsetToCommit]
) -> Mapping[TopicPartition, ErrorCode]:
    request = call.request
    error = await broker.coordinators.prepare(GROUPS)
    if error is not ErrorCode.none:
        return {(each.topic, each.partition): error for each in offsets}
    return await broker.groups.commit_offsets(
        OffsetCommitRequest(
            group_id=request.group_id,
            offsets=offsets,
            generation=request.generation_id_or_member_epoch,
            member_id=request.member_id,
            instance_id=call.field("group_instance_id"),
            retention_ms=ms(call.field("retention_time")),
            version=call.version,
            client_host=call.client_host,
        )
    )


@serves("OffsetFetch", for_each(DESCRIBE, GROUP), for_each(DESCRIBE, TOPIC))
async def offset_fetch(broker: Broker, call: Call) -> dict[str, Any]:
    """Committed offsets of one group, or from v8 on of several.

    From v7 on a client can insist on offsets that no open transaction may change.
    """
    request = call.request
    if call.version >= _FIRST_FETCH_OF_SEVERAL:
        return {"groups": await _fetch_groups(broker, call)}
    body = await _fetch_group(broker, call, request)
    return {"error_code": body["error_code"], "topics": body["topics"]}


async def _fetch_groups(broker: Broker, call: Call) -> list[dict[str, Any]]:
    twice = await repeated_in_slices(each.group_id for each in call.request.groups)
    bodies = []
    for each in call.request.groups:
        if each.group_id in twice:
            # Naming a group again and again would let a small request ask for a huge answer.
            body = {"group_id": each.group_id, "error_code": ErrorCode.invalid_request, "topics": ()}
        else:
            body = await _fetch_group(broker, call, each)
        bodies.append(body)
        await give_way()
    return bodies


async def _fetch_group(broker: Broker, call: Call, request: Any) -> dict[str, Any]:
    """The answer for one group; ``request`` is the part of the request that is about it."""
    topics: Sequence[Any] | None = request.topics
    names = await in_slices(_name_or_error(broker, call, topic) for topic in topics or ())
    asked: list[TopicPartition] | None = None
    if topics is not None:
        asked = await in_slices(
            (name, index)
            for topic, name in zip(topics, names, strict=True)
            if isinstance(name, str)
            for index in topic.partition_indexes
        )
    result = await _fetch(broker, call, request, asked)
    bodies: list[dict[str, Any]]
    if result.error is not ErrorCode.none and call.version >= _FIRST_FETCH_WITH_GROUP_ERROR:
        bodies = []
    elif topics is None:
        bodies = await _all_offsets(broker, call, result)
    else:
        bodies = [
            await _fetched_topic(topic, name, result) for topic, name in zip(topics, names, strict=True)
        ]
    return {"group_id": request.group_id, "error_code": result.error, "topics": bodies}


def _name_or_error(broker: Broker, call: Call, topic: Any) -> str | ErrorCode:
    """The topic's name. Committed offsets can outlive their topic, so that the topic need not exist."""
    try:
        by_id = hasattr(topic, "topic_id")
        name = broker.find.topic_by_id(topic.topic_id).name if by_id else str(topic.name)
        call.authorize(DESCRIBE, TOPIC, name)
    except ApiError as error:
        return error.code
    return name


async def _fetch(
    broker: Broker, call: Call, request: Any, asked: list[TopicPartition] | None
) -> FetchOffsetsResult:
    if not call.may(DESCRIBE, GROUP, request.group_id):
        return FetchOffsetsResult(ErrorCode.group_authorization_failed)
    if broker.coordinators.has_topic(GROUPS):
        found: dict[TopicPartition, CommittedOffset] = {}
        for chunk in [asked] if not asked else in_chunks(asked, _FETCHED_AT_ONCE_MAX):
            result = await broker.groups.fetch_offsets(
                request.group_id,
                chunk,
                require_stable=call.field("require_stable", False),
                # From v9 on a member says who it is.
                member=(getattr(request, "member_id", None), getattr(request, "member_epoch", -1)),
            )
            if result.error is not ErrorCode.none:
                return result
            found.update(result.offsets)
        return FetchOffsetsResult(offsets=found)
    return FetchOffsetsResult(offsets=dict.fromkeys(asked or (), CommittedOffset()))


async def _fetched_topic(topic: Any, name: str | ErrorCode, result: FetchOffsetsResult) -> dict[str, Any]:
    partitions = []
    for index in topic.partition_indexes:
        if isinstance(name, ErrorCode):
            partitions.append(_fetched_partition(index, CommittedOffset(), name))
        else:
            offset = result.offsets.get((name, index), CommittedOffset())
            error = offset.error if result.error is ErrorCode.none else result.error
            partitions.append(_fetched_partition(index, offset, error))
        await give_way()
    return {**_label(topic), "partitions": partitions}


def _fetched_partition(index: int, offset: CommittedOffset, error: ErrorCode) -> dict[str, Any]:
    return {
        "partition_index": index,
        "committed_offset": offset.offset,
        "committed_leader_epoch": offset.leader_epoch,
        "metadata": offset.metadata,
        "error_code": error,
    }


async def _all_offsets(broker: Broker, call: Call, result: FetchOffsetsResult) -> list[dict[str, Any]]:
    by_topic: dict[str, list[dict[str, Any]]] = {}
    for (name, index), offset in result.offsets.items():
        if not call.may(DESCRIBE, TOPIC, name):
            continue
        by_topic.setdefault(name, []).append(_fetched_partition(index, offset, offset.error))
        await give_way()
    if call.version < _FIRST_FETCH_BY_ID:
        return [{"name": name, "partitions": partitions} for name, partitions in by_topic.items()]
    # A topic that is gone has no id to be named by.
    existing = [topic for name in by_topic if (topic := broker.image.topics.get(name)) is not None]
    return [{"topic_id": topic.id, "partitions": by_topic[topic.name]} for topic in existing]


@serves("OffsetDelete", for_one(DELETE, GROUP, "group_id"), for_each(READ, TOPIC))
async def offset_delete(broker: Broker, call: Call) -> dict[str, Any]:
    """Delete committed offsets of a group."""
    request = call.request
    existing: list[TopicPartition] = []
    refusals: dict[TopicPartition, ErrorCode] = {}
    for topic in request.topics:
        for entry in topic.partitions:
            key = topic.name, entry.partition_index
            try:
                _existing_partition(broker, call, topic, entry.partition_index)
                existing.append(key)
            except ApiError as error:
                refusals[key] = error.code
            await give_way()
    if request.group_id and not broker.coordinators.has_topic(GROUPS):
        result = DeleteOffsetsResult(ErrorCode.group_id_not_found)
    else:
        result = await _delete(broker, request.group_id, existing)
    if result.error is not ErrorCode.none:
        return {"error_code": result.error}
    codes = {**result.partitions, **refusals}
    topics = []
    for topic in request.topics:
        indexes = [entry.partition_index for entry in topic.partitions]
        bodies = ({"partition_index": index, "error_code": codes[topic.name, index]} for index in indexes)
        topics.append({"name": topic.name, "partitions": await in_slices(bodies)})
    return {"error_code": ErrorCode.none, "topics": topics}


async def _delete(broker: Broker, group_id: str, partitions: list[TopicPartition]) -> DeleteOffsetsResult:
    codes: dict[TopicPartition, ErrorCode] = {}
    for chunk in list(in_chunks(partitions, _COMMITTED_AT_ONCE_MAX)) or [partitions]:
        result = await broker.groups.delete_offsets(group_id, chunk)
        if result.error is not ErrorCode.none:
            return result
        codes.update(result.partitions)
    return DeleteOffsetsResult(partitions=codes)
