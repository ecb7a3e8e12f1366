"""Lanes against a model: order of each key, no more than so many side by side, and what counts as done."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidemill.cursors.lanes import Done, Lanes

_AHEAD_MAX = 8


class _Record(NamedTuple):
    partition: int
    offset: int
    key: bytes | None


def _records(*keys: str | None) -> list[_Record]:
    return [_Record(0, offset, None if key is None else key.encode()) for offset, key in enumerate(keys)]


def test_different_keys_go_side_by_side_and_one_key_in_order() -> None:
    lanes: Lanes[_Record] = Lanes(4)
    a1, b1, a2, b2 = _records("a", "b", "a", "b")
    lanes.add([a1, b1, a2, b2])
    assert (lanes.begin(), lanes.begin(), lanes.begin()) == (a1, b1, None)
    lanes.done(b1)
    assert lanes.begin() == b2
    assert lanes.progress() == {0: Done(0, (1,))}
    lanes.done(a1)
    assert lanes.progress() == {0: Done(2, ())}


def test_records_without_a_key_wait_for_nobody() -> None:
    lanes: Lanes[_Record] = Lanes(3)
    lanes.add(_records(None, None, None, None))
    assert [
        each and each.offset for each in (lanes.begin(), lanes.begin(), lanes.begin(), lanes.begin())
    ] == [
        0,
        1,
        2,
        None,
    ]


def test_a_record_that_is_given_back_is_begun_again_before_later_ones_of_its_key() -> None:
    lanes: Lanes[_Record] = Lanes(4)
    first, second = _records("a", "a")
    lanes.add([first, second])
    assert lanes.begin() == first
    lanes.give_back(first)
    assert lanes.begin() == first
    assert lanes.begin() is None


def test_nothing_is_begun_too_far_ahead_of_a_slow_record() -> None:
    lanes: Lanes[_Record] = Lanes(100, ahead_max=3)
    slow, *others = _records("slow", "a", "b", "c")
    lanes.add([slow, *others])
    assert [lanes.begin() for _ in range(4)] == [slow, others[0], others[1], None]
    lanes.done(slow)
    assert lanes.begin() == others[2]


def test_the_position_goes_behind_offsets_that_the_region_does_not_have() -> None:
    lanes: Lanes[_Record] = Lanes(2)
    first, second = _Record(0, 3, b"a"), _Record(0, 9, b"b")
    lanes.add([first, second])
    lanes.begin()
    lanes.begin()
    lanes.done(first)
    assert lanes.progress() == {0: Done(9, ())}
    lanes.done(second)
    assert lanes.progress() == {0: Done(10, ())}
    assert lanes.is_idle


class _LanesModel(RuleBasedStateMachine):
    @initialize(concurrency=st.integers(1, 5))
    def begin_anew(self, concurrency: int) -> None:
        self.lanes: Lanes[_Record] = Lanes(concurrency, _AHEAD_MAX)
        self.added: list[_Record] = []
        self.ends = {0: 0, 1: 0}
        self.under_way: list[_Record] = []
        self.finished: set[_Record] = set()

    @rule(
        partition=st.sampled_from((0, 1)),
        gap=st.integers(0, 3),
        keys=st.lists(st.sampled_from((None, b"a", b"b", b"c")), max_size=6),
    )
    def add(self, partition: int, gap: int, keys: list[bytes | None]) -> None:
        start = self.ends[partition] + gap
        records = [_Record(partition, start + number, key) for number, key in enumerate(keys)]
        self.lanes.add(records)
        self.added += records
        if records:
            self.ends[partition] = records[-1].offset + 1

    @rule()
    def begin(self) -> None:
        record = self.lanes.begin()
        unfinished = [each for each in self.added if each not in self.finished]
        may = [
            each
            for each in unfinished
            if each not in self.under_way
            and each.offset - min(other.offset for other in unfinished if other.partition == each.partition)
            < _AHEAD_MAX
            and not any(
                other.partition == each.partition and other.key == each.key and other.offset < each.offset
                for other in unfinished
                if each.key is not None
            )
        ]
        if len(self.under_way) >= self.lanes.concurrency or not may:
            assert record is None
        else:
            assert record in may
            self.under_way.append(record)

    @precondition(lambda self: self.under_way)
    @rule(choice=st.integers(0, 10), is_done=st.booleans())
    def end(self, choice: int, is_done: bool) -> None:
        record = self.under_way.pop(choice % len(self.under_way))
        if is_done:
            self.lanes.done(record)
            self.finished.add(record)
        else:
            self.lanes.give_back(record)

    @invariant()
    def what_is_done_is_told(self) -> None:
        for partition, done in self.lanes.progress().items():
            records = [each for each in self.added if each.partition == partition]
            assert all(each in self.finished for each in records if each.offset < done.upto)
            above = {each.offset for each in records if each in self.finished and each.offset >= done.upto}
            assert set(done.finished) == above
            assert done.upto not in above
            assert all(offset - done.upto < _AHEAD_MAX for offset in above)
        assert self.lanes.under_way == len(self.under_way)
        assert self.lanes.waiting == len(self.added) - len(self.finished) - len(self.under_way)


TestLanesModel = _LanesModel.TestCase
