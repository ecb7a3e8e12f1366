"""What one node still has to be told about records, in which requests, and what its answers mean.

Rules:

- Renewals, settlements that only the extension ShareSettle can say (a delay, a reason, that nobody has
  looked at the record), and all others travel in requests of their own: a lock that has ended must not take
  settlements down with its renewal.
- A node rolls back everything that a request says about a partition if one record of it is not this
  consumer's any more (INVALID_RECORD_STATE). Such a part is cut in two and sent again, until the records at
  fault stand alone.
- What may pass by itself is said again: the record is locked meanwhile.
- When the leader has changed, or the session is gone, so are the locks: those records are somebody else's.

No clock and no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from tidemill.client.share.record import Acknowledge, Settlement
from tidemill.config.values import TopicPartition
from tidemill.errors import ErrorCode

__all__ = ("AckBatch", "Entry", "Outbox", "Outcome", "Parcel", "Way", "ack_batches", "merged")

#: Entries in one request: it is walked by the node's event loop.
_PARCEL_ENTRIES_MAX: Final = 4_000
#: The record is locked still, and the same may succeed soon: its state could not be written.
_SAY_AGAIN: Final = frozenset(
    {
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.network_exception,
        ErrorCode.not_coordinator,
        ErrorCode.not_enough_replicas,
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.request_timed_out,
        ErrorCode.throttling_quota_exceeded,
        ErrorCode.unknown_server_error,
    }
)


class Way(Enum):
    """The kind of request that carries a settlement to a node."""

    ACKNOWLEDGE = "ShareAcknowledge"
    SETTLE = "ShareSettle"
    RENEW = "renewal"


class Entry(NamedTuple):
    """Offsets of one partition with one settlement; several only if their records were not handed out."""

    first_offset: int
    last_offset: int
    settlement: Settlement


class AckBatch(NamedTuple):
    """Consecutive offsets in Kafka's form, with an acknowledge type for each or one for all."""

    first_offset: int
    last_offset: int
    types: list[int]


@dataclass(slots=True)
class Parcel:
    """Settlements that go to the node in one request of one kind."""

    way: Way
    parts: dict[TopicPartition, list[Entry]]


class Outcome(NamedTuple):
    """What became of an entry. ``error`` is none if the node has carried it out."""

    partition: TopicPartition
    entry: Entry
    error: ErrorCode


