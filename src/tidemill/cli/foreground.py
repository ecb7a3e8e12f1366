"""Running a node in the foreground, for ``tidemill up``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from importlib.abc import MetaPathFinder
from typing import Any

import uvloop

from tidemill import __version__
from tidemill.cli.output import write_json, write_line
from tidemill.cli.session import DEFAULT_SERVER, Session, warn
from tidemill.cli.supervisor import LeaseReport
from tidemill.config.settings import Settings
from tidemill.server.node import Node
from tidemill.server.running import run_until, tame_collector

__all__ = ("serve",)

_ANY_HOST = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to


def serve(session: Session, settings: Settings, supervisor: LeaseReport | None = None) -> None:
    """Run a node until a signal stops it, or until its ``supervisor`` is gone."""
    sys.meta_path.insert(0, _WithoutPandas())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Run(session, settings, supervisor).serve())


class _WithoutPandas(MetaPathFinder):
    """Makes ``import pandas`` fail, as where it is not installed.

    pyarrow imports it, to see whether a Python value is one of its objects. A process that only runs a node
    has none, and would load it, for a third of a second and 40 MB, while the first row is written.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("a node does not load pandas", name=fullname)


class _Run:
    """One node from start to stop."""

    def __init__(self, session: Session, settings: Settings, supervisor: LeaseReport | None) -> None:
        self._session = session
        self._supervisor = supervisor
        self._settings = settings
        self._stop = asyncio.Event()

    async def serve(self) -> None:
        """Start, announce, wait for a signal, stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        supervisor = self._supervisor
        if supervisor is not None:
            loop.add_reader(supervisor.fileno(), self._left_alone, loop, supervisor)
        node = Node(self._settings, on_lease=None if supervisor is None else supervisor.tell)
        await run_until(node, self._stop, lambda: self._ready(node))
        self._say({"event": "stopped"}, ["stopped"])

    def _ready(self, node: Node) -> None:
        tame_collector()
        self._announce(node)

    def _signalled(self, number: int) -> None:
        if self._stop.is_set():
            # What was acknowledged is on disk: the next start checks the logs and goes on.
            os._exit(128 + number)
        self._stop.set()
        self._say({"event": "stopping"}, ["stopping; once more to stop at once"])

    def _left_alone(self, loop: asyncio.AbstractEventLoop, supervisor: LeaseReport) -> None:
        loop.remove_reader(supervisor.fileno())
        warn("the process that looks after this node is gone: the node stops in an orderly way")
        self._stop.set()

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
        if self._session.as_json:
            write_json(event)
        else:
            for line in lines:
                write_line(line)


def _welcome(ready: dict[str, Any]) -> list[str]:
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
