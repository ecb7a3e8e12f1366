"""Each refusal of a batch header, with its code."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from support.batches import plain_batch
from tidemill.errors import ApiError, ErrorCode
from tidemill.records.batch import (
    HEADER_BYTES,
    check_batch,
    check_crc,
    next_sequence,
    parse_header,
    restamp_append_time,
    stamp_prefix,
)
from tidemill.records.record import build_empty_batch, read_records


def altered(data: bytes, position: int, layout: str, value: int, *, fix_crc: bool = True) -> bytes:
    copy = bytearray(data)
    struct.pack_into(layout, copy, position, value)
    if fix_crc:
        struct.pack_into(">I", copy, 17, crc32c(bytes(copy[21:])))
    return bytes(copy)


GOOD = plain_batch("a", "b", "c", producer=(5, 1, 10))
ANONYMOUS = plain_batch("a", "b", "c")


def refused(data: bytes) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        check_batch(data)
    return caught.value.code


def test_a_sound_batch_passes_and_gives_its_header() -> None:
    header = check_batch(GOOD)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (5, 1, 10)
    assert (header.record_count, header.last_sequence, header.size_bytes) == (3, 12, len(GOOD))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", ErrorCode.corrupt_message),
        (GOOD[: HEADER_BYTES - 1], ErrorCode.corrupt_message),
        (GOOD[:-1], ErrorCode.corrupt_message),
        (altered(GOOD, 8, ">i", -1), ErrorCode.corrupt_message),
        (altered(GOOD, 8, ">i", 48), ErrorCode.corrupt_message),
        (altered(GOOD, 8, ">i", 2**31 - 1), ErrorCode.corrupt_message),
        (altered(GOOD, 16, ">b", 3), ErrorCode.corrupt_message),
        (altered(GOOD, 16, ">b", -1), ErrorCode.corrupt_message),
        (altered(GOOD, 16, ">b", 1), ErrorCode.unsupported_for_message_format),
        (altered(GOOD, 16, ">b", 0), ErrorCode.unsupported_for_message_format),
        (altered(GOOD, 16, ">b", 0)[:40], ErrorCode.unsupported_for_message_format),
        (altered(GOOD, 27, ">q", 99, fix_crc=False), ErrorCode.corrupt_message),
        (altered(GOOD, 17, ">I", 0, fix_crc=False), ErrorCode.corrupt_message),
        (GOOD + GOOD, ErrorCode.invalid_record),
        (GOOD + b"x", ErrorCode.invalid_record),
        (altered(GOOD, 57, ">i", 0), ErrorCode.invalid_record),
        (altered(GOOD, 57, ">i", -1), ErrorCode.invalid_record),
        (altered(GOOD, 57, ">i", 4), ErrorCode.invalid_record),
        (altered(GOOD, 23, ">i", 1), ErrorCode.invalid_record),
        (build_empty_batch(0, 4, 0), ErrorCode.invalid_record),
        (altered(GOOD, 21, ">h", 0x20), ErrorCode.invalid_record),
        (altered(GOOD, 21, ">h", 0x08), ErrorCode.invalid_timestamp),
        (altered(ANONYMOUS, 21, ">h", 0x10), ErrorCode.invalid_record),
        (altered(GOOD, 43, ">q", -2), ErrorCode.invalid_record),
        (altered(GOOD, 51, ">h", -1), ErrorCode.invalid_record),
        (altered(GOOD, 53, ">i", -1), ErrorCode.invalid_record),
    ],
)
def test_a_bad_batch_is_refused_with_its_code(data: bytes, code: ErrorCode) -> None:
    assert refused(data) == code


@given(st.integers(0, 2**31 - 1), st.integers(0, 1000))
def test_last_sequence_wraps_to_zero(base_sequence: int, delta: int) -> None:
    header = parse_header(GOOD)._replace(base_sequence=base_sequence, last_offset_delta=delta)
    sequence = base_sequence
    for _ in range(min(delta, 20)):
        sequence = next_sequence(sequence)
    if delta <= 20:
        assert header.last_sequence == sequence
    assert 0 <= header.last_sequence < 2**31


def test_stamping_offset_and_epoch_does_not_touch_the_checksum() -> None:
    stamped = stamp_prefix(parse_header(GOOD), 1234, 7) + GOOD[16:]
    header = parse_header(stamped)
    assert (header.base_offset, header.leader_epoch, header.size_bytes) == (1234, 7, len(GOOD))
    assert check_crc(stamped, header)
    assert [record.offset for record in read_records(stamped)] == [1234, 1235, 1236]


def test_append_time_is_what_every_record_then_carries() -> None:
    restamped = restamp_append_time(GOOD, 999)
    header = parse_header(restamped)
    assert header.is_append_time
    assert header.max_timestamp == 999
    assert check_crc(restamped, header)
    assert {record.timestamp_ms for record in read_records(restamped)} == {999}
    assert not parse_header(GOOD).is_append_time


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_an_api_error(data: bytes) -> None:
    refused(data)


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 7))
def test_any_flipped_bit_behind_the_stamp_is_refused(position: int, bit: int) -> None:
    copy = bytearray(GOOD)
    copy[position] ^= 1 << bit
    if position < 8 or 12 <= position < 16:
        assert check_batch(copy).record_count == 3
    else:
        refused(bytes(copy))
