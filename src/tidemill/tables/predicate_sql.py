"""SQL text to predicates. The text is read by sqlglot and never run.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, NoReturn

from sqlglot import Dialect, Token, TokenType, exp
from sqlglot import Tokenizer as PlainTokenizer
from sqlglot.errors import SqlglotError

from tidemill.tables.predicate_sql_terms import SUPPORTED, Term
from tidemill.tables.predicate_tree import DEPTH_MAX, TERMS_MAX, Not, Predicate, all_of, any_of
from tidemill.tables.predicate_values import refuse, shorten

__all__ = ("TEXT_BYTES_MAX", "parse_sql")

TEXT_BYTES_MAX: Final = 64 * 1024
#: Brackets inside of one comparison, and words between two of its commas or brackets: more than any needs.
_LEAF_DEPTH_MAX: Final = 8
_LEAF_RUN_MAX: Final = 64
_JOINTS: Final = (TokenType.AND, TokenType.OR, TokenType.R_PAREN)


class _FilterDialect(Dialect):
    """sqlglot's own SQL, with backticks around names and with X'…'."""

    class Tokenizer(PlainTokenizer):
        """See the dialect."""

        IDENTIFIERS: ClassVar[list[str | tuple[str, str]]] = ['"', "`"]
        HEX_STRINGS: ClassVar[list[str | tuple[str, str]]] = [("x'", "'"), ("X'", "'")]


def parse_sql(text: str) -> Predicate:
    """The predicate that ``text``, the condition of a WHERE clause, stands for.

    Raises ``TableError`` for text that is not SQL, or SQL that no filter can be.

    >>> parse_sql("age >= 18 AND name LIKE 'A%'")
    <And "age" >= 18 AND starts_with("name", 'A')>
    """
    if len(text) > TEXT_BYTES_MAX or len(text.encode(errors="replace")) > TEXT_BYTES_MAX:
        refuse(f"the filter is longer than {TEXT_BYTES_MAX} bytes; split the scan")
    dialect = _FilterDialect()
    try:
        found = dialect.tokenize(text)
    except SqlglotError as error:
        refuse(f"the filter is not SQL: {shorten(str(error))}; {SUPPORTED}")
    if not found:
        refuse(f"the filter is empty; leave it out, or write TRUE: {SUPPORTED}")
    return _Reader(text, found, dialect).read()


class _Reader:
    """Takes AND, OR, NOT and brackets apart: two stacks, of operators and of results."""

    def __init__(self, text: str, found: Sequence[Token], dialect: Dialect) -> None:
        self._text = text
        self._tokens = found
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
        """Take the token after a term; answers whether another term must follow."""
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
        """Apply the operators on top that bind more tightly than ``while_above``."""
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
        """Where each opening bracket closes. Refuses what nests too deeply."""
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
        """Whether the bracket holds a predicate: ``(a = 1) AND``, and not a value: ``(a) = 1``."""
        after = self._closing[at] + 1
        return after == len(self._tokens) or self._tokens[after].token_type in _JOINTS

    def _leaf_end(self, start: int) -> int:
        """Where the comparison that begins at ``start`` ends. The AND of a BETWEEN is part of it."""
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


#: How tightly the operators bind; a bracket holds nothing together until it is closed.
_BINDING: Final = {TokenType.L_PAREN: 0, TokenType.OR: 1, TokenType.AND: 2, TokenType.NOT: 3}


def _finish(joint: TokenType | None, terms: list[Predicate]) -> Predicate:
    return any_of(terms) if joint is TokenType.OR else all_of(terms)
