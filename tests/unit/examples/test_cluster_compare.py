"""The cluster example: everything that can be wrong with a stream is found and told."""

from __future__ import annotations

import pytest
from stream import compare


def test_a_stream_as_it_must_be_has_no_problems() -> None:
    assert list(compare([3, 2], [[0, 1, 2], [1, 0]], [[0, 1, 2], [0, 1]])) == []


def test_a_record_that_was_not_acknowledged_may_be_there_or_not() -> None:
    assert list(compare([3], [[0]], [[0, 1]])) == []


@pytest.mark.parametrize(
    ("read", "problem"),
    [
        ([0, 2], "partition 0: 1 records are acknowledged and missing: 1"),
        ([0, 1, 1, 2], "partition 0: 1 records are there more than once: 1"),
        ([0, 2, 1], "partition 0: 1 records are behind a later one: 1"),
        ([0, 1, 2, 3], "partition 0: 1 records are there and never sent: 3"),
    ],
)
def test_what_is_wrong_is_told(read: list[int], problem: str) -> None:
    assert list(compare([3], [[0, 1, 2]], [read])) == [problem]


def test_of_many_only_the_first_are_shown() -> None:
    (problem,) = compare([10], [list(range(10))], [[]])
    assert problem == "partition 0: 10 records are acknowledged and missing: 0, 1, 2, 3, 4 ..."
