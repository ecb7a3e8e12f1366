"""ListOffsets, OffsetForLeaderEpoch and DeleteRecords: where a log starts and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tidemill.coordination.turns import give_way, in_slices
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.log.segments.by_time import TimedOffset
from tidemill.replication.coordinator_log import wait_committed, wait_deleted
from tidemill.replication.partition import Partition
from tidemill.server.broker import Broker
from tidemill.server.broker.time_search import find_time, search
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import DELETE, DESCRIBE, TOPIC, for_each
from tidemill.server.requests.call import Call
from tidemill.wire.requests import ms

__all__ = ("delete_records", "list_offsets", "offset_for_leader_epoch")

_READ_COMMITTED = 1
_LATEST = -1
_EARLIEST = -2
_MAX_TIMESTAMP = -3
_EARLIEST_LOCAL = -4
_LATEST_TIERED = -5
_EARLIEST_PENDING_UPLOAD = -6
_NOT_FOUND = TimedOffset(-1, -1, -1)
#: Older versions of ListOffsets know LEADER_NOT_AVAILABLE instead.
_OFFSET_NOT_AVAILABLE_MIN_VERSION = 5
#: The version of ListOffsets that brought each special timestamp.
_SPECIAL_MIN_VERSION = {
    _MAX_TIMESTAMP: 7,
    _EARLIEST_LOCAL: 8,
    _LATEST_TIERED: 9,
    _EARLIEST_PENDING_UPLOAD: 11,
}


@serves("ListOffsets", for_each(DESCRIBE, TOPIC))
async def list_offsets(broker: Broker, call: Call) -> dict[str, Any]:
    """Find the offset of a time, or the start or end of what the reader may see."""
    return await _each_partition(broker, call, _list_one)


async def _each_partition(
    broker: Broker, call: Call, answer: Callable[[Broker, Call, str, Any], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """The answers about all partitions that a request names, by topic."""
    topics = []
    for topic in call.request.topics:
        partitions = []
        for entry in topic.partitions:
            partitions.append(await answer(broker, call, topic.name, entry))
            await give_way()
        topics.append({"name": topic.name, "partitions": partitions})
    return {"topics": topics}


async def _list_one(broker: Broker, call: Call, topic: str, entry: Any) -> dict[str, Any]:
    index = entry.partition_index
    try:
        call.authorize(DESCRIBE, TOPIC, topic)
        partition = _leader(broker, topic, index, getattr(entry, "current_leader_epoch", -1))
        committed = call.field("isolation_level", 0) == _READ_COMMITTED
        found = await _find(broker, partition, entry.timestamp, call.version, committed=committed)
    except TidemillError as error:
        code = error.code
        if code == ErrorCode.offset_not_available and call.version < _OFFSET_NOT_AVAILABLE_MIN_VERSION:
            code = ErrorCode.leader_not_available
        return {"partition_index": index, "error_code": code, "timestamp": -1, "offset": -1}
    return {
        "partition_index": index,
        "timestamp": found.timestamp,
        "offset": found.offset,
        "leader_epoch": found.leader_epoch,
    }


def _leader(broker: Broker, topic: str, index: int, epoch: int) -> Partition:
    partition = broker.find.partition(broker.find.topic(topic), index, epoch)
    partition.check_leads()
    return partition


async def _find(
    broker: Broker, partition: Partition, timestamp: int, version: int, *, committed: bool
) -> TimedOffset:
    if version < _SPECIAL_MIN_VERSION.get(timestamp, 0):
        raise ApiError(
            ErrorCode.unsupported_version, f"timestamp {timestamp} needs a newer version of ListOffsets"
        )
    if timestamp == _LATEST:
        return TimedOffset(-1, partition.latest_offset(committed=committed), partition.leader_epoch)
    if timestamp in (_EARLIEST, _EARLIEST_LOCAL):
        return TimedOffset(
            -1, partition.log_start_offset, partition.epochs.epoch_at(partition.log_start_offset)
        )
    if timestamp in (_LATEST_TIERED, _EARLIEST_PENDING_UPLOAD):
        return _NOT_FOUND
    if timestamp < 0 and timestamp != _MAX_TIMESTAMP:
        raise ApiError(ErrorCode.invalid_request, f"timestamp {timestamp} has no meaning")
    upper = partition.upper_offset(committed=committed)
    if timestamp == _MAX_TIMESTAMP:
        found = await search(broker, partition, lambda: partition.find_max_timestamp(upper))
    else:
        found = await find_time(broker, partition, timestamp, upper)
    if found is None:
        # The record may be there and not be known to be committed yet, as with the end.
        partition.latest_offset(committed=committed)
    return found or _NOT_FOUND


@serves("OffsetForLeaderEpoch", for_each(DESCRIBE, TOPIC))
async def offset_for_leader_epoch(broker: Broker, call: Call) -> dict[str, Any]:
    """Tell where a leader epoch ended, by which a reader finds out whether its position was cut off."""
    topics = []
    for topic in call.request.topics:
        ends = (_epoch_end(broker, call, topic.topic, entry) for entry in topic.partitions)
        topics.append({"topic": topic.topic, "partitions": await in_slices(ends)})
    return {"topics": topics}


def _epoch_end(broker: Broker, call: Call, topic: str, entry: Any) -> dict[str, Any]:
    try:
        call.authorize(DESCRIBE, TOPIC, topic)
        partition = _leader(broker, topic, entry.partition, entry.current_leader_epoch)
    except TidemillError as error:
        return {"partition": entry.partition, "error_code": error.code, "leader_epoch": -1, "end_offset": -1}
    epoch, end_offset = partition.end_of_epoch(entry.leader_epoch)
    return {"partition": entry.partition, "leader_epoch": epoch, "end_offset": end_offset}


@serves("DeleteRecords", for_each(DELETE, TOPIC))
async def delete_records(broker: Broker, call: Call) -> dict[str, Any]:
    """Move the start of logs up; the records below it are deleted for good, on every in-sync replica."""
    return await _each_partition(broker, call, _delete_one)


async def _delete_one(broker: Broker, call: Call, topic_name: str, entry: Any) -> dict[str, Any]:
    index = entry.partition_index
    try:
        call.authorize(DELETE, TOPIC, topic_name)
        topic = broker.find.topic(topic_name)
        partition = _leader(broker, topic_name, index, -1)
        if broker.image.table_of_topic(topic.id) is not None:
            raise ApiError(
                ErrorCode.policy_violation,
                f"{topic_name} is the log of a table, whose rows would be gone with its records; delete rows",
            )
        if topic.internal or not partition.config.deletes:
            raise ApiError(
                ErrorCode.policy_violation,
                f"records of {topic_name} cannot be deleted: its cleanup.policy does not contain 'delete'",
            )
        await _wait_until_durable(partition, entry.offset, ms(call.request.timeout))
        broker.removal.discard(partition, partition.delete_records(entry.offset))
        await _wait_until_deleted(partition, ms(call.request.timeout))
    except TidemillError as error:
        return {"partition_index": index, "error_code": error.code, "low_watermark": -1}
    return {"partition_index": index, "low_watermark": partition.log_start_offset}


async def _wait_until_deleted(partition: Partition, timeout_ms: int) -> None:
    """Wait until no replica that could be elected has the records any more."""
    start = partition.log_start_offset
    try:
        await asyncio.wait_for(wait_deleted(partition, start), max(0, timeout_ms) / 1000)
    except TimeoutError:
        raise ApiError(
            ErrorCode.request_timed_out,
            f"not every in-sync replica of {partition.topic}-{partition.index} had deleted up to offset "
            f"{start} in {timeout_ms} ms; the others follow",
        ) from None


async def _wait_until_durable(partition: Partition, offset: int, timeout_ms: int) -> None:
    """Wait until everything below ``offset`` is durable: another producer may have just written it."""
    if not partition.high_watermark < offset <= partition.log_end_offset:
        return
    try:
        await asyncio.wait_for(wait_committed(partition, offset), max(0, timeout_ms) / 1000)
    except TimeoutError:
        raise ApiError(
            ErrorCode.request_timed_out,
            f"offset {offset} of {partition.topic}-{partition.index} was not durable in {timeout_ms} ms",
        ) from None
