"""Positions of a cursor, the gaps that it has passed over, and the buffer of gaps. Pure."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

__all__ = ("FINISHED_AHEAD_MAX", "NO_EPOCH", "Gap", "GapBuffer", "Gaps", "Position", "Reason")

#: A leader epoch that is not known, so that nothing can be compared with it.
NO_EPOCH: Final = -1
#: How far above a position offsets may be finished already.
FINISHED_AHEAD_MAX: Final = 1_024


class Position(NamedTuple):
    """Where a cursor stands in a partition.

    Attributes:
        offset: the next offset to look at; everything below was delivered or passed over.
        leader_epoch: the leader epoch of what is right below it, by which a log that was cut is noticed.
        started: whether a record was delivered. At offset 0 nothing can have been; at a higher offset nothing
            need have been, for the cursor may have begun there.
    """

    offset: int
    leader_epoch: int = NO_EPOCH
    started: bool = False


class Reason(enum.IntEnum):
    """Why offsets were passed over; the numbers are part of the protocol."""

    ABORTED = 1
    """An aborted transaction wrote them."""
    CONTROL = 2
    """Markers that end transactions."""
    COMPACTION = 3
    """Newer records of the same keys made them superfluous."""
    RETENTION = 4
    """They were deleted before they were read, and the cursor was told to go on behind them."""
    FILTERED = 5
    """Records that the filter of the cursor's region leaves out."""


class Gap(NamedTuple):
    """A range of offsets that a cursor has passed over, both ends included."""

    partition: int
    first_offset: int
    last_offset: int
    reason: Reason


class Gaps(NamedTuple):
    """Gaps since they were last asked for, oldest first.

    ``dropped`` more are left out: they were older and did not fit the buffer, or the node has not told them.
    """

    ranges: tuple[Gap, ...]
    dropped: int


class GapBuffer:
    """The last gaps, at most ``capacity``. Neighbours of one reason are one gap."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._gaps: deque[Gap] = deque()
        self._dropped = 0
        #: By partition, the offset below which every gap was noted: after a rollback it is not noted again.
        self._noted: dict[int, int] = {}

    def note(self, gaps: Iterable[Gap]) -> None:
        """Add gaps, in the order of their offsets in each partition."""
        for gap in gaps:
            first = max(gap.first_offset, self._noted.get(gap.partition, 0))
            if first <= gap.last_offset:
                self._noted[gap.partition] = gap.last_offset + 1
                self._add(gap._replace(first_offset=first))

    def _add(self, gap: Gap) -> None:
        if self._gaps:
            last = self._gaps[-1]
            if (last.partition, last.reason, last.last_offset + 1) == (
                gap.partition,
                gap.reason,
                gap.first_offset,
            ):
                self._gaps[-1] = last._replace(last_offset=gap.last_offset)
                return
        if not self._capacity:
            self._dropped += 1
            return
        if len(self._gaps) >= self._capacity:
            self._gaps.popleft()
            self._dropped += 1
        self._gaps.append(gap)

    def note_dropped(self, partition: int, last_offset: int, count: int) -> None:
        """Count gaps up to ``last_offset`` that an answer has counted without giving their ranges."""
        if count and last_offset >= self._noted.get(partition, 0):
            self._noted[partition] = last_offset + 1
            self._dropped += count

    def forget_above(self, partition: int, offset: int) -> None:
        """Accept gaps from ``offset`` on once more, because the cursor was sent back there on purpose."""
        self._noted[partition] = min(self._noted.get(partition, 0), offset)

    def take(self) -> Gaps:
        """The gaps since the last call."""
        taken = Gaps(tuple(self._gaps), self._dropped)
        self._gaps.clear()
        self._dropped = 0
        return taken
