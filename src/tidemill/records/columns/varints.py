"""Decodes many varints at once with numpy: each lies within eight bytes that are loaded.

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
#: Steps that join groups of seven bits: longest mask to leave alone, low mask, high mask, shift.
_CLOSING = tuple(
    (mask, np.uint64(low), np.uint64(high), np.uint64(shift))
    for mask, low, high, shift in (
        (0xFF, 0x007F007F007F007F, 0x7F007F007F007F00, 1),
        (0xFFFF, 0x00003FFF00003FFF, 0x3FFF00003FFF0000, 2),
        (0xFFFFFFFF, 0x000000000FFFFFFF, 0x0FFFFFFF00000000, 4),
    )
)


class Unusual(Exception):
    """A batch has something that cannot be read by columns, and is read in a loop."""


def cut_numbers(loaded: Words, positions: Int64s) -> tuple[Words, int, Int64s]:
    """The bytes of the numbers that ``loaded`` begins with, the longest mask, and the positions behind."""
    stops = ~loaded & _STOP_BITS
    # Ones up to the first byte without a continuation bit.
    masks = stops ^ (stops - _ONE)
    longest = int(masks.max())
    if longest == _ALL_BITS:
        raise Unusual
    return loaded & (masks & _NUMBER_BITS), longest, positions + (np.bitwise_count(masks) >> 3)


def signed_numbers(numbers: Words, longest: int) -> Int64s:
    """Decode the bytes of zigzag numbers."""
    for mask, low, high, shift in _CLOSING:
        if longest > mask:
            numbers = (numbers & low) | ((numbers & high) >> shift)
    return (numbers >> _ONE).view(np.int64) ^ -(numbers & _ONE).view(np.int64)


def load_numbers(words: Words, positions: Int64s) -> tuple[Words, int, Int64s]:
    """The bytes of the numbers at ``positions``, the mask of the longest of them, and the positions behind.

    Behind the end of the body zeros are read; the caller finds that the fields end outside their record.
    """
    last = len(words) - 1
    if positions[-1] > last:
        inside = np.minimum(positions, last)
        loaded = words[inside] >> ((positions - inside) * 8).astype(np.uint64)
    else:
        # One in the middle may be outside, too, if lengths of records are wrong; then the caller gets an
        # IndexError.
        loaded = words[positions]
    return cut_numbers(loaded, positions)


def numbers_at(words: Words, positions: Int64s) -> tuple[Int64s, Int64s]:
    """The zigzag numbers at ``positions``, and the positions behind them."""
    numbers, longest, behind = load_numbers(words, positions)
    return signed_numbers(numbers, longest), behind


def _strides() -> list[list[int]]:
    """A table from the first two bytes of a record to its size, its length included.

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


#: The distance to the next record, by the first two bytes of a record.
STRIDES = _strides()
