"""``connect_async``: databases and tables of a cluster, with await."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidemill.client.cluster import Cluster
from tidemill.client.process_bound import Unpicklable
from tidemill.errors import ConfigError, TidemillError
from tidemill.net.connection import DEFAULT_TIMEOUT_MS

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemill.client.tables.table import AsyncTable
    from tidemill.client.tables.values import Lease
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
            f"the servers are text like '127.0.0.1:9092', several separated by commas, not a "
            f"{type(bootstrap_servers).__name__}"
        )
    cluster = Cluster(bootstrap_servers, client_id=client_id, timeout_ms=timeout_ms)
    await cluster.connect()
    return AsyncTidemill(cluster, bootstrap_servers)


class AsyncTidemill(Unpicklable):
    """A connection to a node or a cluster: of one process and one event loop."""

    def __init__(self, cluster: Cluster, bootstrap_servers: str) -> None:
        self.cluster = cluster
        self.bootstrap_servers = bootstrap_servers

    async def __aenter__(self) -> AsyncTidemill:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<tidemill at {self.bootstrap_servers}{', closed' if self.cluster.closed else ''}>"

    def _instead_of_a_pickle(self) -> str:
        return f"Open one there: await tidemill.connect_async({self.bootstrap_servers!r})"

    async def close(self) -> None:
        """Close every connection. Closing twice is fine."""
        await self.cluster.close()

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
            "name": name,
            "comment": comment,
            "properties": pairs(properties),
            "if_not_exists": if_not_exists,
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
            "name": name,
            "comment": comment,
            "set_properties": pairs(set_properties),
            "unset_properties": list(unset_properties),
        }
        await self._ask("AlterDatabase", body, f"altering database {name!r}")

    async def drop_database(self, name: str, *, cascade: bool = False, if_exists: bool = False) -> None:
        """Drop a database. One that has tables only with ``cascade``, which drops them too."""
        body = {"name": name, "cascade": cascade, "if_exists": if_exists}
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
            name,
            schema,
            primary_key=(primary_key,) if isinstance(primary_key, str) else tuple(primary_key),
            buckets=buckets,
            boundaries=boundaries,
            partition_by=partition_by,
            row_format=row_format,
            key_format=key_format,
        )
        body |= {"properties": pairs(properties), "comment": comment, "if_not_exists": if_not_exists}
        await self._ask("CreateTable", body, f"creating table {name!r}")
        self.cluster.forget()
        return await self.table(name)

    async def table(self, name: str) -> AsyncTable:
        """The table of that name. Raises ``TableError`` TABLE_NOT_FOUND if there is none."""
        from tidemill.client.tables.requests import definition_from
        from tidemill.client.tables.table import AsyncTable

        response = await self._ask("DescribeTable", {"name": name}, f"describing table {name!r}")
        return AsyncTable(self.cluster, definition_from(response.table))

    async def tables(self, database: str | None = None) -> list[TableInfo]:
        """The tables, by name, of one database or of all."""
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
        await self._ask("DropTable", {"name": name, "if_exists": if_exists}, f"dropping table {name!r}")
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
        await self._ask("ReleaseLease", {"lease_id": lease_id}, f"releasing lease {lease_id!r}")

    async def _ask(self, name: str, body: dict[str, Any], what: str) -> Any:
        from tidemill.client.tables.requests import ask_controller

        return await ask_controller(self.cluster, name, body, what)
