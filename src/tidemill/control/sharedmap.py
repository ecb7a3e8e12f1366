"""An immutable map whose copies share what did not change.

``update`` copies one shard of 256 per changed key, so a change to a map of 10,000 topics copies about 40
entries. Two maps that come from each other are compared shard by shard, by identity, so a difference is
found in the time of what differs. Iteration order depends on the keys only, not on the process, so that
simulations repeat.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import TypeVar
from uuid import UUID

__all__ = ("SharedMap",)

_SHARDS = 256

K = TypeVar("K", str, int, UUID)
V = TypeVar("V")


def _shard_of(key: str | int | UUID) -> int:
    if isinstance(key, str):
        return zlib.crc32(key.encode()) % _SHARDS
    return (key.int if isinstance(key, UUID) else key) % _SHARDS


class SharedMap(Mapping[K, V]):
    """An immutable map whose copies share what did not change. Keys are strings, integers or UUIDs.

    >>> old = SharedMap[str, int]().update({"a": 1, "b": 2})
    >>> new = old.update({"a": None, "c": 3})
    >>> sorted(old), sorted(new), sorted(new.differing_keys(old))
    (['a', 'b'], ['b', 'c'], ['a', 'c'])
    """

    __slots__ = ("_length", "_shards")

    def __init__(self) -> None:
        self._shards: tuple[dict[K, V], ...] = ({},) * _SHARDS
        self._length = 0

    def update(self, changes: Mapping[K, V | None]) -> SharedMap[K, V]:
        """A map with ``changes`` made to it; None removes the key."""
        if not changes:
            return self
        shards = list(self._shards)
        copied: set[int] = set()
        length = self._length
        for key, value in changes.items():
            index = _shard_of(key)
            if index not in copied:
                copied.add(index)
                shards[index] = dict(shards[index])
            shard = shards[index]
            length -= len(shard)
            if value is None:
                shard.pop(key, None)
            else:
                shard[key] = value
            length += len(shard)
        new: SharedMap[K, V] = SharedMap()
        new._shards = tuple(shards)
        new._length = length
        return new

    def differing_keys(self, other: SharedMap[K, V]) -> set[K]:
        """Keys that only one of the two has, or whose values are not the same object."""
        keys: set[K] = set()
        for mine, theirs in zip(self._shards, other._shards, strict=True):
            if mine is not theirs:
                keys.update(
                    key for key in mine.keys() | theirs.keys() if mine.get(key) is not theirs.get(key)
                )
        return keys

    def __getitem__(self, key: K) -> V:
        return self._shards[_shard_of(key)][key]

    def get(self, key: K, default: V | None = None) -> V | None:  # type: ignore[override]
        """The value of ``key``, or ``default``. Faster than ``Mapping.get``, which catches an exception."""
        return self._shards[_shard_of(key)].get(key, default)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, (str, int, UUID)) and key in self._shards[_shard_of(key)]

    def __iter__(self) -> Iterator[K]:
        for shard in self._shards:
            yield from shard

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        return self._shards == other._shards if isinstance(other, SharedMap) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SharedMap({dict(self)!r})"
