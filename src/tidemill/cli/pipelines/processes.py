"""The processes of a run. Their output goes, line by line, into one queue and one log file.

No process outlives the run, however it ends: each is told by the kernel when this one dies.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Final, NamedTuple

__all__ = ("Line", "Process", "RunLog")

_PR_SET_PDEATHSIG: Final = 1
_STOP_SECONDS: Final = 20.0
_TAIL_CHARACTERS: Final = 200_000
# Loaded here, because nothing may be loaded between fork and exec.
_LIBC: Final = ctypes.CDLL(None)


class Line(NamedTuple):
    """A line that a process wrote. ``text`` is None once, after its last line."""

    process: str
    stream: str
    text: str | None


class RunLog:
    """The log file of a run, which has the output of all its processes."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = threading.Lock()
        self._file = path.open("w", encoding="utf-8")

    def write(self, who: str, text: str) -> None:
        """Write one line, with the name of the process that wrote it."""
        with self._lock:
            if not self._file.closed:
                self._file.write(f"{who} | {text}\n")
                self._file.flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()


class Process:
    """A process whose lines go to the log and to ``lines``."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        log: RunLog,
        lines: SimpleQueue[Line],
    ) -> None:
        self.name = name
        self._log = log
        self._lines = lines
        self._errors: list[str] = []
        self._errors_characters = 0
        self._popen = subprocess.Popen(  # noqa: S603
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            # A session of its own, so that Ctrl-C reaches this process only, which ends the others in order.
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509  # it makes one system call
        )
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(stream, pipe), daemon=True)
            for stream, pipe in (("out", self._popen.stdout), ("err", self._popen.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: str, pipe: IO[str]) -> None:
        with pipe:
            for text in pipe:
                text = text.rstrip("\n")
                self._log.write(self.name, text)
                if stream == "err" and self._errors_characters < _TAIL_CHARACTERS:
                    self._errors.append(text)
                    self._errors_characters += len(text)
                self._lines.put(Line(self.name, stream, text))
        self._lines.put(Line(self.name, stream, None))

    @property
    def errors(self) -> str:
        """What the process wrote to its standard error, up to a limit."""
        return "\n".join(self._errors)

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    def wait(self) -> int:
        """Wait for the process, until all of its output has been read; gives its exit code."""
        for reader in self._readers:
            reader.join()
        return self._popen.wait()

    def stop(self) -> None:
        """Terminate the process; kill it if that takes too long."""
        if not self.ended:
            self._popen.terminate()
            try:
                self._popen.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._popen.kill()
        self.wait()


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
