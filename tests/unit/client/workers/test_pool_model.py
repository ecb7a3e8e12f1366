"""An ordered worker with lanes against a model of keys: handlers end and fail, stores fail, crash, reopen.

The engine, its pool, the lanes and the cursor's machine are the real ones, on a loop with virtual time. The
log, the handlers and the store are the model's: it decides when a poll is answered, a handler ends and a
position is stored. After each step all that can happen by itself has happened.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.virtual_loop import VirtualLoop
from tidemill.client.cursors.records import CursorRecord
from tidemill.client.workers import ordered_engine
from tidemill.client.workers.logs import WORKER_LOG
from tidemill.client.workers.ordered import Ordered
from tidemill.client.workers.ordered_engine import OrderedEngine
from tidemill.client.workers.workspace import BatchEnd, Progress, Workspace
from tidemill.cursors import machine
from tidemill.cursors.checkpoint import Entry, pack_finished, unpack_finished
from tidemill.cursors.lanes import Lanes
from tidemill.cursors.machine import Arrival, CursorMachine, Step
from tidemill.cursors.position import FINISHED_AHEAD_MAX, Position
from tidemill.cursors.restarts import Bounded
from tidemill.errors import ApiError, ConfigError, ErrorCode

_PARTITIONS = (0, 1)
#: So few that small examples reach it.
_AHEAD_MAX = 6
#: Longer than every pause of a worker.
_SETTLE_SECONDS = 1_000.0

_KEYS = st.lists(st.sampled_from((None, b"a", b"b", b"c")), min_size=1, max_size=8)

Place = tuple[int, int]


class _Store:
    """Positions and finished offsets, as bytes keep them."""

    def __init__(self) -> None:
        self.entries = {partition: Entry(1, Position(0)) for partition in _PARTITIONS}

    def commit(self, steps: Mapping[int, Step], *, keep_notes: bool) -> None:
        for partition, step in steps.items():
            stored = self.entries[partition]
            after = step.after.offset
            notes = {offset for offset in stored.finished if offset >= after} if keep_notes else set()
            packed = pack_finished(after, sorted({*step.finished} - notes))
            finished = {*unpack_finished(after, packed), *notes}
            self.entries[partition] = Entry(1, step.after, tuple(sorted(finished)))

    def note(self, partition: int, offset: int) -> None:
        """A record is done, as a lane's own transaction says."""
        stored = self.entries[partition]
        self.entries[partition] = stored._replace(finished=(*stored.finished, offset))

    def has(self, partition: int, offset: int) -> bool:
        """Whether a record is stored as done."""
        stored = self.entries[partition]
        return offset < stored.position.offset or offset in stored.finished


class _Cursor:
    """A cursor over the model's log, which polls when it is told to."""

    def __init__(self, world: _World) -> None:
        self._log = world.log
        entries = world.store.entries
        self.machine: CursorMachine[CursorRecord] = CursorMachine(
            {partition: entry.position for partition, entry in entries.items()},
            {partition: entry.finished for partition, entry in entries.items()},
        )
        #: The poll that waits; it is told how many records of each partition arrive.
        self.polling: asyncio.Future[int] | None = None

    @property
    def positions(self) -> dict[int, Position]:
        return self.machine.delivered

    @property
    def committed(self) -> dict[int, Position]:
        return self.machine.committed

    def key_of(self, record: CursorRecord) -> bytes | None:
        return record.key

    async def poll_batch(self, limit: int, *, timeout_ms: int) -> list[CursorRecord]:
        if not self.machine.waiting_records:
            self.polling = asyncio.get_running_loop().create_future()
            try:
                self._fetch(await self.polling)
            finally:
                self.polling = None
        return self.machine.take(limit)

    def _fetch(self, limit: int) -> None:
        for partition, records in self._log.items():
            start = self.machine.fetch_position(partition).offset
            found = [record for record in records if record.offset >= start][:limit]
            if found:
                self.machine.arrived([Arrival(partition, start, found, found[-1].offset + 1, 0)])


