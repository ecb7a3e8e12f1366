"""An event loop on a thread of its own, for callers that do not have one.

A process that is forked has no such thread: there, every call is refused and closing does nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar

from tidemill.client.process_bound import OpeningProcess
from tidemill.errors import ConnectionClosed, ErrorCode, TidemillError

__all__ = ("CLOSED", "LoopThread")

_T = TypeVar("_T")
#: The message of the error for every use of a connection after its ``close``.
CLOSED: Final = "this connection is closed; open another one with tidemill.connect or tidemill.open"


class LoopThread:
    """Runs coroutines for blocking callers. ``close`` ends the thread; nothing can be run afterwards.

    ``servers`` is what it is connected to, for the message that a forked process gets.
    """

    def __init__(self, name: str, servers: str) -> None:
        self._servers = servers
        self._process = OpeningProcess()
        self._loop = asyncio.new_event_loop()
        self._closing = False
        #: Held while work is scheduled: nothing may be scheduled after the loop's end, where it would never
        #: run.
        self._scheduling = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of ``work``; it is cancelled if the caller is interrupted."""
        if threading.current_thread() is self._thread:
            work.close()
            raise TidemillError(
                "a blocking call cannot be made from a callback of the client; use connect_async",
                code=ErrorCode.invalid_request,
            )
        future = self.spawn(work)
        try:
            return future.result()
        except BaseException as error:
            future.cancel()
            if isinstance(error, CancelledError) and self._closing:
                raise ConnectionClosed("this connection was closed during the call") from None
            raise

    def spawn(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Begin ``work`` and go on; it is cancelled when the thread ends."""
        try:
            # Checked before the lock is taken: a thread that the fork left behind may hold it for ever.
            self._process.check(self._servers)
            with self._scheduling:
                if self._closing:
                    raise ConnectionClosed(CLOSED)
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        except ConnectionClosed:
            work.close()
            raise

    def close(self) -> None:
        """End the thread. Closing twice is fine; in a forked process there is nothing to close."""
        if not self._process.is_this:
            return
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
            self._run_until_closed()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    def _run_until_closed(self) -> None:
        while True:
            try:
                self._loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt):
                # Raised by something that a caller handed over. asyncio lets it end the loop; here its caller
                # is told, and the calls of others go on.
                if self._closing:
                    return
