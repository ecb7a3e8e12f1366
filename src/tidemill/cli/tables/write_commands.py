"""``tidemill table upsert | delete``: rows from files, keys from files or the command line."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.output import plural
from tidemill.cli.session import Session, command
from tidemill.cli.tables.session import FileFormat, QuietOption, TableArgument, input_file, with_table

if TYPE_CHECKING:
    from tidemill.cli.tables.write_rows import Writing
    from tidemill.client.tables.table import AsyncTable

__all__ = (
    "chosen_format",
    "register",
)

InputFormatOption = Annotated[
    FileFormat | None,
    typer.Option("--input-format", help="The format of the file. Default: by the end of its name."),
]
DelimiterOption = Annotated[
    str | None,
    typer.Option(
        "--delimiter", metavar="CHARACTER", help="What separates the cells of CSV. Default: a comma."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(app, "upsert")(upsert)
    command(app, "delete")(delete)


def upsert(
    session: Session,
    table: TableArgument,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            show_default=False,
            help="CSV with a header, Parquet, or JSON (an array, or one object per line). '-' is stdin.",
        ),
    ],
    input_format: InputFormatOption = None,
    delimiter: DelimiterOption = None,
    quiet: QuietOption = False,
) -> None:
    """Write the rows of files. A row replaces the one with the same key, if there is one.

    Columns are matched by name; missing columns are null. Files ending in .gz, .bz2 or .zst are decompressed.
    The rows are durable when the command ends. If a row is refused, rows before it may have been written:
    correct it, and run the command again. In a table without a primary key the rows before it are then there
    twice.

    \b
    Examples:
      tidemill table upsert shop.orders orders.parquet more.csv.gz
      cat orders.jsonl | tidemill table upsert shop.orders - --input-format json
    """
    paths = [input_file(file, "FILE") for file in files]
    plan = [(path, chosen_format(path, input_format)) for path in paths]
    _check_delimiter(delimiter)

    async def work(found: AsyncTable) -> Writing:
        from tidemill.cli.tables.write_rows import Writing

        writing = Writing(found)
        for path, kind in plan:
            await writing.write_file(path, kind, delimiter=delimiter, quiet=quiet)
        return writing

    started = time.monotonic()
    done = with_table(session, table, work)
    _summarize(session, table, done, time.monotonic() - started)


def delete(
    session: Session,
    table: TableArgument,
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY",
            show_default=False,
            help="The text of a key of one column, or JSON like '[\"eu\",42]' for several columns.",
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Take the keys from the key columns of this file: CSV, Parquet or JSON. '-' is stdin.",
        ),
    ] = None,
    input_format: InputFormatOption = None,
    delimiter: DelimiterOption = None,
    quiet: QuietOption = False,
) -> None:
    """Delete the rows with these keys. Keys without a row are no error.

    Put -- before keys that begin with a minus.

    \b
    Examples:
      tidemill table delete shop.orders 17 18
      tidemill table delete shop.stock '["eu",42]' '{"region":"us","id":7}'
      tidemill table delete shop.orders --file gone.csv
    """
    if (file is None) == (not keys):
        raise typer.BadParameter("name either keys or a --file with keys")
    path = None if file is None else input_file(file, "--file")
    kind = None if path is None else chosen_format(path, input_format)
    _check_delimiter(delimiter)

    async def work(found: AsyncTable) -> Writing:
        from tidemill.cli.tables.write_rows import Writing

        writing = Writing(found, deletes=True)
        if path is not None and kind is not None:
            await writing.write_file(path, kind, delimiter=delimiter, quiet=quiet)
        else:
            await writing.delete_keys(keys or [])
        return writing

    started = time.monotonic()
    done = with_table(session, table, work)
    _summarize(session, table, done, time.monotonic() - started)


def chosen_format(path: Path, asked: FileFormat | None, option: str = "--input-format") -> FileFormat:
    """The format of a file: the one asked for, else the one that its name says; else a usage error."""
    from tidemill.cli.tables.byte_input import STDIN
    from tidemill.cli.tables.row_files import file_format

    kind = asked or file_format(path)
    if kind is None:
        what = "stdin" if path == STDIN else f"the name of {path}"
        raise typer.BadParameter(
            f"{what} does not say what is in it: give csv, json or parquet",
            param_hint=option,
        )
    return kind


def _check_delimiter(text: str | None) -> None:
    if text is not None and (len(text) != 1 or not text.isascii()):
        raise typer.BadParameter(f"{text!r} is not one ASCII character", param_hint="--delimiter")


def _summarize(session: Session, table: str, done: Writing, seconds: float) -> None:
    from tidemill.cli.output import human_bytes, write_json, write_line

    if session.as_json:
        write_json(
            {
                "table": table,
                "deleted" if done.deletes else "written": done.rows,
                "bytes_read": done.bytes_read,
                "seconds": round(seconds, 3),
            }
        )
        return
    what = plural(done.rows, "key") if done.deletes else plural(done.rows, "row")
    size = f" ({human_bytes(done.bytes_read)})" if done.bytes_read else ""
    done_what = f"deleted {what}{size} of" if done.deletes else f"wrote {what}{size} to"
    rate = f"{done.rows / seconds:,.0f} {'keys' if done.deletes else 'rows'}/s" if seconds > 0 else ""
    write_line(f"{done_what} {table} in {seconds:.2f} s ({rate})")
