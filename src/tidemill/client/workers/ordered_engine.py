"""A worker on a cursor: records in order, at least once, from the position that was stored last.

Rules:

- Without ``concurrency`` records are handled one after the other, in the order of each partition. With it
  different keys go side by side, and each key stays in order (``cursors/lanes.py``).
- A position is stored only for records whose handler has returned. With a database the handler's writes and
  the position commit together (``workspace.py``).
- A handler that raises sends the worker back to the stored position, and uses its restart budget. With a
  dead-letter topic the record is tried alone first, ``attempts`` times, and parked then; that uses nothing.
- A database driver that raises outside of the handler, when the position is written or at COMMIT, uses the
  budget, too: the connections are opened again. So does a connection that a handler finds lost.
- Nodes that cannot be reached are tried again for as long as the worker runs. A lost ownership, a position
  that cannot be stored, and an exhausted budget end it: ``join`` raises them.
- A stop ends the opening of the cursor at once, also if that waits for another owner's lease. With
  ``standby`` it waits for as long as the owner lives.
- At a stop the handlers that run get ``stop_timeout`` to end, and what is done is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidemill.client.cursors.checkpoints.store import StoredElsewhere
from tidemill.client.workers.handling import WorkerCounts
from tidemill.client.workers.logs import WORKER_LOG, record_fields
from tidemill.client.workers.ordered import Action, Cadence, Ordered, WorkerFailed
from tidemill.client.workers.outcomes import Reject, Retry
from tidemill.client.workers.stopping import unless_stopped
from tidemill.client.workers.workspace import BatchEnd, Progress, Workspace
from tidemill.cursors.errors import CursorInUse
from tidemill.cursors.lanes import Lanes
from tidemill.cursors.restarts import Once, RestartBudget
from tidemill.errors import TidemillError
from tidemill.net.retry import backoff_ms, is_transient

if TYPE_CHECKING:
    from tidemill.client.cursors.cursor import AsyncCursor, Delivery

    Park = Callable[[Delivery, int, str], Awaitable[None]]

__all__ = ("OrderedEngine",)

_POLL_MS: Final = 5_000
_SETTLE_MS: Final = 200
_FIRST_PAUSE_MS: Final = 100
_LONGEST_PAUSE_MS: Final = 10_000
#: A file says at once that it is locked; the cluster answers when its wait is over.
_STANDBY_PAUSE_SECONDS: Final = 0.5


class _HandlerFailed(Exception):
    """A handler has raised, and its record is not parked."""


class _Work(NamedTuple):
    """A record in a lane."""

    partition: int
    offset: int
    key: bytes | None
    record: Delivery


class OrderedEngine:
    """Runs a handler for the records of a cursor.

    ``open_workspace`` opens the cursor; ``park`` writes a record, with how often it was tried and why it is
    given up, to the dead-letter topic.
    """

    def __init__(
        self,
        name: str,
        options: Ordered,
        open_workspace: Callable[[], Coroutine[Any, Any, Workspace]],
        park: Park | None,
        *,
        concurrency: int,
        retry_backoff: float,
        stop_timeout: float,
    ) -> None:
        self._name = name
        self._options = options
        self._open = open_workspace
        self._park = park
        self._concurrency = concurrency
        self._retry_backoff = retry_backoff
        self._stop_timeout = stop_timeout
        self._budget = RestartBudget(options.restart)
        self._workspace: Workspace | None = None
        self._counts = WorkerCounts()
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()
        #: Tells handlers in threads to stop between two records.
        self._halt = threading.Event()
        #: Set by a stop from outside, and by a handler that says so.
        self._stop = asyncio.Event()

    # --- what it tells

    @property
    def counts(self) -> WorkerCounts:
        """Counters of the records that were handled so far."""
        return self._counts

    @property
    def description(self) -> str:
        """One line for logs that names what the worker reads."""
        return f"cursor {self._name}"

    @property
    def cursor(self) -> AsyncCursor | None:
        """The cursor, while the worker has one open."""
        return None if self._workspace is None else self._workspace.cursor

    async def is_empty(self) -> bool:
        """Whether everything is handled and stored that is there to be handled."""
        cursor = self.cursor
        if cursor is None or self._counts.running or _is_behind(cursor):
            return False
        return (await cursor.lag()).records == 0

    def pause(self) -> None:
        """Take no more records after those that were polled."""
        self._may_go_on.clear()

    def resume(self) -> None:
        """Take records again, after ``pause``."""
        self._may_go_on.set()

    # --- its life

    async def run(self, stop: asyncio.Event, ready: asyncio.Event) -> None:
        """Work until ``stop`` is set, or the handler says so."""
        self._stop.clear()
        self._halt.clear()
        stopping = asyncio.ensure_future(self._stop_at(stop))
        try:
            await self._run(ready)
        except Exception as error:
            self._tell(self._options.on_failure, error)
            raise
        finally:
            stopping.cancel()

    async def _stop_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._end()

    def _tell(self, callback: Callable[[Any], None], what: Any) -> None:
        """Call a callback. An error of its own changes nothing."""
        try:
            callback(what)
        except Exception:  # noqa: BLE001 - whatever a callback raises
            WORKER_LOG.exception("worker %s: a callback has failed", self._name, extra={"worker": self._name})

    def _end(self) -> None:
        self._stop.set()
        self._halt.set()

    async def _run(self, ready: asyncio.Event) -> None:
        failures, stands_by = 0, False
        while not self._stop.is_set():
            try:
                self._workspace = await unless_stopped(self._open(), self._stop)
                if self._workspace is None:
                    return
                ready.set()
                failures, stands_by = 0, False
                await self._live(self._workspace)
            except CursorInUse as error:
                if not self._options.standby:
                    raise
                if not stands_by:
                    WORKER_LOG.info(
                        "worker %s: stands by: %s", self._name, error.message, extra={"worker": self._name}
                    )
                stands_by = True
                await self._stopped_within(_STANDBY_PAUSE_SECONDS)
            except TidemillError as error:
                if not is_transient(error):
                    raise
                failures += 1
                await self._pause(backoff_ms(failures, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS), error.message)
            except Exception as error:
                # A database driver's: a connection that is lost, a COMMIT that has failed.
                if not ready.is_set():
                    raise
                await self._pause(self._spend(error), f"{type(error).__name__}: {error}")
            finally:
                # Taken away first: callers must not see a workspace that is about to be closed.
                workspace, self._workspace = self._workspace, None
                if workspace is not None:
                    await workspace.close()

    async def _live(self, workspace: Workspace) -> None:
        """Work on one open cursor; after an error of the handler again, from the stored position on."""
        while not self._stop.is_set():
            try:
                if self._concurrency == 1:
                    await self._work_in_order(workspace)
                else:
                    await self._work_side_by_side(workspace)
            except _HandlerFailed as failed:
                if not await self._restart(workspace, failed.__cause__ or failed):
                    return
            except StoredElsewhere as error:
                # Somebody has reset the cursor: it is where they want it.
                WORKER_LOG.warning("worker %s: %s", self._name, error.message, extra={"worker": self._name})
                if self._concurrency > 1 and workspace.stores_at_once:
                    return  # Lanes have noted more since: opened again, the cursor knows that, too.
                await workspace.rollback()

    async def _restart(self, workspace: Workspace, error: BaseException) -> bool:
        """Go back to the stored position. False: the workspace is of no use any more."""
        pause_ms = self._spend(error)
        await workspace.rollback()
        await self._pause(pause_ms, f"the handler raised {type(error).__name__}: {error}")
        return workspace.is_usable

    def _spend(self, error: BaseException) -> int:
        """Use the restart budget; how long to wait, in ms. Raises ``WorkerFailed`` if it is used up."""
        pause_ms = self._budget.take(int(time.monotonic() * 1000))
        if pause_ms is None:
            policy = self._options.restart
            allowed = (
                "1 restart"
                if isinstance(policy, Once)
                else f"{policy.max_restarts} restarts within {policy.within_seconds:g} seconds"
            )
            raise WorkerFailed(
                f"worker {self._name!r} has used up its budget of {allowed}; the last error was "
                f"{type(error).__name__}: {error}. Mend its cause, or give the worker a dead_letter topic "
                "for records that its handler cannot do"
            ) from error
        self._counts.restarts += 1
        self._tell(self._options.on_restart, error)
        return pause_ms

    async def _pause(self, pause_ms: float, why: str) -> None:
        WORKER_LOG.warning(
            "worker %s: %s; going on in %d ms", self._name, why, pause_ms, extra={"worker": self._name}
        )
        await self._stopped_within(pause_ms / 1000)

    async def _stopped_within(self, seconds: float) -> bool:
        """Wait so long, or until a stop; whether it came."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
        return self._stop.is_set()

    # --- calling the handler

    async def _call(self, workspace: Workspace, records: Sequence[Delivery], *, beside: bool) -> BatchEnd:
        """Have records handled. After a stop, wait no longer than ``stop_timeout``."""
        progress = Progress()
        self._counts.running += 1
        work = (
            workspace.handle_one(records[0], progress)
            if beside
            else workspace.handle(records, self._halt, progress)
        )
        handling = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({handling, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not handling.done():
                await asyncio.wait({handling}, timeout=self._stop_timeout)
            if handling.done():
                end = await handling
            else:
                end = BatchEnd(progress.done)
                WORKER_LOG.warning(
                    "worker %s: its handler did not end within %g seconds; its record comes again",
                    *(self._name, self._stop_timeout),
                    # A thread may just have ended the last one.
                    extra=record_fields(self._name, records[min(end.done, len(records) - 1)]),
                )
        finally:
            self._counts.running -= 1
            stopping.cancel()
            handling.cancel()
        self._counts.handled += end.done
        self._counts.accepted += end.done
        return end

    async def _try_alone(
        self, workspace: Workspace, record: Delivery, error: BaseException, *, beside: bool = False
    ) -> BatchEnd:
        """Try a record again whose handler has raised, and park it in the end. Not done: a stop came."""
        tries = 1
        while True:
            self._counts.failed += not isinstance(error, Reject | Retry)
            self._log_failure(record, error, tries)
            is_last = isinstance(error, Reject) or (
                self._park is not None and tries >= self._options.attempts
            )
            if is_last and self._park is not None:
                await self._park_record(record, tries, error)
                if beside:
                    await workspace.note_parked(record)
                return BatchEnd(1)
            if is_last or (self._park is None and not isinstance(error, Retry)):
                raise _HandlerFailed from error
            if await self._stopped_within(self._delay(error, tries)):
                return BatchEnd(0)
            end = await self._call(workspace, [record], beside=beside)
            if end.error is None:
                return end
            error, tries = end.error, tries + 1

    def _delay(self, error: BaseException, tries: int) -> float:
        if isinstance(error, Retry) and error.delay is not None:
            return error.delay
        return min(self._retry_backoff * (1 << min(tries - 1, 20)), _LONGEST_PAUSE_MS / 1000)

    async def _park_record(self, record: Delivery, tries: int, error: BaseException) -> None:
        assert self._park is not None
        reason = str(error) if isinstance(error, Reject) else f"{type(error).__name__}: {error}"
        await self._park(record, tries, reason)
        self._counts.handled += 1
        self._counts.rejected += 1
        WORKER_LOG.warning(
            "worker %s: %s-%s offset %s: parked after %d tries: %s",
            *(self._name, record.topic, record.partition, record.offset, tries, reason),
            extra=record_fields(self._name, record)
            | {"delivery_count": tries, "outcome": "parked", "reason": reason},
        )
        self._tell(self._options.on_park, record)

    def _log_failure(self, record: Delivery, error: BaseException, tries: int) -> None:
        is_asked_for = isinstance(error, Reject | Retry)
        WORKER_LOG.log(
            30 if is_asked_for else 40,
            "worker %s: %s-%s offset %s, try %d: %s: %s",
            *(self._name, record.topic, record.partition, record.offset, tries, type(error).__name__, error),
            extra=record_fields(self._name, record) | {"delivery_count": tries, "reason": str(error)},
            exc_info=None if is_asked_for else error,
        )

    # --- one after the other

    async def _work_in_order(self, workspace: Workspace) -> None:
        cadence = Cadence(self._options, time.monotonic())
        while not self._stop.is_set():
            batch = await self._poll(workspace.cursor, cadence)
            if batch:
                end = await self._handle_batch(workspace, batch)
                if end.action is Action.STOP_WITH_ROLLBACK:
                    self._end()
                    await workspace.rollback()
                    return
                cadence.done(end.done)
                if end.done < len(batch):
                    self._end()
                    await workspace.store(_upto(workspace.cursor, batch[end.done :]))
                    return
                if end.action is Action.STOP:
                    self._end()
            # What was passed over is stored once nothing has come for a while.
            is_behind = not batch and not cadence.is_pending and _is_behind(workspace.cursor)
            if is_behind or cadence.is_due(time.monotonic(), is_idle=not batch):
                await workspace.store()
                cadence.stored(time.monotonic())
        await workspace.store()

    async def _poll(self, cursor: AsyncCursor, cadence: Cadence) -> list[Delivery]:
        """The next records. Returns early at a stop, and when the position is to be stored."""
        left = cadence.seconds_left(time.monotonic())
        if not self._may_go_on.is_set():
            await self._first_of(asyncio.ensure_future(self._may_go_on.wait()), left)
            return []
        timeout_ms = _POLL_MS if left is None else min(_POLL_MS, int(left * 1000) + 1)
        polling = asyncio.ensure_future(cursor.poll_batch(self._options.batch_size, timeout_ms=timeout_ms))
        await self._first_of(polling, None)
        return [] if polling.cancelled() else polling.result()

    async def _first_of(self, task: asyncio.Future[Any], seconds: float | None) -> None:
        """Wait for the task, for a stop, or so long; then the task is done or cancelled."""
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stopping}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _handle_batch(self, workspace: Workspace, batch: list[Delivery]) -> BatchEnd:
        """Handle the records of a batch, until a stop. Raises ``_HandlerFailed``."""
        done = 0
        while done < len(batch) and not self._stop.is_set():
            end = await self._call(workspace, batch[done:], beside=False)
            done += end.done
            if end.error is not None:
                failed = batch[done + end.redo]
                if end.redo and (self._park is not None or isinstance(end.error, Retry)):
                    # They were done, and were taken back with the transaction of the one that failed.
                    again = await self._call(workspace, batch[done : done + end.redo], beside=False)
                    if again.error is not None:
                        raise _HandlerFailed from again.error
                    done += again.done
                    if again.done < end.redo or again.action is not Action.CONTINUE:
                        return BatchEnd(done, again.action)
                    await workspace.store(_upto(workspace.cursor, batch[done:]))
                end = await self._try_alone(workspace, failed, end.error)
                done += end.done
            if end.action is Action.STOP_WITH_ROLLBACK:
                return BatchEnd(done, end.action)
            if workspace.stores_at_once and done:
                await workspace.store(_upto(workspace.cursor, batch[done:]))
            if end.action is Action.STOP:
                return BatchEnd(done, end.action)
        return BatchEnd(done)

    # --- side by side

    async def _work_side_by_side(self, workspace: Workspace) -> None:
        lanes: Lanes[_Work] = Lanes(self._concurrency)
        pool = _Pool(self, workspace, lanes)
        try:
            await pool.work()
        finally:
            await pool.close()


class _Pool:
    """The records that one worker handles side by side."""

    def __init__(self, engine: OrderedEngine, workspace: Workspace, lanes: Lanes[_Work]) -> None:
        self._engine = engine
        self._workspace = workspace
        self._cursor = workspace.cursor
        self._lanes = lanes
        self._cadence = Cadence(engine._options, time.monotonic(), side_by_side=True)
        self._running: dict[asyncio.Future[BatchEnd], _Work] = {}
        self._polling: asyncio.Future[list[Delivery]] | None = None
        self._stopping = asyncio.ensure_future(engine._stop.wait())
        self._resuming: asyncio.Future[bool] | None = None
        self._failure: BaseException | None = None
        self._is_rolled_back = False
        #: Whether a position could not be stored: then the cursor may be elsewhere than the lanes believe.
        self._is_adrift = False

    async def work(self) -> None:
        """Handle records until a stop or a failure, and store what is done."""
        while True:
            is_ending = self._engine._stop.is_set() or self._failure is not None
            if is_ending and not self._running:
                break
            if not is_ending:
                self._begin()
            await self._wait(is_ending=is_ending)
            self._collect()
            if self._is_store_due():
                await self._store_meanwhile()
        if self._is_rolled_back:
            await self._workspace.rollback()
        elif not self._is_adrift:
            await self._store()
        if self._failure is not None and not (
            self._is_rolled_back and isinstance(self._failure, _HandlerFailed)
        ):
            raise self._failure

    def _begin(self) -> None:
        engine = self._engine
        while (work := self._lanes.begin()) is not None:
            handling = asyncio.ensure_future(self._handle(work.record))
            self._running[handling] = work
        if self._polling is None and engine._may_go_on.is_set():
            size = engine._options.batch_size
            if self._lanes.waiting < size:
                # What is behind the last record is stored once nothing has come for a while.
                timeout_ms = _SETTLE_MS if _is_behind(self._cursor) else _POLL_MS
                self._polling = asyncio.ensure_future(self._cursor.poll_batch(size, timeout_ms=timeout_ms))

    async def _handle(self, record: Delivery) -> BatchEnd:
        engine = self._engine
        end = await engine._call(self._workspace, [record], beside=True)
        if end.error is not None:
            end = await engine._try_alone(self._workspace, record, end.error, beside=True)
        return end

    async def _wait(self, *, is_ending: bool) -> None:
        waiting: set[asyncio.Future[Any]] = {*self._running}
        if not is_ending:
            waiting.add(self._stopping)
            if self._polling is not None:
                waiting.add(self._polling)
            elif not self._engine._may_go_on.is_set():
                self._resuming = self._resuming or asyncio.ensure_future(self._engine._may_go_on.wait())
                waiting.add(self._resuming)
        is_stored = self._failure is None and not self._is_rolled_back
        timeout = self._cadence.seconds_left(time.monotonic()) if is_stored else None
        await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    def _collect(self) -> None:
        """Take the ends of handlers and what was polled."""
        if self._resuming is not None and self._resuming.done():
            self._resuming = None
        if self._polling is not None and self._polling.done():
            polling, self._polling = self._polling, None
            self._take(polling)
        for handling in [each for each in self._running if each.done()]:
            work = self._running.pop(handling)
            error = handling.exception()
            if error is not None:
                self._failure = self._failure or error
                continue
            end = handling.result()
            if end.action is Action.STOP_WITH_ROLLBACK:
                self._is_rolled_back = True
            elif end.done:
                self._lanes.done(work)
                self._cadence.done(1)
            if end.action is not Action.CONTINUE:
                self._engine._end()

    def _take(self, polling: asyncio.Future[list[Delivery]]) -> None:
        if (error := polling.exception()) is not None:
            self._failure = self._failure or error
        elif not self._is_adrift:
            self._lanes.add(
                _Work(each.partition, each.offset, self._cursor.key_of(each), each)
                for each in polling.result()
            )

    @property
    def _is_idle(self) -> bool:
        """Whether everything that the cursor has delivered is done."""
        return self._lanes.is_idle and self._polling is None

    def _is_store_due(self) -> bool:
        if self._is_rolled_back or self._failure is not None:
            return False
        is_behind = self._is_idle and _is_behind(self._cursor)
        return is_behind or self._cadence.is_due(time.monotonic())

    async def _store_meanwhile(self) -> None:
        """Store what is done. If that fails, the handlers that run end first: their records come again."""
        try:
            await self._store()
        except Exception as error:  # noqa: BLE001 - raised when they have ended
            self._failure = error
            self._is_adrift = True

    async def _store(self) -> None:
        if self._is_idle:
            await self._workspace.store()
        elif progress := self._lanes.progress():
            # What was stored as finished did not come again: the lanes know nothing of it.
            stored = self._cursor.committed
            upto = {each: max(done.upto, stored[each].offset) for each, done in progress.items()}
            finished = {partition: done.finished for partition, done in progress.items()}
            await self._workspace.store(upto, finished)
        self._cadence.stored(time.monotonic())

    async def close(self) -> None:
        """Cancel every task that the engine has started, and wait until all have ended."""
        left: list[asyncio.Future[Any]] = [self._stopping, *self._running]
        left += [each for each in (self._polling, self._resuming) if each is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _is_behind(cursor: AsyncCursor) -> bool:
    """Whether more was delivered, or passed over, than is stored."""
    return cursor.positions != cursor.committed


def _upto(cursor: AsyncCursor, left: Sequence[Delivery]) -> dict[int, int]:
    """By partition, the offset behind the last record that is done; those in ``left`` are not."""
    upto = {partition: position.offset for partition, position in cursor.positions.items()}
    for record in reversed(left):
        upto[record.partition] = record.offset
    return upto
