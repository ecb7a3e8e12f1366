"""Asking who uses a data directory, without taking it."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

__all__ = ("owner_of",)


def owner_of(path: Path) -> str | None:
    """Who holds the lock of a data directory, in words; None if nobody does.

    The lock is tried shared and given back at once, and nothing is created, so a node that starts at the same
    moment hardly notices.
    """
    try:
        descriptor = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            found = json.loads(os.pread(descriptor, 4096, 0))
            return f"process {found['pid']} on {found['host']}"
        except (ValueError, KeyError, TypeError):
            return "another process"
    else:
        return None
    finally:
        os.close(descriptor)
