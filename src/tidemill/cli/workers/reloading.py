"""``tidemill worker run --reload``: a child process that is started again when a source file changes.

Files are looked at from time to time: no library for that has to be installed, and it works on every file
system. The child is stopped in an orderly way, so nothing that it holds has to wait for its lock to end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tidemill.client.workers.stopping import StopSignals

__all__ = ("run_reloading", "source_times")

_LOOK_SECONDS: Final = 0.3
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist"})


def run_reloading(arguments: Sequence[str]) -> int:
    """Run ``tidemill worker run`` with these arguments until a signal; gives the exit code."""
    directory = Path.cwd()
    with StopSignals(second_interrupts=False) as stopping:
        while True:
            seen = dict(source_times(directory))
            # Its own session, so that Ctrl-C reaches it once, from here.
            child = subprocess.Popen(  # noqa: S603 - what the user has given to this very command
                [sys.executable, "-m", "tidemill.cli", "worker", "run", *arguments], start_new_session=True
            )
            changed = _wait(stopping, child, directory, seen)
            code = _end(child)
            if changed is None:
                return code
            sys.stderr.write(f"{changed} changed: starting again\n")


def _wait(
    stopping: StopSignals, child: subprocess.Popen[bytes], directory: Path, seen: dict[Path, int]
) -> Path | None:
    """The file that has changed; None if a signal came. A child that has ended waits for a change."""
    told = False
    while not stopping.wait(_LOOK_SECONDS):
        if child.poll() is not None and not told:
            told = True
            sys.stderr.write(f"the workers ended with code {child.returncode}; waiting for a change\n")
        now = dict(source_times(directory))
        for path in sorted(now.keys() | seen.keys()):
            if now.get(path) != seen.get(path):
                return path.relative_to(directory)
    return None


def _end(child: subprocess.Popen[bytes]) -> int:
    if child.poll() is None:
        child.terminate()
    code = child.wait()
    return code if code >= 0 else 128 - code


def source_times(directory: Path) -> Iterator[tuple[Path, int]]:
    """The Python files below a directory, and when each was changed last."""
    for root, directories, files in os.walk(directory):
        directories[:] = [each for each in directories if each not in _SKIPPED and not each.startswith(".")]
        for name in files:
            if name.endswith(".py"):
                path = Path(root, name)
                try:
                    yield path, path.stat().st_mtime_ns
                except OSError:
                    continue  # Removed, or being replaced, right now.
