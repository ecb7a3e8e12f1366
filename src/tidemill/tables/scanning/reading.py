"""Reading of state: from keys and views to Arrow batches. Blocking: runs in threads, in bounded pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa

from tidemill.errors import TableCode, TableError
from tidemill.kv.contract import KvStore, KvView
from tidemill.records.columns.arrays import from_numpy
from tidemill.tables.definition import INDEX_COLUMN, TableDefinition
from tidemill.tables.predicates.predicate import BoundPredicate
from tidemill.tables.scanning.sessions import ReadPlan
from tidemill.tables.state.changes import OFFSET_BYTES

__all__ = ("BatchRead", "ScanShape", "look_up", "pack_batches", "read_batch")

#: How many rows are turned into columns at once.
_PIECE_ROWS = 8_192
_PIECE_BYTES = 1024 * 1024
#: Rows of an old schema, and null structs, take more memory as columns than they do as rows.
_PIECE_SPREAD_BYTES = 16 * 1024 * 1024
#: How many keys are looked up at once: at first, and at most. What is found is copied with Python's lock
#: held, and its size is known only then.
_LOOKED_UP_FIRST = 32
_LOOKED_UP_MAX = 1_024
#: The next piece has at most so many times as many, and these bytes if its rows are like the largest so far.
_LOOKED_UP_GROWTH = 4
_LOOKED_UP_BYTES = 8 * 1024 * 1024
#: A call whose filter lets nothing pass ends after so many bytes of state; the next call goes on.
_SCANNED_BYTES_MAX = 64 * 1024 * 1024
_NO_LIMIT = 2**62
#: Unknown columns that an error names; a request may have very many.
_UNKNOWN_NAMED_MAX = 10


@dataclass(frozen=True, slots=True)
class ScanShape:
    """What a scan reads: which columns (None: all) of which rows, up to which state key."""

    columns: tuple[str, ...] | None
    predicate: BoundPredicate | None
    end_key: bytes | None


@dataclass(frozen=True, slots=True)
class BatchRead:
    """One batch of a scan. ``next_key`` is the key at which the next one starts, None at the end."""

    batches: list[pa.RecordBatch]
    rows: int
    next_key: bytes | None


def decode_values(
    table: TableDefinition, values: Sequence[bytes], columns: Sequence[str] | None
) -> pa.RecordBatch:
    """Decode state rows into columns."""
    data = b"".join(values)
    ends = np.cumsum(np.fromiter(map(len, values), np.int64, len(values)))
    starts = np.empty_like(ends)
    starts[0] = OFFSET_BYTES
    starts[1:] = ends[:-1] + OFFSET_BYTES
    return table.rows.decode(data, starts, ends, columns=columns)


def look_up(
    find_table: Callable[[], TableDefinition],
    store: KvStore,
    keys: Sequence[bytes],
    columns: Sequence[str] | None,
    max_bytes: int,
) -> pa.RecordBatch | None:
    """Look up rows by key; gives each with the index of its key, or None if there are none.

    Raises ``TableError`` ANSWER_TOO_LARGE if those of several keys have more than ``max_bytes``.
    """
    # A key that is named very often would have its row copied as often before anybody counts the bytes.
    distinct = dict.fromkeys(keys)
    values = _values_of(store, list(distinct), max_bytes)
    if len(distinct) < len(keys):
        found = dict(zip(distinct, values, strict=True))
        values = [found[key] for key in keys]
        if sum(len(value) for value in values if value is not None) > max_bytes:
            raise _too_large(keys, max_bytes)
    # Asked for now, because rows may be of a schema that the table has only just got.
    table = find_table()
    if None in values:
        indexes = np.array([number for number, value in enumerate(values) if value is not None], np.int32)
    else:
        indexes = np.arange(len(values), dtype=np.int32)
    if not len(indexes):
        return None
    if len(indexes) > 1 and len(indexes) * _spread_bytes(table, columns) > max_bytes:
        raise _too_large(keys, max_bytes)
    batch = decode_values(table, [value for value in values if value is not None], columns)
    return batch.append_column(INDEX_COLUMN, from_numpy(indexes))


def _values_of(store: KvStore, keys: Sequence[bytes], max_bytes: int) -> list[bytes | None]:
    values: list[bytes | None] = []
    size, largest, count = 0, 0, _LOOKED_UP_FIRST
    while len(values) < len(keys):
        piece = store.get_many(keys[len(values) : len(values) + count])
        values += piece
        lengths = [len(value) for value in piece if value is not None]
        size, largest = size + sum(lengths), max(largest, *lengths, 0)
        if size > max_bytes and len(keys) > 1:
            raise _too_large(keys, max_bytes)
        if largest:
            count = max(1, min(_LOOKED_UP_BYTES // largest, _LOOKED_UP_GROWTH * count, _LOOKED_UP_MAX))
    return values


def _too_large(keys: Sequence[bytes], max_bytes: int) -> TableError:
    return TableError(
        TableCode.answer_too_large,
        f"the rows of {len(keys)} keys have more than {max_bytes} bytes; look up fewer keys at a time",
    )


def read_batch(
    table: TableDefinition, view: KvView, shape: ScanShape, plan: ReadPlan, max_bytes: int
) -> BatchRead:
    """Read one batch: at least one row, unless there is none or the filter rejects very many."""
    needed = _needed_columns(table, shape)
    spread_bytes = _spread_bytes(table, needed)
    rows_max = max(1, min(_PIECE_ROWS, _PIECE_SPREAD_BYTES // max(spread_bytes, 1)))
    end = plan.end if plan.end is not None else shape.end_key
    bytes_left = _NO_LIMIT if plan.is_repeat else max_bytes
    rows_left = _NO_LIMIT if plan.rows_max is None else plan.rows_max
    scanned, start, batches, rows = 0, plan.start, list[pa.RecordBatch](), 0
    while True:
        rows_wanted = rows_max if shape.predicate is not None else min(rows_max, rows_left)
        piece = view.read_values(start, end, min(bytes_left, _PIECE_BYTES), rows_wanted)
        if piece.values:
            batch = _shaped(decode_values(table, piece.values, needed), shape).slice(0, rows_left)
            scanned += piece.size_bytes
            if batch.num_rows:
                # With a filter, the limit is on what goes to the client.
                size = max(piece.size_bytes, batch.num_rows * spread_bytes)
                size = size if shape.predicate is None else batch.nbytes
                if rows and size > bytes_left:
                    # The row is larger than what is left of the limit: the next batch begins with it.
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


def _spread_bytes(table: TableDefinition, columns: Sequence[str] | None) -> int:
    """The size of a row as columns if all of it is null."""
    chosen = table.schema.names if columns is None else columns
    layout = table.rows.latest.layout
    return sum(layout.columns[table.schema.get_field_index(name)].spread_bytes for name in chosen)


def _needed_columns(table: TableDefinition, shape: ScanShape) -> list[str] | None:
    """The columns to decode: those asked for, and those that the filter reads."""
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
    """Raise ``TableError`` for columns that the table does not have."""
    names = frozenset(table.schema.names)
    unknown = list(islice((name for name in columns if name not in names), _UNKNOWN_NAMED_MAX))
    if unknown:
        raise TableError(
            TableCode.invalid_scan_request,
            f"table {table.name!r} has no column {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(table.schema.names)}",
        )
    if len(set(columns)) != len(columns):
        raise TableError(TableCode.invalid_scan_request, "a column is asked for twice")


def pack_batches(batches: Sequence[pa.RecordBatch]) -> pa.Buffer | None:
    """Batches of one schema as an Arrow IPC stream; None if there are none."""
    if not batches:
        return None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()
