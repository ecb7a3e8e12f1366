"""What every command shares: its global options, its way to the server, and how it fails.

``command`` registers a function whose first parameter is the ``Session``. It adds the global options, so that
they are accepted before and after the name of the command, and turns errors into one line and an exit code.

=====  ============================================
code   meaning
=====  ============================================
0      done
1      refused or failed; the message says why
2      the command line is wrong
3      the topic, group, partition, node or id does not exist
4      the server cannot be reached
130    interrupted (143: terminated)
=====  ============================================

Nothing heavy is imported here: ``tidemill --help`` must answer at once.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from tidemill.client.cluster import Cluster
    from tidemill.errors import TidemillError

__all__ = (
    "DEFAULT_SERVER",
    "SERVER_VARIABLE",
    "CommandGroup",
    "ExecuteOption",
    "ExitCode",
    "Format",
    "Session",
    "YesOption",
    "command",
    "confirm",
    "fail",
    "tell_waiting",
    "warn",
)

DEFAULT_SERVER: Final = "127.0.0.1:9092"
SERVER_VARIABLE: Final = "TIDEMILL_SERVER"
_NOT_FOUND: Final = frozenset(
    {
        "unknown_topic_or_partition",
        "unknown_topic_id",
        "group_id_not_found",
        "transactional_id_not_found",
        "broker_id_not_registered",
        # Codes of tables, for which Kafka has none that is near.
        "database_not_found",
        "lease_not_found",
        "snapshot_not_found",
    }
)

_T = TypeVar("_T")


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    INTERRUPTED = 130


class Format(StrEnum):
    """The format in which results are written."""

    TABLE = "table"
    JSON = "json"


_PANEL: Final = "Global options"
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="HOST:PORT",
        help=f"The address of a node. Default: ${SERVER_VARIABLE}, else {DEFAULT_SERVER}.",
        rich_help_panel=_PANEL,
    ),
]
FormatOption = Annotated[
    Format | None,
    typer.Option(
        "--format",
        help="How to print results: table is for people, json for programs. Default: table.",
        rich_help_panel=_PANEL,
    ),
]
DebugOption = Annotated[
    bool, typer.Option("--debug", help="Show the Python traceback of an error.", rich_help_panel=_PANEL)
]
#: For commands that move positions, send records again or cut logs: without it they only show what they would
#: do.
ExecuteOption = Annotated[
    bool, typer.Option("--execute/--dry-run", help="Do it, or only show what would be done (default).")
]
#: For commands that ask on a terminal before they do what cannot be undone.
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
_SHARED: Final[dict[str, tuple[Any, Any]]] = {
    "server": (ServerOption, None),
    "format": (FormatOption, None),
    "debug": (DebugOption, False),
}


@dataclass(frozen=True, slots=True)
class Session:
    """The global options of one call."""

    server: str = DEFAULT_SERVER
    format: Format = Format.TABLE
    debug: bool = False
    #: The server if the caller named one, in whatever way; None if it is the default.
    named_server: str | None = None

    @property
    def as_json(self) -> bool:
        """Whether a program reads the output."""
        return self.format is Format.JSON

    def run(self, work: Callable[[Cluster], Coroutine[Any, Any, _T]]) -> _T:
        """Run ``work`` with a connection to the server. SIGINT and SIGTERM cancel it, so it can tidy up."""
        import asyncio

        async def connected() -> _T:
            from tidemill.client.cluster import Cluster

            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            async with Cluster(self.server) as cluster:
                return await work(cluster)

        try:
            return asyncio.run(connected())
        except asyncio.CancelledError:
            raise typer.Exit(128 + signal.SIGTERM) from None


class CommandGroup(TyperGroup):
    """A command with commands of its own, whose help shows the whole first sentence of each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for name in self.list_commands(ctx):
            each = self.get_command(ctx, name)
            if each is not None and not each.hidden:
                first, *_ = re.split(r"(?<=\.)\s", each.help or "", maxsplit=1)
                rows.append((name, " ".join(first.split())))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def command(
    app: typer.Typer, name: str, *, epilog: str | None = None, format_help: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command: its docstring is the help, its first parameter the session.

    ``format_help``: what ``--format`` means to this command, if that is not what it means to all.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in _shared_options(format_help).items()
        ]
        parameters = [
            context,
            *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own),
            *shared,
        ]

        def run(*, context: typer.Context, **values: Any) -> None:
            session = _session(context, {each: values.pop(each) for each in _SHARED})
            with _errors_as_exit_codes(session):
                function(session, **values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        app.command(name, help=inspect.getdoc(function), epilog=epilog)(run)
        return function

    return register


def _shared_options(format_help: str | None) -> dict[str, tuple[Any, Any]]:
    if format_help is None:
        return _SHARED
    option = typer.Option("--format", help=format_help, rich_help_panel=_PANEL)
    return {**_SHARED, "format": (Annotated[Format | None, option], None)}


def _session(context: typer.Context, given: dict[str, Any]) -> Session:
    """The session of a command: options given with it win over those given before it."""
    before = context.find_root().params
    named = given["server"] or before.get("server") or os.environ.get(SERVER_VARIABLE) or None
    return Session(
        server=named or DEFAULT_SERVER,
        format=Format(given["format"] or before.get("format") or Format.TABLE),
        debug=bool(given["debug"] or before.get("debug")),
        named_server=named,
    )


@contextmanager
def _errors_as_exit_codes(session: Session) -> Iterator[None]:
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output has closed it. Without this, Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(ExitCode.OK) from None
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        if session.debug:
            raise
        raise typer.Exit(_report(error)) from None


def _report(error: Exception) -> ExitCode:
    from tidemill.errors import NodeUnavailable, TidemillError

    if not isinstance(error, TidemillError):
        what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        fail(f"{what} (--debug shows where)")
        return ExitCode.ERROR
    fail(describe(error))
    if isinstance(error, NodeUnavailable):
        return ExitCode.UNREACHABLE
    known = {error.code.name, error.name.lower()}
    return ExitCode.NOT_FOUND if known & _NOT_FOUND else ExitCode.ERROR


def describe(error: TidemillError) -> str:
    """The error's code and message, on one line."""
    return f"{error.name}: {' '.join(error.message.split())}"


def fail(message: str) -> None:
    """Write an error to stderr."""
    _to_stderr("error", "31", message)


def warn(message: str) -> None:
    """Write a warning to stderr."""
    _to_stderr("warning", "33", message)


def confirm(question: str, *, yes: bool) -> None:
    """Ask on stderr before what cannot be undone, if a terminal is there to answer."""
    if yes or not sys.stdin.isatty():
        return
    sys.stderr.write(f"{question} [y/N]: ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Abort


def tell_waiting(descriptor: int, text: str) -> None:
    """Say on stderr what the command waits for, if the input is a terminal."""
    if os.isatty(descriptor):
        sys.stderr.write(f"{text}; Ctrl-D at the start of a line ends\n")
        sys.stderr.flush()


def _to_stderr(label: str, colour: str, message: str) -> None:
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        label = f"\x1b[{colour}m{label}\x1b[0m"
    sys.stderr.write(f"{label}: {message}\n")
    sys.stderr.flush()
