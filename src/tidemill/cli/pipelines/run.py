"""One run of a pipeline: a node if it needs one, its ``prepare.py``, Spark, and a summary.

The exit code is that of ``spark-pipelines``. Whatever happens, everything that was started is ended.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from tidemill.cli.data_files import owner_of
from tidemill.cli.pipelines import spark
from tidemill.cli.pipelines.errors import Cause, cause_of, definition_of
from tidemill.cli.pipelines.events import Event, Failed, Finished, Refused, Translator
from tidemill.cli.pipelines.processes import Line, Process, RunLog
from tidemill.cli.pipelines.project import SERVERS_KEY, Project
from tidemill.cli.pipelines.results import Written, how_to_look, log_ends, spark_tables, written_since
from tidemill.cli.pipelines.screen import Screen
from tidemill.cli.session import Session, fail
from tidemill.errors import ConfigError
from tidemill.spark.sessions import check_java

__all__ = ("PREPARE", "Order", "run_pipeline")

PREPARE: Final = "prepare.py"
_LOCAL: Final = "local[*]"
_LOGS_KEPT: Final = 20


@dataclass(frozen=True, slots=True)
class Order:
    """The options of a run."""

    dry: bool = False
    master: str | None = None
    servers: str | None = None
    refresh: Sequence[str] = ()
    configuration: dict[str, str] = field(default_factory=dict)


def run_pipeline(session: Session, project: Project, order: Order) -> int:
    """Run a pipeline, and return the exit code."""
    check_java(os.environ)
    project.state.mkdir(exist_ok=True)
    _check_not_moved(project)
    signal.signal(signal.SIGTERM, _terminated)
    with ExitStack() as stack:
        stack.enter_context(_alone(project))
        return _Run(session, project, order, stack).run()


def _terminated(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _check_not_moved(project: Project) -> None:
    """Raise ``ConfigError`` if the project was moved: Spark's catalog has paths to the old folder."""
    mark = project.state / "folder"
    here = str(project.folder)
    if not mark.exists():
        mark.write_text(here, "utf-8")
    elif (before := mark.read_text("utf-8")) != here:
        raise ConfigError(
            f"this project was at {before} when it last ran, and its tables in {project.state} still point "
            f"there: move it back, or delete {project.state} to begin anew (a node's data in it goes too)"
        )


@contextmanager
def _alone(project: Project) -> Iterator[None]:
    """Lock the project, because two runs of it would write the same tables and checkpoints."""
    descriptor = os.open(project.state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another run of {project.folder} is under way: wait until it has ended"
            ) from None
        yield
    finally:
        os.close(descriptor)


