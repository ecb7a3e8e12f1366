"""What cursors deliver, and how it comes out of the bytes of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tidemill.client.consuming.batch_reader import FetchedBatches
from tidemill.cursors.machine import Arrival, HasOffset
from tidemill.cursors.position import Gap, Reason
from tidemill.errors import ApiError, ErrorCode, UndecodableBatch
from tidemill.records.batch import HEADER_BYTES, check_crc, parse_header
from tidemill.records.record import Header, read_records

if TYPE_CHECKING:
    from tidemill.tables.definition import TableDefinition

__all__ = ("CursorRecord", "CursorRow", "arrivals_of", "decode_records", "decode_rows")

_BATCH = tuple[int, int, int, memoryview]
"""Base offset, last offset, leader epoch and bytes of a batch."""


class CursorRecord(NamedTuple):
    """A record that a cursor delivers."""

    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: tuple[Header, ...]
    offset: int
    topic: str
    partition: int

    def text(self) -> str:
        """The value as UTF-8 text."""
        return (self.value or b"").decode()

    def json(self) -> Any:
        """The value as JSON."""
        return json.loads(self.value or b"null")

    def header(self, name: str) -> bytes | None:
        """The value of the last header of that name; None if there is none."""
        return next((value for each, value in reversed(self.headers) if each == name), None)


class CursorRow(NamedTuple):
    """A change of a table that a cursor delivers. For a deletion ``row`` holds the key columns only.

    ``op`` is ``upsert`` or ``delete``; ``insert`` in a table without a primary key.
    """

    op: str
    row: dict[str, Any]
    timestamp_ms: int
    offset: int
    topic: str
    partition: int


def arrivals_of(entry: Any, topic: str, start: int, *, filtered: bool, decode: Any) -> list[Arrival[Any]]:
    """What an answer's partition holds, from ``start`` on, as arrivals of one leader epoch each.

    ``decode`` makes what is delivered of the bytes of a batch. Raises ``UndecodableBatch`` if the first batch
    cannot be decoded; one behind ends what is given, and is met again by the next fetch.
    """
    partition: int = entry.partition
    end: int = entry.next_offset
    rest = Reason.FILTERED if filtered else Reason.COMPACTION
    gaps = _Gaps(partition, entry.skipped, rest, is_cut=entry.skipped_dropped > 0)
    arrivals: list[Arrival[Any]] = []
    at, epoch = start, entry.leader_epoch
    records: list[HasOffset] = []
    for base, last, batch_epoch, batch in _batches(entry.records or b"", f"{topic}-{partition}"):
        if records and batch_epoch != epoch:
            arrivals.append(Arrival(partition, at, records, base, epoch, gaps.between(at, records, base)))
            at, records = base, []
        epoch = batch_epoch
        try:
            decoded = decode(batch, topic, partition)
        except UndecodableBatch:
            raise
        except ApiError as error:
            if error.code != ErrorCode.corrupt_message:
                raise
            if records or arrivals or base > start:
                end = max(base, start)
                break
            reason = error.message.removeprefix("corrupt record batch: ")
            raise UndecodableBatch(topic, partition, base, last, reason) from error
        if base < start:
            decoded = [each for each in decoded if each.offset >= start]
        records += decoded
    else:
        # The answer is complete: behind its last batch there are only offsets that were passed over.
        epoch = entry.leader_epoch if not records else max(epoch, entry.leader_epoch)
    if end > at or records:
        found = gaps.between(at, records, end)
        # Gaps that were counted without their ranges are in the answer's last batch.
        dropped = max(gaps.unexplained, entry.skipped_dropped) if end == entry.next_offset else 0
        arrivals.append(Arrival(partition, at, records, end, epoch, found, dropped))
    return arrivals


def decode_records(batch: memoryview, topic: str, partition: int) -> list[CursorRecord]:
    """The records of a batch."""
    return [CursorRecord(*record, topic, partition) for record in read_records(batch)]


def decode_rows(table: TableDefinition, batch: memoryview, topic: str, partition: int) -> list[CursorRow]:
    """The changes in a batch of a table's log."""
    from tidemill.client.tables.follow import decoded

    fetched = FetchedBatches((topic, partition), 0, [batch], -1, -1)
    rows: list[CursorRow] = []
    for changes in decoded(table, fetched):
        times = changes.timestamps_ms.to_pylist()
        rows += (
            CursorRow(change.op, change.row, time, change.offset, topic, partition)
            for change, time in zip(changes, times, strict=True)
        )
    if table.has_primary_key:
        for number, each in enumerate(rows):
            if each.op == "delete":
                rows[number] = each._replace(row={name: each.row[name] for name in table.primary_key})
    return rows


def _batches(data: bytes, where: str) -> Iterator[_BATCH]:
    view, position = memoryview(data), 0
    while position + HEADER_BYTES <= len(view):
        header = parse_header(view, position)
        end = position + header.size_bytes
        batch = view[position:end]
        if not HEADER_BYTES <= header.size_bytes <= len(view) - position or not check_crc(batch, header):
            raise ApiError(
                ErrorCode.corrupt_message,
                f"the batch at offset {header.base_offset} of {where} was damaged on its way: its checksum "
                "does not fit",
            )
        yield header.base_offset, header.last_offset, header.leader_epoch, batch
        position = end


class _Gaps:
    """Finds the offsets of an answer that are no records, and why.

    Those that are in no range of ``skipped`` have reason ``rest``. But if the ranges are cut off, nobody
    knows the reason of what is missing behind the last one: that is counted only.
    """

    def __init__(self, partition: int, skipped: Iterable[Any], rest: Reason, *, is_cut: bool) -> None:
        self._partition = partition
        self._skipped = [(each.first_offset, each.last_offset, Reason(each.reason)) for each in skipped]
        self._rest = rest
        self._is_cut = is_cut
        self._next = 0
        self.unexplained = 0

    def between(self, start: int, records: Sequence[HasOffset], end: int) -> list[Gap]:
        """The gaps from ``start`` up to ``end``, in order. To be called for rising ranges."""
        if end - start == len(records):
            return []
        gaps: list[Gap] = []
        at = start
        for record in records:
            offset = record.offset
            if offset > at:
                self._explain(at, offset - 1, gaps)
            at = offset + 1
        if end > at:
            self._explain(at, end - 1, gaps)
        return gaps

    def _explain(self, first: int, last: int, gaps: list[Gap]) -> None:
        """Add the reasons for offsets that are missing."""
        while first <= last:
            while self._next < len(self._skipped) and self._skipped[self._next][1] < first:
                self._next += 1
            if self._next == len(self._skipped) and self._is_cut:
                self.unexplained += 1
                return
            if self._next == len(self._skipped) or self._skipped[self._next][0] > last:
                gaps.append(Gap(self._partition, first, last, self._rest))
                return
            skip_first, skip_last, reason = self._skipped[self._next]
            if skip_first > first:
                gaps.append(Gap(self._partition, first, skip_first - 1, self._rest))
                first = skip_first
            gaps.append(Gap(self._partition, first, min(last, skip_last), reason))
            first = skip_last + 1
