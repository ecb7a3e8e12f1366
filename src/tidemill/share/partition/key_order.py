"""Order per key: which of the unfinished records of each key is the first."""

from __future__ import annotations

from collections import deque
from hashlib import blake2b

__all__ = ("KeyOrder", "short_key")

_KEY_BYTES_MAX = 32


def short_key(key: bytes) -> bytes:
    """The key, or a digest of one that is long: what is kept of a key must not depend on its size.

    >>> short_key(b"user-7"), len(short_key(bytes(1_000)))
    (b'user-7', 33)
    """
    return key if len(key) <= _KEY_BYTES_MAX else blake2b(key, digest_size=_KEY_BYTES_MAX + 1).digest()


class KeyOrder:
    """The unfinished records of a share partition by key, in the order of their offsets."""

    __slots__ = ("_keys", "_lines")

    def __init__(self) -> None:
        self._keys: dict[int, bytes] = {}
        self._lines: dict[bytes, deque[int]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, offset: int, key: bytes) -> bool:
        """Note an unfinished record behind all others of its key. Whether it is the first of them."""
        self._keys[offset] = key
        line = self._lines.get(key)
        if line is None:
            self._lines[key] = deque((offset,))
            return True
        line.append(offset)
        return False

    def between(self, first: int, last: int) -> list[int]:
        """The unfinished records with a key from one offset to another, which may be far apart."""
        if last - first < len(self._keys):
            return [offset for offset in range(first, last + 1) if offset in self._keys]
        return sorted(offset for offset in self._keys if first <= offset <= last)

    def is_first(self, offset: int) -> bool:
        """Whether no earlier record of the key is unfinished; true for a record without a key."""
        key = self._keys.get(offset)
        return key is None or self._lines[key][0] == offset

    def finish(self, offset: int) -> int | None:
        """Forget a record that is finished. The record that is the first of the key by that, if any."""
        key = self._keys.pop(offset, None)
        if key is None:
            return None
        line = self._lines[key]
        if line[0] != offset:
            line.remove(offset)
            return None
        line.popleft()
        if line:
            return line[0]
        del self._lines[key]
        return None
