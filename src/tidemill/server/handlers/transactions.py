"""Transactions: from Kafka's messages to the coordinator's and back.

The topic that holds transactional ids is created by the first call that looks for their coordinator or starts
a producer. Until then no transactional id is known, which is what the other calls answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tidemill.coordination.turns import give_way, in_chunks, in_slices
from tidemill.errors import ErrorCode, TidemillError
from tidemill.groups.consumer_messages import Refused
from tidemill.groups.messages import OffsetCommitRequest, OffsetToCommit, TransactionalCommitRequest
from tidemill.groups.patterns import matching_topics
from tidemill.server.broker import TRANSACTIONS_TOPIC, Broker
from tidemill.server.call import Call
from tidemill.server.handlers.committed_offsets import commit_existing, prepare_groups
from tidemill.server.handlers.outcome import outcome
from tidemill.server.transaction_partitions import BrokerTransactionPartitions
from tidemill.transactions.messages import (
    EndResult,
    ListResult,
    Marker,
    Producer,
    TopicPartition,
    TransactionDescription,
)

__all__ = (
    "add_offsets_to_txn",
    "add_partitions_to_txn",
    "describe_producers",
    "describe_transactions",
    "end_txn",
    "has_transactions",
    "known_to_version",
    "list_transactions",
    "prepare_transactions",
    "txn_offset_commit",
    "write_txn_markers",
)

#: So many partitions are added without a break; one that is added and not written to does no harm.
_ADDED_AT_ONCE_MAX: Final = 500
_FIRST_WITH_PRODUCER_FENCED: Final = 2
_FIRST_ADD_OF_SEVERAL: Final = 4
_FIRST_END_WITH_NEW_EPOCH: Final = 5
_FIRST_COMMIT_WITH_ABORTABLE: Final = 4
_FIRST_COMMIT_THAT_ADDS: Final = 5


def has_transactions(broker: Broker) -> bool:
    """Whether there can be any transactional id at all."""
    return TRANSACTIONS_TOPIC in broker.image.topics


async def prepare_transactions(broker: Broker) -> ErrorCode:
    """Make sure that transactional ids can be written."""
    try:
        await broker.ensure_transactions_topic()
    except TidemillError:
        return ErrorCode.coordinator_not_available
    return ErrorCode.none


def known_to_version(code: ErrorCode, version: int, first_version: int) -> ErrorCode:
    """PRODUCER_FENCED as clients knew it before that code existed."""
    if code is ErrorCode.producer_fenced and version < first_version:
        return ErrorCode.invalid_producer_epoch
    return code


# --- partitions of a transaction


async def add_partitions_to_txn(broker: Broker, call: Call) -> dict[str, Any]:
    """Make partitions part of a transaction; from v4 on of several transactions, or only look."""
    request = call.request
    if call.version >= _FIRST_ADD_OF_SEVERAL:
        bodies = [
            {"transactional_id": each.transactional_id, "topic_results": await _add_one(broker, call, each)}
            for each in request.transactions
        ]
        return {"error_code": ErrorCode.none, "results_by_transaction": bodies}
    return {"results_by_topic_v3_and_below": await _add_one(broker, call, _OldTransaction(request))}


class _OldTransaction:
    """The one transaction of a request before v4, in the form of those of later versions."""

    def __init__(self, request: Any) -> None:
        self.transactional_id = request.v3_and_below_transactional_id
        self.producer_id = request.v3_and_below_producer_id
        self.producer_epoch = request.v3_and_below_producer_epoch
        self.topics = request.v3_and_below_topics
        self.verify_only = False


async def _add_one(broker: Broker, call: Call, transaction: Any) -> list[dict[str, Any]]:
    named = ((topic.name, index) for topic in transaction.topics for index in topic.partitions)
    places = list(dict.fromkeys(await in_slices(named)))
    looked_at = await in_slices((place, _refusal(broker, call, place)) for place in places)
    refusals = {place: code for place, code in looked_at if code is not None}
    codes: Mapping[TopicPartition, ErrorCode]
    if refusals:
        # All or nothing.
        codes = dict.fromkeys(places, ErrorCode.operation_not_attempted) | refusals
    else:
        codes = await _add_or_verify(broker, transaction, places)
    bodies = []
    for topic in transaction.topics:
        results = (
            {
                "partition_index": index,
                "partition_error_code": known_to_version(
                    codes[topic.name, index], call.version, _FIRST_WITH_PRODUCER_FENCED
                ),
            }
            for index in topic.partitions
        )
        bodies.append({"name": topic.name, "results_by_partition": await in_slices(results)})
    return bodies


def _refusal(broker: Broker, call: Call, place: TopicPartition) -> ErrorCode | None:
    topic = broker.image.topics.get(place[0])
    if topic is None or not 0 <= place[1] < len(topic.partitions):
        return ErrorCode.unknown_topic_or_partition
    if topic.internal and call.version < _FIRST_ADD_OF_SEVERAL:
        return ErrorCode.topic_authorization_failed
    return None


async def _add_or_verify(
    broker: Broker, transaction: Any, places: list[TopicPartition]
) -> Mapping[TopicPartition, ErrorCode]:
    producer = Producer(transaction.producer_id, transaction.producer_epoch)
    if not transaction.transactional_id:
        return dict.fromkeys(places, ErrorCode.invalid_request)
    if not has_transactions(broker):
        return dict.fromkeys(places, ErrorCode.invalid_producer_id_mapping)
    if transaction.verify_only:
        return await broker.transactions.verify_all(transaction.transactional_id, producer, places)
    code = ErrorCode.none
    for chunk in in_chunks(places, _ADDED_AT_ONCE_MAX):
        code = await broker.transactions.add_partitions(transaction.transactional_id, producer, chunk)
        if code is not ErrorCode.none:
            break
    return dict.fromkeys(places, code)


async def add_offsets_to_txn(broker: Broker, call: Call) -> dict[str, Any]:
    """Make the place where a group's offsets are kept part of a transaction."""
    request = call.request
    code = await prepare_groups(broker)
    if code is ErrorCode.none and not has_transactions(broker):
        code = ErrorCode.invalid_producer_id_mapping
    if code is ErrorCode.none:
        code = await broker.transactions.add_partitions(
            request.transactional_id,
            Producer(request.producer_id, request.producer_epoch),
            [broker.place_of_group(request.group_id)],
        )
    return {"error_code": known_to_version(code, call.version, _FIRST_WITH_PRODUCER_FENCED)}


