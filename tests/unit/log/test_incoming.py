"""What a topic's configuration makes of a producer's batch."""

from __future__ import annotations

import random
import struct

import pytest
from crc32c import crc32c

from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, ErrorCode, InvalidRecords
from tidemill.log.incoming import is_quick, prepare_batch, prepare_quickly
from tidemill.records.batch import check_crc, parse_header
from tidemill.records.compression import CODEC_NUMBERS, GZIP, NONE, ZSTD, compress
from tidemill.records.record import Record, build_batch, read_records

NOW = 1_700_000_000_000
HOUR_MS = 3_600_000
BATCH = build_batch([Record(b"k", b"v" * 100, NOW), Record(b"k2", b"v" * 100, NOW + 5)])


def refused(data: bytes, config: TopicConfig, now_ms: int = NOW) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        prepare_batch(data, config, now_ms)
    return caught.value.code


def test_a_plain_topic_takes_the_bytes_as_they_are() -> None:
    data, header = prepare_batch(BATCH, TopicConfig(), NOW)
    assert data is BATCH
    assert header == parse_header(BATCH)


def test_the_size_limit_includes_the_limit_itself() -> None:
    assert prepare_batch(BATCH, TopicConfig(max_message_bytes=len(BATCH)), NOW)
    assert refused(BATCH, TopicConfig(max_message_bytes=len(BATCH) - 1)) == ErrorCode.message_too_large


def test_a_batch_must_fit_in_a_segment() -> None:
    config = TopicConfig(segment_bytes=len(BATCH) - 1)
    assert refused(BATCH, config) == ErrorCode.record_list_too_large


def test_a_timestamp_too_far_ahead_is_refused() -> None:
    config = TopicConfig(timestamp_after_max_ms=HOUR_MS)
    assert prepare_batch(BATCH, config, NOW + 5 - HOUR_MS)
    assert refused(BATCH, config, NOW + 4 - HOUR_MS) == ErrorCode.invalid_timestamp


def with_max_timestamp(data: bytes, timestamp_ms: int) -> bytes:
    """The batch with another largest timestamp in its header, and a checksum that fits."""
    forged = bytearray(data)
    struct.pack_into(">q", forged, 35, timestamp_ms)
    struct.pack_into(">I", forged, 17, crc32c(memoryview(forged)[21:]))
    return bytes(forged)


@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize("codec", [NONE, GZIP])
def test_a_timestamp_too_far_ahead_is_refused_whatever_the_header_says(count: int, codec: int) -> None:
    times = [NOW + (10**12 if number == 1 else 0) for number in range(count)]
    data = with_max_timestamp(build_batch([Record(b"k", b"v", each) for each in times], codec=codec), 5)
    with pytest.raises(InvalidRecords) as caught:
        prepare_batch(data, TopicConfig(), NOW)
    assert caught.value.code == ErrorCode.invalid_timestamp
    assert [number for number, _ in caught.value.record_errors] == [1]


@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize("said", [5, NOW + 10**12])
@pytest.mark.parametrize("compression_type", ["producer", "gzip"])
def test_a_header_gets_the_largest_timestamp_of_its_records(
    count: int, said: int, compression_type: str
) -> None:
    records = [Record(b"k", b"v", NOW - number, offset=number) for number in range(count)]
    data = with_max_timestamp(build_batch(records), said)
    stored, header = prepare_batch(data, TopicConfig(compression_type=compression_type), NOW)
    assert header == parse_header(stored)
    assert header.max_timestamp == NOW
    assert check_crc(stored, header)
    assert list(read_records(stored)) == records


def test_records_that_were_checked_are_looked_at_again_for_a_timestamp_too_far_ahead() -> None:
    config = TopicConfig(timestamp_after_max_ms=HOUR_MS)
    assert prepare_batch(BATCH, config, NOW, records_checked=True)
    with pytest.raises(InvalidRecords) as caught:
        prepare_batch(BATCH, config, NOW + 4 - HOUR_MS, records_checked=True)
    assert [number for number, _ in caught.value.record_errors] == [1]


def test_a_timestamp_too_far_back_is_refused_wherever_in_the_batch_it_is() -> None:
    config = TopicConfig(timestamp_before_max_ms=HOUR_MS)
    assert prepare_batch(BATCH, config, NOW + HOUR_MS)
    assert refused(BATCH, config, NOW + HOUR_MS + 1) == ErrorCode.invalid_timestamp


def test_a_record_without_a_timestamp_is_not_too_old() -> None:
    data = build_batch([Record(b"k", b"v", -1)])
    assert prepare_batch(data, TopicConfig(timestamp_before_max_ms=1), NOW)


def test_append_time_replaces_timestamps_and_does_not_judge_them() -> None:
    config = TopicConfig(timestamp_type="LogAppendTime", timestamp_after_max_ms=1, timestamp_before_max_ms=1)
    data, header = prepare_batch(BATCH, config, NOW + 10 * HOUR_MS)
    assert header.is_append_time
    assert check_crc(data, header)
    assert {record.timestamp_ms for record in read_records(data)} == {NOW + 10 * HOUR_MS}


def test_a_producer_may_not_claim_append_time() -> None:
    data = build_batch([Record(b"k", b"v", NOW)], attributes=0x08)
    for timestamp_type in ("CreateTime", "LogAppendTime"):
        config = TopicConfig(timestamp_type=timestamp_type)
        assert refused(data, config) == ErrorCode.invalid_timestamp