@dataclass(slots=True)
class Outbox:
    """Settlements and renewals that wait to be sent to one node."""

    _queued: dict[Way, dict[TopicPartition, dict[int, Entry]]] = field(
        default_factory=lambda: {way: {} for way in Way}
    )
    #: Pieces of parts that were rolled back; each travels alone.
    _pieces: deque[Parcel] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self._pieces) or any(self._queued.values())

    def put(self, partition: TopicPartition, offset: int, settlement: Settlement) -> None:
        """Queue what became of a record. What was queued for it before is forgotten."""
        if settlement.kind is Acknowledge.RENEW:
            way = Way.RENEW
        else:
            way = Way.ACKNOWLEDGE if settlement.is_plain else Way.SETTLE
            renewals = self._queued[Way.RENEW].get(partition)
            if renewals is not None:
                renewals.pop(offset, None)
        self._queued[way].setdefault(partition, {})[offset] = Entry(offset, offset, settlement)

    def put_range(
        self, partition: TopicPartition, first_offset: int, last_offset: int, what: Settlement
    ) -> None:
        """Queue what became of offsets whose records nobody has seen, or which have none."""
        way = Way.ACKNOWLEDGE if what.is_plain else Way.SETTLE
        self._queued[way].setdefault(partition, {})[first_offset] = Entry(first_offset, last_offset, what)

    def take(self, way: Way | None = None) -> Parcel | None:
        """The next parcel, of the given way or of any; None if nothing is queued."""
        if way is None and self._pieces:
            return self._pieces.popleft()
        # Renewals first: they are the ones with a deadline.
        for each in (Way.RENEW, Way.SETTLE, Way.ACKNOWLEDGE) if way is None else (way,):
            parts = self._take_parts(self._queued[each])
            if parts:
                return Parcel(each, parts)
        return None

    def _take_parts(
        self, queued: dict[TopicPartition, dict[int, Entry]]
    ) -> dict[TopicPartition, list[Entry]]:
        parts: dict[TopicPartition, list[Entry]] = {}
        left = _PARCEL_ENTRIES_MAX
        for partition in list(queued):
            entries = queued[partition]
            if len(entries) > left:
                break
            del queued[partition]
            if entries:
                parts[partition] = sorted(entries.values())
                left -= len(entries)
        if not parts and queued:
            partition, entries = next(iter(queued.items()))
            taken = sorted(entries.values())[:_PARCEL_ENTRIES_MAX]
            for entry in taken:
                del entries[entry.first_offset]
            parts[partition] = taken
        return parts

    def answered(self, parcel: Parcel, errors: Mapping[TopicPartition, ErrorCode]) -> list[Outcome]:
        """Take the node's answer by partition; gives what is settled for good, one way or the other."""
        outcomes: list[Outcome] = []
        for partition, entries in parcel.parts.items():
            error = errors.get(partition, ErrorCode.unknown_server_error)
            if error in _SAY_AGAIN:
                self._put_back(parcel.way, partition, entries)
            elif error == ErrorCode.invalid_record_state and len(entries) > 1:
                half = len(entries) // 2
                self._pieces.append(Parcel(parcel.way, {partition: entries[:half]}))
                self._pieces.append(Parcel(parcel.way, {partition: entries[half:]}))
            else:
                outcomes += [Outcome(partition, entry, error) for entry in entries]
        return outcomes

    def unanswered(self, parcel: Parcel) -> None:
        """Queue again what was taken and not sent."""
        for partition, entries in parcel.parts.items():
            self._put_back(parcel.way, partition, entries)

    def _put_back(self, way: Way, partition: TopicPartition, entries: Iterable[Entry]) -> None:
        queued = self._queued[way].setdefault(partition, {})
        for entry in entries:
            queued.setdefault(entry.first_offset, entry)

    def forget(self, partitions: Iterable[TopicPartition]) -> list[Entry]:
        """Drop all that is queued for these partitions, and return it: their locks are gone."""
        gone = set(partitions)
        dropped: list[Entry] = []
        for queued in self._queued.values():
            for partition in gone & queued.keys():
                dropped += queued.pop(partition).values()
        kept: deque[Parcel] = deque()
        for piece in self._pieces:
            (partition,) = piece.parts
            if partition in gone:
                dropped += piece.parts[partition]
            else:
                kept.append(piece)
        self._pieces = kept
        return dropped

    def partitions(self) -> set[TopicPartition]:
        """The partitions for which something is queued."""
        found = {partition for piece in self._pieces for partition in piece.parts}
        return found.union(*self._queued.values())


def ack_batches(entries: Iterable[Entry]) -> list[AckBatch]:
    """Entries in the order of their offsets as batches of Kafka's requests.

    >>> accept, release = Settlement(Acknowledge.ACCEPT), Settlement(Acknowledge.RELEASE)
    >>> entries = [Entry(1, 1, accept), Entry(2, 2, release), Entry(7, 9, accept)]
    >>> [(batch.first_offset, batch.last_offset, batch.types) for batch in ack_batches(entries)]
    [(1, 2, [1, 2]), (7, 9, [1])]
    """
    batches: list[AckBatch] = []
    first, last = 0, -2
    types: list[int] = []
    for entry in entries:
        if entry.first_offset != last + 1:
            if types:
                batches.append(_batch(first, last, types))
            first, types = entry.first_offset, []
        last = entry.last_offset
        types += [int(entry.settlement.kind)] * (last - entry.first_offset + 1)
    if types:
        batches.append(_batch(first, last, types))
    return batches


def _batch(first: int, last: int, types: list[int]) -> AckBatch:
    return AckBatch(first, last, types if len(set(types)) > 1 else types[:1])


def merged(entries: Iterable[Entry]) -> list[Entry]:
    """Entries in the order of their offsets, with neighbours that say the same as one.

    >>> later = Settlement(Acknowledge.RELEASE, delay_ms=5)
    >>> [entry[:2] for entry in merged([Entry(1, 1, later), Entry(2, 2, later), Entry(4, 4, later)])]
    [(1, 2), (4, 4)]
    """
    found: list[Entry] = []
    for entry in entries:
        if found and found[-1].last_offset + 1 == entry.first_offset and found[-1][2] == entry.settlement:
            found[-1] = found[-1]._replace(last_offset=entry.last_offset)
        else:
            found.append(entry)
    return found
