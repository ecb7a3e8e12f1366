"""Varints by the thousand: numbers that lie in eight loaded bytes each, decoded with numpy.

Seven bytes of number is the most that is decoded so; a longer one is ``Unusual``, and left to code that looks
at records one by one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = (
    "STRIDES",
    "Int64s",
    "Unusual",
    "Words",
    "cut_numbers",
    "load_numbers",
    "numbers_at",
    "signed_numbers",
)

Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_STOP_BITS = np.uint64(0x8080808080808080)
_NUMBER_BITS = np.uint64(0x7F7F7F7F7F7F7F7F)
_ALL_BITS = 2**64 - 1
_ONE = np.uint64(1)
#: To close the gaps between groups of seven bits: the longest mask without any, low part, high part, shift.
_CLOSING = tuple(
    (mask, np.uint64(low), np.uint64(high), np.uint64(shift))
    for mask, low, high, shift in (
        (0xFF, 0x007F007F007F007F, 0x7F007F007F007F00, 1),
        (0xFFFF, 0x00003FFF00003FFF, 0x3FFF00003FFF0000, 2),
        (0xFFFFFFFF, 0x000000000FFFFFFF, 0x0FFFFFFF00000000, 4),
    )
)


class Unusual(Exception):
    """Something that columns cannot judge."""


def cut_numbers(loaded: Words, places: Int64s) -> tuple[Words, int, Int64s]:
    """The bytes of the numbers that ``loaded`` begins with, the mask of the longest, and the places behind
    them.
    """
    stops = ~loaded & _STOP_BITS
    # Ones up to the first byte without a continuation bit.
    masks = stops ^ (stops - _ONE)
    longest = int(masks.max())
    if longest == _ALL_BITS:
        raise Unusual
    return loaded & (masks & _NUMBER_BITS), longest, places + (np.bitwise_count(masks) >> 3)


def signed_numbers(numbers: Words, longest: int) -> Int64s:
    """What the bytes of zigzag numbers stand for."""
    for mask, low, high, shift in _CLOSING:
        if longest > mask:
            numbers = (numbers & low) | ((numbers & high) >> shift)
    return (numbers >> _ONE).view(np.int64) ^ -(numbers & _ONE).view(np.int64)


def load_numbers(words: Words, places: Int64s) -> tuple[Words, int, Int64s]:
    """The bytes of the numbers at ``places``, the mask of the longest of them, and the places behind.

    Behind the end of the body zeros are read; the caller finds that the fields end outside their record.
    """
    last = len(words) - 1
    if places[-1] > last:
        inside = np.minimum(places, last)
        loaded = words[inside] >> ((places - inside) * 8).astype(np.uint64)
    else:
        # One in the middle may still be outside, where records lie, and the caller meets an IndexError.
        loaded = words[places]
    return cut_numbers(loaded, places)


def numbers_at(words: Words, places: Int64s) -> tuple[Int64s, Int64s]:
    """The zigzag numbers at ``places``, and the places behind them."""
    numbers, longest, behind = load_numbers(words, places)
    return signed_numbers(numbers, longest), behind


def _strides() -> list[list[int]]:
    """From the first two bytes of a record to its size, its length included.

    There is no entry for a negative length or one of three bytes and more.
    """
    rows: list[list[int]] = []
    for first in range(256):
        if first & 1:
            rows.append([])
        elif first < 0x80:
            rows.append([1 + (first >> 1)] * 256)
        else:
            rows.append([2 + ((first & 0x7F) >> 1) + (second << 6) for second in range(128)])
    return rows


#: By the first two bytes of a record: how far it is to the next one.
STRIDES = _strides()
