"""The schema of a file with rows, in the types that a table can have.

Parquet says its types. Those of CSV and JSON are inferred from the first megabytes; a column that is empty
there is text. Types that no table has become the next wider one: unsigned integers, half floats. Nanoseconds
become microseconds, and a row that has some is refused when it is written.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
from pyarrow import types as arrow

from tidemill.cli.tables.byte_input import Input
from tidemill.cli.tables.json_rows import cut_objects
from tidemill.cli.tables.row_files import row_error, unpacked
from tidemill.cli.tables.session import FileFormat
from tidemill.errors import TableCode, TableError

__all__ = ("schema_of", "table_type")

_LOOKED_AT_BYTES: Final = 4 * 1024 * 1024
_WIDER: Final = {
    pa.null(): pa.string(),
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.duration("ns"): pa.duration("us"),
}


def schema_of(path: Path, kind: FileFormat, delimiter: str | None = None) -> pa.Schema:
    """The columns of a file. Raises ``TableError`` for one that has none."""
    try:
        if kind is FileFormat.PARQUET:
            found = pa.parquet.read_schema(path)
        elif kind is FileFormat.CSV:
            found = _csv_schema(path, delimiter or ("\t" if path.suffix.lower() == ".tsv" else ","))
        else:
            found = _json_schema(path)
    except pa.ArrowInvalid as error:
        problem = TableError(TableCode.invalid_schema, f"its columns cannot be told: {error}")
        raise row_error(path, None, problem) from None
    return pa.schema([pa.field(field.name, table_type(field.type), field.nullable) for field in found])


def table_type(data_type: pa.DataType) -> pa.DataType:
    """The type in which a table holds all values of ``data_type``, or those without nanoseconds.

    >>> str(table_type(pa.uint32())), str(table_type(pa.timestamp("ns", "UTC")))
    ('int64', 'timestamp[us, tz=UTC]')
    """
    if arrow.is_timestamp(data_type):
        return pa.timestamp("us", data_type.tz)
    if arrow.is_fixed_size_binary(data_type):
        return pa.binary()
    if arrow.is_dictionary(data_type):
        return table_type(data_type.value_type)
    if arrow.is_struct(data_type):
        return pa.struct([field.with_type(table_type(field.type)) for field in data_type])
    if arrow.is_map(data_type):
        return pa.map_(table_type(data_type.key_type), table_type(data_type.item_type))
    if arrow.is_list(data_type) or arrow.is_large_list(data_type) or arrow.is_fixed_size_list(data_type):
        return pa.list_(data_type.value_field.with_type(table_type(data_type.value_type)))
    return _WIDER.get(data_type, data_type)


def _csv_schema(path: Path, delimiter: str) -> pa.Schema:
    start = b""
    with Input(path) as file:
        source = unpacked(file, path)
        while len(start) < _LOOKED_AT_BYTES and (part := source.read(_LOOKED_AT_BYTES - len(start))):
            start += part
    # A row that is cut off would have too few cells.
    whole = start[: start.rfind(b"\n") + 1] if len(start) == _LOOKED_AT_BYTES else start
    convert = pa.csv.ConvertOptions(null_values=[""], strings_can_be_null=True)
    read = pa.csv.ReadOptions(block_size=_LOOKED_AT_BYTES)
    parse = pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    rows = pa.csv.read_csv(io.BytesIO(whole), read_options=read, parse_options=parse, convert_options=convert)
    return rows.schema


def _json_schema(path: Path) -> pa.Schema:
    with Input(path) as file:
        for objects in cut_objects(unpacked(file, path)):
            lines = b"\n".join(objects.to_pylist())
            read = pa.json.ReadOptions(block_size=max(len(lines), 1))
            parse = pa.json.ParseOptions(newlines_in_values=True)
            return pa.json.read_json(io.BytesIO(lines), read_options=read, parse_options=parse).schema
    raise pa.ArrowInvalid("it is empty")
