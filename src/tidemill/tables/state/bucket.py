"""One bucket of a primary-key table: the state, folded from the log as far as it is stable.

- The state is the read_committed fold of the log. It is folded in steps up to a goal, which is a last stable
  offset; when a goal is reached no part of a transaction is in the state without the rest, unless
  another one lies open between its rows. Views and snapshots are taken only there (``at_stable_end``), so a
  scan equals the fold at its log offset.
- State may be found that is ahead of the high watermark: another leader committed what this one does not know
  to be committed yet. It is kept, and shown to nobody until the last stable offset has caught up with it, and
  the high watermark with the log end of the take-over.
- A standby folds on a follower, up to what that knows to be stable, and shows nothing to anybody. When this
  node becomes the leader it is promoted, and has little left to fold. It takes snapshots of its own, as a
  leader does, at offsets of its own: they are for its recovery, and let its log be compacted.
- One task folds; everything that reads or writes the engine runs in threads, in short pieces. The folds of
  all buckets share one thread (``TableService.fold_thread``). A thread cannot be stopped: a caller that is
  cancelled while one works waits for its end.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tidemill.coordination.pools import run_to_end
from tidemill.coordination.turns import TurnQueue
from tidemill.errors import CorruptData, DiskFull, StorageError, TableCode, TableError, TidemillError
from tidemill.kv.contract import TABLE_SUFFIX, KvEngine, KvStore, KvView
from tidemill.kv.recovery import mark_damaged, recover
from tidemill.kv.snapshots import SnapshotInfo, SnapshotStore
from tidemill.log.epochs import EpochHistory
from tidemill.log.producer_state.transactions import AbortedTransaction
from tidemill.net.retry import backoff_ms
from tidemill.records.batch import parse_header
from tidemill.replication.partition import Partition
from tidemill.replication.rules.state import Role
from tidemill.tables.definition import TableDefinition
from tidemill.tables.scanning.sessions import BucketKey
from tidemill.tables.state.changes import Changes
from tidemill.tables.state.folding import PreparedChanges, fold_batches, read_for_fold, until_taken

__all__ = ("Bucket", "BucketCounts", "bucket_identity")

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_PREPARED_BYTES_MAX = 8 * 1024 * 1024
#: How many rows the fold may be behind before writers wait for it, and how long they wait.
_BEHIND_ROWS_MAX = 20_000
_FOLD_WAIT_SECONDS = 5.0
#: How long the fold pauses after an error that may pass: at first, and at most.
_FIRST_PAUSE_MS = 500
_LONGEST_PAUSE_MS = 30_000


def bucket_identity(topic_id: str, bucket: int) -> bytes:
    """The identity with which a bucket's state is marked; ``topic_id`` is hexadecimal."""
    return f"{topic_id}/{bucket}".encode()


class BucketSize(NamedTuple):
    """The size of a bucket's state, by the engine's estimate."""

    rows: int
    state_bytes: int


class _Stop(NamedTuple):
    offset: int
    call: Callable[[], Awaitable[Any]]
    done: asyncio.Future[Any]
    #: Whether the call waits until the state may be shown.
    shows: bool


@dataclass(slots=True)
class BucketCounts:
    """Counters of a bucket since it was opened."""

    #: Rows put or deleted by the fold.
    folded_rows: int = 0
    lookups: int = 0
    snapshots: int = 0
    #: How often state that did not check out was thrown away.
    rebuilds: int = 0
    #: Time of day of the newest snapshot; -1 if there is none, None if it was not looked for yet.
    newest_snapshot_ms: int | None = None


