"""A disk in memory that loses, tears and reorders whatever was not synced.

Every file has two contents: what reads show, and what is on the platter. A write changes the first at once
and waits in a list for the second; ``sync`` of the file empties the list. Names work the same way, per
directory, with ``sync_dir``.

    crash(power_loss=True)   every waiting change is kept, lost or torn on its own, so a later one may
                             survive an earlier one; bytes between survivors read as zeros
    crash(power_loss=False)  kill -9: everything visible survives, and is as unsynced as before

Both return the storage as the next process finds it; the old object and its open files are dead. Faults by
plan: ``fail_next``, ``before_next`` (run something in the middle of another call), ``cut_power_after`` (the
process dies inside some later call), ``capacity_bytes``, ``flip_bit``. All chance comes from the one
``random.Random``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from tidemill.errors import DiskFull, StorageError, SyncFailed
from tidemill.log.storage import Buffer

__all__ = ("FaultyStorage", "PowerCut")

_SECTOR_BYTES = 512


class PowerCut(BaseException):
    """The process is gone, in the middle of a call. No handler of ordinary errors may swallow it."""


@dataclass
class _Change:
    """A write (``data`` at ``position``) or, with ``data`` None, a truncation to ``position``."""

    position: int
    data: bytes | None

    def apply(self, content: bytearray) -> None:
        if self.data is None:
            del content[self.position :]
            content.extend(bytes(self.position - len(content)))
        elif self.data:
            content.extend(bytes(max(0, self.position - len(content))))
            content[self.position : self.position + len(self.data)] = self.data


@dataclass(eq=False)
class _Node:
    """A file; a directory is a node that nobody writes to."""

    visible: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    waiting: list[_Change] = field(default_factory=list)
    is_dir: bool = False
    #: Identifies the file, under whatever names it has.
    number: int = field(default_factory=count().__next__)

    def change(self, change: _Change) -> None:
        change.apply(self.visible)
        self.waiting.append(change)


@dataclass
class _Naming:
    """``removed`` names go and ``added`` names appear, together or not at all."""

    removed: list[str]
    added: dict[str, _Node]

    def apply(self, names: dict[str, _Node]) -> None:
        for path in self.removed:
            names.pop(path, None)
        names.update(self.added)

    def touches(self, directory: str) -> bool:
        return any(_parent(path) == directory for path in (*self.removed, *self.added))


@dataclass
class _Move(_Naming):
    """A directory goes elsewhere, and the names in it that are durable with it."""

    @property
    def old(self) -> str:
        return self.removed[0]

    @property
    def new(self) -> str:
        return next(iter(self.added))

    def apply(self, names: dict[str, _Node]) -> None:
        inside = [path for path in names if path.startswith(f"{self.old}/")]
        super().apply(names)
        for path in inside:
            names[self.moved(path)] = names.pop(path)

    def moved(self, path: str) -> str:
        return self.new + path.removeprefix(self.old) if path.startswith(f"{self.old}/") else path


@dataclass
class _Plan:
    call: str
    path_part: str
    action: Callable[[], object] | None = None
    error: BaseException | None = None


class FaultyStorage:
    """Implements ``tidemill.log.storage.Storage``."""

    def __init__(self, rng: random.Random | None = None, *, capacity_bytes: int | None = None) -> None:
        self.rng = rng or random.Random(0)
        self.capacity_bytes = capacity_bytes
        #: Told of every call, as (name, path).
        self.on_call: Callable[[str, str], None] = lambda call, path: None
        #: Told of every write that finds no room.
        self.on_full: Callable[[DiskFull], None] = lambda error: None
        #: Every call so far, as (name, path): what a test can look at to see what was and was not done.
        self.calls: list[tuple[str, str]] = []
        self._visible: dict[str, _Node] = {}
        self._durable: dict[str, _Node] = {}
        self._waiting: list[_Naming] = []
        self._plans: list[_Plan] = []
        self._calls_until_cut: int | None = None
        self._dead = False

    # --- faults

    def fail_next(self, call: str, path_part: str = "", error: BaseException | None = None) -> None:
        """The next ``call`` on a path that contains ``path_part`` fails; a write leaves some bytes behind."""
        if error is None:
            kind = SyncFailed if call in ("sync", "sync_dir") else StorageError
            error = kind(f"{call} failed on purpose")
        self._plans.append(_Plan(call, path_part, error=error))

    def before_next(self, call: str, path_part: str, action: Callable[[], object]) -> None:
        """Run ``action`` at the start of the next ``call`` on such a path: a delay, or a certain race."""
        self._plans.append(_Plan(call, path_part, action=action))

    def cut_power_after(self, calls: int) -> None:
        """``PowerCut`` comes out of the call after that many more; use ``crash`` then."""
        self._calls_until_cut = calls

    def forget_faults(self) -> None:
        """Nothing that was planned happens any more."""
        self._plans.clear()

    @property
    def power_is_cut(self) -> bool:
        """Whether no further call can succeed: a task may have swallowed the ``PowerCut``."""
        return self._calls_until_cut == 0

    def flip_bit(self, path: str, position: int, bit: int = 0) -> None:
        """Damage one byte of a file, on the platter and as read."""
        node = self._visible[path]
        node.visible[position] ^= 1 << bit
        if position < len(node.durable):
            node.durable[position] ^= 1 << bit

    def crash(self, *, power_loss: bool = True) -> FaultyStorage:
        """What the next process finds."""
        self._dead = True
        successor = FaultyStorage(self.rng, capacity_bytes=self.capacity_bytes)
        successor.on_call = self.on_call
        if not power_loss:
            successor._visible, successor._durable = self._visible, self._durable
            successor._waiting = self._waiting
            return successor
        # Each crash has its own mood, so that all-lost and all-kept come up as well as every mixture.
        kept_share = self.rng.choice((0.0, 0.2, 0.5, 0.8, 1.0))
        names = dict(self._durable)
        for naming in self._waiting:
            if self.rng.random() < kept_share:
                naming.apply(names)
        survivors: dict[int, _Node] = {}
        for path, node in names.items():
            if all(parent in names for parent in _parents(path)):
                if node.number not in survivors:
                    survivors[node.number] = self._survivor(node, kept_share)
                successor._visible[path] = successor._durable[path] = survivors[node.number]
        return successor

    def _survivor(self, node: _Node, kept_share: float) -> _Node:
        content = bytearray(node.durable)
        for change in node.waiting:
            if self.rng.random() < kept_share:
                change.apply(content)
            elif change.data and self.rng.random() < kept_share:
                for torn in self._torn(change.position, change.data):
                    torn.apply(content)
        return _Node(visible=bytearray(content), durable=content, is_dir=node.is_dir)

    def _torn(self, position: int, data: bytes) -> list[_Change]:
        if self.rng.random() < 0.5:
            return [_Change(position, data[: self.rng.randrange(len(data))])]
        pieces = []
        start = 0
        while start < len(data):
            end = min(len(data), start + _SECTOR_BYTES - (position + start) % _SECTOR_BYTES)
            if self.rng.random() < 0.5:
                pieces.append(_Change(position + start, data[start:end]))
            start = end
        return pieces

    def _enter(self, call: str, path: str) -> None:
        """Every call starts here: dead storages, power cuts and planned faults."""
        if self._dead:
            raise StorageError(f"{call} {path}: this storage belongs to a process that is gone")
        if self._calls_until_cut is not None:
            if self._calls_until_cut == 0:
                raise PowerCut(f"{call} {path}")
            self._calls_until_cut -= 1
        self.calls.append((call, path))
        self.on_call(call, path)
        for plan in self._plans:
            if plan.call == call and plan.path_part in path:
                self._plans.remove(plan)
                if plan.action is not None:
                    plan.action()
                if plan.error is not None:
                    raise plan.error
                return

    def _node(self, path: str) -> _Node:
        node = self._visible.get(path)
        if node is None:
            raise StorageError(f"cannot open {path}: no such file or directory")
        return node

    def _rename_things(self, removed: list[str], added: dict[str, _Node]) -> None:
        naming = _Naming(removed, added)
        naming.apply(self._visible)
        self._waiting.append(naming)

    @property
    def used_bytes(self) -> int:
        return sum(len(node.visible) for node in set(self._visible.values()))

    @property
    def room_bytes(self) -> int:
        """What can still be written."""
        return 2**62 if self.capacity_bytes is None else self.capacity_bytes - self.used_bytes

    # --- the protocol

    def open(self, path: str, *, create: bool = False) -> FaultyFile:
        self._enter("open", path)
        if create and path not in self._visible:
            if _parent(path) and _parent(path) not in self._visible:
                raise StorageError(f"cannot open {path}: its directory does not exist")
            self._rename_things([], {path: _Node()})
        return FaultyFile(self, path, self._node(path))

    def read_file(self, path: str) -> bytes:
        self._enter("read_file", path)
        return bytes(self._node(path).visible)

    def exists(self, path: str) -> bool:
        self._enter("exists", path)
        return path in self._visible

    def list_dir(self, path: str) -> list[str]:
        self._enter("list_dir", path)
        return sorted(name.rpartition("/")[2] for name in self._visible if _parent(name) == path and name)

    def make_dir(self, path: str) -> None:
        self._enter("make_dir", path)
        for directory in (*_parents(path), path):
            if directory not in self._visible:
                self._rename_things([], {directory: _Node(is_dir=True)})

    def rename(self, old: str, new: str) -> None:
        self._enter("rename", old)
        node = self._node(old)
        if not node.is_dir:
            self._rename_things([old], {new: node})
            return
        if any(path.startswith(f"{new}/") for path in self._visible):
            raise StorageError(f"cannot rename {old}: {new} is a directory that is not empty")
        move = _Move([old], {new: node})
        # What waits to be synced in it waits under its new name.
        for naming in self._waiting:
            naming.removed = [move.moved(path) for path in naming.removed]
            naming.added = {move.moved(path): each for path, each in naming.added.items()}
        move.apply(self._visible)
        self._waiting.append(move)

    def link(self, path: str, new: str) -> None:
        """Give a file a second name."""
        self._enter("link", path)
        self._rename_things([], {new: self._node(path)})

    def is_dir(self, path: str) -> bool:
        return not path or self._node(path).is_dir

    def file_number(self, path: str) -> int:
        """What a file has whatever its names are, and no other file."""
        return self._node(path).number

    def remove(self, path: str) -> None:
        self._enter("remove", path)
        self._node(path)
        self._rename_things([path], {})

    def remove_tree(self, path: str) -> None:
        self._enter("remove_tree", path)
        for name in [name for name in self._visible if name == path or name.startswith(f"{path}/")]:
            self._rename_things([name], {})

    def sync_dir(self, path: str) -> None:
        self._enter("sync_dir", path)
        for naming in [naming for naming in self._waiting if naming.touches(path)]:
            naming.apply(self._durable)
            self._waiting.remove(naming)


class FaultyFile:
    """Implements ``tidemill.log.storage.StorageFile``."""

    def __init__(self, storage: FaultyStorage, path: str, node: _Node) -> None:
        self._storage = storage
        self._node = node
        self._closed = False
        self.path = path

    def _enter(self, call: str) -> None:
        if self._closed:
            raise StorageError(f"cannot {call} {self.path}: the file is closed")
        self._storage._enter(call, self.path)

    def size(self) -> int:
        self._enter("size")
        return len(self._node.visible)

    def read(self, position: int, size: int) -> bytes:
        self._enter("read")
        return bytes(self._node.visible[position : position + size])

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        data = b"".join(buffers)
        try:
            self._enter("write")
        except (PowerCut, StorageError):
            if not self._closed and not self._storage._dead:
                self._node.change(_Change(position, data[: self._storage.rng.randrange(len(data) + 1)]))
            raise
        room = self._storage.room_bytes
        if position + len(data) - len(self._node.visible) > room:
            fitting = max(0, len(self._node.visible) + room - position)
            self._node.change(_Change(position, data[:fitting]))
            full = DiskFull(f"cannot write {self.path}: no space left")
            self._storage.on_full(full)
            raise full
        self._node.change(_Change(position, data))

    def truncate(self, size: int) -> None:
        self._enter("truncate")
        if size != len(self._node.visible):
            self._node.change(_Change(size, None))

    def sync(self) -> None:
        try:
            self._enter("sync")
        except StorageError:
            # As on Linux: some pages were written, some not, and all of them count as clean from now on.
            for change in self._node.waiting:
                if self._storage.rng.random() < 0.5:
                    change.apply(self._node.durable)
            self._node.waiting.clear()
            raise
        for change in self._node.waiting:
            change.apply(self._node.durable)
        self._node.waiting.clear()

    def close(self) -> None:
        self._closed = True


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _parents(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: number + 1]) for number in range(len(parts))]
