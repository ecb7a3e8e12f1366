"""A node without sockets or a real disk whose flushes wait for the test: the product's own, on any loop.

Requests go in as frames and answers come out as frames, both at once. Time passes when the test says so. What
is appended becomes durable in ``flusher.step``; other blocking work runs in real threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any, cast

from support.coordination import VirtualClock
from support.faulty_storage import FaultyStorage
from support.frames import split_frames
from support.memory_store import MemoryStore
from support.sim_node import START_MS, SeededIds, SimDirectory, SimDiskSpace, create_topics
from tidemill.config.settings import Settings
from tidemill.config.values import MIB, Address
from tidemill.control.controller import Controller
from tidemill.coordination.pools import thread_pool
from tidemill.errors import DiskFull, StorageError
from tidemill.net.transport import Listener
from tidemill.server.broker import Broker
from tidemill.server.connections.budget import ByteBudget
from tidemill.server.connections.connection import Connection
from tidemill.server.node import Node
from tidemill.server.requests.dispatch import BrokerDispatcher
from tidemill.server.runtime import Runtime
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_response

__all__ = ("HeldClient", "HeldNode", "KeptStore")

#: Turns of the event loop after which every task that can go on has gone on.
_TURNS_TO_SETTLE = 25


class KeptStore(MemoryStore):
    """A store that its nodes share, one after the other: their stops do not close it."""

    async def close(self) -> None:
        pass


class HeldPool(Executor):
    """Calls wait until ``step`` runs the next; after ``release`` they run at once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._is_released = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, partial(fn, *args, **kwargs)))
        if self._is_released:
            self.step()
        return future

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def step(self) -> None:
        """Run one of those that wait, any of them."""
        if not self._waiting:
            return
        future, work = self._waiting.pop(self._rng.randrange(len(self._waiting)))
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    def release(self) -> None:
        self._is_released = True
        while self._waiting:
            self.step()


class _Stream:
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


class _Direct:
    """A ``Transport`` and its ``Listener`` in one: the test calls the protocol itself."""

    def __init__(self) -> None:
        self.address = Address("sim", 1)
        self.protocol: Callable[[], asyncio.BaseProtocol]

    async def listen(
        self, address: Address, protocol: Callable[[], asyncio.BaseProtocol], backlog: int
    ) -> Listener:
        self.protocol = protocol
        return self

    async def connect(
        self, address: Address, protocol: Callable[[], asyncio.BaseProtocol]
    ) -> asyncio.Transport:
        raise ConnectionRefusedError(f"there is nobody at {address}")

    async def start_serving(self) -> None:
        pass

    def close(self) -> None:
        pass


class HeldClient:
    """One connection to a node."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.stream = _Stream()
        self._expected: dict[int, tuple[int, int, Callable[[Any], None]]] = {}
        self._correlation_id = 0
        connection.connection_made(self.stream)  # type: ignore[arg-type]

    def send(
        self, api_key: int, version: int, body: dict[str, Any], on_answer: Callable[[Any], None]
    ) -> None:
        """Send a request; ``on_answer`` is called by ``receive``."""
        self._correlation_id += 1
        self._expected[self._correlation_id] = (api_key, version, on_answer)
        data = encode_request(api_key, version, self._correlation_id, "sim", body)
        while data:
            buffer = self.connection.get_buffer(len(data))
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            data = data[count:]
            self.connection.buffer_updated(count)

    def receive(self) -> None:
        """Take the answers that are there."""
        assert not self.stream.closed, "the node closed the connection"
        for frame in split_frames(self.stream.sent):
            correlation_id = int.from_bytes(frame[:4], "big")
            api_key, version, on_answer = self._expected.pop(correlation_id)
            on_answer(decode_response(api_key, version, frame)[1])


class HeldNode:
    """One process of a node. ``store`` must be one that is kept open."""

    def __init__(self, storage: FaultyStorage, store: KeptStore) -> None:
        self.storage = storage
        self.clock = VirtualClock()
        self.clock.ms = START_MS
        self.flusher = HeldPool(storage.rng)
        self._transport = _Direct()
        runtime = Runtime(
            wall_ms=self.clock.now_ms,
            steady_clock=lambda wall_ms: self.clock,
            ids=SeededIds(storage.rng),
            pools=self._pool,
            directory=lambda path: SimDirectory(storage),
            disk_space=lambda path, reserve_bytes: SimDiskSpace(storage),
            storage=self._storage,
            metadata_store=lambda settings, path, pools: store,
            transport=self._transport,
        )
        settings = Settings(
            data_dir=Path("sim"),
            http=None,
            offsets_topic_partitions=1,
            transactions_topic_partitions=1,
            share_state_topic_partitions=1,
            max_decompressed_bytes=MIB,
            max_inflight_bytes=64 * MIB,
            max_frame_bytes=32 * MIB,
            scrub_interval_ms=0,
            # Real time passes here: on a machine that is busy, a client that has not spoken yet stays.
            handshake_deadline_ms=600_000,
        )
        self.node = Node(settings, runtime)

    def _pool(self, purpose: str, threads: int) -> Executor:
        return self.flusher if purpose == "flush" else thread_pool(purpose, threads)

    def _storage(self, path: Path, on_full: Callable[[DiskFull], None]) -> FaultyStorage:
        self.storage.on_full = on_full
        return self.storage

    @property
    def now_ms(self) -> int:
        return self.clock.ms

    @now_ms.setter
    def now_ms(self, time_ms: int) -> None:
        self.clock.ms = time_ms

    @property
    def broker(self) -> Broker:
        return self.node.broker

    @property
    def controller(self) -> Controller:
        return self.broker.controller

    @property
    def budget(self) -> ByteBudget:
        return self.broker.budget

    @property
    def dispatcher(self) -> BrokerDispatcher:
        assert self.node._dispatcher is not None
        return self.node._dispatcher

    async def start(self, topics: dict[str, tuple[int, dict[str, str]]]) -> None:
        """Start and recover as the product does; create ``topics`` (name → partitions, configs)."""
        await self.node.start()
        await create_topics(self.node, topics)
        for placement in self.broker.find.led_placements():
            with contextlib.suppress(DiskFull):
                self.broker.replicas.open(placement)

    def connect(self) -> HeldClient:
        return HeldClient(cast(Connection, self._transport.protocol()))

    async def settle(self) -> None:
        """Let every task go as far as it can without another flush."""
        for _ in range(_TURNS_TO_SETTLE):
            await asyncio.sleep(0)
        while self.broker.gated_writes:
            # Batches that are looked at in a thread.
            await asyncio.wait(self.broker.gated_writes.values())
            for _ in range(_TURNS_TO_SETTLE):
                await asyncio.sleep(0)

    async def crash(self, *, power_loss: bool) -> FaultyStorage:
        """The process is gone; gives the storage as the next one finds it."""
        successor = self.storage.crash(power_loss=power_loss)
        for connection in list(self.dispatcher.connections):
            connection.connection_lost(None)
        self.flusher.release()
        # What it does on its way out reaches a storage that is dead.
        with contextlib.suppress(StorageError):
            await self.node.stop()
        return successor
