"""DescribeShareRecords: which records of a share partition are locked, delayed, blocked or due to die."""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from tidemill.coordination.share_state import DeliveryState, SharePartitionKey
from tidemill.errors import TidemillError
from tidemill.server.broker import Broker
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import DESCRIBE, GROUP, TOPIC, for_each, for_one
from tidemill.server.requests.call import Call
from tidemill.share.partition.runs import Wait
from tidemill.share.partition.values import RecordsView

__all__ = ("describe_share_records",)

_RECORDS_MAX: Final = 1_000
_STATES: Final = {
    DeliveryState.ACQUIRED: "acquired",
    DeliveryState.ARCHIVING: "dead-letter-due",
    DeliveryState.ACKNOWLEDGED: "acknowledged",
    DeliveryState.ARCHIVED: "dead",
}
_WAITS: Final = {
    Wait.READY: "available",
    Wait.DELAYED: "delayed",
    Wait.BLOCKED: "blocked",
    Wait.UNSEEN: "available",
}


@serves("DescribeShareRecords", for_one(DESCRIBE, GROUP, "group_id"), for_each(DESCRIBE, TOPIC))
async def describe_share_records(broker: Broker, call: Call) -> dict[str, Any]:
    """Show the records of a share partition that are not finished. Asked of the partition's leader."""
    request = call.request
    try:
        call.authorize(DESCRIBE, TOPIC, request.topic)
        topic = broker.find.topic(request.topic)
        led = await broker.share.find(SharePartitionKey(request.group_id, topic.id, request.partition))
        # Nobody else may have looked at keys and delivery times, if nobody fetches.
        await led.look_ahead()
    except TidemillError as error:
        return {"error_code": error.code, "error_message": error.message}
    machine = led.machine
    wanted = set(request.states)
    limit = max(0, min(request.limit, _RECORDS_MAX))
    views = (view for view in machine.records() if not wanted or _state(view) in wanted)
    now_ms = broker.steady_ms()
    return {
        "leader_epoch": led.leader_epoch,
        "state_epoch": machine.state_epoch,
        "start_offset": machine.start_offset,
        "end_offset": machine.end_offset,
        "acquired": machine.acquired_count,
        "available": machine.available_count,
        "delayed": machine.delayed_count,
        "blocked": machine.blocked_count,
        "dead_letters_due": machine.due_letter_count,
        "is_stalled": machine.is_stalled,
        "max_waiting": machine.policy.max_waiting_records,
        "known_for_ms": max(0, now_ms - machine.loaded_ms),
        "records": [_records(view, now_ms) for view in islice(views, limit)],
    }


def _state(view: RecordsView) -> str:
    return _WAITS[view.wait] if view.state is DeliveryState.AVAILABLE else _STATES[view.state]


def _records(view: RecordsView, now_ms: int) -> dict[str, Any]:
    return {
        "first_offset": view.first_offset,
        "last_offset": view.last_offset,
        "state": _state(view),
        "delivery_count": view.delivery_count,
        "owner": view.owner,
        "until_ms": view.until_ms,
        "age_ms": max(0, now_ms - view.since_ms),
        "reason": view.reason,
    }