# --- offsets in a transaction


async def txn_offset_commit(broker: Broker, call: Call) -> dict[str, Any]:
    """Commit offsets of a group, if the transaction is committed."""
    return await commit_existing(broker, call, _commit_in_transaction)


async def _commit_in_transaction(
    broker: Broker, call: Call, offsets: list[OffsetToCommit]
) -> Mapping[TopicPartition, ErrorCode]:
    request = call.request
    code = await prepare_groups(broker)
    if code is ErrorCode.none:
        code = await _enter_transaction(broker, call)
    if code is not ErrorCode.none:
        return {(each.topic, each.partition): code for each in offsets}
    commit = OffsetCommitRequest(
        group_id=request.group_id,
        offsets=offsets,
        generation=call.field("generation_id", -1),
        member_id=call.field("member_id", ""),
        instance_id=call.field("group_instance_id"),
        version=call.version,
    )
    return await broker.groups.commit_transactional_offsets(
        TransactionalCommitRequest(commit, request.producer_id, request.producer_epoch)
    )


async def _enter_transaction(broker: Broker, call: Call) -> ErrorCode:
    """See to it that the group's offsets are part of the transaction: newer clients leave that to us.

    A fenced producer is told INVALID_PRODUCER_EPOCH in every version: Kafka has no PRODUCER_FENCED here.
    """
    request = call.request
    producer = Producer(request.producer_id, request.producer_epoch)
    place = broker.place_of_group(request.group_id)
    if not request.transactional_id:
        return ErrorCode.invalid_request
    if not has_transactions(broker):
        return ErrorCode.invalid_producer_id_mapping
    if call.version >= _FIRST_COMMIT_THAT_ADDS:
        code = await broker.transactions.add_partitions(request.transactional_id, producer, [place])
    else:
        code = await broker.transactions.verify(request.transactional_id, *producer, *place)
    if code is ErrorCode.producer_fenced:
        return ErrorCode.invalid_producer_epoch
    if code is ErrorCode.transaction_abortable and call.version < _FIRST_COMMIT_WITH_ABORTABLE:
        return ErrorCode.invalid_txn_state
    return code


# --- the end


async def end_txn(broker: Broker, call: Call) -> dict[str, Any]:
    """Commit or abort. From v5 on the producer goes on with a new epoch, which the answer holds."""
    request = call.request
    if not request.transactional_id:
        result = EndResult(ErrorCode.invalid_request)
    elif not has_transactions(broker):
        result = EndResult(ErrorCode.invalid_producer_id_mapping)
    else:
        result = await broker.transactions.end(
            request.transactional_id,
            Producer(request.producer_id, request.producer_epoch),
            commit=request.committed,
            new_epoch=call.version >= _FIRST_END_WITH_NEW_EPOCH,
        )
    return {
        "error_code": known_to_version(result.error, call.version, _FIRST_WITH_PRODUCER_FENCED),
        "producer_id": result.producer.id,
        "producer_epoch": result.producer.epoch,
    }


