"""Child processes: a node as a child, and what a process uses, by /proc."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.launch import MODULES_VARIABLE

__all__ = ("ROOT", "NodeProcess", "child_environment", "cpu_seconds", "free_ports", "memory_mb", "run_json")

ROOT = Path(__file__).resolve().parent.parent
_CPU_CLOCK_OF_PROCESS = 2
_START_TIMEOUT_SECONDS = 120.0
_STOP_TIMEOUT_SECONDS = 60.0
_LONGEST_CHILD_SECONDS = 900.0


def cpu_seconds(pid: int) -> float:
    """User and system time that the process has used so far, all threads.

    The sum of utime and stime in /proc/PID/stat, but read from the process's own clock (the formula is of
    clock_getcpuclockid), which counts nanoseconds where the file counts hundredths of a second.
    """
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK_OF_PROCESS)


def memory_mb(pid: int) -> tuple[float, float]:
    """(resident, proportional) size. Proportional counts a page shared with others only in part."""
    kilobytes = {
        name: int(rest.split()[0])
        for name, _, rest in (
            line.partition(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        )
        if name in ("Rss", "Pss")
    }
    return kilobytes["Rss"] / 1000, kilobytes["Pss"] / 1000


def child_environment(work: Path, root: Path = ROOT) -> dict[str, str]:
    """The environment of a child: no settings from outside, and compiled modules kept as in an install.

    ``root`` is the checkout whose code it runs; the installed one is this one.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    kept["PYTHONPYCACHEPREFIX"] = str(work / "pycache")
    if root != ROOT:
        kept["PYTHONPATH"] = str(root / "src")
    return kept


def run_json(
    work: Path, module: str, *arguments: str, root: Path = ROOT, **options: object
) -> dict[str, Any]:
    """Run ``python -m module ARGUMENTS OPTIONS-AS-JSON`` and return the JSON object that it prints."""
    command = [sys.executable, "-m", module, *arguments, json.dumps(options)]
    done = subprocess.run(
        command,
        cwd=root,
        env=child_environment(work, root),
        capture_output=True,
        text=True,
        timeout=_LONGEST_CHILD_SECONDS,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class NodeProcess:
    """A node in a process of its own. Construction returns at once; ``wait_ready`` waits for the port."""

    def __init__(
        self,
        work: Path,
        data_dir: Path,
        environment: Mapping[str, str] | None = None,
        root: Path = ROOT,
    ) -> None:
        self.data_dir = data_dir
        (self.port,) = free_ports(1)
        self._log = work / f"{data_dir.name}.log"
        self.spawned_at = time.perf_counter()
        arguments = ["up", "--data", str(data_dir), "--listen", self.bootstrap_servers, "--http", ""]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.launch", *arguments],
                cwd=root,
                env=child_environment(work, root) | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> socket.socket:
        """A connection, made as soon as the node takes one."""
        deadline = self.spawned_at + _START_TIMEOUT_SECONDS
        while time.perf_counter() < deadline:
            if self._process.poll() is not None:
                break
            try:
                return socket.create_connection(("127.0.0.1", self.port))
            except ConnectionRefusedError:
                time.sleep(0.001)
        self.kill()
        raise SystemExit(f"the node did not start:\n{self._log.read_text()[-4000:]}")

    def stop(self) -> float:
        """Stop in an orderly way; returns the seconds that took."""
        started = time.perf_counter()
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(_STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise SystemExit(f"the node did not stop within {_STOP_TIMEOUT_SECONDS} s") from None
        if code != 0:
            raise SystemExit(f"the node ended with code {code}:\n{self._log.read_text()[-4000:]}")
        return time.perf_counter() - started

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            self.kill()
            sys.stderr.write(f"the node's last words:\n{self._log.read_text()[-4000:]}\n")
        elif self._process.poll() is None:
            self.stop()


def node_modules(work: Path, data_dir: Path) -> list[str]:
    """Every module that a node loads from its start to its end, in order."""
    found = work / "modules.txt"
    with NodeProcess(work, data_dir, {MODULES_VARIABLE: str(found)}) as node:
        node.wait_ready().close()
    return found.read_text().split()


def free_ports(count: int) -> list[int]:
    """Ports for servers that are killed and come back: below those that outgoing connections are given."""
    chance = random.SystemRandom()
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            bound = stack.enter_context(socket.socket())
            port = chance.randrange(12_000, 32_000)
            with contextlib.suppress(OSError):
                bound.bind(("127.0.0.1", port))
                ports.append(port)
    return ports
