"""The scrubber, over a disk in memory whose bits flip."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from uuid import UUID

import pytest

from support.batches import plain_batch
from support.compacting import flush
from support.faulty_storage import FaultyStorage
from support.virtual_loop import VirtualLoop, current_loop, run_virtual
from tidemill.config.topic import TopicConfig
from tidemill.coordination.pools import thread_pool
from tidemill.errors import DamagedBatch
from tidemill.log.log import PartitionLog
from tidemill.log.notes.scrub_progress import PartitionKey
from tidemill.log.pace import Pace
from tidemill.log.segments.segment import Segment
from tidemill.replication.log_work import scrubber as scrubbing
from tidemill.replication.log_work.scrubber import PROGRESS_NAME, Scrubber
from tidemill.replication.partition import Partition
from tidemill.replication.replicas import Placement, Replicas

CONFIG = TopicConfig(segment_bytes=2_000, index_interval_bytes=500)
DAY_SECONDS = 24 * 60 * 60
DAY = DAY_SECONDS * 1000


@dataclass
class World:
    """Partitions of one topic and a scrubber over them; ``again`` is the next process."""

    storage: FaultyStorage = field(default_factory=FaultyStorage)
    count: int = 2
    now_ms: int = DAY
    made: list[Scrubber] = field(default_factory=list)
    bytes_per_second: int = 0
    #: Whose time passes, and whose threads are used, instead of real ones.
    loop: VirtualLoop | None = None

    def __post_init__(self) -> None:
        self.replicas = Replicas(self.storage, lambda partition: None, max_decompressed_bytes=10**6)
        self.scrubber = Scrubber(
            self.replicas,
            lambda: [self.placement(index) for index in range(self.count)],
            self.find,
            (thread_pool if self.loop is None else self.loop.pool)("scrub", 1),
            bytes_per_second=self.bytes_per_second,
            interval_ms=DAY,
            clock_ms=self.clock_ms,
            steady_ms=self.steady_ms,
            pace=Pace if self.loop is None else self.loop.pace,
        )
        self.made.append(self.scrubber)
        self.scrubber.load()

    def clock_ms(self) -> int:
        """The wall clock, which ``now_ms`` sets."""
        return self.now_ms + self.steady_ms()

    def steady_ms(self) -> int:
        return 0 if self.loop is None else self.loop.now_ms()

    def placement(self, index: int) -> Placement:
        return Placement("t", UUID(int=1), index, 0, CONFIG)

    def find(self, key: PartitionKey) -> Placement | None:
        return self.placement(key[1]) if key[1] < self.count else None

    def partition(self, index: int = 0) -> Partition:
        return self.replicas.open(self.placement(index))

    def fill(self, index: int = 0, batches: int = 60) -> Partition:
        partition = self.partition(index)
        for number in range(batches):
            partition.append(plain_batch(f"{number}" * 30), self.now_ms)
        flush(partition)
        return partition

    def damage(self, offset: int, index: int = 0) -> tuple[str, int]:
        path, position = self.partition(index).local_log.position_of(offset)
        self.storage.flip_bit(path, position + 80)
        return path, position

    def again(self) -> World:
        self.scrubber.close()
        self.replicas.close()
        return World(self.storage, self.count, self.now_ms, self.made)

    def damaged(self) -> list[tuple[int, str, int]]:
        return [(each.index, *place) for each in self.replicas.damage for place in sorted(each.batches)]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for scrubber in made.made:
        scrubber.close()


async def test_a_pass_finds_damage_that_nobody_has_read_and_goes_on_behind_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = [world.fill(index).local_log.size_bytes for index in range(2)]
    places = [(0, *world.damage(7)), (0, *world.damage(40)), (1, *world.damage(59, index=1))]
    with caplog.at_level(logging.ERROR):
        await world.scrubber.scrub()
        await world.scrubber.scrub()
    assert world.damaged() == sorted(places)
    assert len(caplog.records) == 3, "each place is logged once"
    assert "'tidemill log repair'" in caplog.text
    counts = world.scrubber.counts
    assert counts.batches == 2 * (2 * 60 - 3)
    assert 2 * (sum(sizes) - 3 * 300) < counts.bytes_read < 2 * sum(sizes)
    assert counts.damaged_batches == 6
    assert world.scrubber.damaged_count == 3


async def test_sound_logs_are_read_whole_and_partitions_opened_for_it_are_closed_again(world: World) -> None:
    sizes = [world.fill(index).local_log.size_bytes for index in range(2)]
    again = world.again()
    await again.scrubber.scrub()
    assert again.damaged() == []
    assert (again.scrubber.counts.bytes_read, again.scrubber.counts.batches) == (sum(sizes), 120)
    assert len(again.replicas) == 0
    assert again.scrubber.progress.pass_ended_ms == again.now_ms


async def test_a_partition_that_is_in_use_stays_open_and_is_read_up_to_its_durable_end(world: World) -> None:
    partition = world.fill()
    durable = partition.local_log.size_bytes
    partition.append(plain_batch("not durable"), world.now_ms)
    await world.scrubber.scrub()
    assert world.scrubber.counts.bytes_read == durable
    assert list(world.replicas) == [partition]


async def test_batches_larger_than_a_chunk_are_checked_piece_by_piece(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubbing, "_CHUNK_BYTES", 100)
    world.fill()
    place = world.damage(11)
    await world.scrubber.scrub()
    assert world.damaged() == [(0, *place)]
    assert world.scrubber.counts.batches == 59


async def test_a_pass_goes_on_where_the_last_process_left_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubbing, "_STEP_BYTES", 1_000)
    total = sum(world.fill(index).local_log.size_bytes for index in range(2))
    await stop_after(world, lambda: world.scrubber.counts.batches >= 80)
    read = world.scrubber.counts.batches
    assert 80 <= read < 120
    assert world.scrubber.progress.partition == (UUID(int=1), 1)
    again = world.again()
    assert again.scrubber.progress == world.scrubber.progress
    assert again.scrubber.progress.due_in_ms(DAY, again.now_ms) == 0
    await again.scrubber.scrub()
    assert again.scrubber.counts.batches == 120 - read
    assert world.scrubber.counts.bytes_read + again.scrubber.counts.bytes_read == total


async def stop_after(world: World, reached: Callable[[], bool]) -> None:
    """Let a pass run until a state is reached, then cancel it as the stop of a node does."""
    task = asyncio.get_running_loop().create_task(world.scrubber.scrub())
    while not reached() and not task.done():  # noqa: ASYNC110 - a test waits for a state
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("harm", ["missing", "flipped", "nonsense"])
async def test_without_a_sound_note_of_progress_a_pass_begins_anew(world: World, harm: str) -> None:
    world.fill()
    await stop_after(world, lambda: world.scrubber.progress.offset > 0)
    assert world.scrubber.progress.offset > 0
    world.scrubber.close()
    if harm == "missing":
        world.storage.remove(PROGRESS_NAME)
    elif harm == "flipped":
        world.storage.flip_bit(PROGRESS_NAME, 15)
    else:
        world.storage.open(PROGRESS_NAME).truncate(3)
    again = world.again()
    assert again.scrubber.progress.partition is None
    await again.scrubber.scrub()
    assert again.scrubber.counts.batches == 60


async def test_damage_that_is_known_is_looked_at_again_after_a_start_and_forgotten_when_it_is_gone(
    world: World,
) -> None:
    partition = world.fill()
    path, position = world.damage(7)
    with pytest.raises(DamagedBatch):
        partition.read(7, 100, at_least_one=True)
    again = world.again()
    await started(again)
    assert again.damaged() == [(0, path, position)], "a reader had found it, and nobody has read since"
    world.storage.flip_bit(path, position + 80)
    third = again.again()
    await started(third)
    assert third.damaged() == []


async def started(world: World) -> None:
    """Begin the scrubber's task; it looks at what is known before it waits for anything."""
    task = asyncio.get_running_loop().create_task(world.scrubber.run())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def test_segments_that_are_deleted_or_replaced_meanwhile_do_no_harm(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubbing, "_STEP_BYTES", 1_000)
    partition = world.fill()
    real = Scrubber._read
    seen: list[int] = []

    def deleting(self: Scrubber, stretch: scrubbing._Stretch) -> object:
        # The thread is about to open the file: retention is faster.
        if len(seen) == 2:
            partition.local_log.discard(partition.local_log.move_start(30))
        seen.append(stretch.offset)
        return real(self, stretch)

    monkeypatch.setattr(Scrubber, "_read", deleting)
    await world.scrubber.scrub()
    assert world.damaged() == []
    assert world.scrubber.counts.errors == 0
    assert max(seen) > 30
    assert world.scrubber.progress.pass_ended_ms


