"""Declared records: every declaration in every version, and the rules of the machinery."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.coordination.stored import NOT_KEPT, Codec, RecordType, RecordTypes, Struct
from tidemill.errors import StorageError
from tidemill.groups.records import RECORD_TYPES as GROUP_TYPES
from tidemill.transactions.records import RECORD_TYPES as TRANSACTION_TYPES
from tidemill.transactions.transaction import Transaction, TransactionState
from tidemill.wire.declare import Field, FieldType, declare, field_of
from tidemill.wire.encode import encode_entity
from tidemill.wire.schema import EntityClass

_NUMBERS: Final = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_TEXTS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "string": st.text(max_size=5),
    "bytes": st.binary(max_size=5),
    "uuid": st.uuids() | st.just(UUID(int=0)),
}


def plain_fields(struct: Struct) -> dict[str, Any]:
    """The fields of a struct with dictionaries for the structs inside of it, as ``declare`` takes them."""

    def plain(field_type: FieldType) -> FieldType:
        if isinstance(field_type, Field):
            return Field(
                plain(field_type.type),
                field_type.since,
                field_type.until,
                field_type.default,
                field_type.tag,
                field_type.nullable,
            )
        if isinstance(field_type, list):
            return [plain(field_type[0])]
        return plain_fields(field_type) if isinstance(field_type, Struct) else field_type

    return {name: plain(field_type) for name, field_type in struct.fields.items()}


def values(field_type: FieldType, *, nullable: bool = False) -> st.SearchStrategy[Any]:
    """Whatever the bytes of a field may say."""
    found: st.SearchStrategy[Any]
    if isinstance(field_type, Field):
        return values(field_type.type, nullable=field_type.nullable)
    if isinstance(field_type, list):
        found = st.lists(values(field_type[0]), max_size=3)
    elif isinstance(field_type, dict):
        found = st.fixed_dictionaries({name: values(each) for name, each in field_type.items()})
    else:
        nullable = nullable or field_type.endswith("?")
        name = field_type.rstrip("?")
        bits = _NUMBERS.get(name, 0)
        # Small numbers are more likely to be a state or another value with a meaning.
        numbers = st.integers(-1, 7) | st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if bits else None
        found = _TEXTS[name] if numbers is None else numbers
    return st.none() | found if nullable else found


CASES: Final = [
    pytest.param(types, each, version, id=f"{each.name}-v{version}")
    for types in (GROUP_TYPES, TRANSACTION_TYPES)
    for each in types.types
    for version in each.versions
]


@cache
def entity_of(record_type: RecordType[Any], version: int) -> tuple[EntityClass, list[str]]:
    """The class of one version of a type's value, and the fields that it has."""
    fields, flexible = plain_fields(record_type.value), version >= record_type.flexible_since
    present = [name for name, each in fields.items() if field_of(each).is_in(version, flexible=flexible)]
    return declare(record_type.name, fields, version=version, flexible=flexible), present


@pytest.mark.parametrize(("types", "record_type", "version"), CASES)
@given(data=st.data())
def test_every_version_of_every_type_is_read_and_comes_back(
    types: RecordTypes[Any], record_type: RecordType[Any], version: int, data: st.DataObject
) -> None:
    entity, present = entity_of(record_type, version)
    body = data.draw(values(plain_fields(record_type.value)))
    value = bytearray(version.to_bytes(2, "big"))
    encode_entity(entity, {name: body[name] for name in present}, value)
    key_fields = tuple(data.draw(values(each)) for each in record_type.key.values())
    key, _ = record_type.encode(key_fields, None)
    try:
        record = types.decode(key, bytes(value))
    except StorageError as error:
        # The fields may mean nothing, one by one or together; the bytes themselves are sound.
        assert not re.search("cut short|follow", error.message)
        return
    if isinstance(record, tuple):
        name, stored = record
        if isinstance(stored, Transaction) and stored.state is TransactionState.EMPTY:
            # Where no transaction was begun there are no partitions, and none are written.
            record = name, replace(stored, partitions=frozenset())
    else:
        assert record is not None
        stored = record.value
    assert types.decode(*record_type.encode(key_fields, stored)) == record


@pytest.mark.parametrize("types", [GROUP_TYPES, TRANSACTION_TYPES])
@given(data=st.data(), value=st.none() | st.binary(max_size=60))
def test_any_bytes_behind_a_known_version_parse_or_end_in_the_topics_error(
    types: RecordTypes[Any], data: st.DataObject, value: bytes | None
) -> None:
    record_type = data.draw(st.sampled_from(types.types))
    version = data.draw(st.sampled_from(record_type.key_versions))
    key = data.draw(
        st.just(b"\0\1k" * len(record_type.key)) | st.binary(max_size=20),
    )
    if value is not None:
        value = data.draw(st.sampled_from(record_type.versions)).to_bytes(2, "big") + value
    try:
        types.decode(version.to_bytes(2, "big") + key, value)
    except StorageError as error:
        assert "cannot be decoded" in error.message


