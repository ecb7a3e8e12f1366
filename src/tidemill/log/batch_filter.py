"""What compaction makes of one batch: kept as it is, made smaller, or dropped. Pure.

Batches are given in the order of the log, from its start, so that the filter knows which transactions have
something left when it meets their markers. The rules, which are Kafka's:

- of every key the record with the largest offset stays; a record without a key goes;
- a tombstone stays until the delete horizon of its batch, which is set when it is first compacted;
- what an aborted transaction wrote goes; a marker goes when no batch of its transaction was there any more,
  and its delete horizon has passed;
- a batch that a remembered producer's state rests on stays, without records if need be.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tidemill.errors import ApiError
from tidemill.log.keymap import KeyMap
from tidemill.log.producers import ProducerStates
from tidemill.log.storage import Buffer
from tidemill.log.transactions import AbortedTransaction
from tidemill.records.batch import HEADER_BYTES, NO_SEQUENCE, BatchHeader
from tidemill.records.compression import decompress
from tidemill.records.control import read_marker
from tidemill.records.rewriting import RecordSlice, delete_horizon, header_only, index_records, keep_records

__all__ = ("AbortedBatches", "BatchFilter", "RememberedProducer", "read_slices", "remembered_producers")


class RememberedProducer(NamedTuple):
    """What the log must still be able to say of a producer."""

    epoch: int
    last_sequence: int
    #: Base offsets of the batches whose retries are recognized.
    batches: frozenset[int]


def remembered_producers(states: ProducerStates) -> dict[int, RememberedProducer]:
    """A copy of what the filter needs to know, for use in another thread."""
    return {
        producer_id: RememberedProducer(
            entry.epoch, entry.last_sequence, frozenset(known.base_offset for known in entry.batches)
        )
        for producer_id, entry in states
    }


class AbortedBatches:
    """Answers whether a batch belongs to an aborted transaction."""

    def __init__(self, transactions: Iterable[AbortedTransaction]) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        for producer_id, first_offset, last_offset in transactions:
            self._ranges.setdefault(producer_id, []).append((first_offset, last_offset))
        for ranges in self._ranges.values():
            ranges.sort()

    def __contains__(self, header: BatchHeader) -> bool:
        ranges = self._ranges.get(header.producer_id) if header.is_transactional else None
        if not ranges:
            return False
        place = bisect_right(ranges, header.base_offset, key=lambda entry: entry[0])
        return place > 0 and header.base_offset < ranges[place - 1][1]


def read_slices(
    header: BatchHeader, data: Buffer, max_bytes: int, breathe: Callable[[], None]
) -> tuple[bytes, list[RecordSlice]]:
    """The uncompressed records of a batch, and where each one is. Raises ``ApiError``."""
    body = bytes(decompress(header.codec, memoryview(data)[HEADER_BYTES:], max_bytes))
    return body, index_records(body, header.record_count, breathe)


class BatchFilter:
    """One pass over a log. Everything from ``mapped_to`` on is kept as it is: its keys are not in the map."""

    def __init__(
        self,
        keys: KeyMap,
        *,
        mapped_to: int,
        aborted: AbortedBatches,
        producers: Mapping[int, RememberedProducer],
        now_ms: int,
        delete_retention_ms: int,
        max_decompressed_bytes: int,
        breathe: Callable[[], None],
    ) -> None:
        self._keys = keys
        self._mapped_to = mapped_to
        self._aborted = aborted
        self._producers = producers
        self._now_ms = now_ms
        self._horizon_ms = now_ms + delete_retention_ms
        self._max_decompressed_bytes = max_decompressed_bytes
        self._breathe = breathe
        #: Producers of whose current transaction a batch was seen.
        self._writing: set[int] = set()
        #: Offsets of the abort markers that stay, as far as the pass has come.
        self.kept_aborts: list[int] = []
        self.records_in = 0
        self.records_kept = 0

    def apply(self, header: BatchHeader, data: Buffer) -> Buffer | None:
        """What is left of the batch, None if nothing is; ``data`` itself if nothing changes."""
        if header.is_control:
            kept = self._control(header, data)
            if kept is not None and not self._is_commit(data):
                self.kept_aborts.append(header.base_offset)
            return kept
        if header.is_transactional:
            self._writing.add(header.producer_id)
        self.records_in += header.record_count
        if header.base_offset >= self._mapped_to:
            self.records_kept += header.record_count
            return data
        if header in self._aborted:
            return self._without_records(header, data)
        return self._data(header, data)

    # --- markers

    def _control(self, header: BatchHeader, data: Buffer) -> Buffer | None:
        has_batches = header.producer_id in self._writing
        self._writing.discard(header.producer_id)
        if has_batches or header.base_offset >= self._mapped_to or self._is_last_of_producer(header):
            return data
        horizon_ms = delete_horizon(header)
        if horizon_ms is not None:
            return data if self._now_ms < horizon_ms else None
        if read_marker(memoryview(data)) is None:
            return data
        body, slices = read_slices(header, data, self._max_decompressed_bytes, self._breathe)
        return keep_records(header, body, slices, self._horizon_ms)

    def _is_commit(self, data: Buffer) -> bool:
        marker = read_marker(memoryview(data))
        return marker is not None and marker.commit

    # --- data

    def _data(self, header: BatchHeader, data: Buffer) -> Buffer | None:
        if not header.record_count:
            return self._without_records(header, data)
        try:
            body, slices = read_slices(header, data, self._max_decompressed_bytes, self._breathe)
        except ApiError:
            # The checksum fits, so these are the bytes that somebody sent, and it is not for us to drop them.
            self.records_kept += header.record_count
            return data
        horizon_ms = delete_horizon(header)
        may_drop_tombstones = horizon_ms is not None and self._now_ms >= horizon_ms
        base_offset, last_offset_of = header.base_offset, self._keys.get
        kept: list[RecordSlice] = []
        has_tombstone = False
        for record in slices:
            _, _, delta, key, is_tombstone = record
            if key is None or base_offset + delta < last_offset_of(key):
                continue
            if is_tombstone:
                if may_drop_tombstones:
                    continue
                has_tombstone = True
            kept.append(record)
        if not kept:
            return self._without_records(header, data)
        self.records_kept += len(kept)
        new_horizon_ms = self._horizon_ms if has_tombstone and horizon_ms is None else None
        if len(kept) == len(slices) and new_horizon_ms is None:
            return data
        return keep_records(header, body, kept, new_horizon_ms)

    def _without_records(self, header: BatchHeader, data: Buffer) -> Buffer | None:
        if not header.is_idempotent or not self._is_last_of_producer(header):
            return None
        return data if not header.record_count else header_only(header)

    def _is_last_of_producer(self, header: BatchHeader) -> bool:
        """Whether what is remembered of the producer could not be read from the log without this batch."""
        producer = self._producers.get(header.producer_id)
        if producer is None or producer.epoch != header.producer_epoch:
            return False
        if header.is_control:
            # Of a producer that has written something in its epoch, that batch keeps its marker here.
            return producer.last_sequence == NO_SEQUENCE
        return header.last_sequence == producer.last_sequence or header.base_offset in producer.batches
