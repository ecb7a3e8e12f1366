"""Batches as columns: the same as record by record, for sound batches, for odd ones and for hostile bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from tidemill.errors import ApiError, ErrorCode
from tidemill.records.batch import HEADER_BYTES, parse_header, restamp_append_time
from tidemill.records.columns import read as columns_read
from tidemill.records.columns.read import RecordColumns, read_columns
from tidemill.records.compression import CODEC_NAMES, GZIP, NONE, compress
from tidemill.records.record import Record, build_batch, build_empty_batch, read_records

CODECS = sorted(CODEC_NAMES)
INT64_MAX = 2**63 - 1
NULLABLE = st.none() | st.binary(max_size=80)
HEADERS = st.lists(st.tuples(st.text(max_size=8), NULLABLE), max_size=2).map(tuple)
TIMES = st.integers(0, 300) | st.integers(-(2**50), 2**50)
RECORD = st.builds(Record, NULLABLE, NULLABLE, TIMES, HEADERS | st.just(()))
#: Lists that are long enough for columns, without hypothesis having to draw every record of them.
RECORDS = st.builds(
    lambda some, times: (some * times)[:150], st.lists(RECORD, min_size=1, max_size=8), st.integers(1, 40)
)
#: From how many records on columns are used: as it is, and so early that small batches use them too.
THRESHOLDS = st.sampled_from([columns_read._SMALL_BATCH_RECORDS, 2])


@contextmanager
def columns_from(threshold: int) -> Iterator[None]:
    with patch.object(columns_read, "_SMALL_BATCH_RECORDS", threshold):
        yield


def varint(value: int, size: int = 1) -> bytes:
    """A zigzag number in at least ``size`` bytes: more than it needs are allowed."""
    zigzag = 2 * value if value >= 0 else -2 * value - 1
    out = bytearray()
    while zigzag > 0x7F or len(out) + 1 < size:
        out.append((zigzag & 0x7F) | 0x80)
        zigzag >>= 7
    out.append(zigzag)
    return bytes(out)


def framed(body: bytes, count: int, codec: int = NONE, **fields: int) -> bytes:
    """A batch with a right checksum around any body; ``fields`` replace those of its header."""
    packed = compress(codec, body)
    header = parse_header(build_batch([Record(None, b"x")]))._replace(
        attributes=codec,
        last_offset_delta=max(0, count - 1),
        record_count=count,
        batch_length=HEADER_BYTES - 12 + len(packed),
    )
    header = header._replace(**fields)
    checked = struct.pack(">hiqqqhii", *header[5:]) + packed
    return struct.pack(">qiibI", *header[:4], crc32c(checked)) + checked


def rows(columns: RecordColumns) -> list[Record]:
    """The columns as records, found by their positions."""
    body = bytes(columns.body)
    assert columns.record_count == len(columns.offsets)
    return [
        Record(
            None if columns.key_null[i] else body[columns.key_starts[i] : columns.key_ends[i]],
            None if columns.value_null[i] else body[columns.value_starts[i] : columns.value_ends[i]],
            int(columns.timestamps[i]),
            columns.headers(i),
            int(columns.offsets[i]),
        )
        for i in range(columns.record_count)
    ]


def agree(batch: bytes, max_bytes: int = 1 << 20) -> RecordColumns | ErrorCode:
    """Both ways of reading must give the same records or the same error."""
    try:
        expected = list(read_records(batch, max_bytes))
    except ApiError as error:
        with pytest.raises(ApiError) as caught:
            read_columns(batch, max_bytes)
        assert caught.value.code == error.code
        return error.code
    if any(record.offset > INT64_MAX for record in expected):
        with pytest.raises(ApiError) as caught:
            read_columns(batch, max_bytes)
        assert caught.value.code == ErrorCode.corrupt_message
        return caught.value.code
    columns = read_columns(batch, max_bytes)
    assert rows(columns) == expected
    assert columns.keys().to_pylist() == [record.key for record in expected]
    assert columns.values().to_pylist() == [record.value for record in expected]
    assert columns.header_counts.tolist() == [len(record.headers) for record in expected]
    assert columns.header == parse_header(batch)
    assert_sound(columns)
    return columns


def assert_sound(columns: RecordColumns) -> None:
    """What the columns promise about themselves."""
    assert columns.record_starts.tolist() == [0, *columns.record_ends.tolist()][: columns.record_count]
    assert not columns.record_count or columns.record_ends[-1] == len(columns.body)
    for starts, ends, null in (
        (columns.key_starts, columns.key_ends, columns.key_null),
        (columns.value_starts, columns.value_ends, columns.value_null),
    ):
        assert starts.dtype == ends.dtype == np.int64
        assert null.dtype == np.bool_
        assert (starts[null] == ends[null]).all()
    assert columns.offsets.dtype == columns.timestamps.dtype == columns.header_counts.dtype == np.int64


# --- sound batches


@given(RECORDS, st.sampled_from(CODECS), st.integers(0, 2**60), THRESHOLDS)
def test_columns_hold_what_the_records_hold(
    records: list[Record], codec: int, base_offset: int, threshold: int
) -> None:
    with columns_from(threshold):
        agree(build_batch(records, codec=codec, base_offset=base_offset))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_bytes_is_read(kind: type) -> None:
    records = [Record(b"k", b"v", 5)] * 40
    assert len(rows(read_columns(kind(build_batch(records))))) == 40


@pytest.mark.parametrize("count", [5, 500])
def test_the_brokers_time_is_every_records_time(count: int) -> None:
    batch = bytes(restamp_append_time(build_batch([Record(None, b"v", i) for i in range(count)]), 1234))
    columns = agree(batch)
    assert isinstance(columns, RecordColumns)
    assert columns.timestamps.tolist() == [1234] * count


def test_a_batch_without_records_gives_empty_columns() -> None:
    columns = agree(build_empty_batch(10, 19, 3))
    assert isinstance(columns, RecordColumns)
    assert columns.record_count == 0
    assert columns.keys().type == pa.binary()


def test_a_batch_followed_by_others_is_read_alone() -> None:
    batch = build_batch([Record(b"k", b"v")] * 50)
    columns = agree(batch + b"more")
    assert isinstance(columns, RecordColumns)
    assert columns.record_count == 50


def test_an_uncompressed_body_is_not_copied() -> None:
    batch = build_batch([Record(b"k", b"v" * 100)] * 50)
    body = read_columns(batch).body
    assert isinstance(body, memoryview)
    assert body.obj is batch


@pytest.mark.parametrize(
    "sizes",
    [
        [100] * 9000,  # one long run, but for the growing offsets
        [100, 101] * 1500,  # no run at all
        [40] * 63 + [41] * 64 + [42] * 65 + [43] * 255 + [44] * 256 + [45] * 257,
        [100] * 1000 + list(range(300)) + [100] * 1000,
        [100] * 1000 + [100 + 64] * 1000,  # lengths that begin with the same byte
        [9000] * 300,  # a length of three bytes, in a run
        [9000, 9001] * 40,  # and in none
        [0] * 2000,
        [random.Random(5).randint(0, 300) for _ in range(5000)],
    ],
    ids=[
        "run",
        "alternating",
        "runs",
        "ragged within runs",
        "alike",
        "large run",
        "large",
        "empty",
        "ragged",
    ],
)
def test_records_are_found_whatever_their_lengths(sizes: list[int]) -> None:
    with patch.object(columns_read, "read_one_by_one", side_effect=AssertionError("not all at once")):
        columns = agree(build_batch([Record(b"key", b"v" * size) for size in sizes]))
    assert isinstance(columns, RecordColumns)
    assert (columns.value_ends - columns.value_starts).tolist() == sizes


def test_gaps_in_offsets_as_compaction_leaves_them_stay() -> None:
    body = b"".join(record(offset=delta) for delta in range(0, 400, 7))
    columns = agree(framed(body, 58, last_offset_delta=500, base_offset=1000))
    assert isinstance(columns, RecordColumns)
    assert columns.offsets.tolist() == list(range(1000, 1400, 7))


def test_taken_records_keep_their_order_and_may_come_twice() -> None:
    records = [
        Record(None if i % 3 == 0 else b"k%d" % i, b"v" * i, i, (("h", b"%d" % i),)) for i in range(60)
    ]
    columns = read_columns(build_batch(records, base_offset=7))
    for indexes in ([3, 4, 59], [59, 3, 3, 0, 4, 0], []):
        taken = columns.take(np.array(indexes, np.int64))
        expected = [records[i]._replace(offset=7 + i) for i in indexes]
        assert rows(taken) == expected
        assert taken.keys().to_pylist() == [record.key for record in expected]
        assert taken.values().to_pylist() == [record.value for record in expected]
    assert rows(columns.take(columns.key_null)) == [
        record._replace(offset=7 + i) for i, record in enumerate(records) if i % 3 == 0
    ]


# --- odd and hostile batches


def record(
    *,
    time: bytes = b"\0",
    offset: int = 0,
    key: bytes = b"\x01",
    value: bytes = b"\x02v",
    headers: bytes = b"\0",
    length_size: int = 1,
    length_lie: int = 0,
) -> bytes:
    """A record out of encoded fields that need not fit."""
    inner = b"\x05" + time + varint(offset) + key + value + headers
    return varint(len(inner) + length_lie, length_size) + inner


PLAIN = b"".join(record(offset=i) for i in range(40))
LAST = 40
LONGEST = b"\xff" * 9
ODD = {
    "a padded length of eight bytes": record(length_size=8),
    "a padded length of ten bytes": record(length_size=10),
    "a length of eleven bytes": record(length_size=11),
    "a padded time of nine bytes": record(time=varint(3, 9)),
    "a time of seven bytes": record(time=varint(2**47)),
    "a time of eight bytes": record(time=varint(2**50)),
    "a time beyond 64 bits": record(time=LONGEST + b"\x7f"),
    "a time of eleven bytes": record(time=b"\x80" * 10 + b"\0"),
    "a null key with another negative length": record(key=varint(-77)),
    "a null value with another negative length": record(value=varint(-(2**60))),
    "a padded key length": record(key=varint(2, 3) + b"ab"),
    "a padded value length": record(value=varint(2, 9) + b"ab"),
    "a key longer than the record": record(key=varint(12) + b"ab"),
    "a key longer than the batch": record(key=varint(2**40) + b"ab"),
    "a key of astronomic length": record(key=LONGEST[:-1] + b"\xfe\x7f"),
    "a value longer than the record": record(value=varint(5) + b"ab"),
    "a value that ends where the record does": record(value=varint(3) + b"ab"),
    "a value shorter than the record": record(value=varint(1) + b"ab"),
    "a value of astronomic length": record(value=LONGEST[:-1] + b"\xfe\x7f"),
    "a padded header count of zero": record(headers=b"\x80\0"),
    "bytes behind a header count of zero": record(headers=b"\0\0"),
    "a negative header count": record(headers=b"\x01"),
    "more headers than fit": record(headers=b"\x7e"),
    "a header": record(headers=b"\x02\x02a\x02b"),
    "a header without a value": record(headers=b"\x02\x02a\x01"),
    "a header without a name": record(headers=b"\x02\x01\x02b"),
    "a header whose name is not text": record(headers=b"\x02\x02\xff\x02b"),
    "a header that is too long": record(headers=b"\x02\x02a\x7eb"),
    "bytes behind the headers": record(headers=b"\x02\x02a\x02bc"),
    "an offset outside the batch": record(offset=41),
    "a negative offset": record(offset=-1),
    "an enormous offset": record(offset=2**60),
    "a length that is too small": record(length_lie=-1),
    "a length that is too large": record(length_lie=1),
    "a length beyond 64 bits": varint(2**66) + record(),
    "a negative length": varint(-3) + record(),
    "no length": b"",
    "zeros": bytes(7),
    "continuation without end": b"\xff" * 60,
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
@pytest.mark.parametrize("after", [0, 1, 3, 40])
def test_one_odd_record_is_judged_as_it_is_alone(odd: bytes, after: int) -> None:
    behind = b"".join(record(offset=i, value=varint(20) + bytes(20)) for i in range(after))
    agree(framed(PLAIN + odd + behind, LAST + 1 + after, last_offset_delta=40))
    agree(framed(odd + behind + PLAIN, LAST + 1 + after, last_offset_delta=40))


def test_the_odd_records_are_of_both_kinds() -> None:
    found = [agree(framed(PLAIN + odd, LAST + 1)) for odd in ODD.values()]
    assert sum(isinstance(entry, RecordColumns) for entry in found) >= 10
    assert sum(entry == ErrorCode.corrupt_message for entry in found) >= 15


@pytest.mark.parametrize(
    "fields",
    [
        {"base_timestamp": INT64_MAX},
        {"base_timestamp": INT64_MAX - 2**47},
        {"base_timestamp": INT64_MAX - 2**47 + 1},
        {"base_timestamp": -(2**63)},
        {"base_timestamp": 2**62},
        {"base_offset": INT64_MAX},
        {"base_offset": INT64_MAX - 40},
        {"base_offset": INT64_MAX - 41},
        {"base_offset": -5},
        {"last_offset_delta": 39},
        {"last_offset_delta": -1},
        {"record_count": 42},
        {"record_count": 40},
        {"record_count": 0},
        {"record_count": -1},
        {"record_count": 2**31 - 1},
        {"batch_length": 10},
        {"batch_length": 2**31 - 1},
        {"batch_length": -(2**31)},
        {"attributes": 0x08, "base_timestamp": INT64_MAX, "max_timestamp": 3},
        {"attributes": 7},
        {"attributes": GZIP},
        {"magic": 1},
    ],
    ids=str,
)
def test_a_header_at_its_limits_is_judged_alike(fields: dict[str, int]) -> None:
    agree(framed(PLAIN + record(time=varint(2**47), offset=40), 41, **fields))


def test_a_negative_time_below_64_bits_is_refused_and_one_above_is_not() -> None:
    below = framed(PLAIN + record(time=varint(-5)), 41, base_timestamp=-(2**63) + 4)
    assert agree(below) == ErrorCode.corrupt_message
    within = framed(PLAIN + record(time=varint(-5)), 41, base_timestamp=-(2**63) + 5)
    assert isinstance(agree(within), RecordColumns)


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1])
def test_fewer_bytes_than_a_header_are_corrupt(size: int) -> None:
    assert agree(build_batch([Record(None, b"v")])[:size]) == ErrorCode.corrupt_message


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != NONE])
def test_more_than_the_allowed_bytes_are_refused(codec: int) -> None:
    batch = build_batch([Record(None, bytes(1000))] * 100, codec=codec)
    size = len(build_batch([Record(None, bytes(1000))] * 100)) - HEADER_BYTES
    assert isinstance(agree(batch, size), RecordColumns)
    assert agree(batch, size - 1) == ErrorCode.corrupt_message


def test_a_number_without_end_is_refused_at_its_tenth_byte() -> None:
    batch = framed(b"\xff" * (8 << 20), 100)
    with pytest.raises(ApiError, match="64 bits"):
        read_columns(batch)


#: Places in a batch, the later ones counted from its end.
EDITS = st.lists(
    st.tuples(st.integers(-60, 200), st.integers(0, 255), st.sampled_from(["set", "insert", "delete"])),
    min_size=1,
    max_size=3,
)


def edited(data: bytes, edits: list[tuple[int, int, str]]) -> bytes:
    out = bytearray(data)
    for place, byte, what in edits:
        place %= len(out) or 1
        if what == "insert":
            out.insert(place, byte)
        elif out:
            out[place : place + 1] = [byte] if what == "set" else []
    return bytes(out)


@given(RECORDS, EDITS, st.sampled_from(CODECS), THRESHOLDS)
def test_changed_records_are_judged_alike(
    records: list[Record], edits: list[tuple[int, int, str]], codec: int, threshold: int
) -> None:
    body = edited(build_batch(records)[HEADER_BYTES:], edits)
    with columns_from(threshold):
        agree(framed(body, len(records), codec))


@given(RECORDS, EDITS, st.sampled_from(CODECS), THRESHOLDS)
def test_changed_batches_are_judged_alike(
    records: list[Record], edits: list[tuple[int, int, str]], codec: int, threshold: int
) -> None:
    with columns_from(threshold):
        agree(edited(build_batch(records, codec=codec), edits))


@st.composite
def odd_records(draw: st.DrawFn) -> bytes:
    """Records most of whose fields fit, with numbers of any allowed length and a few beyond."""
    numbers = st.integers(-3, 200) | st.sampled_from(
        [2**k for k in (6, 13, 20, 27, 34, 41, 48, 55, 62, 63, 66)]
    )
    sizes = st.just(1) | st.integers(1, 11)
    data = st.binary(max_size=12)

    def sized(content: bytes | None, lie: int) -> bytes:
        length = -1 if content is None else len(content)
        return varint(length + lie, draw(sizes)) + (content or b"")

    lies = st.just(0) | st.sampled_from([0, 0, 0, 0, -1, 1, 2**40, 2**65])
    headers = varint(0, draw(sizes))
    if draw(st.booleans()) and draw(st.booleans()):
        headers = varint(1) + sized(draw(data), 0) + sized(draw(st.none() | data), draw(lies))
    return record(
        time=varint(draw(numbers), draw(sizes)),
        offset=draw(st.integers(0, 40) | numbers),
        key=sized(draw(st.none() | data), draw(lies)),
        value=sized(draw(st.none() | data), draw(lies)),
        headers=headers,
        length_size=draw(sizes),
        length_lie=draw(lies),
    )


@given(
    st.lists(odd_records(), min_size=1, max_size=3),
    st.integers(0, 60),
    st.integers(0, 60),
    THRESHOLDS,
    st.sampled_from([0, -1, 2**62 + 1, INT64_MAX, -(2**63)]),
    st.booleans(),
)
@example([record(time=LONGEST + b"\x01")], 40, 3, 32, -(2**63), False)
def test_odd_numbers_are_judged_alike(
    odd: list[bytes], before: int, behind: int, threshold: int, base_timestamp: int, append_time: bool
) -> None:
    plain = record(key=b"\x04ab")
    body = plain * before + b"".join(odd) + plain * behind
    count = before + len(odd) + behind
    with columns_from(threshold):
        agree(
            framed(
                body,
                count,
                last_offset_delta=40,
                base_timestamp=base_timestamp,
                attributes=0x08 if append_time else 0,
            )
        )


@given(st.binary(max_size=300), st.integers(0, 40), THRESHOLDS)
def test_any_bytes_are_judged_alike(body: bytes, count: int, threshold: int) -> None:
    with columns_from(threshold):
        agree(framed(body, count))
