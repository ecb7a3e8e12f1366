"""The tree of commands. Each module registers its own; what they need is imported when they run.

A call that begins with the name of a command gets a tree of that command only: to load and declare all others
takes longer than most commands do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Final, NamedTuple

import typer

from tidemill import __version__
from tidemill.cli.session import CommandGroup, DebugOption, FormatOption, ServerOption, Session, command

__all__ = ("make_app",)


class _Group(NamedTuple):
    """A command with commands of its own, which modules of ``tidemill.cli`` register."""

    text: str
    modules: tuple[str, ...]


#: Modules that register a command of their own name.
_COMMANDS: Final = ("up", "doctor", "settings")
_GROUPS: Final[Mapping[str, _Group]] = {
    "topic": _Group(
        "Create, show, change, write and read topics.",
        ("topics.commands", "topics.produce", "topics.consume"),
    ),
    "db": _Group("Create, show, change and drop databases, which hold tables.", ("databases",)),
    "table": _Group(
        "Create, show, change, write and read tables, their snapshots and leases.", ("tables.commands",)
    ),
    "group": _Group("Show consumer groups and their lag, reset their offsets, delete them.", ("groups",)),
    "cursor": _Group(
        "Show cursors and their lag, reset, pause, delete them, replay what was parked.", ("cursors",)
    ),
    "share": _Group(
        "Show share groups, their lag and records, reset, delete them, send back dead letters.", ("share",)
    ),
    "txn": _Group("Show transactions, and abort those that never end.", ("transactions",)),
    "pipeline": _Group(
        "Create and run Spark's declarative pipelines over topics and tables.", ("pipelines.commands",)
    ),
    "log": _Group("Show, check and repair the log files in a data directory, without a node.", ("logs",)),
    "bench": _Group("Measure how fast a node is, and check that no record is lost.", ("load.commands",)),
    "cluster": _Group("Show and change a cluster of several nodes.", ("cluster.commands",)),
    "worker": _Group(
        "Run workers: Python functions that handle the records of a topic.", ("workers.commands",)
    ),
}


class Shell(StrEnum):
    """The shells that completion is written for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tidemill {__version__}")
        raise typer.Exit


def make_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """The tree of commands; of only one command, if ``arguments`` begin with its name."""
    # Help is plain text: drawing boxes would take longer than everything else that --help does.
    app = typer.Typer(
        name="tidemill",
        cls=CommandGroup,
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
    app.callback()(_root)
    command(app, "completion")(_completion)
    named = arguments[0] if arguments else ""
    is_known = named in _COMMANDS or named in _GROUPS
    for name in _COMMANDS:
        if not is_known or name == named:
            _register(name, app)
    for name, group in _GROUPS.items():
        if not is_known or name == named:
            commands = typer.Typer(
                cls=CommandGroup, help=group.text, no_args_is_help=True, rich_markup_mode=None
            )
            app.add_typer(commands, name=name)
            for module in group.modules:
                _register(module, commands)
    return app


def _register(module: str, app: typer.Typer) -> None:
    import_module(f"tidemill.cli.{module}").register(app)


def _root(
    server: ServerOption = None,
    format: FormatOption = None,  # noqa: A002 - the option is called --format
    debug: DebugOption = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


def _completion(
    session: Session,
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="Your shell: bash, zsh or fish.")],
) -> None:
    """Print the script that completes commands and options in your shell.

    For bash: tidemill completion bash > ~/.local/share/bash-completion/completions/tidemill

    For zsh: tidemill completion zsh > DIRECTORY/_tidemill, in a directory of $fpath

    For fish: tidemill completion fish > ~/.config/fish/completions/tidemill.fish

    In bash, 'source <(tidemill completion bash)' is enough to try it.
    """
    os.environ["_TIDEMILL_COMPLETE"] = f"source_{shell.value}"
    sys.argv = ["tidemill"]
    make_app()(prog_name="tidemill")
