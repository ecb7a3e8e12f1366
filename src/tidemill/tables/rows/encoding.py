"""Encoding of Arrow columns into rows. ``tidemill.tables.rows.binary`` has the layout.

- Everything works on whole arrays; the bytes of a row are put together by Arrow's own join of binary columns.
- Encoded cells are a ``pa.BinaryArray`` without nulls: a null cell is an empty slice.
- What Arrow keeps beneath a null is never looked at: slots are zeroed, cells are emptied.
- A null where the field allows none is refused here as well, so that no invalid row can be written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from tidemill.errors import TableCode, TableError
from tidemill.records.columns import compute as pc
from tidemill.tables.rows.layout import COUNT_BYTES, END_BYTES, Column, Layout
from tidemill.tables.rows.nested import list_parts, null_mask, running
from tidemill.tables.rows.refusals import indexed_by, refuse_where

__all__ = ("MAX_ARRAY_BYTES", "encode_tuples")

#: The most bytes that the 32-bit offsets of one Arrow array can address.
MAX_ARRAY_BYTES = 2**31 - 1


def encode_tuples(
    layout: Layout, arrays: Sequence[pa.Array], count: int, schema_id: int | None = None
) -> pa.BinaryArray:
    """Encode tuples, one value each: head and cells of ``arrays``, which have ``count`` values each."""
    head = np.zeros(count, layout.head)
    if schema_id is not None:
        head["id"] = schema_id
    cells: list[pa.BinaryArray] = []
    ends = np.zeros(count, np.int64)
    for number, (column, array) in enumerate(zip(layout.columns, arrays, strict=True)):
        nulls = _nulls(column, array)
        if nulls is not None:
            head["nulls"][:, number >> 3] |= nulls.view(np.uint8) << (number & 7)
        if column.slot is not None:
            head[f"s{number}"] = _slots(column, array, nulls)
            continue
        encoded = _cells(column, array, nulls)
        offsets = _offsets(encoded)
        ends += offsets[1:] - offsets[:-1]
        head["ends"][:, len(cells)] = ends
        cells.append(encoded)
    return _join(_fixed(head.view(np.uint8), count, layout.head.itemsize), *cells)


def _nulls(column: Column, array: pa.Array) -> np.ndarray | None:
    """Which values are null, where the column allows it; None if none is."""
    nulls = null_mask(array)
    if nulls is not None and not column.field.nullable:
        refuse_where(nulls, column.path, "is null, and the column is not nullable")
    return nulls


def _slots(column: Column, array: pa.Array, nulls: np.ndarray | None) -> np.ndarray:
    """The slots of a fixed-width column as unsigned integers, zero where null."""
    assert column.slot is not None
    if arrow.is_boolean(array.type):
        array = array.cast(pa.uint8())
    count, shape = len(array), column.slot.shape
    if not count:
        return np.zeros((0, *shape), column.slot.base)
    values: np.ndarray = np.frombuffer(
        array.buffers()[1],
        column.slot.base,
        count=count * (column.slot_bytes // column.slot.base.itemsize),
        offset=array.offset * column.slot_bytes,
    ).reshape(count, *shape)
    if nulls is None:
        return values
    values = values.copy()
    values[nulls] = 0
    return values


def _cells(column: Column, array: pa.Array, nulls: np.ndarray | None) -> pa.BinaryArray:
    """The cells of a variable-width column, as bytes."""
    if column.layout is None and column.element is None:
        plain = array.view(pa.binary())
        return plain if nulls is None else plain.fill_null(b"")
    if nulls is None:
        return _nested(column, array)
    with indexed_by(np.flatnonzero(~nulls).__getitem__):
        return _spread(_nested(column, array.drop_null()), nulls)


def _nested(column: Column, array: pa.Array) -> pa.BinaryArray:
    """The cells of structs, lists or maps, none of which is null."""
    if column.layout is not None:
        return encode_tuples(column.layout, array.flatten(), len(array))
    return _lists(column, array)


def _lists(column: Column, array: pa.Array) -> pa.BinaryArray:
    """The cells of lists: count, null bitmap, then slots, or ends and cells."""
    element = column.element
    assert element is not None
    offsets, values = list_parts(array)
    counts = np.diff(offsets)
    parts = [_fixed(counts.astype("<u4").view(np.uint8), len(array), COUNT_BYTES)]
    with indexed_by(lambda index: np.searchsorted(offsets, index, "right") - 1):
        nulls = _nulls(element, values)
        parts.append(_bitmaps(counts, offsets, nulls))
        if element.slot is not None:
            slots = np.ascontiguousarray(_slots(element, values, nulls))
            return _join(*parts, _sliced(slots, offsets * element.slot_bytes))
        cells = _cells(element, values, nulls)
    positions = _offsets(cells).astype(np.int64)
    bounds = positions[offsets]
    ends = (positions[1:] - np.repeat(bounds[:-1], counts)).astype("<u4")
    data = _sliced(cells.buffers()[2], bounds)
    return _join(*parts, _sliced(ends, offsets * END_BYTES), data)


def _bitmaps(counts: np.ndarray, offsets: np.ndarray, nulls: np.ndarray | None) -> pa.BinaryArray:
    """One null bitmap per list, each padded to whole bytes."""
    bounds = running((counts + 7) >> 3)
    if nulls is None:
        return _sliced(np.zeros(bounds[-1], np.uint8), bounds)
    bits = np.zeros(8 * bounds[-1], bool)
    bits[np.arange(len(nulls)) + np.repeat(8 * bounds[:-1] - offsets[:-1], counts)] = nulls
    return _sliced(np.packbits(bits, bitorder="little"), bounds)


def _spread(encoded: pa.BinaryArray, nulls: np.ndarray) -> pa.BinaryArray:
    """The cells with empty ones put in where ``nulls`` is true."""
    lengths = np.zeros(len(nulls), np.int64)
    offsets = _offsets(encoded)
    lengths[~nulls] = offsets[1:] - offsets[:-1]
    return _sliced(encoded.buffers()[2], running(lengths) + int(offsets[0]))


def _offsets(array: pa.BinaryArray) -> np.ndarray:
    """The n + 1 offsets of a binary array into its data."""
    if not len(array):
        return np.zeros(1, np.int32)
    return np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]


def _fixed(data: np.ndarray, count: int, width: int) -> pa.BinaryArray:
    return _sliced(data, np.arange(count + 1, dtype=np.int64) * width)


def _sliced(data: np.ndarray | pa.Buffer | None, offsets: np.ndarray) -> pa.BinaryArray:
    """A binary array over ``data``, without a copy."""
    _check_size(int(offsets[-1]))
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(b"" if data is None else data)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers, 0)


def _join(*parts: pa.BinaryArray) -> pa.BinaryArray:
    """Join the bytes of all parts, row by row."""
    if len(parts) == 1:
        return parts[0]
    _check_size(sum(int(offsets[-1]) - int(offsets[0]) for offsets in map(_offsets, parts)))
    return pc.binary_join_element_wise(*parts, b"")


def _check_size(total_bytes: int) -> None:
    if total_bytes > MAX_ARRAY_BYTES:
        raise TableError(
            TableCode.row_refused,
            f"the rows of one batch take {total_bytes} bytes, and {MAX_ARRAY_BYTES} fit: "
            "write fewer rows at once",
        )
