"""The first files of a partition: its directory and its checkpoint, which the first append needs.

Making them durable takes several syncs, too long for the event loop. So a caller that is about to append to a
partition without files has this work done in a thread before. An append that comes without that does it
itself, or waits for the thread that does.
"""

from __future__ import annotations

import threading

from tidemill.errors import StorageError
from tidemill.log.notes.checkpoint import Checkpoint, CheckpointFile
from tidemill.log.storage import Storage

__all__ = ("LogCreation",)


class LogCreation:
    """Makes the directory and the checkpoint of one partition, once. Safe to use from several threads."""

    def __init__(
        self, storage: Storage, directory: str, first: Checkpoint, existing: CheckpointFile | None
    ) -> None:
        """``existing``: the checkpoint, if there is one and only the segments are missing."""
        self._storage = storage
        self._directory = directory
        self._first = first
        self._existing = existing
        self._lock = threading.Lock()
        self._checkpoint: CheckpointFile | None = None
        self._given_up = False

    @property
    def is_done(self) -> bool:
        """Whether the work is done, so that ``take`` returns at once."""
        return self._checkpoint is not None

    def run(self) -> None:
        """Do the work, unless it is done. Raises ``StorageError``; then it can be tried again."""
        with self._lock:
            if self._checkpoint is None and not self._given_up:
                self._checkpoint = self._create() if self._existing is None else self._sync(self._existing)

    def take(self) -> CheckpointFile:
        """The checkpoint, for the log to keep; the work is done now if no thread has done it."""
        self.run()
        if self._checkpoint is None:
            raise StorageError(f"{self._directory} is closed; nothing was written")
        return self._checkpoint

    def give_up(self) -> None:
        """Make nothing any more, and close what was made: the log is closed without having taken it."""
        with self._lock:
            self._given_up = True
            if self._checkpoint is not None and self._existing is None:
                self._checkpoint.close()
            self._checkpoint = None

    def _sync(self, existing: CheckpointFile) -> CheckpointFile:
        # The checkpoint may have been made by a process that was killed before it synced the name.
        self._storage.sync_dir(self._directory)
        return existing

    def _create(self) -> CheckpointFile:
        # The directory is durable before the checkpoint exists, so a caller that finds one need not sync the
        # parents; the checkpoint is durable before the first segment exists, so a segment without one is
        # damage and never an unfinished start.
        self._storage.make_dir(self._directory)
        parent = self._directory
        while parent:
            parent = parent.rpartition("/")[0]
            self._storage.sync_dir(parent)
        return CheckpointFile.create(self._storage, self._directory, self._first)
