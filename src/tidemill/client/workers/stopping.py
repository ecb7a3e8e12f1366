"""How workers are told to stop: by SIGINT or SIGTERM, and in the midst of something that takes long."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Final, Self, TypeVar

__all__ = ("STOP_SIGNALS", "StopSignals", "unless_stopped")

T = TypeVar("T")

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """SIGINT and SIGTERM, as something that a thread without an event loop can wait for.

    A context manager: while it is open the first signal ends ``wait``, and a second one raises
    ``KeyboardInterrupt`` if ``second_interrupts``. In another thread than the main one there are no signals.

    Python calls the handler of a signal in the main thread, in the midst of whatever that does. So the
    handler must take no lock that the main thread may hold: ``threading.Event.set`` does, and hangs if the
    signal comes inside of ``wait``. ``SimpleQueue.put`` is made to be called there.
    """

    def __init__(self, *, second_interrupts: bool = True) -> None:
        self._told: SimpleQueue[None] = SimpleQueue()
        self._second_interrupts = second_interrupts
        self._is_signalled = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._signalled) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self._is_signalled and self._second_interrupts:
            raise KeyboardInterrupt
        self._is_signalled = True
        self._told.put(None)

    def tell(self) -> None:
        """End ``wait`` without a signal, from any thread."""
        self._told.put(None)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a signal or for ``tell``, at most so long; whether one came. Each ends one wait."""
        try:
            self._told.get(timeout=seconds)
        except Empty:
            return False
        return True


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of ``work``; None if ``stop`` was set before it was done, and it was given up."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.wait({working})
    return None if working.cancelled() else working.result()
