"""Writers of rows, a batch at a time: to the screen, or as CSV, JSON lines or Parquet.

CSV and JSON are written as ``row_files.py`` reads them, so what was exported can be imported again.
"""

from __future__ import annotations

import base64
import json
import os
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from datetime import time as time_of_day
from pathlib import Path
from typing import IO, Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from pyarrow import types as arrow

from tidemill.cli.output import Table
from tidemill.cli.tables.json_rows import json_objects
from tidemill.cli.tables.session import FileFormat

__all__ = (
    "RowWriter",
    "open_target",
    "rows_as_table",
    "writer_to",
)

_ROW_GROUP_ROWS: Final = 1024 * 1024
_ROW_GROUP_BYTES: Final = 64 * 1024 * 1024


class RowWriter(Protocol):
    """Writes batches. All of them are written when it is closed."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Write these rows."""

    def close(self) -> None:
        """Write what is buffered."""


def writer_to(target: IO[bytes], kind: FileFormat, schema: pa.Schema) -> RowWriter:
    """A writer of rows in ``schema`` to an open file."""
    if kind is FileFormat.CSV:
        return _CsvWriter(target, schema)
    if kind is FileFormat.JSON:
        return _JsonWriter(target)
    return _ParquetWriter(target, schema)


@contextmanager
def open_target(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name only when it is complete, so that no half file is taken for one."""
    if path.exists() and not path.is_file():
        # A pipe or a device cannot be replaced by a finished file.
        with path.open("wb") as target:
            yield target
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as target:
            yield target
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def rows_as_table(rows: pa.Table | pa.RecordBatch, title: str = "") -> Table:
    """Rows as a table for people."""
    cells = [[_cell(value) for value in row.values()] for row in rows.to_pylist()]
    return Table(rows.schema.names, cells, title=title)


class _JsonWriter:
    def __init__(self, target: IO[bytes]) -> None:
        self._target = target

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._target.write(b"\n".join(json_objects(batch).to_pylist()) + b"\n")

    def close(self) -> None:
        self._target.flush()


class _CsvWriter:
    def __init__(self, target: IO[bytes], schema: pa.Schema) -> None:
        self._special = [index for index, field in enumerate(schema) if _cell_type(field.type) != field.type]
        self._schema = pa.schema([pa.field(field.name, _cell_type(field.type)) for field in schema])
        self._writer = pa.csv.CSVWriter(target, self._schema)

    def write(self, batch: pa.RecordBatch) -> None:
        columns = list(batch.columns)
        for index in self._special:
            columns[index] = _to_cells(columns[index], batch.schema.field(index))
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


class _ParquetWriter:
    """A writer of Parquet that collects batches until they make a row group of a good size."""

    def __init__(self, target: IO[bytes], schema: pa.Schema) -> None:
        self._writer = pa.parquet.ParquetWriter(target, schema)
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= _ROW_GROUP_ROWS or self._bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_batches(self._waiting, self._schema))
        self._waiting, self._rows, self._bytes = [], 0, 0

    def close(self) -> None:
        self._flush()
        self._writer.close()


def _cell_type(data_type: pa.DataType) -> pa.DataType:
    """The type in which Arrow writes cells of a column."""
    if arrow.is_nested(data_type) or arrow.is_binary(data_type):
        return pa.string()
    return pa.int64() if arrow.is_duration(data_type) else data_type


def _to_cells(column: pa.Array, field: pa.Field) -> pa.Array:
    if arrow.is_duration(field.type):
        return column.cast(pa.int64())
    if arrow.is_binary(field.type):
        encoded = [
            None if value is None else base64.b64encode(value).decode() for value in column.to_pylist()
        ]
        return pa.array(encoded, pa.string())
    name = json.dumps(field.name, ensure_ascii=False).encode()
    objects = json_objects(pa.RecordBatch.from_arrays([column], schema=pa.schema([field])))
    texts = pc.binary_slice(objects, len(name) + 2, -1).cast(pa.string())
    return pc.if_else(column.is_valid(), texts, pa.scalar(None, pa.string()))


def _cell(value: Any) -> object:
    """A value as the text of a table's cell."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    return "".join(
        character.encode("unicode_escape").decode() if unicodedata.category(character) == "Cc" else character
        for character in _text(value)
    )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime | date | time_of_day):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, default=_text)
    return str(value)
