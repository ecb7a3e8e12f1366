"""Spark's ceiling: a Python data source that has its rows in memory and gives the same batches as Tidemill's.

It is found by its module's name, so Spark's workers must be able to import ``bench``. The rows come from a
file with one batch, which a worker reads once; every task gives it again and again. With the option
``distinct`` the column ``id`` is new in every row. As a sink it takes every row and keeps none: what is left
is the time of Spark itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

__all__ = ("BATCH_ROWS", "FORMAT", "MemorySource", "row_batches", "save_sample")

FORMAT = "bench_memory"
#: Rows per batch, as Tidemill's source gives them.
BATCH_ROWS = 32_768
#: Odd, so that different numbers give different keys, and keys come in no order.
_SCATTER = np.uint64(0x9E3779B97F4A7C15)
_KEYS = np.uint64(2**62 - 1)


def save_sample(path: str, batch: pa.RecordBatch) -> None:
    """Write the batch that a source gives."""
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


@cache
def _sample(path: str) -> pa.RecordBatch:
    with pa.OSFile(path, "rb") as file, pa.ipc.open_file(file) as reader:
        return reader.get_batch(0)


def row_batches(path: str, first: int, count: int, *, distinct: bool) -> Iterator[pa.RecordBatch]:
    """``count`` rows, in batches, from number ``first`` on."""
    sample = _sample(path)
    for start in range(first, first + count, sample.num_rows):
        rows = min(sample.num_rows, first + count - start)
        batch = sample.slice(0, rows)
        if distinct:
            numbers = np.arange(start, start + rows, dtype=np.uint64)
            ids = pa.array(((numbers * _SCATTER) & _KEYS).astype(np.int64))
            batch = batch.set_column(batch.schema.get_field_index("id"), batch.schema.field("id"), ids)
        yield batch


class _Share(InputPartition):
    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count


class _Reading:
    """The common part of reading a batch and reading a stream."""

    def __init__(self, options: dict[str, str]) -> None:
        self._path = options["sample"]
        self._rows = int(options["rows"])
        self._tasks = int(options["tasks"])
        self._distinct = options.get("distinct") == "true"

    def shares(self) -> list[InputPartition]:
        bounds = [self._rows * number // self._tasks for number in range(self._tasks + 1)]
        return [_Share(low, high - low) for low, high in pairwise(bounds)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Share)
        return row_batches(self._path, partition.first, partition.count, distinct=self._distinct)


class _Reader(_Reading, DataSourceReader):
    def partitions(self) -> Sequence[InputPartition]:
        return self.shares()


class _StreamReader(_Reading, DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"rows": 0}

    def latestOffset(self, *_: object) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"rows": self._rows}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return self.shares() if start != end else []


class _Writer(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class MemorySource(DataSource):
    """Spark's data source ``bench_memory``, with the options ``sample``, ``rows`` and ``tasks``."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Reader(dict(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        return _StreamReader(dict(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return _Writer()
