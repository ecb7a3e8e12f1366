"""Tables for programs that do not await: the same names as the async client's, run by ``Tidemill``'s thread.

Every method has the parameters of its twin in ``tidemill.client.tables``, with their types and defaults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, overload

import pyarrow as pa

from tidemill.client.process_bound import Unpicklable
from tidemill.client.tables.arguments import Key, Keys, Row
from tidemill.client.tables.lease import AsyncLease
from tidemill.client.tables.scan import AsyncScan
from tidemill.client.tables.scanner import (
    DEFAULT_FETCH_BYTES,
    DEFAULT_TIMEOUT_MS,
    KvBatchScanner,
    ScannerState,
)
from tidemill.client.tables.table import AsyncTable
from tidemill.client.tables.values import BucketStats, Lease, Snapshot, Written
from tidemill.errors import ConnectionClosed
from tidemill.tables.definition import TableDefinition

if TYPE_CHECKING:
    from tidemill.client.sync import Tidemill
    from tidemill.client.tables.follow import AsyncFollow, ChangeBatch

__all__ = ("BucketScanner", "Follow", "Scan", "Table", "TableLease")

#: Rows of a scan that a notebook shows.
_SHOWN_ROWS: Final = 20


class Table(Unpicklable):
    """A table; from ``Tidemill.table`` or ``create_table``.

    What it says about itself is of the moment when the object was made; ``refresh`` gets what is so now.

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
        """Full name of the table, ``database.table``."""
        return self._table.name

    @property
    def schema(self) -> pa.Schema:
        """The columns, as an Arrow schema."""
        return self._table.schema

    @property
    def primary_key(self) -> tuple[str, ...]:
        """The key columns; none for a typed log."""
        return self._table.primary_key

    @property
    def buckets(self) -> int:
        """Over how many logs the rows are spread."""
        return self._table.buckets

    @property
    def properties(self) -> Mapping[str, str]:
        """Configs of its topics, ``snapshot.…`` and ``user.…``."""
        return self._table.properties

    @property
    def definition(self) -> TableDefinition:
        """Everything that is known about the table."""
        return self._table.definition

    def __repr__(self) -> str:
        return repr(self._table)

    def _instead_of_a_pickle(self) -> str:
        return self._table._instead_of_a_pickle()

    def __len__(self) -> int:
        return self.count()

    def __bool__(self) -> bool:
        # A table is there, however many rows it has; without this, Python would count them.
        return True

    def _repr_html_(self) -> str:
        return self._table._repr_html_()

    def refresh(self) -> Table:
        """Take over what was changed about the table meanwhile, or the new table that has its name now."""
        self._db.run(self._table.refresh())
        return self

    # --- writing

    def upsert(self, rows: Any, *, progress: Callable[[int], None] | None = None) -> Written:
        """Write rows: new ones, and such that take the place of those with the same key. For a table without
        a primary key: append them.

        ``rows`` is a dict, an iterable of dicts, or anything that speaks Arrow. They are durable when this
        returns. ``progress`` is called with the number of rows written so far.
        """
        return self._db.run(self._table.upsert(rows, progress=progress))

    def append(self, rows: Any, *, progress: Callable[[int], None] | None = None) -> Written:
        """Append rows to a table without a primary key."""
        return self._db.run(self._table.append(rows, progress=progress))

    def delete(self, keys: Any) -> Written:
        """Delete the row of a key, or of several: dicts, tuples, single values, or an Arrow table of the key
        columns. A key that has no row is fine.
        """
        return self._db.run(self._table.delete(keys))

    # --- reading

    @overload
    def lookup(
        self, keys: Key, *, columns: Sequence[str] | None = None, wait_for_own_writes: bool = True
    ) -> Row | None: ...

    @overload
    def lookup(
        self, keys: Keys, *, columns: Sequence[str] | None = None, wait_for_own_writes: bool = True
    ) -> pa.Table: ...

    def lookup(
        self, keys: Key | Keys, *, columns: Sequence[str] | None = None, wait_for_own_writes: bool = True
    ) -> Row | pa.Table | None:
        """The row of one key as a dict, or None; the rows of several keys as an Arrow table.

        One key is a value, or a tuple or a dict of all key columns. Several are a list of such keys, or
        Arrow, pandas or polars with the key columns: their rows come in the order of the keys, and keys
        without a row are left out. ``wait_for_own_writes=False`` does not wait for rows that this object
        wrote behind somebody's open transaction.
        """
        return self._db.run(
            self._table.lookup(keys, columns=columns, wait_for_own_writes=wait_for_own_writes)
        )

    def lookup_prefix(
        self, prefix: Any, *, columns: Sequence[str] | None = None, limit: int | None = None
    ) -> pa.Table:
        """The rows whose first key columns have these values, in the order of keys within each bucket."""
        return self._db.run(self._table.lookup_prefix(prefix, columns=columns, limit=limit))

    def scan(
        self,
        columns: Sequence[str] | None = None,
        where: Any = None,
        key_range: tuple[Any, Any] | None = None,
        limit: int | None = None,
        *,
        lease: Lease | TableLease | str | None = None,
        fetch_max_bytes: int = DEFAULT_FETCH_BYTES,
        parallel: int = 4,
    ) -> Scan:
        """The rows of the table as of one moment, or of a leased snapshot (``lease``).

        ``where`` is a SQL predicate or a pyarrow expression; it, ``columns`` and ``key_range`` (from a key,
        or the first columns of one, up to but without another; None is open) are worked out on the server.
        ``parallel`` buckets are read at a time, each in batches of up to ``fetch_max_bytes``.
        """
        return Scan(
            self._db,
            self._table.scan(
                columns,
                where,
                key_range,
                limit,
                lease=_lease_id(lease),
                fetch_max_bytes=fetch_max_bytes,
                parallel=parallel,
            ),
        )

    def count(self, where: Any = None) -> int:
        """How many rows there are, or pass ``where``: exactly, as of one moment. ``len(table)`` is the same.

        All rows are read on the server, so that it takes as long as a scan of one column.
        """
        return self._db.run(self._table.count(where))

    def head(self, n: int = 10, *, columns: Sequence[str] | None = None, where: Any = None) -> pa.Table:
        """The first ``n`` rows in the order of their keys, as an Arrow table.

        >>> import tidemill
        >>> with tidemill.open() as db:
        ...     table = db.create_table("shop.stock", "item string, count int", primary_key="item", buckets=4)
        ...     _ = table.upsert([{"item": "pear", "count": 5}, {"item": "apple", "count": 3}])
        ...     len(table), table.head(1).to_pylist()
        (2, [{'item': 'apple', 'count': 3}])
        """
        return self._db.run(self._table.head(n, columns=columns, where=where))

    def bucket_scanner(
        self,
        bucket: int,
        *,
        partition: str | None = None,
        columns: Sequence[str] | None = None,
        predicate: bytes | None = None,
        start_key: bytes | None = None,
        end_key: bytes | None = None,
        limit: int = 0,
        pin_id: str | None = None,
        lease_id: str | None = None,
        fetch_max_bytes: int = DEFAULT_FETCH_BYTES,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
    ) -> BucketScanner:
        """A scanner of one bucket of the table, for those who read it bucket by bucket.

        ``partition`` is the value of a partitioned table's partition. ``start_key`` (as ``next_key`` of
        another scanner gives it) and ``end_key`` are state keys, ``predicate`` is an encoded one; a ``limit``
        of 0 is none. ``pin_id`` or ``lease_id`` name the state to read, which is the present one otherwise.
        """
        return BucketScanner(
            self._db,
            self._table.bucket_scanner(
                bucket,
                partition=partition,
                columns=columns,
                predicate=predicate,
                start_key=start_key,
                end_key=end_key,
                limit=limit,
                pin_id=pin_id,
                lease_id=lease_id,
                fetch_max_bytes=fetch_max_bytes,
                timeout_ms=timeout_ms,
            ),
        )

    def follow(
        self,
        *,
        snapshot: bool = True,
        from_offsets: Mapping[tuple[str, int], int] | None = None,
        until_now: bool = False,
        lease: Lease | TableLease | str | None = None,
    ) -> Follow:
        """The rows of the table, and then every change after them, once and in order.

        ``snapshot=False`` gives changes only, those from now on; ``from_offsets`` (by topic and bucket) those
        from there on. With ``until_now`` it ends at the changes that are there when the snapshot is through.
        ``lease`` takes the rows of a leased snapshot.

        >>> import tidemill
        >>> with tidemill.open() as db:
        ...     table = db.create_table("shop.stock", "item string, count int", primary_key="item")
        ...     _ = table.upsert({"item": "apple", "count": 3})
        ...     for batch in table.follow(until_now=True):
        ...         for change in batch:
        ...             print(change.op, change.row)
        snapshot {'item': 'apple', 'count': 3}
        """
        return Follow(
            self._db,
            self._table.follow(
                snapshot=snapshot, from_offsets=from_offsets, until_now=until_now, lease=_lease_id(lease)
            ),
        )

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
        """Keep the newest snapshots (``fresh``: new ones) while the ``with`` block lasts, and renew in time.

        A lease survives a restart of the node; if its holder does not renew it, it ends after
        ``duration_ms``.
        """
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
        """Add nullable columns, and set or take back properties. The object is up to date afterwards."""
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
        """Add a partition, for those who write its topic with a Kafka client; gives the topic's name.

        Rows that are written through this client make their partitions themselves. One that is there is fine.
        """
        return self._db.run(self._table.create_partition(value))

    def drop_partition(self, value: str) -> None:
        """Drop one partition with everything in it."""
        self._db.run(self._table.drop_partition(value))


