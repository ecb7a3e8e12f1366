"""A few whole nodes of one cluster for unit tests: no faults of disks, and requests without connections.

    async with ProductCluster(3) as cluster:
        await cluster.create("t", partitions=3)
        answer = await cluster.ask(1, "Metadata", 12, topics=None)

To be used inside of ``run_virtual``.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any
from uuid import uuid4

from support.faulty_storage import FaultyStorage
from support.memory_store import MemoryStore
from support.served_apis import served_apis
from support.sim_network import SimNetwork
from support.sim_node import ProcessStore, SimNode
from support.store_proxy import StoreProxy
from support.virtual_loop import current_loop
from tidemill.config.values import Address
from tidemill.control.commands import CreateTopic, Resign
from tidemill.control.stores.store import MetadataStore
from tidemill.errors import NodeUnavailable
from tidemill.replication.partition import Partition
from tidemill.server.broker import Broker
from tidemill.server.requests.call import Call, ReplyBuffers
from tidemill.server.requests.dispatch import BrokerDispatcher
from tidemill.server.traffic import Traffic
from tidemill.wire.apis import APIS_BY_NAME
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_request, decode_response, parse_header

__all__ = ("ProductCluster",)

_CLUSTER_PORT = 9093
_PATIENCE_S = 60

# Requests get to the nodes without a connection, which would have their handlers loaded.
served_apis()


class ProductCluster:
    """Nodes 1 … ``size``."""

    def __init__(self, size: int = 3) -> None:
        loop = current_loop()
        self.network = SimNetwork(loop)
        self.store = MemoryStore(clock_ms=loop.now_ms)
        self.disks = {node_id: FaultyStorage(random.Random(node_id)) for node_id in range(1, size + 1)}
        self.nodes: dict[int, SimNode] = {}
        #: Each node's way to the store.
        self.ways: dict[int, StoreProxy] = {}

    async def __aenter__(self) -> ProductCluster:
        for node_id in self.disks:
            await self.start(node_id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for node_id in list(self.nodes):
            await self.kill(node_id)

    async def start(self, node_id: int, **settings: Any) -> None:
        host = f"n{node_id}"
        self.nodes[node_id] = node = SimNode(
            self.disks[node_id],
            self.store,
            self.network,
            host=host,
            node_id=node_id,
            way_to_store=partial(self._way, node_id),
            cluster="etcd://sim:1",
            cluster_listen=Address(host, _CLUSTER_PORT),
            machine=host,
            **settings,
        )
        await node.start()

    def _way(self, node_id: int, store: MetadataStore) -> MetadataStore:
        self.ways[node_id] = way = StoreProxy(store)
        return way

    async def swap_store(self, store: MemoryStore) -> None:
        """Put another store in the place of the one that the nodes use; they lose their connections."""
        self.store = store
        for node_id, way in self.ways.items():
            way.unavailable = True
            if node_id in self.nodes:
                way.store = ProcessStore(store, self.nodes[node_id].process)
        await asyncio.sleep(1)
        for way in self.ways.values():
            way.unavailable = False

    async def kill(self, node_id: int) -> None:
        """End the process; what it has written stays."""
        node = self.nodes.pop(node_id)
        self.disks[node_id] = self.disks[node_id].crash(power_loss=False)
        await node.crash()

    def broker(self, node_id: int) -> Broker:
        return self.nodes[node_id].broker

    @property
    def some_id(self) -> int:
        """A node that runs."""
        return next(iter(self.nodes))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a state; time is virtual."""
        async with asyncio.timeout(_PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - the state itself
                await asyncio.sleep(0.01)

    # --- topics

    async def create(self, name: str, partitions: int = 3, replication: int = 3) -> None:
        """Create a topic, and wait until each node knows it."""
        command = CreateTopic(name=name, topic_id=uuid4(), partitions=partitions, replication=replication)
        await self.run(self.some_id, self.broker(self.some_id).controller.submit(command))
        await self.until(lambda: all(name in node.broker.image.topics for node in self.nodes.values()))

    def leader(self, topic: str, index: int = 0) -> int:
        """The leader that every running node agrees on; -1 if they do not."""
        found = {
            node.broker.image.topics[topic].partitions[index].leader
            if topic in node.broker.image.topics
            else -1
            for node in self.nodes.values()
        }
        return found.pop() if len(found) == 1 else -1

    def led(self, topic: str, index: int = 0) -> Partition:
        """The partition at its leader."""
        broker = self.broker(self.leader(topic, index))
        return broker.find.partition(broker.find.topic(topic), index)

    async def move(self, topic: str, index: int = 0) -> int:
        """Have the leader of a partition resign; gives the new one."""
        before = self.leader(topic, index)
        image = self.broker(before).image.topics[topic]
        epoch = image.partitions[index].leader_epoch
        resign = Resign(topic_id=image.id, index=index, node_id=before, leader_epoch=epoch)
        while self.leader(topic, index) in (before, -1):
            # The controller may be gone, and the next one does not know of it.
            with contextlib.suppress(NodeUnavailable):
                await self.run(before, self.broker(before).propose(resign))
            await asyncio.sleep(0.1)
        return self.leader(topic, index)

    # --- requests

    async def run(self, node_id: int, work: Any) -> Any:
        """Await something in the process of a node."""

        async def awaited() -> Any:
            return await work

        return await self.nodes[node_id].process.run(awaited())

    async def ask(self, node_id: int, api: str, version: int, /, **body: Any) -> Any:
        """The decoded answer of a node to a client."""
        return await self.run(node_id, _ask(self.broker(node_id), api, version, body))


async def _ask(broker: Broker, api: str, version: int, body: dict[str, Any]) -> Any:
    key = APIS_BY_NAME[api].key
    frame = encode_request(key, version, 1, "test", body)[4:]
    header = parse_header(frame)
    sent: asyncio.Future[ReplyBuffers] = asyncio.get_running_loop().create_future()
    aborted = ConnectionError("the connection was closed")
    call = Call(
        header,
        decode_request(header, frame),
        "client",
        sent.set_result,
        lambda: sent.set_exception(aborted),
    )
    BrokerDispatcher(broker, Traffic()).dispatch(call)
    return decode_response(key, version, b"".join(await sent)[4:])[1]
