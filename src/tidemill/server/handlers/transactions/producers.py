"""InitProducerId: an id for a producer that numbers its batches, with or without transactions."""

from __future__ import annotations

from typing import Any, Final

from tidemill.errors import ErrorCode, TidemillError
from tidemill.server.broker import Broker
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.server.handlers.transactions.transactions import known_to_version
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import (
    CLUSTER,
    CLUSTER_NAME,
    IDEMPOTENT_WRITE,
    TOPIC,
    TRANSACTIONAL_ID,
    WRITE,
    for_each,
)
from tidemill.server.requests.call import Call
from tidemill.share.letters import SHARE_PREFIX
from tidemill.transactions.messages import NO_PRODUCER, InitResult, Producer
from tidemill.wire.requests import ms

__all__ = ("init_producer_id",)

_NONE: Final = -1
_FIRST_WITH_PRODUCER_FENCED: Final = 4


@serves(
    "InitProducerId",
    for_each(WRITE, TRANSACTIONAL_ID),
    for_each(IDEMPOTENT_WRITE, CLUSTER),
    for_each(WRITE, TOPIC),
)
async def init_producer_id(broker: Broker, call: Call) -> dict[str, Any]:
    """Give a new producer id with epoch 0; for a transactional id, its producer id with the next epoch."""
    known = Producer(call.field("producer_id", _NONE), call.field("producer_epoch", _NONE))
    half_known = (known.id == _NONE) != (known.epoch == _NONE)
    forbidden = _forbidden(broker, call)
    if forbidden is not None:
        result = InitResult(forbidden)
    elif half_known or _is_of_nodes(call):
        result = InitResult(ErrorCode.invalid_request)
    elif call.request.transactional_id is None:
        result = await _without_transactions(broker)
    else:
        result = await _with_transactions(broker, call, None if known == NO_PRODUCER else known)
    return {
        "error_code": known_to_version(result.error, call.version, _FIRST_WITH_PRODUCER_FENCED),
        "producer_id": result.producer.id,
        "producer_epoch": result.producer.epoch,
    }


def _is_of_nodes(call: Call) -> bool:
    """Whether a client asks for a transactional id that nodes use for dead letters."""
    return not call.between_nodes and (call.request.transactional_id or "").startswith(SHARE_PREFIX)


def _forbidden(broker: Broker, call: Call) -> ErrorCode | None:
    """The error if the caller may have no id. One without transactions needs WRITE on any topic."""
    transactional_id = call.request.transactional_id
    if call.authorizer is None:
        return None
    if transactional_id is not None:
        allowed = call.may(WRITE, TRANSACTIONAL_ID, transactional_id)
        return None if allowed else ErrorCode.transactional_id_authorization_failed
    if call.may(IDEMPOTENT_WRITE, CLUSTER, CLUSTER_NAME):
        return None
    if any(call.may(WRITE, TOPIC, name) for name in broker.image.topics):
        return None
    return ErrorCode.cluster_authorization_failed


async def _without_transactions(broker: Broker) -> InitResult:
    try:
        return InitResult(producer=Producer(await broker.producer_ids.next(), 0))
    except TidemillError:
        return InitResult(ErrorCode.coordinator_not_available)


async def _with_transactions(broker: Broker, call: Call, known: Producer | None) -> InitResult:
    request = call.request
    if not request.transactional_id:
        return InitResult(ErrorCode.invalid_request)
    if call.field("keep_prepared_txn", False):
        return InitResult(ErrorCode.unsupported_version)
    if call.field("enable2_pc", False):
        # What Kafka answers where two-phase commit is not enabled: nobody is allowed to use it.
        return InitResult(ErrorCode.transactional_id_authorization_failed)
    error = await broker.coordinators.prepare(TRANSACTIONS)
    if error is not ErrorCode.none:
        return InitResult(error)
    if call.is_hurried:
        # Most likely the client is gone. It may have asked again on another connection, and must not be
        # fenced now; one that is still there is told to try again.
        return InitResult(ErrorCode.coordinator_not_available)
    return await broker.transactions.init_producer_id(
        request.transactional_id, ms(request.transaction_timeout), known
    )
