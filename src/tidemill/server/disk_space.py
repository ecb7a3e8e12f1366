"""Room on the disk of the data directory: whether it is full, and what waits for room.

A write that finds no room is refused where it happens, and works again as soon as there is room. This is
the one place that knows of all of them: ``/readyz`` tells it, and what the start could not write is written
once there is room again. Whether there is room is tried out: free blocks do not show a quota.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from tidemill.errors import DiskFull, TidemillError

__all__ = ("DiskSpace",)

logger = logging.getLogger(__name__)

#: The disk counts as full until a file of this size has room.
_ROOM_BYTES = 1024 * 1024
_PROBE_NAME = "room-probe"
_CHECK_SECONDS = 1.0


class DiskSpace:
    """See the module. ``note`` may be called from any thread, everything else belongs to the event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        #: The last write that found no room; None if there has been room since.
        self._refusal: DiskFull | None = None
        self._waiting: Callable[[], Awaitable[None]] | None = None

    @property
    def is_full(self) -> bool:
        return self._refusal is not None

    def note(self, error: DiskFull) -> None:
        """A write found no room."""
        if self._refusal is None:
            logger.error("the disk is full, writes are refused until there is room: %s", error)
        self._refusal = error

    def when_room(self, work: Callable[[], Awaitable[None]]) -> None:
        """Have ``work`` done once there is room, and again until it does not raise ``DiskFull``."""
        self._waiting = work

    def problem(self) -> str | None:
        """What is wrong, in words; None if nothing is."""
        if self._refusal is None:
            return None
        return (
            f"disk full: {self.free_bytes()} bytes are free at {self._path}; writes are refused until there "
            f"is room ({self._refusal.message})"
        )

    def free_bytes(self) -> int:
        """What this process may still use of the disk; 0 if the directory cannot be looked at."""
        try:
            return shutil.disk_usage(self._path).free
        except OSError:
            return 0

    async def watch(self) -> None:
        """Look from time to time, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            if self.is_full or self.free_bytes() < _ROOM_BYTES:
                await self.check()

    async def check(self) -> None:
        """Find out whether there is room, and do what has waited for it."""
        try:
            await asyncio.to_thread(self._probe)
            if self._waiting is not None:
                await self._waiting()
                self._waiting = None
        except DiskFull as error:
            self.note(error)
            return
        except TidemillError as error:
            logger.error("there is room again, but what has waited for it fails: %s", error)
            return
        except Exception:
            logger.exception("there is room again, but what has waited for it fails; it is tried again")
            return
        if self._refusal is not None:
            logger.info("there is room on the disk again: writes are taken")
            self._refusal = None

    def _probe(self) -> None:
        path = self._path / _PROBE_NAME
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(descriptor, 0, _ROOM_BYTES)
            finally:
                os.close(descriptor)
                path.unlink()
        except OSError as error:
            raise DiskFull(f"no room for {_ROOM_BYTES} bytes: {error.strerror}") from error
