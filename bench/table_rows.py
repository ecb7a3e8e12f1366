"""The rows that the table benchmarks write: five columns, some 110 bytes, keys in random order."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

__all__ = ("COLUMNS", "TABLE", "keys_of", "rows")

TABLE = "bench.rows"
COLUMNS = "id bigint not null, price double, amount int, note string, at timestamp"
_SEED = 20_261_116
_NOTE_BYTES = 60


def keys_of(count: int) -> np.ndarray:
    """All keys of a table of ``count`` rows, in the order in which they are written."""
    return np.random.default_rng(_SEED).permutation(count).astype(np.int64)


def rows(count: int) -> pa.Table:
    """A table of ``count`` rows."""
    keys = keys_of(count)
    random = np.random.default_rng(_SEED + 1)
    note = "n" * _NOTE_BYTES
    return pa.table(
        {
            "id": keys,
            "price": random.random(count),
            "amount": pa.array(random.integers(0, 1_000, count), pa.int32()),
            "note": pa.array([f"{note}{key}" for key in keys.tolist()]),
            "at": pa.array(keys, pa.timestamp("us", "UTC")),
        }
    )
