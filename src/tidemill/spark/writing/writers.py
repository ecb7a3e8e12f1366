"""Exactly-once writers: each task attempt writes in a transaction of its own, the driver publishes a batch.

- A *job* is a streaming query, a batch write, or whatever ``txnAppId`` names, together with what it writes
  to; its *batch* is Spark's batch, 0, or ``txnVersion``.
- Nothing is visible before ``commit``. It makes exactly the successful attempts visible, as one, and the
  nodes remember the batch in the same step. A batch that Spark runs again after that finds this out when it
  begins to write, and writes nothing.
- Only the tasks of a stream know its query; so their messages tell the driver which job they belong to.
- What a task that failed or a driver that died left behind is undone by the job's next publication, or when
  the job has given no sign of life for ``transactionTimeout``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tidemill.client.keeping import keep_alive
from tidemill.client.producing.attempts import Attempt, abort_attempts, keep_job, publish
from tidemill.errors import TidemillError
from tidemill.spark.connection import Connected, connected
from tidemill.spark.errors import InvalidOption
from tidemill.spark.writing.foreach import QUERY_PROPERTY
from tidemill.spark.writing.options import WriteOptions
from tidemill.spark.writing.rows import RowsOut, Sending, gathered
from tidemill.spark.writing.targets import Target, open_target
from tidemill.wire.jobs import AttemptId

__all__ = ("TidemillStreamWriter", "TidemillWriter", "Written", "make_stream_writer", "make_writer")

_log = logging.getLogger(__name__)
_BATCH_PROPERTY: Final = "streaming.sql.batchId"
#: Chunks that are prepared and not yet written. More would only take memory.
_UNDER_WAY: Final = 3
_SIGNS_OF_LIFE: Final = 3
_ABORT_SECONDS: Final = 10


@dataclass
class Written(WriterCommitMessage):
    """A task's message to the driver. It has no attempt if there were no rows, or the batch is published."""

    job: str
    batch: int
    attempt: AttemptId | None
    rows: int = 0
    size_bytes: int = 0


def make_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> TidemillWriter:
    """A writer of a batch. Raises ``TidemillError`` if the rows cannot be written."""
    write = WriteOptions.parse(options)
    if overwrite:
        raise InvalidOption(
            'mode("overwrite") is not there: use mode("append"), which replaces the rows of a table that '
            "have the same keys; to be rid of the others delete them (a column _tidemill_op with 'delete'), "
            "or drop the table and write with createTable=true"
        )
    link = connected(write.servers, write.timeout_ms, patient=False)
    target = link.run(open_target(link, write, schema))
    if write.txn_app_id is not None:
        return TidemillWriter(write, target, _job(write.txn_app_id, target), write.txn_version)
    return TidemillWriter(write, target, _job(str(uuid.uuid4()), target), 0)


def make_stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> TidemillStreamWriter:
    """A writer of a streaming query's batch; ``overwrite`` says that it is in complete mode."""
    write = WriteOptions.parse(options)
    if write.txn_app_id is not None:
        raise InvalidOption(
            "options txnAppId and txnVersion are for batch writes: a stream is exactly once without"
        )
    link = connected(write.servers, write.timeout_ms)
    target = link.run(open_target(link, write, schema))
    if overwrite and not target.is_keyed:
        raise InvalidOption(
            f'outputMode("complete") writes all rows again with every batch, which {target.name} would keep: '
            'write to a table with a primary key, or use outputMode("append")'
        )
    return TidemillStreamWriter(write, target)


def _job(name: str, target: Target) -> str:
    return f"{name}:{target.title}"


