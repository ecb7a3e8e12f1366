"""The jobs of this node as their clients use them: finding the shard of a job, waiting until it is visible.

Unlike Kafka's responses, those about jobs can carry a message: whatever is refused raises
``TidemillError``, with a code that says whether the same request can succeed later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tidemill.coordination.shards import client_error
from tidemill.coordination.turns import give_way, in_chunks, in_slices, sorted_in_slices
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.transactions.attempts import check_count, check_job
from tidemill.transactions.transaction import ProducerIdNeeded
from tidemill.wire.jobs import job_key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tidemill.coordination.shards import Shards
    from tidemill.transactions.publications import JobListing
    from tidemill.transactions.settings import TransactionSettings
    from tidemill.transactions.shard import TransactionShard
    from tidemill.wire.jobs import AttemptId

__all__ = ("JobCoordinator", "JobsListed", "with_producer_id")

_T = TypeVar("_T")


_LISTED_AT_ONCE = 500


class JobsListed(NamedTuple):
    """All jobs of the shards that could be asked, and the error that kept others from answering."""

    jobs: list[JobListing]
    failure: TidemillError | None


class JobCoordinator:
    """Opens attempts and publishes them. Every result is durable when it is returned."""

    def __init__(
        self,
        shards: Shards[TransactionShard],
        settings: TransactionSettings,
        next_producer_id: Callable[[], Awaitable[int]],
    ) -> None:
        self._shards = shards
        self._settings = settings
        self._next_producer_id = next_producer_id

    async def open_attempt(self, job: str, batch: int, timeout_ms: int) -> AttemptId | None:
        """Open an attempt of a batch; gives None if the batch was published before."""
        shard = await self._shard_of(job)

        def handler(fresh_id: int | None, now_ms: int) -> AttemptId | None:
            opened = shard.publications.open_attempt(job, batch, timeout_ms, fresh_id, now_ms)
            if opened is not None:
                shard.watch(opened.transactional_id)
            return opened

        try:
            return await with_producer_id(self._next_producer_id, shard, None, handler)
        except TidemillError as failure:
            raise _for_client(failure) from failure

    def check_count(self, listed: int) -> None:
        """Raise INVALID_REQUEST if a request lists more attempts than one may."""
        check_count(listed, self._settings.attempts_max)

    async def publish(self, job: str, batch: int, listed: Sequence[AttemptId]) -> bool:
        """Make what the listed attempts wrote visible; False if the batch was published before.

        Returns when it is visible. Raises CONCURRENT_TRANSACTIONS if that takes long: it is published then,
        and a repeated request is told so as soon as it is visible.
        """
        shard = await self._shard_of(job)
        try:
            published = await shard.publish(job, batch, listed)
        except TidemillError as failure:
            raise _for_client(failure) from failure
        await self._wait_until_visible(shard, job, batch)
        return published

    async def abort(self, job: str, batch: int, listed: Sequence[AttemptId]) -> int:
        """Abort the listed attempts, or all of the job up to the batch; gives how many there were."""
        shard = await self._shard_of(job)
        try:
            shard.publications.check_abort(job, batch, listed)
            aborted = await (
                shard.abort_attempts(job, listed) if listed else shard.abort_attempts_up_to(job, batch)
            )
        except TidemillError as failure:
            raise _for_client(failure) from failure
        await shard.finished(aborted, self._settings.end_wait_ms)
        return len(aborted)

    async def keep(self, job: str) -> None:
        """Keep the job's attempts from timing out: its client is alive."""
        shard = await self._shard_of(job)
        shard.call_now(None, lambda now_ms: shard.publications.keep(job, now_ms))
        try:
            await shard.confirm_newest()
        except TidemillError as failure:
            raise _for_client(failure) from failure

    async def listing(self) -> JobsListed:
        """The jobs of all shards of this node, by name."""
        found: list[tuple[TransactionShard, list[str], int]] = []
        failures = await self._shards.read_all(
            lambda shard, now_ms: found.append((shard, shard.publications.names(), now_ms))
        )
        jobs: dict[str, JobListing] = {}
        for shard, names, now_ms in found:
            for some in in_chunks(names, _LISTED_AT_ONCE):
                jobs |= {each.job: each for each in shard.publications.listing(some, now_ms)}
                await give_way()
        ordered = await in_slices(jobs[name] for name in await sorted_in_slices(tuple(jobs)))
        return JobsListed(ordered, _for_client(failures[0]) if failures else None)

    async def _wait_until_visible(self, shard: TransactionShard, job: str, batch: int) -> None:
        if not await shard.finished(shard.publications.unfinished(job), self._settings.publication_wait_ms):
            raise ApiError(
                ErrorCode.concurrent_transactions,
                f"batch {batch} of job {job!r} is published, but not visible everywhere yet; ask again until "
                "the answer is that it is",
            )
        if shard.stopped is not None:
            raise shard.stopped

    async def _shard_of(self, job: str) -> TransactionShard:
        check_job(job)
        try:
            return await self._shards.of(job_key(job))
        except TidemillError as failure:
            raise _for_client(failure) from failure


async def with_producer_id(
    next_producer_id: Callable[[], Awaitable[int]],
    shard: TransactionShard,
    key: str | None,
    handler: Callable[[int | None, int], _T],
) -> _T:
    """Run a handler that may need a new producer id; such an id is fetched and the handler run again."""
    try:
        return await shard.call(key, lambda now_ms: handler(None, now_ms))
    except ProducerIdNeeded:
        fresh_id = await next_producer_id()
    return await shard.call(key, lambda now_ms: handler(fresh_id, now_ms))


def _for_client(failure: TidemillError) -> ApiError:
    if failure.code is ErrorCode.message_too_large:
        return ApiError(
            ErrorCode.record_list_too_large,
            "nothing is changed: what so many attempts wrote to does not fit one batch of the log of "
            f"transactions, {failure.message}; write the batch with fewer tasks",
        )
    code = failure.code if failure.code is ErrorCode.record_list_too_large else client_error(failure)
    return ApiError(code, failure.message)
