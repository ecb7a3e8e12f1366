"""Invariant 12 of share groups, and order per key, whatever happens in whatever order.

A model of one share partition: members come, go, acknowledge late or twice; locks end; writes fail, or
succeed without anybody knowing; leaders die, and others read the state that is stored; configs change. The
model knows only what members were given and told, and what is stored. It checks each delivery:

- a record is held by one member at a time, or by a transaction that accepts it, until that ends;
- what was accepted, and told so, is never delivered again;
- nothing is delivered before its time, or to a reader that must not see it;
- what came back because nobody had looked at it has the same count at its next delivery, and does not die;
- a record of a key is delivered only if every earlier record of its key is finished for good;
- where the dead block their keys, no later record of such a key is delivered, and all other records are;

and in the end that every record was accepted or has died. Each safeguard is switched off once, and then the
model must find that out.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.share_states import StoredState
from tidemill.coordination.share_state import DeliveryState
from tidemill.errors import ApiError, ErrorCode
from tidemill.share.partition import machine as machine_module
from tidemill.share.partition.key_order import KeyOrder
from tidemill.share.partition.machine import SharePartition
from tidemill.share.partition.policy import SharePolicy
from tidemill.share.partition.runs import Run, Target
from tidemill.share.partition.values import (
    Acknowledgement,
    AcknowledgeType,
    PendingAccept,
    SeenRecord,
    Settlement,
    Span,
)

MEMBERS = ("a", "b", "c")
FINISHED = (DeliveryState.ACKNOWLEDGED, DeliveryState.ARCHIVED)
ACCEPT, RELEASE, REJECT, RENEW, RETURN = (
    AcknowledgeType.ACCEPT,
    AcknowledgeType.RELEASE,
    AcknowledgeType.REJECT,
    AcknowledgeType.RENEW,
    AcknowledgeType.RETURN,
)
POLICIES = (
    SharePolicy(delivery_limit=3, lock_duration_ms=100, max_record_locks=12),
    SharePolicy(delivery_limit=5, lock_duration_ms=100, retry_backoff_ms=50, retry_exponential=True),
    SharePolicy(delivery_limit=4, lock_duration_ms=100, order_by_key=True, max_waiting_records=12),
    SharePolicy(
        delivery_limit=3, lock_duration_ms=100, order_by_key=True, retry_backoff_ms=70, deliver_at=True
    ),
    SharePolicy(delivery_limit=2, lock_duration_ms=100, dead_letters=True, max_waiting_records=5),
    SharePolicy(delivery_limit=3, lock_duration_ms=100, order_by_key=True, dead_blocks_key=True),
    SharePolicy(
        delivery_limit=3, lock_duration_ms=100, order_by_key=True, dead_blocks_key=True, dead_letters=True
    ),
)


@pytest.fixture(autouse=True, scope="module")
def _small_writes() -> Iterator[None]:
    """Let a write take few changes, so that some wait for the next one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_module, "_WRITE_RUNS_MAX", 3)
        yield


class Violation(AssertionError):
    """What must never happen."""


@dataclass
class Accepting:
    """Records that a transaction is to accept, and whose write is under way."""

    producer_id: int
    pending: PendingAccept
    is_refused: bool
    #: Whether the write is carried out, perhaps without anybody knowing.
    is_written: bool

    @property
    def offsets(self) -> set[int]:
        return {each for batch in self.pending.batches for each in range(batch[0], batch[1] + 1)}


