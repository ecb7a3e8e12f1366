"""The state of share partitions: fencing, snapshots, transactions; what is replayed is what was live."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from support.coordination import MemoryLog
from tidemill.coordination.log import ReplayedMarker
from tidemill.coordination.share_state import (
    NO_START,
    DeliveryState,
    LogPosition,
    SharePartitionKey,
    StateBatch,
)
from tidemill.errors import ApiError, ErrorCode
from tidemill.share.state.records import ShareRecord, SnapshotRecord, decode_record, encode_record
from tidemill.share.state.states import ShareStates, StateWrite

KEY = SharePartitionKey("g", UUID(int=1), 0)
NOW = 1_000
ACKNOWLEDGED, ARCHIVED, AVAILABLE = (
    DeliveryState.ACKNOWLEDGED,
    DeliveryState.ARCHIVED,
    DeliveryState.AVAILABLE,
)


class Shard:
    """``ShareStates`` over a log in memory."""

    def __init__(self, updates_per_snapshot: int = 500) -> None:
        self.log = MemoryLog()
        self.updates_per_snapshot = updates_per_snapshot
        self.states = ShareStates(self._append, updates_per_snapshot)

    def _append(self, records: Sequence[ShareRecord], producer: tuple[int, int] | None = None) -> int:
        encoded = [encode_record(record) for record in records]
        if producer is None:
            return self.log.append(encoded) - len(encoded)
        return self.log.append_transactional(encoded, *producer) - len(encoded)

    def end(self, producer_id: int, *, commit: bool) -> None:
        self.log.append_marker(producer_id, 0, commit=commit, coordinator_epoch=0)
        self.states.replay_marker(producer_id, commit=commit)

    def replayed(self) -> ShareStates:
        """What another node makes of the log."""
        states = ShareStates(self._append, self.updates_per_snapshot)
        for entry in self.log.replay(self.log.end_offset):
            if isinstance(entry, ReplayedMarker):
                states.replay_marker(entry.producer_id, commit=entry.commit)
            else:
                record = decode_record(entry.key, entry.value)
                assert record is not None
                states.replay(record, entry.offset, entry.producer_id)
        return states

    def prune(self) -> None:
        floor = self.states.floor()
        self.log.delete_below(self.log.end_offset if floor is None else floor)

    def write(self, *batches: StateBatch, start: int = NO_START, epochs: tuple[int, int] = (1, 0)) -> None:
        self.states.write(KEY, StateWrite(*epochs, start, 0, batches), NOW)

    def pend(self, producer_id: int, *batches: StateBatch) -> None:
        self.states.write(KEY, StateWrite(1, 0, NO_START, -1, batches, (producer_id, 0)), NOW)

    def batches(self, leader_epoch: int = 0) -> list[tuple[int, int, DeliveryState, int]]:
        state = self.states.read(KEY, leader_epoch, NOW)
        return [(each.first_offset, each.last_offset, each.state, each.producer_id) for each in state.batches]


def batch(first: int, last: int, state: DeliveryState = ACKNOWLEDGED) -> StateBatch:
    return StateBatch(first, last, state, 1)


@pytest.fixture
def shard() -> Shard:
    shard = Shard()
    shard.states.initialize(KEY, 1, NO_START, NOW)
    shard.states.read(KEY, 0, NOW)
    return shard


def refusal(action: object, *arguments: object) -> ErrorCode:
    assert callable(action)
    with pytest.raises(ApiError) as caught:
        action(*arguments)
    return caught.value.code


def test_state_that_was_never_initialized_is_neither_read_nor_written() -> None:
    shard = Shard()
    assert refusal(shard.states.read, KEY, 0, NOW) is ErrorCode.invalid_request
    assert refusal(shard.write) is ErrorCode.invalid_request
    shard.states.delete(KEY)
    assert shard.states.summary(KEY).start_offset == NO_START
    assert shard.log.end_offset == 0, "to delete what is not there takes no record"


def test_initialize_is_harmless_at_the_same_epoch_and_begins_anew_at_a_higher_one(shard: Shard) -> None:
    shard.write(batch(5, 9), start=5)
    shard.states.initialize(KEY, 1, 100, NOW)
    assert shard.states.read(KEY, 0, NOW).start_offset == 5
    assert shard.batches() == [(5, 9, ACKNOWLEDGED, -1)]
    assert refusal(shard.states.initialize, KEY, 0, 100, NOW) is ErrorCode.fenced_state_epoch
    shard.states.initialize(KEY, 2, 100, NOW)
    assert shard.states.read(KEY, 0, NOW)[:3] == (2, 100, ())
    assert refusal(shard.write) is ErrorCode.fenced_state_epoch


def test_a_read_by_a_later_leader_fences_the_earlier_ones_also_after_a_replay(shard: Shard) -> None:
    shard.states.read(KEY, 3, NOW)
    shard.states = shard.replayed()
    assert refusal(shard.states.read, KEY, 2, NOW) is ErrorCode.fenced_leader_epoch
    assert refusal(shard.states.write, KEY, StateWrite(1, 2, NO_START, 0, ()), NOW) is (
        ErrorCode.fenced_leader_epoch
    )
    shard.write(batch(0, 1), epochs=(1, 3))
    assert shard.states.summary(KEY).leader_epoch == 3


def test_a_state_that_was_begun_anew_in_the_same_epoch_is_not_written_before_it_is_read(shard: Shard) -> None:
    """Whoever writes knows the state that was deleted."""
    shard.states.delete(KEY)
    shard.states.initialize(KEY, 1, NO_START, NOW)
    for _ in range(2):
        assert refusal(shard.write, batch(0, 1)) is ErrorCode.fenced_state_epoch
        assert refusal(shard.pend, 7, batch(0, 1)) is ErrorCode.fenced_state_epoch
        shard.states = shard.replayed()
    assert shard.batches() == []
    shard.write(batch(0, 1))
    assert shard.batches() == [(0, 1, ACKNOWLEDGED, -1)]


def test_a_higher_state_epoch_than_the_stored_one_is_no_ones(shard: Shard) -> None:
    assert refusal(shard.states.write, KEY, StateWrite(2, 0, NO_START, 0, ()), NOW) is (
        ErrorCode.invalid_request
    )


@pytest.mark.parametrize(
    "bad", [StateBatch(5, 4, ACKNOWLEDGED, 1), StateBatch(0, 1, DeliveryState.ACQUIRED, 1)]
)
def test_a_batch_that_cannot_be_is_refused(shard: Shard, bad: StateBatch) -> None:
    end = shard.log.end_offset
    assert refusal(shard.write, batch(1, 2), bad) is ErrorCode.invalid_request
    assert shard.log.end_offset == end


def test_so_many_updates_make_a_snapshot_that_stands_for_all_before() -> None:
    shard = Shard(updates_per_snapshot=3)
    shard.states.initialize(KEY, 1, 0, NOW)
    shard.states.read(KEY, 0, NOW)
    for number in range(3):
        shard.write(batch(number, number + 5))
    records = [decode_record(entry.key, entry.value) for entry in shard.log.replay(9)]  # type: ignore[union-attr]
    kinds = [isinstance(record, SnapshotRecord) for record in records]
    assert kinds == [True, False, False, False, True]
    live = shard.states.partitions
    shard.prune()
    assert shard.log.start_offset == 4
    assert shard.replayed().partitions == live
    assert live[KEY].batches == [batch(0, 7)]


def test_the_start_moves_over_finished_records_and_takes_them_along(shard: Shard) -> None:
    shard.write(batch(0, 9), batch(10, 12, AVAILABLE))
    shard.write(start=10)
    assert shard.batches() == [(10, 12, AVAILABLE, -1)]
    assert shard.replayed().partitions == shard.states.partitions


def test_a_write_that_comes_late_does_not_take_the_start_back(shard: Shard) -> None:
    """It was sent again because its answer was lost, and then came a second time, behind a later one."""
    shard.write(batch(0, 4), start=5)
    shard.write(batch(5, 9), start=10)
    shard.write(batch(0, 4), start=5)
    assert shard.states.summary(KEY).start_offset == 10
    assert shard.batches() == []
    assert shard.replayed().partitions == shard.states.partitions


# --- transactions


def test_a_pending_write_is_shown_with_its_producer_and_counts_when_the_transaction_commits(
    shard: Shard,
) -> None:
    shard.write(batch(0, 3, AVAILABLE))
    shard.pend(7, batch(1, 2))
    assert shard.batches() == [(0, 0, AVAILABLE, -1), (1, 2, ACKNOWLEDGED, 7), (3, 3, AVAILABLE, -1)]
    assert shard.states.summary(KEY).delivery_complete_count == 0
    shard.states = shard.replayed()
    shard.end(7, commit=True)
    assert shard.batches() == [(0, 0, AVAILABLE, -1), (1, 2, ACKNOWLEDGED, -1), (3, 3, AVAILABLE, -1)]
    assert shard.states.summary(KEY).delivery_complete_count == 2


def test_a_pending_write_vanishes_when_the_transaction_aborts(shard: Shard) -> None:
    shard.write(batch(0, 3, AVAILABLE))
    shard.pend(7, batch(1, 2))
    shard.end(7, commit=False)
    assert shard.batches() == [(0, 3, AVAILABLE, -1)]


def test_a_state_that_was_begun_anew_or_deleted_makes_a_pending_write_void(shard: Shard) -> None:
    shard.pend(7, batch(1, 2))
    shard.states.initialize(KEY, 2, 0, NOW)
    shard.end(7, commit=True)
    assert shard.batches() == []
    shard.states.write(KEY, StateWrite(2, 0, NO_START, -1, (batch(1, 2),), (8, 0)), NOW)
    shard.states.delete(KEY)
    shard.end(8, commit=True)
    assert KEY not in shard.states.partitions


def test_pruning_keeps_what_a_transaction_decides_on_after_a_snapshot() -> None:
    shard = Shard(updates_per_snapshot=1)
    shard.states.initialize(KEY, 1, 0, NOW)
    shard.states.read(KEY, 0, NOW)
    shard.pend(7, batch(3, 4))
    for number in range(6):
        shard.write(batch(number, number, AVAILABLE))
        shard.prune()
        assert shard.replayed().pending == shard.states.pending
    shard.end(7, commit=True)
    shard.prune()
    assert shard.replayed().partitions == shard.states.partitions
    assert (3, 4, ACKNOWLEDGED, -1) in shard.batches()


def test_what_is_not_in_the_log_any_more_is_forgotten_also_if_a_transaction_would_finish_it(
    shard: Shard,
) -> None:
    shard.write(batch(5, 5, AVAILABLE), batch(6, 8), start=5)
    shard.pend(7, batch(9, 12))
    cut = StateWrite(1, 0, NO_START, -1, (), log_position=LogPosition(10, 0), cut_offset=10)
    shard.states.write(KEY, cut, NOW)
    assert shard.batches() == [(5, 5, AVAILABLE, -1), (6, 8, ACKNOWLEDGED, -1), (9, 9, ACKNOWLEDGED, 7)]
    shard.states.write(KEY, cut._replace(log_position=LogPosition(3, 0), cut_offset=3), NOW)
    shard.end(7, commit=True)
    assert shard.states.read(KEY, 0, NOW) == (1, 3, (), 0, LogPosition(3, 0))
    assert shard.replayed().partitions == shard.states.partitions
    assert (
        refusal(shard.states.write, KEY, cut._replace(producer=(8, 0)), NOW) is ErrorCode.invalid_request
    ), "what a transaction decides on is not known yet"


@pytest.mark.parametrize("updates_per_snapshot", [1, 100])
def test_the_epochs_of_a_log_are_kept_until_a_later_leader_says_its_own(updates_per_snapshot: int) -> None:
    shard = Shard(updates_per_snapshot=updates_per_snapshot)
    shard.states.initialize(KEY, 1, 0, NOW)
    shard.states.read(KEY, 0, NOW)
    for position, kept in (
        (LogPosition(5, 0, b"of the first"), b"of the first"),
        (LogPosition(6, 0), b"of the first"),
        (LogPosition(7, 1, b"of the second"), b"of the second"),
        (LogPosition(8, 1), b"of the second"),
    ):
        shard.states.write(KEY, StateWrite(1, 0, NO_START, -1, (), log_position=position), NOW)
        assert shard.states.read(KEY, 0, NOW).log_position == position._replace(history=kept)
        assert shard.replayed().partitions == shard.states.partitions


def test_a_share_partition_that_nobody_changes_does_not_keep_the_start_of_the_log(shard: Shard) -> None:
    busy = SharePartitionKey("busy", UUID(int=1), 0)
    shard.states.initialize(busy, 1, 0, NOW)
    assert shard.states.refresh(shard.log.end_offset, 10, NOW) == 2
    before = dict(shard.states.partitions)
    shard.prune()
    assert shard.log.start_offset == 3
    assert shard.replayed().partitions == before


def test_share_partitions_with_dead_letters_due_are_found_in_turn_also_after_a_replay(shard: Shard) -> None:
    due, done = StateBatch(0, 0, DeliveryState.ARCHIVING, 1), StateBatch(0, 0, ARCHIVED, 1)
    keys = [KEY._replace(partition=number) for number in range(3)]
    for key in keys:
        if key != KEY:
            shard.states.initialize(key, 1, NO_START, NOW)
            shard.states.read(key, 0, NOW)
        shard.states.write(key, StateWrite(1, 0, NO_START, 0, [due]), NOW)
    for states in (shard.states, shard.replayed()):
        assert [states.with_due_letters(2) for _ in range(3)] == [keys[:2], [keys[2], keys[0]], keys[1:]]
    # A transaction that writes the letter, and one that is begun anew.
    shard.pend(7, done)
    assert KEY in shard.states.with_due_letters(9)
    shard.end(7, commit=True)
    shard.states.initialize(keys[1], 2, NO_START, NOW)
    for states in (shard.states, shard.replayed()):
        assert states.with_due_letters(9) == [keys[2]]
    shard.states.delete(keys[2])
    assert shard.states.with_due_letters(9) == shard.replayed().with_due_letters(9) == []


def test_states_of_topics_that_are_gone_are_forgotten(shard: Shard) -> None:
    assert shard.states.forget_topics(lambda topic_id: topic_id != KEY.topic_id, 10) == 1
    assert shard.states.partitions == shard.replayed().partitions == {}


# --- a model


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class StatesModel(RuleBasedStateMachine):
    """Random requests against what each record's state should be, with replays and pruning in between."""

    def __init__(self) -> None:
        super().__init__()
        self.shard = Shard(updates_per_snapshot=4)
        self.state_epoch: int | None = None
        self.leader_epoch = -1
        self.start = NO_START
        self.records: dict[int, DeliveryState] = {}
        self.pending: dict[int, list[tuple[int | None, range, DeliveryState]]] = {}

    @rule(epoch=st.integers(0, 6), start=st.integers(-1, 5))
    def initialize(self, epoch: int, start: int) -> None:
        try:
            self.shard.states.initialize(KEY, epoch, start, NOW)
        except ApiError as error:
            assert error.code is ErrorCode.fenced_state_epoch
            assert self.state_epoch is not None
            assert epoch < self.state_epoch
            return
        assert self.state_epoch is None or epoch >= self.state_epoch
        if epoch != self.state_epoch:
            self.state_epoch, self.start, self.records = epoch, start, {}

    @rule(epoch=st.integers(0, 6))
    def read(self, epoch: int) -> None:
        try:
            self.shard.states.read(KEY, epoch, NOW)
        except ApiError as error:
            fenced = self.state_epoch is not None and epoch < self.leader_epoch
            assert error.code is (ErrorCode.fenced_leader_epoch if fenced else ErrorCode.invalid_request)
            return
        assert epoch >= self.leader_epoch
        self.leader_epoch = epoch

    @rule(
        first=st.integers(0, 20),
        count=st.integers(1, 6),
        state=st.sampled_from([AVAILABLE, ACKNOWLEDGED, ARCHIVED]),
        start=st.integers(-1, 10),
        behind=st.integers(0, 1),
        late=st.integers(0, 1),
        producer_id=st.sampled_from([-1, -1, 1, 2]),
    )
    def write(
        self,
        first: int,
        count: int,
        state: DeliveryState,
        start: int,
        behind: int,
        late: int,
        producer_id: int,
    ) -> None:
        if self.state_epoch is None or start < self.start:
            start = NO_START
        if producer_id != -1:
            start = NO_START
        asked = ((self.state_epoch or 0) - behind, self.leader_epoch - late)
        batches = [batch(first, first + count - 1, state)]
        producer = None if producer_id == -1 else (producer_id, 0)
        request = StateWrite(*asked, start, -1, batches, producer)
        try:
            self.shard.states.write(KEY, request, NOW)
        except ApiError as error:
            expected = ErrorCode.fenced_leader_epoch if late else ErrorCode.fenced_state_epoch
            assert error.code is (expected if self.state_epoch is not None else ErrorCode.invalid_request)
            return
        assert not behind
        assert not late
        changed = range(first, first + count)
        if producer is not None:
            self.pending.setdefault(producer_id, []).append((self.state_epoch, changed, state))
            return
        self.change(changed, state)
        self.start = self.start if start == NO_START else start

    def change(self, changed: range, state: DeliveryState) -> None:
        for offset in changed:
            if state is not AVAILABLE or self.records.get(offset, AVAILABLE) is AVAILABLE:
                self.records[offset] = state

    @rule(offset=st.integers(0, 22), late=st.integers(0, 1))
    def cut(self, offset: int, late: int) -> None:
        """The leader's log has been cut, and the start goes back."""
        if self.state_epoch is None or self.leader_epoch < 0:
            return
        epochs = self.state_epoch, self.leader_epoch - late
        position = LogPosition(offset, self.leader_epoch)
        request = StateWrite(*epochs, NO_START, -1, (), log_position=position, cut_offset=offset)
        if late:
            assert refusal(self.shard.states.write, KEY, request, NOW) is ErrorCode.fenced_leader_epoch
            return
        self.shard.states.write(KEY, request, NOW)
        self.records = {o: state for o, state in self.records.items() if self.start <= o < offset}
        self.start = min(self.start, offset)
        for changes in self.pending.values():
            changes[:] = [
                (epoch, range(changed.start, min(changed.stop, offset)), state)
                for epoch, changed, state in changes
            ]

    @rule(producer_id=st.sampled_from([1, 2]), commit=st.booleans())
    def end(self, producer_id: int, commit: bool) -> None:
        self.shard.end(producer_id, commit=commit)
        for epoch, changed, state in self.pending.pop(producer_id, []):
            if commit and epoch == self.state_epoch:
                self.change(changed, state)

    @rule()
    def delete(self) -> None:
        self.shard.states.delete(KEY)
        if self.state_epoch is not None:
            self.pending.clear()
        self.state_epoch, self.leader_epoch, self.start, self.records = None, -1, NO_START, {}

    @rule()
    def prune(self) -> None:
        self.shard.prune()

    @rule()
    def refresh(self) -> None:
        self.shard.states.refresh(self.shard.log.end_offset - 3, 10, NOW)

    @rule()
    def another_node_takes_over(self) -> None:
        self.shard.states = self.shard.replayed()

    @invariant()
    def live_is_replayed_and_what_it_should_be(self) -> None:
        states = self.shard.states
        again = self.shard.replayed()
        assert again.partitions == states.partitions
        assert again.pending == states.pending
        assert (KEY in states.partitions) is (self.state_epoch is not None)
        if self.state_epoch is not None:
            stored = states.partitions[KEY]
            assert (stored.state_epoch, stored.leader_epoch) == (self.state_epoch, self.leader_epoch)
            found = {
                offset: each.state
                for each in stored.batches
                for offset in range(each.first_offset, each.last_offset + 1)
            }
            assert found == {o: state for o, state in self.records.items() if o >= self.start}


TestStatesModel = StatesModel.TestCase


@given(st.binary(max_size=40), st.none() | st.binary(max_size=80))
def test_any_bytes_decode_or_raise_the_topics_error(key: bytes, value: bytes | None) -> None:
    from tidemill.share.state.records import CorruptShareRecord

    with suppress(CorruptShareRecord):
        decode_record(key, value)
