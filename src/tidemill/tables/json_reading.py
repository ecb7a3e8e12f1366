"""JSON values into Arrow columns; how values are spelt is said in ``tidemill.tables.formats``.

- msgspec reads every value into objects of classes made for the schema; it checks fields, types and ranges.
  Text that stands for something else (times, decimals) stays text and is converted by Arrow, column by
  column.
- msgspec takes the last of two fields of one name. So the fields that were read are counted, and so are the
  colons behind what may be a name. A name's colon follows a quote or white space, so that there are never
  fewer of those than fields; when there are as many, no field was there twice. When there are more, rows are
  looked at one by one.
- Memory for fields that are not in the text is bounded before it is taken.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from tidemill.errors import TableCode, TableError
from tidemill.tables.json_scalars import scalar_reader
from tidemill.tables.nested import Room, make_array, running, spread
from tidemill.tables.refusals import Refusal, first_refusal, indexed_by, refused_row
from tidemill.tables.row_layout import Column, Layout

__all__ = ("JsonReader",)

_POINTER_BYTES = 8
_TEXT_BYTES_MAX = 2**31 - 1
#: What may stand in front of the colon behind a field's name.
_BEFORE_COLON = np.zeros(256, bool)
_BEFORE_COLON[list(b'" \t\r\n')] = True


class JsonReader:
    """Reads rows of one schema, in any number of threads."""

    def __init__(self, schema: pa.Schema) -> None:
        _check_names(schema)
        self._schema = schema
        self._count = _Count()
        self._root = _Objects(Layout(list(schema)), self._count)
        self._decoder = msgspec.json.Decoder(self._root.kind)

    def read(self, data: Any, starts: np.ndarray, ends: np.ndarray) -> pa.RecordBatch:
        """The rows ``data[starts[i]:ends[i]]``. Raises ``TableError`` for the first that is none."""

        def part(first: int, behind: int) -> list[pa.Array]:
            return self._read(octets, starts[first:behind], ends[first:behind])

        octets = memoryview(data).cast("B") if not isinstance(data, pa.Buffer) else memoryview(data)
        self._check_room(octets, starts, ends)
        try:
            arrays = part(0, len(starts))
        except Refusal as refusal:
            raise refused_row(first_refusal(part, refusal)) from None
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _read(self, octets: memoryview, starts: np.ndarray, ends: np.ndarray) -> list[pa.Array]:
        self._count.reset()
        bounds = list(zip(starts.tolist(), ends.tolist(), strict=True))
        arrays = self._root.columns(self._objects(octets, bounds))
        names = _possible_names(octets, starts, ends)
        if names.sum() != self._count.fields:
            _check_twice(octets, bounds, arrays, names)
        return arrays

    def _objects(self, octets: memoryview, bounds: list[tuple[int, int]]) -> list[Any]:
        objects: list[Any] = []
        # One at a time: many slices that live at once keep the garbage collector busy.
        values = (octets[start:end] for start, end in bounds)
        try:
            # Not a comprehension: how many there are when one is refused is its index.
            objects.extend(map(self._decoder.decode, values))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refusal(len(objects), "", f"is not as the table has it: {error}") from None
        return objects

    def _check_room(self, octets: memoryview, starts: np.ndarray, ends: np.ndarray) -> None:
        size = int((ends - starts).sum())
        if size > _TEXT_BYTES_MAX:
            raise TableError(TableCode.row_refused, f"{size} bytes of rows are too many: write fewer at once")
        room = Room()
        room.take(len(starts) * len(self._schema) * _POINTER_BYTES, "")
        widest = self._root.widest_inside
        if widest and len(starts):
            text = np.frombuffer(octets, np.uint8)[starts[0] : ends[-1]]
            room.take(int(np.count_nonzero(text == ord("{"))) * widest * _POINTER_BYTES, "")


class _Count(threading.local):
    """What one call has read. msgspec calls back without saying for whom, so each thread has its own."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.fields = 0
        self.room = Room()

    def absent(self) -> None:
        """Called by msgspec for a field that is not there; what it returns is the field's value."""
        self.fields -= 1

    def absent_text(self) -> msgspec.Raw:
        self.fields -= 1
        return msgspec.Raw(b"null")


class _Objects:
    """Objects with the fields of a layout. ``kind`` is the class that msgspec makes of each."""

    def __init__(self, layout: Layout, count: _Count) -> None:
        self._count = count
        self._readers = [_reader(column, count) for column in layout.columns]
        self._getters = [attrgetter(f"f{number}") for number in range(len(layout.columns))]
        self.widest_inside = max(reader.widest for reader in self._readers)
        fields = [
            _member(number, column, reader.kind, count)
            for number, (column, reader) in enumerate(zip(layout.columns, self._readers, strict=True))
        ]
        self.kind: Any = msgspec.defstruct(
            "Row",
            fields,
            rename={f"f{number}": column.field.name for number, column in enumerate(layout.columns)},
            forbid_unknown_fields=True,
            gc=False,
            kw_only=True,
        )

    def columns(self, objects: list[Any]) -> list[pa.Array]:
        self._count.fields += len(objects) * len(self._readers)
        return [
            reader.read(list(map(getter, objects)))
            for reader, getter in zip(self._readers, self._getters, strict=True)
        ]


def _member(number: int, column: Column, kind: Any, count: _Count) -> tuple[str, Any, Any]:
    name = f"f{number}"
    if not column.field.nullable:
        return name, kind, msgspec.NODEFAULT
    if kind is msgspec.Raw:
        return name, kind, msgspec.field(default_factory=count.absent_text)
    return name, kind | None, msgspec.field(default_factory=count.absent)


