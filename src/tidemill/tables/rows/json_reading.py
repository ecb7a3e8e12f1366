"""Reading of JSON values into Arrow columns. ``tidemill.tables.rows.formats`` says how values are spelt.

- msgspec reads every value into objects of classes made for the schema; it checks fields, types and ranges.
  Text that stands for something else (times, decimals) stays text and is converted by Arrow, column by
  column.
- msgspec takes the last of two fields of one name. So the fields that were read are counted, and so are the
  colons behind what may be a name. A name's colon follows a quote or white space, so that there are never
  fewer of those than fields; when there are as many, no field was there twice. When there are more, rows are
  looked at one by one.
- Memory for fields that are not in the text is bounded before it is taken.
- A reader of one type has ``kind``, what msgspec is told to expect, and ``read``, which makes an array of
  values of that kind, None where null. Where the kind is wider than the type, ``read`` refuses the rest.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from tidemill.errors import TableCode, TableError
from tidemill.records.columns import compute as pc
from tidemill.tables.rows.layout import Column, Layout
from tidemill.tables.rows.nested import SpreadBudget, make_array, running, spread
from tidemill.tables.rows.refusals import (
    Refusal,
    first_failing,
    first_refusal,
    indexed_by,
    refuse_where,
    refused_row,
)

__all__ = ("NOT_NUMBERS", "JsonReader", "scalar_reader")

#: The floating-point numbers that JSON does not have, and their spelling as text.
NOT_NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_SHOWN_CHARACTERS_MAX = 60
_DATE = r"\d{4}-\d{2}-\d{2}"
_TIME = r"\d{2}:\d{2}:\d{2}"
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?"


@dataclass(frozen=True, slots=True)
class _Scalar:
    kind: Any
    read: Callable[[list[Any]], pa.Array]
    widest: int = 0
    """The most fields of an object inside: a scalar has none."""


def scalar_reader(column: Column) -> _Scalar:
    """The reader of a column that is not a list, map or struct."""
    data_type, path = column.type, column.path
    if arrow.is_boolean(data_type):
        return _Scalar(bool, lambda values: pa.array(values, data_type))
    if arrow.is_string(data_type):
        return _Scalar(str, lambda values: pa.array(values, data_type))
    if arrow.is_binary(data_type):
        return _Scalar(bytes, lambda values: pa.array(values, data_type))
    if arrow.is_floating(data_type):
        return _Scalar(float | str, lambda values: _floats(values, data_type, path))
    if arrow.is_decimal(data_type):
        return _Scalar(msgspec.Raw, lambda values: _decimals(values, column))
    if arrow.is_integer(data_type) or arrow.is_duration(data_type):
        bound = 2 ** (data_type.bit_width - 1)
        whole = Annotated[int, msgspec.Meta(ge=-bound, le=bound - 1)]
        return _Scalar(whole, lambda values: pa.array(values, data_type))
    return _Scalar(str, _time_reader(data_type, path))


def _floats(values: list[Any], data_type: pa.DataType, path: str) -> pa.Array:
    try:
        wide = pa.array(values, pa.float64())
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        odd = [isinstance(value, str) and value not in NOT_NUMBERS for value in values]
        text = 'is text, and a number, "NaN", "Infinity" or "-Infinity" is expected'
        refuse_where(np.array(odd), path, text)
        wide = pa.array(
            [NOT_NUMBERS[value] if isinstance(value, str) else value for value in values], pa.float64()
        )
    if not arrow.is_float32(data_type):
        return wide
    narrow = wide.cast(pa.float32(), safe=False)
    beyond = pc.and_(pc.is_inf(narrow), pc.is_finite(wide)).fill_null(False)
    refuse_where(beyond.to_numpy(zero_copy_only=False), path, "is beyond the range of a float")
    return narrow


def _decimals(values: list[Any], column: Column) -> pa.Array:
    texts = pa.array([bytes(value) for value in values], pa.binary())
    data_type = column.type
    texts = pc.if_else(pc.equal(texts, b"null"), pa.scalar(None, pa.binary()), texts)
    if texts.null_count and not column.field.nullable:
        refuse_where(texts.is_null().to_numpy(zero_copy_only=False), column.path, "is null, and not nullable")
    expected = f'a decimal({data_type.precision},{data_type.scale}) such as "12.5"'
    _check_pattern(texts, rf'^(?:"{_NUMBER}"|{_NUMBER})\z', column.path, expected)
    numbers = pc.ascii_trim(texts.cast(pa.string()), '"')
    return _converted(numbers, lambda part: part.cast(data_type), column.path, expected)


def _time_reader(data_type: pa.DataType, path: str) -> Callable[[list[Any]], pa.Array]:
    """Reader of dates, times of day and timestamps: texts of one exact form, which Arrow parses."""
    pattern, example = _DATE, "a date such as 2024-05-31"
    if arrow.is_time(data_type):
        pattern, example = rf"{_TIME}(?:\.\d{{1,9}})?", "a time such as 12:30:00.25"
    elif arrow.is_timestamp(data_type):
        pattern = rf"{_DATE}T{_TIME}(?:\.\d{{1,6}})?"
        example = "a time without zone such as 2024-05-31T12:30:00.25"
        if data_type.tz is not None:
            pattern += r"(?:Z|[+-]\d{2}:\d{2})"
            example = "a time such as 2024-05-31T12:30:00.25Z"

    def convert(texts: pa.Array) -> pa.Array:
        if not arrow.is_time(data_type):
            return texts.cast(data_type)
        # Arrow parses no times of day, so they are parsed as times of the first day.
        whole = pc.binary_join_element_wise("1970-01-01T", texts, "")
        return whole.cast(pa.timestamp("ns")).cast(pa.int64()).cast(data_type)

    def read(values: list[Any]) -> pa.Array:
        texts = pa.array(values, pa.string())
        _check_pattern(texts, rf"^{pattern}\z", path, example)
        return _converted(texts, convert, path, example)

    return read


def _check_pattern(texts: pa.Array, pattern: str, path: str, expected: str) -> None:
    fits = pc.match_substring_regex(texts, pattern)
    if not pc.all(fits, min_count=0).as_py():
        index = int(fits.fill_null(True).to_numpy(zero_copy_only=False).argmin())
        raise _unexpected(texts, index, path, expected)


def _converted(
    texts: pa.Array, convert: Callable[[pa.Array], pa.Array], path: str, expected: str
) -> pa.Array:
    try:
        return convert(texts)
    except pa.ArrowInvalid:
        raise _unexpected(texts, first_failing(texts, convert), path, expected) from None


def _unexpected(texts: pa.Array, index: int, path: str, expected: str) -> Refusal:
    given = texts[index].as_py()
    shown = (given.decode(errors="replace") if isinstance(given, bytes) else given)[:_SHOWN_CHARACTERS_MAX]
    return Refusal(index, path, f"is {shown!r}, and {expected} is expected")


_POINTER_BYTES = 8
_TEXT_BYTES_MAX = 2**31 - 1
#: The bytes that may stand in front of the colon behind a field's name.
_BEFORE_COLON = np.zeros(256, bool)
_BEFORE_COLON[list(b'" \t\r\n')] = True


class JsonReader:
    """Reads rows of one schema. Threads may share it."""

    def __init__(self, schema: pa.Schema) -> None:
        _check_names(schema)
        self._schema = schema
        self._count = _Count()
        self._root = _Objects(Layout(list(schema)), self._count)
        self._decoder = msgspec.json.Decoder(self._root.kind)

    def read(self, data: Any, starts: np.ndarray, ends: np.ndarray) -> pa.RecordBatch:
        """Read the rows ``data[starts[i]:ends[i]]``. Raises ``TableError`` for the first that is none."""

        def part(first: int, behind: int) -> list[pa.Array]:
            return self._read(data, starts[first:behind], ends[first:behind])

        data = memoryview(data).cast("B") if not isinstance(data, pa.Buffer) else memoryview(data)
        self._check_size(data, starts, ends)
        try:
            arrays = part(0, len(starts))
        except Refusal as refusal:
            raise refused_row(first_refusal(part, refusal)) from None
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _read(self, data: memoryview, starts: np.ndarray, ends: np.ndarray) -> list[pa.Array]:
        self._count.reset()
        bounds = list(zip(starts.tolist(), ends.tolist(), strict=True))
        arrays = self._root.columns(self._objects(data, bounds))
        names = _possible_names(data, starts, ends)
        if names.sum() != self._count.fields:
            _check_twice(data, bounds, arrays, names)
        return arrays

    def _objects(self, data: memoryview, bounds: list[tuple[int, int]]) -> list[Any]:
        objects: list[Any] = []
        # One at a time, because many slices alive at once keep the garbage collector busy.
        values = (data[start:end] for start, end in bounds)
        try:
            # Not a comprehension: when a value is refused, the number of objects so far is its index.
            objects.extend(map(self._decoder.decode, values))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refusal(len(objects), "", f"is not as the table has it: {error}") from None
        return objects

    def _check_size(self, data: memoryview, starts: np.ndarray, ends: np.ndarray) -> None:
        size = int((ends - starts).sum())
        if size > _TEXT_BYTES_MAX:
            raise TableError(TableCode.row_refused, f"{size} bytes of rows are too many: write fewer at once")
        budget = SpreadBudget()
        budget.take(len(starts) * len(self._schema) * _POINTER_BYTES, "")
        widest = self._root.widest_inside
        if widest and len(starts):
            text = np.frombuffer(data, np.uint8)[starts[0] : ends[-1]]
            budget.take(int(np.count_nonzero(text == ord("{"))) * widest * _POINTER_BYTES, "")


class _Count(threading.local):
    """What one call has read, by thread: msgspec's callbacks do not say which call they belong to."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.fields = 0
        self.budget = SpreadBudget()

    def absent(self) -> None:
        """The value of a field that is not there. Called by msgspec."""
        self.fields -= 1

    def absent_text(self) -> msgspec.Raw:
        self.fields -= 1
        return msgspec.Raw(b"null")


