"""From the records of a table's log to changes of its state. Pure.

``prepare`` is where a table's leader refuses: before a batch is appended every record of it must have a key
that is spelt canonically, a row that fits the schema, key columns that say the same as the key, and the right
bucket and partition. A refused batch is refused whole. The same function gives the changes when the log is
read again, with nothing left to refuse.

A state row is the offset of the record that wrote it (8 bytes, little-endian), and the row in the ``row``
format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.errors import TableCode, TableError
from tidemill.records.columns import compute as pc
from tidemill.records.columns.arrays import from_numpy
from tidemill.records.columns.read import RecordColumns
from tidemill.tables.definition import PartitionDefinition, TableDefinition
from tidemill.tables.keys.partition_values import partition_texts

__all__ = ("OFFSET_BYTES", "Changes", "prepare", "prepare_checked", "state_values")

#: Size of the log offset in front of every state row.
OFFSET_BYTES = 8
_BYTES_PER_CHANGE = 32
#: The largest record of a table. The state is written and read row by row, with Python's lock held.
_RECORD_BYTES_MAX = 16 * 1024 * 1024
#: The most commas of a row in JSON. One row is decoded at once, which takes about 30 ns for every value.
_COMMAS_MAX = 500_000
#: How many records at fault an error names.
_NAMED_RECORDS_MAX = 1_000
#: How many rows, or how many times a batch's rows, are read again to name more than the first bad row.
_REREAD_ROWS = 10_000
_REREAD_TIMES = 4


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that the records of one batch make to the state, in their order.

    ``rows`` holds rows in the ``row`` format, null for a deletion.
    """

    offsets: np.ndarray[Any, np.dtype[np.int64]]
    state_keys: pa.BinaryArray
    rows: pa.BinaryArray
    #: An estimate of the memory: Arrow's own count takes too long.
    size_bytes: int = 0

    def shifted(self, base_offset: int) -> Changes:
        """The changes of a batch that got ``base_offset`` in the log."""
        return replace(self, offsets=self.offsets - self.offsets[0] + base_offset)


def prepare_checked(
    table: TableDefinition, columns: RecordColumns, partition: PartitionDefinition, bucket: int
) -> Changes | None:
    """The changes of a batch for ``bucket`` of ``partition``, before its append; None without a key.

    Raises ``TableError`` with the records at fault: those that have the first fault that was found.
    """
    _check_numbers(table, columns)
    _check_sizes(table, columns)
    if not table.has_primary_key:
        _check_log_records(table, columns, partition)
        return None
    _refuse_where(
        columns.key_null,
        TableCode.key_refused,
        lambda _: f"a record for table {table.name!r} has no key; the key is {_spelling(table)}",
    )
    keys = columns.keys()
    changes, key_columns = _prepare(table, columns, keys)
    routed = table.bucket_map.route(keys, changes.state_keys)
    _refuse_where(
        routed != bucket,
        TableCode.wrong_bucket,
        lambda at: (
            f"the key {_shown(keys[at].as_py())} belongs to bucket {int(routed[at])} of table "
            f"{table.name!r}, not to {bucket}; {_advice(table)}"
        ),
    )
    if table.partition_column is not None:
        _check_partition(table, key_columns[table.primary_key.index(table.partition_column)], partition)
    return changes


def prepare(table: TableDefinition, columns: RecordColumns) -> Changes:
    """The changes of a batch that is in the log of a table with a primary key."""
    return _prepare(table, columns, columns.keys())[0]


def state_values(changes: Changes) -> pa.BinaryArray:
    """The values of the state: offset and row; null for a deletion."""
    offsets = changes.offsets.astype("<i8").tobytes()
    fixed = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(OFFSET_BYTES), len(changes.offsets), [None, pa.py_buffer(offsets)]
    )
    return pc.binary_join_element_wise(fixed.cast(pa.binary()), changes.rows, b"")


