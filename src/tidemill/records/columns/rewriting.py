"""Reads the records of many batches as columns, and rewrites batches without some of their records.

A producer that waits for nobody writes batches of a few records, and what numpy costs is calls. So the
uncompressed batches are joined, and looked at together: records follow each other across the joints as they
do inside a batch, which one walk over their lengths uses. Nothing is decoded that need not be: a record is
found by its length, and values and headers are not looked at.

- A part is at most ``WINDOW_RECORDS`` records, or one batch if that has more. Columns take 50 bytes a record.
- What is found is what ``index_records`` finds. Where a part has something that columns cannot judge (numbers
  of eight bytes and more, anything that does not fit), it is halved until only that batch is left, and
  ``index_records`` has the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidemill.errors import ApiError
from tidemill.records.batch import HEADER_BYTES, NO_TIMESTAMP, BatchHeader
from tidemill.records.columns.fields import (
    BODY_MARGIN_BYTES,
    PLAIN_TIMESTAMP_MAX,
    WINDOW_RECORDS,
    Breathe,
    Int64s,
    Unusual,
    Words,
    find_starts,
    read_fields,
    words_of,
)
from tidemill.records.compression import decompress
from tidemill.records.record import RECORD_BYTES_MIN
from tidemill.records.rewriting import (
    INDEX_FIELDS,
    fits_64_bits,
    index_records,
    no_breath,
    rebuild_batch,
)
from tidemill.records.varints import to_varint

__all__ = ("Bools", "RecordIndex", "index_batches")

Bools = npt.NDArray[np.bool_]
#: The bytes of a batch in the log.
Stored = bytes | bytearray | memoryview

_PART_BYTES = 2 * 1024 * 1024
_INT64_MIN = -(2**63)
_MARGIN = bytes(BODY_MARGIN_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class RecordIndex:
    """Positions and fields of the records of a part. ``body`` ends with the margin."""

    #: Index of each batch among those that ``index_batches`` was given.
    numbers: Sequence[int]
    headers: Sequence[BatchHeader]
    body: bytes
    #: Where the records of each batch begin in the columns, and where those of the last one end.
    cuts: Int64s
    #: Where each record begins, and where the last one ends.
    bounds: Int64s
    #: Position behind the timestamp of each record.
    after_timestamps: Int64s
    timestamp_deltas: Int64s
    #: Absolute offsets.
    offsets: Int64s
    #: Where each key starts and ends; without a key, the end is before the start.
    key_starts: Int64s
    key_ends: Int64s
    has_no_value: Bools

    def windows(self, start: int, end: int) -> Iterator[slice]:
        """Slices of the columns that are short enough not to keep other threads waiting."""
        for first in range(start, end, WINDOW_RECORDS):
            yield slice(first, min(first + WINDOW_RECORDS, end))

    def count_by_batch(self, chosen: Bools) -> Int64s:
        """The number of chosen records of each batch."""
        return np.add.reduceat(chosen, self.cuts[:-1], dtype=np.int64)

    def keep(self, kept: Bools, rewritten: Bools, horizons: Sequence[int | None]) -> Iterator[bytes | None]:
        """Each batch that is to be ``rewritten``, with its ``kept`` records only.

        ``horizons`` has the delete horizon to be set for each batch of the part, if any. The result is None
        for a batch whose timestamps cannot be written relative to its horizon.
        """
        counts = np.diff(self.cuts)
        kept = kept & np.repeat(rewritten, counts)
        left = self.count_by_batch(kept).tolist()
        largest = np.maximum.reduceat(np.where(kept, self.timestamp_deltas, _INT64_MIN), self.cuts[:-1])
        slices = self._slices(kept)
        for number in np.flatnonzero(rewritten).tolist():
            header, horizon_ms = self.headers[number], horizons[number]
            max_timestamp = header.max_timestamp
            if not header.is_append_time:
                max_timestamp = max(NO_TIMESTAMP, header.base_timestamp + int(largest[number]))
            if horizon_ms is None or header.is_append_time:
                # With the broker's time all records have the batch's timestamp; their own are not read.
                records: bytes | None = b"".join(slices(number))
            else:
                records = self._restamped(number, kept, horizon_ms)
            if records is None:
                yield None
            else:
                yield rebuild_batch(header, records, left[number], max_timestamp, horizon_ms)

    def _slices(self, kept: Bools) -> Callable[[int], list[bytes]]:
        """A function that gives the bytes of a batch's ``kept`` records; neighbours are in one piece."""
        changes = np.empty(len(kept) + 1, np.bool_)
        changes[0], changes[-1] = kept[0], kept[-1]
        np.not_equal(kept[1:], kept[:-1], out=changes[1:-1])
        # A piece ends with its batch, too, and the next one begins there.
        joints = self.cuts[1:-1]
        joints = joints[kept[joints] & kept[joints - 1]]
        edges = np.sort(np.concatenate([np.flatnonzero(changes), joints, joints]), kind="stable")
        firsts, behind = edges[0::2], edges[1::2]
        pieces = np.searchsorted(firsts, self.cuts).tolist()
        starts, ends = self.bounds[firsts].tolist(), self.bounds[behind].tolist()
        body = self.body

        def slices(number: int) -> list[bytes]:
            chosen = range(pieces[number], pieces[number + 1])
            return [body[starts[piece] : ends[piece]] for piece in chosen]

        return slices

    def _restamped(self, number: int, kept: Bools, horizon_ms: int) -> bytes | None:
        """The kept records of a batch, with timestamps relative to the horizon; None if these do not fit."""
        first, behind = int(self.cuts[number]), int(self.cuts[number + 1])
        rows = first + np.flatnonzero(kept[first:behind])
        shift = self.headers[number].base_timestamp - horizon_ms
        parts: list[bytes] = []
        stamps: dict[int, bytes] = {}
        lengths: dict[int, bytes] = {}
        columns = (self.timestamp_deltas[rows], self.after_timestamps[rows], self.bounds[rows + 1])
        for delta, start, end in zip(*(column.tolist() for column in columns), strict=True):
            stamp = stamps.get(delta)
            if stamp is None:
                if not fits_64_bits(delta + shift):
                    return None
                stamp = stamps[delta] = b"\x00" + to_varint(delta + shift)
            length = end - start + len(stamp)
            prefix = lengths.get(length)
            if prefix is None:
                prefix = lengths[length] = to_varint(length)
            parts += (prefix, stamp, self.body[start:end])
        return b"".join(parts)


