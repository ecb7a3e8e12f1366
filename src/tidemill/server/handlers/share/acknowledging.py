"""ShareAcknowledge and ShareSettle: members tell what became of the records that they hold.

ShareSettle is ShareAcknowledge with a delay for released records and a reason for rejected ones; since its
version 1 it takes records back that nobody has looked at. It may also be part of a producer's transaction:
then the records are accepted when that commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from tidemill.coordination.share_state import SharePartitionKey
from tidemill.coordination.turns import give_way, side_by_side
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.server.broker import Broker
from tidemill.server.coordinators.persister import Transaction
from tidemill.server.handlers.records.current_leaders import CurrentLeaders
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import (
    GROUP,
    READ,
    TOPIC,
    TRANSACTIONAL_ID,
    WRITE,
    for_each,
    for_one,
)
from tidemill.server.requests.call import Call
from tidemill.share.partition.values import GROUP_BACKOFF, Acknowledgement, AcknowledgeType
from tidemill.share.sessions import FINAL_EPOCH, INITIAL_EPOCH, PARTITIONS_MAX, SessionKey

__all__ = (
    "Asked",
    "Outcome",
    "acknowledge_all",
    "check_size",
    "checked",
    "leader_of",
    "share_acknowledge",
    "share_settle",
)

NO_TOPIC_ID: Final = UUID(int=0)
_RENEW: Final = int(AcknowledgeType.RENEW)
_RETURN: Final = int(AcknowledgeType.RETURN)
#: The first version of ShareSettle in which records can be returned.
_RETURNING_VERSION: Final = 1
_NO_PRODUCER: Final = -1
#: A delay beyond this is a mistake: a year.
_DELAY_MS_MAX: Final = 366 * 24 * 3_600_000
_REASON_CHARS_MAX: Final = 1_000
_AT_ONCE: Final = 256
#: Partitions that are begun with in one turn of the event loop.
_PARTITIONS_PER_TURN: Final = 20


class Asked(NamedTuple):
    """The acknowledgements of a request for one partition."""

    topic_id: UUID
    partition: int
    batches: Sequence[Any]


class Outcome(NamedTuple):
    """What became of the acknowledgements for one partition."""

    asked: Asked
    error: TidemillError | None

    @property
    def code(self) -> int:
        return int(ErrorCode.none if self.error is None else self.error.code)

    @property
    def message(self) -> str | None:
        return None if self.error is None else self.error.message


@serves("ShareAcknowledge", for_one(READ, GROUP, "group_id"), for_each(READ, TOPIC), overlaps=True)
async def share_acknowledge(broker: Broker, call: Call) -> dict[str, Any]:
    """Acknowledge records, and perhaps close the share session."""
    try:
        check_size(call.request.topics)
        asked = [
            Asked(topic.topic_id or NO_TOPIC_ID, entry.partition_index, entry.acknowledgement_batches)
            for topic in call.request.topics
            for entry in topic.partitions
        ]
        outcomes = await _acknowledge(broker, call, asked, renews=bool(call.field("is_renew_ack", False)))
    except ApiError as error:
        return {"error_code": error.code, "error_message": error.message}
    leaders = CurrentLeaders(broker)
    topics: dict[UUID, list[dict[str, Any]]] = {}
    for outcome in outcomes:
        leader_id, epoch = leader_of(broker, leaders, outcome.asked, outcome.code)
        topics.setdefault(outcome.asked.topic_id, []).append(
            {
                "partition_index": outcome.asked.partition,
                "error_code": outcome.code,
                "error_message": outcome.message,
                "current_leader": {"leader_id": leader_id, "leader_epoch": epoch},
            }
        )
        await give_way()
    return {
        "acquisition_lock_timeout": broker.group_config(
            call.request.group_id or ""
        ).share_record_lock_duration_ms,
        "responses": [
            {"topic_id": topic_id, "partitions": partitions} for topic_id, partitions in topics.items()
        ],
        "node_endpoints": [each._asdict() for each in leaders.endpoints],
    }


@serves(
    "ShareSettle",
    for_one(READ, GROUP, "group_id"),
    for_each(READ, TOPIC),
    for_each(WRITE, TRANSACTIONAL_ID),
    overlaps=True,
)
async def share_settle(broker: Broker, call: Call) -> dict[str, Any]:
    """Acknowledge records with delays and reasons."""
    request = call.request
    try:
        check_size(request.topics)
        asked = [
            Asked(topic.topic_id or NO_TOPIC_ID, entry.partition_index, entry.batches)
            for topic in request.topics
            for entry in topic.partitions
        ]
        outcomes = await _acknowledge(
            broker,
            call,
            asked,
            renews=True,
            returns=call.version >= _RETURNING_VERSION,
            transaction=_transaction(call),
        )
    except ApiError as error:
        return {"error_code": error.code, "error_message": error.message}
    leaders = CurrentLeaders(broker)
    topics: dict[UUID, list[dict[str, Any]]] = {}
    for outcome in outcomes:
        leader_id, epoch = leader_of(broker, leaders, outcome.asked, outcome.code)
        topics.setdefault(outcome.asked.topic_id, []).append(
            {
                "partition_index": outcome.asked.partition,
                "error_code": outcome.code,
                "error_message": outcome.message,
                "leader_id": leader_id,
                "leader_epoch": epoch,
            }
        )
        await give_way()
    return {
        "lock_duration_ms": broker.group_config(request.group_id).share_record_lock_duration_ms,
        "topics": [
            {"topic_id": topic_id, "partitions": partitions} for topic_id, partitions in topics.items()
        ],
    }


def _transaction(call: Call) -> Transaction | None:
    """The transaction that the request is to be part of, if any. Raises ``ApiError``."""
    request = call.request
    if request.transactional_id is None and request.producer_id == _NO_PRODUCER:
        return None
    if not request.transactional_id or request.producer_id < 0 or request.producer_epoch < 0:
        raise ApiError(
            ErrorCode.invalid_request, "a transaction has a transactional id, a producer id and an epoch"
        )
    call.authorize(WRITE, TRANSACTIONAL_ID, request.transactional_id)
    return Transaction(request.transactional_id, request.producer_id, request.producer_epoch)


def check_size(topics: Sequence[Any]) -> None:
    """Raise INVALID_REQUEST for a request that names more partitions than a session may have."""
    if sum(len(topic.partitions) for topic in topics) > PARTITIONS_MAX:
        raise ApiError(ErrorCode.invalid_request, f"a request may name {PARTITIONS_MAX} partitions")


async def _acknowledge(
    broker: Broker,
    call: Call,
    asked: Sequence[Asked],
    *,
    renews: bool,
    returns: bool = False,
    transaction: Transaction | None = None,
) -> list[Outcome]:
    """Acknowledge under the member's session. Raises ``ApiError`` if the request is refused as a whole."""
    request, share = call.request, broker.share
    key = SessionKey(request.group_id or "", request.member_id or "")
    epoch: int = request.share_session_epoch
    if epoch == INITIAL_EPOCH:
        raise ApiError(
            ErrorCode.invalid_share_session_epoch,
            "a share session is opened by ShareFetch; there is nothing to acknowledge before that",
        )
    if epoch == FINAL_EPOCH:
        share.sessions.find(key)
    else:
        share.sessions.resume(key, epoch)
    try:
        if transaction is not None:
            outcomes = await _accept_in_transaction(broker, call, key, asked, transaction)
        else:
            outcomes = await acknowledge_all(broker, call, key, asked, renews=renews, returns=returns)
    finally:
        if epoch == FINAL_EPOCH:
            share.close_session(key)
    return outcomes


