"""What the system tests of tables share: settings under which everything happens soon, names, and rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

__all__ = ("SOON", "by_key", "new_name", "records_of", "rows_of")

#: Snapshots, leases and compaction are looked at all the time.
SOON: dict[str, Any] = {"kv_check_interval_ms": 100, "compaction_check_interval_ms": 100}

_numbers = itertools.count()


def new_name(word: str) -> str:
    """A table's name that no other test of this process uses."""
    return f"test.{word}_{next(_numbers)}"


def rows_of(found: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows in the order of all their values, so that two sets of rows can be compared."""
    return sorted(found.to_pylist(), key=lambda row: [repr(row[name]) for name in found.schema.names])


def by_key(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows by the values of some columns; no key may come twice."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        assert key not in found, f"{key} is there twice"
        found[key] = dict(row)
    return found


def records_of(follow: Any) -> list[tuple[str, int, int, str, dict[str, Any]]]:
    """All changes of a ``follow`` that comes to an end: topic, bucket, offset, what happened, the row."""
    return [
        (batch.topic, change.bucket, change.offset, change.op, change.row)
        for batch in follow
        for change in batch
    ]
