"""From batches of a table's log to writes of its state. Blocking: runs in threads, in bounded pieces."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import cast

import numpy as np
import pyarrow as pa

from tidemill.errors import ApiError, StorageError, TableCode, TableError
from tidemill.kv.contract import KvStore, WriteStalled
from tidemill.log.pace import Pace
from tidemill.log.producer_state.transactions import AbortedTransaction
from tidemill.log.segments.segment_reader import ReadBudget
from tidemill.records.batch import HEADER_BYTES, BatchHeader, parse_header
from tidemill.records.columns import compute as pc
from tidemill.records.columns.read import read_columns
from tidemill.replication.partition import Partition
from tidemill.replication.rules.state import Role
from tidemill.tables.definition import TableDefinition
from tidemill.tables.state.changes import Changes, prepare, state_values

__all__ = ("PreparedChanges", "apply", "fold_batches", "read_for_fold", "until_taken")

#: How many bytes of the log, and how many batches, one step of a fold reads: it does so on the event loop.
#: While the step is folded, other buckets and the checks of batches wait for the thread.
_STEP_BYTES = 256 * 1024
_STEP_BATCHES = 500
#: How many rows, and bytes of rows, are written to the engine at a time: Python's lock is held while rows are
#: made of Arrow's columns, and by the write.
_WRITE_ROWS = 500
_WRITE_BYTES = 1024 * 1024
#: How long a fold pauses when the engine takes no writes, and for how long one step does so in all.
_STALL_PAUSE_SECONDS = 0.005
_STALL_SECONDS_MAX = 60.0


class PreparedChanges:
    """Cache of changes that the leader worked out before an append: the newest ``limit_bytes`` of them.

    What is not here any more is worked out again from the log. Thread-safe.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        #: By base offset: the leader epoch of the batch, and its changes.
        self._changes: OrderedDict[int, tuple[int, Changes]] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()

    def put(self, changes: Changes, leader_epoch: int) -> None:
        """Keep the changes of a batch of this epoch, with their offsets, if there is capacity for them."""
        with self._lock:
            base_offset = int(changes.offsets[0])
            if (earlier := self._changes.pop(base_offset, None)) is not None:
                self._size_bytes -= earlier[1].size_bytes
            self._changes[base_offset] = leader_epoch, changes
            self._size_bytes += changes.size_bytes
            while self._size_bytes > self._limit_bytes:
                self._size_bytes -= self._changes.popitem(last=False)[1][1].size_bytes

    def take(self, header: BatchHeader) -> Changes | None:
        """The changes of a batch, if they are here and the batch is as it was appended."""
        with self._lock:
            kept = self._changes.pop(header.base_offset, None)
            if kept is None:
                return None
            leader_epoch, changes = kept
            self._size_bytes -= changes.size_bytes
            is_same = (leader_epoch, len(changes.offsets)) == (header.leader_epoch, header.record_count)
            return changes if is_same else None


def read_for_fold(log: Partition, offset: int) -> tuple[bytes, list[AbortedTransaction]]:
    """Whole batches of the log from ``offset`` on, up to what is stable here; on the event loop."""
    read = log.as_follower.read if log.role is Role.FOLLOWER else log.read
    try:
        budget = ReadBudget(_STEP_BATCHES)
        data = read(offset, _STEP_BYTES, at_least_one=True, committed=True, budget=budget)
        return bytes(data), log.aborted_in(data)
    except StorageError as error:
        # Not an error of the state, which is as valid as before.
        raise TableError(
            TableCode.state_damaged, f"the log of {log.topic}-{log.index} cannot be read: {error}"
        ) from error


