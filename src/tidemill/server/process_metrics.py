"""What the operating system says of the process and of the disk below the data directory.

The names of the process are those that Prometheus' own clients use, so that dashboards for any process fit.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tidemill.server.metrics import Metric

__all__ = ("measure_machine",)

_PROC = Path("/proc/self")


def measure_machine(data_dir: Path) -> list[Metric]:
    """Samples of the process and of the disk. Does system calls, so it runs in a thread.

    What the system does not tell is left out.
    """
    return [*_process(), *_disk(data_dir)]


def _process() -> Iterator[Metric]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield Metric(
        "process_cpu_seconds_total", "counter", "CPU time of the process.", used.ru_utime + used.ru_stime
    )
    with suppress(OSError):
        # The second number is the resident set in pages.
        pages = int((_PROC / "statm").read_text().split()[1])
        yield Metric(
            "process_resident_memory_bytes",
            "gauge",
            "Memory of the process that is in RAM.",
            pages * resource.getpagesize(),
        )
    with suppress(OSError):
        # One of them is the listing itself.
        open_files = len(os.listdir(_PROC / "fd")) - 1
        yield Metric("process_open_fds", "gauge", "Open files and sockets of the process.", open_files)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield Metric("process_max_fds", "gauge", "The most open files and sockets.", limit)


def _disk(data_dir: Path) -> Iterator[Metric]:
    with suppress(OSError):
        found = os.statvfs(data_dir)
        # What this user may write: a reserve of root's does not count.
        free = found.f_bavail * found.f_frsize
        yield Metric("tidemill_disk_free_bytes", "gauge", "Room left where the data directory is.", free)
        yield Metric(
            "tidemill_disk_total_bytes",
            "gauge",
            "Size of the disk of the data directory.",
            found.f_blocks * found.f_frsize,
        )
