"""Records: round trips, hostile bytes, and the codecs of aiokafka and kafka-python in both directions."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterable

import cramjam
import pytest
from aiokafka.record.default_records import DefaultRecordBatch as AiokafkaBatch
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AiokafkaBuilder
from crc32c import crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from tidemill.errors import ApiError, ErrorCode
from tidemill.records.batch import HEADER_BYTES, check_batch, parse_header
from tidemill.records.compression import CODEC_NAMES, SNAPPY, decompress
from tidemill.records.record import Record, build_batch, build_empty_batch, read_records, recompress

with warnings.catch_warnings():
    # kafka-python loads its schemas through deprecated importlib.resources calls.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka.record.default_records import DefaultRecordBatch as KafkaPythonBatch
    from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaPythonBuilder

CODECS = sorted(CODEC_NAMES)
NULLABLE = st.none() | st.binary(max_size=40)
HEADERS = st.lists(st.tuples(st.text(max_size=8), NULLABLE), max_size=3).map(tuple)
TIMES = st.integers(0, 2**48)
RECORDS = st.lists(st.builds(Record, NULLABLE, NULLABLE, TIMES, HEADERS), min_size=1, max_size=8)


def without_offsets(records: Iterable[Record]) -> list[tuple[object, ...]]:
    return [tuple(record)[:4] for record in records]


@given(RECORDS, st.sampled_from(CODECS), st.integers(0, 2**60))
def test_records_survive_every_codec(records: list[Record], codec: int, base_offset: int) -> None:
    data = build_batch(records, codec=codec, base_offset=base_offset)
    header = check_batch(data)
    assert header.max_timestamp == max(record.timestamp_ms for record in records)
    found = list(read_records(data))
    assert without_offsets(found) == without_offsets(records)
    assert [record.offset for record in found] == list(range(base_offset, base_offset + len(records)))


@given(RECORDS, st.sampled_from(CODECS), st.sampled_from(CODECS))
def test_recompression_keeps_records_and_header(records: list[Record], first: int, second: int) -> None:
    data = build_batch(records, codec=first, producer_id=3, producer_epoch=1, base_sequence=8)
    plain = decompress(first, memoryview(data)[HEADER_BYTES:], 1_000_000)
    again = recompress(parse_header(data), plain, second)
    before, after = check_batch(data), check_batch(again)
    assert after.codec == second
    assert before._replace(batch_length=0, crc=0, attributes=0) == after._replace(
        batch_length=0, crc=0, attributes=0
    )
    assert list(read_records(again)) == list(read_records(data))


def with_body(body: bytes, codec: int, record_count: int = 1) -> bytes:
    """A batch with a right checksum around any body."""
    plain = bytearray(build_batch([Record(None, b"x")] * record_count)[:HEADER_BYTES] + body)
    struct.pack_into(">i", plain, 8, len(plain) - 12)
    struct.pack_into(">h", plain, 21, codec)
    struct.pack_into(">I", plain, 17, crc32c(bytes(plain[21:])))
    return bytes(plain)


def test_snappy_without_framing_is_read_as_librdkafka_sends_it() -> None:
    records = [Record(b"k", b"v" * 500, 7)]
    body = build_batch(records)[HEADER_BYTES:]
    data = with_body(bytes(cramjam.snappy.compress_raw(body)), SNAPPY)
    assert [record.value for record in read_records(data)] == [b"v" * 500]


def test_a_batch_without_records_gives_none() -> None:
    assert list(read_records(build_empty_batch(10, 19, 3))) == []
    assert parse_header(build_empty_batch(10, 19, 3)).next_offset == 20


@given(st.binary(max_size=120), st.sampled_from([*CODECS, 5, 6, 7]), st.integers(0, 5))
@example(b"", 2, 0)
def test_any_body_gives_records_or_corrupt_message(body: bytes, codec: int, count: int) -> None:
    data = bytearray(with_body(body, codec))
    struct.pack_into(">i", data, 57, count)
    only_api_errors(bytes(data))


def only_api_errors(data: bytes) -> None:
    try:
        for record in read_records(data, max_bytes=100_000):
            assert -(2**63) <= record.timestamp_ms < 2**63
    except ApiError as error:
        assert error.code in (ErrorCode.corrupt_message, ErrorCode.unsupported_compression_type)


@given(RECORDS, st.sampled_from(CODECS), st.data())
def test_mutated_batches_give_records_or_corrupt_message(
    records: list[Record], codec: int, choices: st.DataObject
) -> None:
    data = bytearray(build_batch(records, codec=codec))
    for _ in range(choices.draw(st.integers(1, 4))):
        position = choices.draw(st.integers(0, len(data) - 1))
        data[position] = choices.draw(st.integers(0, 255))
    only_api_errors(bytes(data))
    only_api_errors(bytes(data[: choices.draw(st.integers(0, len(data)))]))


@pytest.mark.parametrize(
    "body",
    [
        b"\x02",  # a record of one byte that is not there
        b"\x01\x00\x00\x00\x01\x01\x00",  # a negative length
        b"\x0e\x00\x00\x00\x01\x7e\x00\x00",  # a value longer than the record
        b"\x0c\x00\x00\x00\x01\x01\x7e",  # more headers than fit
        b"\x0c\x00\x00\x00\x01\x01\x00\x00",  # bytes behind the last record
        b"\x0c\x00\x00\x02\x01\x01\x00",  # an offset delta outside the batch
        b"\x0c\x00\x00\x01\x01\x01\x00",  # a negative offset delta
        b"\x10\x00\x00\x00\x01\x01\x02\x01\x01",  # a header without a name
        b"\x12\x00\x00\x00\x01\x01\x02\x02\xff\x01",  # a header's name that is not UTF-8
        b"\x1e\x00" + b"\xff" * 9 + b"\x7f" + b"\x00\x01\x01\x00",  # a timestamp beyond 64 bits
    ],
)
def test_a_record_that_does_not_fit_is_corrupt(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        list(read_records(with_body(body, 0)))
    assert caught.value.code == ErrorCode.corrupt_message


# --- other people's codecs

FOREIGN = st.lists(
    st.tuples(
        st.none() | st.binary(max_size=40),
        st.none() | st.binary(max_size=40),
        TIMES,
        st.lists(st.tuples(st.text(max_size=8), st.binary(max_size=8)), max_size=2),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("builder", [AiokafkaBuilder, KafkaPythonBuilder])
@given(FOREIGN, st.sampled_from(CODECS))
def test_batches_of_other_clients_are_read(
    builder: type, records: list[tuple[bytes | None, bytes | None, int, list[tuple[str, bytes]]]], codec: int
) -> None:
    made = builder(
        magic=2,
        compression_type=codec,
        is_transactional=0,
        producer_id=9,
        producer_epoch=2,
        base_sequence=4,
        batch_size=1 << 20,
    )
    for offset, (key, value, timestamp, headers) in enumerate(records):
        made.append(offset, timestamp, key, value, headers)
    data = bytes(made.build())
    header = check_batch(data)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (9, 2, 4)
    assert [(r.key, r.value, r.timestamp_ms, list(r.headers)) for r in read_records(data)] == records


@pytest.mark.parametrize("reader", [AiokafkaBatch, KafkaPythonBatch])
@given(FOREIGN, st.sampled_from(CODECS))
def test_other_clients_read_our_batches(
    reader: type, records: list[tuple[bytes | None, bytes | None, int, list[tuple[str, bytes]]]], codec: int
) -> None:
    data = build_batch(
        [Record(key, value, timestamp, tuple(headers)) for key, value, timestamp, headers in records],
        codec=codec,
        base_offset=100,
    )
    batch = reader(bytearray(data))
    assert batch.validate_crc()
    found = list(batch)
    assert [(r.key, r.value, r.timestamp, [tuple(h) for h in r.headers]) for r in found] == records
    assert [r.offset for r in found] == list(range(100, 100 + len(records)))


@pytest.mark.parametrize("reader", [AiokafkaBatch, KafkaPythonBatch])
def test_other_clients_pass_over_a_batch_without_records(reader: type) -> None:
    batch = reader(bytearray(build_empty_batch(10, 19, 0)))
    assert batch.validate_crc()
    assert list(batch) == []
    assert batch.next_offset == 20


def test_records_outside_of_the_wanted_offsets_are_passed_over() -> None:
    data = build_batch([Record(b"k", b"%d" % number, 5) for number in range(100)], base_offset=1_000)
    whole = list(read_records(data))
    assert list(read_records(data, offsets=(1_010, 1_019))) == whole[10:20]
    assert list(read_records(data, offsets=(0, 1_001))) == whole[:2]
    assert list(read_records(data, offsets=(1_099, 5_000))) == whole[99:]
    assert list(read_records(data, offsets=(5_000, 6_000))) == []
