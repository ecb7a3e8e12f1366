"""State keys: typed keys as bytes whose order is the order of the values.

The columns follow each other in the order of the primary key:

| kind | bytes |
| --- | --- |
| boolean | one: 0 or 1 |
| integer, date, timestamp | big-endian in the type's own width, sign bit flipped |
| decimal | sixteen: the unscaled value, big-endian, sign bit flipped |
| string, binary | the bytes, each 0x00 as 0x00 0xFF, then 0x00 0x00 |

Strings are ordered by code points, which is the order of their UTF-8. No value's bytes begin with those of
another value of its type, so the bytes of the first columns begin exactly the keys that have these values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from tidemill.records.columns import compute as pc
from tidemill.tables.keys.ragged import (
    ByteArray,
    bytes_of,
    fixed_width,
    values_of,
)
from tidemill.tables.keys.text import Kind, kind_of

__all__ = ("after_prefix", "encode_state_keys")

_ZERO: Final = b"\x00"
_ESCAPED_ZERO: Final = b"\x00\xff"
_END: Final = b"\x00\x00"
_WORD_BYTES_MAX: Final = 8
_LAST_BYTE: Final = 0xFF
_RAGGED: Final = (Kind.string, Kind.binary)


def encode_state_keys(columns: Sequence[pa.Array]) -> pa.Array:
    """Encode typed columns (at least one, of one length, without nulls) as state keys."""
    parts: list[pa.Array] = []
    fixed: list[ByteArray] = []
    for column in columns:
        if kind_of(column.type) not in _RAGGED:
            fixed.append(_encode_fixed(column))
            continue
        if fixed:
            parts.append(fixed_width(_side_by_side(fixed)))
            fixed = []
        parts += [_escape(column.cast(pa.binary())), _END]
    if fixed:
        parts.append(fixed_width(_side_by_side(fixed)))
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, b"")


def after_prefix(prefix: bytes) -> bytes | None:
    """The smallest byte string above all that begin with ``prefix``; None if nothing is above them.

    >>> after_prefix(b"a\\x01"), after_prefix(b"a\\xff"), after_prefix(b"\\xff")
    (b'a\\x02', b'b', None)
    """
    kept = prefix.rstrip(bytes((_LAST_BYTE,)))
    return kept[:-1] + bytes((kept[-1] + 1,)) if kept else None


def _width(data_type: pa.DataType) -> int:
    return 1 if pa.types.is_boolean(data_type) else int(data_type.byte_width)


def _side_by_side(fixed: list[ByteArray]) -> ByteArray:
    return fixed[0] if len(fixed) == 1 else np.concatenate(fixed, axis=1)


def _encode_fixed(column: pa.Array) -> ByteArray:
    """Encode a fixed-width column: one row of bytes for each value."""
    count = len(column)
    if pa.types.is_boolean(column.type):
        return values_of(column.cast(pa.uint8()), np.uint8)
    width = _width(column.type)
    word = min(width, _WORD_BYTES_MAX)
    # Arrow stores the high word of a decimal last.
    values = np.array(values_of(column, f"<u{word}")[:, ::-1], order="C")
    values[:, 0] ^= values.dtype.type(1 << (8 * word - 1))
    return values.astype(f">u{word}").view(np.uint8).reshape(count, width)


def _escape(column: pa.Array) -> pa.Array:
    data = bytes_of(column)
    if not len(data) or data.min():
        return column
    return pc.replace_substring(column, pattern=_ZERO, replacement=_ESCAPED_ZERO)
