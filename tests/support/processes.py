"""Processes of the system tests: nodes, and clients that take calls as lines of JSON.

Nothing here waits by sleeping: a node says on its standard output that it is ready, a client answers every
call with one line. Every wait has a deadline, and what a process wrote to its standard error is part of the
error.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from support.ports import free_ports

__all__ = ("ClientFailed", "ClientProcess", "NodeProcess", "process_environment", "wait_until")

_TESTS = Path(__file__).resolve().parents[1]
_AS_INSTALLED = Path(__file__).with_name("as_installed")
_RUN_NODE = Path(__file__).with_name("run_node.py")
_START_DEADLINE_SECONDS = 120.0
_STOP_DEADLINE_SECONDS = 120.0
_CALL_DEADLINE_SECONDS = 400.0
_POLL_SECONDS = 0.02


def wait_until(condition: Callable[[], Any], what: str, deadline_seconds: float = 120.0) -> Any:
    """What ``condition`` returns once it is true. For states that only asking shows."""
    deadline = time.monotonic() + deadline_seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {deadline_seconds:.0f} s still not: {what}")
        time.sleep(_POLL_SECONDS)


class ClientFailed(Exception):
    """A call to a client process raised there; the message holds its traceback."""


class _Process:
    """A process whose output arrives line by line and whose errors go to a file."""

    def __init__(self, command: list[str], error_path: Path) -> None:
        self.error_path = error_path
        self._lines: queue.Queue[str | None] = queue.Queue()
        with error_path.open("ab") as errors:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=process_environment(),
            )
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self._stdin: IO[str] = self.popen.stdin
        self._reader = threading.Thread(target=self._read, args=(self.popen.stdout,), daemon=True)
        self._reader.start()

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self._lines.put(line)
        self._lines.put(None)

    def next_line(self, deadline_seconds: float) -> str | None:
        """The next line of output; None at its end. ``TimeoutError`` after the deadline."""
        try:
            return self._lines.get(timeout=deadline_seconds)
        except queue.Empty:
            raise TimeoutError(
                f"process {self.popen.pid} said nothing for {deadline_seconds:.0f} s\n{self.error_text()}"
            ) from None

    def write_line(self, line: str) -> None:
        self._stdin.write(line + "\n")
        self._stdin.flush()

    def error_text(self) -> str:
        return self.error_path.read_text(errors="replace")[-20_000:]

    def wait(self, deadline_seconds: float = _STOP_DEADLINE_SECONDS) -> int:
        """Wait for the end and let go of the pipes. A process that does not end is killed."""
        try:
            return self.popen.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise TimeoutError(f"process {self.popen.pid} did not end\n{self.error_text()}") from None
        finally:
            self._reader.join()
            for pipe in (self._stdin, self.popen.stdout):
                # What was not read by a killed process cannot be flushed any more.
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def kill(self) -> None:
        self.popen.kill()
        self.wait()


def process_environment() -> dict[str, str]:
    """The environment of processes that tests start: this work tree, and nothing of the caller's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
    paths = [str(_AS_INSTALLED), str(_TESTS.parent / "src"), str(_TESTS), kept.get("PYTHONPATH", "")]
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


