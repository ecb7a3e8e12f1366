"""Spark's filters as predicates for the server.

The server leaves out what cannot pass; Spark looks at the rest once more. So a filter is only sent where no
row that Spark would keep is lost: comparisons of floating point columns are sent where NaN, which Spark takes
for the largest number, makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import datasource as spark

from tidemill.errors import TableError
from tidemill.tables.predicates.predicate import Compare, In, IsNull, Not, Predicate, Prefix, all_of, bind

__all__ = ("to_predicate",)

_COMPARISONS: Final[dict[type[Any], str]] = {
    spark.EqualTo: "=",
    spark.EqualNullSafe: "<=>",
    spark.LessThan: "<",
    spark.LessThanOrEqual: "<=",
    spark.GreaterThan: ">",
    spark.GreaterThanOrEqual: ">=",
}
_SAFE_WITH_NAN: Final = frozenset({"=", "<", "<="})


def to_predicate(filters: Sequence[Any], schema: pa.Schema) -> Predicate | None:
    """The predicate for the part of ``filters`` that the server can check; None if there is none."""
    parts = [part for each in filters if (part := _translated(each, schema)) is not None]
    return all_of(parts) if parts else None


def _translated(given: Any, schema: pa.Schema) -> Predicate | None:
    try:
        predicate = _predicate(given, schema)
        if predicate is not None:
            bind(predicate, schema)
    except TableError:
        # A type or a value that cannot be compared on the server.
        return None
    return predicate


def _predicate(given: Any, schema: pa.Schema) -> Predicate | None:
    if isinstance(given, spark.Not):
        if _has_floats(getattr(given.child, "attribute", ()), schema):
            return None
        inner = _predicate(given.child, schema)
        return None if inner is None else Not(inner)
    if isinstance(given, spark.IsNull):
        return IsNull(given.attribute)
    if isinstance(given, spark.IsNotNull):
        return IsNull(given.attribute, negated=True)
    if isinstance(given, spark.StringStartsWith):
        return Prefix(given.attribute, given.value)
    if isinstance(given, spark.In):
        if any(_is_nan(value) for value in given.value):
            return None
        return In(given.attribute, tuple(given.value))
    operator = _COMPARISONS.get(type(given))
    if operator is None or _is_nan(given.value):
        return None
    if operator not in _SAFE_WITH_NAN and _has_floats(given.attribute, schema):
        return None
    return Compare(given.attribute, operator, given.value)


def _has_floats(path: Sequence[str], schema: pa.Schema) -> bool:
    """Whether the column, or the field of a struct, has floating point numbers; also if it is not there."""
    fields: Any = schema
    for name in path:
        index = fields.get_field_index(name)
        if index < 0:
            return True
        fields = fields.field(index).type
    return not path or pa.types.is_floating(fields)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)
