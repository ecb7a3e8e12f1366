"""The types that a table's columns can have, and how given schemas and rows are brought to them.

- A table has the types that Spark has, each in exactly one Arrow spelling (see ``normalise_schema``).
- Schemas are only widened: a spelling with the same values becomes ours, one that could hold more is refused.
- Names are unique without regard to case, as in Spark, also among the fields of a struct.

In words, types are spelt as in Spark's DDL: ``describe_type`` and ``parse_columns``.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import NoReturn

import pyarrow as pa
from pyarrow import types as arrow

from tidemill.errors import TableCode, TableError
from tidemill.tables.rows.conforming import conform
from tidemill.tables.rows.ddl import describe_type, read_columns

__all__ = (
    "COMMENT",
    "FIELDS_MAX",
    "NAME_CHARACTERS_MAX",
    "NESTING_MAX",
    "RESERVED_PREFIX",
    "conform",
    "describe_type",
    "normalise_schema",
    "parse_columns",
)

#: The most levels of lists, maps and structs inside each other.
NESTING_MAX = 16
#: The most columns, fields of structs, elements of lists, keys and values of maps of a table together.
FIELDS_MAX = 1_000
NAME_CHARACTERS_MAX = 255
#: Prefix of the columns that Tidemill adds to what it returns.
RESERVED_PREFIX = "_tidemill"
#: The one key of a field's metadata that is kept.
COMMENT = b"comment"

_AS_THEY_ARE = (
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    pa.time64("ns"),
)
_SAME_VALUES = {
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
    pa.time32("s"): pa.time64("ns"),
    pa.time32("ms"): pa.time64("ns"),
    pa.time64("us"): pa.time64("ns"),
}
_PLAIN = {**{data_type: data_type for data_type in _AS_THEY_ARE}, **_SAME_VALUES}
_INSTEAD = {
    pa.uint8(): "smallint (int16)",
    pa.uint16(): "int (int32)",
    pa.uint32(): "bigint (int64)",
    pa.uint64(): "decimal(20,0)",
    pa.float16(): "float (float32)",
    pa.null(): "the type that the values will have",
    pa.month_day_nano_interval(): "interval day to second (duration('us')), or an int of months",
}


def normalise_schema(schema: pa.Schema) -> pa.Schema:
    """The same columns in the types of a table. Raises an error for a column that has no such type.

    ======================================== ==============================================================
    kept                                     bool, int8 to int64, float32, float64, string, binary, date32,
                                             time64('ns'), decimal128, timestamp('us') with 'UTC' or without
                                             zone, duration('us'), list, map, struct
    brought to those                         large and view spellings, dictionaries (their values), date64,
                                             coarser units of time, any time zone, smaller decimals
    ======================================== ==============================================================

    The element of a list is called ``element``, those of a map ``key`` and ``value``. Metadata is dropped but
    for a field's ``comment``.

    >>> normalise_schema(pa.schema([pa.field("at", pa.timestamp("ms", "Europe/Berlin"), nullable=False)]))
    at: timestamp[us, tz=UTC] not null
    """
    if not len(schema):
        _refuse("a table has at least one column")
    # First, because an untrusted schema may have very many fields.
    _Budget().spend(len(schema))
    for name in schema.names:
        if name.lower().startswith(RESERVED_PREFIX):
            _refuse(
                f"column {name!r}: names that begin with {RESERVED_PREFIX!r} are reserved; use another name"
            )
    budget = _Budget()
    return pa.schema(_fields(list(schema), "", 0, budget))


def parse_columns(text: str) -> pa.Schema:
    """Parse a list of columns in Spark's words.

    >>> parse_columns("id bigint not null, tags array<string> comment 'free words'").names
    ['id', 'tags']
    """
    return normalise_schema(pa.schema(read_columns(text)))


class _Budget:
    """Counts the fields of one schema, so that it is refused before it becomes large."""

    def __init__(self) -> None:
        self.fields = 0

    def spend(self, count: int) -> None:
        self.fields += count
        if self.fields > FIELDS_MAX:
            _refuse(f"the schema has more than {FIELDS_MAX} columns, nested fields counted: split the table")


def _refuse(message: str) -> NoReturn:
    raise TableError(TableCode.invalid_schema, message)


def _refuse_type(path: str, data_type: pa.DataType, instead: str) -> NoReturn:
    where = f"column {path!r}" if path else "it"
    _refuse(f"{where} has type {data_type}, which a table cannot have: use {instead}")


def _fields(fields: Sequence[pa.Field], parent: str, depth: int, budget: _Budget) -> list[pa.Field]:
    budget.spend(len(fields))
    seen: dict[str, str] = {}
    for field in fields:
        _check_name(field.name, parent)
        same = seen.get(field.name.lower())
        if same is not None:
            twice = f"{_inside(parent, same)!r} and {_inside(parent, field.name)!r}"
            _refuse(f"columns {twice} have one name, for case does not count: rename one")
        seen[field.name.lower()] = field.name
    return [_field(field, field.name, _inside(parent, field.name), depth, budget) for field in fields]


def _field(field: pa.Field, name: str, path: str, depth: int, budget: _Budget) -> pa.Field:
    comment = (field.metadata or {}).get(COMMENT)
    metadata = None if comment is None else {COMMENT: comment}
    return pa.field(name, _type(field.type, path, depth, budget), field.nullable, metadata)


def _inside(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _check_name(name: str, parent: str) -> None:
    if not name:
        where = f"a field of column {parent!r}" if parent else "a column"
        _refuse(f"{where} has an empty name: give it one")
    if len(name) > NAME_CHARACTERS_MAX:
        start = _inside(parent, name[:40])
        _refuse(f"column {start!r}… has a name of {len(name)} characters: use at most {NAME_CHARACTERS_MAX}")
    if any(unicodedata.category(character) == "Cc" for character in name):
        _refuse(f"column {_inside(parent, name)!r} has a control character in its name: leave it out")


def _type(data_type: pa.DataType, path: str, depth: int, budget: _Budget) -> pa.DataType:
    known = _PLAIN.get(data_type)
    if known is not None:
        return known
    if arrow.is_dictionary(data_type) or arrow.is_run_end_encoded(data_type):
        return _type(data_type.value_type, path, depth, budget)
    if arrow.is_temporal(data_type) and not arrow.is_interval(data_type):
        return _temporal(data_type, path)
    if arrow.is_decimal(data_type):
        return _decimal(data_type, path)
    if arrow.is_nested(data_type):
        if depth == NESTING_MAX:
            _refuse(f"column {path!r} is nested deeper than {NESTING_MAX} levels: flatten it")
        return _nested(data_type, path, depth + 1, budget)
    if isinstance(data_type, pa.BaseExtensionType):
        _refuse_type(path, data_type, f"its storage type, {data_type.storage_type}")
    if arrow.is_fixed_size_binary(data_type):
        _refuse_type(path, data_type, "binary")
    _refuse_type(path, data_type, _INSTEAD.get(data_type, "one of Spark's types"))


def _temporal(data_type: pa.DataType, path: str) -> pa.DataType:
    if data_type.unit == "ns":
        _refuse_type(path, data_type, f"{'timestamp' if arrow.is_timestamp(data_type) else 'duration'}('us')")
    if arrow.is_duration(data_type):
        return pa.duration("us")
    return pa.timestamp("us", None if data_type.tz is None else "UTC")


def _decimal(data_type: pa.DataType, path: str) -> pa.DataType:
    if arrow.is_decimal256(data_type):
        _refuse_type(path, data_type, "decimal128, of up to 38 digits")
    if not 0 <= data_type.scale <= data_type.precision:
        _refuse_type(path, data_type, f"a scale between 0 and the precision, {data_type.precision}")
    return pa.decimal128(data_type.precision, data_type.scale)


def _nested(data_type: pa.DataType, path: str, depth: int, budget: _Budget) -> pa.DataType:
    if arrow.is_struct(data_type):
        if not data_type.num_fields:
            _refuse_type(path, data_type, "a struct of at least one field")
        return pa.struct(_fields(list(data_type), path, depth, budget))
    if arrow.is_map(data_type):
        if _has_map(data_type.key_type):
            _refuse_type(path, data_type, "keys without a map inside")
        budget.spend(2)
        key = _field(data_type.key_field, "key", _inside(path, "key"), depth, budget)
        value = _field(data_type.item_field, "value", _inside(path, "value"), depth, budget)
        return pa.map_(key.with_nullable(False), value)
    if arrow.is_fixed_size_list(data_type):
        _refuse_type(path, data_type, f"list<{data_type.value_type}>")
    if arrow.is_union(data_type):
        _refuse_type(path, data_type, "a struct with a field for each alternative")
    budget.spend(1)
    return pa.list_(_field(data_type.value_field, "element", _inside(path, "element"), depth, budget))


def _has_map(data_type: pa.DataType) -> bool:
    if arrow.is_dictionary(data_type) or arrow.is_run_end_encoded(data_type):
        return _has_map(data_type.value_type)
    if arrow.is_map(data_type):
        return True
    return arrow.is_nested(data_type) and any(
        _has_map(data_type.field(number).type) for number in range(data_type.num_fields)
    )
