"""Data directories of ephemeral nodes: removed when the node is closed, or later if its process was killed.

Each has a file that its process holds locked, so that a later process can tell a directory whose owner is
gone from one that is in use, also across containers that share it. The file is locked before it gets its
name: one that can be seen and locked has no owner any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ("EphemeralDirectory",)

_PREFIX: Final = "tidemill-"
_OWNED: Final = "owned"


class EphemeralDirectory:
    """A temporary directory of this process. Making one removes those that killed processes left behind."""

    def __init__(self) -> None:
        _remove_abandoned()
        self._directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        locked = self._directory / f"{_OWNED}.new"
        self._owned: int | None = os.open(locked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._owned, fcntl.LOCK_EX)
        locked.rename(self._directory / _OWNED)

    @property
    def data_dir(self) -> Path:
        """The data directory of the node."""
        return self._directory / "data"

    def remove(self) -> None:
        """Remove it with everything in it. Removing twice is fine."""
        if self._owned is not None:
            _remove(self._directory)
            os.close(self._owned)
            self._owned = None


def _remove(directory: Path) -> None:
    # The lock file goes last: without it nobody would finish a removal that is interrupted here.
    for each in directory.iterdir():
        if each.name != _OWNED:
            shutil.rmtree(each, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


def _remove_abandoned() -> None:
    for directory in _directories():
        with contextlib.suppress(OSError):
            owned = os.open(directory / _OWNED, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(owned, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(directory)
            finally:
                os.close(owned)


def _directories() -> Iterator[Path]:
    """The directories of this user's nodes, in use or not."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if (
                entry.name.startswith(_PREFIX)
                and entry.is_dir(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_uid == os.getuid()
            ):
                yield Path(entry.path)
