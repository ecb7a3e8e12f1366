"""Resources that all stores of a node share, and the options that each of them is opened with.

- One block cache, which also holds indexes and filters, and one budget for memtables: memory does not grow
  with the number of stores. An open store that is idle takes about 0.2 MB and seven file descriptors.
- RocksDB applies the budget to the store that happens to be written to, which would flush its few rows again
  and again while others sit on full memtables. ``relieve`` flushes the largest memtable before that point.
- LZ4 on all levels: an iterator holds Python's lock while it decompresses, and zstd would save a sixth of the
  disk space for an eighth more time.
- No write-ahead log: the table's log is it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from rocksdict import (
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    Env,
    Options,
    ReadOptions,
    WriteBufferManager,
    WriteOptions,
)

from tidemill.errors import DiskFull

__all__ = ("Memtables", "RocksResources")

_BLOCK_BYTES = 16 << 10
_BLOOM_BITS_PER_KEY = 10
#: Memtables grow in steps of this size, and the budget counts whole steps. With RocksDB's own choice, 1 MB,
#: 256 stores with one row each would fill the budget.
_ARENA_STEP_BYTES = 64 << 10
#: A file that has a window of that many rows of which half are deletions is compacted early: a scan holds
#: Python's lock while it skips them.
_DELETIONS_WINDOW, _DELETIONS_TRIGGER, _DELETIONS_RATIO = 8192, 4096, 0.5
_NOTES_BYTES_MAX = 1 << 20
#: RocksDB starts its list of files anew at this size, so that an open store reads little.
_MANIFEST_BYTES_MAX = 4 << 20


class Memtables(Protocol):
    """A store as the shared memory of all stores sees it: the size of its memtable, and a flush."""

    def memtable_bytes(self) -> int:
        """The size of the memtable that takes the writes."""
        ...

    def start_flush(self) -> None:
        """Start to flush in the background."""
        ...

    def pause_compactions(self, paused: bool) -> None:
        """Pause compactions, or resume them."""
        ...


class RocksResources:
    """Caches, memory budget and options that all stores of a node share. Thread-safe."""

    def __init__(
        self,
        *,
        block_cache_bytes: int,
        write_buffer_bytes: int,
        store_buffer_bytes: int = 16 << 20,
        open_files_per_store: int = 48,
        give_up_reserve: Callable[[DiskFull], bool] = lambda error: False,
    ) -> None:
        #: Called when state could not be opened because the disk is full; True if it freed something.
        self.give_up_reserve = give_up_reserve
        #: Whether new stores start with compactions paused; ``tell_stores_of_pause`` tells those that are
        #: open.
        self.compactions_paused = False
        self._env = Env()
        # Compactions can wait; a thread that holds Python's lock cannot.
        self._env.lower_thread_pool_cpu_priority()
        self._cache = Cache(block_cache_bytes)
        # Never stalling: a stalled write holds Python's lock, and with it the whole node.
        self._manager = WriteBufferManager(write_buffer_bytes, False)
        self._write_buffer_bytes = write_buffer_bytes
        self._store_buffer_bytes = min(store_buffer_bytes, max(write_buffer_bytes // 4, _ARENA_STEP_BYTES))
        self._open_files_per_store = open_files_per_store
        self._stores: weakref.WeakSet[Memtables] = weakref.WeakSet()
        self._lock = threading.Lock()

    def memory_bytes(self) -> tuple[int, int]:
        """Memory of the block cache and of the memtables, also of those that only a view keeps."""
        return self._cache.get_usage(), self._manager.get_usage()

    def options(self, *, open_files: int | None = None) -> Any:
        """A fresh set of RocksDB options for one store."""
        options = Options(raw_mode=True)
        options.set_env(self._env)
        options.create_if_missing(False)
        options.set_paranoid_checks(True)
        options.set_block_based_table_factory(self._table_options())
        options.set_compression_type(DBCompressionType.lz4())
        options.set_write_buffer_manager(self._manager)
        options.set_write_buffer_size(self._store_buffer_bytes)
        options.set_arena_block_size(min(_ARENA_STEP_BYTES, self._store_buffer_bytes // 8))
        options.set_max_write_buffer_number(4)
        # Above RocksDB's own bounds: a flush, and with it a snapshot, waits until it would cross neither.
        options.set_level_zero_slowdown_writes_trigger(30)
        options.set_level_zero_stop_writes_trigger(50)
        options.set_max_background_jobs(2)
        options.set_disable_auto_compactions(self.compactions_paused)
        options.set_max_open_files(open_files or self._open_files_per_store)
        # By default sixteen threads are started and waited for, while Python's lock is held.
        options.set_max_file_opening_threads(1)
        options.set_table_cache_num_shard_bits(0)
        options.set_skip_stats_update_on_db_open(True)
        # Deleting files and freeing memtables is left to background threads, which do not hold Python's lock.
        options.set_avoid_unnecessary_blocking_io(True)
        options.add_compact_on_deletion_collector_factory(
            _DELETIONS_WINDOW, _DELETIONS_TRIGGER, _DELETIONS_RATIO
        )
        options.set_max_manifest_file_size(_MANIFEST_BYTES_MAX)
        options.set_keep_log_file_num(2)
        options.set_max_log_file_size(_NOTES_BYTES_MAX)
        options.set_stats_dump_period_sec(0)
        options.set_stats_persist_period_sec(0)
        return options

    def _table_options(self) -> Any:
        table = BlockBasedOptions()
        table.set_block_cache(self._cache)
        table.set_block_size(_BLOCK_BYTES)
        # The first version whose files have a checksum over their footer and know their own name.
        table.set_format_version(6)
        table.set_bloom_filter(_BLOOM_BITS_PER_KEY, False)
        table.set_cache_index_and_filter_blocks(True)
        table.set_pin_l0_filter_and_index_blocks_in_cache(True)
        return table

    @staticmethod
    def write_options() -> Any:
        """Options of writes: no write-ahead log; a stall is an error, since waiting holds Python's lock."""
        options: Any = WriteOptions()  # its stub takes the property for a method
        options.disable_wal = True
        options.no_slowdown = True
        return options

    @staticmethod
    def scan_options() -> Any:
        """Options of iterators: what a scan reads once does not push out what look-ups use."""
        options: Any = ReadOptions()  # its stub lacks an argument
        options.fill_cache(False)
        options.set_verify_checksums(True)
        options.set_background_purge_on_iterator_cleanup(True)
        return options

    def add(self, store: Memtables) -> None:
        """Let ``relieve`` flush a store, until it is removed or garbage-collected."""
        with self._lock:
            self._stores.add(store)

    def remove(self, store: Memtables) -> None:
        with self._lock:
            self._stores.discard(store)

    def tell_stores_of_pause(self) -> None:
        """Tell the open stores to pause compactions, or to resume them. Slow: runs in a thread."""
        with self._lock:
            stores = list(self._stores)
        for store in stores:
            store.pause_compactions(self.compactions_paused)

    def relieve(self) -> None:
        """Flush the largest memtable if the budget is nearly used up. Call after every write.

        The two bounds keep a distance from RocksDB's own (seven eighths of the budget in memtables that take
        writes, or all of it with half of it in those). Memtables that only a view keeps alive count in the
        first bound only: flushing does not free them.
        """
        if self._manager.get_usage() < self._write_buffer_bytes * 5 // 8:
            return
        with self._lock:
            stores = [(store.memtable_bytes(), store) for store in self._stores]
        if sum(size for size, _ in stores) >= self._write_buffer_bytes * 3 // 8:
            max(stores, key=lambda entry: entry[0])[1].start_flush()