class Bucket:
    """One bucket of a table: its state, folded from its log. ``start`` it first, ``close`` it at the end."""

    def __init__(
        self,
        key: BucketKey,
        table: Callable[[], TableDefinition],
        log: Partition,
        directory: Path,
        engine: KvEngine,
        threads: Executor,
        fold_thread: Executor,
        clock_ms: Callable[[], int],
        steady_ms: Callable[[], int],
        *,
        max_decompressed_bytes: int,
        turns: TurnQueue | None = None,
        standby: bool = False,
    ) -> None:
        self.key = key
        self.log = log
        self.snapshots = SnapshotStore(directory, engine.files)
        self.counts = BucketCounts()
        #: Held to choose among the snapshots, or to remove some.
        self.snapshots_turn = asyncio.Lock()
        self.problem: TidemillError | None = None
        self._table = table
        self._directory = directory
        self._engine = engine
        self._threads = threads
        self._fold_thread = fold_thread
        self._clock_ms = clock_ms
        self._steady_ms = steady_ms
        self._max_decompressed_bytes = max_decompressed_bytes
        self._turns = turns or TurnQueue(1)
        self._store: KvStore | None = None
        #: Whether the state may be shown: not ahead of what is stable, nor behind what was shown before.
        self._is_current = False
        self._is_standby = standby
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        #: Calls to make when the state has reached an offset, before it goes further.
        self._stops: list[_Stop] = []
        self._prepared = PreparedChanges(_PREPARED_BYTES_MAX)
        self._closed = False
        #: Errors of the fold since it last went forward.
        self._failures = 0
        #: When the last snapshot was taken (steady time), and the log's size then.
        self.last_snapshot_ms = steady_ms()
        self.log_bytes_at_snapshot = 0

    @property
    def name(self) -> str:
        return f"{self.log.topic}-{self.log.index}"

    # -- life ----------------------------------------------------------------------------------------------

    def start(self, after: asyncio.Task[None] | None = None) -> None:
        """Recover the state, once ``after`` is done, and from then on keep it at the log's stable end."""
        self.log.subscribe(self, self._wanted.set)
        self._task = asyncio.get_running_loop().create_task(self._run(after), name=f"fold {self.name}")

    def promote(self) -> None:
        """This node leads now: the state of a standby may be shown once it has caught up."""
        self._is_standby = False
        self._wanted.set()

    def resign(self) -> None:
        """Stop folding because another node leads now; every waiting call is told so. ``close`` follows."""
        self._closed = True
        self.problem = self.log.not_leader()
        self._fail_all(self.problem)

    async def close(self) -> None:
        """Stop folding and release the files. What was not folded is folded after the next start."""
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

    # -- what others ask for -------------------------------------------------------------------------------

    @property
    def applied_offset(self) -> int:
        """The log offset that the state has reached; -1 until the state may be shown."""
        return -1 if self._store is None or not self._is_current else self._store.applied_offset

    @property
    def folded_offset(self) -> int:
        """The log offset that the state has reached, whether or not it may be shown; -1 if it is not open."""
        return -1 if self._store is None else self._store.applied_offset

    @property
    def store(self) -> KvStore:
        self._check_usable()
        if self._store is None or not self._is_current:
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
        if self._is_current and self.applied_offset >= min_offset:
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

    async def wait_for_fold(self) -> None:
        """Wait while the fold is far behind. A writer that outruns it would make every reader wait.

        It does not wait for what is not stable yet, such as the writer's own transaction, and not for ever.
        """
        behind = self.log.last_stable_offset - self.applied_offset
        if self._is_current and behind > _BEHIND_ROWS_MAX:
            with contextlib.suppress(TidemillError):
                await self.ready(self.log.last_stable_offset - _BEHIND_ROWS_MAX, _FOLD_WAIT_SECONDS)

    def at_stable_end(self, call: Callable[[], Awaitable[_T]], *, shows: bool = True) -> asyncio.Future[_T]:
        """Await ``call()`` when everything that is stable now has been folded, and nothing later.

        Calls for several buckets that are made in one turn of the event loop see the same instant. One that
        ``shows`` nothing to anybody is also made by a standby.
        """
        self._check_usable()
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._stops.append(_Stop(self.log.last_stable_offset, call, future, shows))
        self._wanted.set()
        return future

    def view(self) -> asyncio.Future[tuple[KvView, int]]:
        """Take a view of the state as of now; gives it with its log offset."""

        async def take() -> tuple[KvView, int]:
            view = await self._in_thread(self.store.view)
            return view, view.applied_offset

        return self.at_stable_end(take)

    def snapshot(self, *, shows: bool = True) -> asyncio.Future[SnapshotInfo]:
        """Take a durable snapshot of the state as of now; the newest one if nothing was folded since.

        One that ``shows`` nothing is for recovery only; a standby takes it, too.
        """

        async def take() -> SnapshotInfo:
            store = self._store
            assert store is not None, "stops are made while the state is open"
            newest = (await self.sound_snapshots())[-1:]
            self.last_snapshot_ms = self._steady_ms()
            self.log_bytes_at_snapshot = self.log.size_bytes
            if newest and newest[0].log_offset == store.applied_offset:
                return newest[0]
            info = await self._in_thread(partial(self.snapshots.create, store, self._clock_ms()))
            self.counts.snapshots += 1
            self.counts.newest_snapshot_ms = info.created_ms
            return info

        return self.at_stable_end(take, shows=shows)

    async def sound_snapshots(self) -> list[SnapshotInfo]:
        """The snapshots that are of the log's own history, and not older than what is compacted; newest last.

        Others are left of a log that was cut, or of a time when this node folded last.
        """
        log, found = self.log, await self._in_thread(self.snapshots.list)
        is_of_log = partial(_is_part, log.epochs, log.log_end_offset)
        return [
            info
            for info in found
            if info.log_offset >= log.compacted_offset
            and (info.leader_epoch < 0 or is_of_log(info.leader_epoch, info.log_offset))
        ]

    def appended(self, changes: Changes) -> None:
        """Keep the changes that the leader worked out before the append, if the cache has capacity."""
        self._prepared.put(changes, self.log.leader_epoch)

    def measure(self) -> BucketSize | None:
        """Estimate the size of the state; None if it is not open. Runs in a thread."""
        if self.counts.newest_snapshot_ms is None:
            newest = self.snapshots.list()[-1:]
            self.counts.newest_snapshot_ms = newest[0].created_ms if newest else -1
        store = self._store
        try:
            return None if store is None else BucketSize(store.count_estimate(), store.size_bytes())
        except StorageError:
            return None  # Closed meanwhile.

    # -- folding -------------------------------------------------------------------------------------------

    async def _run(self, after: asyncio.Task[None] | None) -> None:
        try:
            if after is not None:
                await asyncio.wait([after])
            await self._turns.turn()
            while await self._go_on():
                await self._turns.turn()
        except Exception as error:
            logger.exception("the fold of %s failed", self.name)
            self._stop(TableError(TableCode.state_damaged, f"the fold of {self.name} failed: {error!r}"))

    async def _go_on(self) -> bool:
        """Fold what is there, or wait for more. False when the fold has ended."""
        # Before anything is looked at: what comes during the fold must be found behind it.
        self._wanted.clear()
        try:
            if self._store is None:
                await self._recover()
            # Before the goal: what an earlier leader has shown lies below a goal that is found after it.
            was_caught_up = (
                not self._is_standby
                and self.log.role is not Role.FOLLOWER
                and self.log.has_reached_epoch_start
            )
            await self._fold_to(self._goal())
            if self._may_be_shown(was_caught_up):
                self._release_waiters()
            await self._make_stops()
        except StorageError as error:
            return await self._state_failed(error)
        except TidemillError as error:
            self._stop(error)
            return False
        if self.folded_offset >= self._goal() and not (self._is_current and self._stops):
            await self._wanted.wait()
        return True

    def _goal(self) -> int:
        return min([self.log.last_stable_offset, *(stop.offset for stop in self._stops)])

    def _may_be_shown(self, was_caught_up: bool) -> bool:
        assert self._store is not None
        if not self._is_current:
            self._is_current = was_caught_up and self._store.applied_offset <= self.log.last_stable_offset
        return self._is_current

    async def _recover(self) -> None:
        log = self.log
        if log.failure is not None:
            raise TableError(TableCode.state_damaged, f"the log of {self.name} is stopped: {log.failure}")
        # Compaction leaves the log start where it is: only what was deleted is missing.
        complete = log.log_start_offset == 0
        self._is_current = False
        # The log end, not the high watermark: state between the two is valid.
        log_end = log.log_end_offset
        # Copied, because it changes on the event loop.
        is_of_log = partial(_is_part, log.epochs.copy(), log_end)
        await self._in_thread(
            partial(
                self._open_state,
                log.log_start_offset,
                log_end,
                is_of_log,
                log_is_complete=complete,
                removed_below=log.compacted_offset,
            )
        )

    def _open_state(
        self,
        log_start: int,
        log_end: int,
        is_of_log: Callable[[int, int], bool],
        *,
        log_is_complete: bool,
        removed_below: int,
    ) -> None:
        # Set here, in the thread, so that ``close`` finds the store also if nobody waits for it any more.
        if not self._closed:
            self._store = recover(
                self._directory,
                self._engine,
                bucket_identity(self.log.topic_id.hex, self.key.bucket),
                log_start=log_start,
                log_end=log_end,
                log_is_complete=log_is_complete,
                on_warning=partial(logger.warning, "%s: %s", self.name),
                is_of_log=is_of_log,
                removed_below=removed_below,
            )

    async def _fold_to(self, goal: int) -> None:
        store = self._store
        assert store is not None
        while store.applied_offset < goal:
            before = store.applied_offset
            data, aborted = read_for_fold(self.log, before)
            if not data or parse_header(data).base_offset >= goal:
                # Compaction has left nothing between here and the goal.
                epoch = self.log.epochs.epoch_at(goal - 1)
                step = partial(store.write, [], [], [], goal, epoch)
            else:
                step = partial(self._fold_step, store, data, aborted, goal)
            await until_taken(partial(self._in_thread, step, self._fold_thread))
            assert store.applied_offset > before, "a step of the fold goes forward"
            if self._is_current:
                # A caller that waits for less than the goal need not wait for all of it.
                self._release_waiters()
            self._failures = 0

    def _fold_step(self, store: KvStore, data: bytes, aborted: list[AbortedTransaction], goal: int) -> None:
        self.counts.folded_rows += fold_batches(
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
        """Make the calls that are due at the offset that the state has reached."""
        reached = self.folded_offset
        # State may have been found ahead of what is known to be stable: that is nothing to stop at.
        is_stable = reached <= self.log.last_stable_offset
        due = [
            stop
            for stop in self._stops
            if stop.offset <= reached and (self._is_current or (is_stable and not stop.shows))
        ]
        for stop in due:
            self._stops.remove(stop)
            if stop.done.done():
                continue
            try:
                result = await stop.call()
            except asyncio.CancelledError:
                # The fold is cancelled, not the caller that waits for this call.
                if not stop.done.done():
                    stop.done.set_exception(self.problem or self._closing())
                raise
            except CorruptData as error:
                if not stop.done.done():
                    stop.done.set_exception(self._damaged(error))
                raise
            except Exception as error:  # noqa: BLE001 - the caller gets it
                # Not an error of the state: for instance, a disk was too full for a snapshot.
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

    # -- when things go wrong ------------------------------------------------------------------------------

    async def give_up_state(self, error: StorageError) -> None:
        """Rebuild the state, in which a reader found damage."""
        store = self._store

        async def raise_it() -> None:
            # Several readers may find the same damage; one report is enough.
            if self._store is store:
                raise error

        with contextlib.suppress(TidemillError):
            await self.at_stable_end(raise_it)

    async def _state_failed(self, error: StorageError) -> bool:
        """Prepare the recovery after an error; False if the state cannot be recovered."""
        store, self._store = self._store, None
        self._is_current = False
        if store is not None:
            await self._in_thread(partial(_close_quietly, store))
        if self.log.failure is not None:
            problem = f"the log of {self.name} is stopped: {self.log.failure}"
        elif store is None and not isinstance(error, DiskFull):
            # Recovery itself has failed: there is nothing to build the state from.
            problem = f"the state of {self.name} cannot be recovered: {error}"
        else:
            await self._prepare_recovery(error)
            return True
        self._stop(TableError(TableCode.state_damaged, problem))
        return False

    async def _prepare_recovery(self, error: StorageError) -> None:
        if isinstance(error, CorruptData):
            logger.error("the state of %s does not check out and is built again: %s", self.name, error)
            self.counts.rebuilds += 1
            try:
                await self._in_thread(partial(self._note_damage, error))
                return
            except StorageError as another:
                error = another
        if isinstance(error, DiskFull) and self._engine.give_up_reserve(error):
            return
        self._failures += 1
        pause_seconds = backoff_ms(self._failures, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS) / 1000
        logger.error("%s is opened again in %.1f s: %s", self.name, pause_seconds, error)
        self.problem = TableError(
            TableCode.state_damaged, f"the state of {self.name} is opened again in a moment: {error}"
        )
        self._fail_all(self.problem)
        await asyncio.sleep(pause_seconds)
        self.problem = None

    def _note_damage(self, error: CorruptData) -> None:
        # If the damaged file is not known, recovery verifies every snapshot that it wants to use.
        if error.path.endswith(TABLE_SUFFIX):
            self.snapshots.spoil(error.path)
        mark_damaged(self._directory, self._engine.files)

    def _stop(self, problem: TidemillError) -> None:
        if self._closed:
            return  # Every waiting caller has been told, and no other comes.
        logger.error("%s takes no reads of its state: %s", self.name, problem)
        self.problem = problem
        self._fail_all(problem)

    def _fail_all(self, problem: TidemillError) -> None:
        for future in [*(future for _, future in self._waiters), *(stop.done for stop in self._stops)]:
            if not future.done():
                future.set_exception(problem)
        self._waiters, self._stops = [], []

    async def _in_thread(self, work: Callable[[], _T], threads: Executor | None = None) -> _T:
        return await run_to_end(threads or self._threads, work)


def _is_part(history: EpochHistory, log_end: int, leader_epoch: int, offset: int) -> bool:
    """Whether a state at ``offset``, whose last record is of ``leader_epoch``, is one of the log's own."""
    if offset == 0:
        return True
    known, end_offset = history.end_offset_for(leader_epoch, log_end)
    return known == leader_epoch and offset <= end_offset


def _close_quietly(store: KvStore) -> None:
    """Close a store that is given up. Its last rows need not reach the disk: the log has them."""
    with contextlib.suppress(StorageError):
        store.close()
