"""A whole node without sockets, threads or a real disk: requests go in as frames, answers come out as frames.

Only three things are not the real ones: the transport (two lists of bytes), the flusher (the test decides
when a flush begins, runs and ends), and the storage. Metadata is a ``MemoryStore``, which survives crashes as
an etcd beside the node would.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from support.coordination import VirtualClock
from support.faulty_storage import FaultyStorage
from tidemill.config.settings import Settings
from tidemill.control.commands import BumpLeaderEpochs, CreateTopic, RegisterNode, SetClusterId
from tidemill.control.controller import Controller
from tidemill.control.memory import MemoryStore
from tidemill.coordination.clock import LoopClock
from tidemill.errors import DiskFull, StorageError
from tidemill.groups.coordinator import GroupCoordinator
from tidemill.groups.settings import GroupSettings
from tidemill.log.flush import FlushJob
from tidemill.replication.partition import Partition
from tidemill.replication.replicas import Replicas
from tidemill.server.broker import OFFSETS_TOPIC, TRANSACTIONS_TOPIC, Broker
from tidemill.server.budget import BudgetLimits, ByteBudget
from tidemill.server.connection import Connection
from tidemill.server.dispatch import BrokerDispatcher
from tidemill.server.frame_buffers import FrameBuffers
from tidemill.server.metrics import RequestMetrics
from tidemill.server.transaction_partitions import BrokerTransactionPartitions, TransactionLogs
from tidemill.transactions.coordinator import TransactionCoordinator
from tidemill.transactions.settings import TransactionSettings
from tidemill.wire.encode import encode_request
from tidemill.wire.frames import split_frames
from tidemill.wire.requests import decode_response

__all__ = ("SimClient", "SimFlusher", "SimNode")

#: Turns of the event loop after which every task that can go on has gone on.
_TURNS_TO_SETTLE = 25


class SimFlusher:
    """Keeps flushes waiting until the test says ``step``."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._asked: list[Partition] = []
        self._begun: list[tuple[Partition, FlushJob]] = []
        self.flush_count = 0
        self.flush_seconds = 0.0

    def request(self, partition: Partition) -> None:
        if not partition.flush_scheduled:
            partition.flush_scheduled = True
            self._asked.append(partition)

    @property
    def busy(self) -> bool:
        return bool(self._asked or self._begun)

    def step(self) -> None:
        """Begin a flush, or run and end one that was begun: appends may come in between."""
        if self._asked and (not self._begun or self._rng.random() < 0.5):
            partition = self._asked.pop(self._rng.randrange(len(self._asked)))
            job = partition.begin_flush()
            if job is None:
                partition.flush_scheduled = False
            else:
                self._begun.append((partition, job))
        elif self._begun:
            partition, job = self._begun.pop(self._rng.randrange(len(self._begun)))
            self._finish(partition, job)

    def _finish(self, partition: Partition, job: FlushJob) -> None:
        partition.flush_scheduled = False
        try:
            job.run()
        except StorageError as error:
            partition.flush_failed(error)
            return
        partition.flushed(job)
        if partition.is_dirty:
            self.request(partition)


