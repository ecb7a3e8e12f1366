"""What a share partition does with records, member by member."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from support.share_states import StoredState
from tidemill.coordination.share_state import NO_START, DeliveryState, ShareState, StateBatch
from tidemill.errors import ApiError, ErrorCode
from tidemill.share.partition import machine
from tidemill.share.partition.machine import PartitionState, SharePartition
from tidemill.share.partition.policy import SharePolicy
from tidemill.share.partition.runs import Wait
from tidemill.share.partition.values import Acknowledgement, Acquired, SeenRecord, Span

GAP, ACCEPT, RELEASE, REJECT, RENEW, RETURN = range(6)
_ALL = 1_000_000


class World:
    """A share partition over a log of batches, with a clock and a stored state."""

    def __init__(
        self, policy: SharePolicy | None = None, batches: int = 5, batch_records: int = 10, start: int = 0
    ) -> None:
        self.policy = policy or SharePolicy()
        self.now_ms = 1_000_000
        self.spans = [
            Span(number * batch_records, (number + 1) * batch_records - 1) for number in range(batches)
        ]
        self.keys: dict[int, bytes] = {}
        self.times: dict[int, int] = {}
        self.stored = StoredState(start_offset=start)
        self.load()

    def load(self) -> None:
        """Begin as a new leader does, from the stored state."""
        self.partition = SharePartition(self.policy)
        self.partition.begin_loading()
        state = self.stored.read()
        self.partition.loaded(state, state.start_offset, self.now_ms, self.now_ms)

    def fetch(
        self, member: str, max_records: int = 500, batch_size: int = 500, *, exact: bool = False
    ) -> list[Acquired]:
        partition = self.partition
        while partition.wants_records and self.see():
            pass
        position = partition.next_offset()
        if position is None:
            return []
        spans = [span for span in self.spans if span.last_offset >= position]
        return partition.acquire(
            member,
            position,
            spans,
            max_records,
            batch_size,
            exact=exact,
            now_ms=self.now_ms,
            wall_ms=self.now_ms,
        )

    def see(self) -> bool:
        offset = self.partition.scan_offset
        span = next((span for span in self.spans if span.last_offset >= offset), None)
        if span is None:
            return False
        records = [
            SeenRecord(each, self.keys.get(each), self.times.get(each, 0))
            for each in range(span.first_offset, span.last_offset + 1)
            if not span.is_hidden
        ]
        self.partition.see(records, span.last_offset + 1, self.now_ms, self.now_ms, first_offset=offset)
        return self.partition.scan_offset > offset

    def acknowledge(self, member: str, first: int, last: int, *types: int, delay_ms: int = -1) -> None:
        given = Acknowledgement(first, last, types, delay_ms)
        self.partition.acknowledge(member, [given], self.now_ms, self.now_ms)
        self.write()

    def write(self) -> None:
        while (write := self.partition.next_write()) is not None:
            self.stored.write(write.start_offset, write.delivery_complete_count, write.batches)
            self.partition.wrote(self.now_ms, self.now_ms)

    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        while self.is_due():
            self.tick()

    def tick(self) -> None:
        self.partition.tick(self.now_ms, self.now_ms)

    def is_due(self) -> bool:
        due_ms = self.partition.next_due_ms(self.now_ms, self.now_ms)
        return due_ms is not None and due_ms <= self.now_ms

    def refused(self, member: str, first: int, last: int, *types: int) -> ErrorCode:
        with pytest.raises(ApiError) as caught:
            self.partition.acknowledge(
                member, [Acknowledgement(first, last, types)], self.now_ms, self.now_ms
            )
        return caught.value.code


def _offsets(given: Sequence[Acquired]) -> list[int]:
    return [offset for first, last, _ in given for offset in range(first, last + 1)]


def test_members_are_given_different_records() -> None:
    world = World()
    assert world.fetch("a", 20) == [Acquired(0, 19, 1)]
    assert world.fetch("b", 500) == [Acquired(20, 49, 1)]
    assert world.fetch("c") == []


def test_a_batch_is_given_whole_unless_the_limit_of_records_is_exact() -> None:
    world = World()
    assert world.fetch("a", 3) == [Acquired(0, 9, 1)]
    assert world.fetch("b", 3, exact=True) == [Acquired(10, 12, 1)]
    assert world.fetch("c", 10, exact=True) == [Acquired(13, 22, 1)]


def test_ranges_of_an_answer_end_with_batches_of_about_the_wanted_size() -> None:
    assert World().fetch("a", 500, 15) == [Acquired(0, 19, 1), Acquired(20, 39, 1), Acquired(40, 49, 1)]


def test_accepted_records_move_the_start_and_are_not_stored_one_by_one() -> None:
    world = World()
    world.fetch("a", 10)
    world.acknowledge("a", 5, 9, ACCEPT)
    assert (world.stored.start_offset, world.stored.complete_count) == (0, 5)
    assert world.stored.batches == [StateBatch(5, 9, DeliveryState.ACKNOWLEDGED, 1)]
    world.acknowledge("a", 0, 4, ACCEPT)
    assert (world.stored.start_offset, world.stored.complete_count, world.stored.batches) == (10, 0, [])
    assert world.partition.start_offset == 10
    assert len(world.partition._runs) == 0


def test_released_records_come_again_with_a_higher_count() -> None:
    world = World(batches=1)
    world.fetch("a")
    world.acknowledge("a", 0, 9, *[ACCEPT, RELEASE] * 5)
    assert world.fetch("b") == [Acquired(offset, offset, 2) for offset in (1, 3, 5, 7, 9)]


def test_a_record_dies_at_the_delivery_limit() -> None:
    world = World(SharePolicy(delivery_limit=2), batches=1, batch_records=1)
    for count in (1, 2):
        assert world.fetch("a") == [Acquired(0, 0, count)]
        world.acknowledge("a", 0, 0, RELEASE)
    assert world.fetch("a") == []
    assert world.partition.totals.dead == 1
    assert world.stored.start_offset == 1


def test_records_that_nobody_has_looked_at_come_again_as_if_they_had_not_been_delivered() -> None:
    world = World(SharePolicy(delivery_limit=2, retry_backoff_ms=50), batches=1)
    for _ in range(5):
        assert world.fetch("a") == [Acquired(0, 9, 1)]
        world.acknowledge("a", 0, 9, RETURN)
    assert world.stored.batches == [StateBatch(0, 9, DeliveryState.AVAILABLE, 0)]
    world.fetch("a")
    world.acknowledge("a", 0, 0, RELEASE)
    world.pass_time(50)
    # Not even of a last delivery anything dies, also if another leader gives out the next one.
    for _ in range(3):
        assert _offsets(world.fetch("b", 1)) == [0]
        assert world.partition._runs.runs[0].count == 2
        world.acknowledge("b", 0, 0, RETURN)
        world.load()
    assert world.partition.totals.dead == 0


def test_a_return_that_could_not_be_written_leaves_the_record_with_its_member() -> None:
    world = World(batches=1, batch_records=1)
    world.fetch("a")
    world.partition.acknowledge("a", [Acknowledgement(0, 0, (RETURN,))], world.now_ms, world.now_ms)
    assert world.partition.next_write() is not None
    world.partition.refused()
    assert world.fetch("b") == []
    world.acknowledge("a", 0, 0, RELEASE)
    assert world.fetch("b") == [Acquired(0, 0, 2)]


def test_last_deliveries_are_smaller_and_the_very_last_is_alone() -> None:
    world = World(batches=1, batch_records=100)
    sizes = []
    for _ in range(5):
        given = _offsets(world.fetch("a"))
        sizes.append(len(given))
        world.acknowledge("a", given[0], given[-1], RELEASE)
    assert sizes == [100, 100, 100, 50, 1]


def test_a_throttled_record_is_not_given_beside_others() -> None:
    world = World(batches=1, batch_records=10)
    for _ in range(3):
        world.fetch("a")
        world.acknowledge("a", 0, 9, RELEASE)
    world.spans.append(Span(10, 19))
    assert _offsets(world.fetch("a")) == [0, 1, 2, 3, 4]
    assert _offsets(world.fetch("b")) == [5, 6, 7, 8, 9]
    assert _offsets(world.fetch("c")) == list(range(10, 20))


def test_a_lock_ends_and_the_record_goes_to_somebody_else() -> None:
    world = World(batches=1)
    world.fetch("a")
    world.pass_time(29_999)
    assert world.fetch("b") == []
    world.pass_time(1)
    assert world.fetch("b") == [Acquired(0, 9, 2)]
    assert world.refused("a", 0, 9, ACCEPT) is ErrorCode.invalid_record_state
    world.acknowledge("b", 0, 9, ACCEPT)
    assert world.stored.start_offset == 10


def test_a_renewed_lock_begins_anew_and_nothing_is_written() -> None:
    world = World(batches=1)
    world.fetch("a")
    world.pass_time(20_000)
    settlement = world.partition.acknowledge(
        "a", [Acknowledgement(0, 4, (RENEW,))], world.now_ms, world.now_ms
    )
    assert not settlement.needs_write
    assert world.partition.next_write() is None
    world.pass_time(10_000)
    assert _offsets(world.fetch("b")) == [5, 6, 7, 8, 9]
    world.acknowledge("a", 0, 4, ACCEPT)


def test_renewing_is_refused_where_the_group_does_not_allow_it() -> None:
    world = World(SharePolicy(renew_enabled=False))
    world.fetch("a")
    assert world.refused("a", 0, 1, RENEW) is ErrorCode.invalid_request


def test_a_member_that_goes_gives_its_records_back_with_their_count() -> None:
    world = World(batches=1)
    world.fetch("a", 5, exact=True)
    world.fetch("b")
    assert world.partition.release_members({"a"}, world.now_ms, world.now_ms) == 5
    world.write()
    world.load()
    assert world.fetch("c") == [Acquired(0, 4, 2), Acquired(5, 9, 1)]


@pytest.mark.parametrize(
    ("first", "last", "types", "code"),
    [
        (0, 9, (), ErrorCode.invalid_request),
        (0, 9, (ACCEPT,) * 9, ErrorCode.invalid_request),
        (9, 0, (ACCEPT,), ErrorCode.invalid_request),
        (0, 9, (6,), ErrorCode.invalid_request),
        (0, 9, (-1,), ErrorCode.invalid_request),
        (5, 15, (ACCEPT,), ErrorCode.invalid_record_state),
        (10, 12, (ACCEPT,), ErrorCode.invalid_record_state),
        (500, 501, (ACCEPT,), ErrorCode.invalid_record_state),
    ],
)
def test_an_acknowledgement_that_does_not_fit_changes_nothing(
    first: int, last: int, types: tuple[int, ...], code: ErrorCode
) -> None:
    world = World()
    world.fetch("a", 10)
    world.fetch("b", 10)
    with pytest.raises(ApiError) as caught:
        world.partition.acknowledge(
            "a",
            [Acknowledgement(0, 1, (ACCEPT,)), Acknowledgement(first, last, types)],
            world.now_ms,
            world.now_ms,
        )
    assert caught.value.code == code
    assert world.partition.next_write() is None
    world.acknowledge("a", 0, 9, ACCEPT)


def test_a_gap_is_finished_without_being_delivered_again() -> None:
    world = World(batches=1)
    world.fetch("a")
    world.acknowledge("a", 0, 9, GAP)
    assert world.stored.start_offset == 10
    assert world.partition.totals.dead == 0


def test_records_are_held_until_the_write_is_done_and_after_it_failed() -> None:
    world = World(batches=1)
    world.fetch("a")
    world.partition.acknowledge("a", [Acknowledgement(0, 9, (RELEASE,))], world.now_ms, world.now_ms)
    write = world.partition.next_write()
    assert write is not None
    assert world.fetch("b") == []
    assert world.refused("a", 0, 9, ACCEPT) is ErrorCode.invalid_record_state
    assert world.partition.refused() == write.settlements
    assert world.fetch("b") == []
    assert world.partition.acquired_count == 10
    world.acknowledge("a", 0, 9, ACCEPT)


def test_a_lock_that_ended_while_its_write_failed_ends_then() -> None:
    world = World(batches=1)
    world.fetch("a")
    world.partition.acknowledge("a", [Acknowledgement(0, 9, (ACCEPT,))], world.now_ms, world.now_ms)
    assert world.partition.next_write() is not None
    world.pass_time(40_000)
    assert world.fetch("b") == []
    world.partition.refused()
    world.pass_time(0)
    assert world.fetch("b") == [Acquired(0, 9, 2)]


def test_the_end_of_a_lock_does_not_need_its_write_and_is_written_with_the_next() -> None:
    world = World(batches=1)
    world.fetch("a")
    world.pass_time(30_000)
    assert world.partition.next_write() is not None
    world.partition.refused()
    assert world.fetch("b", 5, exact=True) == [Acquired(0, 4, 2)]
    world.acknowledge("b", 0, 0, ACCEPT)
    assert world.stored.start_offset == 1
    assert world.stored.batches == [StateBatch(1, 9, DeliveryState.AVAILABLE, 1)]


def test_nothing_is_handed_out_while_the_outcome_of_a_write_is_unknown() -> None:
    for was_written in (True, False):
        world = World(batches=2)
        world.fetch("a", 10)
        world.partition.acknowledge("a", [Acknowledgement(3, 9, (RELEASE,))], world.now_ms, world.now_ms)
        write = world.partition.next_write()
        assert write is not None
        if was_written:
            world.stored.write(write.start_offset, write.delivery_complete_count, write.batches)
        world.partition.unsure()
        assert world.fetch("b") == []
        assert world.partition.next_write() is None
        assert world.partition.resolve(world.stored.read()) is was_written
        if was_written:
            world.partition.wrote(world.now_ms, world.now_ms)
        else:
            world.partition.refused()
        assert _offsets(world.fetch("b", 100)) == [*(range(3, 10) if was_written else ()), *range(10, 20)]


def test_a_write_is_found_although_a_transaction_has_finished_some_of_it_since() -> None:
    world = World(batches=1, batch_records=2)
    world.fetch("a")
    world.pass_time(30_000)
    world.fetch("b")
    # The end of a's lock is being written, while a transaction accepts the first record for b.
    write = world.partition.next_write()
    assert write is not None
    accepted = [Acknowledgement(0, 0, (ACCEPT,))]
    pending = world.partition.accept_in_transaction("b", accepted, 7, 0)
    world.stored.write(write.start_offset, write.delivery_complete_count, write.batches)
    world.partition.unsure()
    world.stored.pend(7, pending.batches)
    world.partition.pending_written(pending)
    world.stored.end(7, commit=True)
    assert world.partition.resolve(world.stored.read())


def test_the_limit_of_locks_counts_only_what_is_held() -> None:
    world = World(SharePolicy(max_record_locks=15), batches=10)
    assert len(_offsets(world.fetch("a"))) == 15
    assert world.fetch("b") == []
    world.acknowledge("a", 1, 14, ACCEPT)
    # One record at the start is held, and 14 finished ones behind it: there is room for 14 more.
    assert _offsets(world.fetch("b")) == list(range(15, 29))
    assert len(world.partition._runs) <= 4


def test_hidden_batches_are_never_handed_out_also_after_a_restart() -> None:
    world = World()
    world.spans[1] = Span(10, 19, is_hidden=True)
    assert _offsets(world.fetch("a")) == [*range(10), *range(20, 50)]
    world.acknowledge("a", 20, 29, ACCEPT)
    world.load()
    assert _offsets(world.fetch("a")) == [*range(10), *range(30, 50)]
    for first, last in ((0, 9), (30, 49)):
        world.acknowledge("a", first, last, ACCEPT)
    assert world.stored.start_offset == 50


def test_a_hidden_batch_at_the_front_moves_the_start() -> None:
    world = World(batches=1)
    world.fetch("a")
    world.acknowledge("a", 0, 9, ACCEPT)
    world.spans = [Span(10, 10, is_hidden=True)]
    assert world.fetch("a") == []
    world.write()
    assert world.stored.start_offset == 11


def test_what_compaction_has_removed_is_finished() -> None:
    world = World()
    world.fetch("a")
    world.acknowledge("a", 0, 49, RELEASE)
    world.spans = [world.spans[2], world.spans[4]]
    assert _offsets(world.fetch("b")) == [*range(20, 30), *range(40, 50)]
    for first in (20, 40):
        world.acknowledge("b", first, first + 9, ACCEPT)
    assert world.stored.start_offset == 50


def test_deleting_records_moves_the_start_and_what_was_held_is_gone() -> None:
    world = World()
    world.fetch("a", 20)
    world.partition.log_start_moved(15, world.now_ms, world.now_ms)
    assert (world.partition.start_offset, world.partition.acquired_count) == (15, 5)
    world.acknowledge("a", 0, 19, ACCEPT)
    assert world.stored.start_offset == 20
    world.partition.log_start_moved(500, world.now_ms, world.now_ms)
    world.write()
    assert world.stored.start_offset == 500
    assert world.partition.end_offset == 500


def test_a_start_that_was_never_written_is_written_first() -> None:
    partition = SharePartition(SharePolicy())
    partition.begin_loading()
    partition.loaded(ShareState(3, NO_START, ()), 40, 0, 0)
    write = partition.next_write()
    assert write is not None
    assert (write.start_offset, write.batches) == (40, [])
    partition.wrote(0, 0)
    assert partition.next_write() is None
    assert (partition.state, partition.state_epoch) == (PartitionState.ACTIVE, 3)


def test_a_fenced_partition_gives_nothing_and_names_what_it_cannot_answer() -> None:
    world = World()
    world.fetch("a", 20)
    written, queued = (
        world.partition.acknowledge("a", [Acknowledgement(first, first, (ACCEPT,))], 0, 0) for first in (0, 1)
    )
    assert world.partition.fence() == [written, queued]
    assert world.fetch("b") == []
    assert world.partition.next_write() is None


def test_finished_records_behind_one_that_is_held_take_one_run() -> None:
    world = World(batches=200)
    world.fetch("a", 1, exact=True)
    while given := world.fetch("b"):
        for offset in _offsets(given):
            world.acknowledge("b", offset, offset, ACCEPT)
    assert len(world.partition._runs) == 2
    world.acknowledge("a", 0, 0, ACCEPT)
    assert world.stored.start_offset == 2_000


# --- retry with delay


def test_a_released_record_comes_back_after_its_backoff_also_after_a_restart() -> None:
    policy = SharePolicy(retry_backoff_ms=1_000, retry_exponential=True, retry_backoff_max_ms=1_500)
    world = World(policy, batches=1, batch_records=1)
    for delay_ms in (1_000, 1_500):
        world.fetch("a")
        world.acknowledge("a", 0, 0, RELEASE)
        assert world.stored.batches[0].not_before_ms == world.now_ms + delay_ms
        world.load()
        assert world.partition.delayed_count == 1
        world.pass_time(delay_ms - 1)
        assert world.fetch("a") == []
        assert world.partition.next_due_ms(world.now_ms, world.now_ms) == world.now_ms + 1
        world.pass_time(1)
    assert world.fetch("a") == [Acquired(0, 0, 3)]


def test_a_release_can_name_its_own_delay() -> None:
    world = World(batches=1)
    world.fetch("a")
    world.acknowledge("a", 0, 4, RELEASE, delay_ms=5_000)
    world.acknowledge("a", 5, 9, RELEASE, delay_ms=0)
    assert _offsets(world.fetch("b")) == [5, 6, 7, 8, 9]
    world.pass_time(5_000)
    assert _offsets(world.fetch("b")) == [0, 1, 2, 3, 4]


def test_too_many_delayed_records_stop_new_ones_visibly() -> None:
    world = World(SharePolicy(retry_backoff_ms=60_000, max_waiting_records=20), batches=10)
    world.fetch("a", 20)
    world.acknowledge("a", 0, 19, RELEASE)
    assert world.fetch("a") == []
    assert (world.partition.is_stalled, world.partition.waiting_count) == (True, 20)
    world.pass_time(60_000)
    assert (world.partition.is_stalled, world.partition.waiting_count) == (False, 0)
    assert _offsets(world.fetch("a", 10)) == list(range(10))


def test_a_window_in_too_many_pieces_gives_out_no_more_while_records_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "_RUNS_MAX", 6)
    world = World(SharePolicy(max_record_locks=2**31 - 1))
    assert len(_offsets(world.fetch("a", 10))) == 10
    for offset in range(1, 10, 2):
        world.acknowledge("a", offset, offset, ACCEPT)
    assert world.fetch("a") == []
    world.partition.release_members({"a"}, world.now_ms, world.now_ms)
    world.write()
    assert _offsets(world.fetch("b", 1)) == [0], "what was given back can be finished, however many pieces"


def test_delays_that_end_together_end_in_several_turns() -> None:
    world = World(SharePolicy(max_record_locks=4_000), batches=2, batch_records=1_000)
    world.fetch("a", 2_000)
    world.acknowledge("a", 0, 1_999, *[RELEASE, ACCEPT] * 1_000, delay_ms=5_000)
    world.now_ms += 5_000
    ready: list[int] = []
    while world.is_due():
        world.tick()
        ready.append(world.partition.available_count)
    assert ready == [500, 1_000]


def test_what_a_member_held_in_very_many_pieces_goes_back_in_several_turns() -> None:
    world = World(SharePolicy(max_record_locks=4_000), batches=1, batch_records=2_000)
    world.fetch("a", 2_000)
    world.acknowledge("a", 0, 1_999, *[RENEW, ACCEPT] * 1_000)
    assert world.partition.release_members({"a"}, world.now_ms, world.now_ms) == 1_000
    assert world.partition.available_count == 500
    while world.is_due():
        world.tick()
    world.write()
    assert (world.partition.available_count, world.partition.acquired_count) == (1_000, 0)
    assert world.fetch("b", 1)[0].delivery_count == 2


@pytest.mark.parametrize("order_by_key", [False, True])
def test_locks_that_end_together_end_in_several_turns(order_by_key: bool) -> None:
    policy = SharePolicy(max_record_locks=4_000, order_by_key=order_by_key, lock_duration_ms=60_000)
    world = World(policy, batches=1, batch_records=2_000)
    world.keys = {offset: b"%d" % offset for offset in range(2_000)}
    world.fetch("a", 2_000)
    # Every other lock is renewed: what was given out in one piece is held in many now.
    world.now_ms += 1
    for offset in range(0, 2_000, 2):
        world.acknowledge("a", offset, offset, RENEW)
    world.now_ms += 59_999
    turns = 0
    while world.is_due():
        expired = world.partition.totals.expired
        world.tick()
        turns += 1
        assert world.partition.totals.expired - expired <= 500
    assert (world.partition.totals.expired, world.partition.acquired_count) == (1_000, 1_000)
    assert turns >= 2


def test_delayed_records_that_the_log_start_passes_are_told() -> None:
    world = World(SharePolicy(retry_backoff_ms=60_000), batches=1)
    world.fetch("a")
    world.acknowledge("a", 0, 9, RELEASE)
    assert world.partition.log_start_moved(4, world.now_ms, world.now_ms) == 4
    assert world.partition.totals.lost == 4


# --- order per key

_BY_KEY = SharePolicy(order_by_key=True)


def _keyed(policy: SharePolicy = _BY_KEY, keys: int = 2, **how: int) -> World:
    world = World(policy, batches=1, **how)
    world.keys = {offset: b"%d" % (offset % keys) for offset in range(10)}
    return world


def test_one_record_of_a_key_is_in_flight() -> None:
    world = _keyed()
    assert _offsets(world.fetch("a")) == [0, 1]
    assert world.fetch("b") == []
    assert world.partition.blocked_count == 8
    world.acknowledge("a", 1, 1, ACCEPT)
    assert _offsets(world.fetch("b")) == [3]


def test_a_key_waits_for_a_record_that_comes_back() -> None:
    world = _keyed(SharePolicy(order_by_key=True, retry_backoff_ms=1_000))
    world.fetch("a")
    world.acknowledge("a", 0, 1, RELEASE, ACCEPT)
    assert _offsets(world.fetch("b")) == [3]
    world.pass_time(1_000)
    assert world.fetch("b") == [Acquired(0, 0, 2)]


def test_records_without_a_key_have_no_order() -> None:
    world = World(_BY_KEY, batches=1)
    assert _offsets(world.fetch("a")) == list(range(10))


def test_a_key_goes_on_after_a_death_or_is_blocked_by_it() -> None:
    world = _keyed()
    world.fetch("a")
    world.acknowledge("a", 0, 0, REJECT)
    assert _offsets(world.fetch("b")) == [2]
    world = _keyed(SharePolicy(order_by_key=True, dead_blocks_key=True))
    world.fetch("a")
    world.acknowledge("a", 0, 1, REJECT, ACCEPT)
    for _ in range(2):
        assert _offsets(world.fetch("b")) == [3]
        assert world.partition.start_offset == 0
        # It is blocked for the next leader, too.
        world.load()
    world.partition.configure(_BY_KEY, world.now_ms)
    assert _offsets(world.fetch("b")) == [2, 3]
    world.acknowledge("b", 2, 3, ACCEPT)
    assert world.stored.start_offset == 4


def test_a_key_goes_on_only_when_the_death_by_a_lost_lock_is_written() -> None:
    world = _keyed(SharePolicy(order_by_key=True, delivery_limit=2))
    for _ in range(2):
        world.fetch("a")
        world.pass_time(30_000)
    assert world.fetch("a") == []
    world.write()
    assert _offsets(world.fetch("a")) == [2, 3]


def test_order_holds_for_the_next_leader() -> None:
    world = _keyed()
    world.fetch("a")
    world.acknowledge("a", 0, 0, ACCEPT)
    world.fetch("b")
    world.load()
    assert _offsets(world.fetch("c")) == [1, 2]


def test_too_many_blocked_records_stop_new_ones_visibly() -> None:
    world = _keyed(SharePolicy(order_by_key=True, max_waiting_records=4))
    assert _offsets(world.fetch("a")) == [0, 1]
    assert (world.partition.is_stalled, world.partition.blocked_count) == (True, 4)
    assert world.partition.end_offset == 6
    world.acknowledge("a", 0, 1, ACCEPT)
    assert _offsets(world.fetch("a")) == [2, 3]
    world.acknowledge("a", 2, 3, ACCEPT)
    for first in (4, 6, 8):
        assert _offsets(world.fetch("a")) == [first, first + 1]
        world.acknowledge("a", first, first + 1, ACCEPT)
    assert world.stored.start_offset == 10


def test_a_key_goes_on_when_the_log_start_passes_its_record() -> None:
    world = _keyed()
    world.fetch("a")
    world.partition.log_start_moved(1, world.now_ms, world.now_ms)
    assert _offsets(world.fetch("b")) == [2]


def test_a_key_waits_for_a_held_record_that_compaction_has_removed() -> None:
    world = World(_BY_KEY, batches=4, batch_records=1)
    world.keys = {0: b"other", 1: b"key", 2: b"third", 3: b"key"}
    assert [_offsets(world.fetch("m1")) for _ in range(4)] == [[0], [1], [2], []]
    world.acknowledge("m1", 0, 0, RELEASE)
    # The newest record of the key is there, so the one in flight goes.
    world.spans = [span for span in world.spans if span.first_offset != 1]
    assert _offsets(world.fetch("m2")) == [0], "offset 1 is in flight, so offset 3 waits"
    world.acknowledge("m1", 1, 1, ACCEPT)
    assert _offsets(world.fetch("m2")) == [3]


def test_order_can_be_switched_on_while_records_are_held() -> None:
    world = _keyed(SharePolicy())
    world.fetch("a", 5, exact=True)
    world.partition.configure(_BY_KEY, world.now_ms)
    assert world.fetch("b") == []
    world.acknowledge("a", 0, 4, ACCEPT)
    assert _offsets(world.fetch("b")) == [5, 6]


def test_order_that_is_switched_on_holds_for_what_is_given_back_then() -> None:
    world = _keyed(SharePolicy())
    world.fetch("a", 1, exact=True)
    world.fetch("b", 4, exact=True)
    world.partition.configure(_BY_KEY, world.now_ms)
    # 2 and 4 have the key of 0, which a still holds; nobody has looked at keys yet.
    world.acknowledge("b", 1, 4, RELEASE)
    assert _offsets(world.fetch("c")) == [1]


def test_order_holds_for_a_record_that_a_transaction_gives_back_to_the_next_leader() -> None:
    world = _keyed(SharePolicy())
    world.fetch("a", 1, exact=True)
    world.fetch("b", 2, exact=True)
    accepted = [Acknowledgement(0, 0, (ACCEPT,)), Acknowledgement(2, 2, (ACCEPT,))]
    for producer_id, (member, given) in enumerate(zip("ab", accepted, strict=True)):
        pending = world.partition.accept_in_transaction(member, [given], producer_id, 0)
        world.stored.pend(producer_id, pending.batches)
    world.policy = _BY_KEY
    world.load()
    world.stored.end(1, commit=False)
    read = world.partition.begin_pending_read()
    world.partition.settle_pending(world.stored.read(), read, world.now_ms, world.now_ms)
    # 2 is free again, and 0 of its key is still the other transaction's.
    assert _offsets(world.fetch("c")) == [1]


def test_a_record_that_died_blocks_its_key_once_the_group_says_so_and_an_accepted_one_does_not() -> None:
    world = World(_BY_KEY, batches=1, batch_records=8)
    world.keys = {0: b"a", 1: b"b", 2: b"c", 3: b"c", 4: b"d", 5: b"e", 6: b"e", 7: b"b"}
    assert _offsets(world.fetch("m", 6)) == [0, 1, 2, 4, 5]
    world.acknowledge("m", 1, 2, REJECT, ACCEPT)
    world.acknowledge("m", 4, 5, ACCEPT, REJECT)
    world.partition.configure(replace(_BY_KEY, dead_blocks_key=True), world.now_ms)
    # 1 and 5 have died: b and e are blocked. 2 was accepted: c goes on.
    assert _offsets(world.fetch("n")) == [3]


def test_a_record_that_died_blocks_nothing_once_the_start_has_passed_it() -> None:
    world = World(_BY_KEY, batches=1, batch_records=2)
    world.keys = {0: b"a", 1: b"a"}
    world.fetch("m")
    rejected = [Acknowledgement(0, 0, (REJECT,))]
    world.partition.acknowledge("m", rejected, world.now_ms, world.now_ms)
    write = world.partition.next_write()
    assert write is not None
    assert write.start_offset == 1
    world.partition.configure(replace(_BY_KEY, dead_blocks_key=True), world.now_ms)
    assert world.fetch("n") == []
    world.stored.write(write.start_offset, write.delivery_complete_count, write.batches)
    world.partition.wrote(world.now_ms, world.now_ms)
    assert _offsets(world.fetch("n")) == [1]


def test_a_gap_does_not_block_its_key() -> None:
    world = World(SharePolicy(order_by_key=True, dead_blocks_key=True), batches=1, batch_records=3)
    world.keys = {0: b"a", 1: b"b", 2: b"b"}
    world.fetch("m")
    world.acknowledge("m", 1, 1, GAP)
    world.load()
    assert _offsets(world.fetch("n")) == [0, 2]


def test_records_that_died_take_one_run_and_accepted_ones_between_gaps_another() -> None:
    world = World(batches=40)
    world.spans = [span._replace(is_hidden=number % 2 == 1) for number, span in enumerate(world.spans)]
    world.fetch("a", 1, exact=True)
    while given := world.fetch("b"):
        for first, last, _ in given:
            world.acknowledge("b", first, last, ACCEPT if first < 200 else REJECT)
    # Held; accepted and hidden ones; then dead and hidden ones in turn.
    assert len(world.partition._runs) == 2 + 20


# --- delivery time


def test_a_record_is_not_handed_out_before_its_delivery_time() -> None:
    world = World(SharePolicy(deliver_at=True), batches=1)
    world.times = {4: world.now_ms + 1_000}
    assert _offsets(world.fetch("a")) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    world.load()
    world.pass_time(999)
    assert 4 not in _offsets(world.fetch("a"))
    world.pass_time(1)
    assert _offsets(world.fetch("a")) == [4]


# --- dead letters


def test_a_record_that_dies_is_finished_when_its_letter_is_written() -> None:
    world = World(SharePolicy(dead_letters=True), batches=1)
    world.fetch("a")
    given = Acknowledgement(0, 4, (REJECT,), reason="no such user")
    world.partition.acknowledge("a", [given], world.now_ms, world.now_ms)
    assert world.partition.take_letters() == []
    world.write()
    (letter,) = world.partition.take_letters()
    assert letter == (0, 4, 1, "no such user")
    assert world.stored.batches == [StateBatch(0, 4, DeliveryState.ARCHIVING, 1, reason="no such user")]
    world.load()
    assert world.partition.take_letters() == [letter]
    world.partition.letter_written(0, 4)
    world.write()
    assert world.stored.start_offset == 5


@pytest.mark.parametrize("by_key", [False, True])
def test_nothing_new_is_handed_out_while_too_many_dead_letters_are_due(by_key: bool) -> None:
    """Nobody can write them: the topic is missing. Each of them takes memory, and a place in the state."""
    policy = SharePolicy(dead_letters=True, max_waiting_records=10, order_by_key=by_key)
    world = World(policy, batches=20)
    while given := world.fetch("a", 1, exact=True):
        world.acknowledge("a", given[0].first_offset, given[0].last_offset, REJECT)
    assert world.partition.is_stalled
    assert world.partition.due_letter_count == 10
    for letter in world.partition.take_letters():
        world.partition.letter_written(letter.first_offset, letter.last_offset)
    world.write()
    assert world.fetch("a", 1, exact=True) == [Acquired(10, 10, 1)]


def test_people_see_who_holds_what() -> None:
    world = World(SharePolicy(retry_backoff_ms=1_000), batches=2)
    world.fetch("a", 10)
    world.acknowledge("a", 0, 4, RELEASE)
    locked = next(view for view in world.partition.records() if view.owner)
    assert (locked.first_offset, locked.last_offset, locked.owner) == (5, 9, "a")
    assert locked.until_ms == world.now_ms + 30_000
    delayed = next(view for view in world.partition.records() if view.wait is Wait.DELAYED)
    assert (delayed.delivery_count, delayed.until_ms) == (1, world.now_ms + 1_000)


def test_timers_do_not_keep_what_is_done() -> None:
    world = World(batches=2_000, batch_records=1)
    while given := world.fetch("a", 1, exact=True):
        world.acknowledge("a", given[0].first_offset, given[0].last_offset, ACCEPT)
    assert len(world.partition._locks) < 200


def test_a_large_hole_in_the_log_costs_nothing() -> None:
    """Compaction or aborted transactions leave holes of any size; retention passes them at once."""
    far = 10**12
    world = World(_BY_KEY, batches=0)
    partition, now_ms = world.partition, world.now_ms
    partition.see([SeenRecord(0, b"a", 0)], far, now_ms, now_ms, first_offset=0)
    partition.see([SeenRecord(far, b"a", 0)], far + 1, now_ms, now_ms, first_offset=far)
    world.spans = [Span(0, 0), Span(1, far - 1, is_hidden=True), Span(far, far)]
    assert world.fetch("m") == [Acquired(0, 0, 1)]
    assert world.fetch("n") == []
    partition.log_start_moved(far, now_ms, now_ms)
    assert world.fetch("n") == [Acquired(far, far, 1)]