class NodeProcess:
    """A node on one data directory; its ports stay the same over restarts."""

    def __init__(self, data_dir: Path, **settings: Any) -> None:
        self.data_dir = data_dir
        kafka_port, http_port = free_ports(2)
        self._settings = {
            "data_dir": str(data_dir),
            "listen": f"127.0.0.1:{kafka_port}",
            "http": f"127.0.0.1:{http_port}",
            # The directories of many nodes are kept for a while.
            "disk_reserve_bytes": 1024 * 1024,
            **settings,
        }
        #: Where the next start is to kill itself; see ``support.dying``.
        self.die_at: str | None = None
        self._process: _Process | None = None
        self._error_path = data_dir.with_name(f"{data_dir.name}.stderr")

    @property
    def bootstrap_servers(self) -> str:
        return str(self._settings["listen"])

    @property
    def http(self) -> str:
        """Where health and metrics are served."""
        return str(self._settings["http"])

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.bootstrap_servers.rpartition(":")
        return host, int(port)

    @property
    def http_url(self) -> str:
        return f"http://{self._settings['http']}"

    @property
    def pid(self) -> int:
        return self._running().popen.pid

    def start(self, **changed_settings: Any) -> NodeProcess:
        """Start, and return when it serves. ``RuntimeError`` with its message if it ends instead."""
        self._settings |= changed_settings
        self.launch()
        process = self._running()
        line = process.next_line(_START_DEADLINE_SECONDS)
        if line is None:
            self._process = None
            raise RuntimeError(f"the node ended with {process.wait()}\n{process.error_text()}")
        self._settings |= json.loads(line)
        return self

    def launch(self) -> None:
        """Start without waiting for anything."""
        assert self._process is None, "it runs already"
        points = () if self.die_at is None else (self.die_at,)
        command = [sys.executable, str(_RUN_NODE), json.dumps(self._settings), *points]
        self._process = _Process(command, self._error_path)

    def wait_for_death(self) -> None:
        """Wait until it has killed itself."""
        process, self._process = self._running(), None
        self.die_at = None
        assert process.wait() == -signal.SIGKILL, process.error_text()

    def kill(self) -> None:
        """End the process at once, by ``kill -9``."""
        process, self._process = self._running(), None
        process.kill()

    def stop(self) -> None:
        """Stop in an orderly way."""
        process, self._process = self._running(), None
        process.popen.send_signal(signal.SIGTERM)
        code = process.wait()
        assert code == 0, f"the node ended with {code}\n{process.error_text()}"

    def modules(self) -> set[str]:
        """Names of the Python modules that the process has loaded by now."""
        process = self._running()
        process.write_line("modules")
        line = process.next_line(_CALL_DEADLINE_SECONDS)
        assert line is not None, process.error_text()
        return set(json.loads(line))

    def log_text(self) -> str:
        """Everything this node has logged, over all its starts."""
        return self._error_path.read_text(errors="replace")

    def readiness(self) -> dict[str, Any]:
        """The answer of ``/readyz``."""
        with urllib.request.urlopen(f"http://{self.http}/readyz", timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def metric(self, name: str) -> float:
        """One of those of ``/metrics`` that have no labels."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=120) as response:
            lines = response.read().decode().splitlines()
        (found,) = (line for line in lines if line.startswith(f"{name} "))
        return float(found.split()[1])

    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def partition_dir(self, topic: str, partition: int = 0) -> Path:
        """Where the files of a partition are."""
        (found,) = (self.data_dir / "logs" / topic).glob(f"*-{partition}")
        return found

    def _running(self) -> _Process:
        assert self._process is not None, "it does not run"
        return self._process

    def __enter__(self) -> NodeProcess:
        return self.start() if self._process is None else self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            if exc is None:
                self.stop()
            else:
                self.kill()


class ClientProcess:
    """A program that runs named functions: one line of JSON in, one out.

    It is a Python script, see ``system/clients/worker.py``, or the command of a program in another language.
    """

    def __init__(self, program: Path | Sequence[str], error_path: Path, *arguments: str) -> None:
        command = [sys.executable, str(program)] if isinstance(program, Path) else program
        self._process = _Process([*command, *arguments], error_path)

    def call(
        self, name: str, /, *, deadline_seconds: float = _CALL_DEADLINE_SECONDS, **arguments: Any
    ) -> Any:
        """Run a function there and return its result; ``ClientFailed`` with the traceback if it raises."""
        self.begin(name, **arguments)
        return self.finish(deadline_seconds)

    def begin(self, name: str, /, **arguments: Any) -> None:
        """Start a call without waiting for it. If the process has ended, ``finish`` says so, and why."""
        with contextlib.suppress(BrokenPipeError):
            self._process.write_line(json.dumps({"name": name, "arguments": arguments}))

    def finish(self, deadline_seconds: float = _CALL_DEADLINE_SECONDS) -> Any:
        """The result of the oldest call that was begun."""
        line = self._process.next_line(deadline_seconds)
        if line is None:
            raise ClientFailed(f"the client process ended\n{self._process.error_text()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ClientFailed(answer["error"])
        return answer["result"]

    @property
    def pid(self) -> int:
        return self._process.popen.pid

    @property
    def alive(self) -> bool:
        return self._process.popen.poll() is None

    def kill(self) -> None:
        """End the process at once, by ``kill -9``."""
        self._process.kill()

    def close(self) -> None:
        """End it; a client that is stuck is killed."""
        if not self.alive:
            return
        self._process.popen.terminate()
        with contextlib.suppress(TimeoutError):
            self._process.wait(5.0)
