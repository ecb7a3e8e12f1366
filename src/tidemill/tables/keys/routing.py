"""Routing: the bucket that a key belongs to. Nothing else hashes or compares keys to find a bucket.

- By hash: murmur2 of the canonical key bytes, positive, modulo the number of buckets, as Kafka's Java clients
  choose a partition. So any of them can write to a table.
- By range: ordered boundaries of state keys; bucket ``i`` holds the keys from boundary ``i - 1`` to before
  boundary ``i``. The first bucket has no lower end, the last one no upper end.

A map never changes; a table whose routing changes gets another map with a higher version.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.errors import TableCode, TableError
from tidemill.records.columns import compute as pc
from tidemill.records.columns.arrays import from_numpy
from tidemill.records.partitioner import murmur2
from tidemill.tables.keys.ragged import ByteArray, spans

__all__ = ("BUCKETS_MAX", "BucketMap", "murmur2_many")

#: The most buckets that a table or one of its partitions can have.
BUCKETS_MAX: Final = 65_536

_SEED: Final = np.uint32(0x9747B28C)
_MULTIPLIER: Final = np.uint32(0x5BD1E995)
_POSITIVE: Final = np.uint32(0x7FFFFFFF)
_WORD: Final = 4
#: Rows hashed together: the arrays of one step stay in the processor's cache.
_CHUNK: Final = 8_192
#: Below this number of keys that still have words, hashing one by one is cheaper than whole-array steps.
_FEW: Final = 24


@dataclass(frozen=True, slots=True)
class BucketMap:
    """The routing of a table: from keys to buckets. ``boundaries`` are empty for a map by hash.

    >>> BucketMap.ranged([b"g", b"p"]).key_range(1)
    (b'g', b'p')
    """

    version: int
    kind: Literal["hash", "range"]
    buckets: int
    boundaries: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if self.version < 1:
            raise _invalid(f"version {self.version} of a bucket map; versions count from 1")
        if not 1 <= self.buckets <= BUCKETS_MAX:
            raise _invalid(f"{self.buckets} buckets; a table has 1 to {BUCKETS_MAX}")
        if self.kind == "range":
            _check_boundaries(self.boundaries)
        if len(self.boundaries) != (self.buckets - 1 if self.kind == "range" else 0):
            raise _invalid(
                f"{len(self.boundaries)} boundaries do not make {self.buckets} buckets by {self.kind}"
            )

    @classmethod
    def hashed(cls, buckets: int, *, version: int = 1) -> BucketMap:
        """A map of so many buckets by hash."""
        return cls(version, "hash", buckets)

    @classmethod
    def ranged(cls, boundaries: Sequence[bytes], *, version: int = 1) -> BucketMap:
        """A map by range, of one bucket more than there are boundaries; they must increase."""
        return cls(version, "range", len(boundaries) + 1, tuple(boundaries))

    @property
    def is_ranged(self) -> bool:
        """Whether ``route`` needs the state keys; else it needs the canonical ones. The other may be None."""
        return self.kind == "range"

    def route(self, canonical: pa.Array | None, state_keys: pa.Array | None) -> npt.NDArray[np.int32]:
        """The bucket of each key, which is given in both forms."""
        if self.is_ranged:
            assert state_keys is not None, "a map by range needs state keys"
            return self._search(state_keys)
        assert canonical is not None, "a map by hash needs canonical keys"
        positive = murmur2_many(canonical) & _POSITIVE
        return (positive % np.uint32(self.buckets)).astype(np.int32)

    def key_range(self, bucket: int) -> tuple[bytes, bytes | None]:
        """The state keys that a bucket can hold: from the first, to before the second; None means no end.

        By hash, any bucket can hold any key.
        """
        if not 0 <= bucket < self.buckets:
            raise TableError(
                TableCode.bucket_not_found, f"there is no bucket {bucket}; they are 0 to {self.buckets - 1}"
            )
        if not self.is_ranged:
            return b"", None
        edges = (b"", *self.boundaries, None)
        low = edges[bucket]
        assert low is not None, "only the last edge is open"
        return low, edges[bucket + 1]

    def buckets_for_range(self, low: bytes, high: bytes | None) -> list[int]:
        """The buckets that can hold state keys from ``low`` to before ``high``; None means no end."""
        if high is not None and high <= low:
            return []
        if not self.is_ranged:
            return list(range(self.buckets))
        last = self.buckets - 1 if high is None else bisect_left(self.boundaries, high)
        return list(range(bisect_right(self.boundaries, low), last + 1))

    def to_value(self) -> dict[str, Any]:
        """The map as plain values, as it is stored and sent."""
        value: dict[str, Any] = {"version": self.version, "kind": self.kind, "buckets": self.buckets}
        if self.is_ranged:
            value["boundaries"] = list(self.boundaries)
        return value

    @classmethod
    def from_value(cls, value: Any) -> BucketMap:
        """A map from plain values: the inverse of ``to_value``. Refuses what is no map."""
        match value:
            case {"version": int(version), "kind": "hash", "buckets": int(buckets)}:
                return cls(version, "hash", buckets)
            case {
                "version": int(version),
                "kind": "range",
                "buckets": int(buckets),
                "boundaries": [*boundaries],
            } if all(isinstance(each, bytes) for each in boundaries):
                return cls(version, "range", buckets, tuple(boundaries))
        raise _invalid(
            f"{str(value)[:200]!r} is no bucket map; it was written by another version, or is damaged"
        )

    def _search(self, state_keys: pa.Array) -> npt.NDArray[np.int32]:
        """The number of boundaries at or below each key: a binary search of all keys at once."""
        low = np.zeros(len(state_keys), np.int32)
        if not self.boundaries:
            return low
        boundaries = pa.array(self.boundaries, pa.binary())
        high = np.full(len(state_keys), len(self.boundaries), np.int32)
        for _ in range(len(self.boundaries).bit_length()):
            # For a key whose search has ended, the middle may be past the last boundary.
            middle = (low + high) // 2
            at = boundaries.take(from_numpy(np.minimum(middle, len(self.boundaries) - 1)))
            reached = pc.greater_equal(state_keys, at).to_numpy(zero_copy_only=False)
            is_open = low < high
            low = np.where(reached & is_open, middle + 1, low)
            high = np.where(reached, high, middle)
        return low


def murmur2_many(keys: pa.Array) -> npt.NDArray[np.uint32]:
    """The murmur2 of each value of a binary array, the same as ``tidemill.records.partitioner.murmur2``.

    >>> murmur2_many(pa.array([b"foobar"])).astype("i4").tolist()
    [-790332482]
    """
    data, offsets = spans(keys)
    first = int(offsets[0])
    # Words are read at any byte, so there must be bytes behind the last tail.
    padded = np.zeros(int(offsets[-1]) - first + _WORD, np.uint8)
    padded[:-_WORD] = data[first : int(offsets[-1])]
    starts = offsets.astype(np.int64) - first
    hashes = np.empty(len(keys), np.uint32)
    for begin in range(0, len(keys), _CHUNK):
        end = min(begin + _CHUNK, len(keys))
        hashes[begin:end] = _hash_chunk(padded, starts[begin:end], starts[begin + 1 : end + 1])
    return hashes


def _hash_chunk(
    data: ByteArray, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """The hashes of the keys between starts and ends, a word of all of them at a time."""
    words_at = np.ndarray(len(data) - _WORD + 1, "<u4", data, strides=(1,))
    order = np.argsort(-(ends - starts), kind="stable")
    starts, ends = starts[order], ends[order]
    lengths = ends - starts
    # Longest first: the keys that still have a word are always the first ones.
    words = lengths // _WORD
    left = np.searchsorted(-words, -np.arange(int(words[0]) + 1), side="left")
    values = lengths.astype(np.uint32) ^ _SEED
    single = 0
    for step in range(int(words[0])):
        active = int(left[step])
        if active < _FEW:
            single = active
            break
        word = words_at[starts[:active] + step * _WORD] * _MULTIPLIER
        word ^= word >> np.uint32(24)
        word *= _MULTIPLIER
        values[:active] *= _MULTIPLIER
        values[:active] ^= word
    _finish(values, words_at, starts + words * _WORD, lengths % _WORD)
    for index in range(single):
        values[index] = murmur2(data[starts[index] : ends[index]].tobytes())
    hashes = np.empty_like(values)
    hashes[order] = values
    return hashes


def _finish(
    values: npt.NDArray[np.uint32],
    words_at: npt.NDArray[Any],
    positions: npt.NDArray[np.int64],
    rest: npt.NDArray[np.int64],
) -> None:
    """Mix in the last one to three bytes, then the hash with itself."""
    mask = ((np.int64(1) << (8 * rest)) - 1).astype(np.uint32)
    mixed = (values ^ (words_at[positions] & mask)) * _MULTIPLIER
    np.copyto(values, mixed, where=rest > 0)
    values ^= values >> np.uint32(13)
    values *= _MULTIPLIER
    values ^= values >> np.uint32(15)


def _check_boundaries(boundaries: Sequence[bytes]) -> None:
    for index, (low, high) in enumerate(pairwise((b"", *boundaries))):
        if low >= high:
            raise _invalid(
                f"boundary {index} of a bucket map is not above the one before; sort them, without repeats"
            )


def _invalid(message: str) -> TableError:
    return TableError(TableCode.invalid_schema, message)
