"""Jobs against a model: attempts, publications, drivers that die, crashes anywhere, lost answers, timeouts.

What must hold:

- of a batch exactly the attempts of one list are visible, whole and in every partition, or nothing is;
- a batch is published once, whatever is asked again, and a driver that is told so is told the truth;
- what was not listed is aborted, and nothing stays open for ever;
- no marker comes before its decision is durable, and the markers of a publication come as one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from support.coordination import settle
from support.transaction_world import World, Write
from tidemill.errors import DiskFull, ErrorCode, TidemillError
from tidemill.transactions.attempts import is_open
from tidemill.transactions.messages import Producer, TransactionEnd
from tidemill.transactions.transaction import TransactionState
from tidemill.wire.jobs import AttemptId, job_key

PLACES = (("t", 0), ("t", 1), ("u", 0))
JOBS = ("a", "b")
TIMEOUT_MS = 1_000
Tag = tuple[str, int, int]


@dataclass
class Task:
    """One task attempt, as its executor knows it."""

    identity: AttemptId
    tag: Tag
    wrote: bool = False
    refused: bool = False


@dataclass
class Driver:
    """A job: the batch that it is at, and the attempts that have reported to it."""

    job: str
    batch: int = 0
    tasks: list[Task] = field(default_factory=list)
    #: What it has asked to be published and not heard of; asked for again as it is.
    publishing: tuple[Task, ...] | None = None
    request: asyncio.Task[Any] | None = None
    kind: str = ""

    def restart(self) -> None:
        """The process is gone; another one runs the same batch again."""
        self.tasks = []
        self.publishing = None
        self.request = None


class Publishing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world: World = self.run(self._make())
        self.drivers = [Driver(job) for job in JOBS]
        self.serial = 0
        #: All lists that were ever asked to be published, by job and batch.
        self.asked: dict[tuple[str, int], list[frozenset[Tag]]] = {}
        #: What drivers were told to be published by them.
        self.told: dict[tuple[str, int], frozenset[Tag]] = {}
        #: Batches of which drivers were told that they are published, by whomever.
        self.done: set[tuple[str, int]] = set()

    async def _make(self) -> World:
        world = World(*PLACES, end_wait_ms=200, publication_wait_ms=200, slots_max=8)
        await world.coordinator.start()
        return world

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def go(self) -> None:
        self.run(settle())
        for driver in self.drivers:
            if driver.request is not None and driver.request.done():
                task, driver.request = driver.request, None
                self._answered(driver, task)

    def send(self, driver: Driver, kind: str, work: Any) -> None:
        driver.kind = kind
        driver.request = self.loop.create_task(work)
        self.go()

    def _answered(self, driver: Driver, task: asyncio.Task[Any]) -> None:
        error = task.exception()
        assert error is None or isinstance(error, TidemillError), error
        if driver.kind == "open" and error is None:
            self._opened(driver, task.result())
        elif driver.kind == "publish":
            self._published(driver, error, None if error else task.result())

    def _opened(self, driver: Driver, identity: AttemptId | None) -> None:
        if identity is None:
            self.done.add((driver.job, driver.batch))
            driver.batch += 1
            driver.restart()
        else:
            self.serial += 1
            driver.tasks.append(Task(identity, (driver.job, driver.batch, self.serial)))

    def _published(self, driver: Driver, error: BaseException | None, published: bool | None) -> None:
        assert driver.publishing is not None
        place = driver.job, driver.batch
        if error is None:
            self.done.add(place)
            if published:
                self.told[place] = frozenset(task.tag for task in driver.publishing if task.wrote)
            driver.batch += 1
            driver.restart()
        elif isinstance(error, TidemillError) and error.code is ErrorCode.transaction_abortable:
            # Run the batch again.
            driver.restart()

    drivers_drawn = st.integers(0, len(JOBS) - 1)

    # --- what jobs do

    @rule(number=drivers_drawn)
    def open(self, number: int) -> None:
        driver = self.drivers[number]
        if driver.request is None and driver.publishing is None:
            jobs = self.world.coordinator.jobs
            self.send(driver, "open", jobs.open_attempt(driver.job, driver.batch, TIMEOUT_MS))

    @rule(number=drivers_drawn, task=st.integers(0, 9), places=st.sets(st.sampled_from(PLACES), min_size=1))
    def write(self, number: int, task: int, places: set[tuple[str, int]]) -> None:
        driver = self.drivers[number]
        if not driver.tasks or driver.publishing is not None:
            return
        chosen = driver.tasks[task % len(driver.tasks)]
        self.run(self._write(chosen, places))
        self.go()

    async def _write(self, task: Task, places: set[tuple[str, int]]) -> None:
        producer = Producer(*task.identity[1:])
        adding = asyncio.create_task(
            self.world.coordinator.add_partitions(task.identity.transactional_id, producer, places)
        )
        await settle()
        if not adding.done():
            adding.cancel()
            return
        if adding.result() is not ErrorCode.none:
            return
        for place in sorted(places):
            partition = self.world.partitions[place]
            if partition.may_write(producer):
                stored = self.world.stored()[task.identity.transactional_id]
                assert is_open(stored), "a write outside of any attempt"
                partition.write(Write(producer, task.tag))
                task.wrote = True

    @rule(number=drivers_drawn, tasks=st.sets(st.integers(0, 9)))
    def publish(self, number: int, tasks: set[int]) -> None:
        driver = self.drivers[number]
        if driver.request is not None:
            return
        if driver.publishing is None:
            driver.publishing = tuple(task for place, task in enumerate(driver.tasks) if place in tasks)
            listed = frozenset(task.tag for task in driver.publishing if task.wrote)
            self.asked.setdefault((driver.job, driver.batch), []).append(listed)
        identities = [task.identity for task in driver.publishing]
        jobs = self.world.coordinator.jobs
        self.send(driver, "publish", jobs.publish(driver.job, driver.batch, identities))

    @rule(number=drivers_drawn, tasks=st.sets(st.integers(0, 9)))
    def abort(self, number: int, tasks: set[int]) -> None:
        driver = self.drivers[number]
        if driver.request is None and driver.publishing is None:
            left = [task for place, task in enumerate(driver.tasks) if place in tasks]
            driver.tasks = [task for task in driver.tasks if left and task not in left]
            identities = [task.identity for task in left]
            self.send(
                driver, "abort", self.world.coordinator.jobs.abort(driver.job, driver.batch, identities)
            )

    @rule(number=drivers_drawn)
    def work(self, number: int) -> None:
        """What jobs mostly do, so that the rest finds something to disturb."""
        for place in PLACES[:2]:
            self.open(number)
            self.write(number, len(self.drivers[number].tasks) - 1, {place, PLACES[2]})

    @rule(number=drivers_drawn)
    def a_driver_dies(self, number: int) -> None:
        driver = self.drivers[number]
        if driver.request is not None:
            driver.request.cancel()
        driver.restart()
        self.go()

    @rule(number=drivers_drawn, behind=st.integers(0, 2))
    def a_late_copy_of_an_old_publication_arrives(self, number: int, behind: int) -> None:
        driver = self.drivers[number]
        batch = driver.batch - 1 - behind
        if batch >= 0:
            self.run(self._late(driver.job, batch))
            self.go()

    async def _late(self, job: str, batch: int) -> None:
        task = asyncio.create_task(self.world.coordinator.jobs.publish(job, batch, ()))
        await settle()
        task.cancel()
        await settle()
        if task.done() and not task.cancelled() and task.exception() is None:
            assert task.result() is False

    @rule(number=drivers_drawn)
    def keep(self, number: int) -> None:
        driver = self.drivers[number]
        if driver.request is None:
            self.send(driver, "keep", self.world.coordinator.jobs.keep(driver.job))

    @rule(number=drivers_drawn)
    def a_task_hangs_and_is_done_again_by_another(self, number: int) -> None:
        """Its slot is given out again; the driver does not know that the first one is over."""
        self.work(number)
        self.time_passes(TIMEOUT_MS + 200)
        self.work(number)
        self.publish(number, {0})

    @rule(number=drivers_drawn, failing=st.sampled_from([None, *PLACES]))
    def publish_all(self, number: int, failing: tuple[str, int] | None) -> None:
        self.work(number)
        if failing is not None:
            self.world.partitions[failing].failures_left = 1
        self.publish(number, set(range(10)))

    @rule(number=drivers_drawn, durable=st.integers(0, 4), slow=st.sampled_from(PLACES))
    def a_crash_in_the_middle_of_a_publication(
        self, number: int, durable: int, slow: tuple[str, int]
    ) -> None:
        self.work(number)
        self.syncs_become_slow_or_fast(slow=True)
        self.world.partitions[slow].syncs_at_once = False
        self.publish(number, set(range(10)))
        for _ in range(durable):
            self.one_more_append_is_durable()
        self.crash()
        self.syncs_become_slow_or_fast(slow=False)
        self.markers_become_slow_or_fast(slow, slow=False)

    # --- time and faults

    @rule()
    def one_more_append_is_durable(self) -> None:
        self.world.log.sync_one()
        self.go()

    @rule(duration_ms=st.sampled_from([50, 300, 1_200]))
    def time_passes(self, duration_ms: int) -> None:
        self.run(self.world.clock.advance(duration_ms))
        self.go()

    @rule(slow=st.booleans())
    def syncs_become_slow_or_fast(self, slow: bool) -> None:
        self.world.log.syncs_at_once = not slow
        if not slow:
            self.world.log.sync()
        self.go()

    @rule(place=st.sampled_from(PLACES), slow=st.booleans())
    def markers_become_slow_or_fast(self, place: tuple[str, int], slow: bool) -> None:
        self.world.partitions[place].syncs_at_once = not slow
        if not slow:
            self.world.partitions[place].sync()
        self.go()

    @rule(place=st.sampled_from(PLACES), count=st.integers(1, 3))
    def markers_fail(self, place: tuple[str, int], count: int) -> None:
        self.world.partitions[place].failures_left = count

    @rule(full=st.booleans())
    def the_disk_fills_up_or_empties(self, full: bool) -> None:
        self.world.log.refuse_with = DiskFull("no room") if full else None

    @rule()
    def crash(self) -> None:
        for driver in self.drivers:
            if driver.request is not None:
                driver.request.cancel()
                driver.request = None
        self.run(self.world.crash())
        self.go()

    @rule()
    def fsync_fails(self) -> None:
        if self.world.log.high_watermark < len(self.world.log.entries):
            self.world.log.fail_sync()
            self.go()

    # --- what must hold

    @invariant()
    def markers_follow_durable_decisions(self) -> None:
        assert not self.world.premature

    @invariant()
    def the_attempts_of_a_publication_end_as_one_in_a_partition(self) -> None:
        for partition in self.world.partitions.values():
            committed: dict[tuple[str, int], set[Tag]] = {}
            undecided: set[Tag] = set()
            for tag, fates in partition.decisions().items():
                assert isinstance(tag, tuple)
                if True in fates:
                    committed.setdefault(tag[:2], set()).add(tag)
                if None in fates:
                    undecided.add(tag)
            for batch, tags in committed.items():
                # An attempt that nobody listed, such as one that has timed out, may end at another time.
                assert any(tags <= listed and not listed & undecided for listed in self.asked[batch]), (
                    f"{batch} is half visible"
                )

    def teardown(self) -> None:
        try:
            self.run(self.world.heal())
            self.go()
            self._check_fates()
        finally:
            self.run(self.world.coordinator.close())
            self.loop.close()

    def _check_fates(self) -> None:
        for value in self.world.stored().values():
            assert not value.is_prepared, value
            assert value.state is not TransactionState.ONGOING, value
            assert not is_open(value), value
        committed: dict[tuple[str, int], set[Tag]] = {}
        for partition in self.world.partitions.values():
            for tag, fates in partition.decisions().items():
                assert None not in fates, f"{tag} hangs"
                assert len(set(fates)) == 1, f"{tag} is torn"
                assert isinstance(tag, tuple)
                if fates[0]:
                    committed.setdefault(tag[:2], set()).add(tag)
        published = self.world.published()
        for place in self.done:
            assert published[job_key(place[0])].batch >= place[1]
        for place, tags in committed.items():
            assert published[job_key(place[0])].batch >= place[1]
            assert tags in self.asked[place]
        for place, listed in self.told.items():
            assert committed.get(place, set()) == listed
        self._check_slots_are_few()

    def _check_slots_are_few(self) -> None:
        markers = [
            entry
            for partition in self.world.partitions.values()
            for entry in partition.entries
            if isinstance(entry, TransactionEnd)
        ]
        assert len({marker.producer.id for marker in markers}) <= len(JOBS) * self.world.settings.slots_max


TestPublishing = Publishing.TestCase
TestPublishing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