class Model:
    """One share partition with its log, its stored state, its members, and what they were told."""

    def __init__(self, policy: SharePolicy) -> None:
        self.policy = policy
        self.now_ms = 1_000
        self.spans: list[Span] = []
        self.keys: dict[int, bytes] = {}
        self.times: dict[int, int] = {}
        self.end = 0
        self.log_start = 0
        self.stored = StoredState(start_offset=0)
        #: Who holds what, and until when, as far as members can know.
        self.held: dict[int, tuple[str, int]] = {}
        #: Records whose acceptance a member was told.
        self.accepted: set[int] = set()
        #: Records whose rejection a member was told, and those of them that block their keys.
        self.rejected: set[int] = set()
        self.blocking: set[int] = set()
        #: The count of each record's last delivery; and of those whose return a member was told.
        self.counts: dict[int, int] = {}
        self.returned: dict[int, int] = {}
        #: Records that may not be delivered before a time.
        self.not_before: dict[int, int] = {}
        self.settling: dict[Settlement, tuple[str, list[tuple[int, int]]]] = {}
        self.writing: Any = None
        #: Open transactions: the records that they accept, by producer.
        self.transactions: dict[int, set[int]] = {}
        self.next_producer = 0
        self.accepting: list[Accepting] = []
        #: A read of the state on its way: its number, and what was read.
        self.reading: tuple[int, Any] | None = None
        self.load()

    def load(self) -> None:
        self.partition = SharePartition(self.policy)
        self.partition.begin_loading()
        state = self.stored.read()
        start = max(state.start_offset, self.log_start)
        self.partition.loaded(state, start, self.now_ms, self.now_ms)
        self.held.clear()
        self.settling.clear()
        self.accepting.clear()
        self.writing = self.reading = None

    @property
    def blocks(self) -> bool:
        """Whether a record that died blocks its key."""
        return self.policy.order_by_key and self.policy.dead_blocks_key

    # --- what happens

    def append(self, a: int, b: int) -> None:
        if self.end > 120:
            return
        count = a % 6 + 1
        is_hidden = b % 7 == 0
        self.spans.append(Span(self.end, self.end + count - 1, is_hidden))
        for offset in range(self.end, self.end + count):
            if (offset + b) % 4:
                self.keys[offset] = b"%d" % ((offset * 7 + b) % 3)
            if self.policy.deliver_at and (offset + a) % 5 == 0:
                self.times[offset] = self.now_ms + b % 200
        self.end += count

    def fetch(self, a: int, b: int) -> None:
        member, partition = MEMBERS[a % 3], self.partition
        while partition.wants_records and self._see():
            pass
        position = partition.next_offset()
        if position is None:
            return
        spans = [span for span in self.spans if span.last_offset >= max(position, self.log_start)]
        given_out = partition.acquire(
            member,
            position,
            spans,
            b % 9 + 1,
            b % 4 + 1,
            exact=bool(a % 2),
            now_ms=self.now_ms,
            wall_ms=self.now_ms,
        )
        for first, last, count in given_out:
            for offset in range(first, last + 1):
                self._delivered(member, offset, count)

    def _see(self) -> bool:
        offset = self.partition.scan_offset
        span = next((span for span in self.spans if span.last_offset >= offset), None)
        if span is None:
            return False
        visible = () if span.is_hidden else range(span.first_offset, span.last_offset + 1)
        records = [SeenRecord(each, self.keys.get(each), self.times.get(each, 0)) for each in visible]
        self.partition.see(records, span.last_offset + 1, self.now_ms, self.now_ms, first_offset=offset)
        return self.partition.scan_offset > offset

    def _delivered(self, member: str, offset: int, count: int) -> None:
        holder = self.held.get(offset)
        if holder is not None and holder[1] > self.now_ms:
            raise Violation(f"{offset} is given to {member}, and {holder[0]} holds it")
        if offset in self.accepted:
            raise Violation(f"{offset} was accepted, and is delivered again")
        if any(offset in accepted for accepted in self.transactions.values()):
            raise Violation(f"{offset} is delivered, and an open transaction accepts it")
        if any(offset in each.offsets for each in self.accepting):
            raise Violation(f"{offset} is delivered, and a transaction is about to accept it")
        if self.stored.state_of(offset) in FINISHED:
            raise Violation(f"{offset} is finished, and is delivered again")
        if count > self.policy.delivery_limit:
            raise Violation(f"{offset} is delivered {count} times")
        if max(self.not_before.get(offset, 0), self.times.get(offset, 0)) > self.now_ms:
            raise Violation(f"{offset} is delivered before its time")
        if any(span.is_hidden and span.first_offset <= offset <= span.last_offset for span in self.spans):
            raise Violation(f"{offset} is hidden, and is delivered")
        if offset < self.log_start:
            raise Violation(f"{offset} is deleted, and is delivered")
        if count != self.returned.pop(offset, count):
            raise Violation(f"{offset} was not looked at, and that delivery counts")
        if self.policy.order_by_key:
            self._check_order(offset)
        self.counts[offset] = count
        self.held[offset] = member, self.now_ms + self.policy.lock_duration_ms

    def _check_order(self, offset: int) -> None:
        key = self.keys.get(offset)
        for earlier in range(self.log_start, offset if key is not None else 0):
            if self.keys.get(earlier) != key or self._is_hidden(earlier):
                continue
            if self.stored.state_of(earlier) not in (*FINISHED, DeliveryState.ARCHIVING):
                raise Violation(f"{offset} is delivered before {earlier} of its key is finished")
            if earlier in self.blocking:
                raise Violation(f"{offset} is delivered, and {earlier}, which died, blocks its key")

    def _is_hidden(self, offset: int) -> bool:
        return any(span.is_hidden and span.first_offset <= offset <= span.last_offset for span in self.spans)

    def acknowledge(self, a: int, b: int) -> None:
        """A member acknowledges some of what it holds, or has held."""
        member = MEMBERS[a % 3]
        own = sorted(offset for offset, (holder, _) in self.held.items() if holder == member)
        if not own:
            return
        first = own[b % len(own)]
        last = first
        while last + 1 in own and (last + b) % 4:
            last += 1
        types = [
            (ACCEPT, ACCEPT, RELEASE, REJECT, RENEW, RETURN)[(a // 3 + each * b) % 6]
            for each in range(last - first + 1)
        ]
        delay_ms = (-1, 0, 30)[b % 3]
        given_back = Acknowledgement(first, last, types, delay_ms)
        try:
            settlement = self.partition.acknowledge(member, [given_back], self.now_ms, self.now_ms)
        except ApiError as error:
            assert error.code == ErrorCode.invalid_record_state
            return
        told = list(zip(range(first, last + 1), types, strict=True))
        for offset, kind in told:
            if kind == RENEW:
                self.held[offset] = member, self.now_ms + self.policy.lock_duration_ms
        self.settling[settlement] = member, [each for each in told if each[1] != RENEW]
        if not settlement.needs_write:
            del self.settling[settlement]

    def foreign(self, a: int, b: int) -> None:
        """A member acknowledges what another one holds."""
        held = sorted(offset for offset, (_, until) in self.held.items() if until > self.now_ms)
        if not held:
            return
        offset = held[b % len(held)]
        other = next(name for name in MEMBERS if name != self.held[offset][0])
        acknowledgement = Acknowledgement(offset, offset, (ACCEPT,))
        try:
            settlement = self.partition.acknowledge(other, [acknowledgement], self.now_ms, self.now_ms)
        except ApiError:
            return
        if settlement.needs_write:
            raise Violation(f"{other} has acknowledged {offset}, which another member holds")

    def write(self, a: int, b: int) -> None:
        """Begin a write, or end the one that is under way: well, badly, or nobody knows how."""
        if self.writing is None:
            self.writing = self.partition.next_write()
            return
        write, outcome = self.writing, a % 6
        if outcome in (0, 1, 2, 4):
            self.stored.write(write.start_offset, write.delivery_complete_count, write.batches)
        self.writing = None
        was_written = outcome in (0, 1, 2)
        if outcome > 3:
            self.partition.unsure()
            was_written = self.partition.resolve(self.stored.read())
        if was_written:
            self._told(self.partition.wrote(self.now_ms, self.now_ms))
        else:
            for settlement in self.partition.refused():
                self.settling.pop(settlement, None)
            self.partition.tick(self.now_ms, self.now_ms)

    def _told(self, settlements: list[Settlement]) -> None:
        """Members hear that their acknowledgements are written."""
        for settlement in settlements:
            _, told = self.settling.pop(settlement)
            for offset, kind in told:
                self.held.pop(offset, None)
                if kind == REJECT:
                    self.rejected.add(offset)
                    # A write that began under other configs may have passed it.
                    if self.blocks and offset >= self.partition.start_offset:
                        self.blocking.add(offset)
                if kind == RELEASE:
                    self.not_before[offset] = self.stored.not_before_of(offset)
                if kind == RETURN and offset >= self.log_start:
                    self.returned[offset] = self.counts[offset]
                    state = self.stored.state_of(offset)
                    if state is not DeliveryState.AVAILABLE or self.stored.not_before_of(offset):
                        raise Violation(f"{offset} was not looked at, and is {state.name} or has to wait")
                if kind == ACCEPT:
                    self.accepted.add(offset)
                    state = self.stored.state_of(offset)
                    if state not in FINISHED:
                        raise Violation(f"{offset} was accepted, and is stored as {state.name}")

    def accept_in_transaction(self, a: int, b: int) -> None:
        """A transaction begins to accept some of what a member holds."""
        member = MEMBERS[a % 3]
        own = sorted(offset for offset, (holder, _) in self.held.items() if holder == member)
        if not own:
            return
        first = last = own[b % len(own)]
        while last + 1 in own and (last + a) % 3:
            last += 1
        self.next_producer += 1
        try:
            pending = self.partition.accept_in_transaction(
                member, [Acknowledgement(first, last, (ACCEPT,))], self.next_producer, 0
            )
        except ApiError as error:
            assert error.code == ErrorCode.invalid_record_state
            return
        outcome = b % 4
        accepting = Accepting(self.next_producer, pending, outcome == 0, outcome > 1)
        self.accepting.append(accepting)
        if a % 2:
            self.end_accept(len(self.accepting) - 1, b)

    def end_accept(self, a: int, b: int) -> None:
        """The write of what a transaction accepts ends: it is written, or not, or nobody knows."""
        if not self.accepting:
            return
        accepting = self.accepting.pop(a % len(self.accepting))
        if accepting.is_written:
            self.stored.pend(accepting.producer_id, accepting.pending.batches)
            self.transactions[accepting.producer_id] = accepting.offsets
            if b % 5 == 0:
                # The leader dies before it hears of it.
                self.load()
                return
        if accepting.is_refused:
            self.partition.pending_refused(accepting.pending)
            return
        self.partition.pending_written(accepting.pending)
        for offset in accepting.offsets:
            self.held.pop(offset, None)

    def end_transaction(self, a: int, b: int) -> None:
        if not self.transactions:
            return
        producer_id = sorted(self.transactions)[a % len(self.transactions)]
        accepted = self.transactions.pop(producer_id)
        self.stored.end(producer_id, commit=bool(b % 3))
        if b % 3:
            self.accepted |= accepted

    def settle_pending(self, a: int, b: int) -> None:
        """Begin to read the state, or take what was read some time ago."""
        if self.reading is None:
            self.reading = self.partition.begin_pending_read(), self.stored.read()
            return
        number, state = self.reading
        self.reading = None
        self.partition.settle_pending(state, number, self.now_ms, self.now_ms)

    def letters(self, a: int, b: int) -> None:
        for letter in self.partition.take_letters():
            self.partition.letter_written(letter.first_offset, letter.last_offset)

    def wait(self, a: int, b: int) -> None:
        self.now_ms += (1, 20, 60, 110)[a % 4]
        self.partition.tick(self.now_ms, self.now_ms)

    def close(self, a: int, b: int) -> None:
        if b % 3:
            return
        member = MEMBERS[a % 3]
        settling = {offset for _, told in self.settling.values() for offset, _ in told}
        self.partition.release_members({member}, self.now_ms, self.now_ms)
        for offset in [offset for offset, (holder, _) in self.held.items() if holder == member]:
            if offset not in settling:
                del self.held[offset]

    def configure(self, a: int, b: int) -> None:
        """The group gets other configs: order per key, what a death means, dead letters."""
        if b % 3:
            return
        self._configure(
            replace(
                self.policy,
                order_by_key=a % 5 > 0,
                dead_blocks_key=a % 3 > 0,
                dead_letters=a % 7 > 3,
            )
        )

    def _configure(self, policy: SharePolicy) -> None:
        did_block, self.policy = self.blocks, policy
        self.partition.configure(policy, self.now_ms)
        if not self.blocks:
            self.blocking.clear()
        elif not did_block:
            # What died before blocks its key if the start has not passed it, and is not about to.
            start = self.partition.start_offset
            if self.writing is not None:
                start = max(start, self.writing.start_offset)
            self.blocking = {offset for offset in self.rejected if offset >= start}

    def crash(self, a: int, b: int) -> None:
        """The leader dies. A write that was under way may have been carried out."""
        if b % 4:
            return
        if self.writing is not None and a % 2:
            write = self.writing
            self.stored.write(write.start_offset, write.delivery_complete_count, write.batches)
        self.load()

    def delete(self, a: int, b: int) -> None:
        if a % 4 == 0 and self.log_start < self.end:
            self.log_start = min(self.end, self.log_start + b % 5)
            self.partition.log_start_moved(self.log_start, self.now_ms, self.now_ms)

    # --- what holds

    def check(self) -> None:
        """The parts of the state machine fit together."""
        partition = self.partition
        runs = list(partition._runs)
        offset = partition.start_offset
        for run in runs:
            assert run.first == offset, runs
            assert run.last >= run.first
            offset = run.last + 1
        assert offset == partition.end_offset, runs
        assert sum(partition._counts) == partition.end_offset - partition.start_offset
        ready = [run.first for run in runs if run.state is DeliveryState.AVAILABLE and run.wait == 0]
        assert ready == partition._ready
        limit = self.policy.max_record_locks
        assert partition.acquired_count <= limit
        assert partition.start_offset >= self.stored.start_offset

    def drain(self) -> None:
        """Everything that is not finished is delivered and accepted in the end, and nothing is left.

        Where the dead block their keys, only the later records of these keys are left.
        """
        if self.blocks:
            idle = 0
            while idle < 30 and self.stored.start_offset < self.end:
                finished = len(self.accepted)
                self._go_on()
                idle = 0 if len(self.accepted) > finished else idle + 1
            self._check_left()
            self._configure(replace(self.policy, dead_blocks_key=False))
        for _ in range(2_000):
            if self._go_on():
                return
        raise Violation(f"what is left after {self.stored.start_offset} is never finished")

    def _check_left(self) -> None:
        """Each record that is not delivered has an earlier one of its key that died."""
        if self.partition.is_stalled:
            return
        blocked: set[bytes] = set()
        for offset in range(max(self.stored.start_offset, self.log_start), self.end):
            key, state = self.keys.get(offset), self.stored.state_of(offset)
            if state in FINISHED:
                if key is not None and self.stored.is_dead(offset):
                    blocked.add(key)
            elif not self._is_hidden(offset) and key not in blocked:
                raise Violation(f"{offset} is never delivered, and nothing of its key has died")

    def _go_on(self) -> bool:
        """Let everything end that is under way, and accept what is delivered. Whether all is finished."""
        while self.accepting:
            self.end_accept(0, 1)
        self.end_transaction(0, 1)
        self.settle_pending(0, 0)
        if self.writing is not None:
            self.stored.write(
                self.writing.start_offset, self.writing.delivery_complete_count, self.writing.batches
            )
            self.writing = None
            self._told(self.partition.wrote(self.now_ms, self.now_ms))
        while (write := self.partition.next_write()) is not None:
            self.stored.write(write.start_offset, write.delivery_complete_count, write.batches)
            self._told(self.partition.wrote(self.now_ms, self.now_ms))
        self.letters(0, 0)
        if self.stored.start_offset >= self.end:
            return True
        self.fetch(0, 8)
        for offset, (member, _) in sorted(self.held.items()):
            try:
                acknowledgement = Acknowledgement(offset, offset, (ACCEPT,))
                settlement = self.partition.acknowledge(member, [acknowledgement], self.now_ms, self.now_ms)
                self.settling[settlement] = member, [(offset, ACCEPT)]
            except ApiError:
                del self.held[offset]
        self.now_ms += 30
        self.partition.tick(self.now_ms, self.now_ms)
        return False


ACTIONS: tuple[Callable[[Model, int, int], None], ...] = (
    Model.append,
    Model.fetch,
    Model.fetch,
    Model.acknowledge,
    Model.acknowledge,
    Model.write,
    Model.write,
    Model.write,
    Model.foreign,
    Model.accept_in_transaction,
    Model.end_accept,
    Model.end_transaction,
    Model.settle_pending,
    Model.configure,
    Model.letters,
    Model.wait,
    Model.close,
    Model.crash,
    Model.delete,
)
STEPS = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99), st.integers(0, 99)), min_size=5, max_size=120
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(POLICIES), STEPS)
def test_records_are_held_by_one_accepted_once_in_order_and_never_lost(
    policy: SharePolicy, steps: Any
) -> None:
    model = Model(policy)
    for action, a, b in steps:
        action(model, a, b)
        model.check()
    model.drain()


