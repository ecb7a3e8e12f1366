"""What the commands about databases and tables share: the connection, arguments, and texts."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tidemill.cli.session import Session

if TYPE_CHECKING:
    from tidemill.client.async_client import AsyncTidemill
    from tidemill.client.cluster import Cluster
    from tidemill.client.tables.table import AsyncTable

__all__ = (
    "FileFormat",
    "QuietOption",
    "TableArgument",
    "input_file",
    "run",
    "split_names",
    "time_text",
    "with_table",
)

_T = TypeVar("_T")


class FileFormat(StrEnum):
    """The formats of files with rows."""

    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


TableArgument = Annotated[
    str, typer.Argument(metavar="TABLE", help="The name of the table: database.table.", show_default=False)
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]


def run(session: Session, work: Callable[[AsyncTidemill], Coroutine[Any, Any, _T]]) -> _T:
    """Run ``work`` with the databases and tables of the server."""
    from tidemill.client.async_client import AsyncTidemill

    async def connected(cluster: Cluster) -> _T:
        return await work(AsyncTidemill(cluster, session.server))

    return session.run(connected)


def with_table(session: Session, name: str, work: Callable[[AsyncTable], Coroutine[Any, Any, _T]]) -> _T:
    """Run ``work`` with one table of the server."""

    async def with_client(db: AsyncTidemill) -> _T:
        return await work(await db.table(name))

    return run(session, with_client)


def input_file(text: str, option: str) -> Path:
    """The path of a file that can be read, or ``-`` for stdin; anything else is a usage error."""
    path = Path(text)
    if text != "-":
        if path.is_dir():
            raise typer.BadParameter(f"{text} is a directory, not a file", param_hint=option)
        if not path.exists():
            raise typer.BadParameter(f"there is no file {text}", param_hint=option)
        if not os.access(path, os.R_OK):
            raise typer.BadParameter(f"{text} cannot be read", param_hint=option)
    return path


def split_names(texts: list[str] | None) -> list[str]:
    """Names given one by one, or several with commas between them.

    >>> split_names(["region, id", "day"])
    ['region', 'id', 'day']
    """
    return [name.strip() for text in texts or () for name in text.split(",") if name.strip()]


def time_text(timestamp_ms: int) -> str | None:
    """A time as people read it, to the second; None if it is not known."""
    from datetime import UTC, datetime

    if timestamp_ms < 0:
        return None
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="seconds")
