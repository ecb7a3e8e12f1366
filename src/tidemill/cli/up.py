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
    "A setting is taken from the command line, else from a TIDEMILL_* variable, else from the settings file; "
    "'tidemill settings' lists all settings. Ctrl-C (SIGINT) or SIGTERM stops the node, a second one "
    "at once. No acknowledged record is lost either way. With --cluster the node is a child of this process, "
    "which tells the cluster at once when it dies. Exit codes: 0 stopped, 1 could not start, "
    "128 + signal number: stopped at once."
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
        "--set",
        metavar="NAME=VALUE",
        help="Any setting; topic.NAME=VALUE is a default for topics. Repeatable.",
    ),
]


class LogLevel(StrEnum):
    """The verbosity of the node's log."""

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
        str | None,
        typer.Option("--data", metavar="DIR", help="Where the node keeps its data. Default: tidemill-data."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", metavar="HOST:PORT", help=f"The address for Kafka clients. Default: {DEFAULT_SERVER}."
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="HOST:PORT",
            help="The address for /healthz, /readyz and /metrics. Default: 127.0.0.1:9080; '' for none.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="ETCD",
            help="Be a node of the cluster whose metadata is in this etcd: etcd://host:port[,host:port...].",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="The node's name in the cluster. Default: node-1."),
    ] = None,
    cluster_listen: Annotated[
        str | None,
        typer.Option(
            "--cluster-listen",
            metavar="HOST:PORT",
            help="The address for other nodes of the cluster. Default: 127.0.0.1:9093.",
        ),
    ] = None,
    rack: Annotated[
        str | None,
        typer.Option("--rack", metavar="NAME", help="The node's rack: replicas are spread over racks."),
    ] = None,
    replace_directory: Annotated[
        bool,
        typer.Option(
            "--replace-directory",
            help="The node's old data directory is lost: go on with this empty one, once.",
        ),
    ] = False,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated",
            help="Allow addresses that other machines can reach. There is no authentication: use this on "
            "trusted networks only.",
        ),
    ] = False,
    config: ConfigOption = None,
    settings: SetOption = None,
    log_level: Annotated[
        LogLevel, typer.Option("--log-level", help="The least important messages that are logged.")
    ] = LogLevel.INFO,
) -> None:
    """Run a node in this terminal, until it is stopped."""
    import gc
    import logging

    from tidemill.config.loading import find_config_file, load_settings

    flags = flags_of(
        settings,
        data_dir=data,
        listen=listen,
        http=http,
        cluster=cluster,
        node_name=name,
        cluster_listen=cluster_listen,
        rack=rack,
        replace_directory="true" if replace_directory else None,
        allow_unauthenticated="true" if allow_unauthenticated else None,
    )
    file = find_config_file(config, os.environ, Path.cwd())
    chosen = load_settings(flags, os.environ, file)
    supervisor = None
    if chosen.cluster is not None:
        # Before anything large is loaded: the parent stays as small as it is here.
        from tidemill.cli.supervisor import revoker, supervise

        supervisor = supervise(revoker(chosen))
    # Importing makes many objects and hardly any garbage: a collector that looks for it slows the start.
    gc.disable()
    from tidemill.cli.foreground import serve

    gc.freeze()
    gc.enable()
    logging.basicConfig(
        level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    serve(session, chosen, supervisor)


def flags_of(settings: list[str] | None, **named: str | None) -> dict[str, Any]:
    """``--set`` and the flags with names of their own, as ``load_settings`` takes them; the latter win."""
    from tidemill.cli.topics.commands import parse_assignments

    flags: dict[str, Any] = {}
    topic: dict[str, str] = {}
    for name, value in parse_assignments(settings, "--set").items():
        if name.startswith("topic."):
            topic[name.removeprefix("topic.")] = value
        else:
            flags[name] = value
    flags |= {name: value for name, value in named.items() if value is not None}
    return {**flags, "topic": topic} if topic else flags
