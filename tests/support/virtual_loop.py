"""An event loop with virtual time: nothing waits, and one seed gives one trace.

- Whenever nothing is ready, time moves on to the next timer. There are no sockets, no pipes and no threads.
- Blocking work (``run_in_executor``, ``asyncio.to_thread``, pools made by ``pool``) runs on the loop's own
  thread at a seeded moment, and its result arrives at a later one: what it did is there before that.
- Whoever runs in a ``Process`` can be killed: its tasks end, its timers and its blocking work never come. It
  can be paused, as by SIGSTOP: whatever is due in it happens when it goes on. Its clock can have a rate.
- ``trace`` is what happened, each with its virtual time. Two runs of one seed must have the same. So nothing
  may depend on when Python collects its garbage: that waits until the run is over.

    run_virtual(story, seed=7)
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, TypeVar
from unittest.mock import patch

from tidemill.errors import StorageError
from tidemill.log.pace import Pace

__all__ = ("Process", "VirtualLoop", "current_loop", "current_process", "run_virtual")

T = TypeVar("T")

#: How long blocking work takes at most, before and after it is done; mostly it is much less. A loop has one.
_BUSY_SECONDS_MAX = (0.01, 0.1, 0.5)
#: Longer than any story takes.
_LONG_SECONDS = 1e7
#: Turns of the loop in which the tasks of a killed process must have ended.
_TURNS_TO_DIE = 200
#: Cancelled timers are thrown away when there are more of them than of the others, and than this.
_CANCELLED_TIMERS_MAX = 200
#: What ``asyncio`` calls the same moment. Timers are set later by twice that: who looks at the clock when one
#: fires must not find that its time has not come, and set it again for the same moment, for ever.
_RESOLUTION_SECONDS = 1e-9


class Process:
    """What runs here dies together; ``run`` and ``start`` put something in."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.is_dead = False
        #: What became due while it was paused; None while it is not.
        self.held: list[asyncio.Handle] | None = None
        #: How fast its clock goes; it is a constant, because clocks never go back.
        self.clock_rate = 1.0
        self.context = copy_context()
        self.context.run(_process.set, self)
        #: In the order of their beginnings, which is that of their ends, too.
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.pools: list[VirtualPool] = []
        self.default_pool = VirtualPool(loop, "default", 4, self)
        self._loop = loop

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of this process."""
        return self._loop.create_task(work, context=self.context.copy())

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a task of this process."""
        return await self.start(work)

    def pause(self) -> None:
        """Nothing of it runs until ``go_on``."""
        if self.held is None:
            self.held = []
            self._loop.hold(self)

    def go_on(self) -> None:
        """Everything that became due in the pause happens now."""
        if self.held is not None:
            held, self.held = self.held, None
            self._loop.let_go(self, held)

    async def kill(self) -> None:
        """End everything at once. Whatever the tasks do on their way out must not reach anybody."""
        self.is_dead = True
        self.go_on()
        for pool in self.pools:
            pool.die()
        for _ in range(_TURNS_TO_DIE):
            if not self.tasks:
                break
            for task in list(self.tasks):
                task.cancel()
            await asyncio.sleep(0)
        assert not self.tasks, f"{self.name} does not die: {list(self.tasks)}"
        self._loop.forget_timers(self)


