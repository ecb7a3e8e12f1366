"""Where the records of uncompressed batches are, and where their fields, read with numpy.

- A record is found by the length in front of it, so that one walk over the lengths comes first.
- A field is read by loading eight bytes at its place in every record. Seven bytes of number is the most that
  is decoded so. Behind the body there is a margin of zeros, so that nothing is loaded from outside.
- Whatever cannot be judged so is ``Unusual``, and left to ``rewriting.index_records``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tidemill.errors import ApiError
from tidemill.records.rewriting import read_varint
from tidemill.records.word_numbers import STRIDES, Int64s, Unusual, Words, cut_numbers, signed_numbers

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


def words_of(body: bytes) -> Words:
    """Every place in the body as the beginning of eight bytes."""
    return np.ndarray((len(body) - _WORD_BYTES + 1,), np.dtype("<u8"), body, strides=(1,))


def find_records(body: bytes, words: Words, count: int, breathe: Breathe) -> Int64s:
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


def _equal_records(body: bytes, words: Words, position: int, count: int) -> tuple[int, int]:
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


def _walk(body: bytes, position: int) -> Iterator[int]:
    """Where records begin, from ``position`` on."""
    strides = STRIDES
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


def read_fields(words: Words, bounds: Int64s) -> tuple[Int64s, ...]:
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
    has_no_value = (words[values] & np.uint64(1)).view(np.int64)  # the sign of its length
    return after_timestamps, timestamp_deltas, offset_deltas, key_starts, key_ends, has_no_value


def _load(words: Words, places: Int64s) -> tuple[Words, int, Int64s]:
    """The bytes of the numbers at ``places``, the mask of the longest of them, and the places behind."""
    loaded = words[places]
    return cut_numbers(loaded, places)


def _numbers(words: Words, places: Int64s) -> tuple[Int64s, Int64s]:
    """The zigzag numbers at ``places``, and the places behind them."""
    numbers, longest, behind = _load(words, places)
    return signed_numbers(numbers, longest), behind
