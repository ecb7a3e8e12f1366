"""The context of a benchmark: its plan, a working directory, and fresh nodes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from bench.plan import Plan
from bench.processes import NodeProcess

__all__ = ("Bench",)


@dataclass(slots=True)
class Bench:
    """The context of a run: its plan, a directory to work in, and a function that reports progress."""

    plan: Plan
    work: Path
    progress: Callable[[str], None]
    _numbers: Iterator[int] = field(default_factory=count)

    @contextmanager
    def data_dir(self) -> Iterator[Path]:
        """A name for a data directory that does not exist yet; removed at the end."""
        path = self.work / f"data-{next(self._numbers)}"
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def node(self) -> Iterator[NodeProcess]:
        """A fresh node that takes connections."""
        with self.data_dir() as path, NodeProcess(self.work, path) as node:
            node.wait_ready().close()
            yield node