def index_batches(
    batches: Iterable[tuple[BatchHeader, Stored]], max_bytes: int, breathe: Breathe = no_breath
) -> Iterator[RecordIndex]:
    """The records of all batches that can be read, part by part; none of the batches is without records.

    ``breathe`` is called now and then, so that other threads need not wait.
    """
    numbers: list[int] = []
    headers: list[BatchHeader] = []
    bodies: list[bytes | memoryview] = []
    records = size_bytes = 0
    for number, (header, data) in enumerate(batches):
        body: bytes | memoryview = memoryview(data)[HEADER_BYTES:]
        if codec := header.codec:
            try:
                # Copied, because the buffer that it is unpacked into is far larger than a small batch.
                body = bytes(decompress(codec, body, max_bytes))
            except ApiError:
                continue
            breathe()
        if bodies and (
            records + header.record_count > WINDOW_RECORDS or size_bytes + len(body) > _PART_BYTES
        ):
            yield from _index_part(numbers, headers, bodies, breathe)
            numbers, headers, bodies, records, size_bytes = [], [], [], 0, 0
        numbers.append(number)
        headers.append(header)
        bodies.append(body)
        records += header.record_count
        size_bytes += len(body)
    if bodies:
        yield from _index_part(numbers, headers, bodies, breathe)


def _index_part(
    numbers: list[int], headers: list[BatchHeader], bodies: list[bytes | memoryview], breathe: Breathe
) -> Iterator[RecordIndex]:
    try:
        part = _index_columns(numbers, headers, bodies, breathe)
    except Unusual:
        if len(bodies) == 1:
            yield from _index_odd(numbers, headers, bytes(bodies[0]), breathe)
        else:
            half = len(bodies) // 2
            yield from _index_part(numbers[:half], headers[:half], bodies[:half], breathe)
            yield from _index_part(numbers[half:], headers[half:], bodies[half:], breathe)
    else:
        yield part


