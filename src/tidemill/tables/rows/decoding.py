"""Decoding of rows into Arrow columns. ``tidemill.tables.rows.binary`` has the layout.

- A value is a slice of one buffer; slices are in increasing order at every level of nesting, so that ragged
  slices can be gathered by one ``take`` of Arrow.
- Structure (lengths, counts, ends) is checked always and before memory is allocated for it: damaged bytes
  never read outside their slice. ``validate`` adds what makes a spelling the only one and a value a valid
  one.
- A wrong value raises ``Refusal`` with its index at that level; every level turns it into the index of its
  parent.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from tidemill.records.columns import compute as pc
from tidemill.records.columns.arrays import from_numpy
from tidemill.tables.rows.layout import COUNT_BYTES, END_BYTES, Column, Layout
from tidemill.tables.rows.nested import SpreadBudget, make_array, nulls_of, running, spread
from tidemill.tables.rows.refusals import Refusal, first_failing, indexed_by, refuse_where

__all__ = ("Source", "decode_tuples", "utf8_array")

_NANOSECONDS_PER_DAY = 86_400_000_000_000
_SMALL_BYTES_MAX = 2**31 - 1


class Source:
    """The buffer that all slices of one call are in, and whether its bytes are validated."""

    def __init__(self, data: bytes | memoryview | pa.Buffer, *, validate: bool) -> None:
        self.buffer = pa.py_buffer(data)
        self.data = np.frombuffer(self.buffer, np.uint8)
        self.validate = validate
        self.budget = SpreadBudget()

    def heads(self, starts: np.ndarray, head: np.dtype) -> np.ndarray:
        """An array with the ``head`` at each start. The caller knows that all are inside the buffer."""
        if not len(starts):
            return np.empty(0, head)
        size = head.itemsize
        # As opaque items, which numpy copies whole: a record is copied field by field, ten times as slow.
        windows: np.ndarray = np.ndarray(
            (len(self.data) - size + 1,), f"V{size}", buffer=self.data, strides=(1,)
        )
        heads: np.ndarray = windows[starts].view(head)
        return heads

    def gather(self, starts: np.ndarray, ends: np.ndarray) -> pa.BinaryArray:
        """A binary array of the slices, with a buffer of its own."""
        small = len(self.data) <= _SMALL_BYTES_MAX
        count = len(starts)
        offsets = np.zeros(2 * count + 1, np.int32 if small else np.int64)
        offsets[0:-1:2] = starts
        offsets[1::2] = ends
        if count:
            offsets[-1] = ends[-1]
        kind = pa.binary() if small else pa.large_binary()
        slices = pa.Array.from_buffers(kind, 2 * count, [None, pa.py_buffer(offsets), self.buffer], 0)
        chosen = pc.take(slices, from_numpy(np.arange(0, 2 * count, 2)), boundscheck=False)
        return chosen if small else chosen.cast(pa.binary())

    def gather_bytes(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The bytes of all slices, one after the other."""
        total = int((ends - starts).sum())
        if not total:
            return np.empty(0, np.uint8)
        return np.frombuffer(self.gather(starts, ends).buffers()[2], np.uint8, count=total)


def decode_tuples(
    source: Source, layout: Layout, starts: np.ndarray, ends: np.ndarray, wanted: Collection[int]
) -> dict[int, pa.Array]:
    """The columns of these indexes, of the tuples in these slices. Only these columns are validated."""
    if not len(starts):
        return {number: nulls_of(0, layout.columns[number].type) for number in wanted}
    size = layout.head.itemsize
    text = f"is shorter than the {size} bytes in front of its variable part"
    refuse_where(ends - starts < size, layout.path, text)
    head = source.heads(starts, layout.head)
    bounds = _cell_bounds(layout, head, starts + size, ends)
    used = np.bitwise_or.reduce(head["nulls"], axis=0)
    if source.validate and used[-1] & layout.unused_null_bits:
        wrong = head["nulls"][:, -1] & layout.unused_null_bits != 0
        refuse_where(wrong, layout.path, "has a bit set in its null bitmap that belongs to no column")
    arrays = {}
    for number in wanted:
        column = layout.columns[number]
        nulls = None
        if used[number >> 3] >> (number & 7) & 1:
            nulls = (head["nulls"][:, number >> 3] >> (number & 7) & 1).view(bool)
        if column.slot is not None:
            arrays[number] = _slot_array(source, column, head[f"s{number}"].copy(), nulls)
        else:
            index = layout.variable[number]
            arrays[number] = _cell_array(source, column, bounds[index], bounds[index + 1], nulls)
    return arrays


