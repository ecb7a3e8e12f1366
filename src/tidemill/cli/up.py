"""``tidemill up``: run a node until it is told to stop.

Exit codes: 0 after an orderly stop, 1 if it could not start, 128 + signal if a second one ended it at once.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tidemill.cli.session import DEFAULT_SERVER, Session, command

__all__ = ("ConfigOption", "SetOption", "flags_of", "register")

_EPILOG = (
    "Settings come from flags, then TIDEMILL_* variables, then the file, then defaults; 'tidemill settings' "
    "lists them. SIGTERM and SIGINT stop the node in an orderly way, a second one at once; nothing that was "
    "acknowledged is lost either way. Exit codes: 0 stopped, 1 could not start, 128 + signal stopped at once."
)

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="The settings file. Default: tidemill.toml, if there is one."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Any setting; topic.NAME sets a topic default. Repeatable."
    ),
]


class LogLevel(StrEnum):
    """How much the node tells of its work."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    command(app, "up", epilog=_EPILOG)(up)


def up(
    session: Session,
    data: Annotated[
        str | None, typer.Option("--data", metavar="DIR", help="The data directory. Default: tidemill-data.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help=f"For Kafka clients. Default: {DEFAULT_SERVER}."),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            "--http", metavar="HOST:PORT", help="Health and metrics. Default: 127.0.0.1:9080; '' for none."
        ),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated",
            help="Allow other machines to connect. Nobody is authenticated: for trusted networks only.",
        ),
    ] = False,
    config: ConfigOption = None,
    settings: SetOption = None,
    log_level: Annotated[LogLevel, typer.Option("--log-level")] = LogLevel.INFO,
) -> None:
    """Run a node."""
    import logging

    from tidemill.cli.serving import serve
    from tidemill.config.loading import find_config_file, load_settings

    flags = flags_of(
        settings,
        data_dir=data,
        listen=listen,
        http=http,
        allow_unauthenticated="true" if allow_unauthenticated else None,
    )
    file = find_config_file(config, os.environ, Path.cwd())
    chosen = load_settings(flags, os.environ, file)
    logging.basicConfig(
        level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    serve(session, chosen)


def flags_of(settings: list[str] | None, **named: str | None) -> dict[str, Any]:
    """``--set`` and the flags with names of their own, as ``load_settings`` takes them; the latter win."""
    from tidemill.cli.topics import parse_assignments

    flags: dict[str, Any] = {}
    topic: dict[str, str] = {}
    for name, value in parse_assignments(settings, "--set").items():
        if name.startswith("topic."):
            topic[name.removeprefix("topic.")] = value
        else:
            flags[name] = value
    flags |= {name: value for name, value in named.items() if value is not None}
    return {**flags, "topic": topic} if topic else flags