def _prepare(
    table: TableDefinition, columns: RecordColumns, keys: pa.BinaryArray
) -> tuple[Changes, list[pa.Array]]:
    live = np.flatnonzero(~columns.value_null)
    dead = np.flatnonzero(columns.value_null)
    batch = _live_rows(table, columns, live)
    if table.format.carries_keys:
        key_columns = table.key_columns(batch)
        _check_same_keys(table, keys, live, key_columns)
        if len(dead):
            deleted = _translated(dead, lambda: table.keys.parse(keys.take(from_numpy(dead))))
            key_columns = _merged(key_columns, deleted, live, dead)
    else:
        key_columns = table.keys.parse(keys)
        batch = _with_keys(table, batch, [column.take(from_numpy(live)) for column in key_columns])
    if table.row_format == "row" and table.format.carries_keys:
        rows = columns.values()
    else:
        rows = _spread(table.codec.encode(batch), live, len(keys))
    size_bytes = len(columns.body) + columns.record_count * _BYTES_PER_CHANGE
    return Changes(columns.offsets, table.keys.state_keys(key_columns), rows, size_bytes), key_columns


def _live_rows(table: TableDefinition, columns: RecordColumns, live: Any) -> pa.RecordBatch:
    starts, ends = columns.value_starts, columns.value_ends
    if len(live) != columns.record_count:
        starts, ends = starts[live], ends[live]
    return _translated(live, lambda: _read_rows(table, columns.body, starts, ends))


def _read_rows(table: TableDefinition, body: Any, starts: Any, ends: Any) -> pa.RecordBatch:
    """Read the rows at these positions. ``TableError`` names several bad rows, while looking is cheap."""
    try:
        return table.format.to_batch(body, starts, ends)
    except TableError as error:
        if error.index is None:
            raise
        raise _with_later_faults(
            error, lambda first: table.format.to_batch(body, starts[first:], ends[first:]), len(starts)
        ) from None


def _with_later_faults(error: TableError, read_from: Callable[[int], object], count: int) -> TableError:
    """The error with the faults of later rows too.

    A format stops at the first bad row, so the rows behind it are read again for the next one.
    """
    faults = list(error.record_errors)
    rows_left = max(_REREAD_ROWS, _REREAD_TIMES * count)
    while rows_left > 0 and len(faults) < _NAMED_RECORDS_MAX:
        following = faults[-1][0] + 1
        rows_left -= count - following
        try:
            if following < count:
                read_from(following)
            break
        except TableError as later:
            faults += ((following + number, text) for number, text in later.record_errors)
    return TableError(error.table_code, error.message, index=error.index, record_errors=tuple(faults))


def _translated(indexes: Any, work: Any) -> Any:
    """Run ``work`` on some of the records; an error names records by their index among all."""
    try:
        return work()
    except TableError as error:
        if error.index is None:
            raise
        faults = tuple((int(indexes[number]), text) for number, text in error.record_errors)
        raise TableError(error.table_code, error.message, index=faults[0][0], record_errors=faults) from None


def _refuse_where(wrong: Any, code: TableCode, message: Callable[[int], str], numbers_of: Any = None) -> None:
    """Raise ``TableError`` if ``wrong`` is true anywhere; it names each such record, with its ``message``.

    ``numbers_of``: the indexes of the records that ``wrong`` is about, if it is not about the whole batch.
    """
    at = np.flatnonzero(wrong)[:_NAMED_RECORDS_MAX]
    if not len(at):
        return
    numbers = at if numbers_of is None else numbers_of[at]
    faults = tuple((int(number), message(int(index))) for number, index in zip(numbers, at, strict=True))
    raise TableError(code, faults[0][1], index=faults[0][0], record_errors=faults)


def _check_same_keys(
    table: TableDefinition, keys: pa.BinaryArray, live: Any, key_columns: list[pa.Array]
) -> None:
    given = keys if len(live) == len(keys) else keys.take(from_numpy(live))
    canonical = table.keys.canonical(key_columns)
    if given.equals(canonical):
        return
    _refuse_where(
        pc.not_equal(given, canonical).to_numpy(zero_copy_only=False),
        TableCode.key_refused,
        lambda at: (
            f"the key {_shown(given[at].as_py())} of a record for table {table.name!r} is not that of its "
            f"row, {_shown(canonical[at].as_py())}; the key is {_spelling(table)}"
        ),
        live,
    )


def _merged(ours: list[pa.Array], theirs: list[pa.Array], live: Any, dead: Any) -> list[pa.Array]:
    """The key columns of all records, from those of rows and those of deletions."""
    order = from_numpy(np.argsort(np.concatenate([live, dead]), kind="stable"))
    return [pa.concat_arrays([one, other]).take(order) for one, other in zip(ours, theirs, strict=True)]


