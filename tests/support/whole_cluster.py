"""Several whole nodes of one cluster on a virtual loop, and what can happen to them.

Each node is the product's own ``Node`` on a disk of its own; the metadata is one ``MemoryStore``, which each
node reaches through a ``StoreProxy``. A process can be killed (what was not synced may be lost), stopped in
an orderly way, and paused; links can be cut; the way to the store can hang or lose answers; a lease can end.

A node that cannot start is started again, as an operator or a supervisor would do it. Every transaction is
compared with who the controller is when it is committed: see ``CheckedStore``.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

from support.faulty_storage import FaultyStorage
from support.memory_store import MemoryStore
from support.sim_network import SimNetwork
from support.sim_node import SimNode
from support.store_proxy import StoreProxy
from support.virtual_loop import current_loop, current_process
from tidemill.config.values import Address
from tidemill.control.records import CONTROLLER_KEY, ControllerRecord, alive_key, decode
from tidemill.control.stores.store import MetadataStore, Txn
from tidemill.errors import TidemillError
from tidemill.replication.partition import Partition

__all__ = ("CheckedStore", "WholeCluster")

_CLUSTER_PORT = 9093
_START_AGAIN_SECONDS = 1.0
#: After that a supervisor gives up on a stop, as ``systemd`` does.
_STOP_SECONDS = 60.0


class CheckedStore(MemoryStore):
    """Notes in ``violations`` what was committed by a node that was not the controller any more, or never.

    Leaders and in-sync sets are the controller's alone; any node creates topics.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.violations: list[str] = []

    async def commit(self, txn: Txn) -> int:
        process, engine = current_process(), self._engine
        known = engine.read("partitions/", None).entries
        changed = [put.key for put in txn.puts if put.key in known]
        found = engine.read(CONTROLLER_KEY, None).entries.get(CONTROLLER_KEY)
        revision = await super().commit(txn)
        if changed and process is not None:
            node_id = None
            if found is not None:
                node_id = decode(CONTROLLER_KEY, found.value, ControllerRecord).node_id
            if process.name != f"n{node_id}":
                what = f"{process.name} changed {changed} at revision {revision}"
                self.violations.append(f"{what}, and the controller was {node_id}")
        return revision


