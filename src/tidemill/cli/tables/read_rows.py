"""Writing rows and changes of a table to the screen or to a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.cli.output import human_bytes, plural, show, write_json, write_line
from tidemill.cli.session import Session, fail
from tidemill.cli.tables.json_rows import json_objects
from tidemill.cli.tables.keys import key_fields, parse_key, parse_prefix, show_key
from tidemill.cli.tables.progress import transfer
from tidemill.cli.tables.row_writers import open_target, rows_as_table, writer_to
from tidemill.cli.tables.session import FileFormat
from tidemill.client.admin.topics import EARLIEST, list_offsets
from tidemill.client.tables.follow import DELETE, ChangeBatch
from tidemill.client.tables.table import AsyncTable
from tidemill.client.tables.table_scan import AsyncScan, ScanOptions
from tidemill.errors import TableCode, TableError

__all__ = (
    "Reading",
    "ScanArguments",
    "follow_changes",
    "look_up",
)

#: How many rows share one header on the screen.
_SCREEN_ROWS: Final = 1_000


@dataclass(frozen=True, slots=True)
class ScanArguments:
    """The rows to scan, as the user described them."""

    columns: list[str] | None
    where: str | None
    start: str | None
    end: str | None
    lease: str | None

    def scan(self, table: AsyncTable, limit: int | None) -> AsyncScan:
        """The scan of these rows."""
        key_range = None
        if self.start is not None or self.end is not None:
            _need_key(table)
            fields = key_fields(table.schema, table.primary_key)
            low, high = (
                None if text is None else parse_prefix(text, fields) for text in (self.start, self.end)
            )
            key_range = low, high
        return table.scan(self.columns, self.where, key_range, limit, lease=self.lease)

    @property
    def takes_all(self) -> bool:
        """Whether every row of the table is wanted."""
        return self.where is None and self.start is None and self.end is None


@dataclass(frozen=True, slots=True)
class Reading:
    """The target of rows (``kind`` None: the screen) and their limit. ``shown_rows`` is the screen's own."""

    session: Session
    shown_rows: int | None
    limit: int | None
    kind: FileFormat | None = None
    to_file: Path | None = None
    quiet: bool = True

    async def run(self, table: AsyncTable, arguments: ScanArguments) -> None:
        """Write the rows of a scan."""
        if self.kind is None:
            await self._to_screen(table.name, lambda limit: arguments.scan(table, limit))
            return
        total = None
        if self.to_file is not None and arguments.takes_all and sys.stderr.isatty():
            total = sum(each.row_count for each in await table.stats())
        scan = arguments.scan(table, self.limit)
        rows, size = await self._to_target(scan, self.kind, _least(total, self.limit))
        if self.to_file is not None:
            self._say_written(table.name, rows, size)

    async def run_prefix(self, table: AsyncTable, key: str, columns: list[str] | None) -> None:
        """Write the rows whose keys begin with ``key``."""
        _need_key(table)
        values = parse_prefix(key, key_fields(table.schema, table.primary_key))
        start, end = table.definition.keys.prefix_bounds(values)
        # This refuses columns that do not exist.
        names = tuple(table.scan(columns).schema.names)

        def scan(limit: int | None) -> AsyncScan:
            return AsyncScan(table, ScanOptions(columns=names, start_key=start, end_key=end, limit=limit))

        if self.kind is None:
            await self._to_screen(table.name, scan)
        else:
            await self._to_target(scan(self.limit), self.kind, None)

    async def count(self, table: AsyncTable, arguments: ScanArguments) -> None:
        """Print the number of rows."""
        rows = await arguments.scan(table, None).count()
        if self.session.as_json:
            write_json({"table": table.name, "rows": rows})
        else:
            write_line(str(rows))

    async def _to_screen(self, name: str, scan_of: Callable[[int | None], AsyncScan]) -> None:
        cut = self.shown_rows if self.limit is None else None
        # One row more than is shown, to know whether there are more.
        scan = scan_of(self.limit if cut is None else cut + 1)
        waiting, shown = scan.schema.empty_table(), 0
        async with aclosing(scan.batches()) as batches:
            async for batch in batches:
                waiting = pa.concat_tables([waiting, pa.Table.from_batches([batch], scan.schema)])
                while waiting.num_rows >= _SCREEN_ROWS:
                    show(self.session, None, rows_as_table(waiting.slice(0, _SCREEN_ROWS)))
                    waiting, shown = waiting.slice(_SCREEN_ROWS), shown + _SCREEN_ROWS
        if waiting.num_rows or not shown:
            show(self.session, None, rows_as_table(waiting.slice(0, cut)))
        if cut is not None and waiting.num_rows > cut:
            note = f"these are the first {cut} rows of {name}: --limit N shows more of them, --all shows all"
            sys.stderr.write(f"{note}\n")

    async def _to_target(self, scan: AsyncScan, kind: FileFormat, total: int | None) -> tuple[int, int]:
        """Write a scan's rows to the file, or to stdout; gives the numbers of rows and bytes."""
        rows = size = 0
        opened: AbstractContextManager[IO[bytes]]
        opened = nullcontext(sys.stdout.buffer) if self.to_file is None else open_target(self.to_file)
        quiet = self.quiet or self.to_file is None
        with opened as target, transfer("scanning", total, quiet=quiet) as bar:
            writer = writer_to(target, kind, scan.schema)
            async with aclosing(scan.batches()) as batches:
                async for batch in batches:
                    writer.write(batch)
                    rows += batch.num_rows
                    size = 0 if self.to_file is None else target.tell()
                    bar.update(rows, rows=rows, size_bytes=size)
            writer.close()
            size = 0 if self.to_file is None else target.tell()
        return rows, size

    def _say_written(self, name: str, rows: int, size: int) -> None:
        if self.session.as_json:
            write_json({"table": name, "rows": rows, "bytes": size, "file": str(self.to_file)})
        else:
            write_line(f"wrote {plural(rows, 'row')} ({human_bytes(size)}) of {name} to {self.to_file}")


