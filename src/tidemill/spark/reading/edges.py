"""The offsets at which reading begins and ends, worked out from the options."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tidemill.client.admin.topics import EARLIEST, LATEST, list_offsets
from tidemill.client.cluster import Cluster
from tidemill.spark.errors import DataLost, InvalidOption
from tidemill.spark.reading.options import Edge
from tidemill.spark.reading.positions import TopicPartition

__all__ = ("checked_start", "committed_ends", "log_starts", "resolve")


async def committed_ends(
    cluster: Cluster, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, int]:
    """The last stable offset of each partition: a batch may read up to there."""
    found = await list_offsets(cluster, dict.fromkeys(partitions, LATEST), committed=True)
    return {partition: at.offset for partition, at in found.items()}


async def log_starts(cluster: Cluster, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """The first offset that each log still has."""
    found = await list_offsets(cluster, dict.fromkeys(partitions, EARLIEST))
    return {partition: at.offset for partition, at in found.items()}


async def resolve(
    cluster: Cluster, partitions: Collection[TopicPartition], edge: Edge, now_ms: int
) -> dict[TopicPartition, int]:
    """The offset of every partition that ``edge`` means. A time behind the last record means the end."""
    ends = await committed_ends(cluster, partitions)
    if edge.kind == "latest":
        return ends
    if edge.kind == "earliest":
        return await log_starts(cluster, partitions)
    if edge.kind in ("offsets", "times"):
        _refuse_others(edge.by_partition, partitions)
        if edge.kind == "times":
            return await _by_time(cluster, _asked(edge.by_partition, partitions), ends)
        return await _by_offset(cluster, _asked(edge.by_partition, partitions), ends)
    assert edge.kind in ("time", "relative"), edge
    return await _by_time(cluster, dict.fromkeys(partitions, edge.at_ms(now_ms)), ends)


async def _by_time(
    cluster: Cluster, times: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    found = await list_offsets(cluster, times)
    return {
        partition: ends[partition] if at.offset < 0 else min(at.offset, ends[partition])
        for partition, at in found.items()
    }


async def _by_offset(
    cluster: Cluster, offsets: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    starts = await log_starts(cluster, list(offsets))
    words = {EARLIEST: starts, LATEST: ends}
    return {
        partition: words[offset][partition] if offset < 0 else offset for partition, offset in offsets.items()
    }


def _asked(
    by_partition: Mapping[str, Mapping[int, int]], partitions: Collection[TopicPartition]
) -> dict[TopicPartition, int]:
    missing = [
        partition for partition in partitions if partition[1] not in by_partition.get(partition[0], {})
    ]
    if missing:
        names = ", ".join(f"{topic}-{number}" for topic, number in sorted(missing)[:10])
        raise InvalidOption(f"the offsets that were given say nothing about {names}: name every partition")
    return {(topic, number): by_partition[topic][number] for topic, number in partitions}


def _refuse_others(
    by_partition: Mapping[str, Mapping[int, int]], partitions: Collection[TopicPartition]
) -> None:
    known = set(partitions)
    for topic, entries in by_partition.items():
        for number in entries:
            if (topic, number) not in known:
                raise InvalidOption(f"the offsets that were given name {topic}-{number}, which is not read")


def checked_start(partition: TopicPartition, start: int, log_start: int, log_end: int, *, fail: bool) -> int:
    """``start`` if the log still has it; else raises ``DataLost``, or returns where the log goes on."""
    if log_start <= start <= log_end:
        return start
    topic, number = partition
    if fail:
        lost = f"{topic}-{number} begins at {log_start} now: offsets {start} to {log_start - 1} were deleted"
        if start > log_end:
            lost = (
                f"{topic}-{number} ends at {log_end}, and the query has read up to {start}: it was made anew"
            )
        raise DataLost(
            f"{lost}. To go on with what is there, set failOnDataLoss to false; retention.ms and "
            f"retention.bytes of the topic say how long records are kept"
        )
    return log_start
