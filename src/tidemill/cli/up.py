"""``tidemill up``: run a node until it is told to stop.

Exit codes: 0 after an orderly stop, 1 if it could not start, 128 + signal if a second one ended it at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.session import DEFAULT_SERVER, Session, command, warn

if TYPE_CHECKING:
    from tidemill.config.settings import Settings
    from tidemill.server.http import HttpServer
    from tidemill.server.node import Node

__all__ = ("ConfigOption", "SetOption", "flags_of", "register")

_EPILOG = (
    "Settings come from flags, then TIDEMILL_* variables, then the file, then defaults; 'tidemill settings' "
    "lists them. SIGTERM and SIGINT stop the node in an orderly way, a second one at once; nothing that was "
    "acknowledged is lost either way. Exit codes: 0 stopped, 1 could not start, 128 + signal stopped at once."
)
_ANY_HOST = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to

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
    config: ConfigOption = None,
    settings: SetOption = None,
    log_level: Annotated[LogLevel, typer.Option("--log-level")] = LogLevel.INFO,
) -> None:
    """Run a node."""
    import logging

    import uvloop

    from tidemill.config.loading import find_config_file, load_settings

    flags = flags_of(settings, data_dir=data, listen=listen, http=http)
    file = find_config_file(config, os.environ, Path.cwd())
    chosen = load_settings(flags, os.environ, file)
    logging.basicConfig(
        level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Run(session, chosen).serve())


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


class _Run:
    """One node from start to stop."""

    def __init__(self, session: Session, settings: Settings) -> None:
        self._session = session
        self._settings = settings
        self._stop = asyncio.Event()

    async def serve(self) -> None:
        from tidemill.server.node import Node

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)
        node = Node(self._settings)
        starting = asyncio.ensure_future(node.start())
        if not await self._unless_stopped(starting):
            return
        http: HttpServer | None = None
        try:
            if self._settings.http is not None:
                from tidemill.server.http import HttpServer

                http = HttpServer(node)
                await http.start(self._settings.http)
            self._announce(node)
            await self._stop.wait()
        finally:
            if http is not None:
                await http.stop()
            await node.stop()
        self._say({"event": "stopped"}, ["stopped"])

    async def _unless_stopped(self, starting: asyncio.Future[Any]) -> bool:
        """Wait for the start. False if a signal came first: what was begun has been undone."""
        stopped: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
        if starting.cancelled():
            return False
        starting.result()
        return True

    def _signalled(self, number: int) -> None:
        if self._stop.is_set():
            # What is acknowledged is on disk: the next start checks the logs and goes on.
            os._exit(128 + number)
        self._stop.set()
        self._say({"event": "stopping"}, ["stopping; once more to stop at once"])

    def _announce(self, node: Node) -> None:
        advertised = node.broker.advertised
        if advertised.host in _ANY_HOST:
            warn(
                f"clients are told to connect to {advertised}, which works on this machine only: "
                "name the address they can reach with --set advertised_listener=HOST:PORT"
            )
        for problem in node.problems():
            warn(problem)
        server = str(advertised)
        ready = {
            "event": "ready",
            "server": server,
            "listen": str(node.address),
            "http": None if node.http_address is None else f"http://{node.http_address}",
            "data": str(node.settings.data_dir.resolve()),
            "node_id": node.settings.node_id,
            "cluster_id": node.broker.image.cluster_id,
            "pid": os.getpid(),
        }
        self._say(ready, _welcome(ready))

    def _say(self, event: dict[str, Any], lines: list[str]) -> None:
        from tidemill.cli.output import write_json, write_line

        if self._session.as_json:
            write_json(event)
        else:
            for line in lines:
                write_line(line)


def _welcome(ready: dict[str, Any]) -> list[str]:
    from tidemill import __version__

    option = "" if ready["server"] == DEFAULT_SERVER else f" --server {ready['server']}"
    served = "not served" if ready["http"] is None else f"{ready['http']}  (/healthz /readyz /metrics)"
    return [
        f"Tidemill {__version__} is ready (node {ready['node_id']}, process {ready['pid']})",
        f"  Kafka clients  {ready['server']}",
        f"  HTTP           {served}",
        f"  data           {ready['data']}",
        "try in another terminal:",
        f"  echo hello | tidemill topic produce greetings{option}",
        f"  tidemill topic consume greetings --exit{option}",
        f"  kcat -b {ready['server']} -L",
        "Ctrl-C stops it",
    ]
