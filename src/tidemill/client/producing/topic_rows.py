"""Splits columns of records for a topic by partition, in the form in which they are sent.

- A record goes to the partition that is named for it, else to that of its key as Java's clients choose it,
  else, with all others of its call, to the partition whose turn it is.
- Text is sent as UTF-8.
"""

from __future__ import annotations

import time
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types as arrow

from tidemill.client.producing.columns import Outgoing
from tidemill.errors import ApiError, ErrorCode
from tidemill.records.columns.arrays import from_numpy
from tidemill.records.columns.build import encode_headers
from tidemill.records.columns.scalar import Int64s
from tidemill.tables.keys.routing import murmur2_many

__all__ = ("Column", "records_by_partition")

Column: TypeAlias = Any
"""Values of all records: an array of Arrow, or plain values that Arrow understands."""

_POSITIVE = np.uint32(0x7FFFFFFF)
_HEADERS = pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))


def records_by_partition(
    topic: str,
    partition_count: int,
    turn: int,
    *,
    partition: int | Column | None,
    keys: Column | None,
    values: Column,
    timestamps_ms: Column | None,
    headers: Column | None,
) -> dict[int, Outgoing]:
    """The records by partition. ``turn`` is the partition for those that nothing else decides about."""
    as_bytes = _as_bytes(values, "values")
    records = Outgoing(
        None if keys is None else _as_bytes(keys, "keys"),
        as_bytes,
        None if timestamps_ms is None else _times(timestamps_ms),
        None if headers is None else encode_headers(_array(headers, _HEADERS)),
    )
    if not len(as_bytes):
        return {}
    chosen = _choose(records, turn, partition, partition_count)
    _check_partitions(chosen, topic, partition_count)
    found = {}
    for index in np.unique(chosen).tolist():
        indexes = np.flatnonzero(chosen == index)
        found[index] = records if len(indexes) == len(as_bytes) else _taken(records, indexes)
    return found


def _choose(records: Outgoing, turn: int, partition: Any, count: int) -> npt.NDArray[np.int64]:
    rows = len(records.values)
    if isinstance(partition, int):
        return np.full(rows, partition, np.int64)
    chosen = np.full(rows, turn, np.int64)
    if records.keys is not None and records.keys.null_count < rows:
        by_key = (murmur2_many(records.keys.fill_null(b"")) & _POSITIVE) % np.uint32(count)
        chosen = np.where(_is_valid(records.keys), by_key, chosen)
    if partition is not None:
        named = _array(partition, pa.int64())
        chosen = np.where(_is_valid(named), named.fill_null(0).to_numpy(zero_copy_only=False), chosen)
    return chosen


def _is_valid(column: pa.Array) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    return found


def _check_partitions(chosen: npt.NDArray[np.int64], topic: str, count: int) -> None:
    wrong = chosen[(chosen < 0) | (chosen >= count)]
    if len(wrong):
        raise ApiError(
            ErrorCode.unknown_topic_or_partition,
            f"topic {topic!r} has {count} partitions (0 to {count - 1}), there is no partition {wrong[0]}",
        )


def _taken(records: Outgoing, indexes: npt.NDArray[np.intp]) -> Outgoing:
    rows = from_numpy(indexes)
    return Outgoing(
        None if records.keys is None else records.keys.take(rows),
        records.values.take(rows),
        None if records.timestamps_ms is None else records.timestamps_ms[indexes],
        None if records.headers is None else records.headers.take(rows),
    )


def _as_bytes(column: Column, name: str) -> pa.BinaryArray:
    if isinstance(column, pa.Array | pa.ChunkedArray):
        kind = column.type
        if not (
            arrow.is_null(kind)
            or arrow.is_string(kind)
            or arrow.is_large_string(kind)
            or arrow.is_binary(kind)
            or arrow.is_large_binary(kind)
            or arrow.is_fixed_size_binary(kind)
        ):
            raise ApiError(
                ErrorCode.invalid_record, f"the {name} have type {kind}: give them as text or bytes"
            )
    return _array(column, pa.binary())


def _times(column: Column) -> Int64s:
    """Timestamps in milliseconds; a missing one is the present time."""
    if isinstance(column, pa.Array | pa.ChunkedArray) and arrow.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms", column.type.tz), safe=False)
    times = _array(column, pa.int64())
    found: Int64s = times.fill_null(time.time_ns() // 1_000_000).to_numpy(zero_copy_only=False)
    return found


def _array(column: Column, kind: pa.DataType) -> pa.Array:
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        return pa.array(column, kind)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column if column.type == kind else column.cast(kind)
