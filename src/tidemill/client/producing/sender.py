"""Batches on their way to partitions: in order, and never written twice.

Every front end sends through it: ``Producer`` records one by one, ``ColumnProducer`` whole columns.

Rules:

- A partition gets one window of batches after the other. The batches of a window go out one behind the
  other; the next window is encoded when all of it is durable.
- With acks=all each partition has an idempotent producer of its own. What is tried again goes out with the
  same sequence numbers, and the server answers a batch that it has with its first offset.
- After a window failed for good its outcome may be unknown: the partition goes on under another producer,
  whose sequence numbers start anew, so that nothing is taken for a duplicate of what was lost.
- In a transaction all partitions are written under its producer. A partition that lost a batch is broken for
  good: what its transaction holds is not whole, and the caller that opened it aborts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.net.answers import check
from tidemill.net.connection import Connection, Versions
from tidemill.net.retry import RetryPolicy
from tidemill.records.batch import NO_PRODUCER_ID, NO_SEQUENCE, SEQUENCE_MODULUS, TRANSACTIONAL_BIT
from tidemill.wire.apis import ACKS_ALL
from tidemill.wire.jobs import AttemptId

__all__ = ("WINDOW", "Encoded", "Sender", "Stamp")

#: Batches of one partition under way at most. The server remembers the last five of a producer.
WINDOW: Final = 4
#: Stands for an offset that the server did not tell.
_NO_OFFSET: Final = -1
# Newer versions name topics by id only.
_PRODUCE_VERSIONS: Final[Versions] = (3, 12)


class Stamp(NamedTuple):
    """The fields of a batch's header that say which producer sends it, and with which sequence number."""

    producer_id: int
    producer_epoch: int
    base_sequence: int
    is_transactional: bool = False

    @property
    def attributes(self) -> int:
        """The bits of the header's attributes that it sets."""
        return TRANSACTIONAL_BIT if self.is_transactional else 0

    def behind(self, count: int) -> Stamp:
        """The stamp of the batch that follows one of ``count`` records."""
        if self.base_sequence == NO_SEQUENCE:
            return self
        sequence = (self.base_sequence + count) % SEQUENCE_MODULUS
        return Stamp(self.producer_id, self.producer_epoch, sequence, self.is_transactional)


_ANONYMOUS: Final = Stamp(NO_PRODUCER_ID, -1, NO_SEQUENCE)


class Encoded(NamedTuple):
    """A batch, and how many records it has."""

    data: bytes
    record_count: int


Encode = Callable[[Stamp], Awaitable[Sequence[Encoded]]]
"""Makes the batches of a window: the first with the given stamp, each further one with the next."""


@dataclass(slots=True)
class _PartitionState:
    """A partition with the stamp of its next batch, which is None until a producer is started for it."""

    partition: TopicPartition
    stamp: Stamp | None = None
    has_written: bool = False
    is_broken: bool = False


class _OutOfOrder(ApiError):
    """The server refused a batch because one before it is missing."""


class _ProducerForgotten(Exception):
    """The server does not know this producer's last batch any more, as after a day without writes."""


