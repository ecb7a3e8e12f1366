"""Records of internal topics: each type is declared once, and read and written by that declaration.

A ``RecordType`` says what key and value are made of in bytes, by version, in the words of
``tidemill.wire.declare``, and what they become in memory. ``RecordTypes`` are all types of one topic; the
version of the key, its first two bytes, tells them apart.

Rules:

- Any key and value either decode or raise the topic's error, in memory that their own size bounds.
- A key of an unknown version is a record type of a newer writer: it decodes to None, and the loader skips it.
- An unknown version of a value is an error: skipping it would lose what it says about a known thing.
- Tagged fields that are not declared here are passed over, and are not written again.
- A value of None is a tombstone.

Classes and closures are made when a version is first read or written, so that declarations cost a node's
start nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar
from uuid import UUID

from tidemill.errors import ProtocolError
from tidemill.wire.declare import Field, declare, field_of
from tidemill.wire.encode import value_writer
from tidemill.wire.guard import write_uvarint
from tidemill.wire.requests import decode_entity
from tidemill.wire.schema import FIXED_FORMATS, fields_of
from tidemill.wire.values import Writer as _Write

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tidemill.errors import StorageError
    from tidemill.wire.declare import Fields
    from tidemill.wire.schema import EntityClass, FieldSpec

__all__ = ("NOT_KEPT", "Codec", "RecordType", "RecordTypes", "Struct")

R = TypeVar("R")

_VERSION_BYTES: Final = 2
_ANY: Final = 2**36
"""Limit of elements and string bytes: none, because what is stored passed the limits of requests."""
_ZERO_UUID: Final = UUID(int=0)
_read_version: Final = struct.Struct(">h").unpack_from
_pack_version: Final = struct.Struct(">h").pack


class Codec(NamedTuple):
    """Conversion of a field between its form in bytes and its form in memory.

    ``pack`` and ``unpack`` turn one into the other; None leaves it as it is. ``get`` takes the field from the
    value that holds it; None takes the attribute of its name. ``remembered`` is how many encodings are kept,
    for fields that many records have in common. ``write`` writes the field as its declaration would, where
    that would take too long.
    """

    unpack: Callable[[Any], Any] | None = None
    pack: Callable[[Any], Any] | None = None
    get: Callable[[Any], Any] | None = None
    remembered: int = 0
    write: Callable[[Any, bytearray], None] | None = None


NOT_KEPT: Final = Codec()
"""The codec of an array that is passed over when it is read, and written empty."""

_AS_IT_IS: Final = Codec()


@dataclass(frozen=True, slots=True)
class Struct:
    """Fields that make one value in memory.

    ``make`` takes the fields in the order in which they are declared; their names are the attributes of the
    value. None: there is one field, and the value is that field. ``make`` raises ``ValueError`` for fields
    that cannot stand together.
    """

    make: Callable[..., Any] | None
    fields: Fields
    codecs: Mapping[str, Codec] | None = None

    def kept(self) -> dict[str, Field]:
        """The fields that are kept in memory."""
        return {
            name: field_of(each) for name, each in self.fields.items() if self.codec(name) is not NOT_KEPT
        }

    def codec(self, name: str) -> Codec:
        """The conversion of a field."""
        return (self.codecs or {}).get(name, _AS_IT_IS)


class RecordType(Generic[R]):
    """One type of record of an internal topic.

    Attributes:
        name: for error messages.
        record: makes the record of the fields of its key and the value; None for a tombstone.
        key_versions: the versions of its key; the first is written.
        key: the fields of the key, which are never flexible. Their names are attributes of the record.
        value: the fields of the value, of all versions.
        versions: the versions of the value that are read.
        flexible_since: the first flexible version of the value.
        written: the version in which a value is written.
    """

    def __init__(
        self,
        name: str,
        record: Callable[..., R],
        *,
        key_versions: tuple[int, ...],
        key: Fields,
        value: Struct,
        versions: range,
        flexible_since: int = 0,
        written: int | Callable[[Any], int],
    ) -> None:
        self.name = name
        self.record = record
        self.key_versions = key_versions
        self.key = key
        self.value = value
        self.versions = versions
        self.flexible_since = flexible_since
        self.written = written
        self._key_codec: _KeyCodec | None = None
        self._value_codecs: dict[int, _ValueCodec] = {}

    def encode(self, key: tuple[Any, ...], value: Any) -> tuple[bytes, bytes | None]:
        """Key and value as they go into the log."""
        raw_key = self._codec_of_key().write(key)
        if value is None:
            return raw_key, None
        version = self.written if isinstance(self.written, int) else self.written(value)
        return raw_key, self._codec_of_value(version).write(value)

    def decode(self, key: bytes, value: bytes | None) -> R:
        """The record. ``key`` has one of the type's versions. Raises ProtocolError or ValueError."""
        fields = self._codec_of_key().read(key)
        if value is None:
            return self.record(*fields, None)
        if len(value) < _VERSION_BYTES:
            raise ProtocolError(f"a value of {len(value)} bytes has no version")
        version: int = _read_version(value)[0]
        codec = self._value_codecs.get(version)
        if codec is None:
            if version not in self.versions:
                raise ProtocolError(f"value version {version} of {self.name} is unknown")
            codec = self._codec_of_value(version)
        return self.record(*fields, codec.read(value))

    def _codec_of_key(self) -> _KeyCodec:
        if self._key_codec is None:
            entity = declare(f"{self.name}Key", self.key, version=self.key_versions[0], flexible=False)
            self._key_codec = _KeyCodec(entity)
        return self._key_codec

    def _codec_of_value(self, version: int) -> _ValueCodec:
        codec = self._value_codecs.get(version)
        if codec is None:
            flexible = version >= self.flexible_since
            codec = _ValueCodec(f"{self.name}Value", self.value, version, flexible=flexible)
            self._value_codecs[version] = codec
        return codec


