"""What an engine for the state of tables has to do: stores, views, and what all stores of a node share.

Tables and the server know this module, ``recovery`` and ``snapshots``, and no engine. ``server/runtime.py``
chooses the engine; RocksDB is in ``rocks/``.

- A store is a directory of files. Every write carries the log offset that the state has reached with it, and
  is there with its offset or not at all. What was not flushed may be lost in a crash: the store then has a
  prefix of the writes, and ``applied_offset`` says which one. The table's log has the rest.
- A store belongs to one identity (table, bucket, …, in bytes that only the caller understands).
- Rows are in table files, whose names end in ``TABLE_SUFFIX``. They never change once they are written, so
  that a snapshot shares them with the live state by hard links.
- Everything blocks, runs in threads and is thread-safe. Errors are Tidemill's own: ``CorruptData`` if
  something does not check out, ``DiskFull``, or another ``StorageError``, also for every call after
  ``close``.
- A write never waits for the engine's background work: it raises ``WriteStalled``, and the caller waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from tidemill.errors import DiskFull, StorageError
from tidemill.kv.files import Files

__all__ = (
    "TABLE_SUFFIX",
    "KvEngine",
    "KvExtent",
    "KvLimits",
    "KvRows",
    "KvStore",
    "KvValues",
    "KvView",
    "MakeKvEngine",
    "WriteStalled",
)

TABLE_SUFFIX = ".sst"


class WriteStalled(StorageError):
    """The engine takes no writes until its background work has caught up. Nothing was written."""


@dataclass(frozen=True, slots=True)
class KvRows:
    """A slice of the state in the order of keys. ``next_start`` is where the next begins, None at the end."""

    keys: list[bytes]
    values: list[bytes]
    next_start: bytes | None


@dataclass(frozen=True, slots=True)
class KvValues:
    """Values only; ``size_bytes`` still estimates keys plus values."""

    values: list[bytes]
    size_bytes: int
    next_start: bytes | None


@dataclass(frozen=True, slots=True)
class KvExtent:
    """How much state there is from a key on. ``next_start`` has the same meaning as in ``KvRows``."""

    rows: int
    size_bytes: int
    next_start: bytes | None
    #: Whether it stopped at ``next_start`` because of its limits, and not because it took long.
    is_full: bool


@dataclass(frozen=True, slots=True)
class KvLimits:
    """Limits of the memory of all stores of a node together."""

    block_cache_bytes: int
    write_buffer_bytes: int


class KvView(Protocol):
    """The state as it was at one moment, read slice by slice while writes go on."""

    @property
    def applied_offset(self) -> int:
        """The log offset of the view: everything below it is in the view, and nothing else."""

    def read(self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int) -> KvRows:
        """Rows with ``start <= key < end``: at least one if there is one, even one larger than ``max_bytes``.

        Fewer than the limits allow if it takes long: only ``next_start`` says whether there are more.
        """

    def read_values(self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int) -> KvValues:
        """``read`` without the keys. It may stop a little before the limits."""

    def measure(
        self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int, *, at_least_one: bool
    ) -> KvExtent:
        """Count rows with ``start <= key < end`` up to the limits, and the bytes of their keys and values.

        Ends early if it takes long, as ``read`` does.
        """

    def close(self) -> None:
        """Close the view. Never waits for other readers of it."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


class KvStore(Protocol):
    """The live state of a bucket. One thread writes at a time (others wait), any number read."""

    @property
    def identity(self) -> bytes: ...
    @property
    def applied_offset(self) -> int:
        """The log offset that the state has reached: everything below it is in the state."""

    @property
    def leader_epoch(self) -> int:
        """The leader epoch that wrote the last record below ``applied_offset``; -1 if it is not known."""

    @property
    def was_created(self) -> bool:
        """Whether ``open`` made an empty state because there was none."""

    def write(
        self,
        puts_keys: Collection[bytes],
        puts_values: Collection[bytes],
        deletes: Collection[bytes],
        applied_offset: int,
        leader_epoch: int = -1,
    ) -> None:
        """Put, then delete, and set ``applied_offset`` and ``leader_epoch``: all of it or nothing.

        Durable after the next ``flush``; before that a crash may take it back, and everything after it.
        ``WriteStalled`` if the engine takes no writes now.
        """

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, None where there is none."""

    def view(self) -> KvView:
        """A view of the state as it is now. Cheap, and waits for no writer."""

    def count_estimate(self) -> int:
        """An estimate of the number of keys."""

    def size_bytes(self) -> int:
        """An estimate of the size of the state in bytes."""

    def flush(self) -> None:
        """Make everything written so far durable."""

    def checkpoint(self, path: Path, files: Files) -> int:
        """Put a copy of the present state at ``path``, and give its offset. Nothing of it is synced yet."""

    def close(self) -> None:
        """Wait for calls under way, close the views and the files. Closing twice is fine."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


class KvEngine(Protocol):
    """Opens stores, and owns what they share. A node has one."""

    #: Whether new stores start with compactions paused; ``tell_stores_of_pause`` tells those that are open.
    compactions_paused: bool

    @property
    def files(self) -> Files:
        """The disk that the stores are on."""

    @property
    def give_up_reserve(self) -> Callable[[DiskFull], bool]:
        """Called when state could not be opened because the disk is full; True if it freed something."""

    def open(self, path: Path, identity: bytes, *, first_offset: int = 0) -> KvStore:
        """Open a store, or make an empty one whose applied offset is ``first_offset``.

        ``CorruptData`` if it is damaged or of another identity.
        """

    def open_read_only(self, path: Path, identity: bytes | None = None) -> KvView:
        """Open the state in a directory that nobody writes to, such as a snapshot's, for reading.

        Several may be open at once. The directory must not go away before.
        """

    def tell_stores_of_pause(self) -> None:
        """Tell the open stores to pause compactions, or to resume them. Slow."""


#: Called in a thread: it may load libraries. The callback is that of ``KvEngine.give_up_reserve``.
MakeKvEngine = Callable[[KvLimits, Callable[[DiskFull], bool]], KvEngine]
