"""The filter of a compaction: each batch is kept as it is, made smaller, or dropped. Pure.

Batches are given in the order of the log, from its start, so that the filter knows which transactions have
something left when it meets their markers. The rules, which are Kafka's:

- of every key the record with the largest offset stays; a record without a key goes;
- a tombstone stays until the delete horizon of its batch, which is set when it is first compacted;
- what an aborted transaction wrote goes; a marker goes when no batch of its transaction was there any more,
  and its delete horizon has passed;
- a batch that a remembered producer's state rests on stays, without records if need be.

Both passes of a run read batches by ``index_batches``: what it does not understand has no key in the map, and
is kept as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tidemill.log.compaction.batch_owners import AbortedBatches, RememberedProducer
from tidemill.log.compaction.keymap import KeyMap
from tidemill.log.storage import Buffer
from tidemill.records.batch import NO_SEQUENCE, BatchHeader
from tidemill.records.columns.rewriting import Bools, RecordIndex, index_batches
from tidemill.records.control import read_marker
from tidemill.records.rewriting import delete_horizon, header_only

__all__ = ("BatchFilter",)


class BatchFilter:
    """Filters the batches of one pass over a log. From ``mapped_to`` on all are kept as they are."""

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
        #: Producers whose current transaction has batches that the pass has seen.
        self._writing: set[int] = set()
        #: Offsets of the abort markers that were kept so far.
        self.kept_aborts: list[int] = []
        self.records_in = 0
        self.records_kept = 0

    def apply(self, batches: Sequence[tuple[BatchHeader, Buffer]]) -> list[Buffer | None]:
        """The rest of each batch: None if nothing is left, the same bytes if nothing changes."""
        left: list[Buffer | None] = []
        judged: list[int] = []
        for number, (header, data) in enumerate(batches):
            if header.is_control:
                kept = self._control(header, data)
                if kept is not None and not self._is_commit(data):
                    self.kept_aborts.append(header.base_offset)
                left.append(kept)
                continue
            if header.is_transactional:
                self._writing.add(header.producer_id)
            self.records_in += header.record_count
            if header.base_offset >= self._mapped_to:
                self.records_kept += header.record_count
                left.append(data)
            elif not header.record_count or header in self._aborted:
                left.append(self._without_records(header, data))
            else:
                # Records that cannot be read are kept: the checksum fits, so these are the bytes that a
                # producer sent.
                self.records_kept += header.record_count
                left.append(data)
                judged.append(number)
        self._breathe()
        wanted = [batches[number] for number in judged]
        for part in index_batches(wanted, self._max_decompressed_bytes, self._breathe):
            self._judge(part, judged, left)
        return left

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
        for part in index_batches([(header, data)], self._max_decompressed_bytes, self._breathe):
            everything = np.ones(len(part.offsets), np.bool_)
            (marked,) = part.keep(everything, np.array([True]), [self._horizon_ms])
            return data if marked is None else marked
        return data

    def _is_commit(self, data: Buffer) -> bool:
        marker = read_marker(memoryview(data))
        return marker is not None and marker.commit

    # --- data

    def _judge(self, part: RecordIndex, judged: list[int], left: list[Buffer | None]) -> None:
        """Replace those batches in ``left`` that lose records or get a delete horizon."""
        kept = self._are_last(part)
        horizons: list[int | None] = [None] * len(part.headers)
        if part.has_no_value.any():
            self._judge_tombstones(part, kept, horizons)
        counts = part.count_by_batch(kept)
        changed = counts != np.diff(part.cuts)
        changed[[horizon_ms is not None for horizon_ms in horizons]] = True
        if not changed.any():
            return
        changed &= counts > 0
        for number in np.flatnonzero(counts == 0).tolist():
            index, header = judged[part.numbers[number]], part.headers[number]
            self.records_kept -= header.record_count
            data = left[index]
            assert data is not None
            left[index] = self._without_records(header, data)
        rewritten = part.keep(kept, changed, horizons)
        for number, data in zip(np.flatnonzero(changed).tolist(), rewritten, strict=True):
            if data is not None:
                left[judged[part.numbers[number]]] = data
                self.records_kept += int(counts[number]) - part.headers[number].record_count
            self._breathe()

    def _are_last(self, part: RecordIndex) -> Bools:
        """Which records are the last ones of their key."""
        kept = np.zeros(len(part.offsets), np.bool_)
        for window in part.windows(0, len(part.offsets)):
            starts, ends = part.key_starts[window], part.key_ends[window]
            rows = np.flatnonzero(ends >= 0)
            last = self._keys.get(part.body, starts[rows], ends[rows])
            kept[window][rows] = part.offsets[window][rows] >= last
            self._breathe()
        return kept

    def _judge_tombstones(self, part: RecordIndex, kept: Bools, horizons: list[int | None]) -> None:
        """Drop tombstones whose time has come from ``kept``; fill in ``horizons`` for the others."""
        tombstones = kept & part.has_no_value
        for number in np.flatnonzero(part.count_by_batch(tombstones)).tolist():
            horizon_ms = delete_horizon(part.headers[number])
            if horizon_ms is None:
                horizons[number] = self._horizon_ms
            elif self._now_ms >= horizon_ms:
                rows = slice(int(part.cuts[number]), int(part.cuts[number + 1]))
                kept[rows] &= ~part.has_no_value[rows]

    def _without_records(self, header: BatchHeader, data: Buffer) -> Buffer | None:
        if not header.is_idempotent or not self._is_last_of_producer(header):
            return None
        return data if not header.record_count else header_only(header)

    def _is_last_of_producer(self, header: BatchHeader) -> bool:
        """Whether the producer's state rests on this batch, so that the batch must stay in the log."""
        producer = self._producers.get(header.producer_id)
        if producer is None or producer.epoch != header.producer_epoch:
            return False
        if header.is_control:
            # If the producer has written something in its epoch, that batch keeps the state, and the marker
            # may go.
            return producer.last_sequence == NO_SEQUENCE
        return header.last_sequence == producer.last_sequence or header.base_offset in producer.batches
