"""Rows as JSON. Input is an array of objects, or one object per line; output is one object per line.

Values are spelt as in tables of the row format ``json``, whose code does the work. What is read is cut into
objects here, a part of the input at a time; a single row is bounded.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.errors import TableCode, TableError
from tidemill.tables.keys.ragged import spans
from tidemill.tables.rows.formats import make_format

__all__ = ("cut_objects", "json_column", "json_objects", "json_rows")

_CHUNK_BYTES: Final = 1024 * 1024
_ROW_BYTES_MAX: Final = 16 * 1024 * 1024
_SPACE: Final = b" \t\r\n"
_GAP = re.compile(r"[ \t\r\n]*")
_NEWLINE, _RETURN = 10, 13


class Source(Protocol):
    """Bytes that are read once, from the front."""

    def read(self, size: int) -> bytes:
        """Read at most ``size`` bytes; none at the end."""


def json_rows(source: Source, schema: pa.Schema, *, only: bool = False) -> Iterator[pa.RecordBatch]:
    """The rows of JSON input in ``schema``; with ``only``, fields that are not in it are left out.

    Raises ``TableError`` whose index counts from the first row of the batch that would have come next.
    """
    row_format = _format(schema)
    for objects in cut_objects(source):
        if only:
            objects = _picked(objects, schema.names)
        data, offsets = spans(objects)
        positions = offsets.astype(np.int64)
        yield row_format.to_batch(data, positions[:-1], positions[1:])


def json_objects(batch: pa.RecordBatch) -> pa.BinaryArray:
    """The rows of a batch as JSON objects."""
    return _format(batch.schema).from_batch(batch)


def json_column(cells: pa.Array, field: pa.Field) -> pa.Array:
    """Texts of JSON values as a column; null stays null. Raises ``TableError`` with the index of the text."""
    schema = pa.schema([pa.field(field.name, field.type)])
    name = json.dumps(field.name, ensure_ascii=False).encode()
    texts = pc.fill_null(cells.cast(pa.binary()), b"null")
    rows = pc.binary_join_element_wise(b"{" + name + b":", texts, b"}", b"")
    data, offsets = spans(rows)
    positions = offsets.astype(np.int64)
    return _format(schema).to_batch(data, positions[:-1], positions[1:]).column(0)


def cut_objects(source: Source) -> Iterator[pa.BinaryArray]:
    """Cut JSON input into objects, as bytes, some at a time."""
    first = b""
    while len(first) < len(codecs.BOM_UTF8) and (part := source.read(_CHUNK_BYTES)):
        first += part
    first = first.removeprefix(codecs.BOM_UTF8).lstrip(_SPACE)
    while not first and (part := source.read(_CHUNK_BYTES)):
        first = part.lstrip(_SPACE)
    if first.startswith(b"["):
        yield from _array_elements(first[1:], source)
    else:
        yield from _lines(first, source)


def _format(schema: pa.Schema) -> Any:
    return make_format("json", {0: schema}, 0, ())


# -- one object per line ---------------------------------------------------------------------------------


def _lines(data: bytes, source: Source) -> Iterator[pa.BinaryArray]:
    chunk = data
    while chunk:
        end = data.rfind(b"\n") + 1
        if end:
            yield from _non_empty(data[:end])
            data = data[end:]
        elif len(data) > _ROW_BYTES_MAX:
            _refuse(f"is longer than {_ROW_BYTES_MAX} bytes: is this one object per line?", 0)
        chunk = source.read(_CHUNK_BYTES)
        data += chunk
    if data:
        yield from _non_empty(data + b"\n")


def _non_empty(data: bytes) -> Iterator[pa.BinaryArray]:
    """Give the lines as one array, unless all are empty."""
    characters = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(characters == _NEWLINE)
    starts = np.concatenate([[0], ends[:-1] + 1])
    # The array shares the bytes, so a line keeps its end: JSON ends before it.
    offsets = np.concatenate([starts, [len(data)]]).astype(np.int32)
    empty = (ends == starts) | ((ends == starts + 1) & (characters[starts] == _RETURN))
    lines = pa.Array.from_buffers(pa.binary(), len(starts), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    if empty.any():
        lines = lines.filter(pa.array(~empty))
    if len(lines):
        yield lines


# -- an array of objects ---------------------------------------------------------------------------------


def _array_elements(data: bytes, source: Source) -> Iterator[pa.BinaryArray]:
    cutter = _ArrayCutter()
    is_last = False
    while not is_last:
        found = cutter.feed(data, is_last=is_last)
        if found:
            yield pa.array(found, pa.binary())
        data = source.read(_CHUNK_BYTES)
        is_last = not data
    cutter.feed(b"", is_last=True)


class _ArrayCutter:
    """Cuts the content of a JSON array into objects."""

    def __init__(self) -> None:
        self.is_done = False
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._text = ""
        self._is_first = True
        self._wants_object = True

    def feed(self, data: bytes, *, is_last: bool) -> list[bytes]:
        """Take more input; gives the objects that are complete now."""
        found: list[bytes] = []
        try:
            self._text += self._decoder.decode(data, is_last)
        except UnicodeDecodeError:
            _refuse("is not UTF-8", 0)
        position = 0
        while (behind := self._step(position, len(found), is_last=is_last)) is not None:
            if self._text[position : position + 1] == "{":
                found.append(self._text[position:behind].encode())
            position = behind
        self._text = self._text[position:]
        return found

    def _step(self, position: int, index: int, *, is_last: bool) -> int | None:
        """The position behind the gap, mark or object that begins here; None if it needs more input."""
        text = self._text
        gap = _GAP.match(text, position)
        assert gap is not None, "the pattern matches nothing as well"
        if gap.end() > position:
            return gap.end()
        mark = text[position : position + 1]
        if not mark:
            if is_last and not self.is_done:
                _refuse("is missing: the input ends before the array's ']'", index)
            return None
        if self.is_done:
            _refuse("is behind the array's ']': a file has one array, or one object per line", index)
        if mark == "]" and (self._is_first or not self._wants_object):
            self.is_done = True
            return position + 1
        if not self._wants_object:
            if mark != ",":
                _refuse(f"has no comma before it, but {mark!r}", index)
            self._wants_object = True
            return position + 1
        if mark != "{":
            _refuse(f"is not an object: it begins with {mark!r}", index)
        return self._object(position, index, is_last=is_last)

    def _object(self, position: int, index: int, *, is_last: bool) -> int | None:
        try:
            _, behind = self._json.raw_decode(self._text, position)
        except RecursionError:
            _refuse("is nested too deeply", index)
        except json.JSONDecodeError as error:
            # An object that is cut off looks like a wrong one; only the end of the input, or its size, tells.
            if is_last or len(self._text) - position > _ROW_BYTES_MAX:
                _refuse(f"is not JSON: {error.msg}", index)
            return None
        self._is_first = self._wants_object = False
        return behind


# -- parts -----------------------------------------------------------------------------------------------


def _picked(objects: pa.BinaryArray, names: Sequence[str]) -> pa.BinaryArray:
    decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
    wanted, picked = frozenset(names), []
    for index, text in enumerate(objects.to_pylist()):
        try:
            fields = decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            _refuse(f"is not a JSON object: {error}", index)
        picked.append(msgspec.json.encode({name: fields[name] for name in fields if name in wanted}))
    return pa.array(picked, pa.binary())


def _refuse(message: str, index: int) -> NoReturn:
    raise TableError(TableCode.row_refused, f"row {index} {message}", index=index)