async def _accept_in_transaction(
    broker: Broker, call: Call, key: SessionKey, asked: Sequence[Asked], transaction: Transaction
) -> list[Outcome]:
    """Have a transaction accept records of several partitions. Returns when it decides on them."""

    async def of_one(each: Asked) -> Outcome:
        try:
            topic = broker.find.topic_by_id(each.topic_id)
            call.authorize(READ, TOPIC, topic.name)
            acknowledgements = await checked(each.batches, renews=False)
            led = await broker.share.find(SharePartitionKey(key.group_id, each.topic_id, each.partition))
            return Outcome(
                each, await led.accept_in_transaction(key.member_id, acknowledgements, transaction)
            )
        except TidemillError as error:
            return Outcome(each, error)

    return await side_by_side(((1, of_one(each)) for each in asked), _PARTITIONS_PER_TURN)


async def acknowledge_all(
    broker: Broker,
    call: Call,
    key: SessionKey,
    asked: Iterable[Asked],
    *,
    renews: bool,
    returns: bool = False,
) -> list[Outcome]:
    """Acknowledge records of several partitions. Returns when the changes are written."""
    begun = [
        outcome async for outcome in _begin_all(broker, call, key, asked, renews=renews, returns=returns)
    ]
    return [
        Outcome(each, result if not isinstance(result, asyncio.Future) else await result)
        for each, result in begun
    ]


