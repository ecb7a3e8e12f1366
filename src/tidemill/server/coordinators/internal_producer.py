"""A transactional producer inside a node, for records that the node must write all or none of.

It speaks to coordinators and leaders as a client of transactions V2 does, through the handlers of this node
or, between nodes, through those of others: InitProducerId, Produce (between nodes: Append), EndTxn. Rules:

- ``begin`` starts the producer: before it returns, the last producer with its transactional id is fenced, and
  what that one left open is decided. So what is read afterwards holds the outcome.
- Every transaction has an epoch of its own, so that nothing of the last one can come late.
- After any failure the outcome of the transaction may be unknown. ``give_up`` then makes the next ``begin``
  start anew, which aborts what is still open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tidemill.cluster.messages import PartitionId
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.net.retry import RetryPolicy, retry
from tidemill.records.record import Record, build_batch
from tidemill.replication.rules.assignment import NO_LEADER
from tidemill.server.coordinators.persister import Transaction
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.wire.apis import ACKS_ALL, APIS_BY_NAME
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_response

if TYPE_CHECKING:
    from tidemill.control.image import TopicImage
    from tidemill.server.broker import Broker

__all__ = ("InternalProducer", "append_here", "ask_any")

_TRANSACTIONAL: Final = 0x10
_INIT, _PRODUCE, _END = 4, 12, 5
"""Versions: with that of Produce the leader adds the partition, with that of EndTxn comes a new epoch."""
_TRANSACTION_MS: Final = 60_000
#: Shorter than a request between nodes may take.
_PRODUCE_MS: Final = 8_000
_LENGTH_BYTES: Final = 4
_PASSING: Final = frozenset(
    {
        ErrorCode.broker_not_available,
        ErrorCode.concurrent_transactions,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.network_exception,
        ErrorCode.not_coordinator,
        ErrorCode.request_timed_out,
    }
)
_POLICY: Final = RetryPolicy(
    timeout_ms=None, first_pause_ms=50, longest_pause_ms=1_000, failures_max=10, transient=_PASSING
)


async def ask_any(broker: Broker, node_id: int, api: str, version: int, body: Mapping[str, Any]) -> Any:
    """Ask a node, which may be this one, for what nodes serve each other. Raises ``TidemillError``."""
    if node_id != broker.node_id:
        return await broker.ask_node(node_id, api, version, body)
    # Handlers import coordinators, so they cannot be imported above.
    from tidemill.server.cluster.kafka_requests import serve_node_request

    key = APIS_BY_NAME[api].key
    frame = encode_request(key, version, 0, None, body)[_LENGTH_BYTES:]
    return decode_response(key, version, await serve_node_request(broker, node_id, memoryview(frame)))[1]


async def append_here(
    broker: Broker, topic: TopicImage, index: int, batch: bytes, *, acks: int, transactional_id: str | None
) -> tuple[int, int]:
    """Write a batch to a partition that this node leads, as for a client; gives its offset and append time.

    The time is -1 if the records keep their own. Raises ``ApiError``.
    """
    data = {"name": topic.name, "partition_data": [{"index": index, "records": batch}]}
    body = {
        "transactional_id": transactional_id,
        "acks": acks,
        "timeout": _PRODUCE_MS,
        "topic_data": [data],
    }
    answer = await ask_any(broker, broker.node_id, "Produce", _PRODUCE, body)
    ((result,),) = (each.partition_responses for each in answer.responses)
    code = ErrorCode(result.error_code)
    if code is not ErrorCode.none:
        raise ApiError(code, result.error_message or code.name)
    stamped = result.log_append_time
    return result.base_offset, -1 if stamped is None else round(stamped.timestamp() * 1_000)


class InternalProducer:
    """A transactional producer of this node. One task uses it at a time."""

    def __init__(self, broker: Broker, transactional_id: str) -> None:
        self._broker = broker
        self._id = transactional_id
        #: Producer id and epoch; None before ``begin``.
        self._producer: tuple[int, int] | None = None
        self._sequences: dict[tuple[str, int], int] = {}

    @property
    def transaction(self) -> Transaction:
        """The transaction that is open or is opened next."""
        assert self._producer is not None, "begin was not called"
        return Transaction(self._id, *self._producer)

    async def begin(self) -> bool:
        """Start the producer if it was not, or was given up. Whether that was done now."""
        if self._producer is not None:
            return False
        await self._broker.coordinators.ensure_topic(TRANSACTIONS)
        answer = await self._ask_coordinator(
            "InitProducerId",
            _INIT,
            {
                "transactional_id": self._id,
                "transaction_timeout": _TRANSACTION_MS,
                "producer_id": -1,
                "producer_epoch": -1,
            },
        )
        self._started(answer.producer_id, answer.producer_epoch)
        return True

    def _started(self, producer_id: int, producer_epoch: int) -> None:
        self._producer = producer_id, producer_epoch
        self._sequences = {}

    def give_up(self) -> None:
        """Begin anew next time, because the outcome of the last transaction is not known."""
        self._producer = None

    async def append(self, topic: TopicImage, index: int, records: Sequence[Record]) -> None:
        """Write one batch to a partition, as part of the transaction. Raises ``ApiError``."""
        assert self._producer is not None, "begin was not called"
        sequence = self._sequences.get((topic.name, index), 0)
        batch = build_batch(
            records,
            producer_id=self._producer[0],
            producer_epoch=self._producer[1],
            base_sequence=sequence,
            attributes=_TRANSACTIONAL,
        )
        broker = self._broker
        leader, leader_epoch = broker.find.leader_of(topic, index)
        if leader == NO_LEADER:
            raise ApiError(ErrorCode.leader_not_available, f"{topic.name}-{index} has no leader now")
        try:
            if leader == broker.node_id:
                await append_here(broker, topic, index, batch, acks=ACKS_ALL, transactional_id=self._id)
            else:
                where = PartitionId(topic.id, index)
                await broker.append_at(leader, where, leader_epoch, batch, self._id)
        except ApiError as error:
            raise ApiError(
                error.code, f"{topic.name}-{index} takes no records of {self._id!r}: {error.message}"
            ) from error
        self._sequences[topic.name, index] = sequence + len(records)

    async def commit(self) -> None:
        """Commit. Raises ``ApiError`` if it is refused, or if the outcome is not known."""
        assert self._producer is not None, "begin was not called"
        producer_id, producer_epoch = self._producer
        answer = await self._ask_coordinator(
            "EndTxn",
            _END,
            {
                "transactional_id": self._id,
                "producer_id": producer_id,
                "producer_epoch": producer_epoch,
                "committed": True,
            },
        )
        self._started(answer.producer_id, answer.producer_epoch)

    async def _ask_coordinator(self, api: str, version: int, body: Mapping[str, Any]) -> Any:
        """Ask the coordinator of the transactional id until it has answered. Raises ``ApiError``."""
        try:
            return await retry(
                lambda: self._ask_coordinator_once(api, version, body), _POLICY, jitter=lambda: 0.0
            )
        except TidemillError as error:
            raise ApiError(
                error.code, f"the coordinator of {self._id!r} does not serve {api}: {error.message}"
            ) from error

    async def _ask_coordinator_once(self, api: str, version: int, body: Mapping[str, Any]) -> Any:
        node_id = await self._broker.coordinators.leader_of(TRANSACTIONS, self._id)
        if node_id == NO_LEADER:
            raise ApiError(ErrorCode.coordinator_not_available, "it has no leader now")
        answer = await ask_any(self._broker, node_id, api, version, body)
        code = ErrorCode(answer.error_code)
        if code is not ErrorCode.none:
            raise ApiError(code, code.name)
        return answer
