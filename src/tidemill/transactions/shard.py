"""The shell around one shard of transactional ids: carries every decision to the partitions.

- A decision (Prepare…) is durable before its first marker is written.
- Every marker is durable before the transaction is Complete.
- A decision that a crash interrupted is found when the shard loads, and carried on from the start: a marker
  that a partition has already is written there again, which changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tidemill.coordination.log import ReplayedMarker
from tidemill.coordination.shell import ShardShell, resolve
from tidemill.errors import ErrorCode, TidemillError
from tidemill.transactions.messages import Marker, Producer
from tidemill.transactions.records import CorruptTransactionRecord, decode_record, encode_record
from tidemill.transactions.state import TransactionsState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tidemill.coordination.clock import Clock
    from tidemill.coordination.log import CoordinatorLog, ReplayedRecord
    from tidemill.transactions.messages import TopicPartition, TransactionPartitions
    from tidemill.transactions.settings import TransactionSettings
    from tidemill.transactions.transaction import Transaction

__all__ = ("TRANSACTIONS_TOPIC", "TransactionShard")

TRANSACTIONS_TOPIC = "__transaction_state"

_logger = logging.getLogger(__name__)

_FIRST_RETRY_MS = 50
_LAST_RETRY_MS = 5_000


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
        self._partitions = partitions
        self._finishing: dict[str, asyncio.Task[None]] = {}

    # -- the log ---------------------------------------------------------------------------------------

    def _append(self, records: Sequence[tuple[str, Transaction | None]]) -> None:
        self._note_appended(self.log.append([encode_record(*record) for record in records]))
        for transactional_id, value in records:
            if value is not None and value.is_prepared:
                self._finish_soon(transactional_id, value)

    def _replay(self, entry: ReplayedRecord | ReplayedMarker, now_ms: int) -> None:
        where = f"{self.topic}-{self.partition} at offset {entry.offset}"
        if isinstance(entry, ReplayedMarker):
            raise CorruptTransactionRecord(f"{where}: a transaction marker does not belong there")
        try:
            record = decode_record(entry.key, entry.value)
        except CorruptTransactionRecord as error:
            raise CorruptTransactionRecord(
                f"{where}: {error.message}. The transactional ids of that partition are not served; look at"
                " it with 'tidemill log dump'"
            ) from error
        if record is None:
            _logger.warning("%s: skipped a record whose kind is unknown to this version", where)
        else:
            self.state.replay(*record)

    def _loaded(self, now_ms: int) -> Iterable[str]:
        for transactional_id, value in self.state.prepared():
            self._finish_soon(transactional_id, value)
        return self.state.transactions

    # -- time ------------------------------------------------------------------------------------------

    def _next_deadline_ms(self, key: str) -> int | None:
        return self.state.next_deadline_ms(key)

    def _tick(self, key: str, now_ms: int) -> None:
        if self.state.tick(key, now_ms):
            _logger.info("the transaction of %r has timed out and is aborted", key)

    # -- decisions -------------------------------------------------------------------------------------

    async def finished(self, transactional_id: str, timeout_ms: int) -> None:
        """Wait until the id's decision, if there is one, is carried out; at most so long."""
        task = self._finishing.get(transactional_id)
        if task is None:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self.clock.call_at(self.clock.now_ms() + timeout_ms, lambda: resolve(waiting, None))

        def done(_: object) -> None:
            resolve(waiting, None)

        task.add_done_callback(done)
        try:
            await waiting
        finally:
            timer.cancel()
            task.remove_done_callback(done)

    def _finish_soon(self, transactional_id: str, prepared: Transaction) -> None:
        assert transactional_id not in self._finishing, transactional_id
        task = asyncio.get_running_loop().create_task(self._finish(transactional_id, prepared))
        self._finishing[transactional_id] = task

    async def _finish(self, transactional_id: str, prepared: Transaction) -> None:
        """Carry a decision to its end, however long that takes."""
        try:
            await self.barrier()
            marker = Marker(
                Producer(prepared.producer_id, prepared.producer_epoch),
                prepared.commits,
                self.log.leader_epoch,
            )
            await asyncio.gather(*(self._end_in(place, marker) for place in sorted(prepared.partitions)))
            await self._complete(transactional_id, prepared)
        except TidemillError:
            # The shard has stopped: whoever serves the partition next goes on from the log.
            assert self.stopped is not None
        except Exception:
            _logger.exception("the decision on the transaction of %r is stuck", transactional_id)
            self.stop(ErrorCode.not_coordinator)
        finally:
            self._finishing.pop(transactional_id, None)

    async def _end_in(self, place: TopicPartition, marker: Marker) -> None:
        """Write one partition's marker, again and again until it is durable or cannot matter any more."""
        delay_ms = _FIRST_RETRY_MS
        while True:
            self._raise_if_stopped()
            try:
                await self._partitions.write_marker(place, marker)
                return
            except TidemillError as error:
                if error.code is ErrorCode.transaction_coordinator_fenced:
                    self.stop(ErrorCode.not_coordinator)
                    continue
                if error.code is ErrorCode.unknown_topic_or_partition:
                    _logger.info("%s-%d is deleted: no marker for %s", *place, marker.producer)
                    return
                if error.code is ErrorCode.invalid_producer_epoch:
                    # A later epoch has written there, which it could only after this transaction's end.
                    _logger.warning(
                        "%s-%d refused the marker of %s: %s", *place, marker.producer, error.message
                    )
                    return
                _logger.warning(
                    "%s-%d: the marker of %s waits %d ms: %s",
                    *place,
                    marker.producer,
                    delay_ms,
                    error.message,
                )
            await self._sleep(delay_ms)
            delay_ms = min(2 * delay_ms, _LAST_RETRY_MS)

    async def _complete(self, transactional_id: str, prepared: Transaction) -> None:
        while True:
            self._raise_if_stopped()
            try:
                self.call_now(
                    transactional_id,
                    lambda now_ms: self.state.complete(transactional_id, prepared, now_ms),
                )
                return
            except TidemillError as error:
                _logger.warning(
                    "the end of %r's transaction cannot be noted: %s", transactional_id, error.message
                )
            await self._sleep(_LAST_RETRY_MS)

    def _raise_if_stopped(self) -> None:
        if self.stopped is not None:
            raise self.stopped

    async def _sleep(self, duration_ms: int) -> None:
        awake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self.clock.call_at(self.clock.now_ms() + duration_ms, lambda: resolve(awake, None))
        try:
            await awake
        finally:
            timer.cancel()

    # -- stopping --------------------------------------------------------------------------------------

    def _die(self, code: ErrorCode) -> None:
        current = asyncio.current_task()
        for task in self._finishing.values():
            if task is not current:
                task.cancel()

    async def close(self) -> None:
        """Stop and wait until nothing of the shard runs any more."""
        tasks = tuple(self._finishing.values())
        await super().close()
        await asyncio.gather(*tasks, return_exceptions=True)
