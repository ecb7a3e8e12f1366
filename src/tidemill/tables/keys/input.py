"""Keys as users give them, made into typed columns.

A value must have the kind of its column: no text is read as a number, no number as a boolean, no local time
as an instant. Within a kind the width may differ if nothing is lost. What does not fit is refused.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tidemill.errors import TableCode, TableError
from tidemill.tables.keys.ragged import search_first
from tidemill.tables.keys.text import Kind, find_out_of_range, kind_of

__all__ = (
    "KeyField",
    "as_array",
    "check_no_nulls",
    "column_from_array",
    "column_from_values",
    "columns_from_arrow",
    "columns_from_rows",
    "out_of_range",
    "refused",
    "show",
)

_PYTHON: Final[dict[Kind, tuple[type, ...]]] = {
    Kind.boolean: (bool, np.bool_),
    Kind.integer: (int, np.integer),
    Kind.string: (str,),
    Kind.binary: (bytes, bytearray, memoryview),
    Kind.date: (dt.date,),
    Kind.timestamp: (dt.datetime,),
    Kind.decimal: (Decimal, int),
}
_REFUSED_PYTHON: Final[dict[Kind, tuple[type, ...]]] = {
    Kind.integer: (bool,),
    Kind.date: (dt.datetime,),
    Kind.decimal: (bool,),
}
_CONVERSION_ERRORS: Final = (pa.ArrowException, ValueError, OverflowError, TypeError)
_SHOWN_CHARACTERS: Final = 80

KeyField = tuple[str, pa.DataType]


def columns_from_rows(rows: Sequence[Any], fields: Sequence[KeyField]) -> list[pa.Array]:
    """The key columns of rows: mappings, tuples or lists, or single values if the key is one column."""
    if len(fields) == 1 and not any(
        issubclass(kind, Mapping | tuple | list) for kind in set(map(type, rows))
    ):
        # Single values, as a look-up of thousands of them has: no need to look at each.
        return [column_from_values(fields[0], list(rows))]
    names = ", ".join(name for name, _ in fields)
    picked: list[Sequence[Any]] = []
    for index, row in enumerate(rows):
        if isinstance(row, Mapping):
            missing = [name for name, _ in fields if name not in row]
            if missing:
                raise refused(f"key {index} has no value for {', '.join(missing)}; a key is: {names}", index)
            picked.append([row[name] for name, _ in fields])
        elif isinstance(row, tuple | list):
            if len(row) != len(fields):
                raise refused(
                    f"key {index} has {len(row)} values instead of {len(fields)}; a key is: {names}", index
                )
            picked.append(row)
        elif len(fields) == 1:
            picked.append((row,))
        else:
            raise refused(
                f"key {index} is the single value {show(row)}; give a tuple or a mapping of: {names}", index
            )
    return [column_from_values(field, [row[index] for row in picked]) for index, field in enumerate(fields)]


def columns_from_arrow(table: Any, fields: Sequence[KeyField]) -> list[pa.Array]:
    """The key columns of a table or record batch, which may have other columns too."""
    columns = []
    for name, data_type in fields:
        indices = table.schema.get_all_field_indices(name)
        if len(indices) != 1:
            found = "no column" if not indices else f"{len(indices)} columns"
            raise refused(f"the given keys have {found} {name!r}; they have: {', '.join(table.schema.names)}")
        columns.append(column_from_array((name, data_type), table.column(indices[0])))
    return columns


def column_from_values(field: KeyField, values: list[Any]) -> pa.Array:
    """The column of these Python values; refuses those of another kind, out of range, or None."""
    name, data_type = field
    kind = _kind(data_type)
    odd = {each for each in set(map(type, values)) if not _is_python(each, kind)}
    if odd:
        index = next(index for index, value in enumerate(values) if type(value) in odd)
        raise _misfit(field, values[index], index)
    if kind is Kind.timestamp:
        _check_times(field, values)
    if kind is Kind.decimal:
        # Arrow lets an integer wrap around, but not a Decimal.
        values = [value if isinstance(value, Decimal) else Decimal(value) for value in values]
    convert = _converter(lambda start, stop: pa.array(values[start:stop], data_type))
    column = convert(0, len(values))
    if column is None:
        index = search_first(len(values), lambda start, stop: convert(start, stop) is not None)
        raise refused(f"key column {name!r}: {show(values[index])} does not fit {data_type}", index)
    return _within_range(field, column)


def column_from_array(field: KeyField, column: Any) -> pa.Array:
    """The column in the field's type; refuses values of another kind, lost digits and nulls."""
    name, data_type = field
    column = as_array(column)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not _is_castable(column.type, data_type):
        raise refused(f"the given column {name!r} is {column.type}; the key's is {data_type}")
    if column.type != data_type:
        convert = _converter(lambda start, stop: column[start:stop].cast(data_type))
        converted = convert(0, len(column))
        if converted is None:
            index = search_first(len(column), lambda start, stop: convert(start, stop) is not None)
            raise refused(f"key column {name!r}: {show(column[index])} does not fit {data_type}", index)
        column = converted
    return _within_range(field, column)


