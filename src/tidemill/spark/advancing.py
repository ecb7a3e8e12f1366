"""How far a batch goes, and how it is split into tasks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from tidemill.spark.positions import LogRange, Place

__all__ = ("furthest", "shares", "split_ranges")


def shares(sizes: Mapping[Place, int], limit: int) -> dict[Place, int]:
    """How much of each to take, in proportion to what there is, so that it is ``limit`` in all or everything.

    What is small gets something before what is large gets more: nothing waits for ever behind a backlog.

    >>> shares({("a", 0): 900, ("a", 1): 100, ("a", 2): 1}, 101)
    {('a', 0): 90, ('a', 1): 10, ('a', 2): 1}
    """
    total = sum(sizes.values())
    if total <= limit:
        return dict(sizes)
    taken = {place: size * limit // total for place, size in sizes.items()}
    rest = limit - sum(taken.values())
    waiting = sorted(
        (place for place, size in sizes.items() if size > taken[place]),
        key=lambda place: (taken[place] > 0, -(sizes[place] * limit % total), place),
    )
    for place in waiting[:rest]:
        taken[place] += 1
    return taken


def furthest(at: Mapping[Place, int], ends: Mapping[Place, int], max_rows: int | None) -> dict[Place, int]:
    """The next offsets after a batch of at most ``max_rows`` offsets; a place that is new begins at 0."""
    if max_rows is None:
        return {place: max(end, at.get(place, 0)) for place, end in ends.items()}
    sizes = {place: max(0, end - at.get(place, 0)) for place, end in ends.items()}
    return {place: at.get(place, 0) + size for place, size in shares(sizes, max_rows).items()}


def split_ranges(ranges: Sequence[LogRange], min_parts: int) -> list[LogRange]:
    """The ranges, the large ones in pieces, so that there are ``min_parts`` if there are so many offsets.

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
