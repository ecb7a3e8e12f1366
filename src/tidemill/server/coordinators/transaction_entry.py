"""Entering a transaction: the leader of a partition asks the coordinator before it takes writes.

The coordinator may be this node, which is a call, or another one, which is asked with AddPartitionsToTxn. Its
yes is true when it leaves, and may be overtaken by the end of the transaction: ``Partition.answer`` has the
rule for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.replication.rules.assignment import NO_LEADER
from tidemill.server.coordinators.transactions import TRANSACTIONS

if TYPE_CHECKING:
    from tidemill.replication.partition import Partition
    from tidemill.replication.rules.transaction_permits import TransactionQuestion
    from tidemill.server.broker import Broker
    from tidemill.transactions.messages import Producer, TopicPartition

__all__ = ("enter_transaction", "unknown_id")

_VERSION: Final = 5
#: What tells of another node's trouble, and is over soon.
_PASSING: Final = frozenset(
    {
        ErrorCode.broker_not_available,
        ErrorCode.network_exception,
        ErrorCode.request_timed_out,
        ErrorCode.unknown_topic_or_partition,
    }
)

Codes = Mapping["TopicPartition", ErrorCode]


def unknown_id(broker: Broker) -> ErrorCode:
    """The answer about a transactional id while there is no topic for them.

    A node that is alone knows that no producer was ever given an id. Another node may have created the topic
    a moment ago, and the client is to look for it again.
    """
    return ErrorCode.not_coordinator if broker.image.replicated else ErrorCode.invalid_producer_id_mapping


async def enter_transaction(
    broker: Broker,
    transactional_id: str,
    producer: Producer,
    partitions: Sequence[TopicPartition],
    *,
    add: bool,
) -> Codes:
    """Open partitions that this node leads to a transaction that has them as its parts.

    ``add``: have the coordinator add them first, for clients that leave that to the leader. Every partition
    that has no error takes the producer's writes from now on, until a marker.
    """
    coordinator = broker.node_id
    if broker.image.replicated:
        coordinator = await broker.coordinators.leader_of(TRANSACTIONS, transactional_id)
    if coordinator == NO_LEADER:
        return dict.fromkeys(partitions, ErrorCode.coordinator_not_available)
    if coordinator != broker.node_id:
        return await _ask(broker, coordinator, transactional_id, producer, partitions, add=add)
    if not add:
        return await broker.transactions.verify_all(transactional_id, producer, partitions)
    code = await broker.transactions.add_partitions(transactional_id, producer, partitions)
    return dict.fromkeys(partitions, code)


async def _ask(
    broker: Broker,
    coordinator: int,
    transactional_id: str,
    producer: Producer,
    partitions: Sequence[TopicPartition],
    *,
    add: bool,
) -> Codes:
    """Ask a coordinator on another node."""
    asked: dict[TopicPartition, tuple[Partition, TransactionQuestion]] = {}
    codes: dict[TopicPartition, ErrorCode] = {}
    for each in partitions:
        try:
            partition = broker.find.partition(broker.find.topic(each[0]), each[1])
        except TidemillError as error:
            codes[each] = error.code
        else:
            asked[each] = partition, partition.ask_about(producer.id)
    answers: Codes = {}
    try:
        if asked:
            answers = await _request(broker, coordinator, transactional_id, producer, asked, add=add)
    except TidemillError as error:
        code = ErrorCode.coordinator_not_available if error.code in _PASSING else error.code
        answers = dict.fromkeys(asked, code)
    finally:
        for each, (partition, question) in asked.items():
            codes[each] = _answered(partition, question, producer, answers.get(each))
    return codes


def _answered(
    partition: Partition, question: TransactionQuestion, producer: Producer, code: ErrorCode | None
) -> ErrorCode:
    """Take the coordinator's answer; None: there was none."""
    allowed = code is ErrorCode.none
    in_time = partition.answer(question, producer.epoch if allowed else None)
    if code is None:
        return ErrorCode.coordinator_not_available
    # The client asks again, and the coordinator then speaks of what is true behind the marker.
    return code if in_time else ErrorCode.concurrent_transactions


async def _request(
    broker: Broker,
    coordinator: int,
    transactional_id: str,
    producer: Producer,
    partitions: Mapping[TopicPartition, Any],
    *,
    add: bool,
) -> Codes:
    topics: dict[str, list[int]] = {}
    for name, index in partitions:
        topics.setdefault(name, []).append(index)
    transaction = {
        "transactional_id": transactional_id,
        "producer_id": producer.id,
        "producer_epoch": producer.epoch,
        "verify_only": not add,
        "topics": [{"name": name, "partitions": indexes} for name, indexes in topics.items()],
    }
    answer = await broker.ask_node(
        coordinator, "AddPartitionsToTxn", _VERSION, {"transactions": [transaction]}
    )
    if answer.error_code is not ErrorCode.none:
        raise ApiError(ErrorCode(answer.error_code), f"node {coordinator} refused to look at a transaction")
    return {
        (topic.name, each.partition_index): _known(each.partition_error_code)
        for result in answer.results_by_transaction
        for topic in result.topic_results
        for each in topic.results_by_partition
    }


def _known(code: int) -> ErrorCode:
    """The coordinator's code; where its metadata is behind this node's, one that the client retries."""
    found = ErrorCode(code)
    return ErrorCode.coordinator_not_available if found in _PASSING else found
