"""Space on the data directory's disk: whether it is full, who may use the reserve, what waits for space.

A write that finds no space is refused where it happens, and reported here: ``/readyz`` tells it, and what
could not be written for want of space is written once there is some::

    space ─ a write finds no space ─▶ full ── a read or a deletion finds none ──▶ reserve given up
      ▲                                 │                                                  │
      └─── space was tried out ◀────────┴──── the reserve is made again, beside that ◀─────┘

- Full: the reserve is there. A write may find space or not.
- Reserve given up: its space is for reads (state that is opened), recovery and deletions. Whatever makes the
  node's data grow is refused: appends to any partition, new topics and tables, snapshots, compactions.
- A start that finds no reserve and cannot make one begins in that last state: the node was killed in it.

Whether there is space is found out by writing: free blocks do not show a quota.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from tidemill.coordination.metrics import Metric, gauge
from tidemill.errors import DiskFull, TidemillError
from tidemill.server.disk.reserve import ReserveFile

__all__ = ("DISK_METRICS", "DiskSpace", "Reserve")

logger = logging.getLogger(__name__)

#: The disk counts as full until a file of this size fits.
_PROBE_BYTES = 1024 * 1024
_PROBE_NAME = "room-probe"
_CHECK_SECONDS = 1.0


class DiskUsage(NamedTuple):
    """Space on the disk of the data directory."""

    free_bytes: int
    total_bytes: int
    #: The size of the reserve; 0 while it is given up.
    reserve_bytes: int
    is_full: bool


Work = Callable[[], Awaitable[None]]


class Reserve(Protocol):
    """The reserve file, or a stand-in for it in tests."""

    @property
    def wanted_bytes(self) -> int:
        """The size that it should have; 0 means none."""

    def held_bytes(self) -> int:
        """The size that it has; 0 if it is given up."""

    def make(self) -> None:
        """Bring it to its size. Raises ``DiskFull`` and leaves nothing if there is no space."""

    def release(self) -> int:
        """Remove the reserve; returns how many bytes that frees."""


class DiskSpace:
    """The space on the disk of a data directory. Any thread may call ``note`` and ``give_up_reserve``."""

    def __init__(self, path: Path, reserve: Reserve | None = None) -> None:
        self._path = path
        self._reserve: Reserve = reserve or ReserveFile(path, 0)
        #: The error of the last write that found no space; None if there has been space since.
        self._refusal: DiskFull | None = None
        self._is_given_up = False
        self._lock = threading.Lock()
        #: Work to do before writes are accepted again, and work to do afterwards.
        self._before_writes: list[Work] = []
        self._after_writes: list[Work] = []
        #: Called with the reason when nothing may grow from now on, and with None when it may again.
        self.on_growth_refused: Callable[[DiskFull | None], None] = lambda refusal: None

    @classmethod
    def with_reserve(cls, path: Path, reserve_bytes: int) -> DiskSpace:
        """The disk of ``path``, with a reserve file of that size there; 0 means none."""
        return cls(path, ReserveFile(path, reserve_bytes))

    @property
    def is_full(self) -> bool:
        return self._refusal is not None

    @property
    def growth_refusal(self) -> DiskFull | None:
        """Why nothing may grow now; None while the reserve is there."""
        if not self._is_given_up:
            return None
        return DiskFull("the disk is full; writes are taken again when there is room")

    # --- what happens

    async def open_reserve(self) -> None:
        """Make the reserve if it is missing; without space for it the disk counts as full from the start."""
        try:
            await asyncio.to_thread(self._reserve.make)
        except DiskFull as error:
            self.note(error)
            self._begin_refusing()

    def note(self, error: DiskFull) -> None:
        """Note that a write found no space."""
        if self._refusal is None:
            logger.error("the disk is full, writes are refused until there is room: %s", error)
        self._refusal = error

    def give_up_reserve(self, error: DiskFull) -> bool:
        """Give up the reserve for a read or a deletion; returns whether trying again may help."""
        with self._lock:
            self.note(error)
            if not self._reserve.held_bytes():
                return False
            # Before that, so that nothing that grows takes the space.
            self._begin_refusing()
            freed = self._reserve.release()
        logger.warning("the reserve of %d bytes is given up for reads and deletions: %s", freed, error)
        return freed > 0

    def _begin_refusing(self) -> None:
        self._is_given_up = True
        self.on_growth_refused(self.growth_refusal)

    def when_space(self, work: Work) -> None:
        """Have ``work`` done before writes are accepted again; it is repeated until it succeeds."""
        if work not in self._before_writes:
            self._before_writes.append(work)

    def when_writable(self, work: Work) -> None:
        """Have ``work`` done once writes are accepted again; it is repeated until it succeeds."""
        if work not in self._after_writes:
            self._after_writes.append(work)

    async def watch(self) -> None:
        """Check the space from time to time, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            if self.is_full or self._after_writes or self.free_bytes() < _PROBE_BYTES:
                await self.check()

    async def check(self) -> None:
        """Find out whether there is space, and do the work that waits for it."""
        try:
            await asyncio.to_thread(self._try_space)
            await _do_all(self._before_writes)
            self._end_refusing()
            if not self.is_full:
                await _do_all(self._after_writes)
        except DiskFull as error:
            self.note(error)
        except TidemillError as error:
            logger.error("there is room again, but what has waited for it fails: %s", error)
        except Exception:
            logger.exception("there is room again, but what has waited for it fails; it is tried again")

    def _try_space(self) -> None:
        """Make the reserve again if it is given up; raises ``DiskFull`` unless there is space beside it."""
        if self._is_given_up:
            wanted = self._reserve.wanted_bytes - self._reserve.held_bytes() + _PROBE_BYTES
            if self.free_bytes() < wanted:
                # Trying would take the last space away from reads and deletions.
                raise DiskFull(f"{wanted} bytes must be free to make the reserve again")
            self._reserve.make()
        self._probe()

    def _end_refusing(self) -> None:
        with self._lock:
            if self._is_given_up:
                if self._reserve.held_bytes() < self._reserve.wanted_bytes:
                    return  # The work that waited has given up the reserve again.
                self._is_given_up = False
                self.on_growth_refused(None)
            if self._refusal is not None:
                logger.info("there is room on the disk again: writes are taken")
                self._refusal = None

    # --- what it tells

    def problem(self) -> str | None:
        """What is wrong with the disk, for people; None if nothing is."""
        refusal = self._refusal
        if refusal is None:
            return None
        text = (
            f"disk full: {self.free_bytes()} bytes are free at {self._path}; writes are refused until there "
            f"is room ({refusal.message})"
        )
        if self._is_given_up:
            needed = self._reserve.wanted_bytes + _PROBE_BYTES
            text += f"; the reserve is given up for reads and deletions, {needed} bytes must be free to go on"
        return text

    def free_bytes(self) -> int:
        """Bytes of the disk that this process may still use; 0 if the directory cannot be read."""
        try:
            return shutil.disk_usage(self._path).free
        except OSError:
            return 0

    async def measure(self) -> DiskUsage | None:
        """The disk's usage for the metrics; None if the directory cannot be read."""
        # In a thread: a disk that hangs must not stop the loop.
        return await asyncio.to_thread(self._measure)

    def _measure(self) -> DiskUsage | None:
        try:
            found = os.statvfs(self._path)
        except OSError:
            return None
        # What this user may write: blocks that are reserved for root do not count.
        free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
        return DiskUsage(free, total, self._reserve.held_bytes(), self.is_full)

    def _probe(self) -> None:
        path = self._path / _PROBE_NAME
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(descriptor, 0, _PROBE_BYTES)
            finally:
                os.close(descriptor)
                path.unlink()
        except OSError as error:
            raise DiskFull(f"no room for {_PROBE_BYTES} bytes: {error.strerror}") from error


async def _do_all(works: list[Work]) -> None:
    while works:
        work = works[0]
        await work()
        works.remove(work)


DISK_METRICS: Final[Sequence[Metric[DiskUsage | None]]] = (
    gauge(
        "tidemill_disk_free_bytes",
        "Room left where the data directory is.",
        lambda usage: None if usage is None else usage.free_bytes,
    ),
    gauge(
        "tidemill_disk_total_bytes",
        "Size of the disk of the data directory.",
        lambda usage: None if usage is None else usage.total_bytes,
    ),
    gauge(
        "tidemill_disk_full",
        "Whether a write found no room lately.",
        lambda usage: None if usage is None else usage.is_full,
    ),
    gauge(
        "tidemill_disk_reserve_bytes",
        "Room kept for reads and deletions on a full disk; 0 while it is given up.",
        lambda usage: None if usage is None else usage.reserve_bytes,
    ),
)
