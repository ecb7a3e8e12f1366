"""Key → last offset, for a fixed amount of memory, and for many keys at once.

A hash table with open addressing: 24 bytes a slot, instead of some 160 in a dict. Of a key only a hash of 128
bits is kept. That two keys of one partition have the same is not going to happen, see ``key_hash``; Kafka
relies on a hash of that size too.

All keys of a call look at a slot each, and those that find another key there go on to their next slot
together. Who gets a free slot that several want is left to numpy, which writes one of them, no matter which:
they look who it was.
"""

from __future__ import annotations

import numpy as np

from tidemill.log.key_hash import KeyHash, Words
from tidemill.records.record_places import Int64s

__all__ = ("KeyMap",)

_SLOT_BYTES = 24
_FULL_AT = 0.7
_SLOTS_MIN = 16
#: Columns of the table. The last is the offset plus one, so that memory that was never touched is free slots.
_FIRST, _SECOND, _MARK = 0, 1, 2
_MIXER = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_ONE = np.uint64(1)


class KeyMap:
    """Holds at least ``entries_max`` keys, or as many as fit into ``budget_bytes``, if those are fewer."""

    def __init__(self, budget_bytes: int, entries_max: int) -> None:
        slots = _SLOTS_MIN
        while slots * _FULL_AT < entries_max and slots * 2 * _SLOT_BYTES <= budget_bytes:
            slots *= 2
        self._hash = KeyHash()
        self._allocate(slots)

    def _allocate(self, slots: int) -> None:
        self._mask = np.uint64(slots - 1)
        self._table = np.zeros((slots, 3), np.int64)
        self._room = int(slots * _FULL_AT)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def memory_bytes(self) -> int:
        return self._table.nbytes

    def has_room(self, entries: int) -> bool:
        """Whether so many more keys surely fit."""
        return self._count + entries <= self._room

    def make_room(self, entries: int) -> None:
        """Grow an empty map beyond its budget: one batch must always fit, or there would be no progress."""
        assert not self._count, "only an empty map can grow"
        slots = len(self._table)
        while slots * _FULL_AT < entries:
            slots *= 2
        self._allocate(slots)

    def put(self, body: bytes, starts: Int64s, ends: Int64s, offsets: Int64s) -> None:
        """Note the offsets of the keys that are in ``body``, behind which there is its margin. Of a key that
        is there more than once, now or in another call, the largest stays.
        """
        if not len(starts):
            return
        assert self.has_room(len(starts)), "the caller asks has_room first"
        first, second, slots, steps = self._places(body, starts, ends)
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

        Their own numbers stand there for the moment, below zero: so nobody else's mark is like them, and any
        offset is larger.
        """
        numbers = -1 - np.arange(len(slots))
        self._table[slots, _MARK] = numbers
        won = np.flatnonzero(self._table[slots, _MARK] == numbers)
        self._table[slots[won], _FIRST] = first[won]
        self._table[slots[won], _SECOND] = second[won]
        self._count += len(won)

    def get(self, body: bytes, starts: Int64s, ends: Int64s) -> Int64s:
        """The offset of each of the keys in ``body``; -1 for one that is not there."""
        offsets = np.full(len(starts), -1, np.int64)
        if not len(starts):
            return offsets
        first, second, slots, steps = self._places(body, starts, ends)
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

    def _places(self, body: bytes, starts: Int64s, ends: Int64s) -> tuple[Int64s, Int64s, Int64s, Words]:
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