_process: ContextVar[Process | None] = ContextVar("process", default=None)


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time moves on when nothing is ready. All chance comes from ``rng``."""

    _ready: deque[asyncio.Handle]
    _closed: bool

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.busy_seconds_max = rng.choice(_BUSY_SECONDS_MAX)
        self.trace: list[tuple[float, str]] = []
        #: What went wrong in callbacks, where nobody could catch it.
        self.failures: list[dict[str, Any]] = []
        self._now = 0.0
        #: How long the blocking work that runs now has slept.
        self.slept_seconds = 0.0
        self._clock_resolution = _RESOLUTION_SECONDS
        #: A heap of (time, number, handle): those of one moment come in the order of their making.
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = count()
        self._cancelled_timers = 0
        self._main = Process(self, "main")
        self._paused: dict[Process, None] = {}
        self.set_task_factory(_new_task)
        self.set_exception_handler(_note_failure)

    @property
    def now(self) -> float:
        """The time outside of all processes."""
        return self._now

    def time(self) -> float:
        """The time on the clock of the process that asks."""
        process = _process.get()
        return self._now if process is None else self._now * process.clock_rate

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call in the next turn; without the base class's checks of threads."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call at a time on the clock of the process that asks."""
        process = _process.get()
        if process is not None:
            when /= process.clock_rate
        return self.call_outside(when, callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call after a time on the clock of the process that asks."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_outside(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call at a time outside of all processes, on no process's clock."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        when += 2 * _RESOLUTION_SECONDS
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled_timers += 1
        if self._cancelled_timers > max(_CANCELLED_TIMERS_MAX, len(self._timers) // 2):
            self._timers = [each for each in self._timers if not each[2].cancelled()]
            heapify(self._timers)
            self._cancelled_timers = 0

    def _run_once(self) -> None:
        """One turn: what is ready, or if nothing is, what the next timer brings."""
        ready, timers = self._ready, self._timers
        if not ready:
            while timers and timers[0][2]._cancelled:
                heappop(timers)
            if timers:
                self._now = max(self._now, timers[0][0])
            elif not self._stopping:  # type: ignore[attr-defined]
                raise RuntimeError("everybody waits, and nothing will ever happen again")
        end = self._now + _RESOLUTION_SECONDS
        while timers and timers[0][0] < end:
            handle = heappop(timers)[2]
            if not handle._cancelled:
                ready.append(handle)
        for _ in range(len(ready)):
            due = ready.popleft()
            if due._cancelled:
                continue
            if self._paused:
                process = due._context.get(_process)  # type: ignore[attr-defined]
                if process is not None and process.held is not None:
                    process.held.append(due)
                    continue
            due._run()

    def hold(self, process: Process) -> None:
        """Run nothing of a process any more, for now."""
        self._paused[process] = None

    def let_go(self, process: Process, held: list[asyncio.Handle]) -> None:
        """Run what a process was kept from."""
        del self._paused[process]
        self._ready.extend(held)

    def now_ms(self) -> int:
        """The virtual time in milliseconds, for a metadata store's leases."""
        return int(self._now * 1_000)

    def pace(self, bytes_per_second: int = 0) -> Pace:
        """A throttle for blocking work: what it sleeps comes on top of the time that the work takes."""
        return Pace(bytes_per_second, clock=self._work_time, sleep=self._sleep_at_work)

    def _work_time(self) -> float:
        return self._now + self.slept_seconds

    def _sleep_at_work(self, seconds: float) -> None:
        self.slept_seconds += seconds

    def jump(self, seconds: float) -> None:
        """Let time pass at once, as for a machine that was asleep: what was due happens after it."""
        self._now += seconds

    def note(self, what: str) -> None:
        """Something happened."""
        self.trace.append((self._now, what))

    def process(self, name: str) -> Process:
        return Process(self, name)

    def pool(self, purpose: str, threads: int) -> Executor:
        """A pool of the process that asks for it; takes the place of ``coordination.pools.thread_pool``."""
        return VirtualPool(self, purpose, threads, _process.get() or self._main)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        pool = executor or (_process.get() or self._main).default_pool
        return asyncio.wrap_future(pool.submit(func, *args), loop=self)

    def forget_timers(self, process: Process) -> None:
        for _, _, handle in list(self._timers):
            if handle._context.get(_process) is process:  # type: ignore[attr-defined]
                handle.cancel()

    # What the base class needs of a loop.

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class VirtualPool(Executor):
    """Calls that run at seeded moments; with one thread, one after the other."""

    def __init__(self, loop: VirtualLoop, purpose: str, threads: int, process: Process) -> None:
        self._loop = loop
        self._purpose = purpose
        self._idle = threads
        self._process = process
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        #: Calls that have a thread, until they are over.
        self._running: dict[Future[Any], Callable[[], Any]] = {}
        self._is_shut = False
        process.pools.append(self)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[T] = Future()
        if self._process.is_dead:
            future.set_exception(_gone())
            return future
        self._queue.append((future, partial(fn, *args, **kwargs)))
        self._start_next()
        return future

    def _start_next(self) -> None:
        while self._idle and self._queue:
            future, work = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                self._idle -= 1
                self._running[future] = work
                self._later(self._run, future)

    def _later(self, call: Callable[..., None], *args: Any, slept_seconds: float = 0.0) -> None:
        loop = self._loop
        delay = slept_seconds + loop.busy_seconds_max * loop.rng.random() ** 3
        loop.call_later(delay, call, *args, context=self._process.context)

    def _run(self, future: Future[Any]) -> None:
        if future not in self._running:
            return  # A shutdown or the end of the process came first.
        work = self._running[future]
        self._loop.note(f"{self._purpose} runs")
        self._loop.slept_seconds = 0.0
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        self._later(self._over, future, result, failure, slept_seconds=self._loop.slept_seconds)
        self._loop.slept_seconds = 0.0

    def _over(self, future: Future[Any], result: Any, error: BaseException | None) -> None:
        if self._running.pop(future, None) is None:
            return
        self._idle += 1
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
        self._start_next()

    def map(
        self, fn: Callable[..., T], *iterables: Any, timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """At once: whoever waits for it holds the only thread."""
        return iter([fn(*each) for each in zip(*iterables, strict=False)])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more; what waits is run at once if the caller waits for it."""
        self._is_shut = True
        while cancel_futures and self._queue:
            self._queue.popleft()[0].cancel()
        if wait:
            for future, work in [*self._running.items(), *self._queue]:
                self._finish_now(future, work)
            self._running.clear()
            self._queue.clear()

    def _finish_now(self, future: Future[Any], work: Callable[[], Any]) -> None:
        if future.done() or (not future.running() and not future.set_running_or_notify_cancel()):
            return
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    def die(self) -> None:
        """The process is gone: nothing runs any more, and who waits hears so."""
        for future in [*self._running, *(future for future, _ in self._queue)]:
            if not future.done():
                future.set_exception(_gone())
        self._running.clear()
        self._queue.clear()


def current_loop() -> VirtualLoop:
    """The running loop, which must be a virtual one."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def current_process() -> Process | None:
    """The process that runs now; None outside of all."""
    return _process.get()


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]], *, seed: int) -> T:
    """Run ``main`` on a loop of its own. Raises what went wrong in a callback of anybody who is alive."""
    loop = VirtualLoop(random.Random(seed))
    with _no_processor_time(), _no_garbage_collection(), asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(main())
    for failure in loop.failures:
        raise AssertionError(failure["message"]) from failure.get("exception")
    return result