def _reader(column: Column, count: _Count) -> Any:
    if column.layout is not None:
        return _Structs(column, count)
    if column.element is None:
        return scalar_reader(column)
    if not arrow.is_map(column.type):
        return _Lists(column, count)
    return _Maps(column, count)


class _Structs:
    def __init__(self, column: Column, count: _Count) -> None:
        assert column.layout is not None
        self._column = column
        self._count = count
        self._objects = _Objects(column.layout, count)
        self.kind = self._objects.kind
        self.widest = max(len(column.layout.columns), self._objects.widest_inside)

    def read(self, values: list[Any]) -> pa.Array:
        nulls = _nulls(values)
        if nulls is None:
            return make_array(self._column.type, len(values), None, [], self._objects.columns(values))
        self._count.room.take(len(values) * self._column.spread_bytes, self._column.path)
        with indexed_by(np.flatnonzero(~nulls).__getitem__):
            fields = self._objects.columns([value for value in values if value is not None])
        children = spread(list(self._column.type), fields, nulls)
        return make_array(self._column.type, len(values), nulls, [], children)


class _Lists:
    def __init__(self, column: Column, count: _Count) -> None:
        assert column.element is not None
        self._column = column
        self._element = _reader(column.element, count)
        self.kind = list[_or_null(column.element, self._element.kind)]  # type: ignore[misc]
        self.widest = self._element.widest

    def read(self, values: list[Any]) -> pa.Array:
        offsets = _offsets(values)
        with _elements(offsets):
            elements = self._element.read(list(_flat(values)))
        return _lists(self._column.type, values, offsets, elements)


class _Maps:
    """Maps: objects where the keys are text, else arrays of pairs."""

    def __init__(self, column: Column, count: _Count) -> None:
        assert column.element is not None
        assert column.element.layout is not None
        self._column = column
        self._count = count
        key, value = column.element.layout.columns
        self._key, self._value = _reader(key, count), _reader(value, count)
        self._as_objects = arrow.is_string(key.type)
        item = _or_null(value, self._value.kind)
        pair = tuple[self._key.kind, item]  # type: ignore[name-defined, valid-type]
        self.kind = dict[str, item] if self._as_objects else list[pair]  # type: ignore[valid-type]
        self.widest = max(self._key.widest, self._value.widest)

    def read(self, values: list[Any]) -> pa.Array:
        offsets = _offsets(values)
        if self._as_objects:
            keys = list(_flat(values))
            items = list(_flat(value.values() for value in values if value is not None))
            self._count.fields += len(keys)
        else:
            pairs = list(_flat(values))
            keys, items = [key for key, _ in pairs], [item for _, item in pairs]
        with _elements(offsets):
            fields = [self._key.read(keys), self._value.read(items)]
        entries = make_array(self._column.type.field(0).type, len(keys), None, [], fields)
        return _lists(self._column.type, values, offsets, entries)


def _or_null(column: Column, kind: Any) -> Any:
    return kind | None if column.field.nullable and kind is not msgspec.Raw else kind


def _nulls(values: list[Any]) -> np.ndarray | None:
    nulls = np.fromiter((value is None for value in values), bool, len(values))
    return nulls if nulls.any() else None


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    return chain.from_iterable(value for value in values if value is not None)


def _offsets(values: list[Any]) -> np.ndarray:
    lengths = (0 if value is None else len(value) for value in values)
    return running(np.fromiter(lengths, np.int64, len(values)))


def _elements(offsets: np.ndarray) -> Any:
    return indexed_by(lambda index: np.searchsorted(offsets, index, "right") - 1)


def _lists(kind: pa.DataType, values: list[Any], offsets: np.ndarray, elements: pa.Array) -> pa.Array:
    buffer = pa.py_buffer(offsets.astype(np.int32))
    return make_array(kind, len(values), _nulls(values), [buffer], [elements])


def _possible_names(octets: memoryview, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """How many colons of each row may be those behind a field's name."""
    text = np.frombuffer(octets, np.uint8)
    colons = np.flatnonzero(text[1:] == ord(":"))
    names = colons[_BEFORE_COLON[text[colons]]] + 1
    counts: np.ndarray = np.searchsorted(names, ends) - np.searchsorted(names, starts)
    return counts


def _check_twice(
    octets: memoryview, bounds: list[tuple[int, int]], arrays: list[pa.Array], names: np.ndarray
) -> None:
    """Refuse the first row in which a field is there twice. Rows that cannot have one are not looked at."""
    flat = not any(arrow.is_nested(array.type) for array in arrays)
    valued = sum(array.is_valid().to_numpy(zero_copy_only=False).astype(np.int64) for array in arrays)
    for index in np.flatnonzero(names != valued) if flat else range(len(bounds)):
        start, end = bounds[index]
        # Numbers stay text: Python would refuse very long ones.
        try:
            json.loads(bytes(octets[start:end]), object_pairs_hook=_once, parse_int=str, parse_float=str)
        except _Twice as twice:
            raise Refusal(int(index), "", f"has field {str(twice)!r} twice: leave one out") from None
        except (ValueError, RecursionError) as error:
            # msgspec does not look into texts that it passes over.
            raise Refusal(int(index), "", f"is not as the table has it: {error}") from None


class _Twice(Exception):
    """A field that is there twice, by name."""


def _once(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise _Twice(name)
        seen.add(name)


def _check_names(schema: pa.Schema) -> None:
    fields = list(schema)
    while fields:
        field = fields.pop()
        if '"' in field.name or "\\" in field.name:
            raise TableError(
                TableCode.invalid_schema,
                f"column {field.name!r} has a quote or a backslash in its name, which a table of JSON rows "
                "cannot have: rename it, or use another row format",
            )
        fields += [field.type.field(number) for number in range(field.type.num_fields)]