class _Objects:
    """Reader of objects with the fields of a layout. ``kind`` is the class that msgspec makes of each."""

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
        self._count.budget.take(len(values) * self._column.spread_bytes, self._column.path)
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
    """Reader of maps: objects where the keys are text, else arrays of pairs."""

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


def _possible_names(data: memoryview, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The number of colons in each row that may follow a field's name."""
    text = np.frombuffer(data, np.uint8)
    colons = np.flatnonzero(text[1:] == ord(":"))
    names = colons[_BEFORE_COLON[text[colons]]] + 1
    counts: np.ndarray = np.searchsorted(names, ends) - np.searchsorted(names, starts)
    return counts


def _check_twice(
    data: memoryview, bounds: list[tuple[int, int]], arrays: list[pa.Array], names: np.ndarray
) -> None:
    """Refuse the first row in which a field occurs twice. Rows that cannot have one are not looked at."""
    flat = not any(arrow.is_nested(array.type) for array in arrays)
    valued = sum(array.is_valid().to_numpy(zero_copy_only=False).astype(np.int64) for array in arrays)
    for index in np.flatnonzero(names != valued) if flat else range(len(bounds)):
        start, end = bounds[index]
        # Numbers stay text, because Python refuses very long ones.
        try:
            json.loads(bytes(data[start:end]), object_pairs_hook=_once, parse_int=str, parse_float=str)
        except _Twice as twice:
            raise Refusal(int(index), "", f"has field {str(twice)!r} twice: leave one out") from None
        except (ValueError, RecursionError) as error:
            # msgspec does not check texts that it skips.
            raise Refusal(int(index), "", f"is not as the table has it: {error}") from None


class _Twice(Exception):
    """The error for a field that occurs twice, by name."""


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
