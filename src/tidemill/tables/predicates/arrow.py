"""From pyarrow expressions to predicates.

An expression shows its parts only in the bytes that pickle gets: an Arrow IPC file with one row. Its columns
are the literals and the functions' options, with their types; the metadata of its schema is the tree, as
pairs: ``call`` f, the arguments, ``options`` column, ``end`` f; ``field_ref`` name; ``literal`` column.
pyarrow gives metadata as a dict, which loses repeated keys, so they are read from the flatbuffer itself.

The meaning is that of the predicate, which differs from Arrow's for NaN only: equal to itself, above all.
``isin`` never is unknown in Arrow, and stays so: NULL is in the list if the list holds NULL, else it is not.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias

import pyarrow as pa

from tidemill.records.columns import compute as pc
from tidemill.tables.predicates.literals import (
    TimeOfDay,
    Timestamp,
    Value,
    literal_of,
    refuse,
    shorten,
    to_date,
)
from tidemill.tables.predicates.tree import (
    LITERALS_MAX,
    Always,
    Compare,
    In,
    IsNull,
    Never,
    Not,
    Path,
    Predicate,
    Prefix,
    all_of,
    any_of,
)

__all__ = ("from_arrow",)

_COMPARISONS: Final = {
    "equal": "=",
    "not_equal": "!=",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
}
_FLIPPED: Final = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_UNIT_NS: Final = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_SUPPORTED: Final = (
    "a filter is made of comparisons of fields with values, isin, is_null, is_valid, is_nan and starts_with, "
    "joined by &, | and ~"
)
#: Null handling of is_in that is supported: NULL matches if the list holds one, or never matches.
_NULLS_MATCH, _NULLS_SKIPPED = 0, 1
#: An Arrow file begins with these bytes, then come the messages of a stream.
_FILE_MAGIC: Final = b"ARROW1\x00\x00"


@dataclass(frozen=True, slots=True)
class _Literal:
    scalar: pa.Scalar


@dataclass(frozen=True, slots=True)
class _Options:
    fields: pa.StructScalar


@dataclass(slots=True)
class _Chain:
    """Terms joined by AND or OR, not yet a node: chains of thousands are built two terms at a time."""

    is_and: bool
    terms: list[Predicate]


#: An argument of a call, as far as it was read.
_Item: TypeAlias = Path | _Literal | _Options | _Chain | Predicate


def from_arrow(expression: pc.Expression) -> Predicate:
    """The predicate of a pyarrow expression. Raises ``TableError`` for an expression that is no filter.

    >>> from_arrow((pc.field("age") >= 18) & pc.field("address", "city").is_valid())
    <And "age" >= 18 AND "address"."city" IS NOT NULL>
    """
    shown = shorten(" ".join(str(expression).split()))
    try:
        data = pa.py_buffer(expression.__reduce__()[1][0])
        pairs = list(_metadata_pairs(data))
        row = pa.ipc.open_file(data).get_batch(0)
    except (pa.ArrowException, struct.error, IndexError, ValueError) as error:
        refuse(f"the expression {shown} cannot be read ({error}); name fields by name, not by number")
    return _Reader(row, shown).read(pairs)


class _Reader:
    """Reads the pairs of an expression, with a stack of the calls that are open."""

    def __init__(self, row: pa.RecordBatch, shown: str) -> None:
        self._row = row
        self._shown = shown

    def read(self, pairs: Sequence[tuple[str, str]]) -> Predicate:
        opened: list[list[_Item]] = [[]]
        path: list[str] = []
        missing = 0
        for key, text in pairs:
            if key == "nested_field_ref":
                path, missing = [], int(text)
            elif key == "field_ref":
                path, missing = [*path, text], max(missing - 1, 0)
                if not missing:
                    opened[-1].append(tuple(path))
                    path = []
            elif key in ("literal", "options"):
                scalar = self._row.column(int(text))[0]
                opened[-1].append(_Literal(scalar) if key == "literal" else _Options(scalar))
            elif key == "call":
                opened.append([])
            elif key == "end":
                items = opened.pop()
                opened[-1].append(self._call(text, items))
            else:
                self._refuse(f"holds {key!r}, which is not known")
        return self._predicate(opened[0][0])

    def _call(self, name: str, items: list[_Item]) -> _Item:
        if name in _COMPARISONS:
            return self._compare(_COMPARISONS[name], items)
        calls: dict[str, Callable[[list[_Item]], _Item]] = {
            "and_kleene": lambda items: self._join(items, is_and=True),
            "or_kleene": lambda items: self._join(items, is_and=False),
            "invert": lambda items: Not(self._predicate(items[0])),
            "is_valid": lambda items: IsNull(self._column(items[0]), negated=True),
            "is_nan": lambda items: Compare(self._column(items[0]), "=", math.nan),
            "is_null": self._is_null,
            "is_in": self._is_in,
            "starts_with": self._starts_with,
        }
        if name not in calls:
            self._refuse(f"calls {name}, which is not supported")
        return calls[name](items)

    def _join(self, items: list[_Item], *, is_and: bool) -> _Chain:
        first, *others = items
        chain = first if isinstance(first, _Chain) and first.is_and is is_and else None
        if chain is None:
            chain = _Chain(is_and, [self._predicate(first)])
        for item in others:
            same = isinstance(item, _Chain) and item.is_and is is_and
            chain.terms += item.terms if isinstance(item, _Chain) and same else [self._predicate(item)]
        return chain

    def _compare(self, op: str, items: list[_Item]) -> Predicate:
        left, right = items
        if isinstance(left, _Literal):
            left, right, op = right, left, _FLIPPED[op]
        if not isinstance(right, _Literal):
            self._refuse("compares something else than a field with a value")
        return Compare(self._column(left), op, self._value(right.scalar))

    def _is_null(self, items: list[_Item]) -> Predicate:
        column = self._column(items[0])
        if len(items) > 1 and self._option(items, "nan_is_null").as_py():
            return any_of((IsNull(column), Compare(column, "=", math.nan)))
        return IsNull(column)

    def _is_in(self, items: list[_Item]) -> Predicate:
        column = self._column(items[0])
        members = self._option(items, "value_set").values
        nulls = self._option(items, "null_matching_behavior").as_py()
        if nulls not in (_NULLS_MATCH, _NULLS_SKIPPED):
            self._refuse("calls is_in in a way that makes NULL unknown, which is not supported")
        if len(members) > LITERALS_MAX:
            self._refuse(f"looks for {len(members)} values, and {LITERALS_MAX} are allowed")
        values = tuple(self._value(scalar) for scalar in members if scalar.is_valid)
        found: list[Predicate] = []
        if values:
            found.append(all_of((In(column, values), IsNull(column, negated=True))))
        if members.null_count and nulls == _NULLS_MATCH:
            found.append(IsNull(column))
        return any_of(found)

    def _starts_with(self, items: list[_Item]) -> Predicate:
        if self._option(items, "ignore_case").as_py():
            self._refuse("ignores case, which is not supported")
        return Prefix(self._column(items[0]), self._option(items, "pattern").as_py())

    def _option(self, items: list[_Item], name: str) -> pa.Scalar:
        options = items[-1]
        if not isinstance(options, _Options):
            self._refuse("calls a function without its options")
        return options.fields[name]

    def _column(self, item: _Item) -> Path:
        return item if isinstance(item, tuple) else self._refuse("tests something else than a field")

    def _predicate(self, item: _Item) -> Predicate:
        match item:
            case Predicate():
                return item
            case _Chain(is_and, terms):
                return all_of(terms) if is_and else any_of(terms)
            case tuple():
                return Compare(item, "=", True)
            case _Literal(scalar) if scalar.as_py() in (True, False) and pa.types.is_boolean(scalar.type):
                return Always() if scalar.as_py() else Never()
        return self._refuse("has a part that is neither true nor false")

    def _value(self, scalar: pa.Scalar) -> Value:
        """The literal of a scalar. Times are read by their numbers: Python's have no nanoseconds."""
        data_type, types = scalar.type, pa.types
        if not scalar.is_valid:
            return None
        if types.is_timestamp(data_type):
            return Timestamp(scalar.value * _UNIT_NS[data_type.unit], data_type.tz is not None)
        if types.is_date64(data_type):
            return Timestamp(scalar.value * _UNIT_NS["ms"], False)
        if types.is_date32(data_type):
            day = to_date(scalar.value)
            return self._refuse("holds a date outside of the years 1 to 9999") if day is None else day
        if types.is_time(data_type):
            return TimeOfDay(scalar.value * _UNIT_NS[data_type.unit])
        if types.is_nested(data_type) or types.is_temporal(data_type):
            self._refuse(f"holds a literal of type {data_type}, which is not supported")
        return literal_of(scalar.as_py())

    def _refuse(self, complaint: str) -> NoReturn:
        refuse(f"the expression {self._shown} {complaint}; {_SUPPORTED}")


