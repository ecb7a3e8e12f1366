"""Fields in bytes that can be read in one way only: the encoding of regions and checkpoints. Pure.

Numbers are unsigned and as short as they can be (seven bits a byte, the last one below 128), signed ones are
eight bytes; text and data have their length in front. Reading checks every length, and that nothing is left.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

__all__ = ("FieldReader", "FieldWriter")

_T = TypeVar("_T")
_SIGNED: Final = struct.Struct(">q")
_SHIFT_MAX: Final = 63


class FieldWriter:
    """Builds bytes field by field; every method returns the writer."""

    def __init__(self) -> None:
        self._out = bytearray()

    def done(self) -> bytes:
        return bytes(self._out)

    def number(self, value: int) -> FieldWriter:
        if value < 0:
            raise ValueError(f"{value} is negative")
        while value > 0x7F:
            self._out.append((value & 0x7F) | 0x80)
            value >>= 7
        self._out.append(value)
        return self

    def signed(self, value: int) -> FieldWriter:
        self._out += _SIGNED.pack(value)
        return self

    def flag(self, value: bool) -> FieldWriter:
        self._out.append(1 if value else 0)
        return self

    def raw(self, data: bytes) -> FieldWriter:
        """Data whose length the reader knows."""
        self._out += data
        return self

    def data(self, data: bytes) -> FieldWriter:
        return self.number(len(data)).raw(data)

    def text(self, text: str) -> FieldWriter:
        return self.data(text.encode())

    def optional(self, value: _T | None, write: Callable[[_T], Any]) -> FieldWriter:
        self.flag(value is not None)
        if value is not None:
            write(value)
        return self

    def sequence(self, values: Iterable[_T], write: Callable[[_T], Any]) -> FieldWriter:
        items = list(values)
        self.number(len(items))
        for item in items:
            write(item)
        return self


class FieldReader:
    """Reads what a ``FieldWriter`` wrote. Raises ``ValueError`` for anything else."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def number(self) -> int:
        value = shift = 0
        while True:
            byte = self.raw(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if not byte and shift:
                    raise ValueError("a number is longer than it need be")
                return value
            shift += 7
            if shift > _SHIFT_MAX:
                raise ValueError("a number has more than 64 bits")

    def signed(self) -> int:
        value: int = _SIGNED.unpack(self.raw(_SIGNED.size))[0]
        return value

    def flag(self) -> bool:
        byte = self.raw(1)[0]
        if byte > 1:
            raise ValueError(f"a flag is 0 or 1, not {byte}")
        return bool(byte)

    def raw(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise ValueError(f"{size} bytes are missing at byte {self._position}")
        found = self._data[self._position : end]
        self._position = end
        return found

    def data(self) -> bytes:
        return self.raw(self.number())

    def text(self) -> str:
        return self.data().decode()  # UnicodeDecodeError is a ValueError.

    def optional(self, read: Callable[[], _T]) -> _T | None:
        return read() if self.flag() else None

    def sequence(self, read: Callable[[], _T]) -> list[_T]:
        count = self.number()
        if count > len(self._data) - self._position:
            raise ValueError(f"{count} items do not fit into {len(self._data) - self._position} bytes")
        return [read() for _ in range(count)]

    def end(self) -> None:
        """Raise unless everything was read."""
        if self._position != len(self._data):
            raise ValueError(f"{len(self._data) - self._position} bytes are left over")
