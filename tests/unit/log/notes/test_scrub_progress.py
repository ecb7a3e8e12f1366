"""Where a pass of the scrubber goes on, and when the next one begins."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.log.notes.scrub_progress import ScrubProgress, Suspect

A, B, C = ((UUID(int=number), 0) for number in (1, 2, 3))
DAY = 24 * 60 * 60 * 1000
KEYS = st.tuples(st.uuids(), st.integers(0, 2**31 - 1))


def test_a_pass_reads_the_partitions_in_order_and_the_next_waits_for_the_interval() -> None:
    progress = ScrubProgress().seen(1_000)
    assert progress.due_in_ms(DAY, 1_000) == DAY, "a new node begins after one interval"
    begun = progress.resumed(DAY).at(A)
    assert begun.due_in_ms(DAY, DAY) == 0, "in the middle of a pass"
    assert begun.next_partition([A, B]) == 0
    assert begun.read_to(77).resumed(DAY + 3) == begun.read_to(77)
    assert begun.read_to(77).at(A).offset == 77
    assert begun.read_to(77).at(B).offset == 0
    ended = begun.at(B).ended(DAY + 5)
    assert (ended.pass_began_ms, ended.pass_ended_ms, ended.partition) == (DAY, DAY + 5, None)
    assert ended.due_in_ms(DAY, DAY + 10) == DAY - 10
    assert ended.due_in_ms(DAY, 3 * DAY) == 0


@pytest.mark.parametrize(("there", "place"), [([A, B, C], 1), ([A, C], 1), ([A], 1), ([C], 0), ([], 0)])
def test_a_pass_goes_on_with_the_first_partition_that_is_not_before_its_place(
    there: list[tuple[UUID, int]], place: int
) -> None:
    assert ScrubProgress(1, 0, B, 5).next_partition(there) == place


def test_after_the_clock_went_back_the_interval_counts_from_when_that_is_seen() -> None:
    progress = ScrubProgress(pass_began_ms=100 * DAY, pass_ended_ms=100 * DAY).seen(7 * DAY)
    assert progress.due_in_ms(DAY, 7 * DAY) == DAY
    assert progress.seen(8 * DAY).due_in_ms(DAY, 8 * DAY) == 0


@given(
    st.integers(0, 2**60),
    st.integers(0, 2**60),
    st.none() | KEYS,
    st.integers(0, 2**62),
    st.lists(st.builds(Suspect, st.uuids(), st.integers(0, 9), st.integers(0, 2**62))),
)
def test_progress_survives_being_written(
    began: int, ended: int, partition: tuple[UUID, int] | None, offset: int, suspects: list[Suspect]
) -> None:
    progress = ScrubProgress(began, ended, partition, offset, tuple(suspects))
    assert ScrubProgress.from_bytes(progress.to_bytes()) == progress
