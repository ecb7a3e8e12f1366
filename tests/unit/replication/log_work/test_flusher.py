"""The real flusher with its threads, over a disk in memory that can be held up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import UUID

import pytest

from support.batches import plain_batch
from support.faulty_storage import FaultyStorage
from support.leadership import led
from tidemill.config.topic import TopicConfig
from tidemill.coordination.clock import wall_clock_ms
from tidemill.coordination.pools import thread_pool
from tidemill.errors import StorageError, SyncFailed, TidemillError, TooManyFiles
from tidemill.log.recovery import open_log
from tidemill.replication.coordinator_log import wait_committed
from tidemill.replication.log_work import flusher as flusher_module
from tidemill.replication.log_work.flusher import Flusher
from tidemill.replication.partition import Partition


@pytest.fixture
async def flusher() -> AsyncIterator[Flusher]:
    made = Flusher(asyncio.get_running_loop(), thread_pool("flush", 2))
    yield made
    made.close()


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage()


Make = Callable[..., Partition]


@pytest.fixture
def make(flusher: Flusher, storage: FaultyStorage) -> Make:
    def build(index: int = 0, **config: Any) -> Partition:
        log, _ = open_log(storage, f"logs/t/{index}", TopicConfig(**config))
        return Partition(
            "t",
            UUID(int=1),
            index,
            log,
            assignment=led(0),
            request_flush=flusher.request,
            max_decompressed_bytes=10**6,
        )

    return build


def append(partition: Partition) -> int:
    return partition.append(plain_batch("v"), wall_clock_ms()).last_offset + 1


def hold(storage: FaultyStorage) -> tuple[threading.Event, threading.Event]:
    """The next sync waits: (it has begun, it may go on)."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(120)

    storage.before_next("sync", ".log", wait)
    return begun, go_on


async def test_appends_of_one_turn_share_a_flush(flusher: Flusher, make: Make) -> None:
    partition = make()
    end = max(append(partition) for _ in range(5))
    await wait_committed(partition, end)
    assert flusher.flush_count == 1
    assert not partition.is_dirty


async def test_what_comes_during_a_flush_is_taken_by_the_next_one(
    flusher: Flusher, make: Make, storage: FaultyStorage
) -> None:
    partition = make()
    begun, go_on = hold(storage)
    first = wait_committed(partition, append(partition))
    await asyncio.to_thread(begun.wait, 120)
    later = [wait_committed(partition, append(partition)) for _ in range(5)]
    assert partition.high_watermark == 0
    go_on.set()
    await asyncio.gather(first, *later)
    assert flusher.flush_count == 2
    assert partition.high_watermark == 6


async def test_partitions_are_flushed_side_by_side(
    flusher: Flusher, make: Make, storage: FaultyStorage
) -> None:
    slow, fast = make(0), make(1)
    begun, go_on = hold(storage)
    waiting = wait_committed(slow, append(slow))
    await asyncio.to_thread(begun.wait, 120)
    await wait_committed(fast, append(fast))
    assert not waiting.done()
    go_on.set()
    await waiting


@pytest.mark.parametrize("error", [SyncFailed("on purpose"), ValueError("a bug")])
async def test_an_error_stops_the_partition_and_no_other(
    flusher: Flusher, make: Make, storage: FaultyStorage, error: Exception
) -> None:
    partition, other = make(0), make(1)
    await wait_committed(partition, append(partition))
    storage.fail_next("sync", "logs/t/0/", error)
    with pytest.raises(StorageError):
        await wait_committed(partition, append(partition))
    with pytest.raises(StorageError):
        append(partition)
    await wait_committed(other, append(other))
    await flusher.drain([partition, other])


async def test_a_waiter_that_raises_does_not_hang_the_drain(
    flusher: Flusher, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    partition = make()

    def broken(error: TidemillError | None) -> None:
        raise KeyError("a bug in a waiter")

    partition.when_committed(append(partition), broken)
    await asyncio.wait_for(flusher.drain([partition]), 120)
    assert partition.high_watermark == 1


async def test_flush_ms_delays_a_flush_and_a_waiter_brings_it_forward(flusher: Flusher, make: Make) -> None:
    partition = make(flush_ms=60_000)
    end = append(partition)
    await asyncio.sleep(0.01)
    assert flusher.flush_count == 0
    await asyncio.wait_for(wait_committed(partition, end), 120)
    assert flusher.flush_count == 1


async def test_flush_messages_brings_a_delayed_flush_forward(flusher: Flusher, make: Make) -> None:
    partition = make(flush_messages=2)
    append(partition)
    await asyncio.sleep(0.01)
    assert flusher.flush_count == 0
    reached = asyncio.Event()
    partition.subscribe("reader", reached.set)
    append(partition)
    await asyncio.wait_for(reached.wait(), 120)
    assert partition.high_watermark == 2


async def test_a_delayed_flush_comes_by_itself(flusher: Flusher, make: Make) -> None:
    partition = make(flush_ms=1)
    reached = asyncio.Event()
    partition.subscribe("reader", reached.set)
    append(partition)
    await asyncio.wait_for(reached.wait(), 120)
    assert partition.high_watermark == 1


async def test_a_delayed_flush_comes_by_itself_after_the_clock_was_set_back(
    flusher: Flusher, make: Make
) -> None:
    partition = make(flush_ms=1)
    reached = asyncio.Event()
    partition.subscribe("reader", reached.set)
    # By the clock as it was then; it was set back by an hour before the flush was planned.
    partition.append(plain_batch("v"), wall_clock_ms() + 3_600_000)
    await asyncio.wait_for(reached.wait(), 120)
    assert partition.high_watermark == 1


async def test_drain_flushes_everything_delayed_or_not(
    flusher: Flusher, make: Make, storage: FaultyStorage
) -> None:
    partitions = [make(0), make(1, flush_ms=10**9), make(2, flush_messages=10**6)]
    for partition in partitions:
        append(partition)
    begun, go_on = hold(storage)
    draining = asyncio.get_running_loop().create_task(flusher.drain(partitions))
    await asyncio.to_thread(begun.wait, 120)
    assert not draining.done()
    go_on.set()
    await asyncio.wait_for(draining, 120)
    assert [partition.high_watermark for partition in partitions] == [1, 1, 1]


async def test_drain_of_nothing_returns(flusher: Flusher, make: Make) -> None:
    await asyncio.wait_for(flusher.drain([make()]), 120)


@pytest.mark.parametrize(("call", "path"), [("sync_dir", "logs/t/0"), ("open", "leader-epochs")])
async def test_a_flush_that_could_open_no_file_is_tried_again(
    make: Make, storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch, call: str, path: str
) -> None:
    monkeypatch.setattr(flusher_module, "_RETRY_SECONDS", 0.0)
    partition = make()
    offset = append(partition)
    storage.fail_next(call, path, TooManyFiles("too many open files"))
    before = len(storage.calls)
    await asyncio.wait_for(wait_committed(partition, offset), 120)
    assert partition.failure is None
    tries = [number for number, each in enumerate(storage.calls) if each[0] == call and path in each[1]]
    tries = [number for number in tries if number >= before]
    synced = storage.calls.index(("sync", partition.segments[0].log_path))
    assert len(tries) >= 2, "what was left undone is done later"
    assert call != "sync_dir" or tries[1] < synced, "names before data, also at the second try"
    log, _ = open_log(storage.crash(), "logs/t/0", TopicConfig())
    assert (log.end_offset, log.epochs.latest_epoch) == (1, 0)
