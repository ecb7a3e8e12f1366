"""``tidemill table lookup | scan | follow``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.session import ExitCode, Session, command
from tidemill.cli.tables.session import FileFormat, QuietOption, TableArgument, split_names, with_table

if TYPE_CHECKING:
    from tidemill.client.tables.table import AsyncTable

__all__ = ("register",)

_SHOWN_ROWS = 100

ColumnsOption = Annotated[
    list[str] | None,
    typer.Option("--columns", "-c", metavar="A,B", help="Only these columns, in this order; repeatable."),
]
LimitOption = Annotated[
    int | None,
    typer.Option(
        "--limit", "-n", metavar="N", min=1, help=f"The most rows. Default in a terminal: {_SHOWN_ROWS}."
    ),
]
AllOption = Annotated[
    bool,
    typer.Option("--all", "-a", help="All rows, also in a terminal; the header is repeated every 1000 rows."),
]
OutputOption = Annotated[
    FileFormat | None,
    typer.Option("--output", "-o", help="Write all rows as csv, json (one object per line) or parquet."),
]
ToFileOption = Annotated[
    Path | None,
    typer.Option(
        "--to-file",
        metavar="FILE",
        dir_okay=False,
        help="Write to this file. Default format: by the end of its name.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(app, "lookup")(lookup)
    command(app, "scan")(scan)
    command(app, "follow", format_help="Of no use here: it is always JSON lines.")(follow)


def lookup(
    session: Session,
    table: TableArgument,
    keys: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY",
            show_default=False,
            help="The text of a key of one column, or JSON like '[\"eu\",42]' for several columns.",
        ),
    ],
    prefix: Annotated[
        bool,
        typer.Option(
            "--prefix", "-p", help="KEY has only the first key columns: show all rows with these values."
        ),
    ] = False,
    columns: ColumnsOption = None,
    limit: LimitOption = None,
    all_rows: AllOption = False,
) -> None:
    """Show the rows with these keys, in the order of the keys.

    Exits with 3 if a key has no row. With --format json there is one object per line. Put -- before keys that
    begin with a minus.

    \b
    Examples:
      tidemill table lookup shop.orders 17 18
      tidemill table lookup shop.stock '["eu",42]' '{"region":"us","id":7}'
      tidemill table lookup shop.stock eu --prefix
    """
    from tidemill.cli.tables.read_rows import Reading, look_up

    names = split_names(columns) or None
    if prefix:
        if len(keys) != 1:
            raise typer.BadParameter("--prefix takes one key", param_hint="KEY")
        _check_all(all_rows, limit)
        kind = FileFormat.JSON if session.as_json else None
        reading = Reading(session, shown_rows=None if all_rows else _SHOWN_ROWS, limit=limit, kind=kind)
        with_table(session, table, lambda found: reading.run_prefix(found, keys[0], names))
        return
    if limit is not None or all_rows:
        raise typer.BadParameter("a key has one row: --limit and --all are for --prefix")
    if not with_table(session, table, lambda found: look_up(session, found, keys, names)):
        raise typer.Exit(ExitCode.NOT_FOUND)


def scan(
    session: Session,
    table: TableArgument,
    columns: ColumnsOption = None,
    where: Annotated[
        str | None,
        typer.Option("--where", "-w", metavar="SQL", help="Only rows for which this SQL condition is true."),
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="KEY", help="Only keys from this one on.")
    ] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="KEY", help="Only keys before this one.")] = None,
    limit: LimitOption = None,
    all_rows: AllOption = False,
    lease: Annotated[
        str | None, typer.Option("--lease", metavar="ID", help="Read the snapshots of this lease.")
    ] = None,
    count: Annotated[bool, typer.Option("--count", help="Show only the number of rows.")] = False,
    output: OutputOption = None,
    to_file: ToFileOption = None,
    quiet: QuietOption = False,
) -> None:
    """Show the rows of a table, or write them to a file. All are read as of the same instant.

    Rows come in the order of their keys within each bucket. --from and --to take a key, or JSON of its first
    columns. --format json is the same as --output json.

    \b
    Examples:
      tidemill table scan shop.orders --where "region = 'eu' AND amount > 10" --columns id,amount
      tidemill table scan shop.orders --from 100 --to 200 --count
      tidemill table scan shop.orders --to-file orders.parquet
    """
    from tidemill.cli.tables.read_rows import Reading, ScanArguments

    _check_all(all_rows, limit)
    if count and (output is not None or to_file is not None or limit is not None):
        raise typer.BadParameter("--count shows a number, no rows: leave --output, --to-file and --limit out")
    kind = _output_format(session, output, to_file)
    arguments = ScanArguments(
        columns=split_names(columns) or None, where=where, start=start, end=end, lease=lease
    )
    reading = Reading(
        session,
        shown_rows=None if all_rows else _SHOWN_ROWS,
        limit=limit,
        kind=kind,
        to_file=to_file,
        quiet=quiet,
    )

    async def work(found: AsyncTable) -> None:
        if count:
            await reading.count(found, arguments)
        else:
            await reading.run(found, arguments)

    with_table(session, table, work)


def _check_all(all_rows: bool, limit: int | None) -> None:
    if all_rows and limit is not None:
        raise typer.BadParameter("--all and --limit contradict each other", param_hint="--limit")


def _output_format(session: Session, output: FileFormat | None, to_file: Path | None) -> FileFormat | None:
    import sys

    if to_file is not None and output is None and not session.as_json:
        from tidemill.cli.tables.row_files import file_format

        output = file_format(to_file)
        if output is None:
            raise typer.BadParameter(
                f"the name of {to_file} does not say what to write: end it with .csv, .json or .parquet, or "
                "give --output",
                param_hint="--to-file",
            )
    if session.as_json:
        if output not in (None, FileFormat.JSON):
            raise typer.BadParameter("--format json and another --output contradict each other")
        output = FileFormat.JSON
    if output is FileFormat.PARQUET and to_file is None and sys.stdout.isatty():
        raise typer.BadParameter("Parquet is not for the screen: give --to-file", param_hint="--output")
    return output


def follow(
    session: Session,
    table: TableArgument,
    snapshot: Annotated[
        bool,
        typer.Option(
            "--snapshot/--no-snapshot",
            show_default=False,
            help="First the existing rows (default), or only changes from now on.",
        ),
    ] = True,
    until_now: Annotated[
        bool,
        typer.Option(
            "--until-now", help="Stop at the last change that exists now, instead of waiting for more."
        ),
    ] = False,
) -> None:
    """Print the rows of a table and then every change after them, as JSON lines, until Ctrl-C.

    A row that is there has op "snapshot" and row. A change has op (upsert or delete), bucket, offset,
    timestamp_ms and row, and in a partitioned table partition; the row of a deletion has the key columns
    only. Every change comes once, and in order within its bucket. A table without a primary key is a log:
    its rows all come as changes with op insert.

    \b
    Examples:
      tidemill table follow shop.orders                  the rows, then changes as they come
      tidemill table follow shop.orders --no-snapshot    only changes from now on
      tidemill table follow shop.orders --until-now      the rows, and no waiting

    \b
    Lines look like this:
      {"op":"snapshot","row":{"id":1,"region":"eu"}}
      {"op":"delete","bucket":0,"offset":17,"timestamp_ms":1767225600000,"row":{"id":1}}
    """
    from tidemill.cli.tables.read_rows import follow_changes

    with_table(session, table, lambda found: follow_changes(found, snapshot=snapshot, until_now=until_now))
