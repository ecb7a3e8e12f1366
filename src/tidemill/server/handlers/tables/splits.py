"""SplitBucket and MeasureLog: pieces of buckets and sizes of ranges of logs, for parallel readers."""

from __future__ import annotations

import asyncio
from typing import Any

from tidemill.errors import ErrorCode, TidemillError
from tidemill.server.broker import Broker
from tidemill.server.handlers.outcome import refused
from tidemill.server.handlers.tables.definitions import table_handler
from tidemill.server.handlers.tables.scans import authorize_table
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import DESCRIBE, READ, TOPIC, for_each
from tidemill.server.requests.call import Call

__all__ = ("measure_log", "split_bucket")

_RANGES_MAX = 10_000
#: Ranges that are measured before others get their turn.
_RANGES_AT_ONCE = 16


@serves("SplitBucket", for_each(READ, TOPIC))
@table_handler
async def split_bucket(broker: Broker, call: Call) -> dict[str, Any]:
    """Cut the rows of a bucket into pieces."""
    authorize_table(broker, call, READ, call.request.table_id)
    tables = await broker.tables.load()
    pieces = await tables.split(call.request)
    return {
        "pieces": [
            {"end_key": piece.end_key, "row_count": piece.row_count, "size_bytes": piece.size_bytes}
            for piece in pieces
        ]
    }


@serves("MeasureLog", for_each(DESCRIBE, TOPIC))
@table_handler
async def measure_log(broker: Broker, call: Call) -> dict[str, Any]:
    """Measure ranges of logs in bytes, or find where a range of so many bytes ends."""
    wanted = call.request.ranges
    if len(wanted) > _RANGES_MAX:
        raise refused(f"{len(wanted)} ranges to measure, {_RANGES_MAX} are the most; ask in several requests")
    ranges = []
    for number, each in enumerate(wanted):
        if number % _RANGES_AT_ONCE == _RANGES_AT_ONCE - 1:
            await asyncio.sleep(0)
        ranges.append({"topic": each.topic, "partition": each.partition} | _measure(broker, call, each))
    return {"ranges": ranges}


def _measure(broker: Broker, call: Call, wanted: Any) -> dict[str, Any]:
    log_start_offset = end_offset = -1
    try:
        call.authorize(DESCRIBE, TOPIC, wanted.topic)
        partition = broker.find.partition(broker.find.topic(wanted.topic), wanted.partition)
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