async def test_a_file_that_changed_under_its_name_is_not_taken_for_damage(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = world.fill()
    first: Segment = partition.local_log.segments[0]
    _ = first.file
    real = Scrubber._check

    def swapped(self: Scrubber, file: object, stretch: scrubbing._Stretch) -> object:
        # As a compaction would: another content under the name, while the log reads through its own handle.
        other = world.storage.open(partition.local_log.segments[-1].log_path)
        return real(self, other, stretch)

    monkeypatch.setattr(Scrubber, "_check", swapped)
    await world.scrubber.scrub()
    assert world.damaged() == []


async def test_a_segment_that_cannot_be_read_is_left_out_and_counted(world: World) -> None:
    partition = world.fill()
    gone = partition.local_log.segments[1]
    _ = gone.file
    world.storage.remove(gone.log_path)
    await world.scrubber.scrub()
    assert world.scrubber.counts.errors == 1
    assert world.scrubber.counts.batches == 60 - (gone.next_offset - gone.base_offset)


async def test_a_node_without_partitions_waits_for_the_next_interval(world: World) -> None:
    world.count = 0
    await world.scrubber.scrub()
    assert world.scrubber.progress.due_in_ms(DAY, world.now_ms) == DAY


async def test_a_deleted_topic_ends_its_part_of_the_pass(world: World) -> None:
    world.fill(0)
    world.fill(1)
    world.damage(5, index=1)
    world.count = 1
    await world.scrubber.scrub()
    assert world.damaged() == []
    assert world.scrubber.counts.batches == 60


async def test_a_long_stretch_of_damage_is_noted_in_short_turns(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = world.fill(batches=800).local_log
    for segment in log.segments:
        segment.file.write(0, [bytes(segment.size_bytes)])
    turns = [0]
    count_damage = Scrubber._count_damage

    def counted(scrubber: Scrubber, log: PartitionLog, damage: DamagedBatch) -> None:
        turns[-1] += 1
        count_damage(scrubber, log, damage)

    monkeypatch.setattr(Scrubber, "_count_damage", counted)
    scrub = asyncio.ensure_future(world.scrubber.scrub())
    while not scrub.done():
        await asyncio.sleep(0)
        turns.append(0)
    await scrub
    assert sum(turns) > 3 * scrubbing._DAMAGE_PER_TURN_MAX
    assert max(turns) <= scrubbing._DAMAGE_PER_TURN_MAX


# --- the task, in virtual time


def test_a_clock_that_goes_back_delays_the_next_pass_by_one_interval_at_most() -> None:
    async def story() -> int:
        world = World(loop=current_loop(), now_ms=1_000 * DAY)
        world.fill()
        task = asyncio.ensure_future(world.scrubber.run())
        await asyncio.sleep(DAY_SECONDS / 2)
        world.now_ms -= 30 * DAY
        await asyncio.sleep(DAY_SECONDS + 60)
        task.cancel()
        return world.scrubber.counts.batches

    assert run_virtual(story, seed=1) == 60


def test_passes_follow_each_other_at_the_interval() -> None:
    async def story() -> list[int]:
        world = World(loop=current_loop())
        world.fill()
        task = asyncio.ensure_future(world.scrubber.run())
        counted = []
        for _ in range(4):
            counted.append(world.scrubber.counts.batches)
            await asyncio.sleep(DAY_SECONDS + 60)
        task.cancel()
        return counted

    assert run_virtual(story, seed=1) == [0, 60, 120, 180], "the first one after one interval"


def test_a_pass_reads_at_the_pace_that_is_set() -> None:
    bytes_per_second = 100

    async def story() -> None:
        world = World(loop=current_loop(), bytes_per_second=bytes_per_second)
        logs = [world.fill(index).local_log for index in range(2)]
        total, counts = sum(log.size_bytes for log in logs), world.scrubber.counts
        task = asyncio.ensure_future(world.scrubber.run())
        while not counts.bytes_read:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(1)
        began, read_before = current_loop().time(), counts.bytes_read
        while counts.bytes_read < total:
            await asyncio.sleep(1)
            allowed = (current_loop().time() - began) * bytes_per_second
            assert counts.bytes_read - read_before <= allowed + CONFIG.segment_bytes
        seconds = current_loop().time() - began
        assert seconds == pytest.approx((total - read_before) / bytes_per_second, rel=0.1)
        task.cancel()

    run_virtual(story, seed=1)
