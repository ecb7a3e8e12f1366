"""What a cursor gets of batches: nothing that was aborted, and a reason for every offset that is missing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tidemill.cursors.filtering import RegionFilter
from tidemill.cursors.position import Reason
from tidemill.cursors.walking import SKIPPED_MAX, Skipped, Walked, walk
from tidemill.records.batch import parse_header
from tidemill.records.columns.read import read_columns
from tidemill.records.compression import ZSTD
from tidemill.records.control import Marker, build_markers
from tidemill.records.record import Record, build_batch, build_empty_batch, read_records
from tidemill.records.rewriting import rebuild_batch

TRANSACTIONAL = 0x10


def batch(base: int, keys: Sequence[str], *, producer: int = -1, codec: int = 0) -> bytes:
    records = [Record(key.encode(), key.encode(), 5, (("h", key.encode()),)) for key in keys]
    attributes = TRANSACTIONAL if producer >= 0 else 0
    return build_batch(
        records,
        base_offset=base,
        leader_epoch=3,
        codec=codec,
        attributes=attributes,
        producer_id=producer,
        producer_epoch=0,
        base_sequence=0 if producer >= 0 else -1,
    )


def marker(base: int, producer: int, *, commit: bool) -> bytes:
    end = producer, 0, Marker(commit, 0)
    data = bytearray(build_markers([end], timestamp_ms=5, base_offset=0, leader_epoch=3))
    data[:8] = base.to_bytes(8, "big")
    return bytes(data)


def compacted(data: bytes, left: Sequence[int]) -> bytes:
    """The batch with only the records at some positions."""
    columns = read_columns(data)
    body = b"".join(
        bytes(columns.body[int(columns.record_starts[index]) : int(columns.record_ends[index])])
        for index in left
    )
    return rebuild_batch(parse_header(data), body, len(left), 5, None)


def prefixed(prefix: bytes) -> RegionFilter:
    return RegionFilter(key_prefix=prefix, max_decompressed_bytes=1_000_000)


def offsets(walked: Walked) -> list[int]:
    return [record.offset for data in walked.batches for record in read_records(data)]


def test_batches_of_an_aborted_transaction_are_left_out_up_to_its_marker() -> None:
    data = b"".join(
        [
            batch(0, "ab", producer=7),
            batch(2, "c", producer=8),
            marker(3, 7, commit=False),
            batch(4, "d", producer=7),
            marker(5, 7, commit=True),
            marker(6, 8, commit=True),
        ]
    )
    walked = walk(memoryview(data), 0, [(0, 7)])
    assert offsets(walked) == [2, 4]
    assert walked.next_offset == 7
    assert walked.skipped == [
        Skipped(0, 1, Reason.ABORTED),
        Skipped(3, 3, Reason.CONTROL),
        Skipped(5, 6, Reason.CONTROL),
    ]


def test_without_a_filter_batches_are_passed_on_as_they_are() -> None:
    data = batch(0, "ab", codec=ZSTD) + batch(2, "cd")
    walked = walk(memoryview(data), 1, [])
    assert b"".join(walked.batches) == data
    assert (walked.record_count, walked.next_offset, walked.skipped) == (4, 4, [])


@pytest.mark.parametrize("codec", [0, ZSTD])
def test_a_filter_leaves_the_records_that_pass(codec: int) -> None:
    data = (
        batch(0, ["x1", "y1", "x2"], codec=codec)
        + batch(3, ["y2"], codec=codec)
        + batch(4, ["x3"], codec=codec)
    )
    walked = walk(memoryview(data), 0, [], prefixed(b"x"))
    assert offsets(walked) == [0, 2, 4]
    assert walked.next_offset == 5
    assert [read_columns(each).header.leader_epoch for each in walked.batches] == [3, 3]


def test_with_a_filter_what_compaction_removed_is_told_apart() -> None:
    whole = batch(0, ["x1", "y1", "x2", "x3"])
    data = compacted(whole, [0, 1, 3]) + build_empty_batch(4, 5, 3) + batch(8, ["x4"])
    walked = walk(memoryview(data), 0, [], prefixed(b"x"))
    assert offsets(walked) == [0, 3, 8]
    # 1 is filtered: it is neither delivered nor skipped.
    assert walked.skipped == [
        Skipped(2, 2, Reason.COMPACTION),
        Skipped(4, 7, Reason.COMPACTION),
    ]


def test_headers_and_keys_must_both_pass() -> None:
    data = batch(0, ["xa", "xb", "ya"])
    both = RegionFilter(key_prefix=b"x", headers=[("h", b"xb")], max_decompressed_bytes=1_000_000)
    assert offsets(walk(memoryview(data), 0, [], both)) == [1]


def test_a_batch_that_cannot_be_decoded_is_passed_on() -> None:
    data = bytearray(batch(0, ["x1", "y1"]))
    data[61] = 0x7F  # The length of its first record.
    walked = walk(memoryview(bytes(data)), 0, [], prefixed(b"x"))
    assert walked.batches == [bytes(data)]


def test_a_walk_ends_where_it_has_too_many_ranges() -> None:
    data = bytearray()
    aborted = []
    for number in range(2 * SKIPPED_MAX):
        base = number * 2
        data += batch(base, "a", producer=number) + batch(base + 1, "b")
        aborted.append((base, number))
    for filtered in (None, prefixed(b"b")):
        walked = walk(memoryview(bytes(data)), 0, aborted, filtered)
        assert walked.next_offset in (2 * SKIPPED_MAX - 1, 2 * SKIPPED_MAX)
        assert offsets(walked) == list(range(1, walked.next_offset, 2))
        assert (len(walked.skipped), walked.skipped_dropped) == (SKIPPED_MAX, 0)


def test_ranges_that_do_not_fit_are_counted() -> None:
    walked = Walked(0)
    for number in range(SKIPPED_MAX + 5):
        walked.skip(number * 2, number * 2, Reason.COMPACTION)
    assert (len(walked.skipped), walked.skipped_dropped) == (SKIPPED_MAX, 5)
