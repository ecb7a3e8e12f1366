"""The ``row`` format: one row as bytes, exact for every type that a table can have.

Everything is little-endian and nothing is aligned. Each row has exactly one spelling; any other is refused
when rows are validated, so that equal rows are equal bytes.

A **row** is its schema's id (u16) and then the tuple of its columns. A **tuple** of *n* columns is::

    null bitmap     ceil(n / 8) bytes; bit (i % 8) of byte (i // 8) is set when column i is null, and the bits
                    behind the last column are 0
    slots           of the columns of fixed width, in column order
    ends            u32 each, of the columns of variable width, in column order: where the column's cell ends,
                    counted from the end of this table; they never decrease
    cells           of the columns of variable width, one right behind the other; nothing follows the last

A null column has a slot of zeros, or an empty cell. Slots by type:

    boolean                     1 byte, 0 or 1
    tinyint smallint int bigint 1, 2, 4, 8 bytes, two's complement
    float double                4, 8 bytes, IEEE 754; the bits are kept as they are, also those of a NaN
    date                        4 bytes, signed, days since 1970-01-01
    timestamp timestamp_ntz     8 bytes, signed, microseconds since 1970-01-01T00:00:00 (UTC, or of no zone)
    interval day to second      8 bytes, signed, microseconds
    time                        8 bytes, nanoseconds since midnight, less than 86,400,000,000,000
    decimal(p,s)                16 bytes, two's complement, value * 10^s, at most p digits

Cells by type:

    string                      UTF-8 (no surrogates, shortest forms)
    binary                      the bytes
    struct<...>                 the tuple of its fields
    array<T>                    count of elements (u32), null bitmap (as above, of the elements), and then
                                  T of fixed width: a slot per element
                                  T of variable width: an end per element (u32, as above), and the cells,
                                  one right behind the other
    map<K,V>                    as array<struct<key:K not null,value:V> not null>, in the order given

For example, schema 1 is ``id bigint, name string, tags array<string>``, and the row is 7, null, ["a", "bc"]::

    01 00                       schema id
    02                          column 1 is null
    07 00 00 00 00 00 00 00     id
    00 00 00 00  10 00 00 00    ends: name 0, tags 16
    02 00 00 00  00             tags: two elements, none null
    01 00 00 00  03 00 00 00    their ends
    61  62 63                   "a", "bc"

A table only ever gains nullable columns, at the end. So a row of an older schema is a row of the newest one
whose last columns are null: ``VersionedRows`` reads any mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from tidemill.errors import TableCode, TableError
from tidemill.records.columns.arrays import from_numpy
from tidemill.tables.rows.decoding import Source, decode_tuples
from tidemill.tables.rows.encoding import encode_tuples
from tidemill.tables.rows.layout import Layout
from tidemill.tables.rows.nested import SpreadBudget, nulls_of
from tidemill.tables.rows.refusals import Refusal, first_refusal, refused_row

__all__ = ("MAX_SCHEMA_ID", "BytesLike", "RowCodec", "VersionedRows", "checked_slices")

#: Types in which the bytes of many values may be given.
BytesLike: TypeAlias = "bytes | bytearray | memoryview | pa.Buffer"
MAX_SCHEMA_ID = 0xFFFF
_ID = np.dtype("<u2")


class RowCodec:
    """Encodes and decodes rows of one schema, which is as ``normalise_schema`` returns it.

    >>> codec = RowCodec(pa.schema([("id", pa.int64()), ("name", pa.string())]), schema_id=1)
    >>> rows = codec.encode(pa.record_batch({"id": [7], "name": ["a"]}, schema=codec.schema))
    >>> rows[0].as_py().hex(" ")
    '01 00 00 07 00 00 00 00 00 00 00 01 00 00 00 61'
    >>> codec.decode(rows[0].as_py(), np.array([0]), np.array([16])).to_pylist()
    [{'id': 7, 'name': 'a'}]
    """

    def __init__(self, schema: pa.Schema, schema_id: int) -> None:
        if not 0 <= schema_id <= MAX_SCHEMA_ID:
            raise ValueError(f"schema id {schema_id} is not between 0 and {MAX_SCHEMA_ID}")
        self.schema = schema
        self.schema_id = schema_id
        self.layout = Layout(list(schema), with_id=True)

    def encode(self, batch: pa.RecordBatch) -> pa.BinaryArray:
        """Encode rows, one value each. ``batch`` has the schema's columns in its order (see ``conform``)."""
        if batch.schema.names != self.schema.names or batch.schema.types != self.schema.types:
            raise TableError(
                TableCode.row_refused,
                f"the batch has columns {_named(batch.schema)}, and the table has {_named(self.schema)}: "
                "bring it to the table's schema with conform() first",
            )
        try:
            return encode_tuples(self.layout, batch.columns, batch.num_rows, self.schema_id)
        except Refusal as refusal:
            raise refused_row(refusal) from None

    def decode(
        self,
        data: BytesLike,
        starts: np.ndarray,
        ends: np.ndarray,
        *,
        columns: Sequence[str] | None = None,
        validate: bool = False,
    ) -> pa.RecordBatch:
        """Decode the rows ``data[starts[i]:ends[i]]``, which are in increasing order and do not overlap.

        ``columns`` chooses columns and their order. With ``validate`` any bytes may be given: either they are
        the one spelling of the rows returned, or the first row at fault is refused. Without it, the bytes are
        trusted to have been validated; damaged ones give wrong values or a refusal, but never a read outside
        of their row.
        """
        numbers = _numbers(self.schema, columns)
        starts, ends = checked_slices(data, starts, ends)
        try:
            arrays = self.read(data, starts, ends, numbers, validate=validate)
        except Refusal as refusal:
            raise refused_row(refusal) from None
        return _batch(self.schema, numbers, arrays, len(starts))

    def read(
        self, data: BytesLike, starts: np.ndarray, ends: np.ndarray, numbers: Sequence[int], *, validate: bool
    ) -> list[pa.Array]:
        """``decode`` with columns by index, and a ``Refusal`` for the first row at fault."""

        def part(first: int, behind: int) -> Mapping[int, pa.Array]:
            return self._read(data, starts[first:behind], ends[first:behind], numbers, validate)

        try:
            arrays = part(0, len(starts))
        except Refusal as refusal:
            raise first_refusal(part, refusal) from None
        return [arrays[number] for number in numbers]

    def _read(
        self, data: BytesLike, starts: np.ndarray, ends: np.ndarray, numbers: Sequence[int], validate: bool
    ) -> Mapping[int, pa.Array]:
        source = Source(data, validate=validate)
        ids = _schema_ids(source, starts, ends)
        wrong = ids != self.schema_id
        if wrong.any():
            index = int(wrong.argmax())
            text = f"has schema id {ids[index]}, and {self.schema_id} is expected"
            raise Refusal(index, "", text if ids[index] >= 0 else _TOO_SHORT)
        wanted = range(len(self.layout.columns)) if validate else numbers
        return decode_tuples(source, self.layout, starts, ends, wanted)


