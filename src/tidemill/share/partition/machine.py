"""The state machine of a share partition: who holds which record, how often it was delivered, what is done.

Rules (KIP-932, and what goes beyond it):

- The window reaches from the start offset to the end offset. Below it everything is finished; above it
  nobody has been given anything. Inside of it every record belongs to a run.
- Events and times come in; records to hand out and states to write come out. Times of locks are those of a
  steady clock; times before which a record is not handed out are those of the wall clock, since they are
  stored.
- An acknowledgement is checked whole, changes nothing that others see until it is written, and is taken back
  if the write fails. The end of a lock does not wait for its write; what is not written is written with the
  next one.
- One write is under way at a time; whatever happens meanwhile goes into the next one. After a write whose
  outcome is unknown nothing is handed out until the state was read again (``resolve``).
- A record may come back that nobody has looked at. Then the delivery is taken back: it does not count, no
  delay follows, and nothing dies of it.
- The start moves over the finished records at the front with the write that finishes them.
- A transaction may accept records: its members' locks then end no more by time or with their session. The
  records are held, by nobody, until a read of the state shows what became of the transaction: they are
  finished, or given out again.
- With order per key, or delivery times, records are looked at (``see``) before they can be handed out, from
  the start on. A key goes on to its next record when the end of the one before is written.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from heapq import heapify, heappop, heappush

from tidemill.coordination.share_state import NO_START, DeliveryState, ShareState, StateBatch
from tidemill.errors import ApiError, ErrorCode
from tidemill.share.partition.key_order import KeyOrder, short_key
from tidemill.share.partition.policy import SharePolicy
from tidemill.share.partition.runs import NEVER_MS, Run, RunList, Target, Unwritten, Wait
from tidemill.share.partition.values import (
    GROUP_BACKOFF,
    Acknowledgement,
    AcknowledgeType,
    Acquired,
    DueLetter,
    PendingAccept,
    RecordsView,
    SeenRecord,
    Settlement,
    Span,
    StateWrite,
    Totals,
)

__all__ = ("PartitionState", "SharePartition", "finished_from")

_AVAILABLE = DeliveryState.AVAILABLE
_ACQUIRED = DeliveryState.ACQUIRED
_ACKNOWLEDGED = DeliveryState.ACKNOWLEDGED
_ARCHIVING = DeliveryState.ARCHIVING
_ARCHIVED = DeliveryState.ARCHIVED
_READY, _DELAYED, _BLOCKED, _UNSEEN = Wait.READY, Wait.DELAYED, Wait.BLOCKED, Wait.UNSEEN
_GAP, _ACCEPT, _RELEASE, _REJECT, _RENEW, _RETURN = (int(each) for each in AcknowledgeType)
#: Kinds of records that are counted; those of AVAILABLE ones are the values of ``Wait``.
_HELD, _FINISHED, _DUE = 4, 5, 6
_KINDS = 7
_LIMIT_REASON = "the delivery limit is reached"
#: Above this part of the bound, nothing new is looked at while members hold records.
_WAITING_SLACK = 0.75
#: How many entries of timers that are out of date are kept without a look.
_SPARE_ENTRIES = 64
#: About how many runs one write may change: what is written is settled in one turn of the event loop.
_WRITE_RUNS_MAX = 500
#: How many locks and delays ``tick`` ends at once; records, with order per key.
_TICK_MAX = 500
#: With so many runs nothing is handed out while members hold records. The bounds of locks and of waiting
#: records keep below it; but a redrive may hold any number of letters, and finish others between them.
_RUNS_MAX = 120_000


class PartitionState(Enum):
    """Where a share partition is in its life."""

    EMPTY = "empty"
    INITIALIZING = "initializing"
    ACTIVE = "active"
    FAILED = "failed"
    FENCED = "fenced"


def _kind(run: Run) -> int:
    state = run.state
    if state is _AVAILABLE:
        return run.wait
    if state is _ACQUIRED:
        return _HELD
    return _DUE if state is _ARCHIVING else _FINISHED


class SharePartition:
    """What one share group has done with one partition, as far as it is not finished."""

    def __init__(self, policy: SharePolicy) -> None:
        self.policy = policy
        self.state = PartitionState.EMPTY
        self.state_epoch = -1
        self.start_offset = -1
        self.end_offset = -1
        self.totals = Totals()
        #: When the state was read. What happened before has no times: ages are counted from then.
        self.loaded_ms = 0
        #: The outcome of a write is unknown: the state has to be read again.
        self.is_unsure = False
        self._runs = RunList()
        #: First offsets of the runs that are handed out next, in order.
        self._ready: list[int] = []
        self._counts = [0] * _KINDS
        #: (time, first, last): when a lock or a delay may end. Entries that are out of date are passed over.
        self._locks: list[tuple[int, int, int]] = []
        self._delays: list[tuple[int, int, int]] = []
        self._keys = KeyOrder()
        #: Below it keys and headers are known, if they matter.
        self._seen_to = -1
        self._written_start = -1
        self._queued: list[Settlement] = []
        self._dirty: list[tuple[int, int]] = []
        self._writing: StateWrite | None = None
        self._letters: list[DueLetter] = []
        #: Reads of the state for transactions that were begun.
        self._rounds = 0

    # --- numbers

    @property
    def acquired_count(self) -> int:
        """Records that members hold."""
        return self._counts[_HELD]

    @property
    def available_count(self) -> int:
        """Records inside of the window that can be handed out now, or that nobody has looked at yet."""
        return self._counts[_READY] + self._counts[_UNSEEN]

    @property
    def delayed_count(self) -> int:
        return self._counts[_DELAYED]

    @property
    def blocked_count(self) -> int:
        """Records that wait for an earlier one of their key."""
        return self._counts[_BLOCKED]

    @property
    def due_letter_count(self) -> int:
        """Records whose dead letter is not written yet."""
        return self._counts[_DUE]

    @property
    def waiting_count(self) -> int:
        """Records that are delayed, blocked by their key, or whose dead letter is due: what
        ``max_waiting_records`` bounds.
        """
        return self._counts[_DELAYED] + self._counts[_BLOCKED] + self._counts[_DUE]

    @property
    def is_stalled(self) -> bool:
        """Whether nothing new is handed out because too many records wait."""
        return self.waiting_count >= self.policy.max_waiting_records

    @property
    def written_start(self) -> int:
        """The start offset that is stored, as far as is known."""
        return self._written_start

    # --- life

    def begin_loading(self) -> None:
        """Note that the state is being read from the persister."""
        assert self.state is PartitionState.EMPTY, self.state
        self.state = PartitionState.INITIALIZING

    def fail(self) -> None:
        """The state could not be read: nothing is guessed, nothing is served."""
        self.state = PartitionState.FAILED

    def fence(self) -> list[Settlement]:
        """Another leader, or a newer state, has taken over. Gives what cannot be acknowledged any more."""
        self.state = PartitionState.FENCED
        lost = [*(self._writing.settlements if self._writing is not None else ()), *self._queued]
        self._queued = []
        self._writing = None
        return lost

    def loaded(self, state: ShareState, start_offset: int, now_ms: int, wall_ms: int) -> int:
        """Take the state that was read. ``start_offset``: the state's, or one that is to replace it.

        Gives how many records below it were not finished: the start of the log has passed them.
        """
        assert self.state is PartitionState.INITIALIZING, self.state
        lost = 0 if state.start_offset == NO_START else _unfinished_below(state, start_offset)
        self.totals.lost += lost
        self.state_epoch = state.state_epoch
        self.loaded_ms = now_ms
        self._written_start = state.start_offset
        self.start_offset = self.end_offset = self._seen_to = start_offset
        for batch in sorted(state.batches):
            first = max(batch.first_offset, self.end_offset)
            if first > batch.last_offset:
                continue
            if first > self.end_offset:
                self._append(Run(self.end_offset, first - 1, _AVAILABLE), wall_ms)
            self._append(_stored_run(batch, first), wall_ms)
        self.state = PartitionState.ACTIVE
        return lost

    def _append(self, run: Run, wall_ms: int) -> None:
        """Put a run of a stored state behind the others."""
        run.since_ms = self.loaded_ms
        if run.state is _AVAILABLE:
            if self.policy.needs_records:
                run.wait = _UNSEEN
            elif run.not_before_ms > wall_ms:
                run.wait = _DELAYED
        elif run.state is _ARCHIVING:
            self._letters.append(DueLetter(run.first, run.last, run.count, run.reason))
        self._runs.append(run)
        self.end_offset = run.last + 1
        self._enter(run)

    def configure(self, policy: SharePolicy, wall_ms: int) -> None:
        """Use these configs of the group from now on."""
        before, self.policy = self.policy, policy
        if (before.order_by_key, before.dead_blocks_key, before.deliver_at) == (
            policy.order_by_key,
            policy.dead_blocks_key,
            policy.deliver_at,
        ):
            return
        # All records of the window are looked at again, from the start on.
        self._keys = KeyOrder()
        self._seen_to = self.start_offset
        for run in self._runs:
            run.blocks_key = False
            if run.state is _AVAILABLE:
                self._leave(run)
                run.wait = _DELAYED if run.not_before_ms > wall_ms else _READY
                if policy.needs_records:
                    run.wait = _UNSEEN
                self._enter(run)

    # --- runs

    def _leave(self, run: Run) -> None:
        kind = _kind(run)
        self._counts[kind] -= len(run)
        if kind == _READY:
            del self._ready[bisect_left(self._ready, run.first)]

    def _enter(self, run: Run) -> None:
        kind = _kind(run)
        self._counts[kind] += len(run)
        if kind == _READY:
            insort(self._ready, run.first)
        elif kind == _DELAYED:
            heappush(self._delays, (run.not_before_ms, run.first, run.last))
            if len(self._delays) > 2 * len(self._runs) + _SPARE_ENTRIES:
                self._delays = [
                    (each.not_before_ms, each.first, each.last)
                    for each in self._runs
                    if each.wait is _DELAYED
                ]
                heapify(self._delays)

    def _split(self, offset: int) -> None:
        part = self._runs.split(offset)
        if part is not None and _kind(part) == _READY:
            insort(self._ready, offset)

    def _cut_out(self, first: int, last: int) -> list[Run]:
        """The runs from ``first`` to ``last``, split so that they have no other records."""
        self._split(first)
        self._split(last + 1)
        return self._runs.overlapping(first, last)

    def _merge_finished(self, first: int, last: int) -> None:
        """Make one run of finished neighbours: what is done must not take memory for each record.

        Records that died stay apart from others: with other configs they block their keys.
        """
        runs = self._runs
        low = max(0, runs.index_of(first) - 1)
        high = min(len(runs), bisect_right(runs.firsts, last) + 1)
        merged: list[Run] = []
        for run in runs.runs[low:high]:
            before = merged[-1] if merged else None
            if before is not None and self._are_done_alike(before, run):
                before.last = run.last
            else:
                merged.append(run)
        if len(merged) < high - low:
            runs.runs[low:high] = merged
            runs.firsts[low:high] = [run.first for run in merged]

    def _are_done_alike(self, one: Run, other: Run) -> bool:
        return self._is_done(one) and self._is_done(other) and _is_dead(one) == _is_dead(other)

    def _is_done(self, run: Run) -> bool:
        """Whether nobody needs to know more of these records than that they are finished."""
        if run.state is _ACKNOWLEDGED:
            return not run.unwritten
        return run.state is _ARCHIVED and not run.unwritten and not self._may_block(run)

    def _may_block(self, run: Run) -> bool:
        """Whether records that died hold up, or may be found to hold up, later ones of their keys."""
        if run.blocks_key:
            return True
        policy = self.policy
        blocking = policy.order_by_key and policy.dead_blocks_key
        return blocking and _is_dead(run) and run.last >= self._seen_to

    # --- handing out

    def next_offset(self) -> int | None:
        """The offset of the first record that can be handed out now; None if there is none in the window
        and nothing new may be handed out.
        """
        if self.state is not PartitionState.ACTIVE or self.is_unsure:
            return None
        if self._is_full:
            return None
        if self._ready:
            return self._ready[0]
        if self.policy.needs_records or self.is_stalled:
            return None
        return self.end_offset

    @property
    def _is_full(self) -> bool:
        """Whether nothing is handed out before members have finished some of what they hold."""
        held = self._counts[_HELD]
        return held >= self.policy.max_record_locks or (held > 0 and len(self._runs) >= _RUNS_MAX)

    def acquire(
        self,
        member: str,
        position: int,
        spans: Sequence[Span],
        max_records: int,
        batch_size: int,
        *,
        exact: bool,
        now_ms: int,
        wall_ms: int,
    ) -> list[Acquired]:
        """Give a member records of the batches in ``spans``, which were read at ``position``.

        ``exact`` is KIP-1206's record-limit mode. Without it the last batch is given whole, even if that is
        more than ``max_records``; the limit of locks is kept in any case.
        """
        if self.state is not PartitionState.ACTIVE or self.is_unsure or not spans:
            return []
        locks_left = self.policy.max_record_locks - self._counts[_HELD]
        wanted = min(max_records, locks_left)
        if wanted <= 0:
            return []
        self._hide_inside(position, spans, now_ms, wall_ms)
        if not self.policy.needs_records and not self.is_stalled:
            self._extend(spans, wanted, now_ms)
        given: list[Acquired] = []
        deadline_ms = now_ms + self.policy.lock_duration_ms
        for run, room in self._pieces(position, spans, wanted, locks_left, exact=exact):
            self._give(run, room, member, now_ms, deadline_ms)
            _add_acquired(given, run, spans, batch_size, exact=exact)
        for acquired in given:
            self._given(acquired)
        return given

    def _extend(self, spans: Sequence[Span], wanted: int, now_ms: int) -> None:
        """Take batches behind the window into it, until there is enough to hand out."""
        for span in spans:
            if span.last_offset < self.end_offset:
                continue
            if self._counts[_READY] >= wanted:
                break
            if span.first_offset > self.end_offset:
                # Compaction has removed what was there.
                self._hide(self.end_offset, span.first_offset - 1)
            first = max(span.first_offset, self.end_offset)
            if span.is_hidden:
                self._hide(first, span.last_offset)
            else:
                self._take_in(first, span.last_offset, _READY, 0, now_ms)

    def _hide_inside(self, position: int, spans: Sequence[Span], now_ms: int, wall_ms: int) -> None:
        """Finish records of the window that nobody can be given: hidden ones, and what compaction removed."""
        behind = position
        for first, last, is_hidden in spans:
            if behind >= self.end_offset:
                return
            nothing_to = last if is_hidden else first - 1
            if nothing_to >= behind:
                for run in self._pass_over(behind, min(nothing_to, self.end_offset - 1)):
                    self._release_keys(run.first, run.last, now_ms, wall_ms)
            behind = last + 1

    def _hide(self, first: int, last: int) -> None:
        """Pass over offsets behind the window without a record to deliver; the log says so again."""
        before = self._runs.runs[-1] if self._runs.runs else None
        if before is not None and self._is_done(before) and not _is_dead(before):
            before.last = last
            self._counts[_FINISHED] += last - first + 1
        else:
            run = Run(first, last, _ARCHIVED)
            self._runs.append(run)
            self._enter(run)
        self.end_offset = last + 1

    def _take_in(self, first: int, last: int, wait: Wait, not_before_ms: int, now_ms: int) -> None:
        """Extend the window by new records behind its end, which wait as ``wait`` says."""
        before = self._runs.runs[-1] if self._runs.runs else None
        if (
            before is not None
            and before.state is _AVAILABLE
            and before.wait is wait
            and before.count == 0
            and before.not_before_ms == not_before_ms
            and wait is not _DELAYED
        ):
            before.last = last
            self._counts[wait] += last - first + 1
        else:
            run = Run(first, last, _AVAILABLE)
            run.wait, run.not_before_ms, run.since_ms = wait, not_before_ms, now_ms
            self._runs.append(run)
            self._enter(run)
        self.end_offset = last + 1

    def _pieces(
        self, position: int, spans: Sequence[Span], wanted: int, locks_left: int, *, exact: bool
    ) -> Iterator[tuple[Run, int]]:
        """Runs to hand out, and how many records of each."""
        data_last = spans[-1].last_offset
        given = 0
        while given < wanted:
            place = bisect_left(self._ready, position)
            if place == len(self._ready) or self._ready[place] > data_last:
                return
            run = self._runs.runs[self._runs.index_of(self._ready[place])]
            together = self.policy.together_max(run.count, run.batch_records or len(run))
            if together is not None and given:
                return
            last = min(run.last, data_last)
            room = min(wanted - given, last - run.first + 1)
            if together is not None:
                room = min(room, together)
            elif not exact and room == wanted - given:
                whole = _end_of_span(spans, run.first + room - 1)
                room = min(locks_left - given, min(last, whole) - run.first + 1)
            given += room
            yield run, room
            if together is not None:
                return

    def _give(self, run: Run, room: int, member: str, now_ms: int, deadline_ms: int) -> None:
        if room < len(run):
            self._split(run.first + room)
        self._leave(run)
        run.state = _ACQUIRED
        run.count += 1
        run.owner = member
        run.deadline_ms = deadline_ms
        run.since_ms = now_ms
        run.not_before_ms = 0
        self._enter(run)
        self.totals.acquired += room

    def _lock_until(self, run: Run) -> None:
        heappush(self._locks, (run.deadline_ms, run.first, run.last))
        if len(self._locks) > 2 * len(self._runs) + _SPARE_ENTRIES:
            # Most locks end long before their time, and leave their entries behind.
            self._locks = [(each.deadline_ms, each.first, each.last) for each in self._runs if each.owner]
            heapify(self._locks)

    def _given(self, acquired: Acquired) -> None:
        """Make one run of neighbours that a member was given together, and note when their locks end."""
        first, last, _ = acquired
        self._split(first)
        runs = self._cut_out(first, last)
        for run in runs:
            run.batch_records = run.batch_records or last - first + 1
        first_run = runs[0]
        if len(runs) > 1 and all(
            run.batch_records == first_run.batch_records and not run.unwritten for run in runs
        ):
            index = self._runs.index_of(first)
            first_run.last = last
            del self._runs.runs[index + 1 : index + len(runs)]
            del self._runs.firsts[index + 1 : index + len(runs)]
            runs = [first_run]
        for run in runs:
            self._lock_until(run)

    # --- keys and delivery times

    @property
    def wants_records(self) -> bool:
        """Whether records at ``scan_offset`` have to be looked at, so that there is something to hand out."""
        policy = self.policy
        if not policy.needs_records or self.state is not PartitionState.ACTIVE or self.is_unsure:
            return False
        held, waiting = self._counts[_HELD], self.waiting_count
        if self._ready or held >= policy.max_record_locks or waiting >= policy.max_waiting_records:
            return False
        return not held or waiting < policy.max_waiting_records * _WAITING_SLACK

    @property
    def scan_offset(self) -> int:
        """Where ``see`` goes on. Finished records need not be looked at."""
        offset = self._seen_to
        index = self._runs.index_of(offset)
        while index < len(self._runs):
            run = self._runs.runs[index]
            if run.first > offset or not self._is_done(run):
                break
            offset = run.last + 1
            index += 1
        return offset

    def see(
        self, records: Iterable[SeenRecord], next_offset: int, now_ms: int, wall_ms: int, *, first_offset: int
    ) -> None:
        """Look at all records from ``first_offset`` to ``next_offset``; offsets without one are hidden.

        Stops early when as many wait as may wait. Does nothing if earlier records have to be looked at first:
        ``scan_offset`` goes back when other configs ask for that, and stays back when too many wait.
        """
        position = self.scan_offset
        if position < first_offset:
            return
        for record in records:
            if record.offset < position:
                continue
            if self.is_stalled:
                next_offset = position
                break
            if record.offset > position:
                self._pass_over(position, record.offset - 1)
            self._see_one(record, now_ms, wall_ms)
            position = record.offset + 1
        if position < next_offset:
            self._pass_over(position, next_offset - 1)
        self._seen_to = max(position, next_offset)

    def _pass_over(self, first: int, last: int) -> list[Run]:
        """Archive offsets that have no record to deliver: markers, aborted records, compacted offsets.

        Gives the runs of the window that are finished by that. What members hold stays theirs, and its keys
        wait for it, although compaction may have removed it since.
        """
        passed: list[Run] = []
        if first < self.end_offset:
            for run in self._cut_out(first, min(last, self.end_offset - 1)):
                if run.state is _AVAILABLE:
                    self._leave(run)
                    run.state, run.count = _ARCHIVED, 0
                    self._enter(run)
                    passed.append(run)
        if last >= self.end_offset:
            self._hide(max(first, self.end_offset), last)
        return passed

    def _see_one(self, record: SeenRecord, now_ms: int, wall_ms: int) -> None:
        policy, offset = self.policy, record.offset
        key = short_key(record.key) if policy.order_by_key and record.key is not None else None
        not_before_ms = record.deliver_at_ms if policy.deliver_at else 0
        if offset >= self.end_offset:
            is_first = key is None or self._keys.add(offset, key)
            wait = _BLOCKED if not is_first else _DELAYED if not_before_ms > wall_ms else _READY
            if wait is _READY:
                not_before_ms = 0
            self._take_in(offset, offset, wait, not_before_ms, now_ms)
            return
        run = self._runs.runs[self._runs.index_of(offset)]
        if self._is_done(run) or (
            run.state is _ARCHIVING and not run.unwritten and not policy.dead_blocks_key
        ):
            return
        may_block = self._may_block(run)
        (run,) = self._cut_out(offset, offset)
        if key is not None:
            # Also of a record whose death is not written yet: its key goes on, or is blocked, after that.
            self._keys.add(offset, key)
            run.blocks_key = may_block
        if run.state is _AVAILABLE:
            if not run.count:
                run.not_before_ms = max(run.not_before_ms, not_before_ms)
            self._set_available(run, now_ms, wall_ms, is_seen=True)

    def _set_available(self, run: Run, now_ms: int, wall_ms: int, *, is_seen: bool = False) -> None:
        """Let records be handed out as soon as their time and their keys allow it, and these are known."""
        if self.policy.needs_records and run.first < self._seen_to <= run.last:
            first, last = run.first, run.last
            self._split(self._seen_to)
            for each in self._runs.overlapping(first, last):
                self._set_available(each, now_ms, wall_ms)
            return
        is_unseen = self.policy.needs_records and run.first >= self._seen_to and not is_seen
        if self.policy.order_by_key and not is_unseen and len(run) > 1:
            # Each has a key of its own, and may have to wait for another record.
            firsts = [self._keys.is_first(offset) for offset in range(run.first, run.last + 1)]
            if not all(firsts):
                for each in [
                    part
                    for offset in range(run.first, run.last + 1)
                    for part in self._cut_out(offset, offset)
                ]:
                    self._set_available(each, now_ms, wall_ms)
                return
        self._leave(run)
        if run.state is not _AVAILABLE or not run.since_ms:
            run.since_ms = now_ms
        run.state, run.owner, run.deadline_ms = _AVAILABLE, "", NEVER_MS
        if is_unseen:
            # There are other configs or another leader, and nobody has looked at their keys since.
            run.wait = _UNSEEN
        elif self.policy.order_by_key and not self._keys.is_first(run.first):
            run.wait = _BLOCKED
        else:
            run.wait = _DELAYED if run.not_before_ms > wall_ms else _READY
        self._enter(run)

    def _release_keys(self, first: int, last: int, now_ms: int, wall_ms: int) -> None:
        """Let the next record of each key go on: the end of these records is written, or they are gone."""
        if not len(self._keys):
            return
        for offset in self._keys.between(first, last):
            following = self._keys.finish(offset)
            if following is None or not self.start_offset <= following < self.end_offset:
                continue
            index = self._runs.index_of(following)
            if self._runs.runs[index].state is _AVAILABLE:
                self._unblock(following, now_ms, wall_ms)

    def _unblock(self, offset: int, now_ms: int, wall_ms: int) -> None:
        """Make the record at ``offset`` available: it is now the first of its key that is not finished."""
        before = self._runs.runs[self._runs.index_of(offset)]
        if before.wait is _READY:
            self._split(offset)
            self._split(offset + 1)
        run = self._runs.isolate(offset)
        assert run is not None
        self._set_available(run, now_ms, wall_ms)

    # --- acknowledging

    def acknowledge(
        self, member: str, acknowledgements: Sequence[Acknowledgement], now_ms: int, wall_ms: int
    ) -> Settlement:
        """What a member says of records that it holds. Raises ``ApiError``, and then nothing is changed."""
        pieces = [piece for each in acknowledgements for piece in self._checked(member, each)]
        settlement = Settlement()
        for first, last, kind, given in pieces:
            for run in self._cut_out(first, last):
                if kind == _RENEW:
                    run.deadline_ms = now_ms + self.policy.lock_duration_ms
                    self._lock_until(run)
                else:
                    run.target = self._target(kind, run.count, given, wall_ms)
            if kind != _RENEW:
                settlement.ranges.append((first, last))
        if settlement.needs_write:
            self._queued.append(settlement)
        return settlement

    def _checked(
        self, member: str, given: Acknowledgement
    ) -> Iterator[tuple[int, int, int, Acknowledgement]]:
        """The parts of an acknowledgement that have one type. Raises unless the member holds all of them."""
        types = given.types
        count = given.last_offset - given.first_offset + 1
        if count <= 0 or len(types) not in (1, count):
            raise ApiError(
                ErrorCode.invalid_request,
                f"offsets {given.first_offset} to {given.last_offset} cannot be acknowledged by "
                f"{len(types)} types: give one, or one for each",
            )
        first, last = max(given.first_offset, self.start_offset), given.last_offset
        if last < first:
            return  # The start has passed them: they are finished already.
        self._check_held(member, first, last)
        if len(types) == 1:
            yield first, last, self._checked_type(types[0]), given
            return
        offset = first
        while offset <= last:
            kind = types[offset - given.first_offset]
            end = offset
            while end < last and types[end + 1 - given.first_offset] == kind:
                end += 1
            yield offset, end, self._checked_type(kind), given
            offset = end + 1

    def _check_held(self, member: str, first: int, last: int) -> None:
        if last >= self.end_offset:
            raise _not_held(f"offset {last} was not handed out yet")
        for run in self._runs.overlapping(first, last):
            if run.state is not _ACQUIRED or run.target is not None or run.owner != member:
                what = "is held by another member" if run.state is _ACQUIRED else f"is {run.state.name}"
                if run.target is not None:
                    what = "is being acknowledged already"
                raise _not_held(f"offset {max(run.first, first)} {what}")

    def _checked_type(self, kind: int) -> int:
        if not 0 <= kind <= _RETURN or (kind == _RENEW and not self.policy.renew_enabled):
            raise ApiError(
                ErrorCode.invalid_request,
                f"acknowledge type {kind} is not known"
                if kind != _RENEW
                else "locks cannot be renewed: share.renew.acknowledge.enable is off for the group",
            )
        return kind

    def _target(self, kind: int, count: int, given: Acknowledgement, wall_ms: int) -> Target:
        if kind == _ACCEPT:
            return Target(_ACKNOWLEDGED, tally="accepted")
        if kind == _GAP:
            return Target(_ARCHIVED)
        if kind == _REJECT:
            return self._death(given.reason, "rejected")
        if kind == _RETURN:
            return Target(_AVAILABLE, tally="released", is_return=True)
        if count >= self.policy.delivery_limit:
            return self._death(_LIMIT_REASON, "released")
        delay_ms = self.policy.backoff_ms(count) if given.delay_ms == GROUP_BACKOFF else given.delay_ms
        return Target(_AVAILABLE, wall_ms + delay_ms if delay_ms > 0 else 0, tally="released")

    def _death(self, reason: str, tally: str) -> Target:
        state = _ARCHIVING if self.policy.dead_letters else _ARCHIVED
        return Target(state, reason=reason, tally=tally, is_death=True)

    # --- transactions that accept records

    def accept_in_transaction(
        self, member: str, acknowledgements: Sequence[Acknowledgement], producer_id: int, producer_epoch: int
    ) -> PendingAccept:
        """Hold records for a transaction: ``pending_written`` or ``pending_refused`` has to follow.

        Raises ``ApiError``, and then nothing is changed.
        """
        pieces = [piece for each in acknowledgements for piece in self._checked(member, each)]
        if any(kind != _ACCEPT for _, _, kind, _ in pieces):
            raise ApiError(
                ErrorCode.invalid_request,
                "in a transaction records are accepted; release, reject or renew them outside of it",
            )
        pending = PendingAccept()
        for first, last, _, _ in pieces:
            for run in self._cut_out(first, last):
                pending.locks.append((run.first, run.last, run.owner, run.deadline_ms))
                pending.batches.append(StateBatch(run.first, run.last, _ACKNOWLEDGED, run.count))
                run.producer_id, run.producer_epoch = producer_id, producer_epoch
                run.owner, run.deadline_ms, run.pending_round = "", NEVER_MS, NEVER_MS
                if run.unwritten:
                    # Whatever was to be written of them, the end of the transaction replaces it.
                    pending.unwritten.append((run.first, run.last))
                    run.unwritten = Unwritten.NO
        return pending

    def pending_written(self, pending: PendingAccept) -> None:
        """The transaction has the records, or may have them: a later read of the state tells."""
        for first, last, _, _ in pending.locks:
            for run in self._runs.overlapping(first, last):
                if run.pending_round == NEVER_MS:
                    run.pending_round = self._rounds

    def pending_refused(self, pending: PendingAccept) -> None:
        """The transaction does not have the records: their locks go on as if nothing had been."""
        for first, last, owner, deadline_ms in pending.locks:
            for run in self._runs.overlapping(first, last):
                if run.pending_round == NEVER_MS:
                    run.producer_id = run.producer_epoch = -1
                    run.owner, run.deadline_ms, run.pending_round = owner, deadline_ms, 0
                    self._lock_until(run)
        for first, last in pending.unwritten:
            for run in self._runs.overlapping(first, last):
                run.unwritten = Unwritten.YES
        self._dirty += pending.unwritten

    @property
    def has_pending(self) -> bool:
        """Whether transactions hold records. Costly: it looks at all runs."""
        return any(run.producer_id >= 0 for run in self._runs)

    def begin_pending_read(self) -> int:
        """The number of a read of the state that begins now, for ``settle_pending``."""
        self._rounds += 1
        return self._rounds

    def settle_pending(self, state: ShareState, number: int, now_ms: int, wall_ms: int) -> None:
        """Take what became of transactions from a state that was read."""
        stored = sorted(state.batches)
        held = [
            (run.first, run.last) for run in self._runs if run.producer_id >= 0 and run.pending_round < number
        ]
        for first, last in held:
            for start, end, batch in _covering(stored, first, last):
                for run in self._cut_out(start, end):
                    if run.producer_id < 0 or (batch is not None and batch.producer_id == run.producer_id):
                        continue
                    self._settle_one(run, batch, now_ms, wall_ms)
            self._merge_finished(first, last)

    def _settle_one(self, run: Run, batch: StateBatch | None, now_ms: int, wall_ms: int) -> None:
        """Give records that a transaction held the state that is stored."""
        run.producer_id = run.producer_epoch = -1
        state = _AVAILABLE if batch is None else batch.state
        if _is_finished(state) or state is _ARCHIVING:
            self._leave(run)
            run.state, run.reason = state, "" if batch is None else batch.reason
            self._enter(run)
            if state is _ARCHIVING:
                self._letters.append(DueLetter(run.first, run.last, run.count, run.reason))
                return
            if state is _ACKNOWLEDGED:
                self.totals.accepted += len(run)
            self._end_of_keys(run, is_death=state is _ARCHIVED, now_ms=now_ms, wall_ms=wall_ms)
        else:
            self._let_go(run, now_ms, wall_ms)

    # --- writing

    @property
    def may_write(self) -> bool:
        """Whether ``next_write`` may have something. Cheap, unlike the call itself."""
        if self._queued or self._dirty or self.start_offset != self._written_start:
            return True
        return bool(self._runs.runs) and self._is_done(self._runs.runs[0])

    def next_write(self) -> StateWrite | None:
        """The next write to the persister, if any: ``wrote``, ``refused`` or ``unsure`` has to follow."""
        if self.state is not PartitionState.ACTIVE or self._writing is not None or self.is_unsure:
            return None
        changed: dict[int, Run] = {}
        settlements = self._take_queued(changed)
        dirty = self._take_dirty(changed)
        start, finishing = self._start_after_write()
        if not settlements and not dirty and start == self._written_start:
            return None
        complete = self._counts[_FINISHED]
        for run in changed.values():
            if run.is_writing and run.target is not None and _is_finished(run.target.state):
                complete += len(run)
        batches = _batches([changed[first] for first in sorted(changed)], start)
        self._writing = StateWrite(start, complete - finishing, batches, settlements, dirty)
        return self._writing

    def _take_queued(self, changed: dict[int, Run]) -> list[Settlement]:
        """Put the runs of queued acknowledgements into ``changed``; not too many: all are settled at once."""
        taken = 0
        for settlement in self._queued:
            if len(changed) >= _WRITE_RUNS_MAX:
                break
            taken += 1
            for first, last in settlement.ranges:
                for run in self._runs.overlapping(first, last):
                    if run.target is not None:
                        run.is_writing = True
                        changed[run.first] = run
        settlements = self._queued[:taken]
        del self._queued[:taken]
        return settlements

    def _take_dirty(self, changed: dict[int, Run]) -> list[tuple[int, int]]:
        """Add changed runs that no acknowledgement waits for to ``changed``, up to ``_WRITE_RUNS_MAX``."""
        taken = 0
        for first, last in self._dirty:
            if len(changed) >= _WRITE_RUNS_MAX:
                break
            taken += 1
            for run in self._runs.overlapping(first, last):
                if run.unwritten:
                    run.unwritten = Unwritten.BEING_WRITTEN
                    changed[run.first] = run
        dirty = self._dirty[:taken]
        del self._dirty[:taken]
        return dirty

    def _start_after_write(self) -> tuple[int, int]:
        """(where the window begins once this write is done, how many records that passes)."""
        start = self.start_offset
        blocking = self.policy.order_by_key and self.policy.dead_blocks_key
        for run in self._runs.runs:
            target = run.target if run.is_writing else None
            if not _is_finished(run.state if target is None else target.state):
                break
            if run.unwritten is Unwritten.YES:
                break
            dies = target is not None and target.is_death
            if self._may_block(run) or (blocking and (dies or run.unwritten)):
                break
            start = run.last + 1
        return start, start - self.start_offset

    def wrote(self, now_ms: int, wall_ms: int) -> list[Settlement]:
        """The write is committed. Gives the acknowledgements that it answers."""
        write = self._end_write()
        self._written_start = write.start_offset
        for settlement in write.settlements:
            for first, last in settlement.ranges:
                for run in self._runs.overlapping(first, last):
                    if run.is_writing and run.target is not None:
                        self._settle(run, run.target, now_ms, wall_ms)
        for first, last in write.dirty:
            self._noted(first, last, now_ms, wall_ms)
        if write.start_offset > (start := self.start_offset):
            self._move_start(write.start_offset)
            # Records that died since the write began may block their keys; they are gone with the new start.
            self._release_keys(start, write.start_offset - 1, now_ms, wall_ms)
        for settlement in write.settlements:
            for first, last in settlement.ranges:
                self._merge_finished(first, last)
        for first, last in write.dirty:
            self._merge_finished(first, last)
        return write.settlements

    def _noted(self, first: int, last: int, now_ms: int, wall_ms: int) -> None:
        """Mark runs as written that had changed before their write: expired locks, and records that died."""
        for run in self._runs.overlapping(first, last):
            if run.unwritten is Unwritten.BEING_WRITTEN:
                run.unwritten = Unwritten.NO
                if run.state is _ARCHIVED or run.state is _ARCHIVING:
                    self._end_of_keys(run, is_death=True, now_ms=now_ms, wall_ms=wall_ms)

    def refused(self) -> list[Settlement]:
        """The write has failed and has changed nothing. Gives the acknowledgements that failed with it."""
        write = self._end_write()
        for settlement in write.settlements:
            for first, last in settlement.ranges:
                for run in self._runs.overlapping(first, last):
                    if run.is_writing:
                        run.target, run.is_writing = None, False
                        self._lock_until(run)
        for first, last in write.dirty:
            for run in self._runs.overlapping(first, last):
                if run.unwritten is Unwritten.BEING_WRITTEN:
                    run.unwritten = Unwritten.YES
        self._dirty = [*write.dirty, *self._dirty]
        return write.settlements

    def _end_write(self) -> StateWrite:
        write = self._writing
        assert write is not None, "no write is under way"
        self._writing = None
        return write

    def unsure(self) -> None:
        """Nobody knows whether the write was carried out: the state is to be read again, for ``resolve``."""
        assert self._writing is not None, "no write is under way"
        self.is_unsure = True

    def resolve(self, state: ShareState) -> bool:
        """Whether a state that was read again has the write; ``wrote`` or ``refused`` has to follow."""
        assert self._writing is not None, "no write is under way"
        assert self.is_unsure, "no outcome is unknown"
        self.is_unsure = False
        return _has_write(state, self._writing)

    def _settle(self, run: Run, target: Target, now_ms: int, wall_ms: int) -> None:
        run.target, run.is_writing = None, False
        run.unwritten = Unwritten.NO
        if target.tally:
            setattr(self.totals, target.tally, getattr(self.totals, target.tally) + len(run))
        self._move_to(run, target, now_ms, wall_ms)
        if run.state is not _AVAILABLE:
            self._end_of_keys(run, is_death=target.is_death, now_ms=now_ms, wall_ms=wall_ms)

    def _move_to(self, run: Run, target: Target, now_ms: int, wall_ms: int) -> None:
        """Give an acquired run its next state."""
        if target.is_death:
            self.totals.dead += len(run)
        run.not_before_ms, run.reason = target.not_before_ms, target.reason
        run.count = target.count_after(run.count)
        if not run.count:
            run.batch_records = 0
        if target.state is _AVAILABLE:
            self._set_available(run, now_ms, wall_ms)
            return
        self._leave(run)
        run.state, run.owner, run.deadline_ms = target.state, "", NEVER_MS
        self._enter(run)
        if target.state is _ARCHIVING:
            self._letters.append(DueLetter(run.first, run.last, run.count, run.reason))

    def _end_of_keys(self, run: Run, *, is_death: bool, now_ms: int, wall_ms: int) -> None:
        """Let the keys of records whose end is written go on, or stay blocked."""
        first, last = run.first, run.last
        if is_death and self.policy.order_by_key and self.policy.dead_blocks_key:
            for offset in self._keys.between(first, last):
                for each in self._cut_out(offset, offset):
                    each.blocks_key = True
        else:
            self._release_keys(first, last, now_ms, wall_ms)

    def _move_start(self, offset: int) -> None:
        self._split(offset)
        for run in self._runs.remove_below(offset):
            self._leave(run)
        self.start_offset = offset
        self.end_offset = max(self.end_offset, offset)
        self._seen_to = max(self._seen_to, offset)

    # --- time, members, the log

    def next_due_ms(self, now_ms: int, wall_ms: int) -> int | None:
        """The time of the steady clock at which ``tick`` may have something to do; None if never."""
        due = [self._locks[0][0]] if self._locks else []
        if self._delays:
            due.append(now_ms + max(0, self._delays[0][0] - wall_ms))
        return min(due, default=None)

    def tick(self, now_ms: int, wall_ms: int) -> bool:
        """End locks and delays whose time has come. Whether there is more to hand out than before.

        Many end together after a pause of a group's workers. What is more than one turn of the event loop can
        take stays due: ``next_due_ms`` then gives a time that has passed.
        """
        ready = self._counts[_READY]
        ended = self._take_due(self._locks, now_ms, _TICK_MAX)
        for run in ended:
            if run.state is _ACQUIRED and run.target is None and run.deadline_ms <= now_ms:
                self.totals.expired += len(run)
                self._let_go(run, now_ms, wall_ms)
        for run in self._take_due(self._delays, wall_ms, _TICK_MAX - len(ended)):
            if run.state is _AVAILABLE and run.wait is _DELAYED and run.not_before_ms <= wall_ms:
                self._set_available(run, now_ms, wall_ms)
        return self._counts[_READY] > ready

    def _take_due(self, timers: list[tuple[int, int, int]], until_ms: int, limit: int) -> list[Run]:
        """Take runs out of a heap of timers whose time has come. About ``limit`` at most; the rest stays."""
        due: list[Run] = []
        while timers and timers[0][0] <= until_ms and limit > 0:
            when_ms, first, last = heappop(timers)
            runs = self._runs.overlapping(first, last)
            limit -= not runs
            for run in runs:
                if limit <= 0:
                    heappush(timers, (when_ms, run.first, last))
                    break
                limit -= self._weight(run)
                due.append(run)
        return due

    def release_members(self, members: Collection[str], now_ms: int, wall_ms: int) -> int:
        """Take back what gone members hold, with the same delivery counts; gives how many records.

        Not more at once than ``tick`` would: the locks of the rest have ended, and ``tick`` goes on.
        """
        if not self._counts[_HELD]:
            return 0
        held = [
            run
            for run in self._runs
            if run.owner in members and run.state is _ACQUIRED and run.target is None
        ]
        count = sum(map(len, held))
        limit = _TICK_MAX
        for number, run in enumerate(held):
            if limit <= 0:
                rest = held[number:]
                for each in rest:
                    each.deadline_ms = now_ms
                heappush(self._locks, (now_ms, rest[0].first, rest[-1].last))
                break
            limit -= self._weight(run)
            self._let_go(run, now_ms, wall_ms)
        return count

    def _weight(self, run: Run) -> int:
        """How much of ``_TICK_MAX`` a run takes: with order per key every record is looked at by itself."""
        return len(run) if self.policy.order_by_key else 1

    def _let_go(self, run: Run, now_ms: int, wall_ms: int) -> None:
        """End the lock of a run now; the state is written afterwards, and that write may fail."""
        first, last = run.first, run.last
        if run.count >= self.policy.delivery_limit:
            target = self._death(_LIMIT_REASON, "")
        else:
            delay_ms = self.policy.backoff_ms(run.count)
            target = Target(_AVAILABLE, wall_ms + delay_ms if delay_ms else 0)
        run.unwritten = Unwritten.YES
        self._dirty.append((first, last))
        self._move_to(run, target, now_ms, wall_ms)

    def log_start_moved(self, offset: int, now_ms: int, wall_ms: int) -> int:
        """Forget the records below ``offset``, which are gone; gives how many waited for a time or a key."""
        if self.state is not PartitionState.ACTIVE or offset <= self.start_offset:
            return 0
        self._split(offset)
        gone = [run for run in self._runs if run.first < offset]
        waiting = sum(len(run) for run in gone if _kind(run) in (_DELAYED, _BLOCKED))
        self.totals.lost += sum(len(run) for run in gone if not _is_finished(run.state))
        self.totals.lost += max(0, offset - self.end_offset)
        self._move_start(offset)
        for run in gone:
            self._release_keys(run.first, run.last, now_ms, wall_ms)
        return waiting

    # --- dead letters

    def take_letters(self) -> list[DueLetter]:
        """Dead letters that are due since the last call."""
        letters, self._letters = self._letters, []
        return letters

    def letter_written(self, first: int, last: int) -> None:
        """Finish records whose dead letters are written."""
        for run in self._cut_out(first, last):
            if run.state is _ARCHIVING:
                self._leave(run)
                run.state, run.unwritten = _ARCHIVED, Unwritten.YES
                self._enter(run)
                self._dirty.append((run.first, run.last))

    # --- for people

    def records(self) -> Iterator[RecordsView]:
        """The records of the window that are not finished, and those that block their key or may do so."""
        for run in self._runs:
            if _is_finished(run.state) and not self._may_block(run):
                continue
            until_ms = run.deadline_ms if run.state is _ACQUIRED else run.not_before_ms
            yield RecordsView(
                run.first,
                run.last,
                run.state,
                run.wait,
                run.count,
                run.owner,
                0 if until_ms >= NEVER_MS else until_ms,
                run.since_ms,
                run.reason,
            )

    def oldest_ms(self, state: DeliveryState) -> int | None:
        """Since when the oldest records of the window are ACQUIRED, or AVAILABLE; None if none are."""
        return min((run.since_ms for run in self._runs if run.state is state and run.since_ms), default=None)


def _not_held(why: str) -> ApiError:
    return ApiError(
        ErrorCode.invalid_record_state,
        f"the records cannot be acknowledged: {why}; nothing of this request was acknowledged",
    )


def _is_finished(state: DeliveryState) -> bool:
    return state is _ACKNOWLEDGED or state is _ARCHIVED


def _is_dead(run: Run) -> bool:
    """Whether finished records were delivered and died; those that nobody can be given have no count."""
    return run.state is _ARCHIVED and run.count > 0


def _unfinished_below(state: ShareState, offset: int) -> int:
    """How many offsets from the state's start up to ``offset`` have records that are not finished."""
    finished = sum(
        max(0, min(batch.last_offset + 1, offset) - max(batch.first_offset, state.start_offset))
        for batch in state.batches
        if _is_finished(batch.state) and batch.producer_id < 0
    )
    return max(0, offset - state.start_offset - finished)


