"""The way from the arguments of ``db.worker(..., ordered=…)`` to the engine of an ordered worker."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from tidemill.client.cursors.checkpoints.transaction import IN_TRANSACTION
from tidemill.client.cursors.opening import begin_cursor, open_cursor, plan_cursor
from tidemill.client.cursors.records import CursorRow
from tidemill.client.cursors.replay import check_replayable
from tidemill.client.producing.producer import Producer
from tidemill.client.workers.logs import called
from tidemill.client.workers.ordered import Ordered
from tidemill.client.workers.ordered_engine import OrderedEngine
from tidemill.client.workers.transaction_workspace import TransactionWorkspace
from tidemill.client.workers.workspace import DatabaseWorkspace, Workspace
from tidemill.config.topic_keys import BATCH_BYTES_MAX
from tidemill.errors import ApiError, ConfigError, ErrorCode
from tidemill.records.record import Record
from tidemill.share.letters import Letter, letter_record

if TYPE_CHECKING:
    from tidemill.client.cluster import Cluster
    from tidemill.client.cursors.cursor import AsyncCursor, CursorPlan, Delivery

__all__ = ("DEFAULT_RETRY_BACKOFF_SECONDS", "PARKED_OPERATION", "ordered_engine")

DEFAULT_RETRY_BACKOFF_SECONDS = 0.1
#: The header of a parked change of a table: upsert, delete or insert.
PARKED_OPERATION = "tidemill-op"
#: As of share groups: an error's text can have any length.
_REASON_CHARACTERS_MAX: Final = 1_000


def ordered_engine(
    cluster: Cluster,
    records: Callable[[], Producer],
    name: str | None,
    source: Any,
    handler: Any,
    options: Ordered,
    *,
    concurrency: int,
    dead_letter: str | None,
    retry_backoff: float | None,
    stop_timeout: float,
) -> OrderedEngine:
    """The engine of an ordered worker. ``records`` gives the producer that writes parked records."""
    _check_checkpoint(options, concurrency)
    if name is None and dead_letter is not None:
        raise ConfigError(
            "a worker without a name cannot park records: they are known by its name, partition and offset"
        )
    if name is not None and dead_letter is not None:
        check_replayable(name)
    last: AsyncCursor | None = None

    async def plan(checkpoint: Any) -> CursorPlan:
        return await plan_cursor(
            cluster,
            name,
            source,
            partitions=options.partitions,
            key_prefix=options.key_prefix,
            headers=options.headers,
            where=options.where,
            start=options.start if last is None or name is not None else _reached(last),
            checkpoint=checkpoint,
            own=options.own,
            take_over=False,
            lease_ms=options.lease_ms,
            if_lost=options.if_lost,
            gaps_kept=0,
        )

    async def open_in_database(connection: Any, run: Callable[..., Awaitable[Any]]) -> AsyncCursor:
        planned = await plan(connection)
        try:
            entries = await run(planned.store.take_over_now, planned.starts)
        except BaseException:
            await planned.store.close()
            raise
        cursor = await begin_cursor(cluster, planned, entries)
        try:
            await run(cursor.store_lost_now)
        except BaseException:
            await cursor.close()
            raise
        return cursor

    async def open_workspace() -> Workspace:
        if callable(options.checkpoint):
            return await DatabaseWorkspace.open(options.checkpoint, open_in_database, handler, concurrency)
        nonlocal last
        cursor = last = await open_cursor(cluster, await plan(options.checkpoint))
        if options.checkpoint is IN_TRANSACTION:
            return TransactionWorkspace(cursor, handler)
        return Workspace(cursor, handler, concurrency)

    async def park(record: Delivery, tries: int, reason: str) -> None:
        assert dead_letter is not None
        assert name is not None
        letter = Letter(
            name, record.topic, record.partition, record.offset, tries, reason[:_REASON_CHARACTERS_MAX]
        )
        await _write_letter(cluster, records(), dead_letter, _as_record(record), letter)

    return OrderedEngine(
        called(name),
        options,
        open_workspace,
        None if dead_letter is None else park,
        concurrency=concurrency,
        retry_backoff=DEFAULT_RETRY_BACKOFF_SECONDS if retry_backoff is None else retry_backoff,
        stop_timeout=stop_timeout,
    )


async def _write_letter(
    cluster: Cluster, shared: Producer, topic: str, record: Record, letter: Letter
) -> None:
    """Write the dead letter of a record: whole, or without its contents if the topic takes no more."""
    now_ms = int(time.time() * 1000)
    whole = letter_record(record, letter, copy=True, now_ms=now_ms)
    if await _is_taken(shared, topic, whole):
        return
    # One after the other in a batch of their own: others may have made the batch too large.
    async with Producer(cluster) as alone:
        if await _is_taken(alone, topic, whole):
            return
        if await _is_taken(
            alone, topic, letter_record(record, letter, copy=True, left_out=True, now_ms=now_ms)
        ):
            return
        # Its key or its headers are too large. A record that cannot be parked would hold up all others.
        bare = letter_record(record, letter, copy=False, left_out=True, now_ms=now_ms)
        await (await alone.send(topic, bare))


async def _is_taken(producer: Producer, topic: str, letter: Record) -> bool:
    """Send a letter; False if it is too large for the topic."""
    if len(letter.key or b"") + len(letter.value or b"") > BATCH_BYTES_MAX:
        return False  # No topic takes it, and a node would not read such a request to its end.
    try:
        await (await producer.send(topic, letter))
    except ApiError as error:
        if error.code == ErrorCode.message_too_large:
            return False
        raise
    return True


def _check_checkpoint(options: Ordered, concurrency: int) -> None:
    """Raise ``ConfigError`` for what a cursor takes and a worker does not, and for what would be ignored."""
    checkpoint = options.checkpoint
    if checkpoint is None or isinstance(checkpoint, str | os.PathLike):
        return
    if checkpoint is IN_TRANSACTION:
        if concurrency > 1:
            raise ConfigError(
                "a worker with checkpoint=tidemill.IN_TRANSACTION has one transaction open at a time, and so "
                f"handles one record after the other: concurrency is 1, not {concurrency}"
            )
    # A connection of sqlite3 can be called, too.
    elif not callable(checkpoint) or isinstance(checkpoint, sqlite3.Connection):
        raise ConfigError(
            "a worker opens its database connections itself, one for each of its threads: give it a function "
            f"that opens one, as checkpoint=lambda: sqlite3.connect(path), not a {type(checkpoint).__name__}"
        )
    for name in ("every_records", "every_seconds"):
        if concurrency == 1 and getattr(options, name) is not None:
            raise ConfigError(
                f"{name} has no effect if the position commits together with what the handler writes: that "
                f"is after each batch. Leave {name} out, and say with batch_size how much a transaction has"
            )


def _reached(cursor: AsyncCursor) -> dict[int, int]:
    """Where a cursor without a name stood: the next one of the same worker goes on there."""
    return {partition: position.offset for partition, position in cursor.committed.items()}


def _as_record(delivery: Delivery) -> Record:
    """What is parked: the record as it was, or the change of a table as JSON."""
    if not isinstance(delivery, CursorRow):
        return Record(delivery.key, delivery.value, delivery.timestamp_ms, delivery.headers)
    row = json.dumps(delivery.row, default=str, separators=(",", ":"), ensure_ascii=False).encode()
    return Record(None, row, delivery.timestamp_ms, ((PARKED_OPERATION, delivery.op.encode()),))
