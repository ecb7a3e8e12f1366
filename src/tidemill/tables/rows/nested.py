"""Splitting lists, maps and structs of Arrow into their parts, and making them of parts, as whole arrays.

- What Arrow keeps beneath a null has no meaning: it is never read, and what is made here has empty values
  there.
- A field that is not nullable holds no null, also beneath a null struct. Arrow allows one there, but some of
  its functions refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from tidemill.errors import TableCode, TableError
from tidemill.records.columns.arrays import from_numpy

__all__ = (
    "MAX_SPREAD_BYTES",
    "SpreadBudget",
    "list_parts",
    "make_array",
    "null_mask",
    "nulls_of",
    "running",
    "spread",
)

#: The most memory per batch for values that untrusted bytes imply and do not hold.
MAX_SPREAD_BYTES = 256 * 1024 * 1024


class SpreadBudget:
    """Budget of memory for values that rows imply: missing columns, the fields of a struct that is null.

    Each takes next to nothing in a row and a value of every field in Arrow. Without a limit, a small batch
    could ask for any amount.
    """

    def __init__(self) -> None:
        self._left = MAX_SPREAD_BYTES

    def take(self, size: int, path: str) -> None:
        """Take ``size`` bytes off the budget. Raises ``TableError`` if they are too many."""
        self._left -= size
        if self._left < 0:
            what = f"null structs in column {path!r}" if path else "fields that rows do not have"
            raise TableError(
                TableCode.row_refused,
                f"{what} would take more than {MAX_SPREAD_BYTES} bytes of memory in one batch: "
                "write fewer rows at once",
            )


def running(counts: np.ndarray) -> np.ndarray:
    """The running sums of the counts, from 0 to the sum of all: n + 1 numbers.

    >>> running(np.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def null_mask(array: pa.Array) -> np.ndarray | None:
    """Which values are null; None if none is."""
    if array.null_count == 0:
        return None
    nulls: np.ndarray = array.is_null().to_numpy(zero_copy_only=False)
    return nulls


def make_array(
    data_type: pa.DataType,
    count: int,
    nulls: np.ndarray | None,
    buffers: Sequence[pa.Buffer],
    children: Sequence[pa.Array] | None = None,
) -> pa.Array:
    """Make an array of these parts, which are not copied."""
    validity = None if nulls is None else pa.py_buffer(np.packbits(~nulls, bitorder="little"))
    null_count = 0 if nulls is None else int(np.count_nonzero(nulls))
    return pa.Array.from_buffers(
        data_type, count, [validity, *buffers], null_count, 0, children=children and list(children)
    )


def nulls_of(count: int, data_type: pa.DataType) -> pa.Array:
    """An array of nulls, like ``pa.nulls`` but without nulls in nested fields that are not nullable."""
    if not arrow.is_nested(data_type):
        return pa.nulls(count, data_type)
    return pa.array([None], data_type).take(from_numpy(np.zeros(count, np.int64)))


def list_parts(array: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """The offsets of lists or maps into their elements (n + 1 numbers), and the elements.

    Null lists have no elements. Those of a map are structs of key and value.
    """
    if not arrow.is_map(array.type):
        lengths = array.value_lengths().fill_null(0).to_numpy()
        return running(lengths), array.flatten()
    entries = array.type.field(0).type
    given = array.drop_null()
    if not len(given):
        return np.zeros(len(array) + 1, np.int64), nulls_of(0, entries)
    bounds = np.frombuffer(given.buffers()[1], np.int32)[given.offset : given.offset + len(given) + 1]
    first, total = int(bounds[0]), int(bounds[-1] - bounds[0])
    fields = [given.keys.slice(first, total), given.items.slice(first, total)]
    lengths = np.zeros(len(array), np.int64)
    nulls = null_mask(array)
    lengths[slice(None) if nulls is None else ~nulls] = np.diff(bounds)
    return running(lengths), make_array(entries, total, None, [], fields)


def spread(fields: Sequence[pa.Field], arrays: Sequence[pa.Array], nulls: np.ndarray) -> list[pa.Array]:
    """The fields of all structs, given those of the structs that are not null; null ones get empty values."""
    indices = np.cumsum(~nulls) - 1
    results = []
    for field, array in zip(fields, arrays, strict=True):
        if field.nullable:
            results.append(array.take(from_numpy(indices, nulls)))
            continue
        empty = pa.array([None], pa.struct([field])).field(0)
        indices_or_empty = from_numpy(np.where(nulls, len(array), indices))
        results.append(pa.concat_arrays([array, empty]).take(indices_or_empty))
    return results
