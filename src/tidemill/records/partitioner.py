"""The partition that a key belongs to, by murmur2 as Java's clients compute it.

Every client that keeps records of one key in one partition must agree on this function to the bit.
"""

from __future__ import annotations

from typing import Final

__all__ = ("murmur2", "partition_for_key")

_SEED: Final = 0x9747B28C
_MULTIPLIER: Final = 0x5BD1E995
_SHIFT: Final = 24
_MASK: Final = 0xFFFFFFFF
_POSITIVE: Final = 0x7FFFFFFF


def murmur2(data: bytes) -> int:
    """The 32-bit murmur2 hash of ``data``, unsigned.

    >>> murmur2(b"foobar") - 2**32
    -790332482
    """
    size = len(data)
    value = (_SEED ^ size) & _MASK
    whole = size & ~3
    for start in range(0, whole, 4):
        word = int.from_bytes(data[start : start + 4], "little") * _MULTIPLIER & _MASK
        word ^= word >> _SHIFT
        value = (value * _MULTIPLIER & _MASK) ^ (word * _MULTIPLIER & _MASK)
    if whole != size:
        value = (value ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER & _MASK
    value ^= value >> 13
    value = value * _MULTIPLIER & _MASK
    return value ^ (value >> 15)


def partition_for_key(key: bytes, partition_count: int) -> int:
    """The partition of ``key`` in a topic with ``partition_count`` partitions.

    >>> partition_for_key(b"foobar", 10)
    6
    """
    return (murmur2(key) & _POSITIVE) % partition_count
