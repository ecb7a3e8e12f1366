"""``db.cursor``: what its arguments mean, and the way from them to an open cursor."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidemill.client.admin.topics import LATEST, list_offsets
from tidemill.client.arguments import chosen_partitions, shown, whole
from tidemill.client.cluster import Cluster
from tidemill.client.cursors.admin import describe_cursor
from tidemill.client.cursors.checkpoints.registration import Registration
from tidemill.client.cursors.checkpoints.store import CheckpointStore, MemoryStore
from tidemill.client.cursors.cursor import (
    AsyncCursor,
    CursorPlan,
    IfLost,
    Start,
    names_offsets,
    resolve_starts,
)
from tidemill.cursors.checkpoint import Entry
from tidemill.cursors.errors import CursorNotFound
from tidemill.cursors.position import Position
from tidemill.cursors.region import Region, header_match, key_prefix_of
from tidemill.cursors.stored import Home
from tidemill.errors import ConfigError, TableCode, TableError

if TYPE_CHECKING:
    from tidemill.client.tables.table import AsyncTable

__all__ = ("begin_cursor", "check_cursor_name", "open_cursor", "plan_cursor")

_NAME_CHARACTERS_MAX: Final = 249
_LEASE_MS_MAX: Final = 600_000


async def plan_cursor(
    cluster: Cluster,
    name: str | None,
    source: Any,
    *,
    partitions: Iterable[int] | None,
    key_prefix: bytes | str | None,
    headers: Mapping[str, bytes | str | None] | None,
    where: Any,
    start: Start,
    checkpoint: Any,
    own: Iterable[int] | None,
    take_over: bool,
    lease_ms: int,
    gaps_kept: int,
    if_lost: IfLost | None = None,
) -> CursorPlan:
    """Find out what is to be read, and where it begins if nothing is stored."""
    if name is not None:
        check_cursor_name(name)
    _check_if_lost(if_lost)
    chosen_of_region = None if partitions is None else chosen_partitions("partitions", partitions)
    owned = None if own is None else chosen_partitions("own", own)
    lease_ms = whole("lease_ms", lease_ms, least=1, most=_LEASE_MS_MAX)
    gaps_kept = whole("gaps_kept", gaps_kept, least=0)
    topic_name, table = await _source(cluster, source)
    topic = await cluster.topic(topic_name)
    if topic.topic_id is None:
        raise ConfigError(f"topic {topic_name!r} has no id: the node is too old for cursors")
    region = Region(
        topic_name,
        topic.topic_id,
        chosen_of_region,
        key_prefix_of(key_prefix),
        header_match(headers),
        _predicate(table, where),
    )
    count = len(topic.partitions)
    chosen = list(owned or region.partitions or range(count))
    for each in chosen:
        if each >= count:
            raise ConfigError(
                f"topic {topic_name!r} has {count} partition{'' if count == 1 else 's'}, numbered from 0: "
                f"there is no partition {each}"
            )
        if not region.has_partition(each):
            raise ConfigError(f"own names partition {each}, which is not one of partitions={partitions}")
    if own is not None and checkpoint is not None and not isinstance(checkpoint, str | os.PathLike):
        _check_shared(checkpoint)
    reads_all = region.partitions is None and own is None
    starts = await resolve_starts(cluster, topic_name, chosen, start)
    log_starts = None
    if reads_all:
        is_earliest = isinstance(start, str) and start == "earliest"
        log_starts = starts if is_earliest else await resolve_starts(cluster, topic_name, chosen, "earliest")
    store = _store(
        cluster, name, region, checkpoint, take_over=take_over, lease_ms=lease_ms, log_starts=log_starts
    )
    follows = reads_all and not store.is_callers
    try:
        if if_lost is None and names_offsets(start):
            await _check_start(cluster, name, topic_name, starts)
        await store.register(starts)
    except BaseException:
        await store.close()
        raise
    return CursorPlan(name, region, table, starts, store, gaps_kept, follows, if_lost)


async def open_cursor(cluster: Cluster, plan: CursorPlan) -> AsyncCursor:
    """Take the cursor over, and check its position against the log."""
    try:
        entries = await plan.store.take_over(plan.starts)
    except BaseException:
        await plan.store.close()
        raise
    return await begin_cursor(cluster, plan, entries, in_loop=True)


async def begin_cursor(
    cluster: Cluster, plan: CursorPlan, entries: Mapping[int, Entry], *, in_loop: bool = False
) -> AsyncCursor:
    """The cursor with these positions, once they are checked against the log.

    ``in_loop`` says that a connection of the caller's is used in the thread of the event loop. Who uses it in
    another thread calls ``store_lost_now`` of the cursor there.
    """
    cursor = AsyncCursor(cluster, plan, entries, in_loop=in_loop)
    try:
        await plan.store.show_now()
        await cursor.begin()
        if not plan.store.is_callers:
            await cursor.store_lost()
        elif in_loop:
            cursor.store_lost_now()
    except BaseException:
        await cursor.close()
        raise
    return cursor


async def _check_start(
    cluster: Cluster, name: str | None, topic: str, starts: Mapping[int, Position]
) -> None:
    """Raise ``ConfigError`` for a cursor that is to begin behind the end of a log, before that is stored."""
    ends = await list_offsets(cluster, {(topic, partition): LATEST for partition in starts})
    behind = [partition for partition in starts if starts[partition].offset > ends[topic, partition].offset]
    if not behind:
        return
    with contextlib.suppress(CursorNotFound):
        if name is not None and behind[0] in (await describe_cursor(cluster, name)).positions:
            # It has begun: ``start`` does not count any more, and the log has lost its end.
            return
    raise ConfigError(
        f"start is offset {starts[behind[0]].offset} of {topic}-{behind[0]}, which ends at offset "
        f"{ends[topic, behind[0]].offset}, where the next record comes: start there at most, or at 'latest'"
    )


def check_cursor_name(name: Any) -> None:
    """Raise ``ConfigError`` for what cannot name a cursor."""
    if not isinstance(name, str) or not name or len(name) > _NAME_CHARACTERS_MAX or not name.isprintable():
        raise ConfigError(
            f"a cursor's name is 1 to {_NAME_CHARACTERS_MAX} printable characters, not {str(name)[:40]!r}"
        )


def _check_if_lost(if_lost: Any) -> None:
    """Raise ``ConfigError`` for what does not say where to go on."""
    if if_lost not in (None, "earliest", "latest"):
        raise ConfigError(f"if_lost is 'earliest' or 'latest', not {if_lost!r}")


async def _source(cluster: Cluster, source: Any) -> tuple[str, AsyncTable | None]:
    """The topic to read, and the table that it is the log of."""
    from tidemill.client.tables.requests import ask_controller, definition_from

    awaited = getattr(source, "_awaited", source)  # A table of the blocking client wraps an async one.
    if not isinstance(awaited, str):
        name = getattr(awaited, "name", None)
        if not isinstance(name, str):
            raise ConfigError(f"a cursor reads a topic or a table, not {shown(source)}")
    else:
        name = awaited
    try:
        response = await ask_controller(
            cluster, "DescribeTable", {"name": name}, f"describing table {name!r}"
        )
    except TableError as error:
        if error.table_code != TableCode.table_not_found or not isinstance(awaited, str):
            raise
        return name, None
    from tidemill.client.tables.table import AsyncTable

    definition = definition_from(response.table)
    if definition.partition_column is not None:
        topics = ", ".join(each.topic for each in definition.partitions[:3]) or "none yet"
        raise ConfigError(
            f"table {name!r} is partitioned by {definition.partition_column!r}: each value has a log of its "
            f"own; open a cursor over one of their topics ({topics})"
        )
    return definition.partitions[0].topic, AsyncTable(cluster, definition)


def _check_shared(checkpoint: Any) -> None:
    from tidemill.client.cursors.checkpoints.transaction import IN_TRANSACTION

    if checkpoint is IN_TRANSACTION:
        raise ConfigError("a cursor in transactions has one producer, and so one owner of all its partitions")


def _predicate(table: AsyncTable | None, where: Any) -> bytes | None:
    if where is None:
        return None
    if table is None:
        raise ConfigError("where looks at columns, and a topic has none: filter by key_prefix or headers")
    from tidemill.client.tables.arguments import to_predicate
    from tidemill.tables.predicates.predicate import bind, encode

    predicate = to_predicate(where)
    bind(predicate, table.definition.schema)  # Raises for columns that the table does not have.
    return encode(predicate)


def _store(
    cluster: Cluster,
    name: str | None,
    region: Region,
    checkpoint: Any,
    *,
    take_over: bool,
    lease_ms: int,
    log_starts: Mapping[int, Position] | None,
) -> CheckpointStore:
    if name is None:
        if checkpoint is not None:
            raise ConfigError("a checkpoint needs a name: a cursor without one keeps its position in memory")
        return MemoryStore()
    if checkpoint is None:
        from tidemill.client.cursors.checkpoints.cluster import ClusterStore

        return ClusterStore(
            cluster, name, region, take_over=take_over, lease_ms=lease_ms, log_starts=log_starts
        )

    def registration(home: Home, owner: str | None = None) -> Registration:
        return Registration(
            cluster, name, region, take_over=take_over, lease_ms=lease_ms, home=home, owner=owner
        )

    if isinstance(checkpoint, str | os.PathLike):
        from tidemill.client.cursors.checkpoints.file import FileStore

        path = Path(checkpoint)
        if not str(checkpoint):
            raise ConfigError("checkpoint is an empty path: name the file that keeps the position")
        # The process that has the file's lock need not wait for the lease of an earlier owner.
        owner = f"{socket.gethostname()}:{path.absolute()}"
        return FileStore(path, name, region, registration(Home.FILE, owner), log_starts=log_starts)
    from tidemill.client.cursors.checkpoints.transaction import IN_TRANSACTION, TransactionStore

    if checkpoint is IN_TRANSACTION:
        return TransactionStore(
            cluster, name, region, take_over=take_over, lease_ms=lease_ms, log_starts=log_starts
        )
    from tidemill.client.cursors.checkpoints.database import DatabaseStore

    return DatabaseStore(checkpoint, name, region, registration(Home.DATABASE), log_starts=log_starts)
