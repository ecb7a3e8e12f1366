"""A flush of a partition, and the side files that wait for one.

A flush is prepared by the log's owner, and run in any thread.

The order is the safeguard: names first, then data from the oldest segment to the newest, then the note
that says so. A job that fails leaves the note untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tidemill.errors import DiskFull
from tidemill.log.notes.checkpoint import CheckpointFile
from tidemill.log.notes.inventory import Inventory
from tidemill.log.storage import Storage, StorageFile, write_atomic

__all__ = ("FlushJob", "SideFile", "SideFilesDue")


class SideFile(NamedTuple):
    """An index, a producer snapshot or an epoch history: something that can be built again from the log."""

    path: str
    data: bytes
    #: It describes the log below this offset, and may be written once that much is durable.
    offset: int


class SideFilesDue:
    """The side files of a log that are to be written, by the next flush as a rule."""

    def __init__(self, deferred: list[SideFile]) -> None:
        self._new: list[SideFile] = []
        #: There was no disk space for these; they alone are no reason for another flush.
        self._deferred = deferred

    @property
    def has_new(self) -> bool:
        """Whether there are side files for which a flush is due."""
        return bool(self._new)

    @property
    def has_deferred(self) -> bool:
        return bool(self._deferred)

    def add(self, side_file: SideFile) -> None:
        self._new.append(side_file)

    def take(self) -> list[SideFile]:
        """All of them, for a flush: it either defers or puts back what it does not write."""
        taken = self._deferred + self._new
        self._new, self._deferred = [], []
        return taken

    def defer(self, side_files: list[SideFile]) -> None:
        """Keep what a flush had no disk space for, until there is another reason to flush."""
        self._deferred = side_files

    def put_back(self, side_files: list[SideFile]) -> None:
        """Take back what a flush that could not run was given."""
        self._new = side_files + self._new

    def retry_deferred(self) -> None:
        """Make the deferred ones a reason for a flush."""
        self._new, self._deferred = self._deferred + self._new, []

    def keep_only(self, is_kept: Callable[[SideFile], bool]) -> None:
        """Forget the others: the part of the log that they describe is gone."""
        self._new = [side_file for side_file in self._new if is_kept(side_file)]
        self._deferred = [side_file for side_file in self._deferred if is_kept(side_file)]

    def write_new(self, storage: Storage, durable_offset: int) -> None:
        """Write at once what describes the log below ``durable_offset``. Raises ``DiskFull``."""
        for side_file in [each for each in self._new if each.offset <= durable_offset]:
            write_atomic(storage, side_file.path, side_file.data)
            self._new.remove(side_file)


@dataclass(slots=True)
class FlushJob:
    """Makes everything below ``target_offset`` durable."""

    storage: Storage
    directory: str
    checkpoint: CheckpointFile
    target_offset: int
    segment_base_offset: int
    position: int
    #: Files with unsynced batches, oldest first.
    files: list[StorageFile]
    sync_directory: bool
    #: Side files that are final and due. After ``run``: those for which there was no disk space.
    side_files: list[SideFile] = field(default_factory=list)
    #: The list of partitions, if this one's line in it may not be durable yet.
    inventory: Inventory | None = None

    def run(self) -> None:
        """Run the flush. Raises ``SyncFailed`` if durability is unknown; then it must not be tried again."""
        if self.sync_directory:
            self.storage.sync_dir(self.directory)
        for file in self.files:
            file.sync()
        if self.inventory is not None:
            self.inventory.sync()
        save = bool(self.side_files)
        try:
            while self.side_files:
                side_file = self.side_files[0]
                write_atomic(self.storage, side_file.path, side_file.data)
                self.side_files.pop(0)
            if save:
                self.checkpoint.save_recovery_point(self.target_offset)
            else:
                self.checkpoint.hint(self.target_offset)
        except DiskFull:
            # The data is durable, which is what was asked for. Side files that did not fit are tried again
            # with the next flush; until then the recovery point stays behind, so that a start would rebuild
            # them.
            return
