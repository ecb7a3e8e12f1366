"""Runs: neighbouring records of a share partition that have the same state, and the ordered list of them.

A run is split only where a part of it gets another state. The runs of a list lie side by side: each begins
where the one before it ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from tidemill.coordination.share_state import DeliveryState

__all__ = ("NEVER_MS", "Run", "RunList", "Target", "Unwritten", "Wait")

NEVER_MS = 2**62


class Wait(IntEnum):
    """Why a record that is AVAILABLE is not handed out."""

    #: It is handed out to the next member that asks.
    READY = 0
    #: Its time has not come.
    DELAYED = 1
    #: An earlier record of its key is not finished.
    BLOCKED = 2
    #: Nobody has looked at its key and headers since this leader began.
    UNSEEN = 3


class Unwritten(IntEnum):
    """Whether the state of a run is one that the persister does not have yet."""

    NO = 0
    YES = 1
    #: The write that is under way has it.
    BEING_WRITTEN = 2


class Target(NamedTuple):
    """The state that records get once it is written."""

    state: DeliveryState
    not_before_ms: int = 0
    reason: str = ""
    #: The field of ``Totals`` that counts it; "" if none does.
    tally: str = ""
    #: They reached the delivery limit or were rejected.
    is_death: bool = False
    #: Their member has shown them to nobody.
    is_return: bool = False

    def count_after(self, count: int) -> int:
        """The delivery count that goes with the state; ``count`` has the delivery that ends."""
        if self.is_gap:
            return 0
        # The next delivery has the number of this one, and so the same fencing token. No two handlers get the
        # token: the member that had it first gave the record back before any handler had it.
        return count - 1 if self.is_return else count

    @property
    def is_gap(self) -> bool:
        """Whether there turned out to be no record: it is finished, and did not die."""
        return self.state is DeliveryState.ARCHIVED and not self.is_death


class Run:
    """Records from ``first`` to ``last`` offset that share a state."""

    __slots__ = (
        "batch_records",
        "blocks_key",
        "count",
        "deadline_ms",
        "first",
        "is_writing",
        "last",
        "not_before_ms",
        "owner",
        "pending_round",
        "producer_epoch",
        "producer_id",
        "reason",
        "since_ms",
        "state",
        "target",
        "unwritten",
        "wait",
    )

    def __init__(self, first: int, last: int, state: DeliveryState, count: int = 0) -> None:
        self.first = first
        self.last = last
        self.state = state
        #: How often the records were delivered, the present delivery included.
        self.count = count
        #: For AVAILABLE records.
        self.wait = Wait.READY
        self.not_before_ms = 0
        #: For ACQUIRED records: the member, and when its lock ends.
        self.owner = ""
        self.deadline_ms = NEVER_MS
        #: When they were acquired or began to wait.
        self.since_ms = 0
        #: What an acknowledgement makes of them; None if none is being written.
        self.target: Target | None = None
        #: Whether the write that is under way has the target.
        self.is_writing = False
        #: Whether their state changed without waiting for the write, and whether that is being written.
        self.unwritten = Unwritten.NO
        #: How many records were delivered together the first time; 0 before that.
        self.batch_records = 0
        #: They died, and later records of their keys wait for that to be mended.
        self.blocks_key = False
        self.reason = ""
        #: The transaction that acknowledges them; -1: none does.
        self.producer_id = -1
        self.producer_epoch = -1
        #: When that was known to be stored, in reads of the state; ``NEVER_MS`` while it is being written.
        self.pending_round = 0

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __repr__(self) -> str:
        return f"<Run {self.first}-{self.last} {self.state.name} count {self.count}>"

    def tail(self, first: int) -> Run:
        """A run from ``first`` to the end of this one, with its state."""
        part = Run(first, self.last, self.state, self.count)
        part.wait = self.wait
        part.not_before_ms = self.not_before_ms
        part.owner = self.owner
        part.deadline_ms = self.deadline_ms
        part.since_ms = self.since_ms
        part.target = self.target
        part.is_writing = self.is_writing
        part.unwritten = self.unwritten
        part.batch_records = self.batch_records
        part.blocks_key = self.blocks_key
        part.reason = self.reason
        part.producer_id = self.producer_id
        part.producer_epoch = self.producer_epoch
        part.pending_round = self.pending_round
        return part


class RunList:
    """Runs in the order of their offsets, side by side."""

    __slots__ = ("firsts", "runs")

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.runs: list[Run] = []

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def index_of(self, offset: int) -> int:
        """The index of the run that holds ``offset``, or of the first one behind it."""
        index = bisect_right(self.firsts, offset) - 1
        if index >= 0 and self.runs[index].last >= offset:
            return index
        return index + 1

    def overlapping(self, first: int, last: int) -> list[Run]:
        """The runs that have a record from ``first`` to ``last``, whole."""
        return self.runs[self.index_of(first) : bisect_right(self.firsts, last)]

    def append(self, run: Run) -> None:
        self.firsts.append(run.first)
        self.runs.append(run)

    def split(self, offset: int) -> Run | None:
        """Make ``offset`` the first of a run. The new run if one was split, else None."""
        index = bisect_right(self.firsts, offset) - 1
        if index < 0:
            return None
        run = self.runs[index]
        if run.first == offset or run.last < offset:
            return None
        part = run.tail(offset)
        run.last = offset - 1
        self.firsts.insert(index + 1, offset)
        self.runs.insert(index + 1, part)
        return part

    def isolate(self, offset: int) -> Run | None:
        """The run that holds this offset and no other, split off if need be; None if no run holds it."""
        index = bisect_right(self.firsts, offset) - 1
        if index < 0 or self.runs[index].last < offset:
            return None
        run = self.runs[index]
        if run.first < offset:
            head, run = run, run.tail(offset)
            head.last = offset - 1
            index += 1
            self.firsts.insert(index, offset)
            self.runs.insert(index, run)
        if run.last > offset:
            rest = run.tail(offset + 1)
            run.last = offset
            self.firsts.insert(index + 1, offset + 1)
            self.runs.insert(index + 1, rest)
        return run

    def remove_below(self, offset: int) -> list[Run]:
        """Take out the runs below ``offset``, which must be the first of a run or behind the last."""
        index = bisect_left(self.firsts, offset)
        removed = self.runs[:index]
        del self.firsts[:index]
        del self.runs[:index]
        return removed
