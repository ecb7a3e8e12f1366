"""Nodes whose lag is measured: started again on one directory, with topics that have records."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from support.batches import plain_batch
from support.prometheus_text import Family, parse_metrics
from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control.commands import CreateTopic
from tidemill.server.node import Node

__all__ = ("StartNode", "make_topic", "nodes_on", "scrape")

StartNode = Callable[..., Awaitable[Node]]


@contextlib.asynccontextmanager
async def nodes_on(directory: Path) -> AsyncIterator[StartNode]:
    """Starts nodes one after the other on a directory, and stops in the end those that still run."""
    running: list[Node] = []

    async def begin(**changes: Any) -> Node:
        node = Node(Settings(data_dir=directory, listen=Address("127.0.0.1", 0), http=None, **changes))
        await node.start()
        running.append(node)
        return node

    try:
        yield begin
    finally:
        for node in running:
            if node.ready:
                await node.stop()


async def make_topic(node: Node, name: str, records: list[int]) -> None:
    """A topic with so many records in each of its partitions."""
    broker = node.broker
    await broker.controller.submit(
        CreateTopic(name=name, topic_id=uuid4(), partitions=len(records), replication=1)
    )
    for index, count in enumerate(records):
        partition = broker.find.partition(broker.find.topic(name), index)
        for _ in range(count):
            partition.append(plain_batch("v"), broker.clock_ms())
    await broker.flusher.drain(list(broker.replicas))


async def scrape(node: Node) -> dict[str, Family]:
    """The metrics page of a node, parsed."""
    return parse_metrics("".join([part async for part in node.metrics_page()]))
