"""Lanes: which records of a cursor may be worked on side by side, and how far everything is done. Pure.

Rules:

- Records of one key, in one partition, are worked on one after the other, in the order of their offsets. A
  record without a key waits for nobody. Different keys go side by side, up to ``concurrency`` records.
- What is done is a position (everything below it is done) and the finished offsets above it. A record that is
  ``ahead_max`` or more above the oldest unfinished one of its partition is not begun: it could not be stored.
- A record that is given back is begun again before later records of its key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from tidemill.cursors.position import FINISHED_AHEAD_MAX

__all__ = ("Done", "HasKey", "Lanes")


class HasKey(Protocol):
    """What lanes order: a record of a partition with an offset and a key."""

    @property
    def partition(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def key(self) -> bytes | None: ...


R = TypeVar("R", bound=HasKey)


class Done(NamedTuple):
    """How far a partition is done: every record below ``upto``, and those at the offsets ``finished``."""

    upto: int
    finished: tuple[int, ...]


@dataclass(slots=True)
class _Partition:
    #: Offsets that were added and are not below the position, in order; the first is not finished.
    open: deque[int] = field(default_factory=deque)
    finished: set[int] = field(default_factory=set)
    #: Behind the last record that was added.
    end: int = 0


class Lanes(Generic[R]):
    """The records that were polled and are not done, by key."""

    def __init__(self, concurrency: int, ahead_max: int = FINISHED_AHEAD_MAX) -> None:
        self.concurrency = concurrency
        self._ahead_max = ahead_max
        self._partitions: dict[int, _Partition] = {}
        #: By partition and key: its records that are not finished, in order. The first may be under way.
        self._lines: dict[tuple[int, bytes], deque[R]] = {}
        #: Records that no other has to be finished before, in the order in which they became so.
        self._ready: deque[R] = deque()
        self._under_way: set[tuple[int, int]] = set()
        self._waiting = 0

    @property
    def under_way(self) -> int:
        """Records that were begun and are not done."""
        return len(self._under_way)

    @property
    def waiting(self) -> int:
        """Records that were added and not begun."""
        return self._waiting

    @property
    def is_idle(self) -> bool:
        """Whether everything that was added is done."""
        return not self._waiting and not self._under_way

    def add(self, records: Iterable[R]) -> None:
        """Take records behind all others of their partition."""
        for record in records:
            each = self._partitions.setdefault(record.partition, _Partition())
            assert record.offset >= each.end, f"offset {record.offset} comes after {each.end}"
            each.open.append(record.offset)
            each.end = record.offset + 1
            self._waiting += 1
            if record.key is None:
                self._ready.append(record)
                continue
            line = self._lines.setdefault((record.partition, record.key), deque())
            line.append(record)
            if len(line) == 1:
                self._ready.append(record)

    def begin(self) -> R | None:
        """The next record to work on; None while there is none, or enough are under way."""
        if len(self._under_way) >= self.concurrency:
            return None
        for _ in range(len(self._ready)):
            record = self._ready[0]
            if record.offset - self._partitions[record.partition].open[0] < self._ahead_max:
                self._ready.popleft()
                self._under_way.add((record.partition, record.offset))
                self._waiting -= 1
                return record
            # Another partition may have something that is not too far ahead.
            self._ready.rotate(-1)
        return None

    def done(self, record: R) -> None:
        """A record that was begun is finished: the next one of its key may be begun."""
        self._under_way.remove((record.partition, record.offset))
        if record.key is not None:
            line = self._lines[record.partition, record.key]
            line.popleft()
            if line:
                self._ready.append(line[0])
            else:
                del self._lines[record.partition, record.key]
        each = self._partitions[record.partition]
        each.finished.add(record.offset)
        while each.open and each.open[0] in each.finished:
            each.finished.remove(each.open.popleft())

    def give_back(self, record: R) -> None:
        """A record that was begun is not done: it is begun again, before later ones of its key."""
        self._under_way.remove((record.partition, record.offset))
        self._waiting += 1
        self._ready.appendleft(record)

    def progress(self) -> dict[int, Done]:
        """How far each partition is done: the first offset that is not, and finished ones above it."""
        return {
            number: Done(each.open[0] if each.open else each.end, tuple(sorted(each.finished)))
            for number, each in self._partitions.items()
        }

    def clear(self) -> None:
        """Forget everything: the cursor has gone elsewhere."""
        self._partitions.clear()
        self._lines.clear()
        self._ready.clear()
        self._under_way.clear()
        self._waiting = 0