@pytest.mark.parametrize("name", sorted(CODEC_NUMBERS))
def test_the_topics_codec_replaces_the_producers(name: str) -> None:
    data, header = prepare_batch(BATCH, TopicConfig(compression_type=name), NOW)
    assert header.codec == CODEC_NUMBERS[name]
    assert check_crc(data, header)
    assert list(read_records(data)) == list(read_records(BATCH))


def test_a_batch_in_the_topics_codec_is_not_touched() -> None:
    packed = build_batch(list(read_records(BATCH)), codec=GZIP)
    data, _ = prepare_batch(packed, TopicConfig(compression_type="gzip"), NOW)
    assert data is packed


def test_what_grows_beyond_the_limit_by_recompression_is_refused() -> None:
    packed = build_batch([Record(b"k", b"v" * 10_000, NOW)], codec=GZIP)
    config = TopicConfig(compression_type="uncompressed", max_message_bytes=1000)
    assert refused(packed, config) == ErrorCode.message_too_large


def test_an_unknown_codec_is_refused_even_if_nobody_decodes() -> None:
    data = build_batch([Record(b"k", b"v", NOW)], attributes=0x05)
    assert refused(data, TopicConfig()) == ErrorCode.unsupported_compression_type


@pytest.mark.parametrize("policy", [{"compact"}, {"compact", "delete"}])
def test_a_compacted_topic_needs_keys(policy: set[str]) -> None:
    config = TopicConfig(cleanup_policy=frozenset(policy))
    assert prepare_batch(BATCH, config, NOW)
    assert (
        refused(build_batch([Record(b"k", b"v", NOW), Record(None, b"v", NOW)]), config)
        == ErrorCode.invalid_record
    )


def test_a_bomb_is_refused_where_the_topic_needs_its_records() -> None:
    bomb = build_batch([Record(b"k", bytes(5_000_000), NOW)], codec=GZIP)
    with pytest.raises(ApiError) as caught:
        prepare_batch(bomb, TopicConfig(cleanup_policy=frozenset({"compact"})), NOW, 1_000_000)
    assert caught.value.code == ErrorCode.invalid_record


# --- batches with a right checksum and wrong records


def forged(
    body: bytes, *, count: int = 1, last_offset_delta: int | None = None, attributes: int = 0
) -> bytes:
    """A batch whose checksum is right whatever it says."""
    delta = count - 1 if last_offset_delta is None else last_offset_delta
    checked = struct.pack(">hiqqqhii", attributes, delta, NOW, NOW, -1, -1, -1, count) + body
    return struct.pack(">qiibI", 0, len(checked) + 9, -1, 2, crc32c(checked)) + checked


SOUND = BATCH[61:]


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("a count of 2**31 - 1", forged(SOUND, count=2**31 - 1)),
        ("a count too high", forged(SOUND, count=3)),
        ("a count too low", forged(SOUND, count=1)),
        ("no records", forged(b"", count=0, last_offset_delta=-1)),
        ("a last offset that moves the end", forged(SOUND, count=2, last_offset_delta=2**31 - 2)),
        ("a negative count", forged(SOUND, count=-1)),
        ("bytes behind the records", forged(SOUND + b"\x00", count=2)),
        ("garbage for gzip", forged(b"no gzip at all", attributes=GZIP)),
        ("gzip of garbage", forged(compress(GZIP, b"garbage" * 9), attributes=GZIP)),
        ("a negative record length", forged(b"\x0d" + SOUND[1:], count=2)),
        ("a control batch", forged(SOUND, count=2, attributes=0x20)),
    ],
)
def test_a_plain_topic_refuses_what_its_readers_could_not_read(what: str, data: bytes) -> None:
    assert check_crc(data, parse_header(data))
    assert refused(data, TopicConfig()) == ErrorCode.invalid_record


def test_a_bomb_is_refused_by_a_plain_topic() -> None:
    bomb = build_batch([Record(b"k", bytes(5_000_000), NOW)], codec=ZSTD)
    with pytest.raises(ApiError) as caught:
        prepare_batch(bomb, TopicConfig(), NOW, 1_000_000)
    assert caught.value.code == ErrorCode.invalid_record


# --- what may be looked at by the event loop


def quick(data: bytes, config: TopicConfig) -> bool:
    return is_quick(parse_header(data), len(data), config)


def test_a_small_batch_is_quick() -> None:
    assert quick(BATCH, TopicConfig())
    assert quick(build_batch([Record(b"k", bytes(1_000_000), NOW)]), TopicConfig())


@pytest.mark.parametrize(
    ("data", "config"),
    [
        (forged(SOUND, count=1_000_000), TopicConfig()),
        (build_batch([Record(b"k", bytes(3_000_000), NOW)]), TopicConfig(max_message_bytes=2**30)),
        (build_batch([Record(b"k", random.Random(1).randbytes(50_000), NOW)], codec=ZSTD), TopicConfig()),
        (build_batch([Record(b"k", bytes(50_000), NOW)]), TopicConfig(compression_type="zstd")),
    ],
)
def test_what_takes_long_to_look_at_is_not_quick(data: bytes, config: TopicConfig) -> None:
    assert not quick(data, config)


def test_a_small_batch_that_unpacks_to_much_is_left_to_a_thread() -> None:
    small, large = (build_batch([Record(b"k", bytes(size), NOW)], codec=ZSTD) for size in (1_000, 10_000_000))
    assert quick(large, TopicConfig())
    assert prepare_quickly(large, parse_header(large), TopicConfig(), NOW) is None
    prepared = prepare_quickly(small, parse_header(small), TopicConfig(), NOW)
    assert prepared is not None
    assert prepared.data is small
