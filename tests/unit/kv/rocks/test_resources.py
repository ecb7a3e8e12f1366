"""Many stores share one budget: the largest memtable is flushed, not whichever is written to."""

from __future__ import annotations

import os
from pathlib import Path

from support.processes import wait_until
from tidemill.kv.rocks.resources import RocksResources
from tidemill.kv.rocks.store import RocksStore

BUDGET = 4 << 20
_FLUSHES = ("num-immutable-mem-table", "mem-table-flush-pending", "num-running-flushes")


def number_of(store: RocksStore, name: str) -> int:
    return int(store._database.property_value(f"rocksdb.{name}"))


def files_of(store: RocksStore) -> int:
    return number_of(store, "num-files-at-level0")


def let_flushes_end(stores: list[RocksStore]) -> None:
    """RocksDB flushes in threads of its own. While one is late, its memory counts, and more is flushed."""
    wait_until(
        lambda: not any(number_of(store, name) for store in stores for name in _FLUSHES),
        "no memtable waits to be flushed",
    )


def test_a_store_with_few_rows_is_not_flushed_again_and_again(tmp_path: Path) -> None:
    resources = RocksResources(
        block_cache_bytes=1 << 20,
        write_buffer_bytes=BUDGET,
        store_buffer_bytes=BUDGET,
        open_files_per_store=20,
    )
    stores = [RocksStore.open(tmp_path / str(number), resources, b"id") for number in range(5)]
    busy, idle = stores[0], stores[1:]
    # The idle ones take most of the budget, and then one small write after the other goes to the busy one.
    for offset in range(90):
        for store in idle:
            store.write([b"%d" % offset], [os.urandom(8_000)], [], offset)
            let_flushes_end(stores)
    for offset in range(300):
        busy.write([b"%d" % offset], [os.urandom(2_000)], [], offset)
        let_flushes_end(stores)
    assert files_of(busy) <= 2
    assert sum(files_of(store) for store in idle) >= 1
    assert resources.memory_bytes()[1] < BUDGET
    for store in stores:
        store.close()
    assert resources.memory_bytes()[1] < BUDGET // 8


def test_many_stores_with_few_rows_each_do_not_use_up_the_budget(tmp_path: Path) -> None:
    resources = RocksResources(block_cache_bytes=1 << 20, write_buffer_bytes=64 << 20)
    stores = [RocksStore.open(tmp_path / str(number), resources, b"id") for number in range(24)]
    for store in stores:
        store.write([b"k"], [os.urandom(5_000)], [], 1)
    assert 24 * 5_000 < resources.memory_bytes()[1] < 24 * (160 << 10)
    for store in stores:
        store.close()


def test_a_store_that_is_forgotten_without_being_closed_does_not_count(tmp_path: Path) -> None:
    resources = RocksResources(block_cache_bytes=1 << 20, write_buffer_bytes=1 << 20)
    RocksStore.open(tmp_path / "forgotten", resources, b"id").write([b"k"], [b"v"], [], 1)
    resources.relieve()
    with RocksStore.open(tmp_path / "forgotten", resources, b"id") as store:
        assert store.get_many([b"k"]) == [b"v"]