class _Run:
    """One run, from the start of the first process to the last line."""

    def __init__(self, session: Session, project: Project, order: Order, stack: ExitStack) -> None:
        self._project = project
        self._order = order
        self._stack = stack
        self._screen = Screen(as_json=session.as_json)
        self._master = order.master or project.configuration.get("spark.master") or _LOCAL
        self._lines: SimpleQueue[Line] = SimpleQueue()
        self._translator = Translator()
        self._finished: list[Finished] = []
        self._troubles: list[Failed | Refused] = []
        self._started = time.monotonic()
        #: The data of the node inside this process; None if the servers run elsewhere.
        self._own_data: Path | None = None
        self._ends_before: dict[str, int] = {}
        self._log = RunLog(_log_path(project))
        stack.callback(self._log.close)

    def run(self) -> int:
        """Run everything and report the outcome; gives the exit code."""
        with self._screen.live():
            servers, embedded = self._node()
            configuration = {
                **spark.default_configuration(self._project.state, self._master),
                **self._project.configuration,
                **self._order.configuration,
                SERVERS_KEY: servers,
            }
            environment = spark.spark_environment(
                os.environ, servers, secrets.token_hex(16), local=spark.is_local(self._master)
            )
            server = self._start_server(configuration, environment)
            # Meanwhile Spark starts, which takes some seconds.
            if (embedded or not self._order.dry) and not self._prepare(environment):
                return 1
            port = self._wait_for(server)
            if port is None:
                return self._failed(1, _last_words(server.errors, "Spark could not start"))
            if not self._order.dry:
                self._ends_before = log_ends(servers)
            return self._pipeline(configuration, {**environment, "SPARK_REMOTE": f"sc://localhost:{port}"})

    def _node(self) -> tuple[str, bool]:
        """The servers' address, and whether they are a node inside this process."""
        servers = self._order.servers or self._project.servers
        name = self._project.name
        if servers is not None:
            self._screen.say(f"pipeline {name} on {servers}", event="node", servers=servers, data=None)
            return servers, False
        if not spark.is_local(self._master):
            raise ConfigError(
                f"{self._master} runs tasks on other machines, which cannot reach a node inside the run: "
                "run a node ('tidemill up') and give its address with --servers HOST:PORT"
            )
        data = self._project.state / "node"
        if (owner := owner_of(data)) is not None:
            raise ConfigError(
                f"{data} is in use by {owner}: if that is a node, give its address with --servers HOST:PORT"
            )
        from tidemill.embedded.node import open_node

        node = self._stack.enter_context(open_node(data))
        self._own_data = data
        text = f"pipeline {name} on a node of its own, data in {_relative(data)}"
        self._screen.say(text, event="node", servers=node.bootstrap_servers, data=str(data))
        return node.bootstrap_servers, True

    def _start(self, name: str, command: list[str], environment: dict[str, str]) -> Process:
        process = Process(
            name,
            command,
            folder=self._project.folder,
            environment=environment,
            log=self._log,
            lines=self._lines,
        )
        self._stack.callback(process.stop)
        return process

    def _start_server(self, configuration: dict[str, str], environment: dict[str, str]) -> Process:
        self._screen.doing("Spark starts")
        logging = spark.write_logging(self._project.state)
        return self._start("spark", spark.server_command(self._master, configuration, logging), environment)

    def _prepare(self, environment: dict[str, str]) -> bool:
        if not (self._project.folder / PREPARE).is_file():
            return True
        process = self._start("prepare", [sys.executable, "-u", PREPARE], environment)
        self._screen.doing(PREPARE)
        for line in self._until_end_of(process):
            if line.process == "prepare" and line.stream == "out" and line.text:
                self._screen.say(line.text)
        code = process.wait()
        if code:
            why = cause_of(process.errors, self._project.folder) or _last_words(process.errors, "")
            self._failed(code, Cause(f"{PREPARE} ended with {code}: {why.message}", why.path, why.line))
        return code == 0

    def _until_end_of(self, process: Process) -> Iterator[Line]:
        """The lines of all processes, until this one has closed both its streams."""
        open_streams = 2
        while open_streams:
            line = self._lines.get()
            if line.text is None and line.process == process.name:
                open_streams -= 1
            yield line

    def _wait_for(self, server: Process) -> int | None:
        """The port of Spark's server; None if the server has ended instead."""
        self._screen.doing("Spark starts")
        # It may have printed that while another process was waited for.
        for text in server.errors.splitlines():
            if found := spark.SERVER_READY.search(text):
                return int(found[1])
        for line in self._until_end_of(server):
            if line.text and (found := spark.SERVER_READY.search(line.text)):
                return int(found[1])
        return None

    def _pipeline(self, configuration: dict[str, str], environment: dict[str, str]) -> int:
        # The server has Spark's settings already, and Spark refuses some of them in the spec.
        spec = self._project.write_effective(
            {key: value for key, value in configuration.items() if not key.startswith("spark.")}
        )
        self._stack.callback(spec.unlink, missing_ok=True)
        self._screen.doing("reading the pipeline")
        command = spark.client_command(spec, dry=self._order.dry, refresh=self._order.refresh)
        client = self._start("pipeline", command, environment)
        for line in self._until_end_of(client):
            if line.text is None:
                continue
            if line.process == "spark":
                self._translator.logged(line.text)
            elif line.stream == "out":
                self._take(self._translator.printed(line.text, time.monotonic()))
        self._take(self._translator.ended(time.monotonic()))
        code = client.wait()
        if code:
            return self._failed(code, cause_of(client.errors, self._project.folder))
        named = [option for option in self._order.refresh if "=" in option]
        if named and not self._finished:
            return self._failed(1, Cause(_names_nothing(named)))
        self._completed(configuration)
        return 0

    def _take(self, events: list[Event]) -> None:
        for event in events:
            self._screen.show(event)
            if isinstance(event, Finished):
                self._finished.append(event)
            elif isinstance(event, Failed | Refused):
                self._troubles.append(event)

    def _completed(self, configuration: dict[str, str]) -> None:
        seconds = time.monotonic() - self._started
        servers = configuration[SERVERS_KEY]
        written, of_spark = Written(), list[Path]()
        if not self._order.dry:
            written = written_since(self._ends_before, servers)
            of_spark = spark_tables(
                configuration["spark.sql.warehouse.dir"], [each.flow for each in self._finished]
            )
        flows = len({each.flow for each in self._finished})
        done = "the pipeline is sound" if self._order.dry else f"{flows} {_flows(flows)} done"
        self._screen.say(
            f"{done} in {seconds:.1f} s; log: {_relative(self._log.path)}",
            event="completed",
            flows=flows,
            seconds=round(seconds, 3),
            log=str(self._log.path),
            tables=written.tables,
            topics=written.topics,
            spark_tables=[str(path) for path in of_spark],
        )
        data = None if self._own_data is None else _relative(self._own_data)
        for line in how_to_look(written, [_relative(path) for path in of_spark], servers, data):
            self._screen.advise(line)

    def _failed(self, code: int, cause: Cause | None) -> int:
        """Report each reason once, and the log file; gives the exit code."""
        reasons = self._reasons() or [_with_line(cause, self._project.folder)]
        if cause is None and not self._troubles:
            reasons = [f"spark-pipelines ended with code {code}"]
        self._screen.clear()
        for reason in reasons:
            fail(reason)
        self._screen.say(
            f"failed; log: {_relative(self._log.path)}",
            event="failed",
            code=code,
            errors=reasons,
            log=str(self._log.path),
        )
        return code if code > 0 else 1

    def _reasons(self) -> list[str]:
        """The messages about single flows: all that cannot run, or the failure that ended the run."""
        refused = [each for each in self._troubles if isinstance(each, Refused)]
        failed = [each for each in self._troubles if isinstance(each, Failed)]
        reasons = []
        for trouble in refused or failed[-1:]:
            definition = definition_of(trouble.flow, self._project.sources())
            cause = Cause(f"flow {trouble.flow}: {trouble.reason}", *(definition or (None, None)))
            reasons.append(_with_line(cause, self._project.folder))
        return reasons


