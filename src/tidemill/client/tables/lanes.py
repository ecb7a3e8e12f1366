"""Columns of records on their way to partitions: a lane for each, batch after batch, in order.

Rules:

- Batches of one lane go out in order, a few at a time, under a producer whose sequences the server checks:
  what is tried again is never written twice.
- Without a transaction each lane has an idempotent producer of its own, and begins under another one when it
  does not know what became of a batch.
- In a transaction all lanes write under its producer. A partition enters the transaction before its first
  batch. A lane that lost a batch is broken for good: what its transaction holds is not whole, and whoever
  opened it aborts it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import pyarrow as pa

from tidemill.client.cluster import TRANSACTION_KEY, Cluster, TopicPartition, check
from tidemill.client.connection import Versions
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError
from tidemill.records.columns import build_batch_columns, split_by_bytes
from tidemill.records.columns_scalar import Int64s
from tidemill.records.compression import NONE

__all__ = ("BATCH_BYTES", "AttemptId", "Lanes", "Outgoing")

#: How large a batch is unless its topic takes less.
BATCH_BYTES: Final = 384 * 1024
# Newer versions name topics by id only.
_PRODUCE_VERSIONS: Final[Versions] = (3, 12)
# Newer versions are for brokers, which speak of several transactions.
_ADD_VERSIONS: Final[Versions] = (0, 3)
_ACKS_ALL: Final = -1
#: Batches of one lane under way. The server remembers the last five of a producer.
_WINDOW: Final = 4
_SEQUENCE_MODULUS: Final = 2**31
_TRANSACTIONAL_BIT: Final = 0x10


class AttemptId(NamedTuple):
    """Who writes in a transaction: its id, and the producer that the coordinator started for it."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


class Outgoing(NamedTuple):
    """Records for one partition. Without timestamps they get the time at which they are sent."""

    keys: pa.BinaryArray | None
    values: pa.BinaryArray
    timestamps_ms: Int64s | None = None
    headers: pa.BinaryArray | None = None

    def pieces(self, max_bytes: int) -> list[slice]:
        """Slices that make a batch of at most so many bytes each."""
        times = 0 if self.timestamps_ms is None else self.timestamps_ms
        return split_by_bytes(self.keys, self.values, max_bytes, timestamp_ms=times, headers=self.headers)

    def batch(self, piece: slice, now_ms: int, **header: int) -> bytes:
        """One slice as a batch."""
        return build_batch_columns(
            None if self.keys is None else self.keys[piece],
            self.values[piece],
            timestamp_ms=now_ms if self.timestamps_ms is None else self.timestamps_ms[piece],
            headers=None if self.headers is None else self.headers[piece],
            **header,
        )


@dataclass(slots=True)
class _Lane:
    """One partition, and the producer that writes it."""

    topic: str
    index: int
    producer_id: int = -1
    epoch: int = -1
    next_sequence: int = 0
    is_broken: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class _Encoded:
    data: bytes
    count: int


class _OutOfOrder(ApiError):
    """A batch is missing in front of this one."""


class _ProducerForgotten(Exception):
    """The server does not know this producer's last batch any more, as after a day without writes."""


