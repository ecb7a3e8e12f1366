"""``tidemill.connect``: databases and tables for programs that do not await.

The same names as the async client, on top of it: an event loop runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tidemill.client.async_client import AsyncTidemill, connect_async
from tidemill.client.blocking import blocking, blocking_as, wrapping
from tidemill.client.loop_thread import CLOSED, LoopThread
from tidemill.client.process_bound import OpeningProcess, Unpicklable
from tidemill.client.sync_share import Share
from tidemill.client.sync_table import Table
from tidemill.client.sync_worker import Worker
from tidemill.errors import ConnectionClosed, TidemillError
from tidemill.net.connection import DEFAULT_TIMEOUT_MS

if TYPE_CHECKING:
    from tidemill.client.cursors.cursor import IfLost, Start
    from tidemill.client.cursors.sync_cursor import Cursor

__all__ = ("Tidemill", "connect")

_T = TypeVar("_T")
_CLOSING_TRIES = 100
_CLOSING_PAUSE_SECONDS = 0.01


def connect(
    bootstrap_servers: str, *, client_id: str = "tidemill", timeout_ms: int = DEFAULT_TIMEOUT_MS
) -> Tidemill:
    """Connect to a node, or to a cluster by some of its nodes (``"host:port,host:port"``).

    ``client_id`` is the name that nodes know it by. What may pass by itself, such as a node that is started
    again, is tried again for ``timeout_ms``. Raises ``NodeUnavailable`` if no address answers.

    >>> import tidemill
    >>> with tidemill.open() as node, tidemill.connect(node.bootstrap_servers) as db:
    ...     orders = db.create_table("shop.orders", "id bigint, item string", primary_key=["id"])
    ...     written = orders.upsert([{"id": 1, "item": "apple"}, {"id": 2, "item": "pear"}])
    ...     orders.lookup(2)
    {'id': 2, 'item': 'pear'}
    """
    db = Tidemill(bootstrap_servers, client_id=client_id, timeout_ms=timeout_ms)
    try:
        db.ping()
    except BaseException:
        db.close()
        raise
    return db


class Tidemill(Unpicklable):
    """A connection to a node or a cluster. Use it in a ``with`` statement, or call ``close``.

    Any number of threads may use it, and what it gives, at the same time. Processes that are forked cannot:
    each opens a connection of its own.

    >>> import tidemill
    >>> with tidemill.open() as db:
    ...     db.create_table("shop.orders", "id bigint, region string", primary_key=["id"], buckets=4)
    <table shop.orders: id bigint, region string, primary key (id), 4 buckets>
    """

    def __init__(
        self, bootstrap_servers: str, *, client_id: str = "tidemill", timeout_ms: int = DEFAULT_TIMEOUT_MS
    ):
        self._bootstrap_servers = bootstrap_servers
        self._client_id = client_id
        self._timeout_ms = timeout_ms
        #: The workers that were defined with this connection: ``tidemill worker run module:db`` runs them.
        self.workers: list[Worker] = []
        self._opened: _Opened | None = None
        self._connecting = threading.Lock()
        self._closed = False
        self._process = OpeningProcess()

    @property
    def bootstrap_servers(self) -> str:
        """What a Kafka client takes as ``bootstrap.servers``."""
        return self._bootstrap_servers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<tidemill at {self.bootstrap_servers}{', closed' if self._closed else ''}>"

    def _instead_of_a_pickle(self) -> str:
        return f"Open one there: tidemill.connect({self.bootstrap_servers!r})"

    def ping(self) -> None:
        """Make sure that the node answers. Raises ``NodeUnavailable`` if it does not."""
        self.run(self._awaited.cluster.connect())

    def close(self) -> None:
        """Close every connection. Closing twice is fine. Iterators that are still open end with it.

        A forked process closes nothing: the connection is its parent's.
        """
        if not self._process.is_this:
            return
        with self._connecting:
            self._closed = True
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    # --- records and share groups

    produce = blocking(AsyncTidemill.produce)
    produce_many = blocking(AsyncTidemill.produce_many)
    share = wrapping(AsyncTidemill.share, Share)
    worker = wrapping(AsyncTidemill.worker, Worker)
    configure_share = blocking(AsyncTidemill.configure_share)
    # --- cursors

    def cursor(
        self,
        name: str | None,
        source: str | Table,
        *,
        partitions: Iterable[int] | None = None,
        key_prefix: bytes | str | None = None,
        headers: Mapping[str, bytes | str | None] | None = None,
        where: Any = None,
        start: Start = "earliest",
        checkpoint: Any = None,
        own: Iterable[int] | None = None,
        take_over: bool = False,
        lease_ms: int = 10_000,
        if_lost: IfLost | None = None,
        gaps_kept: int = 1_000,
    ) -> Cursor:
        """Open a durable cursor over a topic or a table: records in order, from where the last commit ended.

        ``AsyncTidemill.cursor`` says what the options are.

        >>> import tidemill
        >>> with tidemill.open() as db:
        ...     orders = db.create_table("shop.orders", "id bigint, item string", primary_key=["id"])
        ...     _ = orders.upsert([{"id": 1, "item": "apple"}, {"id": 2, "item": "pear"}])
        ...     with db.cursor(None, "shop.orders", where="item = 'pear'") as cursor:
        ...         cursor.poll().row
        {'id': 2, 'item': 'pear'}
        """
        from tidemill.client.cursors.sync_cursor import open_blocking

        return open_blocking(
            self,
            self._awaited.cluster,
            name,
            source,
            partitions=partitions,
            key_prefix=key_prefix,
            headers=headers,
            where=where,
            start=start,
            checkpoint=checkpoint,
            own=own,
            take_over=take_over,
            lease_ms=lease_ms,
            if_lost=if_lost,
            gaps_kept=gaps_kept,
        )

    # --- databases

    create_database = blocking(AsyncTidemill.create_database)
    databases = blocking(AsyncTidemill.databases)
    alter_database = blocking(AsyncTidemill.alter_database)
    drop_database = blocking(AsyncTidemill.drop_database)

    # --- tables

    create_table = blocking_as(AsyncTidemill.create_table, Table)
    table = blocking_as(AsyncTidemill.table, Table)
    tables = blocking(AsyncTidemill.tables)
    drop_table = blocking(AsyncTidemill.drop_table)
    leases = blocking(AsyncTidemill.leases)
    release_lease = blocking(AsyncTidemill.release_lease)

    # --- the thread

    @property
    def _db(self) -> Self:
        return self

    @property
    def _awaited(self) -> AsyncTidemill:
        """The async client, connected at its first use."""
        # Checked before the lock is taken: a thread that the fork left behind may hold it for ever.
        self._process.check(self.bootstrap_servers)
        with self._connecting:
            if self._closed:
                raise ConnectionClosed(CLOSED)
            if self._opened is None:
                self._opened = _Opened(LoopThread("tidemill-client", self.bootstrap_servers))
                # Closes a connection that is dropped without ``close``, or is open when the program ends.
                weakref.finalize(self, self._opened.close)
            opened = self._opened
            if opened.client is None:
                opened.client = opened.thread.run(
                    connect_async(
                        self.bootstrap_servers, client_id=self._client_id, timeout_ms=self._timeout_ms
                    )
                )
            return opened.client

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine of the async client to its end."""
        opened = self._opened
        if opened is None:
            work.close()
            raise ConnectionClosed(CLOSED)
        return opened.thread.run(work)

    def iterate(self, batches: AsyncGenerator[_T]) -> Generator[_T]:
        """A plain iterator over an async one; dropping it closes the async one."""
        opened = self._opened
        if opened is None:
            raise ConnectionClosed(CLOSED)
        opened.iterated.add(batches)
        try:
            while True:
                try:
                    yield self.run(_next(batches))
                except StopAsyncIteration:
                    return
        finally:
            # After ``close``, and in a forked process, there is nothing left to do.
            if batches in opened.iterated and self._process.is_this:
                opened.iterated.discard(batches)
                self.run(_closing(batches))


