"""InitProducerId: an id for a producer that numbers its batches."""

from __future__ import annotations

from typing import Any, Final

from tidemill.errors import ErrorCode, TidemillError
from tidemill.server.broker import Broker
from tidemill.server.call import Call

__all__ = ("init_producer_id",)

_NONE: Final = -1


async def init_producer_id(broker: Broker, call: Call) -> dict[str, Any]:
    """A producer id that nobody had before, with epoch 0, whether or not the producer has one already."""
    known = call.field("producer_id", _NONE), call.field("producer_epoch", _NONE)
    half_known = (known[0] == _NONE) != (known[1] == _NONE)
    # Transactions come with the transaction coordinator. Until then INVALID_REQUEST ends a transactional
    # producer with a clear error, where COORDINATOR_NOT_AVAILABLE would let it retry for ever.
    if half_known or call.request.transactional_id is not None:
        return _failed(ErrorCode.invalid_request)
    try:
        producer_id = await broker.next_producer_id()
    except TidemillError:
        return _failed(ErrorCode.coordinator_not_available)
    return {"error_code": ErrorCode.none, "producer_id": producer_id, "producer_epoch": 0}


def _failed(code: ErrorCode) -> dict[str, Any]:
    return {"error_code": code, "producer_id": _NONE, "producer_epoch": _NONE}