class RecordTypes(Generic[R]):
    """The record types of one internal topic.

    ``title`` is what error messages call one of its records; ``error`` is raised for what cannot be decoded.
    """

    def __init__(self, title: str, error: type[StorageError], *types: RecordType[Any]) -> None:
        self.types = types
        self._title = title
        self._error = error
        self._by_version = {version: each for each in types for version in each.key_versions}
        assert len(self._by_version) == sum(len(each.key_versions) for each in types), title
        self._by_class = {each.record: (each, _getter(list(each.key))) for each in types}

    def encode(self, record: Any) -> tuple[bytes, bytes | None]:
        """Key and value of a record whose class is that of its type."""
        record_type, key_of = self._by_class[type(record)]
        return record_type.encode(key_of(record), record.value)

    def decode(self, key: bytes | None, value: bytes | None) -> R | None:
        """Decode a record; gives None for a key version that this program does not know."""
        try:
            if key is None or len(key) < _VERSION_BYTES:
                raise ProtocolError("it has no key" if key is None else f"its key is {len(key)} bytes long")
            record_type = self._by_version.get(_read_version(key)[0])
            return None if record_type is None else record_type.decode(key, value)
        except (ProtocolError, ValueError) as error:
            raise self._error(f"{self._title} cannot be decoded: {error}") from error


# -- one version -----------------------------------------------------------------------------------------


class _KeyCodec:
    """Codec of a type's key. Writes the first version; the others have the same fields."""

    def __init__(self, entity: EntityClass) -> None:
        self._entity = entity
        specs = fields_of(entity)
        self._start = _pack_version(int(entity.__version__))
        self._writers = [value_writer(spec, flexible=False) for spec in specs]
        self._get = _getter([spec.name for spec in specs])

    def write(self, values: tuple[Any, ...]) -> bytes:
        out = bytearray(self._start)
        for write, value in zip(self._writers, values, strict=True):
            write(value, out)
        return bytes(out)

    def read(self, key: bytes) -> tuple[Any, ...]:
        return self._get(_decode(self._entity, key))


class _ValueCodec:
    """Codec of one version of a type's value."""

    def __init__(self, name: str, value: Struct, version: int, *, flexible: bool) -> None:
        self._entity = declare(name, _bytes_of(value), version=version, flexible=flexible)
        self._start = _pack_version(version)
        self._read = _reader(value, version, flexible=flexible)
        self._steps = _steps(value, self._entity)

    def write(self, value: Any) -> bytes:
        out = bytearray(self._start)
        for step in self._steps:
            step(value, out)
        return bytes(out)

    def read(self, raw: bytes) -> Any:
        return self._read(_decode(self._entity, raw))


def _decode(entity: EntityClass, raw: bytes) -> Any:
    return decode_entity(entity, raw, _VERSION_BYTES, _ANY, max_string_bytes=_ANY)


def _bytes_of(value: Struct) -> Fields:
    """The fields of a struct in the form that ``declare`` takes: structs become dictionaries."""

    def plain(field: Field) -> Field:
        inner, is_array = (field.type[0], True) if isinstance(field.type, list) else (field.type, False)
        inner = _bytes_of(inner) if isinstance(inner, Struct) else inner
        return Field(
            [inner] if is_array else inner, field.since, field.until, field.default, field.tag, field.nullable
        )

    return {name: plain(field_of(each)) for name, each in value.fields.items()}