class Scan(Unpicklable):
    """Rows of a table as of one moment: ``for batch in scan``, ``scan.to_arrow()``. Speaks the Arrow C stream
    itself, so ``polars.DataFrame(scan)``, ``duckdb.from_arrow(scan)`` and ``pandas`` (``scan.to_pandas()``)
    take it.
    """

    def __init__(self, db: Tidemill, scan: AsyncScan) -> None:
        self._db = db
        self._scan = scan

    def __repr__(self) -> str:
        return repr(self._scan)

    def _instead_of_a_pickle(self) -> str:
        return self._scan._instead_of_a_pickle()

    @property
    def schema(self) -> pa.Schema:
        """The schema of the batches."""
        return self._scan.schema

    @property
    def log_offsets(self) -> dict[tuple[str, int], int]:
        """The log offset that the last iteration's rows stand for, by topic and bucket."""
        return self._scan.log_offsets

    def __iter__(self) -> Generator[pa.RecordBatch]:
        return self._db.iterate(self._scan.batches())

    def to_arrow(self) -> pa.Table:
        """All rows as one Arrow table."""
        return self._db.run(self._scan.to_arrow())

    def to_reader(self) -> pa.RecordBatchReader:
        """The rows as a stream of batches, for whoever reads Arrow."""
        return pa.RecordBatchReader.from_batches(self.schema, iter(self))

    def to_pandas(self) -> Any:
        """All rows as a pandas frame."""
        return self.to_arrow().to_pandas()

    def to_polars(self) -> Any:
        """All rows as a polars frame."""
        import polars as pl

        return pl.from_arrow(self.to_arrow())

    def count(self) -> int:
        """How many rows there are, exactly. Only the narrowest column of the key is sent."""
        return self._db.run(self._scan.count())

    def head(self, n: int = 10) -> pa.Table:
        """The first ``n`` rows in the order of their keys, as one Arrow table."""
        return self._db.run(self._scan.head(n))

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


