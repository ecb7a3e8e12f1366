"""Bytes between offsets, against the batches that a reader gets."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.compacting import batches_of, clean, end_transaction, flush, keyed, seal, write
from support.faulty_storage import FaultyStorage
from tidemill.config.topic import TopicConfig
from tidemill.log.log import PartitionLog
from tidemill.log.recovery import open_log
from tidemill.log.segments.index import IndexCache
from tidemill.log.segments.measuring import Measured, measure
from tidemill.log.storage import StorageFile
from tidemill.records.batch import BatchHeader

DIRECTORY = "t-0"
HOUR_MS = 3_600_000


def make_log(storage: FaultyStorage | None = None, **config: Any) -> PartitionLog:
    settings: dict[str, Any] = {"segment_bytes": 2_000, "index_interval_bytes": 200, **config}
    opened = TopicConfig(**settings)
    return open_log(storage or FaultyStorage(random.Random(0)), DIRECTORY, opened, IndexCache(max_bytes=1))[0]


def headers(log: PartitionLog) -> list[BatchHeader]:
    """The headers of all batches of the log, in order."""
    found = []
    for batch in log.read_batches(log.log_start_offset, log.durable_offset):
        found += [header for header, _ in batches_of(batch)]
    return found


def expected(log: PartitionLog, start: int, end: int, max_bytes: int | None) -> Measured:
    """What ``measure`` says, found by reading everything."""
    size, reached = 0, start
    for header in headers(log):
        if header.last_offset < start or header.base_offset >= end:
            continue
        if max_bytes is not None and size and size + header.size_bytes > max_bytes:
            return Measured(reached, size)
        size, reached = size + header.size_bytes, min(header.next_offset, end)
    return Measured(end, size)


@settings(max_examples=80, deadline=None)
@given(
    batches=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 300)), max_size=40),
    interval=st.sampled_from((1, 200, 4096)),
    choices=st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 500), st.none() | st.integers(0, 9_000)), min_size=5
    ),
    reopened=st.booleans(),
)
def test_ranges_have_the_bytes_of_their_batches(
    batches: list[tuple[int, int]],
    interval: int,
    choices: list[tuple[int, int, int | None]],
    reopened: bool,
) -> None:
    storage = FaultyStorage(random.Random(0))
    log = make_log(storage, index_interval_bytes=interval)
    for count, size in batches:
        write(log, *[keyed("k", "v" * size)] * count)
    flush(log)
    if reopened:
        log.close()
        log = make_log(storage, index_interval_bytes=interval)
    end_offset = log.end_offset
    for first, second, max_bytes in choices:
        start, end = sorted((first % (end_offset + 1), second % (end_offset + 1)))
        assert measure(log, start, end, max_bytes) == expected(log, start, end, max_bytes)


def test_a_walk_by_bytes_comes_to_the_end_of_the_log() -> None:
    log = make_log()
    for number in range(60):
        write(log, *[keyed("k", "v" * (number * 7))] * 3)
    flush(log)
    assert len(log.segments) > 3
    total = measure(log, 0, log.end_offset, None).size_bytes
    assert total == log.size_bytes
    for max_bytes in (0, 1, 1_000, 5_000):
        offset = walked = 0
        while offset < log.end_offset:
            part = measure(log, offset, log.end_offset, max_bytes)
            assert part.end_offset > offset
            offset, walked = part.end_offset, walked + part.size_bytes
        assert walked == total, "ends are boundaries of batches, so nothing counts twice"


@pytest.mark.parametrize("max_bytes", [None, 0, 300, 1_000])
def test_compacted_logs_with_markers_are_measured_as_they_are(max_bytes: int | None) -> None:
    log = make_log(cleanup_policy=frozenset({"compact"}), delete_retention_ms=HOUR_MS)
    for number in range(30):
        producer = (7, 0, 2 * number)
        write(
            log,
            keyed("a", "x" * 50),
            keyed(f"b{number % 3}", "y" * 50),
            producer=producer,
            transactional=True,
        )
        end_transaction(log, 7, commit=number % 4 != 0)
        write(log, keyed("c", f"{number}"))
    seal(log)
    before = log.size_bytes
    clean(log, 1)
    assert log.size_bytes < before * 0.7
    write(log, keyed("d", "open"), producer=(7, 0, 60), transactional=True)
    flush(log)
    assert log.last_stable_offset(log.durable_offset) < log.end_offset
    for start in range(log.end_offset + 1):
        for end in range(start, log.end_offset + 1):
            assert measure(log, start, end, max_bytes) == expected(log, start, end, max_bytes)


def test_no_data_is_read_far_from_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FaultyStorage(random.Random(0))
    log = make_log(storage, segment_bytes=1_000_000, index_interval_bytes=4096)
    for _ in range(2_000):
        write(log, keyed("k", "v" * 1_000))
    flush(log)
    bytes_read = 0
    file_type = type(log.segments[0].file)
    real = file_type.read

    def counting(self: StorageFile, position: int, size: int) -> bytes:
        nonlocal bytes_read
        data = real(self, position, size)
        bytes_read += len(data)
        return data

    monkeypatch.setattr(file_type, "read", counting)
    assert measure(log, 500, 1_700, None).size_bytes > 1_000_000
    assert bytes_read < 50_000
    assert measure(log, 100, 1_900, 700_000).end_offset > 500
    assert bytes_read < 400_000
