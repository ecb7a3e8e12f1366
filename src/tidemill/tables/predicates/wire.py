"""Predicates as bytes: MessagePack of ``[version, nodes]``.

Nodes follow each other as in reverse Polish notation, so bytes do not nest and depth costs no stack:

| node | means |
| --- | --- |
| ``[1, path, op, value]`` | comparison |
| ``[2, path, values, negated]`` | IN, NOT IN |
| ``[3, path, negated]`` | IS NULL, IS NOT NULL |
| ``[4, path, text]`` | starts with |
| ``[5, n]``, ``[6, n]`` | AND, OR of the last n results |
| ``[7]`` | NOT of the last result |
| ``[8]``, ``[9]`` | TRUE, FALSE |

| value | means |
| --- | --- |
| ``[0]`` | NULL |
| ``[1, bool]``, ``[2, int]``, ``[4, float]``, ``[6, text]``, ``[7, bytes]`` | the value itself |
| ``[3, text]``, ``[5, text]`` | an integer beyond 64 bits, a decimal |
| ``[8, days]`` | a date, from 1970 |
| ``[9, seconds, nanos]``, ``[10, seconds, nanos]`` | a timestamp without a zone, in UTC |
| ``[11, nanos]`` | a time of day |

``decode`` may be given any bytes. It answers with a tree or with ``TableError``, in time and memory that
``ENCODED_BYTES_MAX`` bounds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from typing import Annotated, Final, TypeAlias

import msgspec

from tidemill.tables.predicates.literals import (
    DIGITS_MAX,
    SECOND_NS,
    TimeOfDay,
    Timestamp,
    Value,
    refuse,
    to_date,
    to_days,
)
from tidemill.tables.predicates.tree import (
    LITERALS_MAX,
    TERMS_MAX,
    Always,
    And,
    Compare,
    In,
    IsNull,
    Never,
    Not,
    Or,
    Predicate,
    Prefix,
)

__all__ = ("ENCODED_BYTES_MAX", "decode", "encode")

ENCODED_BYTES_MAX: Final = 1 << 20
_VERSION: Final = 1
_INT64: Final = range(-(1 << 63), 1 << 63)
_WHOLE: Final = re.compile(rf"-?[0-9]{{1,{DIGITS_MAX}}}")
_DECIMAL: Final = re.compile(rf"-?[0-9]{{1,{DIGITS_MAX}}}(\.[0-9]{{1,{DIGITS_MAX}}})?")


class _Form(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of nodes and values: a tag, then the fields in order."""


class _Null(_Form, tag=0):
    pass


class _Bool(_Form, tag=1):
    value: bool


class _Int(_Form, tag=2):
    value: int


class _BigInt(_Form, tag=3):
    text: str


class _Float(_Form, tag=4):
    value: float


class _Decimal(_Form, tag=5):
    text: str


class _Text(_Form, tag=6):
    value: str


class _Bytes(_Form, tag=7):
    value: bytes


class _Date(_Form, tag=8):
    days: int


class _Local(_Form, tag=9):
    seconds: int
    nanos: int


class _Utc(_Form, tag=10):
    seconds: int
    nanos: int


class _Time(_Form, tag=11):
    nanos: int


_AnyValue: TypeAlias = (
    _Null | _Bool | _Int | _BigInt | _Float | _Decimal | _Text | _Bytes | _Date | _Local | _Utc | _Time
)


class _CompareNode(_Form, tag=1):
    path: tuple[str, ...]
    op: str
    value: _AnyValue


class _InNode(_Form, tag=2):
    path: tuple[str, ...]
    values: Annotated[tuple[_AnyValue, ...], msgspec.Meta(max_length=LITERALS_MAX)]
    negated: bool


class _NullNode(_Form, tag=3):
    path: tuple[str, ...]
    negated: bool


class _PrefixNode(_Form, tag=4):
    path: tuple[str, ...]
    text: str


class _AndNode(_Form, tag=5):
    count: int


class _OrNode(_Form, tag=6):
    count: int


class _NotNode(_Form, tag=7):
    pass


class _AlwaysNode(_Form, tag=8):
    pass


class _NeverNode(_Form, tag=9):
    pass


_AnyNode: TypeAlias = (
    _CompareNode
    | _InNode
    | _NullNode
    | _PrefixNode
    | _AndNode
    | _OrNode
    | _NotNode
    | _AlwaysNode
    | _NeverNode
)


class _Message(_Form):
    version: int
    nodes: list[_AnyNode]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Message)


def encode(predicate: Predicate) -> bytes:
    """Encode a predicate. Raises ``TableError`` if ``decode`` would refuse so many bytes."""
    data = _ENCODER.encode(_Message(_VERSION, list(_nodes(predicate))))
    if len(data) > ENCODED_BYTES_MAX:
        refuse(f"the predicate takes {len(data)} bytes, and {ENCODED_BYTES_MAX} are allowed; split the scan")
    return data


