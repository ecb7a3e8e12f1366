"""What a filter says about the key: the range of state keys in which all rows that pass must be."""

from __future__ import annotations

from tidemill.tables.definition import TableDefinition
from tidemill.tables.predicate import Predicate, bind

__all__ = ("key_bounds",)


def key_bounds(table: TableDefinition, predicate: Predicate) -> tuple[bytes | None, bytes | None]:
    """From where on, and up to where; None is open. Raises ``TableError`` for a filter that does not fit the
    table.
    """
    bounds = bind(predicate, table.schema).key_bounds(table.primary_key)
    if bounds is None:
        return None, None
    if bounds.empty:
        return b"", b""
    keys, equal = table.keys, list(bounds.equal)
    start, end = keys.prefix_bounds(equal) if equal else (None, None)
    if bounds.lower is not None:
        values = [*equal, bounds.lower.value]
        start = keys.bound(values) if bounds.lower.inclusive else keys.prefix_bounds(values)[1]
        if start is None:
            return b"", b""  # Nothing lies above the largest key.
    if bounds.upper is not None:
        values = [*equal, bounds.upper.value]
        end = keys.prefix_bounds(values)[1] if bounds.upper.inclusive else keys.bound(values)
    return start, end
