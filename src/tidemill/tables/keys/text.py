"""The text of key values: one spelling for each value, whole columns at a time.

| kind | text |
| --- | --- |
| boolean | ``true``, ``false`` |
| integer | decimal digits, ``-`` before negative ones, no leading zero |
| string, binary | the bytes themselves |
| date | ``YYYY-MM-DD``, years 0001 to 9999 |
| timestamp | ``YYYY-MM-DDTHH:MM:SS[.ffffff]``, no trailing zeros in the fraction; ``Z`` behind it if in UTC |
| decimal | digits with exactly the type's number of fraction digits, no exponent, no ``-0`` |

Inside a JSON key all but booleans and integers are quoted, and binary is base64 with padding. Only what JSON
requires is escaped: ``"`` and the backslash, and control characters in the shortest form there is
(``\\n``, else ``\\u00xx`` in lower case).

``from_text`` may take more spellings than these and wraps around where Arrow does: its caller writes the
values out again and compares.
"""

from __future__ import annotations

import enum
from binascii import b2a_base64
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.records.columns import compute as pc
from tidemill.tables.keys.ragged import bytes_of, search_first, values_of

__all__ = ("Kind", "find_out_of_range", "from_text", "json_text", "kind_of", "to_text")


class Kind(enum.Enum):
    """The kind of values of a key column, apart from their width."""

    boolean = "boolean"
    integer = "integer"
    string = "string"
    binary = "binary"
    date = "date"
    timestamp = "timestamp"
    decimal = "decimal"


_UNQUOTED: Final = (Kind.boolean, Kind.integer)
_DAYS: Final = (-719_162, 2_932_896)
_DAY_US: Final = 86_400_000_000
_MICROSECONDS: Final = (_DAYS[0] * _DAY_US, (_DAYS[1] + 1) * _DAY_US - 1)
_SHORT_ESCAPES: Final = {8: b"\\b", 9: b"\\t", 10: b"\\n", 12: b"\\f", 13: b"\\r", 34: b'\\"', 92: b"\\\\"}
_QUOTE: Final = 0x22
_BACKSLASH: Final = 0x5C
_FIRST_PRINTABLE: Final = 0x20
_DATE_WIDTH: Final = 10


def kind_of(data_type: pa.DataType) -> Kind | None:
    """The kind of a type that keys can have; None for all others."""
    types = pa.types
    if types.is_signed_integer(data_type):
        return Kind.integer
    if types.is_timestamp(data_type):
        return Kind.timestamp if data_type.unit == "us" and data_type.tz in (None, "UTC") else None
    if types.is_decimal128(data_type):
        return Kind.decimal if 0 <= data_type.scale <= data_type.precision else None
    plain = {
        pa.bool_(): Kind.boolean,
        pa.string(): Kind.string,
        pa.binary(): Kind.binary,
        pa.date32(): Kind.date,
    }
    return plain.get(data_type)


def to_text(column: pa.Array, kind: Kind) -> pa.Array:
    """The texts of a column without nulls and within its range, as binary."""
    match kind:
        case Kind.binary:
            return column
        case Kind.timestamp:
            return _timestamp_text(column)
        case Kind.decimal:
            return _decimal_text(column)
    return column.cast(pa.string()).cast(pa.binary())


def from_text(texts: pa.Array, data_type: pa.DataType, kind: Kind) -> pa.Array:
    """The column with these texts; raises ``pa.ArrowInvalid`` if one is far from any spelling."""
    match kind:
        case Kind.binary:
            return texts
        case Kind.boolean:
            return pc.equal(texts, b"true")
        case Kind.integer:
            return texts.cast(data_type)
    return texts.cast(pa.string()).cast(data_type)


def json_text(column: pa.Array, kind: Kind) -> tuple[pa.Array, bool]:
    """The texts of a column inside a JSON array, without quotes, and whether quotes go around them."""
    if kind is Kind.binary:
        encoded = [b2a_base64(value, newline=False) for value in column.to_pylist()]
        return pa.array(encoded, pa.binary()), True
    text = to_text(column, kind)
    return _escape(text) if kind is Kind.string else text, kind not in _UNQUOTED


