"""The transactions of a partition: those that are open, and those that were aborted. Pure.

A transaction opens with its producer's first transactional batch and ends with a marker. Until the marker is
committed nobody who reads committed data may pass the first batch: that is the last stable offset. What an
aborted transaction wrote stays in the log; readers are told which producer's batches to leave out, from where
to where.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from typing import Any, NamedTuple

from tidemill.records.batch import HEADER_BYTES, parse_header

__all__ = ("AbortedTransaction", "TransactionStates", "with_markers")


class AbortedTransaction(NamedTuple):
    """An aborted transaction: batches of its producer from ``first_offset`` to the marker do not count."""

    producer_id: int
    first_offset: int
    last_offset: int


def with_markers(aborted: list[AbortedTransaction], data: memoryview) -> list[AbortedTransaction]:
    """The aborted transactions without those whose marker compaction has removed from ``data``.

    None of their batches are left. But a reader that is told of them would leave out what their producer
    wrote later, because no marker ends that. Producer snapshots may name them long after the compaction.
    """
    markers = set()
    position, end_offset = 0, 0
    while position + HEADER_BYTES <= len(data):
        header = parse_header(data, position)
        end_offset = header.next_offset
        if header.is_control:
            markers.add(header.base_offset)
        position += header.size_bytes
    return [entry for entry in aborted if entry.last_offset >= end_offset or entry.last_offset in markers]


class TransactionStates:
    """Open and aborted transactions of a partition, computed from its log."""

    def __init__(self) -> None:
        #: In the order of their first offsets. A plain dict finds its first entry slowly once many are gone.
        self._open: OrderedDict[int, int] = OrderedDict()
        #: (first offset, marker's offset) of transactions whose marker may not be committed yet.
        self._ending: list[tuple[int, int]] = []
        # Aborted transactions in the order of their markers, as columns: there may be very many. ``stable``
        # is the last stable offset right behind the marker, below which no later entry can start.
        self._producers = array("q")
        self._firsts = array("q")
        self._lasts = array("q")
        self._stables = array("q")

    @property
    def open(self) -> dict[int, int]:
        """First offset of each open transaction by producer id."""
        return self._open

    @property
    def aborted_count(self) -> int:
        return len(self._lasts)

    def begin(self, producer_id: int, offset: int) -> None:
        """Note a transactional batch of the log, in its order; only the first of a transaction counts."""
        self._open.setdefault(producer_id, offset)

    def end(self, producer_id: int, marker_offset: int, *, commit: bool) -> None:
        """Note a marker. One for a producer without an open transaction changes nothing."""
        first = self._open.pop(producer_id, None)
        if first is None:
            return
        self._ending.append((first, marker_offset))
        if not commit:
            self._producers.append(producer_id)
            self._firsts.append(first)
            self._lasts.append(marker_offset)
            self._stables.append(self._first_open(marker_offset + 1))

    def _first_open(self, default: int) -> int:
        """The first offset of the oldest open transaction."""
        return next(iter(self._open.values()), default)

    def last_stable_offset(self, high_watermark: int) -> int:
        """The last stable offset: where a reader of committed data must stop."""
        if not self._open and not self._ending:
            return high_watermark
        if self._ending:
            self._ending = [entry for entry in self._ending if entry[1] >= high_watermark]
        first = self._first_open(high_watermark)
        for ending, _ in self._ending:
            first = min(first, ending)
        return min(first, high_watermark)

    def aborted_between(self, start_offset: int, end_offset: int) -> list[AbortedTransaction]:
        """Aborted transactions that have batches in the half-open range."""
        found = []
        for number in range(bisect_left(self._lasts, start_offset), len(self._lasts)):
            if self._firsts[number] < end_offset:
                found.append(
                    AbortedTransaction(self._producers[number], self._firsts[number], self._lasts[number])
                )
            if self._stables[number] >= end_offset:
                break
        return found

    def truncate_start(self, log_start_offset: int) -> None:
        """Forget aborted transactions whose data is all deleted."""
        keep_from = bisect_left(self._lasts, log_start_offset)
        for column in (self._producers, self._firsts, self._lasts, self._stables):
            del column[:keep_from]

    def forget_aborted(self, start_offset: int, end_offset: int, kept_markers: frozenset[int]) -> None:
        """Forget aborted transactions whose marker was in the half-open range and is no longer in the log.

        A reader that was told of them would leave out what their producer wrote later: the marker is what
        ends the leaving out.
        """
        first, behind = bisect_left(self._lasts, start_offset), bisect_left(self._lasts, end_offset)
        kept = [number for number in range(first, behind) if self._lasts[number] in kept_markers]
        for column in (self._producers, self._firsts, self._lasts, self._stables):
            column[first:behind] = array("q", [column[number] for number in kept])

    def to_value(self) -> Any:
        """The states as plain lists, for a producer snapshot."""
        columns = (self._producers, self._firsts, self._lasts, self._stables)
        return [
            dict(self._open),
            [list(entry) for entry in self._ending],
            *(column.tolist() for column in columns),
        ]

    @classmethod
    def from_value(cls, value: Any) -> TransactionStates:
        states = cls()
        opened, ending, *columns = value
        states._open.update(sorted(opened.items(), key=lambda entry: entry[1]))
        states._ending = [(first, marker) for first, marker in ending]
        states._producers, states._firsts, states._lasts, states._stables = (
            array("q", column) for column in columns
        )
        return states