def finished_from(state: ShareState, offset: int) -> int:
    """How many offsets from ``offset`` on are finished in the state: all below its start, and some behind."""
    inside = sum(
        max(0, batch.last_offset + 1 - max(batch.first_offset, offset))
        for batch in state.batches
        if _is_finished(batch.state) and batch.producer_id < 0
    )
    return max(0, state.start_offset - offset) + inside


def _stored_run(batch: StateBatch, first: int) -> Run:
    run = Run(first, batch.last_offset, DeliveryState(batch.state), batch.delivery_count)
    run.not_before_ms, run.reason = batch.not_before_ms, batch.reason
    run.producer_id, run.producer_epoch = batch.producer_id, batch.producer_epoch
    run.batch_records = len(run) if run.count else 0
    if run.state is _ACQUIRED or run.producer_id >= 0:
        # A lock ends with its leader; a transaction that acknowledges them does not.
        run.state = _ACQUIRED if run.producer_id >= 0 else _AVAILABLE
    return run


def _covering(
    stored: Sequence[StateBatch], first: int, last: int
) -> Iterator[tuple[int, int, StateBatch | None]]:
    """The offsets from ``first`` to ``last`` in parts, each with the batch that has it, or None."""
    position = first
    low = bisect_left(stored, first, key=lambda batch: batch.last_offset)
    for batch in stored[low:]:
        if batch.first_offset > last:
            break
        if batch.first_offset > position:
            yield position, batch.first_offset - 1, None
            position = batch.first_offset
        end = min(last, batch.last_offset)
        yield position, end, batch
        position = end + 1
    if position <= last:
        yield position, last, None


