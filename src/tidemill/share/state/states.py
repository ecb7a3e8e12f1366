"""The state of one shard: the share partitions that live in one partition of ``__share_group_state``. Pure.

Every change follows one pattern: a request is checked, ``append`` puts its record into the log, and
``replay`` makes it part of the state; loading calls the same ``replay``. If ``append`` raises, nothing was
appended and the state is as before. Rules:

- A write names the state epoch and the leader epoch that it was made for. A lower one is fenced.
- A read by the leader of a higher epoch is stored: the leaders before it are fenced from then on. Only the
  leader that has read a state may write it: one that was deleted and begun anew, perhaps in the same state
  epoch, takes nothing from those who still know the one before.
- A finished record stays finished, and the start never goes back: a late write brings nothing back. Only a
  leader whose log was cut, by an unclean election, has the state of what is not in it forgotten.
- After ``updates_per_snapshot`` updates the next change is written as a snapshot of the whole state.
- A write inside of a transaction is pending until that ends: then it counts, or vanishes. A state that was
  begun anew or deleted meanwhile makes it void. Readers see pending batches with the producer's id.
- ``floor`` is the offset below which the log is not needed: all below it is in later snapshots. What is
  pending is not in any snapshot; its records keep the log's last stable offset, and so the start of the log,
  below them. One that was committed after a snapshot was written keeps the floor until the next snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from tidemill.coordination.share_state import (
    NO_CUT,
    NO_POSITION,
    NO_START,
    DeliveryState,
    LogPosition,
    ShareState,
    ShareStateSummary,
    StateBatch,
)
from tidemill.errors import ApiError, ErrorCode
from tidemill.share.state.batches import change, cut, finished_count, trim
from tidemill.share.state.records import Snapshot, SnapshotRecord, Update, UpdateRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from uuid import UUID

    from tidemill.coordination.share_state import SharePartitionKey
    from tidemill.share.state.records import ShareRecord

__all__ = ("Append", "ShareStates", "StateWrite")

NO_PRODUCER_ID: Final = -1
#: More in one write would make a record that is too large for a batch.
_BATCHES_MAX: Final = 50_000
_REASON_CHARACTERS_MAX: Final = 1_024
#: What describing a share partition says that was never initialized, as in Kafka.
_NO_SUMMARY: Final = ShareStateSummary(0, 0, NO_START, 0)


class Append(Protocol):
    """Puts records into the log as one batch, or raises and leaves the log as it was."""

    def __call__(self, records: Sequence[ShareRecord], producer: tuple[int, int] | None = None) -> int:
        """Append ``records``; gives the offset of the first.

        ``producer`` is id and epoch if they are part of its transaction.
        """


class StateWrite(NamedTuple):
    """A change of a share partition's state. ``producer``: id and epoch, if a transaction decides on it."""

    state_epoch: int
    leader_epoch: int
    start_offset: int
    delivery_complete_count: int
    batches: Sequence[StateBatch]
    producer: tuple[int, int] | None = None
    log_position: LogPosition = NO_POSITION
    cut_offset: int = NO_CUT


class _Pending(NamedTuple):
    """A write inside of a transaction that is still open; ``offset`` is that of its record."""

    offset: int
    producer_epoch: int
    state_epoch: int
    batches: tuple[StateBatch, ...]


@dataclass(slots=True)
class _Partition:
    """The state of one share partition. ``floor``: where the records begin that it can be loaded from."""

    snapshot_epoch: int
    state_epoch: int
    leader_epoch: int
    start_offset: int
    created_ms: int
    delivery_complete_count: int
    floor: int = field(compare=False)
    batches: list[StateBatch] = field(default_factory=list)
    log_position: LogPosition = NO_POSITION
    #: Updates since the last snapshot.
    updates: int = field(default=0, compare=False)


