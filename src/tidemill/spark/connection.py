"""The way from Spark's Python processes to the nodes: one connection per process and address.

Spark's workers are forked and used for many tasks; a connection is opened by the first task that needs it and
kept for the next. A forked child never uses its parent's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from queue import Empty, Full, Queue
from typing import Any, Final, Generic, TypeVar

from tidemill.client.async_client import AsyncTidemill
from tidemill.client.cluster import Cluster
from tidemill.client.loop_thread import LoopThread
from tidemill.errors import TidemillError
from tidemill.net.retry import RetryPolicy, retry

__all__ = ("DEFAULT_TIMEOUT_MS", "Connected", "connected")

_T = TypeVar("_T")
#: How long a node may be away before a task or the driver gives up: it may be started again.
DEFAULT_TIMEOUT_MS: Final = 120_000
#: Items that ``iterate`` has ready before they are asked for.
_AHEAD: Final = 2
_LOOK_SECONDS: Final = 0.2
_PAUSE_MS: Final = 200
_IMPATIENT_MS: Final = 3_000


class Connected:
    """A connection, and the thread that its coroutines run in."""

    def __init__(self, servers: str, timeout_ms: int, *, patient: bool) -> None:
        self._loop = LoopThread("tidemill", servers)
        self.cluster = Cluster(servers, client_id=f"spark-{os.getpid()}", timeout_ms=timeout_ms)
        self.client = AsyncTidemill(self.cluster, servers)
        try:
            self.run(self._first_contact(timeout_ms if patient else _IMPATIENT_MS))
        except BaseException:
            self._loop.close()
            raise

    async def _first_contact(self, timeout_ms: int) -> None:
        """Wait until a node answers: a query must survive that a node is started again."""
        await retry(self.cluster.connect, RetryPolicy(timeout_ms, _PAUSE_MS, _PAUSE_MS))

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of a coroutine, for a caller that blocks."""
        return self._loop.run(work)

    def close(self) -> None:
        """Close the connection and end the thread."""
        with contextlib.suppress(TidemillError, OSError):
            self.run(self.cluster.close())
        self._loop.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Run a coroutine beside everything else; cancel the future to end it."""
        return self._loop.spawn(work)

    def iterate(self, items: AsyncIterator[_T]) -> Iterator[_T]:
        """The items of an asynchronous iterator; the next are made while the caller works on the last."""
        ready: Queue[_Item[_T]] = Queue(_AHEAD)
        gone = threading.Event()

        def put(item: _Item[_T]) -> None:
            while not gone.is_set():
                try:
                    ready.put(item, timeout=_LOOK_SECONDS)
                    return
                except Full:
                    continue

        def pump() -> None:
            try:
                while not gone.is_set():
                    put(_Item(self.run(_next(items))))
            except _Ended:
                put(_Item(ended=True))
            except BaseException as error:  # noqa: BLE001  # raised where the items are asked for
                put(_Item(error=error))

        thread = threading.Thread(target=pump, name="tidemill-ahead", daemon=True)
        thread.start()
        try:
            while not (item := ready.get()).ended:
                if item.error is not None:
                    raise item.error
                assert item.value is not None
                yield item.value
        finally:
            gone.set()
            _drain(ready)
            thread.join()
            close = getattr(items, "aclose", None)
            if close is not None:
                self.run(close())


class _Item(Generic[_T]):
    """An entry of the queue between two threads: an item, an error, or the end of the items."""

    def __init__(
        self, value: _T | None = None, *, error: BaseException | None = None, ended: bool = False
    ) -> None:
        self.value = value
        self.error = error
        self.ended = ended


async def _next(items: AsyncIterator[_T]) -> _T:
    try:
        return await anext(items)
    except StopAsyncIteration:
        # Python does not let StopAsyncIteration leave a coroutine.
        raise _Ended from None


class _Ended(Exception):
    """Stands for StopAsyncIteration: there are no more items."""


def _drain(ready: Queue[Any]) -> None:
    while True:
        try:
            ready.get_nowait()
        except Empty:
            return


_connections: dict[tuple[int, str, int], Connected] = {}
_opening = threading.Lock()


def connected(servers: str, timeout_ms: int = DEFAULT_TIMEOUT_MS, *, patient: bool = True) -> Connected:
    """This process's connection to these servers, which is opened at its first use.

    Raises ``NodeUnavailable`` if none answers in time, or soon if the caller is not ``patient``: a wrong
    address should be known at once.
    """
    key = (os.getpid(), servers, timeout_ms)
    with _opening:
        found = _connections.get(key)
        if found is None:
            found = _connections[key] = Connected(servers, timeout_ms, patient=patient)
            # Otherwise the interpreter ends while the loop runs, which prints warnings.
            atexit.register(_close, key)
        return found


def _close(key: tuple[int, str, int]) -> None:
    # A parent's connection is the parent's to close.
    if key[0] == os.getpid():
        _connections.pop(key).close()
