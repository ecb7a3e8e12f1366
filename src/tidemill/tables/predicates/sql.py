"""From SQL text to predicates. The text is read by sqlglot and never run.

Supported are ``=``, ``<>``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, ``<=>``, IS [NOT] DISTINCT FROM, IS [NOT]
NULL, TRUE and FALSE, [NOT] IN, [NOT] BETWEEN, [NOT] LIKE with a text or ``'text%'``, ``starts_with``, a
boolean column alone, AND, OR, NOT and brackets; one side of a comparison is a column, the other a literal.
Strings are in single quotes, which are doubled inside; names may be in ``"`` or backticks; a backslash
escapes in LIKE only.

| literal | type |
| --- | --- |
| ``1`` · ``1.5`` · ``15e-1`` | integer · decimal · float |
| ``TRUE`` · ``NULL`` · ``'text'`` · ``X'00ff'`` | as written |
| ``DATE '…'`` · ``TIME '…'`` · ``TIMESTAMP '…'`` · ``TIMESTAMPTZ '…'`` | also as ``CAST('…' AS …)`` |
| ``CAST('NaN' AS DOUBLE)`` | float |

sqlglot descends about twenty Python frames for each bracket, so it is given one comparison at a time: AND,
OR, NOT and the brackets around them are taken apart here, with a stack on the heap.
Anything that is not known is refused, also what sqlglot notes beside a node that is known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from decimal import Decimal
from typing import ClassVar, Final, NoReturn

from sqlglot import Dialect, Token, TokenType, exp
from sqlglot import Tokenizer as PlainTokenizer
from sqlglot.errors import SqlglotError

from tidemill.tables.predicates.literals import (
    DIGITS_MAX,
    Timestamp,
    Value,
    parse_date,
    parse_time,
    parse_timestamp,
    refuse,
    shorten,
)
from tidemill.tables.predicates.tree import (
    DEPTH_MAX,
    TERMS_MAX,
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

__all__ = (
    "SUPPORTED",
    "TEXT_BYTES_MAX",
    "Term",
    "parse_sql",
)

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
        """The node. For NOT IN, IS NOT NULL and the like, a negated node or a NOT around it."""
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
            self._refuse("compares two columns, which is not supported (text has single quotes: 'eu')")
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
                # Not the decimal's own minus, which rounds to 28 digits.
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
        """Return ``node`` unless it has arguments beyond ``known``: sqlglot notes rare clauses in them."""
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


TEXT_BYTES_MAX: Final = 64 * 1024
#: Limits inside of one comparison: nested brackets, and words between two commas or brackets.
_LEAF_DEPTH_MAX: Final = 8
_LEAF_RUN_MAX: Final = 64
_JOINTS: Final = (TokenType.AND, TokenType.OR, TokenType.R_PAREN)


class _FilterDialect(Dialect):
    """sqlglot's own SQL, with names in backticks and hexadecimal strings."""

    class Tokenizer(PlainTokenizer):
        """The tokens of that dialect."""

        IDENTIFIERS: ClassVar[list[str | tuple[str, str]]] = ['"', "`"]
        HEX_STRINGS: ClassVar[list[str | tuple[str, str]]] = [("x'", "'"), ("X'", "'")]


def parse_sql(text: str) -> Predicate:
    """Parse ``text``, the condition of a WHERE clause.

    Raises ``TableError`` for text that is not SQL, or SQL that no filter can be.

    >>> parse_sql("age >= 18 AND name LIKE 'A%'")
    <And "age" >= 18 AND starts_with("name", 'A')>
    """
    if len(text) > TEXT_BYTES_MAX or len(text.encode(errors="replace")) > TEXT_BYTES_MAX:
        refuse(f"the filter is longer than {TEXT_BYTES_MAX} bytes; split the scan")
    dialect = _FilterDialect()
    try:
        tokens = dialect.tokenize(text)
    except SqlglotError as error:
        refuse(f"the filter is not SQL: {shorten(str(error))}; {SUPPORTED}")
    if not tokens:
        refuse(f"the filter is empty; leave it out, or write TRUE: {SUPPORTED}")
    return _Reader(text, tokens, dialect).read()


