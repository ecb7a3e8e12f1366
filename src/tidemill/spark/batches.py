"""Batches as Spark is given them: small ones put together, and those of scans with exactly its columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tidemill.client.tables.values import SNAPSHOT
from tidemill.records.columns_numpy import from_numpy, repeated

__all__ = ("TIMESTAMP", "Gathering", "snapshot_batch")

TIMESTAMP: Final = pa.timestamp("us", "UTC")
#: Small batches are put together: each costs Spark about as much as some thousand rows.
_ROWS_AT_ONCE: Final = 32_768
_BYTES_AT_ONCE: Final = 4 * 1024 * 1024


class Gathering:
    """Puts small batches of one schema together."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """What is large enough to be given on."""
        if batch.num_rows == 0:
            return
        self._batches.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= _ROWS_AT_ONCE or self._bytes >= _BYTES_AT_ONCE:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """All that is left."""
        batches, self._batches, self._rows, self._bytes = self._batches, [], 0, 0
        if len(batches) > 1:
            yield pa.concat_batches(batches)
        else:
            yield from batches


def snapshot_batch(rows: pa.RecordBatch, bucket: int, schema: pa.Schema) -> pa.RecordBatch:
    """Rows of a scan, with the columns of changes if they are wanted."""
    count = rows.num_rows
    made: dict[str, Callable[[], Any]] = {
        "_tidemill_op": lambda: repeated(SNAPSHOT, count),
        "_tidemill_bucket": lambda: from_numpy(np.full(count, bucket, np.int32)),
        "_tidemill_offset": lambda: from_numpy(np.full(count, -1, np.int64)),
        "_tidemill_timestamp": lambda: pa.nulls(count, TIMESTAMP),
    }
    columns = [
        made[name]() if name in made else rows.column(rows.schema.get_field_index(name))
        for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