def utf8_array(values: pa.BinaryArray, path: str) -> pa.StringArray:
    """The bytes as text; refuses the first value that is not UTF-8."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        index = first_failing(values, lambda part: part.cast(pa.string()))
    raise Refusal(index, path, "is not UTF-8")


def _cell_bounds(layout: Layout, head: np.ndarray, bases: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    """The starts of the cells of each variable-width column, and after them the ends of the last ones."""
    bounds = [bases]
    for index in range(len(layout.variable)):
        bound = bases + head["ends"][:, index]
        refuse_where(bound < bounds[-1], layout.path, "has end positions that go backwards")
        bounds.append(bound)
    refuse_where(bounds[-1] != ends, layout.path, "does not end where its last cell ends")
    return bounds


def _slot_array(source: Source, column: Column, slots: np.ndarray, nulls: np.ndarray | None) -> pa.Array:
    """The array of a fixed-width column. ``slots`` is contiguous, and becomes the array's own memory."""
    _check_nullable(column, nulls)
    if source.validate:
        _check_slots(column, slots, nulls)
    count = len(slots)
    if arrow.is_boolean(column.type):
        slots = np.packbits(slots != 0, bitorder="little")
    return make_array(column.type, count, nulls, [pa.py_buffer(slots)])


def _check_slots(column: Column, slots: np.ndarray, nulls: np.ndarray | None) -> None:
    if nulls is not None:
        filled = (slots if slots.ndim == 1 else slots[:, 0] | slots[:, 1]) != 0
        refuse_where(nulls & filled, column.path, "is null, and its slot is not zero")
    if arrow.is_boolean(column.type):
        refuse_where(slots > 1, column.path, "is a boolean that is neither 0 nor 1")
    elif arrow.is_time(column.type):
        refuse_where(slots >= _NANOSECONDS_PER_DAY, column.path, "is a time outside of its day")
    elif arrow.is_decimal(column.type):
        text = f"has more digits than the {column.type.precision} that the column has"
        refuse_where(_beyond(slots, 10**column.type.precision - 1), column.path, text)


def _check_nullable(column: Column, nulls: np.ndarray | None) -> None:
    # Not only when validating: Arrow ends the process when a map has a null key.
    if nulls is not None and not column.field.nullable:
        refuse_where(nulls, column.path, "is null, and the column is not nullable")


def _beyond(slots: np.ndarray, bound: int) -> np.ndarray:
    """Which 128-bit numbers, as pairs of (low, high) words, are above ``bound`` or below ``-bound``."""
    low, high = slots[:, 0], slots[:, 1].view(np.int64)
    above_low, above_high = np.uint64(bound % 2**64), np.int64(bound >> 64)
    below_low, below_high = np.uint64(-bound % 2**64), np.int64(-bound >> 64)
    above = (high > above_high) | ((high == above_high) & (low > above_low))
    below = (high < below_high) | ((high == below_high) & (low < below_low))
    wrong: np.ndarray = above | below
    return wrong


def _cell_array(
    source: Source, column: Column, starts: np.ndarray, ends: np.ndarray, nulls: np.ndarray | None
) -> pa.Array:
    """The array of a variable-width column from the slices of its cells."""
    _check_nullable(column, nulls)
    if source.validate and nulls is not None:
        refuse_where(nulls & (starts != ends), column.path, "is null, and its cell is not empty")
    if column.layout is not None:
        return _structs(source, column, starts, ends, nulls)
    if column.element is not None:
        return _lists(source, column, starts, ends, nulls)
    values = source.gather(starts, ends)
    if source.validate and arrow.is_string(column.type):
        utf8_array(values, column.path)
    return make_array(column.type, len(starts), nulls, values.buffers()[1:])


def _structs(
    source: Source, column: Column, starts: np.ndarray, ends: np.ndarray, nulls: np.ndarray | None
) -> pa.Array:
    assert column.layout is not None
    count, numbers = len(starts), range(len(column.layout.columns))
    if nulls is None:
        fields = decode_tuples(source, column.layout, starts, ends, numbers)
        return make_array(column.type, count, None, [], [fields[number] for number in numbers])
    if source.validate:
        source.budget.take(count * column.spread_bytes, column.path)
    present = np.flatnonzero(~nulls)
    with indexed_by(present.__getitem__):
        fields = decode_tuples(source, column.layout, starts[present], ends[present], numbers)
    children = spread(list(column.type), [fields[number] for number in numbers], nulls)
    return make_array(column.type, count, nulls, [], children)


