"""``tidemill db create | list | describe | alter | drop``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.session import Session, YesOption, command, confirm
from tidemill.cli.tables.session import run, time_text
from tidemill.cli.topics.commands import parse_assignments

if TYPE_CHECKING:
    from tidemill.client.async_client import AsyncTidemill, DatabaseInfo, TableInfo

__all__ = ("register",)

DatabaseArgument = Annotated[str, typer.Argument(metavar="DATABASE", help="The name of the database.")]
CommentOption = Annotated[str | None, typer.Option("--comment", metavar="TEXT", help="A text for people.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(app, "create")(create)
    command(app, "list")(list_databases)
    command(app, "describe")(describe)
    command(app, "alter")(alter)
    command(app, "drop")(drop)


def create(
    session: Session,
    database: DatabaseArgument,
    comment: CommentOption = None,
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", metavar="NAME=VALUE", help="A property; repeatable."),
    ] = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Succeed if the database exists.")
    ] = False,
) -> None:
    """Create a database. 'table create' creates a missing database by itself.

    \b
    Example:
      tidemill db create shop --comment "orders and stock"
    """
    from tidemill.cli.output import write_json, write_line

    values = parse_assignments(properties, "--property")

    async def work(db: AsyncTidemill) -> bool:
        existed = any(each.name == database for each in await db.databases())
        await db.create_database(database, comment=comment, properties=values, if_not_exists=if_not_exists)
        return not existed

    created = run(session, work)
    if session.as_json:
        write_json({"database": database, "created": created})
    else:
        write_line(f"database {database} {'created' if created else 'exists already'}")


def list_databases(session: Session) -> None:
    """List the databases.

    \b
    Example:
      tidemill db list
    """
    from tidemill.cli.output import Table, show

    async def work(db: AsyncTidemill) -> list[DatabaseInfo]:
        return await db.databases()

    found = run(session, work)
    rows = [(each.name, each.table_count, time_text(each.created_ms), each.comment) for each in found]
    show(session, list(map(_value, found)), Table(("database", "tables", "created", "comment"), rows))


def _value(database: DatabaseInfo) -> dict[str, Any]:
    return {
        "database": database.name,
        "comment": database.comment,
        "properties": dict(database.properties),
        "tables": database.table_count,
        "created_ms": database.created_ms,
    }


def describe(session: Session, database: DatabaseArgument) -> None:
    """Show a database: its comment, its properties and its tables.

    \b
    Example:
      tidemill db describe shop
    """
    from tidemill.cli.output import Table, show
    from tidemill.errors import TableCode, TableError

    async def work(db: AsyncTidemill) -> tuple[DatabaseInfo, list[TableInfo]]:
        for each in await db.databases():
            if each.name == database:
                return each, await db.tables(database)
        raise TableError(
            TableCode.database_not_found,
            f"there is no database {database!r}; 'tidemill db list' shows those that exist",
        )

    found, tables = run(session, work)
    facts = [("created", time_text(found.created_ms)), ("comment", found.comment)]
    facts += sorted(found.properties.items())
    rows = [(each.name, ", ".join(each.primary_key) or None, each.buckets, each.comment) for each in tables]
    show(
        session,
        {**_value(found), "tables": [each.name for each in tables]},
        Table(("property", "value"), facts, title=f"database {database}"),
        Table(("table", "primary key", "buckets", "comment"), rows),
    )


def alter(
    session: Session,
    database: DatabaseArgument,
    to_set: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set a property; repeatable."),
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", metavar="NAME", help="Remove a property; repeatable.")
    ] = None,
    comment: CommentOption = None,
) -> None:
    """Change the properties or the comment of a database.

    \b
    Example:
      tidemill db alter shop --set owner=anna --unset purpose
    """
    from tidemill.cli.output import write_json, write_line

    values = parse_assignments(to_set, "--set")
    if not values and not unset and comment is None:
        raise typer.BadParameter("nothing to change: give --set, --unset or --comment")

    async def work(db: AsyncTidemill) -> None:
        await db.alter_database(
            database, comment=comment, set_properties=values, unset_properties=unset or ()
        )

    run(session, work)
    if session.as_json:
        write_json({"database": database, "set": values, "unset": unset or [], "comment": comment})
    else:
        write_line(f"database {database} altered")


def drop(
    session: Session,
    database: DatabaseArgument,
    cascade: Annotated[
        bool, typer.Option("--cascade", help="Also drop its tables, with all their rows.")
    ] = False,
    yes: YesOption = False,
    if_exists: Annotated[
        bool, typer.Option("--if-exists", help="Succeed if the database does not exist.")
    ] = False,
) -> None:
    """Drop a database. If it has tables, --cascade is needed. This cannot be undone.

    \b
    Example:
      tidemill db drop shop --cascade --yes
    """
    from tidemill.cli.output import write_json, write_line

    async def work(db: AsyncTidemill) -> bool:
        names = [each.name for each in await db.databases()]
        await db.drop_database(database, cascade=cascade, if_exists=if_exists)
        return database in names

    also = " with all of its tables and their rows" if cascade else ""
    confirm(f"Drop database {database}{also}?", yes=yes)
    dropped = run(session, work)
    if session.as_json:
        write_json({"database": database, "dropped": dropped})
    else:
        write_line(f"database {database} {'dropped' if dropped else 'does not exist'}")
