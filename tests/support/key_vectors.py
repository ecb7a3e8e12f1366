"""The language-neutral key vectors, and a slow model of keys that works on one value at a time.

Values are as in the file: a date is days and a timestamp microseconds since 1970, a decimal is its unscaled
integer.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import struct
from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from tidemill.tables.keys.codec import KeyCodec

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "keys.json").read_text(encoding="utf-8"))
WIDTHS = {"tinyint": 1, "smallint": 2, "int": 4, "bigint": 8, "date": 4, "timestamp": 8, "timestamp_ntz": 8}
DAYS = (-719_162, 2_932_896)
MICROSECONDS = (-62_135_596_800_000_000, 253_402_300_799_999_999)

_ARROW = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


def decimal_of(name: str) -> tuple[int, int] | None:
    """Precision and scale of a decimal type; None for other types."""
    match = re.fullmatch(r"decimal\((\d+),(\d+)\)", name)
    return (int(match[1]), int(match[2])) if match else None


def arrow_type(name: str) -> pa.DataType:
    parts = decimal_of(name)
    return pa.decimal128(*parts) if parts else _ARROW[name]


def codec_of(types: Sequence[str], key_format: str) -> KeyCodec:
    fields = [pa.field(f"c{place}", arrow_type(name), nullable=False) for place, name in enumerate(types)]
    return KeyCodec(pa.schema(fields), [field.name for field in fields], key_format)


def columns_of(types: Sequence[str], keys: Sequence[Sequence[Any]]) -> list[pa.Array]:
    return [column_of(name, [key[place] for key in keys]) for place, name in enumerate(types)]


def column_of(name: str, values: Sequence[Any]) -> pa.Array:
    if parts := decimal_of(name):
        unscaled = b"".join(int(value).to_bytes(16, "little", signed=True) for value in values)
        return pa.Array.from_buffers(pa.decimal128(*parts), len(values), [None, pa.py_buffer(unscaled)])
    if name == "date":
        return pa.array(values, pa.int32()).view(pa.date32())
    if name.startswith("timestamp"):
        return pa.array(values, pa.int64()).view(arrow_type(name))
    return pa.array(values, arrow_type(name))


def key_in(case: dict[str, Any]) -> list[Any]:
    """The values of a vector: binary ones are in base64, decimals in text."""

    def value(name: str, item: Any) -> Any:
        if name == "binary":
            return b64decode(item)
        return int(item) if decimal_of(name) else item

    return [value(name, item) for name, item in zip(case["types"], case["key"], strict=True)]


def bytes_in(case: dict[str, Any], field: str) -> bytes:
    """The bytes of a field of a vector, which is text, or base64 where it cannot be."""
    if field in case:
        return str(case[field]).encode()
    return b64decode(case[f"{field}_base64"])


def model_canonical(types: Sequence[str], key_format: str, key: Sequence[Any]) -> bytes:
    if key_format == "raw":
        text = _text(types[0], key[0])
        return text if isinstance(text, bytes) else text.encode()
    items = [_json_item(name, value) for name, value in zip(types, key, strict=True)]
    return json.dumps(items, ensure_ascii=False, separators=(",", ":")).encode()


def _json_item(name: str, value: Any) -> Any:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    return value if name in ("boolean", "tinyint", "smallint", "int", "bigint") else _text(name, value)


def _text(name: str, value: Any) -> str | bytes:
    if isinstance(value, bool):
        return "true" if value else "false"
    if name == "date":
        return (dt.date(1970, 1, 1) + dt.timedelta(days=value)).isoformat()
    if name.startswith("timestamp"):
        text = (dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=value)).isoformat()  # noqa: DTZ001
        text = text.rstrip("0") if "." in text else text
        return text + ("Z" if name == "timestamp" else "")
    parts = decimal_of(name)
    if parts and parts[1]:
        digits = str(abs(value)).rjust(parts[1] + 1, "0")
        return ("-" if value < 0 else "") + digits[: -parts[1]] + "." + digits[-parts[1] :]
    return value if isinstance(value, bytes) else str(value)


def model_state_key(types: Sequence[str], key: Sequence[Any]) -> bytes:
    return b"".join(_state_part(name, value) for name, value in zip(types, key, strict=True))


def _state_part(name: str, value: Any) -> bytes:
    if name == "boolean":
        return struct.pack("?", value)
    if name in ("string", "binary"):
        data = value.encode() if isinstance(value, str) else value
        return bytes(data).replace(b"\0", b"\0\xff") + b"\0\0"
    width = WIDTHS.get(name, 16)
    return int(value + (1 << (8 * width - 1))).to_bytes(width, "big")


def values_of_type(name: str) -> st.SearchStrategy[Any]:
    if parts := decimal_of(name):
        return st.integers(-(10 ** parts[0]) + 1, 10 ** parts[0] - 1)
    if name == "boolean":
        return st.booleans()
    if name == "string":
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.text(
            '\0\x01\x1f"\\/ä\ud7ff', max_size=6
        )
    if name == "binary":
        return st.binary(max_size=12) | st.lists(st.sampled_from([0, 1, 0xFE, 0xFF]), max_size=6).map(bytes)
    if name == "date":
        return st.integers(*DAYS)
    if name.startswith("timestamp"):
        # Whole seconds and short fractions are rare among all values.
        step = st.sampled_from([1, 10, 1_000, 1_000_000, 86_400_000_000])
        return st.tuples(st.integers(*MICROSECONDS), step).map(
            lambda pair: max(pair[0] - pair[0] % pair[1], MICROSECONDS[0])
        )
    half = 1 << (8 * WIDTHS[name] - 1)
    return st.integers(-half, half - 1) | st.integers(-20 if half > 20 else -half, 20)


TYPE_NAMES = st.sampled_from([*_ARROW, "decimal(5,2)", "decimal(18,0)", "decimal(38,38)", "decimal(38,6)"])


@st.composite
def tables_and_keys(draw: st.DrawFn, *, keys_max: int = 6) -> tuple[list[str], str, list[list[Any]]]:
    """Types, a key format that they can have, and keys."""
    types = draw(st.lists(TYPE_NAMES, min_size=1, max_size=3))
    key_format = draw(st.sampled_from(["raw", "json"])) if len(types) == 1 else "json"
    key = st.tuples(*map(values_of_type, types)).map(list)
    return types, key_format, draw(st.lists(key, min_size=1, max_size=keys_max))
