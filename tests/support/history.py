"""Recorded histories, and the checks of invariants 1 to 5 over them.

A test, in one process or over many, records what its clients saw; the checks run afterwards and know nothing
of how the log works. Every record that is ever sent has a value of its own, so a value names a record.

1. after the last fault a full drain returns every acknowledged record, at the offset that was acknowledged;
2. one value per (partition, offset), over all readers and all time;
3. no value at two offsets: an idempotent producer's retries leave no duplicates;
4. nothing is read that definitely failed, or that nobody sent;
5. a reader neither goes backwards nor passes over an offset that holds a record.

    history = History()
    history.sent("t-0", "a1"); history.acked("t-0", "a1", offset=0); history.read("drain", "t-0", 0, "a1")
    assert not check(history, drain="drain")
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

__all__ = ("Event", "History", "Violation", "check")

Kind = Literal["sent", "acked", "failed", "read", "seek", "deleted"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a client saw. ``offset`` is -1 where there is none."""

    kind: Kind
    partition: str
    value: str = ""
    offset: int = -1
    reader: str = ""


class Violation(NamedTuple):
    """An invariant that does not hold, and how."""

    invariant: int
    message: str


class History:
    """Events in the order in which they were seen; several files can be loaded into one."""

    def __init__(self, events: list[Event] | None = None) -> None:
        self.events = events or []

    def sent(self, partition: str, value: str) -> None:
        """About to be sent; without another event its fate is unknown, and both fates are right."""
        self.events.append(Event("sent", partition, value))

    def acked(self, partition: str, value: str, offset: int) -> None:
        self.events.append(Event("acked", partition, value, offset))

    def failed(self, partition: str, value: str) -> None:
        """Refused for good: it must never be read."""
        self.events.append(Event("failed", partition, value))

    def read(self, reader: str, partition: str, offset: int, value: str) -> None:
        self.events.append(Event("read", partition, value, offset, reader))

    def seek(self, reader: str, partition: str, offset: int) -> None:
        """The reader goes on at ``offset`` on purpose: a restart, a rebalance, a reset."""
        self.events.append(Event("seek", partition, "", offset, reader))

    def deleted(self, partition: str, before_offset: int) -> None:
        """Records below were deleted on purpose and need not be read any more."""
        self.events.append(Event("deleted", partition, "", before_offset))

    def of(self, kind: Kind) -> Iterator[Event]:
        return (event for event in self.events if event.kind == kind)

    def save(self, path: Path) -> None:
        path.write_text("".join(json.dumps(asdict(event)) + "\n" for event in self.events))

    def load(self, path: Path) -> None:
        """Add the events of a file. Order matters only within one reader, and one reader writes one file."""
        self.events += [Event(**json.loads(line)) for line in path.read_text().splitlines()]


def check(history: History, drain: str) -> list[Violation]:
    """All violations; ``drain`` is the reader that read everything after the last fault."""
    return [
        *lost_writes(history, drain),
        *conflicting_reads(history),
        *duplicates(history),
        *reads_of_unsent(history),
        *skips_and_rewinds(history),
    ]


def lost_writes(history: History, drain: str) -> Iterator[Violation]:
    """Invariant 1."""
    drained = {
        (event.partition, event.value): event.offset for event in history.of("read") if event.reader == drain
    }
    starts: dict[str, int] = defaultdict(int)
    for event in history.of("deleted"):
        starts[event.partition] = max(starts[event.partition], event.offset)
    for event in history.of("acked"):
        found = drained.get((event.partition, event.value))
        if found is None and event.offset >= starts[event.partition]:
            yield Violation(
                1, f"{event.value} was acknowledged at {event.partition}@{event.offset} and is gone"
            )
        elif found is not None and found != event.offset:
            yield Violation(
                1, f"{event.value} was acknowledged at {event.partition}@{event.offset} and is at {found}"
            )


def conflicting_reads(history: History) -> Iterator[Violation]:
    """Invariant 2. Acknowledgements are sightings too."""
    values: dict[tuple[str, int], str] = {}
    for event in history.events:
        if event.kind in ("read", "acked"):
            first = values.setdefault((event.partition, event.offset), event.value)
            if first != event.value:
                yield Violation(2, f"{event.partition}@{event.offset} was {first} and then {event.value}")


def duplicates(history: History) -> Iterator[Violation]:
    """Invariant 3."""
    offsets: dict[tuple[str, str], int] = {}
    for event in history.of("read"):
        first = offsets.setdefault((event.partition, event.value), event.offset)
        if first != event.offset:
            yield Violation(3, f"{event.value} is at {event.partition}@{first} and at {event.offset}")


def reads_of_unsent(history: History) -> Iterator[Violation]:
    """Invariant 4."""
    sent = {(event.partition, event.value) for event in history.of("sent")}
    failed = {(event.partition, event.value) for event in history.of("failed")}
    for event in history.of("read"):
        if (event.partition, event.value) in failed:
            yield Violation(4, f"{event.value} at {event.partition}@{event.offset} was refused")
        elif (event.partition, event.value) not in sent:
            yield Violation(4, f"{event.value} at {event.partition}@{event.offset} was never sent")


def skips_and_rewinds(history: History) -> Iterator[Violation]:
    """Invariant 5. Offsets may have gaps; passing over one that is known to hold a record is a skip."""
    known: dict[str, set[int]] = defaultdict(set)
    for event in history.events:
        if event.kind in ("read", "acked"):
            known[event.partition].add(event.offset)
    starts: dict[str, int] = defaultdict(int)
    positions: dict[tuple[str, str], int] = {}
    for event in history.events:
        key = (event.reader, event.partition)
        if event.kind == "deleted":
            starts[event.partition] = max(starts[event.partition], event.offset)
        elif event.kind == "seek":
            positions[key] = event.offset
        elif event.kind == "read":
            expected = positions.get(key)
            positions[key] = event.offset + 1
            if expected is None:
                continue
            if event.offset < expected:
                yield Violation(
                    5, f"{event.reader} went back from {expected} to {event.partition}@{event.offset}"
                )
                continue
            first = max(expected, starts[event.partition])
            passed = [offset for offset in range(first, event.offset) if offset in known[event.partition]]
            if passed:
                yield Violation(
                    5,
                    f"{event.reader} went from {expected} to {event.offset} over {event.partition}@{passed}",
                )
