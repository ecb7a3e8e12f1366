"""OffsetCommit, OffsetFetch and OffsetDelete: where groups are in their topics.

The topic that holds groups and offsets is created by the first call that may write to it. Until then every
group is unknown, which is what the other calls answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from tidemill.control.image import TopicImage
from tidemill.coordination.turns import give_way, in_chunks, in_slices
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.groups.messages import (
    CommittedOffset,
    DeleteOffsetsResult,
    FetchOffsetsResult,
    OffsetCommitRequest,
    OffsetToCommit,
    TopicPartition,
)
from tidemill.server.broker import OFFSETS_TOPIC, Broker
from tidemill.server.call import Call
from tidemill.server.handlers.outcome import repeated
from tidemill.wire.requests import ms

__all__ = (
    "commit_existing",
    "has_groups",
    "offset_commit",
    "offset_delete",
    "offset_fetch",
    "prepare_groups",
)

#: So many offsets are written to, or read from, the coordinator without a break.
_COMMITTED_AT_ONCE_MAX: Final = 500
_FETCHED_AT_ONCE_MAX: Final = 2_000
_FIRST_FETCH_WITH_GROUP_ERROR: Final = 2
_FIRST_FETCH_OF_SEVERAL: Final = 8
_FIRST_FETCH_BY_ID: Final = 10


def has_groups(broker: Broker) -> bool:
    """Whether there can be any group at all."""
    return OFFSETS_TOPIC in broker.image.topics


async def prepare_groups(broker: Broker) -> ErrorCode:
    """Make sure that groups can be written."""
    try:
        await broker.ensure_offsets_topic()
    except TidemillError:
        return ErrorCode.coordinator_not_available
    return ErrorCode.none


def _label(topic: Any) -> dict[str, Any]:
    """What a request names a topic by, as the fields of its answer: a name, or from v10 on an id."""
    if hasattr(topic, "topic_id"):
        return {"topic_id": topic.topic_id}
    return {"name": topic.name}


def _resolve(broker: Broker, topic: Any) -> TopicImage:
    if hasattr(topic, "topic_id"):
        return broker.topic_by_id(topic.topic_id)
    return broker.topic(topic.name)


Commit = Callable[[Broker, Call, list[OffsetToCommit]], Awaitable[Mapping[TopicPartition, ErrorCode]]]


async def offset_commit(broker: Broker, call: Call) -> dict[str, Any]:
    """Commit offsets of a group."""
    return await commit_existing(broker, call, _commit)


async def commit_existing(broker: Broker, call: Call, commit: Commit) -> dict[str, Any]:
    """Commit what exists; a topic or partition that does not is refused for itself."""
    offsets: list[OffsetToCommit] = []
    checked: list[tuple[Any, list[tuple[int, ErrorCode, str]]]] = []
    for topic in call.request.topics:
        partitions: list[tuple[int, ErrorCode, str]] = []
        for entry in topic.partitions:
            index = entry.partition_index
            try:
                name = _existing_partition(broker, topic, index)
            except ApiError as error:
                partitions.append((index, error.code, ""))
                continue
            partitions.append((index, ErrorCode.none, name))
            offsets.append(_offset_to_commit(name, entry))
            await give_way()
        checked.append((topic, partitions))
    committed: dict[TopicPartition, ErrorCode] = {}
    for chunk in in_chunks(offsets, _COMMITTED_AT_ONCE_MAX):
        committed.update(await commit(broker, call, list(chunk)))
    topics = []
    for topic, partitions in checked:
        bodies = (
            {"partition_index": index, "error_code": committed[name, index] if name else refusal}
            for index, refusal, name in partitions
        )
        topics.append({**_label(topic), "partitions": await in_slices(bodies)})
    return {"topics": topics}


def _existing_partition(broker: Broker, topic: Any, index: int) -> str:
    """The name of the partition's topic. Raises ``ApiError`` if there is no such topic or partition."""
    found = _resolve(broker, topic)
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
    error = await prepare_groups(broker)
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
        )
    )


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
    twice = repeated(await in_slices(each.group_id for each in call.request.groups))
    bodies = []
    for each in call.request.groups:
        if each.group_id in twice:
            # Each would be answered with all that the group has committed: a small request, a huge answer.
            body = {"group_id": each.group_id, "error_code": ErrorCode.invalid_request, "topics": ()}
        else:
            body = await _fetch_group(broker, call, each)
        bodies.append(body)
        await give_way()
    return bodies


async def _fetch_group(broker: Broker, call: Call, request: Any) -> dict[str, Any]:
    """``request``: the part of the request that is about one group."""
    topics: Sequence[Any] | None = request.topics
    names = await in_slices(_name_or_error(broker, topic) for topic in topics or ())
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


def _name_or_error(broker: Broker, topic: Any) -> str | ErrorCode:
    """The name that offsets are kept under. What was committed can outlive its topic, so any name will do."""
    if not hasattr(topic, "topic_id"):
        return str(topic.name)
    try:
        return broker.topic_by_id(topic.topic_id).name
    except ApiError as error:
        return error.code


async def _fetch(
    broker: Broker, call: Call, request: Any, asked: list[TopicPartition] | None
) -> FetchOffsetsResult:
    if has_groups(broker):
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
        by_topic.setdefault(name, []).append(_fetched_partition(index, offset, offset.error))
        await give_way()
    if call.version < _FIRST_FETCH_BY_ID:
        return [{"name": name, "partitions": partitions} for name, partitions in by_topic.items()]
    # A topic that is gone has no id to be named by.
    existing = [topic for name in by_topic if (topic := broker.image.topics.get(name)) is not None]
    return [{"topic_id": topic.id, "partitions": by_topic[topic.name]} for topic in existing]


async def offset_delete(broker: Broker, call: Call) -> dict[str, Any]:
    """Forget what a group has committed for partitions."""
    request = call.request
    existing: list[TopicPartition] = []
    refusals: dict[TopicPartition, ErrorCode] = {}
    for topic in request.topics:
        for entry in topic.partitions:
            key = topic.name, entry.partition_index
            try:
                _existing_partition(broker, topic, entry.partition_index)
                existing.append(key)
            except ApiError as error:
                refusals[key] = error.code
            await give_way()
    if request.group_id and not has_groups(broker):
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


async def _delete(broker: Broker, group_id: str, places: list[TopicPartition]) -> DeleteOffsetsResult:
    codes: dict[TopicPartition, ErrorCode] = {}
    for chunk in list(in_chunks(places, _COMMITTED_AT_ONCE_MAX)) or [places]:
        result = await broker.groups.delete_offsets(group_id, chunk)
        if result.error is not ErrorCode.none:
            return result
        codes.update(result.partitions)
    return DeleteOffsetsResult(partitions=codes)
