"""What compaction must know of producers: which ones are remembered, and which transactions were aborted.

Made by the log's owner, read by the thread that compacts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from tidemill.log.producer_state.producers import ProducerStates
from tidemill.log.producer_state.transactions import AbortedTransaction
from tidemill.records.batch import BatchHeader

__all__ = ("AbortedBatches", "RememberedProducer", "remembered_producers")


class RememberedProducer(NamedTuple):
    """The state of a producer that must stay readable from the log."""

    epoch: int
    last_sequence: int
    #: Base offsets of the batches whose retries are recognized.
    batches: frozenset[int]


def remembered_producers(states: ProducerStates) -> dict[int, RememberedProducer]:
    """The remembered producers by id: a copy, for use in another thread."""
    return {
        producer_id: RememberedProducer(
            entry.epoch, entry.last_sequence, frozenset(known.base_offset for known in entry.batches)
        )
        for producer_id, entry in states
    }


class AbortedBatches:
    """Answers whether a batch belongs to an aborted transaction."""

    def __init__(self, transactions: Iterable[AbortedTransaction]) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        for producer_id, first_offset, last_offset in transactions:
            self._ranges.setdefault(producer_id, []).append((first_offset, last_offset))
        for ranges in self._ranges.values():
            ranges.sort()

    def __contains__(self, header: BatchHeader) -> bool:
        ranges = self._ranges.get(header.producer_id) if header.is_transactional else None
        if not ranges:
            return False
        index = bisect_right(ranges, header.base_offset, key=lambda entry: entry[0])
        return index > 0 and header.base_offset < ranges[index - 1][1]
