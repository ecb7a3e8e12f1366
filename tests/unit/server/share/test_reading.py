"""Batches as share partitions see them."""

from __future__ import annotations

from support.batches import plain_batch
from tidemill.log.producer_state.transactions import AbortedTransaction
from tidemill.records.control import Marker, build_markers
from tidemill.records.record import Record, build_batch, build_empty_batch
from tidemill.server.share.reading import DELIVER_AT_HEADER, chosen, look_at, walk
from tidemill.share.partition.values import Acquired, SeenRecord, Span

_TRANSACTIONAL = 0x10


def _batch(base: int, count: int, producer_id: int = -1) -> bytes:
    transactional = producer_id >= 0
    return build_batch(
        [Record(b"k%d" % each, b"v") for each in range(base, base + count)],
        base_offset=base,
        producer_id=producer_id,
        producer_epoch=0 if transactional else -1,
        base_sequence=0 if transactional else -1,
        attributes=_TRANSACTIONAL if transactional else 0,
    )


def test_markers_empty_batches_and_aborted_ones_are_hidden() -> None:
    end = 7, 0, Marker(commit=False, coordinator_epoch=0)
    marker = build_markers([end], timestamp_ms=1, base_offset=0, leader_epoch=-1)
    data = b"".join([_batch(0, 3), _batch(3, 2, 7), _batch(5, 1, 8), build_empty_batch(6, 9, 0), marker])
    read = walk(memoryview(data), [AbortedTransaction(7, 3, 10)])
    assert [span.is_hidden for span in read.spans] == [False, True, False, True, True]
    assert read.spans[:2] == [Span(0, 2), Span(3, 4, is_hidden=True)]
    assert read.record_count == 4


def test_a_transaction_that_was_aborted_earlier_hides_nothing_of_a_later_one() -> None:
    read = walk(memoryview(_batch(20, 2, 7)), [AbortedTransaction(7, 3, 10)])
    assert read.spans == [Span(20, 21)]


def test_a_batch_that_is_cut_short_is_left_out() -> None:
    assert walk(memoryview(_batch(0, 3) + _batch(3, 3)[:50])).spans == [Span(0, 2)]


def test_only_batches_with_acquired_records_are_sent() -> None:
    batches = [_batch(base, 2) for base in range(0, 10, 2)]
    read = walk(memoryview(b"".join(batches)))
    pieces = chosen(read, [Acquired(1, 2, 1), Acquired(7, 7, 1)])
    assert [bytes(piece) for piece in pieces] == [batches[0] + batches[1], batches[3]]
    assert chosen(read, []) == []
    assert [bytes(piece) for piece in chosen(read, [Acquired(0, 9, 1)])] == [b"".join(batches)]


def test_keys_and_delivery_times_are_read() -> None:
    def at(value: bytes) -> tuple[tuple[str, bytes], ...]:
        return ((DELIVER_AT_HEADER, value),)

    batch = build_batch(
        [
            Record(b"k", b"v", headers=at(b"1700000000000")),
            Record(None, b"v", headers=at(b"-5")),
            Record(b"", b"v", headers=(("other", b"7"), *at(b"1"), *at(b"2"))),
            Record(b"k", b"v", headers=at(b"9" * 30)),
        ]
    )
    assert look_at([memoryview(batch)], 1 << 20) == [
        SeenRecord(0, b"k", 1_700_000_000_000),
        SeenRecord(1, None, 0),
        SeenRecord(2, b"", 2),
        SeenRecord(3, b"k", 0),
    ]
    assert look_at([memoryview(plain_batch("a"))], 1 << 20) == [SeenRecord(0, None, 0)]