def _lists(
    source: Source, column: Column, starts: np.ndarray, ends: np.ndarray, nulls: np.ndarray | None
) -> pa.Array:
    """The array of a column of lists or maps. Null ones have no cell, so only the others are read."""
    counts = np.zeros(len(starts), np.int64)
    if nulls is None:
        values = _elements(source, column, starts, ends, counts)
    else:
        present = np.flatnonzero(~nulls)
        read = np.zeros(len(present), np.int64)
        with indexed_by(present.__getitem__):
            values = _elements(source, column, starts[present], ends[present], read)
        counts[present] = read
    offsets = running(counts).astype(np.int32)
    return make_array(column.type, len(starts), nulls, [pa.py_buffer(offsets)], [values])


def _elements(
    source: Source, column: Column, starts: np.ndarray, ends: np.ndarray, counts: np.ndarray
) -> pa.Array:
    """The elements of all lists in these slices, one after the other; fills in ``counts``, one per list."""
    element = column.element
    assert element is not None
    refuse_where(ends - starts < COUNT_BYTES, column.path, "is shorter than its number of elements")
    counts[:] = source.heads(starts, np.dtype("<u4"))
    bodies = starts + COUNT_BYTES + ((counts + 7) >> 3)
    behind = bodies + counts * (element.slot_bytes or END_BYTES)
    text = "has a number of elements that does not fit its length"
    if element.slot is not None:
        refuse_where(behind != ends, column.path, text)
    else:
        refuse_where((behind > ends) | ((counts == 0) & (behind != ends)), column.path, text)
    offsets = running(counts)
    nulls = _element_nulls(source, column, starts + COUNT_BYTES, bodies, counts, offsets)
    with indexed_by(lambda index: np.searchsorted(offsets, index, "right") - 1):
        if element.slot is not None:
            slots = source.gather_bytes(bodies, ends).view(element.slot.base)
            return _slot_array(source, element, slots.reshape(-1, *element.slot.shape), nulls)
        cell_starts, cell_ends = _element_bounds(source, column, bodies, behind, ends, counts, offsets)
        return _cell_array(source, element, cell_starts, cell_ends, nulls)


def _element_nulls(
    source: Source,
    column: Column,
    starts: np.ndarray,
    ends: np.ndarray,
    counts: np.ndarray,
    offsets: np.ndarray,
) -> np.ndarray | None:
    """Which elements are null, from the bitmaps of all lists; None if none is."""
    packed = source.gather_bytes(starts, ends)
    if not packed.any():
        return None
    bits = np.unpackbits(packed, bitorder="little")
    bounds = 8 * running(ends - starts)
    positions = np.arange(offsets[-1]) + np.repeat(bounds[:-1] - offsets[:-1], counts)
    nulls: np.ndarray = bits[positions].view(bool)
    if source.validate:
        bits[positions] = 0
        with indexed_by(lambda index: np.searchsorted(bounds, index, "right") - 1):
            refuse_where(bits, column.path, "has a bit set in its null bitmap that belongs to no element")
    return nulls if nulls.any() else None


def _element_bounds(
    source: Source,
    column: Column,
    tables: np.ndarray,
    bases: np.ndarray,
    ends: np.ndarray,
    counts: np.ndarray,
    offsets: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The starts and ends of all elements' cells, from the tables of ends of all lists."""
    filled = counts > 0
    cell_ends = np.repeat(bases, counts) + source.gather_bytes(tables, bases).view("<u4")
    cell_starts = np.empty_like(cell_ends)
    cell_starts[1:] = cell_ends[:-1]
    cell_starts[offsets[:-1][filled]] = bases[filled]
    refuse_where(cell_ends < cell_starts, column.path, "has end positions that go backwards")
    last = offsets[1:][filled] - 1
    wrong = np.zeros(len(cell_ends), bool)
    wrong[last] = cell_ends[last] != ends[filled]
    refuse_where(wrong, column.path, "does not end where its last element ends")
    return cell_starts, cell_ends
