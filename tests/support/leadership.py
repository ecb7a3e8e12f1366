"""Elections by hand: the metadata names a leader, as a controller of several nodes would."""

from __future__ import annotations

from tidemill.control.controller import Controller
from tidemill.control.records import (
    PARTITIONS_PER_CHUNK,
    PartitionImage,
    PartitionsRecord,
    chunk_key,
    encode,
)
from tidemill.control.stores.store import Put, Txn

__all__ = ("elect",)


async def elect(controller: Controller, topic_name: str, index: int, leader: int) -> int:
    """Make ``leader`` the leader of a partition; returns its epoch, the next one, once it is known here."""
    topic = controller.image.topics[topic_name]
    chunk = index // PARTITIONS_PER_CHUNK
    placed = topic.partitions[index]
    members = tuple(sorted({*placed.replicas, leader}))
    elected = PartitionImage(leader, placed.leader_epoch + 1, members, members)
    partitions = list(topic.partitions[chunk * PARTITIONS_PER_CHUNK : (chunk + 1) * PARTITIONS_PER_CHUNK])
    partitions[index % PARTITIONS_PER_CHUNK] = elected
    value = encode(PartitionsRecord(partitions=tuple(partitions)))
    revision = await controller._store.commit(Txn(puts=(Put(chunk_key(topic.id, chunk), value),)))
    await controller._reached(revision)
    return elected.leader_epoch
