"""The machine of a cursor: what is handed out, committed, taken back and passed over, by exact counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import pytest

from tidemill.cursors.machine import Arrival, CursorMachine, Step
from tidemill.cursors.position import Gap, Position, Reason


class Item(NamedTuple):
    """Something at an offset."""

    offset: int


def arrival(start: int, offsets: list[int], end: int, *, epoch: int = 1, partition: int = 0) -> Arrival[Item]:
    return Arrival(partition, start, [Item(each) for each in offsets], end, epoch)


def machine(*, finished: tuple[int, ...] = ()) -> CursorMachine[Item]:
    return CursorMachine({0: Position(0)}, {0: finished})


def offsets(items: list[Item]) -> list[int]:
    return [each.offset for each in items]


def test_nothing_delivered_differs_from_offset_0_delivered() -> None:
    cursor = machine()
    assert cursor.delivered == {0: Position(0, -1, started=False)}
    cursor.arrived([arrival(0, [0], 1)])
    assert cursor.delivered == {0: Position(0, -1, started=False)}
    assert offsets(cursor.take(1)) == [0]
    assert cursor.delivered == {0: Position(1, 1, started=True)}


def test_a_limit_is_kept_and_order_too() -> None:
    cursor = machine()
    cursor.arrived([arrival(0, [0, 1, 2], 3), arrival(3, [3, 4], 5)])
    assert offsets(cursor.take(2)) == [0, 1]
    assert offsets(cursor.take(10)) == [2, 3, 4]
    assert cursor.take(1) == []


def test_a_commit_is_planned_from_the_last_one_and_counts_once_confirmed() -> None:
    cursor = machine()
    cursor.arrived([arrival(0, [0, 1, 2], 3)])
    cursor.take(2)
    steps = cursor.plan_commit()
    assert steps == {0: Step(Position(0), Position(2, 1, True))}
    assert cursor.committed == {0: Position(0)}
    cursor.confirm(steps)
    assert cursor.committed == {0: Position(2, 1, True)}
    assert cursor.plan_commit() == {}
    assert cursor.delivered == cursor.committed


def test_a_rollback_delivers_only_what_was_not_committed_again() -> None:
    cursor = machine()
    cursor.arrived([arrival(0, [0, 1, 2, 3], 4)])
    cursor.take(2)
    cursor.confirm(cursor.plan_commit())
    assert offsets(cursor.take(2)) == [2, 3]
    cursor.rollback()
    assert cursor.fetch_position(0) == Position(2, 1)
    cursor.arrived([arrival(2, [2, 3], 4)])
    assert offsets(cursor.take(9)) == [2, 3]


def test_a_fetch_of_before_a_rollback_is_dropped() -> None:
    cursor = machine()
    cursor.arrived([arrival(0, [0, 1], 2)])
    cursor.take(2)
    cursor.rollback()
    cursor.arrived([arrival(2, [2], 3)])
    assert cursor.take(9) == []
    assert cursor.fetch_position(0).offset == 0


def test_what_was_passed_over_is_committed_once_nothing_waits_in_front() -> None:
    cursor = machine()
    cursor.arrived([arrival(0, [5], 100)])
    assert cursor.delivered[0].offset == 0
    cursor.take(1)
    assert cursor.delivered[0] == Position(100, 1, True)
    cursor.arrived([arrival(100, [], 500)])
    assert cursor.delivered[0] == Position(500, 1, True)


def test_passing_over_everything_starts_nothing() -> None:
    cursor = machine()
    cursor.arrived([arrival(0, [], 500)])
    assert cursor.plan_commit() == {0: Step(Position(0), Position(500, 1, started=False))}


def test_a_seek_is_committed_from_the_stored_position() -> None:
    cursor = machine()
    cursor.arrived([arrival(0, [0, 1], 2)])
    cursor.take(1)
    cursor.confirm(cursor.plan_commit())
    cursor.seek(0, Position(40))
    assert cursor.take(9) == []
    assert cursor.plan_commit() == {0: Step(Position(1, 1, True), Position(40), sought=True)}
    assert cursor.waiting_records == 0
    cursor.confirm(cursor.plan_commit())
    assert cursor.plan_commit() == {}


def test_a_seek_delivers_what_is_finished_too_and_a_rollback_does_not() -> None:
    cursor = machine(finished=(1, 3))
    cursor.seek(0, Position(0))
    step = cursor.plan_commit()[0]
    assert (step.finished, step.finished_before, step.sought) == ((), (1, 3), True)
    cursor.arrived([arrival(0, [0, 1, 2, 3, 4], 5)])
    assert offsets(cursor.take(9)) == [0, 1, 2, 3, 4]
    # The store still has what it had.
    cursor.rollback()
    cursor.arrived([arrival(0, [0, 1, 2, 3, 4], 5)])
    assert offsets(cursor.take(9)) == [0, 2, 4]


def test_a_prefix_can_be_committed_after_a_seek_below_the_committed_position() -> None:
    cursor = CursorMachine[Item]({0: Position(10, 1, True), 1: Position(5, 1, True)})
    cursor.seek(0, Position(2, 1, True))
    assert cursor.plan_commit({1: 5}) == {}
    cursor.arrived([arrival(2, [2, 3, 4], 5)])
    cursor.take(3)
    step = cursor.plan_commit({0: 4}, {0: [4]})[0]
    assert (step.before.offset, step.after.offset, step.finished) == (10, 4, (4,))
    with pytest.raises(ValueError, match="not between the sought 2 and the delivered 5"):
        cursor.plan_commit({0: 1})


def test_a_prefix_can_be_committed_with_its_leader_epoch() -> None:
    cursor = machine()
    cursor.arrived([arrival(0, [0, 1, 2], 3, epoch=1), arrival(3, [3, 4, 5], 6, epoch=2)])
    cursor.take(6)
    assert cursor.plan_commit({0: 2})[0].after == Position(2, 1, True)
    assert cursor.plan_commit({0: 3})[0].after == Position(3, 1, True)
    assert cursor.plan_commit({0: 4})[0].after == Position(4, 2, True)
    with pytest.raises(ValueError, match="not between"):
        cursor.plan_commit({0: 7})
    cursor.confirm(cursor.plan_commit({0: 2}, {0: [3, 5]}))
    assert cursor.plan_commit({0: 4})[0] == Step(
        Position(2, 1, True), Position(4, 2, True), (5,), finished_before=(3, 5)
    )


def test_a_commit_of_a_partition_that_is_not_read_is_refused() -> None:
    cursor = machine()
    cursor.arrived([arrival(0, [0, 1], 2)])
    cursor.take(2)
    with pytest.raises(ValueError, match="partition 7 is not read here"):
        cursor.plan_commit({0: 1, 7: 1})
    with pytest.raises(ValueError, match="partition 7 is not read here"):
        cursor.plan_commit({0: 1}, {7: [1]})


def test_finished_offsets_are_not_handed_out_again() -> None:
    cursor = machine(finished=(1, 3))
    cursor.arrived([arrival(0, [0, 1, 2, 3, 4], 5)])
    assert offsets(cursor.take(9)) == [0, 2, 4]


def test_finished_offsets_stay_within_1024_of_the_position() -> None:
    cursor = machine()
    cursor.arrived([arrival(0, list(range(1100)), 1100)])
    cursor.take(1100)
    cursor.plan_commit({0: 1}, {0: [1024]})
    with pytest.raises(ValueError, match="1024 are the most"):
        cursor.plan_commit({0: 1}, {0: [1025]})


def test_gaps_are_told_once_when_they_are_passed() -> None:
    cursor = machine()
    gaps = [Gap(0, 1, 4, Reason.ABORTED), Gap(0, 5, 5, Reason.CONTROL), Gap(0, 7, 9, Reason.FILTERED)]
    cursor.arrived([arrival(0, [0, 6], 10)._replace(gaps=gaps)])
    cursor.take(1)
    assert cursor.gaps().ranges == ()
    cursor.take(1)
    assert cursor.gaps() == (tuple(gaps), 0)
    cursor.rollback()
    cursor.arrived([arrival(0, [0, 6], 10)._replace(gaps=gaps)])
    cursor.take(2)
    assert cursor.gaps() == ((), 0)


def test_the_buffer_of_gaps_says_how_many_it_dropped() -> None:
    cursor: CursorMachine[Item] = CursorMachine({0: Position(0)}, gaps_kept=2)
    for start in range(0, 10, 2):
        gap = Gap(0, start, start, Reason.FILTERED)
        cursor.arrived([arrival(start, [start + 1], start + 2)._replace(gaps=[gap])])
    cursor.take(9)
    told = cursor.gaps()
    assert [gap.first_offset for gap in told.ranges] == [6, 8]
    assert told.dropped == 3
    assert cursor.gaps() == ((), 0)


class Counted(Sequence[Gap]):
    """Gaps that count how often somebody looks at one."""

    def __init__(self, gaps: list[Gap]) -> None:
        self._gaps = gaps
        self.looks = 0

    def __len__(self) -> int:
        return len(self._gaps)

    @overload
    def __getitem__(self, index: int) -> Gap: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Gap]: ...
    def __getitem__(self, index: int | slice) -> Gap | Sequence[Gap]:
        found = self._gaps[index]
        self.looks += len(found) if isinstance(index, slice) else 1
        return found


def test_each_gap_is_looked_at_a_few_times_however_many_there_are() -> None:
    count = 500
    cursor = machine()
    gaps = Counted([Gap(0, 2 * number, 2 * number, Reason.FILTERED) for number in range(count)])
    records = [2 * number + 1 for number in range(count)]
    cursor.arrived([arrival(0, records, 2 * count)._replace(gaps=gaps)])
    for _ in records:
        cursor.take(1)
    assert len(cursor.gaps().ranges) == count
    assert gaps.looks <= 4 * count


def test_gaps_that_nobody_has_told_are_counted_once() -> None:
    cursor = machine()
    gap = Gap(0, 0, 0, Reason.COMPACTION)
    for _ in range(2):
        cursor.arrived([arrival(0, [1, 4], 9)._replace(gaps=[gap], gaps_dropped=2)])
        cursor.take(9)
        cursor.rollback()
    assert cursor.gaps() == ((gap,), 2)
    assert cursor.gaps() == ((), 0)


def test_neighbouring_gaps_of_one_reason_are_one() -> None:
    cursor = machine()
    for start in (0, 5):
        gap = Gap(0, start, start + 4, Reason.FILTERED)
        cursor.arrived([arrival(start, [], start + 5)._replace(gaps=[gap])])
    assert cursor.gaps().ranges == (Gap(0, 0, 9, Reason.FILTERED),)


def test_the_store_can_send_the_cursor_elsewhere() -> None:
    cursor = machine()
    cursor.arrived([arrival(0, [0, 1, 2], 3)])
    cursor.take(3)
    cursor.confirm(cursor.plan_commit())
    cursor.rollback({0: Position(1, 1, True)})
    assert cursor.committed == {0: Position(1, 1, True)}
    assert cursor.fetch_position(0).offset == 1
