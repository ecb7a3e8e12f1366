"""Consumer lag: how many offsets each group is behind the high watermark of what it reads.

It is measured when somebody asks, over the committed offsets of both group protocols, in short turns of the
event loop. Rules:

- A partition is not opened for it. The high watermark of a closed one is what its checkpoint says, read
  once in a thread: nobody can write to a log without opening it.
- A partition that is stopped, or that this node does not hold, has no lag: where it ends is not known.
- The number of series is bounded. Sums over the partitions of a topic come always; single partitions only if
  they are few enough; of too many sums the largest are shown. What is left out is counted.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill.coordination.metrics import Metric, gauge, gauges
from tidemill.coordination.turns import begin_slice, give_way
from tidemill.replication.replicas import PartitionKey, Replicas
from tidemill.server.coordinators.groups import GROUPS

if TYPE_CHECKING:
    from tidemill.server.broker.bundle import Broker

__all__ = ("LAG_METRICS", "ConsumerLag", "HighWatermarks", "LagReport")


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
        """Add the lag of one partition."""
        self._topics.setdefault((group, topic), _TopicLag()).add(lag)
        self._partition_count += 1
        if self._partition_count <= self.series_max:
            self.partitions.append(_PartitionLag(group, topic, partition, lag))

    def close(self) -> None:
        """Finish the report: leave out series above the limit."""
        if self._partition_count > self.series_max:
            # All partitions are left out, because some would look like all.
            self.left_out += self._partition_count
            self.partitions.clear()
        too_many = len(self._topics) - self.series_max
        if too_many > 0:
            self.left_out += too_many
            largest = heapq.nlargest(self.series_max, self._topics.items(), key=lambda item: item[1].total)
            self._topics = dict(largest)

    def by_topic(self, read: Callable[[_TopicLag], int]) -> list[tuple[tuple[str, str], int]]:
        """One figure of each group's lag in each topic."""
        return [(key, read(lag)) for key, lag in self._topics.items()]

    def by_partition(self) -> Iterator[tuple[tuple[str, str, str], int]]:
        """The lag of each group in each partition, if they are few enough."""
        for group, topic, partition, lag in self.partitions:
            yield (group, topic, str(partition)), lag


LAG_METRICS: Final[Sequence[Metric[LagReport]]] = (
    gauge("tidemill_groups", "Groups that have committed offsets.", lambda report: report.groups),
    gauge(
        "tidemill_group_lag_series_left_out",
        "Lags that are not shown: more than lag_series_max.",
        lambda report: report.left_out,
    ),
    gauges(
        "tidemill_group_topic_lag",
        "Lag of a group, all partitions.",
        ("group", "topic"),
        lambda report: report.by_topic(lambda lag: lag.total),
    ),
    gauges(
        "tidemill_group_topic_lag_max",
        "Lag in the partition with most.",
        ("group", "topic"),
        lambda report: report.by_topic(lambda lag: lag.largest),
    ),
    gauges(
        "tidemill_group_lag",
        "High watermark minus committed offset.",
        ("group", "topic", "partition"),
        lambda report: report.by_partition(),
    ),
)


class ConsumerLag:
    """Measures the lag of all groups that this node coordinates."""

    def __init__(self, broker: Broker, series_max: int) -> None:
        self._broker = broker
        self._find = broker.find
        self._watermarks = HighWatermarks(broker.replicas)
        self._series_max = series_max

    async def measure(self) -> LagReport:
        """Compare committed offsets with high watermarks, now."""
        report = LagReport(self._series_max)
        if not self._broker.coordinators.has_topic(GROUPS):
            return report
        await self._watermarks.look_up(self._held_here())
        begin_slice()
        for group, offsets in self._broker.groups.committed_offsets():
            report.groups += 1
            for name, partition, committed in offsets:
                topic = self._find.image.topics.get(name)
                end = None if topic is None else self._watermarks.of((topic.id, partition))
                if end is not None:
                    report.add(group, name, partition, max(0, end - committed))
                await give_way()
        report.close()
        return report

    def _held_here(self) -> Iterator[tuple[PartitionKey, str]]:
        """The partitions that groups read and of which this node is a replica, with their topics' names."""
        topics = self._find.image.topics
        for _, offsets in self._broker.groups.committed_offsets():
            for name, index, _ in offsets:
                topic = topics.get(name)
                if topic is not None and self._find.held_placement(topic.id, index) is not None:
                    yield (topic.id, index), name


class HighWatermarks:
    """The high watermarks of the partitions that this node holds, open or not."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        #: Those of partitions that were closed when they were last looked at; None if one could not be read.
        self._closed: dict[PartitionKey, int | None] = {}

    def of(self, key: PartitionKey) -> int | None:
        """The high watermark of a partition that is open or was looked up; None if it is not known."""
        partition = self._replicas.peek(*key)
        if partition is not None:
            return None if partition.failure is not None else partition.high_watermark
        return self._closed.get(key)

    async def look_up(self, partitions: Iterable[tuple[PartitionKey, str]]) -> None:
        """Read those of closed partitions, given with their topics' names, if they are not known yet."""
        replicas, known = self._replicas, self._closed
        wanted: dict[PartitionKey, str] = {}
        needed: dict[PartitionKey, int | None] = {}
        begin_slice()
        for key, name in partitions:
            if replicas.peek(*key) is None and key not in replicas.offline:
                if key in known:
                    needed[key] = known[key]
                else:
                    wanted[key] = name
            await give_way()
        if wanted:
            needed |= await asyncio.to_thread(_read_closed, replicas, wanted)
        self._closed = needed


def _read_closed(replicas: Replicas, topics: dict[PartitionKey, str]) -> dict[PartitionKey, int | None]:
    return {key: replicas.closed_high_watermark(topic, *key) for key, topic in topics.items()}
