"""A whole node on a virtual loop: the product's own ``Node``, with time, ids, disk and network in memory.

``SimNode`` is one process of it on a ``FaultyStorage``; ``crash`` ends the process, and the next one is
started on what the storage says is left. Metadata is a ``MemoryStore``, which survives crashes as an etcd
beside the node would. ``SimClient`` is a connection; it keeps the answers until they are taken.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec

from support.dict_engine import DictEngine
from support.faulty_storage import FaultyStorage
from support.frames import split_frames
from support.memory_store import MemoryStore
from support.served_apis import served_apis
from support.sim_network import SimNetwork
from support.virtual_loop import Process, current_loop
from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control.commands import CreateTopic
from tidemill.control.stores.store import ChangeBatch, MetadataStore, StoreClosed, StoredKeys, Txn
from tidemill.errors import DiskFull, StorageError
from tidemill.replication.log_work.flusher import Flusher
from tidemill.server.broker import Broker
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.disk.data_directory import DataDirectory, DirectoryIdentity
from tidemill.server.disk.space import DiskSpace
from tidemill.server.node import Node
from tidemill.server.runtime import Runtime
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_response

__all__ = (
    "START_MS",
    "ProcessStore",
    "SeededIds",
    "SimClient",
    "SimDirectory",
    "SimDiskSpace",
    "SimNode",
    "create_topics",
)

#: The time of day at which a virtual loop begins.
START_MS = 1_700_000_000_000
_CLEAN, _IDENTITY = "clean-stop", "cluster-identity.json"
_ROOM_BYTES = 1024
_STORE_SECONDS_MAX = 0.003
_API_VERSIONS = 18

# Whether code is loaded by now is the process's business: no trace may depend on it.
served_apis()


class SeededIds:
    """Implements ``tidemill.coordination.ids.Ids``."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def uuid(self) -> UUID:
        return UUID(bytes=self.token(16), version=4)

    def token(self, size_bytes: int) -> bytes:
        return self._rng.randbytes(size_bytes)


class SimDirectory(DataDirectory):
    """The note of an orderly stop is on the simulated disk; there is nobody to lock out."""

    def __init__(self, storage: FaultyStorage) -> None:
        super().__init__(Path("sim"))
        self._storage = storage

    def acquire(self) -> None:
        noted = self._storage.exists(_CLEAN)
        self.stopped_cleanly = noted or not self._storage.list_dir("logs")
        if noted:
            # A note that was torn names nobody.
            with suppress(ValueError):
                self.clean_of = UUID(hex=self._storage.read_file(_CLEAN).decode("ascii", "replace"))
            self._storage.remove(_CLEAN)
            self._storage.sync_dir("")

    def read_identity(self) -> DirectoryIdentity | None:
        if not self._storage.exists(_IDENTITY):
            return None
        return msgspec.json.decode(self._storage.read_file(_IDENTITY), type=DirectoryIdentity)

    def write_identity(self, identity: DirectoryIdentity) -> None:
        self._write(f"{_IDENTITY}.new", msgspec.json.encode(identity))
        self._storage.rename(f"{_IDENTITY}.new", _IDENTITY)
        self._storage.sync_dir("")

    def _write(self, path: str, data: bytes) -> None:
        file = self._storage.open(path, create=True)
        file.truncate(0)
        file.write(0, [data])
        file.sync()
        file.close()

    def check_metadata_present(self) -> None:
        pass

    def note_owner(self, listening: str) -> None:
        pass

    def note_clean_stop(self, incarnation: UUID | None = None) -> None:
        # As the product: without room for the note the next start looks at every log.
        with suppress(StorageError):
            self._write(_CLEAN, b"" if incarnation is None else incarnation.hex.encode())
            self._storage.sync_dir("")

    def release(self) -> None:
        pass


class SimDiskSpace(DiskSpace):
    """The room of a ``FaultyStorage``."""

    def __init__(self, storage: FaultyStorage) -> None:
        super().__init__(Path("sim"))
        self._storage = storage

    def free_bytes(self) -> int:
        return self._storage.room_bytes

    def _probe(self) -> None:
        if self._storage.room_bytes < _ROOM_BYTES:
            raise DiskFull(f"no room for {_ROOM_BYTES} bytes")


async def create_topics(node: Node, topics: dict[str, tuple[int, dict[str, str]]]) -> None:
    """Create those of ``topics`` (name → partitions, configs) that are missing, and that of the groups."""
    for name, (partitions, configs) in topics.items():
        if name not in node.broker.image.topics:
            await node.broker.controller.submit(
                CreateTopic(
                    name=name,
                    topic_id=node.runtime.ids.uuid(),
                    partitions=partitions,
                    replication=1,
                    configs=configs,
                )
            )
    await node.broker.coordinators.ensure_topic(GROUPS)


