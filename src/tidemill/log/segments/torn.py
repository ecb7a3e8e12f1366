"""Cutting bytes off the end of a log and keeping them in files beside it: torn ones, or a follower's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tidemill.errors import DiskFull
from tidemill.log.segments.segment import Segment
from tidemill.log.storage import Storage, StorageFile

__all__ = ("Cut", "TornTail", "keep_tail", "put_aside", "unused_name")

_COPY_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes that were taken off the end of a log."""

    path: str
    position: int
    size_bytes: int
    #: The path of the file that keeps the bytes.
    kept_in: str
    reason: str


class TornTail(NamedTuple):
    """The torn end of a segment: where it begins, and why it is taken for torn."""

    segment: Segment
    position: int
    reason: str

    def cut(self, storage: Storage) -> Cut:
        """Keep the bytes in a file beside and take them off the segment.

        Raises ``DiskFull`` if there is no space for that file, and then nothing is changed.
        """
        file = self.segment.file
        kept = keep_tail(storage, file, self.segment.log_path, self.position, self.reason)
        file.truncate(self.position)
        return kept


def keep_tail(storage: Storage, file: StorageFile, path: str, position: int, reason: str) -> Cut:
    """Copy what stands in a segment's file from ``position`` on to a file beside, synced; its name is not.

    Raises ``DiskFull`` if there is no space for that file, and then there is none.
    """
    end = file.size()
    kept_in = unused_name(storage, f"{path}.cut-{position}")
    keep = storage.open(kept_in, create=True)
    try:
        for start in range(position, end, _COPY_BYTES):
            keep.write(start - position, [file.read(start, min(_COPY_BYTES, end - start))])
        keep.sync()
    except DiskFull:
        storage.remove(kept_in)
        raise
    finally:
        keep.close()
    return Cut(path, position, end - position, kept_in, reason)


def put_aside(storage: Storage, path: str, size_bytes: int, reason: str) -> Cut:
    """Give a whole segment's file another name, under which no start takes it for a part of the log."""
    kept_in = unused_name(storage, f"{path}.cut-0")
    storage.rename(path, kept_in)
    return Cut(path, 0, size_bytes, kept_in, reason)


def unused_name(storage: Storage, wanted: str) -> str:
    """``wanted``, or the first of its numbered variants that does not exist: nothing kept is overwritten."""
    name, number = wanted, 1
    while storage.exists(name):
        number += 1
        name = f"{wanted}-{number}"
    return name
