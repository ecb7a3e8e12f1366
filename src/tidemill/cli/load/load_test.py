"""A load test against a topic: produce at a rate or as fast as it goes, consume, and check what was read."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tidemill.cli.load.records import BatchTemplate, IntegrityCheck
from tidemill.client.admin.topics import EARLIEST, LATEST, list_offsets
from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.client.consuming.record_reader import RecordReader
from tidemill.net.answers import check
from tidemill.net.connection import Connection
from tidemill.records.compression import NONE

__all__ = (
    "LoadPlan",
    "LoadResult",
    "consume_load",
    "produce_load",
    "read_back",
)

_BATCH_BYTES = 256 * 1024
#: With a rate, a batch has at most the records that are due in this time.
_BATCH_MS_MAX = 10
_NO_PRODUCER = (-1, -1)
_PRODUCE_VERSIONS = (3, 12)
_VISIBLE_SECONDS_MAX = 10.0
_VISIBLE_PAUSE_SECONDS = 0.01

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The records to send. ``rate`` is records a second over all partitions; 0: no limit."""

    records: int
    value_bytes: int
    acks: int = -1
    rate: float = 0.0
    codec: int = NONE
    in_flight: int = 5
    run: int = field(default_factory=lambda: random.getrandbits(62))

    def batch_records(self, partitions: int) -> int:
        count = max(1, _BATCH_BYTES // (self.value_bytes + 10))
        if self.rate:
            count = min(count, max(1, int(self.rate / partitions * _BATCH_MS_MAX / 1000)))
        return min(count, max(1, self.records // partitions))


@dataclass(slots=True)
class LoadResult:
    """The measurements of a run."""

    records: int = 0
    bytes: int = 0
    seconds: float = 0.0
    #: The latency of each batch, from sending it to its acknowledgement.
    latencies_ms: list[float] = field(default_factory=list)
    start_offsets: dict[TopicPartition, int] = field(default_factory=dict)
    sent_by_partition: dict[int, int] = field(default_factory=dict)


async def produce_load(cluster: Cluster, topic: str, plan: LoadPlan, progress: Progress) -> LoadResult:
    """Send the planned records, spread evenly over the partitions, and wait for all acknowledgements."""
    partitions = [(topic, partition.index) for partition in (await cluster.topic(topic)).partitions]
    ends = await list_offsets(cluster, dict.fromkeys(partitions, LATEST))
    result = LoadResult(start_offsets={partition: ends[partition].offset for partition in partitions})
    leaders = await cluster.leaders(partitions)
    started = time.perf_counter()
    loads = []
    for node_id, led in leaders.items():
        connection = await cluster.connection(node_id, purpose="load")
        for _, index in led:
            share = plan.records // len(partitions) + (index < plan.records % len(partitions))
            load = _PartitionLoad(connection, topic, index, share, len(partitions), plan, result, progress)
            loads.append(load.run())
    await asyncio.gather(*loads)
    result.seconds = time.perf_counter() - started
    return result


class _PartitionLoad:
    """The stream of batches into one partition."""

    def __init__(
        self,
        connection: Connection,
        topic: str,
        index: int,
        records: int,
        partitions: int,
        plan: LoadPlan,
        result: LoadResult,
        progress: Progress,
    ) -> None:
        self._connection = connection
        self._topic = topic
        self._index = index
        self._records = records
        self._plan = plan
        self._result = result
        self._progress = progress
        self._rate = plan.rate / partitions
        self._slots = asyncio.Semaphore(plan.in_flight)
        self._template = BatchTemplate(plan.batch_records(partitions), plan.value_bytes, plan.run)

    async def run(self) -> None:
        producer = await self._producer_id()
        sent, started, answers = 0, time.perf_counter(), []
        while sent < self._records:
            if self._rate:
                await asyncio.sleep(max(0.0, started + sent / self._rate - time.perf_counter()))
            left = self._records - sent
            if left < self._template.count:
                self._template = BatchTemplate(left, self._plan.value_bytes, self._plan.run)
            await self._slots.acquire()
            sequence = sent % 2**31 if producer != _NO_PRODUCER else -1
            batch = self._template.fill(
                sent, time.time_ns() // 1_000_000, (*producer, sequence), self._plan.codec
            )
            answers.append(asyncio.ensure_future(self._send(batch, self._template.count)))
            sent += self._template.count
            if len(answers) > 1000:
                answers = [answer for answer in answers if not answer.done() or answer.exception()]
            # Let the event loop run, so that answers are received between two batches.
            await asyncio.sleep(0)
        await asyncio.gather(*answers)
        self._result.sent_by_partition[self._index] = sent

    async def _producer_id(self) -> tuple[int, int]:
        if self._plan.acks != -1:
            return _NO_PRODUCER
        answer = await self._connection.request(
            "InitProducerId", {"transactional_id": None, "transaction_timeout": 60_000}
        )
        check(answer.error_code, None, "getting a producer id")
        return answer.producer_id, answer.producer_epoch

    async def _send(self, batch: bytes, count: int) -> None:
        started = time.perf_counter()
        partition = {"index": self._index, "records": batch}
        body: dict[str, Any] = {
            "acks": self._plan.acks,
            "timeout": 30_000,
            "topic_data": [{"name": self._topic, "partition_data": [partition]}],
        }
        try:
            if self._plan.acks == 0:
                await self._connection.send_unanswered("Produce", body, versions=_PRODUCE_VERSIONS)
            else:
                answer = await self._connection.request("Produce", body, versions=_PRODUCE_VERSIONS)
                outcome = answer.responses[0].partition_responses[0]
                message = getattr(outcome, "error_message", None)
                check(outcome.error_code, message, f"writing to {self._topic}-{self._index}")
        finally:
            self._slots.release()
        self._result.latencies_ms.append((time.perf_counter() - started) * 1000)
        self._result.records += count
        self._result.bytes += count * self._plan.value_bytes
        self._progress(count)


async def read_back(
    cluster: Cluster, plan: LoadPlan, produced: LoadResult, progress: Progress
) -> IntegrityCheck:
    """Read everything that a run produced, and check that each record is there once and in order."""
    checker = IntegrityCheck(plan.run)
    await _read(
        cluster,
        produced.start_offsets,
        await _visible_ends(cluster, produced),
        checker.note,
        progress,
    )
    checker.finish(produced.sent_by_partition)
    return checker


async def _visible_ends(cluster: Cluster, produced: LoadResult) -> dict[TopicPartition, int]:
    """The ends of the partitions, once all that was sent can be read. With acks=0 that is not at once."""
    deadline = time.monotonic() + _VISIBLE_SECONDS_MAX
    while True:
        found = await list_offsets(cluster, dict.fromkeys(produced.start_offsets, LATEST))
        ends = {partition: end.offset for partition, end in found.items()}
        missing = [
            partition
            for partition, start in produced.start_offsets.items()
            if ends[partition] - start < produced.sent_by_partition[partition[1]]
        ]
        if not missing or time.monotonic() > deadline:
            return ends
        await asyncio.sleep(_VISIBLE_PAUSE_SECONDS)


async def consume_load(cluster: Cluster, topic: str, limit: int | None, progress: Progress) -> LoadResult:
    """Read a topic from its start to its present end, or until ``limit`` records."""
    partitions = [(topic, partition.index) for partition in (await cluster.topic(topic)).partitions]
    starts = await list_offsets(cluster, dict.fromkeys(partitions, EARLIEST))
    ends = await list_offsets(cluster, dict.fromkeys(partitions, LATEST))
    result = LoadResult()

    def note(index: int, value: bytes | None) -> bool:
        result.records += 1
        result.bytes += len(value or b"")
        return limit is not None and result.records >= limit

    started = time.perf_counter()
    await _read(
        cluster,
        {partition: found.offset for partition, found in starts.items()},
        {partition: found.offset for partition, found in ends.items()},
        note,
        progress,
        result.latencies_ms,
    )
    result.seconds = time.perf_counter() - started
    return result


async def _read(
    cluster: Cluster,
    starts: dict[TopicPartition, int],
    ends: dict[TopicPartition, int],
    note: Callable[[int, bytes | None], bool | None],
    progress: Progress,
    latencies_ms: list[float] | None = None,
) -> None:
    """Call ``note`` for every record between the offsets, until it returns True."""
    reader = RecordReader(cluster, {key: at for key, at in starts.items() if at < ends[key]})
    try:
        while any(position < ends[key] for key, position in reader.positions.items()):
            started = time.perf_counter()
            messages = await reader.poll()
            if latencies_ms is not None:
                latencies_ms.append((time.perf_counter() - started) * 1000)
            for message in messages:
                if note(message.partition, message.record.value):
                    return
            progress(len(messages))
            for key in [key for key, position in reader.positions.items() if position >= ends[key]]:
                del reader.positions[key]
    finally:
        await reader.close()
