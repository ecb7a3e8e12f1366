"""One bucket of a primary-key table on its leader: the state, folded from the log as far as it is stable.

- The state is the read_committed fold of the log. It is folded in steps up to a goal, the last stable offset
  of some moment; when a goal is reached no part of a transaction is in the state without the rest. Views and
  snapshots are taken only there (``at_stable_end``), so a scan equals the fold at its log offset.
- One task folds; everything that reads or writes the engine runs in threads, in short pieces.
- State that does not check out is thrown away and built again, from a snapshot and the log. A log that cannot
  be read stops the fold: ``problem`` says why, and every read is answered with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from tidemill.errors import StorageError, TableCode, TableError, TidemillError
from tidemill.kv.engine import KvStore
from tidemill.kv.recovery import mark_damaged, recover
from tidemill.kv.resources import KvResources
from tidemill.kv.snapshots import SnapshotInfo, SnapshotStore
from tidemill.kv.view import KvView
from tidemill.log.transactions import AbortedTransaction
from tidemill.records.batch import HEADER_BYTES, BatchHeader, parse_header
from tidemill.records.columns import read_columns
from tidemill.replication.partition import Partition
from tidemill.tables.changes import Changes, prepare, state_values
from tidemill.tables.definition import TableDefinition
from tidemill.tables.scanners import BucketKey

__all__ = ("Bucket", "View")

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: What one step reads of the log, and how many rows one write to the engine takes: both bound how long the
#: interpreter is held.
_STEP_BYTES = 1024 * 1024
_WRITE_ROWS = 1_000
_PREPARED_BYTES_MAX = 8 * 1024 * 1024
#: How far the fold may be behind before writers wait for it, and for how long they do.
_BEHIND_ROWS_MAX = 20_000
_ROOM_SECONDS = 5.0


class _Stop(NamedTuple):
    offset: int
    call: Callable[[], Awaitable[Any]]
    done: asyncio.Future[Any]


class View(Protocol):
    """State that does not change any more: a RocksDB snapshot, or a durable snapshot opened for reading."""

    def read(self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int) -> Any:
        """Rows in the order of their state keys."""


class Bucket:
    """See the module. ``start`` before anything else; ``close`` when the node or the table goes."""

    def __init__(
        self,
        key: BucketKey,
        table: Callable[[], TableDefinition],
        log: Partition,
        directory: Path,
        resources: KvResources,
        threads: Executor,
        clock_ms: Callable[[], int],
        *,
        max_decompressed_bytes: int,
    ) -> None:
        self.key = key
        self.log = log
        self.snapshots = SnapshotStore(directory)
        self.problem: TidemillError | None = None
        self._table = table
        self._directory = directory
        self._resources = resources
        self._threads = threads
        self._clock_ms = clock_ms
        self._max_decompressed_bytes = max_decompressed_bytes
        self._store: KvStore | None = None
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        #: What is to be done when the state has come to an offset, and before it goes further.
        self._stops: list[_Stop] = []
        self._prepared: OrderedDict[int, Changes] = OrderedDict()
        self._prepared_bytes = 0
        self._prepared_lock = threading.Lock()
        #: What decides when the next snapshot is due: the time, and the size of the log then.
        self.last_snapshot_ms = clock_ms()
        self.log_bytes_at_snapshot = 0

    @property
    def name(self) -> str:
        return f"{self.log.topic}-{self.log.index}"

    # --- life

    def start(self) -> None:
        """Recover the state, and keep it at the log's stable end from now on."""
        self.log.subscribe(self, self._wanted.set)
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"fold {self.name}")

    async def close(self) -> None:
        """Stop folding and let go of the files. What was not folded is folded after the next start."""
        self.log.unsubscribe(self)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._fail_all(
            TableError(TableCode.state_not_ready, f"bucket {self.name} is being closed; try again")
        )
        store, self._store = self._store, None
        if store is not None:
            await self._in_thread(store.close)

    # --- what others ask for

    @property
    def applied_offset(self) -> int:
        """Everything below it is in the state; -1 until the state is recovered."""
        return -1 if self._store is None else self._store.applied_offset

    @property
    def store(self) -> KvStore:
        if self.problem is not None:
            raise self.problem
        if self._store is None:
            raise TableError(
                TableCode.state_not_ready,
                f"the state of {self.name} is being recovered; try again in a moment",
            )
        return self._store

    async def ready(self, min_offset: int, timeout_seconds: float) -> None:
        """Wait until the state is recovered and everything below ``min_offset`` is in it.

        Raises ``TableError`` STATE_NOT_READY, which is retriable, if that takes too long.
        """
        if self.problem is not None:
            raise self.problem
        if self._store is not None and self._store.applied_offset >= min_offset:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((min_offset, future))
        self._wanted.set()
        try:
            async with asyncio.timeout(timeout_seconds):
                await future
        except TimeoutError:
            raise TableError(
                TableCode.state_not_ready,
                f"the state of {self.name} is at offset {self.applied_offset} of "
                f"{self.log.last_stable_offset}, "
                f"not yet at {max(min_offset, 0)}; try again in a moment",
            ) from None
        finally:
            self._waiters = [entry for entry in self._waiters if entry[1] is not future]

    async def room(self) -> None:
        """Wait while the fold is far behind: a writer that outruns it would make every reader wait.

        Not for what is not stable yet, such as the writer's own transaction, and not for ever.
        """
        behind = self.log.last_stable_offset - self.applied_offset
        if self._store is not None and behind > _BEHIND_ROWS_MAX:
            with contextlib.suppress(TidemillError):
                await self.ready(self.log.last_stable_offset - _BEHIND_ROWS_MAX, _ROOM_SECONDS)

    def at_stable_end(self, call: Callable[[], Awaitable[_T]]) -> asyncio.Future[_T]:
        """Await ``call()`` when everything that is stable now has been folded, and nothing that comes later.

        Calls for several buckets that are made in one turn of the loop see one moment.
        """
        if self.problem is not None:
            raise self.problem
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._stops.append(_Stop(self.log.last_stable_offset, call, future))
        self._wanted.set()
        return future

    def view(self) -> asyncio.Future[tuple[KvView, int]]:
        """The state as of now, and the log offset that it stands for."""

        async def take() -> tuple[KvView, int]:
            store = self.store
            return store.snapshot(), store.applied_offset

        return self.at_stable_end(take)

    async def snapshot(self) -> SnapshotInfo:
        """Take a durable snapshot; the newest one if nothing was folded since."""

        async def take() -> SnapshotInfo:
            store = self.store
            newest = (await self._in_thread(self.snapshots.list))[-1:]
            self.last_snapshot_ms = self._clock_ms()
            self.log_bytes_at_snapshot = self.log.log.size_bytes
            if newest and newest[0].log_offset == store.applied_offset:
                return newest[0]
            return await self._in_thread(partial(self.snapshots.create, store, self._clock_ms()))

        return await self.at_stable_end(take)

    def appended(self, changes: Changes) -> None:
        """Keep what the leader has worked out already while the batch becomes stable, if there is room."""
        with self._prepared_lock:
            self._prepared[int(changes.offsets[0])] = changes
            self._prepared_bytes += changes.size_bytes
            while self._prepared_bytes > _PREPARED_BYTES_MAX:
                self._prepared_bytes -= self._prepared.popitem(last=False)[1].size_bytes

    # --- folding

    async def _run(self) -> None:
        while self.problem is None:
            try:
                if self._store is None:
                    self._store = await self._recover()
                goal = min([self.log.last_stable_offset, *(stop.offset for stop in self._stops)])
                await self._fold_to(goal)
                await self._make_stops()
            except StorageError as error:
                await self._give_up_state(error)
                continue
            except TidemillError as error:
                self._stop(error)
                return
            except Exception as error:
                logger.exception("the fold of %s failed", self.name)
                self._stop(TableError(TableCode.state_damaged, f"the fold of {self.name} failed: {error!r}"))
                return
            if self.log.last_stable_offset <= self.applied_offset and not self._stops:
                self._wanted.clear()
                await self._wanted.wait()

    async def _recover(self) -> KvStore:
        log = self.log
        if log.log.failure is not None:
            raise TableError(TableCode.state_damaged, f"the log of {self.name} is stopped: {log.log.failure}")
        # Compaction leaves the log start where it is: only what was deleted is missing.
        complete = log.log_start_offset == 0
        return await self._in_thread(
            partial(
                recover,
                self._directory,
                self._resources,
                self._identity(),
                log_start=log.log_start_offset,
                log_end=log.high_watermark,
                log_is_complete=complete,
                on_warning=partial(logger.warning, "%s: %s", self.name),
            )
        )

    def _identity(self) -> bytes:
        return f"{self.log.topic_id.hex}/{self.key.bucket}".encode()

    async def _fold_to(self, goal: int) -> None:
        store = self._store
        assert store is not None
        while store.applied_offset < goal:
            data = self.log.read(store.applied_offset, _STEP_BYTES, at_least_one=True, committed=True)
            if not data:
                break
            aborted = self.log.log.aborted_in(data)
            await self._in_thread(partial(self._fold_step, store, bytes(data), aborted, goal))
        self._release_waiters()

    def _fold_step(self, store: KvStore, data: bytes, aborted: list[AbortedTransaction], goal: int) -> None:
        """Fold whole batches up to the goal. In a thread."""
        position, table = 0, self._table()
        while position + HEADER_BYTES <= len(data):
            header = parse_header(data, position)
            if header.base_offset >= goal or position + header.size_bytes > len(data):
                return
            batch = memoryview(data)[position : position + header.size_bytes]
            position += header.size_bytes
            if header.next_offset <= store.applied_offset:
                continue
            prepared = self._take_prepared(header.base_offset)
            if header.is_control or header.record_count == 0 or _is_aborted(header, aborted):
                store.write([], [], [], header.next_offset)
            elif prepared is not None and len(prepared.offsets) == header.record_count:
                _apply(store, prepared, header.next_offset)
            else:
                columns = read_columns(batch, self._max_decompressed_bytes)
                _apply(store, prepare(table, columns), header.next_offset)

    def _take_prepared(self, base_offset: int) -> Changes | None:
        with self._prepared_lock:
            changes = self._prepared.pop(base_offset, None)
            if changes is not None:
                self._prepared_bytes -= changes.size_bytes
            return changes

    async def _make_stops(self) -> None:
        """Do what is to be done at the offset that the state has reached."""
        due = [stop for stop in self._stops if stop.offset <= self.applied_offset]
        for stop in due:
            self._stops.remove(stop)
            if stop.done.done():
                continue
            try:
                result = await stop.call()
            except asyncio.CancelledError:
                stop.done.cancel()
                raise
            except TidemillError as error:
                if not stop.done.done():
                    stop.done.set_exception(error)
                if isinstance(error, StorageError):
                    raise
            else:
                if not stop.done.done():
                    stop.done.set_result(result)

    def _release_waiters(self) -> None:
        applied = self.applied_offset
        for offset, future in self._waiters:
            if offset <= applied and not future.done():
                future.set_result(None)

    # --- when things go wrong

    async def give_up_state(self, error: StorageError) -> None:
        """A reader found state that does not check out."""

        async def raise_it() -> None:
            raise error

        with contextlib.suppress(TidemillError):
            await self.at_stable_end(raise_it)

    async def _give_up_state(self, error: StorageError) -> None:
        if self.log.log.failure is not None:
            self._stop(TableError(TableCode.state_damaged, f"the log of {self.name} is stopped: {error}"))
            return
        if self._store is None:
            # Recovery itself has failed: there is nothing that it could be built from.
            self._stop(
                TableError(TableCode.state_damaged, f"the state of {self.name} cannot be recovered: {error}")
            )
            return
        logger.error("the state of %s does not check out and is built again: %s", self.name, error)
        store, self._store = self._store, None
        await self._in_thread(store.close)
        await self._in_thread(partial(mark_damaged, self._directory))

    def _stop(self, problem: TidemillError) -> None:
        logger.error("%s takes no reads of its state: %s", self.name, problem)
        self.problem = problem
        self._fail_all(problem)

    def _fail_all(self, problem: TidemillError) -> None:
        for future in [*(future for _, future in self._waiters), *(stop.done for stop in self._stops)]:
            if not future.done():
                future.set_exception(problem)
        self._waiters, self._stops = [], []

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _is_aborted(header: BatchHeader, aborted: list[AbortedTransaction]) -> bool:
    return header.is_transactional and any(
        entry.producer_id == header.producer_id
        and entry.first_offset <= header.base_offset <= entry.last_offset
        for entry in aborted
    )


def _apply(store: KvStore, changes: Changes, next_offset: int) -> None:
    """Write the changes, some at a time; the state is that of the log at an offset after each of them."""
    keys: list[bytes] = changes.state_keys.to_pylist()
    values: list[bytes | None] = state_values(changes).to_pylist()
    offsets = changes.offsets
    for first in range(0, len(keys), _WRITE_ROWS):
        behind = min(first + _WRITE_ROWS, len(keys))
        # Of several changes of one key the last one counts.
        latest = dict(zip(islice(keys, first, behind), islice(values, first, behind), strict=True))
        deleted = [key for key, value in latest.items() if value is None]
        put = {key: value for key, value in latest.items() if value is not None} if deleted else latest
        reached = next_offset if behind == len(keys) else int(offsets[behind])
        store.write(list(put.keys()), cast("list[bytes]", list(put.values())), deleted, reached)
