"""What a partition remembers of idempotent producers. Pure.

Per producer id: its epoch, the last sequence number, and the last five batches, so that a retry of any of
them is answered with the offset it got the first time. ``check`` never changes anything; ``record`` does, and
is called only once the batch is in the log: a refused batch uses no sequence number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from tidemill.errors import ApiError, ErrorCode
from tidemill.records.batch import NO_SEQUENCE, BatchHeader, next_sequence

__all__ = ("KnownBatch", "ProducerEntry", "ProducerStates")

_BATCHES_REMEMBERED = 5


class KnownBatch(NamedTuple):
    """A batch that is in the log."""

    base_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    timestamp_ms: int


class ProducerEntry:
    """One producer's state in one partition."""

    __slots__ = ("batches", "epoch", "last_append_ms")

    def __init__(self, epoch: int, last_append_ms: int, batches: list[KnownBatch] | None = None) -> None:
        self.epoch = epoch
        self.last_append_ms = last_append_ms
        self.batches: deque[KnownBatch] = deque(batches or (), maxlen=_BATCHES_REMEMBERED)

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE


class ProducerStates:
    """All producers of one partition."""

    def __init__(self) -> None:
        self._entries: dict[int, ProducerEntry] = {}
        #: Whether an unknown producer may be one whose state was let go, by expiry or with old segments.
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
            raise ApiError(
                ErrorCode.invalid_producer_epoch,
                f"producer {header.producer_id} is fenced: epoch {header.producer_epoch} is older than "
                f"{entry.epoch}",
            )
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
        entry = self._entries.get(header.producer_id)
        if entry is None or entry.epoch != header.producer_epoch:
            entry = self._entries[header.producer_id] = ProducerEntry(header.producer_epoch, now_ms)
        entry.last_append_ms = now_ms
        entry.batches.append(
            KnownBatch(
                header.base_sequence,
                header.last_sequence,
                base_offset,
                base_offset + header.last_offset_delta,
                header.max_timestamp,
            )
        )

    def expire(self, older_than_ms: int) -> int:
        """Let go of producers that have not written since; returns how many."""
        expired = [key for key, entry in self._entries.items() if entry.last_append_ms < older_than_ms]
        for key in expired:
            del self._entries[key]
        self.forgetful = self.forgetful or bool(expired)
        return len(expired)

    def to_bytes(self) -> bytes:
        producers = [
            (producer_id, entry.epoch, entry.last_append_ms, [tuple(known) for known in entry.batches])
            for producer_id, entry in self._entries.items()
        ]
        return msgspec.msgpack.encode((self.forgetful, producers))

    @classmethod
    def from_bytes(cls, data: bytes) -> ProducerStates:
        states = cls()
        states.forgetful, producers = msgspec.msgpack.decode(data, type=_Snapshot)
        for producer_id, epoch, last_append_ms, known in producers:
            states._entries[producer_id] = ProducerEntry(
                epoch, last_append_ms, [KnownBatch(*batch) for batch in known]
            )
        return states


_Snapshot = tuple[bool, list[tuple[int, int, int, list[tuple[int, int, int, int, int]]]]]


def _out_of_order(header: BatchHeader, last_sequence: int) -> ApiError:
    return ApiError(
        ErrorCode.out_of_order_sequence_number,
        f"producer {header.producer_id} epoch {header.producer_epoch} sent sequence {header.base_sequence}, "
        f"expected {next_sequence(last_sequence)}",
    )
