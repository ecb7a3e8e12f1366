"""Checks and converts the arguments of a table's methods: keys, prefixes, ranges, filters."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

from tidemill.client.arguments import optional_text, shown, whole
from tidemill.errors import ConfigError, TableCode, TableError
from tidemill.records.columns import compute as pc
from tidemill.tables.definition import TableDefinition

if TYPE_CHECKING:
    from tidemill.tables.predicates.predicate import Predicate

__all__ = (
    "Key",
    "Keys",
    "Row",
    "both_ends",
    "bound",
    "check_offsets",
    "is_single_key",
    "key_bounds",
    "lease_id_of",
    "narrowed",
    "prefix_values",
    "to_predicate",
    "whole_number",
)

_PAIR = 2


class _ArrowStream(Protocol):
    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


class _ArrowArray(Protocol):
    def __arrow_c_array__(self, requested_schema: object = None) -> object: ...


Row = dict[str, Any]
"""A row: its values by column."""

Key = Mapping[str, Any] | tuple[Any, ...] | str | bytes | SupportsIndex | date | Decimal
"""One key: a value, or a tuple or dict of the values of all key columns."""

Keys = Iterable[Any] | _ArrowStream | _ArrowArray
"""Several keys: a list (or any other iterable) of them, or the key columns as Arrow, pandas or polars."""


def is_single_key(keys: Any) -> bool:
    """Whether ``keys`` is one key rather than several."""
    if isinstance(keys, Mapping | tuple | str | bytes):
        return True
    return not (
        hasattr(keys, "__arrow_c_stream__") or hasattr(keys, "__arrow_c_array__") or hasattr(keys, "__iter__")
    )


def whole_number(name: str, value: Any, least: int, code: TableCode = TableCode.invalid_scan_request) -> int:
    """``value`` as an int of at least ``least``. Raises ``TableError`` for anything else."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise TableError(code, f"{name} is a whole number of at least {least}, not {value!r}")
    return number


def prefix_values(prefix: Any, primary_key: Sequence[str]) -> list[Any]:
    """The values of the first key columns: a tuple, a dict, or the first one's value alone."""
    if isinstance(prefix, Mapping):
        names = list(primary_key[: len(prefix)])
        if set(names) != set(prefix):
            raise TableError(
                TableCode.key_refused,
                f"a prefix of the key is {', '.join(primary_key)} from the left, not "
                f"{', '.join(map(str, prefix))}",
            )
        return [prefix[name] for name in names]
    return list(prefix) if isinstance(prefix, tuple | list) else [prefix]


def both_ends(key_range: Any) -> tuple[Any, Any]:
    """The two keys of a range. Raises ``TableError`` if it is no pair."""
    if isinstance(key_range, tuple | list) and len(key_range) == _PAIR:
        return key_range[0], key_range[1]
    raise TableError(
        TableCode.key_refused,
        "a range of keys is a pair: from a key, up to but without another, None is open; it cannot be "
        f"{key_range!r}",
    )


def check_offsets(name: str, offsets: Any) -> None:
    """Raise an error unless ``offsets`` are whole numbers by pairs of a topic and a bucket, or None."""
    if offsets is None:
        return
    if not isinstance(offsets, Mapping):
        raise ConfigError(
            f"{name} is offsets by (topic, bucket), as log_offsets of a scan or a lease has them, not "
            f"{shown(offsets)}"
        )
    for bucket, offset in offsets.items():
        if not isinstance(bucket, tuple) or len(bucket) != _PAIR:
            raise TableError(
                TableCode.bucket_not_found,
                "offsets are by (topic, bucket), as log_offsets of a scan or a lease has them, not by "
                f"{bucket!r}",
            )
        whole(f"the offset of {bucket} in {name}", offset, least=0)


def lease_id_of(lease: Any) -> str | None:
    """The id of a lease that a caller names by id or by object. Raises ``ConfigError``."""
    lease_id = lease if lease is None or isinstance(lease, str) else getattr(lease, "lease_id", lease)
    return optional_text("lease, a lease or its id,", lease_id)


def bound(definition: TableDefinition, key: Any) -> bytes | None:
    """The state key at one end of a range; None for an open end."""
    return None if key is None else definition.keys.bound(prefix_values(key, definition.primary_key))


def to_predicate(where: Any) -> Predicate:
    """A predicate from SQL text, a pyarrow expression, or one that is ready."""
    if isinstance(where, str):
        from tidemill.tables.predicates.sql import parse_sql

        return parse_sql(where)
    if isinstance(where, pc.Expression):
        from tidemill.tables.predicates.arrow import from_arrow

        return from_arrow(where)
    from tidemill.tables.predicates.predicate import Predicate

    if not isinstance(where, Predicate):
        raise TableError(
            TableCode.invalid_predicate,
            f"a filter is SQL text or a pyarrow expression, not {where!r:.60}",
        )
    return where


def narrowed(
    definition: TableDefinition, predicate: Predicate, start: bytes | None, end: bytes | None
) -> tuple[bytes | None, bytes | None]:
    """The part of a range of keys in which rows can pass ``predicate``. Raises for a wrong predicate."""
    low, high = key_bounds(definition, predicate)
    start = low if start is None else max(start, low or b"")
    if end is None or (high is not None and high < end):
        end = high
    return start, end


def key_bounds(table: TableDefinition, predicate: Predicate) -> tuple[bytes | None, bytes | None]:
    """The range of state keys in which all rows that pass a filter are; None is open.

    Raises ``TableError`` for a filter that does not fit the table.
    """
    from tidemill.tables.predicates.predicate import bind

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
