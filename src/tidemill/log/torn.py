"""The torn end of a log: bytes behind its last whole batch, which never became durable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tidemill.errors import DiskFull
from tidemill.log.segment import Segment
from tidemill.log.storage import Storage

__all__ = ("Cut", "TornTail", "unused_name")


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes that were written but never durable, taken off the end of a log."""

    path: str
    position: int
    size_bytes: int
    #: Where the bytes are kept.
    kept_in: str
    reason: str


class TornTail(NamedTuple):
    """Where a segment is torn, and why that is known."""

    segment: Segment
    position: int
    reason: str

    def cut(self, storage: Storage) -> Cut:
        """Keep the bytes in a file beside and take them off the segment.

        Raises ``DiskFull`` if there is no room for that file, and then nothing is changed.
        """
        file = self.segment.file
        tail = file.read(self.position, file.size() - self.position)
        kept_in = unused_name(storage, f"{self.segment.log_path}.cut-{self.position}")
        keep = storage.open(kept_in, create=True)
        try:
            keep.write(0, [tail])
            keep.sync()
        except DiskFull:
            storage.remove(kept_in)
            raise
        finally:
            keep.close()
        file.truncate(self.position)
        return Cut(self.segment.log_path, self.position, len(tail), kept_in, self.reason)


def unused_name(storage: Storage, wanted: str) -> str:
    """``wanted``, or the first of its numbered variants that does not exist: nothing kept is overwritten."""
    name, number = wanted, 1
    while storage.exists(name):
        number += 1
        name = f"{wanted}-{number}"
    return name
