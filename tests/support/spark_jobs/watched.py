"""The data source ``watched``: Tidemill's, with points at which a test can hold it. See ``points``.

| point | when | where |
| --- | --- | --- |
| ``before-write`` | nothing is opened | a task |
| ``during-write`` | half of the task's rows are sent, some are in the log for certain | a task |
| ``after-write`` | all rows are in the log, Spark does not know yet | a task |
| ``before-commit`` | the tasks are through, nothing is published | the driver |
| ``during-commit`` | the nodes have published, and their answer is lost on its way | the driver |
| ``after-commit`` | the answer is there, Spark's commit log knows nothing | the driver |

``write-failed`` is noted if the product refuses or fails. Spark imports this module anew in every process, so
nothing here may rest on what the test's process knows, other than the directory in the option ``points``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

import tidemill.client.producing.attempts
import tidemill.spark.writing.writers
from support.spark_jobs.points import Points
from tidemill.errors import NodeUnavailable
from tidemill.spark.data_source import TidemillSource
from tidemill.spark.writing.rows import gathered
from tidemill.spark.writing.writers import Written

__all__ = ("WatchedSource",)

_SLICES = 6


class WatchedSource(TidemillSource):
    def __init__(self, options: dict[str, str]) -> None:
        given = dict(options)
        self._points = Points(Path(given.pop("points")))
        super().__init__(given)

    @classmethod
    def name(cls) -> str:
        return "watched"

    def writer(self, schema: StructType, overwrite: bool) -> WatchedWriter:
        return WatchedWriter(self._points, super().writer(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> WatchedStreamWriter:  # noqa: N802
        return WatchedStreamWriter(self._points, super().streamWriter(schema, overwrite))


class WatchedWriter(DataSourceArrowWriter):
    """A batch write: its batch is that of the writer inside."""

    def __init__(self, points: Points, inner: Any) -> None:
        self._points, self._inner = points, inner

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _write(self._points, self._inner._batch, self._inner.write, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _commit(self._points, self._inner._batch, lambda: self._inner.commit(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._points.note("abort", self._inner._batch)
        self._inner.abort(messages)


class WatchedStreamWriter(DataSourceStreamArrowWriter):
    """A stream's write: its batch is what Spark says."""

    def __init__(self, points: Points, inner: Any) -> None:
        self._points, self._inner = points, inner

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        batch = int(_task().getLocalProperty("streaming.sql.batchId") or "")
        return _write(self._points, batch, self._inner.write, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        _commit(self._points, batchId, lambda: self._inner.commit(messages, batchId))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._points.note("abort", batchId)
        self._inner.abort(messages, batchId)


def _task() -> TaskContext:
    """The task that runs this; a writer's code runs nowhere else."""
    task = TaskContext.get()
    assert task is not None
    return task


def _write(
    points: Points,
    batch: int,
    write: Callable[[Iterator[pa.RecordBatch]], WriterCommitMessage],
    rows: Iterator[pa.RecordBatch],
) -> WriterCommitMessage:
    context = _task()
    about = {"partition": context.partitionId(), "attempt": context.attemptNumber()}
    points.reach("before-write", batch, **about)
    # Small chunks, one after the other: at half of a few hundred rows some are in the log for certain.
    small = patch.multiple(
        tidemill.spark.writing.writers, gathered=functools.partial(gathered, chunk_bytes=1), _UNDER_WAY=1
    )
    try:
        with small:
            message = write(_halves(points, batch, rows, about))
    except BaseException as error:
        points.note("write-failed", batch, error=f"{type(error).__name__}: {error}", **about)
        raise
    assert isinstance(message, Written)
    points.reach("after-write", batch, rows=message.rows, **about)
    return message


def _halves(
    points: Points, batch: int, rows: Iterator[pa.RecordBatch], about: dict[str, int]
) -> Iterator[pa.RecordBatch]:
    """The same rows in small batches, with a point in the middle."""
    found = list(rows)
    if not found:
        return
    whole = pa.Table.from_batches(found)
    size = max(1, -(-whole.num_rows // _SLICES))
    for number, start in enumerate(range(0, whole.num_rows, size)):
        if number == _SLICES // 2:
            points.reach("during-write", batch, **about)
        yield from whole.slice(start, size).combine_chunks().to_batches()


def _commit(points: Points, batch: int, commit: Callable[[], None]) -> None:
    points.reach("before-commit", batch)
    with _lossy(points, batch):
        commit()
    points.reach("after-commit", batch)


@contextlib.contextmanager
def _lossy(points: Points, batch: int) -> Iterator[None]:
    """If ``during-commit`` is held, the answer about the publication gets lost."""
    request = tidemill.client.producing.attempts._request

    async def lossy(cluster: Any, job: str, name: str, body: dict[str, Any]) -> Any:
        answer = await request(cluster, job, name, body)
        if name == "PublishAttempts" and await asyncio.to_thread(points.reach, "during-commit", batch):
            raise NodeUnavailable("the test has lost the answer")
        return answer

    with patch.object(tidemill.client.producing.attempts, "_request", lossy):
        yield
