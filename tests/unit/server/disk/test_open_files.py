"""The limit of open files, with a count and a clock that the test sets."""

from __future__ import annotations

import pytest

from tidemill.errors import TooManyFiles
from tidemill.server.disk.open_files import OpenFiles, count_open_files


class Process:
    """What the process has open, how often it was counted, and the time."""

    open = 0
    counted = 0
    now = 100.0

    def count(self) -> int:
        self.counted += 1
        return self.open

    def clock(self) -> float:
        return self.now


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def files(process: Process) -> OpenFiles:
    return OpenFiles(1_000, process.count, process.clock)


def test_partitions_are_opened_while_there_are_descriptors(files: OpenFiles, process: Process) -> None:
    process.open = 840
    files.check(3)
    assert files.problem() is None


def test_with_few_left_only_internal_partitions_are_opened(files: OpenFiles, process: Process) -> None:
    process.open = 851
    with pytest.raises(TooManyFiles, match="851 of 1000 files are open"):
        files.check(3)
    files.check(3, internal=True)
    assert "ulimit" in (files.problem() or "")


def test_it_goes_on_when_files_are_closed(files: OpenFiles, process: Process) -> None:
    process.open = 900
    with pytest.raises(TooManyFiles):
        files.check(3)
    process.open, process.now = 500, process.now + 2
    assert files.problem() is None
    files.check(3)


def test_openings_between_two_counts_are_estimated(files: OpenFiles, process: Process) -> None:
    process.open = 600
    for _ in range(84):
        files.check(3)
    with pytest.raises(TooManyFiles):
        files.check(3)
    assert process.counted == 1, "counting takes long, so it is not done each time"


def test_what_was_asked_for_right_before_a_count_is_added_to_it(files: OpenFiles, process: Process) -> None:
    process.open = 600
    for _ in range(84):
        files.check(3)
    process.now += 1.5
    with pytest.raises(TooManyFiles):
        files.check(3)
    process.now += 1.5
    files.check(3)


def test_the_open_files_of_this_process_are_counted() -> None:
    before = count_open_files()
    with open(__file__, "rb"):
        assert count_open_files() == before + 1
