"""Conforming rows that users give to a table's schema.

- Columns are found by name, in any order. A missing nullable column becomes null; an unknown column is
  refused, for dropping it would lose what somebody wrote.
- A value is cast only where it stays what it is: to a wider type, or to a narrower one that it happens to
  fit. Nothing is turned from text into a number, or from local time into an instant, or back.
- Arrow data of users is validated before anything looks at it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from tidemill.errors import TableCode, TableError
from tidemill.records.columns import compute as pc
from tidemill.tables.rows.ddl import describe_type
from tidemill.tables.rows.nested import list_parts, make_array, null_mask, nulls_of, spread
from tidemill.tables.rows.refusals import Refusal, first_failing, indexed_by, refuse_where, refused_row

__all__ = ("conform",)

_VALUE_CHARACTERS_MAX = 60


def conform(data: pa.Table | pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    """``data`` with exactly the columns of ``schema``, which is as ``normalise_schema`` returns it.

    >>> schema = pa.schema([pa.field("id", pa.int32(), nullable=False), pa.field("name", pa.string())])
    >>> conform(pa.table({"id": [1, 2]}), schema).to_pylist()
    [{'id': 1, 'name': None}, {'id': 2, 'name': None}]
    """
    try:
        data.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowIndexError) as error:
        raise TableError(TableCode.row_refused, f"the rows are not valid Arrow data: {error}") from None
    _check_names(data.schema.names, schema)
    columns = [_column(data, field) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(data: pa.Table | pa.RecordBatch, field: pa.Field) -> pa.ChunkedArray:
    if field.name not in data.schema.names:
        return pa.chunked_array([nulls_of(data.num_rows, field.type)])
    given = data.column(field.name)
    chunks = given.chunks if isinstance(given, pa.ChunkedArray) else [given]
    done: list[pa.Array] = []
    before = 0
    for chunk in chunks:
        try:
            done.append(_array(chunk, field, field.name))
        except Refusal as refusal:
            refusal.index += before
            error = refused_row(refusal)
            raise TableError(
                error.table_code, f"row {error.index}: {error.message}", index=error.index
            ) from None
        before += len(chunk)
    return pa.chunked_array(done, field.type)


def _check_names(given: list[str], schema: pa.Schema, inside: str = "") -> None:
    where = f"in column {inside!r} " if inside else ""
    kind = "field" if inside else "column"
    known = {field.name: field for field in schema}
    for number, name in enumerate(given):
        if name in given[:number]:
            _refuse(f"{where}there are two {kind}s {name!r}: leave one out")
        if name not in known:
            near = [other for other in known if other.lower() == name.lower()]
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            _refuse(f"{where}there is a {kind} {name!r}, which the table does not have: {hint}")
    for name, field in known.items():
        if name not in given and not field.nullable:
            _refuse(f"{where}{kind} {name!r} is missing, and it is not nullable: give it")


def _refuse(message: str) -> NoReturn:
    raise TableError(TableCode.row_refused, message)


def _array(array: pa.Array, field: pa.Field, path: str) -> pa.Array:
    """The values in the field's type. Raises ``Refusal`` for the first one that does not fit."""
    array = _plain(array)
    if arrow.is_null(array.type):
        array = nulls_of(len(array), field.type)
    nulls = null_mask(array)
    if nulls is not None and not field.nullable:
        refuse_where(nulls, path, "is null, and the column is not nullable")
    if array.type == field.type and _all_nullable(field.type):
        return array
    if arrow.is_map(field.type) and arrow.is_map(array.type):
        return _map(array, field.type, path)
    if arrow.is_list(field.type) and _is_list(array.type):
        return _list(array, field.type, path)
    if arrow.is_struct(field.type) and arrow.is_struct(array.type):
        return _struct(array, field.type, path)
    return _cast(array, field.type, path)


def _plain(array: pa.Array) -> pa.Array:
    """Values of an array without dictionary, run ends or extension type."""
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif isinstance(array, pa.DictionaryArray):
            array = array.dictionary_decode()
        elif isinstance(array, pa.RunEndEncodedArray):
            array = pc.run_end_decode(array)
        else:
            return array


def _all_nullable(data_type: pa.DataType) -> bool:
    """Whether a null is allowed everywhere inside; Arrow checks the keys and entries of maps."""
    if arrow.is_map(data_type):
        return (
            data_type.item_field.nullable
            and _all_nullable(data_type.key_type)
            and _all_nullable(data_type.item_type)
        )
    fields = [data_type.field(number) for number in range(data_type.num_fields)]
    return all(field.nullable and _all_nullable(field.type) for field in fields)


def _is_list(data_type: pa.DataType) -> bool:
    return bool(
        arrow.is_list(data_type)
        or arrow.is_large_list(data_type)
        or arrow.is_fixed_size_list(data_type)
        or arrow.is_list_view(data_type)
        or arrow.is_large_list_view(data_type)
    )


