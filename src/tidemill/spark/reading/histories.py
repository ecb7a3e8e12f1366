"""Leader epochs of a stream's position: whether a log still is the one that the stream has read.

An offset alone does not say that. After an unclean election a log is cut, and grows again: the same offset is
another record then, and a stream that went on from it would miss some records, or have others that are gone.
So a position has, for each offset, the leader epoch that wrote the record right below it. The leader's epoch
history tells whether the log has that record (OffsetForLeaderEpoch, as Kafka's consumers use it).

While a leader's epoch is the position's own, the log cannot have been cut since, and nothing is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from tidemill.client.admin.topics import LATEST, OffsetAt, epoch_ends, list_offsets
from tidemill.client.cluster import Cluster
from tidemill.errors import ApiError, ErrorCode
from tidemill.net.retry import RetryPolicy
from tidemill.spark.reading.positions import TopicPartition

__all__ = ("epochs_at", "newest_ends", "parted")

Offsets = Mapping[TopicPartition, int]
#: A deposed leader that does not know it yet knows it by then: the session of its node is over.
_DEPOSED_MS: Final = 10_000


async def newest_ends(
    cluster: Cluster, partitions: Collection[TopicPartition], epochs: Offsets
) -> dict[TopicPartition, OffsetAt]:
    """The last stable offset of each partition, with the epoch of the leader that says so.

    A leader that is older than an epoch that was read was replaced: another one is looked for, for a while.
    """
    found: dict[TopicPartition, OffsetAt] = {}

    async def ask() -> None:
        found.update(await list_offsets(cluster, dict.fromkeys(partitions, LATEST), committed=True))
        for partition, at in found.items():
            if at.leader_epoch < epochs.get(partition, -1):
                topic, number = partition
                raise ApiError(
                    ErrorCode.unknown_leader_epoch,
                    f"the leader of {topic}-{number} has epoch {at.leader_epoch}, and the query has read "
                    f"records of epoch {epochs[partition]}: the node is not up to date yet, try again",
                )

    try:
        await cluster.retrying(ask, policy=RetryPolicy(min(_DEPOSED_MS, cluster.timeout_ms)))
    except ApiError as error:
        # Nobody knows that epoch: ``parted`` finds that the log is another one.
        if error.code is not ErrorCode.unknown_leader_epoch or found.keys() != {*partitions}:
            raise
    return found


async def parted(cluster: Cluster, at: Offsets, epochs: Offsets) -> dict[TopicPartition, int]:
    """The partitions of ``epochs`` whose logs do not have what was read, each with where they part."""
    found = await epoch_ends(cluster, epochs)
    return {
        partition: max(0, min(at[partition], end.end_offset))
        for partition, end in found.items()
        if end.leader_epoch != epochs[partition] or end.end_offset < at[partition]
    }


async def epochs_at(cluster: Cluster, at: Offsets, leading: Offsets) -> dict[TopicPartition, int]:
    """The leader epoch that wrote the record right below each offset; ``leading`` are the present ones.

    The offsets must be above the starts of the logs.
    """
    found: dict[TopicPartition, int] = {}
    asked = {partition: leading[partition] for partition in at}
    while asked:
        before = await epoch_ends(cluster, {each: epoch - 1 for each, epoch in asked.items() if epoch > 0})
        older = {}
        for partition, epoch in asked.items():
            end = before.get(partition)
            if end is None or end.end_offset < at[partition]:
                found[partition] = epoch
            else:
                older[partition] = end.leader_epoch
        asked = older
    return found