class _Workspace(Workspace):
    """Handlers that end when the model says so, and positions in the model's store."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self.cursor: Any = _Cursor(world)
        self.stores_at_once = world.notes_each

    async def handle_one(self, record: Any, progress: Progress) -> BatchEnd:
        end = await self._world.handle(record)
        progress.done = end.done
        return end

    async def store(
        self, upto: Mapping[int, int] | None = None, finished: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        positions: CursorMachine[CursorRecord] = self.cursor.machine
        try:
            steps = positions.plan_commit(upto, finished)
        except ValueError as error:
            raise ConfigError(str(error)) from error  # As ``AsyncCursor`` does: it ends the worker.
        await self._world.write(steps)
        positions.confirm(steps)

    async def note_parked(self, record: Any) -> None:
        if self._world.notes_each:
            self._world.store.note(record.partition, record.offset)

    async def rollback(self) -> None:
        self.cursor.machine.rollback()
        self._world.done_here.clear()

    async def close(self) -> None:
        """There is nothing to close."""


class _World:
    """A log, a store, and a worker that may be killed."""

    def __init__(self, options: Ordered, *, concurrency: int, has_letters: bool, notes_each: bool) -> None:
        self.loop = VirtualLoop(random.Random(0))
        self.log: dict[int, list[CursorRecord]] = {partition: [] for partition in _PARTITIONS}
        self.store = _Store()
        #: Whether handlers note in their own transactions that their record is done, as with a database.
        self.notes_each = notes_each
        self.effects: Counter[Place] = Counter()
        self.parked: set[Place] = set()
        #: What was done since the cursor was opened or went back.
        self.done_here: set[Place] = set()
        self.running: dict[Place, asyncio.Future[BatchEnd]] = {}
        self.wrong: list[str] = []
        self.is_store_slow = False
        #: The position that is being stored, if that is slow; whether it is written decides its result.
        self.storing: asyncio.Future[None] | None = None
        self.planned: Mapping[int, Step] = {}
        self.workspace: _Workspace | None = None
        self._options = options
        self._concurrency = concurrency
        self._has_letters = has_letters
        self.start()

    # --- what the worker calls

    async def open(self) -> _Workspace:
        self.done_here.clear()
        self.workspace = _Workspace(self)
        return self.workspace

    async def handle(self, record: CursorRecord) -> BatchEnd:
        place = record.partition, record.offset
        self._expect(not self.store.has(*place), f"{place} is stored as done, and is done again")
        self._expect(place not in self.running, f"{place} is done twice at a time")
        for other in self.log[record.partition]:
            if record.key is not None and other.key == record.key and other.offset < record.offset:
                before = other.partition, other.offset
                is_done = before in self.done_here or self.store.has(*before)
                self._expect(is_done, f"{place} comes before {before}, which has the same key")
        self.running[place] = asyncio.get_running_loop().create_future()
        self._expect(len(self.running) <= self._concurrency, "too many are side by side")
        try:
            return await self.running[place]
        finally:
            del self.running[place]

    async def park(self, record: Any, tries: int, reason: str) -> None:
        self.parked.add((record.partition, record.offset))
        self.done_here.add((record.partition, record.offset))

    async def write(self, steps: Mapping[int, Step]) -> None:
        if self.is_store_slow:
            self.storing, self.planned = asyncio.get_running_loop().create_future(), steps
            try:
                await self.storing
            finally:
                self.storing = None
        else:
            self._commit(steps)

    def _commit(self, steps: Mapping[int, Step]) -> None:
        for partition, step in steps.items():
            stored = self.store.entries[partition].position.offset
            self._expect(step.before.offset == stored, f"a commit begins at {step.before}, not at {stored}")
            self._expect(step.after.offset >= stored, f"a commit goes back from {stored} to {step.after}")
        self.store.commit(steps, keep_notes=self.notes_each)

    def _expect(self, is_so: bool, what: str) -> None:
        """Note what is wrong: a worker would take an error raised here for a handler's or a driver's."""
        if not is_so:
            self.wrong.append(what)

    # --- what the model does

    def settle(self) -> None:
        """Let everything happen that can happen by itself."""
        self.loop.run_until_complete(asyncio.sleep(_SETTLE_SECONDS))
        if self._worker.done():
            self._worker.result()

    def start(self) -> None:
        async def run() -> None:
            engine = OrderedEngine(
                "w",
                self._options,
                self.open,
                self.park if self._has_letters else None,
                concurrency=self._concurrency,
                retry_backoff=0.01,
                stop_timeout=1.0,
            )
            self._stop = asyncio.Event()
            await engine.run(self._stop, asyncio.Event())

        self._worker = self.loop.create_task(run())
        self.settle()

    def crash(self) -> None:
        self._worker.cancel()
        self.loop.run_until_complete(asyncio.wait([self._worker]))
        assert self._worker.cancelled()
        assert not self.running

    def stop(self) -> None:
        self.is_store_slow = False
        self.answer_store("written")
        self._stop.set()
        self.settle()
        assert self._worker.done()

    def poll(self, limit: int) -> None:
        polling = None if self.workspace is None else self.workspace.cursor.polling
        if polling is not None:
            polling.set_result(limit)
            self.settle()

    def end(self, *places: Place) -> None:
        for place in places:
            self.effects[place] += 1
            self.done_here.add(place)
            if self.notes_each:
                self.store.note(*place)
            self.running[place].set_result(BatchEnd(1))
        self.settle()

    def fail(self, place: Place) -> None:
        self.running[place].set_result(BatchEnd(0, error=ValueError("poison")))
        self.settle()

    def answer_store(self, how: str) -> None:
        """A slow store answers. Lost: it is written, and the worker does not know."""
        if self.storing is None:
            return
        if how != "refused":
            self._commit(self.planned)
        if how == "written":
            self.storing.set_result(None)
        else:
            self.storing.set_exception(ApiError(ErrorCode.not_coordinator, how))
        self.settle()

    def finish(self) -> None:
        """Handle all that is there, and stop."""
        self.is_store_slow = False
        self.answer_store("written")
        before = None
        while not (self.is_all_stored or self.wrong) and before != (before := self._progress()):
            self.end(*self.running)
            self.poll(5)
        self.stop()

    def _progress(self) -> object:
        """What changes while there is something left to do."""
        delivered = None if self.workspace is None else self.workspace.cursor.positions
        return self.effects.total(), len(self.parked), delivered, dict(self.store.entries), set(self.running)

    @property
    def is_all_stored(self) -> bool:
        return all(self.store.has(each.partition, each.offset) for each in self.records())

    def records(self) -> list[CursorRecord]:
        return [record for records in self.log.values() for record in records]

    def append(self, partition: int, keys: Sequence[bytes | None], gap: int = 0) -> None:
        records = self.log[partition]
        start = gap + (records[-1].offset + 1 if records else 0)
        records += [
            CursorRecord(key, b"", 5, (), start + number, "t", partition) for number, key in enumerate(keys)
        ]

    def check(self, ahead_max: int) -> None:
        """What is stored as done was done, and is not too far ahead."""
        assert not self.wrong
        for partition, records in self.log.items():
            stored = {each.offset for each in records if self.store.has(partition, each.offset)}
            for offset in stored:
                place = partition, offset
                assert self.effects[place] or place in self.parked, f"{place} is lost"
            # Where lanes note each record themselves the position follows later.
            oldest = min((each.offset for each in records if each.offset not in stored), default=None)
            position = self.store.entries[partition].position.offset
            ahead_of = position if not self.notes_each else oldest
            finished = self.store.entries[partition].finished
            assert ahead_of is None or all(offset - ahead_of < ahead_max for offset in finished)
        if self.notes_each:
            assert all(count == 1 for count in self.effects.values()), "an effect came twice"


class PoolModel(RuleBasedStateMachine):
    """A worker whose positions the cluster keeps."""

    notes_each = False

    def __init__(self) -> None:
        super().__init__()
        self.patches = _limited_ahead()

    @initialize(
        concurrency=st.integers(2, 4),
        batch_size=st.integers(1, 5),
        every_records=st.none() | st.integers(1, 6),
        has_letters=st.booleans(),
        keys=_KEYS,
    )
    def begin(
        self,
        concurrency: int,
        batch_size: int,
        every_records: int | None,
        has_letters: bool,
        keys: list[bytes | None],
    ) -> None:
        options = Ordered(
            batch_size=batch_size,
            every_records=every_records,
            attempts=2,
            restart=Bounded(1_000_000, within_seconds=1),
        )
        self.world = _World(
            options, concurrency=concurrency, has_letters=has_letters, notes_each=self.notes_each
        )
        self.patches.callback(self.world.loop.close)
        self.world.append(0, keys)

    @rule(partition=st.sampled_from(_PARTITIONS), keys=_KEYS, gap=st.integers(0, 2))
    def append(self, partition: int, keys: list[bytes | None], gap: int) -> None:
        self.world.append(partition, keys, gap)

    @rule(limit=st.integers(0, 8))
    def poll(self, limit: int) -> None:
        self.world.poll(limit)

    @rule(choices=st.lists(st.integers(0, 3), min_size=1, max_size=10))
    def handlers_end(self, choices: list[int]) -> None:
        """One after the other; what a poll has at once comes in between."""
        for choice in choices:
            if self.world.running:
                self.world.end(sorted(self.world.running)[choice % len(self.world.running)])
            self.world.poll(choice)

    @precondition(lambda self: self.world.running)
    @rule(choice=st.integers(0, 3))
    def a_handler_fails(self, choice: int) -> None:
        self.world.fail(sorted(self.world.running)[choice % len(self.world.running)])

    @precondition(lambda self: not self.world.is_store_slow)
    @rule()
    def the_store_becomes_slow(self) -> None:
        self.world.is_store_slow = True

    @precondition(lambda self: self.world.storing is not None)
    @rule(how=st.sampled_from(("written", "refused", "lost")), is_slow=st.booleans())
    def the_store_answers(self, how: str, is_slow: bool) -> None:
        self.world.is_store_slow = is_slow
        self.world.answer_store(how)

    @rule()
    def crash_and_open_again(self) -> None:
        self.world.crash()
        self.world.start()

    @rule()
    def stop_and_open_again(self) -> None:
        self.world.stop()
        assert not self.world.running
        self.world.start()

    @invariant()
    def nothing_is_lost_and_few_are_ahead(self) -> None:
        self.world.check(_AHEAD_MAX)

    def teardown(self) -> None:
        """In the end everything was done."""
        with self.patches:
            if hasattr(self, "world"):
                self.world.finish()
                self.world.check(_AHEAD_MAX)
                assert self.world.is_all_stored


class NotingPoolModel(PoolModel):
    """A worker with a database: each handler's transaction notes its record. Effects come once."""

    notes_each = True


