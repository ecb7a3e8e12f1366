"""What a bucket does at its start when there is no state on disk, and whom it tells how far the fold is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from support.batches import plain_batch
from tidemill.errors import CorruptData, TableCode, TableError
from tidemill.kv.contract import KvLimits
from tidemill.kv.rocks.engine import make_engine
from tidemill.kv.rocks.store import RocksStore
from tidemill.log.epochs import EpochHistory
from tidemill.replication.rules.state import Role
from tidemill.tables.scanning.sessions import BucketKey
from tidemill.tables.state.bucket import Bucket


def empty_log(*, first_offset: int) -> Any:
    """A log that had records up to ``first_offset``, all of which were deleted."""
    return SimpleNamespace(
        topic="shop.orders",
        index=0,
        topic_id=UUID(int=7),
        failure=None,
        size_bytes=0,
        config=SimpleNamespace(compacts=True, deletes=True),
        log_start_offset=first_offset,
        log_end_offset=first_offset,
        has_reached_epoch_start=True,
        last_stable_offset=first_offset,
        compacted_offset=0,
        epochs=EpochHistory([(0, 0)]),
        role=Role.LEADER,
        subscribe=lambda key, wake: None,
        unsubscribe=lambda key: None,
    )


@asynccontextmanager
async def opened(directory: Path, log: Any) -> AsyncIterator[Bucket]:
    no_table: Callable[[], Any] = pytest.fail
    engine = make_engine(KvLimits(1 << 20, 1 << 20), lambda error: False)
    with ThreadPoolExecutor(1) as threads:
        bucket = Bucket(
            BucketKey(1, 0, 0),
            no_table,
            log,
            directory,
            engine,
            threads,
            threads,
            lambda: 0,
            lambda: 0,
            max_decompressed_bytes=1,
        )
        bucket.start()
        yield bucket
        await bucket.close()


async def test_a_log_from_its_first_record_on_is_enough(tmp_path: Path) -> None:
    async with opened(tmp_path / "bucket", empty_log(first_offset=0)) as bucket:
        await bucket.ready(0, 120)
        assert bucket.applied_offset == 0


async def test_a_log_whose_first_records_were_deleted_is_not_taken_for_the_whole_table(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path / "bucket", empty_log(first_offset=5)) as bucket:
        with pytest.raises(TableError, match="cannot be rebuilt") as caught:
            await bucket.ready(0, 120)
        assert caught.value.table_code is TableCode.state_damaged


def log_of_batches() -> tuple[Any, Callable[[int], None]]:
    """A log with one record at each offset, and what makes the offsets below some other one stable."""
    log = empty_log(first_offset=0)
    wakes: list[Callable[[], None]] = []
    log.subscribe = lambda key, wake: wakes.append(wake)
    log.read = lambda *_, **__: plain_batch("row")
    log.aborted_in = lambda data: []

    def grow(end: int) -> None:
        log.log_end_offset = log.last_stable_offset = end
        for wake in wakes:
            wake()

    return log, grow


async def test_whoever_waits_for_an_offset_need_not_wait_for_all_that_is_folded_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()

    def fold_one(bucket: Bucket, store: RocksStore, *_: object) -> None:
        if store.applied_offset == 5:
            assert held.wait(120)
        store.write([], [], [], store.applied_offset + 1)

    monkeypatch.setattr(Bucket, "_fold_step", fold_one)
    log, grow = log_of_batches()
    async with opened(tmp_path / "bucket", log) as bucket:
        await bucket.ready(0, 120)
        grow(10)
        try:
            await bucket.ready(3, 10)
            assert bucket.applied_offset <= 5
        finally:
            held.set()
        await bucket.ready(10, 120)


async def test_state_that_was_given_up_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, noting = threading.Event(), threading.Event()

    def note_damage(bucket: Bucket, error: CorruptData) -> None:
        noting.set()
        assert held.wait(120)

    monkeypatch.setattr(Bucket, "_note_damage", note_damage)
    async with opened(tmp_path / "bucket", empty_log(first_offset=0)) as bucket:
        await bucket.ready(0, 120)
        giving_up = asyncio.ensure_future(
            bucket.give_up_state(CorruptData("a bit has flipped", path="x", position=0))
        )
        try:
            assert await asyncio.to_thread(noting.wait, 120)
            with pytest.raises(TableError, match="not yet at 0"):
                await bucket.ready(-1, 0.01)
        finally:
            held.set()
        await giving_up
        await bucket.ready(-1, 120)
        assert bucket.store.applied_offset == 0
