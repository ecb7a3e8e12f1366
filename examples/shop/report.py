"""The results, read back with Tidemill's own client and compared with the truth, row by row.

Spark has no part in this: what is compared is what any other reader of the tables would see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from events import Message, Truth
from pipeline import ORDERS, QUARANTINE, REVENUE

import tidemill

Row = dict[str, Any]
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Difference:
    """A row that is not what it must be. ``expected`` is None if it must not be, ``found`` if it is not."""

    table: str
    key: Key
    expected: Row | None
    found: Row | None

    def lines(self) -> tuple[str, str, str]:
        """Its place, what must be there and what is there, for people."""
        return f"{self.table} {', '.join(map(str, self.key))}", _words(self.expected), _words(self.found)


@dataclass(frozen=True)
class Results:
    """What the pipeline has made."""

    orders: list[Row]
    revenue: list[Row]
    quarantine: list[Row]

    def by_status(self) -> dict[str, Counter[str]]:
        """How many orders there are, by status and then by region."""
        counts: dict[str, Counter[str]] = {}
        for row in self.orders:
            counts.setdefault(row["status"], Counter())[row["region"]] += 1
        return counts

    def reasons(self) -> Counter[str]:
        """How many messages are in quarantine, by reason."""
        return Counter(row["reason"] for row in self.quarantine)


def _words(row: Row | None) -> str:
    return "no row" if row is None else ", ".join(f"{name}: {value}" for name, value in row.items())


def read_results(db: tidemill.Tidemill) -> Results:
    """Scan the two tables, and read the log of the quarantine from its beginning."""
    log = db.table(QUARANTINE)
    beginning = {(QUARANTINE, bucket): 0 for bucket in range(log.buckets)}
    quarantined = [
        row
        for batch in log.follow(snapshot=False, from_offsets=beginning, until_now=True)
        for row in batch.rows.to_pylist()
    ]
    return Results(
        orders=db.table(ORDERS).scan().to_arrow().to_pylist(),
        revenue=db.table(REVENUE).scan().to_arrow().to_pylist(),
        quarantine=quarantined,
    )


def compare(results: Results, truth: Truth, broken: Mapping[tuple[int, int], Message]) -> list[Difference]:
    """All differences. ``broken`` are the broken messages by where they are: partition and offset."""
    quarantine = {
        place: dict(zip(("partition", "offset"), place, strict=True))
        | {"reason": message.broken, "text": message.text}
        for place, message in broken.items()
    }
    orders = {(order_id,): row for order_id, row in truth.orders.items()}
    return [
        *_differences(ORDERS, ("order_id",), orders, results.orders),
        *_differences(REVENUE, ("region", "minute"), truth.revenue, results.revenue),
        *_differences(QUARANTINE, ("partition", "offset"), quarantine, results.quarantine),
    ]


def _differences(
    table: str, key_columns: tuple[str, ...], expected: Mapping[Any, Row], found: Iterable[Row]
) -> list[Difference]:
    differences = []
    missing = dict(expected)
    for row in found:
        key = tuple(row[name] for name in key_columns)
        # Taken out, so that a second row with the same key has nothing that expects it.
        wanted = missing.pop(key, None)
        if row != wanted:
            differences.append(Difference(table, key, wanted, row))
    return differences + [Difference(table, key, row, None) for key, row in missing.items()]
