"""A worker on a share group: many handlers side by side, each with a record of its own.

Rules:

- Handlers that are awaited run on the event loop, others in threads of the worker's own: as many as
  ``concurrency`` says.
- While a handler runs its record stays locked: the consumer renews the lock, up to ``timeout``. After that
  the record goes to somebody else, and a handler that is awaited is cancelled.
- At a stop no more records are taken, those that wait go back at once, and handlers that run get
  ``stop_timeout`` to end. Then the others are cancelled, or left alone if they are threads; their records go
  back.
- A paused worker leaves the group, so that others get its records, and joins again when it is resumed.
- When the nodes cannot be reached the worker tries again for as long as it runs.
- A runner (task or thread) that ends although nobody stopped it ends the worker with an error: it would go on
  renewing locks of records that nobody handles.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from tidemill.client.workers.handling import Handling, WorkerCounts, is_async_handler
from tidemill.client.workers.logs import WORKER_LOG
from tidemill.client.workers.stopping import unless_stopped
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.net.retry import backoff_ms, is_transient

if TYPE_CHECKING:
    from tidemill.client.share.consumer import AsyncShare

__all__ = ("ShareEngine",)

_FIRST_PAUSE_MS: Final = 200
_LONGEST_PAUSE_MS: Final = 10_000


class ShareEngine:
    """Runs a handler for the records of a share group. ``open_share`` makes a member of the group."""

    def __init__(
        self,
        name: str,
        handler: Any,
        open_share: Callable[[], AsyncShare],
        *,
        concurrency: int,
        timeout: float | None,
        stop_timeout: float,
    ) -> None:
        self._name = name
        self._open_share = open_share
        self._concurrency = concurrency
        self._timeout = timeout
        self._stop_timeout = stop_timeout
        self._counts = WorkerCounts()
        self._handling = Handling(name, handler, self._counts)
        self._is_async = is_async_handler(handler)
        self._share: AsyncShare | None = None
        self._lost_before = 0
        self._paused = asyncio.Event()
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()

    @property
    def counts(self) -> WorkerCounts:
        """Counters of the records that were handled so far."""
        lost = 0 if self._share is None else self._share.counts.lost
        self._counts.lost = self._lost_before + lost
        return self._counts

    @property
    def description(self) -> str:
        """One line for logs that names what the worker reads."""
        return f"share group {self._name}"

    def pause(self) -> None:
        """Leave the group once the handlers that run have ended."""
        self._may_go_on.clear()
        self._paused.set()

    def resume(self) -> None:
        """Join the group again, and take records."""
        self._paused.clear()
        self._may_go_on.set()

    async def run(self, stop: asyncio.Event, ready: asyncio.Event) -> None:
        """Work until ``stop`` is set, then finish or give back what is held."""
        failures = 0
        while not stop.is_set():
            if self._paused.is_set():
                ready.set()
                await first_of(stop.wait(), self._may_go_on.wait())
                continue
            share = self._share = self._open_share()
            try:
                await unless_stopped(share.start(), stop)
                if stop.is_set():
                    return
                ready.set()
                failures = 0
                await self._work(share, stop)
            except TidemillError as error:
                if not is_transient(error):
                    raise
                failures += 1
                pause_ms = backoff_ms(failures, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)
                WORKER_LOG.warning(
                    "worker %s: %s; trying again in %d ms",
                    *(self._name, error.message, pause_ms),
                    extra={"worker": self._name, "reason": error.name},
                )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), pause_ms / 1000)
            finally:
                await share.close()
                self._lost_before += share.counts.lost
                self._share = None

    async def is_empty(self) -> bool:
        """Whether all records are done that are there to be done: none waits, here or on a node."""
        share = self._share
        if share is None or self._counts.running or not share.is_drained:
            return False
        try:
            waiting = await share.lag()
        except ApiError as error:
            if error.code != ErrorCode.unsupported_version:
                raise
            waiting = 0
        return waiting == 0 and share.is_drained

    async def _work(self, share: AsyncShare, stop: asyncio.Event) -> None:
        runners = (
            _Tasks(self._handling, share, self._timeout)
            if self._is_async
            else _Threads(self._name, self._handling, share)
        )
        runners.start(self._concurrency)
        stopped = asyncio.ensure_future(stop.wait())
        failed = asyncio.ensure_future(share.until_failed())
        paused = asyncio.ensure_future(self._paused.wait())
        ends: set[asyncio.Future[Any]] = {stopped, failed, paused, runners.broken}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            share.give_back()
            is_done = await runners.finish(self._stop_timeout)
            if not is_done:
                WORKER_LOG.warning(
                    "worker %s: %d handlers did not end within %g seconds; their records go back",
                    *(self._name, self._counts.running, self._stop_timeout),
                    extra={"worker": self._name},
                )
            if failed.done():
                raise failed.result()
            if runners.broken.done():
                error = runners.broken.result()
                raise TidemillError(
                    f"worker {self._name!r} stops, because one of its {self._concurrency} runners has ended "
                    f"by {type(error).__name__}: {error}"
                ) from error
        finally:
            for task in (stopped, failed, paused):
                task.cancel()
            await runners.cancel()


async def first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of these is done; the others are given up."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class _Tasks:
    """Handlers on the event loop: a task for each record that is worked on at a time."""

    def __init__(self, handling: Handling, share: AsyncShare, timeout: float | None) -> None:
        self._handling = handling
        self._share = share
        self._timeout = timeout
        #: What a runner has died of.
        self.broken: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: set[asyncio.Task[None]] = set()
        self._stopping = False

    def start(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = {loop.create_task(self._run()) for _ in range(count)}
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and not self._stopping and not self.broken.done():
            self.broken.set_result(error)

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while not self._stopping:
            self._idle.add(task)
            try:
                record = await self._share.next()
            except TidemillError:
                return  # The consumer failed, or was closed: the task that started this runner knows.
            finally:
                self._idle.discard(task)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout):
                    await self._handling.run_async(record)

    async def finish(self, timeout: float) -> bool:  # noqa: ASYNC109
        """Take no more records, and wait for those in work. False if some were not done in time."""
        self._stopping = True
        for task in list(self._idle):
            task.cancel()
        if not self._tasks:
            return True
        _, pending = await asyncio.wait(self._tasks, timeout=timeout)
        return not pending

    async def cancel(self) -> None:
        """Cancel the handlers that still run."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Threads:
    """Handlers in threads: each takes a record, handles it, and takes the next."""

    def __init__(self, name: str, handling: Handling, share: AsyncShare) -> None:
        self._name = name
        self._handling = handling
        self._share = share
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._stopping = False
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        #: What a runner has died of.
        self.broken: asyncio.Future[BaseException] = self._loop.create_future()

    def start(self, count: int) -> None:
        self._running = count
        self._threads = [
            threading.Thread(target=self._run, name=f"tidemill-worker-{self._name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while not self._stopping:
                record = self._share.take_blocking()
                if record is None:
                    return
                self._handling.run(record)
        except BaseException as error:  # noqa: BLE001 - raised by the worker, which ends
            failure = error
        finally:
            # After the loop's end nobody waits for this thread.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end, failure)

    def _end(self, failure: BaseException | None) -> None:
        if failure is not None and not self.broken.done():
            self.broken.set_result(failure)
        self._running -= 1
        if self._running == 0:
            self._ended.set()

    async def finish(self, timeout: float) -> bool:  # noqa: ASYNC109
        """Take no more records, and wait for those in work. False if some were not done in time."""
        self._stopping = True
        self._share.wake_threads(len(self._threads))
        try:
            await asyncio.wait_for(self._ended.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def cancel(self) -> None:
        """Let go of the threads that still run: they end with their handlers."""
        self._stopping = True
