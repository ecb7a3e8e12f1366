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
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.errors import TableCode, TableError
from tidemill.records.columns import compute as pc
from tidemill.records.columns.arrays import from_numpy
from tidemill.tables.keys.ragged import (
    ByteArray,
    Positions,
    as_bytes,
    bytes_of,
    fixed_width,
    gather,
    values_of,
)
from tidemill.tables.keys.text import Kind, find_out_of_range, kind_of

__all__ = ("after_prefix", "decode_state_keys", "encode_state_keys")

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


def decode_state_keys(
    data: Any, starts: Positions, ends: Positions, types: Sequence[pa.DataType]
) -> list[pa.Array]:
    """Decode the state keys that lie in ``data`` from ``starts`` to ``ends`` into typed columns.

    Raises ``TableError`` with ``state_damaged`` for bytes that no key has.
    """
    buffer = as_bytes(data)
    cursor = np.array(starts, np.int64)
    ends = np.asarray(ends, np.int64)
    _require((cursor >= 0) & (cursor <= ends) & (ends <= len(buffer)), "lies outside of its buffer")
    columns: list[pa.Array] = []
    for index, data_type in enumerate(types):
        kind = kind_of(data_type)
        assert kind is not None, f"{data_type} is no type of a key"
        if kind in _RAGGED:
            stops = _find_ends(buffer, cursor, ends, is_last=index == len(types) - 1)
            column = _unescape(gather(buffer, cursor, stops))
            column = _as_string(column) if kind is Kind.string else column
            cursor = stops + len(_END)
        else:
            width = _width(data_type)
            _require(cursor + width <= ends, "is too short")
            column = _decode_fixed(_rows(buffer, cursor, width), data_type, kind)
            cursor = cursor + width
        outside = find_out_of_range(column, kind)
        if outside is not None:
            _refuse(outside, f"holds a {data_type} out of range")
        columns.append(column)
    _require(cursor == ends, "is too long")
    return columns


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


def _decode_fixed(rows: ByteArray, data_type: pa.DataType, kind: Kind) -> pa.Array:
    """Decode a fixed-width column: the inverse of ``_encode_fixed``."""
    count, width = rows.shape
    if kind is Kind.boolean:
        _require(rows[:, 0] <= 1, "holds a boolean that is neither 0 nor 1")
        return from_numpy(rows[:, 0].astype(np.bool_))
    word = min(width, _WORD_BYTES_MAX)
    big = rows.reshape(-1).view(f">u{word}").reshape(count, width // word)[:, ::-1]
    values = np.array(big, dtype=f"<u{word}", order="C")
    values[:, -1] ^= values.dtype.type(1 << (8 * word - 1))
    buffers = [None, pa.py_buffer(values.reshape(-1))]
    return pa.Array.from_buffers(data_type, count, buffers, null_count=0)


def _rows(buffer: ByteArray, cursor: Positions, width: int) -> ByteArray:
    if not len(cursor):
        return np.empty((0, width), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(buffer, width)[cursor]


def _escape(column: pa.Array) -> pa.Array:
    data = bytes_of(column)
    if not len(data) or data.min():
        return column
    return pc.replace_substring(column, pattern=_ZERO, replacement=_ESCAPED_ZERO)


def _unescape(column: pa.Array) -> pa.Array:
    data = bytes_of(column)
    if not len(data) or data.min():
        return column
    zeros = pc.count_substring(column, pattern=_ZERO)
    escaped = pc.count_substring(column, pattern=_ESCAPED_ZERO)
    _require(pc.equal(zeros, escaped).to_numpy(zero_copy_only=False), "holds a zero that is not escaped")
    return pc.replace_substring(column, pattern=_ESCAPED_ZERO, replacement=_ZERO)


def _find_ends(buffer: ByteArray, cursor: Positions, ends: Positions, *, is_last: bool) -> Positions:
    """Where the value at each cursor ends: at two zeros, since a zero inside is followed by 0xFF."""
    if is_last:
        stops = ends - len(_END)
        _require(stops >= cursor, "is too short")
        tails = _rows(buffer, stops, len(_END))
        _require((tails == 0).all(axis=1), "does not end with two zeros")
        return stops
    zeros = np.flatnonzero(buffer == 0)
    pairs: Positions = zeros[:-1][np.diff(zeros) == 1]
    found = np.searchsorted(pairs, cursor)
    _require(found < len(pairs), "is too short")
    stops = pairs[found]
    _require(stops + len(_END) <= ends, "is too short")
    return stops


def _as_string(column: pa.Array) -> pa.Array:
    """The column as strings. UTF-8 is checked later, with the range, so that the row is named."""
    return pa.Array.from_buffers(pa.string(), len(column), column.buffers(), offset=column.offset)


def _require(holds: npt.NDArray[np.bool_], complaint: str) -> None:
    if not holds.all():
        _refuse(int(holds.argmin()), complaint)


def _refuse(index: int, complaint: str) -> NoReturn:
    raise TableError(
        TableCode.state_damaged,
        f"state key {index} {complaint}; the bucket's state must be built again from its log",
        index=index,
    )
