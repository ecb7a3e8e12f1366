"""Tables for programs that do not await: the async client's names, run by the thread of ``Tidemill``."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidemill.client.blocking import Blocking, blocking, returning_self, wrapping
from tidemill.client.tables.bucket_scanner import AsyncBucketScanner, ScannerState
from tidemill.client.tables.lease import AsyncLease
from tidemill.client.tables.table import AsyncTable
from tidemill.client.tables.table_scan import AsyncScan
from tidemill.errors import ConnectionClosed
from tidemill.tables.definition import TableDefinition

if TYPE_CHECKING:
    from tidemill.client.tables.follow import AsyncFollow, ChangeBatch

__all__ = ("BucketScanner", "Follow", "Scan", "Table", "TableLease")


class Scan(Blocking[AsyncScan]):
    """Rows of a table as of one moment: ``for batch in scan``, ``scan.to_arrow()``.

    It has the Arrow C stream interface, so ``polars.DataFrame(scan)``, ``duckdb.from_arrow(scan)`` and
    ``pandas`` (``scan.to_pandas()``) take it.
    """

    @property
    def schema(self) -> pa.Schema:
        """The schema of the batches."""
        return self._awaited.schema

    @property
    def log_offsets(self) -> dict[tuple[str, int], int]:
        """The log offset that the last iteration's rows stand for, by topic and bucket."""
        return self._awaited.log_offsets

    def __iter__(self) -> Generator[pa.RecordBatch]:
        return self._db.iterate(self._awaited.batches())

    to_arrow = blocking(AsyncScan.to_arrow)
    count = blocking(AsyncScan.count)
    head = blocking(AsyncScan.head)

    def to_pandas(self) -> Any:
        """All rows as a pandas frame."""
        return self.to_arrow().to_pandas()

    def to_polars(self) -> Any:
        """All rows as a polars frame."""
        import polars as pl

        return pl.from_arrow(self.to_arrow())

    def to_reader(self) -> pa.RecordBatchReader:
        """The rows as a ``pyarrow.RecordBatchReader``, which gives them batch by batch."""
        return pa.RecordBatchReader.from_batches(self.schema, iter(self))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        from tidemill.client.tables.notebook import rows_html

        return rows_html(self.schema.names, self)


class BucketScanner(Blocking[AsyncBucketScanner]):
    """A cursor over the rows of one bucket. Use it in a ``with`` statement: leaving it closes the cursor."""

    @property
    def state(self) -> ScannerState:
        """Whether the scanner is pending, active, done or failed."""
        return self._awaited.state

    @property
    def topic_partition(self) -> tuple[str, int]:
        """Topic and number of the bucket."""
        return self._awaited.topic_partition

    @property
    def log_offset(self) -> int | None:
        """The log offset that the scanned state stands for; known from the first batch on."""
        return self._awaited.log_offset

    @property
    def next_key(self) -> bytes | None:
        """The state key at which a scan would go on after the last batch (``start_key=``)."""
        return self._awaited.next_key

    next_batch = blocking(AsyncBucketScanner.next_batch)
    keep_alive = blocking(AsyncBucketScanner.keep_alive)

    def close(self) -> None:
        """Close the cursor, also on the server if it can be reached. A closed scanner gives no more rows."""
        # A closed connection has closed the cursor, too.
        with contextlib.suppress(ConnectionClosed):
            self._db.run(self._awaited.close())

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while (batch := self.next_batch()) is not None:
            yield batch

    def __enter__(self) -> BucketScanner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Follow(Blocking[Any]):
    """``for batch in table.follow()``: rows, then changes as they come. Leaving the loop ends it.

    >>> import tidemill
    >>> with tidemill.open() as db:
    ...     table = db.create_table("shop.stock", "item string, count int", primary_key="item")
    ...     _ = table.upsert({"item": "apple", "count": 3})
    ...     for batch in table.follow(until_now=True):
    ...         for change in batch:
    ...             print(change.op, change.row)
    snapshot {'item': 'apple', 'count': 3}
    """

    # Declared here and not as a parameter of ``Blocking``: the class is loaded when somebody follows a table.
    _awaited: AsyncFollow

    def __iter__(self) -> Generator[ChangeBatch]:
        return self._db.iterate(self._awaited.batches())