def _with_keys(table: TableDefinition, batch: pa.RecordBatch, key_columns: list[pa.Array]) -> pa.RecordBatch:
    by_name = dict(zip(table.primary_key, key_columns, strict=True))
    for name in batch.schema.names:
        by_name[name] = batch.column(name)
    return pa.RecordBatch.from_arrays([by_name[name] for name in table.schema.names], schema=table.schema)


def _spread(rows: pa.BinaryArray, live: Any, count: int) -> pa.BinaryArray:
    """The rows at the indexes of their records, null elsewhere."""
    if len(live) == count:
        return rows
    indexes = np.full(count, -1, np.int64)
    indexes[live] = np.arange(len(live))
    return rows.take(from_numpy(indexes, indexes < 0))


def _check_log_records(
    table: TableDefinition, columns: RecordColumns, partition: PartitionDefinition
) -> None:
    _refuse_where(
        columns.value_null,
        TableCode.row_refused,
        lambda _: (
            f"a record for table {table.name!r} has no value; it has no primary key, so there is nothing to "
            "delete"
        ),
    )
    batch = _read_rows(table, columns.body, columns.value_starts, columns.value_ends)
    if table.partition_column is not None:
        _check_partition(table, batch.column(table.partition_column), partition)


def _check_partition(table: TableDefinition, column: pa.Array, partition: PartitionDefinition) -> None:
    texts = partition_texts(column)
    _refuse_where(
        pc.not_equal(texts, partition.value).to_numpy(zero_copy_only=False),
        TableCode.wrong_bucket,
        lambda at: (
            f"a row of partition {texts[at].as_py()!r} of table {table.name!r} was sent to the topic of "
            f"partition {partition.value!r}"
        ),
    )


def _check_numbers(table: TableDefinition, columns: RecordColumns) -> None:
    """Check that records are numbered without gaps, because offsets are given by their order."""
    numbers = columns.offsets - columns.header.base_offset
    _refuse_where(
        numbers != np.arange(columns.record_count),
        TableCode.row_refused,
        lambda at: f"record {at} of a batch for table {table.name!r} says that it is number {numbers[at]}",
    )


def _check_sizes(table: TableDefinition, columns: RecordColumns) -> None:
    """Check that no row is too large: compressed, a batch of it may be small."""
    sizes = columns.key_ends - columns.key_starts + columns.value_ends - columns.value_starts
    _refuse_where(
        sizes > _RECORD_BYTES_MAX,
        TableCode.row_refused,
        lambda at: (
            f"a record for table {table.name!r} has {sizes[at]} bytes, {_RECORD_BYTES_MAX} are the most"
        ),
    )
    if table.row_format == "json":
        _refuse_where(
            _have_very_many_commas(columns),
            TableCode.row_refused,
            lambda _: (
                f"a row for table {table.name!r} has more than {_COMMAS_MAX} commas: very many values in one "
                "row take too long to read; divide them among several rows"
            ),
        )


def _have_very_many_commas(columns: RecordColumns) -> np.ndarray[Any, np.dtype[np.bool_]]:
    # Between two of them is a byte at least, or the row is no JSON.
    found = columns.value_ends - columns.value_starts > 2 * _COMMAS_MAX
    text = np.frombuffer(columns.body, np.uint8)
    for at in np.flatnonzero(found):
        row = text[columns.value_starts[at] : columns.value_ends[at]]
        found[at] = np.count_nonzero(row == ord(",")) > _COMMAS_MAX
    return found


def _spelling(table: TableDefinition) -> str:
    columns = ", ".join(table.primary_key)
    if table.key_format == "json":
        return f"a JSON array of {columns}, without spaces"
    return f"the text of {columns}"


def _advice(table: TableDefinition) -> str:
    if table.bucket_map.kind == "hash":
        return "set partitioner=murmur2_random in clients of librdkafka, whose own default hashes otherwise"
    return "the table is routed by ranges of keys: write through Tidemill's client, or choose the partition"


def _shown(key: bytes) -> str:
    text = key[:100].decode("utf-8", "backslashreplace")
    return repr(text + ("…" if len(key) > len(text) else ""))