class ProcessStore:
    """A shared metadata store as one process reaches it: it answers later, and not to the dead."""

    def __init__(self, store: MemoryStore, process: Process) -> None:
        self._store = store
        self._process = process
        self._loop = current_loop()

    async def _way(self) -> None:
        """A question or an answer is on its way."""
        await asyncio.sleep(_STORE_SECONDS_MAX * self._loop.rng.random() ** 2)
        if self._process.is_dead:
            raise StoreClosed("the process is gone")

    async def read(self, prefix: str = "", *, revision: int | None = None) -> StoredKeys:
        await self._way()
        return await self._store.read(prefix, revision=revision)

    async def commit(self, txn: Txn) -> int:
        await self._way()
        committed = await self._store.commit(txn)
        await self._way()
        return committed

    async def watch(self, from_revision: int) -> AsyncGenerator[ChangeBatch]:
        async with aclosing(self._store.watch(from_revision)) as batches:
            async for batch in batches:
                await self._way()
                yield batch

    async def compact(self, revision: int) -> None:
        await self._way()
        await self._store.compact(revision)

    async def grant_lease(self, ttl_ms: int) -> int:
        await self._way()
        return await self._store.grant_lease(ttl_ms)

    async def keep_alive(self, lease_id: int) -> None:
        await self._way()
        await self._store.keep_alive(lease_id)

    async def revoke(self, lease_id: int) -> None:
        await self._way()
        await self._store.revoke(lease_id)

    async def close(self) -> None:
        """The store goes on for others."""


class SimClient(asyncio.Protocol):
    """One connection to a node."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._received = bytearray()
        self._expected: dict[int, tuple[int, int, Callable[[Any], None]]] = {}
        self._correlation_id = 0
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True

    def send(
        self, api_key: int, version: int, body: dict[str, Any], on_answer: Callable[[Any], None]
    ) -> None:
        """Send a request; ``on_answer`` is called by ``receive``."""
        self._correlation_id += 1
        self._expected[self._correlation_id] = (api_key, version, on_answer)
        self._transport.write(encode_request(api_key, version, self._correlation_id, "sim", body))

    def close(self) -> None:
        self._transport.close()

    def receive(self) -> None:
        """Take the answers that are there."""
        for frame in split_frames(self._received):
            correlation_id = int.from_bytes(frame[:4], "big")
            api_key, version, on_answer = self._expected.pop(correlation_id)
            on_answer(decode_response(api_key, version, frame)[1])


class SimNode:
    """One process of a node, on a virtual loop; ``settings`` are more of the node's own.

    Whatever is between the node and the store is made by ``way_to_store``.
    """

    def __init__(
        self,
        storage: FaultyStorage,
        store: MemoryStore,
        network: SimNetwork,
        *,
        host: str = "node",
        node_id: int = 1,
        way_to_store: Callable[[MetadataStore], MetadataStore] = lambda store: store,
        **settings: Any,
    ) -> None:
        self.storage = storage
        self.network = network
        self.host = host
        #: By how much somebody has set its time of day wrong.
        self.wall_ahead_ms = 0
        self.loop = loop = current_loop()
        self.process = loop.process(host)
        self.settings = Settings(
            data_dir=Path("sim"),
            node_id=node_id,
            node_name=f"node-{node_id}",
            listen=Address(host, 9092),
            http=None,
            offsets_topic_partitions=1,
            transactions_topic_partitions=1,
            share_state_topic_partitions=1,
            max_decompressed_bytes=1 << 20,
            # So slow that the little there is takes a while.
            scrub_bytes_per_second=16 * 1024,
            compaction_bytes_per_second=16 * 1024,
            **settings,
        )
        self.runtime = Runtime(
            wall_ms=self._wall_ms,
            # Nothing sleeps in a simulation: a process that is paused has a clock that goes on.
            session_ms=lambda: int(loop.time() * 1000),
            ids=SeededIds(loop.rng),
            pools=loop.pool,
            pace=loop.pace,
            directory=lambda path: SimDirectory(storage),
            disk_space=lambda path, reserve_bytes: SimDiskSpace(storage),
            storage=self._storage,
            kv_engine=lambda limits, give_up_reserve: DictEngine(storage, loop.rng, give_up_reserve),
            metadata_store=lambda settings, path, pools: way_to_store(ProcessStore(store, self.process)),
            transport=network.transport(host),
        )
        self.node = Node(self.settings, self.runtime)

    def _wall_ms(self) -> int:
        return START_MS + self.wall_ahead_ms + int(self.loop.now * self.process.clock_rate * 1000)

    def _storage(self, path: Path, on_full: Callable[[DiskFull], None]) -> FaultyStorage:
        self.storage.on_full = on_full
        return self.storage

    @property
    def now_ms(self) -> int:
        return self._wall_ms()

    @property
    def broker(self) -> Broker:
        return self.node.broker

    @property
    def flusher(self) -> Flusher:
        return self.broker.flusher

    async def start(self, topics: dict[str, tuple[int, dict[str, str]]] | None = None) -> None:
        """Start and recover as the product does; create ``topics`` (name → partitions, configs)."""
        await self.process.run(self._start(topics or {}))

    async def _start(self, topics: dict[str, tuple[int, dict[str, str]]]) -> None:
        await self.node.start()
        if self.settings.cluster is None:
            await create_topics(self.node, topics)

    async def stop(self) -> None:
        """Stop in an orderly way."""
        await self.process.run(self.node.stop())

    async def crash(self, *, silently: bool = False) -> None:
        """The process ends at once; nothing is written any more. ``silently``: the machine goes with it."""
        self.network.reset(self.host, silently=silently)
        await self.process.kill()

    async def connect(self, host: str = "client") -> SimClient:
        client = SimClient()
        await self.network.transport(host).connect(self.node.address, lambda: client)
        # As clients begin: who says nothing is not kept for long.
        client.send(_API_VERSIONS, 0, {}, lambda answer: None)
        return client
