"""``AsyncCursor``: a region read in order from a durable position.

    cursor = await db.cursor("billing", "orders")
    while batch := await cursor.poll_batch(64):
        ...                      # work on the records
        await cursor.commit()    # everything that was delivered is done

Rules:

- Records of a partition come in the order of their offsets. Only committed ones come.
- After a crash, or ``rollback``, everything behind the last commit comes again, and nothing before it.
- One owner at a time: a process that opens a cursor of the same name fences the others, whose commits are
  refused.
- A cursor is used by one task at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from tidemill.client.admin.topics import EARLIEST, LATEST, list_offsets
from tidemill.client.arguments import chosen_partitions, shown, whole
from tidemill.client.cluster import Cluster
from tidemill.client.cursors.checkpoints.store import CheckpointStore, StoredElsewhere
from tidemill.client.cursors.lag import Lag, measure_lag
from tidemill.client.cursors.reader import RegionReader
from tidemill.client.cursors.records import CursorRecord, CursorRow, decode_records, decode_rows
from tidemill.client.process_bound import Unpicklable
from tidemill.cursors.checkpoint import Entry
from tidemill.cursors.errors import CheckpointAheadOfLog, CheckpointBelowLogStart, CheckpointDiverged
from tidemill.cursors.machine import CursorMachine, Step
from tidemill.cursors.position import Gap, Gaps, Position, Reason
from tidemill.cursors.region import Region
from tidemill.cursors.start import StartAt, parse_start
from tidemill.errors import ConfigError, ConnectionClosed, TidemillError

if TYPE_CHECKING:
    from tidemill.client.cursors.checkpoints.transaction import AsyncCursorTransaction
    from tidemill.client.tables.table import AsyncTable

__all__ = ("AsyncCursor", "CursorPlan", "Delivery", "IfLost", "Start", "names_offsets", "resolve_starts")

Delivery = CursorRecord | CursorRow
Start = str | int | datetime | timedelta | Mapping[int, int]
#: Where a partition goes on whose log does not have the stored position.
IfLost = Literal["earliest", "latest"]

_log = logging.getLogger(__name__)

_FETCH_WAIT_MS: Final = 5_000
#: With so many records waiting, the next fetch is not begun yet.
_WAITING_MAX: Final = 5_000
_PAUSE_SECONDS: Final = 0.05
_NEW_PARTITIONS_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class CursorPlan:
    """A cursor that is about to be opened: what it reads, where it begins, and where its position is kept."""

    name: str | None
    region: Region
    table: AsyncTable | None
    starts: Mapping[int, Position]
    store: CheckpointStore
    gaps_kept: int
    #: Whether partitions that are added to the topic are read as well.
    follows_partitions: bool
    #: Where partitions go on whose log does not have the stored position; None: that is an error.
    if_lost: IfLost | None = None


class AsyncCursor(Unpicklable):
    """A durable cursor over a region of a topic or a table, made by ``db.cursor``. Close it after use."""

    def __init__(
        self, cluster: Cluster, plan: CursorPlan, entries: Mapping[int, Entry], *, in_loop: bool
    ) -> None:
        self._cluster = cluster
        self._plan = plan
        self._store = plan.store
        self._in_loop = in_loop
        self._machine: CursorMachine[Any] = CursorMachine(
            {partition: entry.position for partition, entry in entries.items()},
            {partition: entry.finished for partition, entry in entries.items()},
            gaps_kept=plan.gaps_kept,
        )
        self._reader = RegionReader(
            cluster,
            plan.region,
            self._decode,
            self._renew_table,
            where=plan.store.where,
            ways_out=self._ways_out,
        )
        self._has_begun = False
        #: What is to be stored of partitions that go on elsewhere, because their position was lost.
        self._lost: dict[int, Step] = {}
        self._closed = False
        self._look_again_at = time.monotonic() + _NEW_PARTITIONS_SECONDS
        self._delivered_count = 0
        self._opened_at = time.monotonic()

    async def begin(self) -> None:
        """Check the positions against the log, with the first fetch.

        Raises the error of a position that its log does not have, unless the caller has said where to go on
        then; ``store_lost`` stores that.
        """
        try:
            self._machine.arrived(await self._reader.check(self._fetch_positions()))
        except (CheckpointBelowLogStart, CheckpointAheadOfLog, CheckpointDiverged):
            if self._plan.if_lost is None:
                raise
            await self._leave_lost(self._plan.if_lost)
        self._has_begun = True

    async def _leave_lost(self, to: IfLost) -> None:
        """Go on at ``to`` in the partitions whose log does not have the position."""
        topic = self._plan.region.topic
        behind = (await self.lag()).partitions
        lost = {each: found.problem for each, found in behind.items() if found.problem is not None}
        await self.seek(to, partitions=lost)
        self._lost = self.plan_commit()
        for each, problem in lost.items():
            offset = self._machine.delivered[each].offset
            _log.warning(
                "%s: goes on at the %s offset of %s-%d, which is %d (if_lost=%r): %s",
                self._store.where,
                to,
                topic,
                each,
                offset,
                to,
                problem,
            )

    async def store_lost(self) -> None:
        """Store where partitions go on whose position was lost."""
        if self._lost:
            await self._store.commit_alone(self._lost)
            self._confirm_lost()

    def store_lost_now(self) -> None:
        """``store_lost`` for a store that is the caller's, in the caller's thread."""
        if self._lost:
            self._store.commit_alone_now(self._lost)
            self._confirm_lost()

    def _confirm_lost(self) -> None:
        self.confirm(self._lost)
        self._lost = {}

    def _ways_out(self) -> str:
        """How to go on if the log does not have the position, for errors."""
        if self._has_begun:
            return "go on with seek('earliest') or seek('latest'), or open it again with if_lost"
        opened = "to go on all the same, open the cursor with if_lost='earliest' or if_lost='latest'"
        if not self._store.can_be_reset:
            return opened
        return f"{opened}, or set its position with 'tidemill cursor reset'"

    def __repr__(self) -> str:
        return f"<cursor {self._plan.name or 'without a name'} over {self._plan.region}>"

    def _instead_of_a_pickle(self) -> str:
        return f"Open one there: tidemill.connect({self._cluster.servers!r}).cursor(…)"

    async def __aenter__(self) -> AsyncCursor:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        """Records as they come, without an end. Commit as often as you like in between."""
        while True:
            # One at a time: a commit in between is for what the caller has seen, and for nothing else.
            record = await self.poll(timeout_ms=_FETCH_WAIT_MS)
            if record is not None:
                yield record

    # --- what it is

    @property
    def name(self) -> str | None:
        """The name under which its position is kept; None: in memory only."""
        return self._plan.name

    @property
    def region(self) -> Region:
        """The region that the cursor reads: topic, partitions and filter."""
        return self._plan.region

    @property
    def store(self) -> CheckpointStore:
        """The checkpoint store that keeps the cursor's position."""
        return self._store

    def key_of(self, record: Delivery) -> bytes | None:
        """The key whose records stay in order: a record's key, or a row's primary key; None without one."""
        if isinstance(record, CursorRecord):
            return record.key
        table = self._plan.table
        assert table is not None, "rows come from tables"
        columns = table.definition.primary_key
        return repr([record.row[column] for column in columns]).encode() if columns else None

    @property
    def positions(self) -> dict[int, Position]:
        """By partition, the position behind what was delivered."""
        return self._machine.delivered

    @property
    def committed(self) -> dict[int, Position]:
        """By partition, the position that is stored."""
        return self._machine.committed

    @property
    def is_paused(self) -> bool:
        """Whether somebody has paused it: it delivers nothing until it is resumed."""
        return self._store.is_paused

    @property
    def delivered_per_second(self) -> float:
        """Records delivered a second, since it was opened."""
        return self._delivered_count / max(1e-9, time.monotonic() - self._opened_at)

    # --- reading

    async def poll(self, *, timeout_ms: int = 500) -> Delivery | None:
        """The next record; None if none came within ``timeout_ms``."""
        records = await self.poll_batch(1, timeout_ms=timeout_ms)
        return records[0] if records else None

    async def poll_batch(self, limit: int = 64, *, timeout_ms: int = 500) -> list[Delivery]:
        """The next records, at most ``limit``; an empty list if none came within ``timeout_ms``.

        It waits for the first one only, and is woken by its append.
        """
        self._check()
        if self._in_loop:
            self._store.settle_now()
        limit = whole("limit", limit, least=1)
        if isinstance(timeout_ms, bool) or not isinstance(timeout_ms, int | float):
            raise ConfigError(f"timeout_ms is a number of milliseconds, not {shown(timeout_ms)}")
        deadline = time.monotonic() + timeout_ms / 1000
        while self._store.is_paused or not self._machine.waiting_records:
            left_ms = max(0, int((deadline - time.monotonic()) * 1000))
            if self._store.is_paused:
                if not left_ms:
                    return []
                await asyncio.sleep(min(_PAUSE_SECONDS, left_ms / 1000))
                self._check()
                continue
            await self._follow_partitions()
            self._machine.arrived(await self._reader.fetch(self._fetch_positions(), left_ms))
            self._check()
            if not left_ms:
                break
        await self._fetch_ahead(limit)
        # Nothing may be awaited, or fail, from here on: what is taken counts as delivered.
        taken = self._take(limit)
        self._delivered_count += len(taken)
        return taken

    async def _fetch_ahead(self, limit: int) -> None:
        """Begin the next fetch if few records are left: it is under way while the caller works."""
        waiting = self._machine.waiting_records
        if self._store.is_paused or not waiting or waiting - limit >= min(limit, _WAITING_MAX):
            return
        # The next poll meets the same error, and raises it.
        with contextlib.suppress(TidemillError):
            await self._reader.begin(self._fetch_positions(), _FETCH_WAIT_MS)

    def _take(self, limit: int) -> list[Delivery]:
        return [] if self._store.is_paused else self._machine.take(limit)

    def _fetch_positions(self) -> dict[int, Position]:
        return {partition: self._machine.fetch_position(partition) for partition in self._machine.partitions}

    def _decode(self, batch: memoryview, topic: str, partition: int) -> list[Any]:
        table = self._plan.table
        if table is None:
            return decode_records(batch, topic, partition)
        return decode_rows(table.definition, batch, topic, partition)

    async def _renew_table(self) -> bool:
        """Look up the table's definition again; gives whether its schema has changed."""
        table = self._plan.table
        if table is None:
            return False
        known = table.definition.schema_id
        await table.renew()
        return table.definition.schema_id != known

    async def _follow_partitions(self) -> None:
        """Read partitions that were added to the topic, from their beginning."""
        if not self._plan.follows_partitions or time.monotonic() < self._look_again_at:
            return
        self._look_again_at = time.monotonic() + _NEW_PARTITIONS_SECONDS
        self._cluster.forget()
        topic = await self._cluster.topic(self._plan.region.topic)
        new = [each.index for each in topic.partitions if each.index not in self._machine.committed]
        if new:
            starts = await resolve_starts(self._cluster, topic.name, new, "earliest")
            taken = await self._store.take_over(starts)
            for partition, entry in taken.items():
                self._machine.add(partition, entry.position, entry.finished)

    # --- commit and rollback

    async def commit(
        self,
        upto: Mapping[int, int] | None = None,
        *,
        finished: Mapping[int, Iterable[int]] | None = None,
    ) -> None:
        """Store that everything delivered so far is done.

        ``upto`` gives offsets, by partition, behind the last record that is done, where that is less;
        ``finished`` the offsets above these that are done already, up to 1,024 ahead. Raises ``CursorFenced``
        if another process has taken over, and ``CursorMoved`` if something else is stored than where this
        batch begins; the cursor is then at what is stored.
        """
        steps = self.plan_commit(upto, finished)
        if steps:
            try:
                await self._store.commit(steps)
            except StoredElsewhere as error:
                await self.go_to_stored(error)
                raise
            self.confirm(steps)

    def plan_commit(
        self, upto: Mapping[int, int] | None = None, finished: Mapping[int, Iterable[int]] | None = None
    ) -> dict[int, Step]:
        """What ``commit`` would store. For stores that are written in the caller's thread."""
        self._check()
        try:
            return self._machine.plan_commit(_offsets("upto", upto), finished)
        except ValueError as error:
            raise ConfigError(f"{self._store.where}: {error}") from error

    def confirm(self, steps: Mapping[int, Step]) -> None:
        """Take over the positions of ``plan_commit`` as committed: the store has them now."""
        self._machine.confirm(steps)

    async def go_to_stored(self, error: StoredElsewhere) -> None:
        """Move to the stored positions that a refused commit has told."""
        await self.go_to(error.entries)

    async def go_to(self, entries: Mapping[int, Entry]) -> None:
        """Go to positions that the store has told, and elsewhere to the last commit."""
        await self._reader.reset()
        self._machine.rollback(
            {partition: entry.position for partition, entry in entries.items()},
            {partition: entry.finished for partition, entry in entries.items()},
        )

    async def rollback(self) -> None:
        """Go back to the last commit: everything behind it comes again."""
        self._check()
        await self._reader.reset()
        self._machine.rollback()

    async def seek(self, to: Start, *, partitions: Iterable[int] | None = None) -> None:
        """Go on somewhere else: ``"earliest"``, ``"latest"``, an offset, a time, ``"-10 minutes"``.

        ``to`` may also be offsets by partition. What is stored changes with the next commit. Offsets that
        were deleted before they were read are a gap of reason RETENTION.
        """
        self._check()
        await self._reader.reset()
        chosen = (
            self._machine.partitions if partitions is None else chosen_partitions("partitions", partitions)
        )
        missing = set(chosen) - set(self._machine.partitions)
        if missing:
            raise ConfigError(f"{self._store.where} does not read partition {min(missing)}")
        region = self._plan.region
        targets = await resolve_starts(self._cluster, region.topic, chosen, to)
        wanted = {(region.topic, partition): EARLIEST for partition in targets}
        log_starts = await list_offsets(self._cluster, wanted)
        if names_offsets(to):
            await self._check_ends(targets)
        for partition, target in targets.items():
            before = self._machine.delivered[partition]
            log_start = log_starts[region.topic, partition].offset
            if before.offset < min(log_start, target.offset):
                last = min(log_start, target.offset) - 1
                self._machine.note_gap(Gap(partition, before.offset, last, Reason.RETENTION))
            self._machine.seek(partition, target._replace(started=before.started))

    async def _check_ends(self, targets: Mapping[int, Position]) -> None:
        """Raise ``ConfigError`` for an offset behind the end of its log, before anything is changed."""
        topic = self._plan.region.topic
        ends = await list_offsets(self._cluster, {(topic, partition): LATEST for partition in targets})
        for partition, target in targets.items():
            end = ends[topic, partition].offset
            if target.offset > end:
                raise ConfigError(
                    f"{self._store.where}: {topic}-{partition} ends at offset {end}, where the next record "
                    f"comes: there is no offset {target.offset} to seek"
                )

    def transaction(self) -> AsyncCursorTransaction:
        """A transaction for what is written because of what was read; the position becomes part of it.

        For a cursor that was opened with ``checkpoint=tidemill.IN_TRANSACTION``. Use it in a ``with``
        statement: leaving it commits, an error aborts it and sends the cursor back.
        """
        from tidemill.client.cursors.checkpoints.transaction import AsyncCursorTransaction, TransactionStore

        self._check()
        if not isinstance(self._store, TransactionStore):
            raise ConfigError("transactions are for cursors with checkpoint=tidemill.IN_TRANSACTION")
        return AsyncCursorTransaction(self._cluster, self, self._store)

    # --- what it tells

    async def lag(self) -> Lag:
        """How far it is behind the end of what is committed, from what was delivered on."""
        self._check()
        region = self._plan.region
        return await measure_lag(self._cluster, region.topic, region.topic_id, self._machine.delivered)

    def gaps(self) -> Gaps:
        """The offsets that were passed over since the last call, and why."""
        return self._machine.gaps()

    async def close(self) -> None:
        """Give the cursor up for others. What was not committed comes again. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            if self._in_loop:
                self._store.settle_now(closing=True)
            await self._reader.close()
            await self._store.close()

    def _check(self) -> None:
        if self._closed:
            raise ConnectionClosed("this cursor is closed; open another one with db.cursor")
        self._store.check()


def _offsets(name: str, given: Any) -> Mapping[int, int] | None:
    """``given``, if it is offsets by partition or None. Raises ``ConfigError`` for anything else."""
    if given is None or (
        isinstance(given, Mapping) and all(isinstance(each, int) for each in (*given, *given.values()))
    ):
        return given
    raise ConfigError(f"{name} is offsets by partition, as in {{0: 17}}, not {shown(given)}")


def names_offsets(start: Start) -> bool:
    """Whether ``start`` gives offsets itself. No node has looked those up, so a log may not have them."""
    return isinstance(start, Mapping) or parse_start(start, now_ms=0).kind == "offset"


async def resolve_starts(
    cluster: Cluster, topic: str, partitions: Iterable[int], start: Start
) -> dict[int, Position]:
    """The positions that ``start`` means in these partitions."""
    chosen = list(partitions)
    if isinstance(start, Mapping):
        unknown = set(start) - set(chosen)
        if unknown:
            wrong = next(iter(unknown))
            raise ConfigError(f"there is no partition {wrong!r} to start at offset {start[wrong]!r}")
        found = await resolve_starts(
            cluster, topic, [each for each in chosen if each not in start], "earliest"
        )
        return found | {partition: Position(_checked(offset)) for partition, offset in start.items()}
    at = parse_start(start, now_ms=int(time.time() * 1000))
    if not chosen or at.kind == "offset":
        return {partition: Position(at.value) for partition in chosen}
    wanted = {"earliest": EARLIEST, "latest": LATEST}.get(at.kind, at.value)
    return await _listed(cluster, topic, chosen, wanted)


async def _listed(cluster: Cluster, topic: str, partitions: list[int], wanted: int) -> dict[int, Position]:
    asked = {(topic, partition): wanted for partition in partitions}
    found = await list_offsets(cluster, asked, committed=True)
    # There is nothing at or after that time: whatever comes is.
    late = [index for (_, index), at in found.items() if at.offset < 0]
    ends = await _listed(cluster, topic, late, LATEST) if late else {}
    return {
        index: Position(at.offset, at.leader_epoch) for (_, index), at in found.items() if at.offset >= 0
    } | ends


def _checked(offset: Any) -> int:
    at: StartAt = parse_start(offset, now_ms=0)
    if at.kind != "offset":
        raise ConfigError(f"a partition starts at an offset, not at {offset!r}")
    return at.value
