"""An event loop on a thread of its own, for callers that do not have one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

__all__ = ("LoopThread",)

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines for blocking callers. ``close`` ends the thread; nothing can be run afterwards."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = False
        #: Nothing is scheduled behind the loop's end, where nobody would run it.
        self._scheduling = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of ``work``; it is cancelled if the caller is interrupted."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(
                "a blocking call cannot be made from a callback of the client; use connect_async"
            )
        with self._scheduling:
            if self._closing:
                work.close()
                raise RuntimeError("this connection is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException as error:
            future.cancel()
            if isinstance(error, CancelledError) and self._closing:
                raise RuntimeError("this connection was closed during the call") from None
            raise

    def spawn(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Begin ``work`` and go on; it is cancelled when the thread ends."""
        with self._scheduling:
            if self._closing:
                work.close()
                raise RuntimeError("this connection is closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End the thread. Closing twice is fine."""
        with self._scheduling:
            if not self._closing:
                self._closing = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        # The garbage collector may call this on any thread.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()