def as_array(column: Any) -> pa.Array:
    """One array out of what may be in several chunks."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def check_no_nulls(name: str, column: pa.Array) -> None:
    """Raise the error for a column with a null; it names the row."""
    if column.null_count:
        index = column.is_null().index(True).as_py()
        raise refused(f"key column {name!r} is null in row {index}; every row needs a whole key", index)


def refused(message: str, index: int | None = None) -> TableError:
    """The error for a key that cannot be used."""
    return TableError(TableCode.key_refused, message, index=index)


def show(value: Any) -> str:
    """A value as error messages quote it, cut to a bounded length."""
    text = repr(value[: 2 * _SHOWN_CHARACTERS] if isinstance(value, str | bytes) else value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _kind(data_type: pa.DataType) -> Kind:
    kind = kind_of(data_type)
    assert kind is not None, f"{data_type} is no type of a key"
    return kind


def _is_python(python: type, kind: Kind) -> bool:
    return issubclass(python, _PYTHON[kind]) and not issubclass(python, _REFUSED_PYTHON.get(kind, ()))


def _misfit(field: KeyField, value: Any, index: int) -> TableError:
    name, data_type = field
    if value is None:
        return refused(f"key column {name!r} is None in key {index}; every key needs all its values", index)
    wanted = _PYTHON[_kind(data_type)][0].__name__
    return refused(
        f"key column {name!r} is {data_type} and takes {wanted}, not {type(value).__name__} {show(value)}",
        index,
    )


def _check_times(field: KeyField, values: list[Any]) -> None:
    """Refuse what Arrow would change silently: a missing or needless time zone, and nanoseconds."""
    name, data_type = field
    for index, value in enumerate(values):
        if (value.tzinfo is None) is not (data_type.tz is None):
            wanted = "a time zone" if data_type.tz else "no time zone"
            raise refused(f"key column {name!r} is {data_type}: {show(value)} must have {wanted}", index)
        if getattr(value, "nanosecond", 0):
            raise refused(f"key column {name!r} has microseconds: {show(value)} does not fit", index)


def _is_castable(given: pa.DataType, wanted: pa.DataType) -> bool:
    types = pa.types
    match _kind(wanted):
        case Kind.integer:
            return bool(types.is_integer(given))
        case Kind.string:
            return bool(types.is_string(given) or types.is_large_string(given) or types.is_string_view(given))
        case Kind.binary:
            views = types.is_large_binary(given) or types.is_binary_view(given)
            return bool(types.is_binary(given) or views or types.is_fixed_size_binary(given))
        case Kind.date:
            return bool(types.is_date(given))
        case Kind.timestamp:
            return types.is_timestamp(given) and (given.tz is None) is (wanted.tz is None)
        case Kind.decimal:
            return bool(types.is_decimal(given))
    return bool(given == wanted)


def _converter(convert: Callable[[int, int], pa.Array]) -> Callable[[int, int], pa.Array | None]:
    def try_to(start: int, stop: int) -> pa.Array | None:
        try:
            return convert(start, stop)
        except _CONVERSION_ERRORS:
            return None

    return try_to


def _within_range(field: KeyField, column: pa.Array) -> pa.Array:
    name, data_type = field
    check_no_nulls(name, column)
    outside = find_out_of_range(column, _kind(data_type))
    if outside is not None:
        raise out_of_range(name, data_type, outside)
    return column


def out_of_range(name: str, data_type: pa.DataType, index: int) -> TableError:
    """The error for a value that has no spelling because it is out of range."""
    reason = {
        Kind.string: "is not UTF-8",
        Kind.decimal: f"has more than {getattr(data_type, 'precision', 0)} digits",
    }.get(_kind(data_type), "is outside of the years 0001 to 9999")
    return refused(f"key column {name!r} ({data_type}): the value of row {index} {reason}", index)
