"""Builds a batch out of columns of keys and values: the bytes that ``build_batch`` gives, without its loop.

- A record is numbers, key, number, value and headers, which most records do not have: then a zero stands for
  them. The zero is counted to the numbers of the next record, so that four pieces make a record.
- The numbers of a record stand in three words: two for those before the key, one for the length of the value.
- Arrow then takes the pieces of all records in their order out of one array that has them all, which it does
  faster than joining columns.
- Numbers that do not fit into their words are odd enough to be left to a loop over records. So are small
  batches, and records with headers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.records import batch as batches
from tidemill.records.batch import HEADER_BYTES, LENGTH_PREFIX_BYTES
from tidemill.records.checksum import crc32c
from tidemill.records.columns import compute as pc
from tidemill.records.columns.arrays import from_numpy
from tidemill.records.columns.scalar import Int64s
from tidemill.records.compression import NONE, compress

__all__ = ("build_batch_columns", "encode_headers", "split_by_bytes")

_Words = npt.NDArray[np.uint64]

#: Below so many records a loop in Python is faster than the fixed cost of some eighty calls.
_SMALL_BATCH_RECORDS = 256
#: Encoded numbers below this are cached.
_KEPT_NUMBERS = 2048
#: Arrow must be able to hold a batch twice in 31 bits.
_BODY_BYTES_MAX = 2**30
#: Timestamps further apart than this do not fit into a word as differences.
_SPREAD_MS_MAX = 2**48
_WORD_BYTES = 8
_PREFIX_BYTES_MAX = 16
_VALUE_NUMBER_PLACE = 16
_NUMBERS_BYTES = 24
#: The numbers of a record without its own length.
_VALUE, _KEY, _OFFSET, _TIME = range(4)
#: Bytes of a record's attributes and of the number of its headers, which are both zero.
_ZEROS_BYTES = 2
_ONE, _BYTE_BITS, _WORD_BITS = np.uint64(1), np.uint64(8), np.uint64(64)
_ONE_BYTE_NUMBERS = 128
_CONTINUATION_BITS = np.uint64(0x8080808080808080)
#: Steps that split a number into groups of seven bits: largest number to leave alone, low mask, high mask,
#: shift.
_PARTING = tuple(
    (largest, np.uint64(low), np.uint64(high), np.uint64(shift))
    for largest, low, high, shift in (
        (2**28 - 1, 0x000000000FFFFFFF, 0x00FFFFFFF0000000, 4),
        (2**14 - 1, 0x00003FFF00003FFF, 0x0FFFC0000FFFC000, 2),
        (2**7 - 1, 0x007F007F007F007F, 0x3F803F803F803F80, 1),
    )
)


def build_batch_columns(
    keys: pa.BinaryArray | None,
    values: pa.BinaryArray,
    *,
    timestamp_ms: int | Int64s,
    headers: pa.BinaryArray | None = None,
    base_offset: int = 0,
    leader_epoch: int = -1,
    codec: int = NONE,
    producer_id: int = batches.NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = batches.NO_SEQUENCE,
    attributes: int = 0,
) -> bytes:
    """Encode records as one v2 batch. A null value is a tombstone; ``headers`` are from ``encode_headers``.

    >>> from tidemill.records.record import read_records
    >>> data = build_batch_columns(pa.array([b"k"]), pa.array([b"v"]), timestamp_ms=5)
    >>> [(record.key, record.value) for record in read_records(data)]
    [(b'k', b'v')]
    """
    count = len(values)
    _check_counts(count, keys=keys, timestamps=timestamp_ms, headers=headers)
    if not count:
        raise ValueError("a batch has at least one record")
    at_once = count >= _SMALL_BATCH_RECORDS and headers is None
    parts = _encode_at_once(keys, values, timestamp_ms) if at_once else None
    if parts is None:
        parts = [_encode_one_by_one(keys, values, timestamp_ms, headers)]
    if codec != NONE:
        parts = [compress(codec, b"".join(parts))]
    first_ms, _, latest_ms = _time_range(timestamp_ms)
    producer = (producer_id, producer_epoch, base_sequence)
    fields = struct.pack(">hiqqqhii", attributes | codec, count - 1, first_ms, latest_ms, *producer, count)
    return _frame(base_offset, leader_epoch, fields, parts)


def split_by_bytes(
    keys: pa.BinaryArray | None,
    values: pa.BinaryArray,
    max_bytes: int,
    *,
    timestamp_ms: int | Int64s = 0,
    headers: pa.BinaryArray | None = None,
) -> list[slice]:
    """Slices of the columns, so that each makes a batch of at most ``max_bytes`` before compression.

    A record that is larger stands alone. Offsets and timestamps are counted as if all were as long as the
    longest can be, so that a batch may be smaller than it need be, by a few bytes a record.

    >>> split_by_bytes(None, pa.array([b"v" * 40] * 3), 160)
    [slice(0, 2, None), slice(2, 3, None)]
    """
    count = len(values)
    _check_counts(count, keys=keys, timestamps=timestamp_ms, headers=headers)
    if not count:
        return []
    _, earliest_ms, latest_ms = _time_range(timestamp_ms)
    time_bytes, offset_bytes = len(_NUMBER_BYTES[latest_ms - earliest_ms]), len(_NUMBER_BYTES[count - 1])
    inner = _slot_sizes(_lengths(values, count)) + _slot_sizes(_lengths(keys, count))
    inner += _ZEROS_BYTES + time_bytes + offset_bytes
    if headers is not None:
        inner += _lengths(headers, count) - 1
    ends = np.cumsum(inner + _number_sizes(_zigzag(inner)))
    room = max_bytes - HEADER_BYTES
    found: list[slice] = []
    start = used = 0
    while start < count:
        end = max(start + 1, int(ends.searchsorted(used + room, "right")))
        found.append(slice(start, end))
        start, used = end, int(ends[end - 1])
    return found


def encode_headers(headers: pa.ListArray) -> pa.BinaryArray | None:
    """Headers as they stand at the end of each record; None where no record has any.

    ``headers`` are lists of (name, value), as structs of text and bytes. Few records have headers, so they
    are encoded in a loop.

    >>> entry = pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))
    >>> encode_headers(pa.array([[{"key": "a", "value": b"1"}], None], entry)).to_pylist()
    [b'\\x02\\x02a\\x021', b'\\x00']
    """
    if not pc.any(pc.greater(pc.list_value_length(headers), 0)).as_py():
        return None
    names, contents = headers.flatten().flatten()
    pairs = zip(names.to_pylist(), contents.to_pylist(), strict=True)
    number = _NUMBER_BYTES
    encoded = []
    for count in pc.list_value_length(headers).fill_null(0).to_pylist():
        parts = [number[count]]
        for name, value in islice(pairs, count):
            if name is None:
                raise ValueError("a header has no name: give every header a key")
            text = name.encode()
            parts += (number[len(text)], text, number[-1 if value is None else len(value)], value or b"")
        encoded.append(b"".join(parts))
    return pa.array(encoded, pa.binary())


def _check_counts(count: int, **columns: pa.BinaryArray | int | Int64s | None) -> None:
    for name, column in columns.items():
        if column is not None and not isinstance(column, int) and len(column) != count:
            raise ValueError(f"{len(column)} {name} do not fit {count} values: give one for each value")


def _time_range(timestamp_ms: int | Int64s) -> tuple[int, int, int]:
    """The first, the earliest and the latest timestamp."""
    if isinstance(timestamp_ms, int):
        return timestamp_ms, timestamp_ms, timestamp_ms
    return int(timestamp_ms[0]), int(timestamp_ms.min()), int(timestamp_ms.max())


def _frame(base_offset: int, leader_epoch: int, fields: bytes, body: Sequence[bytes | memoryview]) -> bytes:
    """The whole batch: ``fields`` are those between the checksum and the records, which are copied once."""
    crc = crc32c(fields)
    length = HEADER_BYTES - LENGTH_PREFIX_BYTES
    for part in body:
        crc = crc32c(part, crc)
        length += len(part)
    prefix = struct.pack(">qiibI", base_offset, length, leader_epoch, batches.MAGIC, crc)
    return b"".join([prefix, fields, *body])


# --- one record after the other


class _NumberBytes(dict[int, bytes]):
    """Numbers as they are encoded in a record; the usual ones are cached."""

    def __missing__(self, value: int) -> bytes:
        zigzag = (value << 1) ^ (value >> 63)
        out = bytearray()
        while zigzag >= _ONE_BYTE_NUMBERS:
            out.append((zigzag & 0x7F) | 0x80)
            zigzag >>= 7
        out.append(zigzag)
        return bytes(out)


_NUMBER_BYTES = _NumberBytes()
_NUMBER_BYTES.update((value, _NUMBER_BYTES[value]) for value in range(-1, _KEPT_NUMBERS))


def _encode_one_by_one(
    keys: pa.BinaryArray | None,
    values: pa.BinaryArray,
    timestamp_ms: int | Int64s,
    headers: pa.BinaryArray | None,
) -> bytes:
    """Encode the records of a batch in a loop."""
    count = len(values)
    number = _NUMBER_BYTES
    first_ms, _, _ = _time_range(timestamp_ms)
    times = [timestamp_ms] * count if isinstance(timestamp_ms, int) else timestamp_ms.tolist()
    plain_keys = [None] * count if keys is None else keys.to_pylist()
    ends = [b"\0"] * count if headers is None else headers.to_pylist()
    parts: list[bytes] = []
    rows = zip(plain_keys, values.to_pylist(), times, ends, strict=True)
    for delta, (key, value, time_ms, end) in enumerate(rows):
        fields = (
            b"\0",
            number[time_ms - first_ms],
            number[delta],
            number[-1 if key is None else len(key)],
            key or b"",
            number[-1 if value is None else len(value)],
            value or b"",
            end,
        )
        inner = b"".join(fields)
        parts += (number[len(inner)], inner)
    return b"".join(parts)


# --- all records at once


def _encode_at_once(
    keys: pa.BinaryArray | None, values: pa.BinaryArray, timestamp_ms: int | Int64s
) -> Sequence[bytes | memoryview] | None:
    """Encode the records of a batch, in parts to be joined; None if their numbers do not fit into words."""
    first_ms, earliest_ms, latest_ms = _time_range(timestamp_ms)
    if latest_ms - earliest_ms > _SPREAD_MS_MAX:
        return None
    count = len(values)
    columns = np.empty((4, count), np.int64)
    columns[_VALUE], columns[_KEY] = _lengths(values, count), _lengths(keys, count)
    columns[_OFFSET], columns[_TIME] = np.arange(count), timestamp_ms
    columns[_TIME] -= first_ms
    numbers, sizes = _numbers(_zigzag(columns))
    inner = np.maximum(columns[_VALUE], 0) + np.maximum(columns[_KEY], 0) + sizes.sum(axis=0) + _ZEROS_BYTES
    _check_size(int(inner.sum()) + count * _NUMBERS_BYTES)
    # In front of the length there is the zero of the record before, and behind it are the attributes.
    prefixes = _Prefixes(*_numbers(_zigzag(inner)))
    for field in (_TIME, _OFFSET, _KEY):
        prefixes.put(numbers[field], sizes[field])
    if int(prefixes.sizes.max()) > _PREFIX_BYTES_MAX:
        return None
    words = np.empty((count, _NUMBERS_BYTES // _WORD_BYTES), np.dtype("<u8"))
    words[:, 0], words[:, 1], words[:, 2] = prefixes.low, prefixes.high, numbers[_VALUE]
    return [_interleave(words, prefixes.sizes, sizes[_VALUE], keys, values)[1:], b"\0"]


def _check_size(size_bytes: int) -> None:
    if size_bytes > _BODY_BYTES_MAX:
        raise ValueError(f"{size_bytes} bytes are too many for a batch: cut the columns with split_by_bytes")


class _Prefixes:
    """The bytes before the key of each record, in two words, and how many there are so far."""

    def __init__(self, lengths: _Words, length_sizes: Int64s) -> None:
        self.low: _Words = lengths << _BYTE_BITS
        self.high: _Words = np.zeros_like(lengths)
        self.sizes = length_sizes + _ZEROS_BYTES

    def put(self, numbers: _Words, sizes: Int64s) -> None:
        """Append one number to each prefix. In numpy a shift by 64 bits or more leaves nothing."""
        bits = self.sizes.view(np.uint64) * _BYTE_BITS
        self.low |= numbers << bits
        self.sizes += sizes
        if int(self.sizes.max()) > _WORD_BYTES:
            self.high |= (numbers >> (_WORD_BITS - bits)) | (numbers << (bits - _WORD_BITS))


def _interleave(
    words: _Words,
    prefix_sizes: Int64s,
    value_number_sizes: Int64s,
    keys: pa.BinaryArray | None,
    values: pa.BinaryArray,
) -> memoryview:
    """Join prefix, key, number and value of every record, in order."""
    count = len(words)
    # The words are an array of prefix, gap, number, gap, prefix and so on.
    cuts = np.empty((count, 4), np.int32)
    cuts[:, 0] = np.arange(0, count * _NUMBERS_BYTES, _NUMBERS_BYTES)
    cuts[:, 2] = cuts[:, 0] + _VALUE_NUMBER_PLACE
    cuts[:, 1] = cuts[:, 0] + prefix_sizes
    cuts[:, 3] = cuts[:, 2] + value_number_sizes
    numbers_count = 4 * count - 1
    numbers = pa.BinaryArray.from_buffers(
        pa.binary(), numbers_count, [None, pa.py_buffer(cuts), pa.py_buffer(words)]
    )
    order = np.empty((count, 3 if keys is None else 4), np.int64)
    order[:, 0] = np.arange(0, 4 * count, 4)
    order[:, -2] = order[:, 0] + 2
    order[:, -1] = np.arange(numbers_count, numbers_count + count)
    columns = [numbers, values]
    if keys is not None:
        order[:, 1] = order[:, -1] + count
        columns.append(keys)
    pieces = pa.concat_arrays(columns).take(from_numpy(order.reshape(-1)))
    _, ends, joined = pieces.buffers()
    return memoryview(joined)[: np.frombuffer(ends, np.int32)[len(pieces)]]


# --- numbers


def _lengths(column: pa.BinaryArray | None, count: int) -> npt.NDArray[np.int32]:
    """The length of each entry, -1 for null."""
    if column is None:
        return np.full(count, -1, np.int32)
    lengths = pc.binary_length(column)
    found: npt.NDArray[np.int32] = (lengths.fill_null(-1) if lengths.null_count else lengths).to_numpy()
    return found


def _slot_sizes(lengths: npt.NDArray[np.int32]) -> Int64s:
    """The encoded sizes of nullable byte strings: of their lengths and of the bytes themselves."""
    return _number_sizes(_zigzag(lengths.astype(np.int64))) + np.maximum(lengths, 0)


def _zigzag(values: Int64s) -> _Words:
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def _number_sizes(numbers: _Words) -> Int64s:
    """How many groups of seven bits each number has."""
    sizes = np.ones(numbers.shape, np.int64)
    largest = int(numbers.max()) >> 7
    bits = 7
    while largest:
        sizes += numbers >= np.uint64(1 << bits)
        largest >>= 7
        bits += 7
    return sizes


def _numbers(numbers: _Words) -> tuple[_Words, Int64s]:
    """Numbers of at most 56 bits as bytes in a word, the first byte lowest, and how many bytes these are."""
    sizes = _number_sizes(numbers)
    most = int(numbers.max())
    for largest, low, high, shift in _PARTING:
        if most > largest:
            numbers = (numbers & low) | ((numbers & high) << shift)
    if most < _ONE_BYTE_NUMBERS:
        return numbers, sizes
    bits_before_last = (sizes - 1).view(np.uint64) * _BYTE_BITS
    return numbers | (_CONTINUATION_BITS & ((_ONE << bits_before_last) - _ONE)), sizes
