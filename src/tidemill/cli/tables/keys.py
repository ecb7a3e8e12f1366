"""Keys as people type them, read as values of the key columns' types.

- A key of one column is typed as plain text: ``42``, ``eu``, ``2025-01-31``, ``2025-01-31T12:00:00Z``,
  ``12.50``, ``true``. The text of a binary column is its bytes.
- Any key can be typed as JSON: an array of the key columns in their order, ``["eu",42]``, or an object by
  name, ``{"region":"eu","id":42}``. There binary is base64, as in canonical keys.
- So a plain text that begins with ``[`` or ``{`` has to be put into JSON itself: ``["[odd]"]``.

Where only the first columns of a key are needed (a prefix, the end of a range, a boundary), fewer values do.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NoReturn

import pyarrow as pa

from tidemill.errors import TableCode, TableError
from tidemill.tables.keys.text import Kind, kind_of
from tidemill.tables.rows.types import describe_type

__all__ = ("key_fields", "parse_key", "parse_prefix", "show_key")

KeyFields = Sequence[tuple[str, pa.DataType]]

_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_TOO_FINE = re.compile(r"\.[0-9]{7,}")
_SHOWN_CHARACTERS: Final = 80
_EXAMPLES: Final = {
    Kind.boolean: "true or false",
    Kind.integer: "a whole number like 42",
    Kind.date: "a date like 2025-01-31",
    Kind.decimal: "a number like 12.50",
    Kind.binary: "base64 like aGk=",
    Kind.string: "text",
}


def key_fields(schema: pa.Schema, primary_key: Sequence[str]) -> list[tuple[str, pa.DataType]]:
    """Name and type of each key column."""
    return [(name, schema.field(name).type) for name in primary_key]


def parse_key(text: str, fields: KeyFields) -> tuple[Any, ...]:
    """The values of a whole key. Raises ``TableError`` KEY_REFUSED that says how a key is typed.

    >>> parse_key('["eu",42]', [("region", pa.string()), ("id", pa.int64())])
    ('eu', 42)
    """
    values = parse_prefix(text, fields)
    if len(values) < len(fields):
        _refuse(f"key {_shown(text)} has {len(values)} of {len(fields)} values; {_how_to(fields)}")
    return values


def parse_prefix(text: str, fields: KeyFields) -> tuple[Any, ...]:
    """The values of a key or of its first columns. Raises ``TableError`` KEY_REFUSED.

    >>> parse_prefix("eu", [("region", pa.string()), ("id", pa.int64())])
    ('eu',)
    """
    if not text.startswith(("[", "{")):
        return (_from_text(text, *fields[0]),)
    try:
        value = json.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        _refuse(f"key {_shown(text)} begins like JSON and is none ({error}); {_how_to(fields)}")
    if isinstance(value, Mapping):
        value = _in_order(text, value, fields)
    if not 0 < len(value) <= len(fields):
        _refuse(f"key {_shown(text)} has {len(value)} values instead of {len(fields)}; {_how_to(fields)}")
    return tuple(_from_json(each, *field) for each, field in zip(value, fields, strict=False))


def show_key(values: Sequence[Any]) -> str:
    """The text that a user would type for a key."""
    if len(values) == 1 and _is_plain(values[0]):
        return _plain(values[0])
    shown = [value if isinstance(value, int) else _plain(value) for value in values]
    text = json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    """A character escaped for JSON, in ASCII. Python's encoder would leave DEL as it is."""
    written = json.dumps(character)[1:-1]
    return written if written.isprintable() else f"\\u{ord(character):04x}"


def _is_plain(value: Any) -> bool:
    """Whether a value can be typed as plain text, without JSON."""
    if isinstance(value, str):
        return value.isprintable() and not value.startswith(("[", "{"))
    return not isinstance(value, bytes)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    return str(value)