@contextmanager
def _no_processor_time() -> Iterator[None]:
    """Work takes no virtual time, so no piece of it is ever long enough to give way to others."""
    with (
        patch("tidemill.coordination.turns.SLICE_SECONDS", float("inf")),
        patch("tidemill.server.connections.connection.SLICE_SECONDS", float("inf")),
        # It compares real times: here it would only ever find that all is well, a hundred times a second.
        patch("tidemill.server.watchdog._BUSY_BEAT_SECONDS", _LONG_SECONDS),
        patch("tidemill.server.watchdog._IDLE_BEAT_SECONDS", _LONG_SECONDS),
    ):
        yield


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Whoever is collected may have something to say: a generator that was not closed ends in a task."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _new_task(loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None) -> Any:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
    process = _process.get() if context is None else context.get(_process)
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(process.tasks.pop)
    return task


def _note_failure(loop: asyncio.AbstractEventLoop, failure: dict[str, Any]) -> None:
    assert isinstance(loop, VirtualLoop)
    process, error = _process.get(), failure.get("exception")
    # Whoever waited for work of a process that was killed may be gone as well.
    if isinstance(error, _ProcessGone) or (process is not None and process.is_dead):
        return
    if isinstance(error, Exception):
        loop.failures.append(failure)


class _ProcessGone(StorageError):
    """The answer to blocking work of a process that was killed."""


def _gone() -> StorageError:
    return _ProcessGone("the process is gone")
