"""Records that are not what their batch says are refused, and named; everything sound passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import ApiError, ErrorCode, InvalidRecords
from tidemill.records.batch import HEADER_BYTES, BatchHeader, parse_header
from tidemill.records.record import Record, build_batch, read_records
from tidemill.records.validation import SMALL_BATCH_RECORDS, RecordRules, check_each, check_records
from tidemill.records.varints import to_varint

MANY = 3 * SMALL_BATCH_RECORDS
NULLABLE = st.none() | st.binary(max_size=90)
HEADERS = st.lists(st.tuples(st.text(max_size=4), NULLABLE), max_size=2).map(tuple)
RECORDS = st.lists(
    st.builds(Record, NULLABLE, NULLABLE, st.integers(0, 2**62), HEADERS), min_size=1, max_size=12
)


def record(
    number: int, *, key: bytes | None = b"k", value: bytes | None = b"v", tail: bytes = b"\x00"
) -> bytes:
    """One record, of which every part can be told."""
    inner = b"\x00" + to_varint(0) + to_varint(number) + field(key) + field(value) + tail
    return to_varint(len(inner)) + inner


def field(data: bytes | None) -> bytes:
    return to_varint(-1) if data is None else to_varint(len(data)) + data


def header_of(count: int, base_timestamp: int = 1_000) -> BatchHeader:
    return parse_header(build_batch([Record(b"k", b"v", base_timestamp)]))._replace(
        record_count=count, last_offset_delta=count - 1
    )


def refusal(body: bytes, count: int, rules: RecordRules | None = None) -> InvalidRecords:
    with pytest.raises(InvalidRecords) as caught:
        check_records(header_of(count), body, rules or RecordRules())
    return caught.value


@given(RECORDS, st.integers(1, 30))
def test_whatever_is_built_is_sound(records: list[Record], times: int) -> None:
    data = build_batch(records * times)
    check_records(parse_header(data), memoryview(data)[HEADER_BYTES:])


@pytest.mark.parametrize("count", [3, MANY, 20_000])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a record too few", lambda records: records[:-1]),
        ("a record too many", lambda records: [*records, record(len(records))]),
        ("bytes behind the last", lambda records: [*records, b"\x00"]),
        ("the last cut short", lambda records: [*records[:-1], records[-1][:-1]]),
    ],
)
def test_a_wrong_count_is_refused(
    count: int, name: str, change: Callable[[list[bytes]], list[bytes]]
) -> None:
    body = b"".join(change([record(number) for number in range(count)]))
    assert refusal(body, count).code == ErrorCode.invalid_record


def test_a_count_that_cannot_fit_is_refused_before_anything_is_looked_at() -> None:
    assert "2147483647 records do not fit in 12 bytes" in refusal(bytes(12), 2**31 - 1).message


UNSOUND = {
    "an offset that repeats": lambda number: record(number - 1),
    "an offset that skips": lambda number: record(number + 1),
    "a negative length": lambda number: to_varint(-5) + record(number)[1:],
    "a length of 2**40": lambda number: to_varint(2**40) + record(number)[1:],
    "a negative key length": lambda number: record(number).replace(field(b"k"), to_varint(-2) + b"k"),
    "a key that runs out": lambda number: record(number).replace(field(b"k"), to_varint(2**33) + b"k"),
    "a value that runs out": lambda number: record(number).replace(field(b"v"), to_varint(70) + b"v"),
    "no room for headers": lambda number: record(number, tail=b""),
    "a header count that lies": lambda number: record(number, tail=to_varint(2**20)),
    "a negative header count": lambda number: record(number, tail=to_varint(-1)),
    "a header without a name": lambda number: record(number, tail=to_varint(1) + to_varint(-1) * 2),
    "a header name that is not UTF-8": lambda number: record(number, tail=to_varint(1) + field(b"\xff") * 2),
    "bytes behind its fields": lambda number: record(number, tail=b"\x00\x00"),
    "a number of eleven bytes": lambda number: to_varint(18) + b"\x00" + b"\xff" * 11 + b"\x01" * 6,
}


@pytest.mark.parametrize("count", [5, MANY])
@pytest.mark.parametrize("what", UNSOUND)
def test_an_unsound_record_is_refused_and_named(what: str, count: int) -> None:
    records = [record(number) for number in range(count)]
    at = count // 2
    records[at] = UNSOUND[what](at)
    error = refusal(b"".join(records), count)
    assert error.code == ErrorCode.invalid_record
    assert not error.retriable
    # What comes behind a wrong length may be what is found first, never what comes before it.
    assert error.record_errors == () or error.record_errors[0][0] >= at


@pytest.mark.parametrize("count", [6, MANY, 20_000])
def test_the_records_without_a_key_are_named_where_keys_are_needed(count: int) -> None:
    keyless = {1, 4, count - 1}
    records = [record(number, key=None if number in keyless else b"k") for number in range(count)]
    body = b"".join(records)
    check_records(header_of(count), body)
    error = refusal(body, count, RecordRules(needs_keys=True))
    assert error.code == ErrorCode.invalid_record
    named = {number for number, _ in error.record_errors}
    # A batch is looked at in windows, and refused by the first with such a record.
    assert named == {number for number in keyless if number < 8192}


@pytest.mark.parametrize("count", [6, MANY])
def test_the_records_that_are_too_old_are_named(count: int) -> None:
    records = [Record(b"k", b"v", 1_000 if number != 2 else 10) for number in range(count)]
    data = build_batch(records)
    body = memoryview(data)[HEADER_BYTES:]
    check_records(parse_header(data), body, RecordRules(min_timestamp_ms=10))
    with pytest.raises(InvalidRecords) as caught:
        check_records(parse_header(data), body, RecordRules(min_timestamp_ms=11))
    assert caught.value.code == ErrorCode.invalid_timestamp
    assert [number for number, _ in caught.value.record_errors] == [2]


@pytest.mark.parametrize("count", [6, MANY])
@pytest.mark.parametrize("far", [10**6, 2**60], ids=["near", "beyond what columns judge"])
def test_the_records_that_are_too_new_are_named_whatever_the_header_says(count: int, far: int) -> None:
    records = [Record(b"k", b"v", far if number in (2, 4) else 1_000) for number in range(count)]
    data = build_batch(records)
    header, body = parse_header(data)._replace(max_timestamp=5), memoryview(data)[HEADER_BYTES:]
    check_records(header, body, RecordRules(max_timestamp_ms=far))
    with pytest.raises(InvalidRecords, match=r"message\.timestamp\.after\.max\.ms") as caught:
        check_records(header, body, RecordRules(max_timestamp_ms=far - 1))
    assert caught.value.code == ErrorCode.invalid_timestamp
    assert [number for number, _ in caught.value.record_errors] == [2, 4]


@pytest.mark.parametrize("count", [6, MANY, 20_000])
def test_the_largest_timestamp_is_found_wherever_it_is(count: int) -> None:
    for at in (0, count // 2, count - 1):
        data = build_batch([Record(b"k", b"v", 2_000 if n == at else 1_000) for n in range(count)])
        header = parse_header(data)._replace(max_timestamp=5)
        assert check_records(header, memoryview(data)[HEADER_BYTES:]) == 2_000


@pytest.mark.parametrize("count", [6, MANY])
@pytest.mark.parametrize("timestamp", [-1, -7])
def test_without_a_timestamp_the_largest_is_that_of_none(count: int, timestamp: int) -> None:
    data = build_batch([Record(b"k", b"v", timestamp) for _ in range(count)])
    assert check_records(parse_header(data), memoryview(data)[HEADER_BYTES:]) == -1


@given(st.data())
def test_columns_and_one_by_one_agree_on_any_bytes(data: st.DataObject) -> None:
    records = [record(number, value=b"v" * (number % 7)) for number in range(MANY)]
    body = bytearray(b"".join(records))
    for _ in range(data.draw(st.integers(0, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    header = header_of(MANY)
    assert outcome(lambda: check_records(header, body)) == outcome(lambda: check_to_end(header, bytes(body)))
    if isinstance(outcome(lambda: check_records(header, body)), int):
        sound = build_batch([Record(b"k", b"v", 1_000)])[:HEADER_BYTES] + bytes(body)
        sound = sound[:57] + MANY.to_bytes(4, "big") + sound[61:]
        sound = sound[:23] + (MANY - 1).to_bytes(4, "big") + sound[27:]
        sound = sound[:8] + (len(sound) - 12).to_bytes(4, "big") + sound[12:]
        assert len(list(read_records(sound))) == MANY


def check_to_end(header: BatchHeader, body: bytes) -> int:
    end, largest = check_each(header, body, 0, range(header.record_count), RecordRules())
    if end != len(body):
        raise InvalidRecords(f"{len(body) - end} bytes follow the last of {header.record_count} records")
    return largest


def outcome(check: Callable[[], int]) -> str | int:
    """The largest timestamp, or what is wrong."""
    try:
        return check()
    except ApiError as error:
        return error.message
