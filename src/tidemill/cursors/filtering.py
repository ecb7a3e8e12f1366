"""The filter of a region: takes the records of batches that are in it, by columns. Loads Arrow.

Keys are compared for many batches at once; headers and rows only of what is left. A batch that cannot be
decoded is left as it is: its reader is told so, as it would be without a filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.cursors.walking import Batch, Filtered
from tidemill.records.columns.arrays import from_numpy
from tidemill.records.columns.read import RecordColumns, read_columns
from tidemill.records.columns.rewriting import RecordIndex, index_batches
from tidemill.tables.definition import TableDefinition
from tidemill.tables.predicates.predicate import bind, decode

__all__ = ("RegionFilter", "RowFilter")

Bools = npt.NDArray[np.bool_]


class RowFilter:
    """A predicate over the rows of a table.

    A deletion has the key columns only. It passes if they pass, and also if the predicate looks at other
    columns: a reader that follows the rows that pass must hear that one may be gone.
    """

    def __init__(self, table: TableDefinition, predicate: bytes) -> None:
        self._table = table
        self._bound = bind(decode(predicate), table.schema)
        self._judges_deletions = self._bound.columns <= set(table.primary_key)

    def passes(self, columns: RecordColumns, rows: npt.NDArray[np.intp]) -> Bools:
        """Which of the records at ``rows`` pass. Raises ``TableError`` for rows that do not fit the table."""
        passed = np.ones(len(rows), np.bool_)
        dead = columns.value_null[rows]
        live_at = rows[~dead]
        if len(live_at):
            starts, ends = columns.value_starts[live_at], columns.value_ends[live_at]
            batch = self._table.format.to_batch(columns.body, starts, ends)
            if not self._table.format.carries_keys:
                batch = self._with_keys(batch, columns, live_at)
            passed[~dead] = _to_numpy(self._bound.mask(batch))
        if dead.any() and self._judges_deletions:
            keys = self._keys(columns, rows[dead])
            schema = pa.schema([self._table.schema.field(name) for name in self._table.primary_key])
            passed[dead] = _to_numpy(self._bound.mask(pa.RecordBatch.from_arrays(keys, schema=schema)))
        return passed

    def _keys(self, columns: RecordColumns, rows: Any) -> list[pa.Array]:
        return self._table.keys.parse(columns.keys().take(from_numpy(rows)))

    def _with_keys(self, batch: pa.RecordBatch, columns: RecordColumns, rows: Any) -> pa.RecordBatch:
        by_name = dict(zip(self._table.primary_key, self._keys(columns, rows), strict=True))
        by_name |= {name: batch.column(name) for name in batch.schema.names}
        schema = self._table.schema
        return pa.RecordBatch.from_arrays([by_name[name] for name in schema.names], schema=schema)


class RegionFilter:
    """Filters batches by key prefix, headers and rows; all that are given must pass."""

    def __init__(
        self,
        *,
        key_prefix: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        rows: RowFilter | None = None,
        max_decompressed_bytes: int,
    ) -> None:
        self._key_prefix = key_prefix
        self._headers = frozenset(headers)
        self._rows = rows
        self._max_bytes = max_decompressed_bytes

    def apply(self, batches: Sequence[Batch]) -> list[Filtered]:
        """What is left of each batch; none of them is without records."""
        left = [Filtered(data, header.record_count) for header, data in batches]
        for part in index_batches(batches, self._max_bytes):
            self._judge(part, batches, left)
        return left

    def _judge(self, part: RecordIndex, batches: Sequence[Batch], left: list[Filtered]) -> None:
        kept = self._by_key(part)
        if self._headers or self._rows is not None:
            for number, index in enumerate(part.numbers):
                rows = slice(int(part.cuts[number]), int(part.cuts[number + 1]))
                chosen = np.flatnonzero(kept[rows])
                if len(chosen):
                    kept[rows][chosen] = self._by_content(batches[index][1], chosen)
        counts = part.count_by_batch(kept)
        holes = _holes(part)
        changed = counts != np.diff(part.cuts)
        rewritten = part.keep(kept, changed & (counts > 0), [None] * len(part.headers))
        for number, count in enumerate(counts.tolist()):
            index, own = part.numbers[number], holes.get(number, ())
            if not changed[number]:
                left[index] = left[index]._replace(holes=own)
            else:
                left[index] = Filtered(next(rewritten) if count else None, count, own)

    def _by_key(self, part: RecordIndex) -> Bools:
        kept = np.ones(len(part.offsets), np.bool_)
        prefix = self._key_prefix
        if prefix is None:
            return kept
        body = np.frombuffer(part.body, np.uint8)
        kept[:] = False
        # Without a key the end is before the start, so the length is negative.
        rows = np.flatnonzero(part.key_ends - part.key_starts >= len(prefix))
        starts = part.key_starts[rows]
        for number, byte in enumerate(prefix):
            same = body[starts + number] == byte
            rows, starts = rows[same], starts[same]
            if not len(rows):
                return kept
        kept[rows] = True
        return kept

    def _by_content(self, batch: memoryview, rows: npt.NDArray[np.intp]) -> Bools:
        columns = read_columns(batch, self._max_bytes)
        passed = np.ones(len(rows), np.bool_)
        if self._headers:
            wanted = self._headers
            passed[:] = [wanted.issubset(columns.headers(index)) for index in rows.tolist()]
            if not passed.any():
                return passed
        if self._rows is not None:
            passed[passed] = self._rows.passes(columns, rows[passed])
        return passed


def _holes(part: RecordIndex) -> dict[int, list[tuple[int, int]]]:
    """By number of the batch, offsets that it once had and has not any more."""
    found: dict[int, list[tuple[int, int]]] = {}
    for number, header in enumerate(part.headers):
        if header.record_count == header.last_offset_delta + 1:
            continue
        own = part.offsets[int(part.cuts[number]) : int(part.cuts[number + 1])]
        edges = np.concatenate([[header.base_offset - 1], own, [header.next_offset]])
        at = np.flatnonzero(np.diff(edges) > 1)
        found[number] = [(int(edges[each]) + 1, int(edges[each + 1]) - 1) for each in at.tolist()]
    return found


def _to_numpy(mask: pa.BooleanArray) -> Bools:
    values: Bools = mask.to_numpy(zero_copy_only=False)
    return values
