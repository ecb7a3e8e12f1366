"""``tidemill table create | list | describe | alter | drop``, and the groups of commands beside them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.output import plural
from tidemill.cli.session import Session, YesOption, command, confirm
from tidemill.cli.tables import read_commands as table_read
from tidemill.cli.tables import state_commands as table_state
from tidemill.cli.tables import write_commands as table_write
from tidemill.cli.tables.session import (
    TableArgument,
    run,
    split_names,
    time_text,
    with_table,
)
from tidemill.cli.topics.commands import parse_assignments

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemill.client.async_client import AsyncTidemill, TableInfo
    from tidemill.client.tables.table import AsyncTable
    from tidemill.tables.definition import TableDefinition

__all__ = ("register",)


class RowFormat(StrEnum):
    """The format of rows in the log."""

    ROW = "row"
    JSON = "json"
    RAW = "raw"


class KeyFormat(StrEnum):
    """The format of keys in the log."""

    RAW = "raw"
    JSON = "json"


CommentOption = Annotated[str | None, typer.Option("--comment", metavar="TEXT", help="A text for people.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(app, "create")(create)
    command(app, "list")(list_tables)
    command(app, "describe")(describe)
    command(app, "alter")(alter)
    command(app, "drop")(drop)
    table_write.register(app)
    table_read.register(app)
    table_state.register(app)


def create(
    session: Session,
    table: TableArgument,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns", "-c", metavar="COLUMNS", help='Names and Spark types, like "id bigint, note string".'
        ),
    ] = None,
    schema_from: Annotated[
        Path | None,
        typer.Option(
            "--schema-from",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            readable=True,
            help="Take the columns from a Parquet, CSV or JSON file.",
        ),
    ] = None,
    primary_key: Annotated[
        list[str] | None,
        typer.Option(
            "--primary-key",
            "-k",
            metavar="A,B",
            help="The key columns. Without them rows are only appended, and have no look-ups and scans.",
        ),
    ] = None,
    buckets: Annotated[
        int | None,
        typer.Option(
            "--buckets",
            "-b",
            metavar="N",
            min=1,
            help="The number of buckets (Kafka partitions) over which rows are spread. Default: 1.",
        ),
    ] = None,
    boundary: Annotated[
        list[str] | None,
        typer.Option(
            "--boundary",
            metavar="KEY",
            help="Spread rows by ranges of keys: a bucket begins at this key; repeatable, in rising order.",
        ),
    ] = None,
    partition_by: Annotated[
        str | None,
        typer.Option(
            "--partition-by", metavar="COLUMN", help="Each value of this column gets a topic of its own."
        ),
    ] = None,
    row_format: Annotated[
        RowFormat,
        typer.Option(
            "--row-format", help="How rows are stored; json if other Kafka clients write the table."
        ),
    ] = RowFormat.ROW,
    key_format: Annotated[
        KeyFormat | None,
        typer.Option(
            "--key-format", help="How keys are stored. Default: raw for one key column, json for several."
        ),
    ] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", "-p", metavar="NAME=VALUE", help="A property; repeatable."),
    ] = None,
    comment: CommentOption = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Succeed if the table exists.")
    ] = False,
) -> None:
    """Create a table, and its database if it does not exist.

    Properties are configs of its topics, snapshot.interval.ms, snapshot.log.bytes, and user.* for yourself.

    \b
    Examples:
      tidemill table create shop.orders --columns "id bigint, region string, amount double" \\
        --primary-key id --buckets 4
      tidemill table create shop.stock --schema-from stock.parquet --primary-key region,item
    """
    from tidemill.cli.output import write_json, write_line

    if (columns is None) == (schema_from is None):
        raise typer.BadParameter("say what columns it has: with --columns, or with --schema-from")
    if boundary and buckets is not None:
        raise typer.BadParameter("the boundaries say how many buckets there are", param_hint="--buckets")
    schema = _schema(columns, schema_from)
    key = split_names(primary_key)
    options: dict[str, Any] = {
        "primary_key": key,
        "buckets": buckets,
        "boundaries": _boundaries(boundary or [], schema, key),
        "partition_by": partition_by,
        "row_format": row_format.value,
        "key_format": None if key_format is None else key_format.value,
        "properties": parse_assignments(properties, "--property"),
        "comment": comment,
        "if_not_exists": if_not_exists,
    }

    async def work(db: AsyncTidemill) -> tuple[bool, TableDefinition]:
        existed = if_not_exists and any(each.name == table for each in await db.tables())
        return not existed, (await db.create_table(table, schema, **options)).definition

    created, definition = run(session, work)
    if session.as_json:
        from tidemill.cli.tables.describing import table_value

        write_json({"created": created, **table_value(definition)})
    elif not created:
        write_line(f"table {table} exists already")
    else:
        write_line(f"table {table} created: {_in_words(definition)}")


def _schema(columns: str | None, path: Path | None) -> pa.Schema:
    from tidemill.tables.rows.types import parse_columns

    if columns is not None:
        return parse_columns(columns)
    from tidemill.cli.tables.schema import schema_of

    assert path is not None
    return schema_of(path, table_write.chosen_format(path, None, "--schema-from"))


def _boundaries(texts: list[str], schema: pa.Schema, key: list[str]) -> list[tuple[Any, ...]]:
    from tidemill.cli.tables.keys import key_fields, parse_prefix

    if not texts:
        return []
    missing = [name for name in key if name not in schema.names]
    if missing or not key:
        raise typer.BadParameter(
            f"boundaries are keys, and {', '.join(missing) or 'a primary key'} is not among the columns"
            if missing
            else "boundaries are keys: give a --primary-key",
            param_hint="--boundary",
        )
    fields = key_fields(schema, key)
    return [parse_prefix(text, fields) for text in texts]


def _in_words(definition: TableDefinition) -> str:
    from tidemill.tables.rows.types import describe_type

    columns = ", ".join(f"{field.name} {describe_type(field.type)}" for field in definition.schema)
    key = f"primary key ({', '.join(definition.primary_key)})" if definition.primary_key else "no primary key"
    return f"{columns}; {key}; {plural(definition.buckets, 'bucket')}"


def list_tables(
    session: Session,
    database: Annotated[
        str | None, typer.Argument(metavar="DATABASE", help="Only the tables of this database.")
    ] = None,
) -> None:
    """List the tables.

    \b
    Example:
      tidemill table list shop
    """
    from dataclasses import asdict

    from tidemill.cli.output import Table, show

    async def work(db: AsyncTidemill) -> list[TableInfo]:
        return await db.tables(database)

    found = run(session, work)
    value = [{"table": each.name, **asdict(each)} for each in found]
    for entry in value:
        del entry["name"]
    rows = [
        (
            each.name,
            ", ".join(each.primary_key) or None,
            each.column_count,
            each.buckets,
            each.partition_count or None,
            each.row_format,
            each.comment,
        )
        for each in found
    ]
    columns = ("table", "primary key", "columns", "buckets", "partitions", "format", "comment")
    show(session, value, Table(columns, rows))


def describe(session: Session, table: TableArgument) -> None:
    """Show a table: its columns, key, buckets, formats, partitions, properties, topics and older schemas.

    \b
    Example:
      tidemill table describe shop.orders --format json
    """
    from tidemill.cli.output import Table, show

    async def work(found: AsyncTable) -> TableDefinition:
        return found.definition

    definition = with_table(session, table, work)
    from tidemill.cli.tables.describing import boundary_texts, table_value

    value = table_value(definition)
    columns = [
        (each["name"], each["type"], None if each["nullable"] else "not null", each["key"], each["comment"])
        for each in value["columns"]
    ]
    routing = "by hash"
    if definition.bucket_map.is_ranged:
        routing = f"by range: {', '.join(boundary_texts(definition))}"
    facts = [
        ("primary key", ", ".join(definition.primary_key) or None),
        ("buckets", definition.buckets),
        ("routing", routing),
        ("row format", definition.row_format),
        ("key format", definition.key_format if definition.primary_key else None),
        ("partitioned by", definition.partition_column),
        ("created", time_text(definition.created_ms)),
        ("comment", definition.comment),
        *sorted(definition.properties.items()),
    ]
    tables = [
        Table(("column", "type", "null", "key", "comment"), columns, title=f"table {table}"),
        Table(("property", "value"), [(name, None if each is None else str(each)) for name, each in facts]),
        Table(("partition", "topic"), [(each.value, each.topic) for each in definition.partitions]),
    ]
    versions = [(each["schema_id"], ", ".join(each["columns"])) for each in value["schema_versions"]]
    if len(versions) > 1:
        tables.append(Table(("schema", "columns"), versions))
    show(session, value, *tables)


def alter(
    session: Session,
    table: TableArgument,
    add_column: Annotated[
        list[str] | None,
        typer.Option(
            "--add-column", metavar="COLUMN", help='A nullable column like "note string"; repeatable.'
        ),
    ] = None,
    to_set: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set a property; repeatable.")
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", metavar="NAME", help="Remove a property; repeatable.")
    ] = None,
    comment: CommentOption = None,
) -> None:
    """Add columns to a table, or change its properties or its comment. Existing rows get nulls.

    \b
    Example:
      tidemill table alter shop.orders --add-column "note string" --set retention.ms=86400000
    """
    from tidemill.cli.output import write_json, write_line

    values = parse_assignments(to_set, "--set")
    if not add_column and not values and not unset and comment is None:
        raise typer.BadParameter("nothing to change: give --add-column, --set, --unset or --comment")

    async def work(found: AsyncTable) -> TableDefinition:
        altered = await found.alter(
            add_columns=", ".join(add_column) if add_column else None,
            set_properties=values,
            unset_properties=unset or (),
            comment=comment,
        )
        return altered.definition

    definition = with_table(session, table, work)
    if session.as_json:
        from tidemill.cli.tables.describing import table_value

        write_json(table_value(definition))
    else:
        write_line(f"table {table} altered: {_in_words(definition)}")


def drop(
    session: Session,
    tables: Annotated[
        list[str], typer.Argument(metavar="TABLE", help="The tables to drop.", show_default=False)
    ],
    yes: YesOption = False,
    if_exists: Annotated[
        bool, typer.Option("--if-exists", help="Succeed if a table does not exist.")
    ] = False,
) -> None:
    """Drop tables with all of their rows. This cannot be undone.

    \b
    Example:
      tidemill table drop shop.orders --yes
    """
    from tidemill.cli.output import write_json, write_line

    confirm(f"Drop {', '.join(tables)} with all rows?", yes=yes)

    async def work(db: AsyncTidemill) -> list[str]:
        known = {each.name for each in await db.tables()}
        for name in tables:
            await db.drop_table(name, if_exists=if_exists)
        return [name for name in tables if name in known]

    dropped = run(session, work)
    if session.as_json:
        write_json({"dropped": dropped})
    else:
        for name in tables:
            write_line(f"table {name} {'dropped' if name in dropped else 'does not exist'}")
