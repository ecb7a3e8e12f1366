"""A broker with tables: requests of the table APIs, in few words and with nothing hidden in them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from tidemill.client.tables.creating import creation_body
from tidemill.client.tables.requests import definition_from
from tidemill.client.tables.rows_in import as_tables
from tidemill.client.tables.writer import PreparedRows, prepare_deletes, prepare_upserts
from tidemill.kv.contract import KvStore
from tidemill.kv.rocks.store import RocksStore
from tidemill.records.columns.build import build_batch_columns
from tidemill.records.record import Record, build_batch
from tidemill.server.broker import Broker
from tidemill.tables.definition import TableDefinition

__all__ = ("ManualClock", "TableWorld", "batch_of", "count_views", "rows_of")

START_MS = 1_700_000_000_000
NO_LIMIT_BYTES = 1 << 20


class ManualClock:
    """Milliseconds that pass when the test says so."""

    def __init__(self) -> None:
        self.ms = START_MS

    def __call__(self) -> int:
        return self.ms

    def advance(self, ms: int) -> None:
        self.ms += ms


def batch_of(*records: tuple[bytes | None, bytes | None], timestamp_ms: int = 1_000) -> bytes:
    """A record batch of keys and values."""
    return build_batch([Record(key, value, timestamp_ms) for key, value in records])


def rows_of(response: Any) -> list[dict[str, Any]]:
    """The rows of an answer."""
    return [] if response.records is None else pa.ipc.open_stream(response.records).read_all().to_pylist()


def count_views(store: KvStore) -> int:
    """How many views of a store are held."""
    assert isinstance(store, RocksStore)
    return len(store._views)


class TableWorld:
    """A node with tables, in memory. ``ask`` sends a request through the wire format in both directions."""

    def __init__(self, broker: Broker, ask: Callable[..., Awaitable[Any]], clock: ManualClock) -> None:
        self.broker = broker
        self.clock = clock
        self._ask = ask

    async def ask(self, api: str, **body: Any) -> Any:
        """The answer, whatever it says."""
        return await self._ask(self.broker, api, 0, **body)

    async def ask_kafka(self, api: str, version: int, **body: Any) -> Any:
        """The answer to one of Kafka's own requests."""
        return await self._ask(self.broker, api, version, **body)

    async def done(self, api: str, **body: Any) -> Any:
        """The answer, which must be no error."""
        response = await self.ask(api, **body)
        assert response.error_code == 0, (response.error_code, response.error_message)
        return response

    # --- tables

    async def create(
        self,
        name: str = "shop.orders",
        columns: pa.Schema | str = "id bigint, region string, amount double",
        *,
        primary_key: Sequence[str] = ("id",),
        buckets: int | None = 1,
        boundaries: Sequence[Any] = (),
        partition_by: str | None = None,
        row_format: str | None = None,
        key_format: str | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> TableDefinition:
        body = creation_body(
            name,
            columns,
            primary_key=tuple(primary_key),
            buckets=buckets,
            boundaries=boundaries,
            partition_by=partition_by,
            row_format=row_format,
            key_format=key_format,
        )
        pairs = [{"key": key, "value": value} for key, value in (properties or {}).items()]
        await self.done("CreateTable", **body, properties=pairs, comment=None, if_not_exists=False)
        return await self.definition(name)

    async def definition(self, name: str) -> TableDefinition:
        return definition_from((await self.done("DescribeTable", name=name)).table)

    # --- writing

    async def produce(
        self, topic: str, index: int, records: bytes, *, version: int = 9, acks: int = -1
    ) -> Any:
        """The answer for one partition."""
        part = {"name": topic, "partition_data": [{"index": index, "records": records}]}
        response = await self._ask(
            self.broker, "Produce", version, acks=acks, timeout=60_000, topic_data=[part]
        )
        return response.responses[0].partition_responses[0]

    async def upsert(
        self, table: TableDefinition, rows: Iterable[dict[str, Any]]
    ) -> dict[tuple[str, int], int]:
        """Write rows; gives the offset behind them, by topic and bucket."""
        written: dict[tuple[str, int], int] = {}
        for piece in as_tables(list(rows), table.schema):
            for prepared in prepare_upserts(table, piece):
                written |= await self._write(table, prepared)
        return written

    async def delete(self, table: TableDefinition, keys: Any) -> dict[tuple[str, int], int]:
        return await self._write(table, prepare_deletes(table, table.keys.columns_from(keys)))

    async def _write(self, table: TableDefinition, prepared: PreparedRows) -> dict[tuple[str, int], int]:
        written = {}
        topics = {partition.value: partition.topic for partition in table.partitions}
        for (value, bucket), (keys, values, *_) in prepared.parts.items():
            records = build_batch_columns(keys, values, timestamp_ms=1_000)
            result = await self.produce(topics[value], bucket, records)
            assert result.error_code == 0, (result.error_code, result.error_message)
            written[topics[value], bucket] = result.base_offset + len(values)
        return written

    # --- scanning

    async def open_scan(self, table: TableDefinition, bucket: int = 0, **more: Any) -> Any:
        """The answer to the first call of a scan, whatever it says."""
        body = {
            "scanner_id": None,
            "table_id": table.table_id,
            "partition_id": table.partitions[0].id if table.partitions else 0,
            "bucket": bucket,
            "leader_epoch": -1,
            "limit": 0,
            "columns": (),
            "call_sequence": 0,
            "batch_size_bytes": NO_LIMIT_BYTES,
            **more,
        }
        return await self.ask("ScanKv", **body)

    async def go_on(
        self, scanner_id: bytes, sequence: int, *, batch_size_bytes: int = NO_LIMIT_BYTES, **more: Any
    ) -> Any:
        """The answer to a later call."""
        return await self.ask(
            "ScanKv",
            scanner_id=scanner_id,
            call_sequence=sequence,
            batch_size_bytes=batch_size_bytes,
            **more,
        )

    async def close_scan(self, scanner_id: bytes) -> Any:
        return await self.ask("ScanKv", scanner_id=scanner_id, close=True)

    async def scan(
        self, table: TableDefinition, bucket: int = 0, *, size: int = NO_LIMIT_BYTES, **more: Any
    ) -> Any:
        """All batches of a bucket, each a list of rows."""
        response = await self.open_scan(table, bucket, batch_size_bytes=size, **more)
        batches, sequence = [], 0
        while True:
            assert response.error_code == 0, (response.error_code, response.error_message)
            batches.append(rows_of(response))
            if not response.has_more:
                return batches
            sequence += 1
            response = await self.go_on(response.scanner_id, sequence, batch_size_bytes=size)

    @property
    def sessions(self) -> int:
        """How many scans take a place on the node."""
        tables = self.broker.tables.loaded
        return 0 if tables is None else len(tables.scans.sessions)

    async def sweep(self) -> None:
        """What the node does from time to time."""
        await self.broker.tables.housekeep()
