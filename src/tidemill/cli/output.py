"""Output of commands. Results go to stdout (tables, plain columns or JSON), progress goes to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tidemill.cli.session import Session

__all__ = ("Progress", "Table", "human_bytes", "plural", "progress", "show", "write_json", "write_line")

_KIB = 1024


@dataclass(frozen=True, slots=True)
class Table:
    """A table of columns and rows. Numbers are aligned to the right; None is shown as a dash."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""


def show(session: Session, value: Any, *tables: Table) -> None:
    """Write ``value`` as JSON, or else the tables."""
    if session.as_json:
        write_json(value)
        return
    for number, table in enumerate(tables):
        if number:
            write_line("")
        if sys.stdout.isatty():
            _write_rich(table)
        else:
            _write_plain(table)


def write_line(text: str) -> None:
    """Write one line to stdout, in UTF-8 whatever the locale is."""
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape") + b"\n")
    sys.stdout.buffer.flush()


def write_json(value: Any) -> None:
    """Write a JSON document as one line, so that streams can be read line by line."""
    write_line(json.dumps(value, ensure_ascii=False, default=str))


def plural(count: int, noun: str) -> str:
    """A number and its noun.

    >>> plural(1, "row"), plural(12_000, "row")
    ('1 row', '12,000 rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def human_bytes(size: int) -> str:
    """A size with a unit, for people.

    >>> human_bytes(1536)
    '1.5 KiB'
    """
    if size < _KIB:
        return f"{size} B"
    value = size / _KIB
    for unit in ("KiB", "MiB", "GiB"):
        if value < _KIB:
            return f"{value:.1f} {unit}"
        value /= _KIB
    return f"{value:.1f} TiB"


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _write_plain(table: Table) -> None:
    """Write columns of text without decoration, for ``awk`` and for tests."""
    if table.title:
        write_line(table.title)
    cells = [
        [column.upper() for column in table.columns],
        *([_text(cell) for cell in row] for row in table.rows),
    ]
    widths = [max(len(row[index]) for row in cells) for index in range(len(table.columns))]
    right = [all(_is_number(row[index]) for row in table.rows) for index in range(len(table.columns))]
    for row in cells:
        padded = [
            cell.rjust(width) if to_right and table.rows else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        write_line("  ".join(padded).rstrip())


def _write_rich(table: Table) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE_HEAD, title=table.title or None, title_justify="left", pad_edge=False)
    for index, column in enumerate(table.columns):
        numbers = bool(table.rows) and all(_is_number(row[index]) for row in table.rows)
        drawn.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(_text(cell)) for cell in row))
    Console(no_color="NO_COLOR" in os.environ).print(drawn)


class Progress(Protocol):
    """Receives reports of how much work is done."""

    def advance(self, amount: int) -> None:
        """Report that so much more is done."""


class _NoProgress:
    def advance(self, amount: int) -> None:
        pass


@contextmanager
def progress(label: str, total: int, *, in_bytes: bool = False) -> Iterator[Progress]:
    """A progress bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield _NoProgress()
        return
    from rich import progress as bars
    from rich.console import Console

    amount = bars.DownloadColumn(binary_units=True) if in_bytes else bars.MofNCompleteColumn()
    columns = (bars.TextColumn(label), bars.BarColumn(), amount, bars.TimeRemainingColumn())
    console = Console(stderr=True, no_color="NO_COLOR" in os.environ)
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)

        class Shown:
            def advance(self, amount: int) -> None:
                bar.advance(task, amount)

        yield Shown()
