"""The layout of rows: one ``Column`` per field, and a ``Layout`` for several side by side.

The bytes are described in ``rows/binary.py``. This module turns an Arrow schema into what the encoder
and the decoder share: the numpy type of the *head* (schema id, null bitmap, slots, ends) and a tree of nested
columns.

Slots are handled as unsigned integers of their width, never as numbers: a NaN keeps its payload, and minus
zero is not taken for zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

__all__ = ("COUNT_BYTES", "END_BYTES", "Column", "Layout", "slot_type")

#: Size of the element count at the start of a list's or map's cell.
COUNT_BYTES = 4
#: Size of one end position.
END_BYTES = 4


def slot_type(data_type: pa.DataType) -> np.dtype | None:
    """The unsigned numpy type of a fixed-width slot; None for a type of variable width.

    >>> slot_type(pa.float64()), slot_type(pa.string())
    (dtype('uint64'), None)
    """
    if arrow.is_boolean(data_type):
        return np.dtype("u1")
    if arrow.is_decimal128(data_type):
        return np.dtype(("<u8", (2,)))
    if arrow.is_primitive(data_type):
        return np.dtype(f"<u{data_type.bit_width // 8}")
    return None


class Column:
    """One field: its slot, or what is inside its cells.

    Exactly one of these says what a value is: ``slot`` (fixed width), ``layout`` (a struct), ``element`` (a
    list, or a map as a list of its entries), or none of them (text or bytes).
    """

    __slots__ = ("element", "field", "layout", "path", "slot", "spread_bytes", "type")

    def __init__(self, field: pa.Field, path: str) -> None:
        self.field = field
        self.type = field.type
        self.path = path
        self.slot = slot_type(field.type)
        self.layout: Layout | None = None
        self.element: Column | None = None
        if arrow.is_struct(field.type):
            self.layout = Layout(list(field.type), path + ".")
        elif arrow.is_map(field.type):
            self.element = Column(field.type.field(0), path + ".entries")
        elif arrow.is_list(field.type):
            self.element = Column(field.type.value_field, path + ".element")
        #: Memory of one null in Arrow's columns, which is more than its cell takes.
        self.spread_bytes = self.slot.itemsize if self.slot is not None else END_BYTES
        if self.layout is not None:
            self.spread_bytes = sum(column.spread_bytes for column in self.layout.columns)

    @property
    def slot_bytes(self) -> int:
        """The width of the slot; 0 for a variable-width column."""
        return 0 if self.slot is None else self.slot.itemsize


class Layout:
    """Fields side by side: the columns of a row, or the fields of a struct.

    ``head`` is the numpy type of everything in front of the variable data. Its fields are ``id`` (rows only),
    ``nulls``, one ``s<number of the column>`` per slot, and ``ends``.
    """

    __slots__ = ("columns", "head", "null_bytes", "path", "variable")

    def __init__(self, fields: Sequence[pa.Field], prefix: str = "", *, with_id: bool = False) -> None:
        self.path = prefix.removesuffix(".")
        self.columns = tuple(Column(field, prefix + field.name) for field in fields)
        variable = [number for number, column in enumerate(self.columns) if column.slot is None]
        #: The index among the variable-width columns, by the index among all.
        self.variable = {number: index for index, number in enumerate(variable)}
        self.null_bytes = (len(self.columns) + 7) // 8
        parts: list[tuple[str, object]] = [("id", "<u2")] if with_id else []
        parts.append(("nulls", ("u1", (self.null_bytes,))))
        parts += [
            (f"s{number}", column.slot)
            for number, column in enumerate(self.columns)
            if column.slot is not None
        ]
        if self.variable:
            parts.append(("ends", ("<u4", (len(self.variable),))))
        self.head = np.dtype(parts)

    @property
    def unused_null_bits(self) -> int:
        """The bits of the bitmap's last byte that no column has."""
        used = len(self.columns) - 8 * (self.null_bytes - 1)
        return 0xFF & ~((1 << used) - 1)
