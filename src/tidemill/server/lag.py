"""Consumer lag: how many offsets each group is behind the high watermark of what it reads.

It is measured when somebody asks, over the committed offsets of both group protocols, in short turns of the
event loop. Rules:

- A partition is not opened for it. The end of a closed log is what its checkpoint says, read once in a
  thread: nobody can write to a log without opening it.
- A partition that is stopped has no lag: where it ends is not known.
- The number of series is bounded. Sums over the partitions of a topic come always; single partitions only if
  they are few enough; of too many sums the largest are shown. What is left out is counted.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tidemill.log.checkpoint import read_recovery_point
from tidemill.log.storage import Storage
from tidemill.replication.replicas import PartitionKey, partition_directory
from tidemill.server.broker import Broker
from tidemill.server.metrics import Metric, Turn

__all__ = ("ConsumerLag", "LagReport")


class _PartitionLag(NamedTuple):
    group: str
    topic: str
    partition: int
    lag: int


@dataclass(slots=True)
class _TopicLag:
    """The lag of one group in all partitions of one topic."""

    total: int = 0
    largest: int = 0

    def add(self, lag: int) -> None:
        self.total += lag
        self.largest = max(self.largest, lag)


@dataclass(slots=True)
class LagReport:
    """The lag of every group at about one moment; at most ``series_max`` partitions and sums of each kind."""

    series_max: int
    groups: int = 0
    left_out: int = 0
    partitions: list[_PartitionLag] = field(default_factory=list)
    _topics: dict[tuple[str, str], _TopicLag] = field(default_factory=dict)
    _partition_count: int = 0

    def add(self, group: str, topic: str, partition: int, lag: int) -> None:
        """Take in one partition."""
        self._topics.setdefault((group, topic), _TopicLag()).add(lag)
        self._partition_count += 1
        if self._partition_count <= self.series_max:
            self.partitions.append(_PartitionLag(group, topic, partition, lag))

    def close(self) -> None:
        """All are in: leave out what is too much."""
        if self._partition_count > self.series_max:
            # A part of the partitions would look like all of them.
            self.left_out += self._partition_count
            self.partitions.clear()
        too_many = len(self._topics) - self.series_max
        if too_many > 0:
            self.left_out += too_many
            largest = heapq.nlargest(self.series_max, self._topics.items(), key=lambda item: item[1].total)
            self._topics = dict(largest)

    def collect(self) -> Iterator[Metric]:
        """The metrics of this report, as /metrics shows them."""
        yield Metric("tidemill_groups", "gauge", "Groups that have committed offsets.", self.groups)
        yield Metric(
            "tidemill_group_lag_series_left_out",
            "gauge",
            "Lags that are not shown: more than lag_series_max.",
            self.left_out,
        )
        for (group, topic), lag in self._topics.items():
            labels = (("group", group), ("topic", topic))
            yield Metric(
                "tidemill_group_topic_lag", "gauge", "Lag of a group, all partitions.", lag.total, labels
            )
            yield Metric(
                "tidemill_group_topic_lag_max",
                "gauge",
                "Lag in the partition with most.",
                lag.largest,
                labels,
            )
        for group, topic, partition, behind in self.partitions:
            places = (("group", group), ("topic", topic), ("partition", str(partition)))
            yield Metric(
                "tidemill_group_lag", "gauge", "High watermark minus committed offset.", behind, places
            )


class ConsumerLag:
    """Measures the lag of all groups that this node coordinates."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        #: Ends of logs that were closed when they were last looked at; None: not readable.
        self._closed_ends: dict[PartitionKey, int | None] = {}

    async def measure(self) -> LagReport:
        """Compare committed offsets with high watermarks, now."""
        broker = self._broker
        report = LagReport(broker.settings.lag_series_max)
        await self._read_closed_ends()
        turn = Turn()
        for group, offsets in broker.groups.committed_offsets():
            report.groups += 1
            for topic, partition, committed in offsets:
                end = self._end_offset(topic, partition)
                if end is not None:
                    report.add(group, topic, partition, max(0, end - committed))
                if turn.is_over():
                    await turn.pause()
        report.close()
        return report

    def _end_offset(self, topic_name: str, index: int) -> int | None:
        topic = self._broker.image.topics.get(topic_name)
        if topic is None:
            return None
        partition = self._broker.replicas.peek(topic.id, index)
        if partition is not None:
            return None if partition.log.failure is not None else partition.high_watermark
        return self._closed_ends.get((topic.id, index))

    async def _read_closed_ends(self) -> None:
        """Look up the ends of closed logs that some group reads and that are not known yet."""
        broker, replicas = self._broker, self._broker.replicas
        known, wanted = self._closed_ends, dict[PartitionKey, str]()
        needed: dict[PartitionKey, int | None] = {}
        turn = Turn()
        for _, offsets in broker.groups.committed_offsets():
            for name, index, _ in offsets:
                topic = broker.image.topics.get(name)
                if topic is not None:
                    key = topic.id, index
                    if replicas.peek(*key) is None and key not in replicas.offline:
                        if key in known:
                            needed[key] = known[key]
                        else:
                            wanted[key] = partition_directory(name, *key)
                if turn.is_over():
                    await turn.pause()
        if wanted:
            needed |= await asyncio.to_thread(_read_ends, replicas.storage, wanted)
        self._closed_ends = needed


def _read_ends(storage: Storage, directories: dict[PartitionKey, str]) -> dict[PartitionKey, int | None]:
    return {key: read_recovery_point(storage, directory) for key, directory in directories.items()}
