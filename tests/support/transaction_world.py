"""Partitions, clients and a transaction coordinator that can crash at any point, all under a test's control.

``WorldPartition`` keeps to the rules of the real partition: transactional writes only where they are allowed,
a marker ends what its producer has open, older epochs and older coordinators are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from support.coordination import MemoryLog, VirtualClock, settle
from tidemill.coordination.log import ReplayedRecord
from tidemill.errors import ApiError, ErrorCode, StorageError, TidemillError
from tidemill.transactions.coordinator import TransactionCoordinator
from tidemill.transactions.jobs import Publication
from tidemill.transactions.messages import Producer, TopicPartition, TransactionEnd
from tidemill.transactions.records import decode_record
from tidemill.transactions.settings import TransactionSettings
from tidemill.transactions.transaction import Transaction, TransactionState

__all__ = ("World", "WorldPartition", "Write")


@dataclass(frozen=True)
class Write:
    """A batch in a partition; ``tag`` is the transaction that its client meant it to be part of."""

    producer: Producer
    tag: object


@dataclass
class WorldPartition:
    """A log of writes and markers."""

    entries: list[Write | TransactionEnd] = field(default_factory=list)
    durable: int = 0
    allowed: dict[int, int] = field(default_factory=dict)
    syncs_at_once: bool = True
    failures_left: int = 0
    deleted: bool = False
    #: Another node that leads it; None: the coordinator's.
    leader: int | None = None
    waiters: list[tuple[int, asyncio.Future[None]]] = field(default_factory=list)

    def epoch_of(self, producer_id: int) -> int:
        epochs = [entry.producer.epoch for entry in self.entries if entry.producer.id == producer_id]
        return max(epochs, default=-1)

    def is_open(self, producer_id: int) -> bool:
        last = [entry for entry in self.entries if entry.producer.id == producer_id][-1:]
        return bool(last) and isinstance(last[0], Write)

    def may_write(self, producer: Producer) -> bool:
        if producer.epoch < self.epoch_of(producer.id):
            return False
        return self.allowed.get(producer.id) == producer.epoch or (
            self.is_open(producer.id) and self.epoch_of(producer.id) == producer.epoch
        )

    def write(self, write: Write) -> None:
        assert self.may_write(write.producer)
        self.entries.append(write)
        # A client waits for its writes before it ends a transaction.
        self.sync()

    async def write_markers(self, markers: Sequence[TransactionEnd]) -> None:
        if self.failures_left:
            self.failures_left -= 1
            raise StorageError("the disk has a bad day")
        for marker in markers:
            self._check(marker)
        for marker in markers:
            self.entries.append(marker)
            self.allowed.pop(marker.producer.id, None)
        if self.syncs_at_once:
            self.sync()
        elif self.durable < len(self.entries):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiters.append((len(self.entries), future))
            await future

    def _check(self, marker: TransactionEnd) -> None:
        if marker.producer.epoch < self.epoch_of(marker.producer.id):
            raise ApiError(ErrorCode.invalid_producer_epoch, "fenced")
        epochs = [
            entry.coordinator_epoch
            for entry in self.entries
            if isinstance(entry, TransactionEnd) and entry.producer.id == marker.producer.id
        ]
        if marker.coordinator_epoch < max(epochs, default=-1):
            raise ApiError(ErrorCode.transaction_coordinator_fenced, "fenced")

    def sync(self) -> None:
        self.durable = len(self.entries)
        for _, future in self.waiters:
            if not future.done():
                future.set_result(None)
        self.waiters.clear()

    def crash(self) -> None:
        del self.entries[self.durable :]
        self.allowed.clear()
        self.waiters.clear()

    def decisions(self) -> dict[object, list[bool | None]]:
        """Tag to what became of each of its writes; None is open."""
        found: dict[object, list[bool | None]] = {}
        for number, entry in enumerate(self.entries):
            if isinstance(entry, Write):
                later = (
                    each.commit
                    for each in self.entries[number:]
                    if isinstance(each, TransactionEnd) and each.producer.id == entry.producer.id
                )
                found.setdefault(entry.tag, []).append(next(later, None))
        return found


class World:
    """One shard of a coordinator, and the partitions that its transactions write to."""

    def __init__(self, *places: TopicPartition, **settings: Any) -> None:
        self.clock = VirtualClock()
        self.log = MemoryLog()
        self.partitions = {place: WorldPartition() for place in places}
        self.settings = TransactionSettings(**settings)
        self.producer_ids = 100
        #: Decisions that were not durable when the first marker was written.
        self.premature: list[TransactionEnd] = []
        #: The partitions of every call that wrote markers.
        self.writes: list[list[TopicPartition]] = []
        self.coordinator = self._start()

    def _start(self) -> TransactionCoordinator:
        return TransactionCoordinator(self, self, self.settings, self.clock, self._next_producer_id)

    async def _next_producer_id(self) -> int:
        self.producer_ids += 1
        return self.producer_ids

    # --- what the coordinator uses

    def leads(self, partition: int) -> bool:
        return True

    def partition_count(self) -> int:
        return 1

    def open_log(self, partition: int) -> MemoryLog:
        return self.log

    async def prepare_append(self, partition: int) -> None:
        pass

    def allow_writes(self, place: TopicPartition, producer: Producer) -> None:
        stored = self.stored_with(producer)
        assert stored is not None, "allowed before it was durable"
        assert stored.state is TransactionState.ONGOING
        assert place in stored.partitions
        self.partitions[place].allowed[producer.id] = producer.epoch

    def by_leader(
        self, places: Collection[TopicPartition]
    ) -> tuple[list[TopicPartition], list[list[TopicPartition]]]:
        here = [place for place in places if self.partitions[place].leader is None]
        leaders = sorted(
            {leader for place in places if (leader := self.partitions[place].leader) is not None}
        )
        return here, [
            [place for place in places if self.partitions[place].leader == leader] for leader in leaders
        ]

    async def write(
        self, markers: Mapping[TopicPartition, Sequence[TransactionEnd]]
    ) -> Mapping[TopicPartition, TidemillError]:
        assert len({self.partitions[place].leader for place in markers}) == 1, "one leader at a time"
        self.writes.append(sorted(markers))
        outcomes = await asyncio.gather(
            *(self._write(place, ends) for place, ends in markers.items()), return_exceptions=True
        )
        failures: dict[TopicPartition, TidemillError] = {}
        for place, outcome in zip(markers, outcomes, strict=True):
            if isinstance(outcome, TidemillError):
                failures[place] = outcome
            elif outcome is not None:
                raise outcome
        return failures

    async def _write(self, place: TopicPartition, markers: Sequence[TransactionEnd]) -> None:
        for marker in markers:
            stored = self.stored_with(marker.producer)
            if stored is None or not stored.is_prepared or stored.commits != marker.commit:
                self.premature.append(marker)
        if self.partitions[place].deleted:
            raise ApiError(ErrorCode.unknown_topic_or_partition, "it is gone")
        await self.partitions[place].write_markers(markers)

    def together(self, places: Collection[TopicPartition]) -> AbstractAsyncContextManager[object]:
        return nullcontext()

    # --- what a test does and sees

    async def verify(
        self, transactional_id: str, producer_id: int, producer_epoch: int, topic: str, partition: int
    ) -> ErrorCode:
        """Whether a partition is part of the producer's transaction; if so, the producer may write there."""
        place = (topic, partition)
        producer = Producer(producer_id, producer_epoch)
        return (await self.coordinator.verify_all(transactional_id, producer, [place]))[place]

    def stored(self) -> dict[str, Transaction]:
        """The durable state, folded here from the log."""
        values: dict[str, Transaction] = {}
        for entry in self.log.replay(self.log.high_watermark):
            assert isinstance(entry, ReplayedRecord)
            record = decode_record(entry.key, entry.value)
            assert record is not None
            name, value = record
            if isinstance(value, Transaction):
                values[name] = value
            elif value is None:
                values.pop(name, None)
        return values

    def published(self) -> dict[str, Publication]:
        """What jobs have published, as far as it is durable, by the job's key."""
        values: dict[str, Publication] = {}
        for entry in self.log.replay(self.log.high_watermark):
            assert isinstance(entry, ReplayedRecord)
            record = decode_record(entry.key, entry.value)
            assert record is not None
            if isinstance(record[1], Publication):
                values[record[0]] = record[1]
        return values

    def stored_with(self, producer: Producer) -> Transaction | None:
        for value in self.stored().values():
            if (value.producer_id, value.producer_epoch) == producer:
                return value
        return None

    async def crash(self) -> None:
        """kill -9 and a new start. Requests that are under way never hear an answer."""
        old = self.coordinator
        self.log.crash()
        for partition in self.partitions.values():
            partition.crash()
        refuse, self.log.refuse_with = self.log.refuse_with, StorageError("the process is dead")
        await old.close()
        self.log.refuse_with = refuse
        self.coordinator = self._start()
        await self.coordinator.start()
        await settle()

    async def heal(self) -> None:
        """No more faults, and time for everything that is due."""
        self.log.refuse_with = None
        self.log.syncs_at_once = True
        self.log.sync()
        for partition in self.partitions.values():
            partition.failures_left = 0
            partition.syncs_at_once = True
            partition.sync()
        await self.coordinator.start()
        await settle()
        await self.clock.advance(100_000)
        await settle()
