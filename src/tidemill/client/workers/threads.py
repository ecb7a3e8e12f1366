"""Threads that handlers of ordered workers run in. They keep no process from ending.

A ``ThreadPoolExecutor`` waits for its threads when the process ends: a handler that hangs would keep a worker
that was stopped from that.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ("Threads",)

T = TypeVar("T")


class Threads:
    """Some threads. Each takes a call, makes it, and takes the next."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._run, name="tidemill-worker", daemon=True).start()

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Make a call in one of the threads. After a cancellation it goes on, and nobody hears of its end."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def make() -> None:
            if future.cancelled():
                return
            settle: Callable[[], None]
            try:
                result = call(*args)
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                settle = partial(_fail, future, error)
            else:
                settle = partial(_succeed, future, result)
            # After the loop's end nobody waits for it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle)

        self._calls.put(make)
        return await future

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Let the threads end when their calls have. ``last`` is called after those."""
        if last is not None:
            self._calls.put(last)
        for _ in range(self._count):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        # A StopIteration cannot be raised where something is awaited.
        future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