def _metadata_pairs(data: pa.Buffer) -> Iterator[tuple[str, str]]:
    """The metadata of an Arrow file's schema, in order and with repeated keys.

    The first message of the file is a flatbuffer: Message.header is the Schema, Schema.custom_metadata a
    vector of KeyValue tables.
    """
    magic = len(_FILE_MAGIC)
    if data[:magic].to_pybytes() != _FILE_MAGIC:
        raise ValueError("pyarrow did not write the expression as an Arrow file")
    message = bytes(pa.ipc.read_message(data[magic:]).metadata)
    root = _uint32(message, 0)
    schema = _follow(message, root, slot=2)
    vector = _follow(message, schema, slot=2) if schema else 0
    for index in range(_uint32(message, vector) if vector else 0):
        entry = vector + 4 + 4 * index
        pair = entry + _uint32(message, entry)
        key, value = (_follow(message, pair, slot=slot) for slot in (0, 1))
        yield _string(message, key), _string(message, value)


def _follow(message: bytes, table: int, *, slot: int) -> int:
    """The position that a table's field points to; 0 if the field is not there."""
    vtable = table - int(struct.unpack_from("<i", message, table)[0])
    size = struct.unpack_from("<H", message, vtable)[0]
    if 4 + 2 * slot >= size:
        return 0
    offset = int(struct.unpack_from("<H", message, vtable + 4 + 2 * slot)[0])
    return table + offset + _uint32(message, table + offset) if offset else 0


def _string(message: bytes, at: int) -> str:
    return message[at + 4 : at + 4 + _uint32(message, at)].decode() if at else ""


def _uint32(message: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", message, at)[0])
