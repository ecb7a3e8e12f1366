"""``connect_async``: databases and tables of a cluster, with await."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidemill.client.arguments import (
    flag,
    full_name,
    millis,
    names,
    optional_text,
    shown,
    text,
    topic_names,
    whole,
)
from tidemill.client.cluster import Cluster
from tidemill.client.process_bound import Unpicklable
from tidemill.errors import ConfigError, TidemillError
from tidemill.net.connection import DEFAULT_TIMEOUT_MS

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemill.client.arguments import Named
    from tidemill.client.cursors.cursor import AsyncCursor, IfLost, Start
    from tidemill.client.producing.producer import Delivered, Producer
    from tidemill.client.share.consumer import AsyncShare
    from tidemill.client.share.group_configs import OnDead, Order, ShareStart
    from tidemill.client.tables.table import AsyncTable
    from tidemill.client.tables.values import Lease
    from tidemill.client.workers.engine import Engine
    from tidemill.client.workers.ordered import Ordered
    from tidemill.client.workers.worker import AsyncWorker
    from tidemill.tables.definition import TableDefinition

__all__ = ("AsyncTidemill", "DatabaseInfo", "TableInfo", "connect_async")


@dataclass(frozen=True, slots=True)
class DatabaseInfo:
    """A database in a list."""

    name: str
    comment: str | None
    properties: Mapping[str, str]
    table_count: int
    created_ms: int


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table in a list. ``partition_count`` is 0 for a table that is not partitioned."""

    name: str
    table_id: int
    primary_key: tuple[str, ...]
    column_count: int
    buckets: int
    partition_count: int
    row_format: str
    comment: str | None


async def connect_async(
    bootstrap_servers: str, *, client_id: str = "tidemill", timeout_ms: int = DEFAULT_TIMEOUT_MS
) -> AsyncTidemill:
    """Connect to a node, or to a cluster by some of its nodes (``"host:port,host:port"``).

    The same names as ``tidemill.connect``, with await. Close it, or use it in ``async with await
    connect_async(…)``. ``client_id`` is the name that nodes know it by. What may pass by itself, such as a
    node that is started again, is tried again for ``timeout_ms``. Raises ``NodeUnavailable`` if no address
    answers.
    """
    if not isinstance(bootstrap_servers, str):
        raise ConfigError(
            f"the servers are text like '127.0.0.1:9092', several separated by commas, not "
            f"{shown(bootstrap_servers)}"
        )
    text("client_id", client_id)
    whole("timeout_ms", timeout_ms, least=0)
    cluster = Cluster(bootstrap_servers, client_id=client_id, timeout_ms=timeout_ms)
    await cluster.connect()
    return AsyncTidemill(cluster, bootstrap_servers)


