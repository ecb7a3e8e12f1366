"""One comparison of SQL, as sqlglot read it, to a node. See ``predicate_sql`` for what is supported.

Anything that is not known is refused, also what sqlglot notes beside a node that is known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from decimal import Decimal
from typing import Final, NoReturn

from sqlglot import exp

from tidemill.tables.predicate_tree import (
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
)
from tidemill.tables.predicate_values import (
    DIGITS_MAX,
    Timestamp,
    Value,
    parse_date,
    parse_time,
    parse_timestamp,
    refuse,
    shorten,
)

__all__ = ("SUPPORTED", "Term")

SUPPORTED: Final = (
    "a filter compares columns with literals: = <> < <= > >= <=> IN BETWEEN LIKE 'text%' starts_with IS NULL "
    "IS DISTINCT FROM, joined by AND, OR and NOT"
)
_FLIPPED: Final = {"=": "=", "!=": "!=", "<=>": "<=>", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_COMPARISONS: Final[dict[type, str]] = {
    exp.EQ: "=",
    exp.NEQ: "!=",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
    exp.NullSafeEQ: "<=>",
    exp.NullSafeNEQ: "<=>",
}
_NUMBER: Final = re.compile(r"([0-9]+)(\.[0-9]*)?([eE][+-]?[0-9]{1,4})?")


class Term:
    """Turns what sqlglot made of one comparison into a node. ``shown`` is its text, for messages."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def read(self, node: exp.Expression) -> Predicate:
        """The node. NOT IN, IS NOT NULL and the like are a NOT around it, or a mark of its own."""
        node, negated = _unwrapped(node), False
        while isinstance(node, exp.Not):
            node, negated = _unwrapped(self._only(node, ("this",)).this), not negated
        inner = node.this if isinstance(node, exp.Escape) else node
        if inner.args.get("negate"):
            negated = not negated
        found = self._positive(node)
        if not negated:
            return found
        match found:
            case In(column, values):
                return In(column, values, negated=True)
            case IsNull(column):
                return IsNull(column, negated=True)
        return Not(found)

    def _positive(self, node: exp.Expression) -> Predicate:
        if type(node) in _COMPARISONS:
            return self._compare(node)
        readers: dict[type, Callable[[exp.Expression], Predicate]] = {
            exp.In: self._in,
            exp.Between: self._between,
            exp.Is: self._is,
            exp.Like: self._like,
            exp.Escape: self._like,
            exp.StartsWith: self._starts_with,
            exp.Boolean: lambda found: Always() if found.this else Never(),
        }
        reader = readers.get(type(node))
        if reader is not None:
            return reader(node)
        column = self._column(node)
        return self._refuse("is not supported") if column is None else Compare(column, "=", True)

    def _compare(self, node: exp.Expression) -> Predicate:
        left, right = self._only(node, ("this", "expression")).this, node.expression
        op = _COMPARISONS[type(node)]
        column = self._column(left)
        if column is None:
            left, right, op = right, left, _FLIPPED[op]
            column = self._column(left)
        if column is None:
            self._refuse("has no column that is compared with a literal")
        if self._column(right) is not None:
            self._refuse("compares two columns, which is not supported")
        compared = Compare(column, op, self._literal(right))
        return Not(compared) if isinstance(node, exp.NullSafeNEQ) else compared

    def _in(self, node: exp.Expression) -> Predicate:
        values = self._only(node, ("this", "expressions")).expressions
        return In(self._needed_column(node.this), tuple(map(self._literal, values)))

    def _between(self, node: exp.Expression) -> Predicate:
        self._only(node, ("this", "low", "high"))
        column = self._needed_column(node.this)
        low, high = (self._literal(node.args[side]) for side in ("low", "high"))
        return all_of((Compare(column, ">=", low), Compare(column, "<=", high)))

    def _is(self, node: exp.Expression) -> Predicate:
        column = self._needed_column(self._only(node, ("this", "expression")).this)
        literal = self._literal(node.expression)
        if literal is not None and not isinstance(literal, bool):
            self._refuse("is not supported: IS is followed by NULL, TRUE, FALSE or DISTINCT FROM")
        return IsNull(column) if literal is None else Compare(column, "<=>", literal)

    def _like(self, node: exp.Expression) -> Predicate:
        escape: Value = "\\"
        if isinstance(node, exp.Escape):
            escape = self._literal(self._only(node, ("this", "expression")).expression)
            node = node.this
        if type(node) is not exp.Like:
            self._refuse("is not supported")
        pattern = self._literal(self._only(node, ("this", "expression")).expression)
        column = self._needed_column(node.this)
        if not isinstance(pattern, str) or not isinstance(escape, str) or len(escape) != 1:
            self._refuse("is not supported: LIKE needs a string, and ESCAPE one character")
        text, is_prefix = self._read_pattern(pattern, escape)
        return Prefix(column, text) if is_prefix else Compare(column, "=", text)

    def _read_pattern(self, pattern: str, escape: str) -> tuple[str, bool]:
        """The text that a LIKE pattern stands for, and whether more may follow it."""
        text: list[str] = []
        letters = iter(pattern)
        for letter in letters:
            if letter == escape:
                escaped = next(letters, "")
                if escaped not in ("%", "_", escape):
                    self._refuse(f"is not supported: {escape} in LIKE stands before %, _ or {escape} only")
                text.append(escaped)
            elif letter == "%" and next(letters, None) is None:
                return "".join(text), True
            elif letter in "%_":
                self._refuse("is not supported: LIKE has one wildcard, a % at the end")
            else:
                text.append(letter)
        return "".join(text), False

    def _starts_with(self, node: exp.Expression) -> Predicate:
        text = self._literal(self._only(node, ("this", "expression")).expression)
        if not isinstance(text, str):
            self._refuse("is not supported: starts_with needs a column and a string")
        return Prefix(self._needed_column(node.this), text)

    def _needed_column(self, node: exp.Expression) -> Path:
        column = self._column(node)
        return self._refuse("does not begin with a column") if column is None else column

    def _column(self, node: exp.Expression) -> Path | None:
        """The path of a column; None for anything else."""
        node = _unwrapped(node)
        fields: list[exp.Expression] = []
        while type(node) is exp.Dot:
            fields.insert(0, node.expression)
            node = _unwrapped(node.this)
        if type(node) is not exp.Column or node.args.get("join_mark"):
            return None
        names = [*(node.args.get(part) for part in ("catalog", "db", "table", "this")), *fields]
        path = tuple(name for name in names if name is not None)
        return (
            tuple(name.name for name in path) if all(type(name) is exp.Identifier for name in path) else None
        )

    def _literal(self, node: exp.Expression) -> Value:
        node = _unwrapped(node)
        match node:
            case exp.Literal():
                return str(node.this) if node.is_string else self._number(str(node.this))
            case exp.Neg():
                value = self._literal(node.this)
                # Not a decimal's minus: it rounds to 28 digits.
                if isinstance(value, Decimal):
                    return value.copy_negate()
                if isinstance(value, int | float) and not isinstance(value, bool):
                    return -value
                self._refuse("negates what is no number")
            case exp.Null():
                return None
            case exp.Boolean():
                return bool(node.this)
            case exp.HexString():
                return self._hex(str(node.this))
            case exp.Cast() if type(node) is exp.Cast:
                return self._cast(node)
        return self._refuse("needs a literal and has something else")

    def _number(self, text: str) -> Value:
        found = _NUMBER.fullmatch(text)
        if found is None or len(text) > 2 * DIGITS_MAX:
            self._refuse(f"holds a number that is not understood or has more than {DIGITS_MAX} digits")
        _, fraction, exponent = found.groups()
        if exponent is None:
            return int(text) if fraction is None else Decimal(text)
        value = float(text)
        return self._refuse("holds a float that is too large") if math.isinf(value) else value

    def _hex(self, digits: str) -> bytes:
        try:
            return bytes.fromhex(digits)
        except ValueError:
            self._refuse("holds an X'…' that is not pairs of hexadecimal digits")

    def _cast(self, node: exp.Expression) -> Value:
        target = self._only(node, ("this", "to")).args["to"]
        text = self._literal(node.this)
        name = target.this.value if not target.expressions else ""
        if not isinstance(text, str) or name not in _CASTS:
            self._refuse("has a CAST other than of a string to DATE, TIME, TIMESTAMP, TIMESTAMPTZ or DOUBLE")
        value = _CASTS[name](text)
        if value is None:
            self._refuse(f"holds {shorten(text)!r}, which is no {name}")
        return value

    def _only(self, node: exp.Expression, known: Collection[str]) -> exp.Expression:
        """``node``, if it says no more than ``known``: sqlglot notes rare clauses as further arguments."""
        if any(value for name, value in node.args.items() if name not in known and name != "negate"):
            self._refuse("is not supported")
        return node

    def _refuse(self, complaint: str) -> NoReturn:
        refuse(f"{self._shown!r} in the filter {complaint}; {SUPPORTED}")


def _unwrapped(node: exp.Expression) -> exp.Expression:
    while type(node) is exp.Paren:
        node = node.this
    return node


def _read_local(text: str) -> Value:
    found = parse_timestamp(text)
    return None if found is None or found.zoned else found


def _read_zoned(text: str) -> Value:
    found = parse_timestamp(text)
    return None if found is None else Timestamp(found.nanos, zoned=True)


def _read_double(text: str) -> Value:
    try:
        return float(text)
    except ValueError:
        return None


_CASTS: Final[dict[str, Callable[[str], Value]]] = {
    "DATE": parse_date,
    "TIME": parse_time,
    "TIMESTAMP": parse_timestamp,
    "DATETIME": parse_timestamp,
    "TIMESTAMPNTZ": _read_local,
    "TIMESTAMPTZ": _read_zoned,
    "TIMESTAMPLTZ": _read_zoned,
    "DOUBLE": _read_double,
}
