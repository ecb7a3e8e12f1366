"""The life of a worker: start, stop, join, run until a signal, run until there is nothing to do.

What it does is its ``Engine``'s. An error after which there is no going on reaches ``join``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import TracebackType
from typing import Any, Final, Self

from tidemill.client.process_bound import Unpicklable
from tidemill.client.workers.engine import Engine
from tidemill.client.workers.handling import WorkerCounts
from tidemill.client.workers.logs import WORKER_LOG, called
from tidemill.client.workers.stopping import STOP_SIGNALS
from tidemill.errors import ConfigError, ErrorCode, TidemillError

__all__ = ("AsyncWorker",)

_EMPTY_CHECK_SECONDS: Final = 0.02


class AsyncWorker(Unpicklable):
    """Runs a handler for every record of a topic.

    ``@db.worker("emails", topic="outbox")`` above a handler makes one; ``await send.run()`` works until the
    process is told to stop. Calling it with a record calls the handler.
    """

    def __init__(
        self, name: str | None, topic: str, make_engine: Callable[[Any], Engine], handler: Any = None
    ) -> None:
        self.name = name
        self.topic = topic
        #: What logs and errors call it.
        self._called = called(name)
        self._make_engine = make_engine
        self._handler: Any = None
        self._engine: Engine | None = None
        self._stop = asyncio.Event()
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        if handler is not None:
            self(handler)

    def __repr__(self) -> str:
        return f"<worker {self._called} on {self.topic}, {'running' if self.is_running else 'not running'}>"

    def _instead_of_a_pickle(self) -> str:
        return "Define the worker in a module, and import that there"

    def __call__(self, handler_or_record: Any) -> Any:
        """Set the handler if there is none yet; afterwards, call it with a record, as a test does."""
        if self._handler is not None:
            return self._handler(handler_or_record)
        if not callable(handler_or_record):
            raise ConfigError(
                f"worker {self._called!r} has no handler: put @db.worker({self.name!r}, topic=…) above one"
            )
        self._handler = handler_or_record
        self._engine = self._make_engine(handler_or_record)
        return self

    @property
    def counts(self) -> WorkerCounts:
        """Counters of the records that the worker has handled so far."""
        return self._bound.counts

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not come to its end."""
        return self._task is not None and not self._task.done()

    @property
    def engine(self) -> Engine:
        """The engine that runs the handler: of a share group, or of an ordered worker."""
        return self._bound

    @property
    def _bound(self) -> Engine:
        if self._engine is None:
            raise ConfigError(f"worker {self._called!r} has no handler yet")
        return self._engine

    # --- its life

    async def start(self) -> None:
        """Begin to work, and go on. Returns once records can come; raises what keeps it from working."""
        await self.begin()
        assert self._task is not None
        ready = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._task.done():
            await self.join()

    async def begin(self, *, on_end: Callable[[], None] | None = None) -> None:
        """Begin to work, and wait for nothing. ``on_end`` is called when it has come to its end."""
        if self.is_running:
            raise TidemillError(f"worker {self._called!r} runs already", code=ErrorCode.invalid_request)
        engine = self._bound
        self._stop.clear()
        self._ready.clear()
        self._task = asyncio.get_running_loop().create_task(self._run(engine))
        if on_end is not None:
            self._task.add_done_callback(lambda _: on_end())

    async def stop(self) -> None:
        """Ask it to stop: handlers that run may end, what waits goes back. ``join`` waits for that."""
        self._stop.set()

    async def pause(self) -> None:
        """Take no more records until ``resume``. Handlers that run end as ever."""
        self._bound.pause()

    async def resume(self) -> None:
        """Take records again, after ``pause``."""
        self._bound.resume()

    async def join(self) -> None:
        """Wait until it has stopped. Raises the error that ended it, if one did."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop_and_join(self) -> None:
        """Stop, and wait until it has stopped."""
        await self.stop()
        await self.join()

    async def run(self, *, metrics: str | None = None, allow_unauthenticated: bool = False) -> None:
        """Work until SIGINT or SIGTERM; a second signal interrupts at once.

        With ``metrics``, an address ``host:port``, the worker's metrics are served there, for Prometheus. One
        that other machines can reach needs ``allow_unauthenticated``.
        """
        with self._stopped_by_signals(), self._serving(metrics, allow_unauthenticated):
            await self.start()
            await self.join()

    def _serving(
        self, metrics: str | None, allow_unauthenticated: bool
    ) -> contextlib.AbstractContextManager[object]:
        if metrics is None:
            return contextlib.nullcontext()
        from tidemill.client.workers.metrics import MetricsServer, measure

        loop = asyncio.get_running_loop()
        return MetricsServer(
            lambda: [asyncio.run_coroutine_threadsafe(measure(self), loop).result()],
            metrics,
            allow_unauthenticated=allow_unauthenticated,
        )

    async def run_until_empty(self, *, timeout: float = 30.0) -> WorkerCounts:  # noqa: ASYNC109
        """Work until every record of the topic is done, and stop: for tests.

        Records that were released wait for their backoff as ever. Raises ``TimeoutError`` if the topic is not
        empty within ``timeout`` seconds.
        """
        await self.start()
        try:
            async with asyncio.timeout(timeout):
                while self.is_running and not await self._bound.is_empty():  # noqa: ASYNC110 - nodes tell nobody
                    await asyncio.sleep(_EMPTY_CHECK_SECONDS)
        except TimeoutError:
            raise TimeoutError(
                f"worker {self._called!r}: topic {self.topic!r} is not empty after {timeout:g} seconds "
                f"({self.counts}); give it more time, or see what waits: 'tidemill share peek', of an "
                "ordered worker 'tidemill cursor lag'"
            ) from None
        finally:
            await self.stop_and_join()
        return self.counts

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop_and_join()

    async def _run(self, engine: Engine) -> None:
        fields = {"worker": self._called, "topic": self.topic}
        WORKER_LOG.info("worker %s: started on %s", self._called, engine.description, extra=fields)
        try:
            await engine.run(self._stop, self._ready)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            WORKER_LOG.error(
                "worker %s: ended by %s", self._called, reason, extra=fields | {"reason": reason}
            )
            raise
        WORKER_LOG.info(
            "worker %s: stopped after %d records",
            *(self._called, engine.counts.handled),
            extra=fields | {"counts": asdict(engine.counts)},
        )

    @contextlib.contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def signalled() -> None:
            if self._stop.is_set():
                task.cancel()
            self._stop.set()

        installed = []
        for number in STOP_SIGNALS:
            # Only the main thread can have signals; elsewhere the program stops the worker.
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                loop.add_signal_handler(number, signalled)
                installed.append(number)
        try:
            yield
        finally:
            for number in installed:
                loop.remove_signal_handler(number)