def _in_order(text: str, value: Mapping[str, Any], fields: KeyFields) -> list[Any]:
    names = [name for name, _ in fields]
    if set(value) != set(names[: len(value)]):
        _refuse(f"key {_shown(text)} names {', '.join(value) or 'nothing'}; {_how_to(fields)}")
    return [value[name] for name in names[: len(value)]]


def _from_json(value: Any, name: str, data_type: pa.DataType) -> Any:
    kind = kind_of(data_type)
    if isinstance(value, str):
        if kind is Kind.binary:
            try:
                return base64.b64decode(value, validate=True)
            except binascii.Error:
                _misfit(value, name, data_type)
        return _from_text(value, name, data_type)
    if isinstance(value, bool):
        fits = kind is Kind.boolean
    elif isinstance(value, int):
        fits = kind in (Kind.integer, Kind.decimal)
    else:
        fits = isinstance(value, Decimal) and kind is Kind.decimal
    if not fits:
        _misfit(json.dumps(value, default=str), name, data_type)
    return value


def _from_text(text: str, name: str, data_type: pa.DataType) -> Any:
    value: Any = None
    match kind_of(data_type):
        case Kind.string:
            value = text
        case Kind.binary:
            # The bytes as they were typed, in the terminal's encoding.
            value = os.fsencode(text)
        case Kind.boolean:
            value = {"true": True, "false": False}.get(text)
        case Kind.integer:
            value = int(text) if _INTEGER.fullmatch(text) else None
        case Kind.date:
            value = _date(text)
        case Kind.timestamp:
            value = _timestamp(text, data_type)
        case Kind.decimal:
            value = _decimal(text)
    if value is None:
        _misfit(text, name, data_type)
    return value


def _date(text: str) -> date | None:
    try:
        return date.fromisoformat(text)
    except ValueError:
        return None


def _timestamp(text: str, data_type: pa.DataType) -> datetime | None:
    try:
        value = datetime.fromisoformat(text)
    except ValueError:
        return None
    # Python would drop the digits, and the text would then mean another key.
    is_too_fine = _TOO_FINE.search(text) is not None
    return None if is_too_fine or (value.tzinfo is None) is not (data_type.tz is None) else value


def _decimal(text: str) -> Decimal | None:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _misfit(text: str, name: str, data_type: pa.DataType) -> NoReturn:
    kind = kind_of(data_type)
    if kind is Kind.timestamp:
        zone = "Z" if data_type.tz else ""
        wanted = f"a time like 2025-01-31T12:00:00{zone}, {'with a' if zone else 'without'} zone"
    else:
        wanted = _EXAMPLES[kind] if kind is not None else "a value that can be a key"
    _refuse(f"{_shown(text)} is no value for key column {name!r} ({describe_type(data_type)}): give {wanted}")


def _how_to(fields: KeyFields) -> str:
    """How a key of these columns is typed, for error messages."""
    names = ", ".join(f"{name} {describe_type(data_type)}" for name, data_type in fields)
    example = {name: _example(data_type) for name, data_type in fields}
    array, mapping = (json.dumps(each, separators=(",", ":")) for each in (list(example.values()), example))
    plain = f"{show_key(list(example.values()))}, " if len(fields) == 1 else ""
    return f"the key is ({names}): type it like {plain}'{array}' or '{mapping}'"


def _example(data_type: pa.DataType) -> Any:
    kind = kind_of(data_type)
    values = {
        Kind.boolean: True,
        Kind.integer: 42,
        Kind.date: "2025-01-31",
        Kind.decimal: "12.50",
        Kind.binary: "aGk=",
        Kind.timestamp: "2025-01-31T12:00:00" + ("Z" if getattr(data_type, "tz", None) else ""),
    }
    return "x" if kind is None else values.get(kind, "eu")


def _shown(text: str) -> str:
    shown = repr(text[: 2 * _SHOWN_CHARACTERS])
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}…"


def _refuse(message: str) -> NoReturn:
    raise TableError(TableCode.key_refused, message)