def find_out_of_range(column: pa.Array, kind: Kind) -> int | None:
    """The index of the first value without a text: its year, its digits, or bytes that are not UTF-8."""
    match kind:
        case Kind.string:
            return _find_bad_utf8(column)
        case Kind.date:
            fits = _between(values_of(column, np.int32)[:, 0], *_DAYS)
        case Kind.timestamp:
            fits = _between(values_of(column, np.int64)[:, 0], *_MICROSECONDS)
        case Kind.decimal:
            fits = _within_precision(column)
        case _:
            return None
    return None if fits.all() else int(fits.argmin())


def _between(values: npt.NDArray[Any], low: int, high: int) -> npt.NDArray[np.bool_]:
    fits: npt.NDArray[np.bool_] = (values >= low) & (values <= high)
    return fits


def _within_precision(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Which decimals have no more digits than their type allows. Arrow does not check those of a buffer."""
    words = values_of(column, np.uint64)
    low, high = words[:, 0], words[:, 1].view(np.int64)
    bound = 10**column.type.precision
    top, bottom = bound >> 64, bound & (2**64 - 1)
    below = (high < top) | ((high == top) & (low < bottom))
    # The words of -bound. No power of ten that fits has a low word of zero, so there is no carry.
    above = (high > ~top) | ((high == ~top) & (low > 2**64 - bottom))
    fits: npt.NDArray[np.bool_] = below & above
    return fits


def _find_bad_utf8(column: pa.Array) -> int | None:
    def is_fine(start: int, stop: int) -> bool:
        try:
            column[start:stop].cast(pa.binary()).cast(pa.string())
        except pa.ArrowInvalid:
            return False
        return True

    return None if is_fine(0, len(column)) else search_first(len(column), is_fine)


def _timestamp_text(column: pa.Array) -> pa.Array:
    # Read as local time, so that Arrow needs no time zone database; in range, all texts have the same width.
    text = column.view(pa.int64()).view(pa.timestamp("us")).cast(pa.string())
    text = pc.ascii_rtrim(pc.ascii_rtrim(text, "0"), ".").cast(pa.binary())
    text = pc.binary_replace_slice(text, _DATE_WIDTH, _DATE_WIDTH + 1, b"T")
    return text if column.type.tz is None else pc.binary_join_element_wise(text, b"Z", b"")


def _decimal_text(column: pa.Array) -> pa.Array:
    # Arrow writes small decimals with an exponent, but never integers: the point is put in here.
    buffers = [None, column.buffers()[1]]
    unscaled = pa.Array.from_buffers(pa.decimal128(38, 0), len(column), buffers, offset=column.offset)
    digits = unscaled.cast(pa.string())
    scale = column.type.scale
    if not scale:
        return digits.cast(pa.binary())
    sign = pc.if_else(pc.starts_with(digits, "-"), b"-", b"")
    padded = pc.ascii_lpad(pc.ascii_ltrim(digits, "-"), scale + 1, "0").cast(pa.binary())
    whole, fraction = pc.binary_slice(padded, 0, -scale), pc.binary_slice(padded, -scale)
    return pc.binary_join_element_wise(sign, whole, b".", fraction, b"")


def _escape(text: pa.Array) -> pa.Array:
    data = bytes_of(text)
    special = (data < _FIRST_PRINTABLE) | (data == _QUOTE) | (data == _BACKSLASH)
    if not special.any():
        return text
    # The backslash comes first, because the other escapes contain backslashes.
    for code in sorted(np.unique(data[special]).tolist(), key=lambda code: code != _BACKSLASH):
        escape = _SHORT_ESCAPES.get(code, b"\\u%04x" % code)
        text = pc.replace_substring(text, pattern=bytes((code,)), replacement=escape)
    return text
