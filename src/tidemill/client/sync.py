"""``tidemill.connect``: databases and tables for programs that do not await.

The same names as the async client, on top of it: an event loop runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from tidemill.client.connecting import AsyncTidemill, DatabaseInfo, TableInfo, connect_async
from tidemill.client.connection import DEFAULT_TIMEOUT_MS
from tidemill.client.loop_thread import LoopThread
from tidemill.errors import TidemillError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    import pyarrow as pa

    from tidemill.client.tables.follow import AsyncFollow, ChangeBatch
    from tidemill.client.tables.lease import AsyncLease
    from tidemill.client.tables.scan import AsyncScan
    from tidemill.client.tables.scanner import KvBatchScanner
    from tidemill.client.tables.table import AsyncTable
    from tidemill.client.tables.values import BucketStats, Lease, Snapshot, Written

__all__ = ("BucketScanner", "Follow", "Scan", "Table", "TableLease", "Tidemill", "connect")

_T = TypeVar("_T")
_CLOSING_TRIES = 100
_CLOSING_PAUSE_SECONDS = 0.01


def connect(
    bootstrap_servers: str, *, client_id: str = "tidemill", timeout_ms: int = DEFAULT_TIMEOUT_MS
) -> Tidemill:
    """Connect to a node, or to a cluster by some of its nodes (``"host:port,host:port"``).

    Raises ``NodeUnavailable`` if no address answers.

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


class Tidemill:
    """A connection to a node or a cluster. Use it in a ``with`` statement, or call ``close``.

    Any number of threads may use it, and what it gives, at the same time.
    """

    def __init__(
        self, bootstrap_servers: str, *, client_id: str = "tidemill", timeout_ms: int = DEFAULT_TIMEOUT_MS
    ):
        self._bootstrap_servers = bootstrap_servers
        self._client_id = client_id
        self._timeout_ms = timeout_ms
        self._thread: LoopThread | None = None
        self._connected: AsyncTidemill | None = None
        self._connecting = threading.Lock()
        self._closed = False
        #: Iterators over batches that have not come to their end.
        self._iterated: set[AsyncGenerator[Any]] = set()

    @property
    def bootstrap_servers(self) -> str:
        """What a Kafka client takes as ``bootstrap.servers``."""
        return self._bootstrap_servers

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<tidemill at {self.bootstrap_servers}>"

    def ping(self) -> None:
        """Make sure that the node answers."""
        self._connection()

    def close(self) -> None:
        """Close every connection. Closing twice is fine. Iterators that are still open end with it."""
        with self._connecting:
            self._closed = True
            thread, self._thread = self._thread, None
            connected, self._connected = self._connected, None
            iterated, self._iterated = self._iterated, set()
        if thread is not None:
            for batches in iterated:
                # One that another thread is waiting for ends with the connection.
                with contextlib.suppress(TidemillError):
                    thread.run(_closing(batches))
            if connected is not None:
                thread.run(connected.close())
            thread.close()

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
        """Create a table ``database.table``; see ``AsyncTidemill.create_table`` for what can be said about
        it.

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
        with self._connecting:
            if self._closed:
                raise RuntimeError("this connection is closed")
            if self._connected is None:
                if self._thread is None:
                    self._thread = LoopThread("tidemill-client")
                    # A connection that is dropped without ``close``, or is open when the program ends.
                    weakref.finalize(self, self._thread.close)
                self._connected = self._thread.run(
                    connect_async(
                        self.bootstrap_servers, client_id=self._client_id, timeout_ms=self._timeout_ms
                    )
                )
            return self._connected

    def _run(self, call: Callable[[AsyncTidemill], Coroutine[Any, Any, _T]]) -> _T:
        return self.run(call(self._connection()))

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine of the async client to its end."""
        thread = self._thread
        if thread is None:
            work.close()
            raise RuntimeError("this connection is closed")
        return thread.run(work)

    def iterate(self, batches: AsyncGenerator[_T]) -> Iterator[_T]:
        """An async iterator as a plain one; dropping it closes the other."""
        self._iterated.add(batches)
        try:
            while True:
                try:
                    yield self.run(_next(batches))
                except StopAsyncIteration:
                    return
        finally:
            # After ``close`` there is nothing left to do.
            if batches in self._iterated:
                self._iterated.discard(batches)
                self.run(_closing(batches))


