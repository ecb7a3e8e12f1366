"""For readers that share the work: pieces of a bucket's state, and sizes of ranges of logs."""

from __future__ import annotations

import asyncio
from typing import Any

from tidemill.errors import ErrorCode, TidemillError
from tidemill.server.broker import Broker
from tidemill.server.call import Call
from tidemill.server.handlers.outcome import refused
from tidemill.server.handlers.tables import table_handler

__all__ = ("measure_log", "split_bucket")

_RANGES_MAX = 10_000
#: Ranges between two looks at what else there is to do.
_RANGES_AT_ONCE = 16


@table_handler
async def split_bucket(broker: Broker, call: Call) -> dict[str, Any]:
    """Cut the rows of a bucket into pieces."""
    tables = await broker.tables()
    pieces = await tables.split(call.request)
    return {
        "pieces": [
            {"end_key": piece.end_key, "row_count": piece.row_count, "size_bytes": piece.size_bytes}
            for piece in pieces
        ]
    }


@table_handler
async def measure_log(broker: Broker, call: Call) -> dict[str, Any]:
    """How many bytes ranges of logs have, and where to stop for some number of them."""
    wanted = call.request.ranges
    if len(wanted) > _RANGES_MAX:
        raise refused(f"{len(wanted)} ranges to measure, {_RANGES_MAX} are the most; ask in several requests")
    ranges = []
    for number, each in enumerate(wanted):
        if number % _RANGES_AT_ONCE == _RANGES_AT_ONCE - 1:
            await asyncio.sleep(0)
        ranges.append({"topic": each.topic, "partition": each.partition} | _measure(broker, each))
    return {"ranges": ranges}


def _measure(broker: Broker, wanted: Any) -> dict[str, Any]:
    log_start_offset = end_offset = -1
    try:
        partition = broker.partition(broker.topic(wanted.topic), wanted.partition)
        log_start_offset, end_offset = partition.log_start_offset, partition.last_stable_offset
        measured = partition.measure(
            wanted.start_offset,
            None if wanted.end_offset == -1 else wanted.end_offset,
            None if wanted.max_bytes < 0 else wanted.max_bytes,
        )
    except TidemillError as error:
        return {
            "error_code": int(error.code),
            "error_message": error.message,
            "log_start_offset": log_start_offset,
            "end_offset": end_offset,
            "size_bytes": 0,
        }
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "log_start_offset": log_start_offset,
        "end_offset": measured.end_offset,
        "size_bytes": measured.size_bytes,
    }
