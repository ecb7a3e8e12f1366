"""Reading records of partitions from given offsets; the rules of ``fetching`` hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.client.fetching import BatchReader, FetchedBatches, OutOfRange
from tidemill.records.record import Record, read_records

__all__ = ("Message", "OutOfRange", "PartitionReader")


class Message(NamedTuple):
    """A record and where it was."""

    topic: str
    partition: int
    record: Record


class PartitionReader:
    """Reads a set of partitions. ``positions`` has the next offset of each; options are ``BatchReader``'s."""

    def __init__(
        self, cluster: Cluster, positions: Mapping[TopicPartition, int] | None = None, **options: Any
    ) -> None:
        self._reader = BatchReader(cluster, positions, **options)

    @property
    def positions(self) -> dict[TopicPartition, int]:
        return self._reader.positions

    async def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read these partitions from these offsets, and no others."""
        await self._reader.assign(positions)

    async def poll(self) -> list[Message]:
        """The next messages; an empty list if none came within ``max_wait_ms``."""
        return [message for fetched in await self._reader.poll() for message in _messages(fetched)]

    async def close(self) -> None:
        """Drop the fetches under way."""
        await self._reader.close()


def _messages(fetched: FetchedBatches) -> list[Message]:
    topic, index = fetched.partition
    return [
        Message(topic, index, record)
        for batch in fetched.batches
        for record in read_records(batch)
        if record.offset >= fetched.from_offset
    ]
