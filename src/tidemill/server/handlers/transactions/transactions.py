"""The APIs of transactions: from Kafka's messages to the coordinator's and back.

The topic that holds transactional ids is created by the first call that looks for their coordinator or starts
a producer. Until then no transactional id is known, which is what the other calls answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from tidemill.coordination.turns import distinct_in_slices, give_way, in_chunks, in_slices
from tidemill.errors import ErrorCode, TidemillError
from tidemill.groups.consumer.messages import Refused
from tidemill.groups.messages import OffsetCommitRequest, OffsetToCommit, TransactionalCommitRequest
from tidemill.groups.patterns import matching_topics
from tidemill.server.broker import Broker
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.coordinators.transaction_entry import enter_transaction, unknown_id
from tidemill.server.coordinators.transaction_partitions import MARKERS_MAX, LocalTransactionPartitions
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.server.handlers.groups.committed_offsets import commit_existing
from tidemill.server.handlers.outcome import outcome
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import (
    ALTER,
    CLUSTER,
    CLUSTER_ACTION,
    CLUSTER_NAME,
    DESCRIBE,
    GROUP,
    READ,
    TOPIC,
    TRANSACTIONAL_ID,
    WRITE,
    for_each,
    for_one,
)
from tidemill.server.requests.call import Call
from tidemill.transactions.messages import (
    EndResult,
    ListResult,
    Producer,
    TopicPartition,
    TransactionDescription,
    TransactionEnd,
)

__all__ = (
    "add_offsets_to_txn",
    "add_partitions_to_txn",
    "describe_producers",
    "describe_transactions",
    "end_txn",
    "known_to_version",
    "list_transactions",
    "txn_offset_commit",
    "write_txn_markers",
)

#: So many partitions of a marker are looked at without a break.
_MARKED_AT_ONCE: Final = 1_000
#: So many partitions are added without a break; one that is added and not written to does no harm.
_ADDED_AT_ONCE_MAX: Final = 100
_FIRST_WITH_PRODUCER_FENCED: Final = 2
_FIRST_ADD_OF_SEVERAL: Final = 4
_FIRST_END_WITH_NEW_EPOCH: Final = 5
_FIRST_COMMIT_WITH_ABORTABLE: Final = 4
_FIRST_COMMIT_THAT_ADDS: Final = 5
#: What a group coordinator says of its partition and writers of markers do not know.
_NOT_LOADED: Final = frozenset(
    {
        ErrorCode.not_coordinator,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
    }
)


def known_to_version(code: ErrorCode, version: int, first_version: int) -> ErrorCode:
    """``code``; for versions before ``first_version``, PRODUCER_FENCED as the code that clients knew then."""
    if code is ErrorCode.producer_fenced and version < first_version:
        return ErrorCode.invalid_producer_epoch
    return code


# --- partitions of a transaction


@serves(
    "AddPartitionsToTxn",
    for_each(WRITE, TRANSACTIONAL_ID),
    for_each(WRITE, TOPIC),
    for_each(CLUSTER_ACTION, CLUSTER),
)
async def add_partitions_to_txn(broker: Broker, call: Call) -> dict[str, Any]:
    """Add partitions to a transaction; from v4 on to several, or only verify that they are in."""
    request = call.request
    if call.version >= _FIRST_ADD_OF_SEVERAL:
        # Only brokers send this, for clients whose permissions they have checked.
        if not call.may(CLUSTER_ACTION, CLUSTER, CLUSTER_NAME):
            return {"error_code": ErrorCode.cluster_authorization_failed}
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
    partitions = list(dict.fromkeys(await in_slices(named)))
    if call.version < _FIRST_ADD_OF_SEVERAL and not call.may(
        WRITE, TRANSACTIONAL_ID, transaction.transactional_id
    ):
        refusals = dict.fromkeys(partitions, ErrorCode.transactional_id_authorization_failed)
        return await _added(call, transaction, refusals)
    looked_at = await in_slices((partition, _refusal(broker, call, partition)) for partition in partitions)
    refusals = {partition: code for partition, code in looked_at if code is not None}
    codes: Mapping[TopicPartition, ErrorCode]
    if refusals:
        # All or nothing.
        codes = dict.fromkeys(partitions, ErrorCode.operation_not_attempted) | refusals
    else:
        codes = await _add_or_verify(broker, transaction, partitions)
    return await _added(call, transaction, codes)


async def _added(
    call: Call, transaction: Any, codes: Mapping[TopicPartition, ErrorCode]
) -> list[dict[str, Any]]:
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


def _refusal(broker: Broker, call: Call, partition: TopicPartition) -> ErrorCode | None:
    if call.version < _FIRST_ADD_OF_SEVERAL and not call.may(WRITE, TOPIC, partition[0]):
        return ErrorCode.topic_authorization_failed
    topic = broker.image.topics.get(partition[0])
    if topic is None or not 0 <= partition[1] < len(topic.partitions):
        return ErrorCode.unknown_topic_or_partition
    if topic.internal and call.version < _FIRST_ADD_OF_SEVERAL:
        return ErrorCode.topic_authorization_failed
    return None


async def _add_or_verify(
    broker: Broker, transaction: Any, partitions: list[TopicPartition]
) -> Mapping[TopicPartition, ErrorCode]:
    producer = Producer(transaction.producer_id, transaction.producer_epoch)
    if not transaction.transactional_id:
        return dict.fromkeys(partitions, ErrorCode.invalid_request)
    if not broker.coordinators.has_topic(TRANSACTIONS):
        return dict.fromkeys(partitions, unknown_id(broker))
    if transaction.verify_only:
        return await broker.transactions.verify_all(transaction.transactional_id, producer, partitions)
    code = ErrorCode.none
    for chunk in in_chunks(partitions, _ADDED_AT_ONCE_MAX):
        code = await broker.transactions.add_partitions(transaction.transactional_id, producer, chunk)
        if code is not ErrorCode.none:
            break
    return dict.fromkeys(partitions, code)


@serves(
    "AddOffsetsToTxn", for_one(WRITE, TRANSACTIONAL_ID, "transactional_id"), for_one(READ, GROUP, "group_id")
)
async def add_offsets_to_txn(broker: Broker, call: Call) -> dict[str, Any]:
    """Add the partition that keeps a group's offsets to a transaction."""
    request = call.request
    code = await broker.coordinators.prepare(GROUPS)
    if code is ErrorCode.none and not broker.coordinators.has_topic(TRANSACTIONS):
        code = unknown_id(broker)
    if code is ErrorCode.none:
        code = await broker.transactions.add_partitions(
            request.transactional_id,
            Producer(request.producer_id, request.producer_epoch),
            [broker.coordinators.partition_of(GROUPS, request.group_id)],
        )
    return {"error_code": known_to_version(code, call.version, _FIRST_WITH_PRODUCER_FENCED)}


