"""Planning of batches: how far a batch goes, and how it is split into tasks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from tidemill.spark.reading.positions import LogRange, TopicPartition

__all__ = ("furthest", "shares", "split_ranges")


def shares(sizes: Mapping[TopicPartition, int], limit: int) -> dict[TopicPartition, int]:
    """Share ``limit`` out among partitions, in proportion to their sizes; all sizes if they fit.

    A small partition gets something before a large one gets more: none waits for ever behind a backlog.

    >>> shares({("a", 0): 900, ("a", 1): 100, ("a", 2): 1}, 101)
    {('a', 0): 90, ('a', 1): 10, ('a', 2): 1}
    """
    total = sum(sizes.values())
    if total <= limit:
        return dict(sizes)
    taken = {partition: size * limit // total for partition, size in sizes.items()}
    rest = limit - sum(taken.values())
    waiting = sorted(
        (partition for partition, size in sizes.items() if size > taken[partition]),
        key=lambda partition: (taken[partition] > 0, -(sizes[partition] * limit % total), partition),
    )
    for partition in waiting[:rest]:
        taken[partition] += 1
    return taken


def furthest(
    at: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], max_rows: int | None
) -> dict[TopicPartition, int]:
    """The offsets at which a batch of at most ``max_rows`` offsets ends; a new partition begins at 0."""
    if max_rows is None:
        return {partition: max(end, at.get(partition, 0)) for partition, end in ends.items()}
    sizes = {partition: max(0, end - at.get(partition, 0)) for partition, end in ends.items()}
    return {partition: at.get(partition, 0) + size for partition, size in shares(sizes, max_rows).items()}


def split_ranges(ranges: Sequence[LogRange], min_parts: int) -> list[LogRange]:
    """Cut large ranges so that there are at least ``min_parts``, as far as there are so many offsets.

    >>> [(r.start, r.end) for r in split_ranges([LogRange("t", 0, 0, 10), LogRange("t", 1, 0, 2)], 4)]
    [(0, 4), (4, 7), (7, 10), (0, 2)]
    """
    if len(ranges) >= min_parts:
        return list(ranges)
    spare = {index: each.end - each.start - 1 for index, each in enumerate(ranges)}
    extra = shares({("", index): size for index, size in spare.items()}, min_parts - len(ranges))
    return [piece for index, each in enumerate(ranges) for piece in _cut(each, 1 + extra["", index])]


def _cut(whole: LogRange, pieces: int) -> Iterable[LogRange]:
    size = whole.end - whole.start
    cuts = [whole.start + -(-size * number // pieces) for number in range(pieces + 1)]
    return [whole._replace(start=low, end=high) for low, high in pairwise(cuts) if high > low]
