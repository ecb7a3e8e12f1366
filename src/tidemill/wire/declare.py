"""Message classes in kio's shape, made from lists of fields: for bytes that kio has no schema of.

``declare`` makes the class of one version; ``encode`` and ``requests.decode_entity`` work on it as on kio's.
Fields are a dictionary from names to types, in the order of the bytes. A type is

- the name of a Kafka primitive: "int32", "string", "uuid"; with "?" behind it null is allowed;
- a dictionary of fields: a struct;
- a list with one of these in it: an array;
- a ``Field`` around one of these, which says more: versions, a tag, a default, that an array may be null.
"""

# No ``from __future__ import annotations``: the classes that are made here need real types.

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, TypeAlias
from uuid import UUID

from kio.static.constants import EntityType
from kio.static.primitive import i8, i16, i32, i64

from tidemill.wire.schema import EntityClass

__all__ = ("Field", "FieldType", "Fields", "declare", "field_of")

FieldType: TypeAlias = Any
"""The type of a field: a str, a dict, a list of one, or a ``Field``."""

Fields: TypeAlias = Mapping[str, FieldType]

_PRIMITIVES: Final[dict[str, Any]] = {
    "bool": bool,
    "int8": i8,
    "int16": i16,
    "int32": i32,
    "int64": i64,
    "string": str,
    "bytes": bytes,
    # kio reads the zero UUID as None.
    "uuid": UUID | None,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A field that needs more than a type, for instance versions or a default.

    Attributes:
        since: the first version that has it.
        until: the last version that has it; None if newer versions have it, too.
        default: what it is in versions without it, and the value that a tagged field is not written for.
        tag: the number of a tagged field, which only flexible versions have.
        nullable: whether an array or a struct may be null; a primitive says so by "?".
    """

    type: FieldType
    since: int = 0
    until: int | None = None
    default: Any = None
    tag: int | None = None
    nullable: bool = False

    def is_in(self, version: int, *, flexible: bool) -> bool:
        """Whether that version of the message has the field."""
        newest = version if self.until is None else self.until
        return self.since <= version <= newest and (self.tag is None or flexible)


def field_of(field_type: FieldType) -> Field:
    """The ``Field`` of a field's declaration, in whichever way that is written."""
    return field_type if isinstance(field_type, Field) else Field(field_type)


def declare(
    name: str,
    fields: Fields,
    *,
    version: int = 0,
    flexible: bool = True,
    kind: EntityType = EntityType.data,
    constants: Mapping[str, Any] | None = None,
) -> EntityClass:
    """The class of one version of a message; structs inside of it get classes of their own.

    ``constants`` become attributes of every class, beside kio's own.
    """
    constants = constants or {}
    made = [
        _dataclass_field(name, key, field, version, flexible, constants)
        for key, field in ((key, field_of(each)) for key, each in fields.items())
        if field.is_in(version, flexible=flexible)
    ]
    entity = dataclasses.make_dataclass(
        name,
        made,
        frozen=True,
        slots=True,
        kw_only=True,
        namespace={
            "__type__": kind,
            "__version__": i16(version),
            "__flexible__": flexible,
            "__doc__": f"{name} v{version}: {', '.join(key for key, _, _ in made) or 'nothing'}.",
            **constants,
        },
    )
    entity.__module__ = __name__
    return entity


def _dataclass_field(
    name: str, key: str, field: Field, version: int, flexible: bool, constants: Mapping[str, Any]
) -> tuple[str, Any, Any]:
    inner, metadata = field.type, {}
    nullable = field.nullable
    is_array = isinstance(inner, list)
    if is_array:
        (inner,) = inner
    value_type: Any
    if isinstance(inner, Mapping):
        title = "".join(word.capitalize() for word in key.split("_"))
        value_type = declare(
            f"{name}{title}",
            inner,
            version=version,
            flexible=flexible,
            kind=EntityType.nested,
            constants=constants,
        )
    else:
        nullable = nullable or inner.endswith("?")
        metadata["kafka_type"] = inner.rstrip("?")
        value_type = _PRIMITIVES[inner.rstrip("?")]
    if is_array:
        value_type = tuple[value_type, ...]
    if nullable:
        value_type |= None
    if field.tag is None:
        return key, value_type, dataclasses.field(metadata=metadata)
    return key, value_type, dataclasses.field(metadata=metadata | {"tag": field.tag}, default=field.default)
