"""Looking rows up by their keys: one request per bucket, all at once; rows come in the order of the keys."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tidemill.client.cluster import Cluster
from tidemill.client.tables.bucket_scanner import read_batches
from tidemill.client.tables.requests import ask_soon_again
from tidemill.errors import TableCode, TableError
from tidemill.net.answers import checked
from tidemill.records.columns.arrays import from_numpy
from tidemill.tables.definition import INDEX_COLUMN, PartitionDefinition, TableDefinition
from tidemill.tables.keys.partition_values import partition_texts

__all__ = ("LookUp",)

_KEYS_PER_REQUEST: Final = 10_000


class LookUp:
    """Look-ups through one cluster connection."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def rows(
        self,
        table: TableDefinition,
        key_columns: Sequence[pa.Array],
        columns: Sequence[str],
        written: Mapping[tuple[str, int], int],
    ) -> pa.Table:
        """The rows of the keys that have one, in the order of the keys."""
        state_keys = table.keys.state_keys(key_columns)
        buckets = table.bucket_map.route(table.keys.canonical(key_columns), state_keys)
        requests = []
        for partition, indexes in _by_partition(table, key_columns, len(state_keys)):
            for bucket in np.unique(buckets[indexes]).tolist():
                inside = indexes[buckets[indexes] == bucket]
                for first in range(0, len(inside), _KEYS_PER_REQUEST):
                    piece = inside[first : first + _KEYS_PER_REQUEST]
                    min_offset = written.get((partition.topic, bucket), -1)
                    requests.append(
                        self._ask(table, partition, bucket, piece, state_keys, columns, min_offset)
                    )
        found = [batch for batches in await asyncio.gather(*requests) for batch in batches]
        schema = table.schema if not columns else pa.schema([table.schema.field(name) for name in columns])
        if not found:
            return schema.empty_table()
        together = pa.Table.from_batches(found)
        order = np.argsort(together.column(INDEX_COLUMN).to_numpy(), kind="stable")
        return together.drop_columns([INDEX_COLUMN]).take(from_numpy(order))

    async def _ask(
        self,
        table: TableDefinition,
        partition: PartitionDefinition,
        bucket: int,
        indexes: Any,
        state_keys: pa.BinaryArray,
        columns: Sequence[str],
        min_offset: int,
    ) -> list[pa.RecordBatch]:
        """The rows of keys of one bucket; in several requests if they are too large for one answer."""
        try:
            found = await self._ask_once(table, partition, bucket, indexes, state_keys, columns, min_offset)
        except TableError as error:
            if error.table_code != TableCode.answer_too_large or len(indexes) == 1:
                raise
        else:
            return [] if found is None else [found]
        half = len(indexes) // 2
        return [
            batch
            for piece in (indexes[:half], indexes[half:])
            for batch in await self._ask(table, partition, bucket, piece, state_keys, columns, min_offset)
        ]

    async def _ask_once(
        self,
        table: TableDefinition,
        partition: PartitionDefinition,
        bucket: int,
        indexes: Any,
        state_keys: pa.BinaryArray,
        columns: Sequence[str],
        min_offset: int,
    ) -> pa.RecordBatch | None:
        body = {
            "table_id": table.table_id,
            "partition_id": partition.id,
            "bucket": bucket,
            "leader_epoch": -1,
            "keys": state_keys.take(from_numpy(indexes)).to_pylist(),
            # All columns are named, too: the table may have more than the definition that this client has.
            "columns": list(columns) or table.schema.names,
            "min_offset": min_offset,
            # A node that has not reached the offset by then says so; one that hangs says nothing.
            "max_wait_ms": self._cluster.attempt_ms // 2,
        }

        async def ask() -> Any:
            (leader,) = await self._cluster.leaders([(partition.topic, bucket)])
            connection = await self._cluster.connection(leader, purpose="lookup")
            response = await connection.request("LookupKv", body, timeout_ms=self._cluster.attempt_ms)
            return checked(response, f"looking up rows of table {table.name!r}")

        response = await ask_soon_again(self._cluster, ask)
        if not response.records:
            return None
        batch = read_batches(response.records)
        index = batch.schema.get_field_index(INDEX_COLUMN)
        return batch.set_column(index, INDEX_COLUMN, from_numpy(indexes[batch.column(index).to_numpy()]))


def _by_partition(table: TableDefinition, key_columns: Sequence[pa.Array], count: int) -> Any:
    """Each table partition with the indexes of its keys; keys of one that does not exist are left out."""
    if table.partition_column is None:
        yield table.partitions[0], np.arange(count)
        return
    texts = partition_texts(key_columns[table.primary_key.index(table.partition_column)]).to_numpy(
        zero_copy_only=False
    )
    for partition in table.partitions:
        indexes = np.flatnonzero(texts == partition.value)
        if len(indexes):
            yield partition, indexes
