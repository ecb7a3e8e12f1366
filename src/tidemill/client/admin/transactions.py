"""Transactions of all producers, over the Kafka protocol: typed async functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tidemill.client.cluster import TRANSACTION_KEY, Cluster, TopicPartition
from tidemill.errors import ApiError, ErrorCode
from tidemill.net.answers import check
from tidemill.wire.jobs import JOB_PREFIX
from tidemill.wire.requests import ms

__all__ = (
    "ListedTransaction",
    "PartitionProducer",
    "TransactionDescription",
    "abort_hanging",
    "abort_transaction",
    "describe_producers",
    "describe_transaction",
    "list_transactions",
)

_ONGOING: Final = "Ongoing"
_NONE: Final = -1


class ListedTransaction(NamedTuple):
    """A transactional id as ListTransactions shows it."""

    transactional_id: str
    producer_id: int
    state: str
    coordinator: int


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """A transactional id. ``started_ms`` is None if it has had no transaction."""

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    started_ms: int | None
    partitions: tuple[TopicPartition, ...]


class PartitionProducer(NamedTuple):
    """A producer that has written to a partition.

    ``start_offset`` is None if it has no transaction open there.
    """

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    start_offset: int | None


async def list_transactions(
    cluster: Cluster, states: Sequence[str] = (), *, longer_than_ms: int = -1, pattern: str | None = None
) -> list[ListedTransaction]:
    """The transactional ids of all nodes, by name."""
    body = {
        "state_filters": states,
        "producer_id_filters": (),
        "duration_filter": longer_than_ms,
        "transactional_id_pattern": pattern,
    }

    async def ask() -> list[ListedTransaction]:
        await cluster.all_topics()
        found: list[ListedTransaction] = []
        for node_id in sorted(cluster.nodes):
            response = await (await cluster.connection(node_id)).request("ListTransactions", body)
            check(response.error_code, None, f"listing the transactions of node {node_id}")
            if response.unknown_state_filters:
                unknown = ", ".join(response.unknown_state_filters)
                raise ApiError(ErrorCode.invalid_request, f"there is no transaction state {unknown}")
            found += (
                ListedTransaction(each.transactional_id, each.producer_id, each.transaction_state, node_id)
                for each in response.transaction_states
            )
        return sorted(found)

    return await cluster.retrying(ask)


async def describe_transaction(cluster: Cluster, transactional_id: str) -> TransactionDescription:
    """The transactional id. Raises ``ApiError`` TRANSACTIONAL_ID_NOT_FOUND if nobody has used it."""

    async def ask() -> TransactionDescription:
        response = await cluster.to_coordinator(
            transactional_id,
            "DescribeTransactions",
            {"transactional_ids": [transactional_id]},
            key_type=TRANSACTION_KEY,
        )
        (found,) = response.transaction_states
        if found.error_code == ErrorCode.transactional_id_not_found:
            raise ApiError(
                ErrorCode.transactional_id_not_found,
                f"there is no transactional id {transactional_id!r}; "
                "'tidemill txn list' shows those that exist",
            )
        check(found.error_code, None, f"describing the transaction of {transactional_id!r}")
        return TransactionDescription(
            transactional_id,
            found.transaction_state,
            found.producer_id,
            found.producer_epoch,
            ms(found.transaction_timeout),
            None if found.transaction_start_time < 0 else found.transaction_start_time,
            tuple((topic.topic, index) for topic in found.topics for index in topic.partitions),
        )

    return await cluster.retrying(ask)


async def abort_transaction(cluster: Cluster, transactional_id: str) -> TransactionDescription:
    """Abort an ongoing transaction and fence its producer; gives what it was. Returns when it is over.

    Raises ``ApiError`` INVALID_TXN_STATE if no transaction is ongoing.
    """
    found = await describe_transaction(cluster, transactional_id)
    if found.state != _ONGOING:
        raise ApiError(
            ErrorCode.invalid_txn_state,
            f"the transaction of {transactional_id!r} is in state {found.state}: there is nothing to abort",
        )
    if transactional_id.startswith(JOB_PREFIX):
        await _abort_attempt(cluster, found)
        return found
    body = {"transactional_id": transactional_id, "transaction_timeout": found.timeout_ms}

    async def ask() -> None:
        response = await cluster.to_coordinator(
            transactional_id, "InitProducerId", body, key_type=TRANSACTION_KEY
        )
        check(response.error_code, None, f"aborting the transaction of {transactional_id!r}")

    # CONCURRENT_TRANSACTIONS is the answer until the abort has reached every partition.
    await cluster.retrying(ask)
    return found


async def _abort_attempt(cluster: Cluster, found: TransactionDescription) -> None:
    """Abort a job's attempt through the coordinator: nobody else may start a producer with its id."""
    # Imported late, because it loads Arrow, which nothing else in this module needs.
    from tidemill.client.producing.attempts import abort_attempts
    from tidemill.wire.jobs import AttemptId

    job = found.transactional_id[len(JOB_PREFIX) :].partition("#")[0]
    identity = AttemptId(found.transactional_id, found.producer_id, found.producer_epoch)
    await abort_attempts(cluster, job, 0, [identity])


