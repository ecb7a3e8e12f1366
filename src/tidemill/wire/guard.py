"""A walk over the bytes of a message, by its schema, before the native decoder sees them.

kio's native reader reserves memory for as many elements as an array count claims before it reads the
first one: a body of five bytes can ask for 32 GiB, and a failed reservation there aborts the process. It
also returns null for arrays that cannot be null, and gives up on tagged fields that it does not know,
where the protocol says to skip them. So every message is walked first. The walk itself allocates
nothing but its list of edits, and it holds that:

- a count is believed only if count * smallest element ≤ bytes left, tagged fields included;
- all arrays of a message together have at most ``max_elements`` elements;
- null stands only where the schema allows null;
- a string has at most ``max_string_bytes``: in the compact form it could have more than Kafka allows;
- a tagged field is exactly as long as it says; unknown ones are reported so that they can be cut out;
- the message ends exactly where the bytes end.

``walk`` raises ProtocolError, IndexError or struct.error for bytes that are not the message; ``requests``
makes one error of them. Positions past the end need no check of their own: the next read, or the end,
finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Final

from tidemill.errors import ProtocolError
from tidemill.wire.schema import EntityClass, FieldSpec, fields_of, min_size

__all__ = (
    "MAX_STRING_BYTES",
    "Edit",
    "TooManyElements",
    "find_arrays",
    "read_uvarint",
    "walk",
    "write_uvarint",
)

Edit = tuple[int, int, bytes]
"""An edit of a message, (start, end, replacement), that removes an unknown tagged field."""

_MIN_TAGGED_FIELD_BYTES: Final = 2
_VARINT_MORE: Final = 0x80
_VARINT_MAX_SHIFT: Final = 28
_NULL_STRUCT: Final = 0xFF
MAX_STRING_BYTES: Final = 32_767
"""The longest string in a request, as in Kafka."""
_read_int16: Final = Struct(">h").unpack_from
_read_int32: Final = Struct(">i").unpack_from


class TooManyElements(ProtocolError):
    """A message whose arrays have more elements than were allowed. It may still be well-formed."""


class _Walk:
    """The state of one walk: what is left of its limits, and the edits so far."""

    __slots__ = ("edits", "elements_left", "lifted", "max_string_bytes", "size")

    def __init__(
        self,
        size: int,
        max_elements: int,
        lifted: list[tuple[int, int]] | None,
        max_string_bytes: int = MAX_STRING_BYTES,
    ) -> None:
        self.size = size
        self.elements_left = max_elements
        self.edits: list[Edit] = []
        self.lifted = lifted
        self.max_string_bytes = max_string_bytes

    def take(self, count: int, position: int, min_element_bytes: int) -> None:
        """Accept an array count, or raise ``ProtocolError`` before anything is allocated for it."""
        if count * min_element_bytes > self.size - position:
            raise ProtocolError(
                f"a count of {count} at byte {position} needs at least {count * min_element_bytes} bytes, "
                f"{max(0, self.size - position)} are left"
            )
        self.elements_left -= count
        if self.elements_left < 0:
            raise TooManyElements(f"more array elements than one message may have, at byte {position}")


Buffer = bytes | memoryview
_Skip = Callable[[Buffer, int, _Walk], int]


def walk(
    entity: EntityClass,
    buffer: Buffer,
    offset: int,
    max_elements: int,
    lifted: list[tuple[int, int]] | None = None,
    max_string_bytes: int = MAX_STRING_BYTES,
    *,
    whole: bool = True,
) -> list[Edit]:
    """Check that ``buffer`` from ``offset`` to its end is one message of class ``entity``.

    Anything may follow a message that is not the ``whole``.

    Returns the edits that remove unknown tagged fields: in order, disjoint, almost always none. With a list
    ``lifted``, every field of records that is not null is noted there as (start, end), and the edits make it
    empty: so the native decoder copies none of it.
    """
    state = _Walk(len(buffer), max_elements, lifted, max_string_bytes)
    end = _struct_skipper(entity)(buffer, offset, state)
    if end != state.size and (whole or end > state.size):
        verb = f"is followed by {state.size - end} bytes" if end < state.size else "is cut short"
        raise ProtocolError(f"the message {verb}")
    if len(state.edits) > 1:
        state.edits.sort()
    return state.edits


def find_arrays(
    entity: EntityClass, buffer: Buffer, position: int, take_array: Callable[[FieldSpec, int, int, int], int]
) -> int:
    """Step over one value of ``entity`` that ``walk`` has accepted; gives the position behind it.

    For each array of structs that is not empty, ``take_array`` is called with its field, the positions of its
    count and of its first element, and the count; it gives the position behind the last element.
    """
    state = _Walk(len(buffer), len(buffer), None)
    for spec, skip in _field_steps(entity):
        if spec is not None and spec.is_array and spec.struct is not None:
            count, first = _read_count(buffer, position, entity.__flexible__)
            position = take_array(spec, position, first, count) if count > 0 else first
        else:
            position = skip(buffer, position, state)
    return position


def _read_count(buffer: Buffer, position: int, flexible: bool) -> tuple[int, int]:
    """The count of an array (-1 if it is null), and the position behind it."""
    if flexible:
        count, position = read_uvarint(buffer, position)
        return count - 1, position
    return _read_int32(buffer, position)[0], position + 4


@cache
def _field_steps(entity: EntityClass) -> tuple[tuple[FieldSpec | None, _Skip], ...]:
    """The fields of ``entity``, each with a function that steps over it; None is the tagged fields."""
    flexible: bool = entity.__flexible__
    specs = [spec for spec in fields_of(entity) if spec.tag is None]
    steps: list[tuple[FieldSpec | None, _Skip]] = [(spec, _field_skipper(spec, flexible)) for spec in specs]
    if flexible:
        steps.append((None, _tags_skipper(entity, 0)))
    return tuple(steps)


def read_uvarint(buffer: Buffer, position: int) -> tuple[int, int]:
    """Read an unsigned varint of at most five bytes; gives (value, position behind it)."""
    value = shift = 0
    while True:
        byte = buffer[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < _VARINT_MORE:
            return value, position
        shift += 7
        if shift > _VARINT_MAX_SHIFT:
            raise ProtocolError(f"a varint of more than five bytes before byte {position}")


def write_uvarint(value: int) -> bytes:
    """The shortest unsigned varint of ``value``."""
    out = bytearray()
    while value >= _VARINT_MORE:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@cache
def _struct_skipper(entity: EntityClass) -> _Skip:
    """A function that steps over one value of ``entity``."""
    flexible: bool = entity.__flexible__
    specs = [spec for spec in fields_of(entity) if spec.tag is None]
    steps: list[_Skip] = []
    run = 0
    for spec in specs:
        if not spec.is_array and spec.fixed_size is not None:
            run += spec.fixed_size
            continue
        if run:
            steps.append(_fixed_skipper(run))
            run = 0
        steps.append(_field_skipper(spec, flexible))
    if not flexible:
        if run or not steps:
            steps.append(_fixed_skipper(run))
    else:
        steps.append(_tags_skipper(entity, run))
    if len(steps) == 1:
        return steps[0]
    frozen = tuple(steps)

    def skip_struct(buffer: Buffer, position: int, state: _Walk) -> int:
        for step in frozen:
            position = step(buffer, position, state)
        return position

    return skip_struct


def _fixed_skipper(size: int) -> _Skip:
    return lambda buffer, position, state: position + size


def _field_skipper(spec: FieldSpec, flexible: bool) -> _Skip:
    if spec.is_array:
        return _compact_array_skipper(spec) if flexible else _legacy_array_skipper(spec)
    if spec.struct is not None:
        inner = _struct_skipper(spec.struct)
        return _nullable_struct_skipper(inner) if spec.nullable else inner
    return _element_skipper(spec, flexible, spec.nullable)


def _element_skipper(spec: FieldSpec, flexible: bool, nullable: bool) -> _Skip:
    """A function that steps over one primitive."""
    if spec.fixed_size is not None:
        return _fixed_skipper(spec.fixed_size)
    if flexible:
        skip = _compact_bytes_skipper(spec.name, nullable, is_string=spec.kafka_type == "string")
    else:
        skip = _legacy_bytes_skipper(spec.name, nullable, is_string=spec.kafka_type == "string")
    return _lifting_skipper(skip, flexible) if spec.kafka_type == "records" else skip


def _lifting_skipper(skip: _Skip, flexible: bool) -> _Skip:
    """A function that steps over a field of records and notes its position in ``lifted``."""
    empty = b"\x01" if flexible else b"\x00\x00\x00\x00"

    def skip_and_note(buffer: Buffer, position: int, state: _Walk) -> int:
        end = skip(buffer, position, state)
        if state.lifted is not None:
            if flexible:
                length, start = read_uvarint(buffer, position)
                is_null = length == 0
            else:
                start = position + 4
                is_null = buffer[position] >= _VARINT_MORE
            if not is_null:
                state.lifted.append((start, end))
                state.edits.append((position, end, empty))
        return end

    return skip_and_note


def _compact_bytes_skipper(name: str, nullable: bool, *, is_string: bool) -> _Skip:
    def skip(buffer: Buffer, position: int, state: _Walk) -> int:
        length = buffer[position]
        if length < _VARINT_MORE:
            position += 1
        else:
            length, position = read_uvarint(buffer, position)
            if is_string and length > state.max_string_bytes + 1:
                raise ProtocolError(
                    f"{name} has {length - 1} bytes; a string has {state.max_string_bytes} at most"
                )
        if length:
            return position + length - 1
        if not nullable:
            raise _null_error(name)
        return position

    return skip


def _legacy_bytes_skipper(name: str, nullable: bool, *, is_string: bool) -> _Skip:
    read, width = (_read_int16, 2) if is_string else (_read_int32, 4)

    def skip(buffer: Buffer, position: int, state: _Walk) -> int:
        length: int = read(buffer, position)[0]
        if length >= 0:
            return position + width + length
        if length != -1:
            raise ProtocolError(f"{name} has the length {length}")
        if not nullable:
            raise _null_error(name)
        return position + width

    return skip


def _nullable_struct_skipper(inner: _Skip) -> _Skip:
    def skip(buffer: Buffer, position: int, state: _Walk) -> int:
        presence = buffer[position]
        if presence == 1:
            return inner(buffer, position + 1, state)
        if presence != _NULL_STRUCT:
            raise ProtocolError(f"byte {position} should say whether a struct is null, and is {presence}")
        return position + 1

    return skip


def _legacy_array_skipper(spec: FieldSpec) -> _Skip:
    name, nullable = spec.name, spec.nullable
    skip_elements, min_bytes = _elements_skipper(spec, flexible=False)

    def skip(buffer: Buffer, position: int, state: _Walk) -> int:
        count: int = _read_int32(buffer, position)[0]
        position += 4
        if count < 0:
            if count != -1:
                raise ProtocolError(f"{name} has the count {count}")
            if not nullable:
                raise _null_error(name)
            return position
        state.take(count, position, min_bytes)
        return skip_elements(buffer, position, state, count)

    return skip


def _compact_array_skipper(spec: FieldSpec) -> _Skip:
    name, nullable = spec.name, spec.nullable
    skip_elements, min_bytes = _elements_skipper(spec, flexible=True)

    def skip(buffer: Buffer, position: int, state: _Walk) -> int:
        count = buffer[position]
        if count < _VARINT_MORE:
            position += 1
        else:
            count, position = read_uvarint(buffer, position)
        if count == 0:
            if not nullable:
                raise _null_error(name)
            return position
        state.take(count - 1, position, min_bytes)
        return skip_elements(buffer, position, state, count - 1)

    return skip


def _elements_skipper(
    spec: FieldSpec, *, flexible: bool
) -> tuple[Callable[[Buffer, int, _Walk, int], int], int]:
    """A function that steps over n elements, and the size of the smallest element in bytes."""
    if spec.fixed_size is not None:
        size = spec.fixed_size
        return lambda buffer, position, state, count: position + count * size, size
    if spec.struct is not None:
        skip_one, smallest = _struct_skipper(spec.struct), min_size(spec.struct)
    else:
        skip_one = _element_skipper(spec, flexible, nullable=False)
        smallest = 1 if flexible else 2 if spec.kafka_type == "string" else 4

    def skip_elements(buffer: Buffer, position: int, state: _Walk, count: int) -> int:
        for _ in range(count):
            position = skip_one(buffer, position, state)
        return position

    return skip_elements, smallest


def _tags_skipper(entity: EntityClass, run: int) -> _Skip:
    """A function that steps over ``run`` bytes of fixed fields and the tagged fields behind them."""
    known = {
        spec.tag: _field_skipper(spec, flexible=True) for spec in fields_of(entity) if spec.tag is not None
    }

    def skip(buffer: Buffer, position: int, state: _Walk) -> int:
        position += run
        if buffer[position] == 0:
            return position + 1
        start = position
        count, position = read_uvarint(buffer, position)
        state.take(count, position, _MIN_TAGGED_FIELD_BYTES)
        behind_count, unknown = position, 0
        for _ in range(count):
            tag_start = position
            tag, position = read_uvarint(buffer, position)
            size, position = read_uvarint(buffer, position)
            end = position + size
            if end > state.size:
                raise ProtocolError(
                    f"tagged field {tag} claims {size} bytes, {state.size - position} are left"
                )
            skip_value = known.get(tag)
            if skip_value is None:
                unknown += 1
                state.edits.append((tag_start, end, b""))
            elif skip_value(buffer, position, state) != end:
                raise ProtocolError(f"tagged field {tag} is not the {size} bytes long that it claims")
            position = end
        if unknown:
            state.edits.append((start, behind_count, write_uvarint(count - unknown)))
        return position

    return skip


def _null_error(name: str) -> ProtocolError:
    return ProtocolError(f"{name} is null, which the protocol does not allow")
