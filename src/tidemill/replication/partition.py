"""One partition as its leader sees it: the log, the high watermark, and who waits for it.

The rules of durability.md live here:

- the high watermark is the durable offset (this replica is the whole in-sync set), and nobody is
  told of, or reads, anything at or above it;
- every append asks for a flush; ``begin_flush`` / ``flushed`` / ``flush_failed`` are called by the flusher;
- a failed flush stops the partition: waiting producers and all later requests get ``KAFKA_STORAGE_ERROR``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple
from uuid import UUID

from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, DamagedBatch, ErrorCode, StorageError, SyncFailed
from tidemill.log.cleaner import CleanedSegment, CleaningOrder
from tidemill.log.compacting import (
    begin_swap,
    cleanable_part,
    end_swap,
    order_cleaning,
    roll_for_compaction,
)
from tidemill.log.compaction import NO_FLOOR, is_due
from tidemill.log.epochs import EpochHistory
from tidemill.log.flush import FlushJob
from tidemill.log.incoming import PreparedBatch, prepare_batch
from tidemill.log.log import Appended, PartitionLog
from tidemill.log.measuring import Measured, measure
from tidemill.log.reading import ReadBudget
from tidemill.log.retention import retained_start
from tidemill.log.segment import Segment
from tidemill.log.storage import Buffer, StorageFile
from tidemill.records.batch import BatchHeader
from tidemill.records.control import Marker, build_marker
from tidemill.records.rewriting import no_breath

__all__ = ("ActiveProducer", "Partition", "Waiter")

#: Called with None when the high watermark has passed, or with the error that stopped the partition.
Waiter = Callable[[StorageError | None], None]

_NEVER = 2**63 - 1


class ActiveProducer(NamedTuple):
    """A producer that has written here, as far as it is remembered."""

    producer_id: int
    epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    #: -1: no transaction is open.
    transaction_start_offset: int


class Partition:
    """A partition that this node leads."""

    def __init__(
        self,
        topic: str,
        topic_id: UUID,
        index: int,
        log: PartitionLog,
        *,
        leader_epoch: int,
        request_flush: Callable[[Partition], None],
        max_decompressed_bytes: int,
    ) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.index = index
        self.log = log
        self.leader_epoch = leader_epoch
        #: What clients have written and read here since it was opened; counted by the handlers.
        self.bytes_in = 0
        self.bytes_out = 0
        #: Owned by the flusher: a flush of this partition is planned or under way.
        self.flush_scheduled = False
        self._request_flush = request_flush
        self._max_decompressed_bytes = max_decompressed_bytes
        self._waiters: list[tuple[int, int, Waiter]] = []
        self._waiter_numbers = count()
        self._readers: dict[object, Callable[[], None]] = {}
        self._unflushed_since_ms = _NEVER
        self._stopped = False
        #: Producer id → epoch of transactions that may write here, as far as this process was told.
        self._allowed: dict[int, int] = {}
        #: From this offset on somebody needs every record: neither retention nor compaction goes there.
        self.retention_floor: Callable[[], int] = lambda: NO_FLOOR

    def __repr__(self) -> str:
        return f"<Partition {self.topic}-{self.index} epoch {self.leader_epoch}>"

    # --- offsets

    @property
    def high_watermark(self) -> int:
        return self.log.durable_offset

    @property
    def last_stable_offset(self) -> int:
        return self.log.last_stable_offset

    @property
    def log_start_offset(self) -> int:
        return self.log.log_start_offset

    @property
    def epochs(self) -> EpochHistory:
        """Which leader epoch wrote from where on. The present one counts before its first record, too.

        A reader that was told the present epoch at the log end must find it here after the next restart.
        """
        history = self.log.epochs
        if history.latest_epoch >= self.leader_epoch:
            return history
        return history.extended(self.leader_epoch, self.log.end_offset)

    @property
    def config(self) -> TopicConfig:
        return self.log.config

    def configure(self, config: TopicConfig) -> None:
        self.log.config = config

    # --- writing

    def append(self, data: Buffer, now_ms: int, *, records_checked: bool = False) -> Appended:
        """Check and write one producer batch; with ``records_checked`` the caller has looked at its records.

        Raises ``ApiError`` or ``StorageError``; then nothing changed.
        """
        return self.append_prepared(self.prepare(data, now_ms, records_checked=records_checked), now_ms)

    def prepare(
        self,
        data: Buffer,
        now_ms: int,
        *,
        records_checked: bool = False,
        breathe: Callable[[], None] = no_breath,
    ) -> PreparedBatch:
        """Check one producer batch and bring it into the topic's form. Changes nothing; a thread may call it.

        Raises ``ApiError``.
        """
        config = self.log.config
        prepared = prepare_batch(
            data,
            config,
            now_ms,
            self._max_decompressed_bytes,
            records_checked=records_checked,
            breathe=breathe,
        )
        return PreparedBatch(*prepared, config)

    def append_prepared(self, batch: PreparedBatch, now_ms: int) -> Appended:
        """Write one batch that was prepared for the present configuration. Raises as ``append`` does."""
        assert batch.config is self.log.config, "the batch was prepared for another configuration"
        if self.log.failure is not None:
            raise self.log.failure
        if batch.header.is_idempotent:
            self._check_transaction(batch.header)
        return self._appended(self.log.append(batch.data, batch.header, self.leader_epoch, now_ms), now_ms)

    def _appended(self, appended: Appended, now_ms: int) -> Appended:
        if self._unflushed_since_ms == _NEVER:
            self._unflushed_since_ms = now_ms
        self._request_flush(self)
        return appended

    # --- transactions

    def begin_transaction(self, producer_id: int, producer_epoch: int) -> None:
        """Let a producer write transactional batches until a marker ends them.

        Called once the coordinator knows that the partition takes part.
        """
        self._allowed[producer_id] = producer_epoch

    def may_write(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether the producer has a transaction here that is known to its coordinator."""
        if self._allowed.get(producer_id) == producer_epoch:
            return True
        entry = self.log.producers.get(producer_id)
        is_open = producer_id in self.log.producers.transactions.open
        return is_open and entry is not None and entry.epoch == producer_epoch

    def _check_transaction(self, header: BatchHeader) -> None:
        """A batch outside of a transaction that its coordinator knows of would hang for ever: refuse it."""
        if header.is_transactional:
            if not self.may_write(header.producer_id, header.producer_epoch):
                raise ApiError(
                    ErrorCode.invalid_txn_state,
                    f"{self.topic}-{self.index} is not part of a transaction of producer "
                    f"{header.producer_id} epoch {header.producer_epoch}",
                )
        elif header.producer_id in self.log.producers.transactions.open:
            raise ApiError(
                ErrorCode.invalid_txn_state,
                f"producer {header.producer_id} has an open transaction here and sent a batch outside of it",
            )

    def write_marker(
        self, producer_id: int, producer_epoch: int, *, commit: bool, coordinator_epoch: int, now_ms: int
    ) -> Appended:
        """End a producer's transaction here. Raises as ``append`` does."""
        marker = Marker(commit, coordinator_epoch)
        data = build_marker(
            marker, producer_id=producer_id, producer_epoch=producer_epoch, timestamp_ms=now_ms
        )
        appended = self.log.append_marker(data, marker, self.leader_epoch, now_ms)
        self._allowed.pop(producer_id, None)
        return self._appended(appended, now_ms)

    def write_markers(self, ends: Sequence[tuple[int, int, Marker]], *, now_ms: int) -> Appended:
        """End transactions here, each as (producer id, producer epoch, marker): all of them or none.

        No reader sees the end of one without the others'. Raises as ``append`` does.
        """
        built = [
            (
                build_marker(
                    marker, producer_id=producer_id, producer_epoch=producer_epoch, timestamp_ms=now_ms
                ),
                marker,
            )
            for producer_id, producer_epoch, marker in ends
        ]
        appended = self.log.append_markers(built, self.leader_epoch, now_ms)
        for producer_id, _, _ in ends:
            self._allowed.pop(producer_id, None)
        return self._appended(appended, now_ms)

    def producers(self) -> Iterator[ActiveProducer]:
        """What DescribeProducers tells."""
        started = self.log.producers.transactions.open
        for producer_id, entry in self.log.producers:
            yield ActiveProducer(
                producer_id,
                entry.epoch,
                entry.last_sequence,
                entry.last_append_ms,
                entry.coordinator_epoch,
                started.get(producer_id, -1),
            )

    def when_committed(self, offset: int, waiter: Waiter) -> None:
        """Call ``waiter`` once everything below ``offset`` is durable; at once if it is."""
        if self.log.failure is not None:
            waiter(self.log.failure)
        elif self.log.durable_offset >= offset:
            waiter(None)
        else:
            heapq.heappush(self._waiters, (offset, next(self._waiter_numbers), waiter))
            self._request_flush(self)

    # --- flushing, called by the flusher

    @property
    def is_dirty(self) -> bool:
        return self.log.failure is None and self.log.end_offset > self.log.durable_offset

    def flush_due_ms(self) -> int:
        """When the next flush should start, on the clock that ``append`` was given; a past time means now.

        ``flush.ms`` and ``flush.messages`` let appends that nobody waits for gather; both are off by default.
        """
        config = self.log.config
        unflushed = self.log.end_offset - self.log.durable_offset
        lazy = config.flush_ms < _NEVER or config.flush_messages < _NEVER
        if self._waiters or not lazy or unflushed >= config.flush_messages:
            return 0
        return min(_NEVER, self._unflushed_since_ms + config.flush_ms)

    def begin_flush(self) -> FlushJob | None:
        """What there is to flush; the flusher says how it went by ``flushed`` or ``flush_failed``."""
        self._unflushed_since_ms = _NEVER
        job = self.log.begin_flush()
        if job is None:
            self._let_go_if_stopped()
        return job

    def flushed(self, job: FlushJob) -> None:
        if self.log.failure is not None:
            # Another sync has failed since the job began: after that, a success proves nothing.
            self.flush_failed(self.log.failure)
            return
        self._let_go_if_stopped()
        self.log.finish_flush(job)
        reached = self.log.durable_offset
        while self._waiters and self._waiters[0][0] <= reached:
            heapq.heappop(self._waiters)[2](None)
        self._wake_readers()

    def flush_failed(self, error: StorageError) -> None:
        """Stop for good: after a failed sync nobody knows what is on disk."""
        self._let_go_if_stopped()
        self.log.fail(error)
        waiters, self._waiters = self._waiters, []
        for _, _, waiter in waiters:
            waiter(error)
        self._wake_readers()

    # --- reading

    def subscribe(self, key: object, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever there may be more to read, until ``unsubscribe``."""
        self._readers[key] = wake

    def unsubscribe(self, key: object) -> None:
        self._readers.pop(key, None)

    def _wake_readers(self) -> None:
        for wake in list(self._readers.values()):
            wake()

    def upper_offset(self, *, committed: bool) -> int:
        """Where a reader stops: the last stable offset for committed data, else the high watermark."""
        return self.last_stable_offset if committed else self.high_watermark

    def check_position(self, offset: int) -> None:
        """Raise ``ApiError`` unless a reader may stand at ``offset``: from the log start to the log end.

        Between where readers stop and the log end there is just nothing to read yet.
        """
        self.log.check_readable(offset, self.log.end_offset)

    def read(
        self,
        offset: int,
        max_bytes: int,
        *,
        at_least_one: bool,
        committed: bool = False,
        budget: ReadBudget | None = None,
    ) -> memoryview:
        """Whole batches from the one that holds ``offset``, each of them checked.

        Raises ``DamagedBatch`` if that one is damaged; those behind it can be asked for. ``budget`` is shared
        by the reads of one turn of the event loop.
        """
        if self.log.failure is not None:
            raise self.log.failure
        self.check_position(offset)
        upper = self.upper_offset(committed=committed)
        if offset >= upper:
            return memoryview(b"")
        return self.log.read_on(offset, max_bytes, upper, at_least_one=at_least_one, budget=budget)

    def measure(self, start_offset: int, end_offset: int | None, max_bytes: int | None) -> Measured:
        """Bytes of log from an offset to another one, or to the last stable one; see ``measuring``.

        Raises ``ApiError`` if they are not in the log.
        """
        if self.log.failure is not None:
            raise self.log.failure
        self.check_position(start_offset)
        if end_offset is None:
            # As in ``read``, a start behind the last stable offset is a good one.
            end_offset = max(start_offset, self.last_stable_offset)
        elif end_offset < start_offset:
            raise ApiError(
                ErrorCode.invalid_request,
                f"a range of {self.topic}-{self.index} cannot start at offset {start_offset} and end at "
                f"{end_offset}",
            )
        self.check_position(end_offset)
        if start_offset >= self.high_watermark:
            return Measured(start_offset, 0)
        try:
            return measure(self.log, start_offset, min(end_offset, self.high_watermark), max_bytes)
        except DamagedBatch as damage:
            self.log.on_damage(damage)
            raise

    def delete_records(self, offset: int) -> list[Segment]:
        """Move the log start to ``offset`` (-1: the high watermark); returns what can be discarded."""
        if self.log.failure is not None:
            raise self.log.failure
        target = self.high_watermark if offset == -1 else offset
        if target < 0 or target > self.high_watermark:
            raise ApiError(
                ErrorCode.offset_out_of_range,
                f"cannot delete up to offset {target}: {self.topic}-{self.index} ends at "
                f"{self.high_watermark}",
            )
        return self._move_start(target)

    def apply_retention(self, now_ms: int) -> list[Segment]:
        """Move the log start past segments that are too old or too many; returns what can be discarded."""
        log = self.log
        if log.failure is not None:
            return []
        start = retained_start(log.segments, log.config, durable_offset=log.durable_offset, now_ms=now_ms)
        if start is None:
            return []
        start = min(start, self.retention_floor())
        if start == log.end_offset:
            log.roll()
            self._request_flush(self)
        return self._move_start(start)

    def _move_start(self, offset: int) -> list[Segment]:
        try:
            return self.log.move_start(offset)
        except SyncFailed as error:
            # Whether the new start is on disk is unknown: the same as any other failed sync.
            self.flush_failed(error)
            raise

    # --- compaction

    def compaction_due(self, now_ms: int) -> float | None:
        """How much of the log is dirty, if it is time to compact it; None if not."""
        log = self.log
        if log.failure is not None or not log.config.compacts:
            return None
        if roll_for_compaction(log, now_ms):
            self._request_flush(self)
        cleanable = cleanable_part(log, now_ms, self.retention_floor())
        return cleanable.dirty_ratio if is_due(cleanable, log.config, now_ms) else None

    def order_cleaning(self, now_ms: int) -> CleaningOrder | None:
        """What a compaction would do now; None if nothing."""
        return order_cleaning(self.log, now_ms, self.retention_floor())

    def begin_swap(self, cleaned: CleanedSegment) -> None:
        """Before a compacted segment takes its place on disk. Raises ``StorageError`` if it cannot now."""
        begin_swap(self.log, cleaned)

    def end_swap(self, cleaned: CleanedSegment, error: StorageError | None = None) -> list[StorageFile]:
        """When it has done so, or has failed to; returns the old files, to be closed."""
        files = end_swap(self.log, cleaned, error)
        if self.log.failure is not None:
            self.flush_failed(self.log.failure)
        return files

    def check_leader_epoch(self, epoch: int) -> None:
        """Compare the epoch that a client believes in; -1 means that it does not say."""
        if epoch < 0 or epoch == self.leader_epoch:
            return
        where = f"{self.topic}-{self.index} is at leader epoch {self.leader_epoch}, the request says {epoch}"
        if epoch < self.leader_epoch:
            raise ApiError(ErrorCode.fenced_leader_epoch, where)
        raise ApiError(ErrorCode.unknown_leader_epoch, where)

    def close(self) -> None:
        """Stop in an orderly way; the caller has made sure that no flush is under way."""
        if self.log.failure is None:
            self.log.close()
        else:
            self.log.abandon()

    def stop(self, error: StorageError) -> None:
        """End everything that waits, because the partition goes away, and let go of its files."""
        self.flush_failed(error)
        self._stopped = True
        if not self.flush_scheduled:
            self._let_go_if_stopped()

    def _let_go_if_stopped(self) -> None:
        # Not while a flush is planned or under way: it needs the files.
        if self._stopped:
            self.log.abandon()
