"""A persister in memory: the durable state of share partitions, with outcomes that a test chooses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from tidemill.coordination.share_state import (
    NO_CUT,
    NO_POSITION,
    NO_START,
    DeliveryState,
    LogPosition,
    SharePartitionKey,
    ShareState,
    ShareStateSummary,
    StateBatch,
)
from tidemill.errors import ApiError, ErrorCode
from tidemill.share.state.batches import change

__all__ = ("MemoryPersister", "StoredState")


class StoredState:
    """The stored state of one share partition."""

    def __init__(self, state_epoch: int = 0, start_offset: int = NO_START) -> None:
        self.state_epoch = state_epoch
        self.leader_epoch = -1
        self.start_offset = start_offset
        self.complete_count = 0
        self.batches: list[StateBatch] = []
        #: By producer: what its open transaction will change.
        self.pending: dict[int, list[StateBatch]] = {}

    def write(self, start_offset: int, complete_count: int, batches: Sequence[StateBatch]) -> None:
        for batch in batches:
            change(self.batches, batch)
        if start_offset != NO_START:
            self.start_offset = max(self.start_offset, start_offset)
        self.complete_count = complete_count
        self.batches = [
            batch._replace(first_offset=max(batch.first_offset, self.start_offset))
            for batch in self.batches
            if batch.last_offset >= self.start_offset
        ]

    def read(self) -> ShareState:
        shown = StoredState(self.state_epoch, self.start_offset)
        shown.batches = list(self.batches)
        for producer_id, batches in self.pending.items():
            named = [batch._replace(producer_id=producer_id, producer_epoch=0) for batch in batches]
            shown.write(NO_START, 0, named)
        return ShareState(self.state_epoch, self.start_offset, tuple(shown.batches), self.complete_count)

    def pend(self, producer_id: int, batches: Sequence[StateBatch]) -> None:
        """Have the end of a producer's transaction decide on batches."""
        self.pending.setdefault(producer_id, []).extend(batches)

    def end(self, producer_id: int, *, commit: bool) -> None:
        """End a producer's transaction."""
        batches = self.pending.pop(producer_id, [])
        if commit:
            self.write(NO_START, self.complete_count, batches)

    def state_of(self, offset: int) -> DeliveryState:
        """The state that a leader which reads this finds for a record."""
        if offset < self.start_offset:
            return DeliveryState.ARCHIVED
        batch = self._batch_of(offset)
        return DeliveryState.AVAILABLE if batch is None else batch.state

    def is_dead(self, offset: int) -> bool:
        """Whether a record was delivered and died, and the start has not passed it."""
        batch = self._batch_of(offset)
        is_finished = batch is not None and batch.state is DeliveryState.ARCHIVED
        return batch is not None and is_finished and batch.delivery_count > 0

    def not_before_of(self, offset: int) -> int:
        """The time before which a record must not be handed out."""
        batch = self._batch_of(offset)
        return 0 if batch is None else batch.not_before_ms

    def _batch_of(self, offset: int) -> StateBatch | None:
        index = bisect_right([batch.first_offset for batch in self.batches], offset) - 1
        found = index >= 0 and self.batches[index].last_offset >= offset
        return self.batches[index] if found else None


class MemoryPersister:
    """Implements ``Persister``. ``failures`` are raised one by one; after the change with ``carry_out``."""

    def __init__(self) -> None:
        self.states: dict[SharePartitionKey, StoredState] = {}
        self.write_failures: list[ApiError] = []
        self.read_failures: list[ApiError] = []
        #: Whether a write that fails is carried out all the same: an outcome that nobody knows.
        self.carry_out = False
        self.write_count = 0

    async def initialize(self, key: SharePartitionKey, state_epoch: int, start_offset: int) -> None:
        stored = self.states.get(key)
        if stored is not None and state_epoch < stored.state_epoch:
            raise ApiError(ErrorCode.fenced_state_epoch, "a later state epoch is stored")
        if stored is None or state_epoch > stored.state_epoch:
            self.states[key] = StoredState(state_epoch, start_offset)

    async def read_state(self, key: SharePartitionKey, leader_epoch: int) -> ShareState:
        if self.read_failures:
            raise self.read_failures.pop(0)
        stored = self._stored(key)
        if leader_epoch < stored.leader_epoch:
            raise ApiError(ErrorCode.fenced_leader_epoch, "a later leader has read the state")
        stored.leader_epoch = leader_epoch
        return stored.read()

    async def write_state(
        self,
        key: SharePartitionKey,
        state_epoch: int,
        leader_epoch: int,
        start_offset: int,
        delivery_complete_count: int,
        batches: Sequence[StateBatch],
        log_position: LogPosition = NO_POSITION,
        cut_offset: int = NO_CUT,
    ) -> None:
        assert cut_offset == NO_CUT, "the node's own coordinator is what cuts a state in tests"
        self.write_count += 1
        failure = self.write_failures.pop(0) if self.write_failures else None
        if failure is not None and not self.carry_out:
            raise failure
        stored = self._stored(key)
        if leader_epoch < stored.leader_epoch:
            raise ApiError(ErrorCode.fenced_leader_epoch, "a later leader has read the state")
        if state_epoch < stored.state_epoch:
            raise ApiError(ErrorCode.fenced_state_epoch, "a later state epoch is stored")
        if leader_epoch > stored.leader_epoch:
            raise ApiError(ErrorCode.fenced_state_epoch, "the leader has not read this state")
        stored.write(start_offset, delivery_complete_count, batches)
        if failure is not None:
            raise failure

    async def delete(self, key: SharePartitionKey) -> None:
        self.states.pop(key, None)

    async def read_summary(self, key: SharePartitionKey, leader_epoch: int) -> ShareStateSummary:
        stored = self.states.get(key)
        if stored is None:
            return ShareStateSummary(0, 0, NO_START, 0)
        return ShareStateSummary(
            stored.state_epoch, stored.leader_epoch, stored.start_offset, stored.complete_count
        )

    def _stored(self, key: SharePartitionKey) -> StoredState:
        stored = self.states.get(key)
        if stored is None:
            raise ApiError(ErrorCode.invalid_request, f"the state of {key} was never initialized")
        return stored
