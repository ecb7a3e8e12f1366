"""Headers of batches that lose records, and what counts as a record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import ApiError
from tidemill.records.batch import HEADER_BYTES, BatchHeader, check_crc, parse_header
from tidemill.records.compression import decompress
from tidemill.records.record import Record, build_batch, read_records
from tidemill.records.rewriting import INDEX_FIELDS, header_only, index_records
from tidemill.records.varints import to_varint

_optional_bytes = st.none() | st.binary(max_size=200)
_records = st.builds(
    Record,
    key=_optional_bytes,
    value=_optional_bytes,
    timestamp_ms=st.integers(0, 2**41),
    headers=st.lists(st.tuples(st.text(max_size=5), _optional_bytes), max_size=2).map(tuple),
)


def body_of(batch: bytes) -> bytes:
    header = parse_header(batch)
    return bytes(decompress(header.codec, memoryview(batch)[HEADER_BYTES:], 1 << 24))


def header_for(count: int) -> BatchHeader:
    return parse_header(build_batch([Record(b"k", b"v")]))._replace(
        record_count=count, last_offset_delta=max(0, count - 1)
    )


def record(offset_delta: int, timestamp_delta: int = 0) -> bytes:
    inner = b"\0" + to_varint(timestamp_delta) + to_varint(offset_delta) + b"\x02k\x02v\0"
    return to_varint(len(inner)) + inner


@given(st.lists(_records, min_size=1, max_size=300))
def test_every_record_is_found_with_its_key(records: list[Record]) -> None:
    batch = build_batch(records)
    body = body_of(batch)
    found = index_records(parse_header(batch), body)
    rows = [found[place : place + INDEX_FIELDS] for place in range(0, len(found), INDEX_FIELDS)]
    assert [
        (delta, None if end < 0 else body[start:end], gone) for _, _, _, delta, start, end, gone in rows
    ] == [(delta, record.key, record.value is None) for delta, record in enumerate(records)]
    assert [row[2] + records[0].timestamp_ms for row in rows] == [record.timestamp_ms for record in records]


@pytest.mark.parametrize("deltas", [(1, 0), (0, 0), (0, 2), (-1, 0), (0, -1), (0, 2**65)])
def test_offsets_that_do_not_grow_inside_the_batch_are_refused(deltas: tuple[int, int]) -> None:
    with pytest.raises(ApiError):
        index_records(header_for(2), record(deltas[0]) + record(deltas[1]))


@pytest.mark.parametrize("timestamp_delta", [2**63, -(2**63) - 1, 2**63 - 1, 2**66])
def test_timestamps_beyond_64_bits_are_refused(timestamp_delta: int) -> None:
    zigzag = 2 * timestamp_delta if timestamp_delta >= 0 else -2 * timestamp_delta - 1
    number = bytearray()
    while zigzag > 0x7F:
        number.append((zigzag & 0x7F) | 0x80)
        zigzag >>= 7
    number.append(zigzag)
    inner = b"\0" + bytes(number) + b"\0\x02k\x02v\0"
    header = header_for(1)._replace(base_timestamp=1)
    with pytest.raises(ApiError):
        index_records(header, to_varint(len(inner)) + inner)


@pytest.mark.parametrize("codec", [0, 4])
def test_a_batch_without_its_records_says_who_wrote_it(codec: int) -> None:
    batch = build_batch(
        [Record(b"k", b"v"), Record(b"l", b"w")],
        base_offset=3,
        codec=codec,
        producer_id=5,
        producer_epoch=2,
        base_sequence=9,
        attributes=0x10,
    )
    header = parse_header(header_only(parse_header(batch)))
    assert (header.producer_id, header.producer_epoch, header.last_sequence) == (5, 2, 10)
    assert (header.base_offset, header.next_offset, header.record_count) == (3, 5, 0)
    assert header.is_transactional
    assert header.codec == 0
    assert list(read_records(header_only(header))) == []
    assert check_crc(header_only(header), parse_header(header_only(header)))


@given(st.binary(max_size=60), st.integers(0, 8))
def test_any_bytes_are_records_or_refused(body: bytes, count: int) -> None:
    try:
        found = index_records(header_for(count), body)
    except ApiError:
        return
    assert len(found) == count * INDEX_FIELDS


def test_a_long_batch_lets_others_have_their_turn() -> None:
    breaths = []
    batch = build_batch([Record(b"k", b"v")] * 1_000)
    index_records(parse_header(batch), body_of(batch), lambda: breaths.append(1))
    assert len(breaths) >= 3
