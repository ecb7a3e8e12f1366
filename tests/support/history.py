"""Recorded histories, and the checks of invariants 1 to 6 over them.

A test, in one process or over many, records what its clients saw; the checks run afterwards and know nothing
of how the log works. Every record that is ever sent has a value of its own, so a value names a record.

1. after the last fault a full drain returns every acknowledged record, at the offset that was acknowledged;
2. one value per (partition, offset), over all readers and all time;
3. no value at two offsets: an idempotent producer's retries leave no duplicates;
4. nothing is read that definitely failed, or that nobody sent; nothing aborted is read as committed;
5. a reader neither goes backwards nor passes over an offset that holds a record;
6. a transaction of which anything is read as committed is there as a whole.

Readers see everything, also what belongs to no committed transaction, unless they are said to read committed
data. To such a reader a transaction whose end nobody knows may be there or not, but not a part of it.

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

Kind = Literal["sent", "acked", "failed", "read", "seek", "deleted", "committed", "aborted", "isolated"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a client saw. ``offset`` is -1 where there is none.

    ``transaction`` names the one that a sent value is part of, or that has ended.
    """

    kind: Kind
    partition: str
    value: str = ""
    offset: int = -1
    reader: str = ""
    transaction: str = ""


class Violation(NamedTuple):
    """An invariant that does not hold, and how."""

    invariant: int
    message: str


class History:
    """Events in the order in which they were seen; several files can be loaded into one."""

    def __init__(self, events: list[Event] | None = None) -> None:
        self.events = events or []

    def sent(self, partition: str, value: str, transaction: str = "") -> None:
        """About to be sent; without another event its fate is unknown, and both fates are right."""
        self.events.append(Event("sent", partition, value, transaction=transaction))

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

    def committed(self, transaction: str) -> None:
        """Its commit was acknowledged: all that was sent in it is there for good."""
        self.events.append(Event("committed", "", transaction=transaction))

    def aborted(self, transaction: str) -> None:
        """Its abort was asked for, or nobody ever asked for its commit: it is never read as committed."""
        self.events.append(Event("aborted", "", transaction=transaction))

    def isolated(self, reader: str) -> None:
        """The reader reads committed data only."""
        self.events.append(Event("isolated", "", reader=reader))

    def of(self, kind: Kind) -> Iterator[Event]:
        return (event for event in self.events if event.kind == kind)

    def save(self, path: Path) -> None:
        path.write_text("".join(json.dumps(asdict(event)) + "\n" for event in self.events))

    def load(self, path: Path) -> None:
        """Add the events of a file. Order matters only within one reader, and one reader writes one file."""
        # What a process that died was writing did not happen yet: it is noted first.
        whole, _, _unfinished = path.read_text().rpartition("\n")
        self.events += [Event(**json.loads(line)) for line in whole.splitlines()]


def check(history: History, drain: str, *more_drains: str) -> list[Violation]:
    """All violations; ``drain`` and others are readers that read everything after the last fault."""
    drains = (drain, *more_drains)
    return [
        *(violation for each in drains for violation in lost_writes(history, each)),
        *conflicting_reads(history),
        *duplicates(history),
        *reads_of_unsent(history),
        *reads_of_aborted(history),
        *skips_and_rewinds(history),
        *(violation for each in drains for violation in partial_transactions(history, each)),
    ]


def _isolated(history: History) -> set[str]:
    return {event.reader for event in history.of("isolated")}


def _transactions(history: History) -> dict[tuple[str, str], str]:
    """(partition, value) → transaction, of what was sent in one."""
    return {
        (event.partition, event.value): event.transaction for event in history.of("sent") if event.transaction
    }


def _uncommitted(history: History) -> set[tuple[str, str]]:
    """(partition, value) of what was sent in transactions that are not known to be committed."""
    committed = {event.transaction for event in history.of("committed")}
    return {place for place, transaction in _transactions(history).items() if transaction not in committed}


def lost_writes(history: History, drain: str) -> Iterator[Violation]:
    """Invariant 1. A write in a transaction is promised to readers of committed data by the commit."""
    drained = {
        (event.partition, event.value): event.offset for event in history.of("read") if event.reader == drain
    }
    not_promised = _uncommitted(history) if drain in _isolated(history) else set()
    starts: dict[str, int] = defaultdict(int)
    for event in history.of("deleted"):
        starts[event.partition] = max(starts[event.partition], event.offset)
    for event in history.of("acked"):
        found = drained.get((event.partition, event.value))
        if found is None and (event.partition, event.value) in not_promised:
            continue
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
    """Check invariant 3 of the module."""
    offsets: dict[tuple[str, str], int] = {}
    for event in history.of("read"):
        first = offsets.setdefault((event.partition, event.value), event.offset)
        if first != event.offset:
            yield Violation(3, f"{event.value} is at {event.partition}@{first} and at {event.offset}")


def reads_of_unsent(history: History) -> Iterator[Violation]:
    """Check invariant 4 of the module."""
    sent = {(event.partition, event.value) for event in history.of("sent")}
    failed = {(event.partition, event.value) for event in history.of("failed")}
    for event in history.of("read"):
        if (event.partition, event.value) in failed:
            yield Violation(4, f"{event.value} at {event.partition}@{event.offset} was refused")
        elif (event.partition, event.value) not in sent:
            yield Violation(4, f"{event.value} at {event.partition}@{event.offset} was never sent")


def reads_of_aborted(history: History) -> Iterator[Violation]:
    """Invariant 4, for readers of committed data."""
    isolated, transactions = _isolated(history), _transactions(history)
    aborted = {event.transaction for event in history.of("aborted")}
    for event in history.of("read"):
        transaction = transactions.get((event.partition, event.value))
        if event.reader in isolated and transaction in aborted:
            yield Violation(
                4,
                f"{event.reader} read {event.value} at {event.partition}@{event.offset}, but {transaction} "
                "was aborted",
            )


def partial_transactions(history: History, drain: str) -> Iterator[Violation]:
    """Invariant 6. What any reader of committed data has seen a part of, the drain must find as a whole."""
    isolated, transactions = _isolated(history), _transactions(history)
    if drain not in isolated:
        return
    whole: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for place, transaction in transactions.items():
        whole[transaction].add(place)
    drained: set[tuple[str, str]] = set()
    visible = {event.transaction for event in history.of("committed")}
    for event in history.of("read"):
        place = (event.partition, event.value)
        if event.reader in isolated and place in transactions:
            visible.add(transactions[place])
        if event.reader == drain:
            drained.add(place)
    for transaction in sorted(visible):
        if missing := sorted(whole[transaction] - drained):
            yield Violation(6, f"{transaction} is visible, but not to {drain}: {missing}")


def skips_and_rewinds(history: History) -> Iterator[Violation]:
    """Invariant 5. Offsets may have gaps; passing over one that is known to hold a record is a skip.

    Readers of committed data may pass over what is not known to be committed.
    """
    known: dict[str, set[int]] = defaultdict(set)
    known_committed: dict[str, set[int]] = defaultdict(set)
    isolated, uncommitted = _isolated(history), _uncommitted(history)
    for event in history.events:
        if event.kind in ("read", "acked"):
            known[event.partition].add(event.offset)
            if (event.partition, event.value) not in uncommitted:
                known_committed[event.partition].add(event.offset)
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
            held = (known_committed if event.reader in isolated else known)[event.partition]
            passed = [offset for offset in range(first, event.offset) if offset in held]
            if passed:
                yield Violation(
                    5,
                    f"{event.reader} went from {expected} to {event.offset} over {event.partition}@{passed}",
                )
