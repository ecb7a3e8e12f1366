"""A progress bar on stderr for rows that are read or written, if stderr is a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tidemill.cli.output import human_bytes

__all__ = ("Transfer", "transfer")


class Transfer(Protocol):
    """Receives reports of how far the work is."""

    def update(self, done: int, *, rows: int, size_bytes: int) -> None:
        """Report that ``done`` of the total is done, with so many rows and bytes."""


class _Silent:
    def update(self, done: int, *, rows: int, size_bytes: int) -> None:
        pass


@contextmanager
def transfer(label: str, total: int | None, *, quiet: bool) -> Iterator[Transfer]:
    """A bar with rows, rows a second and bytes. Without a total it shows only that something happens."""
    if quiet or not sys.stderr.isatty():
        yield _Silent()
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn(label),
        bars.BarColumn(),
        bars.TextColumn("{task.fields[rows]}"),
        bars.TextColumn("{task.fields[size]}"),
        bars.TimeRemainingColumn(),
    )
    console = Console(stderr=True, no_color="NO_COLOR" in os.environ)
    started = time.monotonic()
    with bars.Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(label, total=total, rows="", size="")

        class Shown:
            def update(self, done: int, *, rows: int, size_bytes: int) -> None:
                rate = rows / max(time.monotonic() - started, 0.001)
                text = f"{rows:,} rows ({rate:,.0f}/s)"
                shown.update(task, completed=done, rows=text, size=human_bytes(size_bytes))

        yield Shown()
