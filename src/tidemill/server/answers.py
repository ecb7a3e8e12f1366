"""Whether an answer is so large that it is encoded in a thread instead of on the event loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ("HEAVY_ELEMENTS", "is_heavy")

#: An answer with more elements is encoded in a thread.
HEAVY_ELEMENTS = 1_000


def is_heavy(body: Mapping[str, Any]) -> bool:
    """Whether an answer has so many elements that encoding it would take the loop some milliseconds.

    >>> is_heavy({"topics": [{"partitions": [{}] * 100}] * 9}), is_heavy({"topics": [{}] * 1_001})
    (False, True)
    """
    return _count(body, HEAVY_ELEMENTS) > HEAVY_ELEMENTS


def _count(body: Mapping[str, Any], enough: int) -> int:
    """Elements of all arrays in the body, counted until there are more than enough."""
    total = 0
    for value in body.values():
        if isinstance(value, list | tuple):
            total += len(value)
            if total > enough:
                break
            for element in value:
                if not isinstance(element, Mapping):
                    break
                total += _count(element, enough - total)
                if total > enough:
                    return total
    return total
