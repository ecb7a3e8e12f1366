"""``ColumnProducer``: columns of records on their way to partitions, through one ``Sender``.

Rules:

- What a call writes to a partition comes behind what calls before it wrote there, also while those are still
  under way.
- Batches are built in a thread, a window at a time.
- In a transaction a partition is added to it before its first batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import pyarrow as pa

from tidemill.client.cluster import TRANSACTION_KEY, Cluster, TopicPartition
from tidemill.client.producing.sender import WINDOW, Encoded, Sender, Stamp
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError
from tidemill.net.answers import check
from tidemill.net.connection import Versions
from tidemill.records.columns.build import build_batch_columns, split_by_bytes
from tidemill.records.columns.scalar import Int64s
from tidemill.records.compression import NONE
from tidemill.wire.jobs import AttemptId

__all__ = ("BATCH_BYTES", "ColumnProducer", "Outgoing")

#: The size of a batch, unless its topic takes less.
BATCH_BYTES: Final = 384 * 1024
# Newer versions are for brokers, which speak of several transactions.
_ADD_VERSIONS: Final[Versions] = (0, 3)


class Outgoing(NamedTuple):
    """Records for one partition. Without timestamps they get the time at which they are sent."""

    keys: pa.BinaryArray | None
    values: pa.BinaryArray
    timestamps_ms: Int64s | None = None
    headers: pa.BinaryArray | None = None

    def pieces(self, max_bytes: int) -> list[slice]:
        """Slices of the records, each of which makes a batch of at most ``max_bytes``."""
        times = 0 if self.timestamps_ms is None else self.timestamps_ms
        return split_by_bytes(self.keys, self.values, max_bytes, timestamp_ms=times, headers=self.headers)

    def batch(self, piece: slice, now_ms: int, stamp: Stamp, codec: int) -> bytes:
        """Encode one slice as a batch."""
        return build_batch_columns(
            None if self.keys is None else self.keys[piece],
            self.values[piece],
            timestamp_ms=now_ms if self.timestamps_ms is None else self.timestamps_ms[piece],
            headers=None if self.headers is None else self.headers[piece],
            codec=codec,
            producer_id=stamp.producer_id,
            producer_epoch=stamp.producer_epoch,
            base_sequence=stamp.base_sequence,
            attributes=stamp.attributes,
        )


class ColumnProducer:
    """Writes columns through one cluster connection, on its own or in a transaction."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        transaction: AttemptId | None = None,
        codec: int = NONE,
        delivery_timeout_ms: int = 120_000,
    ) -> None:
        self.cluster = cluster
        self._transaction = transaction
        self._codec = codec
        self._delivery_timeout_ms = delivery_timeout_ms
        self._sender = Sender(cluster, transaction=transaction, delivery_timeout_ms=delivery_timeout_ms)
        self._turns: dict[TopicPartition, asyncio.Lock] = {}
        #: Partitions that are part of the transaction.
        self._added: set[TopicPartition] = set()
        self._beginning = asyncio.Lock()

    @property
    def in_transaction(self) -> bool:
        return self._transaction is not None

    def forget(self, topic: str) -> None:
        """Start over in all partitions of a topic that was deleted and created again."""
        self._sender.forget(topic)
        self._added = {partition for partition in self._added if partition[0] != topic}

    async def begin(
        self, parts: Mapping[TopicPartition, Outgoing], batch_bytes: int = BATCH_BYTES
    ) -> list[asyncio.Task[int]]:
        """Begin to send records; returns a task for each part, which gives the offset after its last record.

        In every partition they come after everything that was begun before.
        """
        loop = asyncio.get_running_loop()
        async with self._beginning:
            if self._transaction is not None:
                await self._add(self._transaction, parts)
            # Tasks start in the order in which they are made, and wait for their turns in that order.
            return [
                loop.create_task(self._write(partition, records, batch_bytes))
                for partition, records in parts.items()
            ]

    async def _add(self, transaction: AttemptId, partitions: Iterable[TopicPartition]) -> None:
        """Make partitions part of the transaction: all that are new in one request."""
        new = [partition for partition in partitions if partition not in self._added]
        if new:
            await self.cluster.retrying(
                partial(_add_to_transaction, self.cluster, transaction, new),
                timeout_ms=self._delivery_timeout_ms,
            )
            self._added.update(new)

    async def _write(self, partition: TopicPartition, records: Outgoing, batch_bytes: int) -> int:
        """Send records, a window at a time, until all are durable; gives the offset behind the last."""
        pieces = records.pieces(batch_bytes)
        behind = -1
        async with self._turns.setdefault(partition, asyncio.Lock()):
            for first in range(0, len(pieces), WINDOW):
                window = pieces[first : first + WINDOW]
                offsets = await self._send(partition, records, window)
                for offset, piece in zip(offsets, window, strict=True):
                    if offset >= 0:
                        behind = max(behind, offset + piece.stop - piece.start)
        return behind

    async def _send(self, partition: TopicPartition, records: Outgoing, pieces: Sequence[slice]) -> list[int]:
        async def encode(stamp: Stamp) -> list[Encoded]:
            return await asyncio.to_thread(self._encode, records, pieces, stamp)

        try:
            return await self._sender.send(partition, encode)
        except ApiError as error:
            if error.code == ErrorCode.invalid_record and not isinstance(error, TableError):
                raise TableError(TableCode.row_refused, error.message) from error
            raise

    def _encode(self, records: Outgoing, pieces: Sequence[slice], stamp: Stamp) -> list[Encoded]:
        now_ms = time.time_ns() // 1_000_000
        window = []
        for piece in pieces:
            count = piece.stop - piece.start
            window.append(Encoded(records.batch(piece, now_ms, stamp, self._codec), count))
            stamp = stamp.behind(count)
        return window


async def _add_to_transaction(
    cluster: Cluster, transaction: AttemptId, partitions: Sequence[TopicPartition]
) -> None:
    topics: dict[str, list[int]] = {}
    for topic, index in partitions:
        topics.setdefault(topic, []).append(index)
    body = {
        "v3_and_below_transactional_id": transaction.transactional_id,
        "v3_and_below_producer_id": transaction.producer_id,
        "v3_and_below_producer_epoch": transaction.producer_epoch,
        "v3_and_below_topics": [{"name": name, "partitions": indexes} for name, indexes in topics.items()],
    }
    response = await cluster.to_coordinator(
        transaction.transactional_id.partition("#")[0],
        "AddPartitionsToTxn",
        body,
        key_type=TRANSACTION_KEY,
        versions=_ADD_VERSIONS,
    )
    results = [
        (each.partition_error_code, f"adding {topic.name}-{each.partition_index} to the transaction")
        for topic in response.results_by_topic_v3_and_below
        for each in topic.results_by_partition
    ]
    # The partition at fault has a code that says why; the others were not tried.
    results.sort(key=lambda result: result[0] == ErrorCode.operation_not_attempted)
    for code, what in results:
        check(code, None, what)