def _same(value: Any) -> Any:
    return value


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function from a value to a tuple of these attributes."""
    get: Any = attrgetter(*names)
    return (lambda value: (get(value),)) if len(names) == 1 else get


# -- from bytes ------------------------------------------------------------------------------------------


def _reader(value: Struct, version: int, *, flexible: bool) -> Callable[[EntityClass], Any]:
    """A function from an entity of one version to the value in memory; missing fields get defaults."""
    kept = value.kept()
    present = [name for name, field in kept.items() if field.is_in(version, flexible=flexible)]
    absent = [name for name in kept if name not in present]
    unpacks = {name: _unpack(value, name, version, flexible=flexible) for name in kept}
    defaults = []
    for name in absent:
        unpack, default = unpacks[name], kept[name].default
        defaults.append(default if unpack is None else unpack(default))
    order = [[*present, *absent].index(name) for name in kept]
    get = _getter(present)
    converted = [(index, unpack) for index, name in enumerate(present) if (unpack := unpacks[name])]
    in_order: Any = None if order == sorted(order) else itemgetter(*order)
    make = value.make or _same

    def read(entity: EntityClass) -> Any:
        values: Any = get(entity)
        if converted:
            values = list(values)
            for index, unpack in converted:
                values[index] = unpack(values[index])
        if defaults:
            values = (*values, *defaults)
        return make(*values) if in_order is None else make(*in_order(values))

    return read


def _unpack(value: Struct, name: str, version: int, *, flexible: bool) -> Callable[[Any], Any] | None:
    codec, inner = value.codec(name), field_of(value.fields[name]).type
    if codec.unpack is not None:
        return codec.unpack
    is_array = isinstance(inner, list)
    inner = inner[0] if is_array else inner
    if isinstance(inner, Struct):
        read = _reader(inner, version, flexible=flexible)
    elif inner == "uuid" and not is_array:
        return lambda value: value or _ZERO_UUID
    else:
        return None
    if is_array:
        return lambda items: tuple([read(item) for item in items])
    return lambda item: None if item is None else read(item)


# -- to bytes --------------------------------------------------------------------------------------------


def _steps(value: Struct, entity: EntityClass) -> list[_Write]:
    """The writers of a value in order: runs of numbers at once, other fields singly, then tagged fields."""
    steps: list[_Write] = []
    run: list[FieldSpec] = []
    specs = fields_of(entity)
    for spec in specs:
        if spec.tag is not None:
            continue
        is_number = spec.kafka_type in FIXED_FORMATS and not spec.is_array
        if is_number and value.make is not None and value.codec(spec.name)[1:] == _AS_IT_IS[1:]:
            run.append(spec)
            continue
        if run:
            steps.append(_numbers(run))
            run = []
        steps.append(_field(value, spec, flexible=entity.__flexible__))
    if run:
        steps.append(_numbers(run))
    if entity.__flexible__:
        steps.append(_tags(value, [spec for spec in specs if spec.tag is not None]))
    return steps


def _numbers(specs: list[FieldSpec]) -> _Write:
    pack = struct.Struct(">" + "".join(FIXED_FORMATS[spec.kafka_type] for spec in specs)).pack
    get = _getter([spec.name for spec in specs])

    def write(value: Any, out: bytearray) -> None:
        out += pack(*get(value))

    return write


def _field(value: Struct, spec: FieldSpec, *, flexible: bool) -> _Write:
    codec = value.codec(spec.name)
    write_value = value_writer(spec, flexible)
    if codec is NOT_KEPT:
        zero: tuple[()] = ()
        return lambda _, out: write_value(zero, out)
    get, pack = _get(value, spec.name), _pack(value, spec.name)
    if codec.write is not None:
        write_itself = codec.write
        return lambda holder, out: write_itself(get(holder), out)
    if pack is _same:
        return lambda holder, out: write_value(get(holder), out)

    def write(holder: Any, out: bytearray) -> None:
        write_value(pack(get(holder)), out)

    if not codec.remembered:
        return write

    @lru_cache(maxsize=codec.remembered)
    def encoded(field: Any) -> bytes:
        out = bytearray()
        write_value(pack(field), out)
        return bytes(out)

    def write_remembered(holder: Any, out: bytearray) -> None:
        out += encoded(get(holder))

    return write_remembered


def _get(value: Struct, name: str) -> Callable[[Any], Any]:
    if value.make is None:
        return _same
    return value.codec(name).get or attrgetter(name)


def _pack(value: Struct, name: str) -> Callable[[Any], Any]:
    """A function from a field in memory to what the wire's writers take: mappings for structs."""
    codec, inner = value.codec(name), field_of(value.fields[name]).type
    if codec.pack is not None:
        return codec.pack
    is_array = isinstance(inner, list)
    inner = inner[0] if is_array else inner
    if not isinstance(inner, Struct):
        return _same
    parts = [(each, _get(inner, each), _pack(inner, each)) for each in inner.kept()]

    def pack_struct(item: Any) -> dict[str, Any]:
        return {each: pack(get(item)) for each, get, pack in parts}

    if is_array:
        return lambda items: [pack_struct(item) for item in items]
    return lambda item: None if item is None else pack_struct(item)


def _tags(value: Struct, specs: list[FieldSpec]) -> _Write:
    """A writer of the tagged fields that are not their defaults, in the order of their tags."""
    if not specs:
        return lambda _, out: out.append(0)
    tagged = [
        (
            write_uvarint(spec.tag or 0),
            spec.default,
            _get(value, spec.name),
            _pack(value, spec.name),
            value_writer(spec, flexible=True),
        )
        for spec in sorted(specs, key=lambda spec: spec.tag or 0)
    ]

    def write_tags(holder: Any, out: bytearray) -> None:
        count, section = 0, bytearray()
        for tag, default, get, pack, write in tagged:
            field = get(holder)
            if field != default:
                raw = bytearray()
                write(pack(field), raw)
                count += 1
                section += tag + write_uvarint(len(raw)) + raw
        out += write_uvarint(count)
        out += section

    return write_tags
