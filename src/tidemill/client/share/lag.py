"""How much of its topics a share group has not finished."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from tidemill.client.admin.topics import LATEST, list_offsets
from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.net.answers import checked

__all__ = ("group_lag",)


async def group_lag(cluster: Cluster, group: str, topics: Iterable[str]) -> int:
    """Records of these topics that the group has not finished: waiting, delayed, blocked, or in work.

    It is what the leaders of the partitions know, so that it is exact at one moment for each.
    """
    partitions = [
        (name, index) for name in topics for index in range(len((await cluster.topic(name)).partitions))
    ]
    ends = await list_offsets(cluster, dict.fromkeys(partitions, LATEST))
    found = await asyncio.gather(
        *(_unfinished(cluster, group, partition, ends[partition].offset) for partition in partitions)
    )
    return sum(found)


async def _unfinished(cluster: Cluster, group: str, partition: TopicPartition, end_offset: int) -> int:
    topic, index = partition
    body = {"group_id": group, "topic": topic, "partition": index, "states": [], "limit": 0}

    async def ask() -> int:
        (leader,) = await cluster.leaders([partition])
        connection = await cluster.connection(leader)
        answer = checked(
            await connection.request("DescribeShareRecords", body), f"the lag of group {group!r} on {topic}"
        )
        waiting: int = answer.available + answer.delayed + answer.blocked
        in_work: int = answer.acquired + answer.dead_letters_due
        return waiting + in_work + max(0, end_offset - int(answer.end_offset))

    return await cluster.retrying(ask)
