"""A cluster around one real node: others exist in its metadata only, and live or die when a test says so.

cluster = await FakeCluster.around(broker, racks={2: "b", 3: "c"})
await cluster.kill(3)
await cluster.place("orders", 0, PartitionImage(2, 5, (1, 2, 3), (1, 2)))
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from msgspec.structs import replace

from tidemill.control.records import (
    CLUSTER_KEY,
    CONTROLLER_KEY,
    PARTITIONS_PER_CHUNK,
    AdmittedRecord,
    AliveRecord,
    ClusterRecord,
    ControllerRecord,
    NodeRecord,
    PartitionImage,
    PartitionsRecord,
    Record,
    admitted_key,
    alive_key,
    chunk_key,
    encode,
    node_key,
)
from tidemill.control.stores.store import Put, Txn
from tidemill.server.broker import Broker

__all__ = ("FakeCluster",)


class FakeCluster:
    """Writes the metadata of a cluster of several nodes into the store of one that was alone."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @classmethod
    async def around(
        cls, broker: Broker, racks: Mapping[int, str | None], *, own_rack: str | None = None
    ) -> FakeCluster:
        """Make the broker's node one of a replicated cluster; ``racks`` has the other nodes, all live."""
        cluster = cls(broker)
        own = broker.image.nodes[broker.node_id]
        records: dict[str, Record] = {
            CLUSTER_KEY: ClusterRecord(cluster_id=broker.image.cluster_id or "", replicated=True),
            node_key(own.id): NodeRecord(
                name=own.name, host=own.host, port=own.port, rack=own_rack, incarnation=own.incarnation
            ),
        }
        for node_id, rack in racks.items():
            records[node_key(node_id)] = NodeRecord(
                name=f"n{node_id}",
                host=f"host{node_id}",
                port=9000 + node_id,
                rack=rack,
                incarnation=UUID(int=node_id),
            )
        for node_id in (own.id, *racks):
            incarnation = own.incarnation if node_id == own.id else UUID(int=node_id)
            records[alive_key(node_id)] = AliveRecord(incarnation=incarnation)
            records[admitted_key(node_id)] = AdmittedRecord(incarnation=incarnation)
        await cluster.write(records)
        return cluster

    async def write(self, records: Mapping[str, Record | None]) -> None:
        """Write records, or delete keys, behind the controller's back; returns once the broker knows."""
        controller = self._broker.controller
        puts = tuple(Put(key, encode(record)) for key, record in records.items() if record is not None)
        deletes = tuple(key for key, record in records.items() if record is None)
        await controller._reached(await controller._store.commit(Txn(puts=puts, deletes=deletes)))

    async def kill(self, node_id: int) -> None:
        """End a node's session."""
        await self.write({alive_key(node_id): None})

    async def make_controller(self, node_id: int | None) -> None:
        """Make that node the controller, or nobody."""
        await self.write({CONTROLLER_KEY: None if node_id is None else ControllerRecord(node_id=node_id)})

    async def place(self, topic_name: str, index: int, placed: PartitionImage) -> None:
        """Let the metadata say that of a partition, with the next partition epoch."""
        topic = self._broker.image.topics[topic_name]
        chunk = index // PARTITIONS_PER_CHUNK
        first = chunk * PARTITIONS_PER_CHUNK
        partitions = list(topic.partitions[first : first + PARTITIONS_PER_CHUNK])
        epoch = partitions[index - first].partition_epoch + 1
        partitions[index - first] = replace(placed, partition_epoch=epoch)
        await self.write({chunk_key(topic.id, chunk): PartitionsRecord(partitions=tuple(partitions))})
