"""The gate in front of transactional writes: a partition takes them only if the coordinator knows of it.

The first batch of a transaction in a partition asks the coordinator; the others find the partition open.
While a producer waits at the gate, its later requests wait behind it, so that its batches keep their order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.records.batch import HEADER_BYTES, BatchHeader, parse_header
from tidemill.server.broker import Broker
from tidemill.server.coordinators.transaction_entry import enter_transaction
from tidemill.server.requests.authorization import TOPIC, WRITE
from tidemill.server.requests.call import Call
from tidemill.transactions.messages import Producer, TopicPartition

__all__ = ("TOPIC_ID_MIN_VERSION", "BatchHeaders", "Refusals", "header_of", "pass_gate", "topic_name")

logger = logging.getLogger(__name__)

#: From this version on the client leaves it to the broker to add partitions to its transaction (KIP-890).
_IMPLICIT_ADD_MIN_VERSION = 12
#: From this version on a Produce request names topics by their ids.
TOPIC_ID_MIN_VERSION = 13
#: Older clients do not know the error that asks them to abort.
_ABORTABLE_MIN_VERSION = 11
#: Transient errors that older clients take for fatal: they get an error that they retry instead.
_PASSING = frozenset(
    {
        ErrorCode.concurrent_transactions,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
    }
)

Refusals = dict[TopicPartition, TidemillError]

BatchHeaders = dict[int, BatchHeader]
"""Headers of a request's batches that were parsed already, by the identity of their entries."""


def header_of(headers: BatchHeaders, entry: Any) -> BatchHeader:
    """The header of an entry's batch, which has the length of one; it is parsed once for a request."""
    header = headers.get(id(entry))
    if header is None:
        header = headers[id(entry)] = parse_header(entry.records)
    return header


def pass_gate(broker: Broker, call: Call, headers: BatchHeaders, append: Callable[[Refusals], None]) -> None:
    """Call ``append`` with the refused partitions: now, or when the coordinator has answered."""
    producer, closed = _closed_partitions(broker, call, headers)
    queue = broker.transactional_writes
    before = queue.get(producer.id)
    if not closed and before is None:
        append({})
        return
    call.keep_frame()
    task = call.start_task(_wait(broker, call, headers, producer, before, append))
    queue[producer.id] = task

    def leave(done: asyncio.Task[None]) -> None:
        if queue.get(producer.id) is done:
            del queue[producer.id]
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.error("a transactional write failed at the gate", exc_info=error)
            call.abort()

    task.add_done_callback(leave)


async def _wait(
    broker: Broker,
    call: Call,
    headers: BatchHeaders,
    producer: Producer,
    before: asyncio.Task[None] | None,
    append: Callable[[Refusals], None],
) -> None:
    if before is not None:
        await asyncio.wait([before])
    # Computed again, because the request before this one may have opened some.
    _, closed = _closed_partitions(broker, call, headers)
    append(await _open(broker, call, producer, closed))


async def _open(broker: Broker, call: Call, producer: Producer, closed: list[TopicPartition]) -> Refusals:
    transactional_id = call.request.transactional_id
    if not closed:
        return {}
    adds = call.version >= _IMPLICIT_ADD_MIN_VERSION
    codes = await enter_transaction(broker, transactional_id, producer, closed, add=adds)
    return {
        partition: _refusal(partition, code, call)
        for partition, code in codes.items()
        if code != ErrorCode.none
    }


def _refusal(partition: TopicPartition, code: ErrorCode, call: Call) -> ApiError:
    if code == ErrorCode.producer_fenced:
        # Only coordinators answer PRODUCER_FENCED; clients take this code for fatal in an answer to Produce.
        return ApiError(
            ErrorCode.invalid_producer_epoch,
            f"a newer producer has taken over the transactional id {call.request.transactional_id!r}",
        )
    if code in _PASSING and call.version < _IMPLICIT_ADD_MIN_VERSION:
        code = ErrorCode.not_enough_replicas
    elif code == ErrorCode.transaction_abortable and call.version < _ABORTABLE_MIN_VERSION:
        code = ErrorCode.invalid_txn_state
    return ApiError(
        code,
        f"{partition[0]}-{partition[1]} is not part of the present transaction of "
        f"{call.request.transactional_id!r}",
    )


def _closed_partitions(
    broker: Broker, call: Call, headers: BatchHeaders
) -> tuple[Producer, list[TopicPartition]]:
    """The producer, and the partitions that do not take its transactional batches yet."""
    producer, closed = Producer(-1, -1), []
    for topic in call.request.topic_data:
        name = topic_name(broker, call, topic)
        if call.authorizer is not None and name is not None and not call.may(WRITE, TOPIC, name):
            continue  # The append refuses the batch.
        for entry in topic.partition_data:
            if name is None or not entry.records or len(entry.records) < HEADER_BYTES:
                continue
            header = header_of(headers, entry)
            if not header.is_transactional:
                continue
            producer = Producer(header.producer_id, header.producer_epoch)
            if not _is_open(broker, name, entry.index, producer):
                closed.append((name, entry.index))
    return producer, closed


def _is_open(broker: Broker, topic: str, index: int, producer: Producer) -> bool:
    try:
        return broker.find.partition(broker.find.topic(topic), index).may_write(*producer)
    except TidemillError:
        # Not a matter of transactions: the append itself will say what is wrong.
        return True


def topic_name(broker: Broker, call: Call, topic: Any) -> str | None:
    """The name of a topic in a Produce request, which newer versions name by its id."""
    if call.version < TOPIC_ID_MIN_VERSION:
        name: str = topic.name
        return name
    found = broker.image.topic_by_id(topic.topic_id) if topic.topic_id else None
    return None if found is None else found.name
