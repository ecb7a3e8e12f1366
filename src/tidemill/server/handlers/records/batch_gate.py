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
from tidemill.control.tables.images import TableImage, TablePartition
from tidemill.coordination.turns import give_way, in_chunks, in_slices
from tidemill.errors import ApiError, ErrorCode, TidemillError, without_traceback
from tidemill.log.incoming import QUICK_RECORDS, PreparedBatch, is_quick, prepare_quickly
from tidemill.log.pace import Pace
from tidemill.records.batch import HEADER_BYTES, BatchHeader
from tidemill.records.compression import NONE
from tidemill.replication.partition import Partition
from tidemill.server.broker import Broker
from tidemill.server.handlers.outcome import refused as refused_request
from tidemill.server.handlers.outcome import repeated
from tidemill.server.handlers.records.produce_gate import BatchHeaders, Refusals, header_of, topic_name
from tidemill.server.requests.call import Call
from tidemill.transactions.messages import TopicPartition

if TYPE_CHECKING:
    from tidemill.tables.state.changes import Changes

__all__ = (
    "Append",
    "CheckedBatch",
    "CheckedBatches",
    "check_batches",
    "look_quickly",
)

logger = logging.getLogger(__name__)

#: A request within these limits may be checked on the event loop, if each of its batches may.
_QUICK_PARTITIONS = 128
_QUICK_BYTES = 4 * 1024 * 1024

#: So many partitions that were never written to get their first files at a time.
_CREATED_AT_ONCE = 4

_Owner = tuple[TableImage, TablePartition]


class CheckedBatch(NamedTuple):
    """A batch that was checked. If it holds row changes, ``table`` and ``table_partition`` are theirs."""

    prepared: PreparedBatch
    table: TableImage | None = None
    table_partition: TablePartition | None = None
    changes: Changes | None = None


CheckedBatches = dict[int, "CheckedBatch | BatchHeader | TidemillError"]
"""Results of the checks of a request's batches, by the identity of their entries.

A header is all that is known of a batch that the append itself checks. Errors are ``without_traceback``.
"""

Append = Callable[[Refusals, CheckedBatches], Iterator[None]]


class _Write(NamedTuple):
    """One batch of a Produce request, with the partition it is for and the table whose log that is."""

    partition: TopicPartition
    topic: TopicImage
    owner: _Owner | None
    entry: Any


def look_quickly(broker: Broker, call: Call, headers: BatchHeaders) -> CheckedBatches | None:
    """The results of checks that are quick; None if the request must go through the gate.

    Of batches that are not compressed only the header is checked: the append checks the rest.
    """
    topics = call.request.topic_data
    if sum(len(topic.partition_data) for topic in topics) > _QUICK_PARTITIONS:
        return None
    checked: CheckedBatches = {}
    records = size_bytes = 0
    now_ms = broker.clock_ms()
    for partition, topic, owner, entry in _writes(broker, call):
        config = broker.find.topic_config(topic)
        if owner is not None or partition in broker.gated_writes:
            return None
        if not broker.find.has_files(topic, entry.index):
            return None
        size_bytes += len(entry.records)
        if len(entry.records) < HEADER_BYTES:
            continue
        header = header_of(headers, entry)
        records += header.record_count
        if records > QUICK_RECORDS or size_bytes > _QUICK_BYTES:
            return None
        if header.codec == NONE:
            if not is_quick(header, len(entry.records), config):
                return None
            checked[id(entry)] = header
        else:
            try:
                prepared = prepare_quickly(entry.records, header, config, now_ms)
            except TidemillError as error:
                checked[id(entry)] = without_traceback(error)
                continue
            if prepared is None:
                return None
            checked[id(entry)] = CheckedBatch(prepared)
    return checked


def check_batches(
    broker: Broker, call: Call, headers: BatchHeaders, refusals: Refusals, append: Append
) -> None:
    """Call ``append`` with the results once all batches are checked, in a thread and in order."""
    call.keep_frame()
    queue = broker.gated_writes
    writes = list(_writes(broker, call))
    before = {queue[write.partition] for write in writes if write.partition in queue}
    task = call.start_task(_check(broker, writes, headers, refusals, before, append))
    for write in writes:
        queue[write.partition] = task

    def leave(done: asyncio.Task[None]) -> None:
        for write in writes:
            if queue.get(write.partition) is done:
                del queue[write.partition]
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.error("batches could not be looked at", exc_info=error)
            call.abort()

    task.add_done_callback(leave)