# --- offsets in a transaction


@serves("TxnOffsetCommit", for_each(WRITE, TRANSACTIONAL_ID), for_each(READ, GROUP), for_each(READ, TOPIC))
async def txn_offset_commit(broker: Broker, call: Call) -> dict[str, Any]:
    """Commit offsets of a group as part of a transaction."""
    return await commit_existing(broker, call, _commit_in_transaction, _check_transactional_id)


def _check_transactional_id(call: Call) -> None:
    call.authorize(WRITE, TRANSACTIONAL_ID, call.request.transactional_id)


async def _commit_in_transaction(
    broker: Broker, call: Call, offsets: list[OffsetToCommit]
) -> Mapping[TopicPartition, ErrorCode]:
    request = call.request
    code = await broker.coordinators.prepare(GROUPS)
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
        client_host=call.client_host,
    )
    return await broker.groups.commit_transactional_offsets(
        TransactionalCommitRequest(commit, request.producer_id, request.producer_epoch)
    )


async def _enter_transaction(broker: Broker, call: Call) -> ErrorCode:
    """Add the partition of the group's offsets to the transaction: newer clients leave that to the server.

    A fenced producer is told INVALID_PRODUCER_EPOCH in every version: Kafka has no PRODUCER_FENCED here.
    """
    request = call.request
    producer = Producer(request.producer_id, request.producer_epoch)
    partition = broker.coordinators.partition_of(GROUPS, request.group_id)
    if not request.transactional_id:
        return ErrorCode.invalid_request
    if not broker.coordinators.has_topic(TRANSACTIONS):
        return unknown_id(broker)
    adds = call.version >= _FIRST_COMMIT_THAT_ADDS
    codes = await enter_transaction(broker, request.transactional_id, producer, [partition], add=adds)
    code = codes[partition]
    if code is ErrorCode.not_leader_or_follower:
        # Another node leads the partition of the group's offsets by now.
        return ErrorCode.not_coordinator
    if code is ErrorCode.producer_fenced:
        return ErrorCode.invalid_producer_epoch
    if code is ErrorCode.transaction_abortable and call.version < _FIRST_COMMIT_WITH_ABORTABLE:
        return ErrorCode.invalid_txn_state
    return code