async def write_txn_markers(broker: Broker, call: Call) -> dict[str, Any]:
    """End transactions in partitions of this node, whatever a coordinator here knows of them."""
    partitions = BrokerTransactionPartitions(broker)
    bodies = []
    for each in call.request.markers:
        marker = Marker(
            Producer(each.producer_id, each.producer_epoch), each.transaction_result, each.coordinator_epoch
        )
        topics = [
            {
                "name": topic.name,
                "partitions": [
                    {
                        "partition_index": index,
                        "error_code": await _write_marker(partitions, (topic.name, index), marker),
                    }
                    for index in topic.partition_indexes
                ],
            }
            for topic in each.topics
        ]
        bodies.append({"producer_id": each.producer_id, "topics": topics})
    return {"markers": bodies}


async def _write_marker(
    partitions: BrokerTransactionPartitions, place: TopicPartition, marker: Marker
) -> ErrorCode:
    await give_way()
    try:
        await partitions.write_marker(place, marker)
    except TidemillError as error:
        not_ready = (
            ErrorCode.not_coordinator,
            ErrorCode.coordinator_not_available,
            ErrorCode.coordinator_load_in_progress,
        )
        return ErrorCode.not_leader_or_follower if error.code in not_ready else error.code
    return ErrorCode.none


# --- looking


async def list_transactions(broker: Broker, call: Call) -> dict[str, Any]:
    """The transactional ids that this node coordinates, filtered."""
    request = call.request
    result = ListResult()
    if has_transactions(broker):
        result = await broker.transactions.list_transactions(
            request.state_filters, request.producer_id_filters, call.field("duration_filter", -1)
        )
    pattern = call.field("transactional_id_pattern")
    try:
        names = {each.transactional_id for each in result.transactions}
        shown = matching_topics(pattern, names) if pattern else names
    except Refused as error:
        return {"error_code": error.code}
    return {
        "error_code": result.error,
        "unknown_state_filters": result.unknown_states,
        "transaction_states": [
            {
                "transactional_id": each.transactional_id,
                "producer_id": each.producer_id,
                "transaction_state": each.state,
            }
            for each in result.transactions
            if each.transactional_id in shown
        ],
    }


async def describe_transactions(broker: Broker, call: Call) -> dict[str, Any]:
    """State, producer and partitions of transactional ids."""
    ids = tuple(dict.fromkeys(call.request.transactional_ids))
    if has_transactions(broker):
        found = await broker.transactions.describe_transactions(ids)
    else:
        missing = ErrorCode.transactional_id_not_found
        found = [TransactionDescription(each, missing if each else ErrorCode.invalid_request) for each in ids]
    return {
        "transaction_states": await in_slices(
            {
                "error_code": each.error,
                "transactional_id": each.transactional_id,
                "transaction_state": each.state,
                "transaction_timeout": each.timeout_ms,
                "transaction_start_time": each.started_ms,
                "producer_id": each.producer.id,
                "producer_epoch": each.producer.epoch,
                "topics": [{"topic": name, "partitions": indexes} for name, indexes in each.topics.items()],
            }
            for each in found
        )
    }


async def describe_producers(broker: Broker, call: Call) -> dict[str, Any]:
    """Who writes to partitions of this node, and which of them have a transaction open there."""
    topics = []
    wanted: dict[str, dict[int, None]] = {}
    for topic in call.request.topics:
        wanted.setdefault(topic.name, {}).update(dict.fromkeys(topic.partition_indexes))
    for name, indexes in wanted.items():
        producers = (_producers_of(broker, (name, index)) for index in indexes)
        topics.append({"name": name, "partitions": await in_slices(producers)})
    return {"topics": topics}


def _producers_of(broker: Broker, place: TopicPartition) -> dict[str, Any]:
    name, index = place
    try:
        partition = broker.partition(broker.topic(name), index)
    except TidemillError as error:
        return {"partition_index": index, **outcome(error), "active_producers": ()}
    producers = [
        {
            "producer_id": each.producer_id,
            "producer_epoch": each.epoch,
            "last_sequence": each.last_sequence,
            "last_timestamp": each.last_timestamp_ms,
            "coordinator_epoch": each.coordinator_epoch,
            "current_txn_start_offset": each.transaction_start_offset,
        }
        for each in partition.producers()
    ]
    return {"partition_index": index, **outcome(None), "active_producers": producers}
