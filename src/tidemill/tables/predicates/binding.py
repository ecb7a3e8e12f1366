"""Predicates bound to a schema: columns are found, literals have the columns' types, constants are gone.

Only TRUE lets a row pass, and binding uses it: NOT is moved down to the leaves, where it turns ``<`` into
``>=``, and after that unknown and false need no telling apart. Every leaf is one kernel over a whole column;
equalities on one column that are joined by OR become one IN.

NaN is as in Spark: equal to itself and greater than every other number. -0.0 equals 0.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa

from tidemill.records.columns import compute as pc
from tidemill.tables.predicates.domains import Domain, Position, Rank, Raw, domain_of
from tidemill.tables.predicates.literals import Value, literal_sql, refuse, shorten
from tidemill.tables.predicates.tree import (
    Always,
    And,
    Compare,
    In,
    IsNull,
    Never,
    Not,
    Or,
    Path,
    Predicate,
    Prefix,
)

__all__ = (
    "BoundColumn",
    "CompareTest",
    "Joined",
    "MemberTest",
    "NullTest",
    "PrefixTest",
    "Test",
    "bind_tree",
    "columns_of",
    "evaluate",
)

_OPPOSITE: Final = {"=": "!=", "!=": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


@dataclass(frozen=True, slots=True)
class BoundColumn:
    """A column of the schema: its top-level name, and the indexes of the fields on the path inside of it."""

    name: str
    fields: tuple[int, ...]
    shown: str = field(compare=False)
    top_type: pa.DataType = field(compare=False)
    data_type: pa.DataType = field(compare=False)
    domain: Domain | None = field(compare=False)

    @property
    def is_float(self) -> bool:
        return self.domain is not None and bool(pa.types.is_floating(self.domain.evaluated))


@dataclass(frozen=True, slots=True)
class CompareTest:
    """``column op raw``. NaN occurs with = and != only."""

    column: BoundColumn
    op: str
    raw: Raw
    scalar: pa.Scalar = field(compare=False)

    def __hash__(self) -> int:
        # Hashes of integers can be made to collide by a client; those of texts have a secret in them.
        return hash((self.column, self.op, repr(self.raw)))

    def run(self, values: pa.Array) -> pa.BooleanArray:
        if not self.column.is_float:
            return _KERNELS[self.op](values, self.scalar)
        if math.isnan(self.raw):
            return pc.is_nan(values) if self.op == "=" else pc.invert(pc.is_nan(values))
        if self.op in (">", ">="):
            # To the kernels NaN is neither greater nor less; here it is greater than all.
            return pc.invert(_KERNELS[_OPPOSITE[self.op]](values, self.scalar))
        return _KERNELS[self.op](values, self.scalar)


@dataclass(frozen=True, slots=True)
class MemberTest:
    """``column`` is one of ``raws``, or none of them if ``negated``. NaN is not among them."""

    column: BoundColumn
    raws: tuple[Raw, ...]
    negated: bool
    value_set: pa.Array = field(compare=False)

    def __hash__(self) -> int:
        return hash((self.column, self.negated, repr(self.raws)))

    def run(self, values: pa.Array) -> pa.BooleanArray:
        found = pc.is_in(values, value_set=self.value_set)
        # The kernel gives false for NULL, and NOT IN must not turn that into true.
        return pc.and_(pc.invert(found), pc.is_valid(values)) if self.negated else found


@dataclass(frozen=True, slots=True)
class NullTest:
    """``column`` is NULL, or is not if ``negated``."""

    column: BoundColumn
    negated: bool

    def run(self, values: pa.Array) -> pa.BooleanArray:
        return pc.is_valid(values) if self.negated else pc.is_null(values)


@dataclass(frozen=True, slots=True)
class PrefixTest:
    """``column`` begins with ``text``, or does not if ``negated``."""

    column: BoundColumn
    text: str
    negated: bool

    def run(self, values: pa.Array) -> pa.BooleanArray:
        found = pc.starts_with(values, self.text)
        return pc.invert(found) if self.negated else found


@dataclass(frozen=True, slots=True)
class Joined:
    """Tests joined by AND if ``all_must``, else by OR; at least two."""

    all_must: bool
    terms: tuple[Test, ...]


Leaf: TypeAlias = CompareTest | MemberTest | NullTest | PrefixTest
#: A bool is a constant: every row passes, or none.
Test: TypeAlias = bool | Leaf | Joined


def bind_tree(predicate: Predicate, schema: pa.Schema) -> Test:
    """Bind a predicate to rows of ``schema``. Raises ``TableError`` if a column or a literal does not fit."""
    return _Binder(schema).bind(predicate, negated=False)


def evaluate(test: Leaf | Joined, batch: pa.RecordBatch) -> pa.BooleanArray:
    """A boolean for each row: true where the predicate is TRUE, false or null elsewhere."""
    return _run(test, batch, {})


def columns_of(test: Test) -> frozenset[str]:
    """The top-level columns that a test reads."""
    if isinstance(test, bool):
        return frozenset()
    if isinstance(test, Joined):
        return frozenset().union(*map(columns_of, test.terms))
    return frozenset((test.column.name,))


class _Binder:
    """Binds one predicate. Each column is looked up once."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._columns: dict[Path, BoundColumn] = {}

    def bind(self, node: Predicate, *, negated: bool) -> Test:
        match node:
            case Always() | Never():
                return isinstance(node, Always) is not negated
            case Not(term):
                return self.bind(term, negated=not negated)
            case And(terms) | Or(terms):
                bound = [self.bind(term, negated=negated) for term in terms]
                return _joined(isinstance(node, And) is not negated, bound)
            case IsNull(path, is_not_null):
                return NullTest(self._find(path), is_not_null is not negated)
            case Compare(path, op, literal):
                return self._compare(self._find(path), op, literal, negated)
            case In(path, values, not_in):
                return self._member(self._find(path), values, not_in is not negated)
            case Prefix(path, text):
                return self._prefix(self._find(path), text, negated)
        raise AssertionError(f"unknown node {type(node).__name__}")

    def _compare(self, column: BoundColumn, op: str, literal: Value, negated: bool) -> Test:
        if op == "<=>":
            return self._null_safe(column, literal, negated)
        position = _position_of(column, literal)
        if position is None:
            return False
        return _comparison(column, _OPPOSITE[op] if negated else op, position)

    def _null_safe(self, column: BoundColumn, literal: Value, negated: bool) -> Test:
        position = _position_of(column, literal)
        if literal is None:
            return NullTest(column, negated)
        if not negated:
            return False if position is None else _comparison(column, "=", position)
        differs = True if position is None else _comparison(column, "!=", position)
        return _joined(False, [NullTest(column, False), differs])

    def _member(self, column: BoundColumn, values: Sequence[Value], negated: bool) -> Test:
        positions = [_position_of(column, value) for value in values]
        if negated and None in positions:
            # A comparison with NULL is unknown, so no row can pass.
            return False
        raws = [
            position.raw for position in positions if position is not None and position.rank is Rank.exact
        ]
        return _member_test(column, raws, negated)

    def _prefix(self, column: BoundColumn, text: str, negated: bool) -> Test:
        if _position_of(column, text) is None:
            return False
        assert column.domain is not None
        if not _is_string(column.domain.evaluated):
            refuse(f"column {column.shown} is {column.data_type}; only a string can start with a text")
        return PrefixTest(column, text, negated)

    def _find(self, path: Path) -> BoundColumn:
        if path not in self._columns:
            self._columns[path] = _find_column(path, self._schema)
        return self._columns[path]


