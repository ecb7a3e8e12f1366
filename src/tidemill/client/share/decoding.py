"""Records out of a node's answer to ShareFetch: those that were handed out, and the gaps between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tidemill.client.consuming.batch_reader import whole_batches
from tidemill.config.values import TopicPartition
from tidemill.errors import ApiError
from tidemill.records.batch import parse_header
from tidemill.records.record import Record, read_records

__all__ = ("Acquired", "Handed", "take_records")


class Acquired(NamedTuple):
    """Offsets that are locked for this consumer, both ends included."""

    first_offset: int
    last_offset: int
    delivery_count: int


class Handed(NamedTuple):
    """A record that was handed out, and which delivery of it this is."""

    record: Record
    delivery_count: int


@dataclass(slots=True)
class Taken:
    """Records of one partition in an answer, and the acquired offsets that have none."""

    records: list[Handed] = field(default_factory=list)
    #: Offsets that were handed out and have no record: compacted away, or markers of transactions.
    gaps: list[tuple[int, int]] = field(default_factory=list)
    #: Offsets whose records cannot be decoded, and why.
    undecodable: list[tuple[int, int, str]] = field(default_factory=list)
    #: Offsets behind the last whole batch of the answer: whether they have records is not known.
    unread: list[tuple[int, int]] = field(default_factory=list)
    #: The batches with the records, for rows of tables.
    batches: list[memoryview] = field(default_factory=list)
    _end_offset: int = -1


def take_records(data: bytes, acquired: Sequence[Any], partition: TopicPartition) -> Taken:
    """The records of a partition's part of an answer.

    A batch comes whole, so it can hold records that others have; they are left out.
    """
    taken = Taken()
    ranges = sorted(Acquired(each.first_offset, each.last_offset, each.delivery_count) for each in acquired)
    if not ranges:
        return taken
    found = list(_found(data, ranges, partition, taken))
    at = 0
    expected = ranges[0].first_offset
    for record in found:
        while record.offset > ranges[at].last_offset:
            _gap(taken, expected, ranges[at].last_offset)
            at += 1
            if at == len(ranges):
                return taken
            expected = ranges[at].first_offset
        if record.offset < expected:
            continue
        _gap(taken, expected, record.offset - 1)
        taken.records.append(Handed(record, ranges[at].delivery_count))
        expected = record.offset + 1
    for each in ranges[at:]:
        _gap(taken, max(expected, each.first_offset), each.last_offset)
    return taken


def _found(
    data: bytes, ranges: Sequence[Acquired], partition: TopicPartition, taken: Taken
) -> Iterator[Record]:
    first, last = ranges[0].first_offset, ranges[-1].last_offset
    for batch in whole_batches(data, f"{partition[0]}-{partition[1]}"):
        header = parse_header(batch)
        taken._end_offset = max(taken._end_offset, header.last_offset)
        if header.is_control or header.last_offset < first or header.base_offset > last:
            continue
        try:
            records = list(read_records(batch, offsets=(first, last)))
        except ApiError as error:
            reason = error.message.removeprefix("corrupt record batch: ")
            for each in ranges:
                low = max(each.first_offset, header.base_offset)
                high = min(each.last_offset, header.last_offset)
                if low <= high:
                    taken.undecodable.append((low, high, reason))
            continue
        taken.batches.append(batch)
        yield from records


def _gap(taken: Taken, first: int, last: int) -> None:
    """Note that nothing was found from ``first`` to ``last``, but for what cannot be decoded."""
    for low, high, _ in taken.undecodable:
        if low <= last and high >= first:
            _gap(taken, first, low - 1)
            _gap(taken, high + 1, last)
            return
    end = min(last, taken._end_offset)
    if first <= end:
        taken.gaps.append((first, end))
    if max(first, end + 1) <= last:
        taken.unread.append((max(first, end + 1), last))
