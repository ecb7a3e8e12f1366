"""The child process of the table benchmarks: ``python -m bench.table_client WHAT OPTIONS-AS-JSON``."""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import numpy as np

import tidemill
from bench.table_rows import COLUMNS, TABLE, keys_of, rows

_RAW_BATCH_ROWS = 1_000


def load(servers: str, count: int, buckets: int) -> dict[str, Any]:
    """Create the table and write its rows; seconds until they are durable, and until they can be read."""
    data = rows(count)
    with tidemill.connect(servers) as db:
        db.drop_table(TABLE, if_exists=True)
        table = db.create_table(TABLE, COLUMNS, primary_key=["id"], buckets=buckets)
        # Not timed: the first write loads everything that is loaded at its first use.
        table.upsert(data.slice(0, 1))
        table.scan(limit=1).to_arrow()
        started = time.perf_counter()
        table.upsert(data)
        durable = time.perf_counter() - started
        table.scan(limit=1).to_arrow()
        return {"durable_s": durable, "readable_s": time.perf_counter() - started}


def look_up(servers: str, count: int, lookups: int, batch: int) -> dict[str, Any]:
    """Look up random keys, ``batch`` at a time."""
    keys = np.random.default_rng(1).choice(keys_of(count), lookups).tolist()
    with tidemill.connect(servers) as db:
        table = db.table(TABLE)
        table.lookup(keys[:batch])
        taken, found = [], 0
        for first in range(0, lookups, batch):
            started = time.perf_counter()
            found += table.lookup(keys[first : first + batch]).num_rows
            taken.append(time.perf_counter() - started)
        assert found == lookups, f"{found} rows for {lookups} keys"
        return {"seconds": sum(taken), "p99_s": float(np.percentile(taken, 99))}


def scan(servers: str, keep: bool = False) -> dict[str, Any]:
    """Read the whole table; ``keep`` keeps all of it in memory."""
    with tidemill.connect(servers) as db:
        table = db.table(TABLE)
        # Not timed: the first scan loads everything that is loaded at its first use.
        table.scan(limit=1).to_arrow()
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started, first_s, count, size, kept = time.perf_counter(), 0.0, 0, 0, []
        for batch in table.scan():
            first_s = first_s or time.perf_counter() - started
            count, size = count + batch.num_rows, size + batch.nbytes
            if keep:
                kept.append(batch)
        seconds = time.perf_counter() - started
        grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
        return {
            "seconds": seconds,
            "first_s": first_s,
            "rows": count,
            "bytes": size,
            "grown_mb": grown_kb / 1024,
        }


def first_row(servers: str) -> dict[str, Any]:
    """Seconds until a row can be looked up: what a restarted node needs."""
    key = int(keys_of(1)[0])
    started = time.perf_counter()
    with tidemill.connect(servers, timeout_ms=300_000) as db:
        assert db.table(TABLE).lookup(key) is not None
    return {"seconds": time.perf_counter() - started}


def raw(path: str, count: int, lookups: int, batch: int) -> dict[str, Any]:
    """The same rows straight into and out of RocksDB, through the same binding, with the same options."""
    from rocksdict import AccessType, Rdict, WriteBatch, WriteOptions

    from tidemill.kv.rocks.resources import RocksResources

    keys, values = _state(count)
    resources = RocksResources(block_cache_bytes=256 << 20, write_buffer_bytes=256 << 20)
    found = {}
    for name, durable in (("write_s", False), ("write_durable_s", True)):
        created = resources.options()
        created.create_if_missing(True)
        database = Rdict(f"{path}-{name}", created, {}, AccessType.read_write())
        options = WriteOptions()
        options.disable_wal, options.sync = not durable, durable
        started = time.perf_counter()
        for first in range(0, count, _RAW_BATCH_ROWS):
            writes = WriteBatch(raw_mode=True)
            for number in range(first, min(first + _RAW_BATCH_ROWS, count)):
                writes.put(keys[number], values[number])
            database.write(writes, options)
        found[name] = time.perf_counter() - started
        if durable:
            database.close()
            continue
        chosen = [keys[number] for number in np.random.default_rng(1).choice(count, lookups).tolist()]
        started = time.perf_counter()
        for first in range(0, lookups, batch):
            database.get(chosen[first : first + batch])
        found["lookup_s"] = time.perf_counter() - started
        found["iterate_s"] = _iterate(database)
        database.close()
    return found


def _iterate(database: Any) -> float:
    started = time.perf_counter()
    iterator = database.iter()
    iterator.seek_to_first()
    read = []
    while iterator.valid():
        read.append((iterator.key(), iterator.value()))
        iterator.next()
    return time.perf_counter() - started


def _state(count: int) -> tuple[list[bytes], list[bytes]]:
    """Keys and rows as the state has them."""
    from tidemill.tables.keys.codec import KeyCodec
    from tidemill.tables.rows.binary import RowCodec
    from tidemill.tables.rows.types import normalise_schema, parse_columns

    schema = normalise_schema(parse_columns(COLUMNS))
    batch = rows(count).cast(schema).combine_chunks().to_batches()[0]
    keys = KeyCodec(schema, ["id"], "raw").state_keys([batch.column(0)]).to_pylist()
    values = [bytes(8) + row for row in RowCodec(schema, 0).encode(batch).to_pylist()]
    return keys, values


if __name__ == "__main__":
    what = {"load": load, "lookup": look_up, "scan": scan, "first-row": first_row, "raw": raw}[sys.argv[1]]
    print(json.dumps(what(**json.loads(sys.argv[2]))))  # type: ignore[operator]
    sys.stdout.flush()