class Sender:
    """Sends the batches of one writer through one cluster connection.

    ``delivery_timeout_ms`` is how long a window is tried.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        acks: int = ACKS_ALL,
        transaction: AttemptId | None = None,
        delivery_timeout_ms: int = 120_000,
    ) -> None:
        self._cluster = cluster
        self._acks = acks
        self._transaction = transaction
        self._policy = RetryPolicy(delivery_timeout_ms)
        # A leader that is cut off from its followers never has an answer.
        self._attempt_ms = cluster.attempt_ms
        self._states: dict[TopicPartition, _PartitionState] = {}

    def forget(self, topic: str) -> None:
        """Start over in all partitions of a topic that was deleted and created again."""
        for partition in [partition for partition in self._states if partition[0] == topic]:
            del self._states[partition]

    async def send(self, partition: TopicPartition, encode: Encode) -> list[int]:
        """Send a window until all of it is durable; gives the offset of each batch, -1 where it is not known.

        One call per partition at a time. ``encode`` is called again if the producer had to be replaced.
        """
        state = self._states.get(partition)
        if state is None:
            state = self._states[partition] = self._new_state(partition)
        try:
            return await self._send_window(state, encode)
        except _ProducerForgotten:
            if self._transaction is not None:
                raise _broken(state) from None
            return await self._send_window(state, encode)

    def _new_state(self, partition: TopicPartition) -> _PartitionState:
        if self._transaction is not None:
            _, producer_id, epoch = self._transaction
            return _PartitionState(partition, Stamp(producer_id, epoch, 0, is_transactional=True))
        return _PartitionState(partition, None if self._acks == ACKS_ALL else _ANONYMOUS)

    async def _send_window(self, state: _PartitionState, encode: Encode) -> list[int]:
        if state.is_broken:
            raise _broken(state)
        if state.stamp is None:
            state.stamp, state.has_written = await self._start_producer(), False
        window = await encode(state.stamp)
        try:
            offsets = await self._deliver(state, window)
        except BaseException:
            # Whether the window was written may be unknown.
            if self._transaction is not None:
                state.is_broken = True
            elif self._acks == ACKS_ALL:
                state.stamp = None
            raise
        state.stamp, state.has_written = state.stamp.behind(sum(each.record_count for each in window)), True
        return offsets

    async def _start_producer(self) -> Stamp:
        async def ask() -> Stamp:
            response = await self._cluster.to_any(
                "InitProducerId", {"transactional_id": None, "transaction_timeout": 60_000}
            )
            check(response.error_code, None, "asking for a producer id")
            return Stamp(response.producer_id, response.producer_epoch, 0)

        return await self._cluster.retrying(ask, policy=self._policy)

    async def _deliver(self, state: _PartitionState, window: Sequence[Encoded]) -> list[int]:
        """Send batches one behind the other, again from the first that failed, until all are durable."""
        offsets: list[int] = []
        is_first_try = True

        async def send_rest() -> None:
            nonlocal is_first_try
            (leader,) = await self._cluster.leaders([state.partition])
            connection = await self._cluster.connection(leader, purpose="produce")
            left = window[len(offsets) :]
            answers: Sequence[int | BaseException]
            if len(left) == 1:
                # No task is made for it: many windows have one small batch.
                try:
                    answers = [await self._produce(connection, state.partition, left[0].data)]
                except TidemillError as error:
                    answers = [error]
            else:
                produced = (self._produce(connection, state.partition, each.data) for each in left)
                answers = await asyncio.gather(*produced, return_exceptions=True)
            if is_first_try and state.has_written and isinstance(answers[0], _OutOfOrder):
                # Nothing of this window was sent before, and all windows before it are written.
                raise _ProducerForgotten
            is_first_try = False
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
                offsets.append(answer)

        await self._cluster.retrying(send_rest, policy=self._policy)
        return offsets

    async def _produce(self, connection: Connection, partition: TopicPartition, data: bytes) -> int:
        topic, index = partition
        body = {
            "transactional_id": None if self._transaction is None else self._transaction.transactional_id,
            "acks": self._acks,
            "timeout": self._attempt_ms,
            "topic_data": [{"name": topic, "partition_data": [{"index": index, "records": data}]}],
        }
        if self._acks == 0:
            await connection.send_unanswered("Produce", body, versions=_PRODUCE_VERSIONS)
            return _NO_OFFSET
        # The server gives up first, so that its answer can still arrive.
        response = await connection.request(
            "Produce", body, versions=_PRODUCE_VERSIONS, timeout_ms=self._attempt_ms + 5_000
        )
        ((result,),) = (entry.partition_responses for entry in response.responses)
        if result.error_code == ErrorCode.duplicate_sequence_number:
            return _NO_OFFSET
        _check(result, f"writing to {topic}-{index}")
        return int(result.base_offset)


def _broken(state: _PartitionState) -> ApiError:
    topic, index = state.partition
    return ApiError(
        ErrorCode.invalid_txn_state,
        f"a batch of this transaction was lost on its way to {topic}-{index}: abort it, and write "
        "everything again",
    )


def _check(result: Any, what: str) -> None:
    if result.error_code == ErrorCode.out_of_order_sequence_number:
        # A batch in front of this one has failed, and is about to be tried again.
        raise _OutOfOrder(
            ErrorCode.not_enough_replicas, f"{what}: a batch before this one is not written yet"
        )
    check(result.error_code, getattr(result, "error_message", None), what)
