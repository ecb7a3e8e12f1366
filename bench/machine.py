"""The machine and the versions on which the numbers were taken."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from confluent_kafka import libversion

import tidemill

__all__ = ("describe",)

_LIBRARIES = ("kio", "uvloop", "crc32c", "cramjam", "msgspec")


def describe(command: str) -> list[str]:
    """Lines that say when, where and with what."""
    libraries = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return [
        f"Taken on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC with `{command}`, {_commit()}.",
        "",
        f"- tidemill {tidemill.__version__}, Python {platform.python_version()}, {libraries}",
        f"- client: confluent-kafka {version('confluent-kafka')} (librdkafka {libversion()[0]})",
        f"- {_processor()}, {os.cpu_count()} cores, {_memory_gb():.0f} GB, Linux {platform.release()}; "
        f"load before the run: {load}",
    ]


def _commit() -> str:
    """The commit that was measured, and whether the work tree had changes beside it."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changes = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "of a tree without a commit"
    return f"at commit {commit}" + (" with uncommitted changes" if changes else "")


def _git(*arguments: str) -> str:
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
