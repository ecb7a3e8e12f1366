"""``tidemill table stats``, ``table snapshot …``, ``table lease …``, ``table partition …``."""

from __future__ import annotations

import re
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.output import plural
from tidemill.cli.session import CommandGroup, Session, YesOption, command, confirm, warn
from tidemill.cli.tables.session import TableArgument, run, time_text, with_table
from tidemill.config.values import time_unit_ms

if TYPE_CHECKING:
    from tidemill.client.async_client import AsyncTidemill
    from tidemill.client.tables.table import AsyncTable
    from tidemill.client.tables.values import BucketStats, Lease, Snapshot

__all__ = (
    "parse_duration",
    "register",
)

_DURATION = re.compile(r"([0-9]{1,9})\s*([a-z]+)")
_SUMMED = ("row_count", "state_bytes", "log_bytes", "snapshot_count", "scanner_count")


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(app, "stats")(stats)
    snapshot = _group(app, "snapshot", "Show and take the durable snapshots of a table.")
    command(snapshot, "list")(list_snapshots)
    command(snapshot, "create")(create_snapshot)
    lease = _group(app, "lease", "Show, acquire and release leases, which keep snapshots for a time.")
    command(lease, "list")(list_leases)
    command(lease, "acquire")(acquire_lease)
    command(lease, "release")(release_lease)
    partition = _group(app, "partition", "Show, add and drop the partitions of a partitioned table.")
    command(partition, "list")(list_partitions)
    command(partition, "create")(create_partition)
    command(partition, "drop")(drop_partition)


def _group(app: typer.Typer, name: str, text: str) -> typer.Typer:
    group = typer.Typer(cls=CommandGroup, help=text, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name)
    return group


def parse_duration(text: str) -> int:
    """Parse a duration such as ``90s``, ``10m``, ``2 hours``; gives milliseconds. Raises ValueError.

    >>> parse_duration("10m")
    600000
    """
    match = _DURATION.fullmatch(text.strip())
    unit_ms = match and time_unit_ms(match[2])
    if not match or not unit_ms or int(match[1]) == 0:
        raise ValueError(f"{text[:50]!r} is no span of time: use one like 90s, 10m, 2h or 1d")
    return int(match[1]) * unit_ms


# -- stats -----------------------------------------------------------------------------------------------


def stats(session: Session, table: TableArgument) -> None:
    """Show the rows, sizes and offsets of every bucket, and their sum. The number of rows may be an estimate.

    \b
    Example:
      tidemill table stats shop.orders
    """
    from tidemill.cli.output import Table, show

    async def work(found: AsyncTable) -> list[BucketStats]:
        return await found.stats()

    buckets = with_table(session, table, work)
    total = {name: sum(getattr(each, name) for each in buckets) for name in _SUMMED}
    columns = ["bucket", "rows", "state", "log", "offsets", "applied", "snapshots", "scans"]
    rows = [(each.bucket, *_sizes(asdict(each), each)) for each in buckets]
    rows.append(("total", *_sizes(total, None)))
    # Columns without content are left out: they would only make lines too long.
    if any(each.partition is not None for each in buckets):
        columns.insert(0, "partition")
        rows = _beside([each.partition for each in buckets], rows)
    value = {"table": table, "buckets": [asdict(each) for each in buckets], "total": total}
    show(session, value, Table(columns, rows))
    for each in buckets:
        if each.problem is not None:
            warn(f"bucket {each.bucket} of {each.partition or table}: {each.problem}")


def _sizes(numbers: dict[str, Any], bucket: BucketStats | None) -> tuple[object, ...]:
    from tidemill.cli.output import human_bytes

    return (
        numbers["row_count"],
        human_bytes(numbers["state_bytes"]),
        human_bytes(numbers["log_bytes"]),
        None if bucket is None else f"{bucket.log_start_offset}-{bucket.log_end_offset}",
        None if bucket is None else bucket.applied_offset,
        numbers["snapshot_count"],
        numbers["scanner_count"],
    )