class AsyncTidemill(Unpicklable):
    """A connection to a node or a cluster: of one process and one event loop."""

    def __init__(self, cluster: Cluster, bootstrap_servers: str) -> None:
        self.cluster = cluster
        self.bootstrap_servers = bootstrap_servers
        self._producer: Producer | None = None
        #: Members of share groups, which leave their groups before the connections are closed.
        self._shares: weakref.WeakSet[AsyncShare] = weakref.WeakSet()
        self._workers: weakref.WeakSet[AsyncWorker] = weakref.WeakSet()

    async def __aenter__(self) -> AsyncTidemill:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<tidemill at {self.bootstrap_servers}{', closed' if self.cluster.closed else ''}>"

    def _instead_of_a_pickle(self) -> str:
        return f"Open one there: await tidemill.connect_async({self.bootstrap_servers!r})"

    async def close(self) -> None:
        """Leave all groups and close every connection. Closing twice is fine."""
        if not self.cluster.closed:
            running = [worker for worker in self._workers if worker.is_running]
            await asyncio.gather(*(worker.stop_and_join() for worker in running), return_exceptions=True)
            await asyncio.gather(*(share.close() for share in list(self._shares)))
            if self._producer is not None:
                await self._producer.close()
        await self.cluster.close()

    # --- records

    async def produce(
        self,
        topic: str,
        value: Any,
        *,
        key: Any = None,
        headers: Mapping[str, Any] | None = None,
        partition: int | None = None,
        delay: float | None = None,
    ) -> Delivered:
        """Write one record to a topic; gives its place once it is on the disks of all in-sync replicas.

        ``value``, ``key`` and the values of headers are bytes, text, or anything that JSON can hold. Records
        with the same key go to the same partition, as in Java. ``delay``: share groups with ``deliver_at``
        do not hand the record out before so many seconds are over.
        """
        from tidemill.client.producing.values import as_record

        full_name("a topic's name", topic)
        if partition is not None:
            whole("partition", partition, least=0)
        record = as_record(value, key=key, headers=headers or {}, delay=delay)
        return await (await self._records.send(topic, record, partition))

    async def produce_many(self, topic: str, values: Iterable[Any], *, delay: float | None = None) -> int:
        """Write many records to a topic; gives their number once all are on disk.

        Each is a value as ``produce`` takes it, or a pair of key and value.
        """
        from tidemill.client.producing.values import as_record, keys_and_values

        full_name("a topic's name", topic)
        sent = []
        for key, value in keys_and_values(values):
            sent.append(await self._records.send(topic, as_record(value, key=key, delay=delay)))
        await asyncio.gather(*sent)
        return len(sent)

    @property
    def _records(self) -> Producer:
        """The producer of single records, made at its first use."""
        if self._producer is None:
            from tidemill.client.producing.producer import Producer

            self._producer = Producer(self.cluster, linger_ms=0)
        return self._producer

    # --- share groups

    def share(
        self,
        group: str,
        topic: str | Named | Sequence[str | Named],
        *,
        start: ShareStart | None = None,
        lock: float | None = None,
        max_deliveries: int | None = None,
        retry_backoff: float | None = None,
        retry_backoff_max: float | None = None,
        order: Order | None = None,
        on_dead: OnDead | None = None,
        dead_letter: str | None = None,
        read_committed: bool | None = None,
        deliver_at: bool | None = None,
    ) -> AsyncShare:
        """Take records of one or more topics or tables as a member of a share group, and settle each of them.

        ``async for record in db.share("emails", "outbox")``: every record is locked for one member of the
        group until it calls ``record.accept()``, ``release(delay=…)`` or ``reject("why")``.

        The other arguments are configs of the group, times in seconds. Each is set if the group has none of
        its own; if it has another, ``ConfigError`` says so (``configure_share`` changes it). ``start`` says
        where a new group begins: ``"earliest"`` (the default here), ``"latest"``, or so many seconds ago.
        A record is locked for ``lock`` (30), and delivered at most ``max_deliveries`` times (5). One that is
        released, or whose lock ends, waits for ``retry_backoff``, doubled every time up to
        ``retry_backoff_max`` if that is given. With ``order="key"`` one record of a key is out at a time, in
        order; ``on_dead`` says whether a key goes on after a dead one. Dead records go to the topic
        ``dead_letter``. With ``deliver_at`` the group heeds the ``delay`` of ``produce``.
        """
        from tidemill.client.share.consumer import AsyncShare
        from tidemill.client.share.group_configs import SHARE_DEFAULTS, GroupConfigs, named_configs

        named = named_configs(
            start=start,
            lock=lock,
            max_deliveries=max_deliveries,
            retry_backoff=retry_backoff,
            retry_backoff_max=retry_backoff_max,
            order=order,
            on_dead=on_dead,
            dead_letter=dead_letter,
            read_committed=read_committed,
            deliver_at=deliver_at,
        )
        full_name("the name of a share group", group)
        topics = topic_names(topic)
        _refuse_own_letters(topics, dead_letter)
        share = AsyncShare(self.cluster, group, topics, configs=GroupConfigs(named, SHARE_DEFAULTS))
        self._shares.add(share)
        return share

    def worker(
        self,
        name: str | None,
        topic: str | Named,
        handler: Any = None,
        *,
        ordered: bool | Ordered = False,
        concurrency: int = 1,
        timeout: float | None = None,
        stop_timeout: float = 30.0,
        start: ShareStart | None = None,
        lock: float | None = None,
        max_deliveries: int | None = None,
        retry_backoff: float | None = None,
        retry_backoff_max: float | None = None,
        order: Order | None = None,
        on_dead: OnDead | None = None,
        dead_letter: str | None = None,
        read_committed: bool | None = None,
        deliver_at: bool | None = None,
    ) -> AsyncWorker:
        """Have a handler run for every record of a topic or table: ``@db.worker("emails", topic="outbox")``.

        The handler gets the record. When it returns the record is accepted; when it raises it is released and
        comes again after the group's backoff (a second, doubled every time, unless ``retry_backoff`` says
        otherwise); ``raise tidemill.Reject("why")`` sends it to the dead-letter topic, ``raise
        tidemill.Retry(delay=60)`` says when it comes again.

        ``concurrency`` handlers run side by side: in threads, or on the event loop if the handler is async.
        Workers of the same name share the topic's records, in any number of processes. A lock is renewed
        while its handler runs, for ``timeout`` seconds at most. At a stop handlers get ``stop_timeout``
        seconds to end. The other arguments are the group's configs, as in ``share``.

        With ``ordered`` records are handled in order, from a position that is kept under the worker's name,
        and no group is used: ``tidemill.Ordered`` has the options. Then ``concurrency`` goes over keys. A
        handler that raises sends the worker back to the stored position; with ``dead_letter`` its record is
        tried again alone (after ``retry_backoff`` seconds, doubled every time) and parked there in the end.
        An ordered worker without a name (None) keeps its position in memory, as long as the worker lives.
        """
        from tidemill.client.share.consumer import AsyncShare
        from tidemill.client.share.group_configs import WORKER_DEFAULTS, GroupConfigs, named_configs
        from tidemill.client.workers.share_engine import ShareEngine
        from tidemill.client.workers.worker import AsyncWorker

        whole("concurrency, the number of handlers at a time,", concurrency, least=1)
        millis("stop_timeout", stop_timeout)
        if timeout is not None and not millis("timeout", timeout):
            raise ConfigError("timeout is how long a handler may take: more than 0 seconds")
        (topic_name,) = topics = topic_names(topic)
        _refuse_own_letters(topics, dead_letter)
        if ordered is not False:
            self._refuse_share_options(
                timeout=timeout,
                start=start,
                lock=lock,
                max_deliveries=max_deliveries,
                retry_backoff_max=retry_backoff_max,
                order=order,
                on_dead=on_dead,
                read_committed=read_committed,
                deliver_at=deliver_at,
            )
            return self._ordered_worker(
                name,
                topic,
                handler,
                ordered,
                concurrency=concurrency,
                dead_letter=dead_letter,
                retry_backoff=retry_backoff,
                stop_timeout=stop_timeout,
            )
        if name is None:
            raise ConfigError("a worker has the name of its share group; only an ordered one can have none")
        full_name("a worker's name", name)
        named = named_configs(
            start=start,
            lock=lock,
            max_deliveries=max_deliveries,
            retry_backoff=retry_backoff,
            retry_backoff_max=retry_backoff_max,
            order=order,
            on_dead=on_dead,
            dead_letter=dead_letter,
            read_committed=read_committed,
            deliver_at=deliver_at,
        )

        def open_share() -> AsyncShare:
            configs = GroupConfigs(named, WORKER_DEFAULTS)
            share = AsyncShare(
                self.cluster, name, topics, configs=configs, concurrency=concurrency, renew_for=timeout
            )
            self._shares.add(share)
            return share

        def engine(handler: Any) -> ShareEngine:
            return ShareEngine(
                name,
                handler,
                open_share,
                concurrency=concurrency,
                timeout=timeout,
                stop_timeout=stop_timeout,
            )

        worker = AsyncWorker(name, topic_name, engine, handler)
        self._workers.add(worker)
        return worker

    @staticmethod
    def _refuse_share_options(**options: Any) -> None:
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise ConfigError(
                f"{given[0]} is for workers on a share group; an ordered worker takes tidemill.Ordered(…)"
            )

    def _ordered_worker(
        self, name: str | None, topic: Any, handler: Any, ordered: Any, **arguments: Any
    ) -> AsyncWorker:
        from tidemill.client.workers.opening import ordered_engine
        from tidemill.client.workers.ordered import Ordered
        from tidemill.client.workers.worker import AsyncWorker

        options = Ordered() if ordered is True else ordered
        if not isinstance(options, Ordered):
            raise ConfigError(f"ordered is True, or tidemill.Ordered(…) with options, not {options!r}")

        def engine(handler: Any) -> Engine:
            return ordered_engine(
                self.cluster, lambda: self._records, name, topic, handler, options, **arguments
            )

        worker = AsyncWorker(name, topic if isinstance(topic, str) else topic.name, engine, handler)
        self._workers.add(worker)
        return worker

    async def configure_share(
        self,
        group: str,
        *,
        start: ShareStart | None = None,
        lock: float | None = None,
        max_deliveries: int | None = None,
        retry_backoff: float | None = None,
        retry_backoff_max: float | None = None,
        order: Order | None = None,
        on_dead: OnDead | None = None,
        dead_letter: str | None = None,
        read_committed: bool | None = None,
        deliver_at: bool | None = None,
        max_waiting: int | None = None,
    ) -> None:
        """Set configs of a share group, for all of its members and at once. They are those of ``share``.

        ``max_waiting``: how many records of a partition may be delayed, wait for their key or for their dead
        letter. When so many do, nothing new of the partition is handed out.
        """
        from tidemill.client.share.group_configs import named_configs, set_group_configs

        full_name("the name of a share group", group)
        named = named_configs(
            start=start,
            lock=lock,
            max_deliveries=max_deliveries,
            retry_backoff=retry_backoff,
            retry_backoff_max=retry_backoff_max,
            order=order,
            on_dead=on_dead,
            dead_letter=dead_letter,
            read_committed=read_committed,
            deliver_at=deliver_at,
            max_waiting=max_waiting,
        )
        await set_group_configs(self.cluster, group, named)

    # --- cursors

    async def cursor(
        self,
        name: str | None,
        source: str | AsyncTable,
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
    ) -> AsyncCursor:
        """Open a durable cursor over a topic or a table: records in order, from where the last commit ended.

        It reads ``partitions`` (all), and of these what passes on the server: keys that begin with
        ``key_prefix``, records that have these ``headers``, rows of a table that pass ``where`` (SQL or a
        pyarrow expression). ``start`` says where a cursor begins that has no position yet: ``"earliest"``,
        ``"latest"``, an offset, a time, ``"-10 minutes"``, or offsets by partition.

        Its position is kept under ``name``: by the cluster, or in the file or database that ``checkpoint`` is
        (a path, a DB-API or SQLAlchemy connection), or in the same transaction as what it writes
        (``checkpoint=tidemill.IN_TRANSACTION``). Without a name it is in memory only.

        One process owns a cursor at a time. If another one does, this waits until its lease of ``lease_ms``
        is over; with ``take_over`` it does not wait. ``own`` takes some of the region's partitions only, so
        that several processes can share one name.

        If a partition's log does not have the stored position, because retention has deleted what comes next
        or the log has lost its end, that is an error. With ``if_lost="earliest"`` or ``"latest"`` the cursor
        goes on there in such a partition, and stores that.
        """
        from tidemill.client.cursors.opening import open_cursor, plan_cursor

        plan = await plan_cursor(
            self.cluster,
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
        return await open_cursor(self.cluster, plan)

    # --- databases

    async def create_database(
        self,
        name: str,
        *,
        comment: str | None = None,
        properties: Mapping[str, str] | None = None,
        if_not_exists: bool = False,
    ) -> None:
        """Create a database, whose name is the first part of its tables' names.

        ``create_table`` creates a missing one by itself.
        """
        from tidemill.client.tables.requests import pairs

        body = {
            "name": text("a database's name", name),
            "comment": optional_text("comment", comment),
            "properties": pairs(properties),
            "if_not_exists": flag("if_not_exists", if_not_exists),
        }
        await self._ask("CreateDatabase", body, f"creating database {name!r}")

    async def databases(self) -> list[DatabaseInfo]:
        """The databases, by name."""
        response = await self._ask("ListDatabases", {}, "listing databases")
        return [
            DatabaseInfo(
                each.name,
                each.comment,
                {pair.key: pair.value for pair in each.properties},
                each.table_count,
                each.created_ms,
            )
            for each in response.databases
        ]

    async def alter_database(
        self,
        name: str,
        *,
        comment: str | None = None,
        set_properties: Mapping[str, str] | None = None,
        unset_properties: Sequence[str] = (),
    ) -> None:
        """Set or take back properties of a database, or give it another comment."""
        from tidemill.client.tables.requests import pairs

        body = {
            "name": text("a database's name", name),
            "comment": optional_text("comment", comment),
            "set_properties": pairs(set_properties, "set_properties"),
            "unset_properties": names("unset_properties", unset_properties),
        }
        await self._ask("AlterDatabase", body, f"altering database {name!r}")

    async def drop_database(self, name: str, *, cascade: bool = False, if_exists: bool = False) -> None:
        """Drop a database. One that has tables only with ``cascade``, which drops them too."""
        body = {
            "name": text("a database's name", name),
            "cascade": flag("cascade", cascade),
            "if_exists": flag("if_exists", if_exists),
        }
        await self._ask("DropDatabase", body, f"dropping database {name!r}")

    # --- tables

    async def create_table(
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
    ) -> AsyncTable:
        """Create a table ``database.table``, and its database if that is missing.

        ``schema`` is an Arrow schema, or Spark's words for one (``"id bigint, name string"``); key columns
        become NOT NULL. Without ``primary_key`` the table is a typed log. ``buckets`` (1) says over how many
        logs its rows are spread by the hash of their keys; ``boundaries``, keys in rising order, route by
        ranges of keys instead. ``partition_by`` names a column each of whose values gets buckets of its own.
        ``row_format`` is ``row``, ``json`` (for producers in other languages) or ``raw``. ``properties`` are
        configs of its topics, ``snapshot.…``, and ``user.…``.
        """
        from tidemill.client.tables.creating import creation_body
        from tidemill.client.tables.requests import pairs

        body = creation_body(
            text("a table's name", name),
            schema,
            primary_key=tuple(names("primary_key", primary_key)),
            buckets=buckets,
            boundaries=boundaries,
            partition_by=partition_by,
            row_format=row_format,
            key_format=key_format,
        )
        body |= {
            "properties": pairs(properties),
            "comment": optional_text("comment", comment),
            "if_not_exists": flag("if_not_exists", if_not_exists),
        }
        await self._ask("CreateTable", body, f"creating table {name!r}")
        self.cluster.forget()
        return await self.table(name)

    async def table(self, name: str) -> AsyncTable:
        """The table of that name. Raises ``TableError`` TABLE_NOT_FOUND if there is none."""
        from tidemill.client.tables.requests import definition_from
        from tidemill.client.tables.table import AsyncTable

        text("a table's name", name)
        response = await self._ask("DescribeTable", {"name": name}, f"describing table {name!r}")
        return AsyncTable(self.cluster, definition_from(response.table))

    async def tables(self, database: str | None = None) -> list[TableInfo]:
        """The tables, by name, of one database or of all."""
        optional_text("database, a name,", database)
        response = await self._ask("ListTables", {"database": database}, "listing tables")
        return [
            TableInfo(
                each.name,
                each.table_id,
                tuple(each.primary_key),
                each.column_count,
                each.buckets,
                each.partition_count,
                each.row_format,
                each.comment,
            )
            for each in response.tables
        ]

    async def drop_table(self, name: str, *, if_exists: bool = False) -> None:
        """Drop a table with everything in it."""
        body = {"name": text("a table's name", name), "if_exists": flag("if_exists", if_exists)}
        await self._ask("DropTable", body, f"dropping table {name!r}")
        self.cluster.forget()

    async def leases(self) -> list[Lease]:
        """The leases of all tables."""
        from tidemill.client.tables.values import lease_from

        response = await self._ask("ListLeases", {"table": None}, "listing leases")
        # Only a table's definition knows the topics of its partitions.
        definitions = {
            name: await self._definition(name) for name in {each.table for each in response.leases}
        }
        return [lease_from(each, definitions[each.table]) for each in response.leases]

    async def _definition(self, name: str) -> TableDefinition | None:
        try:
            return (await self.table(name)).definition
        except TidemillError:
            return None  # The table was dropped meanwhile.

    async def release_lease(self, lease_id: str) -> None:
        """Release a lease by its id, for example one that somebody left behind."""
        text("lease_id", lease_id)
        await self._ask("ReleaseLease", {"lease_id": lease_id}, f"releasing lease {lease_id!r}")

    async def _ask(self, name: str, body: dict[str, Any], what: str) -> Any:
        from tidemill.client.tables.requests import ask_controller

        return await ask_controller(self.cluster, name, body, what)


def _refuse_own_letters(topics: Sequence[str], dead_letter: str | None) -> None:
    """Raise ``ConfigError`` if dead records would go back to where they come from."""
    if dead_letter is not None and dead_letter in topics:
        raise ConfigError(
            f"dead_letter is {dead_letter!r}, which the records come from: dead ones would come again and "
            "again; name a topic of their own"
        )
