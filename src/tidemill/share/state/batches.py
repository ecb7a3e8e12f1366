"""Ranges of records that have the same state: sorted, disjoint, and joined where they touch. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING

from tidemill.coordination.share_state import DeliveryState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidemill.coordination.share_state import StateBatch

__all__ = ("FINISHED", "change", "cut", "finished_count", "trim")

#: The states that a record never leaves.
FINISHED = frozenset({DeliveryState.ACKNOWLEDGED, DeliveryState.ARCHIVED})

#: Fields of a batch behind its offsets.
_OFFSETS = 2
_first_offset = itemgetter(0)
_last_offset = itemgetter(1)


def change(batches: list[StateBatch], new: StateBatch) -> None:
    """Give the records of ``new`` its state, except for those that are finished and would not be any more.

    >>> from tidemill.coordination.share_state import StateBatch
    >>> batches = [StateBatch(0, 9, DeliveryState.AVAILABLE, 1)]
    >>> change(batches, StateBatch(3, 5, DeliveryState.ACKNOWLEDGED, 1))
    >>> [(each.first_offset, each.last_offset, each.state.name) for each in batches]
    [(0, 2, 'AVAILABLE'), (3, 5, 'ACKNOWLEDGED'), (6, 9, 'AVAILABLE')]
    """
    if not batches or batches[-1].last_offset < new.first_offset:
        # By far the most common: most writes tell of records that nothing was told of yet.
        batches[-1:] = _joined([*batches[-1:], new])
        return
    if new.state in FINISHED:
        _put(batches, new)
        return
    for piece in _unfinished(batches, new):
        _put(batches, piece)


def _unfinished(batches: Sequence[StateBatch], new: StateBatch) -> list[StateBatch]:
    """The parts of ``new`` whose records are not finished."""
    pieces: list[StateBatch] = []
    first = new.first_offset
    low = bisect_left(batches, first, key=_last_offset)
    for each in batches[low : bisect_right(batches, new.last_offset, lo=low, key=_first_offset)]:
        if each.state in FINISHED:
            if each.first_offset > first:
                pieces.append(new._replace(first_offset=first, last_offset=each.first_offset - 1))
            first = each.last_offset + 1
    if first <= new.last_offset:
        pieces.append(new._replace(first_offset=first))
    return pieces


def _put(batches: list[StateBatch], new: StateBatch) -> None:
    """Give the records of ``new`` its state, whatever the batches said of them before."""
    # One more offset on both sides, to find what touches it.
    low = bisect_left(batches, new.first_offset - 1, key=_last_offset)
    high = bisect_right(batches, new.last_offset + 1, lo=low, key=_first_offset)
    pieces = [new]
    if low < high and batches[low].first_offset < new.first_offset:
        left = batches[low]
        pieces.insert(0, left._replace(last_offset=min(left.last_offset, new.first_offset - 1)))
    if low < high and batches[high - 1].last_offset > new.last_offset:
        right = batches[high - 1]
        pieces.append(right._replace(first_offset=max(right.first_offset, new.last_offset + 1)))
    batches[low:high] = _joined(pieces)


def trim(batches: list[StateBatch], start_offset: int) -> None:
    """Forget records before ``start_offset``."""
    kept = bisect_left(batches, start_offset, key=_last_offset)
    del batches[:kept]
    if batches and batches[0].first_offset < start_offset:
        batches[0] = batches[0]._replace(first_offset=start_offset)


def cut(batches: list[StateBatch], end_offset: int) -> None:
    """Forget records from ``end_offset`` on.

    >>> from tidemill.coordination.share_state import StateBatch
    >>> batches = [StateBatch(0, 4, DeliveryState.ARCHIVED, 1), StateBatch(7, 9, DeliveryState.ARCHIVED, 1)]
    >>> cut(batches, 3)
    >>> [(each.first_offset, each.last_offset) for each in batches]
    [(0, 2)]
    """
    del batches[bisect_left(batches, end_offset, key=_first_offset) :]
    if batches and batches[-1].last_offset >= end_offset:
        batches[-1] = batches[-1]._replace(last_offset=end_offset - 1)


def finished_count(batches: Sequence[StateBatch]) -> int:
    """How many records the batches call finished."""
    return sum(each.last_offset - each.first_offset + 1 for each in batches if each.state in FINISHED)


def _joined(pieces: list[StateBatch]) -> list[StateBatch]:
    joined = [pieces[0]]
    for piece in pieces[1:]:
        last = joined[-1]
        if last.last_offset + 1 == piece.first_offset and last[_OFFSETS:] == piece[_OFFSETS:]:
            joined[-1] = last._replace(last_offset=piece.last_offset)
        else:
            joined.append(piece)
    return joined
