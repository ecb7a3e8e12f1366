"""Reading rows of CSV, Parquet and JSON files, in types near to a table's, a piece at a time.

- Memory is bounded: a file is never read whole, whatever its size.
- CSV has a header that names columns. An empty cell is null, ``""`` is the empty text. Cells of binary
  columns are base64, of lists, maps and structs JSON, of durations microseconds.
- JSON is an array of objects, or one object per line; see ``json_rows.py``.
- An error names the file, and the row counted from 1, the header left out.
"""

from __future__ import annotations

import base64
import binascii
import csv
import io
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from pyarrow import types as arrow

from tidemill.cli.tables.byte_input import STDIN, Input
from tidemill.cli.tables.json_rows import json_column, json_rows
from tidemill.cli.tables.session import FileFormat
from tidemill.errors import TableCode, TableError
from tidemill.tables.rows.types import describe_type

__all__ = (
    "Piece",
    "RowFile",
    "file_format",
    "row_error",
    "unpacked",
)

#: How many rows are conformed, routed and written together.
_ROWS_MAX: Final = 32_768
_PIECE_BYTES: Final = 8 * 1024 * 1024
#: Arrow reads up to 32 blocks ahead. A row may be as long as a block.
_CSV_BLOCK_BYTES: Final = 2 * 1024 * 1024
_HEADER_BYTES_MAX: Final = 64 * 1024
_EXTENSIONS: Final = {
    ".csv": FileFormat.CSV,
    ".tsv": FileFormat.CSV,
    ".json": FileFormat.JSON,
    ".jsonl": FileFormat.JSON,
    ".ndjson": FileFormat.JSON,
    ".parquet": FileFormat.PARQUET,
    ".pq": FileFormat.PARQUET,
}
_CODECS: Final = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
_CSV_PLACE = re.compile(
    r"^(?:In CSV column #(?P<column>\d+): )?(?:CSV parse error: )?(?:Row #(?P<row>\d+): )?"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a file, the number of rows before them, and how much of the file has been read."""

    rows: pa.RecordBatch
    rows_before: int
    bytes_read: int


class Source(Protocol):
    """Bytes that are read once, from the front."""

    def read(self, size: int) -> bytes:
        """Read at most ``size`` bytes; none at the end."""


def file_format(path: Path) -> FileFormat | None:
    """The format that a file's name stands for, apart from a compression.

    >>> file_format(Path("rows.csv.gz")).value
    'csv'
    """
    name = path.with_suffix("") if path.suffix in _CODECS else path
    return _EXTENSIONS.get(name.suffix.lower())


def unpacked(file: Input, path: Path) -> Source:
    """The bytes of a file, decompressed if its name says so."""
    codec = _CODECS.get(path.suffix)
    if codec is None:
        return file
    stream: Source = pa.CompressedInputStream(pa.PythonFile(file, "r"), codec)
    return stream


def row_error(path: Path, row: int | None, error: TableError) -> TableError:
    """``error`` with the file and the row that it is about. ``row`` counts from 0."""
    where = "stdin" if path == STDIN else str(path)
    if row is None:
        return TableError(error.table_code, f"{where}: {error.message}")
    # The error's index counts from 0, in its own piece.
    counted = f"row {error.index}"
    said = error.message.removeprefix(counted) if error.message.startswith(counted) else f": {error.message}"
    return TableError(error.table_code, f"{where}, row {row + 1:,}{said}", index=row)


class RowFile:
    """A file with rows for a table; iterate once. ``schema`` has the columns that are wanted.

    With ``only`` the columns of the file that are not in ``schema`` are left out; else they are given along,
    so that the writer can refuse them.
    """

    def __init__(
        self,
        path: Path,
        kind: FileFormat,
        schema: pa.Schema,
        *,
        only: bool = False,
        delimiter: str | None = None,
    ) -> None:
        self.path = path
        self._kind = kind
        self._schema = schema
        self._only = only
        self._delimiter = delimiter or ("\t" if path.suffix.lower() == ".tsv" else ",")
        if kind is FileFormat.PARQUET and path == STDIN:
            raise TableError(
                TableCode.row_refused,
                "Parquet is read from its end, so it cannot come through a pipe: name a file",
            )
        self._input = Input(path)

    @property
    def size(self) -> int | None:
        """The size of the file; None for a pipe."""
        return self._input.size

    def stop(self) -> None:
        """Make a running iteration end soon."""
        self._input.stop()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._input.close()

    def __iter__(self) -> Iterator[Piece]:
        before = 0
        for batch, bytes_read in self._batches():
            for first in range(0, batch.num_rows, _ROWS_MAX):
                piece = batch.slice(first, _ROWS_MAX)
                yield Piece(piece, before, bytes_read)
                before += piece.num_rows

    def _batches(self) -> Iterator[tuple[pa.RecordBatch, int]]:
        if self._kind is FileFormat.PARQUET:
            yield from _parquet_batches(self.path, self._wanted)
            return
        source = unpacked(self._input, self.path)
        try:
            yield from (
                self._csv_batches(source) if self._kind is FileFormat.CSV else self._json_batches(source)
            )
        except OSError as error:
            # Arrow does not name the file that it could not read or decompress.
            raise row_error(self.path, None, TableError(TableCode.row_refused, str(error))) from None

    @property
    def _wanted(self) -> list[str] | None:
        return self._schema.names if self._only else None

    # -- CSV -------------------------------------------------------------------------------------------------

    def _csv_batches(self, source: Source) -> Iterator[tuple[pa.RecordBatch, int]]:
        blocks = _Blocks(source, self._input)
        names = _header(blocks.first, self._delimiter)
        special = [field for field in self._schema if _csv_type(field.type) != field.type]
        before = 0
        try:
            for batch in self._open_csv(pa.PythonFile(blocks, "r")):
                yield self._restored(batch, special, before), blocks.position()
                before += batch.num_rows
        except pa.ArrowInvalid as error:
            raise self._csv_error(str(error), names) from None

    def _open_csv(self, source: Any) -> Any:
        convert = pa.csv.ConvertOptions(
            column_types={field.name: _csv_type(field.type) for field in self._schema},
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        # One thread, because otherwise Arrow does not say which row is wrong.
        read = pa.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES, use_threads=False)
        parse = pa.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True)
        return pa.csv.open_csv(source, read_options=read, parse_options=parse, convert_options=convert)

    def _restored(self, batch: pa.RecordBatch, special: Sequence[pa.Field], before: int) -> pa.RecordBatch:
        """The batch without unwanted columns, and with the types that CSV cannot hold."""
        if self._only:
            batch = batch.select([name for name in self._schema.names if name in batch.schema.names])
        for field in special:
            index = batch.schema.get_field_index(field.name)
            if index >= 0:
                try:
                    column = _from_cells(batch.column(index), field)
                except TableError as error:
                    row = None if error.index is None else before + error.index
                    raise row_error(self.path, row, error) from None
                batch = batch.set_column(index, pa.field(field.name, field.type), column)
        return batch

    def _csv_error(self, text: str, names: Sequence[str]) -> TableError:
        """Arrow's message with the column's name, and with the row counted from 1."""
        match = _CSV_PLACE.match(text)
        assert match is not None, "every part of the pattern can be absent"
        said = text[match.end() :].partition(". If these timestamps")[0]
        if match["column"] is not None and int(match["column"]) < len(names):
            name = names[int(match["column"])]
            index = self._schema.get_field_index(name)
            kind = f" ({describe_type(self._schema.field(index).type)})" if index >= 0 else ""
            said = f"column {name!r}{kind}: {said.removeprefix('CSV conversion error to ')}"
        row = None if match["row"] is None else int(match["row"]) - 2
        return row_error(self.path, row, TableError(TableCode.row_refused, said))

    # -- JSON ------------------------------------------------------------------------------------------------

    def _json_batches(self, source: Source) -> Iterator[tuple[pa.RecordBatch, int]]:
        before = 0
        try:
            for batch in json_rows(source, self._schema, only=self._only):
                yield batch, self._input.bytes_read
                before += batch.num_rows
        except TableError as error:
            row = None if error.index is None else before + error.index
            raise row_error(self.path, row, error) from None


class _Blocks:
    """A source for Arrow, for which one read is one block. A row may lie in two blocks at most."""

    closed = False

    def __init__(self, source: Source, counted: Input) -> None:
        self._source = source
        self._counted = counted
        #: How much had been read at the end of each block whose rows are not yet given.
        self._ends: deque[int] = deque()
        self._position = 0
        self.first = self._filled(_CSV_BLOCK_BYTES)
        self._is_first = True

    def read(self, size: int) -> bytes:
        if self._is_first:
            assert size >= len(self.first), "Arrow reads whole blocks"
            self._is_first = False
            return self.first
        return self._filled(size)

    def _filled(self, size: int) -> bytes:
        parts, left = [], size
        while left and (part := self._source.read(left)):
            parts.append(part)
            left -= len(part)
        self._ends.append(self._counted.bytes_read)
        return b"".join(parts)

    def position(self) -> int:
        """The approximate place in the file where the rows of the next block end. Ask once for each block."""
        if self._ends:
            self._position = self._ends.popleft()
        return self._position

    def close(self) -> None:
        self.closed = True


def _header(first: bytes, delimiter: str) -> list[str]:
    """The names of the columns, for messages."""
    text = first[:_HEADER_BYTES_MAX].decode("utf-8-sig", "replace")
    return next(csv.reader(io.StringIO(text), delimiter=delimiter), [])


def _parquet_batches(path: Path, names: Sequence[str] | None) -> Iterator[tuple[pa.RecordBatch, int]]:
    try:
        # Not buffered, because a row group may be larger than memory.
        file = pa.parquet.ParquetFile(path, buffer_size=1024 * 1024, pre_buffer=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise row_error(
            path, None, TableError(TableCode.row_refused, f"this is no Parquet: {error}")
        ) from None
    with file:
        known = file.schema_arrow.names
        wanted = None if names is None else [name for name in names if name in known]
        rows, size = file.metadata.num_rows, path.stat().st_size
        raw_bytes = sum(
            file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups)
        )
        per_piece = _PIECE_BYTES * max(rows, 1) // max(raw_bytes, 1)
        done = 0
        for batch in file.iter_batches(batch_size=max(1, min(per_piece, _ROWS_MAX)), columns=wanted):
            done += batch.num_rows
            yield batch, size * done // max(rows, 1)


def _csv_type(data_type: pa.DataType) -> pa.DataType:
    """The type in which Arrow reads cells for a column."""
    if arrow.is_nested(data_type) or arrow.is_binary(data_type):
        return pa.string()
    return pa.int64() if arrow.is_duration(data_type) else data_type


def _from_cells(cells: pa.Array, field: pa.Field) -> pa.Array:
    if arrow.is_duration(field.type):
        return cells.cast(field.type)
    if arrow.is_nested(field.type):
        return json_column(cells, field)
    decoded: list[bytes | None] = []
    for index, cell in enumerate(cells.to_pylist()):
        value = None
        with suppress(binascii.Error, ValueError):
            value = None if cell is None else base64.b64decode(cell, validate=True)
        if value is None and cell is not None:
            raise TableError(
                TableCode.row_refused,
                f"column {field.name!r} (binary): {cell[:80]!r} is not base64",
                index=index,
            )
        decoded.append(value)
    return pa.array(decoded, field.type)