def _end_of_span(spans: Sequence[Span], offset: int) -> int:
    """The last offset of the batch that has ``offset``."""
    index = bisect_right(spans, offset, key=lambda span: span.first_offset) - 1
    return max(offset, spans[index].last_offset) if index >= 0 else offset


def _add_acquired(
    given: list[Acquired], run: Run, spans: Sequence[Span], batch_size: int, *, exact: bool
) -> None:
    """Put the records of ``run`` into the answer, in ranges of about ``batch_size`` that end with batches."""
    first, last, count = run.first, run.last, run.count
    before = given[-1] if given else None
    joins = before is not None and before.last_offset + 1 == first and before.delivery_count == count
    if joins and before is not None and first - before.first_offset < batch_size:
        first = given.pop().first_offset
    if exact or last - first + 1 <= batch_size:
        given.append(Acquired(first, last, count))
        return
    for span in spans:
        if span.first_offset > last:
            break
        if span.first_offset - first >= max(1, batch_size):
            given.append(Acquired(first, span.first_offset - 1, count))
            first = span.first_offset
    given.append(Acquired(first, last, count))


def _batches(runs: Iterable[Run], start: int) -> list[StateBatch]:
    """The states of runs as they are to be stored, neighbours with equal ones as one."""
    batches: list[StateBatch] = []
    for run in runs:
        if run.last < start:
            continue
        state, count, not_before_ms, reason = run.state, run.count, run.not_before_ms, run.reason
        if run.is_writing and run.target is not None:
            state, not_before_ms, reason = run.target.state, run.target.not_before_ms, run.target.reason
            count = run.target.count_after(count)
        elif state is _ACQUIRED:
            # It was given out again after a lock whose end is not written yet.
            state, count = _AVAILABLE, count - 1
        batch = StateBatch(max(run.first, start), run.last, state, count, not_before_ms, reason=reason)
        if batches and batches[-1].last_offset + 1 == batch.first_offset and batches[-1][2:] == batch[2:]:
            batches[-1] = batches[-1]._replace(last_offset=batch.last_offset)
        else:
            batches.append(batch)
    return batches


def _has_write(state: ShareState, write: StateWrite) -> bool:
    if state.start_offset < write.start_offset:
        return False
    stored = sorted(state.batches)
    firsts = [batch.first_offset for batch in stored]
    for batch in write.batches:
        if batch.last_offset < state.start_offset:
            continue
        found = bisect_right(firsts, max(batch.first_offset, state.start_offset)) - 1
        if found < 0 or stored[found].last_offset < batch.first_offset:
            if batch.state is _AVAILABLE and batch.delivery_count == 0:
                continue
            return False
        if stored[found].producer_id >= 0:
            continue  # A transaction has them: what is below that cannot be seen, and does not count.
        if _is_finished(stored[found].state) and not _is_finished(batch.state):
            continue  # A transaction has finished them since: nothing makes them unfinished again.
        if stored[found].state != batch.state or stored[found].delivery_count != batch.delivery_count:
            return False
    return True