def _position_of(column: BoundColumn, literal: Value) -> Position | None:
    """The literal's position among the column's values; None if comparing them is unknown for every row."""
    if pa.types.is_null(column.data_type):
        return None
    if column.domain is None:
        refuse(
            f"column {column.shown} is {column.data_type}, which cannot be compared; "
            "only IS NULL and IS NOT NULL work on it"
        )
    if literal is None:
        return None
    position = column.domain.position_of(literal)
    if position is None:
        refuse(
            f"column {column.shown} is {column.data_type} and cannot be compared with "
            f"{shorten(literal_sql(literal))}; write a literal of the column's type"
        )
    return position


def _comparison(column: BoundColumn, op: str, position: Position) -> Test:
    """The test ``column op literal`` for a literal at ``position``."""
    if position.rank is Rank.exact:
        return _exact(column, op, position.raw)
    if position.rank is Rank.between and op not in ("=", "!="):
        return _exact(column, "<=" if op in ("<", "<=") else ">", position.raw)
    holds = {Rank.between: ("!=",), Rank.below: (">", ">=", "!="), Rank.above: ("<", "<=", "!=")}
    return NullTest(column, negated=True) if op in holds[position.rank] else False


def _exact(column: BoundColumn, op: str, raw: Raw) -> Test:
    assert column.domain is not None
    if isinstance(raw, float) and math.isnan(raw):
        if op in ("<=", ">"):
            return NullTest(column, negated=True) if op == "<=" else False
        op = {"<": "!=", ">=": "="}.get(op, op)
    return CompareTest(column, op, raw, column.domain.array([raw])[0])