#: All but ``explain``, which traces every line of every story again once one has failed: that takes minutes.
_PHASES = tuple(phase for phase in Phase if phase is not Phase.explain)

TestPool = PoolModel.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, phases=_PHASES)
TestNotingPool = NotingPoolModel.TestCase
TestNotingPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, phases=_PHASES)


@pytest.mark.parametrize("notes_each", [False, True])
def test_nothing_is_begun_1024_or_more_ahead_of_a_slow_record(notes_each: bool) -> None:
    world = _World(Ordered(batch_size=500), concurrency=64, has_letters=False, notes_each=notes_each)
    world.append(0, [b"slow"] + [None] * (FINISHED_AHEAD_MAX + 100))
    world.poll(2_000)
    while others := [place for place in world.running if place != (0, 0)]:
        world.end(*others)
    assert set(world.effects) == {(0, offset) for offset in range(1, FINISHED_AHEAD_MAX)}
    world.check(FINISHED_AHEAD_MAX)
    world.crash()
    world.start()
    world.poll(2_000)
    assert (0, 0) in world.running
    world.finish()
    world.check(FINISHED_AHEAD_MAX)
    assert world.is_all_stored
    world.loop.close()


def _limited_ahead() -> ExitStack:
    """So few finished offsets ahead of a position that small examples reach the limit."""
    patches = ExitStack()
    patches.enter_context(patch.object(ordered_engine, "Lanes", partial(Lanes, ahead_max=_AHEAD_MAX)))
    patches.enter_context(patch.object(machine, "FINISHED_AHEAD_MAX", _AHEAD_MAX))
    patches.enter_context(patch.object(WORKER_LOG, "disabled", new=True))
    return patches


def test_notes_far_ahead_of_the_stored_position_end_no_worker() -> None:
    """A process ended between parking a record and noting that, and long after it had stored a position."""
    with _limited_ahead():
        options = Ordered(batch_size=1_000, attempts=1)
        world = _World(options, concurrency=4, has_letters=True, notes_each=True)
        world.append(0, [b"poison"] + [None] * 30)
        world.crash()
        for offset in range(1, 26):
            world.store.note(0, offset)
            world.effects[0, offset] += 1
        world.start()
        world.poll(1_000)
        # The others are too far ahead of it.
        assert list(world.running) == [(0, 0)]
        world.stop()
        world.start()
        world.finish()
        world.check(FINISHED_AHEAD_MAX)
        assert world.is_all_stored
        world.loop.close()
