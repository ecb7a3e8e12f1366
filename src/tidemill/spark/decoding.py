"""Record batches of logs and batches of scans as Arrow batches with exactly the columns that Spark wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tidemill.client.fetching import FetchedBatches
from tidemill.client.tables.follow import SNAPSHOT, ChangeBatch, decoded
from tidemill.records.columns import RecordColumns, read_columns
from tidemill.spark.schemas import HEADERS_FIELD
from tidemill.tables.definition import TableDefinition

__all__ = ("Gathering", "change_batches", "record_batches", "snapshot_batch")

_TIMESTAMP: Final = pa.timestamp("us", "UTC")
#: Small batches are put together: each costs Spark about as much as some thousand rows.
_ROWS_AT_ONCE: Final = 32_768
_BYTES_AT_ONCE: Final = 4 * 1024 * 1024
_LOG_APPEND_TIME: Final = 1


class Gathering:
    """Puts small batches of one schema together."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """What is large enough to be given on."""
        if batch.num_rows == 0:
            return
        self._batches.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= _ROWS_AT_ONCE or self._bytes >= _BYTES_AT_ONCE:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """All that is left."""
        batches, self._batches, self._rows, self._bytes = self._batches, [], 0, 0
        if len(batches) > 1:
            yield pa.concat_batches(batches)
        else:
            yield from batches


def record_batches(fetched: FetchedBatches, end: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Records as Spark's Kafka source shows them."""
    topic, partition = fetched.partition
    for batch in fetched.batches:
        columns = read_columns(batch)
        keep = (columns.offsets >= fetched.from_offset) & (columns.offsets < end)
        if not keep.all():
            columns = columns.take(keep)
        if columns.record_count:
            yield _record_batch(columns, topic, partition, schema)


def _record_batch(columns: RecordColumns, topic: str, partition: int, schema: pa.Schema) -> pa.RecordBatch:
    count = columns.record_count
    made: dict[str, Callable[[], Any]] = {
        "key": columns.keys,
        "value": columns.values,
        "topic": lambda: pa.repeat(topic, count),
        "partition": lambda: pa.repeat(pa.scalar(partition, pa.int32()), count),
        "offset": lambda: pa.array(columns.offsets),
        "timestamp": lambda: _timestamps(pa.array(columns.timestamps)),
        "timestampType": lambda: pa.repeat(pa.scalar(_timestamp_type(columns), pa.int32()), count),
        "headers": lambda: _headers(columns),
    }
    return pa.RecordBatch.from_arrays([made[name]() for name in schema.names], schema=schema)


def _timestamp_type(columns: RecordColumns) -> int:
    return _LOG_APPEND_TIME if columns.header.is_append_time else 0


def _timestamps(millis: pa.Array) -> pa.Array:
    return millis.cast(pa.timestamp("ms", "UTC")).cast(_TIMESTAMP)


def _headers(columns: RecordColumns) -> pa.Array:
    """Null where a record has none."""
    if not columns.header_counts.any():
        return pa.nulls(columns.record_count, HEADERS_FIELD.type)
    rows = [
        [{"key": name, "value": value} for name, value in columns.headers(index)] or None
        for index in range(columns.record_count)
    ]
    return pa.array(rows, HEADERS_FIELD.type)


def change_batches(
    table: TableDefinition, fetched: FetchedBatches, end: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Rows of a typed log, or changes of a table, and what happened to each."""
    for change in decoded(table, fetched, end):
        yield _change_batch(change, schema)


def _change_batch(change: ChangeBatch, schema: pa.Schema) -> pa.RecordBatch:
    count = len(change)
    made: dict[str, Callable[[], Any]] = {
        "_tidemill_op": lambda: change.ops,
        "_tidemill_bucket": lambda: pa.repeat(pa.scalar(change.bucket, pa.int32()), count),
        "_tidemill_offset": lambda: change.offsets,
        "_tidemill_timestamp": lambda: _timestamps(change.timestamps_ms),
    }
    columns = [
        made[name]() if name in made else change.rows.column(change.rows.schema.get_field_index(name))
        for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def snapshot_batch(rows: pa.RecordBatch, bucket: int, schema: pa.Schema) -> pa.RecordBatch:
    """Rows of a scan, with the columns of changes if they are wanted."""
    count = rows.num_rows
    made: dict[str, Callable[[], Any]] = {
        "_tidemill_op": lambda: pa.repeat(SNAPSHOT, count),
        "_tidemill_bucket": lambda: pa.repeat(pa.scalar(bucket, pa.int32()), count),
        "_tidemill_offset": lambda: pa.array(np.full(count, -1, np.int64)),
        "_tidemill_timestamp": lambda: pa.nulls(count, _TIMESTAMP),
    }
    columns = [
        made[name]() if name in made else rows.column(rows.schema.get_field_index(name))
        for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
