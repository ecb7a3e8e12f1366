"""Producer snapshots on disk: the producer and transaction states as they were before an offset.

One is written when a segment is sealed, and by an orderly stop. A state is found again from the newest one at
or below the offset that is wanted, and the batches between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tidemill.errors import StorageError
from tidemill.log.flush import SideFile
from tidemill.log.notes.checked_file import pack_checked, read_checked
from tidemill.log.producer_state.producers import ProducerStates
from tidemill.log.segments.segment import segment_name
from tidemill.log.segments.segment_walk import walk_contiguous
from tidemill.log.storage import Storage, StorageFile

__all__ = (
    "SNAPSHOT_KIND",
    "list_snapshots",
    "newest_snapshot",
    "replay_segment",
    "snapshot_file",
    "snapshot_name",
)

SNAPSHOT_KIND = 2
_ENDING = ".producers"


def snapshot_name(offset: int) -> str:
    """The file name of the producer snapshot at ``offset``."""
    return f"{segment_name(offset)}{_ENDING}"


def list_snapshots(storage: Storage, directory: str) -> list[int]:
    """Offsets of the producer snapshots in a directory, in order."""
    names = (name for name in storage.list_dir(directory) if name.endswith(_ENDING))
    texts = (name.removesuffix(_ENDING) for name in names)
    return sorted(int(text) for text in texts if text.isdigit())


def snapshot_file(directory: str, states: ProducerStates, offset: int) -> SideFile:
    """The producer snapshot at ``offset``, to be written once the log is durable up to there."""
    return SideFile(
        f"{directory}/{snapshot_name(offset)}", pack_checked(SNAPSHOT_KIND, states.to_bytes()), offset
    )


def newest_snapshot(
    storage: Storage, directory: str, end_offset: int, on_damage: Callable[[str, StorageError], None]
) -> tuple[ProducerStates, int]:
    """The newest whole producer snapshot up to ``end_offset``, and its offset; empty states and 0 if none.

    ``on_damage`` is told the path of each that does not check out.
    """
    for offset in reversed(list_snapshots(storage, directory)):
        if offset > end_offset:
            continue
        path = f"{directory}/{snapshot_name(offset)}"
        try:
            return ProducerStates.from_bytes(read_checked(storage, path, SNAPSHOT_KIND)), offset
        except StorageError as error:
            on_damage(path, error)
    return ProducerStates(), 0


def replay_segment(
    states: ProducerStates, file: StorageFile, base_offset: int, end: int, from_offset: int, now_ms: int
) -> None:
    """Fold in the batches from ``from_offset`` on of a segment file up to byte ``end``.

    A producer counts as active at ``now_ms``: the batches' own timestamps may be years old, and expiring it
    would let its retries in as duplicates. Raises ``CorruptData`` if something does not check out.
    """
    for position, header in walk_contiguous(file, base_offset, end):
        if header.base_offset >= from_offset:
            read = partial(file.read, position, header.size_bytes)
            states.replay(header, read, max(header.max_timestamp, now_ms))