class VersionedRows:
    """Reads rows of all versions of a table's schema as rows of the newest one."""

    def __init__(self, schemas: Mapping[int, pa.Schema], latest_id: int) -> None:
        self.schema = schemas[latest_id]
        self.latest = RowCodec(self.schema, latest_id)
        self._codecs = {number: RowCodec(schema, number) for number, schema in schemas.items()}
        for number, schema in schemas.items():
            _check_prefix(number, schema, self.schema)

    def decode(
        self, data: BytesLike, starts: np.ndarray, ends: np.ndarray, *, columns: Sequence[str] | None = None
    ) -> pa.RecordBatch:
        """Decode rows that were validated before: ``RowCodec.decode`` without validation."""
        return self._decode(data, starts, ends, _numbers(self.schema, columns), validate=False)

    def validate(self, data: BytesLike, starts: np.ndarray, ends: np.ndarray) -> pa.RecordBatch:
        """Decode untrusted rows: ``RowCodec.decode`` with validation."""
        return self._decode(data, starts, ends, _numbers(self.schema, None), validate=True)

    def _decode(
        self, data: BytesLike, starts: np.ndarray, ends: np.ndarray, numbers: list[int], *, validate: bool
    ) -> pa.RecordBatch:
        starts, ends = checked_slices(data, starts, ends)
        ids = _schema_ids(Source(data, validate=validate), starts, ends)
        try:
            if not len(ids) or (ids == ids[0]).all():
                arrays = self._of_one(int(ids[0]) if len(ids) else -1, data, starts, ends, numbers, validate)
            else:
                arrays = self._of_many(ids, data, starts, ends, numbers, validate)
        except Refusal as refusal:
            raise refused_row(refusal) from None
        return _batch(self.schema, numbers, arrays, len(starts))

    def _of_one(
        self,
        schema_id: int,
        data: BytesLike,
        starts: np.ndarray,
        ends: np.ndarray,
        numbers: list[int],
        validate: bool,
    ) -> list[pa.Array]:
        """The columns of rows that all have one schema id."""
        codec = self._codecs.get(schema_id) if len(starts) else self.latest
        if codec is None:
            raise Refusal(0, "", self._unknown(schema_id))
        present = [number for number in numbers if number < len(codec.schema)]
        arrays = dict(zip(present, codec.read(data, starts, ends, present, validate=validate), strict=True))
        absent = [number for number in numbers if number not in arrays]
        if validate:
            wide = sum(self.latest.layout.columns[number].spread_bytes for number in absent)
            SpreadBudget().take(len(starts) * wide, "")
        return [
            arrays[number] if number in arrays else nulls_of(len(starts), self.schema.types[number])
            for number in numbers
        ]

    def _of_many(
        self,
        ids: np.ndarray,
        data: BytesLike,
        starts: np.ndarray,
        ends: np.ndarray,
        numbers: list[int],
        validate: bool,
    ) -> list[pa.Array]:
        """The columns of rows of several schema ids: read id by id, then put back into order."""
        groups: list[list[pa.Array]] = []
        order: list[np.ndarray] = []
        refusals: list[Refusal] = []
        for schema_id in np.unique(ids).tolist():
            rows = np.flatnonzero(ids == schema_id)
            try:
                groups.append(self._of_one(schema_id, data, starts[rows], ends[rows], numbers, validate))
            except Refusal as refusal:
                refusal.index = int(rows[refusal.index])
                refusals.append(refusal)
            order.append(rows)
        if refusals:
            raise min(refusals, key=lambda refusal: refusal.index)
        indices = from_numpy(np.argsort(np.concatenate(order)))
        return [pa.concat_arrays(parts).take(indices) for parts in zip(*groups, strict=True)]

    def _unknown(self, schema_id: int) -> str:
        known = ", ".join(map(str, sorted(self._codecs)))
        return _TOO_SHORT if schema_id < 0 else f"has schema id {schema_id}, and the table has {known}"