def walk(seed: int, steps: int = 250) -> None:
    chance = random.Random(seed)
    model = Model(POLICIES[seed % len(POLICIES)])
    for _ in range(steps):
        chance.choice(ACTIONS)(model, chance.randrange(100), chance.randrange(100))
        model.check()
    model.drain()


@pytest.mark.parametrize("first", range(0, int(os.environ.get("TIDEMILL_SHARE_WALKS", "100")), 50))
def test_long_histories_hold(first: int) -> None:
    for seed in range(first, first + 50):
        walk(seed)


def _accept_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members hear success before the write is done."""
    original = Model.acknowledge

    def acknowledge(self: Model, a: int, b: int) -> None:
        before = set(self.settling)
        original(self, a, b)
        for settlement in set(self.settling) - before:
            for offset, kind in self.settling[settlement][1]:
                if kind == ACCEPT:
                    self.accepted.add(offset)

    monkeypatch.setitem(
        globals(), "ACTIONS", tuple(acknowledge if each is original else each for each in ACTIONS)
    )


def _anybody_may_acknowledge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharePartition, "_check_held", lambda self, member, first, last: None)


def _unknown_is_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write whose outcome is unknown is taken back without a look."""

    def resolve(self: SharePartition, state: Any) -> bool:
        self.is_unsure = False
        return False

    monkeypatch.setattr(SharePartition, "resolve", resolve)


