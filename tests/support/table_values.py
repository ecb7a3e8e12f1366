"""Random tables for tests: types, plain values, Arrow made of them, and rows as a slow model writes them.

Values of time types are plain numbers and those of decimals are unscaled ones, so that also what Python's own
types cannot hold is tested.
"""

from __future__ import annotations

import math
import struct
from decimal import Decimal
from itertools import accumulate
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from pyarrow import types as arrow

INTEGERS = {1: "b", 2: "h", 4: "i", 8: "q"}
NAMES = st.sampled_from(["a", "b c", "Ünï", "d`e", "x.y"])

SCALARS = [
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    pa.timestamp("us", "UTC"),
    pa.timestamp("us"),
    pa.time64("ns"),
    pa.duration("us"),
    pa.decimal128(1, 0),
    pa.decimal128(10, 2),
    pa.decimal128(20, 20),
    pa.decimal128(38, 9),
]


def _fields(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[list[pa.Field]]:
    one = st.builds(pa.field, NAMES, inner, st.booleans())
    return st.lists(one, min_size=1, max_size=4, unique_by=lambda field: field.name)


def _nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    element = st.builds(pa.field, st.just("element"), inner, st.booleans())
    value = st.builds(pa.field, st.just("value"), inner, st.booleans())
    return st.one_of(
        st.builds(pa.list_, element),
        st.builds(pa.struct, _fields(inner)),
        st.builds(pa.map_, st.sampled_from(SCALARS), value),
    )


def types() -> st.SearchStrategy[pa.DataType]:
    return st.recursive(st.sampled_from(SCALARS), _nested, max_leaves=3)


def schemas(data_types: st.SearchStrategy[pa.DataType] | None = None) -> st.SearchStrategy[pa.Schema]:
    columns = st.lists(
        st.tuples(data_types if data_types is not None else types(), st.booleans()), min_size=1, max_size=12
    )
    return columns.map(
        lambda drawn: pa.schema([pa.field(f"c{n}", kind, null) for n, (kind, null) in enumerate(drawn)])
    )


def values(data_type: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type, none of them null at the top."""
    if arrow.is_boolean(data_type):
        return st.booleans()
    if arrow.is_float32(data_type):
        return st.floats(width=32)
    if arrow.is_float64(data_type):
        return st.floats()
    if arrow.is_string(data_type):
        return st.text(max_size=6)
    if arrow.is_binary(data_type):
        return st.binary(max_size=6)
    if arrow.is_time(data_type):
        return st.integers(0, 86_400 * 10**9 - 1)
    if arrow.is_decimal(data_type):
        bound = 10**data_type.precision - 1
        return st.integers(-bound, bound)
    if arrow.is_primitive(data_type):
        bound = 2 ** (data_type.bit_width - 1)
        return st.integers(-bound, bound - 1)
    if arrow.is_map(data_type):
        pair = st.tuples(values(data_type.key_type), maybe(data_type.item_field))
        return st.lists(pair, max_size=3)
    if arrow.is_list(data_type):
        return st.lists(maybe(data_type.value_field), max_size=10)
    return st.fixed_dictionaries({field.name: maybe(field) for field in data_type})


def maybe(field: pa.Field) -> st.SearchStrategy[Any]:
    return st.none() | values(field.type) if field.nullable else values(field.type)


@st.composite
def tables(
    draw: st.DrawFn, data_types: st.SearchStrategy[pa.DataType] | None = None, max_rows: int = 6
) -> tuple[pa.Schema, list[dict[str, Any]]]:
    """A schema and rows of it."""
    schema = draw(schemas(data_types))
    row = st.fixed_dictionaries({field.name: maybe(field) for field in schema})
    return schema, draw(st.lists(row, max_size=max_rows))


def to_batch(schema: pa.Schema, rows: list[dict[str, Any]]) -> pa.RecordBatch:
    arrays = [pa.array([_scaled(row[f.name], f.type) for row in rows], f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _scaled(value: Any, data_type: pa.DataType) -> Any:
    if value is None:
        return None
    if arrow.is_decimal(data_type):
        return Decimal((int(value < 0), tuple(map(int, str(abs(value)))), -data_type.scale))
    if arrow.is_map(data_type):
        return [(_scaled(k, data_type.key_type), _scaled(v, data_type.item_type)) for k, v in value]
    if arrow.is_list(data_type):
        return [_scaled(one, data_type.value_type) for one in value]
    if arrow.is_struct(data_type):
        return {field.name: _scaled(value[field.name], field.type) for field in data_type}
    return value


def has_nan(value: Any) -> bool:
    """Whether a NaN is anywhere inside; for Arrow none equals another."""
    if isinstance(value, dict):
        return any(map(has_nan, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_nan, value))
    return isinstance(value, float) and math.isnan(value)


def model_row(schema: pa.Schema, schema_id: int, row: dict[str, Any]) -> bytes:
    """One row in the ``row`` format, written as the format's description says and no faster."""
    return struct.pack("<H", schema_id) + model_tuple(list(schema), [row[name] for name in schema.names])


def model_tuple(fields: list[pa.Field], cells: list[Any]) -> bytes:
    slots, ends, data = b"", b"", b""
    for field, value in zip(fields, cells, strict=True):
        if is_fixed(field.type):
            slots += model_slot(field.type, value)
        else:
            data += model_cell(field.type, value)
            ends += struct.pack("<I", len(data))
    return model_bitmap(cells) + slots + ends + data


def model_bitmap(cells: list[Any]) -> bytes:
    bits = sum(1 << number for number, value in enumerate(cells) if value is None)
    return bits.to_bytes((len(cells) + 7) // 8, "little")


def is_fixed(data_type: pa.DataType) -> bool:
    return not (arrow.is_string(data_type) or arrow.is_binary(data_type) or arrow.is_nested(data_type))


def model_slot(data_type: pa.DataType, value: Any) -> bytes:
    if arrow.is_boolean(data_type):
        return bytes([bool(value)])
    if arrow.is_floating(data_type):
        width = data_type.bit_width // 8
        return bytes(width) if value is None else struct.pack("<f" if width == 4 else "<d", value)
    if arrow.is_decimal(data_type):
        return (value or 0).to_bytes(16, "little", signed=True)
    return struct.pack("<" + INTEGERS[data_type.bit_width // 8], value or 0)


def model_cell(data_type: pa.DataType, value: Any) -> bytes:
    if value is None:
        return b""
    if arrow.is_string(data_type):
        return bytes(value.encode())
    if arrow.is_binary(data_type):
        return bytes(value)
    if arrow.is_struct(data_type):
        return model_tuple(list(data_type), [value[field.name] for field in data_type])
    if arrow.is_map(data_type):
        entries = data_type.field(0).type
        value = [{"key": key, "value": item} for key, item in value]
        return model_list(entries, value)
    return model_list(data_type.value_type, value)


def model_list(element: pa.DataType, elements: list[Any]) -> bytes:
    head = struct.pack("<I", len(elements)) + model_bitmap(elements)
    if is_fixed(element):
        return head + b"".join(model_slot(element, one) for one in elements)
    cells = [model_cell(element, one) for one in elements]
    ends = [struct.pack("<I", end) for end in accumulate(map(len, cells))]
    return head + b"".join(ends) + b"".join(cells)
