"""Lag of share groups: how many records each has not finished, whether it has members or not.

It is measured when somebody asks, from the states of share partitions that this node keeps: a state is there
as long as its group, and each is kept by one node of a cluster. So the sum over the nodes is the group's lag.
The end of a partition is its high watermark, as in DescribeShareGroupOffsets: of this node's own replica, or
else asked of the leader, all partitions of a node in few requests. A leader that does not answer in time is
not waited for: what it said before counts. The number of series is bounded; what is left out is counted.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tidemill.coordination.metrics import Metric, gauge, gauges
from tidemill.coordination.share_state import NO_START
from tidemill.coordination.turns import begin_slice, give_way, in_chunks
from tidemill.errors import ErrorCode, TidemillError
from tidemill.server.coordinators.share_state import SHARE_STATE
from tidemill.server.lag import HighWatermarks

if TYPE_CHECKING:
    from tidemill.replication.replicas import PartitionKey
    from tidemill.server.broker import Broker

__all__ = ("SHARE_LAG_METRICS", "ShareLag", "ShareLagReport", "ask_ends")

_LIST_OFFSETS_VERSION: Final = 7
_LATEST: Final = -1
_ASK_SECONDS: Final = 2.0
_ASKED_AT_ONCE: Final = 5_000


@dataclass(slots=True)
class ShareLagReport:
    """The lag of every share group, as far as this node keeps its states; at most ``series_max`` of them."""

    series_max: int
    left_out: int = 0
    lags: dict[str, int] = field(default_factory=dict)

    def close(self) -> None:
        """Finish the report: leave out the smallest lags above the limit."""
        self.left_out = max(0, len(self.lags) - self.series_max)
        if self.left_out:
            self.lags = dict(heapq.nlargest(self.series_max, self.lags.items(), key=lambda item: item[1]))

    def by_group(self) -> list[tuple[tuple[str], int]]:
        """The lag of each group."""
        return [((group,), lag) for group, lag in self.lags.items()]


SHARE_LAG_METRICS: Final[Sequence[Metric[ShareLagReport]]] = (
    gauge(
        "tidemill_share_lag_series_left_out",
        "Share groups whose lag is not shown: more than lag_series_max.",
        lambda report: report.left_out,
    ),
    gauges(
        "tidemill_share_lag",
        "Records that are not finished, of the partitions whose state this node keeps.",
        ("group",),
        lambda report: report.by_group(),
    ),
)


class ShareLag:
    """Measures the lag of all share groups whose states this node keeps."""

    def __init__(self, broker: Broker, series_max: int) -> None:
        self._broker = broker
        self._series_max = series_max
        self._watermarks = HighWatermarks(broker.replicas)
        #: Ends of partitions that other nodes hold, as they were told last.
        self._elsewhere: dict[PartitionKey, int] = {}

    async def measure(self) -> ShareLagReport:
        """Compare the stored states with high watermarks, now."""
        report = ShareLagReport(self._series_max)
        if not self._broker.coordinators.has_topic(SHARE_STATE):
            return report
        await self._watermarks.look_up(self._held_here())
        await self._ask_others()
        begin_slice()
        for key, state in self._broker.share_states.summaries():
            partition = key.topic_id, key.partition
            end = self._elsewhere.get(partition)
            if end is None:
                end = self._watermarks.of(partition)
            if end is not None and state.start_offset != NO_START:
                lag = max(0, end - state.start_offset - state.delivery_complete_count)
                report.lags[key.group_id] = report.lags.get(key.group_id, 0) + lag
            await give_way()
        report.close()
        return report

    def _held_here(self) -> Iterator[tuple[PartitionKey, str]]:
        """The partitions of which this node is a replica, with the names of their topics."""
        find = self._broker.find
        for key, _ in self._broker.share_states.summaries():
            placement = find.held_placement(key.topic_id, key.partition)
            if placement is not None:
                yield (key.topic_id, key.partition), placement.topic

    async def _ask_others(self) -> None:
        """Learn the ends of partitions that this node does not hold."""
        image, node_id = self._broker.image, self._broker.node_id
        wanted: dict[int, list[tuple[PartitionKey, str]]] = {}
        kept: dict[PartitionKey, int] = {}
        begin_slice()
        for key, _ in self._broker.share_states.summaries():
            await give_way()
            topic = image.topic_by_id(key.topic_id)
            if topic is None or key.partition >= len(topic.partitions):
                continue
            placed, partition = topic.partitions[key.partition], (key.topic_id, key.partition)
            if node_id in placed.replicas:
                continue
            if partition in self._elsewhere:
                kept[partition] = self._elsewhere[partition]
            if placed.leader >= 0:
                wanted.setdefault(placed.leader, []).append((partition, topic.name))
        answers = await asyncio.gather(*(self._ask(leader, some) for leader, some in wanted.items()))
        for ends in answers:
            kept |= ends
        self._elsewhere = kept

    async def _ask(self, node_id: int, wanted: Sequence[tuple[PartitionKey, str]]) -> dict[PartitionKey, int]:
        found: dict[PartitionKey, int] = {}
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                for some in in_chunks(wanted, _ASKED_AT_ONCE):
                    by_topic: dict[str, list[int]] = {}
                    for (_, index), name in some:
                        by_topic.setdefault(name, []).append(index)
                    ends = await ask_ends(self._broker, node_id, by_topic)
                    found |= {key: ends[name, key[1]] for key, name in some if (name, key[1]) in ends}
        except TimeoutError:
            pass
        return found


async def ask_ends(
    broker: Broker, node_id: int, partitions: Mapping[str, Sequence[int]]
) -> dict[tuple[str, int], int]:
    """High watermarks of partitions, asked of the node that leads them; what it cannot tell is left out."""
    body = {
        "replica_id": -1,
        "isolation_level": 0,
        "topics": [
            {
                "name": name,
                "partitions": [{"partition_index": index, "timestamp": _LATEST} for index in indexes],
            }
            for name, indexes in partitions.items()
        ],
    }
    try:
        answer = await broker.ask_node(node_id, "ListOffsets", _LIST_OFFSETS_VERSION, body)
    except TidemillError:
        return {}
    return {
        (topic.name, entry.partition_index): entry.offset
        for topic in answer.topics
        for entry in topic.partitions
        if entry.error_code == ErrorCode.none
    }
