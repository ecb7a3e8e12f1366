"""The gate in front of tables: a batch goes into a table's log only if every row of it is right.

Rows are looked at in a thread, so other requests go on meanwhile. Batches for one partition keep their order,
those for other topics in the same request too: whatever comes later for any of them waits as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tidemill.control.table_images import TableImage, TablePartition
from tidemill.errors import TidemillError
from tidemill.server.broker import Broker
from tidemill.server.call import Call
from tidemill.server.handlers.outcome import refused as refused_request
from tidemill.server.handlers.outcome import repeated
from tidemill.server.handlers.produce_gate import Refusals, keep_records, topic_name
from tidemill.tables.scanners import BucketKey
from tidemill.transactions.messages import TopicPartition

if TYPE_CHECKING:
    from tidemill.tables.changes import Changes

__all__ = ("CheckedRows", "check_rows", "writes_to_tables")

logger = logging.getLogger(__name__)

_Owner = tuple[TableImage, TablePartition]
CheckedRows = dict[TopicPartition, "tuple[TableImage, TablePartition, Changes | None]"]
"""The partitions whose batches were looked at, and what they do to the state of their tables."""


def writes_to_tables(broker: Broker, call: Call) -> bool:
    """Whether the request writes to tables, or to partitions for which an earlier request waits here."""
    if not broker.image.tables and not broker.table_writes:
        return False
    return any(owner is not None or place in broker.table_writes for place, owner, _ in _places(broker, call))


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
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.error("rows could not be looked at", exc_info=error)
            call.abort()

    task.add_done_callback(leave)


async def _check(
    broker: Broker,
    places: list[tuple[TopicPartition, _Owner | None, Any]],
    refusals: Refusals,
    before: list[asyncio.Task[None]],
    append: Callable[[Refusals, CheckedRows], None],
) -> None:
    tables = await broker.tables()
    checked: CheckedRows = {}
    twice = repeated(place for place, owner, _ in places if owner is not None)
    refused = dict.fromkeys(twice, refused_request("a table's bucket takes one batch per request")) | refusals
    for place, owner, records in places:
        if owner is None or place in refused:
            continue
        table, partition = owner
        try:
            # A bucket that is elsewhere, or nowhere, is told before anything is said about its rows.
            broker.partition(broker.topic(place[0]), place[1])
            changes = await tables.service.check(table, partition.id, place[1], records)
        except TidemillError as error:
            refused[place] = error
        else:
            checked[place] = table, partition, changes
            await tables.service.room(BucketKey(table.id, partition.id, place[1]))
    if before:
        await asyncio.wait(before)
    append(refused, checked)


def _places(broker: Broker, call: Call) -> Iterator[tuple[TopicPartition, _Owner | None, Any]]:
    """Every partition with a batch in the request, and the table whose log it is."""
    for topic in call.request.topic_data:
        name = topic_name(broker, call, topic)
        found = None if name is None else broker.image.topics.get(name)
        if name is not None and found is not None:
            owner = broker.image.table_of_topic(found.id)
            for entry in topic.partition_data:
                if entry.records:
                    yield (name, entry.index), owner, entry.records