class Table:
    """A table; from ``Tidemill.table`` or ``create_table``. See ``AsyncTable`` for every detail.

    >>> import tidemill
    >>> with tidemill.open() as db:
    ...     columns = "id bigint, region string, amount double"
    ...     orders = db.create_table("shop.orders", columns, primary_key=["id"])
    ...     regions = ("us", "eu")
    ...     _ = orders.upsert({"id": n, "region": regions[n % 2], "amount": 2.5 * n} for n in range(10))
    ...     _ = orders.delete([{"id": 9}])
    ...     orders.scan(columns=["id"], where="region = 'eu' AND amount > 10").to_arrow().to_pylist()
    [{'id': 5}, {'id': 7}]
    """

    def __init__(self, db: Tidemill, table: AsyncTable) -> None:
        self._db = db
        self._table = table

    @property
    def name(self) -> str:
        return self._table.name

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    @property
    def primary_key(self) -> tuple[str, ...]:
        return self._table.primary_key

    @property
    def buckets(self) -> int:
        return self._table.buckets

    @property
    def properties(self) -> Mapping[str, str]:
        return self._table.properties

    @property
    def definition(self) -> Any:
        """Everything that is known about the table."""
        return self._table.definition

    def __repr__(self) -> str:
        return repr(self._table)

    def _repr_html_(self) -> str:
        return self._table._repr_html_()

    def refresh(self) -> Table:
        """Take over what was changed about the table meanwhile."""
        self._db.run(self._table.refresh())
        return self

    # --- writing

    def upsert(self, rows: Any, *, progress: Callable[[int], None] | None = None) -> Written:
        """Write rows: new ones, and such that take the place of those with the same key.

        ``rows`` is a dict, an iterable of dicts, or anything that speaks Arrow. They are durable when this
        returns.
        """
        return self._db.run(self._table.upsert(rows, progress=progress))

    def append(self, rows: Any, *, progress: Callable[[int], None] | None = None) -> Written:
        """Append rows to a table without a primary key."""
        return self._db.run(self._table.append(rows, progress=progress))

    def delete(self, keys: Any) -> Written:
        """Delete the rows with these keys: dicts, tuples, single values, or an Arrow table of the key
        columns.
        """
        return self._db.run(self._table.delete(keys))

    # --- reading

    def lookup(
        self, keys: Any, *, columns: Sequence[str] | None = None, wait_for_own_writes: bool = True
    ) -> Any:
        """The row of a single key as a dict or None; the rows of several as an Arrow table in their order."""
        return self._db.run(
            self._table.lookup(keys, columns=columns, wait_for_own_writes=wait_for_own_writes)
        )

    def lookup_prefix(
        self, prefix: Any, *, columns: Sequence[str] | None = None, limit: int | None = None
    ) -> pa.Table:
        """The rows whose first key columns have these values."""
        return self._db.run(self._table.lookup_prefix(prefix, columns=columns, limit=limit))

    def scan(
        self,
        columns: Sequence[str] | None = None,
        where: Any = None,
        key_range: tuple[Any, Any] | None = None,
        limit: int | None = None,
        **options: Any,
    ) -> Scan:
        """The rows of the table as of one moment; ``lease=`` those of a leased snapshot. See
        ``AsyncTable.scan``.
        """
        if isinstance(options.get("lease"), TableLease):
            options["lease"] = options["lease"].lease_id
        return Scan(self._db, self._table.scan(columns, where, key_range, limit, **options))

    def bucket_scanner(self, bucket: int, **options: Any) -> BucketScanner:
        """A scanner of one bucket, for those who read bucket by bucket. See ``KvBatchScanner``."""
        return BucketScanner(self._db, self._table.bucket_scanner(bucket, **options))

    def follow(self, **options: Any) -> Follow:
        """The rows of the table, and then every change after them, once and in order. See
        ``AsyncTable.follow``.

        >>> import tidemill
        >>> with tidemill.open() as db:
        ...     table = db.create_table("shop.stock", "item string, count int", primary_key="item")
        ...     _ = table.upsert({"item": "apple", "count": 3})
        ...     for batch in table.follow(until_now=True):
        ...         for change in batch:
        ...             print(change.op, change.row)
        snapshot {'item': 'apple', 'count': 3}
        """
        return Follow(self._db, self._table.follow(**options))

    # --- snapshots, leases, numbers

    def stats(self) -> list[BucketStats]:
        """Rows, bytes and offsets of every bucket."""
        return self._db.run(self._table.stats())

    def snapshots(self) -> list[Snapshot]:
        """The durable snapshots of every bucket."""
        return self._db.run(self._table.snapshots())

    def create_snapshot(self) -> list[Snapshot]:
        """Take a durable snapshot of every bucket now."""
        return self._db.run(self._table.create_snapshot())

    def lease(self, *, duration_ms: int = 600_000, holder: str = "", fresh: bool = False) -> TableLease:
        """Keep the newest snapshots (``fresh``: new ones) while the ``with`` block lasts."""
        return TableLease(self._db, self._table.lease(duration_ms=duration_ms, holder=holder, fresh=fresh))

    def leases(self) -> list[Lease]:
        """The leases of this table."""
        return self._db.run(self._table.leases())

    # --- changing it

    def alter(
        self,
        *,
        add_columns: pa.Schema | str | None = None,
        set_properties: Mapping[str, str] | None = None,
        unset_properties: Sequence[str] = (),
        comment: str | None = None,
    ) -> Table:
        """Add nullable columns, and set or take back properties."""
        self._db.run(
            self._table.alter(
                add_columns=add_columns,
                set_properties=set_properties,
                unset_properties=unset_properties,
                comment=comment,
            )
        )
        return self

    def drop(self) -> None:
        """Drop the table with everything in it."""
        self._db.run(self._table.drop())

    def create_partition(self, value: str) -> str:
        """Add a partition, for those who write its topic with a Kafka client; gives the topic's name."""
        return self._db.run(self._table.create_partition(value))

    def drop_partition(self, value: str) -> None:
        """Drop one partition with everything in it."""
        self._db.run(self._table.drop_partition(value))


