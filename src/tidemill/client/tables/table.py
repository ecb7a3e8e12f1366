"""One table: write it, look rows up, scan it whole, follow its changes.

What only some of its users need is loaded when they first ask for it: writing, following, filters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import pyarrow as pa

from tidemill.client.admin.topics import LATEST, list_offsets
from tidemill.client.arguments import flag, names, optional_text, shown, text, whole
from tidemill.client.cluster import Cluster
from tidemill.client.process_bound import Unpicklable, opening_of_table
from tidemill.client.tables.arguments import (
    Key,
    Keys,
    Row,
    both_ends,
    bound,
    check_offsets,
    is_single_key,
    lease_id_of,
    narrowed,
    prefix_values,
    to_predicate,
    whole_number,
)
from tidemill.client.tables.bucket_scanner import (
    DEFAULT_FETCH_BYTES,
    DEFAULT_TIMEOUT_MS,
    AsyncBucketScanner,
    BucketScan,
)
from tidemill.client.tables.leaders import ask_leaders
from tidemill.client.tables.lease import AsyncLease
from tidemill.client.tables.lookup import LookUp
from tidemill.client.tables.pinning import pin_once, release_pin
from tidemill.client.tables.requests import ask_controller, ask_soon_again, definition_from, pairs
from tidemill.client.tables.table_scan import AsyncScan, ScanOptions
from tidemill.client.tables.values import (
    AnyLease,
    BucketStats,
    Lease,
    PinnedTable,
    Snapshot,
    Written,
    lease_from,
)
from tidemill.errors import ApiError, ConfigError, ErrorCode, TableCode, TableError
from tidemill.records.columns import compute as pc
from tidemill.tables.definition import TableDefinition, pack_schema
from tidemill.tables.keys.partition_values import partition_texts
from tidemill.tables.rows.ddl import describe_type

if TYPE_CHECKING:
    from tidemill.client.tables.follow import AsyncFollow
    from tidemill.client.tables.writer import PreparedRows, TableWriter

__all__ = ("AsyncTable",)

_T = TypeVar("_T")
_LEASE_MS = 600_000
#: How long another node may take to hear of a new lease.
_LEASE_NEWS_SECONDS = (0.02, 0.1, 0.5)


class AsyncTable(Unpicklable):
    """A table of a cluster; from ``AsyncTidemill.table`` or ``create_table``.

    The definition is the one from when the object was made; ``refresh`` gets the present one.
    """

    def __init__(self, cluster: Cluster, definition: TableDefinition) -> None:
        self.cluster = cluster
        self.definition = definition
        self._look_up = LookUp(cluster)
        #: The offset behind this object's last write to each bucket: what reads wait for.
        self._written: dict[tuple[str, int], int] = {}

    @cached_property
    def _writer(self) -> TableWriter:
        from tidemill.client.producing.columns import ColumnProducer
        from tidemill.client.tables.writer import TableWriter

        return TableWriter(ColumnProducer(self.cluster))

    # --- what it is

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def schema(self) -> pa.Schema:
        return self.definition.schema

    @property
    def primary_key(self) -> tuple[str, ...]:
        return self.definition.primary_key

    @property
    def buckets(self) -> int:
        return self.definition.buckets

    @property
    def properties(self) -> Mapping[str, str]:
        return self.definition.properties

    def __repr__(self) -> str:
        columns = ", ".join(f"{field.name} {describe_type(field.type)}" for field in self.schema)
        key = f", primary key ({', '.join(self.primary_key)})" if self.primary_key else ""
        column = self.definition.partition_column
        partitioned = f", partitioned by {column}" if column is not None else ""
        buckets = f"{self.buckets} bucket{'s' if self.buckets > 1 else ''}"
        return f"<table {self.name}: {columns}{key}{partitioned}, {buckets}>"

    def _instead_of_a_pickle(self) -> str:
        return (
            f"Open it where it is used: {opening_of_table(self.cluster.servers, self.name)}; in Spark, use "
            f'spark.read.format("tidemill").option("servers", "{self.cluster.servers}").load("{self.name}")'
        )

    def _repr_html_(self) -> str:
        from tidemill.client.tables.notebook import describe_html

        return describe_html(self.definition)

    async def refresh(self) -> AsyncTable:
        """Read the definition again, also if another table has the name by now."""
        self._adopt(await self._described())
        return self

    async def renew(self) -> None:
        """Refresh the definition of this very table: another one of its name is not taken for it."""
        found = await self._described()
        if found.table_id != self.definition.table_id:
            raise TableError(
                TableCode.table_not_found,
                f"table {self.name!r} was dropped, and is another one now; refresh() takes that one",
            )
        self._adopt(found)

    async def _described(self) -> TableDefinition:
        response = await ask_controller(
            self.cluster, "DescribeTable", {"name": self.name}, f"describing table {self.name!r}"
        )
        return definition_from(response.table)

    def _adopt(self, found: TableDefinition) -> None:
        old, new = _identities(self.definition), _identities(found)
        for topic in [topic for topic, identity in old.items() if new.get(topic) != identity]:
            # A new topic of that name has offsets of its own.
            self._writer.forget(topic)
            self._written = {bucket: at for bucket, at in self._written.items() if bucket[0] != topic}
        self.definition = found

    # --- writing

    async def upsert(self, rows: Any, *, progress: Callable[[int], None] | None = None) -> Written:
        """Insert rows, or replace those with the same key; append them if the table has no primary key.

        ``rows`` is a dict, an iterable of dicts, or anything that speaks Arrow. They are durable when this
        returns. ``progress`` is called with the number of rows written so far.
        """
        from tidemill.client.tables.rows_in import as_tables
        from tidemill.client.tables.writer import prepare_upserts

        if progress is not None and not callable(progress):
            raise ConfigError(f"progress is a function of the number of rows, not {shown(progress)}")
        done, offsets = 0, dict[tuple[str, int], int]()
        iterator = as_tables(rows, self.schema)
        while (piece := await asyncio.to_thread(next, iterator, None)) is not None:
            for prepared in await asyncio.to_thread(prepare_upserts, self.definition, piece):
                offsets |= await self._write(prepared)
                done += prepared.rows
                if progress is not None:
                    progress(done)
        return Written(done, offsets)

    async def append(self, rows: Any, *, progress: Callable[[int], None] | None = None) -> Written:
        """Append rows to a table without a primary key."""
        if self.definition.has_primary_key:
            raise TableError(
                TableCode.row_refused,
                f"table {self.name!r} has a primary key: its rows are upserted, not appended",
            )
        return await self.upsert(rows, progress=progress)

    async def delete(self, keys: Any) -> Written:
        """Delete the row of a key, or the rows of several keys. A key that has no row is fine.

        Keys are dicts, tuples, single values, or an Arrow table of the key columns.
        """
        from tidemill.client.tables.writer import prepare_deletes

        self._need_key()
        columns = self.definition.keys.columns_from([keys] if is_single_key(keys) else keys)
        prepared = prepare_deletes(self.definition, columns)
        return Written(prepared.rows, await self._write(prepared))

    async def _write(self, prepared: PreparedRows) -> dict[tuple[str, int], int]:
        offsets = await self._writer.write(self.topic_of, prepared, self.renew)
        for bucket, offset in offsets.items():
            self._written[bucket] = max(offset, self._written.get(bucket, -1))
        return offsets

    async def topic_of(self, value: str | None) -> str:
        """The topic of a partition, which is created if it is new."""
        for partition in self.definition.partitions:
            if partition.value == value:
                return partition.topic
        assert value is not None
        return await self.create_partition(value)

    # --- looking up

    @overload
    async def lookup(
        self, keys: Key, *, columns: Sequence[str] | None = None, wait_for_own_writes: bool = True
    ) -> Row | None: ...

    @overload
    async def lookup(
        self, keys: Keys, *, columns: Sequence[str] | None = None, wait_for_own_writes: bool = True
    ) -> pa.Table: ...

    async def lookup(
        self, keys: Key | Keys, *, columns: Sequence[str] | None = None, wait_for_own_writes: bool = True
    ) -> Row | pa.Table | None:
        """The row of one key as a dict, or None; the rows of several keys as an Arrow table.

        One key is a value, or a tuple or a dict of all key columns. Several are a list of such keys, or
        Arrow, pandas or polars with the key columns: their rows come in the order of the keys, and keys
        without a row are left out. ``wait_for_own_writes=False`` does not wait for rows that this object
        wrote behind somebody's open transaction.
        """
        self._need_key()
        single = is_single_key(keys)
        key_columns = self.definition.keys.columns_from([keys] if single else keys)
        if names_unknown_partition(self.definition, key_columns):
            await self.renew()

        async def look_up() -> pa.Table:
            written = self._written if wait_for_own_writes else {}
            return await self._look_up.rows(self.definition, key_columns, self._columns(columns), written)

        found = await self._knowing(look_up)
        if not single:
            return found
        rows = found.to_pylist()
        return rows[0] if rows else None

    async def lookup_prefix(
        self, prefix: Any, *, columns: Sequence[str] | None = None, limit: int | None = None
    ) -> pa.Table:
        """The rows whose first key columns have these values, in the order of keys within each bucket."""
        self._need_key()
        values = prefix_values(prefix, self.primary_key)
        start, end = self.definition.keys.prefix_bounds(values)
        chosen = self._scanned_columns(columns)
        limit = limit if limit is None else whole_number("limit", limit, 0)
        options = ScanOptions(columns=chosen, start_key=start, end_key=end, limit=limit)
        return await AsyncScan(self, options).to_arrow()

    # --- scanning

    def scan(
        self,
        columns: Sequence[str] | None = None,
        where: Any = None,
        key_range: tuple[Any, Any] | None = None,
        limit: int | None = None,
        *,
        lease: AnyLease | str | None = None,
        fetch_max_bytes: int = DEFAULT_FETCH_BYTES,
        parallel: int = 4,
    ) -> AsyncScan:
        """The rows of the table as of one moment, or of a leased snapshot (``lease``).

        If several nodes lead the buckets, it is one moment for each of them, and not the same one.

        ``where`` is a SQL predicate or a pyarrow expression; it, ``columns`` and ``key_range`` (from a key,
        or the first columns of one, up to but without another; None is open) are worked out on the server.
        ``parallel`` buckets are read at a time, each in batches of up to ``fetch_max_bytes``.
        """
        self._need_key()
        parallel = whole_number("parallel", parallel, 1)
        fetch_max_bytes = whole_number("fetch_max_bytes", fetch_max_bytes, 1)
        limit = limit if limit is None else whole_number("limit", limit, 0)
        start, end = self._bounds(key_range)
        encoded = None
        if where is not None:
            from tidemill.tables.predicates.predicate import encode

            predicate = to_predicate(where)
            start, end = narrowed(self.definition, predicate, start, end)
            encoded = encode(predicate)
        lease_id = lease_id_of(lease)
        return AsyncScan(
            self,
            ScanOptions(
                columns=self._scanned_columns(columns),
                predicate=encoded,
                start_key=start,
                end_key=end,
                limit=limit,
                lease_id=lease_id,
                fetch_max_bytes=fetch_max_bytes,
                parallel=parallel,
            ),
        )

    async def count(self, where: Any = None) -> int:
        """How many rows there are, or pass ``where``: exactly, as of one moment on each node.

        All rows are read on the server, so that it takes as long as a scan of one column.
        """
        return await self.scan(where=where).count()

    async def head(self, n: int = 10, *, columns: Sequence[str] | None = None, where: Any = None) -> pa.Table:
        """The first ``n`` rows in the order of their keys, as an Arrow table."""
        return await self.scan(columns, where).head(n)

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
    ) -> AsyncBucketScanner:
        """A scanner of one bucket of the table, for those who read it bucket by bucket.

        ``partition`` is the value of a partitioned table's partition. ``start_key`` (as ``next_key`` of
        another scanner gives it) and ``end_key`` are state keys, ``predicate`` is an encoded one; a ``limit``
        of 0 is none. ``pin_id`` or ``lease_id`` name the state to read, which is the present one otherwise.
        """
        self._need_key()
        if whole_number("bucket", bucket, 0, TableCode.bucket_not_found) >= self.buckets:
            raise TableError(
                TableCode.bucket_not_found,
                f"table {self.name!r} has buckets 0 to {self.buckets - 1}, not {bucket}",
            )
        matching = [each for each in self.definition.partitions if each.value == partition]
        if not matching:
            raise TableError(
                TableCode.partition_not_found, f"table {self.name!r} has no partition {partition!r}"
            )
        for name, key in (("predicate", predicate), ("start_key", start_key), ("end_key", end_key)):
            if key is not None and not isinstance(key, bytes):
                raise ConfigError(f"{name} is bytes or None, not {shown(key)}")
        scan = BucketScan(
            table_id=self.definition.table_id,
            partition_id=matching[0].id,
            topic=matching[0].topic,
            bucket=bucket,
            pin_id=optional_text("pin_id", pin_id),
            lease_id=optional_text("lease_id", lease_id),
            limit=whole("limit", limit, least=0),
            columns=self._columns(columns),
            predicate=predicate,
            start_key=start_key,
            end_key=end_key,
        )
        whole("fetch_max_bytes", fetch_max_bytes, least=1)
        whole("timeout_ms", timeout_ms, least=0)
        return AsyncBucketScanner(self.cluster, scan, fetch_max_bytes=fetch_max_bytes, timeout_ms=timeout_ms)

    def follow(
        self,
        *,
        snapshot: bool = True,
        from_offsets: Mapping[tuple[str, int], int] | None = None,
        until_now: bool = False,
        lease: AnyLease | str | None = None,
    ) -> AsyncFollow:
        """The rows of the table, and then every change after them, once and in order.

        ``snapshot=False`` gives changes only, those from now on; ``from_offsets`` (by topic and bucket) those
        from there on. With ``until_now`` it ends at the changes that are there when the snapshot is through.
        ``lease`` takes the rows of a leased snapshot.
        """
        from tidemill.client.tables.follow import AsyncFollow

        check_offsets("from_offsets", from_offsets)
        flag("snapshot", snapshot)
        flag("until_now", until_now)
        if not self.definition.has_primary_key or from_offsets is not None:
            snapshot = False
        scan = self.scan(lease=lease) if snapshot else None
        return AsyncFollow(self, scan, from_offsets=from_offsets, until_now=until_now)

    async def committed_ends(self, buckets: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int]:
        """The last stable offset of each bucket's log, by topic and bucket."""
        ends = await list_offsets(self.cluster, dict.fromkeys(buckets, LATEST), committed=True)
        return {bucket: at.offset for bucket, at in ends.items()}

    async def starts(self) -> dict[tuple[str, int], int]:
        """The last stable offset of every bucket of the table, by topic and bucket."""
        await self._renew_partitions()
        return await self.committed_ends(dict.fromkeys(self.topic_partitions(), 0))

    def topic_partitions(self) -> list[tuple[str, int]]:
        """Every bucket, by topic and number."""
        return [(each.topic, bucket) for each in self.definition.partitions for bucket in range(self.buckets)]

    async def pin(self, *, idle_ms: int = 0) -> PinnedTable:
        """Pin the state of all buckets. Scans do it by themselves.

        Buckets that one node leads are pinned at one moment; with several nodes there is one for each node.
        It ends when it was not used for ``idle_ms``; 0 leaves that to the server.
        """
        await self._renew_partitions()
        while True:
            pinned = await self._knowing(partial(self._pin, idle_ms))
            if pinned is not None:
                return pinned
            await self.renew()

    async def _pin(self, idle_ms: int) -> PinnedTable | None:
        """Pin once. None if the pin has a table partition that the definition lacks."""
        definition = self.definition
        topics = {each.id: each.topic for each in definition.partitions}
        min_offsets = {
            (each.id, bucket): self._written[each.topic, bucket]
            for each in definition.partitions
            for bucket in range(self.buckets)
            if (each.topic, bucket) in self._written
        }
        pinning = partial(pin_once, self.cluster, definition, min_offsets, idle_ms)
        answers = await ask_soon_again(self.cluster, pinning)
        buckets = [each for answer in answers.values() for each in answer.buckets]
        pin_id: str = next(iter(answers.values())).pin_id
        if any(each.partition_id not in topics for each in buckets):
            await self.release_pin(pin_id, nodes=tuple(answers))
            return None
        return PinnedTable(
            pin_id,
            {(topics[each.partition_id], each.bucket): each.log_offset for each in buckets},
            min(answer.expires_in_ms for answer in answers.values()),
            tuple(answers),
            {(topics[each.partition_id], each.bucket): each.log_epoch for each in buckets},
        )

    async def release_pin(
        self, pin_id: str, *, keep_alive: bool = False, nodes: Collection[int] = ()
    ) -> None:
        """Release a pin, or keep it from expiring, on the nodes that have it; on all if none are given."""
        await release_pin(
            self.cluster, pin_id, nodes, f"releasing a pin of table {self.name!r}", keep_alive=keep_alive
        )

    # --- snapshots, leases, numbers

    async def stats(self) -> list[BucketStats]:
        """Rows, bytes and offsets of every bucket."""
        await self._renew_partitions()
        answers = await self._ask_leaders("TableStats")
        names = [name for name in BucketStats.__slots__ if name not in ("partition", "bucket")]
        return [
            BucketStats(
                self._value(each.partition_id), each.bucket, **{name: getattr(each, name) for name in names}
            )
            for each in sorted(_parts(answers, "buckets"), key=_place)
        ]

    async def snapshots(self) -> list[Snapshot]:
        """The durable snapshots of every bucket."""
        await self._renew_partitions()
        answers = await self._ask_leaders("ListSnapshots")
        return [self._snapshot(each) for each in sorted(_parts(answers, "snapshots"), key=_place)]

    async def create_snapshot(self) -> list[Snapshot]:
        """Take a durable snapshot of every bucket now; those on one node are of one moment."""
        await self._renew_partitions()
        answers = await self._ask_leaders("CreateSnapshot")
        return [self._snapshot(each) for each in sorted(_parts(answers, "snapshots"), key=_place)]

    def lease(self, *, duration_ms: int = _LEASE_MS, holder: str = "", fresh: bool = False) -> AsyncLease:
        """Keep the newest snapshots (``fresh``: new ones) while the ``with`` block lasts, and renew in time.

        A lease survives a restart of the node; if its holder does not renew it, it ends after
        ``duration_ms``.
        """
        self._need_key()
        whole("duration_ms", duration_ms, least=1)
        text("holder", holder)
        flag("fresh", fresh)
        return AsyncLease(self, duration_ms=duration_ms, holder=holder, fresh=fresh)

    async def leases(self) -> list[Lease]:
        """The leases of this table."""
        await self._renew_partitions()
        response = await self._ask("ListLeases", {"table": self.name})
        return [lease_from(each, self.definition) for each in response.leases]

    async def held_by(self, lease_id: str) -> Lease:
        """The lease of that id, which must hold nothing that was dropped meanwhile."""
        for lease in await self._leases_with(lease_id):
            if lease.lease_id == lease_id:
                if lease.log_offsets.keys() <= set(self.topic_partitions()):
                    return lease
                raise TableError(
                    TableCode.snapshot_not_found,
                    f"lease {lease_id!r} holds snapshots of a partition of {self.name!r} that was dropped",
                )
        raise TableError(
            TableCode.lease_not_found, f"table {self.name!r} has no lease {lease_id!r}; it may have expired"
        )

    async def _leases_with(self, lease_id: str) -> list[Lease]:
        """The leases; asked for again if that one is missing: it may be news to the node that was asked."""
        found = await self.leases()
        for pause_seconds in _LEASE_NEWS_SECONDS if len(self.cluster.nodes) > 1 else ():
            if any(lease.lease_id == lease_id for lease in found):
                break
            await asyncio.sleep(pause_seconds)
            found = await self.leases()
        return found

    # --- changing it

    async def alter(
        self,
        *,
        add_columns: pa.Schema | str | None = None,
        set_properties: Mapping[str, str] | None = None,
        unset_properties: Sequence[str] = (),
        comment: str | None = None,
    ) -> AsyncTable:
        """Add nullable columns, and set or take back properties. The object is up to date afterwards."""
        from tidemill.client.tables.creating import given_schema

        await self._ask(
            "AlterTable",
            {
                "name": self.name,
                "add_columns": None if add_columns is None else pack_schema(given_schema(add_columns)),
                "set_properties": pairs(set_properties, "set_properties"),
                "unset_properties": names("unset_properties", unset_properties),
                "comment": optional_text("comment", comment),
            },
        )
        return await self.refresh()

    async def drop(self) -> None:
        """Drop the table with everything in it."""
        await self._ask("DropTable", {"name": self.name, "if_exists": False})

    async def create_partition(self, value: str) -> str:
        """Add a partition, for those who write its topic with a Kafka client; gives the topic's name.

        Rows that are written through this client make their partitions themselves. One that is there is fine.
        """
        text("value, which names the partition,", value)
        made = await self._ask("CreateTablePartition", {"table": self.name, "value": value})
        await self.refresh()
        topic: str = made.partition.topic
        return topic

    async def drop_partition(self, value: str) -> None:
        """Drop one partition with everything in it."""
        text("value, which names the partition,", value)
        await self._ask("DropTablePartition", {"table": self.name, "value": value})
        await self.refresh()

    # --- parts

    async def _ask(self, name: str, body: dict[str, Any]) -> Any:
        return await ask_controller(self.cluster, name, body, f"{name} of table {self.name!r}")

    async def _ask_leaders(self, name: str) -> list[Any]:
        what = f"{name} of table {self.name!r}"
        return await ask_leaders(self.cluster, self.definition, name, {"table": self.name}, what)

    async def _renew_partitions(self) -> None:
        """Read the definition of a partitioned table again: others may have added or dropped partitions."""
        if self.definition.partition_column is not None:
            await self.renew()

    async def _knowing(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Await ``call()``; if it met something that was dropped, renew the definition and call it again."""
        try:
            return await call()
        except ApiError as error:
            if error.code != ErrorCode.unknown_topic_or_partition:
                raise
        self.cluster.forget()
        await self.renew()
        return await call()

    def _need_key(self) -> None:
        if not self.definition.has_primary_key:
            raise TableError(
                TableCode.not_a_primary_key_table,
                f"table {self.name!r} has no primary key: follow() reads it ('tidemill table follow' on the "
                "command line), or any Kafka consumer of its topic",
            )

    def _columns(self, columns: Sequence[str] | None) -> tuple[str, ...]:
        if columns is None:
            return ()
        columns = names("columns", columns)
        unknown = [name for name in columns if self.schema.get_field_index(name) < 0]
        if unknown or not columns:
            raise TableError(
                TableCode.invalid_scan_request,
                f"table {self.name!r} has no column {', '.join(map(repr, unknown)) or 'to give'}; it has "
                f"{', '.join(self.schema.names)}",
            )
        return tuple(columns)

    def _scanned_columns(self, columns: Sequence[str] | None) -> tuple[str, ...]:
        """Names of a scan's columns, also if it is all: the scan stays the same when the table gets more."""
        return self._columns(columns) or tuple(self.schema.names)

    def _bounds(self, key_range: tuple[Any, Any] | None) -> tuple[bytes | None, bytes | None]:
        if key_range is None:
            return None, None
        low, high = both_ends(key_range)
        return bound(self.definition, low), bound(self.definition, high)

    def _value(self, partition_id: int) -> str | None:
        partition = self.definition.partition(partition_id)
        return None if partition is None else partition.value

    def _snapshot(self, each: Any) -> Snapshot:
        return Snapshot(
            self._value(each.partition_id),
            each.bucket,
            each.snapshot_id,
            each.log_offset,
            each.created_ms,
            each.size_bytes,
            each.problem,
        )


def _parts(answers: Sequence[Any], name: str) -> list[Any]:
    """The entries of all answers under that name."""
    return [each for answer in answers for each in getattr(answer, name)]


def _place(entry: Any) -> tuple[int, int]:
    """The sort key of an entry in nodes' answers: table partition and bucket."""
    return entry.partition_id, entry.bucket


def _identities(definition: TableDefinition) -> dict[str, tuple[int, int]]:
    """The ids of table and table partition behind each topic name."""
    return {each.topic: (definition.table_id, each.id) for each in definition.partitions}


def names_unknown_partition(definition: TableDefinition, key_columns: Sequence[pa.Array]) -> bool:
    """Whether some of the keys are of a partition that the definition does not have."""
    if definition.partition_column is None:
        return False
    texts = partition_texts(key_columns[definition.primary_key.index(definition.partition_column)])
    known = pa.array([each.value for each in definition.partitions], pa.string())
    return bool(pc.any(pc.invert(pc.is_in(texts, known))).as_py())
