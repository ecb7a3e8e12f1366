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
from typing import TYPE_CHECKING

from tidemill.coordination.clock import pause
from tidemill.coordination.shell import ShardShell, resolve
from tidemill.coordination.turns import pause_after, side_by_side
from tidemill.errors import ErrorCode, TidemillError
from tidemill.net.retry import backoff_ms
from tidemill.transactions.messages import Producer, TransactionEnd
from tidemill.transactions.publications import Publications
from tidemill.transactions.records import chunks, decode_record, encode_record
from tidemill.transactions.state import TransactionsState
from tidemill.transactions.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tidemill.coordination.clock import Clock
    from tidemill.coordination.log import CoordinatorLog, ReplayedRecord
    from tidemill.transactions.messages import TopicPartition, TransactionPartitions
    from tidemill.transactions.records import StoredRecord
    from tidemill.transactions.settings import TransactionSettings

    _Markers = Mapping[TopicPartition, Sequence[TransactionEnd]]

__all__ = ("TRANSACTIONS_TOPIC", "TransactionShard")

TRANSACTIONS_TOPIC = "__transaction_state"

_logger = logging.getLogger(__name__)

_FIRST_RETRY_MS = 50
#: A new leader is elected within a second where a process has died.
_LAST_RETRY_MS = 1_000
_DECISIONS_PER_TURN = 50
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
    ) -> None:
        super().__init__(TRANSACTIONS_TOPIC, partition, log, clock, on_stop)
        self.state = TransactionsState(settings, self._append)
        self.publications = Publications(self.state)
        self._partitions = partitions
        self._finishing: dict[str, asyncio.Task[None]] = {}

    # -- the log ---------------------------------------------------------------------------------------

    def _append(self, records: Sequence[StoredRecord]) -> None:
        self._note_appended(self.log.append([encode_record(*record) for record in records]))
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
            markers: dict[TopicPartition, list[TransactionEnd]] = {}
            for number, value in enumerate(decided.values(), start=1):
                producer = Producer(value.producer_id, value.producer_epoch)
                marker = TransactionEnd(producer, value.commits, self.log.leader_epoch)
                for partition in value.partitions:
                    markers.setdefault(partition, []).append(marker)
                await pause_after(number, _DECISIONS_PER_TURN)
            here, elsewhere = self._partitions.by_leader(sorted(markers))
            work = [self._end_here({each: markers[each] for each in here})]
            work += [self._end({each: markers[each] for each in group}) for group in elsewhere]
            await side_by_side(((1, each) for each in work), _MARKERS_PER_TURN)
            await self._complete(decided)
        except TidemillError:
            # The shard has stopped: whoever serves the partition next goes on from the log.
            assert self.stopped is not None
        except Exception:
            _logger.exception("the decision on the transaction of %r is stuck", next(iter(decided)))
            self.stop(ErrorCode.not_coordinator)
        finally:
            self._leave(decided)

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
        for chunk in chunks(decided.items()):
            await self._complete_some({name: decided[name] for name, _ in chunk})

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
