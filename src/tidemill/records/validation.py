"""Checks the records of a producer's batch against its header, by the rules of Kafka's LogValidator.

- There are exactly as many records as the header counts, and nothing follows the last one.
- Each record's length, and the lengths and numbers inside it, fit into it; header names are UTF-8.
- Offsets count from 0 without a gap: a reader finds a record by them.
- A compacted topic needs a key in each record, and a topic has limits for timestamps.

A batch that breaks a rule is refused whole, as INVALID_RECORD or INVALID_TIMESTAMP: its checksum is right, so
sending it again would not help. The largest timestamp is found on the way, since the one in the header is
only what the producer says. Small batches are checked here, record by record and without numpy, larger ones
in ``columns.validation``, which leaves whatever it cannot judge to the functions here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tidemill.errors import ApiError, ErrorCode, InvalidRecords
from tidemill.records.batch import HEADER_BYTES, NO_TIMESTAMP, BatchHeader
from tidemill.records.compression import decompress
from tidemill.records.record import MAX_DECOMPRESSED_BYTES, RECORD_BYTES_MIN, read_records
from tidemill.records.rewriting import no_breath
from tidemill.records.varints import read_varint

__all__ = (
    "INT64_MAX",
    "INT64_MIN",
    "NO_RULES",
    "SMALL_BATCH_RECORDS",
    "Body",
    "RecordRules",
    "check_each",
    "check_records",
    "check_stored_records",
    "record_faults",
)

#: Uncompressed records.
Body = bytes | bytearray | memoryview

#: Up to so many records a loop in Python costs less than some forty calls of numpy.
SMALL_BATCH_RECORDS = 80
#: So many records are looked at between two calls of ``breathe``.
_RECORDS_PER_BREATH = 256
#: The most records at fault that an answer names.
_NAMED_RECORDS_MAX = 1_000
#: Limits of timestamps for topics that have none.
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class RecordRules(NamedTuple):
    """The rules of a topic for records, beyond being sound."""

    needs_keys: bool = False
    #: Timestamps below the first or above the second are refused, except those that are not set.
    min_timestamp_ms: int = INT64_MIN
    max_timestamp_ms: int = INT64_MAX

    def allows_up_to(self, max_timestamp: int) -> bool:
        """Whether any timestamps are allowed, however old they are, if the largest is ``max_timestamp``."""
        return self.min_timestamp_ms == INT64_MIN and max_timestamp <= self.max_timestamp_ms


NO_RULES = RecordRules()


def check_records(
    header: BatchHeader,
    body: Body,
    rules: RecordRules = NO_RULES,
    breathe: Callable[[], None] = no_breath,
) -> int:
    """Raise ``InvalidRecords`` unless the uncompressed ``body`` is what ``header`` and ``rules`` say.

    Returns the largest timestamp of the records, which need not be the header's; ``NO_TIMESTAMP`` if none is
    set. ``breathe`` is called now and then, so that a large batch in a thread does not keep others waiting.
    """
    count = header.record_count
    if count * RECORD_BYTES_MIN > len(body):
        raise InvalidRecords(f"{count} records do not fit in {len(body)} bytes")
    if count <= SMALL_BATCH_RECORDS:
        end, largest = check_each(header, body, 0, range(count), rules, breathe)
    else:
        # Imported late: numpy would cost a node that gets small batches only a fifth of its memory.
        from tidemill.records.columns.validation import check_in_windows

        end, largest = check_in_windows(header, body, rules, breathe)
    if end != len(body):
        raise InvalidRecords(f"{len(body) - end} bytes follow the last of {count} records")
    return largest


def check_stored_records(
    data: bytes | memoryview, header: BatchHeader, max_bytes: int = MAX_DECOMPRESSED_BYTES
) -> int:
    """Raise ``ApiError`` unless readers can read every record of a batch in a log.

    Returns the largest timestamp that the header should have. Compaction leaves gaps between offsets, and
    batches without records, which keep their header's.
    """
    plain = decompress(header.codec, memoryview(data)[HEADER_BYTES : header.size_bytes], max_bytes)
    if header.record_count == 0 and not plain:
        return header.max_timestamp
    try:
        largest = check_records(header, plain)
    except InvalidRecords:
        offset, largest = header.base_offset - 1, NO_TIMESTAMP
        for record in read_records(data, max_bytes):
            if record.offset <= offset:
                raise InvalidRecords(f"offset {record.offset} follows offset {offset}") from None
            offset, largest = record.offset, max(largest, record.timestamp_ms)
    return header.max_timestamp if header.is_append_time else largest


def check_each(
    header: BatchHeader,
    body: Body,
    position: int,
    numbers: range,
    rules: RecordRules,
    breathe: Callable[[], None] = no_breath,
) -> tuple[int, int]:
    """Check the records with these numbers, the first of which is at ``position``.

    Returns where they end, and their largest timestamp.
    """
    keyless: list[int] = []
    untimely: list[int] = []
    base_timestamp, largest = header.base_timestamp, NO_TIMESTAMP
    _, oldest, newest = rules
    for number in numbers:
        try:
            position, timestamp_delta, key_length = _check_one(body, position, number)
        except IndexError:
            raise _unsound(number, "it runs past the end of the batch") from None
        except OverflowError:
            raise _unsound(number, "a number in it does not fit in 64 bits") from None
        timestamp = base_timestamp + timestamp_delta
        if not oldest <= timestamp <= newest:
            if not INT64_MIN <= timestamp <= INT64_MAX:
                raise _unsound(number, "its timestamp does not fit in 64 bits")
            if timestamp != NO_TIMESTAMP:
                untimely.append(number)
        if timestamp > largest:
            largest = timestamp
        if key_length < 0:
            keyless.append(number)
        if not number % _RECORDS_PER_BREATH:
            breathe()
    record_faults(rules, keyless, untimely)
    return position, largest


def record_faults(rules: RecordRules, keyless: list[int], untimely: list[int]) -> None:
    """Raise the error that names the records that the topic refuses, if there are any."""
    if rules.needs_keys and keyless:
        what = "a record without a key cannot be written to a compacted topic"
        raise InvalidRecords(what, record_errors=_named(keyless, what))
    if untimely:
        limits = [f"above {rules.max_timestamp_ms} (message.timestamp.after.max.ms)"]
        if rules.min_timestamp_ms > INT64_MIN:
            limits.append(f"below {rules.min_timestamp_ms} (message.timestamp.before.max.ms)")
        what = f"a timestamp is {' or '.join(limits)}"
        raise InvalidRecords(what, code=ErrorCode.invalid_timestamp, record_errors=_named(untimely, what))


def _named(numbers: list[int], what: str) -> tuple[tuple[int, str], ...]:
    return tuple((number, what) for number in numbers[:_NAMED_RECORDS_MAX])


def _check_one(body: Body, position: int, number: int) -> tuple[int, int, int]:
    """Check a record; returns where it ends, its timestamp delta, and the length of its key.

    Raises as ``read_varint`` does. Numbers of one byte, which most are, are read inline:
    a call costs as much again.
    """
    length, start = read_varint(body, position)
    end = start + length
    if length < 0 or end > len(body):
        raise _unsound(number, f"its length of {length} bytes does not fit in the batch")
    position = start + 1  # behind attributes that mean nothing
    byte = body[position]
    if byte < 0x80:
        timestamp_delta, position = (byte >> 1) ^ -(byte & 1), position + 1
    else:
        timestamp_delta, position = read_varint(body, position)
    byte = body[position]
    if byte < 0x80:
        offset_delta, position = (byte >> 1) ^ -(byte & 1), position + 1
    else:
        offset_delta, position = read_varint(body, position)
    if offset_delta != number:
        raise _unsound(
            number, f"it says that it is record {offset_delta}; offsets count from 0 without a gap"
        )
    byte = body[position]
    if byte < 0x80:
        key_length, position = (byte >> 1) ^ -(byte & 1), position + 1
    else:
        key_length, position = read_varint(body, position)
    if key_length > 0:
        position += key_length
    value_length, position = read_varint(body, position)
    if key_length < -1 or value_length < -1:
        raise _unsound(number, f"a key of {key_length} bytes and a value of {value_length}")
    if value_length > 0:
        position += value_length
    if body[position]:
        position = _check_headers(body, position, end, number)
    else:
        position += 1
    if position != end:
        raise _unsound(number, "its length does not fit its fields")
    return end, timestamp_delta, key_length


def _check_headers(body: Body, position: int, end: int, number: int) -> int:
    """Check the headers whose count is at ``position``; returns where they end."""
    count, position = read_varint(body, position)
    if count < 0 or count * 2 > end - position:
        raise _unsound(number, f"{count} headers do not fit in it")
    for _ in range(count):
        length, position = read_varint(body, position)
        if length < 0 or position + length > end:
            raise _unsound(number, f"a header's name of {length} bytes does not fit in it")
        try:
            str(body[position : position + length], "utf-8")
        except UnicodeDecodeError:
            raise _unsound(number, "a header's name is not UTF-8") from None
        length, position = read_varint(body, position + length)
        if length < -1 or position + length > end:
            raise _unsound(number, f"a header's value of {length} bytes does not fit in it")
        position += max(0, length)
    return position


def _unsound(number: int, why: str) -> ApiError:
    return InvalidRecords(f"record {number} is unsound: {why}", record_errors=((number, why),))
