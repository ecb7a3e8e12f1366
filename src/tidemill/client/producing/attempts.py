"""Jobs that write in many attempts and publish them as one: what the exactly-once sinks are made of.

A job (a streaming query, say) writes batch after batch. Any number of attempts, in any number of processes,
write the rows of a batch, each in a transaction of its own. ``publish`` then makes the rows of those attempts
that count visible as one, aborts all others of the batch, and remembers that the job has published it:

    attempt = await Attempt.open(cluster, job, batch)      # None: the batch was published before
    for prepared in prepare_upserts(table.definition, rows):
        await attempt.send_rows(table, prepared)
    await publish(cluster, job, batch, [attempt.identity])

Rules:

- Nothing that an attempt wrote is visible to readers of committed data before its batch is published.
- A batch is published once, whatever is tried again. An answer that was lost is asked for again.
- An attempt lives as long as its job gives signs of life: by ``keep_job``, and by what its attempts begin.
  A batch that is not published within ``timeout_ms`` of the last sign is aborted.
- An attempt in which a write failed is aborted, and made again from the beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from tidemill.client.cluster import TRANSACTION_KEY, Cluster
from tidemill.client.producing.columns import BATCH_BYTES, ColumnProducer, Outgoing
from tidemill.client.tables.table import AsyncTable
from tidemill.client.tables.writer import PreparedRows, TableWriter
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.net.answers import checked
from tidemill.net.retry import is_transient
from tidemill.records.compression import NONE
from tidemill.wire.jobs import AttemptId, job_key

__all__ = (
    "DEFAULT_TIMEOUT_MS",
    "Attempt",
    "JobInfo",
    "abort_attempts",
    "keep_job",
    "list_jobs",
    "publish",
)

DEFAULT_TIMEOUT_MS: Final = 600_000
#: How long a node may be away before what an attempt does fails.
_PATIENCE_MS: Final = 120_000
#: Long, because a publication is answered once every partition that was written has its markers.
_ANSWER_MS: Final = 60_000
#: Errors for a producer whose transaction somebody else has ended.
_OVER: Final = frozenset(
    {
        ErrorCode.invalid_producer_epoch,
        ErrorCode.invalid_producer_id_mapping,
        ErrorCode.invalid_txn_state,
        ErrorCode.producer_fenced,
        ErrorCode.transactional_id_not_found,
        ErrorCode.unknown_producer_id,
    }
)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job as its coordinator knows it. ``published_batch`` is -1 before the first publication."""

    job: str
    published_batch: int
    published_ms: int
    open_attempts: int
    idle_ms: int


class Attempt:
    """An open attempt of a job; made by ``Attempt.open``.

    Rows of a call come after those of earlier calls, also while these are under way.
    """

    def __init__(
        self, cluster: Cluster, job: str, batch: int, identity: AttemptId, *, codec: int, patience_ms: int
    ) -> None:
        self.job = job
        self.batch = batch
        self.identity = identity
        self._cluster = cluster
        self._producer = ColumnProducer(
            cluster, transaction=identity, codec=codec, delivery_timeout_ms=patience_ms
        )
        self._writer = TableWriter(self._producer)

    @classmethod
    async def open(
        cls,
        cluster: Cluster,
        job: str,
        batch: int,
        *,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        codec: int = NONE,
        patience_ms: int = _PATIENCE_MS,
    ) -> Attempt | None:
        """Begin to write rows of a batch. None if the batch was published before: there is nothing to write.

        ``codec`` compresses what is sent. ``patience_ms`` is how long a node may be away before a write
        fails.
        """
        body = {"job": job, "batch": batch, "timeout_ms": timeout_ms}
        opened = await _ask(cluster, job, "OpenAttempt", body, f"opening an attempt of {_named(job, batch)}")
        if opened.already_published:
            return None
        identity = AttemptId(opened.transactional_id, opened.producer_id, opened.producer_epoch)
        return cls(cluster, job, batch, identity, codec=codec, patience_ms=patience_ms)

    # --- rows of tables

    async def send_rows(self, table: AsyncTable, prepared: PreparedRows) -> None:
        """Send what ``prepare_upserts`` or ``prepare_deletes`` made, which the caller may do in a thread."""
        await self._while_open(lambda: self._writer.write(table.topic_of, prepared, table.renew))

    # --- records of topics

    async def send_records(
        self, topic: str, parts: dict[int, Outgoing], *, batch_bytes: int = BATCH_BYTES
    ) -> None:
        """Send what ``records_by_partition`` made."""

        async def send() -> None:
            tasks = await self._producer.begin({(topic, index): parts[index] for index in parts}, batch_bytes)
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result

        await self._while_open(send)

    async def _while_open(self, work: Callable[[], Awaitable[_Result]]) -> _Result:
        try:
            return await work()
        except ApiError as error:
            if error.code not in _OVER:
                raise
            raise ApiError(
                error.code,
                f"this attempt of {_named(self.job, self.batch)} is over: it was aborted, for its job gave "
                "no sign of life in time, or another run of the job has published or aborted the batch; run "
                f"it again ({error.message})",
            ) from error

    # --- its life

    async def abort(self) -> None:
        """Abort the attempt and what it wrote. One that is over already is fine."""
        await abort_attempts(self._cluster, self.job, self.batch, [self.identity])