async def _check(
    broker: Broker,
    writes: list[_Write],
    headers: BatchHeaders,
    refusals: Refusals,
    before: set[asyncio.Task[None]],
    append: Append,
) -> None:
    checked: CheckedBatches = {}
    refused = dict(refusals)
    rows = [write for write in writes if write.owner is not None]
    if rows:
        twice = repeated(write.partition for write in rows)
        refused = (
            dict.fromkeys(twice, refused_request("a table's bucket takes one batch per request")) | refused
        )
    plain: list[tuple[Any, Partition, BatchHeader | None]] = []
    for write in writes:
        if write.partition in refused:
            continue
        try:
            # A bucket that is elsewhere, or does not exist, is reported before anything is said about its
            # rows.
            partition = broker.find.partition(broker.find.topic(write.partition[0]), write.partition[1])
            if write.owner is None:
                plain.append((write.entry, partition, headers.get(id(write.entry))))
            else:
                checked[id(write.entry)] = await _check_rows(broker, write, write.owner, partition)
        except TidemillError as error:
            checked[id(write.entry)] = without_traceback(error)
        await give_way()
    if plain:
        work = partial(_prepare_all, plain, broker.clock_ms(), broker.pace(0))
        checked |= await asyncio.get_running_loop().run_in_executor(broker.workers, work)
    if before:
        await asyncio.wait(before)
    await _create_files(broker, writes, refused, checked)
    _refuse_if_leader_changed(broker, writes, checked)
    await in_slices(append(refused, checked))


def _refuse_if_leader_changed(broker: Broker, writes: list[_Write], checked: CheckedBatches) -> None:
    """Have batches sent again whose partition got another leader, or another epoch, while they waited here.

    What their producer's coordinator allowed was allowed to the leader of that time: an append would be
    refused as one outside of any transaction, which is final for a client.
    """
    for write in writes:
        topic, index = broker.image.topics.get(write.topic.name), write.partition[1]
        if topic is None or topic.id != write.topic.id or index >= len(write.topic.partitions):
            continue  # The append says what is wrong.
        if topic.partitions[index].leader_epoch != write.topic.partitions[index].leader_epoch:
            checked[id(write.entry)] = ApiError(
                ErrorCode.not_leader_or_follower,
                f"{topic.name}-{index} got another leader epoch while the batch was looked at; try again",
            )


async def _create_files(
    broker: Broker, writes: list[_Write], refused: Refusals, checked: CheckedBatches
) -> None:
    """Give partitions that were never written to their first files, in threads, a few at a time."""

    async def create(write: _Write) -> None:
        try:
            await broker.find.partition_with_files(*write.partition)
        except TidemillError as error:
            checked[id(write.entry)] = without_traceback(error)

    new = [
        write
        for write in writes
        if write.partition not in refused
        and not isinstance(checked.get(id(write.entry)), TidemillError)
        and not broker.find.has_files(write.topic, write.partition[1])
    ]
    for some in in_chunks(new, _CREATED_AT_ONCE):
        await asyncio.gather(*map(create, some))


async def _check_rows(broker: Broker, write: _Write, owner: _Owner, partition: Partition) -> CheckedBatch:
    # Loaded with the first table.
    from tidemill.tables.scanning.sessions import BucketKey

    table, table_partition = owner
    service = (await broker.tables.load()).service
    rows = await service.check(table, table_partition.id, write.partition[1], write.entry.records)
    # Without a primary key the check of rows has looked neither at keys nor at offsets of records.
    prepare = partial(
        partition.prepare,
        write.entry.records,
        broker.clock_ms(),
        header=rows.header,
        batch_checked=True,
        records_checked=rows.changes is not None and rows.is_timed,
    )
    prepared = await asyncio.get_running_loop().run_in_executor(broker.workers, prepare)
    await service.wait_for_fold(BucketKey(table.id, table_partition.id, write.partition[1]))
    return CheckedBatch(prepared, table, table_partition, rows.changes)


def _prepare_all(
    writes: list[tuple[Any, Partition, BatchHeader | None]], now_ms: int, pace: Pace
) -> CheckedBatches:
    """Check and prepare the batches of a request. Runs in a thread."""
    checked: CheckedBatches = {}
    for entry, partition, header in writes:
        try:
            prepared = partition.prepare(entry.records, now_ms, header=header, breathe=pace.breathe)
        except TidemillError as error:
            checked[id(entry)] = without_traceback(error)
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
