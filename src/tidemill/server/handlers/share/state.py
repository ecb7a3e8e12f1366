"""The APIs of the share coordinator, which nodes serve each other. On the clients' port they are refused.

Every share partition of a request is answered for itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from tidemill.coordination.share_state import (
    NO_CUT,
    DeliveryState,
    LogPosition,
    SharePartitionKey,
    StateBatch,
)
from tidemill.coordination.turns import side_by_side
from tidemill.errors import ApiError, ErrorCode
from tidemill.server.broker import Broker
from tidemill.server.coordinators.persister import write_here
from tidemill.server.handlers.outcome import outcome
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.call import Call
from tidemill.share.state.states import StateWrite

__all__ = (
    "delete_share_group_state",
    "initialize_share_group_state",
    "read_share_group_state",
    "read_share_group_state_summary",
    "write_share_group_state",
)

#: Share partitions that are begun with in one turn of the event loop.
_PARTITIONS_PER_TURN: Final = 50
_NO_PRODUCER_ID: Final = -1

Action = Callable[[SharePartitionKey, Any], Awaitable[dict[str, Any]]]
"""Carries out a request for one share partition; gives the fields of the answer beside its error."""


@serves("InitializeShareGroupState")
async def initialize_share_group_state(broker: Broker, call: Call) -> dict[str, Any]:
    """Begin the state of share partitions."""

    async def initialize(key: SharePartitionKey, asked: Any) -> dict[str, Any]:
        await broker.share_states.initialize(key, asked.state_epoch, asked.start_offset)
        return {}

    return await _answer(call, initialize, {})


@serves("ReadShareGroupState")
async def read_share_group_state(broker: Broker, call: Call) -> dict[str, Any]:
    """The state of share partitions, for the leaders of their data."""

    async def read(key: SharePartitionKey, asked: Any) -> dict[str, Any]:
        state = await broker.share_states.read(key, asked.leader_epoch)
        return {
            "state_epoch": state.state_epoch,
            "start_offset": state.start_offset,
            "delivery_complete_count": state.delivery_complete_count,
            "log_offset": state.log_position.offset,
            "log_epoch": state.log_position.leader_epoch,
            "log_history": state.log_position.history,
            "state_batches": [_batch_body(batch) for batch in state.batches],
        }

    return await _answer(call, read, {"state_epoch": 0, "start_offset": 0, "state_batches": []})


@serves("WriteShareGroupState")
async def write_share_group_state(broker: Broker, call: Call) -> dict[str, Any]:
    """Change the state of share partitions, in a transaction where the request says so."""

    async def write(key: SharePartitionKey, asked: Any) -> dict[str, Any]:
        producer_id = getattr(asked, "producer_id", _NO_PRODUCER_ID)
        in_transaction = producer_id != _NO_PRODUCER_ID
        change = StateWrite(
            asked.state_epoch,
            asked.leader_epoch,
            asked.start_offset,
            getattr(asked, "delivery_complete_count", -1),
            [_batch(each) for each in asked.state_batches],
            (producer_id, asked.producer_epoch) if in_transaction else None,
            _position(asked),
            getattr(asked, "cut_offset", NO_CUT),
        )
        await write_here(broker, key, change, asked.transactional_id if in_transaction else None)
        return {}

    return await _answer(call, write, {})


@serves("DeleteShareGroupState")
async def delete_share_group_state(broker: Broker, call: Call) -> dict[str, Any]:
    """Forget the state of share partitions."""

    async def delete(key: SharePartitionKey, asked: Any) -> dict[str, Any]:
        del asked
        await broker.share_states.delete(key)
        return {}

    return await _answer(call, delete, {})


@serves("ReadShareGroupStateSummary")
async def read_share_group_state_summary(broker: Broker, call: Call) -> dict[str, Any]:
    """Answer with the start offsets and counts of share partitions, for descriptions."""

    async def read(key: SharePartitionKey, asked: Any) -> dict[str, Any]:
        del asked
        return (await broker.share_states.summary(key))._asdict()

    empty = {"state_epoch": 0, "leader_epoch": 0, "start_offset": 0, "delivery_complete_count": 0}
    return await _answer(call, read, empty)


async def _answer(call: Call, action: Action, empty: dict[str, Any]) -> dict[str, Any]:
    """Carry out the action for every share partition; ``empty`` has the fields beside an error."""
    group_id = call.request.group_id

    async def of_one(topic_id: Any, asked: Any) -> dict[str, Any]:
        try:
            if not call.between_nodes:
                raise ApiError(
                    ErrorCode.cluster_authorization_failed,
                    "the state of share groups is for the nodes of the cluster among themselves",
                )
            if topic_id is None:
                raise ApiError(ErrorCode.invalid_request, "a share partition is named by its topic's id")
            fields = await action(SharePartitionKey(group_id, topic_id, asked.partition), asked)
        except ApiError as error:
            return {"partition": asked.partition, **outcome(error), **empty}
        return {"partition": asked.partition, **outcome(None), **fields}

    results = []
    for topic in call.request.topics:
        partitions = await side_by_side(
            ((1, of_one(topic.topic_id, asked)) for asked in topic.partitions), _PARTITIONS_PER_TURN
        )
        results.append({"topic_id": topic.topic_id, "partitions": partitions})
    return {"results": results}


def _batch(asked: Any) -> StateBatch:
    try:
        state = DeliveryState(asked.delivery_state)
    except ValueError as error:
        raise ApiError(
            ErrorCode.invalid_request, f"there is no delivery state {asked.delivery_state}"
        ) from error
    return StateBatch(
        asked.first_offset,
        asked.last_offset,
        state,
        asked.delivery_count,
        getattr(asked, "not_before_ms", 0),
        reason=getattr(asked, "reason", ""),
    )


def _position(asked: Any) -> LogPosition:
    offset, leader_epoch = getattr(asked, "log_offset", -1), getattr(asked, "log_epoch", -1)
    return LogPosition(offset, leader_epoch, bytes(getattr(asked, "log_history", b"")))


def _batch_body(batch: StateBatch) -> dict[str, Any]:
    return {
        "first_offset": batch.first_offset,
        "last_offset": batch.last_offset,
        "delivery_state": int(batch.state),
        "delivery_count": batch.delivery_count,
        "not_before_ms": batch.not_before_ms,
        "reason": batch.reason,
        "producer_id": batch.producer_id,
        "producer_epoch": batch.producer_epoch,
    }
