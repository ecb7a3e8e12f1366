"""Writers of single values and arrays, from which ``encode`` builds the encoders of whole messages.

A ``Writer`` appends the bytes of one value. Numbers are tried as they are, because that is what the
server nearly always passes; only if ``struct`` refuses them are times and nulls converted and mistakes
named.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from tidemill.wire.guard import write_uvarint
from tidemill.wire.requests import ms
from tidemill.wire.schema import FIXED_FORMATS, MISSING, FieldSpec

if TYPE_CHECKING:
    from uuid import UUID

__all__ = ("Writer", "array_writer", "number_default", "primitive_writer", "to_number")

Writer = Callable[[Any, bytearray], None]

_ZERO_UUID: Final = bytes(16)
_SMALL_ARRAY: Final = 8
_ONE_BYTE_VARINTS: Final = 0x80
_pack_int16: Final = Struct(">h").pack
_pack_int32: Final = Struct(">i").pack


def number_default(spec: FieldSpec) -> Any:
    """The number that a missing field of constant size is packed as."""
    if spec.default is not MISSING:
        return to_number(spec.default, spec)
    return -1 if spec.nullable and spec.kafka_type == "datetime_i64" else 0


def to_number(value: Any, spec: FieldSpec) -> Any:
    """``value`` as ``struct`` takes it: times become milliseconds and a missing time -1."""
    number = value
    if isinstance(value, (timedelta, datetime)) or (value is None and spec.kafka_type == "datetime_i64"):
        number = ms(value)
    try:
        Struct(">" + FIXED_FORMATS[spec.kafka_type]).pack(number)
    except struct.error as error:
        raise ValueError(f"{spec.name} of type {spec.kafka_type} cannot be {value!r}: {error}") from None
    return number


def primitive_writer(spec: FieldSpec, flexible: bool, nullable: bool) -> Writer:
    """The writer of one primitive."""
    if spec.kafka_type == "uuid":
        return _write_uuid
    if spec.kafka_type in FIXED_FORMATS:
        return _number_writer(spec)
    if spec.kafka_type == "string":
        return _compact_string(spec, nullable) if flexible else _legacy_string(spec, nullable)
    return _bytes_writer(spec, flexible, nullable)


def array_writer(spec: FieldSpec, flexible: bool, write_struct: Writer | None) -> Writer:
    """The writer of a whole array, with its count."""
    write_count = _count_writer(spec, flexible)
    if spec.kafka_type in FIXED_FORMATS:
        return _numbers_writer(spec, flexible, write_count)
    if spec.kafka_type == "bytes" and flexible:
        return _many_bytes_writer(write_count)
    write_one = write_struct or primitive_writer(spec, flexible, nullable=False)

    def write(items: Sequence[Any] | None, out: bytearray) -> None:
        write_count(items, out)
        for item in items or ():
            write_one(item, out)

    return write


#: Length prefixes of values whose compact length takes one byte, by the length.
_BYTES_PREFIXES: Final = tuple(bytes([length + 1]) for length in range(_ONE_BYTE_VARINTS - 1))


def _many_bytes_writer(write_count: Writer) -> Writer:
    """The writer of an array of byte strings, such as the keys of a look-up: there may be thousands."""

    def write(items: Sequence[bytes] | None, out: bytearray) -> None:
        write_count(items, out)
        parts: list[bytes] = []
        for item in items or ():
            length = len(item)
            short = length < len(_BYTES_PREFIXES)
            parts += (_BYTES_PREFIXES[length] if short else write_uvarint(length + 1), item)
        out += b"".join(parts)

    return write


def _count_writer(spec: FieldSpec, flexible: bool) -> Writer:
    """The writer of an array's count, or of the null array."""
    null, nullable = b"\0" if flexible else _pack_int32(-1), spec.nullable

    def write(items: Sequence[Any] | None, out: bytearray) -> None:
        if items is None:
            if not nullable:
                raise _null_error(spec)
            out += null
        elif not flexible:
            out += _pack_int32(len(items))
        else:
            count = len(items) + 1
            if count < _ONE_BYTE_VARINTS:
                out.append(count)
            else:
                out += write_uvarint(count)

    return write


def _numbers_writer(spec: FieldSpec, flexible: bool, write_count: Writer) -> Writer:
    code = FIXED_FORMATS[spec.kafka_type]
    # A short array, such as the replicas of a partition, is packed together with its count.
    packers = tuple(
        Struct(f">{'B' if flexible else 'i'}{count}{code}").pack for count in range(_SMALL_ARRAY + 1)
    )
    one_more = 1 if flexible else 0

    def write(items: Sequence[Any] | None, out: bytearray) -> None:
        if items is not None and len(items) <= _SMALL_ARRAY:
            try:
                out += packers[len(items)](len(items) + one_more, *items)
            except struct.error:
                out += packers[len(items)](len(items) + one_more, *[to_number(each, spec) for each in items])
            return
        write_count(items, out)
        if items:
            out += Struct(f">{len(items)}{code}").pack(*[to_number(each, spec) for each in items])

    return write


def _number_writer(spec: FieldSpec) -> Writer:
    pack = Struct(">" + FIXED_FORMATS[spec.kafka_type]).pack

    def write(value: Any, out: bytearray) -> None:
        try:
            out += pack(value)
        except struct.error:
            out += pack(to_number(value, spec))

    return write


def _write_uuid(value: UUID | None, out: bytearray) -> None:
    out += _ZERO_UUID if value is None else value.bytes


def _compact_string(spec: FieldSpec, nullable: bool) -> Writer:
    def write(value: str | None, out: bytearray) -> None:
        if value is None:
            if not nullable:
                raise _null_error(spec)
            out.append(0)
            return
        data = value.encode()
        length = len(data) + 1
        if length < _ONE_BYTE_VARINTS:
            out.append(length)
        else:
            out += write_uvarint(length)
        out += data

    return write


def _legacy_string(spec: FieldSpec, nullable: bool) -> Writer:
    null = _pack_int16(-1)

    def write(value: str | None, out: bytearray) -> None:
        if value is None:
            if not nullable:
                raise _null_error(spec)
            out += null
            return
        data = value.encode()
        try:
            out += _pack_int16(len(data))
        except struct.error:
            raise ValueError(f"{spec.name} has {len(data)} bytes, 32767 fit into this version") from None
        out += data

    return write


def _bytes_writer(spec: FieldSpec, flexible: bool, nullable: bool) -> Writer:
    null = b"\0" if flexible else _pack_int32(-1)

    def write(value: bytes | bytearray | memoryview | None, out: bytearray) -> None:
        if value is None:
            if not nullable:
                raise _null_error(spec)
            out += null
            return
        out += write_uvarint(len(value) + 1) if flexible else _pack_int32(len(value))
        out += value

    return write


def _null_error(spec: FieldSpec) -> TypeError:
    return TypeError(f"{spec.name} is None, which this version of the message cannot say")