class _Reader:
    """Parses AND, OR, NOT and brackets with two stacks: one of operators, one of results."""

    def __init__(self, text: str, tokens: Sequence[Token], dialect: Dialect) -> None:
        self._text = text
        self._tokens = tokens
        self._parser = dialect.parser()
        self._closing = self._match_brackets()
        self._operators: list[TokenType] = []
        # Each result is a list of terms with the operator that joins them, so that long chains stay flat.
        self._results: list[tuple[TokenType | None, list[Predicate]]] = []
        self._terms = 0

    def read(self) -> Predicate:
        at, wants_term = 0, True
        while at < len(self._tokens):
            kind = self._tokens[at].token_type
            if not wants_term:
                wants_term = self._join(at)
                at += 1
            elif kind is TokenType.NOT or (kind is TokenType.L_PAREN and self._is_group(at)):
                self._operators.append(kind)
                at += 1
            else:
                end = self._leaf_end(at)
                self._results.append((None, [self._leaf(at, end)]))
                at, wants_term = end, False
        if wants_term:
            self._refuse(len(self._tokens) - 1, len(self._tokens), "a comparison is missing after")
        self._reduce(while_above=0)
        return _finish(*self._results.pop())

    def _join(self, at: int) -> bool:
        """Take the token after a term; True if another term must follow."""
        kind = self._tokens[at].token_type
        if kind is TokenType.R_PAREN:
            self._reduce(while_above=0)
            if not self._operators:
                self._refuse(at, at + 1, "there is no opening bracket for")
            self._operators.pop()
            return False
        if kind not in (TokenType.AND, TokenType.OR):
            self._refuse(at, len(self._tokens), "AND or OR is missing before")
        self._reduce(while_above=1 if kind is TokenType.AND else 0)
        self._operators.append(kind)
        return True

    def _reduce(self, *, while_above: int) -> None:
        """Apply the operators on top of the stack that bind more tightly than ``while_above``."""
        while self._operators and _BINDING[self._operators[-1]] > while_above:
            kind = self._operators.pop()
            last = self._results.pop()
            if kind is TokenType.NOT:
                self._results.append((None, [Not(_finish(*last))]))
                continue
            joint, terms = self._results.pop()
            if joint is not kind:
                terms = [_finish(joint, terms)]
            terms += last[1] if last[0] is kind else [_finish(*last)]
            self._results.append((kind, terms))

    def _match_brackets(self) -> dict[int, int]:
        """The position of each bracket's closing bracket. Refuses what nests too deeply."""
        closing: dict[int, int] = {}
        opened: list[int] = []
        for at, token in enumerate(self._tokens):
            if token.token_type is TokenType.L_PAREN:
                opened.append(at)
                if len(opened) > DEPTH_MAX:
                    self._refuse(at, len(self._tokens), f"brackets nest deeper than {DEPTH_MAX} at")
            elif token.token_type is TokenType.R_PAREN:
                if not opened:
                    self._refuse(at, len(self._tokens), "there is no opening bracket for")
                closing[opened.pop()] = at
        if opened:
            self._refuse(opened[-1], len(self._tokens), "there is no closing bracket for")
        return closing

    def _is_group(self, at: int) -> bool:
        """Whether the bracket holds a predicate, as ``(a = 1) AND``, and not a value, as ``(a) = 1``."""
        after = self._closing[at] + 1
        return after == len(self._tokens) or self._tokens[after].token_type in _JOINTS

    def _leaf_end(self, start: int) -> int:
        """The end of the comparison that begins at ``start``. The AND of a BETWEEN is part of it."""
        at, depth, run, between = start, 0, 0, False
        while at < len(self._tokens):
            kind = self._tokens[at].token_type
            if not depth and kind in _JOINTS and not (kind is TokenType.AND and between):
                break
            if not depth and kind in (TokenType.BETWEEN, TokenType.AND):
                between = kind is TokenType.BETWEEN
            depth += (kind is TokenType.L_PAREN) - (kind is TokenType.R_PAREN)
            run = 0 if kind in (TokenType.L_PAREN, TokenType.R_PAREN, TokenType.COMMA) else run + 1
            if depth > _LEAF_DEPTH_MAX or run > _LEAF_RUN_MAX:
                self._refuse(start, at + 1, "this is too long or too deep for a comparison:")
            at += 1
        if at == start:
            self._refuse(at, at + 1, "a comparison is missing before")
        return at

    def _leaf(self, start: int, end: int) -> Predicate:
        self._terms += 1
        # Checked before sqlglot spends time on them; the tree checks again.
        if self._terms > TERMS_MAX:
            refuse(f"the filter has more than {TERMS_MAX} comparisons; split the scan")
        shown = self._shown(start, end)
        part = list(self._tokens[start:end])
        if any(each.token_type is TokenType.HEX_STRING and self._text[each.start] == "0" for each in part):
            refuse(f"{shown!r} in the filter holds a 0x number, which is bytes to some; write X'…' for bytes")
        try:
            parsed = self._parser.parse_into(exp.Condition, part, self._text)
        except (SqlglotError, RecursionError):
            refuse(f"{shown!r} in the filter is not understood; {SUPPORTED}")
        if len(parsed) != 1 or not isinstance(parsed[0], exp.Expression):
            refuse(f"{shown!r} in the filter is not one condition; {SUPPORTED}")
        return Term(shown).read(parsed[0])

    def _shown(self, start: int, end: int) -> str:
        last = self._tokens[end - 1]
        return shorten(self._text[self._tokens[start].start : last.end + 1])

    def _refuse(self, start: int, end: int, complaint: str) -> NoReturn:
        refuse(f"{complaint} {self._shown(start, end)!r} in the filter; {SUPPORTED}")


#: How tightly operators bind. An open bracket binds least: nothing is joined across it.
_BINDING: Final = {TokenType.L_PAREN: 0, TokenType.OR: 1, TokenType.AND: 2, TokenType.NOT: 3}


def _finish(joint: TokenType | None, terms: list[Predicate]) -> Predicate:
    return any_of(terms) if joint is TokenType.OR else all_of(terms)
