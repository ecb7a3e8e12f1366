"""Messages from mappings to bytes, by kio's schema.

kio's own encoder takes entities and is slow; a server that answers builds plain dictionaries. For every
entity class this module compiles, once, a chain of closures that append to a bytearray: neighbouring fields
of constant size become one ``struct`` call.

Rules:

- Keys are kio's field names. Values: numbers; ``int`` milliseconds, ``timedelta`` or ``datetime`` for times;
  ``ErrorCode`` or ``int`` for error codes; ``UUID`` or None (the zero UUID); ``str``; buffers of bytes;
  sequences of mappings for arrays of structs.
- A missing key stands for the schema's default, else null where null is allowed, else the zero of its type.
  So one body serves all versions: keys that only other versions have are ignored.
- A key that no version has is a mistake in the program. Looking for it costs time, so only the test suite
  does (``tests/support/typos.py``).
- A tagged field is written if its value differs from its default.
- A value that does not fit raises ValueError or TypeError with the name of its field.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from struct import Struct
from typing import Any, Final

from tidemill.wire.apis import request_class, request_header_version, response_class, response_header_version
from tidemill.wire.guard import write_uvarint
from tidemill.wire.schema import FIXED_FORMATS, MISSING, EntityClass, FieldSpec, fields_of
from tidemill.wire.values import Writer, array_writer, number_default, primitive_writer, to_number

__all__ = ("encode_entity", "encode_request", "encode_response", "value_writer")

Body = Mapping[str, Any]
_Step = Callable[[Body, bytearray], None]

_response_start: Final = Struct(">ii")
_request_start: Final = Struct(">ihhih")


def encode_entity(entity: EntityClass, body: Body, out: bytearray) -> None:
    """Append the bytes of ``body`` as a value of kio's class ``entity``."""
    for step in _steps(entity):
        step(body, out)


def encode_response(api_key: int, api_version: int, correlation_id: int, body: Body) -> memoryview:
    """The whole frame of a response: length, header, body."""
    out = bytearray(_response_start.size + response_header_version(api_key, api_version))
    encode_entity(response_class(api_key, api_version), body, out)
    _response_start.pack_into(out, 0, len(out) - 4, correlation_id)
    # A view: the sender cuts off what was sent, and that should not copy megabytes.
    return memoryview(out).toreadonly()


def encode_request(
    api_key: int, api_version: int, correlation_id: int, client_id: str | None, body: Body
) -> memoryview:
    """The whole frame of a request: length, header, body."""
    client = b"" if client_id is None else client_id.encode()
    out = bytearray(_request_start.size)
    out += client
    if request_header_version(api_key, api_version) > 1:
        out.append(0)
    encode_entity(request_class(api_key, api_version), body, out)
    client_length = -1 if client_id is None else len(client)
    _request_start.pack_into(out, 0, len(out) - 4, api_key, api_version, correlation_id, client_length)
    return memoryview(out).toreadonly()


@cache
def _steps(entity: EntityClass) -> tuple[_Step, ...]:
    """The steps that write one value of ``entity``."""
    flexible: bool = entity.__flexible__
    steps: list[_Step] = []
    run: list[FieldSpec] = []
    for spec in fields_of(entity):
        if spec.tag is not None:
            continue
        if spec.kafka_type in FIXED_FORMATS and not spec.is_array:
            run.append(spec)
            continue
        if run:
            steps.append(_run_step(run, no_tags=False))
            run = []
        steps.append(_field_step(spec, flexible))
    tagged = [spec for spec in fields_of(entity) if spec.tag is not None]
    no_tags = flexible and not tagged
    if run or no_tags:
        steps.append(_run_step(run, no_tags=no_tags))
    if tagged:
        steps.append(_tags_step(tagged))
    return tuple(steps)


def _run_step(specs: list[FieldSpec], *, no_tags: bool) -> _Step:
    """The step that writes a run of numbers at once; with ``no_tags``, also the empty tagged fields."""
    codes = "".join(FIXED_FORMATS[spec.kafka_type] for spec in specs)
    pack = Struct(f">{codes}{'x' if no_tags else ''}").pack
    if not specs:
        return lambda body, out: out.append(0)
    defaults = [(spec.name, number_default(spec)) for spec in specs]

    def slowly(body: Body) -> bytes:
        return pack(*[to_number(body.get(spec.name, number_default(spec)), spec) for spec in specs])

    if len(specs) == 1:
        ((name, default),) = defaults

        def write_one(body: Body, out: bytearray) -> None:
            try:
                out += pack(body.get(name, default))
            except struct.error:
                out += slowly(body)

        return write_one

    def write_run(body: Body, out: bytearray) -> None:
        get = body.get
        try:
            out += pack(*[get(name, default) for name, default in defaults])
        except struct.error:
            out += slowly(body)

    return write_run


def _field_step(spec: FieldSpec, flexible: bool) -> _Step:
    name, default, write = spec.name, _default(spec), value_writer(spec, flexible)

    def write_field(body: Body, out: bytearray) -> None:
        write(body.get(name, default), out)

    return write_field


def value_writer(spec: FieldSpec, flexible: bool) -> Writer:
    """The writer of the value of one field."""
    write_struct = None if spec.struct is None else _struct_writer(spec.struct)
    if spec.is_array:
        return array_writer(spec, flexible, write_struct)
    if write_struct is None:
        return primitive_writer(spec, flexible, spec.nullable)
    return _nullable_struct_writer(write_struct) if spec.nullable else write_struct


def _struct_writer(entity: EntityClass) -> Writer:
    steps = _steps(entity)
    if len(steps) == 1:
        return steps[0]

    def write_struct(body: Body, out: bytearray) -> None:
        for step in steps:
            step(body, out)

    return write_struct


def _nullable_struct_writer(write_struct: Writer) -> Writer:
    """The writer of a struct behind a byte that says whether it is null (KIP-893)."""

    def write(body: Body | None, out: bytearray) -> None:
        if body is None:
            out.append(0xFF)
        else:
            out.append(1)
            write_struct(body, out)

    return write


def _tags_step(specs: list[FieldSpec]) -> _Step:
    """The step that writes the tagged fields that are not their defaults, in the order of their tags."""
    tagged: list[tuple[str, bytes, Writer, bytes]] = []
    for spec in sorted(specs, key=lambda spec: spec.tag or 0):
        write = value_writer(spec, flexible=True)
        default = bytearray()
        write(_default(spec), default)
        tagged.append((spec.name, write_uvarint(spec.tag or 0), write, bytes(default)))

    def write_tags(body: Body, out: bytearray) -> None:
        count, section = 0, b""
        for name, tag, write, default in tagged:
            if name in body:
                value = bytearray()
                write(body[name], value)
                if value != default:
                    count += 1
                    section += tag + write_uvarint(len(value)) + value
        out += write_uvarint(count)
        out += section

    return write_tags


def _default(spec: FieldSpec) -> Any:
    """The value that a missing field is written with."""
    if spec.default is not MISSING:
        is_struct = spec.struct is not None and not spec.is_array and spec.default is not None
        return asdict(spec.default) if is_struct else spec.default
    if spec.nullable:
        return None
    if spec.is_array:
        return ()
    if spec.struct is not None:
        return {}
    if spec.kafka_type in FIXED_FORMATS:
        return number_default(spec)
    return "" if spec.kafka_type == "string" else None if spec.kafka_type == "uuid" else b""
