"""Hashes of many keys at once, of 128 bits each.

A key of up to 64 bytes is a row of 32-bit words, its length in front. Four times it is multiplied with random
numbers of 64 bits, word by word, and of the sum modulo 2**64 the upper 32 bits are taken: a multilinear hash,
which is strongly universal. So whatever two keys there are, chosen before the numbers were drawn, they have
the same 128 bits with a probability of 2**-128, and two among m keys with less than m**2 / 2**129. Longer
keys are left to BLAKE2, which Python computes one by one.

The numbers are drawn anew for each hash and never shown, so that nobody can look for keys that collide.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.records.record_places import BODY_MARGIN_BYTES, Int64s, words_of

__all__ = ("KeyHash", "Words")

Words = npt.NDArray[np.uint64]

_WORD_BYTES = 8
#: Longer keys are hashed one by one; with so many words that is the faster way.
_WORDS_MAX = 8
_COLUMN_BYTES_MAX = _WORDS_MAX * _WORD_BYTES
assert _COLUMN_BYTES_MAX + _WORD_BYTES <= BODY_MARGIN_BYTES, "words are loaded behind the end of a key"

_HASHES = 4
_FORM_BYTES = 16
_SECRET_BYTES = 32
_HALF = np.uint64(32)
_LOW_HALF = np.uint64(2**32 - 1)
_HIGH_HALF = np.uint64(2**64 - 2**32)
#: What stays of a word of which so many bytes belong to the key.
_MASKS: Words = np.array([2 ** (8 * size) - 1 for size in range(_WORD_BYTES + 1)], np.uint64)


class KeyHash:
    """One drawing of the random numbers: only hashes of the same object can be compared."""

    def __init__(self) -> None:
        count = _HASHES * (2 + 2 * _WORDS_MAX)
        drawn = np.frombuffer(os.urandom(count * _WORD_BYTES), np.uint64).reshape(-1, _HASHES, 1)
        self._constants, self._for_length = drawn[0], drawn[1]
        self._for_low, self._for_high = drawn[2 : 2 + _WORDS_MAX], drawn[2 + _WORDS_MAX :]
        self._secret = os.urandom(_SECRET_BYTES)

    def __call__(self, body: bytes, starts: Int64s, ends: Int64s) -> tuple[Words, Words]:
        """Two words for each of the keys in ``body``, behind which there is its margin."""
        lengths = ends - starts
        sums = lengths.view(np.uint64) * self._for_length + self._constants
        shortest, longest = int(lengths.min()), int(lengths.max())
        words = words_of(body)
        for number in range(-(-min(longest, _COLUMN_BYTES_MAX) // _WORD_BYTES)):
            loaded = words[starts + number * _WORD_BYTES]
            if shortest < (number + 1) * _WORD_BYTES:
                loaded &= _MASKS[np.clip(lengths - number * _WORD_BYTES, 0, _WORD_BYTES)]
            sums += (loaded & _LOW_HALF) * self._for_low[number]
            sums += (loaded >> _HALF) * self._for_high[number]
        first = (sums[0] & _HIGH_HALF) | (sums[1] >> _HALF)
        second = (sums[2] & _HIGH_HALF) | (sums[3] >> _HALF)
        if longest > _COLUMN_BYTES_MAX:
            self._hash_long(body, starts, ends, first, second)
        return first, second

    def _hash_long(self, body: bytes, starts: Int64s, ends: Int64s, first: Words, second: Words) -> None:
        which: Any = np.flatnonzero(ends - starts > _COLUMN_BYTES_MAX)
        places = zip(starts[which].tolist(), ends[which].tolist(), strict=True)
        digests = b"".join(
            blake2b(body[start:end], digest_size=_FORM_BYTES, key=self._secret).digest()
            for start, end in places
        )
        pairs = np.frombuffer(digests, np.uint64).reshape(-1, 2)
        first[which], second[which] = pairs[:, 0], pairs[:, 1]