async def describe_producers(
    cluster: Cluster, partitions: Iterable[TopicPartition]
) -> list[PartitionProducer]:
    """The producers that have written to these partitions, in the order of the partitions."""
    wanted = list(partitions)

    async def ask() -> list[PartitionProducer]:
        found: list[PartitionProducer] = []
        for node_id, led in (await cluster.leaders(wanted)).items():
            topics: dict[str, list[int]] = {}
            for topic, index in led:
                topics.setdefault(topic, []).append(index)
            body = {"topics": [{"name": name, "partition_indexes": each} for name, each in topics.items()]}
            response = await (await cluster.connection(node_id)).request("DescribeProducers", body)
            for topic in response.topics:
                for entry in topic.partitions:
                    where = f"the producers of {topic.name}-{entry.partition_index}"
                    check(entry.error_code, entry.error_message, where)
                    found += (
                        _producer(topic.name, entry.partition_index, each) for each in entry.active_producers
                    )
        return sorted(found, key=lambda each: each[:3])

    return await cluster.retrying(ask)


def _producer(topic: str, partition: int, state: Any) -> PartitionProducer:
    return PartitionProducer(
        topic,
        partition,
        state.producer_id,
        state.producer_epoch,
        state.last_sequence,
        state.last_timestamp,
        state.coordinator_epoch,
        None if state.current_txn_start_offset == _NONE else state.current_txn_start_offset,
    )


async def abort_hanging(cluster: Cluster, partition: TopicPartition, start_offset: int) -> PartitionProducer:
    """Abort the transaction that is open in a partition since ``start_offset``.

    Its coordinator is not asked: this is for a transaction that no coordinator ends any more. One that its
    producer still works on would be torn.
    """
    topic, index = partition
    open_there = [
        each for each in await describe_producers(cluster, [partition]) if each.start_offset == start_offset
    ]
    if not open_there:
        raise ApiError(
            ErrorCode.invalid_txn_state,
            f"no transaction is open in {topic}-{index} since offset {start_offset}; "
            f"'tidemill txn describe --topic {topic}' shows those that are",
        )
    producer = open_there[0]
    marker = {
        "producer_id": producer.producer_id,
        "producer_epoch": producer.producer_epoch,
        "transaction_result": False,
        "topics": [{"name": topic, "partition_indexes": [index]}],
        "coordinator_epoch": max(0, producer.coordinator_epoch),
    }

    async def ask() -> None:
        (node_id,) = await cluster.leaders([partition])
        connection = await cluster.connection(node_id)
        response = await connection.request("WriteTxnMarkers", {"markers": [marker]})
        code = response.markers[0].topics[0].partitions[0].error_code
        check(code, None, f"aborting the transaction in {topic}-{index}")

    await cluster.retrying(ask)
    return producer