class _Transport:
    """What a connection needs of a transport."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.closed = False

    def get_extra_info(self, name: str) -> Any:
        return ("sim", 0)

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def writelines(self, buffers: list[bytes]) -> None:
        for buffer in buffers:
            self.sent += buffer

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    abort = close


class SimClient:
    """One connection to a node."""

    def __init__(self, connection: Connection, transport: _Transport) -> None:
        self._connection = connection
        self._transport = transport
        self._expected: dict[int, tuple[int, int, Callable[[Any], None]]] = {}
        self._correlation_id = 0

    def send(
        self, api_key: int, version: int, body: dict[str, Any], on_answer: Callable[[Any], None]
    ) -> None:
        """Send a request; ``on_answer`` is called by ``receive``."""
        self._correlation_id += 1
        self._expected[self._correlation_id] = (api_key, version, on_answer)
        data = encode_request(api_key, version, self._correlation_id, "sim", body)
        while data:
            buffer = self._connection.get_buffer(len(data))
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            data = data[count:]
            self._connection.buffer_updated(count)

    def receive(self) -> None:
        """Take the answers that are there."""
        assert not self._transport.closed, "the node closed the connection"
        for frame in split_frames(self._transport.sent):
            correlation_id = int.from_bytes(frame[:4], "big")
            api_key, version, on_answer = self._expected.pop(correlation_id)
            on_answer(decode_response(api_key, version, frame)[1])


class SimNode:
    """Started on a storage; a crash is simply never using it again."""

    def __init__(self, storage: FaultyStorage, store: MemoryStore, rng: random.Random) -> None:
        self.storage = storage
        self.store = store
        self.clock = VirtualClock()
        self.clock.ms = 1_700_000_000_000
        self.flusher = SimFlusher(rng)
        self.budget = ByteBudget(BudgetLimits(64 * 1024 * 1024, 32 * 1024 * 1024))
        self.settings = Settings(
            data_dir=Path("sim"), offsets_topic_partitions=1, transactions_topic_partitions=1
        )
        self.controller = Controller(store)
        self.broker: Broker
        self._dispatcher: BrokerDispatcher

    @property
    def now_ms(self) -> int:
        return self.clock.ms

    @now_ms.setter
    def now_ms(self, time_ms: int) -> None:
        self.clock.ms = time_ms

    def advance(self, duration_ms: int) -> None:
        """Let time pass at once; what was due in between happens after it."""
        self.clock.ms += duration_ms
        timers = self.clock.timers
        for handle in [handle for handle, (when_ms, _) in timers.items() if when_ms <= self.clock.ms]:
            if handle in timers:
                timers.pop(handle)[1]()

    async def start(self, topics: dict[str, tuple[int, dict[str, str]]]) -> None:
        """Start, recover every log, and create ``topics`` (name → partitions, configs) that are missing."""
        controller = self.controller
        await controller.start()
        if controller.image.cluster_id is None:
            await controller.submit(SetClusterId(cluster_id="sim"))
        await controller.submit(
            RegisterNode(node_id=1, name="node-1", host="sim", port=1, incarnation=uuid4())
        )
        replicas = Replicas(
            self.storage, self.flusher.request, max_decompressed_bytes=1 << 20, clock_ms=lambda: self.now_ms
        )
        self.broker = broker = Broker(
            self.settings,
            controller,
            replicas,
            self.flusher,  # type: ignore[arg-type]
            self.budget,
            clock_ms=lambda: self.now_ms,
        )
        for topic in list(broker.image.topics.values()):
            await controller.submit(
                BumpLeaderEpochs(name=topic.name, partitions=tuple(range(len(topic.partitions))))
            )
        for name, (partitions, configs) in topics.items():
            if name not in broker.image.topics:
                await controller.submit(
                    CreateTopic(
                        name=name,
                        topic_id=_stable_id(name),
                        partitions=partitions,
                        replication=1,
                        configs=configs,
                    )
                )
        await broker.ensure_offsets_topic()
        for placement in broker.led_placements():
            with contextlib.suppress(DiskFull):
                replicas.open(placement)
        broker.groups = GroupCoordinator(
            broker, GroupSettings(partitions=len(broker.image.topics[OFFSETS_TOPIC].partitions)), LoopClock()
        )
        await broker.groups.start()
        broker.transactions = TransactionCoordinator(
            TransactionLogs(broker),
            BrokerTransactionPartitions(broker),
            TransactionSettings(partitions=broker.settings.transactions_topic_partitions),
            self.clock,
            broker.next_producer_id,
        )
        if TRANSACTIONS_TOPIC in broker.image.topics:
            await broker.transactions.start()
        self._dispatcher = BrokerDispatcher(broker, RequestMetrics())

    def connect(self) -> SimClient:
        transport = _Transport()
        loop = asyncio.get_running_loop()
        connection = Connection(loop, self._dispatcher, self.budget, self.settings, FrameBuffers())
        connection.connection_made(transport)  # type: ignore[arg-type]
        return SimClient(connection, transport)

    async def settle(self) -> None:
        """Let every task go as far as it can without another flush."""
        for _ in range(_TURNS_TO_SETTLE):
            await asyncio.sleep(0)
        while self.broker.gated_writes:
            # Batches that are looked at in a thread.
            await asyncio.wait(self.broker.gated_writes.values())
            for _ in range(_TURNS_TO_SETTLE):
                await asyncio.sleep(0)

    async def abandon(self) -> None:
        """Let go of the tasks of a node that has crashed; nothing is written."""
        for connection in list(self._dispatcher.connections):
            connection.connection_lost(None)
        await self.broker.transactions.close()
        await self.broker.groups.close()
        await self.controller.stop()


def _stable_id(name: str) -> UUID:
    return UUID(bytes=name.encode().ljust(16, b"\0")[:16])
