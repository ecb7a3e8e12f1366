"""The shell around one shard of transactional ids: carries every decision to the partitions.

- A decision (PrepareCommit, PrepareAbort) is durable before its first marker is written.
- What was decided in one append is carried out as one: the markers of one partition are written in one step,
  and those of several partitions while nobody reads them all (``coordination.moments``). The markers for
  partitions that another node leads go there together.
- Every marker is durable before the transaction is Complete.
- A decision that a crash interrupted is found when the shard loads, and carried on from the start: a marker
  that a partition has already is written there again, which changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from tidemill.control.image import TRANSACTIONS_TOPIC
from tidemill.coordination.clock import pause
from tidemill.coordination.shell import ShardShell, resolve
from tidemill.coordination.turns import in_chunks, side_by_side
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.log.pace import Pace
from tidemill.net.retry import backoff_ms
from tidemill.transactions.messages import Producer, TransactionEnd
from tidemill.transactions.publications import PublicationDraft, Publications
from tidemill.transactions.records import decode_record, encode_record
from tidemill.transactions.state import TransactionsState
from tidemill.transactions.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tidemill.coordination.clock import Clock
    from tidemill.coordination.log import CoordinatorLog, ReplayedRecord
    from tidemill.transactions.messages import TopicPartition, TransactionPartitions
    from tidemill.transactions.records import StoredRecord
    from tidemill.transactions.settings import TransactionSettings
    from tidemill.wire.jobs import AttemptId

    _Markers = Mapping[TopicPartition, Sequence[TransactionEnd]]

__all__ = ("TransactionShard",)


_logger = logging.getLogger(__name__)

_FIRST_RETRY_MS = 50
#: A new leader is elected within a second where a process has died.
_LAST_RETRY_MS = 1_000
#: Ends of transactions in partitions that are gone through in one turn, and then those of one more at most.
_ENDS_PER_TURN = 5_000
_COMPLETED_PER_TURN = 200
_LISTED_PER_TURN = 200
#: So often a large publication is worked out again because what it rests on has changed.
_DRAFTS_MAX = 5
#: Markers that are written in one turn of the event loop, and then those of one more partition at most.
_MARKERS_PER_TURN = 100


class TransactionShard(ShardShell):
    """The shell of ``TransactionsState``. Keys are transactional ids."""

    def __init__(
        self,
        partition: int,
        log: CoordinatorLog,
        partitions: TransactionPartitions,
        settings: TransactionSettings,
        clock: Clock,
        on_stop: Callable[[TransactionShard], None],
        one_draft: asyncio.Lock,
    ) -> None:
        super().__init__(TRANSACTIONS_TOPIC, partition, log, clock, on_stop)
        self.state = TransactionsState(settings, self._append)
        self.publications = Publications(self.state)
        self._partitions = partitions
        #: All shards share it. One thread is enough: threads that compute take turns with the event loop.
        self._one_draft = one_draft
        self._finishing: dict[str, asyncio.Task[None]] = {}

    # -- the log ---------------------------------------------------------------------------------------

    def _append(self, records: Sequence[StoredRecord], batch: bytes | None = None) -> None:
        if batch is None:
            self._note_appended(self.log.append([encode_record(*record) for record in records]))
        else:
            self._note_appended(self.log.append_built(batch))
        decided = {
            name: value for name, value in records if isinstance(value, Transaction) and value.is_prepared
        }
        if decided:
            self._finish_soon(decided)

    def _replay_record(self, entry: ReplayedRecord, now_ms: int) -> bool:
        record = decode_record(entry.key, entry.value)
        if record is not None:
            self.state.replay(*record)
        return record is not None

    def _loaded(self, now_ms: int) -> Iterable[str]:
        self.state.loaded(now_ms)
        for decided in self.state.prepared():
            self._finish_soon(decided)
        return self.state.transactions

    # -- time ------------------------------------------------------------------------------------------

    def _next_deadline_ms(self, key: str) -> int | None:
        return self.state.next_deadline_ms(key)

    def _tick(self, key: str, now_ms: int) -> None:
        for name in self.state.tick(key, now_ms):
            _logger.info("the transaction of %r has timed out and is aborted", name)

    def watch(self, key: str) -> None:
        """Schedule the timeout of the id's transaction."""
        self._schedule(key)

    # -- jobs ------------------------------------------------------------------------------------------

    async def publish(self, job: str, batch: int, listed: Sequence[AttemptId]) -> bool:
        """Publish attempts as a batch; False if the batch was published before. Durable when it returns.

        Raises CONCURRENT_TRANSACTIONS if attempts of the job change all the time.
        """

        def begin(now_ms: int) -> bool | PublicationDraft:
            """Publish what is small at once; else give the draft. False if it was published before."""
            draft = self.publications.draft(job, batch, listed, now_ms)
            if draft is None or draft.is_large:
                return draft or False
            draft.adopt(self.log.build(draft.run()))
            return True

        published = await self.call(None, begin)
        if isinstance(published, PublicationDraft):
            published = await self._end_publication(published, begin)
        if not published:
            await self.abort_attempts_up_to(job, batch)
        return published

    async def _end_publication(
        self, draft: PublicationDraft, begin: Callable[[int], bool | PublicationDraft]
    ) -> bool:
        """Work out a large publication in a thread, and have it take effect.

        It is begun again if what it rests on has changed.
        """
        try:
            async with self._one_draft:
                published = await self._work_out(draft, begin)
        except ApiError:
            # A refusal, too, tells the client something about the state, which must be the newest.
            await self.confirm_newest()
            raise
        await self.barrier()
        if not published:
            await self.confirm_newest()
        return published

    async def _work_out(
        self, draft: PublicationDraft, begin: Callable[[int], bool | PublicationDraft]
    ) -> bool:
        for _ in range(_DRAFTS_MAX):
            built = await asyncio.get_running_loop().run_in_executor(None, self._build, draft)
            if self.call_now(None, partial(_adopt, draft, built)):
                return True
            begun = self.call_now(None, begin)
            if isinstance(begun, bool):
                return begun
            draft = begun
        raise ApiError(
            ErrorCode.concurrent_transactions,
            "attempts of the job changed all the time while the batch was prepared; try again in a moment",
        )

    def _build(self, draft: PublicationDraft) -> bytes:
        """The batch of a publication. Runs in a thread."""
        return self.log.build(draft.run(Pace().breathe))

    async def abort_attempts(self, job: str, listed: Sequence[AttemptId]) -> list[str]:
        """Abort the listed attempts; gives the slots of those that were open. Durable when it returns."""
        aborted: list[str] = []
        for part in in_chunks(listed, _LISTED_PER_TURN):
            aborted += await self._until_none(partial(self.publications.abort, job, part))
        return await self.call(None, lambda _: aborted)

    async def abort_attempts_up_to(self, job: str, batch: int) -> list[str]:
        """Abort a job's open attempts up to a batch; gives their slots. Durable when it returns."""
        aborted = await self._until_none(partial(self.publications.abort_left, job, batch))
        return await self.call(None, lambda _: aborted)

    async def _until_none(self, step: Callable[[int], list[str]]) -> list[str]:
        """What steps give that are repeated, each in a turn of its own, until one gives nothing."""
        found: list[str] = []
        while some := self.call_now(None, step):
            found += some
            await asyncio.sleep(0)
        return found

    # -- decisions -------------------------------------------------------------------------------------

    async def finished(self, transactional_ids: Iterable[str], timeout_ms: int) -> bool:
        """Wait until the decisions on these ids are carried out, but not longer; gives whether they are."""
        tasks = {self._finishing[each] for each in transactional_ids if each in self._finishing}
        if not tasks:
            return True
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        timer = self.clock.call_at(self.clock.now_ms() + timeout_ms, lambda: resolve(waiting, False))

        def done(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not tasks:
                resolve(waiting, True)

        watched = tuple(tasks)
        for task in watched:
            task.add_done_callback(done)
        try:
            return await waiting
        finally:
            timer.cancel()
            for task in watched:
                task.remove_done_callback(done)

    async def settled(self, timeout_ms: int) -> bool:
        """Wait until all decisions made so far are carried out, but not longer; gives whether they are."""
        return await self.finished(tuple(self._finishing), timeout_ms)

    def _finish_soon(self, decided: dict[str, Transaction]) -> None:
        assert self._finishing.keys().isdisjoint(decided), decided
        task = asyncio.get_running_loop().create_task(self._finish(decided))
        self._finishing.update(dict.fromkeys(decided, task))

    async def _finish(self, decided: dict[str, Transaction]) -> None:
        """Carry out what was decided in one append: markers, then Complete. Retries until that is done."""
        try:
            await self.barrier()
            markers = await self._markers_of(decided)
            here, elsewhere = self._partitions.by_leader(markers)
            work = [self._end_here({each: markers[each] for each in here})]
            work += [self._end({each: markers[each] for each in group}) for group in elsewhere]
            await side_by_side(((1, each) for each in work), _MARKERS_PER_TURN)
            await self._complete(decided)
        except TidemillError:
            # The shard has stopped: the next leader of the partition goes on from the log.
            assert self.stopped is not None
        except Exception:
            _logger.exception("the decision on the transaction of %r is stuck", next(iter(decided)))
            self.stop(ErrorCode.not_coordinator)
        finally:
            self._leave(decided)

    async def _markers_of(self, decided: Mapping[str, Transaction]) -> _Markers:
        """The markers that carry out decisions, by partition, in the order of the partitions."""
        markers: dict[TopicPartition, list[TransactionEnd]] = {}
        count = 0
        for value in decided.values():
            producer = Producer(value.producer_id, value.producer_epoch)
            marker = TransactionEnd(producer, value.commits, self.log.leader_epoch)
            for partition in value.partitions:
                markers.setdefault(partition, []).append(marker)
            count += len(value.partitions) + 1
            if count > _ENDS_PER_TURN:
                count = 0
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        return {partition: markers[partition] for partition in sorted(markers)}

    def _leave(self, decided: Iterable[str]) -> None:
        """Take these ids off the list of unfinished ones, so that another decision on them may follow."""
        current = asyncio.current_task()
        for transactional_id in decided:
            if self._finishing.get(transactional_id) is current:
                del self._finishing[transactional_id]

    async def _end_here(self, markers: _Markers) -> None:
        """Write the markers of partitions that this node leads, while nobody reads several of them."""
        async with self._partitions.together(markers):
            # Each by itself: a partition that takes no marker must not hold up the others.
            work = ((len(ends), self._end({each: ends})) for each, ends in markers.items())
            await side_by_side(work, _MARKERS_PER_TURN)

    async def _end(self, markers: _Markers) -> None:
        """Write the markers of one leader's partitions; retries until they are durable or cannot matter."""
        attempts = 0
        while True:
            self._raise_if_stopped()
            here, elsewhere = self._partitions.by_leader(markers)
            groups = [[each] for each in here] + elsewhere
            if len(groups) > 1:
                # By now they are led by several nodes.
                work = ((len(part), self._end({each: markers[each] for each in part})) for part in groups)
                await side_by_side(work, _MARKERS_PER_TURN)
                return
            failures = await self._partitions.write(markers)
            attempts += 1
            delay_ms = backoff_ms(attempts, _FIRST_RETRY_MS, _LAST_RETRY_MS)
            markers = {
                partition: left
                for partition, error in failures.items()
                if (left := await self._after_failure(partition, markers[partition], error, delay_ms))
            }
            if not markers:
                return
            await pause(self.clock, delay_ms)

    async def _after_failure(
        self,
        partition: TopicPartition,
        markers: Sequence[TransactionEnd],
        error: TidemillError,
        delay_ms: int,
    ) -> Sequence[TransactionEnd]:
        """The markers of a partition that have to be written again behind an error."""
        if error.code is ErrorCode.transaction_coordinator_fenced:
            self.stop(ErrorCode.not_coordinator)
            self._raise_if_stopped()
        if error.code is ErrorCode.unknown_topic_or_partition:
            _logger.info("%s-%d is deleted: no marker for %s", *partition, markers[0].producer)
            return ()
        if error.code is ErrorCode.invalid_producer_epoch:
            # A later epoch could write there only after this transaction's end, so its marker is there.
            _logger.warning("%s-%d refused a marker: %s", *partition, error.message)
            if len(markers) > 1:
                work = ((1, self._end({partition: [each]})) for each in markers)
                await side_by_side(work, _MARKERS_PER_TURN)
            return ()
        _logger.warning(
            "%s-%d: the marker of %s waits %d ms: %s",
            *partition,
            markers[0].producer,
            delay_ms,
            error.message,
        )
        return markers

    async def _complete(self, decided: dict[str, Transaction]) -> None:
        # These need not be atomic: after a crash in between, the rest is finished once more.
        for some in in_chunks(tuple(decided), _COMPLETED_PER_TURN):
            await self._complete_some({name: decided[name] for name in some})
            await asyncio.sleep(0)

    async def _complete_some(self, decided: dict[str, Transaction]) -> None:
        while True:
            self._raise_if_stopped()
            try:
                self.call_now(None, lambda now_ms: self.state.complete(decided, now_ms))
                self._leave(decided)
                return
            except TidemillError as error:
                _logger.warning(
                    "the end of %r's transaction cannot be noted: %s", next(iter(decided)), error.message
                )
            await pause(self.clock, _LAST_RETRY_MS)

    def _raise_if_stopped(self) -> None:
        if self.stopped is not None:
            raise self.stopped

    # -- stopping --------------------------------------------------------------------------------------

    def _die(self, code: ErrorCode) -> None:
        current = asyncio.current_task()
        for task in set(self._finishing.values()):
            if task is not current:
                task.cancel()

    async def close(self) -> None:
        """Stop and wait until nothing of the shard runs any more."""
        tasks = set(self._finishing.values())
        await super().close()
        await asyncio.gather(*tasks, return_exceptions=True)


def _adopt(draft: PublicationDraft, built: bytes, now_ms: int) -> bool:
    """Have a publication that was worked out take effect; False if it rests on what has changed."""
    del now_ms
    if not draft.is_current():
        return False
    draft.adopt(built)
    return True