class _Opened:
    """Thread, client and iterators of a connection, apart from it: they are closed when it is dropped."""

    def __init__(self, thread: LoopThread) -> None:
        self.thread = thread
        #: None until the first contact.
        self.client: AsyncTidemill | None = None
        #: Iterators over batches that have not come to their end.
        self.iterated: set[AsyncGenerator[Any]] = set()

    def close(self) -> None:
        """Close iterators, connections and thread. Any thread or process may call it, also twice."""
        iterated, self.iterated = self.iterated, set()
        # Refused in a forked process, and on the thread itself, where the garbage collector may call this;
        # and an iterator that another thread is waiting for ends with the connection.
        with contextlib.suppress(TidemillError):
            for batches in iterated:
                with contextlib.suppress(TidemillError):
                    self.thread.run(_closing(batches))
            if self.client is not None:
                self.thread.run(self.client.close())
        self.thread.close()


async def _next(batches: AsyncGenerator[_T]) -> _T:
    return await anext(batches)


async def _closing(batches: AsyncGenerator[Any]) -> None:
    # After an interrupt the call that was cancelled may take some time to end.
    for _ in range(_CLOSING_TRIES):
        with contextlib.suppress(RuntimeError):
            await batches.aclose()
            return
        await asyncio.sleep(_CLOSING_PAUSE_SECONDS)
