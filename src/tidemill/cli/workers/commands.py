"""``tidemill worker run module:app``: run the workers of a module until a signal."""

from __future__ import annotations

import logging
import os
import signal
import sys
from enum import StrEnum
from typing import Annotated

import typer

from tidemill.cli.session import SERVER_VARIABLE, Session, command

__all__ = ("register",)

_EPILOG = (
    "APP is a worker, a connection (all of its workers are run), or a list of workers; without :APP all "
    "workers of the module are run. SIGINT or SIGTERM stops them: handlers that run may end, what waits goes "
    "back to the group; a second signal interrupts at once. --server goes to the module in $TIDEMILL_SERVER."
)


class LogLevel(StrEnum):
    """The verbosity of the log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(
        app,
        "run",
        epilog=_EPILOG,
        format_help="How to write the log to stderr: table (text) or json.",
    )(run)


def run(
    session: Session,
    target: Annotated[str, typer.Argument(metavar="MODULE[:APP]", help="Where the workers are.")],
    reload: Annotated[
        bool, typer.Option("--reload", help="Start again when a .py file below this directory changes.")
    ] = False,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="HOST:PORT",
            help="Serve the workers' metrics there as /metrics, for Prometheus.",
        ),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated",
            help="Allow an address for --metrics that other machines can reach. There is no authentication.",
        ),
    ] = False,
    log_level: Annotated[LogLevel, typer.Option("--log-level", help="What to log.")] = LogLevel.INFO,
) -> None:
    """Run the workers that a Python module defines, until they are told to stop."""
    if session.named_server is not None:
        os.environ[SERVER_VARIABLE] = session.named_server
    if reload:
        from tidemill.cli.workers.reloading import run_reloading

        options = ["--log-level", log_level.value, "--format", session.format.value]
        options += [] if metrics is None else ["--metrics", metrics]
        options += ["--allow-unauthenticated"] if allow_unauthenticated else []
        raise typer.Exit(run_reloading([target, *options]))
    from tidemill.cli.workers.finding import find_workers

    _log_to_stderr(session, log_level)
    # While the module is imported, which may wait for nodes, there is nothing to finish yet.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # As with python -m: modules of the directory in which one stands are found.
    sys.path.insert(0, os.getcwd())
    workers = find_workers(target)
    from tidemill.client.sync_worker import run_workers

    run_workers(*workers, metrics=metrics, allow_unauthenticated=allow_unauthenticated)


def _log_to_stderr(session: Session, level: LogLevel) -> None:
    handler = logging.StreamHandler()
    if session.as_json:
        from tidemill.client.workers.logs import JsonFormatter

        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=level.value.upper(), handlers=[handler])
