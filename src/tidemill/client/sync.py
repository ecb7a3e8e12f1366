"""``tidemill.connect``: databases and tables for programs that do not await.

The same names as the async client, on top of it: an event loop runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import pyarrow as pa

from tidemill.client.connecting import AsyncTidemill, DatabaseInfo, TableInfo, connect_async
from tidemill.client.connection import DEFAULT_TIMEOUT_MS
from tidemill.client.loop_thread import CLOSED, LoopThread
from tidemill.client.process_bound import OpeningProcess, Unpicklable
from tidemill.client.sync_table import BucketScanner, Follow, Scan, Table, TableLease
from tidemill.client.tables.values import Lease
from tidemill.errors import ConnectionClosed, TidemillError

__all__ = ("BucketScanner", "Follow", "Scan", "Table", "TableLease", "Tidemill", "connect")

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
    """

    def __init__(
        self, bootstrap_servers: str, *, client_id: str = "tidemill", timeout_ms: int = DEFAULT_TIMEOUT_MS
    ):
        self._bootstrap_servers = bootstrap_servers
        self._client_id = client_id
        self._timeout_ms = timeout_ms
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
        self._run(lambda db: db.cluster.connect())

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

    # --- databases

    def create_database(
        self,
        name: str,
        *,
        comment: str | None = None,
        properties: Mapping[str, str] | None = None,
        if_not_exists: bool = False,
    ) -> None:
        """Create a database: the first part of its tables' names. ``create_table`` makes a missing one by
        itself.
        """
        self._run(
            lambda db: db.create_database(
                name, comment=comment, properties=properties, if_not_exists=if_not_exists
            )
        )

    def databases(self) -> list[DatabaseInfo]:
        """The databases, by name."""
        return self._run(lambda db: db.databases())

    def alter_database(
        self,
        name: str,
        *,
        comment: str | None = None,
        set_properties: Mapping[str, str] | None = None,
        unset_properties: Sequence[str] = (),
    ) -> None:
        """Set or take back properties of a database, or give it another comment."""
        self._run(
            lambda db: db.alter_database(
                name, comment=comment, set_properties=set_properties, unset_properties=unset_properties
            )
        )

    def drop_database(self, name: str, *, cascade: bool = False, if_exists: bool = False) -> None:
        """Drop a database. One that has tables only with ``cascade``, which drops them too."""
        self._run(lambda db: db.drop_database(name, cascade=cascade, if_exists=if_exists))

    # --- tables

    def create_table(
        self,
        name: str,
        schema: pa.Schema | str,
        *,
        primary_key: Sequence[str] | str = (),
        buckets: int | None = None,
        boundaries: Sequence[Any] = (),
        partition_by: str | None = None,
        row_format: str | None = None,
        key_format: str | None = None,
        properties: Mapping[str, str] | None = None,
        comment: str | None = None,
        if_not_exists: bool = False,
    ) -> Table:
        """Create a table ``database.table``, and its database if that is missing.

        ``schema`` is an Arrow schema, or Spark's words for one (``"id bigint, name string"``); key columns
        become NOT NULL. Without ``primary_key`` the table is a typed log. ``buckets`` (1) says over how many
        logs its rows are spread by the hash of their keys; ``boundaries``, keys in rising order, route by
        ranges of keys instead. ``partition_by`` names a column each of whose values gets buckets of its own.
        ``row_format`` is ``row``, ``json`` (for producers in other languages) or ``raw``. ``properties`` are
        configs of its topics, ``snapshot.…``, and ``user.…``.

        >>> import tidemill
        >>> with tidemill.open() as db:
        ...     db.create_table("shop.orders", "id bigint, region string", primary_key=["id"], buckets=4)
        <table shop.orders: id bigint, region string, primary key (id), 4 buckets>
        """
        made = self._run(
            lambda db: db.create_table(
                name,
                schema,
                primary_key=primary_key,
                buckets=buckets,
                boundaries=boundaries,
                partition_by=partition_by,
                row_format=row_format,
                key_format=key_format,
                properties=properties,
                comment=comment,
                if_not_exists=if_not_exists,
            )
        )
        return Table(self, made)

    def table(self, name: str) -> Table:
        """The table of that name. Raises ``TableError`` TABLE_NOT_FOUND if there is none."""
        return Table(self, self._run(lambda db: db.table(name)))

    def tables(self, database: str | None = None) -> list[TableInfo]:
        """The tables, by name, of one database or of all."""
        return self._run(lambda db: db.tables(database))

    def drop_table(self, name: str, *, if_exists: bool = False) -> None:
        """Drop a table with everything in it."""
        self._run(lambda db: db.drop_table(name, if_exists=if_exists))

    def leases(self) -> list[Lease]:
        """The leases of all tables."""
        return self._run(lambda db: db.leases())

    def release_lease(self, lease_id: str) -> None:
        """End a lease that somebody left behind."""
        self._run(lambda db: db.release_lease(lease_id))

    # --- the thread

    def _connection(self) -> AsyncTidemill:
        # Before the lock: a thread that the fork has left behind may have held it.
        self._process.check(self.bootstrap_servers)
        with self._connecting:
            if self._closed:
                raise ConnectionClosed(CLOSED)
            if self._opened is None:
                self._opened = _Opened(LoopThread("tidemill-client", self.bootstrap_servers))
                # A connection that is dropped without ``close``, or is open when the program ends.
                weakref.finalize(self, self._opened.close)
            opened = self._opened
            if opened.client is None:
                opened.client = opened.thread.run(
                    connect_async(
                        self.bootstrap_servers, client_id=self._client_id, timeout_ms=self._timeout_ms
                    )
                )
            return opened.client

    def _run(self, call: Callable[[AsyncTidemill], Coroutine[Any, Any, _T]]) -> _T:
        return self.run(call(self._connection()))

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine of the async client to its end."""
        opened = self._opened
        if opened is None:
            work.close()
            raise ConnectionClosed(CLOSED)
        return opened.thread.run(work)

    def iterate(self, batches: AsyncGenerator[_T]) -> Generator[_T]:
        """An async iterator as a plain one; dropping it closes the other."""
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
    """What a connection has open: apart from it, so that it can be closed when the connection is dropped."""

    def __init__(self, thread: LoopThread) -> None:
        self.thread = thread
        #: None until the first contact.
        self.client: AsyncTidemill | None = None
        #: Iterators over batches that have not come to their end.
        self.iterated: set[AsyncGenerator[Any]] = set()

    def close(self) -> None:
        """Close iterators, connections and thread. Closing twice is fine, and so is any thread or process."""
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
    # After an interrupt the call that was cancelled may take a moment to end.
    for _ in range(_CLOSING_TRIES):
        with contextlib.suppress(RuntimeError):
            await batches.aclose()
            return
        await asyncio.sleep(_CLOSING_PAUSE_SECONDS)
