"""The gate in front of tables: a batch goes into a table's log only if every row of it is right.

Rows are looked at in a thread, so other requests go on meanwhile; batches for one partition keep their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tidemill.control.table_images import TableImage, TablePartition
from tidemill.errors import TidemillError
from tidemill.server.broker import Broker
from tidemill.server.call import Call
from tidemill.server.handlers.produce_gate import Refusals, keep_records, topic_name
from tidemill.tables.scanners import BucketKey
from tidemill.transactions.messages import TopicPartition

if TYPE_CHECKING:
    from tidemill.tables.changes import Changes

__all__ = ("CheckedRows", "check_rows", "writes_to_tables")

CheckedRows = dict[TopicPartition, "tuple[TableImage, TablePartition, Changes | None]"]
"""The partitions whose batches were looked at, and what they do to the state of their tables."""


def writes_to_tables(broker: Broker, call: Call) -> bool:
    """Whether some of the request's topics are logs of tables."""
    if not broker.image.tables:
        return False
    return any(_owner(broker, call, topic) is not None for topic in call.request.topic_data)


def check_rows(
    broker: Broker, call: Call, refusals: Refusals, append: Callable[[Refusals, CheckedRows], None]
) -> None:
    """Call ``append`` with what may not be written, once everything has been looked at."""
    keep_records(call)
    queue = broker.table_writes
    places = list(_places(broker, call))
    before = [queue[place] for place, *_ in places if place in queue]
    task = asyncio.get_running_loop().create_task(_check(broker, places, refusals, before, append))
    for place, *_ in places:
        queue[place] = task

    def leave(done: asyncio.Task[None]) -> None:
        for place, *_ in places:
            if queue.get(place) is done:
                del queue[place]
        if not done.cancelled() and done.exception() is not None:
            call.abort()

    task.add_done_callback(leave)


async def _check(
    broker: Broker,
    places: list[tuple[TopicPartition, TableImage, TablePartition, Any]],
    refusals: Refusals,
    before: list[asyncio.Task[None]],
    append: Callable[[Refusals, CheckedRows], None],
) -> None:
    tables = await broker.tables()
    checked: CheckedRows = {}
    refused = dict(refusals)
    for place, table, partition, records in places:
        if place in refused:
            continue
        try:
            changes = await tables.service.check(table, partition.id, place[1], records)
        except TidemillError as error:
            refused[place] = error
        else:
            checked[place] = table, partition, changes
            await tables.service.room(BucketKey(table.id, partition.id, place[1]))
    if before:
        await asyncio.wait(before)
    append(refused, checked)


def _places(broker: Broker, call: Call) -> Any:
    for topic in call.request.topic_data:
        owner = _owner(broker, call, topic)
        if owner is not None:
            name = topic_name(broker, call, topic)
            for entry in topic.partition_data:
                if entry.records:
                    yield (name, entry.index), *owner, entry.records


def _owner(broker: Broker, call: Call, topic: Any) -> tuple[TableImage, TablePartition] | None:
    name = topic_name(broker, call, topic)
    found = None if name is None else broker.image.topics.get(name)
    return None if found is None else broker.image.table_of_topic(found.id)
