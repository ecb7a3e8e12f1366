"""A table as a dict, and what a table of a node must answer if that dict is right.

``TableModel`` takes changes in the order of the log, also those of transactions whose end is not known yet;
``state`` is the fold of all that is committed. ``check_table`` asks a table everything in every way and
compares: look-ups, scans with and without filter, columns and key range, counts, prefixes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from support.table_nodes import by_key

__all__ = ("Change", "Filter", "Key", "Row", "TableModel", "check_table")

Key = tuple[Any, ...]
Row = dict[str, Any]


class Change(NamedTuple):
    """An upsert, or the deletion of a key if ``row`` is None."""

    key: Key
    row: Row | None


@dataclass(slots=True)
class TableModel:
    """Everything that was ever acknowledged, in order."""

    columns: list[str]
    key: tuple[str, ...]
    #: The fold of what was settled when nothing was open any more.
    _base: dict[Key, Row] = field(default_factory=dict)
    #: (transaction or None, change), behind the base.
    _tail: list[tuple[str | None, Change]] = field(default_factory=list)
    _ended: dict[str, bool] = field(default_factory=dict)
    _open: set[str] = field(default_factory=set)

    def write(self, changes: Iterable[Change], transaction: str | None = None) -> None:
        """Changes that are in the log now."""
        if transaction is not None:
            self._open.add(transaction)
        self._tail += [(transaction, change) for change in changes]

    def end(self, transaction: str, *, commit: bool) -> None:
        """The transaction has come to its end."""
        if transaction in self._open:
            self._open.remove(transaction)
            self._ended[transaction] = commit
        if not self._open:
            self._base = self._folded()
            self._tail, self._ended = [], {}

    def add_column(self, name: str) -> None:
        """Rows that are there have None in it."""
        self.columns.append(name)
        self._base = {key: {**row, name: None} for key, row in self._base.items()}

    @property
    def is_settled(self) -> bool:
        return not self._open

    @property
    def state(self) -> dict[Key, Row]:
        """What a reader must see; nothing may be open."""
        assert self.is_settled, "a transaction is open"
        return self._folded()

    def keys_ever(self) -> set[Key]:
        return set(self._base) | {change.key for _, change in self._tail}

    def _folded(self) -> dict[Key, Row]:
        state = dict(self._base)
        for transaction, change in self._tail:
            if transaction is not None and not self._ended.get(transaction, False):
                continue
            if change.row is None:
                state.pop(change.key, None)
            else:
                state[change.key] = {name: change.row.get(name) for name in self.columns}
        return state


@dataclass(frozen=True, slots=True)
class Filter:
    """The same question as SQL and in Python."""

    sql: str
    passes: Callable[[Row], bool]


def check_table(
    table: Any, model: TableModel, rng: random.Random, filters: Iterable[Filter], missing: Iterable[Key]
) -> None:
    """Compare a table with its model in every way."""
    expected, names = model.state, list(model.key)
    found = table.scan(fetch_max_bytes=rng.choice([1_000, 50_000, 4 << 20])).to_arrow().to_pylist()
    _same(by_key(found, names), expected, "the scan")
    assert table.scan().count() == len(expected)
    for each in filters:
        columns = rng.sample(model.columns, rng.randrange(1, len(model.columns) + 1))
        columns += [name for name in names if name not in columns]
        found = table.scan(columns=columns, where=each.sql).to_arrow().to_pylist()
        passing = {key: row for key, row in expected.items() if each.passes(row)}
        _same(by_key(found, names), _projected(passing, columns), each.sql)
    _check_range(table, expected, names, rng)
    _check_look_ups(table, model, expected, rng, missing)


def _check_range(table: Any, expected: Mapping[Key, Row], names: list[str], rng: random.Random) -> None:
    keys = sorted(expected)
    if not keys:
        return
    low, high = sorted(rng.choices(keys, k=2))
    found = by_key(table.scan(key_range=(low, high)).to_arrow().to_pylist(), names)
    _same(found, {key: expected[key] for key in keys if low <= key < high}, f"keys {low} to {high}")
    prefix = rng.choice(keys)[: rng.randrange(1, len(names) + 1)]
    found = by_key(table.lookup_prefix(prefix).to_pylist(), names)
    _same(found, {key: expected[key] for key in keys if key[: len(prefix)] == prefix}, f"prefix {prefix}")


def _check_look_ups(
    table: Any, model: TableModel, expected: Mapping[Key, Row], rng: random.Random, missing: Iterable[Key]
) -> None:
    keys = [*model.keys_ever(), *missing]
    rng.shuffle(keys)
    keys = keys[:3_000]
    found: pa.Table = table.lookup(keys)
    assert found.to_pylist() == [expected[key] for key in keys if key in expected]
    for key in keys[:3]:
        assert table.lookup(key) == expected.get(key)


def _projected(rows: Mapping[Key, Row], columns: list[str]) -> dict[Key, Row]:
    return {key: {name: row[name] for name in columns} for key, row in rows.items()}


def _same(found: Mapping[Key, Row], expected: Mapping[Key, Row], what: str) -> None:
    """Equal, or an error that shows the first few differences rather than everything."""
    if found == expected:
        return
    lost = sorted(expected.keys() - found.keys())[:5]
    extra = sorted(found.keys() - expected.keys())[:5]
    other = [(key, found[key], expected[key]) for key in found.keys() & expected.keys()]
    differing = [entry for entry in other if entry[1] != entry[2]][:3]
    raise AssertionError(
        f"{what}: {len(found)} rows, {len(expected)} expected; lost {lost}, too many {extra}, "
        f"different {differing}"
    )
