"""The layout of a kio entity class as plain values.

kio describes every message of every version as a frozen dataclass; the Kafka type, the tag and the
default of a field are in the dataclass field. The encoder, the guard in front of the decoder and the
check for misspelt keys all need the same facts, so they are read here, once per class, into
``FieldSpec``.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, TypeAlias, Union, get_args, get_origin

__all__ = ("FIXED_FORMATS", "MISSING", "EntityClass", "FieldSpec", "fields_of", "min_size")

EntityClass: TypeAlias = Any
"""A class in kio's shape: a dataclass with ``__flexible__``, ``__version__`` and ``__type__``."""

MISSING: Final = dataclasses.MISSING

FIXED_FORMATS: Final[dict[str, str]] = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "float64": "d",
    "error_code": "h",
    "timedelta_i32": "i",
    "timedelta_i64": "q",
    "datetime_i64": "q",
}
"""Kafka types of constant size that ``struct`` packs, with their format character.

``uuid`` is constant too (16 bytes) but is no number, so it is not in this table.
"""

_FORMAT_SIZES: Final = {"?": 1, "b": 1, "B": 1, "h": 2, "H": 2, "i": 4, "I": 4, "q": 8, "Q": 8, "d": 8}


@dataclasses.dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of an entity."""

    name: str
    """kio's name, which is the key in the mappings that the encoder takes."""
    kafka_type: str
    """kio's name of the primitive type, or "" for a struct."""
    struct: EntityClass | None
    """The nested entity class, or None for a primitive."""
    is_array: bool
    nullable: bool
    """Whether null has an encoding; for an array, whether the array itself may be null."""
    tag: int | None
    default: Any
    """The schema's default, or ``MISSING``."""

    @property
    def fixed_size(self) -> int | None:
        """Size of one element if it is the same for every value, else None. Structs are not looked into."""
        if self.kafka_type == "uuid":
            return 16
        code = FIXED_FORMATS.get(self.kafka_type)
        return None if code is None else _FORMAT_SIZES[code]


@cache
def fields_of(entity: EntityClass) -> tuple[FieldSpec, ...]:
    """The fields of ``entity`` in wire order; tagged fields are among them, wherever kio declares them."""
    return tuple(_field_spec(field) for field in dataclasses.fields(entity))


@cache
def min_size(entity: EntityClass) -> int:
    """The fewest bytes that a value of ``entity`` takes: at least 1, so that no array count is free."""
    size = sum(_min_field_size(spec, entity.__flexible__) for spec in fields_of(entity) if spec.tag is None)
    return max(1, size + (1 if entity.__flexible__ else 0))


def _min_field_size(spec: FieldSpec, flexible: bool) -> int:
    if spec.is_array:
        return 1 if flexible else 4
    if spec.struct is not None:
        return 1 if spec.nullable else min_size(spec.struct)
    if spec.fixed_size is not None:
        return spec.fixed_size
    if flexible:
        return 1
    return 2 if spec.kafka_type == "string" else 4


def _field_spec(field: dataclasses.Field[Any]) -> FieldSpec:
    value_type, nullable = _without_none(field.type)
    is_array = get_origin(value_type) is tuple
    if is_array:
        value_type, _ = _without_none(get_args(value_type)[0])
    struct: EntityClass | None = value_type if dataclasses.is_dataclass(value_type) else None
    return FieldSpec(
        name=field.name,
        kafka_type="" if struct is not None else field.metadata["kafka_type"],
        struct=struct,
        is_array=is_array,
        nullable=nullable,
        tag=field.metadata.get("tag"),
        default=field.default,
    )


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """The type without ``| None``, and whether it had that."""
    if get_origin(annotation) not in (UnionType, Union):
        return annotation, False
    (value_type,) = (arg for arg in get_args(annotation) if arg is not NoneType)
    return value_type, True
