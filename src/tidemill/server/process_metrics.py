"""Metrics of the process, from the operating system.

The names are those that Prometheus' own clients use, so that dashboards for any process fit.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from tidemill.coordination.metrics import Metric, counter, gauge

__all__ = ("PROCESS_METRICS", "ProcessUsage", "measure_process")

_PROC: Final = Path("/proc/self")


class ProcessUsage(NamedTuple):
    """Resources that the process uses; None for those that the system does not tell."""

    cpu_seconds: float
    resident_bytes: int | None
    open_files: int | None
    open_files_max: int


async def measure_process() -> ProcessUsage:
    """Measure the process, in a thread."""
    return await asyncio.to_thread(_measure)


def _measure() -> ProcessUsage:
    used = resource.getrusage(resource.RUSAGE_SELF)
    resident_bytes = open_files = None
    with suppress(OSError):
        # The second number is the resident set in pages.
        resident_bytes = int((_PROC / "statm").read_text().split()[1]) * resource.getpagesize()
    with suppress(OSError):
        # One of them is the listing itself.
        open_files = len(os.listdir(_PROC / "fd")) - 1
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ProcessUsage(used.ru_utime + used.ru_stime, resident_bytes, open_files, limit)


PROCESS_METRICS: Final[Sequence[Metric[ProcessUsage]]] = (
    counter("process_cpu_seconds_total", "CPU time of the process.", lambda usage: usage.cpu_seconds),
    gauge(
        "process_resident_memory_bytes",
        "Memory of the process that is in RAM.",
        lambda usage: usage.resident_bytes,
    ),
    gauge("process_open_fds", "Open files and sockets of the process.", lambda usage: usage.open_files),
    gauge("process_max_fds", "The most open files and sockets.", lambda usage: usage.open_files_max),
)
