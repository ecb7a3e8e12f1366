"""One partition on this node: its log, its replication state, and the requests that wait for it.

The rules of durability.md live here:

- nobody is told of, or reads, anything at or above the high watermark, which is the replication state's and
  not the log's durable offset;
- every append asks for a flush; ``begin_flush`` / ``flushed`` / ``flush_failed`` are called by the flusher;
- a failed flush stops the partition: waiting producers and all later requests get ``KAFKA_STORAGE_ERROR``;
- when another node becomes the leader, waiting requests get ``NOT_LEADER_OR_FOLLOWER``, and so do later ones,
  until this node leads again.

With several replicas, ``as_leader`` answers the followers and proposes in-sync sets, and ``as_follower``
takes what was fetched and cuts the log where it has diverged. What both roles share is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from uuid import UUID

from tidemill.cluster.messages import PartitionId
from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, DamagedBatch, ErrorCode, StorageError, SyncFailed, TidemillError
from tidemill.log.compaction.cleaner import CleanedSegment, CleaningOrder
from tidemill.log.compaction.policy import NO_FLOOR, is_due
from tidemill.log.compaction.runs import (
    begin_swap,
    cleanable_part,
    end_swap,
    order_cleaning,
    roll_for_compaction,
)
from tidemill.log.creation import LogCreation
from tidemill.log.epochs import EpochHistory
from tidemill.log.flush import FlushJob
from tidemill.log.incoming import PreparedBatch, prepare_batch
from tidemill.log.log import Appended, PartitionLog
from tidemill.log.producer_state.transactions import AbortedTransaction
from tidemill.log.retention import retained_start
from tidemill.log.segments.by_time import TimeSearch
from tidemill.log.segments.measuring import Measured, measure
from tidemill.log.segments.segment import Segment
from tidemill.log.segments.segment_reader import ReadBudget
from tidemill.log.storage import Buffer, StorageFile
from tidemill.records.batch import BatchHeader
from tidemill.records.control import Marker, MarkerEnd
from tidemill.records.rewriting import no_breath
from tidemill.replication.follower_side import FollowerSide
from tidemill.replication.leader_side import LeaderSide
from tidemill.replication.rules.assignment import NO_LEADER, PartitionAssignment
from tidemill.replication.rules.state import ReplicationState, Role
from tidemill.replication.rules.transaction_permits import TransactionPermits, TransactionQuestion
from tidemill.replication.rules.waiting import OffsetWaiters, Waiter

__all__ = ("ActiveProducer", "Partition", "Waiter")

_NEVER = 2**63 - 1
#: Followers are given batches of at least this size from memory. Copies of small ones would save little.
_LARGE_BATCH_BYTES = 64 * 1024
#: Bound once, because every batch compares with them, and ``Role.LEADER`` costs more than the comparison.
_LEADER, _FOLLOWER = Role.LEADER, Role.FOLLOWER


class ActiveProducer(NamedTuple):
    """A producer whose state the partition still holds."""

    producer_id: int
    epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    #: -1: no transaction is open.
    transaction_start_offset: int


class Partition:
    """A partition on this node. Without an assignment it follows nobody, until ``apply`` tells its role."""

    def __init__(
        self,
        topic: str,
        topic_id: UUID,
        index: int,
        log: PartitionLog,
        *,
        request_flush: Callable[[Partition], None],
        max_decompressed_bytes: int,
        assignment: PartitionAssignment | None = None,
        node_id: int | None = None,
    ) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.index = index
        self.id = PartitionId(topic_id, index)
        #: This node's copy of the records. Only ``replication`` looks at it; others ask the partition.
        self.local_log = log
        known = log.high_watermark_checkpoint
        self._state = ReplicationState(
            high_watermark=log.log_start_offset if known is None else known,
            durable_offset=log.durable_offset,
            is_lost=log.is_repaired,
        )
        #: What only a leader does, and what only a follower does.
        self.as_leader = LeaderSide(self, self._state)
        self.as_follower = FollowerSide(self, self._state)
        #: The newest record of the metadata; None before the first.
        self.assignment: PartitionAssignment | None = None
        #: What the metadata said while the end of the log was being cut.
        self._deferred: tuple[PartitionAssignment, int] | None = None
        #: What clients have written and read here since it was opened; counted by the handlers.
        self.bytes_in = 0
        self.bytes_out = 0
        #: Owned by the flusher: a flush of this partition is planned or under way.
        self.flush_scheduled = False
        #: Set by the flusher: when the flush that is under way began, by the event loop's time.
        self.flush_started_s: float | None = None
        self._request_flush = request_flush
        #: Called after every append: a flush is due, and a leader's followers have something to fetch.
        self._after_append = request_flush
        self._max_decompressed_bytes = max_decompressed_bytes
        #: Callers that wait for the high watermark.
        self._waiters = OffsetWaiters()
        #: Producers with acks=all, which wait for the same but not for an in-sync set that is too small.
        self._acknowledgements = OffsetWaiters()
        #: Callers that wait for this replica's own disk.
        self._durable_waiters = OffsetWaiters()
        #: By key: called once, when this node no longer leads.
        self._dependents: dict[object, Callable[[], None]] = {}
        self._readers: dict[object, Callable[[], None]] = {}
        #: Called once, when the flush that is under way has ended.
        self._flush_ended: list[Callable[[], None]] = []
        #: Told when this node's role, its leader or the in-sync set has changed.
        self.on_role_change: Callable[[Partition], None] = lambda partition: None
        self._unflushed_since_ms = _NEVER
        self._stopped = False
        #: What coordinators have said of producers' transactions here.
        self._permits = TransactionPermits()
        #: From this offset on somebody needs every record: neither retention nor compaction goes there.
        self.retention_floor: Callable[[], int] = lambda: NO_FLOOR
        if assignment is not None:
            self.apply(assignment, assignment.leader if node_id is None else node_id)

    def __repr__(self) -> str:
        return f"<Partition {self.topic}-{self.index} epoch {self.leader_epoch}>"

    # --- offsets

    @property
    def leader_epoch(self) -> int:
        """The newest leader epoch that the metadata has told of."""
        return self._state.leader_epoch

    @property
    def high_watermark(self) -> int:
        """Everything below it is durable on every in-sync replica; nobody reads at or above it."""
        return self._state.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """The last stable offset: readers of committed data stop there. Never above the high watermark."""
        return self.local_log.last_stable_offset(self._state.high_watermark)

    @property
    def has_reached_epoch_start(self) -> bool:
        """Whether the high watermark is known to be no older than one that an earlier leader told."""
        return self._state.has_reached_epoch_start

    @property
    def log_start_offset(self) -> int:
        """The oldest offset that can be read."""
        return self.local_log.log_start_offset

    @property
    def log_end_offset(self) -> int:
        """The next offset that this node gives. What lies between the high watermark and it may be cut."""
        return self.local_log.end_offset

    @property
    def durable_offset(self) -> int:
        """Offset below which everything is on this node's disk."""
        return self.local_log.durable_offset

    @property
    def last_epoch(self) -> int:
        """The leader epoch of the last record that this replica has; -1 if there is none."""
        return self.local_log.epochs.latest_epoch

    @property
    def compacted_offset(self) -> int:
        """Everything below was compacted: a key's older records may be gone. Above, every record is there."""
        return self.local_log.first_dirty_offset

    @property
    def size_bytes(self) -> int:
        """The size of the log's segments on disk."""
        return self.local_log.size_bytes

    @property
    def failure(self) -> StorageError | None:
        """The error that stopped the log for good; None if it is not stopped."""
        return self.local_log.failure

    @property
    def epochs(self) -> EpochHistory:
        """The history of leader epochs. The present one is in it before its first record, too.

        A reader that was told the present epoch at the log end must find it here after the next restart.
        """
        history = self.local_log.epochs
        if history.latest_epoch >= self.leader_epoch:
            return history
        return history.extended(self.leader_epoch, self.local_log.end_offset)

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """The largest known epoch not above ``epoch``, and the offset where it ended, or the log end.

        The log end and not the high watermark: a reader that stands between the two was not cut off.
        (-1, -1) for an epoch above all that are known.
        """
        return self.epochs.end_offset_for(epoch, self.local_log.end_offset)

    def divergence(self, last_epoch: int, offset: int) -> tuple[int, int] | None:
        """(epoch, end offset) behind which a reader's log is another one; None if it is a part of this one.

        The reader stands at ``offset``, and what it has read last was written in ``last_epoch``. One that is
        above all that are known here was led elsewhere, so all behind this log's end is another log's.
        """
        epoch, end_offset = self.end_of_epoch(last_epoch)
        if epoch < 0:
            return self.leader_epoch, self.local_log.end_offset
        if epoch < last_epoch or end_offset < offset:
            return epoch, end_offset
        return None

    @property
    def config(self) -> TopicConfig:
        return self.local_log.config

    def configure(self, config: TopicConfig) -> None:
        self.local_log.config = config

    # --- the role

    @property
    def role(self) -> Role:
        """The role of this node: leader, follower or offline."""
        return self._state.role

    def leads_at(self, epoch: int) -> bool:
        """Whether this node leads the partition, in that epoch; also if its storage has stopped."""
        return self._state.leader_epoch == epoch and self._state.role is not _FOLLOWER

    def check_leads(self) -> None:
        """Raise ``StorageError`` if the log is stopped, ``ApiError`` if this node does not lead."""
        if self.local_log.failure is not None:
            raise self.local_log.failure
        if self._state.role is not _LEADER:
            raise self.not_leader()

    def apply(self, assignment: PartitionAssignment, node_id: int) -> None:
        """Take what the metadata says of this partition; ``node_id`` is this node. Older news change nothing.

        While the end of the log is being cut it waits for that: a leader's log end must not go down.
        """
        if self.local_log.is_truncating:
            if self._deferred is None or _is_newer(assignment, self._deferred[0]):
                self._deferred = assignment, node_id
        elif assignment.leader_epoch > self._state.leader_epoch:
            if assignment.leader == node_id:
                self.become_leader(assignment)
            else:
                self.become_follower(assignment.leader_epoch, assignment.leader)
            self.assignment = assignment
        elif self.assignment is not None and _is_newer(assignment, self.assignment):
            self.assignment = assignment
            if self._state.committed(assignment):
                self._in_sync_changed()

    def become_leader(self, assignment: PartitionAssignment) -> None:
        """The metadata makes this node the leader from the assignment's epoch on; older news change nothing.

        If it led before, waiting requests go on waiting: its log is as it was.
        """
        if assignment.leader_epoch <= self._state.leader_epoch:
            return
        self.assignment = assignment
        self._permits.void_questions()
        self._take_log_as_it_is()
        moved = self._state.become_leader(assignment, self.local_log.end_offset)
        self._watch_followers()
        if moved:
            self.high_watermark_moved()
        self._check_acknowledgements()
        self.as_leader.wake_tail()
        self.on_role_change(self)

    def _take_log_as_it_is(self) -> None:
        try:
            self.local_log.take_as_it_is()
        except StorageError as error:
            self.flush_failed(error)

    def become_follower(self, epoch: int, leader: int = NO_LEADER) -> None:
        """The metadata makes another node the leader from ``epoch`` on; an older one says nothing new."""
        if epoch <= self._state.leader_epoch:
            return
        self.assignment = PartitionAssignment.led_elsewhere(leader, epoch)
        self._state.become_follower(epoch, leader)
        self._watch_followers()
        # Coordinators gave these permissions to the leader, which this node no longer is.
        self._permits.clear()
        self._fail_waiters(self.not_leader())
        dependents, self._dependents = self._dependents, {}
        for leadership_lost in dependents.values():
            leadership_lost()
        self.wake_readers()
        self.as_leader.wake_tail()
        self.on_role_change(self)

    def _fail_waiters(self, error: TidemillError) -> None:
        self._durable_waiters.fail(error)
        self._waiters.fail(error)
        self._acknowledgements.fail(error)
        self.as_leader.fail_waiters(error)

    def fail_acknowledgements(self) -> None:
        """Tell producers that wait with acks=all to look for another leader: there may be one."""
        if self._acknowledgements:
            self._acknowledgements.fail(self.not_leader())

    def depend(self, key: object, leadership_lost: Callable[[], None]) -> None:
        """Call ``leadership_lost`` once when another node becomes the leader, unless ``release`` comes."""
        self._dependents[key] = leadership_lost

    def release(self, key: object) -> None:
        """Remove what ``depend`` registered under ``key``."""
        self._dependents.pop(key, None)

    def not_leader(self) -> ApiError:
        """The error for every request while another node leads."""
        return ApiError(
            ErrorCode.not_leader_or_follower,
            f"this node does not lead {self.topic}-{self.index} in epoch {self.leader_epoch}; ask for the "
            "metadata",
        )

    # --- what the sides of a leader and of a follower share

    @property
    def leader(self) -> int:
        """The node that this one follows; ``NO_LEADER`` if it follows nobody."""
        return self.as_follower.leader

    def _watch_followers(self) -> None:
        """Wake followers at every append, if there are any: a partition of one replica pays nothing."""
        has_followers = self.as_leader.has_followers
        self._after_append = self._flush_and_wake if has_followers else self._request_flush

    def _flush_and_wake(self, partition: Partition) -> None:
        self._request_flush(partition)
        self.as_leader.wake_tail()

    def _in_sync_changed(self) -> None:
        self._watch_followers()
        self.as_leader.offsets_moved(self._state.advance())
        self._check_acknowledgements()
        self.on_role_change(self)

    def _check_acknowledgements(self) -> None:
        error = self.as_leader.too_few_after_append()
        if error is not None:
            self._acknowledgements.fail(error)

    def appended_as_follower(self, now_ms: int) -> None:
        """Records of the leader were appended: they are flushed soon."""
        if self._unflushed_since_ms == _NEVER:
            self._unflushed_since_ms = now_ms
        self._request_flush(self)

    def when_not_flushing(self, call: Callable[[], None]) -> None:
        """Call back once no flush is under way; at once if none is."""
        if self.local_log.is_flushing:
            self._flush_ended.append(call)
        else:
            call()

    def _end_flush(self) -> None:
        ended, self._flush_ended = self._flush_ended, []
        for call in ended:
            call()

    def resume_after_cut(self) -> None:
        """Go on behind a cut: flush what is left, and take the role that was told meanwhile."""
        self._let_go_if_stopped()
        if self.is_dirty:
            self._request_flush(self)
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self.apply(*deferred)

    def high_watermark_moved(self) -> None:
        """Call those who wait for the high watermark, and wake readers."""
        self.local_log.note_high_watermark(self._state.high_watermark)
        self._waiters.reached(self._state.high_watermark)
        self._acknowledgements.reached(self._state.high_watermark)
        self.wake_readers()

    # --- writing

    @property
    def has_files(self) -> bool:
        """Whether an append finds files to write to."""
        return self.local_log.has_files

    def begin_creation(self) -> LogCreation | None:
        """What to run in a thread before the first append; None if there is nothing to do."""
        return self.local_log.begin_creation()

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
        header: BatchHeader | None = None,
        batch_checked: bool = False,
        records_checked: bool = False,
        breathe: Callable[[], None] = no_breath,
    ) -> PreparedBatch:
        """Check one producer batch and bring it into the topic's form. Changes nothing; a thread may call it.

        The arguments are those of ``prepare_batch``. Raises ``ApiError``.
        """
        config = self.local_log.config
        prepared = prepare_batch(
            data,
            config,
            now_ms,
            self._max_decompressed_bytes,
            header=header,
            batch_checked=batch_checked,
            records_checked=records_checked,
            breathe=breathe,
        )
        return PreparedBatch(*prepared, config)

    def append_prepared(self, batch: PreparedBatch, now_ms: int) -> Appended:
        """Write one batch that was prepared for the present configuration. Raises as ``append`` does."""
        assert batch.config is self.local_log.config, "the batch was prepared for another configuration"
        state = self._state
        if state.role is not _LEADER or self.local_log.failure is not None:
            self.check_leads()
        if batch.header.is_idempotent:
            self._check_transaction(batch.header)
        appended = self.local_log.append(batch.data, batch.header, state.leader_epoch, now_ms)
        if batch.header.size_bytes >= _LARGE_BATCH_BYTES and not appended.duplicate:
            self.as_leader.written(batch, appended.base_offset)
        return self._appended(appended, now_ms)

    def _appended(self, appended: Appended, now_ms: int) -> Appended:
        if self._unflushed_since_ms == _NEVER:
            self._unflushed_since_ms = now_ms
        self._after_append(self)
        return appended

    # --- transactions

    def begin_transaction(self, producer_id: int, producer_epoch: int) -> None:
        """Let a producer write transactional batches until a marker ends them.

        Called once the coordinator knows that the partition takes part.
        """
        self._permits.allow(producer_id, producer_epoch)

    def ask_about(self, producer_id: int) -> TransactionQuestion:
        """Note that a coordinator on another node is asked about a producer's transaction.

        ``answer`` has to follow.
        """
        return self._permits.ask_about(producer_id)

    def answer(self, question: TransactionQuestion, allowed_epoch: int | None) -> bool:
        """The coordinator has answered; ``allowed_epoch`` is the producer's epoch if it may write.

        Its yes opens the partition only if no marker of the producer was appended since the question, and
        this node has led since then in the same leader epoch: the marker may have ended the very transaction
        that the coordinator spoke of. False if the yes came too late.
        """
        return self._permits.answer(question, allowed_epoch, leads=self._state.role is _LEADER)

    def may_write(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether the producer has a transaction here that is known to its coordinator."""
        if self._permits.allows(producer_id, producer_epoch):
            return True
        entry = self.local_log.producers.get(producer_id)
        is_open = producer_id in self.local_log.producers.transactions.open
        return is_open and entry is not None and entry.epoch == producer_epoch

    def _check_transaction(self, header: BatchHeader) -> None:
        """Refuse a batch whose transaction no coordinator knows: it would stay open for ever."""
        if header.is_transactional:
            if not self.may_write(header.producer_id, header.producer_epoch):
                raise ApiError(
                    ErrorCode.invalid_txn_state,
                    f"{self.topic}-{self.index} is not part of a transaction of producer "
                    f"{header.producer_id} epoch {header.producer_epoch}",
                )
        elif header.producer_id in self.local_log.producers.transactions.open:
            raise ApiError(
                ErrorCode.invalid_txn_state,
                f"producer {header.producer_id} has an open transaction here and sent a batch outside of it",
            )

    def write_marker(
        self, producer_id: int, producer_epoch: int, *, commit: bool, coordinator_epoch: int, now_ms: int
    ) -> Appended:
        """End a producer's transaction here. Raises as ``append`` does."""
        ends = [(producer_id, producer_epoch, Marker(commit, coordinator_epoch))]
        return self.write_markers(ends, now_ms=now_ms)

    def write_markers(self, ends: Sequence[MarkerEnd], *, now_ms: int) -> Appended:
        """End transactions here: all of them or none. No reader sees the end of one without the others'.

        Raises as ``append`` does.
        """
        self.check_leads()
        appended = self.local_log.append_markers(ends, self.leader_epoch, now_ms)
        self._permits.ended([producer_id for producer_id, _, _ in ends])
        return self._appended(appended, now_ms)

    def expire_producers(self, before_ms: int) -> None:
        """Forget producers that have written nothing since ``before_ms``."""
        self.local_log.producers.expire(before_ms)

    @property
    def has_open_transactions(self) -> bool:
        """Whether this replica's log has a transaction whose end it does not have."""
        return bool(self.local_log.producers.transactions.open)

    def producers(self) -> Iterator[ActiveProducer]:
        """The producers that DescribeProducers lists."""
        started = self.local_log.producers.transactions.open
        for producer_id, entry in self.local_log.producers:
            yield ActiveProducer(
                producer_id,
                entry.epoch,
                entry.last_sequence,
                entry.last_append_ms,
                entry.coordinator_epoch,
                started.get(producer_id, -1),
            )

    # --- waiting for an offset

    def when_committed(self, offset: int, waiter: Waiter) -> None:
        """Call ``waiter`` once the high watermark has reached ``offset``; at once if it has."""
        if self.local_log.failure is not None:
            waiter(self.local_log.failure)
        elif self._state.role is not _LEADER:
            waiter(self.not_leader())
        elif self._state.high_watermark >= offset:
            waiter(None)
        else:
            self._waiters.add(offset, waiter)
            self._request_flush(self)

    def when_acknowledged(self, offset: int, waiter: Waiter) -> None:
        """Call ``waiter`` as ``when_committed`` does, for a producer with acks=all.

        It gets NOT_ENOUGH_REPLICAS_AFTER_APPEND as soon as the committed in-sync set is too small to commit
        anything. That means "unknown", as NOT_LEADER_OR_FOLLOWER does: the batch is in this leader's log, and
        is committed if the set grows again, or lost with this leader.
        """
        state = self._state
        if state.high_watermark < offset and state.role is _LEADER and self.local_log.failure is None:
            self._acknowledgements.add(offset, waiter)
            self._check_acknowledgements()
            self._request_flush(self)
        else:
            self.when_committed(offset, waiter)

    def when_durable(self, offset: int, waiter: Waiter) -> None:
        """Call ``waiter`` once everything below ``offset`` is on this node's disk; at once if it is.

        What a client is told then can still be lost, with this node, until the high watermark has passed.
        """
        if self.local_log.failure is not None:
            waiter(self.local_log.failure)
        elif self._state.role is not _LEADER:
            waiter(self.not_leader())
        elif self._state.durable_offset >= offset:
            waiter(None)
        else:
            self._durable_waiters.add(offset, waiter)
            self._request_flush(self)

    # --- flushing, called by the flusher

    @property
    def is_dirty(self) -> bool:
        return self.local_log.failure is None and self.local_log.end_offset > self.local_log.durable_offset

    def flush_due_ms(self) -> int:
        """When the next flush should start, on the clock that ``append`` was given; a past time means now.

        ``flush.ms`` and ``flush.messages`` let appends that nobody waits for gather; both are off by default.
        """
        config = self.local_log.config
        is_lazy = config.flush_ms < _NEVER or config.flush_messages < _NEVER
        # Somebody may wait at the leader for what this follower has.
        if not is_lazy or self._state.role is _FOLLOWER:
            return 0
        unflushed = self.local_log.end_offset - self.local_log.durable_offset
        waits = self._waiters or self._acknowledgements or self._durable_waiters
        if waits or unflushed >= config.flush_messages:
            return 0
        return min(_NEVER, self._unflushed_since_ms + config.flush_ms)

    def begin_flush(self) -> FlushJob | None:
        """The next flush, if there is anything to flush; ``flushed`` or ``flush_failed`` has to follow."""
        self._unflushed_since_ms = _NEVER
        job = self.local_log.begin_flush()
        if job is None:
            self._let_go_if_stopped()
        return job

    def flushed(self, job: FlushJob) -> None:
        if self.local_log.failure is not None:
            # Another sync has failed since the job began: after that, a success proves nothing.
            self.flush_failed(self.local_log.failure)
            return
        self._let_go_if_stopped()
        self.local_log.finish_flush(job)
        moved = self._state.flushed(self.local_log.durable_offset)
        self._durable_waiters.reached(self._state.durable_offset)
        if moved:
            self.high_watermark_moved()
        if self._state.role is _FOLLOWER:
            self.as_follower.flushed()
        self._end_flush()

    def flush_put_off(self, job: FlushJob) -> None:
        """Undo ``begin_flush``: the job has failed before it synced anything in vain. Another one follows."""
        self._let_go_if_stopped()
        self.local_log.undo_flush(job)

    def flush_failed(self, error: StorageError) -> None:
        """Stop for good: after a failed sync nobody knows what is on disk."""
        self._let_go_if_stopped()
        self.local_log.fail(error)
        self._state.go_offline()
        self._watch_followers()
        self._fail_waiters(error)
        self.wake_readers()
        self.as_leader.wake_tail()
        self._end_flush()
        self.on_role_change(self)

    # --- reading

    def subscribe(self, key: object, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever there may be more to read, until ``unsubscribe``."""
        self._readers[key] = wake

    def unsubscribe(self, key: object) -> None:
        self._readers.pop(key, None)

    def wake_readers(self) -> None:
        """Wake everybody who waits for records: there may be more, or this node serves none any more."""
        for wake in list(self._readers.values()):
            wake()

    def latest_offset(self, *, committed: bool) -> int:
        """The offset at which a new reader begins that wants only what comes from now on.

        Raises ``ApiError`` OFFSET_NOT_AVAILABLE while a leader before this one may have told a later one.
        """
        if not self._state.has_reached_epoch_start:
            raise ApiError(
                ErrorCode.offset_not_available,
                f"{self.topic}-{self.index} does not know yet how far it was committed when leader epoch "
                f"{self.leader_epoch} began; try again in a moment",
            )
        return self.upper_offset(committed=committed)

    def upper_offset(self, *, committed: bool) -> int:
        """The end for a reader: the last stable offset for committed data, else the high watermark."""
        return self.last_stable_offset if committed else self.high_watermark

    def check_position(self, offset: int) -> None:
        """Raise ``ApiError`` unless a reader may stand at ``offset``: from the log start to the log end.

        Between where readers stop and the log end there is just nothing to read yet.
        """
        self.local_log.check_readable(offset, self.local_log.end_offset)

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
        self.check_leads()
        self.check_position(offset)
        upper = self.upper_offset(committed=committed)
        if offset >= upper:
            return memoryview(b"")
        return self.local_log.read_on(offset, max_bytes, upper, at_least_one=at_least_one, budget=budget)

    def aborted_in(self, data: memoryview) -> list[AbortedTransaction]:
        """Aborted transactions with batches in what ``read`` gave; may name a few that lie just behind it."""
        return self.local_log.aborted_in(data)

    def available_bytes(self, offset: int, *, committed: bool, enough: int) -> int:
        """Bytes that a reader at ``offset`` would get, counted until ``enough``."""
        upper = self.upper_offset(committed=committed)
        return self.local_log.available_bytes(offset, upper, enough) if offset < upper else 0

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the log: others after a roll, retention or compaction."""
        return self.local_log.segments

    def find_time(self, timestamp: int, upper_offset: int) -> TimeSearch:
        """Search for the first record at or after ``timestamp``. Raises ``DamagedBatch``."""
        return self.local_log.find_time(timestamp, upper_offset)

    def find_max_timestamp(self, upper_offset: int) -> TimeSearch:
        """Search for the record with the largest timestamp. Raises ``DamagedBatch``."""
        return self.local_log.find_max_timestamp(upper_offset)

    def measure(self, start_offset: int, end_offset: int | None, max_bytes: int | None) -> Measured:
        """Bytes of log from one offset to another, or to the last stable offset if there is no other.

        Raises ``ApiError`` if they are not in the log.
        """
        self.check_leads()
        self.check_position(start_offset)
        if end_offset is None:
            # As in ``read``, a start between the last stable offset and the log end is valid.
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
            return measure(self.local_log, start_offset, min(end_offset, self.high_watermark), max_bytes)
        except DamagedBatch as damage:
            self.local_log.on_damage(damage)
            raise

    # --- deleting from the start

    def delete_records(self, offset: int) -> list[Segment]:
        """Move the log start to ``offset`` (-1: the high watermark); returns what can be discarded."""
        self.check_leads()
        target = self.high_watermark if offset == -1 else offset
        if target < 0 or target > self.high_watermark:
            raise ApiError(
                ErrorCode.offset_out_of_range,
                f"cannot delete up to offset {target}: {self.topic}-{self.index} ends at "
                f"{self.high_watermark}",
            )
        return self._move_start_as_leader(target)

    def retention_start(self, now_ms: int) -> int | None:
        """Where retention would let the log of a leader start at that time; None if it deletes nothing."""
        log = self.local_log
        if log.failure is not None or self._state.role is not _LEADER:
            return None
        return retained_start(log.segments, log.config, high_watermark=self.high_watermark, now_ms=now_ms)

    def apply_retention(self, now_ms: int, floor: int = NO_FLOOR) -> list[Segment]:
        """Move the log start past segments that are too old or too many; returns what can be discarded.

        Nothing from ``floor`` on goes.
        """
        log = self.local_log
        start = self.retention_start(now_ms)
        if start is None:
            return []
        start = min(start, self.retention_floor(), floor)
        if start <= log.log_start_offset:
            return []
        if start == log.end_offset:
            log.roll()
            self._request_flush(self)
        return self._move_start_as_leader(start)

    def discard(self, segments: list[Segment]) -> None:
        """Remove the files of segments that are no longer part of the log. May run in another thread."""
        self.local_log.discard(segments)

    def _move_start_as_leader(self, offset: int) -> list[Segment]:
        removed = self.move_start(offset)
        self.as_leader.wake_tail()
        return removed

    def move_start(self, offset: int) -> list[Segment]:
        """Move the log start durably; returns what can be discarded. Raises ``StorageError``."""
        try:
            return self.local_log.move_start(offset)
        except SyncFailed as error:
            # Whether the new start is on disk is unknown: the same as any other failed sync.
            self.flush_failed(error)
            raise

    # --- compaction

    def compaction_due(self, now_ms: int) -> float | None:
        """The dirty ratio of the log if it is time to compact it; None if not."""
        log = self.local_log
        if log.failure is not None or not log.config.compacts:
            return None
        if roll_for_compaction(log, now_ms):
            self._request_flush(self)
        cleanable = cleanable_part(
            log, now_ms, high_watermark=self.high_watermark, floor_offset=self._compaction_floor()
        )
        return cleanable.dirty_ratio if is_due(cleanable, log.config, now_ms) else None

    def _compaction_floor(self) -> int:
        """The offset from which on every record is still needed, as far as this node and the leader know."""
        following = self._state.following
        floor = self.retention_floor()
        return floor if following is None else min(floor, following.compaction_floor)

    def order_cleaning(self, now_ms: int) -> CleaningOrder | None:
        """The work of a compaction that starts now; None if there is none."""
        return order_cleaning(
            self.local_log, now_ms, high_watermark=self.high_watermark, floor_offset=self._compaction_floor()
        )

    def begin_swap(self, cleaned: CleanedSegment) -> None:
        """Prepare for a compacted segment to replace old files. Raises ``StorageError`` if it may not."""
        begin_swap(self.local_log, cleaned)

    def end_swap(self, cleaned: CleanedSegment, error: StorageError | None = None) -> list[StorageFile]:
        """Finish what ``begin_swap`` began, or undo it after ``error``; returns old files, to be closed."""
        files = end_swap(self.local_log, cleaned, error)
        if self.local_log.failure is not None:
            self.flush_failed(self.local_log.failure)
        return files

    # --- the end

    def close(self) -> None:
        """Stop in an orderly way; the caller has made sure that no flush is under way."""
        if self.local_log.failure is None:
            self.local_log.close()
        else:
            self.local_log.abandon()

    def stop(self, error: StorageError) -> None:
        """End everything that waits, because the partition goes away, and let go of its files."""
        self.flush_failed(error)
        self._stopped = True
        if not self.flush_scheduled:
            self._let_go_if_stopped()

    def _let_go_if_stopped(self) -> None:
        # Not while a flush is planned or under way, or the end is being cut: that needs the files.
        if self._stopped and not self.local_log.is_truncating:
            self.local_log.abandon()


def _is_newer(assignment: PartitionAssignment, known: PartitionAssignment) -> bool:
    return (assignment.leader_epoch, assignment.partition_epoch) > (known.leader_epoch, known.partition_epoch)