def _start_passes_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "_is_finished", lambda state: state is not DeliveryState.AVAILABLE)


def _renewals_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SharePartition._lock_until

    def lock_until(self: SharePartition, run: Run) -> None:
        run.deadline_ms = min(run.deadline_ms, run.since_ms + self.policy.lock_duration_ms)
        original(self, run)

    monkeypatch.setattr(SharePartition, "_lock_until", lock_until)


def _keys_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyOrder, "add", lambda self, offset, key: True)


def _keys_go_on_before_the_write(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SharePartition._let_go

    def let_go(self: SharePartition, run: Run, now_ms: int, wall_ms: int) -> None:
        original(self, run, now_ms, wall_ms)
        if run.state is not DeliveryState.AVAILABLE:
            self._release_keys(run.first, run.last, now_ms, wall_ms)

    monkeypatch.setattr(SharePartition, "_let_go", let_go)


def _unseen_records_are_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new leader does not look at the keys of what an earlier one has handed out."""
    monkeypatch.setattr(SharePolicy, "needs_records", property(lambda self: False))


def _the_dead_block_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start passes records that died and block their keys, so that the next leader does not know them."""
    monkeypatch.setattr(SharePartition, "_may_block", lambda self, run: False)


def _a_new_leader_ignores_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    original = machine_module._stored_run
    monkeypatch.setattr(
        machine_module, "_stored_run", lambda batch, first: original(batch._replace(not_before_ms=0), first)
    )


def _a_write_that_failed_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records whose acknowledgement failed stay in the hands of nobody."""

    def refused(self: SharePartition) -> list[Settlement]:
        return self._end_write().settlements

    monkeypatch.setattr(SharePartition, "refused", refused)


def _old_reads_decide_on_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that was read before a transaction had the records tells that it does not have them."""
    original = SharePartition.settle_pending

    def settle(self: SharePartition, state: Any, number: int, now_ms: int, wall_ms: int) -> None:
        original(self, state, 2**61, now_ms, wall_ms)

    monkeypatch.setattr(SharePartition, "settle_pending", settle)


def _a_new_leader_does_not_know_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    original = machine_module._stored_run

    def stored_run(batch: Any, first: int) -> Run:
        if batch.producer_id >= 0:
            batch = batch._replace(state=DeliveryState.AVAILABLE, producer_id=-1)
        return original(batch, first)

    monkeypatch.setattr(machine_module, "_stored_run", stored_run)


def _time_ends_what_transactions_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SharePartition.pending_written

    def written(self: SharePartition, pending: Any) -> None:
        original(self, pending)
        for first, last, owner, deadline_ms in pending.locks:
            for run in self._runs.overlapping(first, last):
                run.owner, run.deadline_ms = owner, deadline_ms
                self._lock_until(run)

    monkeypatch.setattr(SharePartition, "pending_written", written)


def _the_dead_and_the_done_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of finished records does not tell which of them died."""
    monkeypatch.setattr(
        SharePartition,
        "_are_done_alike",
        lambda self, one, other: self._is_done(one) and self._is_done(other),
    )


def _what_is_given_back_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that comes back is handed out before its key is known under the group's new configs."""
    original = SharePartition._set_available

    def set_available(self: SharePartition, run: Run, now_ms: int, wall_ms: int, **_: bool) -> None:
        original(self, run, now_ms, wall_ms, is_seen=True)

    monkeypatch.setattr(SharePartition, "_set_available", set_available)


def _returns_count_as_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "count_after", lambda self, count: 0 if self.is_gap else count)


