"""The gate in front of the logs: batches that take long to look at, and those of tables, are checked here.

A batch goes into a log only if every record of it is sound, and into a table's log only if every row of it is
right. A request whose batches are small is looked at by the event loop, between two other requests. Any other
goes through this gate: its batches are looked at in a thread, so other requests go on meanwhile, and appended
a few milliseconds at a time. Batches for one partition keep their order, those for other partitions in the
same request too: whatever comes later for any of them waits as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tidemill.control.image import TopicImage
from tidemill.control.table_images import TableImage, TablePartition
from tidemill.coordination.turns import give_way, in_slices
from tidemill.errors import TidemillError
from tidemill.log.incoming import QUICK_RECORDS, PreparedBatch, is_quick, prepare_quickly
from tidemill.log.pace import Pace
from tidemill.records.batch import HEADER_BYTES, parse_header
from tidemill.records.compression import NONE
from tidemill.replication.partition import Partition
from tidemill.server.broker import Broker
from tidemill.server.call import Call
from tidemill.server.handlers.outcome import refused as refused_request
from tidemill.server.handlers.outcome import repeated
from tidemill.server.handlers.produce_gate import Refusals, topic_name
from tidemill.tables.scanners import BucketKey
from tidemill.transactions.messages import TopicPartition

if TYPE_CHECKING:
    from tidemill.tables.changes import Changes

__all__ = ("Append", "CheckedBatch", "CheckedBatches", "check_batches", "look_quickly")

logger = logging.getLogger(__name__)

#: A request within these limits may be looked at by the loop, if each of its batches may.
_QUICK_PARTITIONS = 128
_QUICK_BYTES = 4 * 1024 * 1024

_Owner = tuple[TableImage, TablePartition]


class CheckedBatch(NamedTuple):
    """A batch that was looked at; ``table`` and ``place`` are those whose row changes it holds."""

    prepared: PreparedBatch
    table: TableImage | None = None
    place: TablePartition | None = None
    changes: Changes | None = None


CheckedBatches = dict[int, "CheckedBatch | TidemillError"]
"""What became of the partitions of a request, by the identity of their entries."""

Append = Callable[[Refusals, CheckedBatches], Iterator[None]]


class _Write(NamedTuple):
    """One batch of a Produce request, with the partition it is for and the table whose log that is."""

    place: TopicPartition
    topic: TopicImage
    owner: _Owner | None
    entry: Any


def look_quickly(broker: Broker, call: Call) -> CheckedBatches | None:
    """What can be said at once; None if the request must go through the gate.

    Batches that are not compressed are not in it: the append looks at them.
    """
    topics = call.request.topic_data
    if sum(len(topic.partition_data) for topic in topics) > _QUICK_PARTITIONS:
        return None
    checked: CheckedBatches = {}
    records = size_bytes = 0
    now_ms = broker.clock_ms()
    for place, topic, owner, entry in _writes(broker, call):
        config = broker.topic_config(topic)
        if owner is not None or place in broker.gated_writes or not is_quick(entry.records, config):
            return None
        size_bytes += len(entry.records)
        if len(entry.records) < HEADER_BYTES:
            continue
        header = parse_header(entry.records)
        records += header.record_count
        if records > QUICK_RECORDS or size_bytes > _QUICK_BYTES:
            return None
        if header.codec != NONE:
            try:
                prepared = prepare_quickly(entry.records, config, now_ms)
            except TidemillError as error:
                checked[id(entry)] = error
                continue
            if prepared is None:
                return None
            checked[id(entry)] = CheckedBatch(prepared)
    return checked


def check_batches(broker: Broker, call: Call, refusals: Refusals, append: Append) -> None:
    """Run ``append`` with what may not be written, once everything has been looked at."""
    call.keep_frame()
    queue = broker.gated_writes
    writes = list(_writes(broker, call))
    before = {queue[write.place] for write in writes if write.place in queue}
    task = call.start_task(_check(broker, writes, refusals, before, append))
    for write in writes:
        queue[write.place] = task

    def leave(done: asyncio.Task[None]) -> None:
        for write in writes:
            if queue.get(write.place) is done:
                del queue[write.place]
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.error("batches could not be looked at", exc_info=error)
            call.abort()

    task.add_done_callback(leave)


async def _check(
    broker: Broker,
    writes: list[_Write],
    refusals: Refusals,
    before: set[asyncio.Task[None]],
    append: Append,
) -> None:
    checked: CheckedBatches = {}
    refused = dict(refusals)
    rows = [write for write in writes if write.owner is not None]
    if rows:
        twice = repeated(write.place for write in rows)
        refused = (
            dict.fromkeys(twice, refused_request("a table's bucket takes one batch per request")) | refused
        )
    plain: list[tuple[Any, Partition]] = []
    for write in writes:
        if write.place in refused:
            continue
        try:
            # A bucket that is elsewhere, or nowhere, is told before anything is said about its rows.
            partition = broker.partition(broker.topic(write.place[0]), write.place[1])
            if write.owner is None:
                plain.append((write.entry, partition))
            else:
                checked[id(write.entry)] = await _check_rows(broker, write, write.owner, partition)
        except TidemillError as error:
            checked[id(write.entry)] = error
        await give_way()
    if plain:
        work = partial(_prepare_all, plain, broker.clock_ms())
        checked |= await asyncio.get_running_loop().run_in_executor(broker.workers, work)
    if before:
        await asyncio.wait(before)
    await in_slices(append(refused, checked))


async def _check_rows(broker: Broker, write: _Write, owner: _Owner, partition: Partition) -> CheckedBatch:
    table, place = owner
    service = (await broker.tables()).service
    changes = await service.check(table, place.id, write.place[1], write.entry.records)
    # Without a primary key nobody has looked for keys, nor at where the records say they are.
    prepare = partial(
        partition.prepare, write.entry.records, broker.clock_ms(), records_checked=changes is not None
    )
    prepared = await asyncio.get_running_loop().run_in_executor(broker.workers, prepare)
    await service.room(BucketKey(table.id, place.id, write.place[1]))
    return CheckedBatch(prepared, table, place, changes)


def _prepare_all(writes: list[tuple[Any, Partition]], now_ms: int) -> CheckedBatches:
    """Look at the batches of a request. Runs in a thread."""
    pace = Pace()
    checked: CheckedBatches = {}
    for entry, partition in writes:
        try:
            prepared = partition.prepare(entry.records, now_ms, breathe=pace.breathe)
        except TidemillError as error:
            checked[id(entry)] = error
        else:
            checked[id(entry)] = CheckedBatch(prepared)
        pace.breathe()
    return checked


def _writes(broker: Broker, call: Call) -> Iterator[_Write]:
    """Every batch of the request whose topic is known, and the table whose log it is for."""
    topics = broker.image.topics
    for topic in call.request.topic_data:
        name = topic_name(broker, call, topic)
        found = None if name is None else topics.get(name)
        if name is None or found is None or found.internal:
            continue
        owner = broker.image.table_of_topic(found.id)
        for entry in topic.partition_data:
            if entry.records:
                yield _Write((name, entry.index), found, owner, entry)