def _member_test(column: BoundColumn, raws: Iterable[Raw], negated: bool) -> Test:
    # By their texts, so that no client can make hashes collide: see ``CompareTest``.
    distinct = list({repr(raw): raw for raw in raws}.values())
    if not distinct:
        return NullTest(column, negated=True) if negated else False
    op = "!=" if negated else "="
    if column.is_float:
        nans = [raw for raw in distinct if math.isnan(raw)]
        if nans:
            numbers = [raw for raw in distinct if not math.isnan(raw)]
            not_a_number = _exact(column, op, nans[0])
            if not numbers:
                return not_a_number
            return Joined(negated, (_member_test(column, numbers, negated), not_a_number))
    if len(distinct) == 1:
        return _exact(column, op, distinct[0])
    assert column.domain is not None
    # The kernel for membership tells -0.0 from 0.0, so both are listed.
    zeros = [0.0, -0.0] if column.is_float and 0.0 in distinct else []
    return MemberTest(column, tuple(distinct), negated, column.domain.array([*distinct, *zeros]))


def _joined(all_must: bool, terms: Iterable[Test]) -> Test:
    """Join terms; drops constants and repetitions, and merges equalities into one membership test."""
    flat: dict[Leaf | int, Leaf | Joined] = {}
    members: dict[BoundColumn, list[Raw]] = {}
    merged_op = "!=" if all_must else "="
    for term in terms:
        if isinstance(term, bool):
            if term is not all_must:
                return term
            continue
        inner = term.terms if isinstance(term, Joined) and term.all_must is all_must else (term,)
        for each in inner:
            match each:
                case CompareTest(column, op, raw) if op == merged_op:
                    members.setdefault(column, []).append(raw)
                case MemberTest(column, raws, negated) if negated is all_must:
                    members.setdefault(column, []).extend(raws)
                case bool():
                    raise AssertionError("a constant inside of a joined test")
                case _:
                    # Joined tests count as different: comparing them would cost again at each level above.
                    flat[id(each) if isinstance(each, Joined) else each] = each
    tests: list[Test] = [_member_test(column, raws, all_must) for column, raws in members.items()]
    tests += flat.values()
    if not tests:
        return all_must
    return tests[0] if len(tests) == 1 else Joined(all_must, tuple(tests))


def _find_column(path: Path, schema: pa.Schema) -> BoundColumn:
    shown = shorten(".".join(path))
    number = _find_field(path[0], list(schema.names), shown, "the table")
    top = schema.field(number)
    data_type = top.type
    numbers: list[int] = []
    for depth, name in enumerate(path[1:], 1):
        owner = shorten(".".join(path[:depth]))
        if not pa.types.is_struct(data_type):
            refuse(f"column {shown} does not exist: {owner} is {data_type} and has no fields")
        names = [data_type.field(index).name for index in range(data_type.num_fields)]
        numbers.append(_find_field(name, names, shown, owner))
        data_type = data_type.field(numbers[-1]).type
    return BoundColumn(top.name, tuple(numbers), shown, top.type, data_type, domain_of(data_type))


def _find_field(name: str, names: Sequence[str], shown: str, owner: str) -> int:
    found = [index for index, each in enumerate(names) if each == name]
    if not found:
        folded = name.casefold()
        found = [index for index, each in enumerate(names) if each.casefold() == folded]
    if len(found) > 1:
        refuse(
            f"column {shown} is ambiguous: {owner} has {shorten(', '.join(names[index] for index in found))}"
        )
    if not found:
        refuse(f"column {shown} does not exist: {owner} has {shorten(', '.join(names)) or 'no columns'}")
    return found[0]


def _is_string(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))


def _run(test: Test, batch: pa.RecordBatch, read: dict[BoundColumn, pa.Array]) -> pa.BooleanArray:
    assert not isinstance(test, bool)
    if not isinstance(test, Joined):
        return test.run(_values(test.column, batch, read))
    join = pc.and_kleene if test.all_must else pc.or_kleene
    result = _run(test.terms[0], batch, read)
    for term in test.terms[1:]:
        if result.true_count == (0 if test.all_must else len(result)):
            break
        result = join(result, _run(term, batch, read))
    return result


def _values(column: BoundColumn, batch: pa.RecordBatch, read: dict[BoundColumn, pa.Array]) -> pa.Array:
    """The column's values in the type that kernels compare."""
    if column not in read:
        values = batch.column(column.name)
        assert values.type == column.top_type, f"{column.name} is {values.type}, bound as {column.top_type}"
        if column.fields:
            # A field is null where the struct around it is null.
            values = pc.struct_field(values, list(column.fields))
        if column.domain is not None and values.type != column.domain.evaluated:
            values = values.cast(column.domain.evaluated)
        read[column] = values
    return read[column]
