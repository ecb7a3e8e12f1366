"""Refusals: how code that works on whole columns says which row is at fault.

A check looks at an array and raises ``Refusal`` with an index into that array. Every level of nesting turns
it into the index of its parent (``indexed_by``), so that at the top it is the number of the row, and
``refused_row`` makes the ``TableError`` of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.errors import TableCode, TableError

__all__ = ("Refusal", "first_failing", "first_refusal", "indexed_by", "refuse_where", "refused_row")


class Refusal(Exception):
    """The error for a value that its column or format does not allow. ``text`` completes "column 'a' …"."""

    def __init__(self, index: int, path: str, text: str) -> None:
        super().__init__(index, path, text)
        self.index = index
        self.path = path
        self.text = text


def refuse_where(wrong: np.ndarray, path: str, text: str) -> None:
    """Raise ``Refusal`` for the first value where ``wrong`` is true, if there is one."""
    if wrong.any():
        raise Refusal(int(wrong.argmax()), path, text)


@contextmanager
def indexed_by(parent: Callable[[int], Any]) -> Iterator[None]:
    """Turn the index of a refusal inside the block into the index of the parent value."""
    try:
        yield
    except Refusal as refusal:
        refusal.index = int(parent(refusal.index))
        raise


def first_failing(array: pa.Array, attempt: Callable[[pa.Array], object]) -> int:
    """The first index whose value makes ``attempt`` raise ``pa.ArrowInvalid``, as the whole array does."""
    first, behind = 0, len(array)
    while behind - first > 1:
        middle = (first + behind) // 2
        try:
            attempt(array[first:middle])
            first = middle
        except pa.ArrowInvalid:
            behind = middle
    return first


def first_refusal(attempt: Callable[[int, int], object], refusal: Refusal) -> Refusal:
    """The refusal of the first row at fault, given the ``refusal`` of any row.

    ``attempt`` works on the rows from one number up to another and refuses with an index among those. Each
    step halves the rows in question.
    """
    first, last = 0, refusal.index
    while first < last:
        middle = (first + last) // 2
        try:
            attempt(first, middle + 1)
            first = middle + 1
        except Refusal as earlier:
            last = earlier.index = first + earlier.index
            refusal = earlier
    return refusal


def refused_row(refusal: Refusal) -> TableError:
    """The error that names column and reason. The row is its ``index``, because callers count differently.

    >>> refused_row(Refusal(3, "name", "is not UTF-8")).message
    "column 'name' is not UTF-8"
    """
    where = f"column {refusal.path!r}" if refusal.path else "the row"
    return TableError(TableCode.row_refused, f"{where} {refusal.text}", index=refusal.index)
