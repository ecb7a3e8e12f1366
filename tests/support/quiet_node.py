"""A node for unit tests: the product's own, on real files and threads, without sockets and SQLite.

Time is the test's if it brings a clock. Nothing happens on its own that a test would have to wait for: no
scrubber reads, no reserve is kept on the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.memory_store import MemoryStore
from tidemill.config.settings import Settings
from tidemill.config.values import MIB, Address
from tidemill.control.commands import SetClusterId
from tidemill.control.controller import Controller
from tidemill.coordination.clock import Clock, LoopClock, Timer, wall_clock_ms
from tidemill.net.transport import Listener
from tidemill.server.node import Node
from tidemill.server.runtime import Runtime

__all__ = ("ADVERTISED", "CLUSTER_ID", "start_quiet_node")

ADVERTISED = Address("advertised", 9999)
CLUSTER_ID = "the-cluster"


class _SteadyAt:
    """A clock whose time is a test's; timers go by the loop, from that time on."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.now_ms = now_ms

    def call_at(self, when_ms: int, callback: Callable[[], None]) -> Timer:
        delay_ms = max(1, when_ms - self.now_ms())
        return asyncio.get_running_loop().call_later(delay_ms / 1_000, callback)


class _NoListener:
    """Where nobody can connect."""

    def __init__(self, address: Address) -> None:
        self.address = address

    async def start_serving(self) -> None:
        pass

    def close(self) -> None:
        pass


class _NoTransport:
    """Implements ``tidemill.net.transport.Transport`` for a node that is alone."""

    async def listen(
        self, address: Address, protocol: Callable[[], asyncio.BaseProtocol], backlog: int
    ) -> Listener:
        return _NoListener(address)

    async def connect(
        self, address: Address, protocol: Callable[[], asyncio.BaseProtocol]
    ) -> asyncio.Transport:
        raise ConnectionRefusedError(f"there is nobody at {address}")


async def start_quiet_node(
    path: Path,
    *,
    clock_ms: Callable[[], int] | None = None,
    steady_ms: Callable[[], int] | None = None,
    **settings: Any,
) -> Node:
    """Start a node with its data at ``path``; ``clock_ms`` is its time of day, and its steady time, too."""
    store = MemoryStore()
    # Named before the node comes, which keeps the name.
    controller = Controller(store)
    await controller.start()
    await controller.submit(SetClusterId(cluster_id=CLUSTER_ID))
    await controller.stop()
    steady = steady_ms or clock_ms

    def steady_clock(wall_ms: Callable[[], int]) -> Clock:
        return LoopClock(wall_ms) if steady is None else _SteadyAt(steady)

    runtime = Runtime(
        wall_ms=clock_ms or wall_clock_ms,
        steady_clock=steady_clock,
        metadata_store=lambda settings, metadata_path, pools: store,
        transport=_NoTransport(),
    )
    defaults = {
        "data_dir": path,
        "http": None,
        "advertised_listener": ADVERTISED,
        "offsets_topic_partitions": 2,
        "transactions_topic_partitions": 2,
        "share_state_topic_partitions": 2,
        "group_initial_rebalance_delay_ms": 0,
        "flush_threads": 1,
        "max_decompressed_bytes": MIB,
        "disk_reserve_bytes": 0,
        "scrub_interval_ms": 0,
    }
    node = Node(Settings(**defaults | settings), runtime)
    await node.start()
    return node
