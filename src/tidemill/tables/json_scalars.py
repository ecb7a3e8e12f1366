"""Single JSON values into Arrow columns: a reader per type.

A reader has ``kind``, what msgspec is told to expect, and ``read``, which makes an array of values of that
kind, None where null. Where the kind is wider than the type, ``read`` refuses what the type cannot be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from tidemill.records import columns_compute as pc
from tidemill.tables.refusals import Refusal, first_failing, refuse_where
from tidemill.tables.row_layout import Column

__all__ = ("NOT_NUMBERS", "scalar_reader")

#: The floating-point numbers that JSON does not have, and their spelling as text.
NOT_NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_SHOWN_CHARACTERS_MAX = 60
_DATE = r"\d{4}-\d{2}-\d{2}"
_TIME = r"\d{2}:\d{2}:\d{2}"
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?"


@dataclass(frozen=True, slots=True)
class _Scalar:
    kind: Any
    read: Callable[[list[Any]], pa.Array]
    widest: int = 0
    """Fields of objects inside: a scalar has none."""


def scalar_reader(column: Column) -> _Scalar:
    """The reader of a column that is no list, map or struct."""
    data_type, path = column.type, column.path
    if arrow.is_boolean(data_type):
        return _Scalar(bool, lambda values: pa.array(values, data_type))
    if arrow.is_string(data_type):
        return _Scalar(str, lambda values: pa.array(values, data_type))
    if arrow.is_binary(data_type):
        return _Scalar(bytes, lambda values: pa.array(values, data_type))
    if arrow.is_floating(data_type):
        return _Scalar(float | str, lambda values: _floats(values, data_type, path))
    if arrow.is_decimal(data_type):
        return _Scalar(msgspec.Raw, lambda values: _decimals(values, column))
    if arrow.is_integer(data_type) or arrow.is_duration(data_type):
        bound = 2 ** (data_type.bit_width - 1)
        whole = Annotated[int, msgspec.Meta(ge=-bound, le=bound - 1)]
        return _Scalar(whole, lambda values: pa.array(values, data_type))
    return _Scalar(str, _moment_reader(data_type, path))


def _floats(values: list[Any], data_type: pa.DataType, path: str) -> pa.Array:
    try:
        wide = pa.array(values, pa.float64())
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        odd = [isinstance(value, str) and value not in NOT_NUMBERS for value in values]
        text = 'is text, and a number, "NaN", "Infinity" or "-Infinity" is expected'
        refuse_where(np.array(odd), path, text)
        wide = pa.array(
            [NOT_NUMBERS[value] if isinstance(value, str) else value for value in values], pa.float64()
        )
    if not arrow.is_float32(data_type):
        return wide
    narrow = wide.cast(pa.float32(), safe=False)
    beyond = pc.and_(pc.is_inf(narrow), pc.is_finite(wide)).fill_null(False)
    refuse_where(beyond.to_numpy(zero_copy_only=False), path, "is beyond the range of a float")
    return narrow


def _decimals(values: list[Any], column: Column) -> pa.Array:
    texts = pa.array([bytes(value) for value in values], pa.binary())
    data_type = column.type
    texts = pc.if_else(pc.equal(texts, b"null"), pa.scalar(None, pa.binary()), texts)
    if texts.null_count and not column.field.nullable:
        refuse_where(texts.is_null().to_numpy(zero_copy_only=False), column.path, "is null, and not nullable")
    expected = f'a decimal({data_type.precision},{data_type.scale}) such as "12.5"'
    _check_pattern(texts, rf'^(?:"{_NUMBER}"|{_NUMBER})\z', column.path, expected)
    numbers = pc.ascii_trim(texts.cast(pa.string()), '"')
    return _converted(numbers, lambda part: part.cast(data_type), column.path, expected)


def _moment_reader(data_type: pa.DataType, path: str) -> Callable[[list[Any]], pa.Array]:
    """Dates, times of day and timestamps: text of one exact form, which Arrow then reads."""
    pattern, example = _DATE, "a date such as 2024-05-31"
    if arrow.is_time(data_type):
        pattern, example = rf"{_TIME}(?:\.\d{{1,9}})?", "a time such as 12:30:00.25"
    elif arrow.is_timestamp(data_type):
        pattern = rf"{_DATE}T{_TIME}(?:\.\d{{1,6}})?"
        example = "a time without zone such as 2024-05-31T12:30:00.25"
        if data_type.tz is not None:
            pattern += r"(?:Z|[+-]\d{2}:\d{2})"
            example = "a time such as 2024-05-31T12:30:00.25Z"

    def convert(texts: pa.Array) -> pa.Array:
        if not arrow.is_time(data_type):
            return texts.cast(data_type)
        # Arrow reads no times of day; those of its first day are its numbers.
        whole = pc.binary_join_element_wise("1970-01-01T", texts, "")
        return whole.cast(pa.timestamp("ns")).cast(pa.int64()).cast(data_type)

    def read(values: list[Any]) -> pa.Array:
        texts = pa.array(values, pa.string())
        _check_pattern(texts, rf"^{pattern}\z", path, example)
        return _converted(texts, convert, path, example)

    return read


def _check_pattern(texts: pa.Array, pattern: str, path: str, expected: str) -> None:
    fits = pc.match_substring_regex(texts, pattern)
    if not pc.all(fits, min_count=0).as_py():
        index = int(fits.fill_null(True).to_numpy(zero_copy_only=False).argmin())
        raise _unexpected(texts, index, path, expected)


def _converted(
    texts: pa.Array, convert: Callable[[pa.Array], pa.Array], path: str, expected: str
) -> pa.Array:
    try:
        return convert(texts)
    except pa.ArrowInvalid:
        raise _unexpected(texts, first_failing(texts, convert), path, expected) from None


def _unexpected(texts: pa.Array, index: int, path: str, expected: str) -> Refusal:
    given = texts[index].as_py()
    shown = (given.decode(errors="replace") if isinstance(given, bytes) else given)[:_SHOWN_CHARACTERS_MAX]
    return Refusal(index, path, f"is {shown!r}, and {expected} is expected")
