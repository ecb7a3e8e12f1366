"""Batches of a log as a share partition sees them: which it hands out, and what their records say. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tidemill.log.producer_state.transactions import AbortedTransaction
from tidemill.records.batch import HEADER_BYTES, BatchHeader, parse_header
from tidemill.records.record import read_records
from tidemill.share.partition.values import NO_DELIVERY_TIME, Acquired, SeenRecord, Span

__all__ = ("DELIVER_AT_HEADER", "ReadBatches", "chosen", "look_at", "walk")

#: The header of a record that must not be handed out before a time, in milliseconds, as decimal digits.
DELIVER_AT_HEADER = "tidemill-deliver-at"
_TIME_DIGITS_MAX = 18


class ReadBatches(NamedTuple):
    """Whole batches that were read, with where each of them begins in the data."""

    data: memoryview
    spans: list[Span]
    positions: list[int]
    #: How many records the batches that are shown have.
    record_count: int


def walk(data: memoryview, aborted: Sequence[AbortedTransaction] = ()) -> ReadBatches:
    """Find the batches in ``data``. Markers, batches without records and aborted ones are hidden."""
    spans: list[Span] = []
    positions: list[int] = []
    position = records = 0
    while position + HEADER_BYTES <= len(data):
        header = parse_header(data, position)
        is_hidden = header.is_control or header.record_count == 0 or _is_aborted(header, aborted)
        spans.append(Span(header.base_offset, header.last_offset, is_hidden))
        positions.append(position)
        if not is_hidden:
            records += header.record_count
        position += header.size_bytes
    return ReadBatches(data[:position], spans, positions, records)


def _is_aborted(header: BatchHeader, aborted: Sequence[AbortedTransaction]) -> bool:
    return header.is_transactional and any(
        entry.producer_id == header.producer_id
        and entry.first_offset <= header.base_offset <= entry.last_offset
        for entry in aborted
    )


def chosen(read: ReadBatches, acquired: Sequence[Acquired]) -> list[memoryview]:
    """The parts of the data that have acquired records: whole batches, neighbours in one piece."""
    pieces: list[memoryview] = []
    ranges = iter(acquired)
    current = next(ranges, None)
    start: int | None = None
    for span, position in zip(read.spans, read.positions, strict=True):
        while current is not None and current.last_offset < span.first_offset:
            current = next(ranges, None)
        wanted = current is not None and current.first_offset <= span.last_offset and not span.is_hidden
        if wanted and start is None:
            start = position
        elif not wanted and start is not None:
            pieces.append(read.data[start:position])
            start = None
    if start is not None:
        pieces.append(read.data[start:])
    return pieces


def look_at(batches: Iterable[memoryview], max_bytes: int) -> list[SeenRecord]:
    """Keys and delivery times of the records in whole batches. Raises ``ApiError`` if one cannot be read."""
    return [
        SeenRecord(record.offset, record.key, _delivery_time(record.headers) if record.headers else 0)
        for batch in batches
        for record in read_records(batch, max_bytes)
    ]


def _delivery_time(headers: Iterable[tuple[str, bytes | None]]) -> int:
    """The time in the last header of the right name; one that is no number does not count."""
    time_ms = NO_DELIVERY_TIME
    for name, value in headers:
        if (
            name == DELIVER_AT_HEADER
            and value is not None
            and len(value) <= _TIME_DIGITS_MAX
            and value.isdigit()
        ):
            time_ms = int(value)
    return time_ms
