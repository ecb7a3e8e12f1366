"""Keys of tables: which columns may be keys, how a key is spelt in bytes, and how keys are ordered.

A typed key has exactly one spelling in each key format, and any other is refused, because routing hashes the
bytes: two spellings of one key would live in two buckets.

- ``raw``, for a key of one column: the text of the value (see ``text.py``), or the bytes of a binary one.
- ``json``, for any key: an array of the key columns in the order of the primary key, without spaces. Integers
  and booleans stand as they are, everything else is a string.

What is canonical is decided in one way: the bytes are read, the values are written out again, and the two
must be the same. A spelling has at most ``KEY_BYTES_MAX`` bytes.

State keys (see ``state_keys``) have the order of the values. A prefix of a key is always made of whole
columns: ``prefix_bounds(["eu"])`` has the keys whose region is ``eu``, not those whose region begins with it.
For the latter, two calls of ``bound`` give the ends of the range.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import GenericAlias
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.errors import TableCode, TableError
from tidemill.records.columns import compute as pc
from tidemill.tables.keys.guess import guess_values
from tidemill.tables.keys.input import (
    as_array,
    check_no_nulls,
    column_from_array,
    column_from_values,
    columns_from_arrow,
    columns_from_rows,
    out_of_range,
    refused,
    show,
)
from tidemill.tables.keys.ragged import search_first, spans
from tidemill.tables.keys.state_keys import after_prefix, encode_state_keys
from tidemill.tables.keys.text import Kind, find_out_of_range, from_text, json_text, kind_of, to_text

__all__ = ("KEY_BYTES_MAX", "KEY_FORMATS", "KeyCodec", "check_key_columns", "default_key_format")

#: The longest canonical key, in bytes.
KEY_BYTES_MAX: Final = 4_096
KEY_FORMATS: Final = ("raw", "json")

_DECODE_ERRORS: Final = (pa.ArrowException, msgspec.MsgspecError, ValueError, OverflowError)
_JSON_TYPES: Final = {Kind.boolean: bool, Kind.integer: int, Kind.binary: bytes}


def default_key_format(primary_key: Sequence[str]) -> str:
    """The key format of a table that names none.

    >>> default_key_format(["id"]), default_key_format(["region", "id"])
    ('raw', 'json')
    """
    return "raw" if len(primary_key) == 1 else "json"


def check_key_columns(schema: pa.Schema, primary_key: Sequence[str]) -> None:
    """Raise ``TableError`` (``invalid_schema``) for a primary key that no table can have."""
    if not primary_key:
        raise _invalid("the primary key names no column; name at least one")
    for index, name in enumerate(primary_key):
        if name in primary_key[:index]:
            raise _invalid(f"the primary key names column {name!r} twice; name each column once")
        indices = schema.get_all_field_indices(name)
        if len(indices) != 1:
            found = "is not in the schema" if not indices else f"is {len(indices)} times in the schema"
            raise _invalid(f"primary key column {name!r} {found}; the columns are: {', '.join(schema.names)}")
        field = schema.field(indices[0])
        if kind_of(field.type) is None:
            raise _invalid(
                f"column {name!r} of type {field.type} cannot be a key column: {_why_no_key(field.type)}"
            )
        if field.nullable:
            raise _invalid(f"primary key column {name!r} may be null; declare it not null")


class KeyCodec:
    """Spells, reads and orders the keys of one table.

    >>> schema = pa.schema([pa.field("region", pa.string(), False), pa.field("id", pa.int64(), False)])
    >>> codec = KeyCodec(schema, ["region", "id"], "json")
    >>> codec.canonical(codec.columns_from([("eu", 7)])).to_pylist()
    [b'["eu",7]']
    """

    def __init__(self, schema: pa.Schema, primary_key: Sequence[str], key_format: str) -> None:
        check_key_columns(schema, primary_key)
        if key_format not in KEY_FORMATS:
            raise _invalid(f"there is no key format {key_format!r}; use {' or '.join(KEY_FORMATS)}")
        if key_format == "raw" and len(primary_key) != 1:
            raise _invalid(f"a raw key has one column, not {len(primary_key)}; use the key format json")
        self.primary_key = tuple(primary_key)
        self.key_format = key_format
        self.types: tuple[pa.DataType, ...] = tuple(schema.field(name).type for name in primary_key)
        self._fields = list(zip(self.primary_key, self.types, strict=True))
        self._kinds = [_kind(each) for each in self.types]
        self._is_raw = key_format == "raw"
        row = GenericAlias(tuple, tuple(_JSON_TYPES.get(kind, str) for kind in self._kinds))
        self._rows: msgspec.json.Decoder[list[tuple[Any, ...]]] = msgspec.json.Decoder(
            GenericAlias(list, (row,))
        )

    def canonical(self, columns: Sequence[Any]) -> pa.Array:
        """The canonical spellings of typed keys, as a binary array.

        Refuses nulls, values that have no spelling, and keys longer than ``KEY_BYTES_MAX``.
        """
        arrays = self._typed(columns)
        for (name, data_type), kind, column in zip(self._fields, self._kinds, arrays, strict=True):
            outside = find_out_of_range(column, kind)
            if outside is not None:
                raise out_of_range(name, data_type, outside)
        keys = self._encode(arrays)
        _check_lengths(keys)
        return keys

    def parse(self, keys: Any) -> list[pa.Array]:
        """The typed columns of canonical keys; takes any bytes, and refuses every other spelling.

        The error has the ``index`` of the first refused key and the canonical spelling if there is one.
        """
        keys = as_array(keys).cast(pa.binary())
        if keys.null_count:
            index = keys.is_null().index(True).as_py()
            raise refused(f"record {index} has no key; a table with a primary key needs one", index)
        _check_lengths(keys)
        columns = self._read(keys)
        if columns is None:
            index = search_first(len(keys), lambda start, stop: self._read(keys[start:stop]) is not None)
            raise self._refusal(keys[index].as_py(), index)
        return columns

    def state_keys(self, columns: Sequence[Any]) -> pa.Array:
        """The state keys of typed keys, as a binary array; the columns are as for ``canonical``."""
        return encode_state_keys(self._typed(columns))

    def bound(self, values: Sequence[Any]) -> bytes:
        """The smallest state key of the keys whose first columns are at least these values.

        >>> schema = pa.schema([pa.field("id", pa.int16(), False)])
        >>> KeyCodec(schema, ["id"], "raw").bound([-1])
        b'\\x7f\\xff'
        """
        if len(values) > len(self._fields):
            raise refused(
                f"{len(values)} values for a key of {len(self._fields)}: {', '.join(self.primary_key)}"
            )
        if not len(values):
            return b""
        fields = self._fields[: len(values)]
        columns = [column_from_values(field, [value]) for field, value in zip(fields, values, strict=True)]
        bound: bytes = encode_state_keys(columns)[0].as_py()
        return bound

    def prefix_bounds(self, values: Sequence[Any]) -> tuple[bytes, bytes | None]:
        """The range of state keys of all keys whose first columns have these values: (first, end).

        ``end`` is not part of the range; None means that there is no end.
        """
        prefix = self.bound(values)
        return prefix, after_prefix(prefix)

    def columns_from(self, keys: Any) -> list[pa.Array]:
        """The typed columns of keys as users give them.

        A list of mappings by column name, or of tuples in the order of the primary key; a table, record batch
        or data frame with the key columns; if the key is one column, also a list of values or an array. Other
        columns are ignored.
        """
        if isinstance(keys, pa.Array | pa.ChunkedArray):
            if len(self._fields) != 1:
                raise refused(f"one array for a key of {len(self._fields)}: {', '.join(self.primary_key)}")
            return [column_from_array(self._fields[0], keys)]
        # A data frame would be taken for a list of its column names. A series has a dtype and is a list.
        if hasattr(keys, "__arrow_c_stream__") and not hasattr(type(keys), "dtype"):
            return columns_from_arrow(pa.table(keys), self._fields)
        if isinstance(keys, str | bytes | dict) or not isinstance(keys, Iterable):
            raise refused(
                f"keys are a list or a table, not {type(keys).__name__}; put {show(keys)} into a list"
            )
        return columns_from_rows(list(keys), self._fields)

    def _typed(self, columns: Sequence[Any]) -> list[pa.Array]:
        """The columns as arrays of the key's types, of one length and without nulls."""
        if len(columns) != len(self._fields):
            raise refused(
                f"{len(columns)} columns for a key of {len(self._fields)}: {', '.join(self.primary_key)}"
            )
        arrays = [as_array(column) for column in columns]
        for (name, data_type), column in zip(self._fields, arrays, strict=True):
            if column.type != data_type:
                raise refused(f"key column {name!r} is {column.type} instead of {data_type}")
            if len(column) != len(arrays[0]):
                raise refused(f"key column {name!r} has {len(column)} rows, the first one {len(arrays[0])}")
            check_no_nulls(name, column)
        return arrays

    def _encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        if self._is_raw:
            return to_text(columns[0], self._kinds[0])
        parts: list[Any] = []
        before = b"["
        for column, kind in zip(columns, self._kinds, strict=True):
            text, is_quoted = json_text(column, kind)
            parts += [before + b'"', text] if is_quoted else [before, text]
            before = b'",' if is_quoted else b","
        return pc.binary_join_element_wise(*parts, before[:-1] + b"]", b"")

    def _read(self, keys: pa.Array) -> list[pa.Array] | None:
        """The columns of keys; None if one of the keys is not canonical."""
        try:
            columns = self._decode(keys)
        except _DECODE_ERRORS:
            return None
        for column, kind in zip(columns, self._kinds, strict=True):
            if find_out_of_range(column, kind) is not None:
                return None
        return columns if self._encode(columns).equals(keys) else None

    def _decode(self, keys: pa.Array) -> list[pa.Array]:
        """The columns of keys if all are canonical. Other keys give an error or any columns."""
        if self._is_raw:
            return [from_text(keys, self.types[0], self._kinds[0])]
        # One document for all keys is much faster than one for each. Keys that only make sense together, such
        # as "[1" and "2]", are caught like everything else: written out again, they differ.
        everything = pc.binary_join(
            pa.ListArray.from_arrays(pa.array([0, len(keys)], pa.int32()), keys), b","
        )
        rows = self._rows.decode(b"[%b]" % everything[0].as_py())
        columns = []
        for index, (data_type, kind) in enumerate(zip(self.types, self._kinds, strict=True)):
            values = [row[index] for row in rows]
            if kind in _JSON_TYPES or kind is Kind.string:
                columns.append(pa.array(values, data_type))
            else:
                columns.append(from_text(pa.array(values, pa.string()).cast(pa.binary()), data_type, kind))
        return columns

    def _refusal(self, key: bytes, index: int) -> TableError:
        """The error for one key that is not canonical."""
        types = ", ".join(map(str, self.types))
        values = guess_values(key, self.types, is_raw=self._is_raw)
        try:
            spelling = None if values is None else self.canonical(self.columns_from([values]))[0].as_py()
        except TableError:
            spelling = None
        if spelling is None:
            return refused(f"the key {show(key)} is not a {self.key_format} key of ({types})", index)
        return refused(f"the key {show(key)} is not spelt canonically; spell it {show(spelling)}", index)