def decode(data: bytes) -> Predicate:
    """Decode a predicate from untrusted bytes. Raises ``TableError`` for bytes that are none."""
    if len(data) > ENCODED_BYTES_MAX:
        refuse(f"the predicate takes {len(data)} bytes, and {ENCODED_BYTES_MAX} are allowed; split the scan")
    try:
        message = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        refuse(f"the bytes are no predicate: {error}")
    if message.version != _VERSION:
        refuse(
            f"the predicate has version {message.version}, and this node reads {_VERSION}; upgrade the node"
        )
    stack: list[Predicate] = []
    for node in message.nodes:
        stack.append(_pop(node, stack) if isinstance(node, _AndNode | _OrNode | _NotNode) else _leaf(node))
        if len(stack) > TERMS_MAX:
            refuse(f"the predicate has more than {TERMS_MAX} parts; split the scan")
    if len(stack) != 1:
        refuse(f"the bytes are no predicate: they hold {len(stack)} of them")
    return stack[0]


def _pop(node: _AndNode | _OrNode | _NotNode, stack: list[Predicate]) -> Predicate:
    count = 1 if isinstance(node, _NotNode) else node.count
    least = 1 if isinstance(node, _NotNode) else 2
    if not least <= count <= len(stack):
        refuse(f"the bytes are no predicate: {count} of {len(stack)} parts cannot be joined")
    terms = tuple(stack[-count:])
    del stack[-count:]
    if isinstance(node, _NotNode):
        return Not(terms[0])
    kind = And if isinstance(node, _AndNode) else Or
    if any(isinstance(term, kind) for term in terms):
        # ``encode`` never writes these, and taking thousands of them apart one by one would be slow.
        refuse(f"the bytes are no predicate: an {kind.__name__.upper()} lies directly in another")
    return kind(terms)


def _leaf(node: _CompareNode | _InNode | _NullNode | _PrefixNode | _AlwaysNode | _NeverNode) -> Predicate:
    match node:
        case _CompareNode(path, op, value):
            return Compare(path, op, _read(value))
        case _InNode(path, values, negated):
            return In(path, tuple(map(_read, values)), negated)
        case _NullNode(path, negated):
            return IsNull(path, negated)
        case _PrefixNode(path, text):
            return Prefix(path, text)
        case _AlwaysNode():
            return Always()
    return Never()


def _nodes(predicate: Predicate) -> Iterator[_AnyNode]:
    match predicate:
        case And(terms) | Or(terms):
            for term in terms:
                yield from _nodes(term)
            yield _AndNode(len(terms)) if isinstance(predicate, And) else _OrNode(len(terms))
        case Not(term):
            yield from _nodes(term)
            yield _NotNode()
        case Compare(path, op, literal):
            yield _CompareNode(path, op, _write(literal))
        case In(path, values, negated):
            yield _InNode(path, tuple(map(_write, values)), negated)
        case IsNull(path, negated):
            yield _NullNode(path, negated)
        case Prefix(path, text):
            yield _PrefixNode(path, text)
        case _:
            yield _AlwaysNode() if isinstance(predicate, Always) else _NeverNode()


def _write(value: Value) -> _AnyValue:
    match value:
        case None:
            return _Null()
        case bool():
            return _Bool(value)
        case int():
            return _Int(value) if value in _INT64 else _BigInt(str(value))
        case float():
            return _Float(value)
        case Decimal():
            return _Decimal(f"{value:f}")
        case str():
            return _Text(value)
        case bytes():
            return _Bytes(value)
        case Timestamp(nanos, zoned):
            return (_Utc if zoned else _Local)(*divmod(nanos, SECOND_NS))
        case TimeOfDay(nanos):
            return _Time(nanos)
        case date():
            return _Date(to_days(value))


def _read(value: _AnyValue) -> Value:
    match value:
        case _Null():
            return None
        case _BigInt(text):
            return int(text) if _WHOLE.fullmatch(text) else _refuse_value("integer", text)
        case _Decimal(text):
            return Decimal(text) if _DECIMAL.fullmatch(text) else _refuse_value("decimal", text)
        case _Date(days):
            day = to_date(days)
            return (
                refuse("a date in the predicate lies outside of the years 1 to 9999") if day is None else day
            )
        case _Local(seconds, nanos) | _Utc(seconds, nanos):
            if not 0 <= nanos < SECOND_NS:
                refuse(f"a timestamp in the predicate has {nanos} nanoseconds, and a second has {SECOND_NS}")
            return Timestamp(seconds * SECOND_NS + nanos, isinstance(value, _Utc))
        case _Time(nanos):
            return TimeOfDay(nanos)
    return value.value


def _refuse_value(kind: str, text: str) -> Value:
    return refuse(f"the bytes are no predicate: {text[:40]!r} is no {kind} that is supported")
