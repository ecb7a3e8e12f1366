"""InitProducerId: an id for a producer that numbers its batches, with or without transactions."""

from __future__ import annotations

from typing import Any, Final

from tidemill.errors import ErrorCode, TidemillError
from tidemill.server.broker import Broker
from tidemill.server.call import Call
from tidemill.server.handlers.transactions import known_to_version, prepare_transactions
from tidemill.transactions.messages import NO_PRODUCER, InitResult, Producer
from tidemill.wire.requests import ms

__all__ = ("init_producer_id",)

_NONE: Final = -1
_FIRST_WITH_PRODUCER_FENCED: Final = 4


async def init_producer_id(broker: Broker, call: Call) -> dict[str, Any]:
    """Without a transactional id: an id that nobody had before, with epoch 0. With one: its next epoch."""
    known = Producer(call.field("producer_id", _NONE), call.field("producer_epoch", _NONE))
    half_known = (known.id == _NONE) != (known.epoch == _NONE)
    if half_known:
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


async def _without_transactions(broker: Broker) -> InitResult:
    try:
        return InitResult(producer=Producer(await broker.next_producer_id(), 0))
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
    error = await prepare_transactions(broker)
    if error is not ErrorCode.none:
        return InitResult(error)
    return await broker.transactions.init_producer_id(
        request.transactional_id, ms(request.transaction_timeout), known
    )
