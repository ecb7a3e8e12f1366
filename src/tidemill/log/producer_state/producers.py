"""The states of idempotent producers in a partition. Pure.

Per producer id: its epoch, the last sequence number, and the last five batches, so that a retry of any of
them is answered with the offset it got the first time. ``check`` never changes anything; ``record`` does, and
is called only once the batch is in the log: a refused batch uses no sequence number.

The end of a transaction forgets the remembered batches: a retry of an aborted batch is not "there already".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from tidemill.errors import ApiError, ErrorCode
from tidemill.log.producer_state.transactions import TransactionStates
from tidemill.records.batch import NO_SEQUENCE, BatchHeader, next_sequence
from tidemill.records.control import Marker, read_marker

__all__ = ("KnownBatch", "ProducerEntry", "ProducerStates")

_BATCHES_REMEMBERED = 5


class KnownBatch(NamedTuple):
    """A batch that the log holds, by which a retry is recognised."""

    base_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    timestamp_ms: int


class ProducerEntry:
    """The state of one producer in one partition."""

    __slots__ = ("batches", "coordinator_epoch", "epoch", "last_append_ms", "last_sequence")

    def __init__(
        self,
        epoch: int,
        last_append_ms: int,
        last_sequence: int = NO_SEQUENCE,
        coordinator_epoch: int = -1,
        batches: list[KnownBatch] | None = None,
    ) -> None:
        self.epoch = epoch
        self.last_append_ms = last_append_ms
        self.last_sequence = last_sequence
        #: The epoch of the coordinator that wrote the last marker; an older coordinator is fenced.
        self.coordinator_epoch = coordinator_epoch
        self.batches: deque[KnownBatch] = deque(batches or (), maxlen=_BATCHES_REMEMBERED)


class ProducerStates:
    """The states of all producers of one partition."""

    def __init__(self) -> None:
        self._entries: dict[int, ProducerEntry] = {}
        self.transactions = TransactionStates()
        #: Whether an unknown producer may be one that was forgotten, by expiry or with old segments.
        self.forgetful = False

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[int, ProducerEntry]]:
        return iter(self._entries.items())

    def get(self, producer_id: int) -> ProducerEntry | None:
        return self._entries.get(producer_id)

    def check(self, header: BatchHeader) -> KnownBatch | None:
        """None if the batch may be appended; the earlier copy if it is a retry; else ``ApiError``."""
        entry = self._entries.get(header.producer_id)
        if entry is None:
            if header.base_sequence != 0 and not self.forgetful:
                raise _out_of_order(header, NO_SEQUENCE)
            return None
        if header.producer_epoch < entry.epoch:
            raise _fenced(header.producer_id, header.producer_epoch, entry)
        if header.producer_epoch > entry.epoch:
            if header.base_sequence != 0:
                raise _out_of_order(header, NO_SEQUENCE)
            return None
        for known in entry.batches:
            if known.base_sequence == header.base_sequence and known.last_sequence == header.last_sequence:
                return known
        if header.base_sequence != next_sequence(entry.last_sequence):
            raise _out_of_order(header, entry.last_sequence)
        return None

    def record(self, header: BatchHeader, base_offset: int, now_ms: int) -> None:
        """Remember a batch that the log holds at ``base_offset``."""
        entry = self._at_epoch(header.producer_id, header.producer_epoch, now_ms)
        entry.last_sequence = header.last_sequence
        if header.is_transactional:
            self.transactions.begin(header.producer_id, base_offset)
        entry.batches.append(
            KnownBatch(
                header.base_sequence,
                header.last_sequence,
                base_offset,
                base_offset + header.last_offset_delta,
                header.max_timestamp,
            )
        )

    def replay(self, header: BatchHeader, read_batch: Callable[[], bytes], now_ms: int) -> None:
        """Apply a batch of the log, of whatever kind, as when it was appended."""
        is_marker = header.is_idempotent and header.is_control
        self.record_fetched(header, read_marker(read_batch()) if is_marker else None, now_ms)

    def record_fetched(self, header: BatchHeader, marker: Marker | None, now_ms: int) -> None:
        """Apply a batch that was checked before: by a leader, or when it was appended."""
        if header.record_count <= header.last_offset_delta:
            # Compaction has removed records, maybe those of a producer that was forgotten before.
            self.forgetful = True
        if not header.is_idempotent:
            return
        if not header.is_control:
            self.record(header, header.base_offset, now_ms)
        elif marker is not None:
            self.record_end(header.producer_id, header.producer_epoch, marker, header.base_offset, now_ms)

    def check_end(self, producer_id: int, producer_epoch: int, marker: Marker) -> None:
        """Raise ``ApiError`` if the marker is of an old coordinator or an old epoch of the producer."""
        entry = self._entries.get(producer_id)
        if entry is None:
            return
        if producer_epoch < entry.epoch:
            raise _fenced(producer_id, producer_epoch, entry)
        if marker.coordinator_epoch < entry.coordinator_epoch:
            raise ApiError(
                ErrorCode.transaction_coordinator_fenced,
                f"a coordinator of epoch {marker.coordinator_epoch} is older than {entry.coordinator_epoch}",
            )

    def record_end(
        self, producer_id: int, producer_epoch: int, marker: Marker, offset: int, now_ms: int
    ) -> None:
        """Remember a marker that the log holds at ``offset``.

        As in Kafka, batches of the same producer epoch that come again behind it are still known.
        """
        entry = self._at_epoch(producer_id, producer_epoch, now_ms)
        entry.coordinator_epoch = max(entry.coordinator_epoch, marker.coordinator_epoch)
        self.transactions.end(producer_id, offset, commit=marker.commit)

    def _at_epoch(self, producer_id: int, producer_epoch: int, now_ms: int) -> ProducerEntry:
        """The producer's entry; a new epoch starts its sequence anew."""
        entry = self._entries.get(producer_id)
        if entry is None:
            entry = self._entries[producer_id] = ProducerEntry(producer_epoch, now_ms)
        elif entry.epoch != producer_epoch:
            entry.epoch = producer_epoch
            entry.last_sequence = NO_SEQUENCE
            entry.batches.clear()
        entry.last_append_ms = now_ms
        return entry

    def expire(self, older_than_ms: int) -> int:
        """Forget producers that have not written since and have no open transaction; returns how many."""
        expired = [
            key
            for key, entry in self._entries.items()
            if entry.last_append_ms < older_than_ms and key not in self.transactions.open
        ]
        for key in expired:
            del self._entries[key]
        self.forgetful = self.forgetful or bool(expired)
        return len(expired)

    def to_bytes(self) -> bytes:
        producers = [
            (
                producer_id,
                entry.epoch,
                entry.last_append_ms,
                entry.last_sequence,
                entry.coordinator_epoch,
                [tuple(known) for known in entry.batches],
            )
            for producer_id, entry in self._entries.items()
        ]
        return msgspec.msgpack.encode((self.forgetful, producers, self.transactions.to_value()))

    @classmethod
    def from_bytes(cls, data: bytes) -> ProducerStates:
        states = cls()
        states.forgetful, producers, transactions = msgspec.msgpack.decode(data, type=_Snapshot)
        states.transactions = TransactionStates.from_value(transactions)
        for producer_id, epoch, last_append_ms, last_sequence, coordinator_epoch, known in producers:
            batches = [KnownBatch(*batch) for batch in known]
            states._entries[producer_id] = ProducerEntry(
                epoch, last_append_ms, last_sequence, coordinator_epoch, batches
            )
        return states


_Snapshot = tuple[bool, list[tuple[int, int, int, int, int, list[tuple[int, int, int, int, int]]]], list[Any]]


def _fenced(producer_id: int, producer_epoch: int, entry: ProducerEntry) -> ApiError:
    return ApiError(
        ErrorCode.invalid_producer_epoch,
        f"producer {producer_id} is fenced: epoch {producer_epoch} is older than {entry.epoch}",
    )


def _out_of_order(header: BatchHeader, last_sequence: int) -> ApiError:
    return ApiError(
        ErrorCode.out_of_order_sequence_number,
        f"producer {header.producer_id} epoch {header.producer_epoch} sent sequence {header.base_sequence}, "
        f"expected {next_sequence(last_sequence)}",
    )