class BucketScanner(Unpicklable):
    """A cursor over the rows of one bucket. Use it in a ``with`` statement: leaving it closes the cursor."""

    def __init__(self, db: Tidemill, scanner: KvBatchScanner) -> None:
        self._db = db
        self._scanner = scanner

    def __repr__(self) -> str:
        return repr(self._scanner)

    def _instead_of_a_pickle(self) -> str:
        return self._scanner._instead_of_a_pickle()

    @property
    def state(self) -> ScannerState:
        """Where the scanner is in its life."""
        return self._scanner.state

    @property
    def place(self) -> tuple[str, int]:
        """Topic and number of the bucket."""
        return self._scanner.place

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
        """Let go of the cursor, as well as that can be done. A closed scanner gives no more rows."""
        # A closed connection has let go of it.
        with contextlib.suppress(ConnectionClosed):
            self._db.run(self._scanner.close())

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while (batch := self.next_batch()) is not None:
            yield batch

    def __enter__(self) -> BucketScanner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Follow(Unpicklable):
    """``for batch in table.follow()``: rows, then changes as they come. Leaving the loop ends it."""

    def __init__(self, db: Tidemill, follow: AsyncFollow) -> None:
        self._db = db
        self._follow = follow

    def __repr__(self) -> str:
        return repr(self._follow)

    def _instead_of_a_pickle(self) -> str:
        return self._follow._instead_of_a_pickle()

    def __iter__(self) -> Generator[ChangeBatch]:
        return self._db.iterate(self._follow.batches())


class TableLease(Unpicklable):
    """A lease while a ``with`` block lasts. ``lease_id`` is there inside."""

    def __init__(self, db: Tidemill, lease: AsyncLease) -> None:
        self._db = db
        self._lease = lease

    def __repr__(self) -> str:
        return repr(self._lease)

    def _instead_of_a_pickle(self) -> str:
        return self._lease._instead_of_a_pickle()

    @property
    def lease_id(self) -> str:
        """What names the lease, also in other processes: ``table.scan(lease=lease_id)``."""
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
        """End the lease: its snapshots may be removed."""
        self._db.run(self._lease.release())

    def __enter__(self) -> TableLease:
        self._db.run(self._lease.__aenter__())
        return self

    def __exit__(self, *exc: object) -> None:
        # It ends by itself if the connection was closed meanwhile.
        with contextlib.suppress(ConnectionClosed):
            self._db.run(self._lease.__aexit__(*exc))


def _lease_id(lease: Lease | TableLease | str | None) -> str | None:
    return lease if lease is None or isinstance(lease, str) else lease.lease_id