def _last_deliveries_die_of_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SharePartition._target

    def target(self: SharePartition, kind: int, count: int, *rest: Any) -> Target:
        is_last = kind == RETURN and count >= self.policy.delivery_limit
        return original(self, RELEASE if is_last else kind, count, *rest)

    monkeypatch.setattr(SharePartition, "_target", target)


ABLATIONS = (
    _returns_count_as_deliveries,
    _last_deliveries_die_of_returns,
    _the_dead_and_the_done_are_one,
    _what_is_given_back_is_not_looked_at,
    _old_reads_decide_on_transactions,
    _a_new_leader_does_not_know_transactions,
    _time_ends_what_transactions_hold,
    _accept_at_once,
    _anybody_may_acknowledge,
    _unknown_is_failed,
    _start_passes_what_is_held,
    _renewals_are_forgotten,
    _keys_do_not_count,
    _keys_go_on_before_the_write,
    _unseen_records_are_handed_out,
    _the_dead_block_nothing_later,
    _a_new_leader_ignores_delays,
    _a_write_that_failed_is_forgotten,
)


@pytest.mark.parametrize("switch_off", ABLATIONS, ids=lambda each: each.__name__.strip("_"))
def test_the_model_finds_out_that_a_safeguard_is_off(
    switch_off: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    switch_off(monkeypatch)
    with pytest.raises((AssertionError, ValueError, KeyError, IndexError)):
        _walk_long()


def _walk_long() -> None:
    for seed in range(300):
        walk(seed)
