"""A flush of a partition: prepared by the log's owner, run in any thread.

The order is the safeguard: names first, then data from the oldest segment to the newest, then the note
that says so. A job that fails leaves the note untouched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tidemill.errors import DiskFull
from tidemill.log.checkpoint import CheckpointFile
from tidemill.log.inventory import Inventory
from tidemill.log.storage import Storage, StorageFile, write_atomic

__all__ = ("FlushJob", "SideFile")


class SideFile(NamedTuple):
    """An index, a producer snapshot or an epoch history: something that can be built again from the log."""

    path: str
    data: bytes
    #: It describes the log below this offset, and may be written once that much is durable.
    offset: int


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
