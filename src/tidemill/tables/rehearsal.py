"""A rehearsal of what tables do, so that the first client of a node does not wait for it.

Arrow, numpy and RocksDB load much of themselves at their first use: modules, kernels, thread pools. Under
load that takes seconds. A node with tables goes through an upsert, a look-up and a scan once before it says
that it is ready, on a small table that exists only here and leaves nothing behind.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidemill.kv.engine import KvStore
from tidemill.kv.resources import KvResources
from tidemill.records.columns import build_batch_columns, read_columns
from tidemill.records.columns_numpy import from_numpy, repeated
from tidemill.tables.changes import prepare_checked
from tidemill.tables.definition import Partition, TableDefinition
from tidemill.tables.folding import apply
from tidemill.tables.keys import default_key_format
from tidemill.tables.predicate import bind
from tidemill.tables.predicate_tree import Compare
from tidemill.tables.reading import ScanShape, look_up, pack_batches, read_batch
from tidemill.tables.routing import BucketMap
from tidemill.tables.scanners import ReadPlan

__all__ = ("rehearse",)

_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("price", pa.float64()),
    ]
)
_ROWS = 2
_PLACE = Partition(0, None, "rehearsal")
_ANSWER_BYTES = 1024 * 1024


def rehearse(directory: Path, resources: KvResources, max_decompressed_bytes: int) -> None:
    """Write and read some rows in ``directory``, which is removed then.

    What a rehearsal that was killed has left in it goes, too.

    Raises ``StorageError`` or ``OSError`` if there is no room for them.
    """
    table = TableDefinition(
        name="rehearsal",
        table_id=0,
        schemas=(_SCHEMA,),
        primary_key=("id",),
        buckets=1,
        bucket_map=BucketMap.hashed(1),
        row_format="row",
        key_format=default_key_format(("id",)),
        partition_column=None,
        partitions=(_PLACE,),
        properties={},
        comment=None,
        created_ms=0,
    )
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.mkdir()
        _upsert_and_read(table, directory, resources, max_decompressed_bytes)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _upsert_and_read(
    table: TableDefinition, directory: Path, resources: KvResources, max_decompressed_bytes: int
) -> None:
    numbers = np.arange(_ROWS)
    columns = [from_numpy(numbers), repeated("a", _ROWS), from_numpy(numbers.astype(np.float64))]
    rows = pa.RecordBatch.from_arrays(columns, schema=table.schema)
    keys = table.keys.canonical(table.key_columns(rows))
    records = build_batch_columns(keys, table.format.from_batch(rows), timestamp_ms=0)
    changes = prepare_checked(table, read_columns(records, max_decompressed_bytes), _PLACE, 0)
    assert changes is not None, "the table has a primary key"
    with KvStore.open(directory / "live", resources, b"rehearsal", first_offset=0) as store:
        apply(store, changes, _ROWS)
        found = look_up(lambda: table, store, changes.state_keys.to_pylist(), None, _ANSWER_BYTES)
        assert found is not None, "the rows are there"
        pack_batches([found])
        with store.snapshot() as view:
            shape = ScanShape(None, bind(Compare(("price",), ">", 1.0), table.schema), None)
            plan = ReadPlan(b"", None, None, is_repeat=False)
            pack_batches(read_batch(table, view, shape, plan, _ANSWER_BYTES).batches)
