"""One transactional id, step by step, as transcripts: who asks what, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidemill.errors import ApiError, ErrorCode
from tidemill.transactions import transaction as steps
from tidemill.transactions.messages import Producer
from tidemill.transactions.transaction import (
    CLIENT_V1,
    CLIENT_V2,
    ProducerIdNeeded,
    Transaction,
    TransactionState,
)

T0, T1 = ("t", 0), ("t", 1)
LAST_EPOCH = 32_766


class Script:
    """One transactional id; every step is checked to leave a value that could be stored."""

    def __init__(self) -> None:
        self.value: Transaction | None = None
        self.now_ms = 1_000

    def init(
        self, known: Producer | None = None, *, fresh_id: int | None = None, timeout_ms: int = 500
    ) -> Producer:
        self.value = steps.initialize(self.value, known, timeout_ms, fresh_id, self.now_ms)
        return self.value.producer

    def add(self, producer: Producer, *places: tuple[str, int]) -> None:
        self.value = steps.add_partitions(self.value, producer, places, self.now_ms)

    def end(
        self, producer: Producer, *, commit: bool, version: int = CLIENT_V1, fresh_id: int | None = None
    ) -> Producer:
        self.value = steps.end(
            self.value,
            producer,
            commit=commit,
            client_version=version,
            fresh_id=fresh_id,
            now_ms=self.now_ms,
        )
        return self.value.producer

    def complete(self) -> None:
        assert self.value is not None
        self.value = steps.complete(self.value, self.now_ms)

    def time_out(self) -> None:
        assert self.value is not None
        self.value = steps.abort_and_fence(self.value, self.now_ms)

    @property
    def state(self) -> str:
        assert self.value is not None
        return self.value.state.label

    def at_epoch(self, epoch: int) -> Producer:
        assert self.value is not None
        self.value = replace(self.value, producer_epoch=epoch)
        return self.value.producer


def refuses(code: ErrorCode) -> pytest.RaisesExc[ApiError]:
    return pytest.RaisesExc(ApiError, check=lambda error: error.code is code)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def producer(script: Script) -> Producer:
    return script.init(fresh_id=7)


class TestInit:
    def test_a_new_id_needs_a_producer_id_and_starts_at_epoch_0(self, script: Script) -> None:
        with pytest.raises(ProducerIdNeeded):
            script.init()
        assert script.init(fresh_id=7) == Producer(7, 0)
        assert script.state == "Empty"

    def test_the_next_producer_gets_the_next_epoch(self, script: Script, producer: Producer) -> None:
        assert script.init() == Producer(7, 1)

    def test_a_producer_that_goes_on_after_an_error_gets_the_next_epoch(
        self, script: Script, producer: Producer
    ) -> None:
        assert script.init(producer) == Producer(7, 1)

    def test_its_retry_gets_the_same_answer(self, script: Script, producer: Producer) -> None:
        first = script.init(producer)
        assert script.init(producer) == first
        assert script.init(producer) == first

    def test_but_not_after_another_producer_came(self, script: Script, producer: Producer) -> None:
        script.init(producer)
        script.init()
        with refuses(ErrorCode.producer_fenced):
            script.init(producer)

    def test_a_stranger_is_fenced(self, script: Script, producer: Producer) -> None:
        with refuses(ErrorCode.producer_fenced):
            script.init(Producer(8, 0))

    def test_an_ongoing_transaction_is_aborted_with_a_new_epoch(
        self, script: Script, producer: Producer
    ) -> None:
        script.add(producer, T0)
        assert script.init() == Producer(7, 1)
        assert script.state == "PrepareAbort"
        with refuses(ErrorCode.concurrent_transactions):
            script.init()
        script.complete()
        assert script.init() == Producer(7, 2)
        assert script.state == "Empty"

    @pytest.mark.parametrize("version", [CLIENT_V1, CLIENT_V2])
    @pytest.mark.parametrize("commit", [True, False])
    def test_the_producer_that_was_replaced_cannot_end_it(
        self, script: Script, producer: Producer, version: int, *, commit: bool
    ) -> None:
        script.add(producer, T0)
        script.init()
        with refuses(ErrorCode.producer_fenced):
            script.end(producer, commit=commit, version=version)
        script.complete()
        with refuses(ErrorCode.producer_fenced):
            script.end(producer, commit=commit, version=version)

    def test_a_zombie_cannot_abort_the_transaction_of_its_successor(
        self, script: Script, producer: Producer
    ) -> None:
        successor = script.init()
        script.add(successor, T0)
        with refuses(ErrorCode.producer_fenced):
            script.init(producer)
        assert script.state == "Ongoing"

    def test_used_up_epochs_lead_to_a_new_producer_id(self, script: Script, producer: Producer) -> None:
        last = script.at_epoch(LAST_EPOCH)
        with pytest.raises(ProducerIdNeeded):
            script.init()
        assert script.init(last, fresh_id=8) == Producer(8, 0)
        assert script.init(last) == Producer(8, 0), "a retry"
        with refuses(ErrorCode.producer_fenced):
            script.init(Producer(7, LAST_EPOCH - 1))

    def test_the_timeout_is_that_of_the_newest_producer(self, script: Script, producer: Producer) -> None:
        script.init(timeout_ms=900)
        assert script.value is not None
        assert script.value.timeout_ms == 900


class TestAddPartitions:
    def test_the_first_partition_begins_the_transaction(self, script: Script, producer: Producer) -> None:
        script.add(producer, T0)
        script.now_ms += 10
        script.add(producer, T1)
        assert script.value is not None
        assert script.state == "Ongoing"
        assert script.value.partitions == {T0, T1}
        assert script.value.started_ms == 1_000

    def test_known_partitions_change_nothing(self, script: Script, producer: Producer) -> None:
        script.add(producer, T0, T1)
        before = script.value
        script.add(producer, T1)
        assert script.value is before

    def test_an_unknown_id_or_producer_is_told_so(self, script: Script) -> None:
        with refuses(ErrorCode.invalid_producer_id_mapping):
            script.add(Producer(7, 0), T0)
        script.init(fresh_id=7)
        with refuses(ErrorCode.invalid_producer_id_mapping):
            script.add(Producer(8, 0), T0)

    def test_an_older_epoch_is_fenced(self, script: Script, producer: Producer) -> None:
        script.init()
        with refuses(ErrorCode.producer_fenced):
            script.add(producer, T0)

    def test_nothing_is_added_while_an_end_is_under_way(self, script: Script, producer: Producer) -> None:
        script.add(producer, T0)
        script.end(producer, commit=True)
        with refuses(ErrorCode.concurrent_transactions):
            script.add(producer, T1)
        script.complete()
        script.add(producer, T1)
        assert script.value is not None
        assert script.value.partitions == {T1}


class TestEndOfV1:
    @pytest.mark.parametrize("commit", [True, False])
    def test_an_end_keeps_the_epoch_and_can_be_repeated(
        self, script: Script, producer: Producer, *, commit: bool
    ) -> None:
        script.add(producer, T0)
        assert script.end(producer, commit=commit) == producer
        assert script.state == ("PrepareCommit" if commit else "PrepareAbort")
        with refuses(ErrorCode.concurrent_transactions):
            script.end(producer, commit=commit)
        with refuses(ErrorCode.invalid_txn_state):
            script.end(producer, commit=not commit)
        script.complete()
        assert script.state == ("CompleteCommit" if commit else "CompleteAbort")
        assert script.end(producer, commit=commit) == producer
        with refuses(ErrorCode.invalid_txn_state):
            script.end(producer, commit=not commit)

    @pytest.mark.parametrize("commit", [True, False])
    def test_there_is_nothing_to_end_before_the_first(
        self, script: Script, producer: Producer, *, commit: bool
    ) -> None:
        with refuses(ErrorCode.invalid_txn_state):
            script.end(producer, commit=commit)

    def test_an_unknown_id_cannot_be_ended(self, script: Script) -> None:
        with refuses(ErrorCode.invalid_producer_id_mapping):
            script.end(Producer(7, 0), commit=True)

    @pytest.mark.parametrize("commit", [True, False])
    def test_after_a_timeout_the_producer_is_fenced(
        self, script: Script, producer: Producer, *, commit: bool
    ) -> None:
        script.add(producer, T0)
        script.time_out()
        script.complete()
        with refuses(ErrorCode.producer_fenced):
            script.end(producer, commit=commit)
        with refuses(ErrorCode.producer_fenced):
            script.add(producer, T0)
        with refuses(ErrorCode.producer_fenced):
            script.init(producer)
        assert script.init() == Producer(7, 2)


class TestEndOfV2:
    def test_every_end_takes_a_new_epoch(self, script: Script, producer: Producer) -> None:
        script.add(producer, T0)
        second = script.end(producer, commit=True, version=CLIENT_V2)
        assert second == Producer(7, 1)
        script.complete()
        script.add(second, T0)
        assert script.end(second, commit=False, version=CLIENT_V2) == Producer(7, 2)

    def test_a_retry_is_known_by_its_old_epoch(self, script: Script, producer: Producer) -> None:
        script.add(producer, T0)
        second = script.end(producer, commit=True, version=CLIENT_V2)
        with refuses(ErrorCode.concurrent_transactions):
            script.end(producer, commit=True, version=CLIENT_V2)
        script.complete()
        assert script.end(producer, commit=True, version=CLIENT_V2) == second
        with refuses(ErrorCode.invalid_txn_state):
            script.end(producer, commit=False, version=CLIENT_V2)

    def test_a_late_retry_cannot_touch_the_next_transaction(self, script: Script, producer: Producer) -> None:
        script.add(producer, T0)
        second = script.end(producer, commit=True, version=CLIENT_V2)
        script.complete()
        script.add(second, T0)
        for commit in (True, False):
            with refuses(ErrorCode.producer_fenced):
                script.end(producer, commit=commit, version=CLIENT_V2)
        assert script.state == "Ongoing"

    def test_what_has_not_begun_can_be_aborted_but_not_committed(
        self, script: Script, producer: Producer
    ) -> None:
        with refuses(ErrorCode.invalid_txn_state):
            script.end(producer, commit=True, version=CLIENT_V2)
        second = script.end(producer, commit=False, version=CLIENT_V2)
        assert second == Producer(7, 1)
        script.complete()
        with refuses(ErrorCode.invalid_txn_state):
            script.end(second, commit=True, version=CLIENT_V2)
        assert script.end(second, commit=False, version=CLIENT_V2) == Producer(7, 2)

    def test_the_new_epoch_waits_for_the_old_end(self, script: Script, producer: Producer) -> None:
        script.add(producer, T0)
        second = script.end(producer, commit=True, version=CLIENT_V2)
        with refuses(ErrorCode.concurrent_transactions):
            script.add(second, T0)
        with refuses(ErrorCode.concurrent_transactions):
            script.end(second, commit=False, version=CLIENT_V2)
        with refuses(ErrorCode.producer_fenced):
            script.add(producer, T0)

    def test_after_a_timeout_an_abort_goes_on_with_the_new_epoch(
        self, script: Script, producer: Producer
    ) -> None:
        script.add(producer, T0)
        script.time_out()
        script.complete()
        with refuses(ErrorCode.invalid_txn_state):
            script.end(producer, commit=True, version=CLIENT_V2)
        second = script.end(producer, commit=False, version=CLIENT_V2)
        assert second == Producer(7, 1)
        script.add(second, T0)
        assert script.state == "Ongoing"

    def test_used_up_epochs_lead_to_a_new_producer_id(self, script: Script, producer: Producer) -> None:
        last = script.at_epoch(LAST_EPOCH)
        script.add(last, T0)
        with pytest.raises(ProducerIdNeeded):
            script.end(last, commit=True, version=CLIENT_V2)
        following = script.end(last, commit=True, version=CLIENT_V2, fresh_id=8)
        assert following == Producer(8, 0)
        assert script.value is not None
        assert (script.value.producer_id, script.value.producer_epoch) == (7, LAST_EPOCH + 1), "the marker's"
        with refuses(ErrorCode.concurrent_transactions):
            script.add(following, T0)
        script.complete()
        assert script.end(last, commit=True, version=CLIENT_V2) == following, "a retry"
        script.add(following, T1)
        assert script.state == "Ongoing"

    def test_a_timeout_at_the_last_epoch_leaves_no_epoch_to_go_on_with(
        self, script: Script, producer: Producer
    ) -> None:
        last = script.at_epoch(LAST_EPOCH)
        script.add(last, T0)
        script.time_out()
        script.complete()
        with refuses(ErrorCode.producer_fenced):
            script.end(last, commit=False, version=CLIENT_V2)
        assert script.init(fresh_id=8) == Producer(8, 0)


def test_labels_are_kafkas() -> None:
    assert [state.label for state in TransactionState] == [
        "Empty",
        "Ongoing",
        "PrepareCommit",
        "PrepareAbort",
        "CompleteCommit",
        "CompleteAbort",
        "Dead",
        "PrepareEpochFence",
    ]