def _beside(first: list[str | None], rows: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Rows with one more cell in front, from ``first``; empty where there are more rows."""
    return [(cell, *row) for cell, row in zip_longest(first, rows)]


# -- snapshots -------------------------------------------------------------------------------------------


def list_snapshots(session: Session, table: TableArgument) -> None:
    """List the durable snapshots of a table, and what is wrong with those that cannot be used.

    \b
    Example:
      tidemill table snapshot list shop.orders
    """

    async def work(found: AsyncTable) -> list[Snapshot]:
        return await found.snapshots()

    _show_snapshots(session, with_table(session, table, work))


def create_snapshot(session: Session, table: TableArgument) -> None:
    """Take a durable snapshot of every bucket now.

    \b
    Example:
      tidemill table snapshot create shop.orders
    """

    async def work(found: AsyncTable) -> list[Snapshot]:
        return await found.create_snapshot()

    _show_snapshots(session, with_table(session, table, work))


def _show_snapshots(session: Session, snapshots: list[Snapshot]) -> None:
    from tidemill.cli.output import Table, human_bytes, show

    columns = ["bucket", "snapshot", "log offset", "taken", "size", "problem"]
    rows: list[tuple[object, ...]] = [
        (
            each.bucket,
            each.snapshot_id,
            each.log_offset,
            time_text(each.created_ms),
            human_bytes(each.size_bytes),
            None,
        )
        # The numbers of a broken snapshot cannot be trusted.
        if each.problem is None
        else (each.bucket, None, None, None, None, each.problem)
        for each in snapshots
    ]
    if any(each.partition is not None for each in snapshots):
        columns.insert(0, "partition")
        rows = _beside([each.partition for each in snapshots], rows)
    show(session, [asdict(each) for each in snapshots], Table(columns, rows))


# -- leases ----------------------------------------------------------------------------------------------


def list_leases(
    session: Session,
    table: Annotated[
        str | None, typer.Argument(metavar="TABLE", help="Only the leases of this table.")
    ] = None,
) -> None:
    """List the leases of tables: who holds each, and until when.

    \b
    Example:
      tidemill table lease list shop.orders
    """

    async def work(db: AsyncTidemill) -> list[Lease]:
        return await db.leases() if table is None else await (await db.table(table)).leases()

    _show_leases(session, run(session, work))


def acquire_lease(
    session: Session,
    table: TableArgument,
    duration: Annotated[
        str, typer.Option("--for", metavar="TIME", help="How long the lease lasts: 90s, 10m, 2h, 1d.")
    ] = "10m",
    holder: Annotated[
        str, typer.Option("--holder", metavar="NAME", help="Who holds the lease; 'lease list' shows it.")
    ] = "",
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Take new snapshots first. Without it, the newest existing ones are kept."
        ),
    ] = False,
) -> None:
    """Keep the newest snapshots of a table for a time. It is not renewed; 'lease release' ends it early.

    \b
    Example:
      tidemill table lease acquire shop.orders --for 2h --holder nightly-report
      tidemill table scan shop.orders --lease ID --to-file orders.parquet
    """
    try:
        duration_ms = parse_duration(duration)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--for") from None

    async def work(found: AsyncTable) -> Lease:
        lease = found.lease(duration_ms=duration_ms, holder=holder or "tidemill table lease", fresh=fresh)
        return await lease.acquire()

    _show_leases(session, [with_table(session, table, work)])


def _show_leases(session: Session, leases: list[Lease]) -> None:
    from tidemill.cli.output import Table, show

    value = [_lease_value(each) for each in leases]
    rows = [
        (each.lease_id, each.table, each.holder, time_text(each.expires_at_ms), len(each.snapshots))
        for each in leases
    ]
    show(session, value, Table(("lease", "table", "holder", "until", "snapshots"), rows))


def _lease_value(lease: Lease) -> dict[str, Any]:
    return {
        "lease_id": lease.lease_id,
        "table": lease.table,
        "holder": lease.holder,
        "expires_at_ms": lease.expires_at_ms,
        "snapshots": [
            {
                "topic": bucket[0],
                "bucket": bucket[1],
                "snapshot_id": snapshot_id,
                "log_offset": lease.log_offsets[bucket],
            }
            for bucket, snapshot_id in sorted(lease.snapshots.items())
        ],
    }


def release_lease(
    session: Session,
    lease_ids: Annotated[
        list[str], typer.Argument(metavar="LEASE", help="The ids of the leases, as 'lease list' shows.")
    ],
) -> None:
    """End leases, so that their snapshots can be deleted.

    \b
    Example:
      tidemill table lease release 5f1c…
    """
    from tidemill.cli.output import write_json, write_line

    async def work(db: AsyncTidemill) -> None:
        for lease_id in lease_ids:
            await db.release_lease(lease_id)

    run(session, work)
    if session.as_json:
        write_json({"released": lease_ids})
    else:
        for lease_id in lease_ids:
            write_line(f"lease {lease_id} released")


# -- partitions ------------------------------------------------------------------------------------------


def list_partitions(session: Session, table: TableArgument) -> None:
    """List the partitions of a table with their rows and sizes.

    \b
    Example:
      tidemill table partition list shop.events
    """
    from tidemill.cli.output import Table, human_bytes, show

    async def work(found: AsyncTable) -> list[dict[str, Any]]:
        buckets = await found.stats()
        return [
            {
                "partition": each.value,
                "topic": each.topic,
                "rows": sum(one.row_count for one in buckets if one.partition == each.value),
                "state_bytes": sum(one.state_bytes for one in buckets if one.partition == each.value),
                "log_bytes": sum(one.log_bytes for one in buckets if one.partition == each.value),
            }
            for each in found.definition.partitions
        ]

    value = with_table(session, table, work)
    rows = [
        (
            each["partition"],
            each["topic"],
            each["rows"],
            human_bytes(each["state_bytes"]),
            human_bytes(each["log_bytes"]),
        )
        for each in value
    ]
    show(session, value, Table(("partition", "topic", "rows", "state", "log"), rows))


def create_partition(
    session: Session,
    table: TableArgument,
    values: Annotated[
        list[str], typer.Argument(metavar="PARTITION", help="The partitions to add.", show_default=False)
    ],
) -> None:
    """Add partitions to a partitioned table, before a Kafka client writes to them. Existing ones are kept.

    \b
    Example:
      tidemill table partition create shop.events 2025-01-01
    """
    from tidemill.cli.output import write_json, write_line

    async def work(found: AsyncTable) -> list[dict[str, str]]:
        return [{"partition": value, "topic": await found.create_partition(value)} for value in values]

    made = with_table(session, table, work)
    if session.as_json:
        write_json({"table": table, "partitions": made})
    else:
        for each in made:
            write_line(f"partition {each['partition']} of {table} is topic {each['topic']}")


def drop_partition(
    session: Session,
    table: TableArgument,
    values: Annotated[
        list[str], typer.Argument(metavar="PARTITION", help="The partitions to drop.", show_default=False)
    ],
    yes: YesOption = False,
) -> None:
    """Drop partitions of a table with all their rows. This cannot be undone.

    \b
    Example:
      tidemill table partition drop shop.events 2024-12-31 --yes
    """
    from tidemill.cli.output import write_json, write_line

    confirm(f"Drop {plural(len(values), 'partition')} of {table} with all rows?", yes=yes)

    async def work(found: AsyncTable) -> None:
        for value in values:
            await found.drop_partition(value)

    with_table(session, table, work)
    if session.as_json:
        write_json({"table": table, "dropped": values})
    else:
        for value in values:
            write_line(f"partition {value} of {table} dropped")
