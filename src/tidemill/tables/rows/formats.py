"""Row formats: how the values of a table's log encode rows.

``row``
    Our own binary layout (``rows/binary.py``): exact, and fast to turn into columns. The default.

``json``
    One JSON object per row, in UTF-8, for writers in any language. Fields are found by name, in any order;
    one that is missing is null. Refused are: unknown fields, a field that is there twice, a null or nothing
    where the column is not nullable, and values of another type or out of range.

    ==========================  ==============================================================================
    tinyint … bigint            a number without fraction or exponent
    float, double               a number, or one of "NaN", "Infinity", "-Infinity"; rounded to the nearest
    decimal(p,s)                text such as "12.50", or a number; what does not fit exactly is refused
    boolean, string             true or false; text
    binary                      text: base64 with padding
    date                        text: "2024-05-31"
    timestamp                   text: "2024-05-31T12:30:00.25Z"; offsets such as +02:00 are read, and not kept
    timestamp_ntz               text: "2024-05-31T12:30:00.25"
    time                        text: "12:30:00", with up to nine digits of a fraction
    interval day to second      a number: whole microseconds
    array, struct               an array; an object with the same rules as a row
    map                         an object where keys are strings, else an array of [key, value]
    ==========================  ==============================================================================

``raw``
    The value's bytes are the one column that is not in the primary key, of type string or binary. The key's
    columns are in the record's key alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from tidemill.errors import TableCode, TableError
from tidemill.tables.rows.binary import BytesLike, RowCodec, VersionedRows, checked_slices
from tidemill.tables.rows.decoding import Source, utf8_array
from tidemill.tables.rows.refusals import Refusal, refused_row

__all__ = ("FORMATS", "RowFormat", "make_format")

FORMATS = ("row", "json", "raw")


class RowFormat(Protocol):
    """Reads and writes the values of a log as columns."""

    @property
    def name(self) -> str:
        """The name of the format in the table's definition."""
        ...

    @property
    def carries_keys(self) -> bool:
        """Whether values have the columns of the primary key; if not, only the record's key has them."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """The schema of ``to_batch``: the table's newest, or those of its columns that values carry."""
        ...

    def to_batch(self, data: BytesLike, starts: np.ndarray, ends: np.ndarray) -> pa.RecordBatch:
        """Decode the values ``data[starts[i]:ends[i]]``, which are in order and do not overlap.

        Any bytes may be given. Raises ``TableError`` (``row_refused``, with ``index``) for the first value
        that is no row.
        """
        ...

    def from_batch(self, batch: pa.RecordBatch) -> pa.BinaryArray:
        """Encode rows of the table's newest schema, none of them null."""
        ...


def make_format(
    name: str, schemas: Mapping[int, pa.Schema], latest_id: int, primary_key: Sequence[str]
) -> RowFormat:
    """Make the format ``name`` for these schemas. Raises ``TableError`` if it cannot hold them."""
    if name == "row":
        return _RowValues(schemas, latest_id)
    if name == "json":
        return _JsonValues(schemas[latest_id])
    if name == "raw":
        return _RawValues(schemas[latest_id], primary_key)
    raise TableError(TableCode.invalid_schema, f"there is no row format {name!r}: use {', '.join(FORMATS)}")


class _RowValues:
    name = "row"
    carries_keys = True

    def __init__(self, schemas: Mapping[int, pa.Schema], latest_id: int) -> None:
        self._rows = VersionedRows(schemas, latest_id)
        self._codec = RowCodec(schemas[latest_id], latest_id)
        self.schema = schemas[latest_id]

    def to_batch(self, data: BytesLike, starts: np.ndarray, ends: np.ndarray) -> pa.RecordBatch:
        return self._rows.validate(data, starts, ends)

    def from_batch(self, batch: pa.RecordBatch) -> pa.BinaryArray:
        return self._codec.encode(batch)


class _JsonValues:
    name = "json"
    carries_keys = True

    def __init__(self, schema: pa.Schema) -> None:
        # Imported here, because most tables have another format.
        from tidemill.tables.rows.json_reading import JsonReader

        self.schema = schema
        self._reader = JsonReader(schema)

    def to_batch(self, data: BytesLike, starts: np.ndarray, ends: np.ndarray) -> pa.RecordBatch:
        return self._reader.read(data, *checked_slices(data, starts, ends))

    def from_batch(self, batch: pa.RecordBatch) -> pa.BinaryArray:
        from tidemill.tables.rows.json_writing import json_objects

        try:
            return json_objects(list(self.schema), batch.columns).view(pa.binary())
        except Refusal as refusal:
            raise refused_row(refusal) from None


class _RawValues:
    name = "raw"
    carries_keys = False

    def __init__(self, schema: pa.Schema, primary_key: Sequence[str]) -> None:
        fields = [field for field in schema if field.name not in primary_key]
        plain = len(fields) == 1 and (arrow.is_string(fields[0].type) or arrow.is_binary(fields[0].type))
        if not plain:
            raise TableError(
                TableCode.invalid_schema,
                "a table of raw rows has one column beside its primary key, of type string or binary, "
                f"and this one has {', '.join(f'{field.name} {field.type}' for field in fields) or 'none'}: "
                "change the columns, or use another row format",
            )
        self.schema = pa.schema(fields)
        self._field = fields[0]

    def to_batch(self, data: BytesLike, starts: np.ndarray, ends: np.ndarray) -> pa.RecordBatch:
        values = Source(data, validate=True).gather(*checked_slices(data, starts, ends))
        if arrow.is_string(self._field.type):
            try:
                values = utf8_array(values, self._field.name)
            except Refusal as refusal:
                raise refused_row(refusal) from None
        return pa.RecordBatch.from_arrays([values], schema=self.schema)

    def from_batch(self, batch: pa.RecordBatch) -> pa.BinaryArray:
        values = batch.column(self._field.name)
        if values.null_count:
            index = int(values.is_null().to_numpy(zero_copy_only=False).argmax())
            raise TableError(
                TableCode.row_refused,
                f"column {self._field.name!r} is null, which a raw row cannot be: "
                "a record without value is a deletion",
                index=index,
            )
        return values.view(pa.binary())