class Lanes:
    """The lanes of one writer through one cluster connection."""

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
        self._lanes: dict[TopicPartition, _Lane] = {}
        self._entered: set[TopicPartition] = set()
        self._beginning = asyncio.Lock()

    def _lane(self, topic: str, index: int) -> _Lane:
        """The lane of a partition."""
        lane = self._lanes.get((topic, index))
        if lane is None:
            lane = self._lanes[topic, index] = _Lane(topic, index)
            if self._transaction is not None:
                _, lane.producer_id, lane.epoch = self._transaction
        return lane

    def forget(self, topic: str) -> None:
        """The topic is not the one that it was: begin anew in all its partitions."""
        for place in [place for place in self._lanes if place[0] == topic]:
            del self._lanes[place]
            self._entered.discard(place)

    @property
    def in_transaction(self) -> bool:
        return self._transaction is not None

    async def begin(
        self, parts: Mapping[TopicPartition, Outgoing], batch_bytes: int = BATCH_BYTES
    ) -> list[asyncio.Task[int]]:
        """Begin to send records, and give what each part will end with: the offset behind its last record.

        What was begun before is in front of it in every lane.
        """
        loop = asyncio.get_running_loop()
        async with self._beginning:
            if self._transaction is not None:
                await self._enter(self._transaction, parts)
            # Tasks start in the order in which they are made, and wait for their lanes in that order.
            return [
                loop.create_task(self._write(self._lane(*place), records, batch_bytes))
                for place, records in parts.items()
            ]

    async def _enter(self, transaction: AttemptId, places: Iterable[TopicPartition]) -> None:
        """Make partitions part of the transaction: all that are new in one request."""
        new = [place for place in places if place not in self._entered]
        if new:
            await self.cluster.retrying(
                partial(self._add, transaction, new), timeout_ms=self._delivery_timeout_ms
            )
            self._entered.update(new)

    async def _add(self, transaction: AttemptId, places: Sequence[TopicPartition]) -> None:
        topics: dict[str, list[int]] = {}
        for topic, index in places:
            topics.setdefault(topic, []).append(index)
        body = {
            "v3_and_below_transactional_id": transaction.transactional_id,
            "v3_and_below_producer_id": transaction.producer_id,
            "v3_and_below_producer_epoch": transaction.producer_epoch,
            "v3_and_below_topics": [
                {"name": name, "partitions": indexes} for name, indexes in topics.items()
            ],
        }
        response = await self.cluster.to_coordinator(
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
        # The partition at fault has a code of its own; the others were only not tried.
        results.sort(key=lambda result: result[0] == ErrorCode.operation_not_attempted)
        for code, what in results:
            check(code, None, what)

    async def _write(self, lane: _Lane, records: Outgoing, batch_bytes: int) -> int:
        """Send records, a window at a time, until all are durable; gives the offset behind the last."""
        pieces = records.pieces(batch_bytes)
        behind = -1
        async with lane.turn:
            for first in range(0, len(pieces), _WINDOW):
                encode = partial(self._encode_window, lane, records, pieces[first : first + _WINDOW])
                try:
                    written = await self._write_window(lane, encode)
                except _ProducerForgotten:
                    if self._transaction is not None:
                        raise _broken(lane) from None
                    lane.producer_id = -1
                    written = await self._write_window(lane, encode)
                behind = max(behind, written)
        return behind

    async def _write_window(self, lane: _Lane, encode: Callable[[], list[_Encoded]]) -> int:
        if lane.is_broken:
            raise _broken(lane)
        if lane.producer_id < 0:
            await self._identify(lane)
        window = await asyncio.to_thread(encode)
        try:
            behind = await self._send_window(lane, window)
        except BaseException:
            # What became of it may be unknown: go on under another producer, whose sequences start anew.
            if self._transaction is None:
                lane.producer_id = -1
            else:
                lane.is_broken = True
            raise
        lane.next_sequence = (lane.next_sequence + sum(each.count for each in window)) % _SEQUENCE_MODULUS
        return behind

    async def _identify(self, lane: _Lane) -> None:
        async def ask() -> Any:
            response = await self.cluster.to_any(
                "InitProducerId", {"transactional_id": None, "transaction_timeout": 60_000}
            )
            check(response.error_code, None, "asking for a producer id")
            return response

        response = await self.cluster.retrying(ask)
        lane.producer_id, lane.epoch, lane.next_sequence = response.producer_id, response.producer_epoch, 0

    async def _send_window(self, lane: _Lane, window: list[_Encoded]) -> int:
        """Send batches one behind the other, again from the first that failed, until all are durable."""
        left = list(window)
        behind, is_first = -1, lane.next_sequence > 0

        async def attempt() -> None:
            nonlocal behind, is_first
            (leader,) = await self.cluster.leaders([(lane.topic, lane.index)])
            connection = await self.cluster.connection(leader, purpose="produce")
            answers = await asyncio.gather(
                *(self._produce(connection, lane, each) for each in left), return_exceptions=True
            )
            if is_first and isinstance(answers[0], _OutOfOrder):
                # Nothing of this window was sent before, and all windows before it are written.
                raise _ProducerForgotten
            is_first = False
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
                behind = max(behind, answer)
                del left[0]

        await self.cluster.retrying(attempt, timeout_ms=self._delivery_timeout_ms)
        return behind

    async def _produce(self, connection: Any, lane: _Lane, encoded: _Encoded) -> int:
        body = {
            "transactional_id": None if self._transaction is None else self._transaction.transactional_id,
            "acks": _ACKS_ALL,
            "timeout": self.cluster.timeout_ms,
            "topic_data": [
                {"name": lane.topic, "partition_data": [{"index": lane.index, "records": encoded.data}]}
            ],
        }
        # The server gives up first, so that its answer can still arrive.
        response = await connection.request(
            "Produce", body, versions=_PRODUCE_VERSIONS, timeout_ms=self.cluster.timeout_ms + 5_000
        )
        ((result,),) = (entry.partition_responses for entry in response.responses)
        if result.error_code == ErrorCode.duplicate_sequence_number:
            return -1
        _check(result, f"writing to {lane.topic}-{lane.index}")
        return int(result.base_offset) + encoded.count

    def _encode_window(self, lane: _Lane, records: Outgoing, pieces: Sequence[slice]) -> list[_Encoded]:
        now_ms, sequence = time.time_ns() // 1_000_000, lane.next_sequence
        window = []
        for piece in pieces:
            count = piece.stop - piece.start
            data = records.batch(
                piece,
                now_ms,
                codec=self._codec,
                producer_id=lane.producer_id,
                producer_epoch=lane.epoch,
                base_sequence=sequence,
                attributes=0 if self._transaction is None else _TRANSACTIONAL_BIT,
            )
            sequence = (sequence + count) % _SEQUENCE_MODULUS
            window.append(_Encoded(data, count))
        return window


def _broken(lane: _Lane) -> ApiError:
    return ApiError(
        ErrorCode.invalid_txn_state,
        f"a batch of this transaction was lost on its way to {lane.topic}-{lane.index}: abort it, and write "
        "everything again",
    )


def _check(result: Any, what: str) -> None:
    if result.error_code == ErrorCode.out_of_order_sequence_number:
        # A batch in front of this one has failed, and is about to be tried again.
        raise _OutOfOrder(
            ErrorCode.not_enough_replicas, f"{what}: a batch before this one is not written yet"
        )
    if result.error_code == ErrorCode.invalid_record:
        raise TableError(
            TableCode.row_refused, getattr(result, "error_message", None) or f"{what}: a row was refused"
        )
    check(result.error_code, getattr(result, "error_message", None), what)
