"""The compactor: which partitions, in which order, and what it does about trouble."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from uuid import UUID, uuid4

import pytest

from support.compacting import consume, flush, keyed, seal, write
from support.faulty_storage import FaultyStorage
from support.leadership import follower_flushed, led
from tidemill.config.topic import TopicConfig
from tidemill.coordination.pools import thread_pool
from tidemill.errors import CorruptData, StorageError, TidemillError
from tidemill.log.recovery import open_log
from tidemill.replication.log_work.compactor import Compactor
from tidemill.replication.partition import Partition

COMPACT = TopicConfig(cleanup_policy=frozenset({"compact"}), segment_bytes=1_000)


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage(random.Random(1))


@pytest.fixture
def compactor(storage: FaultyStorage) -> Iterator[Compactor]:
    made = Compactor(
        storage,
        thread_pool("compact", 1),
        map_bytes=1 << 16,
        bytes_per_second=0,
        max_decompressed_bytes=1 << 20,
        clock_ms=lambda: 10_000,
    )
    yield made
    made.close()


def make_partition(
    storage: FaultyStorage,
    name: str,
    *,
    batches: int,
    config: TopicConfig = COMPACT,
    topic_id: UUID | None = None,
    followers: tuple[int, ...] = (),
) -> Partition:
    log, _ = open_log(storage, name, config)
    for number in range(batches):
        write(log, keyed(f"k{number % 2}", f"{name}-{number}" * 5))
    if batches:
        seal(log)
    return Partition(
        name,
        topic_id or uuid4(),
        0,
        log,
        request_flush=lambda _: None,
        max_decompressed_bytes=1 << 20,
        assignment=led(0, followers),
    )


def offsets(partition: Partition) -> list[int]:
    return [record.offset for record in consume(partition.local_log, committed=True)]


async def test_it_compacts_what_is_due_and_counts_it(storage: FaultyStorage, compactor: Compactor) -> None:
    partition = make_partition(storage, "a", batches=40)
    before = partition.local_log.size_bytes
    await compactor.compact([partition])
    assert offsets(partition) == [38, 39]
    counts = compactor.counts
    assert (counts.runs, counts.records_in, counts.records_kept) == (1, 40, 2)
    assert counts.bytes_in > before
    assert counts.bytes_out == sum(segment.size_bytes for segment in partition.local_log.segments)
    assert 0 < counts.last_ratio < 0.5
    assert counts.last_run_ms == 10_000


async def test_it_leaves_other_topics_alone(storage: FaultyStorage, compactor: Compactor) -> None:
    partition = make_partition(storage, "a", batches=10, config=TopicConfig(segment_bytes=1_000))
    empty = make_partition(storage, "b", batches=0)
    await compactor.compact([partition, empty])
    assert compactor.counts.runs == 0


async def test_what_is_clean_is_not_compacted_again(storage: FaultyStorage, compactor: Compactor) -> None:
    partition = make_partition(storage, "a", batches=40)
    await compactor.compact([partition])
    await compactor.compact([partition])
    assert compactor.counts.runs == 1


async def test_the_dirtiest_partition_comes_first(storage: FaultyStorage, compactor: Compactor) -> None:
    half = make_partition(storage, "half", batches=40)
    await compactor.compact([half])
    for number in range(3):
        write(half.local_log, keyed(f"new{number}", "x" * 300))
    seal(half)
    assert 0.5 <= (half.compaction_due(10_000) or 0) < 1
    whole = make_partition(storage, "whole", batches=40)
    storage.calls.clear()
    await compactor.compact([half, whole])
    written = [path for call, path in storage.calls if call == "open" and path.endswith(".log.cleaned")]
    assert written[0].startswith("whole/")
    assert {path.partition("/")[0] for path in written} == {"half", "whole"}


async def test_keys_that_do_not_fit_are_compacted_in_several_runs(storage: FaultyStorage) -> None:
    compactor = Compactor(
        storage,
        thread_pool("compact", 1),
        map_bytes=1,
        bytes_per_second=0,
        max_decompressed_bytes=1 << 20,
        clock_ms=lambda: 10_000,
    )
    log, _ = open_log(storage, "a", COMPACT)
    for number in range(100):
        write(log, keyed(f"k{number % 50}", str(number)))
    seal(log)
    partition = Partition(
        "a", uuid4(), 0, log, assignment=led(0), request_flush=lambda _: None, max_decompressed_bytes=1 << 20
    )
    await compactor.compact([partition])
    compactor.close()
    assert offsets(partition) == list(range(50, 100))
    assert compactor.counts.runs > 1


async def test_the_floor_is_respected(storage: FaultyStorage, compactor: Compactor) -> None:
    partition = make_partition(storage, "a", batches=40)
    floor = partition.local_log.segments[2].base_offset
    partition.retention_floor = lambda: floor
    await compactor.compact([partition])
    assert offsets(partition) == [floor - 2, floor - 1, *range(floor, 40)]


async def test_a_record_above_the_high_watermark_displaces_none_that_is_committed(
    storage: FaultyStorage, compactor: Compactor
) -> None:
    """All of it is on this disk, but what is not committed may be cut: then an older one is the newest."""
    partition = make_partition(storage, "a", batches=40, followers=(2,))
    await compactor.compact([partition])
    assert offsets(partition) == list(range(40))
    committed = partition.local_log.segments[2].base_offset
    follower_flushed(partition, 2, committed)
    await compactor.compact([partition])
    assert offsets(partition) == [committed - 2, committed - 1, *range(committed, 40)]
    follower_flushed(partition, 2, 40)
    await compactor.compact([partition])
    assert offsets(partition) == [38, 39]


async def test_damage_is_reported_once_and_the_others_go_on(
    storage: FaultyStorage, compactor: Compactor
) -> None:
    damaged = make_partition(storage, "a", batches=40)
    sound = make_partition(storage, "b", batches=40)
    storage.flip_bit(damaged.local_log.segments[0].log_path, 80)
    names = storage.list_dir("a")
    await compactor.compact([damaged, sound])
    await compactor.compact([damaged, sound])
    (error,) = compactor.counts.damaged.values()
    assert isinstance(error, CorruptData)
    assert storage.list_dir("a") == names
    assert offsets(sound) == [38, 39]


async def test_a_full_disk_is_tried_again_later(storage: FaultyStorage, compactor: Compactor) -> None:
    partition = make_partition(storage, "a", batches=40)
    storage.capacity_bytes = storage.used_bytes + 10
    await compactor.compact([partition])
    assert compactor.counts.runs_given_up == 1
    assert len(offsets(partition)) == 40
    storage.capacity_bytes = None
    await compactor.compact([partition])
    assert offsets(partition) == [38, 39]


async def test_a_partition_that_is_stopped_meanwhile_ends_the_run(
    storage: FaultyStorage, compactor: Compactor
) -> None:
    partition = make_partition(storage, "a", batches=40)
    storage.before_next(
        "read", ".log", lambda: partition.local_log.fail(StorageError("the topic was deleted"))
    )
    await compactor.compact([partition])
    assert compactor.counts.runs == 0
    assert not any(name.endswith(".cleaned") for name in storage.list_dir("a"))


async def test_a_failed_sync_in_a_swap_stops_the_partition(
    storage: FaultyStorage, compactor: Compactor
) -> None:
    partition = make_partition(storage, "a", batches=40)
    told: list[TidemillError | None] = []
    write(partition.local_log, keyed("a", "b"))
    partition.when_committed(41, told.append)
    storage.before_next("rename", ".log.cleaned", lambda: storage.fail_next("sync_dir", "a"))
    await compactor.compact([partition])
    assert partition.local_log.failure is not None
    assert told == [partition.local_log.failure]
    again, _ = open_log(storage.crash(), "a", COMPACT)
    assert [record.offset for record in consume(again, committed=True)][-1] >= 39


async def test_deleting_a_topic_waits_for_the_run_that_reads_it(
    storage: FaultyStorage, compactor: Compactor
) -> None:
    partition = make_partition(storage, "a", batches=40)
    reading, go_on = threading.Event(), threading.Event()

    def stop_here() -> None:
        reading.set()
        assert go_on.wait(120)

    storage.before_next("read", ".log", stop_here)
    task = asyncio.create_task(compactor.compact([partition]))
    await asyncio.to_thread(reading.wait, 120)
    waiting = asyncio.create_task(asyncio.to_thread(compactor.wait_until_off, partition.topic_id))
    await asyncio.to_thread(compactor.wait_until_off, uuid4())  # Another topic need not wait.
    assert not waiting.done()
    partition.local_log.fail(StorageError("the topic was deleted"))
    go_on.set()
    await waiting
    await task


async def test_records_that_have_waited_too_long_are_compacted_without_a_full_segment(
    storage: FaultyStorage, compactor: Compactor
) -> None:
    config = TopicConfig(cleanup_policy=frozenset({"compact"}), max_compaction_lag_ms=5_000)
    partition = make_partition(storage, "a", batches=0, config=config)
    for number in range(3):
        write(partition.local_log, keyed("k", str(number)), now_ms=5_000)
    flush(partition)
    await compactor.compact([partition])
    flush(partition)  # The roll asked for it; a real flusher had begun by itself.
    await compactor.compact([partition])
    assert offsets(partition) == [2]
