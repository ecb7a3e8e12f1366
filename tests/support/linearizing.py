"""Whether a history of operations on one object has an order that explains it: Wing and Gong's search.

Each operation took effect at one moment between its call and its answer. One whose answer is not known did so
at some moment after its call, or never. ``explains`` looks for an order of these moments in which each
operation gives what it gave. For small histories: it tries what is possible, and remembers what was tried;
first that what was not answered has not happened.

    history = [Operation(0, 2, put(1)), Operation(1, 3, get(1))]
    assert explains(history, None)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ("UNKNOWN", "Operation", "TooManyOrders", "explains")

#: When an operation is answered whose answer is not known.
UNKNOWN: Final = float("inf")
_TRIED_MAX: Final = 300_000


class TooManyOrders(AssertionError):
    """Nothing was found that explains a history, and not everything was tried."""


@dataclass(frozen=True)
class Operation:
    """``apply`` gives the state after it; None (nothing) if it cannot have given its answer in this state.

    The state is packed in a tuple of one, so that None can be a state.
    """

    called_at: float
    answered_at: float
    apply: Callable[[Hashable], tuple[Hashable] | None]
    name: str = ""


def explains(history: Sequence[Operation], state: Hashable) -> bool:
    """Whether some order of the operations explains their answers, from a first ``state`` on."""
    operations = sorted(history, key=lambda each: each.called_at)
    certain = sum(1 << number for number, each in enumerate(operations) if each.answered_at != UNKNOWN)
    tried: set[tuple[int, Hashable]] = set()
    waiting: list[tuple[int, Hashable]] = [(0, state)]
    while waiting:
        done, state = waiting.pop()
        if done & certain == certain:
            return True
        if (done, state) in tried:
            continue
        tried.add((done, state))
        if len(tried) >= _TRIED_MAX:
            raise TooManyOrders(f"{len(operations)} operations have too many orders")
        # None of them can come behind one that was answered before its call.
        left = [(number, each) for number, each in enumerate(operations) if not done >> number & 1]
        first_answer = min(each.answered_at for _, each in left)
        possible = [(number, each) for number, each in left if each.called_at <= first_answer]
        # The last one is tried first.
        for number, each in sorted(possible, key=lambda it: it[1].answered_at, reverse=True):
            after = each.apply(state)
            if after is not None:
                waiting.append((done | 1 << number, after[0]))
    return False