def _flows(count: int) -> str:
    return "flow" if count == 1 else "flows"


def _names_nothing(options: Sequence[str]) -> str:
    """The message for options that name nothing: Spark ignores names that it does not know."""
    return (
        f"nothing ran: {' '.join(options)} names no table of this pipeline; Spark's tables and materialized "
        "views can be named so, as their transformations do; sinks run with everything"
    )


def _with_line(cause: Cause | None, folder: Path) -> str:
    if cause is None or cause.path is None:
        return "" if cause is None else cause.message
    path = cause.path.relative_to(folder) if cause.path.is_relative_to(folder) else cause.path
    return f"{path}, line {cause.line}: {cause.message}"


def _last_words(errors: str, otherwise: str) -> Cause:
    """The last line of a process's stderr that looks like a reason."""
    told = [text.strip() for text in errors.splitlines() if text.strip() and not text.startswith("\tat ")]
    reasons = [text for text in told if "Exception" in text or "rror" in text]
    return Cause(": ".join(filter(None, (otherwise, (reasons or told or ["it said nothing"])[-1]))))


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _log_path(project: Project) -> Path:
    """The path of a new log file. Deletes the oldest ones."""
    folder = project.state / "logs"
    for old in sorted(folder.glob("*.log"))[: -_LOGS_KEPT + 1]:
        old.unlink(missing_ok=True)
    return folder / f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S.%f}.log"
