"""Writing rows and deletions into a table, with progress on stderr."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from tidemill.cli.output import plural
from tidemill.cli.session import warn
from tidemill.cli.tables.byte_input import run_ahead
from tidemill.cli.tables.keys import key_fields, parse_key
from tidemill.cli.tables.progress import Transfer, transfer
from tidemill.cli.tables.row_files import Piece, RowFile, row_error
from tidemill.cli.tables.session import FileFormat
from tidemill.client.tables.table import AsyncTable
from tidemill.errors import TableCode, TableError, TidemillError

__all__ = ("Writing",)


@dataclass(slots=True)
class Writing:
    """One run of ``table upsert`` or ``table delete``. ``rows`` counts those that are certainly durable."""

    table: AsyncTable
    deletes: bool = False
    rows: int = 0
    bytes_read: int = 0

    async def delete_keys(self, texts: list[str]) -> None:
        """Delete the rows with these keys."""
        self._need_key()
        fields = key_fields(self.table.schema, self.table.primary_key)
        self.rows += (await self.table.delete([parse_key(text, fields) for text in texts])).rows

    async def write_file(self, path: Path, kind: FileFormat, *, delimiter: str | None, quiet: bool) -> None:
        """Write everything in a file. An error says where it arose and what was written before."""
        schema = self.table.schema
        if self.deletes:
            self._need_key()
            schema = pa.schema([schema.field(name) for name in self.table.primary_key])
        file = RowFile(path, kind, schema, only=self.deletes, delimiter=delimiter)
        label = "deleting" if self.deletes else "writing"
        try:
            with file, transfer(label, file.size, quiet=quiet) as bar:
                await self._write_pieces(file, bar)
        except TidemillError as error:
            error.message = f"{error.message}; {self._so_far}"
            raise
        except asyncio.CancelledError:
            warn(f"interrupted; {self._so_far}")
            raise

    async def _write_pieces(self, file: RowFile, bar: Transfer) -> None:
        before = self.bytes_read
        async with aclosing(run_ahead(iter(file), file.stop)) as pieces:
            async for piece in pieces:
                try:
                    await self._write_piece(piece)
                except TableError as error:
                    row = None if error.index is None else piece.rows_before + error.index
                    raise row_error(file.path, row, error) from None
                self.bytes_read = before + piece.bytes_read
                bar.update(piece.bytes_read, rows=self.rows, size_bytes=self.bytes_read)

    async def _write_piece(self, piece: Piece) -> None:
        work = self.table.delete(piece.rows) if self.deletes else self.table.upsert(piece.rows)
        self.rows += (await work).rows

    @property
    def _so_far(self) -> str:
        verb = "deleted" if self.deletes else "written"
        if not self.rows:
            return f"nothing is {verb}"
        return f"{plural(self.rows, 'row')} before it {'is' if self.rows == 1 else 'are'} {verb}"

    def _need_key(self) -> None:
        if not self.table.primary_key:
            raise TableError(
                TableCode.not_a_primary_key_table,
                f"table {self.table.name!r} has no primary key: its rows cannot be deleted one by one",
            )
