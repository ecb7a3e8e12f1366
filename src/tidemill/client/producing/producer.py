"""``Producer``: single records, gathered into batches and sent through one ``Sender``.

Rules:

- Every partition has a queue of records, and one batch of it is under way at a time.
- A batch goes out when it is full, when the linger time is over, or when somebody flushes.
- ``send`` waits while too many bytes are queued.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, NamedTuple

from tidemill.client.cluster import Cluster, TopicInfo, TopicPartition
from tidemill.client.producing.sender import Encoded, Sender, Stamp
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.records.compression import NONE
from tidemill.records.partitioner import partition_for_key
from tidemill.records.record import Record, build_batch
from tidemill.wire.apis import ACKS_ALL

__all__ = ("Delivered", "Producer")

_RECORD_OVERHEAD_BYTES: Final = 32


class Delivered(NamedTuple):
    """Topic, partition and offset of a delivered record. The offset is -1 if it is not known (acks=0)."""

    topic: str
    partition: int
    offset: int


class _Queued(NamedTuple):
    record: Record
    size_bytes: int
    delivered: asyncio.Future[Delivered]


@dataclass(slots=True)
class _PartitionQueue:
    """The queue of records for one partition."""

    partition: TopicPartition
    records: deque[_Queued] = field(default_factory=deque)
    queued_bytes: int = 0
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is reason to send before the linger time is over."""
    task: asyncio.Task[None] | None = None


class Producer:
    """Writes records. Use it in ``async with``: leaving it sends what is queued."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        acks: int = ACKS_ALL,
        codec: int = NONE,
        linger_ms: int = 5,
        batch_bytes: int = 256 * 1024,
        max_queued_bytes: int = 32 * 1024 * 1024,
        delivery_timeout_ms: int = 120_000,
    ) -> None:
        self._cluster = cluster
        self._codec = codec
        self._linger_seconds = linger_ms / 1000
        self._batch_bytes = batch_bytes
        self._max_queued_bytes = max_queued_bytes
        self._sender = Sender(cluster, acks=acks, delivery_timeout_ms=delivery_timeout_ms)
        self._queues: dict[TopicPartition, _PartitionQueue] = {}
        self._sticky: dict[str, int] = {}
        self._queued_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._flushing = False

    async def __aenter__(self) -> Producer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.flush()
        await self._cancel()

    async def close(self) -> None:
        """Send what is queued. Closing twice is fine."""
        await self.flush()
        await self._cancel()

    async def send(
        self, topic: str, record: Record, partition: int | None = None
    ) -> asyncio.Future[Delivered]:
        """Queue a record; the future tells where it went, or fails with ``TidemillError``.

        Without ``partition`` a key decides, as in Java; without a key, batches go to the partitions in turn.
        """
        info = await self._cluster.topic(topic, create=True)
        while self._queued_bytes > self._max_queued_bytes:
            self._room.clear()
            await self._room.wait()
        size = _size_bytes(record)
        queue = self._queue_of((topic, self._choose(info, record, partition)))
        delivered: asyncio.Future[Delivered] = asyncio.get_running_loop().create_future()
        queue.records.append(_Queued(record, size, delivered))
        queue.queued_bytes += size
        self._queued_bytes += size
        if self._flushing or queue.queued_bytes >= self._batch_bytes:
            queue.wanted.set()
        if queue.task is None:
            queue.task = asyncio.get_running_loop().create_task(self._run(queue))
        return delivered

    async def flush(self) -> None:
        """Wait until everything queued is delivered or has failed; the futures tell which."""
        self._flushing = True
        try:
            while tasks := [queue.task for queue in self._queues.values() if queue.task is not None]:
                for queue in self._queues.values():
                    queue.wanted.set()
                await asyncio.wait(tasks)
        finally:
            self._flushing = False

    async def _cancel(self) -> None:
        tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _queue_of(self, partition: TopicPartition) -> _PartitionQueue:
        queue = self._queues.get(partition)
        if queue is None:
            queue = self._queues[partition] = _PartitionQueue(partition)
        return queue

    def _choose(self, info: TopicInfo, record: Record, partition: int | None) -> int:
        count = len(info.partitions)
        if partition is not None:
            if not 0 <= partition < count:
                raise ApiError(
                    ErrorCode.unknown_topic_or_partition,
                    f"topic {info.name!r} has {count} partitions (0 to {count - 1}), "
                    f"there is no partition {partition}",
                )
            return partition
        if record.key is not None:
            return partition_for_key(record.key, count)
        current = self._sticky.get(info.name, 0) % count
        if self._queue_of((info.name, current)).queued_bytes >= self._batch_bytes:
            current = (current + 1) % count
        self._sticky[info.name] = current
        return current

    # --- one partition

    async def _run(self, queue: _PartitionQueue) -> None:
        """Send batch after batch until the queue is empty."""
        try:
            while queue.records:
                if not queue.wanted.is_set():
                    await self._linger(queue)
                batch = self._take(queue)
                try:
                    await self._deliver(queue, batch)
                finally:
                    self._settle(batch)
        finally:
            queue.task = None

    async def _linger(self, queue: _PartitionQueue) -> None:
        try:
            async with asyncio.timeout(self._linger_seconds):
                await queue.wanted.wait()
        except TimeoutError:
            return

    def _take(self, queue: _PartitionQueue) -> list[_Queued]:
        batch = [queue.records.popleft()]
        size = batch[0].size_bytes
        while queue.records and size + queue.records[0].size_bytes <= self._batch_bytes:
            batch.append(queue.records.popleft())
            size += batch[-1].size_bytes
        queue.queued_bytes -= size
        if queue.queued_bytes < self._batch_bytes and not self._flushing:
            queue.wanted.clear()
        topic, index = queue.partition
        if self._sticky.get(topic) == index:
            # The next records without a key go to the next partition.
            self._sticky[topic] = index + 1
        return batch

    def _settle(self, batch: list[_Queued]) -> None:
        self._queued_bytes -= sum(queued.size_bytes for queued in batch)
        self._room.set()
        for queued in batch:
            queued.delivered.cancel()  # Has no effect on those that were answered: they are done.

    async def _deliver(self, queue: _PartitionQueue, batch: list[_Queued]) -> None:
        records = [queued.record for queued in batch]

        async def encode(stamp: Stamp) -> list[Encoded]:
            data = build_batch(
                records,
                codec=self._codec,
                producer_id=stamp.producer_id,
                producer_epoch=stamp.producer_epoch,
                base_sequence=stamp.base_sequence,
            )
            return [Encoded(data, len(records))]

        try:
            (base_offset,) = await self._sender.send(queue.partition, encode)
        except TidemillError as error:
            for queued in batch:
                if not queued.delivered.done():
                    queued.delivered.set_exception(error)
            return
        topic, index = queue.partition
        for delta, queued in enumerate(batch):
            if not queued.delivered.done():
                offset = base_offset + delta if base_offset >= 0 else -1
                queued.delivered.set_result(Delivered(topic, index, offset))


def _size_bytes(record: Record) -> int:
    size = _RECORD_OVERHEAD_BYTES + len(record.key or b"") + len(record.value or b"")
    return size + sum(len(name) + len(value or b"") + 8 for name, value in record.headers)
