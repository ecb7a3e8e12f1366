"""What a transaction writes: records of topics, gathered until they are flushed, and rows of tables.

The classes that open and end transactions (``TransactionalProducer``, a cursor's transaction) write through
this.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidemill.client.cluster import Cluster
    from tidemill.client.sync_table import Table
    from tidemill.client.tables.table import AsyncTable
    from tidemill.client.tables.writer import PreparedRows
    from tidemill.records.record import Header
    from tidemill.wire.jobs import AttemptId

__all__ = ("TransactionWrites",)


class _Gathered(NamedTuple):
    """A record that waits to be sent. Without a timestamp it gets the time at which it is sent."""

    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    partition: int | None
    timestamp_ms: int | None


class TransactionWrites:
    """Writes for one transaction after the other. One task uses it at a time."""

    def __init__(self, cluster: Cluster, on_write: Callable[[], None]) -> None:
        """``on_write`` is called before a send: from then on the coordinator may know of the transaction."""
        self._cluster = cluster
        self._on_write = on_write
        self._columns: Any = None
        self._rows: Any = None
        self._records: dict[str, list[_Gathered]] = {}
        #: Which partition records get that nothing else decides about; the next with every flush.
        self._turn = 0

    def begin(self, identity: AttemptId | None) -> None:
        """Write in that producer's transaction from now on; drop what an earlier one has gathered."""
        from tidemill.client.producing.columns import ColumnProducer
        from tidemill.client.tables.writer import TableWriter

        self._columns = ColumnProducer(self._cluster, transaction=identity)
        self._rows = TableWriter(self._columns)
        self._records = {}

    def gather(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: tuple[Header, ...],
        *,
        partition: int | None,
        timestamp_ms: int | None = None,
    ) -> None:
        """Keep a record until the next flush."""
        self._records.setdefault(topic, []).append(_Gathered(key, value, headers, partition, timestamp_ms))

    async def upsert(self, table: AsyncTable | Table, rows: Any) -> None:
        """Insert rows of a table, or replace those with the same key."""
        from tidemill.client.tables.rows_in import as_tables
        from tidemill.client.tables.writer import prepare_upserts

        target: Any = getattr(table, "_awaited", table)
        for piece in as_tables(rows, target.schema):
            for prepared in await asyncio.to_thread(prepare_upserts, target.definition, piece):
                await self._write(target, prepared)

    async def delete(self, table: AsyncTable | Table, keys: Any) -> None:
        """Delete rows of a table by their keys."""
        from tidemill.client.tables.arguments import is_single_key
        from tidemill.client.tables.writer import prepare_deletes

        target: Any = getattr(table, "_awaited", table)
        columns = target.definition.keys.columns_from([keys] if is_single_key(keys) else keys)
        await self._write(target, prepare_deletes(target.definition, columns))

    async def _write(self, table: AsyncTable, prepared: PreparedRows) -> None:
        if prepared.rows:
            self._on_write()
            await self._rows.write(table.topic_of, prepared, table.renew)

    async def flush(self) -> None:
        """Send the records that were gathered; returns when the nodes have them."""
        from tidemill.client.producing.topic_rows import records_by_partition

        gathered, self._records = self._records, {}
        for topic, records in gathered.items():
            self._on_write()
            info = await self._cluster.topic(topic, create=True)
            parts = records_by_partition(
                topic,
                len(info.partitions),
                self._turn % len(info.partitions),
                partition=[record.partition for record in records],
                keys=[record.key for record in records],
                values=[record.value for record in records],
                timestamps_ms=[record.timestamp_ms for record in records],
                headers=[
                    [{"key": name, "value": value} for name, value in record.headers] for record in records
                ],
            )
            self._turn += 1
            tasks = await self._columns.begin({(topic, index): parts[index] for index in parts})
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