class ShareStates:
    """The share partitions of one shard."""

    def __init__(self, append: Append, updates_per_snapshot: int) -> None:
        self._append = append
        self._updates_per_snapshot = updates_per_snapshot
        self.partitions: dict[SharePartitionKey, _Partition] = {}
        #: By producer: what its open transaction will change.
        self.pending: dict[int, dict[SharePartitionKey, list[_Pending]]] = {}
        #: Share partitions that may have dead letters due: a look at their batches tells.
        self._may_be_due: dict[SharePartitionKey, None] = {}

    # -- what is in the log ----------------------------------------------------------------------------

    def replay(self, record: ShareRecord, offset: int, producer_id: int = NO_PRODUCER_ID) -> None:
        """Make a record that is in the log part of the state."""
        key = record.share_partition
        if isinstance(record, SnapshotRecord):
            self._replay_snapshot(key, record.value, offset)
            return
        if record.value is None:
            return
        if record.value.cut_offset != NO_CUT:
            self._cut_pending(key, record.value.cut_offset)
        if producer_id != NO_PRODUCER_ID:
            self._replay_pending(key, record.value, offset, producer_id)
        elif key in self.partitions:
            # Without a state, a snapshot follows: the log begins behind the one before.
            self._replay_update(self.partitions[key], record.value)
            self._note_due(key, record.value.batches)

    def _replay_snapshot(self, key: SharePartitionKey, snapshot: Snapshot | None, offset: int) -> None:
        if snapshot is None:
            self.partitions.pop(key, None)
            for producer_id, writes in tuple(self.pending.items()):
                writes.pop(key, None)
                if not writes:
                    del self.pending[producer_id]
            return
        self.partitions[key] = _Partition(
            snapshot.snapshot_epoch,
            snapshot.state_epoch,
            snapshot.leader_epoch,
            snapshot.start_offset,
            snapshot.created_ms,
            max(0, snapshot.delivery_complete_count),
            offset,
            list(snapshot.batches),
            LogPosition(snapshot.log_offset, snapshot.log_epoch, snapshot.log_history),
        )
        self._note_due(key, snapshot.batches)

    def _replay_pending(self, key: SharePartitionKey, update: Update, offset: int, producer_id: int) -> None:
        write = _Pending(offset, update.producer_epoch, update.state_epoch, tuple(update.batches))
        self.pending.setdefault(producer_id, {}).setdefault(key, []).append(write)
        state = self.partitions.get(key)
        if state is not None and state.state_epoch == update.state_epoch:
            # It is true of the log, whatever becomes of the transaction.
            _note_position(state, update)

    def _cut_pending(self, key: SharePartitionKey, cut_offset: int) -> None:
        """Forget what open transactions would change of records that are not in the log any more."""
        for writes_of in self.pending.values():
            for number, write in enumerate(writes_of.get(key, ())):
                left = list(write.batches)
                cut(left, cut_offset)
                writes_of[key][number] = write._replace(batches=tuple(left))

    def _note_due(self, key: SharePartitionKey, changed: Iterable[StateBatch]) -> None:
        if any(batch.state is DeliveryState.ARCHIVING for batch in changed):
            self._may_be_due[key] = None

    def _replay_update(self, state: _Partition, update: Update) -> None:
        state.leader_epoch = max(state.leader_epoch, update.leader_epoch)
        _note_position(state, update)
        if update.cut_offset != NO_CUT:
            state.start_offset = min(state.start_offset, update.cut_offset)
            cut(state.batches, update.cut_offset)
            state.delivery_complete_count = finished_count(state.batches)
        if update.delivery_complete_count >= 0:
            state.delivery_complete_count = update.delivery_complete_count
        for batch in update.batches:
            change(state.batches, batch)
        # Never back: what is finished below the start is forgotten, and would be handed out again.
        state.start_offset = max(state.start_offset, update.start_offset)
        trim(state.batches, state.start_offset)
        state.updates += 1

    def replay_marker(self, producer_id: int, *, commit: bool) -> None:
        """Settle what a producer's transaction had pending: it counts now, or never will."""
        for key, writes in self.pending.pop(producer_id, {}).items():
            state = self.partitions.get(key)
            if state is None or not commit:
                continue
            for write in writes:
                if write.state_epoch == state.state_epoch:
                    self._commit(state, write)

    def _commit(self, state: _Partition, write: _Pending) -> None:
        finished = finished_count(state.batches)
        for batch in write.batches:
            change(state.batches, batch)
        trim(state.batches, state.start_offset)
        state.delivery_complete_count += finished_count(state.batches) - finished
        state.floor = min(state.floor, write.offset)

    # -- requests --------------------------------------------------------------------------------------

    def initialize(self, key: SharePartitionKey, state_epoch: int, start_offset: int, now_ms: int) -> None:
        """Begin the state, or begin it anew at a higher epoch. At the same epoch nothing changes."""
        state = self.partitions.get(key)
        if state is not None and state_epoch < state.state_epoch:
            raise _fenced_state(key, state_epoch, state.state_epoch)
        if start_offset < NO_START or state_epoch < 0:
            raise _invalid(key, f"cannot begin at offset {start_offset} in state epoch {state_epoch}")
        if state is not None and state_epoch == state.state_epoch:
            return
        snapshot = Snapshot(
            0 if state is None else state.snapshot_epoch + 1,
            state_epoch,
            -1 if state is None else state.leader_epoch,
            start_offset,
            now_ms,
            now_ms,
            (),
            0,
        )
        self._write(SnapshotRecord(*key, snapshot))

    def read(self, key: SharePartitionKey, leader_epoch: int, now_ms: int) -> ShareState:
        """The state, for the leader at ``leader_epoch``; earlier leaders are fenced from now on."""
        state = self._get(key)
        _check_leader(key, state, leader_epoch)
        if leader_epoch > state.leader_epoch:
            write = StateWrite(state.state_epoch, leader_epoch, NO_START, state.delivery_complete_count, ())
            self._change(key, state, write, now_ms)
            state = self.partitions[key]
        return ShareState(
            state.state_epoch,
            state.start_offset,
            self._shown(key, state),
            state.delivery_complete_count,
            state.log_position,
        )

    def write(self, key: SharePartitionKey, write: StateWrite, now_ms: int) -> None:
        """Change the state; inside of a transaction, the change is pending until that ends."""
        state = self._get(key)
        _check_leader(key, state, write.leader_epoch)
        if write.state_epoch < state.state_epoch:
            raise _fenced_state(key, write.state_epoch, state.state_epoch)
        if write.state_epoch > state.state_epoch:
            raise _invalid(key, f"has state epoch {state.state_epoch}, not {write.state_epoch}")
        if write.leader_epoch > state.leader_epoch:
            raise ApiError(
                ErrorCode.fenced_state_epoch,
                f"share partition {key} was begun anew, and the leader of epoch {write.leader_epoch} has not"
                " read it since: read its state again",
            )
        write = write._replace(batches=_checked(key, write))
        if write.producer is None:
            self._change(key, state, write, now_ms)
            return
        if write.start_offset not in (NO_START, state.start_offset) or write.cut_offset != NO_CUT:
            raise _invalid(key, "moves its start outside of transactions only")
        producer_id, producer_epoch = write.producer
        batches = tuple(each._replace(producer_id=-1, producer_epoch=-1) for each in write.batches)
        update = Update(
            state.snapshot_epoch,
            write.leader_epoch,
            NO_START,
            batches,
            -1,
            producer_epoch,
            state.state_epoch,
            *write.log_position,
        )
        record = UpdateRecord(*key, update)
        self.replay(record, self._append([record], write.producer), producer_id)

    def delete(self, key: SharePartitionKey) -> None:
        """Forget the state. One that is not there is forgotten already."""
        if key in self.partitions:
            self._write(SnapshotRecord(*key, None))

    def summary(self, key: SharePartitionKey) -> ShareStateSummary:
        """What describing the share partition needs; Kafka's zeros if it was never initialized."""
        state = self.partitions.get(key)
        if state is None:
            return _NO_SUMMARY
        return ShareStateSummary(
            state.state_epoch, state.leader_epoch, state.start_offset, state.delivery_complete_count
        )

    def _change(self, key: SharePartitionKey, state: _Partition, write: StateWrite, now_ms: int) -> None:
        update = Update(
            state.snapshot_epoch,
            write.leader_epoch,
            write.start_offset,
            tuple(write.batches),
            write.delivery_complete_count,
            -1,
            -1,
            *write.log_position,
            write.cut_offset,
        )
        # A snapshot does not say that the log was cut, and open transactions have to know.
        if state.updates < self._updates_per_snapshot or write.cut_offset != NO_CUT:
            self._write(UpdateRecord(*key, update))
        else:
            self._write(SnapshotRecord(*key, self._snapshot(state, update, now_ms)))

    def _snapshot(self, state: _Partition, update: Update | None, now_ms: int) -> Snapshot:
        """The state after an update, as the next snapshot; the state itself stays as it is."""
        after = _Partition(
            state.snapshot_epoch,
            state.state_epoch,
            state.leader_epoch,
            state.start_offset,
            state.created_ms,
            state.delivery_complete_count,
            state.floor,
            list(state.batches),
            state.log_position,
        )
        if update is not None:
            self._replay_update(after, update)
        return Snapshot(
            state.snapshot_epoch + 1,
            after.state_epoch,
            after.leader_epoch,
            after.start_offset,
            after.created_ms,
            now_ms,
            tuple(after.batches),
            after.delivery_complete_count,
            *after.log_position,
        )

    def _write(self, *records: ShareRecord) -> None:
        """Put records into the log and make them part of the state."""
        offset = self._append(records)
        for number, record in enumerate(records):
            self.replay(record, offset + number)

    def _get(self, key: SharePartitionKey) -> _Partition:
        state = self.partitions.get(key)
        if state is None:
            raise _invalid(
                key, "was never initialized, or is deleted: a member joins the group before it fetches"
            )
        return state

    def _shown(self, key: SharePartitionKey, state: _Partition) -> tuple[StateBatch, ...]:
        """The batches, with what is pending over them."""
        shown = state.batches
        for producer_id, writes_of in self.pending.items():
            for write in writes_of.get(key, ()):
                if write.state_epoch != state.state_epoch:
                    continue
                shown = list(shown)
                for batch in write.batches:
                    change(
                        shown, batch._replace(producer_id=producer_id, producer_epoch=write.producer_epoch)
                    )
                trim(shown, state.start_offset)
        return tuple(shown)

    # -- housekeeping ----------------------------------------------------------------------------------

    def with_due_letters(self, most: int) -> list[SharePartitionKey]:
        """Share partitions with dead letters that are due, some of them; another time others come first."""
        found: list[SharePartitionKey] = []
        for key in list(islice(self._may_be_due, most)):
            del self._may_be_due[key]
            state = self.partitions.get(key)
            if state is not None and any(each.state is DeliveryState.ARCHIVING for each in state.batches):
                self._may_be_due[key] = None
                found.append(key)
        return found

    def floor(self) -> int | None:
        """The offset below which the log is not needed; None if no state is kept at all."""
        return min((state.floor for state in self.partitions.values()), default=None)

    def refresh(self, before_offset: int, most: int, now_ms: int) -> int:
        """Write snapshots of states that are kept by records before an offset; gives how many.

        A share partition that nobody changes would keep the start of the log for ever.
        """
        old = [key for key, state in self.partitions.items() if state.floor < before_offset][:most]
        for key in old:
            self._write(SnapshotRecord(*key, self._snapshot(self.partitions[key], None, now_ms)))
        return len(old)

    def forget_topics(self, exists: Callable[[UUID], bool], most: int) -> int:
        """Forget states of topics that do not exist; gives how many."""
        gone = [key for key in self.partitions if not exists(key.topic_id)][:most]
        for key in gone:
            self.delete(key)
        return len(gone)