class WholeCluster:
    """Nodes by number, from 1. ``nodes`` has those whose processes exist, ``started`` those that serve."""

    def __init__(self, rng: random.Random, size: int, **settings: Any) -> None:
        self.loop = current_loop()
        self.network = SimNetwork(self.loop)
        self.store = CheckedStore(clock_ms=self.loop.now_ms, history_revisions=100_000)
        self.rng = rng
        self.ids = list(range(1, size + 1))
        self.disks = {node_id: self._new_disk(node_id) for node_id in self.ids}
        self.ways: dict[int, StoreProxy] = {}
        self.nodes: dict[int, SimNode] = {}
        self.started: set[int] = set()
        self.settings = settings
        #: Why nodes have not started, in words.
        self.refusals: list[str] = []
        self._starting: dict[int, asyncio.Task[None]] = {}
        #: Nodes whose disk was lost: they are started as an operator would.
        self._lost: set[int] = set()
        self._rates = {node_id: rng.choice((1.0, 1.0, 0.97, 1.03)) for node_id in self.ids}

    def _new_disk(self, node_id: int) -> FaultyStorage:
        disk = FaultyStorage(self.rng)
        disk.on_call = lambda call, path: self.loop.note(f"node {node_id}: {call} {path}")
        return disk

    @staticmethod
    def host(node_id: int) -> str:
        return f"n{node_id}"

    # --- processes

    async def start_all(self) -> None:
        """Start one after the other, so that numbers follow names."""
        for node_id in self.ids:
            self.start(node_id)
            await self.wait_started(node_id)

    def start(self, node_id: int) -> None:
        """Have the node started, again and again if it must be."""
        assert node_id not in self.nodes
        self.network.switch_on(self.host(node_id))
        self._make(node_id)
        self._starting[node_id] = self.loop.create_task(self._start(node_id))

    async def wait_started(self, node_id: int) -> None:
        await self._starting[node_id]

    def _make(self, node_id: int) -> None:
        host = self.host(node_id)
        way = self.ways.get(node_id)

        def way_to_store(store: MetadataStore) -> MetadataStore:
            self.ways[node_id] = made = StoreProxy(store, self.rng.random)
            if way is not None and not way._way.is_set():
                made.hang()
            return made

        self.nodes[node_id] = node = SimNode(
            self.disks[node_id],
            self.store,
            self.network,
            host=host,
            node_id=node_id,
            way_to_store=way_to_store,
            cluster="etcd://sim:1",
            cluster_listen=Address(host, _CLUSTER_PORT),
            machine=host,
            replace_directory=node_id in self._lost,
            **self.settings,
        )
        node.process.clock_rate = self._rates[node_id]

    async def _start(self, node_id: int) -> None:
        while True:
            node = self.nodes[node_id]
            try:
                await node.start()
            except (TidemillError, TimeoutError) as error:
                if node.process.is_dead:
                    return
                self.refusals.append(f"node {node_id} did not start: {error!r}")
                await node.crash()
                self.disks[node_id] = self.disks[node_id].crash(power_loss=False)
                await asyncio.sleep(_START_AGAIN_SECONDS)
                self._make(node_id)
            else:
                self.started.add(node_id)
                return

    async def kill(self, node_id: int, *, power_loss: bool, silently: bool = False) -> None:
        """The process ends at once; without power, what was not synced may be lost."""
        node = self.nodes.pop(node_id)
        self.started.discard(node_id)
        self.loop.note(f"kill {node_id}")
        starting = self._starting.pop(node_id)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        # First of all: nothing that runs on the way out may reach the disk.
        self.disks[node_id] = self.disks[node_id].crash(power_loss=power_loss)
        await node.crash(silently=silently)

    async def stop(self, node_id: int) -> bool:
        """Stop in an orderly way; a stop that does not end is ended. Whether it was orderly."""
        node = self.nodes[node_id]
        self.started.discard(node_id)
        orderly = True
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await node.stop()
        except (TidemillError, TimeoutError):
            orderly = False
        if self.nodes.get(node_id) is node:
            await self.kill(node_id, power_loss=False)
        return orderly

    def lose_disk(self, node_id: int) -> None:
        """The disk of a node that does not run is replaced by an empty one."""
        assert node_id not in self.nodes
        self.disks[node_id] = self._new_disk(node_id)
        self._lost.add(node_id)

    # --- the store

    async def end_lease(self, node_id: int) -> None:
        """The lease of a node is over, by the store's clock and, as ever a little earlier, by the node's."""
        store = self.store
        if (node := self.nodes.get(node_id)) is not None and node.node.membership is not None:
            node.node.membership.session._serving_until_ms = 0
        for lease_id in list(store._leases):
            if alive_key(node_id) in store._engine.keys_of_lease(lease_id):
                with suppress(TidemillError):
                    await store.revoke(lease_id)

    # --- what there is

    def partitions(self, topic: str) -> list[tuple[int, Partition]]:
        """(node, partition) of every replica that is open."""
        found = []
        for node_id in sorted(self.started):
            replicas = self.nodes[node_id].broker.replicas
            found += [(node_id, each) for each in replicas if each.topic == topic]
        return found

    def heal(self) -> None:
        """Everything is well, except for nodes that do not run."""
        self.network.heal()
        for way in self.ways.values():
            way.lost_commits = way.lost_replies = 0
            way.slow_seconds_max = 0.0
            way.unavailable = False
            way.go_on()
        for node in self.nodes.values():
            node.process.go_on()
        for disk in self.disks.values():
            disk.capacity_bytes = None
            disk.forget_faults()
