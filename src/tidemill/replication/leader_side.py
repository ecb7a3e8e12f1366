"""What a partition does as a leader of followers: answers them, and keeps the in-sync set.

``in_sync`` has the rules. Everything here is empty, or refused, while this node does not lead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from tidemill.cluster.messages import (
    ClusterErrorCode,
    Diverging,
    FetchedPartition,
    FetchPartition,
    ReplicaProgress,
    ReplicaStatus,
)
from tidemill.errors import ApiError, DamagedBatch, ErrorCode, StorageError, TidemillError
from tidemill.log.incoming import PreparedBatch
from tidemill.log.segments.segment_reader import ReadBudget
from tidemill.records.batch import STAMPED_BYTES, stamp_prefix
from tidemill.replication.rules.in_sync import REPLICA_LAG_MS, FollowerProgress, IsrProposal, StaleNodeEpoch
from tidemill.replication.rules.state import ReplicationState, Role
from tidemill.replication.rules.waiting import OffsetWaiters, Waiter

if TYPE_CHECKING:
    from tidemill.replication.partition import Partition

__all__ = ("LeaderSide",)

_NO_RECORDS = memoryview(b"")


class LeaderSide:
    """The part of a ``Partition`` that only its leader needs."""

    __slots__ = ("_partition", "_resigned_epoch", "_start_waiters", "_state", "_tail_readers", "on_written")

    def __init__(self, partition: Partition, state: ReplicationState) -> None:
        self._partition = partition
        self._state = state
        #: Callers that wait for the log start of every in-sync replica.
        self._start_waiters = OffsetWaiters()
        #: By key: called once, when a follower may have something to fetch.
        self._tail_readers: dict[object, Callable[[], None]] = {}
        #: Given each large batch that was written, as it is in the log, and its first offset.
        self.on_written: Callable[[int, memoryview], None] | None = None
        #: The leader epoch at which this node has asked to be replaced last, and may have been.
        self._resigned_epoch = -1

    # --- the resignation

    @property
    def is_resigning(self) -> bool:
        """Whether this node has asked to be replaced in this epoch: another one may lead already."""
        return self._resigned_epoch == self._state.leader_epoch

    def resign(self) -> None:
        """Note that this node is about to ask the metadata for another leader."""
        self._resigned_epoch = self._state.leader_epoch

    def stay(self, epoch: int) -> None:
        """Lead on after ``resign``: asking for another leader in ``epoch`` has failed for good."""
        if self._resigned_epoch == epoch:
            self._resigned_epoch = -1

    # --- the in-sync replicas

    @property
    def has_followers(self) -> bool:
        """Whether this node leads the partition and other nodes hold it, too."""
        return self._state.in_sync is not None and bool(self._state.in_sync.followers)

    @property
    def followers(self) -> Mapping[int, FollowerProgress]:
        """The other nodes that hold the partition, and what each has told this leader."""
        return {} if self._state.in_sync is None else self._state.in_sync.followers

    @property
    def electable(self) -> frozenset[int]:
        """The other nodes that may have been elected without this leader's knowing."""
        return frozenset() if self._state.in_sync is None else self._state.in_sync.electable()

    def in_sync_followers(self, offset: int) -> list[int]:
        """The in-sync followers that have everything below ``offset``."""
        in_sync = self._state.in_sync
        if in_sync is None:
            return []
        return [
            node_id
            for node_id in in_sync.assignment.isr
            if node_id in in_sync.followers and in_sync.followers[node_id].counts_to >= offset
        ]

    def check_enough_replicas(self) -> None:
        """Raise ``ApiError`` NOT_ENOUGH_REPLICAS if nothing can be committed now: before acks=all appends."""
        if self._state.in_sync is not None and not self._state.in_sync.has_enough:
            raise self._too_few(ErrorCode.not_enough_replicas, "nothing was written")

    def too_few_after_append(self) -> ApiError | None:
        """The error for producers that wait, if nothing can be committed now; None if it can."""
        if self._state.in_sync is None or self._state.in_sync.has_enough:
            return None
        return self._too_few(
            ErrorCode.not_enough_replicas_after_append,
            "the batch was written here, and may yet be committed or lost",
        )

    def _too_few(self, code: ErrorCode, outcome: str) -> ApiError:
        partition = self._partition
        assert partition.assignment is not None
        isr, min_isr = partition.assignment.isr, partition.assignment.min_isr
        return ApiError(
            code,
            f"{partition.topic}-{partition.index} has {len(isr)} replicas in sync and needs {min_isr}; "
            f"{outcome}; try again once more replicas are in sync",
        )

    def offsets_moved(self, moved: bool) -> None:
        """Call those who wait for followers' offsets; ``moved`` says whether the high watermark has moved."""
        if moved:
            self._partition.high_watermark_moved()
        if self._start_waiters and self._state.in_sync is not None:
            start = self._partition.log_start_offset
            self._start_waiters.reached(self._state.in_sync.least_log_start(start))

    @property
    def may_have_proposal(self) -> bool:
        """Whether ``next_proposal`` may have one: not while every replica is in sync and has everything."""
        in_sync = self._state.in_sync
        return in_sync is not None and not in_sync.is_complete(self._partition.log_end_offset)

    def next_proposal(
        self, now_ms: int, suspected: Collection[int] = (), lag_ms: int = REPLICA_LAG_MS
    ) -> IsrProposal | None:
        """The in-sync set to propose now; it counts as on its way until ``proposal_ended``.

        A member that has not caught up for ``lag_ms`` is not in it.
        """
        state, log = self._state, self._partition.local_log
        if state.in_sync is None or log.failure is not None:
            return None
        proposal = state.in_sync.proposal(
            now_ms,
            log_end=log.end_offset,
            high_watermark=state.high_watermark,
            epoch_start_offset=state.epoch_start_offset,
            log_start=log.log_start_offset,
            suspected=suspected,
            lag_ms=lag_ms,
        )
        if proposal is None or not state.in_sync.proposed(proposal):
            return None
        return proposal

    def proposal_ended(self, proposal: IsrProposal, *, refused: bool) -> None:
        """End a proposal: it was ``refused`` for good, or its outcome is unknown."""
        if self._state.proposal_ended(proposal, refused=refused):
            self._partition.high_watermark_moved()

    def when_start_durable(self, offset: int, waiter: Waiter) -> None:
        """Call ``waiter`` once every in-sync replica has a log start of ``offset`` or above on its disk.

        Not while fewer are in sync than ``min_isr``: one without that start could be elected.
        """
        in_sync, failure = self._state.in_sync, self._partition.failure
        if in_sync is None or failure is not None:
            waiter(failure or self._partition.not_leader())
        elif in_sync.least_log_start(self._partition.log_start_offset) >= offset:
            waiter(None)
        else:
            self._start_waiters.add(offset, waiter)

    def fail_waiters(self, error: TidemillError) -> None:
        """Call all who wait for the in-sync replicas' log starts with an error."""
        self._start_waiters.fail(error)

    # --- what followers ask and tell

    def fetch(
        self, wanted: FetchPartition, node_id: int, node_epoch: int, now_ms: int
    ) -> FetchedPartition | None:
        """Note what a follower asks for. An answer if it cannot have records: an error, or divergence."""
        refusal = self._refusal(wanted.leader_epoch)
        in_sync = self._state.in_sync
        if refusal is None and in_sync is not None and node_id not in in_sync.followers:
            refusal = ClusterErrorCode.NOT_REPLICA_FOR_PARTITION
        if refusal is not None or in_sync is None:
            return self._fetched(refusal or ClusterErrorCode.NOT_LEADER_FOR_PARTITION)
        diverging = self._divergence_of_follower(wanted)
        if diverging is not None:
            return self._fetched(diverging=diverging)
        log_end = self._partition.log_end_offset
        try:
            in_sync.fetched(node_id, node_epoch, wanted.offset, wanted.durable, now_ms, log_end)
        except StaleNodeEpoch:
            return self._fetched(ClusterErrorCode.FENCED_NODE_EPOCH)
        self.offsets_moved(self._state.advance())
        return None

    def read(
        self,
        wanted: FetchPartition,
        max_bytes: int,
        *,
        at_least_one: bool,
        budget: ReadBudget | None = None,
        known: memoryview | None = None,
    ) -> FetchedPartition:
        """What a follower gets that ``fetch`` has let in: batches up to the log end.

        ``known`` is what was read or written from that offset on a moment ago, at this leader epoch.
        """
        refusal = self._refusal(wanted.leader_epoch)
        if refusal is not None:
            return self._fetched(refusal)
        log, records = self._partition.local_log, _NO_RECORDS
        is_there = log.log_start_offset <= wanted.offset < log.end_offset
        if is_there and known is not None:
            records = known
        elif is_there and (at_least_one or max_bytes > 0):
            try:
                records = log.read(
                    wanted.offset,
                    max(0, min(max_bytes, wanted.max_bytes)),
                    log.end_offset,
                    at_least_one=at_least_one,
                    budget=budget,
                )
            except DamagedBatch:
                return self._fetched(ClusterErrorCode.CORRUPT_MESSAGE)
            except StorageError:
                return self._fetched(ClusterErrorCode.STORAGE_ERROR)
        return self._fetched(records=records)

    def has_news_at(self, offset: int) -> bool:
        """Whether a follower at ``offset`` would get records, or has to start anew."""
        return offset != self._partition.log_end_offset

    def _divergence_of_follower(self, wanted: FetchPartition) -> Diverging | None:
        partition = self._partition
        if wanted.last_epoch < 0:
            # An empty log has nothing that could differ.
            end_offset = partition.log_end_offset
            return Diverging(partition.leader_epoch, end_offset) if wanted.offset > end_offset else None
        found = partition.divergence(wanted.last_epoch, wanted.offset)
        return None if found is None else Diverging(*found)

    def _refusal(self, named_epoch: int) -> ClusterErrorCode | None:
        """Why a follower's message is not taken; None if it is."""
        if named_epoch < self._state.leader_epoch:
            return ClusterErrorCode.FENCED_LEADER_EPOCH
        if named_epoch > self._state.leader_epoch:
            return ClusterErrorCode.UNKNOWN_LEADER_EPOCH
        if self._partition.failure is not None:
            return ClusterErrorCode.STORAGE_ERROR
        if self._state.role is not Role.LEADER:
            return ClusterErrorCode.NOT_LEADER_FOR_PARTITION
        return None

    def _fetched(
        self,
        error: ClusterErrorCode = ClusterErrorCode.NONE,
        *,
        diverging: Diverging | None = None,
        records: memoryview = _NO_RECORDS,
    ) -> FetchedPartition:
        partition, log = self._partition, self._partition.local_log
        return FetchedPartition(
            partition=partition.id,
            high_watermark=self._state.high_watermark,
            log_start_offset=log.log_start_offset,
            error=error,
            diverging=diverging,
            compaction_floor=partition.retention_floor(),
            # Behind the first dirty offset nothing was compacted, so nothing was removed.
            removed_below=log.first_dirty_offset,
            records=records,
        )

    def replica_state(
        self, progress: ReplicaProgress, node_id: int, node_epoch: int, now_ms: int
    ) -> ReplicaStatus:
        """Take a follower's report of what is durable there."""
        where = self._partition.id
        refusal = self._refusal(progress.leader_epoch)
        in_sync = self._state.in_sync
        if refusal is None and in_sync is not None and node_id not in in_sync.followers:
            refusal = ClusterErrorCode.NOT_REPLICA_FOR_PARTITION
        if refusal is not None or in_sync is None:
            error = refusal or ClusterErrorCode.NOT_LEADER_FOR_PARTITION
            return ReplicaStatus(where, in_sync=False, error=error)
        log_end = self._partition.log_end_offset
        try:
            in_sync.reported(node_id, node_epoch, progress.durable, progress.log_start, now_ms, log_end)
        except StaleNodeEpoch:
            return ReplicaStatus(where, in_sync=False, error=ClusterErrorCode.FENCED_NODE_EPOCH)
        self.offsets_moved(self._state.advance())
        return ReplicaStatus(
            where, in_sync=node_id in in_sync.assignment.isr, high_watermark=self._state.high_watermark
        )

    # --- followers that wait

    def written(self, batch: PreparedBatch, base_offset: int) -> None:
        """A large batch was checked and written: followers can have it without a look at the disk."""
        if self.on_written is not None:
            prefix = stamp_prefix(batch.header, base_offset, self._state.leader_epoch)
            # A copy: the memory that it came in is used again.
            self.on_written(base_offset, memoryview(prefix + memoryview(batch.data)[STAMPED_BYTES:]))

    def on_next_tail(self, key: object, wake: Callable[[], None]) -> None:
        """Call ``wake`` once, when a follower may have something to fetch, unless ``forget_tail`` comes."""
        self._tail_readers[key] = wake

    def forget_tail(self, key: object) -> None:
        """Remove what ``on_next_tail`` registered under ``key``."""
        self._tail_readers.pop(key, None)

    def wake_tail(self) -> None:
        """Wake followers that wait: there may be something to fetch, or the role has changed."""
        if self._tail_readers:
            waiting, self._tail_readers = self._tail_readers, {}
            for wake in waiting.values():
                wake()
