"""A node inside the process, and a topic of its own for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

import tidemill
from tidemill.client.admin.topics import create_topic
from tidemill.client.cluster import Cluster
from tidemill.client.producing.producer import Producer
from tidemill.client.sync_client import Tidemill
from tidemill.records.record import Record

_numbers = itertools.count()


class World:
    """A node with helpers to make topics and write to them."""

    def __init__(self, db: Tidemill) -> None:
        self.db = db

    @property
    def cluster(self) -> Cluster:
        return self.db._awaited.cluster

    def topic(self, partitions: int = 1, **configs: str) -> str:
        """A new topic."""
        name = f"topic-{next(_numbers)}"
        named = {key.replace("_", "."): value for key, value in configs.items()}
        self.db.run(create_topic(self.cluster, name, partitions=partitions, configs=named))
        return name

    def send(self, topic: str, values: Iterable[Any], partition: int = 0, key: bytes | None = None) -> None:
        """Write records, in one batch if they are few."""
        self.send_records(topic, [Record(key, str(value).encode(), 1_000) for value in values], partition)

    def send_records(self, topic: str, records: Iterable[Record], partition: int = 0) -> None:
        async def send() -> None:
            async with Producer(self.cluster) as producer:
                for record in records:
                    await producer.send(topic, record, partition)

        self.db.run(send())


def name() -> str:
    """A name that no other cursor of the test run has."""
    return f"cursor-{next(_numbers)}"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with tidemill.open() as db:
        yield World(db)


@pytest.fixture(name="name")
def name_fixture() -> str:
    return name()