class TableLease(Blocking[AsyncLease]):
    """A lease that lasts as long as a ``with`` block, inside which it has its ``lease_id``."""

    @property
    def lease_id(self) -> str:
        """The id of the lease. Other processes can use it, too: ``table.scan(lease=lease_id)``."""
        return self._awaited.lease_id

    @property
    def log_offsets(self) -> Mapping[tuple[str, int], int]:
        """The log offset of each leased snapshot, by topic and bucket: later changes start there."""
        return self._awaited.log_offsets

    acquire = blocking(AsyncLease.acquire)
    renew = blocking(AsyncLease.renew)
    release = blocking(AsyncLease.release)

    def __enter__(self) -> TableLease:
        self._db.run(self._awaited.__aenter__())
        return self

    def __exit__(self, *exc: object) -> None:
        # The lease expires if the connection was closed meanwhile.
        with contextlib.suppress(ConnectionClosed):
            self._db.run(self._awaited.__aexit__(*exc))


class Table(Blocking[AsyncTable]):
    """A table; from ``Tidemill.table`` or ``create_table``.

    Its definition is the one from when the object was made; ``refresh`` gets the present one.
    ``len(table)`` is ``table.count()``.

    >>> import tidemill
    >>> with tidemill.open() as db:
    ...     columns = "id bigint, region string, amount double"
    ...     orders = db.create_table("shop.orders", columns, primary_key=["id"], buckets=4)
    ...     regions = ("us", "eu")
    ...     _ = orders.upsert({"id": n, "region": regions[n % 2], "amount": 2.5 * n} for n in range(10))
    ...     _ = orders.delete([{"id": 9}])
    ...     len(orders), orders.lookup(3), orders.head(1, columns=["id", "region"]).to_pylist()
    ...     orders.scan(columns=["id"], where="region = 'eu' AND amount > 15").to_arrow().to_pylist()
    (9, {'id': 3, 'region': 'eu', 'amount': 7.5}, [{'id': 0, 'region': 'us'}])
    [{'id': 7}]
    """

    # --- what it is

    @property
    def name(self) -> str:
        """Full name of the table, ``database.table``."""
        return self._awaited.name

    @property
    def schema(self) -> pa.Schema:
        """The columns, as an Arrow schema."""
        return self._awaited.schema

    @property
    def primary_key(self) -> tuple[str, ...]:
        """The key columns; none for a typed log."""
        return self._awaited.primary_key

    @property
    def buckets(self) -> int:
        """The number of logs over which the rows are spread."""
        return self._awaited.buckets

    @property
    def properties(self) -> Mapping[str, str]:
        """Configs of its topics, ``snapshot.…`` and ``user.…``."""
        return self._awaited.properties

    @property
    def definition(self) -> TableDefinition:
        """Everything that is known about the table."""
        return self._awaited.definition

    def __len__(self) -> int:
        return self.count()

    def __bool__(self) -> bool:
        # A table is there, however many rows it has; without this, Python would count them.
        return True

    def _repr_html_(self) -> str:
        return self._awaited._repr_html_()

    refresh = returning_self(AsyncTable.refresh)

    # --- writing

    upsert = blocking(AsyncTable.upsert)
    append = blocking(AsyncTable.append)
    delete = blocking(AsyncTable.delete)

    # --- reading

    lookup = blocking(AsyncTable.lookup)
    lookup_prefix = blocking(AsyncTable.lookup_prefix)
    scan = wrapping(AsyncTable.scan, Scan)
    count = blocking(AsyncTable.count)
    head = blocking(AsyncTable.head)
    bucket_scanner = wrapping(AsyncTable.bucket_scanner, BucketScanner)
    follow = wrapping(AsyncTable.follow, Follow)

    # --- snapshots, leases, numbers

    stats = blocking(AsyncTable.stats)
    snapshots = blocking(AsyncTable.snapshots)
    create_snapshot = blocking(AsyncTable.create_snapshot)
    lease = wrapping(AsyncTable.lease, TableLease)
    leases = blocking(AsyncTable.leases)

    # --- changing it

    alter = returning_self(AsyncTable.alter)
    drop = blocking(AsyncTable.drop)
    create_partition = blocking(AsyncTable.create_partition)
    drop_partition = blocking(AsyncTable.drop_partition)
