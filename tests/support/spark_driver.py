"""A Spark driver as a process that can be killed with all that it has started: see ``spark_jobs``."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

from support.processes import ClientProcess, wait_until

__all__ = ("SparkDriver", "descendants", "is_running")

_SCRIPT = Path(__file__).with_name("spark_jobs") / "driver.py"
_COLD_START_SECONDS = 400.0
_numbers = itertools.count()


class SparkDriver:
    """A driver with a session of its own; its files are below ``directory``."""

    def __init__(self, directory: Path, servers: str, master: str = "local[2,4]", **conf: str) -> None:
        number = next(_numbers)
        self._process = ClientProcess(_SCRIPT, directory / f"driver-{number}.stderr", servers)
        settings = {
            "spark.local.dir": str(directory / f"local-{number}"),
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
        }
        self._process.begin("open_session", folder=str(directory), conf=settings | conf, master=master)
        self._is_open = False

    def call(self, name: str, /, **arguments: Any) -> Any:
        """Run a function of ``spark_jobs/driver.py`` there."""
        if not self._is_open:
            self._process.finish(_COLD_START_SECONDS)
            self._is_open = True
        return self._process.call(name, deadline_seconds=_COLD_START_SECONDS, **arguments)

    def kill(self, spared: Collection[int] = ()) -> None:
        """kill -9 of the driver, of Spark's machine and of all its workers, at one moment.

        ``spared`` are workers that live on, as an executor that is cut off from its driver does.
        """
        pids = [self._process.pid, *descendants(self._process.pid)]
        doomed = [pid for pid in pids if pid not in spared]
        # First everybody stands still: nobody shall act upon the death of another.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in doomed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self._process.kill()
        wait_until(lambda: not any(map(is_running, doomed)), "all processes of the driver have ended")

    def __enter__(self) -> SparkDriver:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process.alive:
            self.kill()


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, those that they have started, and so on."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The name, in parentheses, may hold anything.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def is_running(pid: int) -> bool:
    """Whether the process is there, and not only as a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