async def _begin_all(
    broker: Broker, call: Call, key: SessionKey, asked: Iterable[Asked], *, renews: bool, returns: bool
) -> AsyncIterator[tuple[Asked, TidemillError | asyncio.Future[TidemillError | None] | None]]:
    for each in asked:
        try:
            topic = broker.find.topic_by_id(each.topic_id)
            call.authorize(READ, TOPIC, topic.name)
            acknowledgements = await checked(each.batches, renews=renews, returns=returns)
            led = await broker.share.find(SharePartitionKey(key.group_id, each.topic_id, each.partition))
            await broker.share.turns.turn(len(acknowledgements))
            yield each, led.acknowledge(key.member_id, acknowledgements)
        except TidemillError as error:
            yield each, error
        await give_way()


async def checked(batches: Iterable[Any], *, renews: bool, returns: bool = False) -> list[Acknowledgement]:
    """The batches of one partition, in order. Raises INVALID_REQUEST if they cannot mean anything."""
    found: list[Acknowledgement] = []
    behind = -1
    newest_type = _RETURN if returns else _RENEW
    for number, batch in enumerate(batches):
        first, last, types = batch.first_offset, batch.last_offset, batch.acknowledge_types
        if first > last or first < behind or first < 0:
            raise _malformed(f"offsets {first} to {last} are not in order")
        behind = last + 1
        if len(types) not in (1, last - first + 1):
            raise _malformed(f"{len(types)} types for the offsets {first} to {last}")
        if not all(0 <= each <= newest_type for each in set(types)):
            raise _malformed(f"types {sorted(set(types))} for the offsets {first} to {last}")
        if not renews and _RENEW in types:
            raise _malformed("locks are renewed by a request that says so")
        delay_ms = max(GROUP_BACKOFF, min(getattr(batch, "delay_ms", GROUP_BACKOFF), _DELAY_MS_MAX))
        reason = (getattr(batch, "reason", None) or "")[:_REASON_CHARS_MAX]
        found.append(Acknowledgement(first, last, types, delay_ms, reason))
        if number % _AT_ONCE == 0:
            await give_way()
    return found


def _malformed(what: str) -> ApiError:
    return ApiError(ErrorCode.invalid_request, f"the records cannot be acknowledged: {what}")


def leader_of(broker: Broker, leaders: CurrentLeaders, asked: Any, code: int) -> tuple[int, int]:
    """(node, leader epoch) of the partition's leader, as the metadata has it; (-1, -1) if it is not known."""
    if code != ErrorCode.none:
        return leaders.of(asked.topic_id, asked.partition, code) or (-1, -1)
    topic = broker.image.topic_by_id(asked.topic_id)
    if topic is None or not 0 <= asked.partition < len(topic.partitions):
        return -1, -1
    placed = topic.partitions[asked.partition]
    return placed.leader, placed.leader_epoch
