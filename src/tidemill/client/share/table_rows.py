"""Rows of tables in the records of a share group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tidemill.client.cluster import Cluster
from tidemill.client.consuming.batch_reader import FetchedBatches
from tidemill.client.share.decoding import Taken
from tidemill.client.share.record import ShareRecord
from tidemill.client.tables.follow import decoded
from tidemill.client.tables.requests import ask_controller, definition_from
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError
from tidemill.tables.definition import TableDefinition

__all__ = ("TableRows", "table_rows")


class TableRows:
    """The rows of one table: records of its topics get them."""

    def __init__(self, cluster: Cluster, table: TableDefinition) -> None:
        self._cluster = cluster
        self._table = table

    @property
    def topics(self) -> list[str]:
        """The table's topics: one, or one for each table partition that there is now."""
        return [each.topic for each in self._table.partitions]

    @property
    def is_partitioned(self) -> bool:
        """Whether the table can get more topics."""
        return self._table.partition_column is not None

    def give(self, taken: Taken, records: Sequence[ShareRecord]) -> None:
        """Set ``row`` and ``op`` of each record. Raises ``TableError`` for rows of a newer schema."""
        by_offset: dict[int, tuple[str, dict[str, Any]]] = {}
        for batch in taken.batches:
            fetched = FetchedBatches((self._table.name, 0), 0, [batch], -1, -1)
            for changes in decoded(self._table, fetched):
                by_offset |= {change.offset: (change.op, change.row) for change in changes}
        for record in records:
            record.op, record.row = by_offset[record.offset]

    async def renew(self) -> None:
        """Ask for the table's newest schema."""
        renewed = await _table(self._cluster, self._table.name)
        self._table = renewed or self._table


async def table_rows(cluster: Cluster, topics: Iterable[str]) -> dict[str, TableRows]:
    """Readers of rows for those topics that are logs of tables, by topic name."""
    found: dict[str, TableRows] = {}
    for topic in topics:
        # A table's name has a dot between database and table.
        table = await _table(cluster, topic) if "." in topic else None
        if table is not None:
            found[topic] = TableRows(cluster, table)
    return found


async def _table(cluster: Cluster, name: str) -> TableDefinition | None:
    try:
        answer = await ask_controller(cluster, "DescribeTable", {"name": name}, f"describing {name!r}")
    except TableError as error:
        if error.table_code in (TableCode.table_not_found, TableCode.database_not_found):
            return None
        raise
    except ApiError as error:
        # A server without tables has none of that name.
        if error.code == ErrorCode.unsupported_version:
            return None
        raise
    return definition_from(answer.table)
