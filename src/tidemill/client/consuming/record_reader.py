"""Reading records of partitions from given offsets, by the rules of ``batch_reader``.

A batch that cannot be decoded is reported with its offsets, after everything before it has been handed out.
The position stays there, so ``poll`` raises the same again until the caller moves it; a reader can also be
told to skip such batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.client.consuming.batch_reader import BatchReader, FetchedBatches, OutOfRange
from tidemill.errors import ApiError, UndecodableBatch
from tidemill.records.batch import parse_header
from tidemill.records.record import Record, read_records

__all__ = ("Message", "OutOfRange", "RecordReader")


class Message(NamedTuple):
    """A record with its topic, partition and offset."""

    topic: str
    partition: int
    record: Record


class RecordReader:
    """Reads a set of partitions. ``positions`` has the next offset of each; options are ``BatchReader``'s.

    ``on_undecodable`` is told of every batch that cannot be decoded, and the batch is skipped; without it
    ``poll`` raises ``UndecodableBatch``.
    """

    def __init__(
        self,
        cluster: Cluster,
        positions: Mapping[TopicPartition, int] | None = None,
        *,
        on_undecodable: Callable[[UndecodableBatch], None] | None = None,
        **options: Any,
    ) -> None:
        self._reader = BatchReader(cluster, positions, **options)
        self._on_undecodable = on_undecodable
        #: Raised by the next ``poll``, because the last one had messages to hand out first.
        self._failure: UndecodableBatch | None = None

    @property
    def positions(self) -> dict[TopicPartition, int]:
        return self._reader.positions

    async def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read these partitions from these offsets, and no others."""
        self._failure = None
        await self._reader.assign(positions)

    async def poll(self) -> list[Message]:
        """The next messages; an empty list if none came within ``max_wait_ms``.

        Raises ``UndecodableBatch`` when there is nothing left before such a batch.
        """
        messages: list[Message] = []
        if self._failure is None:
            for fetched in await self._reader.poll():
                messages += self._messages(fetched)
        if self._failure is not None and not messages:
            failure, self._failure = self._failure, None
            raise failure
        return messages

    async def close(self) -> None:
        """Drop the fetches under way."""
        await self._reader.close()

    def _messages(self, fetched: FetchedBatches) -> list[Message]:
        """The messages up to the first batch that cannot be decoded, or of all that can be."""
        messages: list[Message] = []
        for batch in fetched.batches:
            try:
                messages += _messages_of_batch(fetched, batch)
            except UndecodableBatch as failure:
                if self._on_undecodable is None:
                    # Later batches wait, so that records come in order.
                    self._reader.positions[fetched.partition] = max(fetched.from_offset, failure.base_offset)
                    self._failure = failure
                    return messages
                self._on_undecodable(failure)
        return messages


def _messages_of_batch(fetched: FetchedBatches, batch: memoryview) -> list[Message]:
    topic, index = fetched.partition
    try:
        records = list(read_records(batch))
    except ApiError as error:
        header = parse_header(batch)
        reason = error.message.removeprefix("corrupt record batch: ")
        raise UndecodableBatch(topic, index, header.base_offset, header.last_offset, reason) from error
    return [Message(topic, index, record) for record in records if record.offset >= fetched.from_offset]
