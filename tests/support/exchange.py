"""Requests to a node without sockets or a real disk; flushes happen when the test says so.

async with Exchange({"orders": (1, {})}) as node:
    answer = node.send("Produce", 9, acks=-1, ...)      # nothing is flushed yet
    await node.flush()
    answer.value
"""

from __future__ import annotations

import asyncio
import random
from types import TracebackType
from typing import Any
from uuid import UUID

from support.batches import plain_batch
from support.faulty_storage import FaultyStorage
from support.held_node import HeldClient, HeldNode, KeptStore
from tidemill.replication.partition import Partition
from tidemill.wire.apis import APIS_BY_NAME

__all__ = ("Answer", "Exchange", "fetch_part", "produce_part")

_TOPIC_ID_MIN_VERSION = 13


class Answer:
    """What came back for one request, if anything did."""

    def __init__(self) -> None:
        self._values: list[Any] = []

    @property
    def arrived(self) -> bool:
        return bool(self._values)

    @property
    def value(self) -> Any:
        (value,) = self._values
        return value


class Exchange:
    """A started node and one connection to it."""

    def __init__(
        self, topics: dict[str, tuple[int, dict[str, str]]], storage: FaultyStorage | None = None
    ) -> None:
        self._topics = topics
        self.storage = storage or FaultyStorage(random.Random(1))
        self.store = KeptStore()
        self.node: HeldNode
        self.client: HeldClient

    async def __aenter__(self) -> Exchange:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.node.crash(power_loss=True)

    async def _start(self) -> None:
        self.node = HeldNode(self.storage, self.store)
        await self.node.start(self._topics)
        self.client = self.node.connect()
        # Answers leave in the order of a connection's requests, and a test's fetch may wait for a write.
        self._writer = self.node.connect()

    async def restart(self, *, power_loss: bool) -> None:
        """The node dies, and starts again on what is left."""
        self.storage = await self.node.crash(power_loss=power_loss)
        await self._start()

    def topic_id(self, topic: str) -> UUID:
        return self.node.broker.image.topics[topic].id

    def partition(self, topic: str, index: int = 0) -> Partition:
        return self.node.broker.find.partition(self.node.broker.find.topic(topic), index)

    def send(self, api: str, version: int, /, **body: Any) -> Answer:
        answer = Answer()
        self.client.send(APIS_BY_NAME[api].key, version, body, answer._values.append)
        return answer

    async def settle(self) -> None:
        """Let the node do what it can without a flush, and take the answers."""
        await self.node.settle()
        self.client.receive()
        self._writer.receive()

    async def until_answered(self, answer: Answer) -> None:
        """Wait for an answer that a timer of the node sends."""
        async with asyncio.timeout(120):
            while not answer.arrived:
                await self.settle()

    async def flush(self) -> None:
        await self.node.settle()
        while self.node.flusher.busy:
            self.node.flusher.step()
            await self.node.settle()
        await self.settle()

    async def ask(self, api: str, version: int, /, **body: Any) -> Any:
        """The answer to a request that needs no flush."""
        answer = self.send(api, version, **body)
        await self.settle()
        return answer.value

    # --- the two that matter most

    def produce(self, version: int, *parts: dict[str, Any], acks: int = -1, **more: Any) -> Answer:
        return self.send(
            "Produce",
            version,
            **{"acks": acks, "timeout": 60_000, "topic_data": self._by(version, parts), **more},
        )

    async def write(self, topic: str, *values: str, partition: int = 0, **batch: Any) -> int:
        """Append a batch of ``values`` and make it durable; returns its first offset."""
        answer = Answer()
        part = {
            "name": topic,
            "partition_data": [{"index": partition, "records": plain_batch(*values, **batch)}],
        }
        body = {"acks": -1, "timeout": 60_000, "topic_data": [part]}
        self._writer.send(APIS_BY_NAME["Produce"].key, 9, body, answer._values.append)
        await self.flush()
        result = answer.value.responses[0].partition_responses[0]
        assert result.error_code == 0, result
        return int(result.base_offset)

    def fetch(self, version: int, *parts: dict[str, Any], **more: Any) -> Answer:
        body = {
            "max_wait": 0,
            "min_bytes": 0,
            "max_bytes": 10**8,
            "topics": self._by(version, parts, "topic"),
        }
        return self.send("Fetch", version, **{**body, **more})

    def _by(
        self, version: int, parts: tuple[dict[str, Any], ...], name: str = "name"
    ) -> list[dict[str, Any]]:
        """Name topics in the way of the version; a UUID is taken as it is."""
        renamed = []
        for part in parts:
            part = dict(part)
            topic = part.pop("topic")
            if version < _TOPIC_ID_MIN_VERSION:
                part[name] = topic
            else:
                part["topic_id"] = topic if isinstance(topic, UUID) else self.topic_id(topic)
            renamed.append(part)
        return renamed


def produce_part(topic: str | UUID, records: bytes | None, index: int = 0) -> dict[str, Any]:
    return {"topic": topic, "partition_data": [{"index": index, "records": records}]}


def fetch_part(
    topic: str | UUID, offset: int = 0, index: int = 0, max_bytes: int = 10**7, **more: Any
) -> dict[str, Any]:
    entry = {"partition": index, "fetch_offset": offset, "partition_max_bytes": max_bytes, **more}
    return {"topic": topic, "partitions": [entry]}
