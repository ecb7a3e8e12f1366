"""Predicates: the filters of table scans, which say which rows pass.

A predicate is a tree of frozen values. It is made from SQL (``sql.parse_sql``), from a pyarrow
expression (``arrow.from_arrow``), from bytes (``wire.decode``), or by hand. It knows no schema until
``bind`` gives it one.

- SQL's logic of three values: comparing with NULL is unknown, and a row passes if the predicate is TRUE.
- Limits hold for every tree, wherever it comes from: 64 levels of AND, OR and NOT, 10,000 values and 10,000
  parts.
- Whatever is wrong with a predicate is a ``TableError`` with ``TableCode.invalid_predicate``.

>>> rows = pa.record_batch({"age": [17, 18, None], "name": ["Ada", "Ann", "Al"]})
>>> bind(And((Compare(("age",), ">=", 18), Prefix(("name",), "A"))), rows.schema).mask(rows).to_pylist()
[False, True, False]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import pyarrow as pa

from tidemill.tables.predicates.binding import Test, bind_tree, columns_of, evaluate
from tidemill.tables.predicates.bounds import Bound, KeyBounds, key_bounds_of
from tidemill.tables.predicates.literals import TimeOfDay, Timestamp, Value
from tidemill.tables.predicates.tree import (
    DEPTH_MAX,
    LITERALS_MAX,
    OPERATORS,
    TERMS_MAX,
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
    all_of,
    any_of,
    to_sql,
)
from tidemill.tables.predicates.wire import ENCODED_BYTES_MAX, decode, encode

__all__ = (
    "DEPTH_MAX",
    "ENCODED_BYTES_MAX",
    "LITERALS_MAX",
    "OPERATORS",
    "TERMS_MAX",
    "Always",
    "And",
    "Bound",
    "BoundPredicate",
    "Compare",
    "In",
    "IsNull",
    "KeyBounds",
    "Never",
    "Not",
    "Or",
    "Path",
    "Predicate",
    "Prefix",
    "TimeOfDay",
    "Timestamp",
    "Value",
    "all_of",
    "any_of",
    "bind",
    "decode",
    "encode",
    "to_sql",
)


class BoundPredicate:
    """A predicate bound to rows of one schema, made by ``bind``. Immutable: threads may share it."""

    def __init__(self, predicate: Predicate, test: Test) -> None:
        self.predicate = predicate
        self._test = test

    @cached_property
    def columns(self) -> frozenset[str]:
        """The top-level columns that ``mask`` reads; a batch may leave out all others."""
        return columns_of(self._test)

    def mask(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        """A boolean for each row, without nulls: whether the row passes."""
        if isinstance(self._test, bool):
            return pa.repeat(pa.scalar(self._test), batch.num_rows)
        passed = evaluate(self._test, batch)
        return passed.fill_null(False) if passed.null_count else passed

    def key_bounds(self, primary_key: Sequence[str]) -> KeyBounds | None:
        """The range of keys outside of which no row passes; None if the predicate does not narrow it.

        Rows inside of the range need not pass: ``mask`` decides.
        """
        return key_bounds_of(self._test, primary_key)

    def __repr__(self) -> str:
        return f"<BoundPredicate {to_sql(self.predicate)}>"


def bind(predicate: Predicate, schema: pa.Schema) -> BoundPredicate:
    """Bind the predicate to rows of ``schema``.

    A column is found by its exact name, else by its name in any case if only one has it. Literals become
    values of the columns' types as SQL compares them; see ``domains.py``. Raises ``TableError`` if a
    column does not exist, is ambiguous, or cannot be compared with its literal.
    """
    return BoundPredicate(predicate, bind_tree(predicate, schema))