# -- the machinery, on a type of its own -----------------------------------------------------------------


class CorruptShape(StorageError):
    """What the records below raise."""


@dataclass(frozen=True)
class Shape:
    sides: tuple[int, ...]
    name: str
    colour: str | None = None


@dataclass(frozen=True)
class ShapeRecord:
    id: int
    value: Shape | None


def shape(sides: tuple[int, ...], name: str, colour: str | None) -> Shape:
    if name == "triangle" and len(sides) != 3:
        raise ValueError("a triangle has three sides")
    return Shape(sides, name, colour)


SHAPES: Final[RecordTypes[ShapeRecord]] = RecordTypes(
    "a shape",
    CorruptShape,
    RecordType(
        "Shape",
        ShapeRecord,
        key_versions=(8, 7),
        key={"id": "int64"},
        value=Struct(
            shape,
            {
                "sides": ["int32"],
                "corners": Field([{"x": "int32"}], until=0),
                "name": Field("string", since=1, default="unnamed"),
                "colour": Field("string?", tag=3),
            },
            {"corners": NOT_KEPT, "name": Codec(unpack=str.lower, pack=str.upper)},
        ),
        versions=range(3),
        flexible_since=2,
        written=lambda value: 1 if value.colour is None else 2,
    ),
)


def key(version: int = 8) -> bytes:
    return version.to_bytes(2, "big") + (5).to_bytes(8, "big")


def test_the_first_key_version_is_written_and_all_are_read() -> None:
    record = ShapeRecord(5, Shape((1, 2), "a"))
    raw_key, value = SHAPES.encode(record)
    assert raw_key == key(8)
    assert SHAPES.decode(key(7), value) == record


def test_a_value_is_written_in_the_version_that_its_type_chooses() -> None:
    assert SHAPES.encode(ShapeRecord(5, Shape((1,), "a")))[1] == bytes.fromhex(
        "0001 00000001 00000001 0001 41"
    )
    flexible = bytes.fromhex("0002 02 00000001 02 41 01 03 04 03 7265".replace("04 03", "03 03"))
    assert SHAPES.encode(ShapeRecord(5, Shape((1,), "a", "re")))[1] == flexible
    assert SHAPES.decode(key(), flexible) == ShapeRecord(5, Shape((1,), "a", "re"))


def test_what_a_version_lacks_has_its_default_as_if_it_had_been_stored() -> None:
    oldest = bytes.fromhex("0000 00000000 00000002 00000001 00000002")
    assert SHAPES.decode(key(), oldest) == ShapeRecord(5, Shape((), "unnamed"))


def test_unknown_tagged_fields_are_passed_over() -> None:
    raw = bytes.fromhex("0002 01 02 41 02 01 02 ffff 07 00")
    assert SHAPES.decode(key(), raw) == ShapeRecord(5, Shape((), "a"))


def test_an_unknown_key_version_is_a_record_to_skip() -> None:
    assert SHAPES.decode(key(9), b"\0\0whatever") is None


def test_a_tombstone_has_no_value() -> None:
    assert SHAPES.encode(ShapeRecord(5, None)) == (key(), None)
    assert SHAPES.decode(key(), None) == ShapeRecord(5, None)


@pytest.mark.parametrize(
    ("raw_key", "value", "told"),
    [
        (None, b"", "it has no key"),
        (b"\0", b"", "its key is 1 bytes long"),
        (key()[:-1], None, "cut short"),
        (key() + b"\0", None, "followed by 1 bytes"),
        (key(), b"\0", "a value of 1 bytes has no version"),
        (key(), b"\0\3", "value version 3 of Shape is unknown"),
        (key(), b"\xff\xff", "value version -1 of Shape is unknown"),
        (key(), bytes.fromhex("0001 7fffffff 0001 41"), "a count of 2147483647"),
        (key(), bytes.fromhex("0001 00000000 0001 ff"), "ShapeValue v1"),
        (key(), bytes.fromhex("0001 00000000 ffff"), "name is null"),
        (key(), bytes.fromhex("0001 00000000 0008 545249414e474c45"), "a triangle has three sides"),
    ],
)
def test_what_cannot_be_decoded_is_the_topics_error(raw_key: bytes | None, value: bytes, told: str) -> None:
    with pytest.raises(CorruptShape, match="a shape cannot be decoded: ") as raised:
        SHAPES.decode(raw_key, value)
    assert told in raised.value.message


def test_two_types_cannot_share_a_key_version() -> None:
    with pytest.raises(AssertionError):
        RecordTypes("a shape", CorruptShape, *SHAPES.types, *SHAPES.types)