def _check_lengths(keys: pa.Array) -> None:
    _, offsets = spans(keys)
    lengths = np.diff(offsets)
    if len(lengths) and lengths.max() > KEY_BYTES_MAX:
        index = int((lengths > KEY_BYTES_MAX).argmax())
        raise refused(f"a key has {lengths[index]} bytes; at most {KEY_BYTES_MAX} are allowed", index)


def _kind(data_type: pa.DataType) -> Kind:
    kind = kind_of(data_type)
    assert kind is not None, "the key columns have been checked"
    return kind


def _invalid(message: str) -> TableError:
    return TableError(TableCode.invalid_schema, message)


def _why_no_key(data_type: pa.DataType) -> str:
    types = pa.types
    if types.is_floating(data_type):
        return "floats have a value that differs from itself, and two zeros; use a decimal"
    if types.is_nested(data_type):
        return "it is made of several values; make each of them a column"
    if types.is_duration(data_type) or types.is_time(data_type):
        return "it has no single spelling; store it as an integer"
    if types.is_timestamp(data_type):
        return "keys take timestamps in microseconds, in UTC or without a time zone"
    if types.is_unsigned_integer(data_type):
        return "Spark and Kafka clients have no unsigned integers; use the next wider signed one"
    if types.is_decimal(data_type):
        return "keys take decimal128 with a scale from 0 to its precision"
    return "use a boolean, integer, string, binary, date, timestamp or decimal column"
