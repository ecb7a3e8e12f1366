"""Metrics of the state of tables, by table: sums over the buckets that are open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tidemill.coordination.metrics import Metric, counters, gauges
from tidemill.tables.state.bucket import Bucket, BucketSize
from tidemill.tables.state.service import TableService

__all__ = ("STATE_METRICS", "TableNumbers", "measure_tables")


@dataclass(slots=True)
class TableNumbers:
    """The metrics of one table."""

    rows: int = 0
    state_bytes: int = 0
    fold_lag: int = 0
    folded_rows: int = 0
    lookups: int = 0
    snapshots: int = 0
    rebuilds: int = 0
    #: When the oldest of the buckets' newest snapshots was taken; -1 if there is none.
    last_snapshot_ms: int = -1

    def add(self, bucket: Bucket, size: BucketSize | None) -> None:
        """Add the numbers of one bucket."""
        if size is not None:
            self.rows += size.rows
            self.state_bytes += size.state_bytes
        # A bucket that is being recovered is behind by its whole log.
        self.fold_lag += max(0, bucket.log.last_stable_offset - max(0, bucket.applied_offset))
        counts = bucket.counts
        self.folded_rows += counts.folded_rows
        self.lookups += counts.lookups
        self.snapshots += counts.snapshots
        self.rebuilds += counts.rebuilds
        taken_ms = counts.newest_snapshot_ms
        if taken_ms is not None and taken_ms >= 0:
            known = self.last_snapshot_ms >= 0
            self.last_snapshot_ms = min(self.last_snapshot_ms, taken_ms) if known else taken_ms


async def measure_tables(service: TableService) -> dict[str, TableNumbers]:
    """The metrics of every table with an open bucket, by name. RocksDB is asked in a thread."""
    buckets = service.buckets()
    loop = asyncio.get_running_loop()
    sizes = await loop.run_in_executor(service.threads, lambda: [bucket.measure() for bucket in buckets])
    tables: dict[str, TableNumbers] = {}
    for bucket, size in zip(buckets, sizes, strict=True):
        table = service.host.image.tables_by_id.get(bucket.key.table_id)
        if table is not None:
            tables.setdefault(table.name, TableNumbers()).add(bucket, size)
    return tables


_Tables = dict[str, TableNumbers]


def _by_table(read: Callable[[TableNumbers], int]) -> Callable[[_Tables], list[tuple[tuple[str], int]]]:
    return lambda tables: [((name,), read(numbers)) for name, numbers in sorted(tables.items())]


_TABLE: Final = ("table",)

STATE_METRICS: Final[Sequence[Metric[_Tables]]] = (
    gauges("tidemill_table_rows", "Rows of a table, estimated.", _TABLE, _by_table(lambda each: each.rows)),
    gauges(
        "tidemill_table_state_bytes",
        "Bytes of a table's state on disk and in memory.",
        _TABLE,
        _by_table(lambda each: each.state_bytes),
    ),
    gauges(
        "tidemill_table_fold_lag",
        "Offsets that are stable in the log and not in the state.",
        _TABLE,
        _by_table(lambda each: each.fold_lag),
    ),
    counters(
        "tidemill_table_folded_rows_total",
        "Rows put into the state or deleted from it.",
        _TABLE,
        _by_table(lambda each: each.folded_rows),
    ),
    counters("tidemill_table_lookups_total", "Look-ups.", _TABLE, _by_table(lambda each: each.lookups)),
    counters(
        "tidemill_table_snapshots_total", "Snapshots taken.", _TABLE, _by_table(lambda each: each.snapshots)
    ),
    gauges(
        "tidemill_table_last_snapshot_timestamp_ms",
        "When the last snapshot was taken, of the bucket that waits longest for one.",
        _TABLE,
        lambda tables: [
            ((name,), numbers.last_snapshot_ms)
            for name, numbers in sorted(tables.items())
            if numbers.last_snapshot_ms >= 0
        ],
    ),
    counters(
        "tidemill_table_rebuilds_total",
        "Times that state did not check out and was built again.",
        _TABLE,
        _by_table(lambda each: each.rebuilds),
    ),
)