def _note_position(state: _Partition, update: Update) -> None:
    if update.log_offset >= 0:
        history = update.log_history or state.log_position.history
        state.log_position = LogPosition(update.log_offset, update.log_epoch, history)


def _check_leader(key: SharePartitionKey, state: _Partition, leader_epoch: int) -> None:
    if leader_epoch < state.leader_epoch:
        raise ApiError(
            ErrorCode.fenced_leader_epoch,
            f"share partition {key} has been read by the leader of epoch {state.leader_epoch}, after epoch"
            f" {leader_epoch}",
        )


def _checked(key: SharePartitionKey, write: StateWrite) -> tuple[StateBatch, ...]:
    """The batches of a write if they can be stored, with reasons that are not too long."""
    if min(write.start_offset, write.cut_offset) < NO_START or len(write.batches) > _BATCHES_MAX:
        raise _invalid(
            key, f"cannot start at {write.start_offset} or change {len(write.batches)} batches at once"
        )
    for batch in write.batches:
        if not 0 <= batch.first_offset <= batch.last_offset or batch.state is DeliveryState.ACQUIRED:
            raise _invalid(key, f"cannot store {batch!r}")
    return tuple(
        batch if len(batch.reason) <= _REASON_CHARACTERS_MAX else batch._replace(reason=batch.reason[:1_024])
        for batch in write.batches
    )


def _fenced_state(key: SharePartitionKey, asked: int, known: int) -> ApiError:
    return ApiError(
        ErrorCode.fenced_state_epoch,
        f"share partition {key} is in state epoch {known}, after {asked}: read its state again",
    )


def _invalid(key: SharePartitionKey, what: str) -> ApiError:
    return ApiError(ErrorCode.invalid_request, f"share partition {key} {what}")