async def look_up(session: Session, table: AsyncTable, texts: list[str], columns: list[str] | None) -> bool:
    """Show the rows with these keys; True if all have one. The others are named on stderr."""
    _need_key(table)
    key_names = table.primary_key
    fields = key_fields(table.schema, key_names)
    asked = table.definition.keys.columns_from([parse_key(text, fields) for text in texts])
    wanted = None if columns is None else [*columns, *(name for name in key_names if name not in columns)]
    found: pa.Table = await table.lookup(pa.table(asked, names=list(key_names)), columns=wanted)
    rows = found if columns is None else found.select(columns)
    if session.as_json:
        for batch in rows.to_batches():
            writer_to(sys.stdout.buffer, FileFormat.JSON, rows.schema).write(batch)
    else:
        show(session, None, rows_as_table(rows))
    sys.stdout.flush()
    there = set(_tuples([found.column(name) for name in key_names]))
    missing = [key for key in _tuples(asked) if key not in there]
    if missing:
        fail(f"{table.name} has no row with key {', '.join(map(show_key, missing))}")
    return not missing


async def follow_changes(table: AsyncTable, *, snapshot: bool, until_now: bool) -> None:
    """Print rows and changes as JSON lines."""
    starts: Mapping[tuple[str, int], int] | None = None
    if snapshot and not table.primary_key:
        # The rows of a table without a key are its log, from the beginning.
        logs = await table.starts()
        found = await list_offsets(table.cluster, dict.fromkeys(logs, EARLIEST))
        starts = {log: at.offset for log, at in found.items()}
    following = table.follow(snapshot=snapshot, from_offsets=starts, until_now=until_now)
    async with aclosing(following.batches()) as batches:
        async for batch in batches:
            if len(batch):
                sys.stdout.buffer.write(b"".join(_change_lines(table, batch).to_pylist()))
                sys.stdout.buffer.flush()


def _change_lines(table: AsyncTable, batch: ChangeBatch) -> pa.BinaryArray:
    rows = _change_rows(table, batch)
    ops = batch.ops.cast(pa.binary())
    if batch.bucket < 0:
        return pc.binary_join_element_wise(b'{"op":"', ops, b'","row":', rows, b"}\n", b"")
    position = f'","bucket":{batch.bucket},"offset":'
    for partition in table.definition.partitions:
        if partition.topic == batch.topic and partition.value is not None:
            position = f'","partition":{json.dumps(partition.value)}{position[1:]}'
    offsets, times = (
        each.cast(pa.string()).cast(pa.binary()) for each in (batch.offsets, batch.timestamps_ms)
    )
    middle = b',"timestamp_ms":'
    parts = (b'{"op":"', ops, position.encode(), offsets, middle, times, b',"row":', rows, b"}\n")
    return pc.binary_join_element_wise(*parts, b"")


def _change_rows(table: AsyncTable, batch: ChangeBatch) -> pa.BinaryArray:
    """The rows as JSON; for a deletion, the key columns."""
    dead = pc.equal(batch.ops, DELETE)
    if not pc.any(dead).as_py():
        return json_objects(batch.rows)
    alive = json_objects(batch.rows.filter(pc.invert(dead)))
    gone = json_objects(batch.rows.select(list(table.primary_key)).filter(dead))
    is_dead = dead.to_numpy(zero_copy_only=False)
    order = np.where(is_dead, len(alive) + np.cumsum(is_dead) - 1, np.cumsum(~is_dead) - 1)
    return pa.concat_arrays([alive, gone]).take(pa.array(order))


def _need_key(table: AsyncTable) -> None:
    if not table.primary_key:
        raise TableError(
            TableCode.not_a_primary_key_table,
            f"table {table.name!r} has no primary key, so it has no keys to look for: 'tidemill table follow "
            f"{table.name}' reads it",
        )


def _tuples(columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def _least(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)
