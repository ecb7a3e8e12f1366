"""When the position of an ordered worker is stored: by batch, by count, by time."""

from __future__ import annotations

import pytest

from tidemill.client.workers.ordered import Cadence, Ordered


def test_by_default_a_position_is_stored_after_each_batch() -> None:
    cadence = Cadence(Ordered(batch_size=64), 0.0)
    pending = [cadence.is_pending]
    assert not cadence.is_due(1_000.0)
    cadence.done(1)
    pending.append(cadence.is_pending)
    assert cadence.is_due(0.0)
    assert cadence.seconds_left(0.0) is None
    cadence.stored(0.0)
    pending.append(cadence.is_pending)
    assert not cadence.is_due(0.0)
    assert pending == [False, True, False]


def test_side_by_side_so_many_records_are_a_batch() -> None:
    cadence = Cadence(Ordered(batch_size=3), 0.0, side_by_side=True)
    cadence.done(2)
    assert not cadence.is_due(1_000.0)
    cadence.done(1)
    assert cadence.is_due(1_000.0)
    # Options come before the size of a batch.
    by_count = Cadence(Ordered(batch_size=3, every_records=5), 0.0, side_by_side=True)
    by_count.done(4)
    assert not by_count.is_due(0.0)
    by_time = Cadence(Ordered(batch_size=3, every_seconds=5), 0.0, side_by_side=True)
    by_time.done(4)
    assert not by_time.is_due(4.9)


def test_by_count_records_since_the_last_time_count() -> None:
    cadence = Cadence(Ordered(every_records=10), 0.0)
    cadence.done(9)
    assert not cadence.is_due(1_000.0)
    assert cadence.seconds_left(1_000.0) is None
    cadence.done(4)
    assert cadence.is_due(1_000.0)
    cadence.stored(1_000.0)
    cadence.done(9)
    assert not cadence.is_due(2_000.0)


def test_by_time_the_time_since_the_last_time_counts() -> None:
    cadence = Cadence(Ordered(every_seconds=10), 100.0)
    assert cadence.seconds_left(105.0) is None, "nothing is to be stored"
    cadence.done(1_000_000)
    assert not cadence.is_due(109.9)
    assert cadence.seconds_left(104.0) == 6.0
    assert cadence.is_due(110.0)
    assert cadence.seconds_left(150.0) == 0.0
    cadence.stored(110.0)
    assert not cadence.is_due(130.0)
    cadence.done(1)
    assert not cadence.is_due(119.0)
    assert cadence.is_due(120.0)


def test_with_both_whichever_comes_first_counts() -> None:
    cadence = Cadence(Ordered(every_records=10, every_seconds=10), 0.0)
    cadence.done(10)
    assert cadence.is_due(1.0)
    cadence.stored(1.0)
    cadence.done(1)
    assert not cadence.is_due(10.9)
    assert cadence.is_due(11.0)


@pytest.mark.parametrize(
    "options",
    [Ordered(), Ordered(every_records=10), Ordered(every_seconds=60)],
    ids=["batch", "count", "time"],
)
@pytest.mark.parametrize("side_by_side", [False, True])
def test_when_nothing_comes_what_is_done_is_stored(options: Ordered, side_by_side: bool) -> None:
    cadence = Cadence(options, 0.0, side_by_side=side_by_side)
    assert not cadence.is_due(1.0, is_idle=True)
    cadence.done(1)
    assert cadence.is_due(1.0, is_idle=True)
