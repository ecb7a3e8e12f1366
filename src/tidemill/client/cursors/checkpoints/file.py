"""Checkpoints in a local file: written beside it, synced, renamed, and the directory synced.

After a crash at any point the file is whole: the old checkpoint or the new one. A lock on a file beside it
(``<path>.lock``) makes one process the owner; it must be on a local disk. The fencing epoch in the checkpoint
goes up with every owner all the same, so that it shows how often that was.

Threads read and write the file. A call that is cancelled leaves its thread at work: what comes next waits for
it, also giving up the lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from tidemill.client.cursors.checkpoints.registration import Registration
from tidemill.client.cursors.checkpoints.store import AwaitedStore, begin_added
from tidemill.cursors.checkpoint import CHECKPOINT_BYTES_MAX, Checkpoint, Entry
from tidemill.cursors.errors import (
    CheckpointCorrupt,
    CheckpointWriteFailed,
    CursorFenced,
    CursorInUse,
)
from tidemill.cursors.machine import Step
from tidemill.cursors.position import Position
from tidemill.cursors.region import Region

__all__ = ("FileStore", "read_checkpoint", "write_checkpoint")

_MODE: Final = 0o600

_T = TypeVar("_T")


class FileStore(AwaitedStore):
    """Keeps the positions of one cursor in the file ``path``."""

    def __init__(
        self,
        path: Path,
        name: str,
        region: Region,
        registration: Registration | None = None,
        *,
        log_starts: Mapping[int, Position] | None = None,
    ) -> None:
        self._path = path
        self._name = name
        self._region = region
        self._registration = registration
        self._log_starts = log_starts
        self._lock: int | None = None
        #: What was begun last in a thread, and the end of the ownership once that has begun.
        self._work: asyncio.Future[Any] | None = None
        self._closing: asyncio.Future[None] | None = None
        self._entries: dict[int, Entry] = {}

    @property
    def where(self) -> str:
        return f"checkpoint {self._path}"

    @property
    def is_paused(self) -> bool:
        return self._registration is not None and self._registration.is_paused

    async def take_over(self, starts: Mapping[int, Position]) -> dict[int, Entry]:
        taken = await self._in_thread(lambda: self._take_over(starts))
        if self._registration is not None:
            # Only now: with the lock it is certain that an earlier owner of this file is gone.
            await self._registration.take(starts)
            self._registration.show({partition: entry.position for partition, entry in taken.items()})
            await self._registration.show_now()
        return taken

    def _take_over(self, starts: Mapping[int, Position]) -> dict[int, Entry]:
        if self._lock is None:
            self._lock = self._acquire()
        stored = read_checkpoint(self._path, self.where)
        if stored is not None:
            stored.check(self._name, self._region, self.where)
            self._entries = dict(stored.entries)
        if self._log_starts is not None:
            starts = begin_added(starts, self._entries, self._log_starts)
        taken = {
            partition: Entry(found.epoch + 1, found.position, found.finished)
            if (found := self._entries.get(partition)) is not None
            else Entry(1, start)
            for partition, start in starts.items()
        }
        # Written before anything is read: also where the first one begins is then decided for good.
        self._write(self._entries | taken)
        return taken

    async def commit(self, steps: Mapping[int, Step]) -> None:
        self.check()
        await self._in_thread(lambda: self._commit(steps))
        if self._registration is not None:
            self._registration.show({partition: step.after for partition, step in steps.items()})

    def _commit(self, steps: Mapping[int, Step]) -> None:
        changed = {
            partition: Entry(self._entries[partition].epoch, step.after, step.finished)
            for partition, step in steps.items()
        }
        self._write(self._entries | changed)

    async def _in_thread(self, action: Callable[[], _T]) -> _T:
        """Do something in a thread, after what an earlier call has begun there."""
        await self._idle()
        work = asyncio.ensure_future(asyncio.to_thread(action))
        self._work = work
        return await asyncio.shield(work)

    async def _idle(self) -> None:
        if self._work is not None:
            await asyncio.wait([self._work])

    def check(self) -> None:
        if self._lock is None or self._closing is not None:
            raise CursorFenced(
                "the checkpoint is not this process's any more; open it again", where=self.where
            )

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._release())
        await asyncio.shield(self._closing)

    async def _release(self) -> None:
        await self._idle()
        if self._registration is not None:
            await self._registration.close()
        # Closing the file gives the lock up. The file stays: a process that waits for the lock has it open.
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _acquire(self) -> int:
        path = f"{self._path}.lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        except OSError as error:
            raise CheckpointWriteFailed(
                f"{path} cannot be opened: {error.strerror}. Its directory must exist, and this process must "
                "be allowed to write there",
                where=self.where,
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.write(lock, f"{os.getpid()}\n".encode())
        except BlockingIOError:
            owner = os.read(lock, 32).decode(errors="replace").strip()
            os.close(lock)
            raise CursorInUse(
                f"another cursor, of process {owner or '?'}, has this checkpoint open; close it first",
                where=self.where,
            ) from None
        except OSError as error:
            os.close(lock)
            raise CheckpointWriteFailed(f"{path} cannot be locked: {error}", where=self.where) from error
        return lock

    def _write(self, entries: dict[int, Entry]) -> None:
        data = Checkpoint(self._name, self._region.identity(), entries).encode()
        try:
            write_checkpoint(self._path, data)
        except OSError as error:
            raise CheckpointWriteFailed(
                f"the checkpoint cannot be written: {error}; what was delivered since the last commit comes "
                "again",
                where=self.where,
            ) from error
        self._entries = entries


def read_checkpoint(path: Path, where: str) -> Checkpoint | None:
    """The checkpoint in a file; None if there is no file. Raises ``CheckpointCorrupt``."""
    try:
        with path.open("rb") as file:
            data = file.read(CHECKPOINT_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointCorrupt(
            f"the checkpoint cannot be read: {error}",
            where=where,
            stored="something that cannot be read",
            expected="a file of a checkpoint that this process may read, or none",
        ) from error
    return Checkpoint.decode(data, where)


def write_checkpoint(path: Path, data: bytes) -> None:
    """Replace a file so that a crash leaves the old one or the new one. Raises ``OSError``."""
    beside = path.with_name(f"{path.name}.new")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _MODE)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.fsync(file)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    finally:
        os.close(file)
    beside.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