# --- the end


@serves("EndTxn", for_one(WRITE, TRANSACTIONAL_ID, "transactional_id"))
async def end_txn(broker: Broker, call: Call) -> dict[str, Any]:
    """Commit or abort. From v5 on the producer goes on with a new epoch, which the answer holds."""
    request = call.request
    if not request.transactional_id:
        result = EndResult(ErrorCode.invalid_request)
    elif not broker.coordinators.has_topic(TRANSACTIONS):
        result = EndResult(unknown_id(broker))
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


@serves("WriteTxnMarkers", for_each(CLUSTER_ACTION, CLUSTER), for_each(ALTER, CLUSTER))
async def write_txn_markers(broker: Broker, call: Call) -> dict[str, Any]:
    """Write markers to partitions of this node, whatever a coordinator here knows of the transactions.

    The markers of one partition are written together, and no pin takes a moment while it is done. A client
    may abort what hangs. Only nodes commit: a client would commit a part of somebody's transaction.
    """
    asked = await in_slices(
        len(topic.partition_indexes) for each in call.request.markers for topic in each.topics
    )
    if sum(asked) > MARKERS_MAX:
        # More than any coordinator sends.
        return await _markers(call, lambda marker, partition: ErrorCode.invalid_request)
    may_write = any(call.may(operation, CLUSTER, CLUSTER_NAME) for operation in (CLUSTER_ACTION, ALTER))

    def is_forbidden(marker: Any) -> bool:
        return not may_write or (marker.transaction_result and not call.between_nodes)

    wanted: dict[TopicPartition, list[TransactionEnd]] = {}
    for each in call.request.markers:
        if is_forbidden(each):
            continue
        marker = TransactionEnd(
            Producer(each.producer_id, each.producer_epoch), each.transaction_result, each.coordinator_epoch
        )
        for topic in each.topics:
            for some in in_chunks(topic.partition_indexes, _MARKED_AT_ONCE):
                for index in some:
                    wanted.setdefault((topic.name, index), []).append(marker)
                await give_way()
    codes = await _write_markers(broker, wanted) if wanted else {}

    def code_of(marker: Any, partition: TopicPartition) -> ErrorCode:
        return ErrorCode.cluster_authorization_failed if is_forbidden(marker) else codes[partition]

    return await _markers(call, code_of)


async def _markers(call: Call, code_of: Callable[[Any, TopicPartition], ErrorCode]) -> dict[str, Any]:
    """The answer of WriteTxnMarkers; ``code_of`` gives what became of a marker of the request."""
    markers = []
    for marker in call.request.markers:
        topics = []
        for topic in marker.topics:
            partitions = (
                {"partition_index": index, "error_code": code_of(marker, (topic.name, index))}
                for index in topic.partition_indexes
            )
            topics.append({"name": topic.name, "partitions": await in_slices(partitions)})
        markers.append({"producer_id": marker.producer_id, "topics": topics})
        await give_way()
    return {"markers": markers}


