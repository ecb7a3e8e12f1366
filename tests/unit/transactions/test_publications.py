"""Attempts and publications of one shard, step by step: slots, times, limits, what is remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tidemill.errors import ApiError, ErrorCode
from tidemill.transactions import attempts as steps
from tidemill.transactions.attempts import slot_id
from tidemill.transactions.messages import Producer
from tidemill.transactions.publications import JobListing, Publications
from tidemill.transactions.records import StoredRecord
from tidemill.transactions.settings import TransactionSettings
from tidemill.transactions.state import TransactionsState
from tidemill.transactions.transaction import ProducerIdNeeded, Transaction, TransactionState
from tidemill.wire.jobs import AttemptId, job_key

PLACES = [("t", 0), ("t", 1)]
TIMEOUT_MS = 1_000
DAY_MS = 86_400_000


class Shard:
    """A state with a log, and a clock that the test sets."""

    def __init__(self, **settings: Any) -> None:
        self.settings = TransactionSettings(**settings)
        self.log: list[list[StoredRecord]] = []
        self.now_ms = 1_000
        self.state = TransactionsState(self.settings, self._append)
        self.publications = Publications(self.state)
        self._ids = 0

    def _append(self, records: Sequence[StoredRecord], batch: bytes | None = None) -> None:
        self.log.append(list(records))

    def restart(self) -> None:
        """Everything from the log."""
        self.state = TransactionsState(self.settings, self._append)
        for batch in self.log:
            for record in batch:
                self.state.replay(*record)
        self.state.loaded(self.now_ms)
        self.publications = Publications(self.state)

    def open(self, batch: int = 0, job: str = "j") -> AttemptId | None:
        try:
            return self.publications.open_attempt(job, batch, TIMEOUT_MS, None, self.now_ms)
        except ProducerIdNeeded:
            self._ids += 1
            return self.publications.open_attempt(job, batch, TIMEOUT_MS, self._ids, self.now_ms)

    def attempt(self, batch: int = 0, job: str = "j", *, writes: bool = True) -> AttemptId:
        opened = self.open(batch, job)
        assert opened is not None
        if writes:
            self.add(opened)
        return opened

    def add(self, attempt: AttemptId) -> None:
        producer = Producer(attempt.producer_id, attempt.producer_epoch)
        self.state.add_partitions(attempt.transactional_id, producer, PLACES, self.now_ms)

    def publish(self, batch: int, *listed: AttemptId, job: str = "j") -> bool:
        draft = self.publications.draft(job, batch, listed, self.now_ms)
        if draft is not None:
            draft.run()
            assert draft.is_current()
            draft.adopt(b"")
        return draft is not None

    def finish(self) -> None:
        """All markers are written."""
        for decided in self.state.prepared():
            self.state.complete(decided, self.now_ms)

    def published(self, batch: int, *listed: AttemptId, job: str = "j") -> None:
        assert self.publish(batch, *listed, job=job)
        self.finish()

    def value(self, attempt: AttemptId) -> Transaction:
        return self.state.transactions[attempt.transactional_id]


def refusal(call: Callable[[], object]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call()
    return caught.value


def test_a_publication_is_one_append() -> None:
    shard = Shard()
    listed, other, idle = shard.attempt(), shard.attempt(), shard.attempt(writes=False)
    later = shard.attempt(1)
    shard.log.clear()
    assert shard.publish(0, listed, idle)
    (records,) = shard.log
    assert {name: getattr(value, "state", value) for name, value in records} == {
        listed.transactional_id: TransactionState.PREPARE_COMMIT,
        other.transactional_id: TransactionState.PREPARE_ABORT,
        idle.transactional_id: TransactionState.EMPTY,
        job_key("j"): shard.state.published["j"],
    }
    assert shard.value(later).state is TransactionState.ONGOING


def test_a_slot_is_busy_until_its_markers_are_written() -> None:
    shard = Shard()
    first = shard.attempt()
    shard.publish(0, first)
    second = shard.attempt(1)
    assert second.transactional_id == slot_id("j", 1)
    shard.finish()
    assert shard.attempt(1).transactional_id == first.transactional_id


def test_the_next_publication_waits_for_the_markers_of_the_last() -> None:
    shard = Shard()
    shard.publish(0, shard.attempt())
    second = shard.attempt(1)
    assert refusal(lambda: shard.publish(1, second)).code is ErrorCode.concurrent_transactions
    assert not shard.publish(0), "asking again for the last one is answered"
    shard.finish()
    shard.published(1, second)


def test_epochs_that_are_used_up_bring_a_new_producer() -> None:
    shard = Shard()
    first = shard.attempt()
    shard.published(0, first)
    old = shard.value(first)
    shard.state.write([(first.transactional_id, replace(old, producer_epoch=0x7FFF - 5))])
    last = shard.attempt(1)
    assert last.producer_epoch == 0x7FFF - 4
    shard.published(1, last)
    fresh = shard.attempt(2)
    assert fresh.transactional_id == first.transactional_id
    assert (fresh.producer_id, fresh.producer_epoch) == (2, 0)


def test_an_attempt_lives_as_long_as_its_job_shows_signs_of_life() -> None:
    shard = Shard()
    early = shard.attempt()
    stranger = shard.attempt(job="other")

    def almost_time_out() -> None:
        shard.now_ms += TIMEOUT_MS - 1
        assert shard.state.tick(early.transactional_id, shard.now_ms) == []

    almost_time_out()
    late = shard.attempt(writes=False)
    almost_time_out()
    shard.add(late)
    almost_time_out()
    shard.publications.keep("j", shard.now_ms)
    assert shard.state.next_deadline_ms(early.transactional_id) == shard.now_ms + TIMEOUT_MS
    assert shard.state.tick(stranger.transactional_id, shard.now_ms) == [stranger.transactional_id]
    shard.now_ms += TIMEOUT_MS
    assert shard.state.tick(late.transactional_id, shard.now_ms) == [
        early.transactional_id,
        late.transactional_id,
    ]
    error = refusal(lambda: shard.publish(0, early, late))
    assert error.code is ErrorCode.transaction_abortable
    assert "2 of 2 attempts are gone" in error.message


def test_a_restart_is_a_sign_of_life_and_attempts_go_on_after_it() -> None:
    shard = Shard()
    writing, idle = shard.attempt(), shard.attempt(writes=False)
    shard.now_ms += 10 * TIMEOUT_MS
    shard.restart()
    assert shard.state.tick(writing.transactional_id, shard.now_ms) == []
    assert shard.attempt().transactional_id == slot_id("j", 2), (
        "the slots are taken, also that of the idle one"
    )
    shard.add(idle)
    shard.published(0, writing, idle)
    shard.restart()
    assert shard.open(0) is None
    assert not shard.publish(0)


def test_an_attempt_that_is_over_begins_nothing_under_its_epoch() -> None:
    shard = Shard()
    idle, aborted = shard.attempt(writes=False), shard.attempt()
    shard.published(0, idle)
    for attempt in (idle, aborted):
        assert refusal(partial(shard.add, attempt)).code is ErrorCode.producer_fenced


def test_idle_slots_expire_and_open_ones_do_not() -> None:
    shard = Shard()
    used, held = shard.attempt(), shard.attempt(1, writes=False)
    shard.published(0, used)
    shard.now_ms += 8 * DAY_MS
    list(shard.state.expire(shard.now_ms))
    assert list(shard.state.transactions) == [held.transactional_id]
    assert not shard.publish(0), "what it has published is remembered for longer"


def test_a_job_is_forgotten_long_after_its_last_publication_but_not_while_it_works() -> None:
    shard = Shard()
    shard.published(5, shard.attempt(5))
    shard.published(6, shard.attempt(6, job="busy"), job="busy")
    shard.now_ms += 91 * DAY_MS
    held = shard.attempt(7, job="busy")
    list(shard.state.expire(shard.now_ms))
    shard.restart()
    assert list(shard.state.published) == list(shard.state.jobs) == ["busy"]
    assert not shard.publish(6, job="busy")
    assert shard.value(held).state is TransactionState.ONGOING


def test_limits_are_checked_before_anything_is_kept() -> None:
    shard = Shard(slots_max=3, attempts_max=2, publication_bytes_max=400)
    opened = [shard.attempt() for _ in range(3)]
    error = refusal(shard.open)
    assert (error.code, "3 attempts that are not over" in error.message) == (ErrorCode.policy_violation, True)
    assert refusal(lambda: shard.publish(0, *opened)).code is ErrorCode.invalid_request
    before = len(shard.log)
    error = refusal(lambda: shard.publish(0, *opened[:2]))
    assert error.code is ErrorCode.record_list_too_large
    assert "400 are the most" in error.message
    assert len(shard.log) == before
    assert {shard.value(each).state for each in opened} == {TransactionState.ONGOING}


def test_a_shard_has_only_so_many_jobs() -> None:
    shard = Shard(jobs_max=2)
    # A job that has published and is at work is one.
    shard.published(0, shard.attempt(job="a"), job="a")
    shard.published(0, job="b")
    before = len(shard.log)
    for more in (lambda: shard.open(job="c"), lambda: shard.publish(0, job="c")):
        error = refusal(more)
        assert (error.code, "2 jobs" in error.message) == (ErrorCode.policy_violation, True)
    assert len(shard.log) == before
    shard.published(1, shard.attempt(1, job="a"), job="a")
    shard.published(1, shard.attempt(1, job="b"), job="b")


@pytest.mark.parametrize("change", ["write", "abort", "open", "publish"])
def test_a_draft_rests_on_the_attempts_that_it_decides(change: str) -> None:
    shard = Shard()
    listed, other = shard.attempt(), shard.attempt()
    draft = shard.publications.draft("j", 0, [listed], shard.now_ms)
    assert draft is not None
    shard.attempt(1)
    shard.attempt(0, job="another")
    assert draft.is_current(), "those are no part of it"
    match change:
        case "write":
            producer = Producer(other.producer_id, other.producer_epoch)
            shard.state.add_partitions(other.transactional_id, producer, [("t", 2)], shard.now_ms)
        case "abort":
            shard.publications.abort("j", [other], shard.now_ms)
        case "open":
            shard.attempt()
        case "publish":
            shard.published(0, listed, other)
    assert not draft.is_current()


def test_a_draft_is_large_by_its_attempts_or_by_their_partitions() -> None:
    shard = Shard()
    few = [shard.attempt() for _ in range(100)]
    draft = shard.publications.draft("j", 0, few, shard.now_ms)
    assert draft is not None
    assert not draft.is_large
    producer = Producer(few[0].producer_id, few[0].producer_epoch)
    wide = [("wide", number) for number in range(5_000)]
    shard.state.add_partitions(few[0].transactional_id, producer, wide, shard.now_ms)
    draft = shard.publications.draft("j", 0, few, shard.now_ms)
    assert draft is not None
    assert draft.is_large
    shard.published(0, *few)
    many = [shard.attempt(1, writes=False) for _ in range(101)]
    draft = shard.publications.draft("j", 1, many, shard.now_ms)
    assert draft is not None
    assert draft.is_large


def test_a_step_aborts_as_many_attempts_as_fit_one_turn() -> None:
    shard = Shard()
    opened = [shard.attempt() for _ in range(250)]
    assert len(shard.publications.abort_left("j", 0, shard.now_ms)) == 200
    assert len(shard.publications.abort("j", opened, shard.now_ms)) == 50
    assert shard.publications.abort_left("j", 0, shard.now_ms) == []
    assert shard.publications.abort("j", opened, shard.now_ms) == []
    shard.finish()
    late = [shard.attempt(1) for _ in range(250)]
    shard.now_ms += TIMEOUT_MS
    assert len(shard.state.tick(late[0].transactional_id, shard.now_ms)) == 200
    assert len(shard.state.tick(late[-1].transactional_id, shard.now_ms)) == 50


def test_a_job_that_asks_for_nothing_is_not_kept() -> None:
    shard = Shard()
    shard.publications.keep("nobody", 1)
    assert shard.publications.abort_left("nobody", 3, 1) == []
    refusal(lambda: shard.publish(0, AttemptId(slot_id("nobody", 0), 1, 0), job="nobody"))
    assert (shard.state.jobs, shard.state.published) == ({}, {})


def test_slots_are_found_again_in_order_however_they_were_freed() -> None:
    shard = Shard()
    for _ in range(50):
        opened = [shard.attempt(writes=False) for _ in range(3)]
        assert [each.transactional_id for each in opened] == [slot_id("j", number) for number in range(3)]
        for each in reversed(opened):
            shard.publications.abort("j", [each, each], shard.now_ms)
    assert len(shard.state.jobs["j"]._free_heap) == 3


def test_jobs_are_listed_with_what_they_have_open() -> None:
    shard = Shard()
    shard.published(4, shard.attempt(4))
    shard.attempt(5)
    shard.now_ms += 700
    names = [*shard.publications.names(), "gone"]
    assert list(shard.publications.listing(names, shard.now_ms)) == [JobListing("j", 4, 1_000, 1, 700)]


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("__tidemill_job:a#0", ("a", 0)),
        ("__tidemill_job:a b/c#12", ("a b/c", 12)),
        ("__tidemill_job:a", None),
        ("__tidemill_job:a#", None),
        ("__tidemill_job:a#x", None),
        ("__tidemill_job:a#²", None),
        ("a#1", None),
    ],
)
def test_slots_are_told_from_other_ids(name: str, parsed: tuple[str, int] | None) -> None:
    assert steps.parse_slot(name) == parsed