class TidemillWriter(DataSourceArrowWriter):
    """Spark's writer of a DataFrame's rows. It is sent to the tasks, so it holds plain values only."""

    def __init__(self, options: WriteOptions, target: Target, job: str, batch: int) -> None:
        self._options = options
        self._target = target
        self._job = job
        self._batch = batch

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return _write(self._options, self._target, self._job, self._batch, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if self._options.txn_app_id is not None or _attempts(messages):
            _publish(self._options, self._job, self._batch, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        # Nobody will try this very write again, so that it can be closed: a task that is still on its way
        # finds it published, without rows, and writes nothing.
        _abort(self._options, self._job, self._batch, closing=self._options.txn_app_id is None)


class TidemillStreamWriter(DataSourceStreamArrowWriter):
    """Spark's writer of a streaming query's rows, batch after batch."""

    def __init__(self, options: WriteOptions, target: Target) -> None:
        self._options = options
        self._target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(QUERY_PROPERTY)
        batch = None if context is None else context.getLocalProperty(_BATCH_PROPERTY)
        if query is None or batch is None:
            raise InvalidOption(
                "this is no task of a streaming query: Spark does not say which query and batch it is"
            )
        return _write(self._options, self._target, _job(query, self._target), int(batch), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        # Also without rows: it undoes what an earlier run of the batch may have left.
        for job in _jobs(messages):
            _publish(self._options, job, batchId, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        for job in _jobs(messages):
            _abort(self._options, job, batchId)


# --- on the driver


def _jobs(messages: Sequence[WriterCommitMessage | None]) -> set[str]:
    return {message.job for message in messages if isinstance(message, Written)}


def _attempts(messages: Sequence[WriterCommitMessage | None]) -> list[AttemptId]:
    found = (message.attempt for message in messages if isinstance(message, Written))
    return [attempt for attempt in found if attempt is not None]


def _publish(
    options: WriteOptions, job: str, batch: int, messages: Sequence[WriterCommitMessage | None]
) -> None:
    link = connected(options.servers, options.timeout_ms)
    if link.run(publish(link.cluster, job, batch, _attempts(messages))):
        written = [message for message in messages if isinstance(message, Written)]
        _log.info(
            "published batch %d of job %s: %d rows, %d bytes",
            batch,
            job,
            sum(message.rows for message in written),
            sum(message.size_bytes for message in written),
        )
    else:
        _log.info("batch %d of job %s was published before: nothing was written again", batch, job)


def _abort(options: WriteOptions, job: str, batch: int, *, closing: bool = False) -> None:
    link = connected(options.servers, options.timeout_ms)
    try:
        if closing:
            link.run(_soon(publish(link.cluster, job, batch, ())))
        else:
            link.run(_soon(abort_attempts(link.cluster, job, batch)))
    except (TidemillError, TimeoutError) as error:
        # Spark has an error to tell already; this one only says that undoing takes longer.
        _log.warning(
            "batch %d of job %s is undone when its transactions time out, after %d s: %s",
            batch,
            job,
            options.transaction_timeout_ms // 1000,
            str(error) or "the node does not answer",
        )


async def _soon(work: Awaitable[object]) -> None:
    """Await ``work``, but not long: there is an error to report, and the node may be away."""
    async with asyncio.timeout(_ABORT_SECONDS):
        await work


# --- in tasks


def _write(
    options: WriteOptions, target: Target, job: str, batch: int, batches: Iterator[pa.RecordBatch]
) -> Written:
    """Write all rows in one attempt. It is opened with the first rows: many tasks have none."""
    link = connected(options.servers, options.timeout_ms)
    message = Written(job, batch, None)
    with _kept_alive(link, job, options.transaction_timeout_ms):
        first = next((each for each in batches if each.num_rows), None)
        if first is None:
            return message
        attempt = link.run(
            Attempt.open(
                link.cluster,
                job,
                batch,
                timeout_ms=options.transaction_timeout_ms,
                codec=options.codec,
                patience_ms=options.timeout_ms,
            )
        )
        if attempt is None:
            # The other rows are left unread, so that Spark need not compute them.
            return message
        try:
            chunks = gathered(itertools.chain((first,), batches))
            _send_all(link, attempt, link.run(target.opened(link)), chunks, message)
        except BaseException:
            with contextlib.suppress(TidemillError, TimeoutError):
                link.run(_soon(attempt.abort()))
            raise
        message.attempt = attempt.identity
        return message


def _send_all(
    link: Connected, attempt: Attempt, out: RowsOut, chunks: Iterator[pa.Table], message: Written
) -> None:
    under_way: deque[Future[None]] = deque()
    try:
        for chunk in chunks:
            message.rows += chunk.num_rows
            message.size_bytes += chunk.nbytes
            for sending in out.sendings(attempt, chunk):
                _begin(link, under_way, sending)
        while under_way:
            under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()


def _begin(link: Connected, under_way: deque[Future[None]], sending: Sending) -> None:
    while len(under_way) >= _UNDER_WAY:
        try:
            under_way.popleft().result()
        except BaseException:
            sending.close()
            raise
    under_way.append(link.spawn(sending))


@contextlib.contextmanager
def _kept_alive(link: Connected, job: str, timeout_ms: int) -> Iterator[None]:
    """Keep the job alive while a block runs, also while Spark computes the rows."""
    interval_seconds = timeout_ms / _SIGNS_OF_LIFE / 1000
    # It fails as long as the job has nothing open yet.
    keeper: Future[Any] = link.spawn(keep_alive(interval_seconds, partial(keep_job, link.cluster, job)))
    try:
        yield
    finally:
        keeper.cancel()