def _index_odd(
    numbers: list[int], headers: list[BatchHeader], body: bytes, breathe: Breathe
) -> Iterator[RecordIndex]:
    """The index of a part that is one batch, read in a loop, if its records can be read."""
    try:
        flat = index_records(headers[0], body, breathe)
    except ApiError:
        return
    fields: Int64s = np.array(flat, np.int64).reshape(-1, INDEX_FIELDS).T
    starts, after_timestamps, timestamp_deltas, offset_deltas, key_starts, key_ends, has_no_value = fields
    yield RecordIndex(
        numbers,
        headers,
        body + _MARGIN,
        np.array([0, len(starts)]),
        np.append(starts, len(body)),
        after_timestamps,
        timestamp_deltas,
        offset_deltas + headers[0].base_offset,
        key_starts,
        key_ends,
        has_no_value != 0,
    )


def _index_columns(
    numbers: list[int], headers: list[BatchHeader], bodies: list[bytes | memoryview], breathe: Breathe
) -> RecordIndex:
    """The index of a part, read with numpy. Raises ``Unusual``."""
    counts = np.array([header.record_count for header in headers])
    timestamps = [header.base_timestamp for header in headers]
    if counts.min() <= 0 or max(timestamps) > PLAIN_TIMESTAMP_MAX or min(timestamps) < -PLAIN_TIMESTAMP_MAX:
        raise Unusual
    cuts = np.append(0, np.cumsum(counts))
    body = b"".join((*bodies, _MARGIN))
    sizes = np.cumsum([len(one) for one in bodies])
    if int(cuts[-1]) * RECORD_BYTES_MIN > int(sizes[-1]):
        raise Unusual
    words = words_of(body)
    try:
        starts, end = find_starts(body, 0, int(cuts[-1]), breathe)
    except (IndexError, ApiError):
        raise Unusual from None
    bounds = np.append(starts, end)
    if (bounds[cuts[1:]] != sizes).any():
        raise Unusual
    found = []
    for start in range(0, int(cuts[-1]), WINDOW_RECORDS):
        found.append(_read_fields(words, bounds[start : start + WINDOW_RECORDS + 1]))
        breathe()
    columns = (
        found[0] if len(found) == 1 else tuple(np.concatenate(each) for each in zip(*found, strict=True))
    )
    after_timestamps, timestamp_deltas, offset_deltas, key_starts, key_ends, has_no_value = columns
    _check_offsets(headers, cuts, offset_deltas)
    base_offsets = np.repeat(np.array([header.base_offset for header in headers]), counts)
    return RecordIndex(
        numbers,
        headers,
        body,
        cuts,
        bounds,
        after_timestamps,
        timestamp_deltas,
        offset_deltas + base_offsets,
        key_starts,
        key_ends,
        has_no_value != 0,
    )


def _read_fields(words: Words, bounds: Int64s) -> tuple[Int64s, ...]:
    """The fields that ``index_records`` finds, without the starts, which are known. Raises ``Unusual``.

    Nothing is loaded from outside: behind the start of a record these are at most three numbers of seven
    bytes, a byte, and eight bytes, for which the margin has room.
    """
    times, key_lengths, key_starts, values = read_fields(words, bounds[:-1])
    if (values >= bounds[1:]).any():
        raise Unusual
    key_ends = np.where(key_lengths < 0, -1, values)
    has_no_value = (words[values] & np.uint64(1)).view(np.int64)  # the sign of its length
    after_timestamps, timestamp_deltas, offset_deltas, _ = times
    return after_timestamps, timestamp_deltas, offset_deltas, key_starts, key_ends, has_no_value


def _check_offsets(headers: list[BatchHeader], cuts: Int64s, deltas: Int64s) -> None:
    """Raise ``Unusual`` unless offsets grow within each batch, and stay within its own."""
    grows = np.ones(len(deltas), np.bool_)
    np.greater(deltas[1:], deltas[:-1], out=grows[1:])
    grows[cuts[:-1]] = deltas[cuts[:-1]] >= 0
    last = np.array([header.last_offset_delta for header in headers])
    if not grows.all() or (deltas[cuts[1:] - 1] > last).any():
        raise Unusual