async def keep_job(cluster: Cluster, job: str) -> None:
    """Give a sign of life of a job, so that its attempts stay open."""
    await _ask(cluster, job, "KeepJob", {"job": job}, f"keeping the attempts of job {job!r} open")


async def publish(cluster: Cluster, job: str, batch: int, attempts: Iterable[AttemptId]) -> bool:
    """Make what these attempts wrote visible, as one, and abort the job's others up to this batch.

    False if the batch was published before; then the attempts are aborted. Raises ``ApiError`` if one of them
    is over; nothing is published then.
    """
    body = {"job": job, "batch": batch, "attempts": [attempt._asdict() for attempt in attempts]}
    asked_before = False

    async def ask() -> Any:
        nonlocal asked_before
        try:
            response = await _request(cluster, job, "PublishAttempts", body)
            return checked(response, f"publishing {_named(job, batch)}")
        except TidemillError as error:
            # The batch may have been published although the answer was lost.
            asked_before |= is_transient(error)
            raise

    response = await cluster.retrying(ask, timeout_ms=_PATIENCE_MS)
    return asked_before or not response.already_published


async def abort_attempts(cluster: Cluster, job: str, batch: int, attempts: Iterable[AttemptId] = ()) -> int:
    """Abort attempts of a job, or all that are open up to this batch if none are named; gives how many."""
    body = {"job": job, "batch": batch, "attempts": [attempt._asdict() for attempt in attempts]}
    response = await _ask(cluster, job, "AbortAttempts", body, f"aborting attempts of {_named(job, batch)}")
    return int(response.aborted_count)


async def list_jobs(cluster: Cluster) -> list[JobInfo]:
    """The jobs that all nodes know, by name."""

    async def ask() -> list[JobInfo]:
        await cluster.all_topics()
        found: list[JobInfo] = []
        for node_id in sorted(cluster.nodes):
            answer = await (await cluster.connection(node_id)).request("ListJobs", {})
            found += (
                JobInfo(each.job, each.published_batch, each.published_ms, each.open_attempts, each.idle_ms)
                for each in checked(answer, f"listing the jobs of node {node_id}").jobs
            )
        return sorted(found, key=lambda info: info.job)

    return await cluster.retrying(ask)


async def _ask(cluster: Cluster, job: str, name: str, body: dict[str, Any], what: str) -> Any:
    async def ask() -> Any:
        return checked(await _request(cluster, job, name, body), what)

    return await cluster.retrying(ask, timeout_ms=_PATIENCE_MS)


async def _request(cluster: Cluster, job: str, name: str, body: dict[str, Any]) -> Any:
    return await cluster.to_coordinator(
        job_key(job), name, body, key_type=TRANSACTION_KEY, timeout_ms=_ANSWER_MS
    )


def _named(job: str, batch: int) -> str:
    return f"batch {batch} of job {job!r}"
