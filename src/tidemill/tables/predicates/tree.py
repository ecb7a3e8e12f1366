"""Predicates as trees of values. ``predicates/predicate.py`` has their meaning and their limits.

A node checks itself and the limits when it is made, so whatever walks a tree may recurse. ``And`` holds no
``And`` and ``Or`` no ``Or``: they are taken apart, so one predicate has one tree however it was bracketed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from tidemill.tables.predicates.literals import (
    Value,
    checked_text,
    literal_key,
    literal_of,
    literal_sql,
    quote_text,
    refuse,
    shorten,
)

__all__ = (
    "DEPTH_MAX",
    "LITERALS_MAX",
    "OPERATORS",
    "TERMS_MAX",
    "Always",
    "And",
    "Compare",
    "In",
    "IsNull",
    "Never",
    "Not",
    "Or",
    "Path",
    "Predicate",
    "Prefix",
    "all_of",
    "any_of",
    "to_sql",
)

#: How deeply AND, OR and NOT may nest.
DEPTH_MAX: Final = 64
#: The most values in one predicate, and the most parts that are joined by AND and OR.
LITERALS_MAX: Final = 10_000
TERMS_MAX: Final = 10_000
OPERATORS: Final = ("=", "!=", "<", "<=", ">", ">=", "<=>")

#: A column, or a field of a struct: ("address", "city").
Path: TypeAlias = tuple[str, ...]


class Size(NamedTuple):
    """The size of a tree, in the quantities that are limited."""

    depth: int
    terms: int
    literals: int


class Predicate:
    """Base of all nodes. ``str`` gives SQL."""

    __slots__ = ()

    size: Size

    def _parts(self) -> tuple[object, ...]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._parts()))

    def __str__(self) -> str:
        return to_sql(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {to_sql(self)}>"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Compare(Predicate):
    """``column op literal``. Unknown if either is NULL, except for ``<=>``, for which NULL equals NULL.

    >>> str(Compare(("address", "city"), "=", "Rome"))
    '"address"."city" = \\'Rome\\''
    """

    column: Path
    op: str
    literal: Value
    size: Size = field(init=False, default=Size(0, 1, 1))

    def __post_init__(self) -> None:
        _set(self, "column", _checked_path(self.column))
        _set(self, "literal", literal_of(self.literal))
        if self.op not in OPERATORS:
            refuse(f"{self.op!r} is no comparison; use one of {' '.join(OPERATORS)}")

    def _parts(self) -> tuple[object, ...]:
        return self.column, self.op, literal_key(self.literal)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class In(Predicate):
    """``column IN (values)``, or NOT IN. At least one value; if one is NULL, no match means unknown."""

    column: Path
    values: tuple[Value, ...]
    negated: bool = False
    size: Size = field(init=False)

    def __post_init__(self) -> None:
        _set(self, "column", _checked_path(self.column))
        _check_limits(Size(0, 1, len(self.values)))
        _set(self, "values", tuple(map(literal_of, self.values)))
        if not self.values:
            refuse(f"IN on column {_path_sql(self.column)} has no values; give it at least one")
        _set(self, "size", Size(0, 1, len(self.values)))

    def _parts(self) -> tuple[object, ...]:
        return self.column, tuple(map(literal_key, self.values)), self.negated


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IsNull(Predicate):
    """``column IS NULL``, or IS NOT NULL. Never unknown; the only test for lists, maps and whole structs."""

    column: Path
    negated: bool = False
    size: Size = field(init=False, default=Size(0, 1, 0))

    def __post_init__(self) -> None:
        _set(self, "column", _checked_path(self.column))

    def _parts(self) -> tuple[object, ...]:
        return self.column, self.negated


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Prefix(Predicate):
    """The string in ``column`` begins with ``text``."""

    column: Path
    text: str
    size: Size = field(init=False, default=Size(0, 1, 1))

    def __post_init__(self) -> None:
        _set(self, "column", _checked_path(self.column))
        checked_text(self.text)

    def _parts(self) -> tuple[object, ...]:
        return self.column, self.text


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class And(Predicate):
    """True if all of ``terms`` are; at least two."""

    terms: tuple[Predicate, ...]
    size: Size = field(init=False)

    def __post_init__(self) -> None:
        _join(self, self.terms)

    def _parts(self) -> tuple[object, ...]:
        return self.terms


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Or(Predicate):
    """True if any of ``terms`` is; at least two."""

    terms: tuple[Predicate, ...]
    size: Size = field(init=False)

    def __post_init__(self) -> None:
        _join(self, self.terms)

    def _parts(self) -> tuple[object, ...]:
        return self.terms


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Not(Predicate):
    """True where ``term`` is false, unknown where it is unknown."""

    term: Predicate
    size: Size = field(init=False)

    def __post_init__(self) -> None:
        _set(self, "size", _sum_up((self.term,)))

    def _parts(self) -> tuple[object, ...]:
        return (self.term,)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Always(Predicate):
    """The constant TRUE."""

    size: Size = field(init=False, default=Size(0, 1, 0))

    def _parts(self) -> tuple[object, ...]:
        return ()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Never(Predicate):
    """The constant FALSE."""

    size: Size = field(init=False, default=Size(0, 1, 0))

    def _parts(self) -> tuple[object, ...]:
        return ()


def all_of(terms: Iterable[Predicate]) -> Predicate:
    """The terms joined by AND: ``Always`` for none, the term itself for one."""
    listed = tuple(terms)
    return And(listed) if len(listed) > 1 else listed[0] if listed else Always()


def any_of(terms: Iterable[Predicate]) -> Predicate:
    """The terms joined by OR: ``Never`` for none, the term itself for one."""
    listed = tuple(terms)
    return Or(listed) if len(listed) > 1 else listed[0] if listed else Never()


def to_sql(predicate: Predicate) -> str:
    """The predicate as SQL that ``parse_sql`` turns into the same tree.

    >>> to_sql(Not(And((Compare(("a",), "<", 3), IsNull(("b",))))))
    'NOT ("a" < 3 AND "b" IS NULL)'
    """
    match predicate:
        case And(terms):
            return " AND ".join(map(_bracketed, terms))
        case Or(terms):
            return " OR ".join(map(_bracketed, terms))
        case Not(term):
            return f"NOT ({to_sql(term)})"
    return _LEAVES[type(predicate)](predicate)


def _bracketed(term: Predicate) -> str:
    return f"({to_sql(term)})" if isinstance(term, And | Or) else to_sql(term)


def _compare_sql(leaf: Compare) -> str:
    op = {"!=": "<>", "<=>": "IS NOT DISTINCT FROM"}.get(leaf.op, leaf.op)
    return f"{_path_sql(leaf.column)} {op} {literal_sql(leaf.literal)}"


def _in_sql(leaf: In) -> str:
    op = "NOT IN" if leaf.negated else "IN"
    return f"{_path_sql(leaf.column)} {op} ({', '.join(map(literal_sql, leaf.values))})"


def _null_sql(leaf: IsNull) -> str:
    return f"{_path_sql(leaf.column)} {'IS NOT NULL' if leaf.negated else 'IS NULL'}"


def _prefix_sql(leaf: Prefix) -> str:
    return f"starts_with({_path_sql(leaf.column)}, {quote_text(leaf.text)})"


_LEAVES: Final[dict[type[Predicate], Callable[..., str]]] = {
    Compare: _compare_sql,
    In: _in_sql,
    IsNull: _null_sql,
    Prefix: _prefix_sql,
    Always: lambda _: "TRUE",
    Never: lambda _: "FALSE",
}


def _path_sql(path: Path) -> str:
    # Always quoted, because readers of SQL differ in their keywords.
    return ".".join('"' + name.replace('"', '""') + '"' for name in path)


def _checked_path(path: object) -> Path:
    # A text is refused, because it would be taken for a tuple of letters.
    if not isinstance(path, tuple | list) or not 1 <= len(path) <= DEPTH_MAX:
        refuse(f"a column is a tuple of 1 to {DEPTH_MAX} names, outermost first, not {shorten(repr(path))}")
    for name in path:
        if not isinstance(name, str) or not checked_text(name):
            refuse(f"a name of a column must be text and not empty, not {shorten(repr(name))}")
    return tuple(path)


def _join(node: And | Or, given: tuple[Predicate, ...]) -> None:
    kind = type(node)
    terms: list[Predicate] = []
    for term in given:
        terms += term.terms if isinstance(term, kind) else (term,)
    if len(terms) < 2:
        refuse(f"{kind.__name__.upper()} joins at least two predicates, and was given {len(terms)}")
    _set(node, "terms", tuple(terms))
    _set(node, "size", _sum_up(terms))


def _sum_up(terms: Iterable[Predicate]) -> Size:
    depth = count = literals = 0
    for term in terms:
        if not isinstance(term, Predicate):
            refuse(f"a predicate is made of predicates, and was given a {type(term).__name__}")
        depth = max(depth, term.size.depth)
        count += term.size.terms
        literals += term.size.literals
    return _check_limits(Size(depth + 1, count, literals))


def _check_limits(size: Size) -> Size:
    for number, limit, what in (
        (size.depth, DEPTH_MAX, "levels of AND, OR and NOT"),
        (size.terms, TERMS_MAX, "comparisons and other parts"),
        (size.literals, LITERALS_MAX, "values"),
    ):
        if number > limit:
            refuse(f"the predicate has {number} {what}, and {limit} are allowed; split the scan")
    return size


def _set(node: Predicate, name: str, value: object) -> None:
    object.__setattr__(node, name, value)