def _list(array: pa.Array, target: pa.DataType, path: str) -> pa.Array:
    offsets, elements = list_parts(array)
    with indexed_by(lambda index: np.searchsorted(offsets, index, "right") - 1):
        elements = _array(elements, target.value_field, path + ".element")
    return _from_lists(array, target, offsets, elements)


def _map(array: pa.MapArray, target: pa.DataType, path: str) -> pa.Array:
    offsets, entries = list_parts(array)
    keys, items = entries.flatten()
    with indexed_by(lambda index: np.searchsorted(offsets, index, "right") - 1):
        fields = [
            _array(keys, target.key_field, path + ".key"),
            _array(items, target.item_field, path + ".value"),
        ]
    entries = make_array(target.field(0).type, len(keys), None, [], fields)
    return _from_lists(array, target, offsets, entries)


def _from_lists(array: pa.Array, target: pa.DataType, offsets: np.ndarray, values: pa.Array) -> pa.Array:
    if offsets[-1] > np.iinfo(np.int32).max:
        _refuse(f"lists have {offsets[-1]} elements together: write fewer rows at once")
    buffer = pa.py_buffer(offsets.astype(np.int32))
    return make_array(target, len(array), null_mask(array), [buffer], [values])


def _struct(array: pa.StructArray, target: pa.DataType, path: str) -> pa.Array:
    names = [field.name for field in array.type]
    _check_names(names, pa.schema(list(target)), path)
    nulls = null_mask(array)
    given = array if nulls is None else array.drop_null()
    fields = given.flatten()
    children = []
    with indexed_by(lambda index: index if nulls is None else np.flatnonzero(~nulls)[index]):
        for field in target:
            if field.name in names:
                child = _array(fields[names.index(field.name)], field, f"{path}.{field.name}")
            else:
                child = nulls_of(len(given), field.type)
            children.append(child)
    if nulls is not None:
        children = spread(list(target), children, nulls)
    return make_array(target, len(array), nulls, [], children)


def _cast(array: pa.Array, target: pa.DataType, path: str) -> pa.Array:
    """Cast values to another type of the same kind, where each keeps its meaning."""
    attempt = _casting(array.type, target)
    if attempt is None:
        _refuse(
            f"column {path!r} has type {array.type}, and the table has {describe_type(target)}: "
            "cast it before you write"
        )
    try:
        return attempt(array)
    except pa.ArrowInvalid:
        index = first_failing(array, attempt)
    # As Arrow writes it: Python cannot express some values, such as a time in the year 40000.
    value = array[index : index + 1].to_string().strip("[ \n]")[:_VALUE_CHARACTERS_MAX]
    raise Refusal(
        index, path, f"is {value} ({array.type}), which {describe_type(target)} cannot hold exactly"
    )


def _casting(source: pa.DataType, target: pa.DataType) -> Callable[[pa.Array], pa.Array] | None:
    """The cast from ``source``, which raises ``ArrowInvalid`` on loss; None if there must be none."""
    if arrow.is_integer(source) and arrow.is_decimal(target):
        # Arrow refuses a decimal that cannot hold every integer of the type, though these values may fit.
        wide = pa.decimal256(20 + target.scale, target.scale)
        return lambda array: array.cast(wide).cast(target)
    if arrow.is_floating(source) and arrow.is_floating(target) and source.bit_width > target.bit_width:
        return lambda array: _narrowed(array, target)
    same_kind = (
        (arrow.is_integer(source) and (arrow.is_integer(target) or arrow.is_floating(target)))
        or (arrow.is_floating(source) and arrow.is_floating(target))
        or (arrow.is_decimal(source) and arrow.is_decimal(target))
        or (_is_text(source) and arrow.is_string(target))
        or (_is_binary(source) and arrow.is_binary(target))
        or (arrow.is_date(source) and arrow.is_date(target))
        or (arrow.is_time(source) and arrow.is_time(target))
        or (arrow.is_duration(source) and arrow.is_duration(target))
        or (
            arrow.is_timestamp(source)
            and arrow.is_timestamp(target)
            and (source.tz is None) == (target.tz is None)
        )
        or source == target
    )
    return (lambda array: array.cast(target)) if same_kind else None


def _narrowed(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Floating-point numbers in fewer bits. Unlike Arrow's cast, this refuses to round."""
    cast = array.cast(target)
    back = cast.cast(array.type)
    exact = pc.or_(pc.equal(back, array), pc.is_nan(array))
    if not pc.all(exact, min_count=0).as_py():
        raise pa.ArrowInvalid("rounded")
    return cast


def _is_text(data_type: pa.DataType) -> bool:
    return bool(
        arrow.is_string(data_type) or arrow.is_large_string(data_type) or arrow.is_string_view(data_type)
    )


def _is_binary(data_type: pa.DataType) -> bool:
    return bool(
        arrow.is_binary(data_type)
        or arrow.is_large_binary(data_type)
        or arrow.is_binary_view(data_type)
        or arrow.is_fixed_size_binary(data_type)
    )
