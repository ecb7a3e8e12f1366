"""Reading and writing the few wire types that group records are made of.

Rules: a reader never reads past its bytes, believes an array count only if that many elements could fit,
and turns every defect into ``MalformedBytes``. Strings and bytes come in the classic form (length of fixed
width, -1 is null) and in the flexible form (unsigned varint of length + 1, 0 is null).
"""

from __future__ import annotations

import struct

__all__ = ("LONGEST_STRING", "MalformedBytes", "Reader", "pack_bytes", "pack_string")

LONGEST_STRING = 0x7FFF
"""The most UTF-8 bytes that a classic string can hold."""

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_INT64 = struct.Struct(">q")


class MalformedBytes(ValueError):
    """Bytes that are not an encoding of what was expected."""


def pack_string(text: str | None) -> bytes:
    """A classic nullable string. The caller has checked that it fits ``LONGEST_STRING``."""
    if text is None:
        return _INT16.pack(-1)
    raw = text.encode()
    return _INT16.pack(len(raw)) + raw


def pack_bytes(raw: bytes) -> bytes:
    """Classic bytes: a 32-bit length and the bytes."""
    return _INT32.pack(len(raw)) + raw


class Reader:
    """A cursor over ``data``. ``flexible`` chooses the compact form of strings, bytes and arrays."""

    def __init__(self, data: bytes, *, flexible: bool = False) -> None:
        self._data = data
        self._position = 0
        self.flexible = flexible

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self._data) - self._position

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        if size < 0 or size > self.left:
            raise MalformedBytes(f"{size} bytes are announced at byte {self._position}, {self.left} are left")
        start = self._position
        self._position = start + size
        return bytes(self._data[start : self._position])

    def int16(self) -> int:
        """Big-endian, signed."""
        return int(_INT16.unpack(self.take(2))[0])

    def int32(self) -> int:
        """Big-endian, signed."""
        return int(_INT32.unpack(self.take(4))[0])

    def int64(self) -> int:
        """Big-endian, signed."""
        return int(_INT64.unpack(self.take(8))[0])

    def uvarint(self) -> int:
        """An unsigned varint of at most 5 bytes."""
        value = 0
        for shift in range(0, 35, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise MalformedBytes(f"an unsigned varint is longer than 5 bytes before byte {self._position}")

    def nullable_string(self) -> str | None:
        """UTF-8 text or null."""
        size = self.uvarint() - 1 if self.flexible else self.int16()
        if size == -1:
            return None
        raw = self.take(size)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise MalformedBytes(f"a string before byte {self._position} is not UTF-8") from error

    def string(self) -> str:
        """UTF-8 text."""
        text = self.nullable_string()
        if text is None:
            raise MalformedBytes(f"null before byte {self._position} where a string is required")
        return text

    def nullable_bytes(self) -> bytes | None:
        """Bytes or null."""
        size = self.uvarint() - 1 if self.flexible else self.int32()
        return None if size == -1 else self.take(size)

    def bytes_(self) -> bytes:
        """Bytes, not null."""
        raw = self.nullable_bytes()
        if raw is None:
            raise MalformedBytes(f"null before byte {self._position} where bytes are required")
        return raw

    def nullable_count(self, smallest_element: int) -> int | None:
        """The length of an array whose elements take at least ``smallest_element`` bytes each, or null."""
        count = self.uvarint() - 1 if self.flexible else self.int32()
        if count == -1:
            return None
        if count < 0 or count * smallest_element > self.left:
            raise MalformedBytes(f"an array of {count} elements before byte {self._position} cannot fit")
        return count

    def count(self, smallest_element: int) -> int:
        """The same of an array that must be there."""
        count = self.nullable_count(smallest_element)
        if count is None:
            raise MalformedBytes(f"null before byte {self._position} where an array is required")
        return count

    def skip_tagged_fields(self) -> None:
        """Pass over the tagged fields that end a flexible struct; a classic struct has none."""
        if not self.flexible:
            return
        for _ in range(self.uvarint()):
            self.uvarint()
            self.take(self.uvarint())

    def end(self) -> None:
        """Insist that nothing follows."""
        if self.left:
            raise MalformedBytes(f"{self.left} bytes follow the end at byte {self._position}")