async def _write_markers(
    broker: Broker, wanted: Mapping[TopicPartition, list[TransactionEnd]]
) -> dict[TopicPartition, ErrorCode]:
    """What became of the markers of each partition."""
    partitions = LocalTransactionPartitions.of(broker)
    async with partitions.together(wanted):
        failures = await partitions.write_all(wanted)
    codes = dict.fromkeys(wanted, ErrorCode.none)
    for partition, error in failures.items():
        is_loading = error.code in _NOT_LOADED
        codes[partition] = ErrorCode.not_leader_or_follower if is_loading else error.code
        await give_way()
    return codes


# --- looking


@serves("ListTransactions", for_each(DESCRIBE, TRANSACTIONAL_ID))
async def list_transactions(broker: Broker, call: Call) -> dict[str, Any]:
    """List the transactional ids that this node coordinates, filtered."""
    request = call.request
    result = ListResult()
    if broker.coordinators.has_topic(TRANSACTIONS):
        states = await distinct_in_slices(request.state_filters)
        producer_ids = await distinct_in_slices(request.producer_id_filters)
        result = await broker.transactions.list_transactions(
            states, producer_ids, call.field("duration_filter", -1)
        )
    pattern = call.field("transactional_id_pattern")
    try:
        names: Collection[str] = await call.allowed(
            DESCRIBE, TRANSACTIONAL_ID, [each.transactional_id for each in result.transactions]
        )
        # In a thread: ids are long, and there may be very many.
        shown = frozenset(await asyncio.to_thread(matching_topics, pattern, names) if pattern else names)
    except Refused as error:
        return {"error_code": error.code}
    return {
        "error_code": result.error,
        "unknown_state_filters": result.unknown_states,
        "transaction_states": await in_slices(
            {
                "transactional_id": each.transactional_id,
                "producer_id": each.producer_id,
                "transaction_state": each.state,
            }
            for each in result.transactions
            if each.transactional_id in shown
        ),
    }


@serves("DescribeTransactions", for_each(DESCRIBE, TRANSACTIONAL_ID), for_each(DESCRIBE, TOPIC))
async def describe_transactions(broker: Broker, call: Call) -> dict[str, Any]:
    """Describe state, producer and partitions of transactional ids."""
    named = tuple(await distinct_in_slices(call.request.transactional_ids))
    ids = tuple(await call.allowed(DESCRIBE, TRANSACTIONAL_ID, named))
    if broker.coordinators.has_topic(TRANSACTIONS):
        found = await broker.transactions.describe_transactions(ids)
    else:
        missing = ErrorCode.transactional_id_not_found
        found = [TransactionDescription(each, missing if each else ErrorCode.invalid_request) for each in ids]
    if len(ids) < len(named):
        code, allowed = ErrorCode.transactional_id_authorization_failed, frozenset(ids)
        found += [TransactionDescription(each, code) for each in named if each not in allowed]
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
                "topics": [
                    {"topic": name, "partitions": indexes}
                    for name, indexes in each.topics.items()
                    if call.may(DESCRIBE, TOPIC, name)
                ],
            }
            for each in found
        )
    }


@serves("DescribeProducers", for_each(READ, TOPIC))
async def describe_producers(broker: Broker, call: Call) -> dict[str, Any]:
    """Describe the producers that write to partitions of this node, and their open transactions."""
    topics = []
    wanted: dict[str, dict[int, None]] = {}
    for topic in call.request.topics:
        wanted.setdefault(topic.name, {}).update(dict.fromkeys(topic.partition_indexes))
    for name, indexes in wanted.items():
        producers = (_producers_of(broker, call, (name, index)) for index in indexes)
        topics.append({"name": name, "partitions": await in_slices(producers)})
    return {"topics": topics}


def _producers_of(broker: Broker, call: Call, topic_partition: TopicPartition) -> dict[str, Any]:
    name, index = topic_partition
    try:
        call.authorize(READ, TOPIC, name)
        partition = broker.find.partition(broker.find.topic(name), index)
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
