"""AlterPartitionReassignments and ListPartitionReassignments: partitions move to other nodes, under load.

A move adds replicas, waits until they are in sync, and removes the others. The controller does that by
itself; the answer says that it has begun. A new target replaces the old one of a move that is under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from tidemill.control.commands import AlterReassignment
from tidemill.control.image import TopicImage
from tidemill.control.placement import check_assignments
from tidemill.control.refusals import CatchUp
from tidemill.coordination.turns import give_way, in_slices
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.server.broker import Broker
from tidemill.server.handlers.outcome import outcome
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import ALTER, DESCRIBE, for_cluster
from tidemill.server.requests.call import Call

__all__ = ("alter_partition_reassignments", "list_partition_reassignments")


@serves("AlterPartitionReassignments", for_cluster(ALTER))
async def alter_partition_reassignments(broker: Broker, call: Call) -> dict[str, Any]:
    """Begin moves of partitions, or cancel them (``replicas`` is null)."""
    may_change_count: bool = call.field("allow_replication_factor_change", True)
    responses = []
    for topic in call.request.topics:
        partitions = []
        for entry in topic.partitions:
            error: TidemillError | None = None
            target = None if entry.replicas is None else tuple(entry.replicas)
            try:
                await _move(broker, topic.name, entry.partition_index, target, may_change_count)
            except TidemillError as failure:
                error = failure
            partitions.append({"partition_index": entry.partition_index, **outcome(error)})
            await give_way()
        responses.append({"name": topic.name, "partitions": partitions})
    return {
        "allow_replication_factor_change": may_change_count,
        **outcome(None),
        "responses": responses,
    }


async def _move(
    broker: Broker, name: str, index: int, target: tuple[int, ...] | None, may_change_count: bool
) -> None:
    command = AlterReassignment(name=name, index=index, replicas=target)
    try:
        # Here first: this node's image is hardly ever behind, and nobody else need be asked.
        await CatchUp(broker.controller.catch_up).check(partial(broker.controller.check, command))
    except ApiError as error:
        if error.code != ErrorCode.reassignment_in_progress or target is None:
            raise
        check_assignments((target,), broker.image.nodes)
        await broker.propose(AlterReassignment(name=name, index=index, replicas=None))
    if target is not None and not may_change_count:
        _check_count(broker.find.topic(name), index, target)
    await broker.propose(command)


def _check_count(topic: TopicImage, index: int, target: tuple[int, ...]) -> None:
    placed = topic.partitions[index]
    count = len(placed.replicas) - len(placed.adding)
    if len(target) != count:
        raise ApiError(
            ErrorCode.invalid_replication_factor,
            f"{topic.name}-{index} has {count} replicas and would have {len(target)}; the request allows no "
            "change of their number",
        )


@serves("ListPartitionReassignments", for_cluster(DESCRIBE))
async def list_partition_reassignments(broker: Broker, call: Call) -> dict[str, Any]:
    """The moves that are under way, of all partitions or of those asked for."""
    asked = call.request.topics
    topics = broker.image.topics
    if asked is None:
        wanted: Iterable[tuple[str, Iterable[int]]] = [
            (name, range(len(topics[name].partitions))) for name in sorted(topics)
        ]
    else:
        wanted = [(topic.name, topic.partition_indexes) for topic in asked if topic.name in topics]
    found = []
    for name, indexes in wanted:
        moving = await in_slices(_moving(topics[name], indexes))
        if moving:
            found.append({"name": name, "partitions": moving})
    return {**outcome(None), "topics": found}


def _moving(topic: TopicImage, indexes: Iterable[int]) -> Iterable[dict[str, Any]]:
    for index in indexes:
        if not 0 <= index < len(topic.partitions):
            continue
        placed = topic.partitions[index]
        if placed.adding or placed.removing:
            yield {
                "partition_index": index,
                "replicas": placed.replicas,
                "adding_replicas": placed.adding,
                "removing_replicas": placed.removing,
            }
