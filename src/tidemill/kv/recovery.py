"""Recovery of a bucket's state at the start, or after it turned out to be damaged.

Names in the bucket's directory::

    live/                the state that is written to
    live/DAMAGED         somebody has read bytes there that do not check out: it is not used again
    live.damaged-<n>/    a state that was given up, for people to look at; only the newest is kept
    live.restoring/      a snapshot on its way to ``live``; worth nothing
    snapshots/<id>/      see ``tidemill.kv.snapshots``

Tried in this order; the first that works is the state, and the caller replays the log from its offset on:

1. ``live``, if it opens, is this bucket's, and the log still has everything that follows, deletions
   too, which compaction removes;
2. the newest snapshot of which the same is true, then the next one, …;
3. an empty state, if the log has everything from its start.

Where bytes were read that do not check out, a snapshot may have them too, if it was taken of such a state:
then it is read to its end before it is used.

Only what is damaged or unusable is moved away. A disk that is full, or a directory that another process has
open, is an error and changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.errors import CorruptData, StorageError
from tidemill.kv.contract import TABLE_SUFFIX, KvEngine, KvStore
from tidemill.kv.files import Files
from tidemill.kv.snapshots import DAMAGED_MARK, SnapshotInfo, SnapshotStore

__all__ = ("mark_damaged", "newest_offset", "recover")

_LIVE = "live"
_GIVEN_UP = "live.damaged-"
_RESTORING = "live.restoring"
#: How much is read at once of a snapshot that may be damaged.
_READ_BYTES = 1 << 20
_READ_ROWS = 10_000


def mark_damaged(directory: str | Path, files: Files) -> None:
    """Mark the live state as damaged, so that the next ``recover`` gives it up. Its store must be closed."""
    live = Path(directory) / _LIVE
    if files.stat(live) is not None:
        files.write(live / DAMAGED_MARK, b"")
        files.sync(live)


def newest_offset(directory: str | Path, engine: KvEngine, identity: bytes) -> int | None:
    """The log offset of the newest state in a bucket's directory that can be read; None if there is none.

    For a bucket whose log is gone: ``recover`` finds the same state if the log begins at this offset. Changes
    nothing of it.
    """
    live = Path(directory) / _LIVE
    files = engine.files
    if files.stat(live) is not None and files.stat(live / DAMAGED_MARK) is None:
        with contextlib.suppress(StorageError), engine.open_read_only(live, identity) as reader:
            return reader.applied_offset
    snapshots = SnapshotStore(directory, files)
    for info in reversed(snapshots.list()):
        if info.identity == identity:
            with contextlib.suppress(CorruptData):
                snapshots.verify(info)
                return info.log_offset
    return None


def recover(
    directory: str | Path,
    engine: KvEngine,
    identity: bytes,
    *,
    log_start: int,
    log_end: int,
    log_is_complete: bool,
    on_warning: Callable[[str], None],
    is_of_log: Callable[[int, int], bool] = lambda leader_epoch, offset: True,
    removed_below: int = 0,
) -> KvStore:
    """Open the newest state from which the log, whose offsets go from ``log_start`` to ``log_end``, leads on.

    ``log_end`` is the log's own end: state between the high watermark and it is good, and just not to be
    shown yet. ``log_is_complete``: replaying the log onto nothing gives the whole state. ``on_warning`` is
    told, in words, of everything that was found unusable. ``is_of_log`` says whether the log's history has
    that leader epoch up to that offset: state of another history is void. Below ``removed_below`` the log may
    have lost deletions, so older state would keep rows that are deleted: it is void, too. ``StorageError`` if
    there is no way to the state.
    """
    recovery = _Recovery(
        Path(directory),
        engine,
        identity,
        log_start,
        log_end,
        on_warning,
        is_of_log,
        engine.files,
        removed_below,
        log_is_complete,
    )
    store = recovery.from_live() or recovery.from_snapshots()
    if store is not None:
        return store
    if not log_is_complete:
        reasons = "; ".join(recovery.reasons) or "there is neither a live state nor a snapshot"
        raise StorageError(
            f"the state in {directory} cannot be rebuilt: the log begins at offset {log_start} and no longer "
            f"has what came before, and nothing else has it ({reasons}); restore the directory from a backup"
        )
    return recovery.from_nothing()


@dataclass(slots=True)
class _Recovery:
    directory: Path
    engine: KvEngine
    identity: bytes
    log_start: int
    log_end: int
    on_warning: Callable[[str], None]
    is_of_log: Callable[[int, int], bool]
    files: Files
    removed_below: int
    log_is_complete: bool
    #: Why the states that were tried cannot be used.
    reasons: list[str] = field(default_factory=list)
    #: Whether bytes were found that do not check out.
    was_damaged: bool = False

    @property
    def live(self) -> Path:
        return self.directory / _LIVE

    def from_live(self) -> KvStore | None:
        self.files.make_directory(self.directory)
        self.files.remove_tree(self.directory / _RESTORING)
        if self.files.stat(self.live) is None:
            return None
        if self.files.stat(self.live / DAMAGED_MARK) is not None:
            self.was_damaged = True
            self._give_up_live("bytes were read there that do not check out")
            return None
        return self._open_live()

    def from_snapshots(self) -> KvStore | None:
        snapshots = SnapshotStore(self.directory, self.files)
        snapshots.clean()
        for broken in snapshots.broken():
            self._warn(f"the snapshot {broken.path} is not used: {broken.reason}")
        for info in reversed(snapshots.list()):
            problem = self._problem_of(info)
            if problem is not None:
                self._warn(f"the snapshot {info.path} is not used: {problem}")
                continue
            try:
                snapshots.restore(info, self.live)
            except CorruptData as error:
                self._warn(f"the snapshot {info.path} is not used: {error.message}")
                continue
            store = self._open_live()
            if store is not None and self._is_readable(store, info, snapshots):
                return store
        return None

    def _is_readable(self, store: KvStore, info: SnapshotInfo, snapshots: SnapshotStore) -> bool:
        if not self.was_damaged:
            return True
        try:
            with store.view() as view:
                start: bytes | None = b""
                while start is not None:
                    start = view.read(start, None, _READ_BYTES, _READ_ROWS).next_start
        except CorruptData as error:
            _close(store)
            if error.path.endswith(TABLE_SUFFIX):
                snapshots.spoil(error.path)
            self._give_up_live(f"it is that of snapshot {info.snapshot_id}: {error.message}")
            return False
        return True

    def from_nothing(self) -> KvStore:
        return self.engine.open(self.live, self.identity, first_offset=self.log_start)

    def _open_live(self) -> KvStore | None:
        """Open the live state if it is usable; otherwise move it away."""
        try:
            store = self.engine.open(self.live, self.identity, first_offset=self.log_start)
        except CorruptData as error:
            self.was_damaged = True
            self._give_up_live(error.message)
            return None
        if store.was_created:
            # A crash has left a database without any content: a snapshot may have more.
            _close(store)
            self.files.remove_tree(self.live)
            return None
        offset = store.applied_offset
        problem = self._problem_at(offset, store.leader_epoch)
        if problem is None:
            return store
        _close(store)
        if self.log_start <= offset < self.removed_below and self.log_is_complete:
            # Sound, but of a replica that has not folded for long: nobody wants to look at it.
            self.files.remove_tree(self.live)
            self._warn(f"the state {self.live} is built again: {problem}")
        else:
            self._give_up_live(problem)
        return None

    def _problem_of(self, info: SnapshotInfo) -> str | None:
        if info.identity != self.identity:
            return f"it is of {info.identity!r}, not of {self.identity!r}"
        return self._problem_at(info.log_offset, info.leader_epoch)

    def _problem_at(self, offset: int, leader_epoch: int) -> str | None:
        if offset < self.log_start:
            return f"it is at offset {offset}, and the log begins at {self.log_start}"
        if offset > self.log_end:
            return f"it is at offset {offset}, and the log ends at {self.log_end}"
        if offset < self.removed_below:
            return (
                f"it is at offset {offset}, and the log is compacted up to {self.removed_below}: deletions "
                "may be missing between"
            )
        # State of an older version does not know its epoch: its offset is all that can be checked.
        if leader_epoch >= 0 and not self.is_of_log(leader_epoch, offset):
            return (
                f"it is at offset {offset} of leader epoch {leader_epoch}, which is not in the log's "
                "history: those records were cut"
            )
        return None

    def _give_up_live(self, reason: str) -> None:
        names = self.files.names(self.directory)
        older = [name for name in names if name.startswith(_GIVEN_UP)]
        numbers = [name.removeprefix(_GIVEN_UP) for name in older]
        number = max((int(text) for text in numbers if text.isascii() and text.isdigit()), default=0) + 1
        target = self.directory / f"{_GIVEN_UP}{number}"
        self.files.rename(self.live, target)
        self.files.sync(self.directory)
        for name in older:
            self.files.remove_tree(self.directory / name)
        self._warn(f"the state {self.live} is not used and was moved to {target.name}: {reason}")

    def _warn(self, text: str) -> None:
        self.reasons.append(text)
        self.on_warning(text)


def _close(store: KvStore) -> None:
    """Close a store that is given up: it does not matter whether its last rows reach the disk."""
    with contextlib.suppress(StorageError):
        store.close()
