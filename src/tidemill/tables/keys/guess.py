"""Guesses at the meaning of a key that is spelt wrongly, so that the error can say how to spell it.

Only for messages: nothing that is guessed here is ever stored.
"""

from __future__ import annotations

import datetime as dt
import re
from binascii import a2b_base64
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec
import pyarrow as pa

from tidemill.tables.keys.text import Kind, kind_of

__all__ = ("guess_values",)

_DIGITS_MAX: Final = 80
_ALWAYS_TEXT: Final = (Kind.binary, Kind.date, Kind.timestamp)
_NANOSECONDS: Final = re.compile(r"[.,]\d{6}\d*[1-9]")
_GUESS_ERRORS: Final = (ValueError, ArithmeticError, LookupError, RecursionError, msgspec.MsgspecError)


def guess_values(key: bytes, types: Sequence[pa.DataType], *, is_raw: bool) -> tuple[Any, ...] | None:
    """The Python values that a key may stand for; None if there is no guess."""
    try:
        items = [key.decode()] if is_raw else msgspec.json.decode(key)
        if not isinstance(items, list) or len(items) != len(types):
            return None
        return tuple(_guess(item, data_type) for item, data_type in zip(items, types, strict=True))
    except _GUESS_ERRORS:
        return None


def _guess(item: Any, data_type: pa.DataType) -> Any:
    """The value for a text or a JSON value; ``ValueError`` or ``ArithmeticError`` if there is none."""
    kind = kind_of(data_type)
    if isinstance(item, bool) is not (kind is Kind.boolean) and not isinstance(item, str):
        raise ValueError("a boolean is no other value")
    if kind is Kind.string:
        return item
    if kind in _ALWAYS_TEXT and not isinstance(item, str):
        raise ValueError("a number is none of these")
    text = str(item).strip()
    match kind:
        case Kind.boolean:
            return {"true": True, "false": False}[text.lower()]
        case Kind.binary:
            return a2b_base64(text.rstrip("=") + "==", strict_mode=False)
        case Kind.date:
            return dt.date.fromisoformat(text)
        case Kind.timestamp:
            return _guess_time(text, data_type)
    if len(text) > _DIGITS_MAX or abs(Decimal(text).adjusted()) > _DIGITS_MAX:
        raise ValueError("no number of a key is that long")
    number = Decimal(text)
    return int(number) if kind is Kind.integer and number == int(number) else number


def _guess_time(text: str, data_type: pa.DataType) -> dt.datetime:
    if _NANOSECONDS.search(text):
        raise ValueError("Python would drop the last digits")
    value = dt.datetime.fromisoformat(text.upper())
    # A local time is not an instant: the caller refuses those that differ in this.
    return value.replace(tzinfo=None) if data_type.tz is None and value.tzinfo is dt.UTC else value
