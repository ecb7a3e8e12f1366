"""Reading state: from keys and views to Arrow batches. Blocking: runs in threads, in bounded pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.errors import TableCode, TableError
from tidemill.kv.engine import KvStore
from tidemill.tables.bucket import View
from tidemill.tables.changes import OFFSET_BYTES
from tidemill.tables.definition import TableDefinition
from tidemill.tables.predicate import BoundPredicate
from tidemill.tables.scanners import ReadPlan

__all__ = ("INDEX_COLUMN", "BatchRead", "ScanShape", "look_up", "pack_batches", "read_batch")

#: In answers to look-ups: which of the keys a row belongs to.
INDEX_COLUMN = "_tidemill_index"
#: Rows that are turned into columns at once.
_PIECE_ROWS = 8_192
_PIECE_BYTES = 1024 * 1024
#: A call whose filter lets nothing pass gives up after so many bytes of state, and goes on with the next
#: call.
_SCANNED_BYTES_MAX = 64 * 1024 * 1024
_NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class ScanShape:
    """What a scan gives: which columns (None: all) of which rows, up to which state key."""

    columns: tuple[str, ...] | None
    predicate: BoundPredicate | None
    end_key: bytes | None


@dataclass(frozen=True, slots=True)
class BatchRead:
    """One batch of a scan: ``next_key`` is where the next one starts, None at the end."""

    batches: list[pa.RecordBatch]
    rows: int
    next_key: bytes | None


def decode_values(
    table: TableDefinition, values: Sequence[bytes], columns: Sequence[str] | None
) -> pa.RecordBatch:
    """State rows as columns."""
    data = b"".join(values)
    ends = np.cumsum(np.fromiter(map(len, values), np.int64, len(values)))
    starts = np.empty_like(ends)
    starts[0] = OFFSET_BYTES
    starts[1:] = ends[:-1] + OFFSET_BYTES
    return table.rows.decode(data, starts, ends, columns=columns)


def look_up(
    table: TableDefinition, store: KvStore, keys: Sequence[bytes], columns: Sequence[str] | None
) -> pa.RecordBatch | None:
    """The rows of those keys that have one, each with the number of its key; None if there are none."""
    values = store.get_many(keys)
    if None in values:
        found = np.array([number for number, value in enumerate(values) if value is not None], np.int32)
    else:
        found = np.arange(len(values), dtype=np.int32)
    if not len(found):
        return None
    batch = decode_values(table, [value for value in values if value is not None], columns)
    return batch.append_column(INDEX_COLUMN, pa.array(found))


def read_batch(
    table: TableDefinition, view: View, shape: ScanShape, plan: ReadPlan, max_bytes: int
) -> BatchRead:
    """Read one batch: at least one row, if there is one and the filter is not too choosy."""
    needed = _needed_columns(table, shape)
    end = plan.end if plan.end is not None else shape.end_key
    bytes_left = _NO_LIMIT if plan.is_repeat else max_bytes
    rows_left = _NO_LIMIT if plan.rows_max is None else plan.rows_max
    scanned, start, batches, rows = 0, plan.start, list[pa.RecordBatch](), 0
    while True:
        rows_wanted = _PIECE_ROWS if shape.predicate is not None else min(_PIECE_ROWS, rows_left)
        piece = view.read(start, end, min(bytes_left, _PIECE_BYTES), rows_wanted)
        if piece.values:
            batch = _shaped(decode_values(table, piece.values, needed), shape).slice(0, rows_left)
            scanned += sum(map(len, piece.values))
            if batch.num_rows:
                # Where a filter takes rows away, what counts is what goes to the client.
                size = scanned_bytes(piece) if shape.predicate is None else batch.nbytes
                if rows and size > bytes_left:
                    # A row that is larger than what is left: the next batch begins with it.
                    return BatchRead(batches, rows, start)
                batches.append(batch)
                rows += batch.num_rows
                rows_left -= batch.num_rows
                bytes_left -= size
        if piece.next_start is None or rows_left <= 0:
            return BatchRead(batches, rows, None)
        start = piece.next_start
        if bytes_left <= 0 or (not plan.is_repeat and scanned >= _SCANNED_BYTES_MAX):
            return BatchRead(batches, rows, start)


def scanned_bytes(piece: Any) -> int:
    """Bytes of keys and rows of a piece."""
    return sum(map(len, piece.keys)) + sum(map(len, piece.values))


def _needed_columns(table: TableDefinition, shape: ScanShape) -> list[str] | None:
    """Columns to decode: those asked for, and those that the filter looks at."""
    if shape.columns is None:
        return None
    needed = list(shape.columns)
    if shape.predicate is not None:
        needed += sorted(shape.predicate.columns - set(needed))
    return needed or [table.schema.names[0]]


def _shaped(batch: pa.RecordBatch, shape: ScanShape) -> pa.RecordBatch:
    if shape.predicate is not None:
        batch = batch.filter(shape.predicate.mask(batch))
    if shape.columns is not None and batch.schema.names != list(shape.columns):
        batch = batch.select(list(shape.columns))
    return batch


def check_columns(table: TableDefinition, columns: Sequence[str]) -> None:
    """Refuse columns that the table does not have."""
    unknown = [name for name in columns if table.schema.get_field_index(name) < 0]
    if unknown:
        raise TableError(
            TableCode.invalid_scan_request,
            f"table {table.name!r} has no column {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(table.schema.names)}",
        )
    if len(set(columns)) != len(columns):
        raise TableError(TableCode.invalid_scan_request, "a column is asked for twice")


def pack_batches(batches: Sequence[pa.RecordBatch]) -> pa.Buffer | None:
    """Batches of one schema as an Arrow IPC stream; None for none."""
    if not batches:
        return None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()
