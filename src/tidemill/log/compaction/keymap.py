"""The key map of a compaction: the last offset of each key, in a fixed amount of memory.

A hash table with open addressing: 24 bytes a slot, instead of some 160 in a dict. Of a key only a hash of 128
bits is kept. Two keys of one partition practically never have the same (the last paragraph says why); Kafka
relies on a hash of that size, too.

All keys of a call look at a slot each, and those that find another key there go on to their next slot
together. If several want a free slot, numpy writes one of them, no matter which, and all look which one it
was.

The hash of many keys at once: a key of up to 64 bytes is a row of 32-bit words, its length in front. Four
times it is multiplied with random numbers of 64 bits, word by word, and of the sum modulo 2**64 the upper 32
bits are taken: a multilinear hash, which is strongly universal. So whatever two keys there are, chosen before
the numbers were drawn, they have the same 128 bits with a probability of 2**-128, and two among m keys with
less than m**2 / 2**129. Longer keys are left to BLAKE2, which Python computes one by one.

The numbers are drawn anew for each hash and never shown, so that nobody can look for keys that collide.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import Any

import numpy as np

from tidemill.records.columns.fields import BODY_MARGIN_BYTES, Int64s, Words, words_of

__all__ = ("KeyHash", "KeyMap")

_SLOT_BYTES = 24
_FULL_AT = 0.7
_SLOTS_MIN = 16
#: Columns of the table. The last is the offset plus one, so that memory that was never touched is free slots.
_FIRST, _SECOND, _MARK = 0, 1, 2
_MIXER = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_ONE = np.uint64(1)

_WORD_BYTES = 8
#: Longer keys are hashed one by one; with so many words that is the faster way.
_WORDS_MAX = 8
_COLUMN_BYTES_MAX = _WORDS_MAX * _WORD_BYTES
assert _COLUMN_BYTES_MAX + _WORD_BYTES <= BODY_MARGIN_BYTES, "words are loaded behind the end of a key"

_HASHES = 4
_FORM_BYTES = 16
_SECRET_BYTES = 32
_LOW_HALF = np.uint64(2**32 - 1)
_HIGH_HALF = np.uint64(2**64 - 2**32)
#: Masks for the last word of a key, by how many of its bytes belong to the key.
_MASKS: Words = np.array([2 ** (8 * size) - 1 for size in range(_WORD_BYTES + 1)], np.uint64)


class KeyHash:
    """A hash function with random numbers of its own: only hashes of the same object can be compared."""

    def __init__(self) -> None:
        count = _HASHES * (2 + 2 * _WORDS_MAX)
        drawn = np.frombuffer(os.urandom(count * _WORD_BYTES), np.uint64).reshape(-1, _HASHES, 1)
        self._constants, self._for_length = drawn[0], drawn[1]
        self._for_low, self._for_high = drawn[2 : 2 + _WORDS_MAX], drawn[2 + _WORDS_MAX :]
        self._secret = os.urandom(_SECRET_BYTES)

    def __call__(self, body: bytes, starts: Int64s, ends: Int64s) -> tuple[Words, Words]:
        """The hash of each key in ``body`` as two words. ``body`` has its margin at the end."""
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
        spans = zip(starts[which].tolist(), ends[which].tolist(), strict=True)
        digests = b"".join(
            blake2b(body[start:end], digest_size=_FORM_BYTES, key=self._secret).digest()
            for start, end in spans
        )
        pairs = np.frombuffer(digests, np.uint64).reshape(-1, 2)
        first[which], second[which] = pairs[:, 0], pairs[:, 1]


class KeyMap:
    """A map of ``entries_max`` keys to offsets, or of as many as fit into ``budget_bytes``."""

    def __init__(self, budget_bytes: int, entries_max: int) -> None:
        slots = _SLOTS_MIN
        while slots * _FULL_AT < entries_max and slots * 2 * _SLOT_BYTES <= budget_bytes:
            slots *= 2
        self._hash = KeyHash()
        self._allocate(slots)

    def _allocate(self, slots: int) -> None:
        self._mask = np.uint64(slots - 1)
        self._table = np.zeros((slots, 3), np.int64)
        self._capacity = int(slots * _FULL_AT)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def memory_bytes(self) -> int:
        return self._table.nbytes

    def has_capacity(self, entries: int) -> bool:
        """Whether ``entries`` more keys surely fit."""
        return self._count + entries <= self._capacity

    def ensure_capacity(self, entries: int) -> None:
        """Grow an empty map beyond its budget: one batch must always fit, or there would be no progress."""
        assert not self._count, "only an empty map can grow"
        slots = len(self._table)
        while slots * _FULL_AT < entries:
            slots *= 2
        self._allocate(slots)

    def put(self, body: bytes, starts: Int64s, ends: Int64s, offsets: Int64s) -> None:
        """Note the offsets of the keys in ``body``; for a key that occurs more than once, the largest.

        ``body`` has its margin at the end.
        """
        if not len(starts):
            return
        assert self.has_capacity(len(starts)), "the caller asks has_capacity first"
        first, second, slots, steps = self._first_slots(body, starts, ends)
        final = np.empty(len(starts), np.int64)
        rows = np.arange(len(starts))
        while len(rows):
            found = self._table[slots]
            free = np.flatnonzero(found[:, _MARK] == 0)
            if len(free):
                self._claim(slots[free], first[free], second[free])
                found[free] = self._table[slots[free]]
            same = (found[:, _FIRST] == first) & (found[:, _SECOND] == second)
            final[rows[same]] = slots[same]
            others = np.flatnonzero(~same)
            rows, first, second, steps = rows[others], first[others], second[others], steps[others]
            slots = self._next(slots[others], steps)
        np.maximum.at(self._table[:, _MARK], final, offsets + 1)

    def _claim(self, slots: Int64s, first: Int64s, second: Int64s) -> None:
        """Give each of the free ``slots`` to one of those who want it.

        Meanwhile the slots hold the negated numbers of the keys: they differ from all marks of others, and
        any offset is larger.
        """
        numbers = -1 - np.arange(len(slots))
        self._table[slots, _MARK] = numbers
        won = np.flatnonzero(self._table[slots, _MARK] == numbers)
        self._table[slots[won], _FIRST] = first[won]
        self._table[slots[won], _SECOND] = second[won]
        self._count += len(won)

    def get(self, body: bytes, starts: Int64s, ends: Int64s) -> Int64s:
        """The offset of each of the keys in ``body``; -1 for a key that the map lacks."""
        offsets = np.full(len(starts), -1, np.int64)
        if not len(starts):
            return offsets
        first, second, slots, steps = self._first_slots(body, starts, ends)
        rows = np.arange(len(starts))
        while len(rows):
            found = self._table[slots]
            same = (found[:, _FIRST] == first) & (found[:, _SECOND] == second)
            # A free slot is all zeros: found or not by a hash of zeros, that is -1.
            offsets[rows[same]] = found[same, _MARK] - 1
            others = np.flatnonzero(~same & (found[:, _MARK] != 0))
            rows, first, second, steps = rows[others], first[others], second[others], steps[others]
            slots = self._next(slots[others], steps)
        return offsets

    def _first_slots(self, body: bytes, starts: Int64s, ends: Int64s) -> tuple[Int64s, Int64s, Int64s, Words]:
        """Both words of each key's hash, its first slot, and how far it is to the next one."""
        first, second = self._hash(body, starts, ends)
        # The hash is linear, so that similar keys would crowd; which slot it is must look random.
        mixed = (first ^ (second >> _HALF)) * _MIXER
        mixed ^= mixed >> _HALF
        slots = (mixed & self._mask).view(np.int64)
        # Odd numbers lead through all slots, of which there is a power of two.
        return first.view(np.int64), second.view(np.int64), slots, second | _ONE

    def _next(self, slots: Int64s, steps: Words) -> Int64s:
        return ((slots.view(np.uint64) + steps) & self._mask).view(np.int64)
