"""Batches that lose records keep everything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import ApiError
from tidemill.records.batch import HEADER_BYTES, check_crc, parse_header, restamp_append_time
from tidemill.records.compression import decompress
from tidemill.records.record import Record, build_batch, read_records
from tidemill.records.rewriting import delete_horizon, header_only, index_records, keep_records

_optional_bytes = st.none() | st.binary(max_size=200)
_records = st.builds(
    Record,
    key=_optional_bytes,
    value=_optional_bytes,
    timestamp_ms=st.integers(0, 2**41),
    headers=st.lists(st.tuples(st.text(max_size=5), _optional_bytes), max_size=2).map(tuple),
)
_CODECS = st.sampled_from((0, 1, 2, 3, 4))


def body_of(batch: bytes) -> bytes:
    header = parse_header(batch)
    return bytes(decompress(header.codec, memoryview(batch)[HEADER_BYTES:], 1 << 24))


@given(st.lists(_records, min_size=1, max_size=300))
def test_every_record_is_found_with_its_key(records: list[Record]) -> None:
    body = body_of(build_batch(records))
    found = index_records(body, len(records))
    assert [(delta, key, gone) for _, _, delta, key, gone in found] == [
        (delta, record.key, record.value is None) for delta, record in enumerate(records)
    ]
    assert b"".join(body[start:end] for start, end, *_ in found) == body


@given(
    st.lists(_records, min_size=1, max_size=20),
    st.sets(st.integers(0, 19)),
    _CODECS,
    st.none() | st.integers(0, 2**42),
)
def test_kept_records_keep_offset_time_and_headers(
    records: list[Record], chosen: set[int], codec: int, horizon_ms: int | None
) -> None:
    batch = build_batch(
        records, base_offset=70, codec=codec, producer_id=5, producer_epoch=2, base_sequence=9
    )
    header, body = parse_header(batch), body_of(batch)
    kept = [record for record in index_records(body, len(records)) if record[2] in chosen]
    result = keep_records(header, body, kept, horizon_ms)
    changed = parse_header(result)
    assert check_crc(result, changed)
    assert list(read_records(result)) == [
        record for record in read_records(batch) if record.offset - 70 in chosen
    ]
    assert (changed.base_offset, changed.last_offset, changed.last_sequence) == (
        header.base_offset,
        header.last_offset,
        header.last_sequence,
    )
    assert changed.codec == codec
    assert delete_horizon(changed) == horizon_ms
    assert changed.max_timestamp == max((record.timestamp_ms for record in read_records(result)), default=-1)


def test_append_time_survives_a_delete_horizon() -> None:
    batch = bytes(restamp_append_time(build_batch([Record(b"k", None, 5), Record(b"l", b"v", 6)]), 1_000))
    body = body_of(batch)
    result = keep_records(parse_header(batch), body, index_records(body, 2)[:1], 9_999)
    assert [record.timestamp_ms for record in read_records(result)] == [1_000]
    assert delete_horizon(parse_header(result)) == 9_999


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
        found = index_records(body, count)
    except ApiError:
        return
    assert len(found) == count


def test_a_long_batch_lets_others_have_their_turn() -> None:
    breaths = []
    index_records(body_of(build_batch([Record(b"k", b"v")] * 1_000)), 1_000, lambda: breaths.append(1))
    assert len(breaths) >= 3