def fold_batches(
    store: KvStore,
    table: TableDefinition,
    data: bytes,
    aborted: list[AbortedTransaction],
    goal: int,
    prepared: PreparedChanges,
    *,
    max_decompressed_bytes: int,
    is_stopped: Callable[[], bool],
) -> int:
    """Fold the whole batches in ``data`` up to the goal; gives the number of rows put or deleted.

    The log's reader has checked their checksums.
    """
    position = rows = 0
    while position + HEADER_BYTES <= len(data) and not is_stopped():
        header = parse_header(data, position)
        if header.base_offset >= goal or position + header.size_bytes > len(data):
            break
        batch = memoryview(data)[position : position + header.size_bytes]
        position += header.size_bytes
        if header.next_offset <= store.applied_offset:
            continue
        changes = prepared.take(header)
        if header.is_control or header.record_count == 0 or _is_aborted(header, aborted):
            store.write([], [], [], header.next_offset, header.leader_epoch)
            continue
        if changes is None:
            changes = _changes_of(table, batch, header, max_decompressed_bytes)
        apply(store, changes, header.next_offset, header.leader_epoch)
        rows += len(changes.state_keys)
    return rows


def apply(store: KvStore, changes: Changes, next_offset: int, leader_epoch: int = -1) -> None:
    """Write the changes of a batch in several writes; after each, the state equals the log's at an offset.

    ``leader_epoch`` is that of the batch; -1 if it is not known.
    """
    all_keys, all_values, offsets = changes.state_keys, state_values(changes), changes.offsets
    # Other threads may go on in a pause, as soon as they could otherwise only after Python's switch interval.
    pace = Pace(sleep=time.sleep)
    # After a crash the state may be in the middle of a batch.
    begun = int(np.searchsorted(offsets, store.applied_offset))
    for first, behind in _pieces(all_values, begun):
        keys: list[bytes] = all_keys.slice(first, behind - first).to_pylist()
        values: list[bytes | None] = all_values.slice(first, behind - first).to_pylist()
        # If a key has several changes, the last one counts.
        latest = dict(zip(keys, values, strict=True))
        deleted = [key for key, value in latest.items() if value is None]
        put = {key: value for key, value in latest.items() if value is not None} if deleted else latest
        reached = next_offset if behind == len(offsets) else int(offsets[behind])
        store.write(put.keys(), cast("Collection[bytes]", put.values()), deleted, reached, leader_epoch)
        pace.breathe()
    if store.applied_offset < next_offset:
        store.write([], [], [], next_offset, leader_epoch)


async def until_taken(step: Callable[[], Awaitable[None]]) -> None:
    """Await a step of a fold, which begins again where it ended, until the engine has taken all of it.

    The wait is here, and not in the thread: what others want of the thread must not wait for this engine.
    """
    waited_seconds = 0.0
    while True:
        try:
            return await step()
        except WriteStalled:
            if waited_seconds >= _STALL_SECONDS_MAX:
                raise
        await asyncio.sleep(_STALL_PAUSE_SECONDS)
        waited_seconds += _STALL_PAUSE_SECONDS


def _pieces(values: pa.BinaryArray, begun: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows from ``begun`` on, each so small that it can be written at once, or of one row."""
    lengths = pc.binary_length(values).fill_null(0)
    ends = np.cumsum(lengths.to_numpy(zero_copy_only=False), dtype=np.int64)
    first = begun
    while first < len(values):
        before = int(ends[first - 1]) if first else 0
        fitting = int(np.searchsorted(ends, before + _WRITE_BYTES, side="right"))
        behind = min(first + _WRITE_ROWS, max(fitting, first + 1))
        yield first, behind
        first = behind


def _is_aborted(header: BatchHeader, aborted: list[AbortedTransaction]) -> bool:
    return header.is_transactional and any(
        entry.producer_id == header.producer_id
        and entry.first_offset <= header.base_offset <= entry.last_offset
        for entry in aborted
    )


def _changes_of(
    table: TableDefinition, batch: memoryview, header: BatchHeader, max_decompressed_bytes: int
) -> Changes:
    where = f"the batch at offset {header.base_offset} of a log of table {table.name!r}"
    try:
        return prepare(table, read_columns(batch, max_decompressed_bytes))
    except ApiError as error:
        # The leader refuses such batches, so the log is damaged: no client is to blame.
        raise TableError(TableCode.state_damaged, f"{where} does not fit the table: {error}") from error
