"""Record batches of logs as Arrow batches with exactly the columns that Spark wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tidemill.client.consuming.batch_reader import FetchedBatches
from tidemill.client.tables.follow import ChangeBatch, decoded
from tidemill.records.columns.arrays import from_numpy, repeated
from tidemill.records.columns.read import RecordColumns, read_columns
from tidemill.spark.reading.schemas import HEADERS_FIELD, TIMESTAMP
from tidemill.tables.definition import TableDefinition

__all__ = ("change_batches", "record_batches")

_LOG_APPEND_TIME: Final = 1


def record_batches(fetched: FetchedBatches, end: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Fetched records below ``end``, in the columns of Spark's Kafka source."""
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
        "topic": lambda: repeated(topic, count),
        "partition": lambda: from_numpy(np.full(count, partition, np.int32)),
        "offset": lambda: from_numpy(columns.offsets),
        "timestamp": lambda: _timestamps(from_numpy(columns.timestamps)),
        "timestampType": lambda: from_numpy(np.full(count, _timestamp_type(columns), np.int32)),
        "headers": lambda: _headers(columns),
    }
    return pa.RecordBatch.from_arrays([made[name]() for name in schema.names], schema=schema)


def _timestamp_type(columns: RecordColumns) -> int:
    return _LOG_APPEND_TIME if columns.header.is_append_time else 0


def _timestamps(millis: pa.Array) -> pa.Array:
    return millis.cast(pa.timestamp("ms", "UTC")).cast(TIMESTAMP)


def _headers(columns: RecordColumns) -> pa.Array:
    """The column ``headers``: null where a record has none."""
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
    """Fetched rows of a typed log or changes of a table below ``end``, with what happened to each."""
    for change in decoded(table, fetched, end):
        yield _change_batch(change, schema)


def _change_batch(change: ChangeBatch, schema: pa.Schema) -> pa.RecordBatch:
    count = len(change)
    made: dict[str, Callable[[], Any]] = {
        "_tidemill_op": lambda: change.ops,
        "_tidemill_bucket": lambda: from_numpy(np.full(count, change.bucket, np.int32)),
        "_tidemill_offset": lambda: change.offsets,
        "_tidemill_timestamp": lambda: _timestamps(change.timestamps_ms),
    }
    columns = [
        made[name]() if name in made else change.rows.column(change.rows.schema.get_field_index(name))
        for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
