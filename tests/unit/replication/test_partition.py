"""A partition over a disk in memory; the test plays the flusher."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from support.batches import plain_batch
from support.faulty_storage import FaultyStorage
from support.leadership import follower_flushed, led
from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, DiskFull, ErrorCode, StorageError, SyncFailed, TidemillError
from tidemill.log.producer_state.transactions import TransactionStates
from tidemill.log.recovery import open_log
from tidemill.records.batch import parse_header
from tidemill.records.control import Marker
from tidemill.records.record import Record, build_batch
from tidemill.replication.partition import Partition
from tidemill.replication.rules.epochs import check_leader_epoch
from tidemill.replication.rules.state import Role

DIRECTORY = "logs/t/0"
NOW = 1_000_000


class Made:
    """A partition, and what it asked of its flusher."""

    def __init__(
        self, storage: FaultyStorage | None = None, followers: tuple[int, ...] = (), **config: Any
    ) -> None:
        self.storage = storage or FaultyStorage()
        log, _ = open_log(self.storage, DIRECTORY, TopicConfig(**config))
        self.asked = 0
        self.partition = Partition(
            "t",
            UUID(int=1),
            0,
            log,
            request_flush=self._ask,
            max_decompressed_bytes=10**6,
            assignment=led(3, followers),
        )

    def _ask(self, partition: Partition) -> None:
        assert partition is self.partition
        self.asked += 1

    def flush(self) -> None:
        job = self.partition.begin_flush()
        assert job is not None
        job.run()
        self.partition.flushed(job)


def refused(call: Callable[..., object], *arguments: object, **more: object) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        call(*arguments, **more)
    return caught.value.code


# --- the role


def test_the_high_watermark_is_that_of_the_in_sync_replicas_and_not_what_is_durable_here() -> None:
    made, called = Made(followers=(2,)), list[object]()
    partition = made.partition
    partition.append(plain_batch("a", "b"), NOW)
    partition.when_committed(2, called.append)
    made.flush()
    assert (partition.high_watermark, partition.last_stable_offset) == (0, 0)
    assert not partition.read(0, 100, at_least_one=True)
    assert called == []
    follower_flushed(partition, 2, 2)
    assert partition.high_watermark == 2
    assert partition.read(0, 100, at_least_one=True)
    assert called == [None]


def test_loss_of_the_role_fails_whoever_waits_and_wakes_readers() -> None:
    made, called, woken = Made(), list[TidemillError | None](), list[str]()
    partition = made.partition
    partition.append(plain_batch("a"), NOW)
    partition.when_committed(1, called.append)
    partition.subscribe("reader", lambda: woken.append("reader"))
    partition.depend("shard", lambda: woken.append("shard"))
    partition.depend("gone", lambda: woken.append("gone"))
    partition.release("gone")
    partition.become_follower(4)
    assert [error and error.code for error in called] == [ErrorCode.not_leader_or_follower]
    assert woken == ["shard", "reader"]
    made.flush()
    assert len(called) == 1, "the flush that comes later answers nobody again"
    assert partition.high_watermark == 0, "the new leader decides how far it is committed"
    partition.when_committed(0, called.append)
    assert called[1] is not None
    assert called[1].code == ErrorCode.not_leader_or_follower


def test_a_partition_that_another_node_leads_takes_and_gives_nothing() -> None:
    partition = Made().partition
    partition.become_follower(4)
    attempts = (
        lambda: partition.append(plain_batch("b"), NOW),
        lambda: partition.write_marker(1, 0, commit=True, coordinator_epoch=0, now_ms=NOW),
        lambda: partition.write_markers([(1, 0, Marker(True, 0))], now_ms=NOW),
        lambda: partition.read(0, 100, at_least_one=True),
        lambda: partition.measure(0, None, None),
        lambda: partition.delete_records(0),
    )
    assert [refused(attempt) for attempt in attempts] == [ErrorCode.not_leader_or_follower] * len(attempts)
    assert partition.local_log.end_offset == 0


def test_it_leads_again_at_a_higher_epoch_and_commits_what_it_has() -> None:
    made = Made()
    partition = made.partition
    partition.append(plain_batch("a"), NOW)
    partition.become_follower(4)
    made.flush()
    assert not partition.leads_at(4)
    partition.become_leader(led(4))
    assert not partition.leads_at(4), "that epoch is another node's"
    partition.become_leader(led(5))
    assert partition.leads_at(5)
    assert partition.high_watermark == 1
    assert partition.append(plain_batch("b"), NOW).base_offset == 1
    made.flush()
    assert parse_header(partition.read(1, 100, at_least_one=True)).leader_epoch == 5


def test_who_waits_goes_on_waiting_when_the_leader_gets_a_new_epoch() -> None:
    made, called = Made(), list[object]()
    made.partition.append(plain_batch("a"), NOW)
    made.partition.when_committed(1, called.append)
    made.partition.become_leader(led(7))
    assert called == []
    made.flush()
    assert called == [None]


def test_writes_that_were_allowed_in_a_transaction_are_not_after_another_node_has_led() -> None:
    partition = Made().partition
    partition.begin_transaction(5, 0)
    assert partition.may_write(5, 0)
    partition.become_follower(4)
    partition.become_leader(led(5))
    assert not partition.may_write(5, 0)


def test_a_stopped_partition_stays_stopped_whoever_leads() -> None:
    made = Made()
    partition = made.partition
    partition.flush_failed(SyncFailed("on purpose"))
    partition.become_follower(4)
    partition.become_leader(led(5))
    assert partition.role is Role.OFFLINE
    with pytest.raises(SyncFailed):
        partition.append(plain_batch("a"), NOW)


# --- who waits


def test_waiters_are_called_in_the_order_of_their_offsets_and_only_when_reached() -> None:
    made, called = Made(), list[str]()
    partition = made.partition
    partition.append(plain_batch("a", "b"), NOW)
    partition.when_committed(2, lambda error: called.append("two"))
    partition.when_committed(1, lambda error: called.append("one"))
    partition.when_committed(2, lambda error: called.append("two again"))
    job = partition.begin_flush()
    assert job is not None
    partition.append(plain_batch("c"), NOW)
    partition.when_committed(3, lambda error: called.append("three"))
    job.run()
    assert called == []
    partition.flushed(job)
    assert called == ["one", "two", "two again"]
    made.flush()
    assert called[3:] == ["three"]


def test_who_waits_for_what_is_durable_is_called_at_once() -> None:
    made, called = Made(), list[TidemillError | None]()
    made.partition.append(plain_batch("a"), NOW)
    made.flush()
    made.partition.when_committed(1, called.append)
    assert called == [None]


def test_a_failure_reaches_everybody_who_waits_and_who_comes_later() -> None:
    made = Made()
    partition = made.partition
    called: list[TidemillError | None] = []
    woken: list[str] = []
    partition.append(plain_batch("a"), NOW)
    partition.when_committed(1, called.append)
    partition.when_committed(1, called.append)
    partition.subscribe("reader", lambda: woken.append("reader"))
    error = SyncFailed("on purpose")
    partition.flush_failed(error)
    partition.when_committed(1, called.append)
    assert called == [error] * 3
    assert woken == ["reader"]
    for attempt in (
        lambda: partition.append(plain_batch("b"), NOW),
        lambda: partition.read(0, 100, at_least_one=True),
        lambda: partition.delete_records(0),
    ):
        with pytest.raises(SyncFailed):
            attempt()
    assert partition.apply_retention(NOW) == []
    assert partition.begin_flush() is None
    assert not partition.is_dirty


def test_a_flush_proves_nothing_after_another_sync_has_failed() -> None:
    """A kernel that could not write pages counts them as clean: the next sync says yes to nothing."""
    made, called = Made(), list[TidemillError | None]()
    made.partition.append(plain_batch("a"), NOW)
    made.partition.when_committed(1, called.append)
    job = made.partition.begin_flush()
    assert job is not None
    job.run()
    made.storage.capacity_bytes = made.storage.used_bytes
    made.storage.fail_next("sync", ".log")
    with pytest.raises(StorageError):
        made.partition.append(plain_batch("b"), NOW)  # undone, and the sync of that fails
    made.storage.capacity_bytes = None
    made.partition.flushed(job)
    assert called == [made.partition.local_log.failure]
    assert made.partition.high_watermark == 0


def test_a_waiter_may_append_and_wait_again() -> None:
    made, called = Made(), list[str]()
    partition = made.partition

    def again(error: TidemillError | None) -> None:
        called.append("first")
        partition.append(plain_batch("b"), NOW)
        partition.when_committed(2, lambda error: called.append("second"))

    partition.append(plain_batch("a"), NOW)
    partition.when_committed(1, again)
    made.flush()
    assert called == ["first"]
    made.flush()
    assert called == ["first", "second"]


def test_readers_are_woken_by_each_flush_until_they_leave() -> None:
    made, woken = Made(), list[str]()
    made.partition.subscribe("a", lambda: woken.append("a"))
    made.partition.append(plain_batch("x"), NOW)
    assert woken == []
    made.flush()
    made.partition.unsubscribe("a")
    made.partition.append(plain_batch("x"), NOW)
    made.flush()
    assert woken == ["a"]


# --- when to flush


def test_every_append_asks_for_a_flush_that_is_due_at_once() -> None:
    made = Made()
    made.partition.append(plain_batch("a"), NOW)
    assert made.asked == 1
    assert made.partition.flush_due_ms() == 0
    assert made.partition.is_dirty


def test_flush_ms_lets_appends_gather_from_the_first_on() -> None:
    made = Made(flush_ms=500)
    made.partition.append(plain_batch("a"), NOW)
    made.partition.append(plain_batch("a"), NOW + 300)
    assert made.partition.flush_due_ms() == NOW + 500
    made.flush()
    made.partition.append(plain_batch("a"), NOW + 900)
    assert made.partition.flush_due_ms() == NOW + 1_400


def test_flush_messages_lets_appends_gather_up_to_a_number() -> None:
    made = Made(flush_messages=3)
    made.partition.append(plain_batch("a", "b"), NOW)
    assert made.partition.flush_due_ms() == 2**63 - 1
    made.partition.append(plain_batch("c"), NOW)
    assert made.partition.flush_due_ms() == 0


def test_who_waits_for_durability_does_not_wait_for_others_to_gather() -> None:
    made = Made(flush_ms=10**9, flush_messages=10**9)
    made.partition.append(plain_batch("a"), NOW)
    asked = made.asked
    made.partition.when_committed(1, lambda error: None)
    assert made.partition.flush_due_ms() == 0
    assert made.asked == asked + 1


# --- reading


def test_nobody_reads_what_is_not_durable() -> None:
    made = Made()
    made.partition.append(plain_batch("a"), NOW)
    assert bytes(made.partition.read(0, 10**6, at_least_one=True)) == b""
    made.flush()
    made.partition.append(plain_batch("b"), NOW)
    read = made.partition.read(0, 10**6, at_least_one=True)
    assert parse_header(read).size_bytes == len(read)
    assert bytes(made.partition.read(2, 10**6, at_least_one=True)) == b""
    assert refused(made.partition.read, 3, 10**6, at_least_one=True) == ErrorCode.offset_out_of_range


def test_what_is_not_durable_is_not_measured() -> None:
    made = Made()
    made.partition.append(plain_batch("a"), NOW)
    made.flush()
    made.partition.append(plain_batch("b", "c"), NOW)
    size = len(plain_batch("a"))
    assert made.partition.measure(0, 3, None) == (1, size)
    assert made.partition.measure(2, 3, None) == (2, 0)
    assert made.partition.measure(2, None, None) == (2, 0)
    assert refused(made.partition.measure, 0, 4, None) == ErrorCode.offset_out_of_range


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [(-1, None), (3, None), (2, ErrorCode.fenced_leader_epoch), (4, ErrorCode.unknown_leader_epoch)],
)
def test_leader_epochs_are_compared(epoch: int, expected: ErrorCode | None) -> None:
    if expected is None:
        check_leader_epoch("t", 0, 3, epoch)
    else:
        assert refused(check_leader_epoch, "t", 0, 3, epoch) == expected


# --- transactions


def transactional(sequence: int = 0, *, producer: int = 9, epoch: int = 0) -> bytes:
    return build_batch(
        [Record(None, b"v")],
        producer_id=producer,
        producer_epoch=epoch,
        base_sequence=sequence,
        attributes=0x10,
    )


def test_a_transactional_batch_needs_a_transaction_that_the_coordinator_knows_of() -> None:
    partition = Made().partition
    assert not partition.may_write(9, 0)
    assert refused(partition.append, transactional(), NOW) == ErrorCode.invalid_txn_state
    assert partition.local_log.end_offset == 0
    partition.begin_transaction(9, 0)
    assert partition.may_write(9, 0)
    assert not partition.may_write(9, 1)
    assert partition.append(transactional(), NOW).base_offset == 0
    assert refused(partition.append, transactional(epoch=1), NOW) == ErrorCode.invalid_txn_state


def test_an_open_transaction_goes_on_after_a_restart_and_a_closed_one_does_not() -> None:
    made = Made()
    for producer in (8, 9):
        made.partition.begin_transaction(producer, 0)
        made.partition.append(transactional(producer=producer), NOW)
    made.partition.write_marker(8, 0, commit=True, coordinator_epoch=0, now_ms=NOW)
    made.flush()
    made.partition.close()
    again = Made(made.storage).partition
    assert again.may_write(9, 0)
    assert not again.may_write(8, 0)
    assert again.append(transactional(1), NOW).base_offset == 3
    assert refused(again.append, transactional(1, producer=8), NOW) == ErrorCode.invalid_txn_state


def test_a_marker_ends_the_right_to_write() -> None:
    partition = Made().partition
    partition.begin_transaction(9, 0)
    partition.append(transactional(), NOW)
    partition.write_marker(9, 0, commit=False, coordinator_epoch=0, now_ms=NOW)
    assert refused(partition.append, transactional(1), NOW) == ErrorCode.invalid_txn_state


def test_a_batch_that_comes_again_behind_its_marker_is_known() -> None:
    """As in Kafka, if the producer goes on with its epoch and has another transaction here."""
    partition = Made().partition
    partition.begin_transaction(9, 0)
    first = partition.append(transactional(), NOW)
    partition.write_marker(9, 0, commit=True, coordinator_epoch=0, now_ms=NOW)
    partition.begin_transaction(9, 0)
    again = partition.append(transactional(), NOW)
    assert (again.duplicate, again.base_offset) == (True, first.base_offset)
    partition.write_marker(9, 1, commit=True, coordinator_epoch=0, now_ms=NOW)
    partition.begin_transaction(9, 1)
    assert not partition.append(transactional(epoch=1), NOW).duplicate, "another epoch begins anew"


def test_a_marker_for_a_transaction_without_batches_ends_the_right_to_write_as_well() -> None:
    partition = Made().partition
    partition.begin_transaction(9, 0)
    partition.write_marker(9, 0, commit=False, coordinator_epoch=0, now_ms=NOW)
    assert not partition.may_write(9, 0)


@pytest.mark.parametrize("together", [False, True])
def test_a_yes_of_another_nodes_coordinator_opens_the_partition_unless_a_marker_came_first(
    together: bool,
) -> None:
    partition = Made().partition
    question = partition.ask_about(9)
    assert partition.answer(question, 0)
    assert partition.may_write(9, 0)
    late, of_another = partition.ask_about(9), partition.ask_about(8)
    if together:
        partition.write_markers([(9, 0, Marker(True, 0))], now_ms=NOW)
    else:
        partition.write_marker(9, 0, commit=True, coordinator_epoch=0, now_ms=NOW)
    assert not partition.answer(late, 0)
    assert not partition.may_write(9, 0)
    assert partition.answer(of_another, 0)
    assert partition.may_write(8, 0)


def test_a_yes_is_for_the_leader_epoch_in_which_it_was_asked_for() -> None:
    partition = Made().partition
    question = partition.ask_about(9)
    partition.become_leader(led(4))
    assert not partition.answer(question, 0)
    question = partition.ask_about(9)
    partition.become_follower(5)
    assert not partition.answer(question, 0)
    partition.become_leader(led(6))
    assert not partition.may_write(9, 0)


def test_a_no_opens_nothing() -> None:
    partition = Made().partition
    assert partition.answer(partition.ask_about(9), None)
    assert not partition.may_write(9, 0)


def begin(made: Made, *producers: int) -> None:
    for producer in producers:
        made.partition.begin_transaction(producer, 0)
        made.partition.append(transactional(producer=producer), NOW)


def test_markers_that_are_written_together_end_all_of_their_transactions() -> None:
    made = Made()
    begin(made, 7, 8, 9)
    ends = [(7, 1, Marker(True, 0)), (8, 1, Marker(False, 0)), (9, 1, Marker(True, 0))]
    assert made.partition.write_markers(ends, now_ms=NOW)[:2] == (3, 5)
    assert made.partition.last_stable_offset == 0, "none of them is seen before it is durable"
    made.flush()
    assert made.partition.last_stable_offset == 6
    assert not any(made.partition.may_write(producer, 0) for producer in (7, 8, 9))
    aborted = made.partition.local_log.producers.transactions.aborted_between(0, 6)
    assert [(each.producer_id, each.first_offset, each.last_offset) for each in aborted] == [(8, 1, 4)]
    made.partition.close()
    again = Made(made.storage).partition
    assert (again.local_log.end_offset, again.last_stable_offset) == (6, 6)
    assert again.local_log.producers.transactions.aborted_between(0, 6) == aborted
    kept = [parse_header(batch) for batch in again.local_log.read_batches(3, 6)]
    assert [(each.base_offset, each.producer_id, each.leader_epoch) for each in kept] == [
        (3, 7, 3),
        (4, 8, 3),
        (5, 9, 3),
    ]


def test_markers_for_which_there_is_no_room_leave_every_transaction_open() -> None:
    made = Made()
    begin(made, 8, 9)
    ends = [(8, 1, Marker(True, 0)), (9, 1, Marker(True, 0))]
    made.storage.fail_next("write", error=DiskFull("no room"))
    with pytest.raises(DiskFull):
        made.partition.write_markers(ends, now_ms=NOW)
    assert (
        made.partition.local_log.end_offset,
        len(made.partition.local_log.producers.transactions.open),
    ) == (2, 2)
    assert made.partition.write_markers(ends, now_ms=NOW)[:2] == (2, 3)


def test_one_marker_that_is_refused_keeps_the_others_out() -> None:
    made = Made()
    begin(made, 8, 9)
    made.partition.write_marker(9, 5, commit=True, coordinator_epoch=0, now_ms=NOW)
    ends = [(8, 1, Marker(True, 0)), (9, 1, Marker(True, 0))]
    assert refused(made.partition.write_markers, ends, now_ms=NOW) == ErrorCode.invalid_producer_epoch
    assert (
        made.partition.local_log.end_offset,
        list(made.partition.local_log.producers.transactions.open),
    ) == (3, [8])


def test_markers_go_into_one_segment() -> None:
    made = Made(segment_bytes=700)
    begin(made, *range(10, 16))
    ends = [(producer, 1, Marker(True, 0)) for producer in range(10, 16)]
    made.partition.write_markers(ends, now_ms=NOW)
    assert [each.base_offset for each in made.partition.local_log.segments][-1] == 6


def test_many_markers_are_the_same_log_as_one_after_the_other() -> None:
    together, one_by_one = Made(), Made()
    ends = [(producer, 0, Marker(producer % 3 > 0, 4)) for producer in range(200)]
    for made in (together, one_by_one):
        begin(made, *range(200))
        made.flush()
    together.partition.write_markers(ends, now_ms=NOW)
    for end in ends:
        one_by_one.partition.write_markers([end], now_ms=NOW)
    logs = [made.partition.local_log for made in (together, one_by_one)]
    assert len(set(map(bytes, (log.read(0, 10**6, 400, at_least_one=True) for log in logs)))) == 1
    assert len({log.segments[0].index_bytes() for log in logs}) == 1
    assert len({log.producers.to_bytes() for log in logs}) == 1


def test_the_end_of_one_transaction_is_not_dearer_beside_many_open_ones() -> None:
    transactions = TransactionStates()
    for producer in range(1_000):
        transactions.begin(producer, producer)
    looked_at = _CountedOpen(transactions.open)
    transactions._open = looked_at
    for producer in range(500):
        transactions.end(producer, 1_000 + producer, commit=False)
    assert looked_at.count <= 500


class _CountedOpen(OrderedDict[int, int]):
    """Open transactions, of which it is counted how many are looked at."""

    count = 0

    def values(self) -> Any:
        for value in super().values():
            self.count += 1
            yield value


def test_a_plain_batch_inside_of_a_transaction_is_refused() -> None:
    partition = Made().partition
    partition.begin_transaction(9, 0)
    partition.append(transactional(), NOW)
    plain = plain_batch("v", producer=(9, 0, 1))
    assert refused(partition.append, plain, NOW) == ErrorCode.invalid_txn_state
    assert partition.append(plain_batch("v", producer=(10, 0, 0)), NOW).base_offset == 1
    partition.write_marker(9, 0, commit=True, coordinator_epoch=0, now_ms=NOW)
    assert partition.append(plain_batch("v", producer=(9, 0, 1)), NOW).base_offset == 3


def test_a_marker_fences_older_epochs_of_its_producer() -> None:
    partition = Made().partition
    partition.begin_transaction(9, 0)
    partition.append(transactional(), NOW)
    partition.write_marker(9, 1, commit=False, coordinator_epoch=0, now_ms=NOW)
    partition.begin_transaction(9, 0)
    assert refused(partition.append, transactional(1), NOW) == ErrorCode.invalid_producer_epoch
    late = refused(partition.write_marker, 9, 0, commit=True, coordinator_epoch=0, now_ms=NOW)
    assert late == ErrorCode.invalid_producer_epoch
    assert partition.local_log.end_offset == 2


def test_a_marker_of_an_old_coordinator_is_refused() -> None:
    partition = Made().partition
    partition.begin_transaction(9, 0)
    partition.append(transactional(), NOW)
    partition.write_marker(9, 0, commit=True, coordinator_epoch=5, now_ms=NOW)
    partition.begin_transaction(9, 0)
    partition.append(transactional(1), NOW)
    zombie = refused(partition.write_marker, 9, 0, commit=False, coordinator_epoch=4, now_ms=NOW)
    assert zombie == ErrorCode.transaction_coordinator_fenced
    assert partition.may_write(9, 0)
    partition.write_marker(9, 0, commit=True, coordinator_epoch=6, now_ms=NOW)


def test_the_last_stable_offset_waits_for_the_marker_to_be_durable() -> None:
    made = Made()
    partition = made.partition
    partition.append(plain_batch("a"), NOW)
    partition.begin_transaction(9, 0)
    partition.append(transactional(), NOW)
    made.flush()
    partition.write_marker(9, 0, commit=True, coordinator_epoch=0, now_ms=NOW)
    assert (partition.high_watermark, partition.last_stable_offset) == (2, 1)
    assert (partition.upper_offset(committed=True), partition.upper_offset(committed=False)) == (1, 2)
    made.flush()
    assert (partition.high_watermark, partition.last_stable_offset) == (3, 3)


def test_producers_are_told_with_their_open_transactions() -> None:
    partition = Made().partition
    partition.append(plain_batch("a", producer=(7, 2, 0)), NOW)
    partition.begin_transaction(9, 1)
    partition.append(transactional(epoch=1), NOW + 5)
    seven, nine = sorted(partition.producers())
    assert (seven.producer_id, seven.epoch, seven.last_sequence, seven.transaction_start_offset) == (
        7,
        2,
        0,
        -1,
    )
    assert (nine.producer_id, nine.epoch, nine.transaction_start_offset) == (9, 1, 1)
    assert nine.last_timestamp_ms == NOW + 5


# --- retention and the end


def test_retention_of_everything_leaves_an_empty_log_that_goes_on() -> None:
    made = Made(retention_ms=1_000)
    partition = made.partition
    partition.append(plain_batch("a", "b", timestamp_ms=NOW), NOW)
    made.flush()
    assert partition.apply_retention(NOW + 900) == []
    removed = partition.apply_retention(NOW + 1_001)
    assert [segment.base_offset for segment in removed] == [0]
    partition.local_log.discard(removed)
    assert (partition.log_start_offset, partition.local_log.end_offset) == (2, 2)
    assert partition.append(plain_batch("c"), NOW).base_offset == 2


def test_what_is_not_durable_is_not_too_old() -> None:
    made = Made(retention_ms=1_000)
    made.partition.append(plain_batch("a", timestamp_ms=NOW), NOW)
    assert made.partition.apply_retention(NOW + 10**9) == []


def test_what_is_above_the_high_watermark_is_not_too_old_and_cannot_be_deleted() -> None:
    made = Made(followers=(2,), retention_ms=1_000)
    partition = made.partition
    for value in ("a", "b"):
        partition.append(plain_batch(value, timestamp_ms=NOW), NOW)
        partition.local_log.roll()
        made.flush()
    assert partition.apply_retention(NOW + 10**9) == []
    assert refused(partition.delete_records, 1) == ErrorCode.offset_out_of_range
    follower_flushed(partition, 2, 1)
    assert [segment.base_offset for segment in partition.apply_retention(NOW + 10**9)] == [0]
    assert partition.log_start_offset == 1
    assert partition.delete_records(-1) == []
    assert partition.log_start_offset == 1, "the high watermark is the end of what can be deleted"


def test_a_start_knows_the_high_watermark_of_the_checkpoint_and_no_more() -> None:
    made = Made()
    for value in ("a", "b"):
        made.partition.append(plain_batch(value), NOW)
        made.flush()
    after_a_crash = Made(made.storage.crash(power_loss=False), followers=(2,))
    partition = after_a_crash.partition
    # The checkpoint was written by the last flush, before the high watermark moved with it.
    assert (partition.high_watermark, partition.log_end_offset) == (1, 2)
    assert not partition.has_reached_epoch_start
    follower_flushed(partition, 2, 2)
    partition.close()
    after_a_stop = Made(after_a_crash.storage, followers=(2,)).partition
    assert (after_a_stop.high_watermark, after_a_stop.log_end_offset) == (2, 2)


def test_the_last_stable_offset_waits_for_the_marker_to_be_committed() -> None:
    made = Made(followers=(2,))
    partition = made.partition
    partition.begin_transaction(9, 0)
    partition.append(transactional(), NOW)
    partition.write_marker(9, 0, commit=True, coordinator_epoch=0, now_ms=NOW)
    made.flush()
    follower_flushed(partition, 2, 1)
    assert (partition.high_watermark, partition.last_stable_offset) == (1, 0)
    follower_flushed(partition, 2, 2)
    assert (partition.high_watermark, partition.last_stable_offset) == (2, 2)


def test_a_partition_that_goes_away_lets_go_of_its_files() -> None:
    made = Made()
    made.partition.append(plain_batch("a"), NOW)
    made.flush()
    files = [segment.file for segment in made.partition.local_log.segments]
    made.partition.stop(StorageError("gone"))
    assert files
    assert all(file._closed for file in files)  # type: ignore[attr-defined]


@pytest.mark.parametrize("fails", [False, True])
def test_a_partition_that_goes_away_during_a_flush_keeps_its_files_until_the_end_of_it(fails: bool) -> None:
    made, called = Made(), list[TidemillError | None]()
    partition = made.partition
    partition.append(plain_batch("a"), NOW)
    partition.when_committed(1, called.append)
    partition.flush_scheduled = True
    job = partition.begin_flush()
    assert job is not None
    error = StorageError("gone")
    partition.stop(error)
    assert called == [error]
    assert not any(file._closed for file in job.files)  # type: ignore[attr-defined]
    partition.flush_scheduled = False
    if fails:
        partition.flush_failed(SyncFailed("on purpose"))
    else:
        job.run()
        partition.flushed(job)
    assert all(file._closed for file in job.files)  # type: ignore[attr-defined]
    assert partition.local_log.failure is error


def test_a_partition_that_goes_away_with_a_planned_flush_lets_go_when_that_begins() -> None:
    made = Made()
    made.partition.append(plain_batch("a"), NOW)
    made.partition.flush_scheduled = True
    files = [segment.file for segment in made.partition.local_log.segments]
    made.partition.stop(StorageError("gone"))
    assert not any(file._closed for file in files)  # type: ignore[attr-defined]
    assert made.partition.begin_flush() is None
    assert all(file._closed for file in files)  # type: ignore[attr-defined]
