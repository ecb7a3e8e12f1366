"""The numbered records of a load test."""

from __future__ import annotations

import pytest

from tidemill.cli.load.records import VALUE_BYTES_MIN, BatchTemplate, IntegrityCheck, percentile
from tidemill.records.batch import check_batch
from tidemill.records.record import read_records


def values(template: BatchTemplate, first: int, codec: int = 0) -> list[bytes]:
    batch = template.fill(first, 1_000, (7, 0, first), codec)
    header = check_batch(batch)
    assert (header.producer_id, header.base_sequence, header.base_timestamp) == (7, first, 1_000)
    return [record.value or b"" for record in read_records(batch)]


@pytest.mark.parametrize("codec", range(5))
def test_filled_batches_are_sound_and_count_up(codec: int) -> None:
    template, check = BatchTemplate(10, 100, run=5), IntegrityCheck(run=5)
    for first in (0, 10, 20):
        for value in values(template, first, codec):
            assert len(value) == 100
            check.note(0, value)
    check.finish({0: 30})
    assert (check.found, check.is_whole) == (30, True)


def test_a_missing_record_is_found() -> None:
    check = IntegrityCheck(run=5)
    for value in values(BatchTemplate(4, VALUE_BYTES_MIN, run=5), 0)[:2]:
        check.note(0, value)
    check.finish({0: 4})
    assert (check.skipped, check.is_whole) == (2, False)


def test_a_repeated_record_is_found() -> None:
    check = IntegrityCheck(run=5)
    first, second = values(BatchTemplate(2, VALUE_BYTES_MIN, run=5), 0)
    for value in (first, second, first):
        check.note(0, value)
    check.finish({0: 2})
    assert (check.repeated, check.is_whole) == (1, False)


def test_records_of_other_runs_and_writers_do_not_count() -> None:
    check = IntegrityCheck(run=5)
    for value in (*values(BatchTemplate(2, 50, run=6), 0), b"", None, b"x" * 100):
        check.note(0, value)
    check.finish({})
    assert (check.foreign, check.found, check.is_whole) == (5, 0, True)


def test_percentile_is_the_nearest_rank() -> None:
    numbers = [float(number) for number in range(1, 101)]
    assert [percentile(numbers, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
