"""Where the records of uncompressed batches are, and where their fields, read with numpy.

- A record is found by the length in front of it, so that one walk over the lengths comes first.
- A field is read by loading eight bytes at its place in every record. Seven bytes of number is the most that
  is decoded so. Behind the body there is a margin of zeros, so that nothing is loaded from outside.
- Whatever cannot be judged so is ``Unusual``, and left to ``rewriting.index_records``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from tidemill.errors import ApiError
from tidemill.records.rewriting import read_varint

__all__ = (
    "BODY_MARGIN_BYTES",
    "RECORD_BYTES_MIN",
    "WINDOW_RECORDS",
    "Breathe",
    "Int64s",
    "Unusual",
    "find_records",
    "read_fields",
    "words_of",
)

Int64s = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
Breathe = Callable[[], None]

#: So many records at once are enough that what each numpy call costs does not count any more, and so few that
#: no call keeps other threads waiting.
WINDOW_RECORDS = 8192
#: So many zeros follow the records: enough to load eight bytes at any field of a record, and behind a key.
BODY_MARGIN_BYTES = 128
#: Its length, attributes, timestamp, offset and the lengths of key and value have a byte each.
RECORD_BYTES_MIN = 6
_WORD_BYTES = 8
#: So many equal lengths in a row are worth a leap; else so many records are walked.
_LEAP_RECORDS_MIN = 64
_WALKED_RECORDS = 1024

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


def words_of(body: bytes) -> _Words:
    """Every place in the body as the beginning of eight bytes."""
    return np.ndarray((len(body) - _WORD_BYTES + 1,), np.dtype("<u8"), body, strides=(1,))


def find_records(body: bytes, words: _Words, count: int, breathe: Breathe) -> Int64s:
    """Where each of ``count`` records begins, and where the last one ends. Raises ``Unusual`` if that is
    outside. Where records of one length follow each other it leaps, else it walks.
    """
    bounds = np.empty(count + 1, np.int64)
    size = len(body) - BODY_MARGIN_BYTES
    found = position = 0
    try:
        while found < count:
            run, stride = _equal_records(body, words, position, min(count - found, WINDOW_RECORDS))
            if run < _LEAP_RECORDS_MIN:
                run = min(_WALKED_RECORDS, count - found)
                bounds[found : found + run + 1] = np.fromiter(_walk(body, position), np.int64, run + 1)
            else:
                bounds[found : found + run + 1] = position + np.arange(run + 1) * stride
            found += run
            position = int(bounds[found])
            if position > size:
                raise Unusual
            breathe()
    except (IndexError, ApiError):
        raise Unusual from None
    return bounds


def _equal_records(body: bytes, words: _Words, position: int, count: int) -> tuple[int, int]:
    """How many records from ``position`` on have the same length in front, and how far apart they are."""
    length, behind = read_varint(body, position)
    stride = behind + length - position
    if stride <= 0 or behind - position >= _WORD_BYTES:
        return 0, 0
    count = min(count, (len(body) - BODY_MARGIN_BYTES - position) // stride)
    mask = np.uint64(2 ** (8 * (behind - position)) - 1)
    front = words[position] & mask
    run, window = 0, _LEAP_RECORDS_MIN
    while run < count:
        window = min(window, count - run)
        first = position + run * stride
        same = (words[first : first + window * stride : stride] & mask) == front
        equal = window if same.all() else int(same.argmin())
        run += equal
        if equal < window:
            break
        window *= 2
    return run, stride


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


_STRIDES = _strides()


def _walk(body: bytes, position: int) -> Iterator[int]:
    """Where records begin, from ``position`` on."""
    strides = _STRIDES
    while True:
        yield position
        try:
            position += strides[body[position]][body[position + 1]]
        except IndexError:
            length, behind = read_varint(body, position)
            position = behind + length
            if length < 0 or position > len(body):
                raise Unusual from None


# --- what is in them


def read_fields(words: _Words, bounds: Int64s) -> tuple[Int64s, ...]:
    """What ``index_records`` finds, but for the starts that are known. Nothing is loaded from outside:
    behind the start of a record these are at most three numbers of seven bytes, a byte, and eight bytes.
    """
    _, _, places = _load(words, bounds[:-1])
    timestamp_deltas, after_timestamps = _numbers(words, places + 1)  # behind attributes that mean nothing
    offset_deltas, places = _numbers(words, after_timestamps)
    key_lengths, key_starts = _numbers(words, places)
    key_ends = np.where(key_lengths < 0, -1, key_starts + key_lengths)
    values = np.maximum(key_starts, key_ends)
    if (values >= bounds[1:]).any():
        raise Unusual
    has_no_value = (words[values] & _ONE).view(np.int64)  # the sign of its length
    return after_timestamps, timestamp_deltas, offset_deltas, key_starts, key_ends, has_no_value


def _load(words: _Words, places: Int64s) -> tuple[_Words, int, Int64s]:
    """The bytes of the numbers at ``places``, the mask of the longest of them, and the places behind."""
    loaded = words[places]
    stops = ~loaded & _STOP_BITS
    # Ones up to the first byte without a continuation bit.
    masks = stops ^ (stops - _ONE)
    longest = int(masks.max())
    if longest == _ALL_BITS:
        raise Unusual
    return loaded & (masks & _NUMBER_BITS), longest, places + (np.bitwise_count(masks) >> 3)


def _numbers(words: _Words, places: Int64s) -> tuple[Int64s, Int64s]:
    """The zigzag numbers at ``places``, and the places behind them."""
    numbers, longest, behind = _load(words, places)
    for mask, low, high, shift in _CLOSING:
        if longest > mask:
            numbers = (numbers & low) | ((numbers & high) >> shift)
    return (numbers >> _ONE).view(np.int64) ^ -(numbers & _ONE).view(np.int64), behind
