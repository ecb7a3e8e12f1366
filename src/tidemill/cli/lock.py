"""Asking who uses a data directory, without taking it."""

from __future__ import annotations

import fcntl
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
        from tidemill.server.data_directory import describe_owner

        return describe_owner(os.pread(descriptor, 4096, 0))
    else:
        return None
    finally:
        os.close(descriptor)
