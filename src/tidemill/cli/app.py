"""The tree of commands. Each module registers its own; what they need is imported when they run."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import Annotated

import typer

from tidemill import __version__
from tidemill.cli import cursors, databases, doctor, groups, logs, settings, share, transactions, up
from tidemill.cli.cluster import commands as cluster
from tidemill.cli.load import commands as bench
from tidemill.cli.pipelines import commands as pipeline
from tidemill.cli.session import DebugOption, FormatOption, ServerOption, Session, command
from tidemill.cli.tables import commands as tables
from tidemill.cli.topics import commands as topics
from tidemill.cli.topics import consume, produce
from tidemill.cli.workers import commands as workers

__all__ = ("app",)


class Shell(StrEnum):
    """The shells that completion is written for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


# Help is plain text: drawing boxes would take longer than everything else that --help does.
app = typer.Typer(
    name="tidemill",
    help="Tidemill: a durable, Kafka-compatible streaming table store.\n\n"
    "'tidemill up' runs a node. In another terminal, 'tidemill topic --help' and 'tidemill table --help' "
    "show how to write and read.",
    epilog="Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 not found, 4 server unreachable, "
    "130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tidemill {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    server: ServerOption = None,
    format: FormatOption = None,  # noqa: A002 - the option is called --format
    debug: DebugOption = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


@command(app, "completion")
def _completion(session: Session, shell: Annotated[Shell, typer.Argument(help="Your shell.")]) -> None:
    """Print the script that completes commands and options in your shell.

    For bash: tidemill completion bash > ~/.local/share/bash-completion/completions/tidemill
    """
    os.environ["_TIDEMILL_COMPLETE"] = f"source_{shell.value}"
    sys.argv = ["tidemill"]
    app(prog_name="tidemill")


def _group(name: str, text: str) -> typer.Typer:
    group = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name)
    return group


up.register(app)
_topic = _group("topic", "Create, show, change, write and read topics.")
topics.register(_topic)
produce.register(_topic)
consume.register(_topic)
databases.register(_group("db", "Create, show, change and drop databases, which hold tables."))
tables.register(_group("table", "Create, show, change, write and read tables, their snapshots and leases."))
groups.register(_group("group", "Show consumer groups and their lag, reset their offsets, delete them."))
cursors.register(
    _group("cursor", "Show cursors and their lag, reset, pause, delete them, replay what was parked.")
)
share.register(
    _group("share", "Show share groups, their lag and records, reset, delete them, send back dead letters.")
)
transactions.register(_group("txn", "Show transactions, and abort those that never end."))
pipeline.register(_group("pipeline", "Create and run Spark's declarative pipelines over topics and tables."))
logs.register(_group("log", "Show, check and repair the log files in a data directory, without a node."))
bench.register(_group("bench", "Measure how fast a node is, and check that no record is lost."))
cluster.register(_group("cluster", "Show and change a cluster of several nodes."))
workers.register(_group("worker", "Run workers: Python functions that handle the records of a topic."))
doctor.register(app)
settings.register(app)
