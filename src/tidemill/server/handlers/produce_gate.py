"""The gate in front of transactional writes: a partition takes them only if the coordinator knows of it.

The first batch of a transaction in a partition asks the coordinator; the others find the partition open.
While a producer waits at the gate, its later requests wait behind it, so that its batches keep their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.records.batch import HEADER_BYTES, parse_header
from tidemill.server.broker import Broker
from tidemill.server.call import Call
from tidemill.transactions.messages import Producer, TopicPartition

__all__ = ("Refusals", "pass_gate", "topic_name")

#: From this version on the client leaves it to the broker to add partitions to its transaction (KIP-890).
_IMPLICIT_ADD_MIN_VERSION = 12
_TOPIC_ID_MIN_VERSION = 13
#: Older clients do not know the error that asks them to abort.
_ABORTABLE_MIN_VERSION = 11
#: What older clients take for fatal although it passes by itself: they are told something they retry.
_PASSING = frozenset(
    {
        ErrorCode.concurrent_transactions,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
    }
)

Refusals = dict[TopicPartition, TidemillError]


def pass_gate(broker: Broker, call: Call, append: Callable[[Refusals], None]) -> None:
    """Call ``append`` with what may not be written: now, or when the coordinator has answered."""
    producer, closed = _closed_partitions(broker, call)
    queue = broker.transactional_writes
    before = queue.get(producer.id)
    if not closed and before is None:
        append({})
        return
    call.keep_frame()
    task = call.start_task(_wait(broker, call, producer, before, append))
    queue[producer.id] = task

    def leave(done: asyncio.Task[None]) -> None:
        if queue.get(producer.id) is done:
            del queue[producer.id]
        if not done.cancelled() and done.exception() is not None:
            call.abort()

    task.add_done_callback(leave)


async def _wait(
    broker: Broker,
    call: Call,
    producer: Producer,
    before: asyncio.Task[None] | None,
    append: Callable[[Refusals], None],
) -> None:
    if before is not None:
        await asyncio.wait([before])
    # Looked at again: the request before this one may have opened them.
    _, closed = _closed_partitions(broker, call)
    append(await _open(broker, call, producer, closed))


async def _open(broker: Broker, call: Call, producer: Producer, closed: list[TopicPartition]) -> Refusals:
    transactional_id = call.request.transactional_id
    if not closed:
        return {}
    if call.version >= _IMPLICIT_ADD_MIN_VERSION:
        code = await broker.transactions.add_partitions(transactional_id, producer, closed)
        codes = dict.fromkeys(closed, code)
    else:
        codes = await broker.transactions.verify_all(transactional_id, producer, closed)
    return {place: _refusal(place, code, call) for place, code in codes.items() if code != ErrorCode.none}


def _refusal(place: TopicPartition, code: ErrorCode, call: Call) -> ApiError:
    if code == ErrorCode.producer_fenced:
        # PRODUCER_FENCED is for coordinators to say; in an answer to Produce, this one is taken for fatal.
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
        f"{place[0]}-{place[1]} is not part of the present transaction of {call.request.transactional_id!r}",
    )


def _closed_partitions(broker: Broker, call: Call) -> tuple[Producer, list[TopicPartition]]:
    """The producer, and the partitions that do not take its transactional batches yet."""
    producer, closed = Producer(-1, -1), []
    for topic in call.request.topic_data:
        name = topic_name(broker, call, topic)
        for entry in topic.partition_data:
            if name is None or not entry.records or len(entry.records) < HEADER_BYTES:
                continue
            header = parse_header(entry.records)
            if not header.is_transactional:
                continue
            producer = Producer(header.producer_id, header.producer_epoch)
            if not _is_open(broker, name, entry.index, producer):
                closed.append((name, entry.index))
    return producer, closed


def _is_open(broker: Broker, topic: str, index: int, producer: Producer) -> bool:
    try:
        return broker.partition(broker.topic(topic), index).may_write(*producer)
    except TidemillError:
        # Not a matter of transactions: the append itself will say what is wrong.
        return True


def topic_name(broker: Broker, call: Call, topic: Any) -> str | None:
    """The name of a topic in a Produce request, which newer versions name by its id."""
    if call.version < _TOPIC_ID_MIN_VERSION:
        name: str = topic.name
        return name
    found = broker.image.topic_by_id(topic.topic_id) if topic.topic_id else None
    return None if found is None else found.name
