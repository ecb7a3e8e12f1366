"""Numbers of variable length, as records have them: zigzag, seven bits a byte, at most ten bytes."""

from __future__ import annotations

__all__ = ("read_varint", "to_varint", "write_varint")

_SHIFT_MAX = 63


def read_varint(body: bytes | bytearray | memoryview, position: int) -> tuple[int, int]:
    """A zigzag number of at most ten bytes, and the position behind it.

    Raises ``IndexError`` where the bytes end, ``OverflowError`` behind ten bytes: the caller says what
    is wrong with the record.
    """
    byte = body[position]
    position += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), position
    result, shift = byte & 0x7F, 7
    while True:
        byte = body[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (result >> 1) ^ -(result & 1), position
        shift += 7
        if shift > _SHIFT_MAX:
            raise OverflowError("a number does not fit in 64 bits")


def write_varint(out: bytearray, value: int) -> None:
    """Append a number of at most 64 bits."""
    zigzag = (value << 1) ^ (value >> 63)
    while zigzag > 0x7F:
        out.append((zigzag & 0x7F) | 0x80)
        zigzag >>= 7
    out.append(zigzag)


def to_varint(value: int) -> bytes:
    """A number of at most 64 bits as bytes.

    >>> to_varint(-1), to_varint(300)
    (b'\\x01', b'\\xd8\\x04')
    """
    out = bytearray()
    write_varint(out, value)
    return bytes(out)
