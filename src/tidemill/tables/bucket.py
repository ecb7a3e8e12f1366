"""One bucket of a primary-key table on its leader: the state, folded from the log as far as it is stable.

- The state is the read_committed fold of the log. It is folded in steps up to a goal, the last stable offset
  of some moment; when a goal is reached no part of a transaction is in the state without the rest, unless
  another one lies open between its rows. Views and snapshots are taken only there (``at_stable_end``), so a
  scan equals the fold at its log offset.
- One task folds; everything that reads or writes the engine runs in threads, in short pieces. A thread cannot
  be stopped: whoever is cancelled while one works waits for its end.
- State that does not check out is thrown away and built again, from a snapshot and the log. What may pass,
  such as a full disk, changes nothing: the state is opened again after a pause. A log that cannot be read
  stops the fold. ``problem`` says why, and every read is answered with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from tidemill.errors import CorruptData, DiskFull, StorageError, TableCode, TableError, TidemillError
from tidemill.kv.copying import TABLE_SUFFIX
from tidemill.kv.engine import KvStore
from tidemill.kv.recovery import mark_damaged, recover
from tidemill.kv.resources import KvResources
from tidemill.kv.snapshots import SnapshotInfo, SnapshotStore
from tidemill.kv.view import KvExtent, KvValues, KvView
from tidemill.log.transactions import AbortedTransaction
from tidemill.records.batch import parse_header
from tidemill.replication.partition import Partition
from tidemill.tables.changes import Changes
from tidemill.tables.definition import TableDefinition
from tidemill.tables.folding import PreparedChanges, fold_batches
from tidemill.tables.scanners import BucketKey

__all__ = ("Bucket", "View", "bucket_identity")

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: What one step reads of the log.
_STEP_BYTES = 1024 * 1024
_PREPARED_BYTES_MAX = 8 * 1024 * 1024
#: How far the fold may be behind before writers wait for it, and for how long they do.
_BEHIND_ROWS_MAX = 20_000
_ROOM_SECONDS = 5.0
#: How long the fold pauses after trouble that may pass: at first, and at most.
_PAUSE_SECONDS_MIN = 0.5
_PAUSE_SECONDS_MAX = 30.0


def bucket_identity(topic_id: str, bucket: int) -> bytes:
    """What the state of a bucket is marked with; ``topic_id`` in hexadecimal digits."""
    return f"{topic_id}/{bucket}".encode()


class _Stop(NamedTuple):
    offset: int
    call: Callable[[], Awaitable[Any]]
    done: asyncio.Future[Any]


class View(Protocol):
    """State that does not change any more: a RocksDB snapshot, or a durable snapshot opened for reading."""

    def read_values(self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int) -> KvValues:
        """Rows in the order of their state keys."""

    def measure(
        self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int, *, at_least_one: bool
    ) -> KvExtent:
        """How much state there is, as far as the limits."""


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
        steady_ms: Callable[[], int],
        *,
        max_decompressed_bytes: int,
    ) -> None:
        self.key = key
        self.log = log
        self.snapshots = SnapshotStore(directory)
        #: Held by whoever chooses among the snapshots, or removes some.
        self.snapshots_turn = asyncio.Lock()
        self.problem: TidemillError | None = None
        self._table = table
        self._directory = directory
        self._resources = resources
        self._threads = threads
        self._clock_ms = clock_ms
        self._steady_ms = steady_ms
        self._max_decompressed_bytes = max_decompressed_bytes
        self._store: KvStore | None = None
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        #: What is to be done when the state has come to an offset, and before it goes further.
        self._stops: list[_Stop] = []
        self._prepared = PreparedChanges(_PREPARED_BYTES_MAX)
        self._closed = False
        self._pause_seconds = _PAUSE_SECONDS_MIN
        #: What decides when the next snapshot is due: the steady time, and the size of the log then.
        self.last_snapshot_ms = steady_ms()
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
        self._closed = True
        self.log.unsubscribe(self)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._fail_all(self._closing())
        store, self._store = self._store, None
        if store is not None:
            await self._in_thread(store.close)

    def _closing(self) -> TableError:
        return TableError(TableCode.state_not_ready, f"bucket {self.name} is being closed; try again")

    def _damaged(self, error: CorruptData) -> TableError:
        return TableError(
            TableCode.state_damaged,
            f"the state of {self.name} does not check out, it is built again: {error}",
        )

    def _check_usable(self) -> None:
        if self.problem is not None:
            raise self.problem
        if self._closed:
            raise self._closing()

    # --- what others ask for

    @property
    def applied_offset(self) -> int:
        """Everything below it is in the state; -1 until the state is recovered."""
        return -1 if self._store is None else self._store.applied_offset

    @property
    def store(self) -> KvStore:
        self._check_usable()
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
        self._check_usable()
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
        self._check_usable()
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._stops.append(_Stop(self.log.last_stable_offset, call, future))
        self._wanted.set()
        return future

    def view(self) -> asyncio.Future[tuple[KvView, int]]:
        """The state as of now, and the log offset that it stands for."""

        async def take() -> tuple[KvView, int]:
            view = await self._in_thread(self.store.snapshot)
            return view, view.applied_offset

        return self.at_stable_end(take)

    def snapshot(self) -> asyncio.Future[SnapshotInfo]:
        """Take a durable snapshot of the state as of now; the newest one if nothing was folded since."""

        async def take() -> SnapshotInfo:
            store = self.store
            newest = (await self._in_thread(self.snapshots.list))[-1:]
            self.last_snapshot_ms = self._steady_ms()
            self.log_bytes_at_snapshot = self.log.log.size_bytes
            if newest and newest[0].log_offset == store.applied_offset:
                return newest[0]
            return await self._in_thread(partial(self.snapshots.create, store, self._clock_ms()))

        return self.at_stable_end(take)

    def appended(self, changes: Changes) -> None:
        """Keep what the leader has worked out already while the batch becomes stable, if there is room."""
        self._prepared.put(changes)

    # --- folding

    async def _run(self) -> None:
        try:
            while await self._go_on():
                pass
        except Exception as error:
            logger.exception("the fold of %s failed", self.name)
            self._stop(TableError(TableCode.state_damaged, f"the fold of {self.name} failed: {error!r}"))

    async def _go_on(self) -> bool:
        """Fold what is there, or wait for more. False when the fold has come to its end."""
        try:
            if self._store is None:
                await self._recover()
            goal = min([self.log.last_stable_offset, *(stop.offset for stop in self._stops)])
            await self._fold_to(goal)
            await self._make_stops()
        except StorageError as error:
            return await self._state_failed(error)
        except TidemillError as error:
            self._stop(error)
            return False
        if self.log.last_stable_offset <= self.applied_offset and not self._stops:
            self._wanted.clear()
            await self._wanted.wait()
        return True

    async def _recover(self) -> None:
        log = self.log
        if log.log.failure is not None:
            raise TableError(TableCode.state_damaged, f"the log of {self.name} is stopped: {log.log.failure}")
        # Compaction leaves the log start where it is: only what was deleted is missing.
        complete = log.log_start_offset == 0
        await self._in_thread(
            partial(self._open_state, log.log_start_offset, log.high_watermark, log_is_complete=complete)
        )

    def _open_state(self, log_start: int, log_end: int, *, log_is_complete: bool) -> None:
        # Set here, in the thread, so that ``close`` finds the store also if nobody waits for it any more.
        if not self._closed:
            self._store = recover(
                self._directory,
                self._resources,
                bucket_identity(self.log.topic_id.hex, self.key.bucket),
                log_start=log_start,
                log_end=log_end,
                log_is_complete=log_is_complete,
                on_warning=partial(logger.warning, "%s: %s", self.name),
            )

    async def _fold_to(self, goal: int) -> None:
        store = self._store
        assert store is not None
        while store.applied_offset < goal:
            before = store.applied_offset
            data, aborted = self._read_log(before)
            if not data or parse_header(data).base_offset >= goal:
                # Compaction has left nothing between here and the goal.
                await self._in_thread(partial(store.write, [], [], [], goal))
            else:
                await self._in_thread(partial(self._fold_step, store, data, aborted, goal))
            assert store.applied_offset > before, "a step of the fold goes forward"
            self._pause_seconds = _PAUSE_SECONDS_MIN
        self._release_waiters()

    def _read_log(self, offset: int) -> tuple[bytes, list[AbortedTransaction]]:
        try:
            data = self.log.read(offset, _STEP_BYTES, at_least_one=True, committed=True)
            return bytes(data), self.log.log.aborted_in(data)
        except StorageError as error:
            # Not an error of the state, which is as good as it was.
            raise TableError(
                TableCode.state_damaged, f"the log of {self.name} cannot be read: {error}"
            ) from error

    def _fold_step(self, store: KvStore, data: bytes, aborted: list[AbortedTransaction], goal: int) -> None:
        fold_batches(
            store,
            self._table(),
            data,
            aborted,
            goal,
            self._prepared,
            max_decompressed_bytes=self._max_decompressed_bytes,
            is_stopped=lambda: self._closed,
        )

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
                # The fold ends, not whoever waits for this.
                if not stop.done.done():
                    stop.done.set_exception(self._closing())
                raise
            except CorruptData as error:
                if not stop.done.done():
                    stop.done.set_exception(self._damaged(error))
                raise
            except Exception as error:  # noqa: BLE001 - whoever asked gets it
                # Says nothing about the state: a snapshot may just have had no room.
                if not stop.done.done():
                    stop.done.set_exception(error)
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
        store = self._store

        async def raise_it() -> None:
            # Of several readers that found it, one is enough.
            if self._store is store:
                raise error

        with contextlib.suppress(TidemillError):
            await self.at_stable_end(raise_it)

    async def _state_failed(self, error: StorageError) -> bool:
        """False if there is no way to go on."""
        store, self._store = self._store, None
        if store is not None:
            await self._in_thread(partial(_close_quietly, store))
        if self.log.log.failure is not None:
            problem = f"the log of {self.name} is stopped: {self.log.log.failure}"
        elif store is None and not isinstance(error, DiskFull):
            # Recovery itself has failed: there is nothing that it could be built from.
            problem = f"the state of {self.name} cannot be recovered: {error}"
        else:
            await self._prepare_recovery(error)
            return True
        self._stop(TableError(TableCode.state_damaged, problem))
        return False

    async def _prepare_recovery(self, error: StorageError) -> None:
        if isinstance(error, CorruptData):
            logger.error("the state of %s does not check out and is built again: %s", self.name, error)
            try:
                await self._in_thread(partial(self._note_damage, error))
                return
            except StorageError as another:
                error = another
        pause_seconds, self._pause_seconds = (
            self._pause_seconds,
            min(2 * self._pause_seconds, _PAUSE_SECONDS_MAX),
        )
        logger.error("%s is opened again in %.1f s: %s", self.name, pause_seconds, error)
        self.problem = TableError(
            TableCode.state_damaged, f"the state of {self.name} is opened again in a moment: {error}"
        )
        self._fail_all(self.problem)
        await asyncio.sleep(pause_seconds)
        self.problem = None

    def _note_damage(self, error: CorruptData) -> None:
        # If it is not known which file it is, recovery looks at every snapshot that it wants to use.
        if error.path.endswith(TABLE_SUFFIX):
            self.snapshots.spoil(error.path)
        mark_damaged(self._directory)

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
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise


def _close_quietly(store: KvStore) -> None:
    """Whether the last rows get to the disk does not matter: the log has them."""
    with contextlib.suppress(StorageError):
        store.close()