_TOO_SHORT = "is shorter than a schema id"


def _schema_ids(source: Source, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The schema id of every row; -1 for a row that is too short to have one."""
    long_enough = ends - starts >= _ID.itemsize
    if long_enough.all():
        return source.heads(starts, _ID)
    ids = np.full(len(starts), -1, np.int32)
    ids[long_enough] = source.heads(starts[long_enough], _ID)
    return ids


def checked_slices(data: BytesLike, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The slices as 64-bit numbers. They come from our own code: asserts that they are right."""
    starts, ends = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
    size = data.size if isinstance(data, pa.Buffer) else memoryview(data).nbytes
    in_order = len(starts) == len(ends) and (starts <= ends).all() and (ends[:-1] <= starts[1:]).all()
    if not in_order or (len(starts) and (starts[0] < 0 or ends[-1] > size)):
        raise ValueError(f"slices of rows overlap, are out of order, or leave their {size} bytes")
    return starts, ends


def _check_prefix(number: int, older: pa.Schema, newest: pa.Schema) -> None:
    shared = list(newest)[: len(older)]
    if list(older) != shared or not all(field.nullable for field in list(newest)[len(older) :]):
        raise TableError(
            TableCode.invalid_schema,
            f"schema {number} ({_named(older)}) is not what the newest ({_named(newest)}) begins with: "
            "a table only ever gains nullable columns, at the end",
        )


def _numbers(schema: pa.Schema, columns: Sequence[str] | None) -> list[int]:
    if columns is None:
        return list(range(len(schema)))
    indices = {name: number for number, name in enumerate(schema.names)}
    unknown = [name for name in columns if name not in indices]
    if unknown:
        raise TableError(
            TableCode.invalid_scan_request, f"there is no column {unknown[0]!r}: there are {_named(schema)}"
        )
    return [indices[name] for name in columns]


def _batch(schema: pa.Schema, numbers: Sequence[int], arrays: list[pa.Array], count: int) -> pa.RecordBatch:
    if arrays:
        chosen = pa.schema([schema.field(number) for number in numbers])
        return pa.RecordBatch.from_arrays(arrays, schema=chosen)
    # A batch without a column would forget its number of rows, which is all that counting needs.
    nothing = pa.Array.from_buffers(pa.struct([]), count, [None], 0, 0, children=[])
    return pa.RecordBatch.from_struct_array(nothing)


def _named(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
