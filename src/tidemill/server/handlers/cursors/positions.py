"""The positions of cursors that the cluster keeps: taken over, committed, listed, altered, deleted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.coordination.turns import give_way, in_slices
from tidemill.cursors.checkpoint import check_finished
from tidemill.cursors.state import CURSOR_PARTITIONS_MAX, Given, Held, Next
from tidemill.cursors.stored import Home, StoredCursor
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError
from tidemill.server.broker import Broker
from tidemill.server.coordinators.cursors import CURSORS
from tidemill.server.handlers.outcome import refused
from tidemill.server.handlers.tables.definitions import table_handler
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import DELETE, DESCRIBE, GROUP, READ, TOPIC, for_each
from tidemill.server.requests.call import Call

__all__ = (
    "alter_cursor",
    "commit_cursor",
    "delete_cursor",
    "describe_cursor",
    "keep_cursor",
    "list_cursors",
    "take_cursor",
)


@serves("TakeCursor", for_each(READ, GROUP), for_each(READ, TOPIC))
@table_handler
async def take_cursor(broker: Broker, call: Call) -> dict[str, Any]:
    """Make the caller the owner of partitions of a cursor, and tell it where they stand."""
    request = call.request
    call.authorize(READ, GROUP, request.name)
    call.authorize(READ, TOPIC, request.topic)
    topic = broker.find.topic(request.topic)
    if topic.id != request.topic_id:
        raise ApiError(ErrorCode.unknown_topic_id, f"topic {request.topic!r} has another id: {topic.id}")
    starts = {each.partition: _given(each) for each in _few(request.partitions)}
    missing = next((each for each in starts if not 0 <= each < len(topic.partitions)), None)
    if missing is not None:
        raise ApiError(
            ErrorCode.unknown_topic_or_partition, f"topic {request.topic!r} has no partition {missing}"
        )
    code = await broker.coordinators.prepare(CURSORS)
    if code is not ErrorCode.none:
        raise ApiError(code, "the topic of cursors cannot be created now; try again in a moment")
    about = StoredCursor(
        topic.name,
        topic.id,
        bytes(request.region),
        request.shown,
        paused=False,
        created_ms=broker.clock_ms(),
        home=_home(request.home),
    )
    paused, held = await broker.cursors.take(
        request.name,
        about,
        starts,
        owner=request.owner,
        lease_ms=request.lease_ms,
        force=request.force,
        origin=broker.ids.uuid(),
    )
    return {"paused": paused, "partitions": await _stored(held)}


@serves("CommitCursor", for_each(READ, GROUP))
@table_handler
async def commit_cursor(broker: Broker, call: Call) -> dict[str, Any]:
    """Store how far the owner of a cursor has come."""
    request = call.request
    _find(broker, call, READ)
    steps = {
        each.partition: Next(each.epoch, each.previous_offset, _given(each))
        for each in _few(request.partitions)
    }
    paused, held = await broker.cursors.commit(request.name, steps)
    return {"paused": paused, "partitions": await _stored(held)}


@serves("KeepCursor", for_each(READ, GROUP))
@table_handler
async def keep_cursor(broker: Broker, call: Call) -> dict[str, Any]:
    """Keep a cursor its owner's for a while longer, or give it up."""
    request = call.request
    _find(broker, call, READ)
    epochs = {each.partition: each.epoch for each in _few(request.partitions)}
    paused = await broker.cursors.keep(
        request.name, epochs, lease_ms=request.lease_ms, release=request.release
    )
    return {"paused": paused}


@serves("ListCursors", for_each(DESCRIBE, GROUP))
@table_handler
async def list_cursors(broker: Broker, call: Call) -> dict[str, Any]:
    """List the cursors that this node coordinates, and which shards of ``__cursors`` these are."""
    topic = broker.image.topics.get(CURSORS.topic)
    if topic is None:
        return {"cursors": (), "shards": (), "shard_count": 0}
    listed = await broker.cursors.listing(call.request.topic)
    found = []
    for name, about, held in listed.cursors:
        if call.may(DESCRIBE, GROUP, name):
            found.append(await _cursor(name, about, held))
        await give_way()
    return {"cursors": found, "shards": listed.shards, "shard_count": len(topic.partitions)}


@serves("DescribeCursor", for_each(DESCRIBE, GROUP))
@table_handler
async def describe_cursor(broker: Broker, call: Call) -> dict[str, Any]:
    """Describe one cursor."""
    _find(broker, call, DESCRIBE)
    described = await broker.cursors.describe(call.request.name)
    return {"cursor": await _cursor(call.request.name, *described)}


@serves("AlterCursor", for_each(READ, GROUP))
@table_handler
async def alter_cursor(broker: Broker, call: Call) -> dict[str, Any]:
    """Pause or resume a cursor, or set its positions."""
    request = call.request
    _find(broker, call, READ)
    altered = await broker.cursors.alter(
        request.name,
        paused=None if request.paused < 0 else bool(request.paused),
        positions={each.partition: _given(each) for each in _few(request.partitions)},
        force=request.force,
        origin=broker.ids.uuid(),
    )
    return {"cursor": await _cursor(request.name, *altered)}


@serves("DeleteCursor", for_each(DELETE, GROUP))
@table_handler
async def delete_cursor(broker: Broker, call: Call) -> dict[str, Any]:
    """Delete a cursor and its positions."""
    _find(broker, call, DELETE)
    await broker.cursors.delete(call.request.name, force=call.request.force)
    return {}


def _find(broker: Broker, call: Call, operation: Any) -> None:
    """Raise unless the caller may do this with the cursor that the request names, and there can be one."""
    call.authorize(operation, GROUP, call.request.name)
    if not broker.coordinators.has_topic(CURSORS):
        raise TableError(TableCode.cursor_not_found, f"no cursor {call.request.name!r} is kept here")


def _few(partitions: Any) -> Any:
    if len(partitions) > CURSOR_PARTITIONS_MAX:
        raise refused(f"{len(partitions)} partitions, {CURSOR_PARTITIONS_MAX} are the most in one request")
    return partitions


def _home(number: int) -> Home:
    if number not in (Home.CLUSTER, Home.TRANSACTIONS, Home.FILE, Home.DATABASE):
        raise refused(f"{number} is no place where a cursor keeps its position")
    return Home(number)


def _given(each: Any) -> Given:
    finished = bytes(each.finished)
    try:
        check_finished(finished)
    except ValueError as error:
        raise refused(f"partition {each.partition}: {error}") from error
    return Given(each.offset, each.leader_epoch, each.started, finished)


async def _stored(held: Mapping[int, Held]) -> list[dict[str, Any]]:
    return await in_slices(
        {
            "partition": partition,
            "epoch": position.epoch,
            "offset": position.offset,
            "leader_epoch": position.leader_epoch,
            "started": position.started,
            "finished": position.finished,
            "owner": position.owner,
            "lease_left_ms": lease_left_ms,
            "committed_ms": position.committed_ms,
            "origin": position.origin,
            "moved": position.moved,
        }
        for partition, (position, lease_left_ms) in held.items()
    )


async def _cursor(name: str, about: StoredCursor, held: Mapping[int, Held]) -> dict[str, Any]:
    return {
        "name": name,
        "topic": about.topic,
        "topic_id": about.topic_id,
        "region": about.region,
        "shown": about.shown,
        "paused": about.paused,
        "created_ms": about.created_ms,
        "home": about.home,
        "partitions": await _stored(held),
    }