class Scan:
    """Rows of a table as of one moment: ``for batch in scan``, ``scan.to_arrow()``. Speaks the Arrow C stream
    itself, so ``polars.DataFrame(scan)``, ``duckdb.from_arrow(scan)`` and ``pandas`` (``scan.to_pandas()``)
    take it.
    """

    def __init__(self, db: Tidemill, scan: AsyncScan) -> None:
        self._db = db
        self._scan = scan

    @property
    def schema(self) -> pa.Schema:
        return self._scan.schema

    @property
    def log_offsets(self) -> dict[tuple[str, int], int]:
        """The log offset that the last iteration's rows stand for, by topic and bucket."""
        return self._scan.log_offsets

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self._db.iterate(self._scan.batches())

    def to_arrow(self) -> pa.Table:
        """All rows as one Arrow table."""
        return self._db.run(self._scan.to_arrow())

    def to_reader(self) -> pa.RecordBatchReader:
        """The rows as a stream of batches, for whoever reads Arrow."""
        import pyarrow as pa

        return pa.RecordBatchReader.from_batches(self.schema, iter(self))

    def to_pandas(self) -> Any:
        """All rows as a pandas frame."""
        return self.to_arrow().to_pandas()

    def to_polars(self) -> Any:
        """All rows as a polars frame."""
        import polars as pl

        return pl.from_arrow(self.to_arrow())

    def count(self) -> int:
        """How many rows there are."""
        return self._db.run(self._scan.count())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        import html

        rows = []
        for batch in self:
            rows += batch.to_pylist()
            if len(rows) >= _SHOWN_ROWS:
                break
        names = self.schema.names
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(row[name]))}</td>" for name in names) + "</tr>"
            for row in rows[:_SHOWN_ROWS]
        )
        note = f"<i>the first {_SHOWN_ROWS} rows</i>" if len(rows) >= _SHOWN_ROWS else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


_SHOWN_ROWS = 20


class BucketScanner:
    """``KvBatchScanner`` for programs that do not await."""

    def __init__(self, db: Tidemill, scanner: KvBatchScanner) -> None:
        self._db = db
        self._scanner = scanner

    @property
    def state(self) -> Any:
        return self._scanner.state

    @property
    def log_offset(self) -> int | None:
        """The log offset that the scanned state stands for; known from the first batch on."""
        return self._scanner.log_offset

    @property
    def next_key(self) -> bytes | None:
        """The state key at which a scan would go on after the last batch (``start_key=``)."""
        return self._scanner.next_key

    def next_batch(self) -> pa.RecordBatch | None:
        """The next rows, or None at the end. A scanner that has failed keeps failing."""
        return self._db.run(self._scanner.next_batch())

    def keep_alive(self) -> None:
        """Tell the server that the caller is still at work on the last batch."""
        self._db.run(self._scanner.keep_alive())

    def close(self) -> None:
        """Let go of the cursor on the server."""
        self._db.run(self._scanner.close())

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while (batch := self.next_batch()) is not None:
            yield batch

    def __enter__(self) -> BucketScanner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Follow:
    """``for batch in table.follow()``: rows, then changes as they come. Leaving the loop ends it."""

    def __init__(self, db: Tidemill, follow: AsyncFollow) -> None:
        self._db = db
        self._follow = follow

    def __iter__(self) -> Iterator[ChangeBatch]:
        return self._db.iterate(self._follow.batches())


class TableLease:
    """A lease while a ``with`` block lasts. ``lease_id`` is there inside."""

    def __init__(self, db: Tidemill, lease: AsyncLease) -> None:
        self._db = db
        self._lease = lease

    @property
    def lease_id(self) -> str:
        return self._lease.lease_id

    @property
    def log_offsets(self) -> Mapping[tuple[str, int], int]:
        """Where changes go on behind the snapshots, by topic and bucket."""
        return self._lease.log_offsets

    def acquire(self) -> Lease:
        """Begin the lease without a block: the caller renews and releases it."""
        return self._db.run(self._lease.acquire())

    def renew(self) -> Lease:
        """Make it last for its whole duration from now on."""
        return self._db.run(self._lease.renew())

    def release(self) -> None:
        """End it."""
        self._db.run(self._lease.release())

    def __enter__(self) -> TableLease:
        self._db.run(self._lease.__aenter__())
        return self

    def __exit__(self, *exc: object) -> None:
        self._db.run(self._lease.__aexit__(*exc))


async def _next(batches: AsyncGenerator[_T]) -> _T:
    return await anext(batches)


async def _closing(batches: AsyncGenerator[Any]) -> None:
    # After an interrupt the call that was cancelled may take a moment to end.
    for _ in range(_CLOSING_TRIES):
        with contextlib.suppress(RuntimeError):
            await batches.aclose()
            return
        await asyncio.sleep(_CLOSING_PAUSE_SECONDS)
