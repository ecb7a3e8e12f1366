"""``log verify`` looks at records, too: a right checksum does not make them readable."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c

from support.batches import make_batch
from support.faulty_storage import FaultyStorage
from tidemill.config.topic import TopicConfig
from tidemill.log.log import PartitionLog
from tidemill.log.offline.inspect import ProblemKind, verify
from tidemill.log.offline.repair import plan_repair
from tidemill.log.recovery import open_log
from tidemill.log.segments.index import IndexCache
from tidemill.records.batch import HEADER_BYTES, parse_header, restamp_append_time, restamp_max_timestamp
from tidemill.records.compression import GZIP
from tidemill.records.record import Record, build_batch, build_empty_batch
from tidemill.records.rewriting import rebuild_batch

SOUND = make_batch("a", "b")[0][61:]


def forged(body: bytes, count: int, attributes: int = 0) -> bytes:
    """A batch with a right checksum, whatever its records are."""
    checked = struct.pack(">hiqqqhii", attributes, count - 1, 1, 1, -1, -1, -1, count) + body
    return struct.pack(">qiibI", 0, len(checked) + 9, -1, 2, crc32c(checked)) + checked


def opened() -> tuple[FaultyStorage, PartitionLog]:
    storage = FaultyStorage()
    log, _ = open_log(storage, "p", TopicConfig(), IndexCache(), now_ms=0)
    return storage, log


def append(log: PartitionLog, data: bytes) -> None:
    log.append(data, parse_header(data), 0, 10)


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("a count of 2**31 - 1", forged(SOUND, 2**31 - 1)),
        ("a count that is too high", forged(SOUND, 3)),
        ("garbage under gzip", forged(b"garbage", 1, GZIP)),
        ("a negative length", forged(b"\x0d" + SOUND[1:], 2)),
    ],
)
def test_a_batch_whose_records_cannot_be_read_is_found_with_file_and_position(what: str, data: bytes) -> None:
    storage, log = opened()
    good = make_batch("one")[0]
    append(log, good)
    append(log, data)
    log.close()
    report = verify(storage, "p")
    (problem,) = report.problems
    assert problem.kind is ProblemKind.RECORDS
    assert problem.path == "p/00000000000000000000.log"
    assert problem.position == len(good)
    assert problem.first_offset == 1
    assert report.records == 1, "a count that lies is not believed"


@pytest.mark.parametrize("count", [2, 300])
def test_a_header_that_hides_the_largest_timestamp_is_found(count: int) -> None:
    storage, log = opened()
    append(log, build_batch([Record(b"k", b"v", 1_000)]))
    append(log, bytes(restamp_max_timestamp(build_batch([Record(b"k", b"v", 1_000)] * count), 5)))
    log.close()
    report = verify(storage, "p")
    (problem,) = report.problems
    assert problem.kind is ProblemKind.TIMESTAMP
    assert (problem.first_offset, problem.next_offset) == (1, count + 1)
    assert "timestamps up to 1000, but their header says 5" in problem.what
    assert report.records == count + 1, "its records can be read"
    assert plan_repair(storage, "p").steps == []


def test_the_brokers_time_and_gaps_of_compaction_are_in_order() -> None:
    storage, log = opened()
    append(log, bytes(restamp_append_time(build_batch([Record(b"k", b"v", 1_000)] * 3), 5_000)))
    whole = build_batch([Record(b"k", b"v", 1_000 + number) for number in range(9)])
    record_bytes = (len(whole) - HEADER_BYTES) // 9
    third = whole[HEADER_BYTES + 2 * record_bytes :][:record_bytes]
    append(log, rebuild_batch(parse_header(whole), third, 1, 1_002, None))
    log.close()
    assert verify(storage, "p").problems == []


def test_a_batch_without_records_is_in_order() -> None:
    storage, log = opened()
    append(log, build_empty_batch(0, 4, 0))
    append(log, make_batch("x", "y")[0])
    log.close()
    report = verify(storage, "p")
    assert report.ok
    assert report.records == 2
