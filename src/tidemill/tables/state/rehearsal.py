"""A rehearsal of what tables do, so that the first client of a node does not wait for it.

Arrow, numpy and the engine load much of themselves at their first use: modules, kernels, thread pools. Under
load that takes seconds. A node with tables goes through an upsert, a look-up and a scan once before it says
that it is ready, on a small table that exists only here and leaves nothing behind.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from tidemill.kv.contract import KvEngine
from tidemill.records.columns.arrays import from_numpy, repeated
from tidemill.records.columns.build import build_batch_columns
from tidemill.records.columns.read import read_columns
from tidemill.tables.definition import PartitionDefinition, TableDefinition
from tidemill.tables.keys.codec import default_key_format
from tidemill.tables.keys.routing import BucketMap
from tidemill.tables.predicates.predicate import bind
from tidemill.tables.predicates.tree import Compare
from tidemill.tables.scanning.reading import ScanShape, look_up, pack_batches, read_batch
from tidemill.tables.scanning.sessions import ReadPlan
from tidemill.tables.state.changes import prepare_checked
from tidemill.tables.state.folding import apply

__all__ = ("rehearse",)

_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("price", pa.float64()),
    ]
)
_ROWS = 2
_PARTITION = PartitionDefinition(0, None, "rehearsal")
_ANSWER_BYTES = 1024 * 1024


def rehearse(directory: Path, engine: KvEngine, max_decompressed_bytes: int) -> None:
    """Write and read some rows in ``directory``, and then remove it.

    Also removes what a rehearsal that was killed has left in it.

    Raises ``StorageError`` if the disk is too full for them.
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
        partitions=(_PARTITION,),
        properties={},
        comment=None,
        created_ms=0,
    )
    engine.files.remove_tree(directory)
    try:
        engine.files.make_directory(directory)
        _upsert_and_read(table, directory, engine, max_decompressed_bytes)
    finally:
        engine.files.remove_tree(directory)


def _upsert_and_read(
    table: TableDefinition, directory: Path, engine: KvEngine, max_decompressed_bytes: int
) -> None:
    numbers = np.arange(_ROWS)
    columns = [from_numpy(numbers), repeated("a", _ROWS), from_numpy(numbers.astype(np.float64))]
    rows = pa.RecordBatch.from_arrays(columns, schema=table.schema)
    keys = table.keys.canonical(table.key_columns(rows))
    records = build_batch_columns(keys, table.format.from_batch(rows), timestamp_ms=0)
    changes = prepare_checked(table, read_columns(records, max_decompressed_bytes), _PARTITION, 0)
    assert changes is not None, "the table has a primary key"
    with engine.open(directory / "live", b"rehearsal") as store:
        apply(store, changes, _ROWS)
        found = look_up(lambda: table, store, changes.state_keys.to_pylist(), None, _ANSWER_BYTES)
        assert found is not None, "the rows are there"
        pack_batches([found])
        with store.view() as view:
            shape = ScanShape(None, bind(Compare(("price",), ">", 1.0), table.schema), None)
            plan = ReadPlan(b"", None, None, is_repeat=False)
            pack_batches(read_batch(table, view, shape, plan, _ANSWER_BYTES).batches)
