"""Key → last offset, for a fixed amount of memory.

A hash table with open addressing over two flat arrays: 24 bytes a slot, instead of some 160 in a dict. Of a
key only sixteen bytes are kept: the key itself and its length if it is short, else a hash of it. That two
keys of one partition have the same 128-bit hash is not going to happen, and Kafka relies on the same.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

__all__ = ("KeyMap",)

_FORM_BYTES = 16
_OFFSET_BYTES = 8
_SLOT_BYTES = _FORM_BYTES + _OFFSET_BYTES
_FULL_AT = 0.7
_SLOTS_MIN = 16
_ABSENT = -1
_LENGTHS = [bytes((size,)) for size in range(_FORM_BYTES)]


class KeyMap:
    """Holds at least ``entries_max`` keys, or as many as fit into ``budget_bytes``, if those are fewer."""

    def __init__(self, budget_bytes: int, entries_max: int) -> None:
        slots = _SLOTS_MIN
        while slots * _FULL_AT < entries_max and slots * 2 * _SLOT_BYTES <= budget_bytes:
            slots *= 2
        self._allocate(slots)

    def _allocate(self, slots: int) -> None:
        self._mask = slots - 1
        self._forms = bytearray(slots * _FORM_BYTES)
        self._offsets = array("q", [_ABSENT]) * slots
        self._room = int(slots * _FULL_AT)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def memory_bytes(self) -> int:
        return (self._mask + 1) * _SLOT_BYTES

    def has_room(self, entries: int) -> bool:
        """Whether so many more keys surely fit."""
        return self._count + entries <= self._room

    def make_room(self, entries: int) -> None:
        """Grow an empty map beyond its budget: one batch must always fit, or there would be no progress."""
        assert not self._count, "only an empty map can grow"
        slots = self._mask + 1
        while slots * _FULL_AT < entries:
            slots *= 2
        self._allocate(slots)

    def put(self, key: bytes, offset: int) -> None:
        """Note the offset of a key; later calls for the same key have larger ones."""
        size = len(key)
        if size < _FORM_BYTES:
            form = key.ljust(_FORM_BYTES - 1, b"\0") + _LENGTHS[size]
        else:
            form = blake2b(key, digest_size=_FORM_BYTES).digest()
        forms, offsets, mask = self._forms, self._offsets, self._mask
        slot = hash(form) & mask
        while offsets[slot] != _ABSENT:
            start = slot * _FORM_BYTES
            if forms[start : start + _FORM_BYTES] == form:
                offsets[slot] = offset
                return
            slot = (slot + 1) & mask
        assert self._count < self._room, "the caller asks has_room first"
        start = slot * _FORM_BYTES
        forms[start : start + _FORM_BYTES] = form
        offsets[slot] = offset
        self._count += 1

    def get(self, key: bytes) -> int:
        """The offset of the key; -1 if it is not there."""
        size = len(key)
        if size < _FORM_BYTES:
            form = key.ljust(_FORM_BYTES - 1, b"\0") + _LENGTHS[size]
        else:
            form = blake2b(key, digest_size=_FORM_BYTES).digest()
        forms, offsets, mask = self._forms, self._offsets, self._mask
        slot = hash(form) & mask
        while offsets[slot] != _ABSENT:
            start = slot * _FORM_BYTES
            if forms[start : start + _FORM_BYTES] == form:
                return offsets[slot]
            slot = (slot + 1) & mask
        return _ABSENT
