"""Elections by hand: the metadata names a leader, as a controller of several nodes would.

Also in-sync sets and followers' reports by hand, for tests of a leader without other nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tidemill.cluster.messages import FetchPartition
from tidemill.control.controller import Controller
from tidemill.control.records import (
    PARTITIONS_PER_CHUNK,
    PartitionImage,
    PartitionsRecord,
    chunk_key,
    encode,
)
from tidemill.control.stores.store import Put, Txn
from tidemill.replication.partition import Partition
from tidemill.replication.rules.assignment import PartitionAssignment

__all__ = ("LEADER", "change_in_sync", "elect", "follower_flushed", "led", "put_record")

#: The node that leads in tests of a single leader.
LEADER = 1


async def elect(
    controller: Controller, topic_name: str, index: int, leader: int, *, followers: Iterable[int] = ()
) -> int:
    """Make ``leader`` the leader of a partition; returns its epoch, the next one, once it is known here.

    Nobody else is there to keep up with it, unless ``followers`` are in sync by the metadata.
    """
    placed = controller.image.topics[topic_name].partitions[index]
    members = tuple(sorted({*placed.replicas, leader}))
    elected = PartitionImage(leader, placed.leader_epoch + 1, members, (leader, *followers))
    await put_record(controller, topic_name, index, elected)
    return elected.leader_epoch


async def put_record(controller: Controller, topic_name: str, index: int, record: PartitionImage) -> None:
    """Write the metadata record of a partition, and wait until it is known here."""
    topic = controller.image.topics[topic_name]
    chunk = index // PARTITIONS_PER_CHUNK
    partitions = list(topic.partitions[chunk * PARTITIONS_PER_CHUNK : (chunk + 1) * PARTITIONS_PER_CHUNK])
    partitions[index % PARTITIONS_PER_CHUNK] = record
    value = encode(PartitionsRecord(partitions=tuple(partitions)))
    revision = await controller._store.commit(Txn(puts=(Put(chunk_key(topic.id, chunk), value),)))
    await controller._reached(revision)


def led(epoch: int, followers: Iterable[int] = (), *, min_isr: int = 1) -> PartitionAssignment:
    """Node 1 leads at ``epoch``, and all of ``followers`` are in sync."""
    members = (LEADER, *sorted(followers))
    return PartitionAssignment(LEADER, epoch, members, members, min_isr=min_isr)


def change_in_sync(partition: Partition, followers: Iterable[int], *, min_isr: int = 1) -> None:
    """The metadata has another in-sync set: the leader and ``followers``."""
    known = partition.assignment
    assert known is not None
    isr = (known.leader, *sorted(followers))
    changed = replace(
        known,
        replicas=tuple(dict.fromkeys((*known.replicas, *isr))),
        isr=isr,
        min_isr=min_isr,
        partition_epoch=known.partition_epoch + 1,
    )
    partition.apply(changed, known.leader)


def follower_flushed(partition: Partition, node_id: int, offset: int) -> None:
    """A follower whose log is the leader's up to ``offset`` says that all of it is on its disk."""
    last_epoch = partition.epochs.epoch_at(offset - 1) if offset else -1
    wanted = FetchPartition(partition.id, offset, 1, partition.leader_epoch, last_epoch, offset)
    partition.as_leader.fetch(wanted, node_id, 1, 0)
