"""Points of a write at which a test can hold a process or make it fail. The two sides share a directory.

The process under test calls ``reach`` at every point. The test arms a point before: the first process that
reaches it is then held there, until it is killed or released, or it fails there. A point is armed for one
batch, and works once. Every point that anybody reached is noted, so that a test can show that it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, Literal

__all__ = ("Failed", "Points")

_HELD_SECONDS_MAX = 240.0
_POLL_SECONDS = 0.02


class Failed(Exception):
    """What happens at a point that is armed to fail."""


class Points:
    """Points, by name and number of the batch."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    # --- the test's side

    def arm(self, point: str, batch: int, action: Literal["hold", "fail"] = "hold") -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._file(point, batch, action).touch()

    def held(self, point: str, batch: int) -> int | None:
        """The process that is held there, if there is one."""
        file = self._file(point, batch, "held")
        return int(file.read_text()) if file.exists() else None

    def release(self, point: str, batch: int) -> None:
        self._file(point, batch, "go").touch()

    def reached(self, point: str, batch: int | None = None) -> list[dict[str, Any]]:
        """What was noted at a point, in order."""
        return [each for each in self.notes() if each["point"] == point and batch in (None, each["batch"])]

    def notes(self) -> list[dict[str, Any]]:
        file = self.directory / "notes"
        if not file.exists():
            return []
        # The other process may be in the middle of a line: a write across a page comes in two pieces.
        whole, _, _unfinished = file.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    # --- the side of the process under test

    def reach(self, point: str, batch: int, **about: Any) -> bool:
        """Note it; wait or fail if that is armed. Gives whether it was held."""
        self.note(point, batch, **about)
        if self._claimed(point, batch, "fail"):
            raise Failed(f"armed to fail: {point} of batch {batch}")
        if not self._claimed(point, batch, "hold"):
            return False
        self.note("held", batch, at=point, **about)
        unready = self._file(point, batch, f"unready-{os.getpid()}")
        unready.write_text(str(os.getpid()))
        unready.rename(self._file(point, batch, "held"))
        deadline = time.monotonic() + _HELD_SECONDS_MAX
        while not self._file(point, batch, "go").exists():
            if time.monotonic() > deadline:
                raise Failed(f"nobody came for what is held: {point} of batch {batch}")
            time.sleep(_POLL_SECONDS)
        return True

    def note(self, point: str, batch: int, **about: Any) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"point": point, "batch": batch, "pid": os.getpid(), **about})
        with (self.directory / "notes").open("a") as notes:
            notes.write(line + "\n")

    def _claimed(self, point: str, batch: int, action: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self._file(point, batch, action).rename(self._file(point, batch, f"{action}-done"))
            return True
        return False

    def _file(self, point: str, batch: int, state: str) -> Path:
        return self.directory / f"{point}.{batch}.{state}"
